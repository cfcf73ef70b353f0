"""`create_block_sparse_attention("auto", …)`: pattern and density from length, device and budget, with the reason."""

from __future__ import annotations

from typing import Any

import torch

from ..ops.checks import check_device, check_device_and_dtype
from ..patterns import Full
from ..patterns.base import check_int
from ..patterns.blocks import ceil_div, check_ratio
from .adaptive import BlockSparseAdaptive
from .attention import BlockSparseAttention, BlockSparseHierarchical

# Up to here dense attention is not worth leaving.
DENSE_TOKENS = 4096
# Masses of blocks that a head may have in memory: 256 MiB in float32.
MOST_MASSES = 2**26


def automatic_attention(
    *,
    seq_len: int,
    device: torch.device | str = "cpu",
    budget: float | None = None,
    scale: float | None = None,
    dropout: float | None = None,
    attention_dropout: float | None = None,
    backend: str = "auto",
    dtype: torch.dtype | None = None,
) -> BlockSparseAttention | BlockSparseAdaptive:
    """The attention for sequences of about this length; `reason` of the module says why this one.

    Args:
        seq_len: tokens.
        device: where it will run: blocks of 128 tokens on a GPU, as its kernels like them, (64, 16) elsewhere, as
            the choice is better.
        dtype: taken as the modules do.
        budget: share of dense attention's blocks that may be computed; a share that keeps about a constant number of
            tokens a query by default.
    """
    check_int("seq_len", seq_len, least=1)
    kind = check_device(device).type
    check_device_and_dtype(device, dtype)
    options: dict[str, Any] = {
        "scale": scale,
        "dropout": dropout,
        "attention_dropout": attention_dropout,
        "backend": backend,
    }
    told = budget is not None
    if budget is None:
        budget = 1.0 if seq_len <= DENSE_TOKENS else max(DENSE_TOKENS / seq_len, 0.02)
    check_ratio("budget", budget)
    block_q, block_k = (128, 128) if kind == "cuda" else (64, 16)
    masses = ceil_div(seq_len, block_q) * ceil_div(seq_len, block_k)
    module: BlockSparseAttention | BlockSparseAdaptive
    if budget == 1.0:
        module = BlockSparseAttention(Full(), **options)
        why = "the budget allows it" if told else f"{seq_len} tokens are no more than {DENSE_TOKENS}"
        module.reason = f"dense: {why}"
        return module
    if masses <= MOST_MASSES:
        module = BlockSparseAdaptive(budget, block_size=(block_q, block_k), **options)
        why = "as told" if told else f"about {DENSE_TOKENS} keys a query"
        module.reason = f"adaptive: {budget:.1%} of the blocks ({why}), {block_q} x {block_k} for {kind}"
        return module
    why = f"{masses} blocks a head are more than the {MOST_MASSES} that a choice from the content may look at"
    if told:
        raise ValueError(
            f"budget cannot be met, because {why}, and other patterns have their own density, got {budget}"
        )
    module = BlockSparseHierarchical("long_range", **options)
    module.reason = f"hierarchical, long_range: {why}"
    return module
