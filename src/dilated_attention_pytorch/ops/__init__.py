"""The public functions: checks, the choice of a backend, and the operators."""

from .block_sparse import attention_with_weights, block_sparse_attention
from .choose import Explanation, explain
from .dilated import dilated_attention
from .merge import merge_attention
from .weights import BlockSparseWeights

__all__ = [
    "BlockSparseWeights",
    "Explanation",
    "attention_with_weights",
    "block_sparse_attention",
    "dilated_attention",
    "explain",
    "merge_attention",
]
