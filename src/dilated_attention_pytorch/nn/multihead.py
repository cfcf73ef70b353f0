"""Multihead attention with projections, by the conventions (and the parameter names) of `nn.MultiheadAttention`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..distributed import Placement
from ..distributed.exchange import Group
from ..ops import BlockSparseWeights
from ..ops.checks import check_dense, check_device_and_dtype, check_masks
from ..ops.choose import has_autocast
from ..options import OptionKeywords
from ..patterns import SparsePatternConfig
from ..patterns.base import check_flag, check_int
from ..patterns.branches import check_heads
from .adaptive import BlockSparseAdaptive
from .attention import BlockSparseRingDilatedAttention, check_segments, one_config, unused_of
from .dilated import DilatedAttention
from .pooled import split_pool_options
from .ringed import Ringed, heard_by_all


class Multihead(Ringed, nn.Module):
    """Projections around an attention module, which takes (batch, seq, heads, head_dim).

    The parameters are those of `nn.MultiheadAttention`, so `load_state_dict(mha.state_dict())` just works. A plain
    tensor comes back; `need_weights=True` (or its other name `return_attention_weights`) gives a pair.
    """

    def __init__(
        self,
        attention: nn.Module,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = True,
        layer_norm: bool = False,
        layer_norm_eps: float | None = None,
        gamma_init: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
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
        check_flag("layer_norm", layer_norm)
        for name, value in (("gamma_init", gamma_init), ("layer_norm_eps", layer_norm_eps)):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and 0 < value < math.inf):
                raise ValueError(f"{name} must be a positive number or None, got {value!r}")
        if layer_norm_eps is not None and not layer_norm:
            raise ValueError(f"layer_norm_eps has no meaning without layer_norm=True, got {layer_norm_eps}")
        self.gamma_init = gamma_init
        self.attention = attention
        self._ring = getattr(attention, "_ring", None)
        for name in ("memory_pool", "buffer_manager"):
            if hasattr(attention, name):
                setattr(self, name, getattr(attention, name))
        check_device_and_dtype(device, dtype)
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
        self.layer_norm = nn.LayerNorm(embed_dim, eps=layer_norm_eps or 1e-5, **options) if layer_norm else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **options)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `nn.MultiheadAttention` does; with `gamma_init` as MAGNETO does, which scales values and output by it."""
        if self.gamma_init is None:
            for name, parameter in self.named_parameters():
                if name.endswith("proj_weight"):
                    nn.init.xavier_uniform_(parameter)
        else:
            gains = (1.0, 1.0, self.gamma_init, self.gamma_init)
            with torch.no_grad():
                for weight, gain in zip((*self._weights(), self.out_proj.weight), gains, strict=True):
                    nn.init.xavier_normal_(weight, gain=gain)
        if self.in_proj_bias is not None and self.out_proj.bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        if self.layer_norm is not None:
            self.layer_norm.reset_parameters()

    @heard_by_all
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_causal: bool = False,
        return_attention_weights: bool = False,
        *,
        need_weights: bool = False,
        placement: Placement | None = None,
        **options: Unpack[OptionKeywords],
    ) -> Tensor | tuple[Tensor, BlockSparseWeights]:
        """Attend. Masks are (batch, seq_k) whatever `batch_first` says, True where a key is padding; they and further
        options are those of the attention inside. Over a ring all tensors are this rank's shards, and `placement` says
        of which tokens."""
        with_weights = either(return_attention_weights, need_weights)
        ring: Any = {} if placement is None else {"placement": placement}
        return self._attend(query, key, value, is_causal, with_weights, **ring, **options)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, with_weights: bool, **options: Any
    ) -> Any:
        check_flag("is_causal", is_causal)
        self._check(query, key, value)
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        check_masks(query, key, options.get("key_padding_mask"), options.get("document_ids"))
        result = self.attention(*self.project_in(query, key, value), is_causal, with_weights, **options)
        out = self.project_out(result[0] if with_weights else result)
        out = out if self.batch_first else out.transpose(0, 1)
        return (out, result[1]) if with_weights else out

    def project_in(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        """q, k, v as (batch, seq, heads, head_dim), of inputs that are (batch, seq, features)."""
        if self._packed and query is key and key is value:
            projected: Sequence[Tensor] = linear(query, self.in_proj_weight, self.in_proj_bias).split(self._widths, -1)
        else:
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.split(self._widths)
            weights = self._weights()
            projected = [linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]
        return [x.unflatten(-1, (-1, self.head_dim)) for x in projected]

    def project_out(self, out: Tensor) -> Tensor:
        """(batch, seq, embed_dim) of the heads' results, through the layer norm if there is one."""
        out = out.flatten(2)
        return self.out_proj(out if self.layer_norm is None else self.layer_norm(out))

    def extra_repr(self) -> str:
        told = {"embed_dim": self.embed_dim, "num_heads": self.num_heads}
        for name, usual in (
            ("num_kv_heads", self.num_heads),
            ("kdim", self.embed_dim),
            ("vdim", self.embed_dim),
            ("batch_first", True),
        ):
            if getattr(self, name) != usual:
                told[name] = getattr(self, name)
        return ", ".join(f"{name}={value}" for name, value in told.items())

    def get_buffer_stats(self) -> dict[str, Any]:
        """See `Pooled`."""
        return self.attention.get_buffer_stats()  # type: ignore[operator]

    def _weights(self) -> Sequence[Tensor]:
        if self._packed:
            return self.in_proj_weight.split(self._widths)
        return self.q_proj_weight, self.k_proj_weight, self.v_proj_weight

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        order = "(batch, seq, features)" if self.batch_first else "(seq, batch, features)"
        batch_dim = 0 if self.batch_first else 1
        weight = self.in_proj_weight if self._packed else self.q_proj_weight  # that of `out_proj` may be quantized
        dtype = weight.dtype
        for name, x, width in (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)):
            if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[2] != width:
                got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(f"{name} must be {order} with {width} features, got {got}")
            check_dense(name, x)
            cast = x.is_floating_point() and x.dtype != torch.float64 and has_autocast(x.device.type)
            if x.dtype != dtype and not cast:
                raise TypeError(f"{name} must have the dtype of the parameters, {dtype}, got {x.dtype}")
            if x.device != weight.device:
                raise ValueError(f"{name} must be on the device of the parameters, {weight.device}, got {x.device}")
            if x.shape[batch_dim] != query.shape[batch_dim]:
                sizes = query.shape[batch_dim], x.shape[batch_dim]
                raise ValueError(f"{name} must have the batch size of query, {sizes[0]}, got {sizes[1]}")
        if key.shape[:2] != value.shape[:2]:
            raise ValueError(f"key and value must have the same length, got {list(key.shape)} and {list(value.shape)}")


