"""What a drawing of a layout shows: a state for every block, or for every group of blocks."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import BlockLayout
from ..patterns.base import check_int
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


class Picture(NamedTuple):
    """A layout in cells.

    Attributes:
        cells: int8 [rows, columns] on the CPU, a `State` for each.
        tokens: of a cell, queries and keys.
        note: what a cell stands for; empty where it is a block.
    """

    cells: Tensor
    tokens: tuple[int, int]
    note: str


def picture(layout: BlockLayout, most: int, *, head: int = 0, sample: int = 0, tokens: int | None = None) -> Picture:
    """One head of one sample in at most `most` cells a side: full or empty if all of a cell is, else partial.

    Time and memory grow with the active blocks and not with the square of the sequence. The blocks of dilated attention
    take every so many-th token; it is drawn in the order of the tokens all the same.

    Args:
        tokens: draw the first so many alone, in whole blocks.
    """
    if tokens is not None:
        check_int("tokens", tokens, least=1)
    number = _list_number(layout, head, sample)
    if layout.dilated:
        return _picture_of_branches(layout, most, number, min(tokens or layout.seq_q, layout.seq_q))
    which, query_block, key_block, rule = layout.entries()
    num_q, num_k = (
        ceil_div(min(tokens or seq, seq), block) for seq, block in zip(layout.lengths, layout.blocks, strict=True)
    )
    mine = (which == number) & (query_block < num_q) & (key_block < num_k)
    size = ceil_div(max(num_q, num_k), most)
    rows, columns = (_cell_sizes(n, size) for n in (num_q, num_k))
    cell = (query_block // size).long() * len(columns) + key_block // size
    active, full = (
        torch.bincount(cell[chosen], minlength=len(rows) * len(columns)).view(len(rows), -1).cpu()
        for chosen in (mine, mine & (rule < 0))
    )
    cells = _states(active > 0, full == rows[:, None] * columns)
    note = f"a cell is {size} x {size} blocks" if size > 1 else ""
    return Picture(cells, (size * layout.block_q, size * layout.block_k), note)


def _picture_of_branches(layout: BlockLayout, most: int, number: int, tokens: int) -> Picture:
    """Cells of neighbouring tokens. A cell that no branch fills alone is partial, also where several do together."""
    if layout.seq_q != layout.seq_k:
        raise ValueError(f"a layout of branches is drawn for as many queries as keys, got {layout.lengths}")
    size = ceil_div(tokens, most)
    sides = _cell_sizes(tokens, size)
    area = sides[:, None] * sides
    held, whole = torch.zeros_like(area, dtype=torch.bool), torch.zeros_like(area, dtype=torch.bool)
    place = torch.arange(tokens)
    for segment, dilation, offset, *moved in layout.branches[number].tolist():
        if any(moved):
            raise ValueError("only a whole layout of branches is drawn, not a part of one")
        kept = place[place % segment % dilation == offset]
        pairs = _pairs_of_segments(kept // size, kept // segment, len(sides))
        held, whole = held | (pairs > 0), whole | (pairs == area)
    if int(layout.rules[0, 0, 1]) == 0:  # causal: of a cell on the diagonal, each token with itself is left
        held, whole = held.tril(), whole.tril(-1) | (whole & torch.diag(sides == 1))
    note = f"a cell is {size} x {size} tokens" if size > 1 else "a cell is one pair of tokens"
    return Picture(_states(held, whole), (size, size), note)


def _pairs_of_segments(cell: Tensor, segment: Tensor, num_cells: int) -> Tensor:
    """Pairs of tokens of the same segment by the cells of the two; tokens come in order."""
    both, count = (segment * num_cells + cell).unique_consecutive(return_counts=True)
    segment, cell = both // num_cells, both % num_cells
    pairs = torch.zeros(num_cells, num_cells, dtype=torch.int64)
    for apart in range(len(cell)):
        here, there = slice(len(cell) - apart), slice(apart, None)
        same = segment[here] == segment[there]
        if not same.any():
            break
        found = (count[here] * count[there])[same]
        pairs.index_put_((cell[here][same], cell[there][same]), found, accumulate=True)
    return pairs + pairs.triu(1).T


def _cell_sizes(count: int, size: int) -> Tensor:
    """How much of `count` each cell has: `size`, the last what is left."""
    starts = torch.arange(0, count, size)
    return (count - starts).clamp(max=size)


def _states(some: Tensor, all_of_it: Tensor) -> Tensor:
    states = torch.where(all_of_it, State.FULL, torch.where(some, State.PARTIAL, State.EMPTY))
    return states.to(torch.int8)


def _list_number(layout: BlockLayout, head: int, sample: int) -> int:
    """Which of the layout's lists; a list that all heads, or all samples, share answers for each of them."""
    heads, samples = layout.num_heads or 1, layout.batch_size or 1
    for name, value, count in (("head", head, heads), ("sample", sample, samples)):
        if value < 0 or (count > 1 and value >= count):
            raise IndexError(f"{name} must be from 0 to {count - 1}, as the layout has {count}, got {value}")
    return (sample if samples > 1 else 0) * heads + (head if heads > 1 else 0)
