"""Historical import path."""

from .nn import BlockSparseRingDilatedAttention as BlockSparseRingDilatedAttention
from .patterns import SparsePatternConfig as SparsePatternConfig
