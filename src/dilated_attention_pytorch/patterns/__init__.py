"""Who may attend: patterns are values made of integers.

A pattern answers one question, `pattern.allows(query, key, seq_q, seq_k)`, and nothing else: it knows no tensor, no
device and no length until it is asked. Patterns compare by value, can be hashed, and combine with `&` (both allow) and
`|` (at least one allows). `layout.BlockLayout.from_pattern` turns one into lists of blocks.

Positions: keys are numbered 0 … seq_k − 1. The last query is aligned with the last key, so query `i` stands at
position `i + seq_k − seq_q`; for equal lengths that is `i`.
"""

from . import presets
from .base import And, Or, Pattern, PerHead
from .blocks import Blocks, DilatedBlocks, GlobalBlocks, LocalBlocks, RandomBlocks, hierarchical
from .branches import Branches
from .config import HIERARCHICAL_PRESETS, SparsePatternConfig
from .ranges import BlockDiffusion, Chunks, Documents, DocumentSinks, KeyRanges, PrefixLM, RangePattern, VerticalSlash
from .space import GridPattern, Neighborhood, SlidingTiles
from .tokens import Causal, Full, GlobalTokens, SlidingWindow, StrictlyCausal

__all__ = [
    "HIERARCHICAL_PRESETS",
    "And",
    "BlockDiffusion",
    "Blocks",
    "Branches",
    "Causal",
    "Chunks",
    "DilatedBlocks",
    "DocumentSinks",
    "Documents",
    "Full",
    "GlobalBlocks",
    "GlobalTokens",
    "GridPattern",
    "KeyRanges",
    "LocalBlocks",
    "Neighborhood",
    "Or",
    "Pattern",
    "PerHead",
    "PrefixLM",
    "RandomBlocks",
    "RangePattern",
    "SlidingTiles",
    "SlidingWindow",
    "SparsePatternConfig",
    "StrictlyCausal",
    "VerticalSlash",
    "hierarchical",
    "presets",
]
