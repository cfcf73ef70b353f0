"""Dilated attention as runs: what kernels walk where segments, dilations or lengths make most blocks mixed.

In the view of a sequence with stride r, token `r · row + column`, the keys that a branch of dilation r keeps in one
segment are neighbouring rows of one column, and may start anywhere: a run. A tile is TILE queries that are in the same
branches, and lists the runs that they see. A tile may reach into several segments of a branch; a row then sees only
the run of its own, which a kernel finds by the bounds of the run (`RUN`), row by row, never pair by pair.

So any grouping of queries into tiles is exact. Queries of the same branches are taken in order and cut where a segment
of the longest branches ends; of how many branches, `_cheapest_cut` says: fewer cuts fill tiles better, more cuts keep
runs apart that only a part of a tile sees.

The same tiles taken as keys list the runs of queries that see them: dilated attention is symmetric but for causality.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .runs import edges_of

if TYPE_CHECKING:
    from .layout import BlockLayout

TILE = 128
WALKED = (128, 64)  # rows of a run that a kernel may take at a time
LEVELS = 16  # of lengths of tiles
TILE_START = 2  # what a tile costs besides, in parts of a run
MOST_DILATIONS = 6
NUM_TENSORS, NUM_SIZES = 5, 4 + MOST_DILATIONS  # of `flattened`
# Fields of a run: `stop` − `first` rows from `first` on, of column `column` in the view with stride `dilation`, which
# is the `place`-th smallest. All rows of the tile see those from `all_from` to before `all_to`, counted from `first`;
# the others are seen by the rows whose token is in the segment, from `begin` to before `end`, and in the column.
RUN = ("place", "dilation", "column", "first", "length", "all_from", "all_to", "begin", "end", "unused")
# Fields of a tile: its list (of a head, or of all heads if there is one), its place in `rows`, its first run, and its
# parts of 128 and of 64 rows (at least one).
WORK = ("list", "rows", "run", "parts_128", "parts_64", "unused")


@dataclass(frozen=True, eq=False)
class RunPlan:
    """The tiles of all lists of branches, the longest first, and what they walk.

    Attributes:
        dilations: the different ones, ascending.
        rows: int32 [any, TILE], tokens of tiles, −1 where a tile has fewer.
        work: int32 [tiles, WORK].
        runs: int32 [any, RUN].
        key_work, key_runs: the same for tiles of keys; not others, where it is not causal.
    """

    dilations: tuple[int, ...]
    rows: Tensor
    work: Tensor
    runs: Tensor
    key_work: Tensor
    key_runs: Tensor

    def tensors(self) -> list[Tensor]:
        return [self.rows, self.work, self.runs, self.key_work, self.key_runs]


Branch = tuple[int, int, int]  # segment length, dilation, offset


def why_no_runs(heads: Sequence[Sequence[Branch]], seq_q: int, seq_k: int) -> str | None:
    """Why these branches cannot be walked as runs."""
    dilations = {r for head in heads for _, r, _ in head}
    if seq_q != seq_k:
        return "runs are for as many queries as keys"
    if len(dilations) > MOST_DILATIONS:
        return f"runs are for at most {MOST_DILATIONS} different dilations"
    # The last tokens of a length that r does not divide are read together with those of the row before.
    if any(seq_k % r and seq_k < TILE * r for r in dilations) or max(dilations) > seq_k:
        return f"runs are for at least {TILE} tokens of each residue class"
    return None


def plan_runs(heads: Sequence[Sequence[Branch]], seq: int, is_causal: bool, device: torch.device) -> RunPlan:
    """The plan of heads with these branches each."""
    dilations = tuple(sorted({r for head in heads for _, r, _ in head}))
    different = list(dict.fromkeys(map(tuple, heads)))
    of_head = [different.index(tuple(head)) for head in heads]
    tiles = [_tiles_of(head, dilations, seq, is_causal, device) for head in different]
    at = torch.tensor([0, *(len(each.rows) for each in tiles)]).cumsum(0).tolist()
    work, runs = _joined([(each.tile, each.runs, len(each.rows)) for each in tiles], of_head, at)
    key_work, key_runs = work, runs
    if is_causal:
        key_work, key_runs = _joined([(each.key_tile, each.key_runs, len(each.rows)) for each in tiles], of_head, at)
    rows = torch.cat([each.rows for each in tiles])
    return RunPlan(dilations, rows, work, runs, key_work, key_runs)


@dataclass(frozen=True)
class _Tiles:
    """The tiles of one list of branches; the runs of each stand together, in the order of tiles."""

    rows: Tensor
    tile: Tensor  # of each run
    runs: Tensor
    key_tile: Tensor
    key_runs: Tensor


def _tiles_of(
    branches: Sequence[Branch], dilations: Sequence[int], seq: int, is_causal: bool, device: torch.device
) -> _Tiles:
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
        inside = [branch for i, branch in enumerate(branches) if which >> i & 1]
        cut = _cheapest_cut(alike, inside, seq, is_causal)
        rows.append(cut.rows(alike))
        for found, of_keys in ((by_query, False), (by_key, True)):
            if not of_keys or is_causal:
                found += _runs_of(cut, inside, dilations, seq, is_causal, of_keys, base)
        base += cut.num
    tile, runs = _in_order(by_query, device)
    key_tile, key_runs = _in_order(by_key, device) if is_causal else (tile, runs)
    return _Tiles(torch.cat(rows), tile, runs, key_tile, key_runs)


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


def _cheapest_cut(alike: Tensor, inside: Sequence[Branch], seq: int, is_causal: bool) -> _Cut:
    """At the borders of none of the branches, of the longest, of the two longest, ...: what walks the fewest parts."""
    longest = sorted(inside, reverse=True)
    costs: list[Tensor] = []
    cuts: list[_Cut] = []
    for num in range(len(longest) + 1):
        cut = _cut_at(alike, longest[:num])
        if cuts and cut.num == cuts[-1].num:
            continue
        parts = torch.full_like(cut.first, TILE_START)
        for w, r, _ in inside:
            before = cut.last // w - cut.first // w
            most = -(-min(w, seq) // r)
            end = (cut.last % w // r + 1) if is_causal else torch.full_like(cut.last, most)
            parts += before * -(-most // TILE) + (end + TILE - 1) // TILE
        costs.append(parts.sum())
        cuts.append(cut)
    return cuts[int(torch.stack(costs).argmin())]


def _runs_of(
    cut: _Cut,
    inside: Sequence[Branch],
    dilations: Sequence[int],
    seq: int,
    is_causal: bool,
    of_keys: bool,
    base: int,
) -> list[tuple[Tensor, Tensor]]:
    """For each branch the tiles, counted from `base`, and their runs: [any] and [any, RUN]."""
    found = []
    for w, r, offset in inside:
        segments = cut.last // w - cut.first // w + 1
        tile = torch.repeat_interleave(segments)
        first, last, alone = cut.first[tile], cut.last[tile], segments[tile] == 1
        place = torch.arange(len(tile), device=tile.device) - edges_of(segments)[:-1][tile]
        begin = (first // w + place) * w
        end = (begin + w).clamp(max=seq)
        length = (end - begin - offset + r - 1).clamp(min=0) // r
        skipped, all_from, all_to = torch.zeros_like(length), torch.zeros_like(length), length
        if is_causal and of_keys:  # queries from the first key on; from the last one on they see all
            skipped = torch.minimum((torch.maximum(first, begin) - begin - offset + r - 1).clamp(min=0) // r, length)
            length = length - skipped
            all_from, all_to = (last - begin - offset) // r - skipped, length
        elif is_causal:
            all_to = (first - begin - offset) // r + 1
            seen = torch.minimum(last, end - 1) - begin - offset + r
            length = torch.minimum(seen.clamp(min=0) // r, length)
        all_to = torch.where(alone, all_to, 0)
        row = (begin + offset) // r + skipped
        which = torch.full_like(tile, dilations.index(r))
        runs = (which, torch.full_like(tile, r), (begin + offset) % r, row, length, all_from, all_to, begin, end)
        there = length > 0
        padded = torch.stack((*runs, torch.zeros_like(tile)), 1)
        found.append((tile[there] + base, padded[there].int()))
    if not inside:  # one run of nothing, so that results are written
        nothing = torch.zeros(cut.num, len(RUN), dtype=torch.int32, device=cut.start.device)
        nothing[:, 1] = 1
        found.append((torch.arange(base, base + cut.num, device=cut.start.device), nothing))
    return found


def _in_order(found: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> tuple[Tensor, Tensor]:
    """The runs tile by tile; in a tile those that all rows see come first."""
    tile, runs = torch.cat([tile for tile, _ in found]), torch.cat([runs for _, runs in found])
    order = (tile * 2 + (runs[:, 6] <= runs[:, 5])).argsort(stable=True)
    return tile[order], runs[order]


def _joined(
    tiles: Sequence[tuple[Tensor, Tensor, int]], of_head: Sequence[int], rows_at: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The work of all heads, the longest tiles first, and all runs."""
    works, runs_at = [], 0
    for which, (tile, runs, num) in enumerate(tiles):
        device = tile.device
        count = torch.zeros(num, dtype=torch.int64, device=device).index_add_(0, tile, torch.ones_like(tile))
        work = torch.zeros(num, len(WORK), dtype=torch.int64, device=device)
        work[:, 1] = torch.arange(num, device=device) + rows_at[which]
        work[:, 2] = edges_of(count)[:-1] + runs_at
        for field, size in zip((3, 4), WALKED, strict=True):
            parts = (runs[:, 4].long() + size - 1) // size
            work[:, field].index_add_(0, tile, parts)
        work[:, 3:5].clamp_(min=1)
        for head in (head for head, used in enumerate(of_head) if used == which):
            works.append(work.clone())
            works[-1][:, 0] = head
        runs_at += len(runs)
    work = torch.cat(works)
    # Neighbours of one head read the same keys: among tiles of about the same length they stay together.
    parts, heads = work[:, 3], len(of_head)
    most = parts.max() + 1
    rank = (parts * LEVELS // most * heads + heads - 1 - work[:, 0]) * most + parts
    work = work[rank.argsort(descending=True, stable=True)]
    return work.int().contiguous(), torch.cat([runs for _, runs, _ in tiles]).contiguous()


@dataclass(frozen=True)
class WholeBranches:
    """What `layout_of_branches` notes of a layout of whole sequences: the branches of each list."""

    heads: tuple[tuple[Branch, ...], ...]
    is_causal: bool

    def tensors(self) -> list[Tensor]:
        return []


@dataclass(frozen=True)
class Runs:
    """Whether a layout can be walked as runs, and what that costs.

    Attributes:
        reason: why it cannot; else empty.
        is_causal: whether keys behind a query are hidden.
        even_pairs, mixed_pairs: what blocks hold, of all lists: those that count alike, and those counted one by one.
        pairs: what tiles of runs hold, if each walked what one of its rows sees.
    """

    reason: str
    is_causal: bool = False
    even_pairs: int = 0
    mixed_pairs: int = 0
    pairs: int = 0

    def tensors(self) -> list[Tensor]:
        return []


def runs_of(layout: BlockLayout) -> Runs:
    """Found once for each layout; on a GPU that may wait for its lists."""
    return layout._derive("runs", lambda: _runs_of_layout(layout))


def plan_of(layout: BlockLayout) -> RunPlan:
    """The plan of a layout that has runs; made once."""
    if "run_plan" in layout._derived:
        return layout._derived["run_plan"]
    whole: WholeBranches = layout._derived["whole"]
    make = partial(plan_runs, whole.heads, layout.seq_q, whole.is_causal, layout.device)
    return layout._derive("run_plan", make)


def _runs_of_layout(layout: BlockLayout) -> Runs:
    whole: WholeBranches | None = layout._derived.get("whole")
    if whole is None:
        return Runs("runs are for whole sequences, not for parts or copies of their layouts")
    reason = why_no_runs(whole.heads, layout.seq_q, layout.seq_k)
    if reason is not None:
        return Runs(reason)
    size, mixed = layout.block_q * layout.block_k, 0
    if layout.has_mixed_blocks:
        mixed = int((layout.by_query.rule_ids[: layout.num_active_blocks] == 0).sum()) * size
    even = layout.num_active_blocks * size - mixed
    seq = layout.seq_q
    pairs = sum(seq * min(w, seq) / r**2 for head in whole.heads for w, r, _ in head)
    return Runs("", whole.is_causal, even, mixed, int(pairs / 2 if whole.is_causal else pairs))


def flattened(layout: BlockLayout) -> tuple[list[Tensor], list[int]]:
    """The plan of a layout that has runs as tensors and ints, for a graph that holds on to its lists."""
    runs, plan = runs_of(layout), plan_of(layout)
    dilations = [*plan.dilations, *[0] * (MOST_DILATIONS - len(plan.dilations))]
    return plan.tensors(), [int(runs.is_causal), runs.even_pairs, runs.mixed_pairs, runs.pairs, *dilations]


def unflatten_into(layout: BlockLayout, tensors: Sequence[Tensor], sizes: Sequence[int]) -> None:
    """The inverse, for a layout that was made from its own."""
    is_causal, even, mixed, pairs, *dilations = sizes
    layout._derived["runs"] = Runs("", bool(is_causal), even, mixed, pairs)
    layout._derived["run_plan"] = RunPlan(tuple(r for r in dilations if r), *tensors)


def counted(plan: RunPlan, num_heads: int, seq: int, *, of_keys: bool = False, is_causal: bool = False) -> Tensor:
    """int32 [heads, seq, seq]: how often the plan pairs a query with a key, as kernels read it. For tests."""
    found = torch.zeros(num_heads, seq, seq, dtype=torch.int32)
    work, runs = (plan.key_work, plan.key_runs) if of_keys else (plan.work, plan.runs)
    for head, at, start, parts, _, _ in work.tolist():
        rows = plan.rows[at].long()
        for run in runs[start:].tolist():
            if parts <= 0:
                break
            _, dilation, column, first, length, all_from, all_to, begin, end, _ = run
            parts -= max(1, -(-length // TILE))
            lane = torch.arange(length)
            own = rows // dilation - first
            inside = (rows >= begin) & (rows < end) & (rows % dilation == column)
            seen = inside[:, None].expand(-1, length)
            if is_causal:
                seen = seen & (lane >= own[:, None] if of_keys else lane <= own[:, None])
            whole = (lane >= all_from) & (lane < all_to)
            seen = seen | whole
            token = (first + lane) * dilation + column
            real = rows >= 0
            pair = seen[real].int()
            one, other = rows[real][:, None].expand_as(pair), token[None].expand_as(pair)
            index = (other, one) if of_keys else (one, other)
            found[head].index_put_(index, pair, accumulate=True)
    return found
