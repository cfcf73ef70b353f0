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

from dilated_attention_pytorch.kernels.dealing import seats, tile_dealt, turns_of


@triton.jit
def _deal_kernel(taken, width, total, num_tiles, order):
    turns = turns_of(total, num_tiles, order)
    base = taken + tl.program_id(0) * width
    tl.store(base, turns)
    for turn in range(turns + 1):
        place, which = tile_dealt(turn, total, num_tiles, order)
        tl.store(base + 1 + turn, which * num_tiles + place)


def dealt(heads, num_tiles, processors):
    """The tiles of every program, and the one that it would ask for next."""
    total = heads * num_tiles
    programs, order = seats(total, num_tiles, processors)
    taken = torch.full((programs, total // programs * 3 + 9), -1)
    _deal_kernel[(programs,)](taken, taken.shape[1], total, num_tiles, order)
    return [row[1 : 1 + row[0]] for row in taken.tolist()], [row[1 + row[0]] for row in taken.tolist()]


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 23))
@settings(max_examples=40)
def test_every_tile_once(heads, num_tiles, processors):
    taken, after = dealt(heads, num_tiles, processors)
    assert len(taken) <= processors
    assert all(taken)
    assert sorted(chain(*taken)) == list(range(heads * num_tiles))
    assert all(0 <= tile < heads * num_tiles for tile in after)


@pytest.mark.parametrize(("heads", "num_tiles"), [(16, 16), (8, 32), (4, 16), (2, 64), (5, 32)])
def test_rows_that_grow_are_shared_out_evenly(heads, num_tiles):
    """Causal rows on 17 processors, against what is possible: the longest first, each to whom is free."""
    lengths = [num_tiles - place + 1 for place in range(num_tiles)]
    taken, _ = dealt(heads, num_tiles, 17)
    most = max(sum(lengths[tile % num_tiles] for tile in tiles) for tiles in taken)
    busy = [0] * 17
    for length in sorted(lengths * heads, reverse=True):
        heapq.heappush(busy, heapq.heappop(busy) + length)
    assert most <= 1.15 * max(busy)
