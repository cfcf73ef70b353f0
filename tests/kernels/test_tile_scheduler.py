"""Every tile is taken once, no program goes without, and none has much more to do than the others."""

import heapq
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="needs triton, which there is for Linux alone")
if torch.cuda.is_available():
    pytest.skip("needs a machine without a CUDA device, where kernels are interpreted", allow_module_level=True)

import triton
import triton.language as tl

from dilated_attention_pytorch.kernels import tile_scheduler
from dilated_attention_pytorch.kernels.tile_scheduler import num_turns, scheduled_tile, tile_schedules


@triton.jit
def _schedule_kernel(taken, width, tiles, total_tiles, tiles_per_head, first_tile, order):
    schedule = (total_tiles, tiles_per_head, first_tile, order)
    turns = num_turns(schedule)
    base = taken + tl.program_id(0) * width
    tl.store(base, turns)
    for turn in range(turns + 1):
        place, head = scheduled_tile(turn, schedule)
        tl.store(base + 1 + turn, head * tiles + place)


def tiles_of_programs(heads, tiles_per_head, processors, neighbourhood=512):
    """For each launch the tiles of every program, and the one that each would ask for next."""
    launches = []
    for programs, schedule in tile_schedules(tiles_per_head, neighbourhood, heads, processors):
        taken = torch.full((programs, schedule.total_tiles // programs * 3 + 9), -1)
        _schedule_kernel[(programs,)](taken, taken.shape[1], tiles_per_head, *schedule)
        rows = taken.tolist()
        launches.append(([row[1 : 1 + row[0]] for row in rows], [row[1 + row[0]] for row in rows]))
    return launches


@pytest.fixture
def short_launches(monkeypatch):
    """Calls of few tiles are several launches too."""
    monkeypatch.setattr(tile_scheduler, "MIN_TURNS", 2)
    tile_schedules.cache_clear()
    yield
    tile_schedules.cache_clear()


@pytest.mark.slow
@pytest.mark.usefixtures("short_launches")
@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 23), st.integers(1, 9))
@settings(max_examples=60)
def test_every_tile_once(heads, tiles_per_head, processors, neighbourhood):
    launches, before = tiles_of_programs(heads, tiles_per_head, processors, neighbourhood), 0
    for taken, after in launches:
        assert len(taken) <= processors
        assert all(taken)
        assert all(0 <= tile < heads * tiles_per_head for tile in after)
        # A launch takes the same run of every head's tiles, behind that of the launch before.
        places = {tile % tiles_per_head for tile in chain(*taken)}
        assert places == set(range(before, before + len(places)))
        before += len(places)
    assert sorted(chain(*(tiles for taken, _ in launches for tiles in taken))) == list(range(heads * tiles_per_head))


@pytest.mark.parametrize(
    ("tiles_per_head", "heads", "tiles"),
    [
        (512, 8, [512]),
        (1023, 8, [1023]),  # less than twice what a launch must have
        (1030, 8, [512, 518]),  # 31 turns of 132 programs
        (4096, 1, [4096]),
        (8000, 1, [3584, 4416]),
        (32, 4096, [32]),
        (2048, 256, [512, 512, 512, 512]),
    ],
)
def test_long_calls_are_several_launches(tiles_per_head, heads, tiles):
    made = tile_schedules(tiles_per_head, 512, heads, 132)
    assert [schedule.tiles_per_head for _, schedule in made] == tiles
    assert all(schedule.total_tiles == schedule.tiles_per_head * heads for _, schedule in made)


@pytest.mark.parametrize(("heads", "tiles_per_head"), [(16, 16), (8, 32), (4, 16), (2, 64), (5, 32)])
def test_rows_that_grow_are_shared_out_evenly(heads, tiles_per_head):
    """Causal rows on 17 processors, against what is possible: the longest first, each to whom is free."""
    lengths = [tiles_per_head - place + 1 for place in range(tiles_per_head)]
    [(taken, _)] = tiles_of_programs(heads, tiles_per_head, 17)
    most = max(sum(lengths[tile % tiles_per_head] for tile in tiles) for tiles in taken)
    busy = [0] * 17
    for length in sorted(lengths * heads, reverse=True):
        heapq.heappush(busy, heapq.heappop(busy) + length)
    assert most <= 1.15 * max(busy)
