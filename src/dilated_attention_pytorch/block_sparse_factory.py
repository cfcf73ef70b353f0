"""Historical import path."""

from .nn import create_block_sparse_attention as create_block_sparse_attention
