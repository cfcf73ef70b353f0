"""`BlockSparseAdaptive`: attention over blocks that are chosen from the content, anew in every call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from ..layout import BlockLayout
from ..layout.checks import block_pair
from ..ops import BlockSparseWeights, TopK, attention_with_weights, block_sparse_attention, select_blocks
from ..ops.checks import check_device_and_dtype, check_qkv, check_scale
from ..ops.choose import check_backend, leave_autocast
from ..ops.named import Opened
from ..ops.scores import Scorer
from ..ops.select import OURS, check_selector, scorer_of
from ..ops.selectors import Selector
from ..options import OptionKeywords
from ..patterns import SparsePatternConfig
from ..patterns.base import check_flag, check_int, shown
from ..patterns.blocks import check_ratio
from ..patterns.config import as_unused
from .attention import module_options, one_dropout, usual_options
from .gate import BlockGate
from .opening import Openable


class BlockSparseAdaptive(Openable, nn.Module):
    """Exact attention (one softmax a row) over the blocks that `select_blocks` keeps, for every sample and head.

    Args:
        sparsity_ratio: share of the visible blocks that is KEPT, 0.1 by default: `TopK(sparsity_ratio, even=True,
            across_heads=True)`, which never looks ahead in a causal model. Or give a `selector`.
        sparse_config: a `SparsePatternConfig` of type "adaptive", instead of `sparsity_ratio` and `block_size`.
        scorer, selector, block_size, sink, local, per_kv_head: as in `select_blocks`; block_size is 64 by default.
        gate_strength: with a `BlockGate` as scorer, add this many times the gate's own score to the scores of the keys
            that were chosen, before the softmax. So the gate is trained end to end, by true gradients; 0, the default,
            for hard choices alone. It makes heads twice as wide: on a GPU they may have 128 dimensions at most.
        scale, dropout, attention_dropout, backend, device, dtype: as in `BlockSparseAttention`.
    """

    reason: str | None = None  # why "auto" took this one

    def __init__(
        self,
        sparsity_ratio: float | None = None,
        *,
        sparse_config: SparsePatternConfig | None = None,
        scorer: str | Scorer = "patches",
        selector: Selector | None = None,
        block_size: int | tuple[int, int] | None = None,
        sink: int = 1,
        local: int = 1,
        per_kv_head: bool = False,
        gate_strength: float = 0.0,
        scale: float | None = None,
        dropout: float | None = None,
        attention_dropout: float | None = None,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_device_and_dtype(device, dtype)
        self.unused: dict[str, Any] = {}
        if sparse_config is not None:
            if sparsity_ratio is not None or block_size is not None:
                raise ValueError(
                    "sparsity_ratio and block_size must be given in sparse_config or as keywords, not both"
                )
            if not isinstance(sparse_config, SparsePatternConfig) or not sparse_config.is_adaptive:
                raise ValueError(f"sparse_config must have pattern_type 'adaptive', got {shown(sparse_config)}")
            sparsity_ratio, block_size = sparse_config.sparsity_ratio, sparse_config.block_size
            self.unused = sparse_config.unused
        if selector is not None and sparsity_ratio is not None:
            raise ValueError(f"give sparsity_ratio or a selector, not both, got {sparsity_ratio} and {shown(selector)}")
        if selector is None:
            sparsity_ratio = 0.1 if sparsity_ratio is None else sparsity_ratio
            check_ratio("sparsity_ratio", sparsity_ratio)
            selector = TopK(sparsity_ratio, even=True, across_heads=True)
        blocks = block_pair(64 if block_size is None else block_size)
        self.block_size = blocks if isinstance(block_size, Sequence) else blocks[0]
        for name, value in (("sink", sink), ("local", local)):
            check_int(name, value, least=0)
        check_flag("per_kv_head", per_kv_head)
        self.scorer, self.selector = scorer_of(scorer), check_selector(selector)
        self.sink, self.local, self.per_kv_head = sink, local, per_kv_head
        if not isinstance(gate_strength, int | float) or isinstance(gate_strength, bool):
            raise TypeError(f"gate_strength must be a number, got {shown(gate_strength)}")
        if not 0.0 <= gate_strength <= torch.finfo(torch.float32).max:
            raise ValueError(f"gate_strength must be at least 0 and finite, got {gate_strength}")
        if gate_strength and not isinstance(self.scorer, BlockGate):
            raise ValueError(f"gate_strength needs a BlockGate as scorer, which can learn, got {self.scorer!r}")
        self.gate_strength = float(gate_strength)
        check_scale(scale, head_dim=1)
        self.scale = scale
        self.dropout = one_dropout(dropout, attention_dropout)
        self.backend = check_backend(backend)

    def layout(
        self,
        q: Tensor,
        k: Tensor,
        is_causal: bool = False,
        *,
        key_padding_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        lengths: Tensor | None = None,
        dense_below: int = 0,
        scale: float | None = None,
    ) -> BlockLayout:
        """The blocks of a call; causal inside them with `is_causal`. The rest is as in `select_blocks`, the scale by
        default the module's."""
        selector: Any = self.selector
        if self._opening_in_graphs is not None:
            if torch.compiler.is_dynamo_compiling() and type(selector) in OURS:
                selector = Opened(selector, self._opening_in_graphs)
            else:
                selector = selector.opened(self.opening)
        return select_blocks(
            q,
            k,
            scorer=self.scorer,
            selector=selector,
            block_size=self.block_size,
            is_causal=is_causal,
            sink=self.sink,
            local=self.local,
            per_kv_head=self.per_kv_head,
            scale=self.scale if scale is None else scale,
            key_padding_mask=key_padding_mask,
            document_ids=document_ids,
            lengths=lengths,
            dense_below=dense_below,
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        return_attention_weights: bool = False,
        **options: Unpack[OptionKeywords],
    ) -> Tensor | tuple[Tensor, BlockSparseWeights]:
        """Tensors are (batch, seq, heads, head_dim); options, masks among them, as in `block_sparse_attention`. Scale
        and dropout are the module's. Blocks are chosen by scaled products and masks alone."""
        check_flag("return_attention_weights", return_attention_weights)
        q, k, v, autocast_off = leave_autocast(q, k, v)
        check_qkv(q, k, v)
        options = module_options(self, options)
        masks: Any = {name: options[name] for name in ("key_padding_mask", "document_ids") if name in options}
        attend: Any = attention_with_weights if return_attention_weights else block_sparse_attention
        with autocast_off:
            layout = self.layout(q, k, is_causal, **masks)
            if self.gate_strength:
                q, k, options["scale"] = self.gated(q, k, check_scale(self.scale, q.shape[3]), **masks)
            return attend(q, k, v, layout, backend=self.backend, **options)

    def gated(self, q: Tensor, k: Tensor, scale: float, **masks: Tensor | None) -> tuple[Tensor, Tensor, float]:
        """q, k and scale with the gate's own score in them: it is a product of a row and a column, which join q and k
        as further coordinates."""
        blocks = self.block_size if isinstance(self.block_size, tuple) else (self.block_size, self.block_size)
        assert isinstance(self.scorer, BlockGate)
        rows, columns = self.scorer.token_features(q, k, scale, blocks, **masks)
        q = torch.cat((q * scale, (rows * self.gate_strength).to(q.dtype)), dim=-1)
        k = torch.cat((k, columns.to(k.dtype)), dim=-1)
        return q, k, 1.0

    def extra_repr(self) -> str:
        scorer = "" if isinstance(self.scorer, nn.Module) else f"{self.scorer}, "
        reason = f", reason={self.reason!r}" if self.reason else ""
        others = (("sink", 1), ("local", 1), ("per_kv_head", False), ("gate_strength", 0.0))
        told = "".join(f"{n}={getattr(self, n)}, " for n, usual in others if getattr(self, n) != usual)
        rest = f"block_size={self.block_size}, {told}{usual_options(self)}{reason}"
        kept = (
            f"; keeps {100 * self.selector.share:g}% of the visible blocks" if hasattr(self.selector, "share") else ""
        )
        return f"{scorer}{self.selector}, {rest}{kept}" + (f"; {as_unused(self.unused)}" if self.unused else "")
