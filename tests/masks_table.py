"""The masks that people have: those of attention-gym's `masks/`, and others, each with the way to have it here.

A mask is a `mask_mod` of our own writing and a recipe: the arguments behind q, k and v of `block_sparse_attention`, as
text that tests evaluate and docs/from_flex.md shows, with what it costs. `python -m tests.masks_table` writes the table
there; tests/layout/test_masks_of_others.py fails while it says something else, and compares every recipe, and every
conversion, with the dense mask.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dilated_attention_pytorch as dap
from dilated_attention_pytorch import BlockLayout, Pattern

PAGE = Path(__file__).parent.parent / "docs" / "from_flex.md"
MARKED = re.compile(r"(<!-- masks -->\n).*?(\n<!-- /masks -->)", re.DOTALL)

N, BLOCK = 384, 32
TOKENS = torch.arange(N)
BY_MASK_MOD = "BlockLayout.from_mask_mod(mask_mod, None, None, N, block_size=32)"

DOCUMENTS = (100, 50, 234)
STARTS = torch.tensor((0, 100, 150, N))
DOCUMENT = torch.repeat_interleave(torch.arange(3), torch.tensor(DOCUMENTS))
PREFIXES = torch.tensor((10, 20, 30))
IMAGES = (1,) * 50 + (64,) + (1,) * 100 + (80,) + (1,) * 90
SPAN = torch.repeat_interleave(torch.arange(len(IMAGES)), torch.tensor(IMAGES))
PARENTS = (-1, 0, 0, 1, 1, 2, 4, 4, 3, 8, 5, 10)
TILES = torch.rand(12, 12, generator=torch.Generator().manual_seed(0)) < 0.3
NOISE = torch.rand(N, N, generator=torch.Generator().manual_seed(1)) < 0.5
PACKED = (60, 40, 50, 80, 74, 80)  # two prompts, each with two answers
PACKED_START = torch.tensor((0, 60, 100, 150, 230, 304, N))
PACKED_AT = torch.repeat_interleave(torch.arange(6), torch.tensor(PACKED))
PROMPT_OF = torch.tensor((0, 0, 0, 3, 3, 3))
SEEN_FROM = torch.tensor((0, 0, 64)).repeat_interleave(torch.tensor((100, 150, 134)))  # of three images of 32 tokens
SEEN_TO = torch.tensor((32, 64, 96)).repeat_interleave(torch.tensor((100, 150, 134)))


class Mask(NamedTuple):
    """A mask: whose, the function, the recipe, and for how many samples, heads, queries and keys."""

    source: str
    mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    recipe: str = BY_MASK_MOD
    batch: int | None = None
    heads: int | None = None
    seq_q: int = N
    seq_k: int = N

    def dense(self) -> Tensor:
        """bool [batch or 1, heads or 1, seq_q, seq_k]."""
        ask = self.mask_mod
        for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
            ask = torch.vmap(ask, in_dims=dims)
        return ask(*(torch.arange(n or 1) for n in (self.batch, self.heads, self.seq_q, self.seq_k)))

    def given(self) -> tuple[BlockLayout | Pattern, dict[str, Any]]:
        """What the recipe passes."""
        names = {**vars(dap), **vars(dap.patterns), **globals(), "mask_mod": self.mask_mod, "torch": torch}
        return eval(f"(lambda what, **options: (what, options))({self.recipe})", names)

    def layout(self) -> BlockLayout:
        what, _ = self.given()
        return (
            what
            if isinstance(what, BlockLayout)
            else BlockLayout.from_pattern(what, self.seq_q, self.seq_k, block_size=BLOCK)
        )

    def costs(self) -> list[str]:
        """Allowed pairs, active blocks and partial ones of them, different bitmaps."""
        layout = self.layout()
        blocks = layout.num_lists * layout.num_q_blocks * layout.num_k_blocks
        partial = int((layout.entries()[3] >= 0).sum())
        share = float(self.dense().double().mean())
        counts = f"{layout.num_active_blocks} of {blocks}", f"{partial}", f"{len(layout.bitmaps)}"
        return [f"{share:.1%}".replace("%", " %"), *counts]


def at(index: Tensor, shape: tuple[int, ...]) -> list[Tensor]:
    """Coordinates in a grid, row by row."""
    return [index // math.prod(shape[d + 1 :]) % shape[d] for d in range(len(shape))]


def near(q: list[Tensor], k: list[Tensor], shape: tuple[int, ...], window: int) -> Tensor:
    """Within a window of odd size that stays inside the grid."""
    half, allowed = window // 2, torch.tensor(True)
    for a, b, size in zip(q, k, shape, strict=True):
        allowed = allowed & ((a.clamp(half, size - 1 - half) - b).abs() <= half)
    return allowed


def in_tiles(index: Tensor, shape: tuple[int, ...], tile: tuple[int, ...]) -> list[Tensor]:
    """Coordinates where the tokens stand tile after tile, row by row in each."""
    tiles = tuple(n // t for n, t in zip(shape, tile, strict=True))
    number, inside = index // math.prod(tile), index % math.prod(tile)
    return [a * t + b for a, b, t in zip(at(number, tiles), at(inside, tile), tile, strict=True)]


def morton(index: Tensor) -> list[Tensor]:
    """Coordinates of the Z-order curve in a grid of 16 × 16."""
    return [sum(((index >> (2 * bit + which)) & 1) << bit for bit in range(4)) for which in (1, 0)]  # type: ignore


def sliding_tiles(
    q: Tensor, k: Tensor, shape: tuple[int, ...], tile: tuple[int, ...], window: int, text: int
) -> Tensor:
    """Tiles around the query's own; text behind the grid sees and is seen by all."""
    tiles = tuple(n // t for n, t in zip(shape, tile, strict=True))
    mine, theirs = (at((x // math.prod(tile)).clamp(max=math.prod(tiles) - 1), tiles) for x in (q, k))
    behind = N - text
    return near(mine, theirs, tiles, window) | (q >= behind) | (k >= behind)


def block_diffusion(q: Tensor, k: Tensor, block: int) -> Tensor:
    """Noised tokens, then clean ones, as many."""
    half = N // 2
    noised_q, noised_k, of_q, of_k = q < half, k < half, q % half // block, k % half // block
    return torch.where(noised_k, noised_q & (of_q == of_k), torch.where(noised_q, of_q > of_k, of_q >= of_k))


def tree(q: Tensor, k: Tensor) -> Tensor:
    """A context and the nodes of a tree of drafts, which see the context and their ancestors."""
    ancestors = torch.eye(len(PARENTS), dtype=torch.bool)
    for node, parent in enumerate(PARENTS[1:], 1):
        ancestors[node] |= ancestors[parent]
    context = N - len(PARENTS)
    return (k < context) | ancestors[q, (k - context).clamp(min=0)]


def shared_prefix(q: Tensor, k: Tensor) -> Tensor:
    mine = PACKED_AT[q]
    prompt = PROMPT_OF[mine]
    own = (k >= PACKED_START[mine]) & (k <= q)
    return own | ((mine != prompt) & (k >= PACKED_START[prompt]) & (k < PACKED_START[prompt + 1]))


def svg_temporal(q: Tensor, k: Tensor) -> Tensor:
    """A prompt of 24 tokens, 12 frames of 30: the same places of all frames, and their neighbours."""
    return (q < 24) | (k < 24) | (((q - 24) % 30 - (k - 24) % 30).abs() < 5)


GYM = "attention-gym"

MASKS = {
    "causal": Mask(GYM, lambda b, h, q, k: q >= k, "Causal()"),
    "sliding window": Mask(GYM, lambda b, h, q, k: (q >= k) & (q - k <= 50), "SlidingWindow(50, 0)"),
    "sinks and a window": Mask(
        GYM,
        lambda b, h, q, k: (q >= k) & ((q - k <= 50) | (k < 4)),
        "(SlidingWindow(50, 0) | GlobalTokens(4)) & Causal()",
    ),
    "global tokens and a window (Longformer)": Mask(
        GYM,
        lambda b, h, q, k: ((q - k).abs() <= 20) | (q == 0) | (k == 0) | (q == 200) | (k == 200),
        "SlidingWindow(20, 20) | GlobalTokens(at=(0, 200), queries=True)",
    ),
    "dilated window": Mask(
        GYM,
        lambda b, h, q, k: ((q - k).abs() <= 60) & ((q - k).abs() % 3 == 0),
        "SlidingWindow(60, 60), document_ids=torch.arange(N)[None] % 3",
    ),
    "prefix LM": Mask(GYM, lambda b, h, q, k: (q >= k) | (k < 100), "PrefixLM(100)"),
    "documents": Mask(GYM, lambda b, h, q, k: DOCUMENT[q] == DOCUMENT[k], "Documents((100, 50, 234))"),
    "causal documents": Mask(
        GYM, lambda b, h, q, k: (k >= STARTS[DOCUMENT[q]]) & (q >= k), "Documents((100, 50, 234)) & Causal()"
    ),
    "a prefix of each document": Mask(
        GYM,
        lambda b, h, q, k: (
            (DOCUMENT[q] == DOCUMENT[k]) & ((q >= k) | (k - STARTS[DOCUMENT[k]] < PREFIXES[DOCUMENT[k]]))
        ),
        "PrefixLM((10, 20, 30), (100, 50, 234))",
    ),
    "prompts shared by answers": Mask(
        GYM,
        lambda b, h, q, k: shared_prefix(q, k),
        "Documents(PACKED) & Causal() | KeyRanges((0, 0, 0, 150, 150, 150), (0, 60, 60, 150, 230, 230), PACKED)",
    ),
    "batches in one sequence": Mask(GYM, lambda b, h, q, k: q // 96 == k // 96, "Chunks(96)"),
    "NATTEN, 16 × 24, window 5": Mask(
        GYM,
        lambda b, h, q, k: near(at(q, (16, 24)), at(k, (16, 24)), (16, 24), 5),
        "Neighborhood((16, 24), 5)",
    ),
    "NATTEN in tiles of 4 × 8": Mask(
        GYM,
        lambda b, h, q, k: near(*(in_tiles(x, (16, 24), (4, 8)) for x in (q, k)), (16, 24), 5),
        "Neighborhood((16, 24), 5).in_tiles((4, 8))",
    ),
    "NATTEN along a Morton curve": Mask(
        GYM,
        lambda b, h, q, k: near(morton(q), morton(k), (16, 16), 5),
        "BlockLayout.from_mask_mod(mask_mod, None, None, 256, block_size=32)",
        seq_q=256,
        seq_k=256,
    ),
    "sliding tiles, 2-D": Mask(
        GYM,
        lambda b, h, q, k: sliding_tiles(q, k, (16, 24), (4, 8), 3, 0),
        "SlidingTiles((16, 24), (4, 8), (12, 24)).in_tiles()",
    ),
    "sliding tiles, 3-D, with text": Mask(
        GYM,
        lambda b, h, q, k: sliding_tiles(q, k, (5, 8, 8), (1, 4, 8), 1, 64),
        "SlidingTiles((5, 8, 8), (1, 4, 8), (1, 4, 8), prefix=64).in_tiles()",
    ),
    "SVG, spatial heads": Mask(
        GYM,
        lambda b, h, q, k: (q < 24) | (k < 54) | ((q - k).abs() < 60),
        "SlidingWindow(59, 59) | GlobalTokens(24, queries=True) | GlobalTokens(54)",
    ),
    "SVG, temporal heads": Mask(
        GYM, lambda b, h, q, k: svg_temporal(q, k), "presets.svg_temporal((12, 5, 6), prefix=24)"
    ),
    "VSA: chosen tiles": Mask(
        GYM, lambda b, h, q, k: TILES[q // 32, k // 32], "BlockLayout.from_block_mask(TILES, 32)"
    ),
    "block diffusion, blocks of 4": Mask(GYM, lambda b, h, q, k: block_diffusion(q, k, 4), "BlockDiffusion(192, 4)"),
    "tree of drafts (JetSpec)": Mask(
        GYM,
        lambda b, h, q, k: tree(q, k),
        "BlockLayout.from_tree(torch.tensor(PARENTS), N, block_size=32)",
        seq_q=12,
    ),
    "drafts in training (JetSpec)": Mask(
        GYM,
        lambda b, h, q, k: (k < 64) | ((k >= 64) & (q // 16 == (k - 64) // 16) & ((k - 64) % 16 <= q % 16)),
        "GlobalTokens(64) | Documents((64,) + (16,) * 20) & Causal()",
        seq_q=320,
    ),
    "images seen by text (Flamingo)": Mask(
        GYM,
        lambda b, h, q, k: (k >= SEEN_FROM[q]) & (k < SEEN_TO[q]),
        "BlockLayout.from_key_ranges(SEEN_FROM, SEEN_TO, 96, block_size=32)",
        seq_k=96,
    ),
    "a prefix of each sample": Mask(
        "",
        lambda b, h, q, k: (q >= k) | (k < torch.tensor((40, 200))[b]),
        "BlockLayout.from_key_ranges(torch.zeros(2, N).int(), "
        "torch.stack([(TOKENS + 1).clamp(min=n) for n in (40, 200)]), block_size=32)",
        batch=2,
    ),
    "chunks with left context": Mask(
        "", lambda b, h, q, k: (q // 32 >= k // 32) & (q // 32 - k // 32 <= 2), "Chunks(32, left=2)"
    ),
    "block-causal": Mask("", lambda b, h, q, k: q // 48 >= k // 48, "Chunks(48, left=None)"),
    "images between text (Transfusion)": Mask(
        "", lambda b, h, q, k: (q >= k) | (SPAN[q] == SPAN[k]), "Causal() | Documents(IMAGES)"
    ),
    "sinks of each document": Mask(
        "",
        lambda b, h, q, k: (DOCUMENT[q] == DOCUMENT[k]) & (q >= k) & ((q - k <= 20) | (k - STARTS[DOCUMENT[k]] < 4)),
        "(DocumentSinks(4, (100, 50, 234)) | SlidingWindow(20, 0) & Documents((100, 50, 234))) & Causal()",
    ),
    "a window of each head": Mask(
        "",
        lambda b, h, q, k: (q >= k) & (q - k <= torch.tensor((10, 80))[h]),
        "PerHead((SlidingWindow(10, 0), SlidingWindow(80, 0)))",
        heads=2,
    ),
    "global tokens anywhere": Mask(
        "",
        lambda b, h, q, k: (q == 77) | (q == 300) | (k == 77) | (k == 300),
        "GlobalTokens(at=(77, 300), queries=True)",
    ),
    "vertical and slash": Mask(
        "",
        lambda b, h, q, k: (q >= k) & ((k == 0) | (k == 50) | (q - k < 2) | (q - k == 100)),
        "VerticalSlash(columns=(0, 50), diagonals=(0, 1, 100))",
    ),
    "strided": Mask(
        "", lambda b, h, q, k: (q >= k) & ((q - k) % 16 == 0), "Causal(), document_ids=torch.arange(N)[None] % 16"
    ),
    "strided and local (Sparse Transformer)": Mask(
        "", lambda b, h, q, k: (q >= k) & ((q - k < 16) | ((q - k) % 16 == 0))
    ),
    "strictly causal": Mask("", lambda b, h, q, k: q > k, "StrictlyCausal()"),
    "anything": Mask("", lambda b, h, q, k: NOISE[q, k], "BlockLayout.from_mask(NOISE, block_size=32)"),
}


def table() -> str:
    """As docs/from_flex.md shows it."""
    lines = [
        "| mask | recipe | pairs | active blocks | partial | different bitmaps |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name, mask in MASKS.items():
        marked = f"{name} \\*" if mask.source == GYM else name
        recipe = mask.recipe.replace("|", "\\|")
        lines.append(f"| {marked} | `{recipe}` | {' | '.join(mask.costs())} |")
    return "\n".join(lines)


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(MARKED.sub(lambda found: f"{found[1]}\n{table()}\n{found[2]}", page), encoding="utf-8")


if __name__ == "__main__":
    main()
