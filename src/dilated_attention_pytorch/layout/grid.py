"""The blocks of patterns of a grid (`patterns.space`), in time and memory proportional to the blocks found.

What a query sees is a box: along each dimension a run of coordinates, every `step`-th of them. The boxes of the queries
of a block together lie in one box, which is cut into cells, runs of neighbouring tokens: these name the candidate key
blocks. Comparing the bounds of both blocks along each dimension tells most of them to be full or empty. What is left is
partial, or empty after all, and is named by its kind: blocks of one kind allow the same pairs, wherever they stand.
"""

from __future__ import annotations

from functools import singledispatch
from typing import NamedTuple

import torch
from torch import Tensor

from ..patterns.blocks import ceil_div
from ..patterns.space import GridPattern, Neighborhood, SlidingTiles

# A candidate here takes as much memory as so many of those that are intervals and block rules.
HEAVY = 16

# Stand for a coordinate: of a token of the prefix, which sees and is seen, and of no token at all.
PREFIX, NOTHING = -1, -2


class Axis(NamedTuple):
    """What a query at each coordinate of a dimension sees: int32 [size], from `first` to before `stop`."""

    first: Tensor
    stop: Tensor
    step: int


@singledispatch
def axis_of(pattern: GridPattern, dimension: int, device: torch.device) -> Axis:
    """The same as the pattern's own `seen`, for all coordinates at once."""
    raise TypeError(f"no layout can be built from a grid pattern of type {type(pattern).__name__}")


