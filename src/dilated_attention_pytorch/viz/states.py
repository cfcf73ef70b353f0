"""What a drawing of a layout shows: a state for every block, or for every group of blocks."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

from ..layout import BlockLayout
from ..patterns.blocks import ceil_div


class State(IntEnum):
    EMPTY = 0
    PARTIAL = 1
    FULL = 2


def block_states(layout: BlockLayout, *, head: int = 0, sample: int = 0) -> Tensor:
    """int8 [query blocks, key blocks] on the CPU: the `State` of every block for one head of one sample."""
    which, query_block, key_block, rule = layout.entries()
    mine = which == _list_number(layout, head, sample)
    states = torch.full((layout.num_q_blocks, layout.num_k_blocks), State.EMPTY, dtype=torch.int8, device=layout.device)
    full = rule[mine] < 0
    states[query_block[mine], key_block[mine]] = torch.where(full, State.FULL, State.PARTIAL).to(torch.int8)
    return states.cpu()


def grouped_states(layout: BlockLayout, most: int, *, head: int = 0, sample: int = 0) -> tuple[Tensor, int]:
    """`block_states` in at most `most` cells a side, and how many blocks a side each cell stands for."""
    states = block_states(layout, head=head, sample=sample)
    size = ceil_div(max(states.shape), most)
    return group(states, size), size


def group(states: Tensor, size: int) -> Tensor:
    """Cells of size × size blocks: full or empty if all of them are, else partial."""
    if size == 1:
        return states
    cells = states[None].float()
    highest = max_pool2d(cells, size, ceil_mode=True)[0]
    lowest = -max_pool2d(-cells, size, ceil_mode=True)[0]
    return torch.where(highest == lowest, highest, State.PARTIAL).to(torch.int8)


def _list_number(layout: BlockLayout, head: int, sample: int) -> int:
    """Which of the layout's lists; a list that all heads, or all samples, share answers for each of them."""
    heads, samples = layout.num_heads or 1, layout.batch_size or 1
    for name, value, count in (("head", head, heads), ("sample", sample, samples)):
        if value < 0 or (count > 1 and value >= count):
            raise IndexError(f"{name} must be from 0 to {count - 1}, as the layout has {count}, got {value}")
    return (sample if samples > 1 else 0) * heads + (head if heads > 1 else 0)
