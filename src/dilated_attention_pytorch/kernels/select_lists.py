"""The lists of the heaviest blocks, for `TopK` and `SharedBudget`: what `ops.select` defines, in a few launches.

    teams_kernel    `TopK`: how heavy a block must be, for each team of rows that share a budget
    digits_kernel   `SharedBudget`: the same for a whole sample, in four launches,
    counts_kernel   and how many blocks of each row are as heavy
    offsets_kernel  where the list of each row begins
    lists_kernel    the blocks that are kept
    order_kernel    the order of work

No block is sorted. A block's weight is an int32 that orders blocks as their masses do; the weight of the last one that
a budget keeps is found by counting, a bit at a time for a team and eight for a sample. Of equally heavy blocks the
first are kept, so a budget is met exactly and all sizes are known on the host. A row sees its first `ends` blocks.

Masses are float32, or weights of 16 bits already (`as_weights`): then there is half as much to count.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import BlockList
from ..layout.lists import neighbourhood
from ..patterns.blocks import ceil_div
from .launcher import Launched, launch, repeat

WEIGHTS = 2048  # blocks that a program looks at together
UNIT = 16  # weights of a row, which is whole units long
GROUP = 8  # rows that it takes together where the budget is a sample's
BINS = tl.constexpr(256)
DIGITS = tl.constexpr(4)
FORCED = tl.constexpr(0x7FFFFFFE)
HEAVIEST = tl.constexpr(0xFFFF)  # the same of 16 bits
TOP = {2: 0x10000, DIGITS.value: 0x7FFFFFFF}  # above all weights of so many digits


@triton.jit
def as_weights(masses, forced):
    """int16 that orders blocks as their masses do, to one in 2048, if read without a sign: 6 bits of the exponent and
    10 of the mantissa. Masses below 2⁻⁶³ are 0, forced blocks have the largest."""
    bits = tl.minimum(masses.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7F000000)
    weight = tl.minimum(tl.maximum(((bits + 0x1000) >> 13) - 0x10000, 0), HEAVIEST - 1)
    return tl.where(forced, HEAVIEST, weight).to(tl.int16)


@triton.jit
def weights_at(masses, forced, row, query, column, end, units, UNIT: tl.constexpr):
    """int32 that orders blocks as their masses do: forced ones before all others, −1 where the row does not see.

    `row`, `query` and `end` are columns of a tile, or numbers; `column` is its row. Rows are units · UNIT apart. Those
    of 16 bits are read in whole units, and know what is forced.
    """
    valid = column < end
    at = row.to(tl.int64) * units * UNIT + column
    if masses.dtype.element_ty == tl.int16:
        weight = tl.load(masses + at, mask=column < tl.cdiv(end, UNIT) * UNIT, other=0).to(tl.int32) & 0xFFFF
    else:
        mass = tl.load(masses + at, mask=valid, other=0.0)
        is_forced = tl.load(forced + query.to(tl.int64) * units * UNIT + column, mask=valid, other=0) != 0
        bits = tl.minimum(mass.to(tl.int32, bitcast=True) & 0x7FFFFFFF, FORCED - 1)
        weight = tl.where(is_forced, FORCED, bits)
    return tl.where(valid, weight, -1)


@triton.jit
def with_digit(counts, weights, prefix, DIGIT: tl.constexpr, OF: tl.constexpr, SIZE: tl.constexpr):
    """How often each value of a digit, OF so many, occurs among the weights whose digits before it are `prefix`."""
    SHIFT: tl.constexpr = 8 * (OF - 1 - DIGIT)
    flat = tl.reshape(weights, SIZE)
    digit = (flat >> SHIFT) & (BINS - 1)
    if DIGIT == 0:
        matches = flat >= 0
    else:
        matches = (flat >> (SHIFT + 8)) == prefix
    if DIGIT < 2:  # most tiles have some
        counts += tl.histogram(digit, BINS, mask=matches)
    else:
        if tl.max(matches.to(tl.int32), 0) > 0:
            counts += tl.histogram(digit, BINS, mask=matches)
    return counts


@triton.jit
def narrowed(counts, prefix, wanted):
    """The next digit of the weight of the `wanted`-th heaviest, and how many are wanted of those that share it."""
    digit = tl.arange(0, BINS)
    as_large = tl.cumsum(counts, 0, reverse=True)
    found = tl.maximum(tl.sum((as_large >= tl.maximum(wanted, 1)).to(tl.int32), 0) - 1, 0)
    return prefix * BINS + found, wanted - tl.sum(tl.where(digit > found, counts, 0), 0)


@triton.jit
def narrowed_by(counts, sample, batch, wanted, NUM: tl.constexpr):
    """The first `NUM` digits, from what `digits_kernel` counted."""
    prefix = wanted * 0
    for DIGIT in tl.static_range(NUM):
        of_digit = tl.load(counts + (DIGIT * batch + sample) * BINS + tl.arange(0, BINS))
        prefix, wanted = narrowed(of_digit, prefix, wanted)
    return prefix, wanted


@triton.jit(do_not_specialize=["num_rows", "num_heads", "num_q", "units"])
def teams_kernel(
    masses, forced, ends, limits, found, num_rows, num_heads, num_q, units,
    HEADS: tl.constexpr, TILE: tl.constexpr, TOP: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """The heads of a row that share a budget: the last weight it keeps, and of each row how many blocks are heavier,
    and how many that are as heavy it keeps. `found` is int32 [3, rows].

    As many as are wanted weigh `low` or more, and fewer `high` or more. What is between is halved, and each time read
    again, from where it is near: that is faster than one histogram.
    """
    pid = tl.program_id(0)
    query = num_q - 1 - pid % num_q  # the longest first
    head = tl.arange(0, HEADS)
    row = (pid // num_q * num_heads + head) * num_q + query
    end, wanted = tl.load(ends + query), tl.load(limits + query)
    ends_of = tl.where(head < num_heads, end, 0)[:, None]
    column = tl.arange(0, TILE)[None, :]
    low, high = end * 0, end * 0 + TOP
    while low + 1 < high:
        middle = low + (high - low) // 2
        counted = tl.zeros([HEADS, TILE], tl.int32)
        for start in range(0, end, TILE):
            weights = weights_at(masses, forced, row[:, None], query, start + column, ends_of, units, UNIT)
            counted += (weights >= middle).to(tl.int32)
        count = tl.sum(tl.sum(counted, 1), 0)
        low = tl.where(count >= tl.maximum(wanted, 1), middle, low)
        high = tl.where(count > wanted, high, tl.where(count == wanted, low + 1, middle))
    heavier, equal = tl.zeros([HEADS], tl.int32), tl.zeros([HEADS], tl.int32)
    for start in range(0, end, TILE):
        weights = weights_at(masses, forced, row[:, None], query, start + column, ends_of, units, UNIT)
        heavier += tl.sum((weights > low).to(tl.int32), 1)
        equal += tl.sum((weights == low).to(tl.int32), 1)
    before = tl.cumsum(equal, 0) - equal
    allowed = tl.minimum(tl.maximum(wanted - tl.sum(heavier, 0) - before, 0), equal)
    valid = head < num_heads
    tl.store(found + row, low + head * 0, mask=valid)
    tl.store(found + num_rows + row, heavier, mask=valid)
    tl.store(found + 2 * num_rows + row, allowed, mask=valid)


@triton.jit(do_not_specialize=["wanted", "rows_per_sample", "num_q", "units"])
def digits_kernel(
    masses, forced, ends, counts, wanted, rows_per_sample, num_q, units,
    DIGIT: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, OF: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """A few rows of a sample: how often each value of a digit occurs among weights that may still be the last kept."""
    sample, batch = tl.program_id(1), tl.num_programs(1)
    prefix, _ = narrowed_by(counts, sample, batch, wanted, DIGIT)
    place = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    row, query = sample * rows_per_sample + place, place % num_q
    end = tl.load(ends + query, mask=place < rows_per_sample, other=0)
    mine = tl.zeros([BINS], tl.int32)
    for start in range(0, tl.max(end, 0), TILE):
        column = start + tl.arange(0, TILE)[None, :]
        weights = weights_at(masses, forced, row[:, None], query[:, None], column, end[:, None], units, UNIT)
        mine = with_digit(mine, weights, prefix, DIGIT, OF, GROUP * TILE)
    at = counts + (DIGIT * batch + sample) * BINS + tl.arange(0, BINS)
    tl.atomic_add(at, mine, mask=mine > 0, sem="relaxed")


@triton.jit(do_not_specialize=["wanted", "num_rows", "rows_per_sample", "num_q", "units"])
def counts_kernel(
    masses, forced, ends, counts, found, wanted, num_rows, rows_per_sample, num_q, units,
    GROUP: tl.constexpr, TILE: tl.constexpr, OF: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """As the end of `teams_kernel`, but with all blocks that are as heavy: whose turn it is, the rows before decide."""
    sample, batch = tl.program_id(1), tl.num_programs(1)
    threshold, _ = narrowed_by(counts, sample, batch, wanted, OF)
    place = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    row, query = sample * rows_per_sample + place, place % num_q
    valid = place < rows_per_sample
    end = tl.load(ends + query, mask=valid, other=0)
    heavier, equal = tl.zeros([GROUP], tl.int32), tl.zeros([GROUP], tl.int32)
    for start in range(0, tl.max(end, 0), TILE):
        column = start + tl.arange(0, TILE)[None, :]
        weights = weights_at(masses, forced, row[:, None], query[:, None], column, end[:, None], units, UNIT)
        heavier += tl.sum((weights > threshold).to(tl.int32), 1)
        equal += tl.sum((weights == threshold).to(tl.int32), 1)
    tl.store(found + row, threshold + place * 0, mask=valid)
    tl.store(found + num_rows + row, heavier, mask=valid)
    tl.store(found + 2 * num_rows + row, equal, mask=valid)


@triton.jit(do_not_specialize=["wanted", "num_rows", "rows_per_sample", "batch"])
def offsets_kernel(
    found, counts, offsets, wanted, num_rows, rows_per_sample, batch,
    SHARED: tl.constexpr, TILE: tl.constexpr, OF: tl.constexpr,
):  # fmt: skip
    """One program: the rows one after another, and with a SHARED budget what each keeps of the equally heavy blocks."""
    done = batch * 0
    tl.store(offsets, done)
    for sample in range(batch):
        left = wanted
        if SHARED:
            _, left = narrowed_by(counts, sample, batch, wanted, OF)
        for start in range(0, rows_per_sample, TILE):
            place = start + tl.arange(0, TILE)
            row, valid = sample * rows_per_sample + place, place < rows_per_sample
            kept = tl.load(found + num_rows + row, mask=valid, other=0)
            equal = tl.load(found + 2 * num_rows + row, mask=valid, other=0)
            if SHARED:
                allowed = tl.minimum(tl.maximum(left - (tl.cumsum(equal, 0) - equal), 0), equal)
                tl.store(found + 2 * num_rows + row, allowed, mask=valid)
                left -= tl.sum(equal, 0)
                equal = allowed
            kept += equal
            tl.store(offsets + 1 + row, done + tl.cumsum(kept, 0), mask=valid)
            done += tl.sum(kept, 0)


@triton.jit
def lengths_near(offsets, start, num_q, NEAR: tl.constexpr):
    """How many blocks the rows of a neighbourhood have, −1 where there is no row, and whether there is one."""
    row = start + tl.arange(0, NEAR)
    valid = row < num_q
    stop = tl.load(offsets + row + 1, mask=valid, other=-1)
    return stop - tl.load(offsets + row, mask=valid, other=0), valid


@triton.jit(do_not_specialize=["num_rows", "num_q", "units"])
def lists_kernel(
    masses, forced, ends, last_full, found, offsets, splits, indices, num_rows, num_q, units,
    TILE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """The list of one row."""
    row = tl.program_id(0)
    query = row % num_q
    threshold, allowed = tl.load(found + row), tl.load(found + 2 * num_rows + row)
    place = tl.load(offsets + row)
    end, full_up_to = tl.load(ends + query), tl.load(last_full + query)
    split, lane = place, tl.arange(0, TILE)
    for start in range(0, end, TILE):
        column = start + lane
        weights = weights_at(masses, forced, row, query, column, end, units, UNIT)
        equal = (weights == threshold).to(tl.int32)
        kept = ((weights > threshold) | ((equal > 0) & (tl.cumsum(equal, 0) <= allowed))).to(tl.int32)
        tl.store(indices + place + tl.cumsum(kept, 0) - 1, column, mask=kept > 0)
        allowed -= tl.sum(equal, 0)
        place += tl.sum(kept, 0)
        split += tl.sum(tl.where(column <= full_up_to, kept, 0), 0)
    tl.store(splits + row, split)


@triton.jit(do_not_specialize=["num_q"])
def order_kernel(offsets, splits, work, num_q, NEAR: tl.constexpr, SOME: tl.constexpr):
    """The places of a neighbourhood of rows, a power of two, in the order of work of their list: `BlockList.work`."""
    near, first_row = tl.program_id(0) * NEAR, tl.program_id(1) * num_q
    lengths, valid = lengths_near(offsets + first_row, near, num_q, NEAR)
    longest, before = tl.max(lengths, 0), near * 0
    for start in range(0, num_q, NEAR):
        others, _ = lengths_near(offsets + first_row, start, num_q, NEAR)
        its_longest = tl.max(others, 0)
        if (its_longest > longest) | ((its_longest == longest) & (start < near)):
            before += tl.minimum(num_q - start, NEAR)
    lane, place = tl.arange(0, NEAR), before + tl.zeros([NEAR], tl.int32)
    for start in range(0, NEAR, SOME):
        other, _ = lengths_near(offsets + first_row, near + start, num_q, SOME)
        equal = (other[None, :] == lengths[:, None]) & (start + tl.arange(0, SOME)[None, :] < lane[:, None])
        place += tl.sum(((other[None, :] > lengths[:, None]) | equal).to(tl.int32), 1)
    row = first_row + near + lane
    at = work + (first_row + place).to(tl.int64) * 4
    tl.store(at, near + lane, mask=valid)
    tl.store(at + 1, tl.load(offsets + row, mask=valid), mask=valid)
    tl.store(at + 2, tl.load(splits + row, mask=valid), mask=valid)
    tl.store(at + 3, tl.load(offsets + row + 1, mask=valid), mask=valid)


def heaviest_blocks(
    masses: Tensor,
    forced: Tensor,
    ends: Tensor,
    last_full: Tensor,
    team: str,
    limits: Tensor | None,
    places: int,
    notes: dict[Any, Any],
) -> tuple[BlockList, Tensor]:
    """The heaviest blocks of each team as lists, and `BlockList.work` of them.

    Args:
        masses: float32 [batch, lists, query blocks, key blocks]; or weights, int16, forced blocks among them, in rows
            that are whole units apart.
        forced: uint8 [query blocks, key blocks], 1 for a block that is kept before all others.
        ends, last_full: [query blocks]: how many blocks a row sees, and the last of them that is full.
        team: "row", "heads" for the heads of a row together, or "sample" for all heads and rows.
        limits: int32 [query blocks], how many a team keeps; None for "sample".
        places: how many all teams of a sample keep.
        notes: what is remembered of calls that differ in the masses alone.
    """
    batch, num_heads, num_q, num_k = masses.shape
    num_rows = batch * num_heads * num_q
    shared, weights = team == "sample", masses.dtype == torch.int16
    masses = masses if weights else masses.contiguous()
    unit = UNIT if weights else 1
    units = masses.stride(2) // unit
    rows_per_sample, of = num_heads * num_q, 2 if weights else DIGITS.value

    def ints(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.int32, device=masses.device)

    found, offsets, splits, indices = ints(3, num_rows), ints(num_rows + 1), ints(num_rows), ints(batch * places)
    work, counts = ints(num_rows, 4), offsets
    tensors = [masses, found, offsets, splits, indices, work]
    if shared:
        counts = torch.zeros(DIGITS.value, batch, BINS.value, dtype=torch.int32, device=masses.device)
        tensors.append(counts)

    def of_samples() -> list[Launched | None]:
        data, grid = (masses, forced, ends, counts), (ceil_div(rows_per_sample, GROUP), batch)
        sizes: dict[str, Any] = {"GROUP": GROUP, "TILE": WEIGHTS // GROUP, "OF": of, "UNIT": unit, "num_warps": 4}
        numbers = rows_per_sample, num_q, units
        digits = range(of)
        counted = [launch(digits_kernel, grid, data, (places, *numbers), DIGIT=digit, **sizes) for digit in digits]
        return [*counted, launch(counts_kernel, grid, (*data, found), (places, num_rows, *numbers), **sizes)]

    def of_rows() -> list[Launched | None]:
        together = num_heads if team == "heads" else 1
        of_team = triton.next_power_of_2(together)
        tile = max(32, min(2048, 8 * WEIGHTS // of_team))
        warps = min(max(of_team * tile // 512, 4), 16)
        sizes = {"HEADS": of_team, "TILE": tile, "TOP": TOP[of], "UNIT": unit, "num_warps": warps}
        data, numbers = (masses, forced, ends, limits, found), (num_rows, together, num_q, units)
        return [launch(teams_kernel, (num_rows // together,), data, numbers, **sizes)]

    def do() -> list[Launched | None]:
        chosen = of_samples() if shared else of_rows()
        placed = launch(
            offsets_kernel, (1,), (found, counts, offsets),
            (places, num_rows, rows_per_sample if shared else num_rows, batch if shared else 1),
            SHARED=shared, TILE=4096, OF=of, num_warps=16,
        )  # fmt: skip
        listed = launch(
            lists_kernel, (num_rows,),
            (masses, forced, ends, last_full, found, offsets, splits, indices), (num_rows, num_q, units),
            TILE=512, UNIT=unit, num_warps=2,
        )  # fmt: skip
        near = neighbourhood(1)
        grid = ceil_div(num_q, near), batch * num_heads
        data = offsets, splits, work
        ordered = launch(order_kernel, grid, data, (num_q,), NEAR=near, SOME=min(near, 32), num_warps=8)
        return [*chosen, placed, listed, ordered]

    kept = [forced, ends, last_full, *([] if limits is None else [limits])]
    repeat(notes, (masses.shape, masses.dtype, masses.data_ptr() % 16 == 0), tensors, kept, do)
    return BlockList(offsets, splits, indices, offsets.new_empty(0)), work
