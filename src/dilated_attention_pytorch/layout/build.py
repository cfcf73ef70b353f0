"""From a pattern to its blocks, in time and memory proportional to the blocks found.

A pattern is first written as a union of terms, each one token interval and any number of block rules that must all
hold. Every term then lists its candidate blocks for a few rows at a time; lists are intersected and joined by sorting.
No step looks at pairs of blocks that no rule names.

Everything about whole rows, above all how many blocks each has, is computed on the host, and the blocks are listed on
the device. The host synchronises with the device only where the number of blocks depends on what was listed: in unions
and intersections of rules, and in dilated blocks that may have fewer candidates than their budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import singledispatch
from itertools import pairwise, product
from math import prod

import torch
from torch import Tensor

from ..patterns import (
    And,
    Documents,
    Full,
    GlobalTokens,
    Or,
    Pattern,
    PerHead,
    SlidingWindow,
)
from ..patterns.blocks import BlockPattern, ceil_div
from ..patterns.tokens import EVERYTHING, UNBOUNDED, Interval
from .block_rules import fine_blocks, width_of
from .lists import HOST, BlockList, send
from .rules import NOTHING, document_bounds
from .runs import edges_of, ragged, rows_of

# Candidate blocks handled at a time; bounds the temporary memory of a build.
CHUNK = 1 << 19

# A block's rule is the set of intervals that reach it, so the table has a row for every set.
MAX_INTERVALS = 6

# An intersection of unions has a term for every choice of one part of each.
MAX_TERMS = 64


# Intervals that are a whole pattern, and its name.
WHOLE = {EVERYTHING: "full", EVERYTHING & Interval(right=0): "causal"}


@dataclass(frozen=True)
class Term:
    """Allowed where the interval allows and every block rule does."""

    interval: Interval
    rules: tuple[BlockPattern, ...] = ()


@singledispatch
def terms_of(pattern: Pattern) -> list[Term]:
    """The pattern as a union of terms."""
    raise TypeError(f"no layout can be built from a pattern of type {type(pattern).__name__}")


@terms_of.register
def _(pattern: Full) -> list[Term]:
    return [Term(EVERYTHING)]


@terms_of.register
def _(pattern: SlidingWindow) -> list[Term]:
    left, right = (UNBOUNDED if bound is None else min(bound, UNBOUNDED) for bound in (pattern.left, pattern.right))
    return [Term(Interval(left, right))]


@terms_of.register
def _(pattern: GlobalTokens) -> list[Term]:
    count = min(pattern.count, UNBOUNDED)
    rows = [Term(Interval(query_stop=count))] if pattern.queries else []
    return [Term(Interval(key_stop=count)), *rows]


@terms_of.register
def _(pattern: Documents) -> list[Term]:
    return [Term(Interval(same_document=1))]


@terms_of.register
def _(pattern: BlockPattern) -> list[Term]:
    return [Term(EVERYTHING, (pattern,))]


@terms_of.register
def _(pattern: Or) -> list[Term]:
    return list(dict.fromkeys(term for part in pattern.parts for term in terms_of(part)))


@terms_of.register
def _(pattern: And) -> list[Term]:
    joined = []
    parts = [terms_of(part) for part in pattern.parts]
    if prod(map(len, parts)) > MAX_TERMS:
        raise ValueError(f"a pattern may be a union of at most {MAX_TERMS} parts once written out, got {pattern}")
    for choice in product(*parts):
        interval = EVERYTHING
        for term in choice:
            interval = interval & term.interval
        joined.append(Term(interval, tuple(dict.fromkeys(rule for term in choice for rule in term.rules))))
    return list(dict.fromkeys(joined))


def kind_of(pattern: Pattern) -> str | None:
    """`BlockLayout.kind`: "full" or "causal" if the pattern is that for all heads."""
    heads = set(pattern.patterns) if isinstance(pattern, PerHead) else {pattern}
    terms = terms_of(next(iter(heads)))
    alone = len(heads) == 1 and len(terms) == 1 and not terms[0].rules
    return WHOLE.get(terms[0].interval) if alone else None


def documents_of(pattern: Pattern) -> set[Documents]:
    """The different `Documents` in a pattern."""
    if isinstance(pattern, Documents):
        return {pattern}
    parts = getattr(pattern, "parts", ()) or getattr(pattern, "patterns", ())
    return set().union(*(documents_of(part) for part in parts))


def rule_table(intervals: list[Interval]) -> list[list[Interval]]:
    """Every set of intervals as one rule: number `bits − 1` holds the intervals whose bit is set."""
    return [
        [interval if bits >> i & 1 else NOTHING for i, interval in enumerate(intervals)]
        for bits in range(1, 1 << len(intervals))
    ]


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
    starts: tuple[int, ...] = (),
    query_blocks: Tensor | None = None,
) -> Iterator[BlockList]:
    """The lists of a union of terms, a few rows at a time, in order.

    Args:
        named: the number of the first of their rules; None if they have one rule, which needs no ids.
        starts: of the documents, if a term depends on them.
        query_blocks: the rows that are asked for, ascending; all by default.
    """
    (seq_q, seq_k), (block_q, block_k) = lengths, blocks
    num_columns = ceil_div(seq_k, block_k)
    if query_blocks is None:
        head = torch.arange(seq_k - seq_q, seq_k, block_q, dtype=torch.int32, device=HOST)
    else:
        head = (query_blocks.cpu() * block_q + (seq_k - seq_q)).int()
    spans = [None if _whole(term, seq_k) else Span.of(term.interval, head, seq_k, blocks, starts) for term in terms]
    for start, stop in _row_chunks(terms, spans, len(head), seq_k, blocks):
        found = []
        for term, span in zip(terms, spans, strict=True):
            here = None if span is None else span.rows(start, stop)
            if term.rules or here is None:
                found.append(_of_rules(term.rules, here, head[start:stop], lengths, blocks, device))
            else:
                found.append(_of_span(here, device))
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
        cls, interval: Interval, head: Tensor, seq_k: int, blocks: tuple[int, int], starts: tuple[int, ...] = ()
    ) -> Span:
        """Of rows whose first queries have the positions `head`, where documents start at `starts`."""
        block_q, block_k = blocks
        left, right, key_stop, query_stop, same_document = interval
        head = head.int()  # half the work of eight bytes: a position and a bound together are below 2³¹ − 1
        # First and last query together, which halves the operators: the queries, those of them that see any key, the
        # first keys that they see, and the keys behind the last ones.
        ends = torch.stack((head, (head + (block_q - 1)).clamp_(max=seq_k - 1)))
        seeing = ends if query_stop >= seq_k else ends.clamp(max=query_stop - 1)
        first, stop = (ends - left).clamp_(min=0), (seeing + (right + 1)).clamp_(min=0, max=min(key_stop, seq_k))
        if same_document:
            first = torch.maximum(first, document_bounds(starts, ends)[0])
            stop = torch.minimum(stop, document_bounds(starts, seeing)[1])
        columns = torch.cat((first, stop))
        columns[1::2].add_(block_k - 1)
        columns >>= block_k.bit_length() - 1  # a power of two, and dividing costs a CPU four times as much
        touched, first_full, stop_full, behind = columns.unbind()
        if min(key_stop, query_stop) < seq_k:  # then some may see nothing
            stop_full = stop_full.masked_fill(seeing[1] < ends[1], 0)
            behind = torch.where((stop[1] <= first[0]) | (seeing[0] < head), touched, behind)
        return cls(touched, behind, first_full, stop_full)

    def rows(self, start: int, stop: int) -> Span:
        if (start, stop) == (0, len(self.first)):
            return self
        return Span(*(x[start:stop] for x in self.tensors()))

    def tensors(self) -> list[Tensor]:
        return [self.first, self.stop, self.first_full, self.stop_full]


def _whole(term: Term, seq_k: int) -> bool:
    """Whether a term is its block rules and nothing else: no token rule, and every block has all its keys."""
    sizes = [rule.block_size for rule in term.rules]
    return bool(sizes) and term.interval == EVERYTHING and not any(seq_k % size for size in sizes)


def _row_chunks(
    terms: list[Term], spans: list[Span | None], num_rows: int, seq_k: int, blocks: tuple[int, int]
) -> list[tuple[int, int]]:
    """Runs of rows with about CHUNK candidates each; a single row may have more."""
    block_q, block_k = blocks
    width = sum(
        width_of(rule, ceil_div(seq_k, rule.block_size)) * (rule.block_size // block_k)
        for term in terms for rule in term.rules
    )  # fmt: skip
    alone = [(term.interval, span) for term, span in zip(terms, spans, strict=True) if span and not term.rules]
    touched = (min(ceil_div(seq_k, block_k), (i.left + i.right + block_q) // block_k + 2) for i, _ in alone)
    if num_rows * (width + sum(touched)) <= CHUNK:  # an upper bound: no need to count
        return [(0, num_rows)]
    counts = torch.full((num_rows,), width, device=HOST)
    for _, span in alone:
        counts += span.stop - span.first
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


def _all_of(lists: list[Tensor]) -> Tensor:
    """The keys that stand in every list, sorted; each list is sorted and holds a key once."""
    if len(lists) == 1:
        return lists[0]
    key, count = torch.unique(torch.cat(lists), return_counts=True)
    return key[count == len(lists)]
