"""The public functions: checks, the choice of a backend, and the operators."""

from .block_sparse import attention_with_weights, block_sparse_attention
from .budget import split_budget
from .decode import decode_attention
from .dilated import dilated_attention
from .explain import Explanation, explain
from .fast_path import set_fast_path
from .fidelity import kept_mass
from .merge import merge_attention
from .scores import Antidiagonal, MeanPooled, MinMaxBound, Moments, SampledRows
from .select import block_masses, select_blocks
from .selectors import CumulativeMass, RelativeThreshold, SharedBudget, TopK
from .weights import BlockSparseWeights

__all__ = [
    "Antidiagonal",
    "BlockSparseWeights",
    "CumulativeMass",
    "Explanation",
    "MeanPooled",
    "MinMaxBound",
    "Moments",
    "RelativeThreshold",
    "SampledRows",
    "SharedBudget",
    "TopK",
    "attention_with_weights",
    "block_masses",
    "block_sparse_attention",
    "decode_attention",
    "dilated_attention",
    "explain",
    "kept_mass",
    "merge_attention",
    "select_blocks",
    "set_fast_path",
    "split_budget",
]