@axis_of.register
def _(pattern: Neighborhood, dimension: int, device: torch.device) -> Axis:
    size, window, dilation, causal, stride = (
        x[dimension] for x in (pattern.shape, pattern.window, pattern.dilation, pattern.causal, pattern.stride)
    )
    coordinate = torch.arange(size, dtype=torch.int32, device=device)
    at, residue = coordinate // dilation, coordinate % dilation
    length = (size - residue + (dilation - 1)) // dilation
    leader = torch.minimum(at // stride * stride + (stride - 1 if causal else stride // 2), length - 1)
    if causal:
        first, stop = leader - (window - 1), at + 1
    else:
        first = leader - window // 2
        if pattern.border == "shift":
            first = torch.minimum(first.clamp(min=0), length - window)
        stop = first + window
    return Axis(residue + first.clamp(min=0) * dilation, residue + torch.minimum(stop, length) * dilation, dilation)


@axis_of.register
def _(pattern: SlidingTiles, dimension: int, device: torch.device) -> Axis:
    size, tile, window = pattern.shape[dimension], pattern.tile[dimension], pattern.window[dimension]
    coordinate = torch.arange(size, dtype=torch.int32, device=device)
    tiles, wide = ceil_div(size, tile), window // tile
    first = (coordinate // tile - wide // 2).clamp(min=0, max=tiles - wide)
    return Axis(first * tile, ((first + wide) * tile).clamp(max=size), 1)


def coordinates_of(pattern: GridPattern, position: Tensor) -> Tensor:
    """int32 [dimensions, *position]: where the tokens at these positions stand in the grid."""
    order = pattern.token_order
    place = position - order.grid_at
    inside = (place >= 0) & (place < order.num_cells)
    there = (position >= 0) & (position < pattern.total)
    found = torch.stack(order.coordinates(place.clamp(0, order.num_cells - 1))).int()
    return torch.where(inside, found, torch.where(there, PREFIX, NOTHING))


def allowed_pairs(axes: list[Axis], query: Tensor, key: Tensor) -> Tensor:
    """bool [entries, block_q, block_k] of coordinates, [dimensions, entries, block_q] and as many keys."""
    allowed = torch.ones((), dtype=torch.bool, device=query.device)
    for axis, of_query, of_key in zip(axes, query, key, strict=True):
        at = of_query.clamp(min=0)
        first, stop, of_key = axis.first[at][:, :, None], axis.stop[at][:, :, None], of_key[:, None]
        allowed = allowed & (of_key >= first) & (of_key < stop)
        if axis.step > 1:
            allowed &= (of_key - first) % axis.step == 0
    query, key = query[0][:, :, None], key[0][:, None]
    return (allowed & (query >= 0) | (query == PREFIX) | (key == PREFIX)) & (query != NOTHING) & (key != NOTHING)


class Seen(NamedTuple):
    """Of each block of queries, along a dimension, the least and the largest bounds of what its queries see."""

    first_min: Tensor
    first_max: Tensor
    stop_min: Tensor
    stop_max: Tensor


class Held(NamedTuple):
    """Of each block of keys, along a dimension, the least and the largest coordinate."""

    low: Tensor
    high: Tensor


class FoundBlocks(NamedTuple):
    """Blocks of some rows, `row · columns + column` ascending. Of those that are not full, equal kinds allow the same
    pairs, if they allow any."""

    key: Tensor
    full: Tensor
    kind: Tensor


class GridBlocks:
    """A pattern over the blocks of some rows and of all keys.

    Args:
        head: the position of the first query of each row.
    """

    def __init__(
        self, pattern: GridPattern, head: Tensor, seq_k: int, blocks: tuple[int, int], device: torch.device
    ) -> None:
        self.block_k = blocks[1]
        self.pattern, self.seq_k, self.device = pattern, seq_k, device
        self.dimensions = len(pattern.shape)
        self.axes = [axis_of(pattern, d, device) for d in range(self.dimensions)]
        lane_q, lane_k = (torch.arange(n, device=device) for n in blocks)
        # A query behind the end stands for the last one: it changes nothing.
        position = (head.to(device)[:, None].long() + lane_q).clamp_(max=seq_k - 1)
        self.query = coordinates_of(pattern, position)  # [dimensions, rows, block_q]
        start = torch.arange(0, seq_k, self.block_k, device=device)
        self.key = coordinates_of(pattern, start[:, None] + lane_k)
        self.num_columns = len(start)
        self.seen, self.held = zip(*(self._bounds(d) for d in range(self.dimensions)), strict=True)
        self.plain_query, self.plain_key = (x[0].amin(1) >= 0 for x in (self.query, self.key))
        # Blocks with the same coordinates along a dimension.
        self.same_query, self.same_key = (
            [torch.unique(x, dim=0, return_inverse=True)[1] for x in of_all] for of_all in (self.query, self.key)
        )

    def _bounds(self, dimension: int) -> tuple[Seen, Held]:
        """Of the tokens in the grid. Of a block without any nothing is seen, and nothing sees it."""
        axis, far = self.axes[dimension], self.pattern.shape[dimension]
        query, key = self.query[dimension], self.key[dimension]
        first, stop, none = axis.first[query.clamp(min=0)], axis.stop[query.clamp(min=0)], query < 0
        seen = Seen(
            first_min=first.masked_fill(none, far).amin(1),
            first_max=first.masked_fill(none, -1).amax(1),
            stop_min=stop.masked_fill(none, far + 1).amin(1),
            stop_max=stop.masked_fill(none, -1).amax(1),
        )
        return seen, Held(key.masked_fill(key < 0, far + 1).amin(1), key.amax(1))

    def allowed(self, row: Tensor, column: Tensor) -> Tensor:
        """bool [blocks, block_q, block_k]."""
        return allowed_pairs(self.axes, self.query[:, row], self.key[:, column])

    def found(self, start: int, stop: int) -> FoundBlocks:
        """Of the rows from `start` to before `stop`."""
        key = self._candidates(torch.arange(start, stop, device=self.device))
        row, column = key // self.num_columns, key % self.num_columns
        touched, full = self._judged(row, column)
        key, full = key[touched], full[touched]
        return FoundBlocks(key, full, self._kinds(row[touched], column[touched], full))

    @property
    def num_candidates(self) -> Tensor:
        """Of each row, on the host: about how many there are, each counted for as many as its memory is worth."""
        return self._cells()[2].cpu() * HEAVY

    def _cells(self, rows: Tensor | slice = slice(None)) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Along each dimension the first cell of each row's box, and how many there are; and how many altogether."""
        first, count = [], []
        for (tile, cell), seen in zip(self._cell_sizes(), self.seen, strict=True):
            bounds = seen.first_min[rows].long(), seen.stop_max[rows].long() - 1
            low, high = (x.clamp(min=0) for x in bounds)
            begin, end = (x // tile * ceil_div(tile, cell) + x % tile // cell for x in (low, high))
            first.append(begin)
            count.append((end - begin + 1).masked_fill(bounds[1] < bounds[0], 0))
        some = self.query[0][rows].amax(1) >= 0
        whole = (self.query[0][rows] == PREFIX).any(1)
        return first, count, torch.stack(count).prod(0).masked_fill(~some | whole, 0)

    def _cell_sizes(self) -> list[tuple[int, int]]:
        """(tile, cell) of each dimension: a cell is a run of tokens, of whole rows or layers of a tile while it fits
        into a block."""
        tiles = self.pattern.order or self.pattern.shape
        sizes, inside, whole = [], 1, True
        for tile in reversed(tiles):
            cell = tile if inside == 1 else (max(1, min(tile, self.block_k // inside)) if whole else 1)
            sizes.append((tile, cell))
            inside, whole = inside * cell, whole and cell == tile
        return sizes[::-1]

    def _candidates(self, rows: Tensor) -> Tensor:
        """`row · columns + column`, ascending."""
        num_columns, block = self.num_columns, self.block_k
        low_cell, count, total = self._cells(rows)
        which = torch.repeat_interleave(total)
        number = torch.arange(len(which), device=self.device) - (total.cumsum(0) - total)[which]
        low, high = [], []
        for d in reversed(range(self.dimensions)):
            (tile, cell), size, seen = self._cell_sizes()[d], self.pattern.shape[d], self.seen[d]
            at = low_cell[d][which] + number % count[d][which]
            number = number // count[d][which]
            per_tile = ceil_div(tile, cell)
            begin = at // per_tile * tile + at % per_tile * cell
            end = torch.minimum(begin + cell, (at // per_tile + 1) * tile).clamp(max=size)
            low.append(torch.maximum(begin, seen.first_min[rows][which]))
            high.append(torch.minimum(end, seen.stop_max[rows][which]) - 1)
        order = self.pattern.token_order
        first, last = ((order.place(x[::-1]) + order.grid_at) // block for x in (low, high))
        spans = [(rows[which], first, last)]
        whole = rows[(self.query[0][rows] == PREFIX).any(1)]
        spans.append((whole, torch.zeros_like(whole), torch.full_like(whole, num_columns - 1)))
        if self.pattern.prefix:
            seeing = rows[(self.query[0][rows] != NOTHING).any(1)]
            place = 0 if order.grid_at else order.num_cells
            ends = [torch.full_like(seeing, x // block) for x in (place, place + self.pattern.prefix - 1)]
            spans.append((seeing, ends[0], ends[1]))
        row, first, last = (torch.cat(x) for x in zip(*spans, strict=True))
        length = (last - first + 1).clamp(min=0)
        entry = torch.repeat_interleave(length)
        nth = torch.arange(len(entry), device=self.device) - (length.cumsum(0) - length)[entry]
        return torch.unique(row[entry] * num_columns + first[entry] + nth)

    def _judged(self, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        """Whether bounds leave room for any pair, and whether they allow all."""
        both = self.plain_query[row] & self.plain_key[column]
        touched, full = torch.ones_like(both), both.clone()
        for axis, seen, held in zip(self.axes, self.seen, self.held, strict=True):
            low, high = held.low[column], held.high[column]
            touched &= (high >= seen.first_min[row]) & (low < seen.stop_max[row])
            full &= (low >= seen.first_max[row]) & (high < seen.stop_min[row]) & (axis.step == 1)
        # A block of the prefix alone is full, too.
        query, key = (x[0] == PREFIX for x in (self.query, self.key))
        nothing = (self.query[0] == NOTHING).any(1)[row] | (self.key[0] == NOTHING).any(1)[column]
        full |= (query.all(1)[row] | key.all(1)[column]) & ~nothing
        return touched | query.any(1)[row] | key.any(1)[column], full

    # Kinds.

    def _kinds(self, row: Tensor, column: Tensor, full: Tensor) -> Tensor:
        kind = torch.zeros_like(row)
        partial = (~full).nonzero()[:, 0]
        row, column, of_block = row[partial], column[partial], torch.zeros_like(partial)
        for d in range(self.dimensions):
            of_query, of_key = self.same_query[d][row], self.same_key[d][column]
            pair, same = torch.unique(of_query * self.num_columns + of_key, return_inverse=True)
            example = torch.empty_like(pair).scatter_(0, same, torch.arange(len(same), device=self.device))
            form, of_pair = torch.unique(self._form(d, row[example], column[example]), dim=0, return_inverse=True)
            of_block = torch.unique(of_block * len(form) + of_pair[same], return_inverse=True)[1]
        kind[partial] = of_block
        return kind

    def _form(self, dimension: int, row: Tensor, column: Tensor) -> Tensor:
        """int32 [blocks, any]: equal where, along a dimension, the same pairs are allowed: bounds of queries
        and coordinates of keys, counted from the block's first key, as far as they matter."""
        axis, query, key = self.axes[dimension], self.query[dimension][row], self.key[dimension][column]
        low, high = (x[column][:, None] for x in self.held[dimension])
        base, behind = low, high + 1 - low  # the last key's
        first, stop = axis.first[query.clamp(min=0)] - base, axis.stop[query.clamp(min=0)] - base
        # What is before the first key begins at it or, of every `step`-th, at the next that is seen.
        first = torch.where(first < 0, first % axis.step if axis.step > 1 else torch.zeros_like(first), first)
        stop = torch.minimum(stop, behind)
        none = first >= stop
        first, stop = first.masked_fill(none, 0), stop.masked_fill(none, 0)
        first, stop = (torch.where(query < 0, query, x) for x in (first, stop))
        return torch.cat((first, stop, torch.where(key < 0, key, key - base)), dim=1).int()
