"""Long-context attention for PyTorch: exact for the pattern you declare, linear in memory.

    from dilated_attention_pytorch import SlidingWindow, block_sparse_attention
    out = block_sparse_attention(q, k, v, SlidingWindow(left=1024, right=0))   # q, k, v: (batch, seq, heads, head_dim)

Importing this package loads torch and nothing else that is heavy. The names below are those that most programs need;
every other public name, of a folder or of `compat`, can be imported from here as well.
"""

from . import compat, distributed, layout, memory, models, nn, ops, patterns, planning
from .distributed import (
    Placement,
    ring_block_sparse_attention,
    ring_dilated_attention,
    shard_sequence,
    unshard_sequence,
)
from .layout import BlockLayout
from .models import LongNet, LongNetConfig, LongNetLM
from .nn import (
    Adaptive,
    BlockSparseAdaptive,
    BlockSparseAttention,
    DilatedAttention,
    MultiheadDilatedAttention,
    SparsitySchedule,
)
from .ops import (
    CumulativeMass,
    RelativeThreshold,
    ScoreBias,
    SharedBudget,
    TopK,
    block_sparse_attention,
    decode_attention,
    dilated_attention,
    explain,
    merge_attention,
    select_blocks,
)
from .patterns import (
    Blocks,
    Branches,
    Causal,
    DilatedBlocks,
    Documents,
    Full,
    GlobalTokens,
    PerHead,
    RandomBlocks,
    SlidingWindow,
    presets,
)
from .planning import max_sequence_length, plan_memory

__version__ = "0.1.0"

__all__ = [
    "Adaptive",
    "BlockLayout",
    "BlockSparseAdaptive",
    "BlockSparseAttention",
    "Blocks",
    "Branches",
    "Causal",
    "CumulativeMass",
    "DilatedAttention",
    "DilatedBlocks",
    "Documents",
    "Full",
    "GlobalTokens",
    "LongNet",
    "LongNetConfig",
    "LongNetLM",
    "MultiheadDilatedAttention",
    "PerHead",
    "Placement",
    "RandomBlocks",
    "RelativeThreshold",
    "ScoreBias",
    "SharedBudget",
    "SlidingWindow",
    "SparsitySchedule",
    "TopK",
    "block_sparse_attention",
    "decode_attention",
    "dilated_attention",
    "explain",
    "max_sequence_length",
    "merge_attention",
    "plan_memory",
    "presets",
    "ring_block_sparse_attention",
    "ring_dilated_attention",
    "select_blocks",
    "shard_sequence",
    "unshard_sequence",
]

_FOLDERS = (patterns, layout, memory, ops, planning, distributed, nn, models, compat)


def __getattr__(name: str) -> object:
    if not name.startswith("_"):
        for folder in _FOLDERS:
            if name in folder.__all__:
                return getattr(folder, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *(name for folder in _FOLDERS for name in folder.__all__)})
