# ruff: noqa: E501 - a case is a line
"""Bad arguments of what puts patterns into models of plain PyTorch."""

import torch
from torch import nn

from dilated_attention_pytorch import Causal, SlidingWindow
from dilated_attention_pytorch.integrations.pytorch import replace_attention, sdpa_with
from dilated_attention_pytorch.integrations.torchscale import replace_dilated_attention

X = torch.ones(1, 2, 16, 8)


def model():
    return nn.TransformerEncoderLayer(16, 2, batch_first=True)


BAD = {
    "no model": (lambda: replace_attention(None, Causal()), TypeError, "model must be an nn.Module, got None"),
    "a model's class": (lambda: replace_attention(nn.Transformer, Causal()), TypeError, "model must be an nn.Module, got <class"),
    "a model by name": (lambda: replace_attention("bert", Causal()), TypeError, "model must be an nn.Module, got 'bert'"),
    "no pattern": (lambda: replace_attention(model(), None), TypeError, "pattern must be a Pattern, got NoneType"),
    "a pattern's class": (lambda: replace_attention(model(), SlidingWindow), TypeError, "pattern must be a Pattern, got ABCMeta"),
    "one name": (lambda: replace_attention(model(), Causal(), names="self_attn"), TypeError, "names must be a collection of names of modules, got 'self_attn'"),
    "a number of names": (lambda: replace_attention(model(), Causal(), names=1), TypeError, "names must be a collection of names of modules, got 1"),
    "a name that is none": (lambda: replace_attention(model(), Causal(), names=["attn"]), ValueError, r"the model has no nn.MultiheadAttention named \['attn'\]"),
    "a model without attention": (lambda: replace_attention(nn.Linear(2, 2), Causal()), ValueError, "the model has no nn.MultiheadAttention to replace"),
    "attention itself": (lambda: replace_attention(nn.MultiheadAttention(8, 2), Causal()), ValueError, "an nn.MultiheadAttention itself cannot be replaced in place"),
    "backend of all": (lambda: replace_attention(model(), Causal(), backend="flash"), ValueError, "backend must be one of .* got 'flash'"),
    "no model of torchscale": (lambda: replace_dilated_attention(None), TypeError, "model must be an nn.Module, got None"),
    "a model without torchscale's attention": (lambda: replace_dilated_attention(model()), ValueError, "the model has no DilatedAttention of torchscale to replace, got TransformerEncoderLayer"),
    "padding of torchscale": (lambda: replace_dilated_attention(model(), padding="zeros"), ValueError, "padding must be 'zero_keys' or None, got 'zeros'"),
    "gradients of torchscale": (lambda: replace_dilated_attention(model(), detach_branch_weights=1), TypeError, "detach_branch_weights must be True or False, got 1"),
    "backend of torchscale": (lambda: replace_dilated_attention(model(), backend="flash_attn"), ValueError, "backend must be one of .* got 'flash_attn'"),
    "no pattern for a function": (lambda: sdpa_with(None), TypeError, "pattern must be a Pattern, got NoneType"),
    "backend of a function": (lambda: sdpa_with(Causal(), backend="flash"), ValueError, "backend must be one of .* got 'flash'"),
    "a sparse query": (lambda: sdpa_with(Causal())(X.to_sparse(), X, X), TypeError, "q must be dense, got a tensor of layout torch.sparse_coo"),
    "a query of three dimensions": (lambda: sdpa_with(Causal())(X[0], X, X), ValueError, r"query must be \(batch, heads, seq, head_dim\), got \[2, 16, 8\]"),
    "grouped heads unasked": (lambda: sdpa_with(Causal())(X, X[:, :1], X[:, :1]), ValueError, "query and key must have as many heads without enable_gqa, got 2 and 1"),
}  # fmt: skip
