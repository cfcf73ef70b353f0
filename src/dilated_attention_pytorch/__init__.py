"""Long-context attention for PyTorch: exact for the pattern you declare, linear in memory.

    from dilated_attention_pytorch import SlidingWindow, block_sparse_attention
    out = block_sparse_attention(q, k, v, SlidingWindow(left=1024, right=0))   # q, k, v: (batch, seq, heads, head_dim)

Importing this package loads torch and nothing else that is heavy.
"""

from .layout import AttentionCost, BlockLayout, PersistentPatternCache, set_pattern_cache
from .memory import (
    AttentionBuffers,
    BufferType,
    MemoryPool,
    max_sequence_length,
    plan_memory,
    recommend,
)
from .models import LongNet, LongNetConfig, LongNetLM
from .nn import (
    BlockSparseAttention,
    BlockSparseHierarchical,
    BlockSparseRingDilatedAttention,
    BlockSparseRingDilatedAttentionV2,
    BlockSparseRingMultiheadDilatedAttention,
    BlockSparseRingMultiheadDilatedAttentionV2,
    DilatedAttention,
    ImprovedDilatedAttention,
    ImprovedDilatedAttentionV2,
    ImprovedMultiheadDilatedAttention,
    MultiheadDilatedAttention,
    create_block_sparse_attention,
)
from .ops import (
    BlockSparseWeights,
    Explanation,
    block_sparse_attention,
    dilated_attention,
    explain,
    merge_attention,
)
from .patterns import (
    Blocks,
    Branches,
    Causal,
    DilatedBlocks,
    Documents,
    Full,
    GlobalBlocks,
    GlobalTokens,
    LocalBlocks,
    Pattern,
    PerHead,
    RandomBlocks,
    SlidingWindow,
    SparsePatternConfig,
    hierarchical,
)

__version__ = "0.1.0"

__all__ = [
    "AttentionBuffers",
    "AttentionCost",
    "BlockLayout",
    "BlockSparseAttention",
    "BlockSparseHierarchical",
    "BlockSparseRingDilatedAttention",
    "BlockSparseRingDilatedAttentionV2",
    "BlockSparseRingMultiheadDilatedAttention",
    "BlockSparseRingMultiheadDilatedAttentionV2",
    "BlockSparseWeights",
    "Blocks",
    "Branches",
    "BufferType",
    "Causal",
    "DilatedAttention",
    "DilatedBlocks",
    "Documents",
    "Explanation",
    "Full",
    "GlobalBlocks",
    "GlobalTokens",
    "ImprovedDilatedAttention",
    "ImprovedDilatedAttentionV2",
    "ImprovedMultiheadDilatedAttention",
    "LocalBlocks",
    "LongNet",
    "LongNetConfig",
    "LongNetLM",
    "MemoryPool",
    "MultiheadDilatedAttention",
    "Pattern",
    "PerHead",
    "PersistentPatternCache",
    "RandomBlocks",
    "SlidingWindow",
    "SparsePatternConfig",
    "block_sparse_attention",
    "create_block_sparse_attention",
    "dilated_attention",
    "explain",
    "hierarchical",
    "max_sequence_length",
    "merge_attention",
    "plan_memory",
    "recommend",
    "set_pattern_cache",
]
