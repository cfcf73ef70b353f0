"""Which program of a persistent kernel takes which tiles, so that all programs have about the same amount of work.

Every head has the same number of tiles, the longest first. There are three orders:

    SNAKE         head by head, forwards in even rounds and backwards in odd ones: the program that got the longest tile
                  of one round gets the shortest of the next. Quickest, by some 4 %, where all tiles are equally long
    ROUND_ROBIN   head by head, always forwards, for the cases where the number of programs and the tiles of a head come
                  in step and a snake would hand the longest tiles to the same programs every time
    PAIRED        if that is no better: a program that takes a tile also takes the one at the opposite end of the next
                  head. Pairs go round robin; a last round that pairs would not fill, and the tiles of an odd head,
                  are handed out singly, from the last program on. Slowest, by some 4 %, where tiles are equally long

Persistent programs are not synchronised, and over thousands of turns they drift apart, until a key block has left the
L2 cache before the neighbours of its first reader ask for it: 32M tokens took 13 % longer per token than 64K. A long
call is therefore split into several launches, each of which covers some neighbourhoods of rows (`BlockList.work`) of
every head.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..caches import cached
from ..layout.lists import HOST

ROUND_ROBIN, SNAKE, PAIRED = 0, 1, 2

MIN_TURNS = 24  # of each launch of a split call: the end of a launch, where some programs idle, must not weigh much


class TileSchedule(NamedTuple):
    """The tiles of one launch, and the order in which its programs take them."""

    total_tiles: int  # of all heads together
    tiles_per_head: int
    first_tile: int  # of each head
    order: int


@cached(1024, "launches of persistent kernels, by numbers of tiles")
def tile_schedules(
    tiles_per_head: int, neighbourhood: int, heads: int, processors: int
) -> tuple[tuple[int, TileSchedule], ...]:
    """The launches of a call: number of programs and schedule of each.

    Args:
        neighbourhood: tiles in a neighbourhood.
        heads: those of all samples.
    """
    per_launch = -(-MIN_TURNS * processors // (heads * neighbourhood)) * neighbourhood
    firsts = range(0, max(1, tiles_per_head // per_launch) * per_launch, per_launch)
    stops = (*firsts[1:], tiles_per_head)
    return tuple(_schedule(heads, stop - first, first, processors) for first, stop in zip(firsts, stops, strict=True))


def _schedule(heads: int, tiles_per_head: int, first_tile: int, processors: int) -> tuple[int, TileSchedule]:
    """At most one program for each processor, and none without a tile."""
    total_tiles = heads * tiles_per_head
    order = _order(total_tiles, tiles_per_head, processors)
    programs = min(total_tiles, processors)
    pairs = heads // 2 * tiles_per_head
    if order == PAIRED and pairs < processors:
        programs = max(pairs, min(total_tiles - 2 * pairs, processors))
    return programs, TileSchedule(total_tiles, tiles_per_head, first_tile, order)


def _order(total_tiles: int, tiles_per_head: int, processors: int) -> int:
    """The first order that balances tiles whose length grows from one to the next, as in causal attention."""
    if total_tiles <= processors:
        return ROUND_ROBIN
    if tiles_per_head >= 16 * processors:
        return SNAKE
    looked_at = min(total_tiles, 1 << 16)  # more would not change the answer
    tile = torch.arange(-(-looked_at // processors) * processors, dtype=torch.int32, device=HOST)
    length = (tiles_per_head - tile % tiles_per_head).view(-1, processors)  # of the tiles of each turn
    length.view(-1)[looked_at:] = 0
    forwards, backwards = length[::2].sum(0), length[1::2].sum(0)
    for order, busy in ((SNAKE, forwards + backwards.flip(0)), (ROUND_ROBIN, forwards + backwards)):
        if int(busy.max()) <= 1.1 * int(busy.sum()) / processors:
            return order
    return PAIRED


@triton.jit
def _pairs(total_tiles, tiles_per_head):
    """PAIRED: pairs, whole rounds of them, whether the last round goes singly, and how many tiles of pairs a program
    takes."""
    programs, program = tl.num_programs(0), tl.program_id(0)
    pairs = total_tiles // tiles_per_head // 2 * tiles_per_head
    rounds, left = pairs // programs, pairs % programs
    singly = 2 * left <= programs
    last = tl.where(singly, (program < 2 * left).to(tl.int32), 2 * (program < left).to(tl.int32))
    return pairs, rounds, singly, 2 * rounds + last


@triton.jit
def num_turns(schedule):
    """How many tiles this program takes."""
    total_tiles, tiles_per_head, _, order = schedule
    programs, program = tl.num_programs(0), tl.program_id(0)
    turns = total_tiles // programs
    turns += (_unpaired_tile(turns, programs, program, order) < total_tiles).to(tl.int32)
    pairs, _, _, turns_of_pairs = _pairs(total_tiles, tiles_per_head)
    return tl.where(order == 2, turns_of_pairs + (total_tiles - 2 * pairs + program) // programs, turns)


@triton.jit
def _unpaired_tile(turn, programs, program, order):
    """The number of a turn's tile among those of all heads: ROUND_ROBIN or SNAKE."""
    return turn * programs + tl.where((order == 1) & (turn % 2 == 1), programs - 1 - program, program)


@triton.jit
def scheduled_tile(turn, schedule):
    """The tile of a turn: its place among those of its head, and the number of the head among those of all samples.

    For turns past the last it is some tile that exists, so that the next tile can be looked up unconditionally.
    """
    total_tiles, tiles_per_head, first_tile, order = schedule
    programs, program = tl.num_programs(0), tl.program_id(0)
    tile = _unpaired_tile(turn, programs, program, order)
    if order == 2:
        pairs, rounds, singly, turns_of_pairs = _pairs(total_tiles, tiles_per_head)
        in_last_round = singly & (turn >= 2 * rounds)
        pair = tl.where(in_last_round, rounds * programs + program // 2, turn // 2 * programs + program)
        second = tl.where(in_last_round, program, turn) % 2
        place = tl.where(second == 1, tiles_per_head - 1 - pair % tiles_per_head, pair % tiles_per_head)
        unpaired = 2 * pairs + (turn - turns_of_pairs) * programs + programs - 1 - program
        tile = tl.where(turn < turns_of_pairs, (pair // tiles_per_head * 2 + second) * tiles_per_head + place, unpaired)
    tile = tl.minimum(tile, total_tiles - 1)
    return first_tile + tile % tiles_per_head, tile // tiles_per_head