class BlockSparseRingMultiheadDilatedAttention(Multihead):
    """Projections around `BlockSparseRingDilatedAttention`; see `Multihead`.

    Args:
        embed_dim, num_heads: as in `nn.MultiheadAttention`.
        segment_lengths, dilation_rates, sparse_config: as in `BlockSparseRingDilatedAttention`; so are the fields of
            a pattern, scale, dropout, attention_dropout, backend and ring_group.
        num_kv_heads: key and value heads, fewer than `num_heads` for grouped queries; `num_heads` by default.
        bias: whether the projections have biases.
        kdim, vdim: features of key and value, `embed_dim` by default.
        batch_first: (batch, seq, embed) if True, the default, else (seq, batch, embed).
    """

    more_keywords = BlockSparseRingDilatedAttention.more_keywords

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
        ring_group: Group | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        pool_options, pattern_fields = split_pool_options(options)
        config = one_config(sparse_config, pattern_fields)
        inner: dict[str, Any] = {
            "sparse_config": config,
            "scale": scale,
            "dropout": dropout,
            "attention_dropout": attention_dropout,
            "backend": backend,
            **pool_options,
        }
        check_segments(segment_lengths, dilation_rates)
        if ring_group is not None:
            if config.is_adaptive:
                raise ValueError(
                    "ring_group has no meaning for pattern_type 'adaptive', whose blocks are chosen from all keys; "
                    "leave it out"
                )
            inner["ring_group"] = ring_group
        attention: BlockSparseAdaptive | BlockSparseRingDilatedAttention
        if config.is_adaptive:
            attention = BlockSparseAdaptive(**inner)
            attention.unused = unused_of(config, segment_lengths, dilation_rates)
        else:
            attention = BlockSparseRingDilatedAttention(segment_lengths, dilation_rates, **inner)
        super().__init__(
            attention,
            embed_dim,
            num_heads,
            num_kv_heads=num_kv_heads,
            bias=bias,
            kdim=kdim,
            vdim=vdim,
            batch_first=batch_first,
            device=device,
            dtype=dtype,
        )


