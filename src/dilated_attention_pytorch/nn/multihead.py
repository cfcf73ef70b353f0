"""Multihead attention with projections, by the conventions (and the parameter names) of `nn.MultiheadAttention`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..ops import BlockSparseWeights
from ..ops.checks import check_masks
from ..patterns import SparsePatternConfig
from ..patterns.base import check_flag, check_int
from .adaptive import BlockSparseAdaptive
from .attention import BlockSparseRingDilatedAttention, one_config


class BlockSparseRingMultiheadDilatedAttention(nn.Module):
    """Projections around `BlockSparseRingDilatedAttention`.

    The parameters are those of `nn.MultiheadAttention`, so `load_state_dict(mha.state_dict())` just works. A plain
    tensor comes back; `need_weights=True` (or its other name `return_attention_weights`) gives a pair.

    Args:
        embed_dim, num_heads: as in `nn.MultiheadAttention`.
        segment_lengths, dilation_rates, sparse_config, pattern fields, scale, dropout, attention_dropout, backend:
            as in `BlockSparseRingDilatedAttention`.
        num_kv_heads: key and value heads, fewer than `num_heads` for grouped queries; `num_heads` by default.
        bias: whether the projections have biases.
        kdim, vdim: features of key and value, `embed_dim` by default.
        batch_first: (batch, seq, embed) if True, the default, else (seq, batch, embed).
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        sparse_config: SparsePatternConfig | None = None,
        *,
        num_kv_heads: int | None = None,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = True,
        scale: float | None = None,
        dropout: float | None = None,
        attention_dropout: float | None = None,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **pattern_fields: Any,
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        check_flag("batch_first", batch_first)
        check_flag("bias", bias)
        self.batch_first = batch_first
        for name in ("embed_dim", "num_heads", "num_kv_heads", "kdim", "vdim"):
            check_int(name, getattr(self, name), least=1)
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}")
        if num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {self.num_kv_heads}")
        self.head_dim = embed_dim // num_heads
        config = one_config(sparse_config, pattern_fields)
        inner: dict[str, Any] = {
            "sparse_config": config,
            "scale": scale,
            "dropout": dropout,
            "attention_dropout": attention_dropout,
            "backend": backend,
        }
        if not config.is_adaptive or segment_lengths is not None or dilation_rates is not None:
            inner |= {"segment_lengths": segment_lengths, "dilation_rates": dilation_rates}
        self.attention = (BlockSparseAdaptive if config.is_adaptive else BlockSparseRingDilatedAttention)(**inner)
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        widths = [embed_dim, self.num_kv_heads * self.head_dim, self.num_kv_heads * self.head_dim]
        self._widths = widths
        self._packed = self.kdim == self.vdim == embed_dim
        if self._packed:
            self.in_proj_weight = nn.Parameter(torch.empty(sum(widths), embed_dim, **options))
        else:
            self.q_proj_weight = nn.Parameter(torch.empty(widths[0], embed_dim, **options))
            self.k_proj_weight = nn.Parameter(torch.empty(widths[1], self.kdim, **options))
            self.v_proj_weight = nn.Parameter(torch.empty(widths[2], self.vdim, **options))
        self.in_proj_bias = nn.Parameter(torch.empty(sum(widths), **options)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **options)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `nn.MultiheadAttention` does."""
        for name, parameter in self.named_parameters():
            if name.endswith("proj_weight"):
                nn.init.xavier_uniform_(parameter)
        if self.in_proj_bias is not None and self.out_proj.bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = False,
        return_attention_weights: bool = False,
        *,
        key_padding_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, BlockSparseWeights]:
        """Attend. Masks are (batch, seq_k) as in `block_sparse_attention`, whatever `batch_first` says."""
        check_flag("is_causal", is_causal)
        check_flag("need_weights", need_weights)
        check_flag("return_attention_weights", return_attention_weights)
        self._check(query, key, value)
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        check_masks(query, key, key_padding_mask, document_ids)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in self._project(query, key, value))
        with_weights = need_weights or return_attention_weights
        result = self.attention(
            q, k, v, is_causal, with_weights, key_padding_mask=key_padding_mask, document_ids=document_ids
        )
        out = self.out_proj((result[0] if with_weights else result).flatten(2))
        out = out if self.batch_first else out.transpose(0, 1)
        return (out, result[1]) if with_weights else out

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        order = "(batch, seq, features)" if self.batch_first else "(seq, batch, features)"
        batch_dim = 0 if self.batch_first else 1
        dtype = self.out_proj.weight.dtype
        for name, x, width in (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)):
            if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[2] != width:
                got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(f"{name} must be {order} with {width} features, got {got}")
            cast = x.is_floating_point() and x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type)
            if x.dtype != dtype and not cast:
                raise TypeError(f"{name} must have the dtype of the parameters, {dtype}, got {x.dtype}")
            if x.device != self.out_proj.weight.device:
                raise ValueError(
                    f"{name} must be on the device of the parameters, {self.out_proj.weight.device}, got {x.device}"
                )
            if x.shape[batch_dim] != query.shape[batch_dim]:
                sizes = query.shape[batch_dim], x.shape[batch_dim]
                raise ValueError(f"{name} must have the batch size of query, {sizes[0]}, got {sizes[1]}")
        if key.shape[:2] != value.shape[:2]:
            raise ValueError(f"key and value must have the same length, got {list(key.shape)} and {list(value.shape)}")

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        if self._packed:
            if query is key and key is value:
                return linear(query, self.in_proj_weight, self.in_proj_bias).split(self._widths, dim=-1)
            weights: Sequence[Tensor] = self.in_proj_weight.split(self._widths)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.split(self._widths)
        return [linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]


BlockSparseRingMultiheadDilatedAttentionV2 = BlockSparseRingMultiheadDilatedAttention
