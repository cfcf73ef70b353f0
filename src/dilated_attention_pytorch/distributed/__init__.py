"""Attention over a sequence that is spread over the ranks of a process group."""

from .cost import RingCost, ring_cost
from .exchange import RingError, Traffic, count_traffic
from .ring import ring_block_sparse_attention, ring_dilated_attention
from .shard import Placement, shard_sequence, unshard_sequence

__all__ = [
    "Placement",
    "RingCost",
    "RingError",
    "Traffic",
    "count_traffic",
    "ring_block_sparse_attention",
    "ring_cost",
    "ring_dilated_attention",
    "shard_sequence",
    "unshard_sequence",
]
