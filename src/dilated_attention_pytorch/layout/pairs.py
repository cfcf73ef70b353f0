"""The blocks of a union with patterns of a grid in it, which are asked pair by pair: partial blocks keep bitmaps.

Each term lists its blocks as `layout.build` and `layout.grid` find them, and says which are full and which allow the
same pairs. One block of those that allow the same is asked, so that the time is that of the different ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..patterns.blocks import ceil_div
from ..patterns.tokens import EVERYTHING
from .bitmaps import UniqueBitmaps, packed
from .build import blocks_of, first_positions, row_chunks, span_of
from .grid import FoundBlocks, GridBlocks
from .lists import BlockList, send
from .ranges import bounds_of
from .rules import NO_DOCUMENTS, key_bounds
from .terms import Term
from .tiles import PAIRS

# The kind of a block that is asked for itself alone.
ALONE = -1


class Listed(NamedTuple):
    """The blocks of a union, and how many of them were asked pair by pair. The rule of a partial block is the number
    of its bitmap."""

    by_query: BlockList
    evaluated: int


def find_pairs(
    terms: Sequence[Term],
    lengths: tuple[int, int],
    blocks: tuple[int, int],
    device: torch.device,
    bitmaps: UniqueBitmaps,
    query_blocks: Tensor | None = None,
) -> Listed:
    """The blocks of a union of terms, whose bitmaps are added to `bitmaps`.

    Args:
        query_blocks: the rows that are asked for, ascending; all by default.
    """
    head = first_positions(lengths, blocks[0], query_blocks)
    sources = [_Source(term, head, lengths, blocks, device) for term in terms]
    alone = [source for source in sources if not source.grids]
    weight = torch.stack([grid.num_candidates for source in sources for grid in source.grids]).sum(0)
    chunks = row_chunks(
        [source.term for source in alone], [source.span for source in alone], len(head), lengths[1], blocks, weight
    )
    keys, numbers, evaluated = [], [], 0
    for start, stop in chunks:
        found = [source.found(start, stop) for source in sources]
        key, full, example, same = _united(found)
        number = torch.full_like(key, FULL)
        asked = _asked(sources, found, example, bitmaps)
        number[~full] = asked[same]
        keys.append(key[number > EMPTY])
        numbers.append(number[number > EMPTY])
        evaluated += len(example)
    key, number = torch.cat(keys), torch.cat(numbers)
    columns = sources[0].num_columns
    return Listed(BlockList.pack(key // columns, key % columns, number >= 0, number, len(head)), evaluated)


# What a block is, if it is not the number of a bitmap.
EMPTY, FULL = -2, -1


def _united(found: Sequence[FoundBlocks]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The blocks that any term has, ascending, and which of them one term fills; of the others one of each kind, as
    `key`, and which of these each is like."""
    key, of_block = torch.unique(torch.cat([each.key for each in found]), return_inverse=True)
    full = torch.zeros_like(key).index_add_(0, of_block, torch.cat([each.full for each in found]).long()) > 0
    terms = torch.bincount(of_block, minlength=len(key))
    # A block of one term is of its kind; one of several is alone.
    kinds = [torch.where(each.kind < 0, ALONE, each.kind * len(found) + i) for i, each in enumerate(found)]
    kind = torch.empty_like(key)
    kind[of_block] = torch.cat(kinds)
    alone = (terms > 1) | (kind < 0)
    place = torch.arange(len(key), device=key.device)
    kind = torch.where(alone, -1 - place, kind)[~full]
    different, same = torch.unique(kind, return_inverse=True)
    rest = key[~full]
    example = torch.empty_like(different).scatter_(0, same, rest)
    return key, full, example, same


