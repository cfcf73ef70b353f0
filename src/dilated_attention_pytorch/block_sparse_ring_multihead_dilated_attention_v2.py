"""Historical import path."""

from .nn import BlockSparseRingMultiheadDilatedAttentionV2 as BlockSparseRingMultiheadDilatedAttentionV2
