"""The drawings of docs/concepts.md, made by the library itself: `python docs/drawings.py [FOLDER]`."""

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
    Pattern,
    SlidingWindow,
    hierarchical,
)
from dilated_attention_pytorch.viz import plot_layout, plot_weights

WINDOW = SlidingWindow(left=100, right=0)
SINKS = WINDOW | GlobalTokens(32) & Causal()
DILATED = DilatedBlocks((1024, 2048, 4096), (1, 2, 4), sparsity_ratio=0.13, block_size=64, causal=True)
LEVELS = hierarchical(((1, 256), (4, 1024), (8, 4096)), block_size=64)


def layout(pattern: Pattern, block_size: int | tuple[int, int] = 32, tokens: int = 512) -> BlockLayout:
    return BlockLayout.from_pattern(pattern, tokens, block_size=block_size)


PANELS = {
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
    "reach": [
        ("SlidingWindow(512, 0)", layout(SlidingWindow(512, 0), 64, 4096)),
        ("Dilated blocks: (1024, 1), (2048, 2), (4096, 4)", layout(DILATED & Causal(), 64, 4096)),
        ("Levels: (1, 256), (4, 1024), (8, 4096)", layout(LEVELS & Causal(), 64, 4096)),
    ],
}


def draw(folder: Path) -> None:
    for name, panels in PANELS.items():
        plot_layout(panels, folder / f"{name}.png")
    # Equal scores: the weight of a key says how many branches hold it.
    dilated = DilatedAttention(segment_lengths=[16, 32, 64], dilation_rates=[1, 2, 4])
    zeros = torch.zeros(1, 64, 4, 8)
    _, weights = dilated(zeros, zeros, zeros, is_causal=True, return_attention_weights=True)
    plot_weights(weights, folder / "branches.png", head=0)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent / "images")
