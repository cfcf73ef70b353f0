"""`create_block_sparse_attention`: a module by the name of its variant."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from .adaptive import BlockSparseAdaptive
from .attention import BlockSparseHierarchical, BlockSparseRingDilatedAttention
from .auto import automatic_attention
from .multihead import BlockSparseRingMultiheadDilatedAttention

# "base" and "ring" are one class: without a ring there is nothing of it in the way.
VARIANTS: dict[str, Any] = {
    "base": BlockSparseRingDilatedAttention,
    "ring": BlockSparseRingDilatedAttention,
    "hierarchical": BlockSparseHierarchical,
    "adaptive": BlockSparseAdaptive,
    "multihead": BlockSparseRingMultiheadDilatedAttention,
    "auto": automatic_attention,
}


def create_block_sparse_attention(variant: str = "base", **options: Any) -> nn.Module:
    """Create a block-sparse attention module.

    Args:
        variant: "base", "ring", "hierarchical", "adaptive", "multihead" or "auto", which chooses by length and device.
        options: what that class takes; anything else is an error that lists what is possible.
    """
    if not isinstance(variant, str) or variant not in VARIANTS:
        raise ValueError(f"variant must be one of {sorted(VARIANTS)}, got {variant!r}")
    parameters = inspect.signature(VARIANTS[variant]).parameters
    possible = {name for name, p in parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
    possible |= set(getattr(VARIANTS[variant], "more_keywords", ()))
    unknown = sorted(set(options) - possible)
    if unknown:
        raise TypeError(f"unknown keyword {unknown[0]!r} for variant {variant!r}; it takes {sorted(possible)}")
    return VARIANTS[variant](**options)
