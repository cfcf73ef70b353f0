"""Block-sparse attention as modules: q, k, v in, out (and, if asked for, the sparse weights) out. No parameters."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from ..distributed import Placement, ring_block_sparse_attention
from ..distributed.exchange import Group
from ..ops import BlockSparseWeights, attention_with_weights, block_sparse_attention
from ..ops.checks import check_device_and_dtype, check_dropout, check_qkv, check_scale
from ..ops.choose import check_backend
from ..ops.named import Opened, opened_once
from ..options import OptionKeywords
from ..patterns import Causal, Pattern, SparsePatternConfig
from ..patterns.base import check_flag
from ..patterns.blocks import check_branches
from ..patterns.config import DEFAULT_DILATION_RATES, DEFAULT_SEGMENT_LENGTHS, as_unused
from ..patterns.opening import window_of
from .opening import Openable
from .order import Reordering
from .pooled import POOL_FIELDS, Pooled, only_pool_options, split_pool_options
from .ringed import Ringed, heard_by_all

PATTERN_FIELDS = tuple(field.name for field in dataclasses.fields(SparsePatternConfig))


class BlockSparseAttention(Openable, Ringed, Pooled, nn.Module):
    """Exact attention over the pairs that a pattern allows (union: one softmax a row, a key counts once).

    Args:
        pattern: who may attend.
        scale: multiplier of the scores, head_dim ** -0.5 by default.
        dropout, attention_dropout: two names of the share of weights dropped in training.
        backend: see `block_sparse_attention`.
        order: for a pattern of a grid (`Neighborhood`, `SlidingTiles`) whose tokens come row by row: `forward` puts
            them into `tile_order(shape, order, prefix)`, where its blocks are full, and the output back. It moves q, k,
            v and the output in every call; a model that orders its tokens itself moves them once.
        ring_group: ranks that the sequence is spread over, a process group or a DeviceMesh of one dimension: `forward`
            then takes this rank's shards, see `ring_block_sparse_attention`.
        device, dtype: taken as PyTorch's own modules without parameters do; there is nothing to place.
        pool options: enable_memory_pool, lightweight_pool, enable_buffer_manager, enable_buffer_reuse; see
            `Pooled.set_buffers`. All off by default.
    """

    # What the class takes beside the arguments of its signature.
    more_keywords: tuple[str, ...] = POOL_FIELDS
    reason: str | None = None  # why "auto" took this one
    _reordering: Reordering | None = None

    def __init__(
        self,
        pattern: Pattern,
        *,
        scale: float | None = None,
        dropout: float | None = None,
        attention_dropout: float | None = None,
        backend: str = "auto",
        order: int | Sequence[int] | None = None,
        ring_group: Group | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **pool_options: Any,
    ) -> None:
        super().__init__()
        check_device_and_dtype(device, dtype)
        self.set_buffers(**only_pool_options(pool_options))
        self.set_ring(ring_group)
        if not isinstance(pattern, Pattern):
            raise TypeError(f"pattern must be a Pattern, got {type(pattern).__name__}")
        self._reordering = None if order is None else Reordering.of(pattern, order)
        if self._reordering is not None:
            pattern = self._reordering.pattern
            if ring_group is not None:
                raise ValueError("order is not possible over a ring; shard tokens that stand in tile_order already")
        # Both made here, not in forward: torch.compile takes a pattern that exists as a constant.
        self._patterns = (pattern, pattern & Causal())
        check_scale(scale, head_dim=1)
        self.scale = scale
        self.dropout = one_dropout(dropout, attention_dropout)
        self.backend = check_backend(backend)

    def pattern(self, is_causal: bool = False) -> Pattern:
        """The pattern of a call."""
        check_flag("is_causal", is_causal)
        return self._patterns[1 if is_causal else 0]

    def open_pattern(self, is_causal: bool, tokens: int) -> Pattern:
        """The pattern, as far as a `SparsitySchedule` has it closed: `opened` by a share `opening` of the tokens."""
        pattern = self.pattern(is_causal)
        if self.opening == 0.0:
            return pattern
        return opened_once(pattern, window_of(self.opening, operator.index(tokens)))

    @heard_by_all
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        return_attention_weights: bool = False,
        *,
        placement: Placement | None = None,
        **options: Unpack[OptionKeywords],
    ) -> Tensor | tuple[Tensor, BlockSparseWeights]:
        """Tensors are (batch, seq, heads, head_dim); options, masks among them, as in `block_sparse_attention`. Scale
        and dropout are the module's.

        With `return_attention_weights` also the weights before dropout, by active block, never the dense matrix.
        Over a ring all tensors are this rank's shards, and `placement` says of which tokens.
        """
        check_flag("return_attention_weights", return_attention_weights)
        ring = self.ring_options(placement, return_attention_weights)
        attend: Any = attention_with_weights if return_attention_weights else block_sparse_attention
        attend = ring_block_sparse_attention if ring else attend
        pattern: Any = self.pattern(is_causal)
        if self._opening_in_graphs is not None:
            check_qkv(q, k, v)
            if torch.compiler.is_dynamo_compiling() and attend is block_sparse_attention:
                pattern = Opened(pattern, self._opening_in_graphs)
            else:
                pattern = self.open_pattern(is_causal, self.whole_length(max(q.shape[1], k.shape[1]), placement))
        given: Any = module_options(self, options)
        if self._reordering is not None:
            self._reordering.check(is_causal, return_attention_weights)
            q, k, v, given = self._reordering.of_call(q, k, v, given)
        run = partial(attend, q, k, v, pattern, backend=self.backend, **ring, **given)
        out = run() if self._source is None else self.drawing(q, run)
        return out if self._reordering is None else self._reordering.back(out)

    def extra_repr(self) -> str:
        reason = f", reason={self.reason!r}" if self.reason else ""
        order = "" if self._reordering is None else ", reorders its tokens"
        return f"{self.pattern()}, {usual_options(self)}{order}{reason}"


class BlockSparseRingDilatedAttention(BlockSparseAttention):
    """Block-sparse attention over a pattern of `SparsePatternConfig`; see `BlockSparseAttention`.

    Args:
        segment_lengths, dilation_rates: branches of pattern type "dilated_sparse", [2048, 4096, 8192] and [1, 2, 4]
            by default. Other pattern types do not read them; like the fields of the configuration they may be given.
        sparse_config: the pattern; or give its fields as keywords (`sparsity_ratio=0.05, block_size=64`, …).
    """

    more_keywords = (*PATTERN_FIELDS, *POOL_FIELDS)

    def __init__(
        self,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        sparse_config: SparsePatternConfig | None = None,
        *,
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
        check_segments(segment_lengths, dilation_rates)
        branches = tuple(segment_lengths or DEFAULT_SEGMENT_LENGTHS), tuple(dilation_rates or DEFAULT_DILATION_RATES)
        super().__init__(
            config.pattern(*branches),
            scale=scale,
            dropout=dropout,
            attention_dropout=attention_dropout,
            backend=backend,
            ring_group=ring_group,
            device=device,
            dtype=dtype,
            **pool_options,
        )
        self.sparse_config = config
        known = config.uses_segments or segment_lengths is not None
        self.segment_lengths = branches[0] if known else None
        self.dilation_rates = branches[1] if known else None
        # The causal pattern is not the other one cut: its window and its budget look back only.
        self._patterns = (config.pattern(*branches), config.pattern(*branches, is_causal=True))

    def extra_repr(self) -> str:
        unused = unused_of(self.sparse_config, self.segment_lengths, self.dilation_rates)
        notes = [self.sparse_config.kept, as_unused(unused) if unused else ""]
        return "; ".join([super().extra_repr(), *filter(None, notes)])


class BlockSparseHierarchical(BlockSparseRingDilatedAttention):
    """Block-sparse attention at several scales: near blocks all, farther ones every `stride`-th.

    Args:
        levels: (stride in blocks, window in tokens) pairs, or "standard", "fine_grained" or "long_range".
    """

    more_keywords = POOL_FIELDS

    def __init__(
        self,
        levels: Sequence[tuple[int, int]] | str = "standard",
        *,
        block_size: int = 128,
        scale: float | None = None,
        dropout: float | None = None,
        attention_dropout: float | None = None,
        backend: str = "auto",
        ring_group: Group | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **pool_options: Any,
    ) -> None:
        only_pool_options(pool_options)
        super().__init__(
            sparse_config=SparsePatternConfig(pattern_type="hierarchical", levels=levels, block_size=block_size),
            scale=scale,
            dropout=dropout,
            attention_dropout=attention_dropout,
            backend=backend,
            ring_group=ring_group,
            device=device,
            dtype=dtype,
            **pool_options,
        )


def check_segments(segment_lengths: Sequence[int] | None, dilation_rates: Sequence[int] | None) -> None:
    """Both or neither."""
    if (segment_lengths is None) != (dilation_rates is None):
        raise ValueError(
            "segment_lengths and dilation_rates must be given together or not at all, "
            f"got {segment_lengths} and {dilation_rates}"
        )
    if segment_lengths is not None and dilation_rates is not None:
        check_branches(segment_lengths, dilation_rates)


def one_config(sparse_config: SparsePatternConfig | None, pattern_fields: dict[str, Any]) -> SparsePatternConfig:
    """The configuration, given whole or by its fields, never both."""
    unknown = sorted(set(pattern_fields) - set(PATTERN_FIELDS))
    if unknown:
        raise TypeError(
            f"unknown keyword {unknown[0]!r}; beside the arguments of its signature the class takes the fields of "
            f"SparsePatternConfig, {sorted(PATTERN_FIELDS)}, and {list(POOL_FIELDS)}"
        )
    if sparse_config is None:
        return SparsePatternConfig(**pattern_fields)
    if not isinstance(sparse_config, SparsePatternConfig):
        raise TypeError(f"sparse_config must be a SparsePatternConfig, got {type(sparse_config).__name__}")
    if pattern_fields:
        raise ValueError(f"{sorted(pattern_fields)} must be given in sparse_config or as keywords, not both")
    return sparse_config


def unused_of(
    config: SparsePatternConfig, segment_lengths: Sequence[int] | None, dilation_rates: Sequence[int] | None
) -> dict[str, Any]:
    """What was given to a module and its pattern type does not read."""
    unused = config.unused
    if not config.uses_segments and segment_lengths is not None and dilation_rates is not None:
        unused |= {"segment_lengths": tuple(segment_lengths), "dilation_rates": tuple(dilation_rates)}
    return unused


def module_options(module: nn.Module, options: OptionKeywords) -> OptionKeywords:
    """The options of a module's call: its own scale and dropout, and those that the call brings."""
    held = sorted({"scale", "dropout_p"} & set(options))
    if held:
        raise TypeError(f"{held[0]} is given to the constructor of {type(module).__name__}, not to its call")
    dropout_p = module.dropout if module.training else 0.0
    return {"scale": module.scale, "dropout_p": dropout_p, **options}  # type: ignore[typeddict-item]


def usual_options(module: Any) -> str:
    """For a `repr`."""
    scale = "" if module.scale is None else f"scale={module.scale}, "
    return f"{scale}dropout={module.dropout}, backend={module.backend!r}"


def one_dropout(dropout: float | None, attention_dropout: float | None) -> float:
    """`dropout` and `attention_dropout` name the same thing."""
    names = {"dropout": dropout, "attention_dropout": attention_dropout}
    given = [check_dropout(value, name) for name, value in names.items() if value is not None]
    if len(set(given)) > 1:
        raise ValueError(
            f"dropout and attention_dropout name the same thing and must agree, got {dropout} and {attention_dropout}"
        )
    return given[0] if given else 0.0
