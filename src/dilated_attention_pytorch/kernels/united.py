"""Rows of small query blocks united: what lets a large tile of queries walk the lists of all its small blocks at once.

The kernels for Hopper own 64 or 128 queries. Where a layout has blocks of 16 or 32, the lists of 2 to 8 neighbouring
rows are united: each key block that any of them sees stands there once, with a word that says which rows see it. The
layout keeps its meaning; this is another way to walk it.

    mark_kernel     a byte for each small row and key block: 1 if it is seen, 2 if all of it is
    unite_kernel    the lists of large rows: first the key blocks of which no row needs the layout's rule, then the rest

A united list is as long as its rows have little in common, so it is counted, on the device, whether it pays
(`WORTH`). Nothing waits for the count: both kernels are launched, and the one that shall not run finds a `work`
of rows that do not exist.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import BlockLayout
from ..layout.lists import in_order_of_work
from ..patterns.blocks import ceil_div
from .launcher import launch

SLAB = 1 << 24  # bytes of marks at a time: they stay in the L2 cache
CHUNK = 256  # entries, or key blocks, that a program looks at together
LARGE_BLOCK = 64  # queries of the blocks that unite rows
SMALL_BLOCKS = (16, 32)  # of which rows are united
# How many times as many pairs large tiles may compute and be as fast, by the rows of a plain tile, of all heads that
# it packs: a plain tile of 16 rows takes about as long as one of 64. From the speeds of other blocks on an H200.
WORTH = {16: 5.0, 32: 2.7, 64: 1.5, 128: 1.2}
VARYING = ("first", "num_q", "num_large", "num_k")  # no new kernel for a new value of them
# FLOPs of a call: to unite rows takes as long as the plain kernel takes for some of it, about 2e10. Infinite: no call
# unites rows until that has been measured on a GPU with several tiles a program. Then `backends.triton.workspace`
# counts the united lists again, 8 bytes an entry and 48 a row, and their marks.
LEAST_WORK = math.inf


class United(NamedTuple):
    """The united lists of a layout.

    Attributes:
        indices: int32 [capacity], key blocks. A list starts where that of its first row starts in the layout.
        words: int32 [capacity]: bit r is set where row r of the united ones sees the key block, bit 8 + r where it sees
            all of it.
        work: int32 [large rows, 4], as `BlockList.work`; no row exists where uniting does not pay.
        own_work: the layout's own `query_work`, of which no row exists where it does.
    """

    indices: Tensor
    words: Tensor
    work: Tensor
    own_work: Tensor

    def tensors(self) -> list[Tensor]:
        return [*self]


def reason_not_to(layout: BlockLayout, heads: int, head_dim: int) -> str | None:
    """Why rows of a layout are not united, for so many heads of all samples."""
    if layout.block_q not in SMALL_BLOCKS:
        return f"rows are united of blocks of {' and '.join(map(str, SMALL_BLOCKS))} queries"
    if layout.dilated or len(layout.bitmaps) or layout.by_query.rule_ids.numel() or layout.rules.shape[1] > 1:
        return "rows are united where all partial blocks share one interval"
    pairs = len(layout.by_query.indices) * layout.block_q * layout.block_k
    if math.inf == LEAST_WORK:
        return "uniting rows of small blocks is switched off: it has not been measured yet"
    if 4 * pairs * head_dim * heads // layout.num_lists < LEAST_WORK:
        return "to unite rows of so few blocks takes longer than it saves"
    return None


@triton.jit(do_not_specialize=VARYING)
def mark_kernel(
    offsets, splits, indices, marks, first, num_q, num_large, num_k, GROUP: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """The marks [large rows from `first` on, num_k, GROUP] of one small row."""
    here, sub = tl.program_id(0) // GROUP, tl.program_id(0) % GROUP
    large = first + here
    row = large % num_large * GROUP + sub
    if row < num_q:
        row += large // num_large * num_q
        start, split, stop = tl.load(offsets + row), tl.load(splits + row), tl.load(offsets + row + 1)
        for chunk in range(start, stop, CHUNK):
            entry = chunk + tl.arange(0, CHUNK)
            block = tl.load(indices + entry, mask=entry < stop, other=0)
            at = (here.to(tl.int64) * num_k + block) * GROUP + sub
            tl.store(marks + at, 1 + (entry < split).to(tl.uint8), mask=entry < stop)


@triton.jit
def words_at(marks, here, column, num_k, GROUP: tl.constexpr):
    sub = tl.arange(0, GROUP)[None, :]
    at = (here.to(tl.int64) * num_k + column[:, None]) * GROUP + sub
    mark = tl.load(marks + at, mask=(column < num_k)[:, None], other=0).to(tl.int32)
    seen = (mark > 0).to(tl.int32) << sub
    whole = (mark > 1).to(tl.int32) << sub
    return tl.sum(seen, 1), tl.sum(whole, 1)


@triton.jit(do_not_specialize=VARYING)
def unite_kernel(
    offsets, marks, indices, words, rows, first, num_q, num_large, num_k, GROUP: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """The list of one large row, and its `rows` [large rows, 4]: number, first entry, first partial one, end."""
    here = tl.program_id(0)
    large = first + here
    start = tl.load(offsets + large // num_large * num_q + large % num_large * GROUP)
    split = start
    for chunk in range(0, num_k, CHUNK):
        seen, whole = words_at(marks, here, chunk + tl.arange(0, CHUNK), num_k, GROUP)
        split += tl.sum(((seen != 0) & (seen == whole)).to(tl.int32), 0)
    place, stop = start, split
    for chunk in range(0, num_k, CHUNK):
        column = chunk + tl.arange(0, CHUNK)
        seen, whole = words_at(marks, here, column, num_k, GROUP)
        full, partial = (seen != 0) & (seen == whole), seen != whole
        of_full, of_partial = tl.cumsum(full.to(tl.int32), 0), tl.cumsum(partial.to(tl.int32), 0)
        at = tl.where(full, place + of_full, stop + of_partial) - 1
        tl.store(indices + at, column, mask=seen != 0)
        tl.store(words + at, seen | (whole << 8), mask=seen != 0)
        place += tl.sum(full.to(tl.int32), 0)
        stop += tl.sum(partial.to(tl.int32), 0)
    tl.store(rows + large * 4, large % num_large)
    tl.store(rows + large * 4 + 1, start)
    tl.store(rows + large * 4 + 2, split)
    tl.store(rows + large * 4 + 3, stop)


def united_rows(layout: BlockLayout, own_rows: int, large_block: int = LARGE_BLOCK) -> United:
    """The rows of a layout united to blocks of `large_block` queries, where that pays against plain tiles of so many
    rows. Waits for nothing."""
    lists, group = layout.by_query, large_block // layout.block_q
    num_q, num_k = layout.num_q_blocks, layout.num_k_blocks
    num_large = ceil_div(num_q, group)
    total = num_large * layout.num_lists
    indices, words = torch.empty_like(lists.indices), torch.empty_like(lists.indices)
    rows = lists.indices.new_empty(total, 4)
    at_once = max(1, SLAB // (num_k * group))
    marks = torch.empty(min(at_once, total) * num_k * group, dtype=torch.uint8, device=layout.device)
    for first in range(0, total, at_once):
        num = min(at_once, total - first)
        marks.zero_()
        numbers, sizes = (first, num_q, num_large, num_k), {"GROUP": group, "CHUNK": CHUNK}
        of_lists = lists.offsets, lists.splits, lists.indices
        launch(mark_kernel, (num * group,), (*of_lists, marks), numbers, **sizes, num_warps=1)
        launch(unite_kernel, (num,), (lists.offsets, marks, indices, words, rows), numbers, **sizes, num_warps=4)
    work = in_order_of_work(rows.view(layout.num_lists, num_large, 4), 1)
    computed = (rows[:, 3] - rows[:, 1]).sum() * group
    worth = computed <= WORTH[own_rows] * lists.offsets[-1]
    gone, own_gone = (rows.new_zeros(4) for _ in range(2))
    gone[0], own_gone[0] = num_large, num_q
    return United(indices, words, torch.where(worth, work, gone), torch.where(worth, own_gone, layout.query_work))
