"""Long-context attention for PyTorch: exact for the pattern you declare, linear in memory.

    from dilated_attention_pytorch import SlidingWindow, block_sparse_attention
    out = block_sparse_attention(q, k, v, SlidingWindow(left=1024, right=0))   # q, k, v: (batch, seq, heads, head_dim)

Importing this package loads torch and nothing else that is heavy.
"""

from .layout import AttentionCost, BlockLayout
from .nn import (
    BlockSparseAttention,
    BlockSparseHierarchical,
    BlockSparseRingDilatedAttention,
    BlockSparseRingDilatedAttentionV2,
    BlockSparseRingMultiheadDilatedAttention,
    BlockSparseRingMultiheadDilatedAttentionV2,
    create_block_sparse_attention,
)
from .ops import (
    Antidiagonal,
    BlockSparseWeights,
    CumulativeMass,
    Explanation,
    MeanPooled,
    MinMaxBound,
    Moments,
    RelativeThreshold,
    SampledRows,
    SharedBudget,
    TopK,
    block_masses,
    block_sparse_attention,
    explain,
    kept_mass,
    merge_attention,
    select_blocks,
)
from .patterns import (
    Blocks,
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
    "Antidiagonal",
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
    "Causal",
    "CumulativeMass",
    "DilatedBlocks",
    "Documents",
    "Explanation",
    "Full",
    "GlobalBlocks",
    "GlobalTokens",
    "LocalBlocks",
    "MeanPooled",
    "MinMaxBound",
    "Moments",
    "Pattern",
    "PerHead",
    "RandomBlocks",
    "RelativeThreshold",
    "SampledRows",
    "SharedBudget",
    "SlidingWindow",
    "SparsePatternConfig",
    "TopK",
    "block_masses",
    "block_sparse_attention",
    "create_block_sparse_attention",
    "explain",
    "hierarchical",
    "kept_mass",
    "merge_attention",
    "select_blocks",
]
