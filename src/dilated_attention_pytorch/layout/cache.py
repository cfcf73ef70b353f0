"""The one cache of layouts: bounded, least recently used out first."""

from __future__ import annotations

from functools import lru_cache

import torch

from ..patterns import Branches, Pattern
from .branches import layout_of_branches
from .layout import BlockLayout

CAPACITY = 100


@lru_cache(maxsize=CAPACITY)
def layout_for(
    pattern: Pattern, seq_q: int, seq_k: int, block_size: int | tuple[int, int], device: torch.device
) -> BlockLayout:
    """`BlockLayout.from_pattern`, remembered; for training too, whatever mode the first call was made in."""
    with torch.inference_mode(False):
        return BlockLayout.from_pattern(pattern, seq_q, seq_k, block_size=block_size, device=device)


@lru_cache(maxsize=CAPACITY)
def layout_for_branches(
    branches: Branches, seq_q: int, seq_k: int, num_heads: int, is_causal: bool, device: torch.device
) -> BlockLayout:
    """The same of `layout_of_branches`."""
    with torch.inference_mode(False):
        return layout_of_branches(branches, seq_q, seq_k, num_heads=num_heads, is_causal=is_causal, device=device)


def clear_layout_cache() -> None:
    """Forget every remembered layout and give its memory back."""
    layout_for.cache_clear()
    layout_for_branches.cache_clear()
