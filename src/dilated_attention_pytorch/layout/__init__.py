"""Which blocks: a pattern, for given lengths and block sizes, as lists of active blocks."""

from .cache import clear_layout_cache, layout_for
from .cost import AttentionCost
from .layout import BlockLayout, BlockList

__all__ = ["AttentionCost", "BlockLayout", "BlockList", "clear_layout_cache", "layout_for"]
