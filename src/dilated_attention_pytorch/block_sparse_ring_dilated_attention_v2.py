"""Historical import path."""

from .nn import BlockSparseRingDilatedAttentionV2 as BlockSparseRingDilatedAttentionV2
from .patterns import SparsePatternConfig as SparsePatternConfig
