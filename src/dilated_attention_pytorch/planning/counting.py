"""The size of a layout's lists without building them: active blocks are counted row by row in plain integers.

Of patterns of a grid some rows are built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, gcd, prod

import torch

from ..layout.bitmaps import UniqueBitmaps
from ..layout.branches import cheapest_blocks, kind_of_branches
from ..layout.build import CHUNK
from ..layout.eager import plain_cache
from ..layout.grid import HEAVY
from ..layout.lists import HOST
from ..layout.pairs import find_pairs
from ..layout.size import ListSize
from ..layout.terms import Term, check_grids, kind_of, numbered, terms_of
from ..patterns import Branches, Pattern, PerHead
from ..patterns.blocks import BlockPattern, ceil_div, mix32
from ..patterns.ranges import QueriesBetween
from ..patterns.tokens import EVERYTHING

# Rows that are counted in each stretch of rows where the rules do not change; longer stretches are sampled.
SAMPLED = 64
# The same for patterns of a grid, whose rows are built together.
ASKED = 1024
# Fewer, but at least eight, where rows are so long that more blocks than this would be examined.
LOOKED_AT = 1 << 15


def lists_of_branches(branches: Branches, seq_len: int, heads: int, is_causal: bool) -> ListSize:
    """Of dilated attention. An upper bound: a block that several branches hold is counted for each of them."""
    block, num_residues = cheapest_blocks(branches, seq_len, None, None)
    per_residue = ceil_div(ceil_div(seq_len, num_residues), block)
    num_lists = heads if len({branches.of_head(head, heads) for head in range(heads)}) > 1 else 1
    per_row, widest, uneven = 0.0, 0, seq_len % num_residues > 0
    for segment, dilation in zip(branches.segment_lengths, branches.dilation_rates, strict=True):
        shared = gcd(dilation, num_residues)  # a branch keeps one residue in `shared`, of queries and of keys
        across = segment < seq_len and segment % (block * num_residues) > 0  # blocks straddle the ends of segments
        rows = ceil_div(min(segment, seq_len), block * num_residues) + across
        uneven |= across or dilation != shared
        per_row += (((rows + 1) / 2) if is_causal else rows) * num_residues / shared**2
        widest += rows * num_residues // shared
    blocks = ceil(per_row * num_residues * per_residue)
    return ListSize(
        block_q=block,
        block_k=block,
        num_q_blocks=num_residues * per_residue,
        num_k_blocks=num_residues * per_residue,
        num_lists=num_lists,
        list_heads=num_lists,
        blocks=num_lists * blocks,
        widest=widest,
        partial=min(widest, 2 * len(branches)),
        candidates=blocks,
        intervals=1,
        named=True,
        documents=0,
        bitmaps=0,
        kind=kind_of_branches(branches, seq_len, seq_len, is_causal),
        num_residues=num_residues,
        run_branches=len(branches) if uneven else 0,
    )


@plain_cache(256, "numbers of blocks of patterns, for plans")
def lists_of_pattern(pattern: Pattern, seq_q: int, seq_k: int, block_size: int | tuple[int, int]) -> ListSize:
    """Of a pattern: exact for few rows, estimated from a sample of rows otherwise."""
    blocks = (block_size, block_size) if isinstance(block_size, int) else block_size
    check_grids(pattern, seq_k)
    heads = pattern.patterns if isinstance(pattern, PerHead) else (pattern,)
    terms = {head: terms_of(head) for head in heads}
    plain = [head for head in terms if not any(term.grids for term in terms[head])]
    of_plain, ranges = numbered(terms[head] for head in plain)
    terms.update(zip(plain, of_plain, strict=True))
    grid, bitmaps = _Grid(seq_q, seq_k, *blocks), UniqueBitmaps(*blocks, HOST)
    counted = {head: grid.count(terms[head], bitmaps) for head in terms}
    rules = {term.interval for head in plain for term in terms[head]}
    intervals = {head: len({term.interval for term in terms[head]}) for head in plain}
    num_rules = sum((1 << number) - 1 for number in intervals.values()) + len(bitmaps)
    width = max(intervals.values(), default=1)
    found = sum(counted[head][0] for head in heads)
    weight = {head: len(terms[head]) * (1 if head in plain else HEAVY) for head in terms}
    return ListSize(
        block_q=blocks[0],
        block_k=blocks[1],
        num_q_blocks=grid.rows,
        num_k_blocks=grid.columns,
        num_lists=len(heads),
        list_heads=len(heads),
        blocks=found,
        widest=max(widest for _, widest in counted.values()),
        partial=2 * len(rules - {EVERYTHING}) + (1 if seq_k % blocks[1] else 0),
        candidates=min(CHUNK, max(total * weight[head] for head, (total, _) in counted.items())),
        intervals=width,
        named=found > 0 and num_rules > 1,
        documents=len(ranges) * seq_q,
        bitmaps=(len(bitmaps) * prod(blocks) // 8 + 20 * width * num_rules) if len(bitmaps) else 0,
        kind=kind_of(pattern, (seq_q, seq_k)),
    )


@dataclass(frozen=True)
class _Grid:
    """Active blocks of single rows, in plain integers; `layout.build` computes the same for all rows at once."""

    seq_q: int
    seq_k: int
    block_q: int
    block_k: int

    @property
    def rows(self) -> int:
        return ceil_div(self.seq_q, self.block_q)

    @property
    def columns(self) -> int:
        return ceil_div(self.seq_k, self.block_k)

    def count(self, terms: Sequence[Term], bitmaps: UniqueBitmaps) -> tuple[int, int]:
        """Active blocks of all rows together and of the longest row; and the bitmaps of the rows that are looked at."""
        total, widest = 0.0, 0
        asked = any(term.grids for term in terms)
        for start, stop in pairwise(self._edges(terms)):
            if asked:
                counts = self._asked(terms, _picked(start, stop, ASKED), bitmaps)
            else:
                middle = self._row(terms, (start + stop) // 2)
                samples = SAMPLED if all(not term.rules for term in terms) else LOOKED_AT // max(1, middle)
                counts = [self._row(terms, row) for row in _picked(start, stop, max(8, min(SAMPLED, samples)))]
            total += (stop - start) * sum(counts) / len(counts)
            widest = max(widest, *counts)
        return round(total), widest

    def _asked(self, terms: Sequence[Term], rows: list[int], bitmaps: UniqueBitmaps) -> list[int]:
        """Of terms with patterns of a grid: these rows are built."""
        found = find_pairs(
            terms, (self.seq_q, self.seq_k), (self.block_q, self.block_k), HOST, bitmaps, torch.tensor(rows)
        )
        counts: list[int] = found.by_query.offsets.diff().tolist()
        return counts

    def _edges(self, terms: Sequence[Term]) -> list[int]:
        """Rows where a rule begins or ends: the first few may hold more blocks than all others together."""
        shift = self.seq_k - self.seq_q
        runs = [rule for term in terms for rule in term.ranges if isinstance(rule, QueriesBetween)]
        for grid in (grid for term in terms for grid in term.grids if grid.prefix):
            first = 0 if grid.order is None else grid.total - grid.prefix
            runs.append(QueriesBetween(first, first + grid.prefix))
        starts = {(run.start - shift) // self.block_q for run in runs if 0 < run.start - shift < self.seq_q}
        stops = [term.interval.query_stop - shift for term in terms] + [run.stop - shift for run in runs]
        inside = {ceil_div(stop, self.block_q) for stop in stops if 0 < stop < self.seq_q}
        return sorted({0, self.rows, *starts, *inside})

    def _row(self, terms: Sequence[Term], row: int) -> int:
        runs, blocks = [], set()
        for term in terms:
            first, last = self._span(term, row)
            if first > last:
                continue
            if term.may_skip:
                found = self._seen(term, row)
                for rule in term.rules:
                    found &= set(self._fine(rule, row))
                blocks |= found
                continue
            if not term.rules:
                runs.append((first, last))
                continue
            found = set.intersection(*(set(self._fine(rule, row)) for rule in term.rules))
            blocks |= {column for column in found if first <= column <= last}
        reached, total = -1, 0
        for first, last in sorted(runs):
            total += max(0, last - max(first - 1, reached))
            reached = max(reached, last)
        return total + sum(not any(first <= column <= last for first, last in runs) for column in blocks)

    def _span(self, term: Term, row: int) -> tuple[int, int]:
        """First and last column that the tokens of a term touch; last < first if none."""
        shift, head = self.seq_k - self.seq_q, row * self.block_q
        return self._between(term, head + shift, min(head + self.block_q, self.seq_q) - 1 + shift)

    def _between(self, term: Term, head: int, tail: int) -> tuple[int, int]:
        """The same for the queries from one position to another."""
        interval = term.interval
        tail = min(tail, interval.query_stop - 1)
        first, last = head - interval.left, min(tail + interval.right, interval.key_stop - 1)
        for rule in term.ranges:
            first = max(first, rule.range_at(head)[0])
            last = min(last, rule.range_at(tail)[1] - 1)
        first, last = max(0, first), min(last, self.seq_k - 1)
        return (first // self.block_k, last // self.block_k) if tail >= head and first <= last else (1, 0)

    def _seen(self, term: Term, row: int) -> set[int]:
        """The columns that the tokens of a term touch, where queries next to each other may skip some."""
        head, stop = row * self.block_q, min((row + 1) * self.block_q, self.seq_q)
        positions = range(head + self.seq_k - self.seq_q, stop + self.seq_k - self.seq_q)
        spans = {self._between(term, position, position) for position in positions}
        return {column for first, last in spans for column in range(first, last + 1)}

    def _fine(self, rule: BlockPattern, row: int) -> Iterator[int]:
        coarse = row * self.block_q // rule.block_size + rule.shift(self.seq_q, self.seq_k)
        for block in rule.key_blocks(coarse, ceil_div(self.seq_k, rule.block_size)):
            start, stop = (n * rule.block_size // self.block_k for n in (block, block + 1))
            yield from range(start, min(stop, self.columns))


def _picked(start: int, stop: int, samples: int) -> list[int]:
    """All rows of a short stretch; of a longer one, one row from each of `samples` equal parts."""
    if stop - start <= samples:
        return list(range(start, stop))
    edges = [start + (stop - start) * i // samples for i in range(samples + 1)]
    return [a + mix32(a) % (b - a) for a, b in pairwise(edges)]
