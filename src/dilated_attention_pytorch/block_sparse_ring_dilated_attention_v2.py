"""Historical import path."""

from .compat import BlockSparseRingDilatedAttentionV2 as BlockSparseRingDilatedAttentionV2
from .patterns import SparsePatternConfig as SparsePatternConfig
