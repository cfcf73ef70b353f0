"""The key blocks of block rules, for many rows at once: `BlockPattern.key_blocks` says the same of a single row.

A new rule registers with `key_blocks_of` and `width_of`.
"""

from __future__ import annotations

from functools import singledispatch

import torch
from torch import Tensor

from ..patterns import Blocks, DilatedBlocks, GlobalBlocks, LocalBlocks, RandomBlocks
from ..patterns.blocks import MASK32, BlockPattern, ceil_div, fold32, mix32, stir32
from .lists import HOST, send
from .runs import ragged


def fine_blocks(
    rule: BlockPattern, head: Tensor, lengths: tuple[int, int], blocks: tuple[int, int], device: torch.device
) -> tuple[Tensor, Tensor | int]:
    """`key_blocks_of` in columns of the layout's own grid, for its own rows. The last may be beyond the keys."""
    seq_q, seq_k = lengths
    size, fine = rule.block_size, rule.block_size // blocks[1]
    coarse = (head + (rule.shift(seq_q, seq_k) * size - (seq_k - seq_q))) >> (size.bit_length() - 1)
    column, count = key_blocks_of(rule, coarse, ceil_div(seq_k, size), device)
    if fine > 1:
        column, count = (column[:, None] * fine + torch.arange(fine, device=device)).flatten(), count * fine
    return column, count


@singledispatch
def key_blocks_of(
    rule: BlockPattern, rows: Tensor, num_blocks: int, device: torch.device
) -> tuple[Tensor, Tensor | int]:
    """`rule.key_blocks` for many rows: on the device the key blocks, row after row, ascending; on the host, where the
    rows are, how many each has, or one number for all."""
    raise TypeError(f"no layout can be built from a block rule of type {type(rule).__name__}")


@singledispatch
def width_of(rule: BlockPattern, num_blocks: int) -> int:
    """At most how many candidates a row of the rule looks at."""
    raise TypeError(f"no layout can be built from a block rule of type {type(rule).__name__}")


@width_of.register
def _(rule: LocalBlocks, num_blocks: int) -> int:
    return min(sum(rule.reach) + 1, ceil_div(num_blocks, rule.stride))


@key_blocks_of.register
def _(rule: LocalBlocks, rows: Tensor, num_blocks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    rows, (back, forth) = rows.long(), rule.reach
    first = (-(rows // rule.stride)).clamp(min=-back)
    last = ((num_blocks - 1 - rows) // rule.stride).clamp(max=forth)
    count = (last - first + 1).clamp(min=0)
    return ragged(rows + first * rule.stride, count, device, rule.stride)[1], count


@width_of.register
def _(rule: GlobalBlocks, num_blocks: int) -> int:
    return min(num_blocks, ceil_div(rule.tokens, rule.block_size))


@key_blocks_of.register
def _(rule: GlobalBlocks, rows: Tensor, num_blocks: int, device: torch.device) -> tuple[Tensor, int]:
    width = width_of(rule, num_blocks)
    return torch.arange(width, device=device).repeat(len(rows)), width


@width_of.register
def _(rule: RandomBlocks, num_blocks: int) -> int:
    return min(rule.blocks_per_row, num_blocks)


@key_blocks_of.register
def _(rule: RandomBlocks, rows: Tensor, num_blocks: int, device: torch.device) -> tuple[Tensor, int]:
    width = width_of(rule, num_blocks)
    part = torch.arange(width + 1, device=HOST)
    edges = part * num_blocks // width
    # `fold32` is its own inverse and goes through `^`: two of them meet between the hash of a row and that of a block.
    seeds = stir32(fold32(mix32(rule.seed) ^ (rows.long() & MASK32)))
    seeds, part, start, size = send((seeds, fold32(part[:-1]), edges[:-1], edges.diff()), device)
    place = fold32(stir32(seeds[:, None] ^ part)).remainder_(size)
    column = torch.empty_like(place, dtype=torch.int32)
    return torch.add(place, start, out=column).flatten(), width


@width_of.register
def _(rule: Blocks, num_blocks: int) -> int:
    return ceil_div(len(rule.pairs), max(1, num_blocks))


@key_blocks_of.register
def _(rule: Blocks, rows: Tensor, num_blocks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    pairs = [pair for pair in rule.pairs if pair[1] < num_blocks]
    row, column = torch.tensor(pairs, dtype=torch.int64, device=HOST).reshape(-1, 2).T.contiguous()
    first, stop = (torch.searchsorted(row, rows.long(), right=right) for right in (False, True))
    count = stop - first
    _, place = ragged(first, count, rows.device)
    (column,) = send((column[place],), device)
    return column, count


@width_of.register
def _(rule: DilatedBlocks, num_blocks: int) -> int:
    return len(rule.branches) * rule.turns(num_blocks)


@key_blocks_of.register
def _(rule: DilatedBlocks, rows: Tensor, num_blocks: int, device: torch.device) -> tuple[Tensor, Tensor | int]:
    before = int(torch.searchsorted(rows, 0))  # rows before the first key see nothing
    rows, budget = rows[before:], rule.budget(num_blocks)
    turn = torch.arange(rule.turns(num_blocks), dtype=torch.int32, device=HOST)
    half = (turn + 1) >> 1
    turns = torch.stack((turn, half, half))
    turns[2, 1::2].neg_()
    # A row's place in a segment, counted from either end; and how far it may look back and forth at most.
    ahead = torch.zeros_like(rows) if rule.causal else (num_blocks - 1) - rows
    places = torch.stack((rows, ~rows, rows, ahead))
    sizes = [[min(size, num_blocks) for size in sizes] for sizes in zip(*rule.branches, strict=True)]
    branches = torch.tensor(sizes, dtype=torch.int32, device=HOST)
    # What every branch offers in every turn: [rows, turns, branches].
    places, turns, branches = send((places.view(2, 2, -1, 1, 1), turns[..., None], branches), device)
    (place, most), (turn, half, alternate), (segment, dilation) = places, turns, branches
    back, forth = torch.minimum(place % segment, most) // dilation
    # One without further candidates repeats its last one.
    turn = torch.minimum(turn, back + forth)
    onward = torch.where(back > forth, forth - turn, turn - back)
    step = torch.where(half <= torch.minimum(back, forth), alternate, onward)
    offer = torch.addcmul(place[0], step, dilation).flatten(1)
    # Drop what an earlier offer of the row named already, then keep the first `budget` of the rest.
    named, order = offer.sort(dim=1, stable=True)
    again = named[:, 1:] == named[:, :-1]
    offer.scatter_(1, order[:, 1:], named[:, 1:].masked_fill_(again, num_blocks))
    spent = (offer < num_blocks).cumsum(1, dtype=torch.int32) > budget
    column = offer.masked_fill_(spent, num_blocks).topk(min(budget, offer.shape[1]), largest=False).values
    if not before and not rule.causal and any((num_blocks % w or w) // r >= budget for w, r in rule.branches):
        # Even in the shortest segment one branch alone spends the budget.
        return column.flatten(), budget
    kept = column < num_blocks
    count = kept.sum(1).cpu()
    return column[kept], torch.cat((count.new_zeros(before), count))
