"""What a drawing of a layout shows: a state for every block, or for every group of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import combinations
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
    mine = which == list_number(layout, head, sample)
    states = torch.full((layout.num_q_blocks, layout.num_k_blocks), State.EMPTY, dtype=torch.int8, device=layout.device)
    full = rule[mine] < 0
    states[query_block[mine], key_block[mine]] = torch.where(full, State.FULL, State.PARTIAL).to(torch.int8)
    return states.cpu()


class Region(NamedTuple):
    """So many queries and keys, from these on."""

    query: int
    key: int
    tokens: int


class Picture(NamedTuple):
    """A layout in cells.

    Attributes:
        cells: int8 [rows, columns] on the CPU, a `State` for each.
        tokens: of a cell, queries and keys.
        note: what a cell stands for; empty where it is a block.
        first: the query and the key that the first cell begins with.
        shares: float64 [2, rows, columns]: how much of each cell lies in partial and in full blocks.
    """

    cells: Tensor
    tokens: tuple[int, int]
    note: str
    first: tuple[int, int]
    shares: Tensor


def picture(layout: BlockLayout, most: int, *, head: int = 0, sample: int = 0, region: Region | None = None) -> Picture:
    """One head of one sample in at most `most` cells a side: full or empty if all of a cell is, else partial.

    Time and memory grow with the active blocks and not with the square of the sequence. The blocks of dilated attention
    take every so many-th token; it is drawn in the order of the tokens all the same.

    Args:
        region: draw this alone, in whole cells: up to two more a side. Where it has no more tokens than there are
            cells, each pair of tokens is one: full if it is allowed, partial if it is masked inside an active block.
    """
    region = _inside(layout, region)
    number = list_number(layout, head, sample)
    if layout.dilated:
        return _picture_of_branches(layout, most, number, region)
    if region.tokens <= most and region.tokens < max(layout.lengths):
        return _picture_of_pairs(layout, number, region)
    which, query_block, key_block, rule = layout.entries()
    spans = [
        (first // block, ceil_div(min(first + region.tokens, seq), block), ceil_div(seq, block))
        for first, block, seq in zip(region[:2], layout.blocks, layout.lengths, strict=True)
    ]
    size = ceil_div(max(stop - start for start, stop, _ in spans), most)
    (top, rows), (left, columns) = (_cells(*span, size) for span in spans)
    row, column = query_block // size - top // size, key_block // size - left // size
    mine = (which == number) & (row >= 0) & (row < len(rows)) & (column >= 0) & (column < len(columns))
    cell = row.long() * len(columns) + column
    partial, full = (
        torch.bincount(cell[chosen], minlength=len(rows) * len(columns)).view(len(rows), -1).cpu()
        for chosen in (mine & (rule >= 0), mine & (rule < 0))
    )
    area = rows[:, None] * columns
    note = f"a cell is {size} x {size} blocks" if size > 1 else ""
    tokens = (size * layout.block_q, size * layout.block_k)
    first = (top * layout.block_q, left * layout.block_k)
    return Picture(_states(partial + full > 0, full == area), tokens, note, first, torch.stack((partial, full)) / area)


def _picture_of_pairs(layout: BlockLayout, number: int, region: Region) -> Picture:
    """Every pair of tokens a cell."""
    which, query_block, key_block, _ = layout.entries()
    mine = which == number
    for first, block, size in (
        (region.query, query_block, layout.block_q),
        (region.key, key_block, layout.block_k),
    ):
        mine &= (block >= first // size) & (block * size < first + region.tokens)
    chosen = mine.nonzero()[:, 0]
    query, key = layout.queries_of(query_block[chosen]) - region.query, layout.keys_of(key_block[chosen]) - region.key
    sides = [min(region.tokens, seq - first) for first, seq in zip(region[:2], layout.lengths, strict=True)]
    states = torch.zeros(sides, dtype=torch.int8, device=layout.device)
    inside = ((query >= 0) & (query < sides[0]))[:, :, None] & ((key >= 0) & (key < sides[1]))[:, None]
    at = inside.nonzero(as_tuple=True)
    allowed = torch.where(layout.cells(chosen), State.FULL, State.PARTIAL).to(torch.int8)
    states[query[at[0], at[1]], key[at[0], at[2]]] = allowed[at]
    states = states.cpu()
    shares = torch.stack((states == State.PARTIAL, states == State.FULL)).double()
    return Picture(states, (1, 1), "a cell is one pair of tokens", region[:2], shares)


def _picture_of_branches(layout: BlockLayout, most: int, number: int, region: Region) -> Picture:
    """Cells of neighbouring tokens. A pair is held by at least one branch: by inclusion and exclusion, exactly."""
    if layout.seq_q != layout.seq_k:
        raise ValueError(f"a layout of branches is drawn for as many queries as keys, got {layout.lengths}")
    branches = [tuple(branch) for branch in layout.branches[number].tolist()]
    if any(any(moved) for _, _, _, *moved in branches):
        raise ValueError("only a whole layout of branches is drawn, not a part of one")
    size = ceil_div(region.tokens, most)
    (top, rows), (left, columns) = (
        _cells(first, min(first + region.tokens, layout.seq_q), layout.seq_q, size) for first in region[:2]
    )
    causal = int(layout.rules[0, 0, 1]) == 0
    queries, keys = (torch.arange(first, first + int(of.sum())) for first, of in ((top, rows), (left, columns)))
    pairs = torch.zeros(len(rows), len(columns), dtype=torch.float64)
    for count in range(1, len(branches) + 1):
        for chosen in combinations(branches, count):
            pairs += (1 if count % 2 else -1) * _pairs_together(chosen, queries, keys, size, causal)
    area = rows[:, None] * columns
    note = f"a cell is {size} x {size} tokens" if size > 1 else "a cell is one pair of tokens"
    shares = torch.stack((torch.zeros_like(pairs), pairs / area))
    return Picture(_states(pairs > 0, pairs == area), (size, size), note, (top, left), shares)


def _pairs_together(
    branches: Sequence[tuple[int, ...]], queries: Tensor, keys: Tensor, size: int, causal: bool
) -> Tensor:
    """Pairs that every one of these branches holds, [cells of queries, cells of keys]; tokens come in order."""
    sides, alone = [], []
    for tokens in (queries, keys):
        kept = tokens
        for segment, dilation, offset, *_ in branches:
            kept = kept[kept % segment % dilation == offset]
        # Segment numbers never fall, so their sum changes where any of them does.
        together = sum((kept // segment for segment, *_ in branches), start=torch.zeros_like(kept))
        cell, num_cells = kept // size - tokens[0] // size, ceil_div(len(tokens), size)
        named, count = (together * num_cells + cell).unique_consecutive(return_counts=True)
        sides.append((named // num_cells, named % num_cells, count))
        alone.append(torch.bincount(cell, minlength=num_cells).double())
    (segment_q, cell_q, count_q), (segment_k, cell_k, count_k) = sides
    # Of every (segment, cell) of queries, all cells of keys that hold tokens of this segment: they are neighbours.
    first = torch.searchsorted(segment_k, segment_q)
    matches = torch.searchsorted(segment_k, segment_q, right=True) - first
    of_query = torch.repeat_interleave(matches)
    of_key = torch.arange(len(of_query)) + (first - (matches.cumsum(0) - matches))[of_query]
    cells = cell_q[of_query] * len(alone[1]) + cell_k[of_key]
    products = (count_q[of_query] * count_k[of_key]).double()
    pairs = torch.bincount(cells, products, minlength=len(alone[0]) * len(alone[1])).view(len(alone[0]), -1)
    if causal:  # in a cell on the diagonal, of two different tokens one sees the other
        row, column = (
            torch.arange(int(t[0]) // size, int(t[0]) // size + ceil_div(len(t), size)) for t in (queries, keys)
        )
        with_itself = (pairs + alone[0][:, None]) / 2
        pairs = torch.where(row[:, None] > column, pairs, torch.where(row[:, None] == column, with_itself, 0.0))
    return pairs


def _inside(layout: BlockLayout, region: Region | None) -> Region:
    """Of the sequence; the whole by default."""
    longest = max(layout.lengths)
    if region is None:
        return Region(0, 0, longest)
    for name, value, seq in zip(("query", "key"), region[:2], layout.lengths, strict=True):
        check_int(f"{name} of region", value, least=0)
        if value >= seq:
            raise ValueError(f"{name} of region must be below {seq}, got {value}")
    check_int("tokens of region", region.tokens, least=1)
    return region._replace(tokens=min(region.tokens, longest))


def _cells(start: int, stop: int, end: int, size: int) -> tuple[int, Tensor]:
    """Where the cell of `start` begins, and how much of `end` each cell from there to that of `stop` − 1 has."""
    start = start // size * size
    return start, _cell_sizes(min(ceil_div(stop, size) * size, end) - start, size)


def _cell_sizes(count: int, size: int) -> Tensor:
    """How much of `count` each cell has: `size`, the last what is left."""
    starts = torch.arange(0, count, size)
    return (count - starts).clamp(max=size)


def _states(some: Tensor, all_of_it: Tensor) -> Tensor:
    states = torch.where(all_of_it, State.FULL, torch.where(some, State.PARTIAL, State.EMPTY))
    return states.to(torch.int8)


def list_number(layout: BlockLayout, head: int, sample: int) -> int:
    """Which of the layout's lists; a list that all heads, or all samples, share answers for each of them."""
    heads, samples = layout.num_heads or 1, layout.batch_size or 1
    for name, value, count in (("head", head, heads), ("sample", sample, samples)):
        if value < 0 or (count > 1 and value >= count):
            raise IndexError(f"{name} must be from 0 to {count - 1}, as the layout has {count}, got {value}")
    return (sample if samples > 1 else 0) * heads + (head if heads > 1 else 0)
