"""Dilated attention as runs: what kernels walk where segments, dilations or lengths make most blocks mixed.

In the view of a sequence with stride r, token `r · row + column`, the keys that a branch of dilation r keeps in one
segment are neighbouring rows of one column, and may start anywhere: a run. A tile is TILE queries that are in the same
branches, and lists the runs that they see; `run_tiles` makes both. A tile may reach into several segments of a branch;
a row then sees only the run of its own, which a kernel finds by the bounds of the run (`RUN`), row by row, never pair
by pair. So any grouping of queries into tiles is exact.

The same tiles taken as keys list the runs of queries that see them: dilated attention is symmetric but for causality.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .lists import HOST
from .run_tiles import TILE, WALKED, Branch, Tables, tiles_of
from .runs import edges_of

if TYPE_CHECKING:
    from .layout import BlockLayout

LEVELS = 16  # of lengths of tiles
MOST_ON_HOST = 1 << 18  # tokens whose plan is made on the host
MOST_DILATIONS = 6
NUM_TENSORS, NUM_SIZES = 6, 4 + MOST_DILATIONS  # of `flattened`
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
        tables: float32 [any], how often rows of runs count.
    """

    dilations: tuple[int, ...]
    rows: Tensor
    work: Tensor
    runs: Tensor
    key_work: Tensor
    key_runs: Tensor
    tables: Tensor

    def tensors(self) -> list[Tensor]:
        return [self.rows, self.work, self.runs, self.key_work, self.key_runs, self.tables]


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
    tables, cuts = Tables(), dict[tuple[Branch, ...], int]()
    tiles = [tiles_of(head, dilations, seq, is_causal, tables, cuts, device) for head in different]
    at = torch.tensor([0, *(len(each.rows) for each in tiles)]).cumsum(0).tolist()
    work, runs = _joined([(each.tile, each.runs, len(each.rows)) for each in tiles], of_head, at)
    key_work, key_runs = work, runs
    if is_causal:
        key_work, key_runs = _joined([(each.key_tile, each.key_runs, len(each.rows)) for each in tiles], of_head, at)
    rows = torch.cat([each.rows for each in tiles])
    return RunPlan(dilations, rows, work, runs, key_work, key_runs, torch.tensor(tables.values, device=device))


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
        pairs: what tiles of runs hold, if all of their rows saw the same.
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
    return layout._derive("run_plan", lambda: _made(layout._derived["whole"], layout))


def _made(whole: WholeBranches, layout: BlockLayout) -> RunPlan:
    """A short plan is many small steps, which a GPU would wait for more than work at."""
    device = HOST if layout.seq_q <= MOST_ON_HOST else layout.device
    plan = plan_runs(whole.heads, layout.seq_q, whole.is_causal, device)
    return RunPlan(plan.dilations, *(x.to(layout.device) for x in plan.tensors()))


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
    pairs = sum(_pairs_of(head, layout.seq_q) for head in whole.heads)
    return Runs("", whole.is_causal, even, mixed, int(pairs / 2 if whole.is_causal else pairs))


def _pairs_of(head: Sequence[Branch], seq: int) -> float:
    """About how many pairs of keys and queries are walked: a branch leaves those in a parent's segment to it."""
    total = 0.0
    branches = sorted((r, min(w, seq)) for w, r, _ in head)
    for i, (r, w) in enumerate(branches):
        left = max((inner for step, inner in branches[:i] if r % step == 0 and inner <= w), default=0)
        total += seq * (w - left) / r**2
    return total


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
