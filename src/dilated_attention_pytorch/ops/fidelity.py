"""What a pattern keeps of dense attention: a number between 0 and 1 for every head and query."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import BlockLayout
from ..patterns import Full, Pattern
from .block_sparse import block_sparse_attention


@torch.no_grad()
def kept_mass(
    q: Tensor,
    k: Tensor,
    layout_or_pattern: BlockLayout | Pattern,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """The share of dense attention's mass that falls on the pairs of a layout or pattern: (batch, heads, seq_q).

    Dense attention is that over all keys, under the same masks and `is_causal`; for a layout from `select_blocks` with
    `is_causal=True` say so here too. A query that sees no key in dense attention has nothing to lose: 1. Both sums of
    exponentials come from `block_sparse_attention`, so the memory is linear, on any backend.
    """

    def lse(who: BlockLayout | Pattern) -> Tensor:
        _, total = block_sparse_attention(
            q,
            k,
            k,
            who,
            is_causal=is_causal,
            scale=scale,
            key_padding_mask=key_padding_mask,
            document_ids=document_ids,
            return_lse=True,
            backend=backend,
        )
        return total

    dense = lse(Full())
    # Rounding may lift a sum over some keys above the sum over all.
    share = torch.exp(lse(layout_or_pattern) - dense.masked_fill(dense == -torch.inf, 0.0)).clamp(max=1.0)
    return share.masked_fill(dense == -torch.inf, 1.0)
