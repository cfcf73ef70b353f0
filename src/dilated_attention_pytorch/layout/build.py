"""From a pattern to its blocks, in time and memory proportional to the blocks found.

A pattern is first written as a union of terms, each one token interval and any number of block rules that must all
hold. Every term then lists its candidate blocks for a few rows at a time; lists are intersected and joined by sorting.
No step looks at pairs of blocks that no rule names.
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
    Blocks,
    DilatedBlocks,
    Documents,
    Full,
    GlobalBlocks,
    GlobalTokens,
    LocalBlocks,
    Or,
    Pattern,
    RandomBlocks,
    SlidingWindow,
)
from ..patterns.blocks import MASK32, BlockPattern, ceil_div, mix32
from ..patterns.tokens import EVERYTHING, UNBOUNDED, Interval
from .rules import NOTHING, key_bounds, moved, num_tokens

# Candidate blocks handled at a time; bounds the temporary memory of a build.
CHUNK = 1 << 18

# A block's rule is the set of intervals that reach it, so the table has a row for every set.
MAX_INTERVALS = 6

# An intersection of unions has a term for every choice of one part of each.
MAX_TERMS = 64


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


def documents_of(pattern: Pattern) -> set[Documents]:
    """The packings that a pattern speaks of."""
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
    """Active blocks of a run of rows, sorted by row (counted within the run) and column. Rule −1 is a full block."""

    row: Tensor
    column: Tensor
    rule: Tensor
    num_rows: int


def find_blocks(
    terms: list[Term],
    intervals: list[Interval],
    documents: Tensor,
    lengths: tuple[int, int],
    blocks: tuple[int, int],
    query_blocks: Tensor | None = None,
) -> Iterator[Found]:
    """The active blocks of a union of terms, a few rows at a time, in order.

    Args:
        documents: those of the queries that are asked for; says on which device.
        query_blocks: the rows that are asked for, ascending; all by default. They are counted as they come.
    """
    (seq_q, seq_k), (block_q, block_k), device = lengths, blocks, documents.device
    num_columns = ceil_div(seq_k, block_k)
    own_q = seq_q if query_blocks is None else num_tokens(query_blocks, block_q, seq_q)
    place = torch.arange(ceil_div(own_q, block_q), device=device)
    asked = place if query_blocks is None else query_blocks
    query_by = (asked - place) * block_q + (own_q - seq_q)
    tables = [torch.tensor(term.interval, device=device) for term in terms]
    spans = [
        Span.of(moved(table, query_by, torch.zeros_like(query_by)), documents, (own_q, seq_k), blocks)
        for table in tables
    ]
    counts = torch.zeros(len(asked), dtype=torch.int64, device=device)
    for term, span in zip(terms, spans, strict=True):
        for rule in term.rules:
            counts += _width(rule, ceil_div(seq_k, rule.block_size)) * (rule.block_size // block_k)
        if not term.rules:
            counts += span.count
    for start, stop in _row_chunks(counts):
        keys, states = [], []
        for term, span in zip(terms, spans, strict=True):
            rows = torch.arange(start, stop, device=device)
            if term.rules:
                key = _all_of([_fine_keys(rule, asked[start:stop], lengths, blocks) for rule in term.rules])
                row, column = start + key // num_columns, key % num_columns
                inside = (column >= span.first[row]) & (column <= span.last[row])
                row, column = row[inside], column[inside]
            else:
                row, column = ragged(rows, span.first[start:stop], span.count[start:stop])
            full = (column >= span.first_full[row]) & (column <= span.last_full[row])
            keys.append(row * num_columns + column)
            states.append(torch.where(full, 0, 1 << intervals.index(term.interval)))
        key, state = torch.cat(keys), torch.cat(states)
        if len(terms) > 1:
            key, state = _union(key, state, len(intervals))
        yield Found(key // num_columns - start, key % num_columns, state - 1, stop - start)


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
    """For every row of blocks: the columns that an interval touches, and those that it fills; first > last is none.

    The first key that a query sees never moves back from one query to the next, nor does the last: so the touched
    columns are one run, and the first and last query of a block decide. A block that reaches beyond the keys is never
    full, so that full blocks need no masking at all.
    """

    first: Tensor
    last: Tensor
    first_full: Tensor
    last_full: Tensor

    @property
    def count(self) -> Tensor:
        return (self.last - self.first + 1).clamp(min=0)

    @classmethod
    def of(cls, interval: Tensor, documents: Tensor, lengths: tuple[int, int], blocks: tuple[int, int]) -> Span:
        """Of an interval [5], or of one for each row [rows, 5]."""
        (seq_q, seq_k), (block_q, block_k) = lengths, blocks
        head = torch.arange(0, seq_q, block_q, device=documents.device)
        tail = (head + (block_q - 1)).clamp(max=seq_q - 1)
        last_seeing = torch.minimum(tail, interval[..., 3] - 1 - (seq_k - seq_q))
        head_first, head_last = key_bounds(interval, head, seq_q, seq_k, documents)
        tail_first, _ = key_bounds(interval, tail, seq_q, seq_k, documents)
        _, reach = key_bounds(interval, last_seeing.clamp(min=0), seq_q, seq_k, documents)
        touched = (last_seeing >= head) & (reach >= head_first)
        filled = last_seeing == tail
        return cls(
            first=torch.where(touched, head_first // block_k, 0),
            last=torch.where(touched, reach // block_k, -1),
            first_full=torch.where(filled, (tail_first + block_k - 1) // block_k, 1),
            last_full=torch.where(filled, (head_last + 1) // block_k - 1, 0),
        )


def _row_chunks(counts: Tensor) -> list[tuple[int, int]]:
    """Runs of rows with about CHUNK candidates each; a single row may have more."""
    total = counts.cumsum(0)
    marks = torch.arange(CHUNK, int(total[-1]) + CHUNK, CHUNK, device=counts.device)
    edges = sorted({0, *(torch.searchsorted(total, marks, right=True)).tolist(), len(counts)})
    return list(pairwise(edges))


def ragged(rows: Tensor, first: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """For each row the columns first, first + 1, … (`count` of them)."""
    row = torch.repeat_interleave(rows, count)
    begin = torch.repeat_interleave(first - (count.cumsum(0) - count), count)
    return row, begin + torch.arange(len(row), device=rows.device)


def _all_of(lists: list[Tensor]) -> Tensor:
    """The keys that stand in every list, sorted; each list is sorted and holds a key once."""
    if len(lists) == 1:
        return lists[0]
    key, count = torch.unique(torch.cat(lists), return_counts=True)
    return key[count == len(lists)]


def _fine_keys(rule: BlockPattern, rows: Tensor, lengths: tuple[int, int], blocks: tuple[int, int]) -> Tensor:
    """The blocks of a rule in these rows, as place of the row · columns + column of the layout's own grid; sorted."""
    (seq_q, seq_k), (block_q, block_k) = lengths, blocks
    num_columns, fine = ceil_div(seq_k, block_k), rule.block_size // block_k
    coarse = rows * block_q // rule.block_size + rule.shift(seq_q, seq_k)
    which, column = _key_blocks(rule, coarse, ceil_div(seq_k, rule.block_size))
    column = column[:, None] * fine + torch.arange(fine, device=rows.device)
    key = which[:, None] * num_columns + column
    return key[column < num_columns]


