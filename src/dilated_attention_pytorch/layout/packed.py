"""`BlockLayout.from_documents`: packed documents that are data, as a data loader gives them on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..patterns import RangePattern

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class DataDocuments(RangePattern):
    """Stands for documents whose lengths are known to a tensor alone: the same pattern for every packing."""

    def range_at(self, position: int) -> tuple[int, int]:
        raise TypeError("these documents are data: a layout of them is made by BlockLayout.from_documents")


PACKED = DataDocuments()
