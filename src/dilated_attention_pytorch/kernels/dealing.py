"""Which program of a persistent kernel takes which tiles, so that all of them have about as much to do.

Every head has the same number of tiles, the longest first. They are dealt out head by head, there and back again: who
got the longest of one round gets the shortest of the next. Where rounds and heads come in step, some would always get
the longest; there they are dealt out in one direction, or, if that is no better, in pairs: whoever takes a tile takes
the one at the other end of the next head with it. Pairs go round; what is left for a last round that they would not
fill is dealt out one by one, and so is an odd head, from the last seat on.

(Where rows are all alike there and back is quickest, by some 4 %, and pairs are slowest, by as much.)

Nobody waits for anybody, and in thousands of turns programs drift apart, until what one reads has left the L2 cache
before its neighbours come: 32M tokens took 13 % longer by the token than 64K. So long calls are several launches, each
of some neighbourhoods of rows (`BlockList.work`) of every head.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..layout.lists import HOST

ONE_WAY, THERE_AND_BACK, IN_PAIRS = 0, 1, 2

LEAST_TURNS = 24  # of a launch, where a call is several: its end, when not all are busy, should weigh little


class Deal(NamedTuple):
    """What a launch deals out."""

    total: int  # tiles of all heads together
    num_tiles: int  # of one head,
    first: int  # from this one on
    order: int


@lru_cache(maxsize=1024)
def deals(num_tiles: int, near: int, heads: int, processors: int) -> tuple[tuple[int, Deal], ...]:
    """The launches of a call of so many tiles a head: how many programs each has, and what they take.

    Args:
        near: tiles of a neighbourhood.
        heads: those of all samples.
    """
    at_once = -(-LEAST_TURNS * processors // (heads * near)) * near
    firsts = range(0, max(1, num_tiles // at_once) * at_once, at_once)
    stops = (*firsts[1:], num_tiles)
    return tuple(_seated(heads, stop - first, first, processors) for first, stop in zip(firsts, stops, strict=True))


def _seated(heads: int, num_tiles: int, first: int, processors: int) -> tuple[int, Deal]:
    """At most one program for each processor, and none without a tile."""
    total = heads * num_tiles
    order = _order(total, num_tiles, processors)
    programs = min(total, processors)
    pairs = heads // 2 * num_tiles
    if order == IN_PAIRS and pairs < processors:
        programs = max(pairs, min(total - 2 * pairs, processors))
    return programs, Deal(total, num_tiles, first, order)


def _order(total: int, num_tiles: int, processors: int) -> int:
    """The first that shares out well what grows from tile to tile, as causal rows do."""
    if total <= processors:
        return ONE_WAY
    if num_tiles >= 16 * processors:
        return THERE_AND_BACK
    tile = torch.arange(min(total, 1 << 16), device=HOST)  # more would tell the same
    turn, seat, length = tile // processors, tile % processors, num_tiles - tile % num_tiles
    back = torch.where(turn % 2 == 1, processors - 1 - seat, seat)
    for order, who in ((THERE_AND_BACK, back), (ONE_WAY, seat)):
        busy = torch.zeros(processors, dtype=torch.int64, device=HOST).index_add_(0, who, length)
        if float(busy.max()) <= 1.1 * float(busy.sum()) / processors:
            return order
    return IN_PAIRS


@triton.jit
def _pairs(total, num_tiles):
    """Pairs, whole rounds of them, whether the last is dealt out one by one, and how many tiles of pairs one takes."""
    programs, seat = tl.num_programs(0), tl.program_id(0)
    pairs = total // num_tiles // 2 * num_tiles
    rounds, left = pairs // programs, pairs % programs
    alone = 2 * left <= programs
    last = tl.where(alone, (seat < 2 * left).to(tl.int32), 2 * (seat < left).to(tl.int32))
    return pairs, rounds, alone, 2 * rounds + last


@triton.jit
def turns_of(deal):
    """How many tiles a program takes."""
    total, num_tiles, _, order = deal
    programs, seat = tl.num_programs(0), tl.program_id(0)
    turns = total // programs
    turns += (_number(turns, programs, seat, order) < total).to(tl.int32)
    pairs, _, _, in_pairs = _pairs(total, num_tiles)
    return tl.where(order == 2, in_pairs + (total - 2 * pairs + seat) // programs, turns)


@triton.jit
def _number(turn, programs, seat, order):
    """The tile of a turn, one way, or there and back."""
    return turn * programs + tl.where((order == 1) & (turn % 2 == 1), programs - 1 - seat, seat)


@triton.jit
def tile_dealt(turn, deal):
    """The place of a tile among those of its head, and the number of the head. Behind the last turn some that exist."""
    total, num_tiles, first, order = deal
    programs, seat = tl.num_programs(0), tl.program_id(0)
    number = _number(turn, programs, seat, order)
    if order == 2:
        pairs, rounds, alone, in_pairs = _pairs(total, num_tiles)
        ends = alone & (turn >= 2 * rounds)
        pair = tl.where(ends, rounds * programs + seat // 2, turn // 2 * programs + seat)
        second = tl.where(ends, seat, turn) % 2
        place = tl.where(second == 1, num_tiles - 1 - pair % num_tiles, pair % num_tiles)
        over = 2 * pairs + (turn - in_pairs) * programs + programs - 1 - seat
        number = tl.where(turn < in_pairs, (pair // num_tiles * 2 + second) * num_tiles + place, over)
    number = tl.minimum(number, total - 1)
    return first + number % num_tiles, number // num_tiles
