"""Layouts: the active blocks of a pattern, as lists, for given lengths and block sizes."""

from .branches import layout_of_branches
from .cache import (
    PersistentPatternCache,
    clear_layout_cache,
    layout_for,
    layout_for_branches,
    pattern_cache,
    set_pattern_cache,
)
from .cost import AttentionCost
from .layout import BlockLayout
from .lists import BlockList

__all__ = [
    "AttentionCost",
    "BlockLayout",
    "BlockList",
    "PersistentPatternCache",
    "clear_layout_cache",
    "layout_for",
    "layout_for_branches",
    "layout_of_branches",
    "pattern_cache",
    "set_pattern_cache",
]
