"""The size of a layout's lists without building them: active blocks are counted row by row in plain integers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, gcd

from ..layout.branches import cheapest_blocks, kind_of_branches
from ..layout.build import CHUNK, Term, documents_of, kind_of, terms_of
from ..layout.eager import plain_cache
from ..layout.size import ListSize
from ..patterns import Branches, Pattern, PerHead
from ..patterns.blocks import BlockPattern, ceil_div, mix32
from ..patterns.tokens import EVERYTHING, Interval

# Rows that are counted in each stretch of rows where the rules do not change; longer stretches are sampled.
SAMPLED = 64
# Fewer, but at least eight, where rows are so long that more blocks than this would be examined.
LOOKED_AT = 1 << 15


def lists_of_branches(branches: Branches, seq_len: int, heads: int, is_causal: bool) -> ListSize:
    """Of dilated attention. An upper bound: a block that several branches hold is counted for each of them."""
    block, num_residues = cheapest_blocks(branches, seq_len, None, None)
    per_residue = ceil_div(ceil_div(seq_len, num_residues), block)
    num_lists = heads if len({branches.of_head(head, heads) for head in range(heads)}) > 1 else 1
    per_row, widest = 0.0, 0
    for segment, dilation in zip(branches.segment_lengths, branches.dilation_rates, strict=True):
        shared = gcd(dilation, num_residues)  # a branch keeps one residue in `shared`, of queries and of keys
        across = segment < seq_len and segment % (block * num_residues) > 0  # blocks straddle the ends of segments
        rows = ceil_div(min(segment, seq_len), block * num_residues) + across
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
        kind=kind_of_branches(branches, seq_len, seq_len, is_causal),
        num_residues=num_residues,
    )


@plain_cache(256)
def lists_of_pattern(pattern: Pattern, seq_q: int, seq_k: int, block_size: int | tuple[int, int]) -> ListSize:
    """Of a pattern: exact for few rows, estimated from a sample of rows otherwise."""
    block_q, block_k = (block_size, block_size) if isinstance(block_size, int) else block_size
    heads = pattern.patterns if isinstance(pattern, PerHead) else (pattern,)
    packing = next(iter(documents_of(pattern)), None)
    grid = _Grid(seq_q, seq_k, block_q, block_k, () if packing is None else packing.starts)
    counted = {head: grid.count(terms_of(head)) for head in dict.fromkeys(heads)}
    rules = {term.interval for head in counted for term in terms_of(head)}
    intervals = max(len({term.interval for term in terms_of(head)}) for head in counted)
    blocks = sum(counted[head][0] for head in heads)
    return ListSize(
        block_q=block_q,
        block_k=block_k,
        num_q_blocks=grid.rows,
        num_k_blocks=grid.columns,
        num_lists=len(heads),
        list_heads=len(heads),
        blocks=blocks,
        widest=max(widest for _, widest in counted.values()),
        partial=2 * len(rules - {EVERYTHING}) + (1 if seq_k % block_k else 0),
        candidates=min(CHUNK, max(total * len(terms_of(head)) for head, (total, _) in counted.items())),
        intervals=intervals,
        named=blocks > 0 and (len(counted) > 1 or intervals > 1),
        documents=0 if packing is None else seq_q,
        kind=kind_of(pattern),
    )


@dataclass(frozen=True)
class _Grid:
    """Active blocks of single rows, in plain integers; `layout.build` computes the same for all rows at once."""

    seq_q: int
    seq_k: int
    block_q: int
    block_k: int
    starts: Sequence[int]  # of documents

    @property
    def rows(self) -> int:
        return ceil_div(self.seq_q, self.block_q)

    @property
    def columns(self) -> int:
        return ceil_div(self.seq_k, self.block_k)

    def count(self, terms: Sequence[Term]) -> tuple[int, int]:
        """Active blocks of all rows together and of the longest row."""
        total, widest = 0.0, 0
        for start, stop in pairwise(self._edges(terms)):
            middle = self._row(terms, (start + stop) // 2)
            samples = SAMPLED if all(not term.rules for term in terms) else LOOKED_AT // max(1, middle)
            picked = [self._row(terms, row) for row in _picked(start, stop, max(8, min(SAMPLED, samples)))]
            total += (stop - start) * sum(picked) / len(picked)
            widest = max(widest, *picked)
        return round(total), widest

    def _edges(self, terms: Sequence[Term]) -> list[int]:
        """Rows where a rule begins or ends: the first few may hold more blocks than all others together."""
        stops = (term.interval.query_stop - (self.seq_k - self.seq_q) for term in terms)
        inside = {ceil_div(stop, self.block_q) for stop in stops if 0 < stop < self.seq_q}
        return sorted({0, self.rows, *inside})

    def _row(self, terms: Sequence[Term], row: int) -> int:
        runs, blocks = [], set()
        for term in terms:
            first, last = self._span(term.interval, row)
            if first > last:
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

    def _span(self, interval: Interval, row: int) -> tuple[int, int]:
        """First and last column that an interval touches; last < first if none."""
        shift = self.seq_k - self.seq_q
        head = row * self.block_q
        tail = min(head + self.block_q, self.seq_q, interval.query_stop - shift) - 1
        first, last = head + shift - interval.left, min(tail + shift + interval.right, interval.key_stop - 1)
        if interval.same_document:
            first = max(first, self._document(head + shift)[0])
            last = min(last, self._document(tail + shift)[1] - 1)
        first, last = max(0, first), min(last, self.seq_k - 1)
        return (first // self.block_k, last // self.block_k) if tail >= head and first <= last else (1, 0)

    def _document(self, position: int) -> tuple[int, int]:
        number = bisect_right(self.starts, position)
        return (self.starts[number - 1], self.starts[number]) if 0 < number < len(self.starts) else (0, 0)

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
