"""Runs of numbers, one after the other: what lists of blocks are made of."""

from __future__ import annotations

import torch
from torch import Tensor

from .lists import send


def ragged(first: Tensor, count: Tensor, device: torch.device, step: int = 1) -> tuple[Tensor, Tensor]:
    """first, first + step, … (`count` of them), run after run, on a device: where each run starts, and behind the last
    one; and the numbers."""
    edges = edges_of(count)
    total = int(edges[-1])
    # Each number is `step` above the one before it, but where a run starts.
    behind = first.new_full((len(first) + 1,), step)
    torch.add(first, count, alpha=step, out=behind[1:])
    edges, jump = send((edges, first - behind[:-1]), device)
    above = torch.full((total + 1,), step, dtype=first.dtype, device=device).index_add_(0, edges[:-1], jump)
    return edges, above[:-1].cumsum(0, dtype=first.dtype)


def edges_of(count: Tensor) -> Tensor:
    """0, then how many the first has, the first two, and so on."""
    edges = count.new_zeros(len(count) + 1)
    torch.cumsum(count, 0, dtype=count.dtype, out=edges[1:])
    return edges


def rows_of(count: Tensor | int, column: Tensor) -> Tensor:
    """The row of each column, where each row has so many."""
    if isinstance(count, int):
        return torch.arange(len(column), device=column.device) // count
    (count,) = send((count,), column.device)
    return torch.repeat_interleave(count, output_size=len(column))
