"""Blocks of patterns of a grid: found without looking at what is far away, and bitmaps without their doubles."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dilated_attention_pytorch import (
    BlockLayout,
    Causal,
    GlobalTokens,
    Neighborhood,
    PerHead,
    SlidingTiles,
    SlidingWindow,
)
from dilated_attention_pytorch.layout.grid import HEAVY, GridBlocks, axis_of, coordinates_of
from tests.patterns.test_patterns import by_rule
from tests.strategies import grids

CPU = torch.device("cpu")
LATENTS, WINDOW = (30, 48, 80), (18, 24, 24)


@given(st.data())
def test_axes_and_coordinates_are_the_pattern_s(data):
    pattern = data.draw(st.integers(1, 120).flatmap(grids))
    for d, size in enumerate(pattern.shape):
        axis = axis_of(pattern, d, CPU)
        for x in range(size):
            assert range(int(axis.first[x]), int(axis.stop[x]), axis.step) == pattern.seen(d, x)
    at = coordinates_of(pattern, torch.arange(-1, pattern.total + 1))
    own = [pattern._coordinates(position) for position in range(pattern.total)]
    assert at[:, 1:-1].T.tolist() == [[-1] * len(pattern.shape) if each is None else each for each in own]
    assert set(at[:, [0, -1]].flatten().tolist()) == {-2}


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_kinds_and_full_blocks_with_any_blocks(data):
    """Equal kinds allow the same pairs, full blocks all, and blocks that are not listed none."""
    pattern = data.draw(st.integers(1, 260).flatmap(grids))
    blocks = data.draw(st.sampled_from([(16, 16), (16, 64), (64, 32), (128, 128)]))
    total = pattern.total
    head = torch.arange(0, total, blocks[0])
    grid = GridBlocks(pattern, head, total, blocks, CPU)
    found = grid.found(0, len(head))
    row, column = found.key // grid.num_columns, found.key % grid.num_columns
    allowed = grid.allowed(row, column)
    assert allowed[found.full].all()
    for kind in found.kind[~found.full].unique():
        alike = allowed[~found.full & (found.kind == kind)]
        assert (alike == alike[0]).all()
    whole = torch.zeros(len(head), grid.num_columns, *blocks, dtype=torch.bool)
    whole[row, column] = allowed
    at = coordinates_of(pattern, torch.arange(total))
    axes = [axis_of(pattern, d, CPU) for d in range(len(pattern.shape))]
    inside = torch.ones(total, total, dtype=torch.bool)
    for of, axis in zip(at.clamp(min=0), axes, strict=True):
        first, stop = axis.first[of][:, None], axis.stop[of][:, None]
        inside &= (of >= first) & (of < stop) & ((of - first) % axis.step == 0)
    prefix = at[0] < 0
    dense = whole.transpose(1, 2).flatten(0, 1).flatten(1)[:total, :total]
    assert torch.equal(dense, inside | prefix[:, None] | prefix)


@pytest.mark.parametrize(
    ("pattern", "most_bitmaps"),
    [
        (Neighborhood(LATENTS, WINDOW, order=(4, 4, 8)), 200),
        (Neighborhood(LATENTS, WINDOW, prefix=226, order=(6, 8, 8)), 90),
        (SlidingTiles(LATENTS, (6, 8, 8), WINDOW).in_tiles(), 0),
        (Neighborhood((100_000,), 4001), 12),
    ],
    ids=["in tiles", "with text", "sliding tiles", "a line"],
)
def test_a_video_is_built_from_what_its_queries_see(pattern, most_bitmaps):
    """Candidates are little more than the blocks that are found, and few blocks are asked pair by pair."""
    layout = BlockLayout.from_pattern(pattern, pattern.total, block_size=128)
    head = torch.arange(0, pattern.total, 128)
    grid = GridBlocks(pattern, head, pattern.total, (128, 128), CPU)
    candidates = len(grid.found(0, len(head)).key)
    assert layout.num_active_blocks <= candidates <= 1.3 * layout.num_active_blocks
    assert int(grid.num_candidates.sum()) <= 3 * HEAVY * layout.num_active_blocks
    assert len(layout.bitmaps) <= most_bitmaps
    assert layout.evaluated <= 5 * most_bitmaps + 4
    assert sum(x.nbytes for x in layout.flatten()[0]) < 12 * layout.num_active_blocks + 5_000 * most_bitmaps + 20_000


def test_rows_of_a_video_are_those_of_its_pattern():
    pattern = Neighborhood((8, 12, 20), (4, 5, 8), prefix=30, order=(3, 4, 8))
    layout = BlockLayout.from_pattern(pattern, pattern.total, block_size=128)
    some = torch.tensor([0, 7, 15])
    alone = BlockLayout.from_pattern(pattern, pattern.total, block_size=128, query_blocks=some)
    assert torch.equal(alone.to_dense(), layout.take(some).to_dense())
    query = 15 * 128 + 3
    assert layout.to_dense()[query].tolist() == [
        pattern.allows(query, j, pattern.total, pattern.total) for j in range(pattern.total)
    ]


def test_heads_share_bitmaps_and_stand_beside_other_rules():
    one, other = Neighborhood((6, 16), (3, 5)), SlidingTiles((6, 16), (2, 5), (4, 10))
    heads = PerHead((one, SlidingWindow(9, 2), other, one)) & Causal()
    layout = BlockLayout.from_pattern(heads, 96, block_size=(16, 32))
    want = torch.stack([by_rule(head, 96, 96) for head in heads.patterns])
    assert torch.equal(layout.to_dense(), want)
    alone = BlockLayout.from_pattern(PerHead((one & Causal(), other & Causal())), 96, block_size=(16, 32))
    assert len(layout.bitmaps) == len(alone.bitmaps)


def test_a_head_without_bitmaps_beside_other_rules():
    """Its blocks named a rule behind the last one."""
    several = SlidingWindow(9, 2) | GlobalTokens(3)
    heads = PerHead((several, SlidingTiles((8, 16), (4, 4), (4, 12)).in_tiles()))
    layout = BlockLayout.from_pattern(heads, 128, block_size=16)
    assert not len(layout.bitmaps)
    assert int(layout.by_query.rule_ids.max()) < len(layout.rules)
    assert torch.equal(layout.to_dense(), torch.stack([by_rule(head, 128, 128) for head in heads.patterns]))


def test_another_length_is_refused():
    with pytest.raises(
        ValueError, match=r"shape of Neighborhood must have seq_k = 50 tokens together, got 3 and \(4, 12\), which"
    ):
        BlockLayout.from_pattern(Neighborhood((4, 12), 3, prefix=3), 50, block_size=16)
