"""The layout of LongNet's branches: dilated attention as lists of blocks.

A branch keeps every r-th token of a segment, so a block of neighbouring tokens would be kept in part, everywhere. But
tokens of one residue class modulo the lcm of the dilations are kept together or not at all: the layout takes its blocks
residue class by residue class (`BlockLayout.num_residues`), and between two such blocks either no pair counts, or every
pair equally often. That number, the multiplicity, stands beside the block: a key that three branches hold is read once
and counts three times.

Only where a segment ends inside a block, or a dilation does not divide the number of residues, is a block mixed: its
pairs are then counted one by one from `branches`, int32 [lists, branches, 5]: segment length, dilation, offset, and how
much later queries and keys stand in the whole, if the layout is a part of it. Any number of residues is right;
`cheapest_blocks` picks one that leaves little mixed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..patterns.base import check_int
from ..patterns.blocks import ceil_div
from ..patterns.branches import Branches
from ..patterns.tokens import EVERYTHING, Interval
from .bitmaps import NO_BITMAPS
from .branch_runs import WholeBranches
from .checks import MAX_SEQUENCE, check_sizes
from .layout import BlockLayout
from .lists import BlockList
from .rules import NO_DOCUMENTS, moved
from .runs import ragged, rows_of

BLOCK_SIZES = (128, 64)
MAX_RESIDUES = 512
CHUNK = 1 << 21  # candidates of blocks at a time


def layout_of_branches(
    branches: Branches,
    seq_q: int,
    seq_k: int | None = None,
    *,
    num_heads: int,
    is_causal: bool = False,
    block_size: int | None = None,
    num_residues: int | None = None,
    device: torch.device | str | None = None,
    queries: range | None = None,
) -> BlockLayout:
    """The blocks of dilated attention for these lengths and query heads.

    Args:
        block_size, num_residues: chosen if they are not given; every choice is exact.
        queries: build the rows of these neighbours alone, as a layout of its own.
    """
    seq_k = seq_q if seq_k is None else seq_k
    check_int("num_heads", num_heads, least=1)
    check_sizes(seq_q, seq_k, BLOCK_SIZES[0] if block_size is None else block_size)
    if num_residues is not None:
        check_int("num_residues", num_residues, least=1)
    if block_size is None or num_residues is None:
        block_size, num_residues = cheapest_blocks(branches, max(seq_q, seq_k), block_size, num_residues)
    device = torch.device("cpu" if device is None else device)
    heads = [_clipped(branches.of_head(head, num_heads)) for head in range(num_heads)]
    heads = heads[:1] if len(set(heads)) == 1 else heads
    asked = range(seq_q) if queries is None else queries
    rows = _Side(len(asked), block_size, num_residues, seq_k - seq_q + asked.start, device)
    keys = _Side(seq_k, block_size, num_residues, 0, device)
    lists = {head: _find_blocks(head, rows, keys, is_causal) for head in dict.fromkeys(heads)}
    by_query = BlockList.concat(lists[head] for head in heads)
    interval = EVERYTHING & Interval(right=0) if is_causal else EVERYTHING
    layout = BlockLayout(
        seq_q=len(asked),
        seq_k=seq_k,
        block_q=block_size,
        block_k=block_size,
        by_query=by_query,
        num_heads=num_heads if len(heads) > 1 else None,
        rules=torch.tensor([[interval]], dtype=torch.int32, device=device),
        documents=NO_DOCUMENTS.to(device),
        kind=kind_of_branches(branches, seq_q, seq_k, is_causal) if queries is None else None,
        num_residues=num_residues,
        branches=torch.tensor([[(*b, 0, 0) for b in head] for head in heads], dtype=torch.int32, device=device),
        has_mixed_blocks=bool((by_query.rule_ids == 0).any()),
        bitmaps=NO_BITMAPS.to(device),
        checked=True,
    )
    if queries is not None:
        return _moved(layout, asked.start + len(asked) - seq_q, 0)
    layout._derived["whole"] = WholeBranches(tuple(heads), is_causal)
    return layout


def kind_of_branches(branches: Branches, seq_q: int, seq_k: int, is_causal: bool) -> str | None:
    """`BlockLayout.kind` for these lengths."""
    alone = len(branches) == 1 and branches.dilation_rates[0] == 1 and branches.segment_lengths[0] >= seq_k
    dense = alone and seq_q <= seq_k  # queries before the first key see nothing
    return ("causal" if is_causal else "full") if dense else None


def take_keys(layout: BlockLayout, keys: range) -> BlockLayout:
    """The part of a layout of branches with these keys alone: neighbours, from a multiple of
    block · num_residues on."""
    lists, old = layout.by_query, layout.num_k_blocks // layout.num_residues
    new = ceil_div(ceil_div(len(keys), layout.num_residues), layout.block_k)
    row = lists.row_of_entry()
    place = lists.indices % old - keys.start // (layout.block_k * layout.num_residues)
    taken = (place >= 0) & (place < new) & (row < lists.num_rows)
    column = lists.indices // old * new + place
    by_query = BlockList.pack(
        row[taken], column[taken], lists.is_partial(row)[taken], lists.rule_ids[taken], lists.num_rows
    )
    mixed = bool((by_query.rule_ids == 0).any())
    part = replace(layout, seq_k=len(keys), by_query=by_query, kind=None, has_mixed_blocks=mixed, checked=True)
    return _moved(part, layout.seq_k - len(keys), keys.start)


def _moved(layout: BlockLayout, query_by: int, key_by: int) -> BlockLayout:
    """With rules and branches of the whole in which the queries and keys stand so much later."""
    steps = layout.branches.new_tensor([0, 0, 0, query_by, key_by])
    by = torch.tensor([query_by, key_by], device=layout.device)
    return replace(layout, branches=layout.branches + steps, rules=moved(layout.rules, *by).int(), checked=True)


def _clipped(head: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, int, int], ...]:
    """The same branches in numbers that fit: no sequence is longer than `MAX_SEQUENCE`."""
    return tuple((min(w, MAX_SEQUENCE), min(r, MAX_SEQUENCE), offset) for w, r, offset in head)


def cheapest_blocks(
    branches: Branches, seq: int, block_size: int | None = None, num_residues: int | None = None, cut: int | None = None
) -> tuple[int, int]:
    """Block size and number of residues with the least work: blocks that are read, by the length of their segments.

    With `cut`, only those of which it is a multiple of block · num_residues.

    A branch costs w / r² pairs a token. A dilation that shares only g of its r with that number costs (r / g)² times
    that, a segment that is not whole blocks costs the blocks at its ends; small blocks cost a little more each.
    """
    candidates = {1}
    for r in branches.dilation_rates:
        candidates |= {c for c in (math.lcm(c, r) for c in candidates) if c <= MAX_RESIDUES}

    def cost(size: int, num_residues: int) -> float:
        total, block = 0.0, size * num_residues
        for w, r in zip(branches.segment_lengths, branches.dilation_rates, strict=True):
            w = min(w, seq)
            ends = 1.0 if w % block == 0 else (1.0 + block / w) ** 2
            total += w / math.gcd(r, num_residues) ** 2 * ends
        return total * (1.0 + 8.0 / size)

    sizes = BLOCK_SIZES if cut is None else (*BLOCK_SIZES, 32, 16)
    choices = [
        (cost(size, c), -size, c)
        for size in (sizes if block_size is None else (block_size,))
        for c in (candidates if num_residues is None else (num_residues,))
        if (c == 1 or c == num_residues or c * size <= seq)  # a residue class fills at least one block
        and (cut is None or cut % (c * size) == 0)
    ]
    _, size, num_residues = min(choices)
    return -size, num_residues


@dataclass(frozen=True)
class _Side:
    """The blocks of the queries or of the keys, by the positions of their tokens."""

    seq: int
    block: int
    num_residues: int
    shift: int  # from a token's number to its position
    device: torch.device

    @property
    def per_residue(self) -> int:
        return ceil_div(ceil_div(self.seq, self.num_residues), self.block)

    @property
    def num_blocks(self) -> int:
        return self.num_residues * self.per_residue

    @cached_property
    def residue(self) -> Tensor:
        """[blocks] the class that a block's tokens are in."""
        return torch.arange(self.num_blocks, device=self.device) // self.per_residue

    @cached_property
    def first(self) -> Tensor:
        """[blocks] position of the first token; of a block without tokens, beyond the last."""
        row = torch.arange(self.num_blocks, device=self.device) % self.per_residue * self.block
        return row * self.num_residues + self.residue + self.shift

    @cached_property
    def end(self) -> Tensor:
        """[blocks] position of the last token there would be, were the sequence endless."""
        return self.first + (self.block - 1) * self.num_residues

    @cached_property
    def last(self) -> Tensor:
        """[blocks] position of the last token there is."""
        last = (self.seq - 1 - self.residue) // self.num_residues * self.num_residues + self.residue + self.shift
        return torch.minimum(self.end, last)


