"""Which program of a persistent kernel takes which tiles, so that all of them have about as much to do.

Every head has the same number of tiles, the longest first. Whoever takes one takes the tile at the other end of the
next head with it, and all stay with two heads at a time, whose keys the cache holds. Pairs go round; what is left for
a last round that they would not fill is dealt out one by one, and so is an odd head, from the last seat on.
"""

import triton
import triton.language as tl


def num_programs(total: int, num_tiles: int, processors: int) -> int:
    """At most one for each processor, and none without a tile. `total` tiles are `num_tiles` of each head."""
    pairs = total // num_tiles // 2 * num_tiles
    if pairs >= processors or total <= processors:
        return min(total, processors)
    return max(pairs, min(total - 2 * pairs, processors))


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
def turns_of(total, num_tiles):
    """How many tiles a program takes."""
    pairs, _, _, turns = _pairs(total, num_tiles)
    return turns + (total - 2 * pairs + tl.program_id(0)) // tl.num_programs(0)


@triton.jit
def tile_dealt(turn, total, num_tiles):
    """The place of a tile among those of its head, and the number of the head. Behind the last turn some that exist."""
    programs, seat = tl.num_programs(0), tl.program_id(0)
    pairs, rounds, alone, in_pairs = _pairs(total, num_tiles)
    ends = alone & (turn >= 2 * rounds)
    pair = tl.where(ends, rounds * programs + seat // 2, turn // 2 * programs + seat)
    second = tl.where(ends, seat, turn) % 2
    place = tl.where(second == 1, num_tiles - 1 - pair % num_tiles, pair % num_tiles)
    over = 2 * pairs + (turn - in_pairs) * programs + programs - 1 - seat
    paired = turn < in_pairs
    place = tl.where(paired, place, over % num_tiles)
    which = tl.where(paired, pair // num_tiles * 2 + second, over // num_tiles)
    return place, tl.minimum(which, total // num_tiles - 1)
