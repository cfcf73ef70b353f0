"""Attention over a sequence that is spread over the ranks of a process group."""

from .attention import ring_block_sparse_attention, ring_dilated_attention
from .batch import Shard, ShardMask, count_labels, load_shard, ring_loss, ring_mean, ring_sampler, shard_batch
from .cost import RingCost, ring_cost
from .exchange import RingError, Traffic, count_traffic
from .shard import Placement, shard_sequence, unshard_sequence

__all__ = [
    "Placement",
    "RingCost",
    "RingError",
    "Shard",
    "ShardMask",
    "Traffic",
    "count_labels",
    "count_traffic",
    "load_shard",
    "ring_block_sparse_attention",
    "ring_cost",
    "ring_dilated_attention",
    "ring_loss",
    "ring_mean",
    "ring_sampler",
    "shard_batch",
    "shard_sequence",
    "unshard_sequence",
]
