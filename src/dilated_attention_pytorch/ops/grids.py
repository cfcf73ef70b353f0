"""Which blocks of a call a selection may choose and which it must, known to the host from the lengths alone: `Grid`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..backends.base import aligned_queries
from ..layout import BlockList
from ..layout.build import Span
from ..layout.eager import plain_cache
from ..layout.lists import HOST
from ..patterns.blocks import ceil_div
from ..patterns.tokens import EVERYTHING, Interval
from .scores import Blocked
from .selectors import Grid


@plain_cache(64, "blocks that a selection may and must choose, for lengths and block sizes")
def grid_of(
    lengths: tuple[int, int], blocks: tuple[int, int], is_causal: bool, sink: int, local: int, device: torch.device
) -> Grid:
    """Made on the host, once for these lengths: its counts are ints, and a device need not be waited for."""
    (seq_q, seq_k), (block_q, block_k) = lengths, blocks
    interval = Interval(right=0) if is_causal else EVERYTHING
    span = Span.of(interval, torch.arange(seq_k - seq_q, seq_k, block_q, device=HOST), seq_k, blocks)
    column = torch.arange(-(-seq_k // block_k), device=HOST)
    visible = (column >= span.first[:, None]) & (column < span.stop[:, None])
    head = torch.arange(0, seq_q, block_q, device=HOST)
    tail = (head + block_q).clamp(max=seq_q) - 1
    near = (head + (seq_k - seq_q) - local) // block_k, (tail + (seq_k - seq_q) + local) // block_k
    forced = (column * block_k < sink) | ((column >= near[0][:, None]) & (column <= near[1][:, None]))
    forced = forced & visible
    return Grid(
        visible.to(device),
        forced.to(device),
        visible.sum(1, dtype=torch.int32).to(device),
        (span.stop_full - 1).clamp(min=-1, max=len(column) - 1).to(device),
        tuple(visible.sum(1).tolist()),
        tuple(forced.sum(1).tolist()),
    )


def masked_grid(
    grid: Grid, lengths: tuple[int, int], blocks: tuple[int, int], hidden: Tensor | None, ids: Tensor | None
) -> Grid:
    """The grid without blocks that padding or documents hide from every query."""
    visible = grid.visible
    if hidden is not None:
        seen = Blocked.of(hidden[:, :, None, None], blocks[1], hidden).real.any(2)
        visible = visible & seen[:, None, None]
    if ids is not None:
        # Apart, if all ids of the one are below all ids of the other: exact where ids ascend, as in packed sequences.
        each = zip((aligned_queries(ids, lengths[0]), ids), blocks, strict=True)
        queries, keys = (Blocked.of(x[:, :, None, None].double(), block) for x, block in each)
        low, high = ([x.extreme(sign)[..., 0, 0] for x in (queries, keys)] for sign in (-1, 1))
        apart = (low[0][:, :, None] > high[1][:, None]) | (high[0][:, :, None] < low[1][:, None])
        visible = visible & ~apart[:, None]
    return replace(grid, visible=visible)


def own_blocks(grid: Grid, blocks: tuple[int, int], lengths: Tensor) -> Tensor:
    """See `Grid.own`."""
    head = torch.arange(len(grid.ends), device=lengths.device) * blocks[0]
    ends = torch.minimum(grid.ends, -(-lengths[:, None] // blocks[1])).long()
    return ends.masked_fill(head >= lengths[:, None], 0)


def extra_places(grid: Grid, blocks: tuple[int, int], dense_below: int, lists: int, places: int) -> int:
    """Of a sample that is short enough to keep all its blocks, beside those of one that is not."""
    seen = grid.num_visible[: ceil_div(dense_below, blocks[0])]
    all_of_short = lists * sum(min(num, ceil_div(dense_below, blocks[1])) for num in seen)
    return min(all_of_short, sum(grid.num_visible) * lists - places)


def listed(keep: Tensor, last_full: Tensor, places: int) -> BlockList:
    """The kept blocks as lists with so many places. Blocks ascend, and behind the last full one all are partial."""
    num_k = keep.shape[-1]
    count = keep.flatten().cumsum(0, dtype=torch.int32)
    ends = count.view(-1, num_k)
    offsets = torch.nn.functional.pad(ends[:, -1], (1, 0))
    up_to = last_full.expand(*keep.shape[:-1]).reshape(-1, 1)
    splits = torch.where(up_to[:, 0] < 0, offsets[:-1], ends.gather(1, up_to.clamp(min=0))[:, 0])
    # The p-th kept block stands where the count reaches p.
    wanted = torch.arange(1, places + 1, dtype=torch.int32, device=keep.device)
    small: Any = {"out_int32": True} if len(count) < 2**31 else {}  # a symbolic bool is no argument
    indices = torch.searchsorted(count, wanted, **small) % num_k
    return BlockList(offsets, splits, indices.int(), offsets.new_empty(0))
