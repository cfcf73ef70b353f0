"""`BlockLayout.flatten` and its inverse: a layout as tensors and ints, the arguments that operators accept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import branch_runs
from .lists import BlockList

if TYPE_CHECKING:
    from .layout import BlockLayout

NUM_LISTS = 8  # tensors of a layout without orders of work
NUM_SIZES = 9  # of a layout; the last one is flags, and those of a plan of runs follow where there is one
MIXED, PLANNED, ASCENDING = 1, 2, 4


def flatten(layout: BlockLayout, work_order: bool, by_key: bool) -> tuple[list[Tensor], list[int]]:
    """See `BlockLayout.flatten`."""
    sizes = [*layout.lengths, *layout.blocks, layout.num_heads or 0, layout.batch_size or 0]
    sizes += [layout.num_residues, MIXED * layout.has_mixed_blocks + ASCENDING * layout.ranges_ascend]
    tensors = [*layout.by_query.tensors(), layout.rules, layout.documents, layout.branches, layout.bitmaps]
    if work_order or by_key:
        tensors.append(layout.query_work)
    if by_key:
        lists = layout.by_key  # once: in a graph it is made each time
        work = layout._derive("key_work", lambda: lists.work(layout.num_lists, layout.num_residues))
        tensors += [*lists.tensors(), work, layout.seen_by]
    if (work_order or by_key) and _may_walk_runs(layout):
        plan, of_plan = branch_runs.flattened(layout)
        tensors += plan
        sizes = [*sizes[:-1], sizes[-1] + PLANNED, *of_plan]
    return tensors, [len(tensors), *sizes]


def _may_walk_runs(layout: BlockLayout) -> bool:
    on_gpu = layout.dilated and layout.device.type == "cuda"
    on_hopper = on_gpu and torch.cuda.get_device_capability(layout.device) == (9, 0)
    return on_hopper and not branch_runs.runs_of(layout).reason


def unflatten(cls: type[BlockLayout], tensors: Sequence[Tensor], sizes: Sequence[int], kind: str | None) -> BlockLayout:
    """See `BlockLayout.unflatten`."""
    _, seq_q, seq_k, block_q, block_k, num_heads, batch_size, num_residues, flags, *of_plan = sizes
    lists, (rules, documents, branches, bitmaps) = tensors[:4], tensors[4:NUM_LISTS]
    at = len(tensors) - (branch_runs.NUM_TENSORS if of_plan else 0)
    more = tensors[NUM_LISTS:at]
    layout = cls(
        seq_q=seq_q,
        seq_k=seq_k,
        block_q=block_q,
        block_k=block_k,
        by_query=BlockList(*lists),
        num_heads=num_heads or None,
        batch_size=batch_size or None,
        rules=rules,
        documents=documents,
        ranges_ascend=bool(flags & ASCENDING),
        kind=kind,
        num_residues=num_residues,
        branches=branches,
        has_mixed_blocks=bool(flags & MIXED),
        bitmaps=bitmaps,
        checked=True,
    )
    if more:
        layout._derived["query_work"] = more[0]
    if more[1:]:
        layout._derived.update(by_key=BlockList(*more[1:5]), key_work=more[5], seen_by=more[6])
    if of_plan:
        branch_runs.unflatten_into(layout, tensors[at:], of_plan)
    return layout


def unflatten_all(cls: type[BlockLayout], tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[BlockLayout]:
    """See `BlockLayout.unflatten_all`."""
    layouts = []
    while sizes:
        num = NUM_SIZES + (branch_runs.NUM_SIZES if sizes[NUM_SIZES - 1] & PLANNED else 0)
        layouts.append(unflatten(cls, tensors[: sizes[0]], sizes[:num], None))
        tensors, sizes = tensors[sizes[0] :], sizes[num:]
    return layouts
