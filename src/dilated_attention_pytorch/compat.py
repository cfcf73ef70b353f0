"""Names of the design documents that this library has under another name: old on the left, new on the right.

They can be imported from here, from the package root, and from the module paths that the documents use. New code takes
the name on the right; docs/names.md says what each of them does.
"""

from .nn import (
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    DilatedAttention,
    MultiheadDilatedAttention,
)

BlockSparseRingDilatedAttentionV2 = BlockSparseRingDilatedAttention
BlockSparseRingMultiheadDilatedAttentionV2 = BlockSparseRingMultiheadDilatedAttention
ImprovedDilatedAttention = DilatedAttention
ImprovedDilatedAttentionV2 = DilatedAttention
ImprovedMultiheadDilatedAttention = MultiheadDilatedAttention
RingDilatedAttentionProduction = DilatedAttention
RingDilatedAttentionV2 = DilatedAttention

__all__ = [
    "BlockSparseRingDilatedAttentionV2",
    "BlockSparseRingMultiheadDilatedAttentionV2",
    "ImprovedDilatedAttention",
    "ImprovedDilatedAttentionV2",
    "ImprovedMultiheadDilatedAttention",
    "RingDilatedAttentionProduction",
    "RingDilatedAttentionV2",
]
