"""Modules over the operators.

One class a concept; a name of the seeds that differs only in version is the same class under another name.
"""

from .attention import (
    BlockSparseAttention,
    BlockSparseHierarchical,
    BlockSparseRingDilatedAttention,
    BlockSparseRingDilatedAttentionV2,
)
from .dilated import DilatedAttention, ImprovedDilatedAttention, ImprovedDilatedAttentionV2
from .factory import create_block_sparse_attention
from .multihead import (
    BlockSparseRingMultiheadDilatedAttention,
    BlockSparseRingMultiheadDilatedAttentionV2,
    ImprovedMultiheadDilatedAttention,
    Multihead,
    MultiheadDilatedAttention,
    magneto_gammas,
)

__all__ = [
    "BlockSparseAttention",
    "BlockSparseHierarchical",
    "BlockSparseRingDilatedAttention",
    "BlockSparseRingDilatedAttentionV2",
    "BlockSparseRingMultiheadDilatedAttention",
    "BlockSparseRingMultiheadDilatedAttentionV2",
    "DilatedAttention",
    "ImprovedDilatedAttention",
    "ImprovedDilatedAttentionV2",
    "ImprovedMultiheadDilatedAttention",
    "Multihead",
    "MultiheadDilatedAttention",
    "create_block_sparse_attention",
    "magneto_gammas",
]
