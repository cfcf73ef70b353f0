"""Blocks counted by arithmetic: as many as a layout really holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch import (
    BlockLayout,
    Branches,
    Causal,
    DilatedBlocks,
    Documents,
    GlobalTokens,
    Neighborhood,
    PerHead,
    RandomBlocks,
    SlidingTiles,
    SlidingWindow,
    hierarchical,
)
from dilated_attention_pytorch.layout import layout_of_branches
from dilated_attention_pytorch.layout.size import ListSize
from dilated_attention_pytorch.layout.terms import grids_of
from dilated_attention_pytorch.planning.counting import lists_of_branches, lists_of_pattern
from tests.strategies import BLOCKS, atoms, documents, lengths, patterns


def facts(size):
    """What must agree; of the rest the plan of a pattern has bounds only."""
    bounds = ("candidates", "intervals", "partial")
    return {name: getattr(size, name) for name in size.__dataclass_fields__ if name not in bounds}


@pytest.mark.slow
@given(st.data())
def test_the_blocks_of_any_pattern_are_counted_as_they_are_built(data):
    seq_q, seq_k = data.draw(lengths())
    block_size = data.draw(st.sampled_from(BLOCKS))
    packing = data.draw(documents(seq_k))
    per_head = st.lists(atoms(packing), min_size=2, max_size=3).map(lambda heads: PerHead(tuple(heads)))
    pattern = data.draw(patterns(seq_k) | per_head)
    layout = BlockLayout.from_pattern(pattern, seq_q, seq_k, block_size=block_size)
    assert facts(lists_of_pattern(pattern, seq_q, seq_k, block_size)) == facts(ListSize.of(layout))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "branches",
    [Branches((2048, 4096, 8192), (1, 2, 4)), Branches((512,), (1,)), Branches((256, 1024), (1, 3), "grouped")],
    ids=str,
)
def test_the_lists_of_dilated_attention_are_bounded_closely(branches, is_causal):
    layout = layout_of_branches(branches, 16384, num_heads=4, is_causal=is_causal)
    planned, built = lists_of_branches(branches, 16384, 4, is_causal), ListSize.of(layout)
    exact = (
        "block_q", "num_q_blocks", "num_k_blocks", "num_lists", "list_heads", "named", "kind", "num_residues",
        "run_plan",
    )  # fmt: skip
    assert {name: getattr(planned, name) for name in exact} == {name: getattr(built, name) for name in exact}
    assert built.blocks <= planned.blocks <= 1.7 * built.blocks
    assert built.widest <= planned.widest


LONG = {
    "window": SlidingWindow(1000, 0),
    "first queries see all": SlidingWindow(100, 100) | GlobalTokens(200, queries=True),
    "causal": Causal(),
    "dilated": DilatedBlocks((2048, 8192), (1, 4), 0.02, 32),
    "dilated, causal": DilatedBlocks((2048, 65536), (1, 4), 0.05, 32, True) & Causal(),
    "random | window": RandomBlocks(7, block_size=32) | SlidingWindow(300, 300),
    "hierarchical": hierarchical(((1, 512), (4, 4096), (16, 32768)), block_size=32),
    "documents": Documents((1000, 40000, 24536)),
}


@pytest.mark.parametrize("name", LONG)
def test_long_sequences_are_sampled_and_counted_within_two_percent(name):
    layout = BlockLayout.from_pattern(LONG[name], 65536, block_size=32)
    assert lists_of_pattern(LONG[name], 65536, 65536, 32).blocks == pytest.approx(layout.num_active_blocks, rel=0.02)


GRIDS = {
    "a video": Neighborhood((30, 48, 80), (18, 24, 24), order=(4, 4, 8)),
    "with text": Neighborhood((30, 48, 80), (9, 12, 12), prefix=226, order=(6, 8, 8)),
    "sliding tiles and global tokens": SlidingTiles((30, 48, 80), (6, 8, 8), (18, 24, 24)).in_tiles() | GlobalTokens(5),
    "a line": Neighborhood((300_000,), 4001),
}


@pytest.mark.parametrize("name", GRIDS)
def test_patterns_of_a_grid_are_counted_within_two_percent(name):
    pattern = GRIDS[name]
    (grid,) = grids_of(pattern)
    layout = BlockLayout.from_pattern(pattern, grid.total, block_size=128)
    counted = lists_of_pattern(pattern, grid.total, grid.total, 128)
    assert counted.blocks == pytest.approx(layout.num_active_blocks, rel=0.02)
    assert counted.bitmaps == pytest.approx(ListSize.of(layout).bitmaps, rel=0.1)
