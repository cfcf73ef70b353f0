"""Dilated attention (LongNet) as a module: q, k, v in, out out. No parameters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from ..distributed import Placement, ring_dilated_attention
from ..distributed.exchange import Group
from ..layout.branches import layout_of_branches
from ..ops import BlockSparseWeights, dilated_attention
from ..ops.checks import DEFAULT_BLOCK_SIZE, check_device_and_dtype, check_options, check_scale
from ..ops.choose import check_backend, leave_autocast
from ..ops.dilated import check_padding
from ..ops.weights import attention_weights
from ..options import OptionKeywords
from ..patterns import Branches
from ..patterns.base import check_flag
from ..patterns.config import DEFAULT_DILATION_RATES, DEFAULT_SEGMENT_LENGTHS
from .attention import check_segments, module_options, one_dropout, usual_options
from .pooled import POOL_FIELDS, Pooled, only_pool_options
from .ringed import Ringed, heard_by_all


class DilatedAttention(Ringed, Pooled, nn.Module):
    """Exact dilated attention (branch merge: one softmax a row, a key counts once for each branch that holds it).

    Args:
        segment_lengths, dilation_rates: the branches, [2048, 4096, 8192] and [1, 2, 4] by default; both or neither.
        head_offsets, detach_branch_weights, padding, scale, backend: see `dilated_attention`. No padding over a ring.
        dropout, attention_dropout: two names of the share of weights dropped in training.
        ring_group: ranks that the sequence is spread over, a process group or a DeviceMesh of one dimension: `forward`
            then takes this rank's shards, see `ring_dilated_attention`.
        device, dtype: taken as PyTorch's own modules without parameters do; there is nothing to place.
        pool options: enable_memory_pool, lightweight_pool, enable_buffer_manager, enable_buffer_reuse; see
            `Pooled.set_buffers`. All off by default.
    """

    more_keywords = POOL_FIELDS

    def __init__(
        self,
        segment_lengths: Sequence[int] | None = None,
        dilation_rates: Sequence[int] | None = None,
        *,
        head_offsets: str = "interleaved",
        detach_branch_weights: bool = False,
        padding: str | None = None,
        scale: float | None = None,
        dropout: float | None = None,
        attention_dropout: float | None = None,
        backend: str = "auto",
        ring_group: Group | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **pool_options: Any,
    ) -> None:
        super().__init__()
        check_device_and_dtype(device, dtype)
        self.set_buffers(**only_pool_options(pool_options))
        self.set_ring(ring_group)
        check_segments(segment_lengths, dilation_rates)
        if segment_lengths is None or dilation_rates is None:
            segment_lengths, dilation_rates = DEFAULT_SEGMENT_LENGTHS, DEFAULT_DILATION_RATES
        self.branches = Branches(segment_lengths, dilation_rates, head_offsets)
        check_flag("detach_branch_weights", detach_branch_weights)
        self.detach_branch_weights = detach_branch_weights
        check_padding(padding)
        if padding is not None and ring_group is not None:
            raise ValueError("padding must be None over a ring, whose ranks attend to tokens alone, got 'zero_keys'")
        self.padding = padding
        check_scale(scale, head_dim=1)
        self.scale = scale
        self.dropout = one_dropout(dropout, attention_dropout)
        self.backend = check_backend(backend)

    @property
    def segment_lengths(self) -> tuple[int, ...]:
        return tuple(self.branches.segment_lengths)

    @property
    def dilation_rates(self) -> tuple[int, ...]:
        return tuple(self.branches.dilation_rates)

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
        """Tensors are (batch, seq, heads, head_dim); options, the mask among them, as in `dilated_attention`. Scale and
        dropout are the module's.

        With `return_attention_weights` also the weights before dropout, by block of neighbouring tokens: those of
        dilated branches are spread thin, so for sequences to look at. Over a ring all tensors are this rank's shards,
        and `placement` says of which tokens.
        """
        check_flag("return_attention_weights", return_attention_weights)
        ring = self.ring_options(placement, return_attention_weights)
        call: Any = module_options(self, options)
        run = partial(
            ring_dilated_attention if ring else dilated_attention,
            q,
            k,
            v,
            segment_lengths=self.branches.segment_lengths,
            dilation_rates=self.branches.dilation_rates,
            is_causal=is_causal,
            head_offsets=self.branches.head_offsets,
            detach_branch_weights=self.detach_branch_weights,
            return_lse=return_attention_weights,
            backend=self.backend,
            **(ring or {"padding": self.padding}),
            **call,
        )
        result = run() if self._source is None else self.drawing(q, run)
        if isinstance(result, Tensor):
            return result
        out, lse = result
        q, k, _, autocast_off = leave_autocast(q, k, v)
        layout = layout_of_branches(
            self.branches, q.shape[1], k.shape[1], num_heads=q.shape[2], is_causal=is_causal, device=q.device,
            block_size=DEFAULT_BLOCK_SIZE, num_residues=1,
        )  # fmt: skip
        with autocast_off:
            return out, attention_weights(q, k, lse, layout, check_options(q, k, **call))

    def extra_repr(self) -> str:
        detached = ", detach_branch_weights=True" if self.detach_branch_weights else ""
        padding = "" if self.padding is None else f", padding={self.padding!r}"
        return f"{self.branches}, {usual_options(self)}{detached}{padding}"
