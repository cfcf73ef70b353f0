"""Lists of blocks in closed form: of patterns whose terms are intervals of keys (`layout.closed_form`).

The columns that a term touches in a row of blocks are one run, and those that it fills are another: a span. Spans of
rows follow from the numbers of a term; spans of columns, the rows that touch or fill them, from those of the rows by
search, because neither end of a span ever moves back from one row to the next. Out of spans, in either orientation,
come counts, offsets, the lists and the order of work.

    row_spans ──spans, counts──▶ fill: by query
        │ spans
        ▼
    column_spans ──spans, counts──▶ fill: by key

A program of the first two takes the 256 rows of a neighbourhood (`BlockList.work`), one of `fill` a row. Terms stand in
the lanes of a second dimension: one kernel serves every pattern. Nothing here waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout.lists import NEAR, BlockList
from . import launcher

TERMS = tl.constexpr(8)  # lanes for `layout.terms.MAX_INTERVALS` terms
ROWS = tl.constexpr(NEAR)  # of a neighbourhood
COLUMNS = tl.constexpr(128)  # listed at a time
SUMS = tl.constexpr(512)  # neighbourhoods looked at at a time
TOKENS = tl.constexpr(256)  # of a program
NONE = tl.constexpr(2**31 - 1)

NUMBERS = ("num_terms", "num_rows", "num_others", "seq_q", "seq_k", "block_q", "shift_k")


@triton.jit
def _next_run(first, stop, reached, axis: tl.constexpr):
    """Of the union of intervals, its next part behind `reached`: where it begins, NONE if there is none, and ends."""
    begin = tl.maximum(first, tl.expand_dims(reached, axis))
    start = tl.min(tl.where(stop > begin, begin, NONE), axis)
    end = tl.max(tl.where(first <= tl.expand_dims(start, axis), stop, 0), axis)
    return start, end


@triton.jit
def _size(first, stop, num_terms):
    """How many numbers the intervals of each row hold together: [rows, terms] → [rows]."""
    reached = tl.max(first, 1) * 0
    size = reached
    for _ in range(num_terms):
        start, end = _next_run(first, stop, reached, 1)
        size += tl.where(start < NONE, end - start, 0)
        reached = tl.where(start < NONE, end, reached)
    return size


@triton.jit
def _parts_of(spans, num_lists, num_terms, num_rows):
    """Where in `Spans` counts and sums of neighbourhoods begin."""
    counts = spans + num_lists.to(tl.int64) * (4 * num_terms * num_rows)
    return counts, counts + num_lists.to(tl.int64) * (2 * num_rows)


@triton.jit
def _store_spans(spans, which, row, term, first, stop, first_full, stop_full, num_terms, num_rows):
    """The spans of a neighbourhood, how many blocks its rows have, full ones and all, and of all their sum and most."""
    num_lists = tl.num_programs(0) // tl.cdiv(num_rows, ROWS)
    counts, near = _parts_of(spans, num_lists, num_terms, num_rows)
    inside = (row[:, None] < num_rows) & (term[None, :] < num_terms)
    at = spans + ((which.to(tl.int64) * 4 * num_terms + term[None, :]) * num_rows + row[:, None])
    step = num_terms * num_rows
    tl.store(at, first, mask=inside)
    tl.store(at + step, stop, mask=inside)
    tl.store(at + 2 * step, first_full, mask=inside)
    tl.store(at + 3 * step, stop_full, mask=inside)
    num = tl.where(row < num_rows, _size(first, stop, num_terms), 0)
    at = counts + which.to(tl.int64) * (2 * num_rows) + row
    tl.store(at, tl.where(row < num_rows, _size(first_full, stop_full, num_terms), 0), mask=row < num_rows)
    tl.store(at + num_rows, num, mask=row < num_rows)
    at = near + 2 * tl.program_id(0)
    tl.store(at, tl.sum(num, 0))
    tl.store(at + 1, tl.max(num, 0))


@triton.jit
def _range_of(documents, key_range, position, behind, seq_q, side: tl.constexpr, other):
    """Start (side 0) or stop of the range of the queries at these positions, where a term has one."""
    known = tl.minimum(tl.maximum(position - behind, 0), seq_q - 1)
    at = ((tl.maximum(key_range, 1) - 1) * 2 + side).to(tl.int64) * seq_q + known
    return tl.load(documents + at, mask=(key_range > 0) & (known >= 0), other=other)


@triton.jit(do_not_specialize=NUMBERS)
def row_spans_kernel(
    terms, documents, spans, num_terms, num_rows, seq_q, seq_k, block_q, shift_k, RANGES: tl.constexpr
):  # fmt: skip
    """Of rows of query blocks, `layout.build.Span.of`, but that spans of rows that see nothing ascend too."""
    near_per_list = tl.cdiv(num_rows, ROWS)
    which, row = tl.program_id(0) // near_per_list, tl.program_id(0) % near_per_list * ROWS + tl.arange(0, ROWS)
    term = tl.arange(0, TERMS)
    at, known = terms + (which * num_terms + term) * 5, term < num_terms
    left = tl.load(at, mask=known, other=0)[None, :]
    right = tl.load(at + 1, mask=known, other=0)[None, :]
    key_stop = tl.minimum(tl.load(at + 2, mask=known, other=0)[None, :], seq_k)
    query_stop = tl.load(at + 3, mask=known, other=-(2**30))[None, :]
    behind = seq_k - seq_q
    head = behind + row[:, None] * block_q
    tail = tl.minimum(head + (block_q - 1), seq_k - 1)
    seeing, seeing_tail = tl.minimum(head, query_stop - 1), tl.minimum(tail, query_stop - 1)
    first, first_tail = tl.maximum(head - left, 0), tl.maximum(tail - left, 0)
    stop = tl.minimum(tl.maximum(seeing + (right + 1), 0), key_stop)
    stop_tail = tl.minimum(tl.maximum(seeing_tail + (right + 1), 0), key_stop)
    least = tl.maximum(behind - left, 0)  # the first key of the first query
    if RANGES:
        key_range = tl.load(at + 4, mask=known, other=0)[None, :]
        first = tl.maximum(first, _range_of(documents, key_range, head, behind, seq_q, 0, 0))
        first_tail = tl.maximum(first_tail, _range_of(documents, key_range, tail, behind, seq_q, 0, 0))
        stop = tl.minimum(stop, _range_of(documents, key_range, seeing, behind, seq_q, 1, NONE))
        stop_tail = tl.minimum(stop_tail, _range_of(documents, key_range, seeing_tail, behind, seq_q, 1, NONE))
        least = tl.maximum(least, _range_of(documents, key_range, behind + 0 * key_range, behind, seq_q, 0, 0))
    touched, reached = first >> shift_k, (stop_tail + ((1 << shift_k) - 1)) >> shift_k
    first_full, stop_full = (first_tail + ((1 << shift_k) - 1)) >> shift_k, stop >> shift_k
    # Rows that see nothing are the first ones, whose keys all come before any that is seen, or the last ones.
    gone = seeing < head
    unseen = (stop_tail <= first) | gone
    place = tl.where(gone | (stop_tail > least), tl.maximum(touched, reached), touched)
    touched, reached = tl.where(unseen, place, touched), tl.where(unseen, place, reached)
    cut = seeing_tail < tail
    place = tl.maximum(first_full, stop_full)
    first_full, stop_full = tl.where(cut, place, first_full), tl.where(cut, place, stop_full)
    _store_spans(spans, which, row, term, touched, reached, first_full, stop_full, num_terms, num_rows)


@triton.jit
def _num_up_to(column, row_of, num_rows, inside):
    """How many rows have a number up to that of the column, of numbers that ascend from row to row."""
    low, high = column * 0, column * 0 + num_rows
    size = num_rows
    while size > 0:
        middle = (low + high) // 2
        up_to = tl.load(row_of + middle, mask=inside & (low < high), other=NONE) <= column
        low, high = tl.where(up_to, tl.minimum(middle + 1, high), low), tl.where(up_to, high, middle)
        size = size // 2
    return low


@triton.jit(do_not_specialize=NUMBERS)
def column_spans_kernel(row_spans, spans, num_terms, num_rows, num_others):
    """Of `num_rows` columns of key blocks the runs of rows that touch and fill each, from the spans of all rows."""
    near_per_list = tl.cdiv(num_rows, ROWS)
    which, row = tl.program_id(0) // near_per_list, tl.program_id(0) % near_per_list * ROWS + tl.arange(0, ROWS)
    term = tl.arange(0, TERMS)
    inside = (row[:, None] < num_rows) & (term[None, :] < num_terms)
    column = tl.where(inside, row[:, None], 0)
    at = row_spans + (which.to(tl.int64) * 4 * num_terms + term[None, :]) * num_others + 0 * column
    step = num_terms * num_others
    stop, first = _num_up_to(column, at, num_others, inside), _num_up_to(column, at + step, num_others, inside)
    stop_full = _num_up_to(column, at + 2 * step, num_others, inside)
    first_full = _num_up_to(column, at + 3 * step, num_others, inside)
    first, stop = tl.where(inside, first, 0), tl.where(inside, stop, 0)
    first_full, stop_full = tl.where(inside, first_full, 0), tl.where(inside, stop_full, 0)
    _store_spans(spans, which, row, term, first, stop, first_full, stop_full, num_terms, num_rows)


@triton.jit(do_not_specialize=NUMBERS)
def fill_kernel(
    spans, bases, offsets, splits, indices, rule_ids, work, num_terms, num_rows,
    HAS_RULE_IDS: tl.constexpr,
):  # fmt: skip
    """One row of a list: its offset, its place in the order of work, and its blocks."""
    which, row = tl.program_id(0) // num_rows, tl.program_id(0) % num_rows
    near_per_list = tl.cdiv(num_rows, ROWS)
    counts, near = _parts_of(spans, tl.num_programs(0) // num_rows, num_terms, num_rows)
    neighbourhood = row // ROWS
    # Blocks before this row.
    at_once, of_all = tl.arange(0, SUMS), which * near_per_list + neighbourhood
    start = 0
    for low in range(0, of_all, SUMS):
        start += tl.sum(tl.load(near + 2 * (low + at_once), mask=low + at_once < of_all, other=0), 0)
    own_counts = counts + which.to(tl.int64) * (2 * num_rows)
    num_full, num = tl.load(own_counts + row), tl.load(own_counts + num_rows + row)
    beside = neighbourhood * ROWS + tl.arange(0, ROWS)
    of_beside = tl.load(own_counts + num_rows + beside, mask=beside < num_rows, other=-1)
    start += tl.sum(tl.where(beside < row, of_beside, 0), 0)
    split, stop = start + num_full, start + num
    tl.store(offsets + tl.program_id(0), start)
    tl.store(splits + tl.program_id(0), split)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(offsets + tl.num_programs(0), stop)
    # Rows before this one in the order of work.
    place = tl.sum(((of_beside > num) | ((of_beside == num) & (beside < row))).to(tl.int32), 0)
    most = tl.load(near + 2 * of_all + 1)
    for low in range(0, near_per_list, SUMS):
        other = low + at_once
        of_other = tl.load(near + 2 * (which * near_per_list + other) + 1, mask=other < near_per_list, other=-1)
        ahead = (of_other > most) | ((of_other == most) & (other < neighbourhood))
        place += tl.sum(tl.where(ahead, tl.minimum(num_rows - other * ROWS, ROWS), 0), 0)
    at = work + (which.to(tl.int64) * num_rows + place) * 4
    tl.store(at, row)
    tl.store(at + 1, start)
    tl.store(at + 2, split)
    tl.store(at + 3, stop)
    term = tl.arange(0, TERMS)
    at, known = spans + (which.to(tl.int64) * 4 * num_terms + term) * num_rows + row, term < num_terms
    step = num_terms * num_rows
    first, after = tl.load(at, mask=known, other=0), tl.load(at + step, mask=known, other=0)
    first_full = tl.load(at + 2 * step, mask=known, other=0)
    after_full = tl.load(at + 3 * step, mask=known, other=0)
    base = tl.load(bases + which) - 1
    reached = 0
    for _ in range(num_terms):
        begin = tl.maximum(first, reached)
        run = tl.min(tl.where(after > begin, begin, NONE), 0)
        end = tl.max(tl.where(first <= run, after, 0), 0)
        if run == NONE:
            end = run
        for low in range(run, end, COLUMNS):
            column = low + tl.arange(0, COLUMNS)
            here = column < end
            touches = (column[:, None] >= first[None, :]) & (column[:, None] < after[None, :])
            fills = (column[:, None] >= first_full[None, :]) & (column[:, None] < after_full[None, :])
            full = (tl.max(fills.to(tl.int32), 1) > 0) & here
            partial = here & (full == 0)
            to = tl.where(full, start + tl.cumsum(full.to(tl.int32), 0), split + tl.cumsum(partial.to(tl.int32), 0)) - 1
            tl.store(indices + to, column, mask=here)
            if HAS_RULE_IDS:
                bits = tl.sum(touches.to(tl.int32) << term[None, :], 1)
                tl.store(rule_ids + to, tl.where(full, tl.maximum(base, 0), base + bits), mask=here)
            start += tl.sum(full.to(tl.int32), 0)
            split += tl.sum(partial.to(tl.int32), 0)
        reached = tl.where(run < NONE, end, reached)


@triton.jit(do_not_specialize=["num", "starts_at", "stops_at", "seq_q", "behind"])
def stretches_kernel(table, documents, num, starts_at, stops_at, seq_q, behind):
    """The range of every query, of `num` stretches whose edges, starts and stops stand in a table. A query before the
    first stretch sees nothing."""
    query = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    position = query + behind
    number = _num_up_to(position, table + position * 0, num + 1, query < seq_q)
    number = tl.minimum(tl.maximum(number - 1, 0), num - 1)
    inside = query < seq_q
    start = tl.load(table + starts_at + number, mask=inside & (position >= 0), other=0)
    stop = tl.load(table + stops_at + number, mask=inside & (position >= 0), other=0)
    tl.store(documents + query, start, mask=inside)
    tl.store(documents + seq_q + query, stop, mask=inside)


class Spans(NamedTuple):
    """The spans of some rows, or columns, of every list, and what comes of them.

    Attributes:
        numbers: int32, one after the other: spans [lists, 4, terms, rows], first and stop of what is touched and of
            what is filled; counts [lists, 2, rows], full blocks and all; and of each neighbourhood [lists,
            neighbourhoods, 2] all blocks of its rows, and the most of one.
    """

    numbers: Tensor
    num_lists: int
    num_terms: int
    num_rows: int

    @classmethod
    def empty(cls, num_lists: int, num_terms: int, num_rows: int, device: torch.device) -> Spans:
        size = num_lists * (num_rows * (4 * num_terms + 2) + 2 * -(-num_rows // NEAR))
        return cls(torch.empty(size, dtype=torch.int32, device=device), num_lists, num_terms, num_rows)

    @property
    def num_near(self) -> int:
        """Neighbourhoods of all lists."""
        return self.num_lists * -(-self.num_rows // NEAR)

    def total(self) -> int:
        """Blocks of all lists. It waits for the device."""
        return int(self.numbers[-2 * self.num_near :: 2].sum())


def row_spans(
    terms: Tensor, documents: Tensor, lengths: tuple[int, int], blocks: tuple[int, int], num_rows: int
) -> Spans:
    """Of every row of query blocks.

    Args:
        terms: int32 [lists, terms, 5], the interval of each term, whose range is one of `documents`.
    """
    num_lists, num_terms = terms.shape[:2]
    found = Spans.empty(num_lists, num_terms, num_rows, terms.device)
    launcher.launch(
        row_spans_kernel, (found.num_near,), (terms, documents, found.numbers),
        (num_terms, num_rows, *lengths, blocks[0], blocks[1].bit_length() - 1), RANGES=documents.numel() > 0,
    )  # fmt: skip
    return found


def column_spans(of_rows: Spans, num_columns: int) -> Spans:
    """Of every column of key blocks, from those of all rows."""
    found = Spans.empty(of_rows.num_lists, of_rows.num_terms, num_columns, of_rows.numbers.device)
    launcher.launch(
        column_spans_kernel, (found.num_near,), (of_rows.numbers, found.numbers),
        (found.num_terms, num_columns, of_rows.num_rows),
    )  # fmt: skip
    return found


def filled(found: Spans, bases: Tensor | None, capacity: int) -> tuple[BlockList, Tensor]:
    """The lists and the order of work.

    Args:
        bases: int32 [lists], the first rule of each list; None where all blocks share rule 0.
        capacity: places for blocks, at least as many as there are.
    """
    rows = found.num_lists * found.num_rows
    offsets, splits, indices, rule_ids, work = (
        torch.empty(size, dtype=torch.int32, device=found.numbers.device)
        for size in (rows + 1, rows, capacity, 0 if bases is None else capacity, (rows, 4))
    )
    launcher.launch(
        fill_kernel, (rows,),
        (found.numbers, splits if bases is None else bases, offsets, splits, indices, rule_ids, work),
        (found.num_terms, found.num_rows), HAS_RULE_IDS=bases is not None, num_warps=1,
    )  # fmt: skip
    return BlockList(offsets, splits, indices, rule_ids), work


def of_stretches(table: Tensor, num: int, starts_at: int, stops_at: int, behind: int, documents: Tensor) -> None:
    """The range of every query into `documents` [2, seq_q].

    Args:
        table: int32: the `num + 1` edges of stretches, and their starts and stops from these places on.
        behind: the position of the first query.
    """
    seq_q = documents.shape[1]
    launcher.launch(
        stretches_kernel, (-(-seq_q // TOKENS.value),), (table, documents), (num, starts_at, stops_at, seq_q, behind)
    )