def _select(table: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Row numbers and values of the kept places of a table, in order."""
    return keep.nonzero()[:, 0], table[keep]


@singledispatch
def _key_blocks(rule: BlockPattern, rows: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    """`rule.key_blocks` for many rows: index into `rows` and key block, sorted by both."""
    raise TypeError(f"no layout can be built from a block rule of type {type(rule).__name__}")


@singledispatch
def _width(rule: BlockPattern, num_blocks: int) -> int:
    """At most how many candidates a row of the rule looks at."""
    raise TypeError(f"no layout can be built from a block rule of type {type(rule).__name__}")


@_width.register
def _(rule: LocalBlocks, num_blocks: int) -> int:
    return min(sum(rule.reach) + 1, ceil_div(num_blocks, rule.stride))


@_key_blocks.register
def _(rule: LocalBlocks, rows: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    back, forth = rule.reach
    first = (-(rows // rule.stride)).clamp(min=-back)
    last = ((num_blocks - 1 - rows) // rule.stride).clamp(max=forth)
    which, step = ragged(torch.arange(len(rows), device=rows.device), first, (last - first + 1).clamp(min=0))
    return which, rows[which] + step * rule.stride


@_width.register
def _(rule: GlobalBlocks, num_blocks: int) -> int:
    return min(num_blocks, ceil_div(rule.tokens, rule.block_size))


@_key_blocks.register
def _(rule: GlobalBlocks, rows: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    column = torch.arange(_width(rule, num_blocks), device=rows.device).expand(len(rows), -1)
    return _select(column, torch.ones_like(column, dtype=torch.bool))


@_width.register
def _(rule: RandomBlocks, num_blocks: int) -> int:
    return min(rule.blocks_per_row, num_blocks)


@_key_blocks.register
def _(rule: RandomBlocks, rows: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    count = _width(rule, num_blocks)
    part = torch.arange(count, device=rows.device)
    start, stop = part * num_blocks // count, (part + 1) * num_blocks // count
    column = start + mix32(mix32(mix32(rule.seed) ^ (rows[:, None] & MASK32)) ^ part) % (stop - start)
    return _select(column, torch.ones_like(column, dtype=torch.bool))


@_width.register
def _(rule: Blocks, num_blocks: int) -> int:
    return ceil_div(len(rule.pairs), max(1, num_blocks))


@_key_blocks.register
def _(rule: Blocks, rows: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    row, column = torch.tensor(rule.pairs, dtype=torch.int64, device=rows.device).reshape(-1, 2).T.contiguous()
    first, stop = torch.searchsorted(row, rows), torch.searchsorted(row, rows, right=True)
    which, place = ragged(torch.arange(len(rows), device=rows.device), first, stop - first)
    inside = column[place] < num_blocks
    return which[inside], column[place][inside]


@_width.register
def _(rule: DilatedBlocks, num_blocks: int) -> int:
    return len(rule.branches) * rule.turns(num_blocks)


@_key_blocks.register
def _(rule: DilatedBlocks, rows: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    row = rows[:, None]
    turn = torch.arange(rule.turns(num_blocks), device=rows.device)
    offers = []
    for segment, dilation in rule.branches:
        start = row - row % segment
        back = (row - start) // dilation
        end = (start + segment).clamp(max=num_blocks)
        forth = torch.zeros_like(back) if rule.causal else (end - 1 - row) // dilation
        both = torch.minimum(back, forth)
        alternate = torch.where(turn % 2 == 1, -((turn + 1) // 2), turn // 2)
        onward = (turn - both) * torch.where(back > forth, -1, 1)
        step = torch.where(turn <= 2 * both, alternate, onward)
        offered = (turn <= back + forth) & (row >= 0)
        offers.append(torch.where(offered, row + step * dilation, num_blocks))
    offer = torch.stack(offers, -1).flatten(1)
    # Drop what an earlier offer of the row named already, then keep the first `budget` of the rest.
    order = offer.sort(dim=1, stable=True)
    repeated = torch.zeros_like(offer, dtype=torch.bool)
    repeated[:, 1:] = order.values[:, 1:] == order.values[:, :-1]
    fresh = (offer < num_blocks) & ~torch.zeros_like(repeated).scatter(1, order.indices, repeated)
    kept = fresh & (fresh.cumsum(1) <= rule.budget(num_blocks))
    column = torch.where(kept, offer, num_blocks).sort(dim=1).values
    return _select(column, column < num_blocks)