def _asked(sources: Sequence[_Source], found: Sequence[FoundBlocks], key: Tensor, bitmaps: UniqueBitmaps) -> Tensor:
    """EMPTY, FULL or the number of its bitmap, of each of these blocks."""
    numbers = []
    for some in key.split(max(1, PAIRS // (sources[0].blocks[0] * sources[0].blocks[1]))):
        allowed = torch.zeros(len(some), *sources[0].blocks, dtype=torch.bool, device=key.device)
        for source, blocks in zip(sources, found, strict=True):
            mine = torch.isin(some, blocks.key, assume_unique=True).nonzero()[:, 0]
            allowed[mine] |= source.allowed(some[mine])
        pairs = allowed.flatten(1)
        number = torch.where(pairs.any(1), FULL, EMPTY)
        partial = ((number == FULL) & ~pairs.all(1)).nonzero()[:, 0]
        number[partial] = bitmaps.numbers_of(packed(allowed[partial]))
        numbers.append(number)
    return torch.cat(numbers) if numbers else key.clone()


class _Source:
    """A term, and its blocks in rows whose first queries have the positions `head`."""

    def __init__(
        self, term: Term, head: Tensor, lengths: tuple[int, int], blocks: tuple[int, int], device: torch.device
    ) -> None:
        self.term, self.head, self.lengths, self.blocks, self.device = term, head, lengths, blocks, device
        self.num_columns = ceil_div(lengths[1], blocks[1])
        self.bounded = term.interval != EVERYTHING or bool(term.ranges)
        self.span = span_of(term, head, lengths[1], blocks)
        self.grids = [GridBlocks(grid, head, lengths[1], blocks, device) for grid in term.grids]
        self.head_there = head.to(device).long()

    def found(self, start: int, stop: int) -> FoundBlocks:
        """The blocks of these rows; of those with bounds, partial ones may have no pair."""
        span = None if self.span is None else self.span.rows(start, stop)
        if not self.grids:
            return self._plain(self.term, span, start, stop)
        found, *others = (grid.found(start, stop) for grid in self.grids)
        for other in others:
            found = _both(found, other)
        if self.term.rules:
            found = _both(found, self._plain(Term(EVERYTHING, self.term.rules), None, start, stop))
        if not self.bounded or span is None:
            return found
        row, column = found.key // self.num_columns - start, found.key % self.num_columns
        first, behind, first_full, behind_full = send(span.tensors(), self.device)
        whole = (column >= first_full[row]) & (column < behind_full[row])
        found = FoundBlocks(found.key, found.full & whole, torch.where(whole, found.kind, ALONE))
        return _chosen(found, (column >= first[row]) & (column < behind[row]))

    def _plain(self, term: Term, span, start: int, stop: int) -> FoundBlocks:  # type: ignore[no-untyped-def]
        """Of a term without grids."""
        found = blocks_of(term, span, self.head[start:stop], self.lengths, self.blocks, self.device)
        state, there = found.rows().long(), found.column < self.num_columns  # coarse blocks reach beyond the keys
        key = ((state // 2 + start) * self.num_columns + found.column)[there]
        key, order = key.sort()
        return FoundBlocks(key, (state[there] % 2 == 0)[order], torch.full_like(key, ALONE))

    def allowed(self, key: Tensor) -> Tensor:
        """bool [blocks, block_q, block_k] of blocks that it has. Queries behind the end are as the last one."""
        (seq_q, seq_k), (block_q, block_k) = self.lengths, self.blocks
        row, column = key // self.num_columns, key % self.num_columns
        keys = (column * block_k)[:, None] + torch.arange(block_k, device=self.device)
        allowed = (keys < seq_k)[:, None].expand(-1, block_q, -1)
        for grid in self.grids:
            allowed = allowed & grid.allowed(row, column)
        if not self.bounded:
            return allowed
        position = (self.head_there[row][:, None] + torch.arange(block_q, device=self.device)).clamp(max=seq_k - 1)
        interval = torch.tensor(self.term.interval._replace(key_range=0), device=self.device)
        first, last = key_bounds(interval, position - (seq_k - seq_q), seq_q, seq_k, NO_DOCUMENTS)
        if self.term.ranges:
            start, stop = bounds_of(self.term.ranges, position)
            first, last = torch.maximum(first, start), torch.minimum(last, stop - 1)
        return allowed & (keys[:, None] >= first[:, :, None]) & (keys[:, None] <= last[:, :, None])


def _both(one: FoundBlocks, other: FoundBlocks) -> FoundBlocks:
    """What both have; a block is of a kind for each pair of kinds."""
    one, other = (_chosen(a, torch.isin(a.key, b.key, assume_unique=True)) for a, b in ((one, other), (other, one)))
    kinds = [torch.where(each.full, 0, each.kind + 1) for each in (one, other)]
    alone = torch.stack([~each.full & (each.kind < 0) for each in (one, other)]).any(0)
    pair = torch.unique(torch.stack(kinds), dim=1, return_inverse=True)[1]
    return FoundBlocks(one.key, one.full & other.full, torch.where(alone, ALONE, pair))


def _chosen(found: FoundBlocks, chosen: Tensor) -> FoundBlocks:
    return FoundBlocks(*(x[chosen] for x in found))
