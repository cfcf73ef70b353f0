"""The tiles of a `RunPlan`, and the runs that they walk.

Queries of the same branches are taken in order and cut where a segment of the longest branches ends; of how many
branches, `_cheapest_cut` says: fewer cuts fill tiles better, more cuts keep runs apart that only a part of a tile sees.

A key that several branches hold is walked once where that is a matter of intervals. Take a tile that is in one segment
of branch a and in one of b, where a's dilation divides b's and a's segment is inside of b's. Then all keys of b in a's
segment are keys of a, every few rows: b leaves them to a, its parent, and walks what is before and behind a's segment.
What a leaves to a parent of its own, b leaves with it. The rows of a run have then a multiplicity, with a period, that
stands in a table (`Tables`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .runs import edges_of

TILE = 128
WALKED = (128, 64)  # rows of a run that a kernel may take at a time
TILE_START = 2  # what a tile costs besides, in parts of a run
MOST_PERIOD = 1024  # of multiplicities
# Fields of a run: `length` rows from `first` on, of column `column` in the view with stride `dilation`, which is the
# `place`-th smallest. All rows of the tile see those from `all_from` to before `all_to`, counted from `first`; the
# others are seen by the rows whose token is in the segment, from `begin` to before `end`, and in the column. Row x
# counts `tables[table + (phase + x) % period]` times; once if the period is 0.
RUN = (
    "place", "dilation", "column", "first", "length", "all_from", "all_to", "begin", "end", "table", "phase", "period",
)  # fmt: skip

Branch = tuple[int, int, int]  # segment length, dilation, offset


@dataclass
class Tables:
    """Multiplicities of rows, for as many as a kernel takes at a time from any row of a period on."""

    values: list[float] = field(default_factory=lambda: [1.0])
    known: dict[tuple[int, ...], tuple[int, int]] = field(default_factory=dict)

    def of(self, steps: tuple[int, ...]) -> tuple[int, int]:
        """Where those stand of runs that share every `step`-th row with another branch, for all of these, and their
        period."""
        if not steps:
            return 0, 0
        if steps not in self.known:
            period = math.lcm(*steps)
            self.known[steps] = len(self.values), period
            self.values += [1.0 + sum(row % step == 0 for step in steps) for row in range(period + max(WALKED))]
        return self.known[steps]


@dataclass(frozen=True)
class Tiles:
    """The tiles of one list of branches; the runs of each stand together, in the order of tiles."""

    rows: Tensor
    tile: Tensor  # of each run
    runs: Tensor
    key_tile: Tensor
    key_runs: Tensor


def tiles_of(
    branches: Sequence[Branch],
    dilations: Sequence[int],
    seq: int,
    is_causal: bool,
    tables: Tables,
    cuts: dict[tuple[Branch, ...], int],
    device: torch.device,
) -> Tiles:
    """Key tiles and their runs are the same as the others where it is not causal.

    Args:
        cuts: at the borders of how many branches tiles were cut for other heads, by segment length and dilation: heads
            differ by their offsets alone, and what is cheapest for one is so for all.
    """
    token = torch.arange(seq, device=device)
    held = torch.zeros(seq, dtype=torch.int64, device=device)
    for i, (w, r, offset) in enumerate(branches):
        held |= (token % w % r == offset).long() << i
    rows: list[Tensor] = []
    by_query: list[tuple[Tensor, Tensor]] = []
    by_key: list[tuple[Tensor, Tensor]] = []
    base = 0
    for which in held.unique().tolist():
        alike = (held == which).nonzero()[:, 0]
        # A parent comes before what leaves keys to it.
        inside = sorted((branch for i, branch in enumerate(branches) if which >> i & 1), key=lambda x: (x[1], x[0]))
        maker = _RunMaker(inside, dilations, seq, is_causal, tables)
        kind = tuple((w, r, 0) for w, r, _ in inside)
        known = cuts.get(kind)
        num, cut, runs = _cheapest_cut(alike, inside, maker, None if known is None else range(known, known + 1))
        cuts[kind] = num
        rows.append(cut.rows(alike))
        by_query.append((runs[0] + base, runs[1]))
        if is_causal:
            tile, key_runs = maker.runs(cut, of_keys=True)
            by_key.append((tile + base, key_runs))
        base += cut.num
    tile, all_runs = _in_order(by_query)
    key_tile, key_runs = _in_order(by_key) if is_causal else (tile, all_runs)
    return Tiles(torch.cat(rows), tile, all_runs, key_tile, key_runs)


@dataclass(frozen=True)
class _Cut:
    """Tokens of the same branches, ascending, cut into tiles."""

    start: Tensor  # place of each tile's first token among them
    first: Tensor  # that token
    last: Tensor  # and the last one

    @property
    def num(self) -> int:
        return len(self.start)

    def rows(self, alike: Tensor) -> Tensor:
        size = torch.diff(self.start, append=self.start.new_tensor([len(alike)]))
        lane = torch.arange(TILE, device=alike.device)
        found = alike[(self.start[:, None] + lane).clamp(max=len(alike) - 1)]
        return torch.where(lane < size[:, None], found, -1).int()


def _cut_at(alike: Tensor, borders: Sequence[Branch]) -> _Cut:
    """Tiles that no segment border of these branches parts."""
    new = torch.zeros(len(alike), dtype=torch.bool, device=alike.device)
    new[:1] = True
    for w, _, _ in borders:
        new[1:] |= (alike // w).diff() != 0
    place = torch.arange(len(alike), device=alike.device)
    group = torch.where(new, place, 0).cummax(0).values
    start = ((place - group) % TILE == 0).nonzero()[:, 0]
    last = torch.cat((start[1:] - 1, start.new_tensor([len(alike) - 1])))
    return _Cut(start, alike[start], alike[last])


def _cheapest_cut(
    alike: Tensor, inside: Sequence[Branch], maker: _RunMaker, nums: range | None
) -> tuple[int, _Cut, tuple[Tensor, Tensor]]:
    """At the borders of none of the branches, of the longest, of the two longest, ... (of those that `nums` names):
    what walks the fewest parts. How many it is, and its runs."""
    longest = sorted(inside, reverse=True)
    costs: list[Tensor] = []
    found: list[tuple[int, _Cut, tuple[Tensor, Tensor]]] = []
    for num in range(len(longest) + 1) if nums is None else nums:
        cut = _cut_at(alike, longest[:num])
        if found and cut.num == found[-1][1].num:
            continue
        tile, runs = maker.runs(cut, of_keys=False)
        costs.append(((runs[:, 4] + TILE - 1) // TILE).sum() + TILE_START * cut.num)
        found.append((num, cut, (tile, runs)))
    return found[int(torch.stack(costs).argmin())] if len(found) > 1 else found[0]


@dataclass(frozen=True)
class _Segments:
    """The segment of a branch that each tile is in; of a tile that is in several, the first."""

    begin: Tensor
    end: Tensor
    alone: Tensor  # whether it is the only one


@dataclass(frozen=True)
class _RunMaker:
    """The runs of tiles whose queries are in these branches, ordered by their dilations."""

    inside: Sequence[Branch]
    dilations: Sequence[int]
    seq: int
    is_causal: bool
    tables: Tables

    def runs(self, cut: _Cut, *, of_keys: bool) -> tuple[Tensor, Tensor]:
        """The tiles and their runs: [any] and [any, RUN]."""
        if not self.inside:  # one run of nothing, so that results are written
            nothing = torch.zeros(cut.num, len(RUN), dtype=torch.int32, device=cut.start.device)
            nothing[:, 1] = 1
            return torch.arange(cut.num, device=cut.start.device), nothing
        segments = [self._segments(cut, w) for w, _, _ in self.inside]
        parents = self._parents(cut, segments)
        left_to, numbers = self._left_to(parents), torch.arange(cut.num, device=cut.start.device)
        found = []
        for i, (w, _, _) in enumerate(self.inside):
            here, parent = segments[i], parents[i]
            count = cut.last // w - cut.first // w + 1
            tile = torch.repeat_interleave(count)
            place = torch.arange(len(tile), device=tile.device) - edges_of(count)[:-1][tile]
            begin = here.begin[tile] + place * w
            end = (begin + w).clamp(max=self.seq)
            start, stop = begin, end
            pieces = [(tile, begin, end, start, stop)]
            if (parent >= 0).any():
                inner_begin = torch.stack([x.begin for x in segments])[parent.clamp(min=0), numbers]
                inner_end = torch.stack([x.end for x in segments])[parent.clamp(min=0), numbers]
                stop = torch.where(parent[tile] >= 0, inner_begin[tile], stop)
                which = (parent >= 0).nonzero()[:, 0]
                behind = (which, here.begin[which], here.end[which], inner_end[which], here.end[which])
                pieces = [(tile, begin, end, start, stop), behind]
            for piece in pieces:
                found.append(self._run(i, cut, piece, left_to[i], here.alone, of_keys))
        return torch.cat([tile for tile, _ in found]), torch.cat([runs for _, runs in found])

    def _segments(self, cut: _Cut, w: int) -> _Segments:
        begin = cut.first // w * w
        return _Segments(begin, (begin + w).clamp(max=self.seq), cut.first // w == cut.last // w)

    def _parents(self, cut: _Cut, segments: Sequence[_Segments]) -> list[Tensor]:
        """For each branch, to which one it leaves the keys in that one's segment; −1 for none. [tiles] each."""
        none = torch.full_like(cut.first, -1)
        rates = [r for _, r, _ in self.inside]
        if math.lcm(*rates) // rates[0] > MOST_PERIOD:
            return [none for _ in rates]
        found = []
        for i, here in enumerate(segments):
            parent, longest = none, torch.zeros_like(none)
            for j, other in enumerate(segments[:i]):
                if rates[i] % rates[j]:
                    continue
                within = here.alone & other.alone & (other.begin >= here.begin) & (other.end <= here.end)
                better = within & (other.end - other.begin >= longest)
                parent = torch.where(better, j, parent)
                longest = torch.where(better, other.end - other.begin, longest)
            found.append(parent)
        return found

    def _left_to(self, parents: Sequence[Tensor]) -> list[Tensor]:
        """For each branch, as bits, those that leave keys to it, of their own or of their children. [tiles] each."""
        bits = [torch.zeros_like(parents[0]) for _ in parents]
        for i in reversed(range(len(parents))):  # children first
            for j in range(i):
                bits[j] = torch.where(parents[i] == j, bits[j] | bits[i] | 1 << i, bits[j])
        return bits

    def _run(
        self, i: int, cut: _Cut, piece: tuple[Tensor, ...], left_to: Tensor, alone: Tensor, of_keys: bool
    ) -> tuple[Tensor, Tensor]:
        """Branch `i` from `start` to before `stop`, a part of its segment, for each tile of a piece."""
        _, r, offset = self.inside[i]
        tile, begin, end, start, stop = piece
        first, last, alone = cut.first[tile], cut.last[tile], alone[tile]
        column = (begin + offset) % r
        row = _above(torch.maximum(start, begin + offset) - column, r)
        length = (_above(stop - column, r) - row).clamp(min=0)
        all_from, all_to = torch.zeros_like(length), length
        if self.is_causal and of_keys:  # queries from the first key on; from the last one on they see all
            skipped = torch.minimum((_above(torch.maximum(first, begin) - column, r) - row).clamp(min=0), length)
            row, length = row + skipped, length - skipped
            all_from, all_to = (_above(last - column, r) - row).clamp(min=0), length
        elif self.is_causal:
            all_to = torch.minimum(((first - column) // r + 1 - row).clamp(min=0), length)
            seen = ((torch.minimum(last, end - 1) - column) // r + 1 - row).clamp(min=0)
            length = torch.minimum(seen, length)
        all_to = torch.where(alone, all_to, 0)
        table, period = self._multiplicities(i, left_to, tile)
        phase = torch.where(period > 0, (row - (first - column) // r) % period.clamp(min=1), 0)
        which = torch.full_like(tile, self.dilations.index(r))
        fields = (
            which, torch.full_like(tile, r), column, row, length, all_from, all_to, begin, end, table, phase, period,
        )  # fmt: skip
        there = length > 0
        return tile[there], torch.stack(fields, 1)[there].int()

    def _multiplicities(self, i: int, left_to: Tensor, tile: Tensor) -> tuple[Tensor, Tensor]:
        codes, which = left_to.unique(return_inverse=True)
        found = []
        for code in codes.tolist():
            steps = sorted(r // self.inside[i][1] for j, (_, r, _) in enumerate(self.inside) if code >> j & 1)
            found.append(self.tables.of(tuple(steps)))
        table, period = torch.tensor(found, device=tile.device).T
        return table[which[tile]], period[which[tile]]


def _above(x: Tensor, divisor: int) -> Tensor:
    """x / divisor, rounded up."""
    return -(-x // divisor)


def _in_order(found: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The runs tile by tile; in a tile those that all rows see come first."""
    tile, runs = torch.cat([tile for tile, _ in found]), torch.cat([runs for _, runs in found])
    order = (tile * 2 + (runs[:, 6] <= runs[:, 5])).argsort(stable=True)
    return tile[order], runs[order]
