"""Every tile is taken once, nobody has none, and nobody has much more to do than the others."""

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

from dilated_attention_pytorch.kernels import dealing
from dilated_attention_pytorch.kernels.dealing import deals, tile_dealt, turns_of


@triton.jit
def _deal_kernel(taken, width, tiles, total, num_tiles, first, order):
    deal = (total, num_tiles, first, order)
    turns = turns_of(deal)
    base = taken + tl.program_id(0) * width
    tl.store(base, turns)
    for turn in range(turns + 1):
        place, which = tile_dealt(turn, deal)
        tl.store(base + 1 + turn, which * tiles + place)


def dealt(heads, num_tiles, processors, near=512):
    """For each launch the tiles of every program, and the one that each would ask for next."""
    launches = []
    for programs, deal in deals(num_tiles, near, heads, processors):
        taken = torch.full((programs, deal.total // programs * 3 + 9), -1)
        _deal_kernel[(programs,)](taken, taken.shape[1], num_tiles, *deal)
        rows = taken.tolist()
        launches.append(([row[1 : 1 + row[0]] for row in rows], [row[1 + row[0]] for row in rows]))
    return launches


@pytest.fixture
def short_launches(monkeypatch):
    """Calls of few tiles are several launches too."""
    monkeypatch.setattr(dealing, "LEAST_TURNS", 2)
    deals.cache_clear()
    yield
    deals.cache_clear()


@pytest.mark.usefixtures("short_launches")
@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 23), st.integers(1, 9))
@settings(max_examples=60)
def test_every_tile_once(heads, num_tiles, processors, near):
    launches, before = dealt(heads, num_tiles, processors, near), 0
    for taken, after in launches:
        assert len(taken) <= processors
        assert all(taken)
        assert all(0 <= tile < heads * num_tiles for tile in after)
        # A launch takes the same run of every head's tiles, behind that of the launch before.
        places = {tile % num_tiles for tile in chain(*taken)}
        assert places == set(range(before, before + len(places)))
        before += len(places)
    assert sorted(chain(*(tiles for taken, _ in launches for tiles in taken))) == list(range(heads * num_tiles))


@pytest.mark.parametrize(
    ("num_tiles", "heads", "tiles"),
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
def test_long_calls_are_several_launches(num_tiles, heads, tiles):
    made = deals(num_tiles, 512, heads, 132)
    assert [deal.num_tiles for _, deal in made] == tiles
    assert all(deal.total == deal.num_tiles * heads for _, deal in made)


@pytest.mark.parametrize(("heads", "num_tiles"), [(16, 16), (8, 32), (4, 16), (2, 64), (5, 32)])
def test_rows_that_grow_are_shared_out_evenly(heads, num_tiles):
    """Causal rows on 17 processors, against what is possible: the longest first, each to whom is free."""
    lengths = [num_tiles - place + 1 for place in range(num_tiles)]
    [(taken, _)] = dealt(heads, num_tiles, 17)
    most = max(sum(lengths[tile % num_tiles] for tile in tiles) for tiles in taken)
    busy = [0] * 17
    for length in sorted(lengths * heads, reverse=True):
        heapq.heappush(busy, heapq.heappop(busy) + length)
    assert most <= 1.15 * max(busy)
