"""The drawings of README, concepts.md, neighborhoods.md and presets.md, made by the library, for light and dark pages.

python docs/drawings.py [FOLDER]
"""

import sys
from pathlib import Path

import torch

from dilated_attention_pytorch import (
    BlockLayout,
    Causal,
    DilatedAttention,
    DilatedBlocks,
    Documents,
    GlobalTokens,
    Neighborhood,
    Pattern,
    SlidingTiles,
    SlidingWindow,
    hierarchical,
    presets,
)
from dilated_attention_pytorch.cli.demo import DRAWN, PICTURE_TOKENS
from dilated_attention_pytorch.layout.branches import layout_of_branches
from dilated_attention_pytorch.viz import plot_layout, plot_weights
from dilated_attention_pytorch.viz.style import light_and_dark

WINDOW = SlidingWindow(left=100, right=0)
SINKS = WINDOW | GlobalTokens(32) & Causal()
DILATED = DilatedBlocks((1024, 2048, 4096), (1, 2, 4), sparsity_ratio=0.13, block_size=64, causal=True)
NEAR = Neighborhood((32, 128), (15, 31))
TILES = SlidingTiles((32, 128), 8, (24, 40)).in_tiles()
LEVELS = hierarchical(((1, 256), (4, 1024), (8, 4096)), block_size=64)


def layout(pattern: Pattern, block_size: int | tuple[int, int] = 32, tokens: int = 512) -> BlockLayout:
    return BlockLayout.from_pattern(pattern, tokens, block_size=block_size)


PANELS = {
    # The picture of the front page is the one that `make demo` draws.
    "patterns": [(name, layout(pattern, 64, PICTURE_TOKENS)) for name, pattern in DRAWN.items()],
    "blocks": [
        ("100 tokens back", layout(WINDOW, 16)),
        ("The same rule, blocks of 64", layout(WINDOW, 64)),
        ("The same rule, blocks of 64 x 16", layout(WINDOW, (64, 16))),
    ],
    "algebra": [
        ("a = SlidingWindow(100, 0)", layout(WINDOW)),
        ("b = a | GlobalTokens(32) & Causal()", layout(SINKS)),
        ("b & Documents((200, 312))", layout(SINKS & Documents((200, 312)))),
    ],
    "neighborhoods": [
        ("Neighborhood((32, 128), (15, 31))", layout(NEAR, 64, 4096)),
        ("The same in tiles of 8 x 8", layout(NEAR.in_tiles(8), 64, 4096)),
        ("Sliding tiles of 8 x 8", layout(TILES, 64, 4096)),
    ],
    "reach": [
        ("SlidingWindow(512, 0)", layout(SlidingWindow(512, 0), 64, 4096)),
        ("Dilated blocks: (1024, 1), (2048, 2), (4096, 4)", layout(DILATED & Causal(), 64, 4096)),
        ("Levels: (1, 256), (4, 1024), (8, 4096)", layout(LEVELS & Causal(), 64, 4096)),
    ],
    "presets": [
        ("longformer(256, global_tokens=32)", layout(presets.longformer(256, global_tokens=32), 32, 1024)),
        ("bigbird(block_size=64)", layout(presets.bigbird(block_size=64), 64, 1024)),
        ("mistral(window=256); five layers of six of gemma3", layout(presets.mistral(window=256), 32, 1024)),
        ("streaming_llm(window=224, sinks=32)", layout(presets.streaming_llm(window=224, sinks=32), 32, 1024)),
        ("gemma3: the sixth layer", layout(Causal(), 32, 1024)),
        (
            "longnet((64, 256, 512), (1, 2, 4)), one head",
            layout_of_branches(presets.longnet((64, 256, 512), (1, 2, 4)), 512, num_heads=4, is_causal=True),
        ),
    ],
}


def draw(folder: Path) -> None:
    """NAME.png and NAME-dark.png for each."""
    for name, panels in PANELS.items():
        for path in light_and_dark(folder / f"{name}.png"):
            plot_layout(panels, path)
    # Equal scores: the weight of a key says how many branches hold it.
    dilated = DilatedAttention(segment_lengths=[16, 32, 64], dilation_rates=[1, 2, 4])
    zeros = torch.zeros(1, 64, 4, 8)
    _, weights = dilated(zeros, zeros, zeros, is_causal=True, return_attention_weights=True)
    for path in light_and_dark(folder / "branches.png"):
        plot_weights(weights, path, head=0)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent / "images")
