"""The zeros that torchscale pads with, as keys: how many each query of dilated attention also attends to.

torchscale pads a sequence to whole segments, and a segment to a multiple of its dilation, with zeros, and attends to
them. A zero key has score 0 and value 0, so all that matters is how many of them a query sees: they add their number
to the denominator of its softmax. Causal queries see none, because every zero comes after the tokens of its segment.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..patterns import Branches
from ..patterns.blocks import ceil_div


def check_zero_keys(branches: Branches, seq_q: int, seq_k: int) -> None:
    """Refuse branches for which torchscale computes something else than attention to zeros."""
    if seq_q != seq_k:
        raise ValueError(f"padding='zero_keys' needs as many queries as keys, got {seq_q} queries and {seq_k} keys")
    for segment, dilation in zip(branches.segment_lengths, branches.dilation_rates, strict=True):
        if segment < seq_k and segment % dilation:
            raise ValueError(
                "padding='zero_keys' needs every segment length that is shorter than the sequence to be a multiple of "
                "its dilation rate (torchscale moves the results of such a segment's successors to other tokens), got "
                f"segment length {segment} with dilation rate {dilation} and {seq_k} tokens"
            )


def log_zero_keys(
    branches: Branches, seq: int, num_heads: int, is_causal: bool, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """[branches, heads, seq]: the log of how many zero keys a branch shows to each query; −inf for none."""
    token = torch.arange(seq, device=device)
    counts = [_of_head(branches.of_head(head, num_heads), token, seq, is_causal) for head in range(num_heads)]
    return torch.stack(counts, dim=1).to(dtype).log()


def _of_head(branches: tuple[tuple[int, int, int], ...], token: Tensor, seq: int, is_causal: bool) -> Tensor:
    counts = []
    for segment, dilation, offset in branches:
        segment = min(segment, seq)
        place = token % segment
        length = (seq - (token - place)).clamp(max=segment)  # tokens of the segment that are there
        real = (length - offset + dilation - 1).div(dilation, rounding_mode="floor").clamp(min=0)
        zeros = ceil_div(segment, dilation) - real
        seen = (place % dilation == offset) & (not is_causal)
        counts.append(torch.where(seen, zeros, 0))
    return torch.stack(counts)
