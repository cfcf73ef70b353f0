"""Which program of a persistent kernel takes which tiles, so that all of them have about as much to do.

Every head has the same number of tiles, the longest first. They are dealt out one by one, head by head. Where heads
have about as many tiles as there are programs, some would always get the longest: there whoever takes a tile takes the
one at the other end of the next head with it. Pairs go round; what is left for a last round that they would not fill is
dealt out one by one, and so is an odd head, from the last seat on. (Pairs where rows are all alike cost some 4 %: a
program goes back and forth between two heads.)
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl


@lru_cache(maxsize=1024)
def seats(total: int, num_tiles: int, processors: int) -> tuple[int, bool]:
    """Programs, at most one for each processor and none without a tile, and whether they take tiles in pairs.

    `total` tiles are `num_tiles` of each head.
    """
    pairs = total // num_tiles // 2 * num_tiles
    if not _in_pairs(total, num_tiles, processors):
        return min(total, processors), False
    if pairs >= processors or total <= processors:
        return min(total, processors), True
    return max(pairs, min(total - 2 * pairs, processors)), True


def _in_pairs(total: int, num_tiles: int, processors: int) -> bool:
    """Whether rows that grow from tile to tile, as causal ones do, would be shared out badly one by one."""
    if num_tiles >= 4 * processors or total <= processors:
        return False
    tile = torch.arange(total)
    busy = torch.zeros(processors, dtype=torch.int64).index_add_(0, tile % processors, num_tiles - tile % num_tiles)
    return float(busy.max()) > 1.1 * float(busy.sum()) / processors


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
def turns_of(total, num_tiles, paired):
    """How many tiles a program takes."""
    programs, seat = tl.num_programs(0), tl.program_id(0)
    pairs, _, _, turns = _pairs(total, num_tiles)
    return tl.where(paired != 0, turns + (total - 2 * pairs + seat) // programs, (total - 1 - seat) // programs + 1)


@triton.jit
def tile_dealt(turn, total, num_tiles, paired):
    """The place of a tile among those of its head, and the number of the head. Behind the last turn some that exist."""
    programs, seat = tl.num_programs(0), tl.program_id(0)
    number = turn * programs + seat
    if paired != 0:
        pairs, rounds, alone, in_pairs = _pairs(total, num_tiles)
        ends = alone & (turn >= 2 * rounds)
        pair = tl.where(ends, rounds * programs + seat // 2, turn // 2 * programs + seat)
        second = tl.where(ends, seat, turn) % 2
        place = tl.where(second == 1, num_tiles - 1 - pair % num_tiles, pair % num_tiles)
        over = 2 * pairs + (turn - in_pairs) * programs + programs - 1 - seat
        number = tl.where(turn < in_pairs, (pair // num_tiles * 2 + second) * num_tiles + place, over)
    number = tl.minimum(number, total - 1)
    return number % num_tiles, number // num_tiles
