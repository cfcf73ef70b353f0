"""`BlockLayout.flatten` and its inverse: a layout as tensors and ints, the arguments that operators accept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from .lists import BlockList

if TYPE_CHECKING:
    from .layout import BlockLayout

NUM_SIZES = 10  # of a layout


def flatten(layout: BlockLayout, work_order: bool, by_key: bool) -> tuple[list[Tensor], list[int]]:
    """See `BlockLayout.flatten`."""
    sizes = [*layout.lengths, *layout.blocks, layout.num_heads or 0, layout.batch_size or 0]
    sizes += [layout.num_residues, int(layout.has_mixed_blocks), int(layout.ranges_ascend)]
    tensors = [*layout.by_query.tensors(), layout.rules, layout.documents, layout.branches, layout.bitmaps]
    if work_order or by_key:
        tensors.append(layout.query_work)
    if by_key:
        lists = layout.by_key  # once: in a graph it is made each time
        work = layout._derive("key_work", lambda: lists.work(layout.num_lists, layout.num_residues))
        tensors += [*lists.tensors(), work, layout.seen_by]
    return tensors, [len(tensors), *sizes]


def unflatten(cls: type[BlockLayout], tensors: Sequence[Tensor], sizes: Sequence[int], kind: str | None) -> BlockLayout:
    """See `BlockLayout.unflatten`."""
    _, seq_q, seq_k, block_q, block_k, num_heads, batch_size, num_residues, has_mixed_blocks, ranges_ascend = sizes
    lists, (rules, documents, branches, bitmaps), more = tensors[:4], tensors[4:8], tensors[8:]
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
        ranges_ascend=bool(ranges_ascend),
        kind=kind,
        num_residues=num_residues,
        branches=branches,
        has_mixed_blocks=bool(has_mixed_blocks),
        bitmaps=bitmaps,
        checked=True,
    )
    if more:
        layout._derived["query_work"] = more[0]
    if more[1:]:
        layout._derived.update(by_key=BlockList(*more[1:5]), key_work=more[5], seen_by=more[6])
    return layout


def unflatten_all(cls: type[BlockLayout], tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[BlockLayout]:
    """See `BlockLayout.unflatten_all`."""
    layouts = []
    while sizes:
        layouts.append(unflatten(cls, tensors[: sizes[0]], sizes[:NUM_SIZES], None))
        tensors, sizes = tensors[sizes[0] :], sizes[NUM_SIZES:]
    return layouts
