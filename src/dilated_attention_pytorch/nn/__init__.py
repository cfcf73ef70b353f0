"""Modules over the operators: one class for each concept. Other names of them are in `compat`."""

from .adaptive import BlockSparseAdaptive
from .adaptive_rule import Adaptive
from .attention import (
    BlockSparseAttention,
    BlockSparseHierarchical,
    BlockSparseRingDilatedAttention,
)
from .dilated import (
    DilatedAttention,
)
from .factory import create_block_sparse_attention
from .gate import BlockGate, gate_loss
from .multihead import (
    BlockSparseRingMultiheadDilatedAttention,
    Multihead,
    MultiheadDilatedAttention,
    magneto_gammas,
)
from .schedule import SparsitySchedule

__all__ = [
    "Adaptive",
    "BlockGate",
    "BlockSparseAdaptive",
    "BlockSparseAttention",
    "BlockSparseHierarchical",
    "BlockSparseRingDilatedAttention",
    "BlockSparseRingMultiheadDilatedAttention",
    "DilatedAttention",
    "Multihead",
    "MultiheadDilatedAttention",
    "SparsitySchedule",
    "create_block_sparse_attention",
    "gate_loss",
    "magneto_gammas",
]
