"""What a pattern keeps of dense attention: a number between 0 and 1 for every head and query."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from ..layout import BlockLayout
from ..options import OptionKeywords
from ..patterns import Full, Pattern
from .block_sparse import block_sparse_attention


@torch.no_grad()
def kept_mass(
    q: Tensor,
    k: Tensor,
    layout_or_pattern: BlockLayout | Pattern,
    *,
    is_causal: bool = False,
    backend: str = "auto",
    **options: Unpack[OptionKeywords],
) -> Tensor:
    """The share of dense attention's mass that falls on the pairs of a layout or pattern: (batch, heads, seq_q).

    Dense attention is that over all keys, under the same masks and `is_causal`; for a layout from `select_blocks` with
    `is_causal=True` say so here too. A query that sees no key in dense attention has nothing to lose: 1. Both sums of
    exponentials come from `block_sparse_attention`, so the memory is linear, on any backend.
    """

    unused = sorted({"deterministic", "dropout_p", "sinks"} & set(options))
    if unused:
        raise TypeError(
            f"{unused[0]} has no meaning for kept_mass, which weighs keys by keys and has no gradient; leave it out"
        )

    def lse(who: BlockLayout | Pattern) -> Tensor:
        _, total = block_sparse_attention(
            q, k, k, who, is_causal=is_causal, return_lse=True, backend=backend, **options
        )
        return total

    some, dense = lse(layout_or_pattern), lse(Full())
    # Rounding may lift a sum over some keys above the sum over all.
    share = torch.exp(some - dense.masked_fill(dense == -torch.inf, 0.0)).clamp(max=1.0)
    return share.masked_fill(dense == -torch.inf, 1.0)
