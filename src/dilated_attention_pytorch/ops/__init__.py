"""The public functions: checks, the choice of a backend, and the operators."""

from .bias import ScoreBias
from .block_sparse import attention_with_weights, block_sparse_attention
from .budget import split_budget
from .cache_blocks import BlockSummaries, CacheBlocks
from .decode import decode_attention, explain_decode
from .dilated import dilated_attention
from .explain import Explanation, explain
from .fast_path import set_fast_path
from .fidelity import kept_mass
from .merge import merge_attention
from .scores import Antidiagonal, MeanPooled, MinMaxBound, Moments, SampledRows
from .select import block_masses, select_blocks
from .selectors import CumulativeMass, RelativeThreshold, SharedBudget, TopK
from .token_order import permute, tile_order, unpermute
from .warm_up import warm_up
from .weights import BlockSparseWeights

__all__ = [
    "Antidiagonal",
    "BlockSparseWeights",
    "BlockSummaries",
    "CacheBlocks",
    "CumulativeMass",
    "Explanation",
    "MeanPooled",
    "MinMaxBound",
    "Moments",
    "RelativeThreshold",
    "SampledRows",
    "ScoreBias",
    "SharedBudget",
    "TopK",
    "attention_with_weights",
    "block_masses",
    "block_sparse_attention",
    "decode_attention",
    "dilated_attention",
    "explain",
    "explain_decode",
    "kept_mass",
    "merge_attention",
    "permute",
    "select_blocks",
    "set_fast_path",
    "split_budget",
    "tile_order",
    "unpermute",
    "warm_up",
]
