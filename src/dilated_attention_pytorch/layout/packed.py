"""`BlockLayout.from_documents`: packed documents that are data, as a data loader gives them on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..patterns import Documents, Full, Pattern, RangePattern
from ..patterns.base import check_int, shown
from ..patterns.ranges import DataDocuments
from . import builders
from .closed_form import can_build
from .ranges import bounds_of
from .terms import written

if TYPE_CHECKING:
    from .layout import BlockLayout

ALL_OF_THEM = DataDocuments()


def from_documents(
    cls: type[BlockLayout],
    pattern: Pattern | None,
    seq: int | None,
    cu_seqlens: Tensor | None,
    document_ids: Tensor | None,
    block_size: int | tuple[int, int],
) -> BlockLayout:
    """See `BlockLayout.from_documents`."""
    if (cu_seqlens is None) == (document_ids is None):
        given = "both" if cu_seqlens is not None else "neither"
        raise ValueError(f"from_documents must be given cu_seqlens or document_ids, got {given}")
    pattern = Full() if pattern is None else pattern
    if not isinstance(pattern, Pattern):
        raise TypeError(f"pattern must be a Pattern, got {type(pattern).__name__}")
    if cu_seqlens is not None:
        data = _checked("cu_seqlens", cu_seqlens, 2)
        if seq is None:
            raise TypeError("seq must be the number of tokens where cu_seqlens is given, got None")
        check_int("seq", seq, least=1)
    else:
        data = _checked("document_ids", document_ids, 1)
        if seq not in (None, len(data)):
            raise ValueError(f"seq must be the number of document_ids, {len(data)}, got {seq}")
        seq = len(data)
    terms = written(pattern & ALL_OF_THEM)
    if not terms.closed or not can_build(data.device):
        packing = Documents.from_ids(data) if cu_seqlens is None else Documents.from_cu_seqlens(data)
        return cls.from_pattern(pattern & packing, seq, block_size=block_size, device=data.device)
    lengths, blocks = builders.check_pattern(pattern, (seq, seq), block_size)
    own = _of_ids(data) if cu_seqlens is None else _of_edges(data.int(), seq)
    return builders.closed_layout(cls, terms, _all_ranges(terms.ranges, own), lengths, blocks)


def _checked(name: str, x: Tensor | None, least: int) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {shown(x)}")
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {x.dtype}")
    if x.ndim != 1 or len(x) < least:
        raise ValueError(f"{name} must have one dimension and {least} numbers at least, got shape {list(x.shape)}")
    return x


def _of_edges(edges: Tensor, seq: int) -> Tensor:
    """int32 [2, seq]: where the document of each token begins and ends."""
    from ..kernels import layouts

    right = (edges[0] == 0) & (edges[-1] == seq) & (edges.diff() >= 0).all()
    torch._assert_async(right, "from_documents: cu_seqlens must begin with 0, not descend and end with seq")
    documents = edges.new_empty(2, seq)
    layouts.of_stretches(edges.contiguous(), len(edges) - 1, 0, 1, 0, documents)
    return documents


def _of_ids(ids: Tensor) -> Tensor:
    """The same, of tokens in one run for each number."""
    seq, one = len(ids), torch.ones(1, dtype=torch.bool, device=ids.device)
    changes = ids[1:] != ids[:-1]
    ordered = ids.sort().values
    right = changes.sum() == (ordered[1:] != ordered[:-1]).sum()
    torch._assert_async(right, "from_documents: document_ids must have every number in one run of tokens")
    place = torch.arange(seq, dtype=torch.int32, device=ids.device)
    starts = torch.where(torch.cat((one, changes)), place, 0).cummax(0).values
    stops = torch.where(torch.cat((changes, one)), place + 1, seq).flip(0).cummin(0).values.flip(0)
    return torch.stack((starts, stops)).int()


def _all_ranges(ranges: Sequence[Sequence[RangePattern]], own: Tensor) -> Tensor:
    """`BlockLayout.documents`, where each range is the documents and what else must hold."""
    found, position = [], None
    for rules in ranges:
        others = [rule for rule in rules if rule != ALL_OF_THEM]
        if others and position is None:
            position = torch.arange(own.shape[1], dtype=torch.int32, device=own.device)
        if others:
            assert position is not None
            start, stop = bounds_of(others, position)
            found.append(torch.stack((torch.maximum(own[0], start), torch.minimum(own[1], stop))))
        else:
            found.append(own)
    return found[0] if len(found) == 1 else torch.cat(found)
