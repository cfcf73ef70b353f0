"""Dropout that every backend, chunk order and device draws alike.

Whether a weight is kept is a hash of the seed, the (sample, head) stream, the query and the key: nothing is stored
between forward and backward, and no order of work changes the draw.
"""

from __future__ import annotations

from torch import Tensor

from ..patterns.blocks import MASK32, mix32


def keep_mask(seed: Tensor, dropout_p: float, stream: Tensor | int, query: Tensor, key: Tensor) -> Tensor:
    """bool, broadcast over `stream`, `query` and `key` (int64): True where the weight stays."""
    row = mix32(mix32(mix32(seed & MASK32) ^ stream) ^ query)
    return mix32(row ^ key) >= round(dropout_p * (MASK32 + 1))
