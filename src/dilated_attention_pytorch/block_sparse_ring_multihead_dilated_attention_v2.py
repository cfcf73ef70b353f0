"""Historical import path."""

from .compat import BlockSparseRingMultiheadDilatedAttentionV2 as BlockSparseRingMultiheadDilatedAttentionV2
