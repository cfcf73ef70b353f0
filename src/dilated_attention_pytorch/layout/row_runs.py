"""`RowRuns`: the blocks of a pattern of token rules as runs of columns, and layouts of parts of it made of them.

A token rule lets a row of blocks see one run of columns, in which the full blocks are one run again (`build.Span`); or
one for each stretch of its queries, where what they see jumps from one document to the next. A union of such rules cuts
a row into a few runs, each full or reached by the same rules throughout. So what some rows see
of some columns is found by comparing a few numbers a row, however long the rows are: the plan of a ring needs no more
than that, and the lists of a part are written down in one go.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..patterns import Pattern, PerHead, RangePattern
from ..patterns.blocks import ceil_div
from ..patterns.tokens import Interval
from .bitmaps import NO_BITMAPS
from .build import Span
from .builders import check_pattern
from .layout import BlockLayout
from .lists import HOST, BlockList, send
from .ranges import bounds_of, edges_within
from .rules import NO_BRANCHES, NO_DOCUMENTS, moved, num_tokens
from .runs import edges_of, ragged
from .slicing import tokens_of
from .terms import MAX_INTERVALS, Term, numbered, rule_table, terms_of

# Of a row: as many documents in one block are left to lists that are built.
MOST_STRETCHES = 16
# Of columns: as many are walked through, one after the other.
FEW_RUNS = 4


def token_terms(pattern: Pattern) -> list[Term] | None:
    """The terms of a pattern of token rules, the same for all heads; None if it has others."""
    heads = set(pattern.patterns) if isinstance(pattern, PerHead) else {pattern}
    if len(heads) > 1:
        return None
    terms = terms_of(next(iter(heads)))
    fit = len({term.interval for term in numbered([terms])[0][0]}) <= MAX_INTERVALS
    return terms if fit and not any(term.rules or term.grids for term in terms) else None


@dataclass(frozen=True, eq=False)
class RowRuns:
    """Rows of blocks of a pattern, on the host.

    Attributes:
        query_blocks: int64 [rows], ascending: which rows.
        start, stop: int32 [rows, runs]: columns of runs that share none, full ones first and each kind in ascending
            order; a run is empty where its stop is not above its start.
        state: int64 [rows, runs]: 0 if full, else the set of intervals that reach the blocks.
    """

    lengths: tuple[int, int]
    blocks: tuple[int, int]
    intervals: list[Interval]
    ranges: list[tuple[RangePattern, ...]]
    query_blocks: Tensor
    start: Tensor
    stop: Tensor
    state: Tensor

    @classmethod
    def of(
        cls,
        pattern: Pattern,
        lengths: tuple[int, int],
        blocks: tuple[int, int],
        query_blocks: Tensor | None = None,
    ) -> RowRuns | None:
        """All rows, or these; None if the pattern has other rules than those of `token_terms`, or a row more stretches
        than `MOST_STRETCHES`."""
        check_pattern(pattern, lengths, blocks)
        terms = token_terms(pattern)
        if terms is None:
            return None
        (terms,), ranges = numbered([terms])
        if query_blocks is None:
            query_blocks = torch.arange(ceil_div(lengths[0], blocks[0]), device=HOST)
        head = (query_blocks * blocks[0] + (lengths[1] - lengths[0])).int()
        stretches = _Stretches.of(head, [term for term in terms if term.may_skip], lengths[1], blocks[0])
        if stretches.head.shape[1] > MOST_STRETCHES:
            return None
        intervals = list(dict.fromkeys(term.interval for term in terms))
        touched = [stretches.touched_by(term, lengths[1], blocks) for term in terms]
        bits = [1 << intervals.index(term.interval) for term in terms]
        return cls(lengths, blocks, intervals, ranges, query_blocks, *_joined(touched, bits))

    def take(self, rows: Tensor) -> RowRuns:
        """Some of these rows, by their places here."""
        taken = (x[rows] for x in (self.query_blocks, self.start, self.stop, self.state))
        return RowRuns(self.lengths, self.blocks, self.intervals, self.ranges, *taken)

    def unions(self, of_row: Tensor) -> Tensor:
        """int64 [any, 3]: for each number that rows have in `of_row`, the runs of columns that one of them touches:
        number, first column, and the one behind the last; ascending."""
        there = self.stop > self.start
        apart = ceil_div(self.lengths[1], self.blocks[1]) + 1
        base = (of_row.long()[:, None] * apart).expand_as(self.start)[there]
        start, order = (self.start[there] + base).sort()
        reach = (self.stop[there] + base)[order].cummax(0).values
        new = torch.ones(len(start), dtype=torch.bool, device=HOST)
        new[1:] = start[1:] > reach[:-1]
        behind = torch.cat((new[1:], new[:1]))  # the last of a run is before the first of the next
        start, stop = start[new], reach[behind]
        number = start // apart
        return torch.stack((number, start - number * apart, stop - number * apart), dim=1)

    def rows_within(self, columns: Tensor) -> range:
        """The neighbouring places of rows from the first to the last that touches one of these runs of columns."""
        touching = (self._within(columns)[1] > 0).flatten(1).any(1).nonzero()
        return range(int(touching[0]), int(touching[-1]) + 1) if len(touching) else range(0)

    def layout(self, columns: Tensor, bounds: Tensor, made: dict[tuple[int, int], BlockLayout]) -> BlockLayout:
        """These rows and the columns of runs [any, 2], ascending, as a layout of their own, as `BlockLayout.take` has
        them.

        Args:
            bounds: of these queries, on the device of the layout: `key_bounds`.
            made: layouts in which every query sees every key, by their lengths, for use again.
        """
        device = bounds.device
        (seq_q, seq_k), (block_q, block_k) = self.lengths, self.blocks
        columns = columns[columns[:, 1] > columns[:, 0]]
        last = columns[-1:, 1] - 1
        lengths = (
            num_tokens(self.query_blocks, block_q, seq_q),
            int((columns[:, 1] - columns[:, 0]).sum() - 1) * block_k + num_tokens(last, block_k, seq_k),
        )
        first, count = self._within(columns)
        every = len(self.query_blocks) * ceil_div(lengths[1], block_k)
        full = int(count[self.state == 0].sum()) == every
        if full and lengths in made:
            return made[lengths]
        rules, names = self._rules(columns, count, lengths)
        layout = BlockLayout(
            seq_q=lengths[0],
            seq_k=lengths[1],
            block_q=block_q,
            block_k=block_k,
            by_query=self._listed(first, count, names, device),
            rules=send((rules,), device)[0],
            documents=self._documents(columns, lengths[1], bounds),
            branches=torch.empty_like(NO_BRANCHES, device=device),
            bitmaps=torch.empty_like(NO_BITMAPS, device=device),
            checked=True,
        )
        if full:
            made[lengths] = layout
        return layout

    def _within(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """int32 [rows, runs, runs of columns]: the first of the columns in each run, as they are counted from 0 on, and
        how many there are."""
        begin, end = columns.int().unbind(1)
        number = edges_of(end - begin)[:-1]
        first = torch.maximum(self.start[:, :, None], begin)
        count = (torch.minimum(self.stop[:, :, None], end) - first).clamp_(min=0)
        return first + (number - begin), count

    def _listed(self, first: Tensor, count: Tensor, names: Tensor | None, device: torch.device) -> BlockList:
        of_row, num_rows = count.flatten(1), len(count)
        if (total := int(of_row.sum(dtype=torch.int64))) >= 2**31:
            raise ValueError(f"a layout must have fewer than {2**31} active blocks, got {total}: use larger blocks")
        offsets = edges_of(of_row.sum(1, dtype=torch.int32))
        splits = offsets[:-1] + (count.sum(2, dtype=torch.int32) * (self.state == 0)).sum(1, dtype=torch.int32)
        there = count.flatten() > 0
        first, count = first.flatten()[there], count.flatten()[there]
        if len(count) == num_rows and bool((first == first[0]).all() & (count == count[0]).all()):
            column = torch.arange(int(count[0]), dtype=torch.int32, device=device) + int(first[0])
            column = column.repeat(num_rows)
        else:
            column = ragged(first, count, device)[1]
        offsets, splits = send((offsets, splits), device)
        rule_ids = column[:0].clone()
        if names is not None:
            named, repeats = send((names.flatten()[there].int(), count), device)
            rule_ids = named.repeat_interleave(repeats, output_size=total)
        return BlockList(offsets, splits, column, rule_ids)

    def _rules(self, columns: Tensor, count: Tensor, lengths: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
        """The rules that these partial blocks have, counted from the part's own first tokens, and which of them each
        run has; None if there is one."""
        table = torch.tensor(rule_table(self.intervals), dtype=torch.int32, device=HOST)
        partial = (self.state > 0)[:, :, None] & (count > 0)
        if not partial.any():
            return table[:1], None
        ahead = (lengths[0] - self.lengths[0]) - (lengths[1] - self.lengths[1])
        places = torch.arange(len(self.query_blocks), device=HOST)
        query_steps, query_step = torch.unique(
            (self.query_blocks - places) * self.blocks[0] + ahead, return_inverse=True
        )
        key_steps = (columns[:, 0] - edges_of(columns[:, 1] - columns[:, 0])[:-1]) * self.blocks[1]
        key_step = torch.arange(len(key_steps), device=HOST)
        used = ((self.state - 1) * len(query_steps) + query_step[:, None])[:, :, None] * len(key_steps) + key_step
        used, named = torch.unique(used.masked_fill(~partial, int(used[partial][0])), return_inverse=True)
        of_key, used = used % len(key_steps), used // len(key_steps)
        of_query, old = used % len(query_steps), used // len(query_steps)
        rules = moved(table[old], query_steps[of_query][:, None], key_steps[of_key][:, None]).int()
        return rules, (named if len(rules) > 1 else None)

    def key_bounds(self, device: torch.device) -> Tensor:
        """int32 [2 · ranges, queries]: first key and the one behind the last by each range."""
        if not self.ranges:
            return torch.empty_like(NO_DOCUMENTS, device=device)
        ahead = self.lengths[1] - self.lengths[0]
        position = tokens_of(self.query_blocks.to(device), self.blocks[0], self.lengths[0]).int() + ahead
        return torch.cat([bounds_of(each, position) for each in self.ranges])

    def _documents(self, columns: Tensor, seq_k: int, bounds: Tensor) -> Tensor:
        """The table of ranges of these queries, in keys of the part."""
        if not self.ranges:
            return bounds
        if len(columns) <= FEW_RUNS:  # the keys before a bound, run by run, without looking up which it is in
            before = torch.zeros_like(bounds)
            for begin, end in (columns * self.blocks[1]).tolist():
                before += bounds.clamp(begin, end).sub_(begin)
            return before.clamp_(max=seq_k)
        begin, end = (x.contiguous() for x in (columns * self.blocks[1]).int().to(bounds.device).unbind(1))
        number = edges_of(end - begin)[:-1]
        run = torch.searchsorted(begin, bounds.contiguous(), right=True, out_int32=True) - 1
        behind = run < 0
        run.clamp_(min=0)
        inside = torch.minimum(bounds, end[run]) - begin[run] + number[run]
        return inside.masked_fill(behind, 0).clamp(max=seq_k)


@dataclass(frozen=True, eq=False)
class _Stretches:
    """The queries of each row in stretches, in each of which what they see does not jump.

    Attributes:
        head, tail: int32 [rows, stretches], positions of the first and last query.
        real: bool, which are there.
    """

    head: Tensor
    tail: Tensor
    real: Tensor

    @classmethod
    def of(cls, head: Tensor, jumping: list[Term], seq_k: int, block_q: int) -> _Stretches:
        edges = edges_within([rule for term in jumping for rule in term.ranges], seq_k)
        tail = (head + (block_q - 1)).clamp_(max=seq_k - 1)
        first, behind = (torch.searchsorted(edges, x, right=True, out_int32=True) for x in (head, tail))
        count = behind - first
        number = torch.arange(int(count.max()) + 1, dtype=torch.int32, device=HOST)
        real = number <= count[:, None]
        place = (first[:, None] + number - 1).clamp(0, max(len(edges) - 1, 0))
        begin = edges[place] if len(edges) else head[:, None]
        starts = torch.where((number > 0) & real, begin, torch.where(real, head[:, None], tail[:, None] + 1))
        ends = torch.cat((starts[:, 1:] - 1, tail[:, None]), dim=1)
        return cls(starts, torch.where(real, ends, tail[:, None]), real)

    def touched_by(self, term: Term, seq_k: int, blocks: tuple[int, int]) -> Span:
        """Columns that each stretch touches, [rows, stretches], and those that all fill, [rows, 1]."""
        head = torch.where(self.real, self.head, self.tail)
        span = Span.of(term.interval, head.flatten(), seq_k, blocks, term.ranges, self.tail.flatten())
        first, stop, first_full, stop_full = (x.view(head.shape) for x in span.tensors())
        stop = torch.where(self.real, torch.maximum(stop, first), first)
        first_full = first_full.masked_fill(~self.real, 0).amax(1, keepdim=True)
        stop_full = stop_full.masked_fill(~self.real, seq_k).amin(1, keepdim=True)
        lowest, highest = first.amin(1, keepdim=True), stop.amax(1, keepdim=True)
        first_full = torch.minimum(torch.maximum(first_full, lowest), highest)
        return Span(first, stop, first_full, torch.minimum(torch.maximum(stop_full, first_full), highest))


def _joined(touched: list[Span], bits: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The runs of a union of terms, as `RowRuns` has them."""
    if len(touched) == 1 and touched[0].first.shape[1] == 1:
        first, stop, first_full, stop_full = (x[:, 0] for x in touched[0].tensors())
        state = torch.tensor([0, bits[0], bits[0]], device=HOST).expand(len(first), 3)
        return torch.stack((first_full, first, stop_full), 1), torch.stack((stop_full, first_full, stop), 1), state
    marks = torch.cat([x for span in touched for x in span.tensors()], dim=1).sort(dim=1).values
    start, stop = marks[:, :-1], marks[:, 1:]
    full = torch.zeros_like(start, dtype=torch.bool)
    state = torch.zeros_like(start, dtype=torch.int64)
    for span, bit in zip(touched, bits, strict=True):
        full |= (start >= span.first_full) & (start < span.stop_full)
        for first, behind in zip(span.first.unbind(1), span.stop.unbind(1), strict=True):
            state |= ((start >= first[:, None]) & (start < behind[:, None])) * bit
    stop = torch.where(state > 0, stop, start)
    state = state.masked_fill(full, 0)
    order = (state > 0).sort(dim=1, stable=True).indices
    return start.gather(1, order), stop.gather(1, order), state.gather(1, order)