def _find_blocks(head: tuple[tuple[int, int, int], ...], queries: _Side, keys: _Side, is_causal: bool) -> BlockList:
    """The list of one head: blocks in which some pair may count, and how often if all count alike."""
    # A block that reaches into many segments meets the same block of keys in each of them: a run of rows at a time.
    block = queries.block * queries.num_residues
    candidates = sum(
        (block // w + 2) * (w // block + 2) * queries.num_residues // math.gcd(r, queries.num_residues)
        for w, r, _ in head
    )
    rows = torch.arange(queries.num_blocks, device=queries.device).split(max(1, CHUNK // candidates))
    return BlockList.concat(_of_rows(run, head, queries, keys, is_causal) for run in rows)


def _of_rows(
    rows: Tensor, head: tuple[tuple[int, int, int], ...], queries: _Side, keys: _Side, is_causal: bool
) -> BlockList:
    """The lists of neighbouring query blocks."""
    found, uniform = [], []
    for segment, dilation, offset in head:
        query_block, key_block, alike = _of_branch(rows, segment, dilation, offset, queries, keys)
        found.append(query_block * keys.num_blocks + key_block)
        uniform.append(alike)
    none = torch.zeros(0, dtype=torch.int64, device=queries.device)
    every, inverse = torch.unique(torch.cat([none, *found]), return_inverse=True)
    alike = torch.cat([none.bool(), *uniform])
    times = torch.zeros_like(every).index_add_(0, inverse, alike.long())
    mixed = torch.zeros_like(every).index_add_(0, inverse, (~alike).long())
    times = torch.where(mixed > 0, 0, times)
    query_block, key_block = every // keys.num_blocks, every % keys.num_blocks
    partial = (times == 0) | (keys.end[key_block] >= keys.seq)
    if is_causal:
        seen = keys.first[key_block] <= queries.last[query_block]
        partial |= keys.last[key_block] > queries.first[query_block]
        query_block, key_block, partial, times = (x[seen] for x in (query_block, key_block, partial, times))
    return BlockList.pack(query_block - rows[0], key_block, partial, times, len(rows))


def _of_branch(
    rows: Tensor, segment: int, dilation: int, offset: int, queries: _Side, keys: _Side
) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of blocks that share a segment and a phase, and whether the branch keeps every token of both."""
    device, num_residues = queries.device, queries.num_residues
    shared = math.gcd(dilation, num_residues)
    # Every segment that a query block reaches into,
    first, last = queries.first[rows], queries.last[rows]
    low, high = first.clamp(min=0) // segment, last // segment
    there = (last >= 0) & (first <= last)
    count = torch.where(there, high - low + 1, 0)
    _, at = ragged(low, count, device)
    query_block = rows[rows_of(count, at)]
    phase = (at * segment + offset) % shared
    start = at * segment
    kept = ((queries.residue[query_block] + queries.shift) % shared == phase) & (start + offset < keys.seq)
    query_block, at, phase, start = (x[kept] for x in (query_block, at, phase, start))
    stop = (start + segment).clamp(max=keys.seq)
    inside = (queries.first[query_block] >= start) & (queries.last[query_block] < stop)
    # the residues that the head keeps there, and their blocks of keys.
    residue = (phase[:, None] + torch.arange(0, num_residues, shared, device=device)).flatten()
    query_block, start, stop, inside = (
        x.repeat_interleave(num_residues // shared) for x in (query_block, start, stop, inside)
    )
    row = (start - residue + num_residues - 1) // num_residues
    last_row = (stop - 1 - residue) // num_residues
    block = row // keys.block
    count = torch.where(last_row >= row, last_row // keys.block - block + 1, 0)
    _, key_row = ragged(block, count, device)
    which = rows_of(count, key_row)
    key_block = residue[which] * keys.per_residue + key_row
    alike = inside[which] & (keys.first[key_block] >= start[which]) & (keys.last[key_block] < stop[which])
    return query_block[which], key_block, alike & (dilation == shared)
