"""From a pattern to its blocks, in time and memory proportional to the blocks found.

A pattern is first written as a union of terms (`layout.terms`). Every term then lists its candidate blocks for a few
rows at a time; lists are intersected and joined by sorting. No step looks at pairs of blocks that no rule names.

Everything about whole rows, above all how many blocks each has, is computed on the host, and the blocks are listed on
the device. The host synchronises with the device only where the number of blocks depends on what was listed: in unions
and intersections of rules, and in dilated blocks that may have fewer candidates than their budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..patterns import RangePattern
from ..patterns.blocks import BlockPattern, ceil_div
from ..patterns.tokens import EVERYTHING, Interval
from .block_rules import fine_blocks, width_of
from .lists import HOST, BlockList, send
from .ranges import bounds_of
from .runs import edges_of, ragged, rows_of
from .terms import Term

# Candidate blocks handled at a time; bounds the temporary memory of a build.
CHUNK = 1 << 19


@dataclass(frozen=True)
class Found:
    """Active blocks of a run of rows: `row` is 2r for a full block of row r and 2r + 1 for a partial one.

    Where the blocks stand in this order, `count` says it instead, on the host: for each row how many are full and how
    many partial, which may be several runs of ascending columns; one number if all rows have as many, and full ones.
    And `edges`, on the device, if it was made: where each run starts.
    """

    column: Tensor
    row: Tensor | None = None
    count: Tensor | int | None = None
    edges: Tensor | None = None

    def listed(self) -> BlockList:
        """Of blocks in their order."""
        edges, device = self.edges, self.column.device
        if isinstance(self.count, int):
            edges = torch.arange(0, len(self.column) + 1, self.count, dtype=torch.int32, device=device)
            return BlockList.placed(self.column, edges, 1)
        assert self.count is not None
        if edges is None:
            (edges,) = send((edges_of(self.count.flatten()),), device)
        return BlockList.placed(self.column, edges, self.count.shape[1])

    def rows(self) -> Tensor:
        if self.count is None:
            assert self.row is not None
            return self.row
        if isinstance(self.count, int):
            return rows_of(self.count, self.column) * 2
        full, partial = self.count[:, 0].long(), self.count[:, 1:].sum(1)
        return rows_of(torch.stack((full, partial), dim=1).flatten(), self.column)


def find_blocks(
    terms: list[Term],
    intervals: list[Interval],
    lengths: tuple[int, int],
    blocks: tuple[int, int],
    device: torch.device,
    *,
    named: int | None = None,
    query_blocks: Tensor | None = None,
) -> Iterator[BlockList]:
    """The lists of a union of terms, a few rows at a time, in order.

    Args:
        named: the number of the first of their rules; None if they have one rule, which needs no ids.
        query_blocks: the rows that are asked for, ascending; all by default.
    """
    seq_k, num_columns = lengths[1], ceil_div(lengths[1], blocks[1])
    head = first_positions(lengths, blocks[0], query_blocks)
    spans = [span_of(term, head, seq_k, blocks) for term in terms]
    for start, stop in row_chunks(terms, spans, len(head), seq_k, blocks):
        found = [
            blocks_of(term, None if span is None else span.rows(start, stop), head[start:stop], lengths, blocks, device)
            for term, span in zip(terms, spans, strict=True)
        ]
        if len(found) == 1 and named is None and found[0].count is not None:
            yield found[0].listed()
            continue
        keys, states = [], []
        for term, each in zip(terms, found, strict=True):
            row = each.rows()
            keys.append(row // 2 * num_columns + each.column)
            states.append(row % 2 << intervals.index(term.interval))
        key, state = torch.cat(keys), torch.cat(states)
        if len(terms) > 1:
            key, state = _union(key, state, len(intervals))
        rule_ids = None if named is None else state + (named - 1)
        yield BlockList.pack(key // num_columns, key % num_columns, state > 0, rule_ids, stop - start)


def first_positions(lengths: tuple[int, int], block_q: int, query_blocks: Tensor | None) -> Tensor:
    """int32 on the host: the position of the first query of each row."""
    seq_q, seq_k = lengths
    if query_blocks is None:
        return torch.arange(seq_k - seq_q, seq_k, block_q, dtype=torch.int32, device=HOST)
    return (query_blocks.cpu() * block_q + (seq_k - seq_q)).int()


def span_of(term: Term, head: Tensor, seq_k: int, blocks: tuple[int, int]) -> Span | None:
    """None where a term is its block rules and nothing else: no token rule, and every block has all its keys."""
    sizes = [rule.block_size for rule in term.rules]
    if sizes and term.interval == EVERYTHING and not term.ranges and not any(seq_k % size for size in sizes):
        return None
    return Span.of(term.interval, head, seq_k, blocks, term.ranges)


def blocks_of(
    term: Term,
    span: Span | None,
    head: Tensor,
    lengths: tuple[int, int],
    blocks: tuple[int, int],
    device: torch.device,
) -> Found:
    """The blocks of a term without grids in the rows of a span."""
    if term.rules or span is None:
        found = _of_rules(term.rules, span, head, lengths, blocks, device)
    else:
        found = _of_span(span, device)
    return _seen(found, term, head, lengths[1], blocks) if term.may_skip else found


def _union(key: Tensor, state: Tensor, num_intervals: int) -> tuple[Tensor, Tensor]:
    """One entry a block: state 0, full, if any term fills it, else the set of intervals that reach it."""
    key, inverse = torch.unique(key, return_inverse=True)
    full = torch.zeros_like(key).index_add_(0, inverse, (state == 0).long())
    bits = torch.zeros_like(key)
    for i in range(num_intervals):
        reached = torch.zeros_like(key).index_add_(0, inverse, (state >> i) & 1)
        bits |= (reached > 0).long() << i
    return key, torch.where(full > 0, 0, bits)


@dataclass(frozen=True)
class Span:
    """For every row of blocks: the columns that an interval touches, from `first` to before `stop`, and those that it
    fills, from `first_full` to before `stop_full`; none where that is not above the first.

    The first key that a query sees never moves back from one query to the next, nor does the last: so the touched
    columns are one run, and the first and last query of a block decide. A block that reaches beyond the keys is never
    full, so that full blocks need no masking at all.
    """

    first: Tensor
    stop: Tensor
    first_full: Tensor
    stop_full: Tensor

    @classmethod
    def of(
        cls,
        interval: Interval,
        head: Tensor,
        seq_k: int,
        blocks: tuple[int, int],
        ranges: tuple[RangePattern, ...] = (),
        tail: Tensor | None = None,
    ) -> Span:
        """Of rows whose first queries have the positions `head`, inside `ranges` of keys; and the last ones `tail`,
        where that is not the end of the block."""
        block_q, block_k = blocks
        left, right, key_stop, query_stop, _ = interval
        head = head.int()  # half the work of eight bytes: a position and a bound together are below 2³¹ − 1
        # First and last query together, which halves the operators: the queries, those of them that see any key, the
        # first keys that they see, and the keys behind the last ones.
        tail = (head + (block_q - 1)).clamp_(max=seq_k - 1) if tail is None else tail
        ends = torch.stack((head, tail))
        seeing = ends if query_stop >= seq_k else ends.clamp(max=query_stop - 1)
        first, stop = (ends - left).clamp_(min=0), (seeing + (right + 1)).clamp_(min=0, max=min(key_stop, seq_k))
        if ranges:
            first = torch.maximum(first, bounds_of(ranges, ends)[0])
            stop = torch.minimum(stop, bounds_of(ranges, seeing)[1])
        columns = torch.cat((first, stop))
        columns[1::2].add_(block_k - 1)
        columns >>= block_k.bit_length() - 1  # a power of two, and dividing costs a CPU four times as much
        touched, first_full, stop_full, behind = columns.unbind()
        if min(key_stop, query_stop) < seq_k or min(left, right) < 0 or ranges:  # then some may see nothing
            stop_full = stop_full.masked_fill(seeing[1] < ends[1], 0)
            behind = torch.where((stop[1] <= first[0]) | (seeing[0] < head), touched, behind)
        return cls(touched, behind, first_full, stop_full)

    def rows(self, start: int, stop: int) -> Span:
        if (start, stop) == (0, len(self.first)):
            return self
        return Span(*(x[start:stop] for x in self.tensors()))

    def tensors(self) -> list[Tensor]:
        return [self.first, self.stop, self.first_full, self.stop_full]


def row_chunks(
    terms: Sequence[Term],
    spans: Sequence[Span | None],
    num_rows: int,
    seq_k: int,
    blocks: tuple[int, int],
    more: Tensor | None = None,
) -> list[tuple[int, int]]:
    """Runs of rows with about CHUNK candidates each; a single row may have more. `more`: of each row, besides."""
    block_q, block_k = blocks
    width = sum(
        width_of(rule, ceil_div(seq_k, rule.block_size)) * (rule.block_size // block_k)
        for term in terms for rule in term.rules
    )  # fmt: skip
    alone = [(term.interval, span) for term, span in zip(terms, spans, strict=True) if span and not term.rules]
    touched = (min(ceil_div(seq_k, block_k), (i.left + i.right + block_q) // block_k + 2) for i, _ in alone)
    if num_rows * (width + sum(touched)) <= CHUNK and more is None:  # an upper bound: no need to count
        return [(0, num_rows)]
    counts = torch.full((num_rows,), width, device=HOST)
    for _, span in alone:
        counts += span.stop - span.first
    counts = counts if more is None else counts + more
    total = counts.cumsum(0)
    marks = torch.arange(CHUNK, int(total[-1]) + CHUNK, CHUNK, device=HOST)
    edges = sorted({0, *(torch.searchsorted(total, marks, right=True)).tolist(), num_rows})
    return list(pairwise(edges))


def _of_span(span: Span, device: torch.device) -> Found:
    """The blocks of an interval: in each row the full ones, then those before and those behind them."""
    first_full = torch.minimum(span.first_full, span.stop)
    stop_full = torch.maximum(span.stop_full, first_full)
    first = torch.stack((first_full, span.first, stop_full), dim=1)
    count = torch.stack((stop_full, first_full, span.stop), dim=1).sub_(first)
    edges, column = ragged(first.flatten(), count.flatten(), device)
    return Found(column, count=count, edges=edges)


def _of_rules(
    rules: tuple[BlockPattern, ...],
    span: Span | None,
    head: Tensor,
    lengths: tuple[int, int],
    blocks: tuple[int, int],
    device: torch.device,
) -> Found:
    """The blocks of these rows (see `Span.of`) that every rule names, and the span, if there is one, touches."""
    lists = [fine_blocks(rule, head, lengths, blocks, device) for rule in rules]
    if span is None and len(lists) == 1:
        column, count = lists[0]
        return Found(column, count=count if isinstance(count, int) else count[:, None])
    num_columns = max(ceil_div(lengths[1], rule.block_size) * (rule.block_size // blocks[1]) for rule in rules)
    key = _all_of([rows_of(count, column) * num_columns + column for column, count in lists])
    row, column = key // num_columns, key % num_columns
    if span is None:
        return Found(column, row * 2)
    first, stop, first_full, stop_full = send(span.tensors(), device)
    if bool((span.first > 0).any() | (span.stop < num_columns).any()):
        inside = (column >= first[row]) & (column < stop[row])
        row, column = row[inside], column[inside]
    partial = (column < first_full[row]) | (column >= stop_full[row])
    return Found(column, row * 2 + partial)


def _seen(found: Found, term: Term, head: Tensor, seq_k: int, blocks: tuple[int, int]) -> Found:
    """Of the blocks between the first and the last key of a row those that some query of it sees."""
    state, column = found.rows(), found.column.long()
    position = head[:, None] + torch.arange(blocks[0], dtype=torch.int32, device=HOST)
    first, stop = bounds_of(term.ranges, position.clamp_(max=seq_k - 1))
    first = torch.maximum(first, position - term.interval.left)
    stop = torch.minimum(stop, (position + (term.interval.right + 1)).clamp(max=min(term.interval.key_stop, seq_k)))
    stop = torch.where(position < term.interval.query_stop, stop, 0)
    first, stop = send((first, stop), column.device)
    at_once = max(1, CHUNK // blocks[0])
    kept = [
        ((first[row] < (here + blocks[1])[:, None]) & (stop[row] > torch.maximum(first[row], here[:, None]))).any(1)
        for row, here in zip((state // 2).split(at_once), (column * blocks[1]).split(at_once), strict=True)
    ]
    seen = torch.cat(kept) if kept else column.new_empty(0, dtype=torch.bool)
    return Found(found.column[seen], state[seen])


def _all_of(lists: list[Tensor]) -> Tensor:
    """The keys that stand in every list, sorted; each list is sorted and holds a key once."""
    if len(lists) == 1:
        return lists[0]
    key, count = torch.unique(torch.cat(lists), return_counts=True)
    return key[count == len(lists)]
