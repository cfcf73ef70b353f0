"""Modules over the operators.

One class a concept; a name of the seeds that differs only in version is the same class under another name.
"""

from .adaptive import BlockSparseAdaptive
from .attention import (
    BlockSparseAttention,
    BlockSparseHierarchical,
    BlockSparseRingDilatedAttention,
    BlockSparseRingDilatedAttentionV2,
)
from .dilated import (
    DilatedAttention,
    ImprovedDilatedAttention,
    ImprovedDilatedAttentionV2,
    RingDilatedAttentionProduction,
    RingDilatedAttentionV2,
)
from .factory import create_block_sparse_attention
from .gate import BlockGate, gate_loss
from .multihead import (
    BlockSparseRingMultiheadDilatedAttention,
    BlockSparseRingMultiheadDilatedAttentionV2,
    ImprovedMultiheadDilatedAttention,
    Multihead,
    MultiheadDilatedAttention,
    magneto_gammas,
)
from .schedule import SparsitySchedule

__all__ = [
    "BlockGate",
    "BlockSparseAdaptive",
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
    "RingDilatedAttentionProduction",
    "RingDilatedAttentionV2",
    "SparsitySchedule",
    "create_block_sparse_attention",
    "gate_loss",
    "magneto_gammas",
]
