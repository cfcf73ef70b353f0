"""How `blockwise` cuts a call: into units of rows, and these into tiles that are computed at once.

A unit is the query heads of one sample that share a list and a key head, over a range of query blocks. A row of blocks
is cut into pieces of at most `PIECE` keys; pieces with the same number of full and partial blocks, of whatever rows of
the unit, form a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ..layout import BlockLayout
from ..layout.size import ListSize
from ..patterns.blocks import ceil_div
from .base import compute_dtype
from .sizes import Shape

# Tuned on 2 CPU cores; benchmarks/results/cpu.json has what they give.
PIECE = 1024  # keys in one piece of a row
TILE_SCORES = 1 << 20  # scores in one tile: they should stay in the cache
RANGE_COPIED = 1 << 20  # elements of the query rows of a unit where key heads come one after the other
RANGE_DIRECT = 1 << 19  # and where they are innermost
SHARE = 1 << 17  # scores that are worth a thread: starting one takes some 20 µs
SPLIT = 1 << 22  # scores from which on the operators of a lone thread are split over the others
COPIES = 1 << 22  # elements of the copies of key heads up to which each thread may hold its own
HEADS_A_COPY = 4  # beyond, key heads for each copy of one that is held at a time
MASKS_KEPT = 1 << 20  # bytes of masks of partial blocks that are kept for the heads and samples that share them
REUSE = 2  # uses of a key block above which copying it first pays
ACCELERATOR = 32  # how many times larger tiles and ranges are where there is no cache to stay in but a launch to pay


@dataclass(frozen=True)
class Unit:
    """Query heads that share a list and a key head, over a range of query blocks."""

    sample: int
    key_head: int
    heads: slice
    rows: range  # query blocks
    tokens: slice  # the same in tokens
    keys: Tensor  # [num_k_blocks, block_k, D]
    values: Tensor  # the same, of their own width
    opens_key_head: bool
    closes_key_head: bool


@dataclass(frozen=True)
class Tile:
    """Pieces of rows that are computed together."""

    rows: Tensor | slice  # which rows of the unit
    query_blocks: Tensor  # the same, as query blocks of the sequence
    blocks: Tensor  # key blocks [num, width]
    num_full: int  # how many of them, the first, are full
    rule_ids: Tensor | None  # [num, width − num_full]
    times: Tensor | None  # [num, width] how often the pairs of a block count, 0 where they differ; None: once
    first: bool  # no earlier piece of these rows
    masked: bool  # some row may have no key at all


class KeptMasks:
    """Masks of tiles, as long as there is room."""

    def __init__(self, room: int) -> None:
        self.room, self.of_tile = room, dict[int, Tensor]()  # by id: a tile lives as long as its plan

    def keep(self, tile: Tile, mask: Tensor) -> None:
        if mask.numel() <= self.room:
            self.of_tile[id(tile)] = mask
            self.room -= mask.numel()


class Cut:
    """How finely a call is cut, as a function of its sizes, so that `workspace` can ask the same.

    Args:
        grid: the layout, or the predicted size of its lists.
        list_heads: lists of a sample.
        blocks: active blocks of all lists.
    """

    def __init__(
        self, shape: Shape, grid: BlockLayout | ListSize, *, list_heads: int, blocks: int, on_cpu: bool
    ) -> None:
        self.num_heads, self.key_heads = shape.heads, shape.heads_kv
        self.widest = max(shape.head_dim, shape.width_v)  # of keys and values
        self.grid, self.on_cpu = grid, on_cpu
        self.enlarge: float = 1 if on_cpu else ACCELERATOR
        group = self.num_heads // self.key_heads
        # Query heads stacked into one tile: all of a key head, unless each has its own list.
        self.stacked = 1 if list_heads > self.key_heads else group
        uses = group // self.stacked * blocks / (grid.num_lists * grid.num_k_blocks)
        # Whether the keys of a head can be used in place, as whole blocks in the compute dtype.
        whole = shape.seq_k % grid.block_k == 0 and grid.num_residues == 1
        self.plain = whole and shape.dtype == compute_dtype(shape.dtype)
        self.copied = uses > REUSE or not self.plain
        self.num_scores = shape.batch * self.num_heads * (blocks // grid.num_lists) * grid.block_q * grid.block_k
        self.a_copy = grid.num_k_blocks * grid.block_k * (shape.head_dim + shape.width_v)
        self.piece = max(1, PIECE // grid.block_k)  # blocks

    def share(self, num: int) -> Self:
        """For one of `num` shares of the call, which shares the cache with the others."""
        share = copy(self)
        share.enlarge = self.enlarge / num
        return share

    def num_at_once(self, threads: int) -> int:
        """How many threads share the cache. No function of the batch: a sample is bitwise the same in any."""
        return threads if self.on_cpu else 1

    def num_shares(self, threads: int) -> int:
        """How many threads work apart."""
        return max(1, min(self.num_at_once(threads), self.num_scores // SHARE))

    def by_heads(self, threads: int) -> bool:
        """Whether the threads of the forward take key heads, each with a copy of its own, and not rows of the same."""
        return self.copied and self.key_heads >= threads and threads * self.a_copy <= COPIES

    def num_backward_at_once(self, threads: int) -> int:
        """How many threads share the cache in the backward, where each takes key heads. Their copies stay small, or
        small beside the tensors of the call."""
        few = self.copied and threads * self.a_copy > COPIES
        return max(1, min(self.key_heads // HEADS_A_COPY if few else self.key_heads, self.num_at_once(threads)))

    def num_backward_shares(self, threads: int) -> int:
        """How many threads work apart in the backward."""
        return min(self.num_backward_at_once(threads), self.num_shares(threads))

    def split(self, threads: int) -> int:
        """Over how many threads each operator of the backward is split."""
        return max(1, threads // self.num_backward_at_once(threads)) if self.num_scores >= SPLIT else 1

    def num_ranges(self, shared_by: int = 1) -> int:
        """Ranges of the query blocks of a residue; with copied keys, enough for all shares."""
        elements, in_parts = RANGE_DIRECT, 1
        if self.copied:
            elements, in_parts = RANGE_COPIED, 2 * shared_by if shared_by > 1 else 1
        row, residues = self.stacked * self.grid.block_q * self.widest, self.grid.num_residues
        num, in_parts = ceil_div(self.grid.num_q_blocks, residues), ceil_div(in_parts, residues)
        parts = ceil_div(num, max(1, int(self.enlarge * elements) // row))
        return min(num, ceil_div(parts, in_parts) * in_parts)

    def rows_at_once(self, width: int) -> int:
        """How many rows of `width` key blocks make a tile."""
        scores = self.stacked * self.grid.block_q * width * self.grid.block_k
        return max(1, int(self.enlarge * TILE_SCORES) // scores)


class Tiling(Cut):
    """A call that is cut into units and these into tiles."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, *, masked: bool) -> None:
        """`masked`: whether the call has a mask of its own."""
        lists, on_cpu = layout.by_query, q.device.type == "cpu"
        super().__init__(
            Shape.of(q, k, v), layout, list_heads=layout.num_heads or 1, blocks=len(lists.indices), on_cpu=on_cpu
        )
        self.layout, self.masked, self.batch, self.device = layout, masked, q.shape[0], q.device
        self.plans: dict[tuple[int, range], list[Tile]] = {}
        self.masks = KeptMasks(MASKS_KEPT)
        self.edges = lists.offsets.cpu().long(), lists.splits.cpu().long()

    def ranges(self, shared_by: int = 1) -> list[range]:
        """Runs of query blocks, each of one residue."""
        num_residues = self.layout.num_residues
        num, parts = self.layout.num_q_blocks // num_residues, self.num_ranges(shared_by)
        cuts = [
            (c * num + num * i // parts, c * num + num * (i + 1) // parts)
            for c in range(num_residues)
            for i in range(parts)
        ]
        return [range(*cut) for cut in cuts]

    def units(self, sample: int, key_head: int, ranges: list[range], keys: Tensor, values: Tensor) -> Iterator[Unit]:
        group = self.num_heads // self.key_heads
        firsts = range(key_head * group, (key_head + 1) * group, self.stacked)
        for head in firsts:
            for rows in ranges:
                yield Unit(
                    sample=sample,
                    key_head=key_head,
                    heads=slice(head, head + self.stacked),
                    rows=rows,
                    tokens=self._tokens(rows),
                    keys=keys,
                    values=values,
                    opens_key_head=head == firsts[0] and rows is ranges[0],
                    closes_key_head=head == firsts[-1] and rows is ranges[-1],
                )

    def _tokens(self, rows: range) -> slice:
        layout, per_residue = self.layout, self.layout.num_q_blocks // self.layout.num_residues
        residue, first = divmod(rows.start, per_residue)
        start, num = first * layout.block_q * layout.num_residues + residue, len(rows) * layout.block_q
        stop = min(start + num * layout.num_residues, layout.seq_q)
        return slice(min(start, stop), stop, layout.num_residues)

    def _first_row(self, unit: Unit) -> int:
        """Where the list of the unit's heads starts among the rows of the layout."""
        layout, first = self.layout, 0
        if layout.num_heads is not None:
            first = unit.heads.start * layout.num_heads // self.num_heads
        if layout.batch_size is not None:
            first += unit.sample % layout.batch_size * (layout.num_heads or 1)
        return first * layout.num_q_blocks

    def _edges(self, unit: Unit) -> tuple[Tensor, Tensor, Tensor]:
        """Where the lists of the unit's rows start, turn from full to partial, and stop."""
        first = self._first_row(unit)
        row = slice(first + unit.rows.start, first + unit.rows.stop)
        offsets, splits = self.edges
        return offsets[row], splits[row], offsets[1:][row]

    def empty_rows(self, unit: Unit) -> Tensor:
        """The rows without any block, which are in no tile."""
        start, _, stop = self._edges(unit)
        return (start == stop).nonzero()[:, 0].to(self.device)

    def tiles(self, unit: Unit) -> list[Tile]:
        """The pieces of the unit's rows, grouped by how many full and partial blocks they have.

        Units of other heads and samples that share the list share the plan too.
        """
        key = self._first_row(unit), unit.rows
        if key not in self.plans:
            self.plans[key] = list(self._plan(unit))
        return self.plans[key]

    def hidden(self, tile: Tile, rule_ids: Tensor) -> Tensor:
        """Which pairs of a tile's partial blocks are not allowed, [num, 1, block_q, partial, block_k]."""
        mask = self.masks.of_tile.get(id(tile))
        if mask is None:
            partial = tile.blocks[:, tile.num_full :]
            query_block = tile.query_blocks[:, None].expand_as(partial)
            allowed = self.layout.token_mask(query_block.flatten(), partial.flatten(), rule_ids.flatten())
            mask = ~allowed.view(len(partial), 1, -1, self.layout.block_q, self.layout.block_k).transpose(2, 3)
            self.masks.keep(tile, mask)
        return mask

    def _plan(self, unit: Unit) -> Iterator[Tile]:
        piece = self.piece
        start, split, stop = self._edges(unit)
        for begin in range(0, int((stop - start).max()), piece):
            first = start + begin
            width = (stop - first).clamp(0, piece)
            full = torch.minimum((split - first).clamp(min=0), width)
            shape = full * (piece + 1) + width
            for value in torch.unique(shape[width > 0]).tolist():
                num_full, num = divmod(value, piece + 1)
                same = (shape == value).nonzero()[:, 0]
                for which in same.split(self.rows_at_once(num)):
                    entries = (first[which][:, None] + torch.arange(num)).to(self.device)
                    yield self._tile(unit, which, entries, num_full, is_first=begin == 0)

    def _tile(self, unit: Unit, which: Tensor, entries: Tensor, num_full: int, *, is_first: bool) -> Tile:
        lists = self.layout.by_query
        rule_ids = None
        if num_full < entries.shape[1]:
            partial = entries[:, num_full:]
            named = lists.rule_ids.numel() > 0 and not self.layout.dilated
            rule_ids = lists.rule_ids[partial] if named else torch.zeros_like(partial)
        times = lists.rule_ids[entries] if self.layout.dilated else None
        consecutive = int(which[-1] - which[0]) == len(which) - 1
        return Tile(
            rows=slice(int(which[0]), int(which[-1]) + 1) if consecutive else which.to(self.device),
            query_blocks=(which + unit.rows.start).to(self.device),
            blocks=lists.indices[entries],
            num_full=num_full,
            rule_ids=rule_ids,
            times=times if times is not None and (times != 1).any() else None,
            first=is_first,
            masked=self.masked or rule_ids is not None,
        )


def largest_buffers(seq_len: int, head_dim: int) -> list[int]:
    """Numbers in each of the largest buffers of a call with as many queries as keys, on a CPU."""
    head = seq_len * head_dim
    rows, scores = min(head, RANGE_COPIED), min(seq_len * seq_len, TILE_SCORES)
    return [head, head, rows, rows, rows, scores, scores]  # keys, values, three of rows, two of scores