class MultiheadDilatedAttention(Multihead):
    """Projections around `DilatedAttention`; see `Multihead`.

    Args:
        embed_dim, num_heads: as in `nn.MultiheadAttention`.
        segment_lengths, dilation_rates, head_offsets, detach_branch_weights, padding: as in `DilatedAttention`; so are
            scale, dropout, attention_dropout, backend, ring_group and the options of the memory pool.
        num_kv_heads, bias, kdim, vdim, batch_first: as in `BlockSparseRingMultiheadDilatedAttention`.
        layer_norm, layer_norm_eps: MAGNETO's layer norm before the output projection; off by default, 1e-5.
        gamma_init: start as MAGNETO does, values and output scaled by this; see `magneto_gammas`. By default the
            parameters start as those of `nn.MultiheadAttention` do.
    """

    more_keywords = DilatedAttention.more_keywords

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        *,
        head_offsets: str = "interleaved",
        detach_branch_weights: bool = False,
        padding: str | None = None,
        num_kv_heads: int | None = None,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = True,
        layer_norm: bool = False,
        layer_norm_eps: float | None = None,
        gamma_init: float | None = None,
        scale: float | None = None,
        dropout: float | None = None,
        attention_dropout: float | None = None,
        backend: str = "auto",
        ring_group: Group | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **pool_options: Any,
    ) -> None:
        attention = DilatedAttention(
            segment_lengths,
            dilation_rates,
            head_offsets=head_offsets,
            detach_branch_weights=detach_branch_weights,
            padding=padding,
            scale=scale,
            dropout=dropout,
            attention_dropout=attention_dropout,
            backend=backend,
            ring_group=ring_group,
            **pool_options,
        )
        super().__init__(
            attention,
            embed_dim,
            num_heads,
            num_kv_heads=num_kv_heads,
            bias=bias,
            kdim=kdim,
            vdim=vdim,
            batch_first=batch_first,
            layer_norm=layer_norm,
            layer_norm_eps=layer_norm_eps,
            gamma_init=gamma_init,
            device=device,
            dtype=dtype,
        )
        check_heads(attention.dilation_rates, num_heads)


def either(return_attention_weights: bool, need_weights: bool) -> bool:
    """Two names of one wish."""
    check_flag("return_attention_weights", return_attention_weights)
    check_flag("need_weights", need_weights)
    return return_attention_weights or need_weights


def magneto_gammas(encoder_layers: int = 0, decoder_layers: int = 0) -> tuple[float, float]:
    """MAGNETO's `gamma_init` of an encoder's and of a decoder's layers, by how many there are; 1 where there are none.

    Alone, N layers take sqrt(log 2N). Together, N encoder and M decoder layers take sqrt(log 3M · log 2N / 3) and
    sqrt(log 3M).
    """
    check_int("encoder_layers", encoder_layers, least=0)
    check_int("decoder_layers", decoder_layers, least=0)
    if encoder_layers and decoder_layers:
        decoder = math.log(3 * decoder_layers)
        return math.sqrt(decoder * math.log(2 * encoder_layers) / 3), math.sqrt(decoder)
    encoder, decoder = (math.sqrt(math.log(2 * n)) if n else 1.0 for n in (encoder_layers, decoder_layers))
    return encoder, decoder
