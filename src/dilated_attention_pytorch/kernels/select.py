"""Choosing blocks in a few launches: what `ops.scores` and `ops.select` define, for mean-pooled scores and budgets.

    masses   pool_kernel     every token is read once: mean queries and mean keys of patches
             masses_kernel   their products, a softmax along each row, summed by block
    lists    teams_kernel    `TopK`: how heavy a block must be, for each team of rows that share a budget
             digits_kernel   `SharedBudget`: the same for a whole sample, in four launches,
             counts_kernel   and how many blocks of each row are as heavy
             offsets_kernel  where the list of each row begins
             lists_kernel    the blocks that are kept, and the order of work

No block is sorted. A block's weight is an int32 that orders blocks as their masses do; the weight of the last one that
a budget keeps is found eight bits at a time, by counting. Of equally heavy blocks the first are kept, so a budget is
met exactly and all sizes are known on the host. A row sees its first `ends` blocks.
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
from .common import LOG2E, load_rows
from .configs import padded_dim
from .launch import contiguous_rows, num_processors, precision_of
from .launcher import Launched, launch, like, repeat

# Rows or columns of a block that a tile must hold.
MAX_PARTS = 64
TILE_COLUMNS = tl.constexpr(64)
ROW_BYTES = 512  # of a row or column; with the tiles they must fit the shared memory of any GPU
POOLED_AT_ONCE = tl.constexpr(32)  # tokens
WAVES = 2  # programs of `masses_kernel` for each processor,
SCRATCH = 1 << 27  # and numbers that all of them may store
WEIGHTS = 2048  # blocks that a program of the selection looks at together
GROUP = 8  # rows that it takes together where the budget is a sample's
BINS = tl.constexpr(256)
DIGITS = tl.constexpr(4)
FORCED = tl.constexpr(0x7FFFFFFF)
_noted: dict[Any, Any] = {}  # calls of `masses`


@triton.jit
def pool(
    x, out, unit, x_b, x_s, x_h, heads, seq, num_patches, scale,
    D: tl.constexpr, PADDED_D: tl.constexpr, PATCH: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """Means of a few patches of one head, times `scale`. `SPREAD` lanes share a patch."""
    PATCHES: tl.constexpr = POOLED_AT_ONCE // SPREAD
    units = tl.cdiv(num_patches, PATCHES)
    head, place = unit % heads, unit // heads
    sample, first = (place // units).to(tl.int64), place % units * PATCHES
    lane = tl.arange(0, PATCHES * SPREAD)
    begin = (first + lane // SPREAD) * PATCH + lane % SPREAD
    acc = tl.zeros([PATCHES * SPREAD, PADDED_D], tl.float32)
    for i in tl.static_range(0, PATCH, SPREAD):
        acc += load_rows(x + sample * x_b + head.to(tl.int64) * x_h, begin + i, x_s, begin + i < seq, D, PADDED_D)
    if SPREAD > 1:
        acc = tl.sum(tl.reshape(acc, PATCHES, SPREAD, PADDED_D), 1)
    patch = first + tl.arange(0, PATCHES)
    num_valid = tl.maximum(tl.minimum(seq - patch * PATCH, PATCH), 1)
    mean = acc / num_valid.to(tl.float32)[:, None] * scale
    at = ((sample * heads + head) * num_patches + patch)[:, None] * PADDED_D + tl.arange(0, PADDED_D)
    tl.store(out + at, mean.to(out.dtype.element_ty), mask=(patch < num_patches)[:, None])


@triton.jit(do_not_specialize=["heads", "heads_kv", "seq_q", "seq_k", "num_rows", "num_columns", "units_q"])
def pool_kernel(
    q, k, rows, columns, q_b, q_s, q_h, k_b, k_s, k_h,
    heads, heads_kv, seq_q, seq_k, num_rows, num_columns, units_q, scale,
    D: tl.constexpr, PADDED_D: tl.constexpr, PATCH_Q: tl.constexpr, PATCH_K: tl.constexpr,
    SPREAD_Q: tl.constexpr, SPREAD_K: tl.constexpr,
):  # fmt: skip
    """Mean queries, times the scale, as rows, and mean keys as columns: [batch · heads, patches, PADDED_D]."""
    unit = tl.program_id(0)
    if unit < units_q:
        pool(q, rows, unit, q_b, q_s, q_h, heads, seq_q, num_rows, scale, D, PADDED_D, PATCH_Q, SPREAD_Q)
    else:
        pool(
            k, columns, unit - units_q, k_b, k_s, k_h, heads_kv, seq_k, num_columns, 1.0,
            D, PADDED_D, PATCH_K, SPREAD_K,
        )  # fmt: skip


@triton.jit
def sum_at(masses, scratch, row, lane, block, num_k, TILE_ROWS: tl.constexpr, ROWS: tl.constexpr):
    """Where `masses_kernel` keeps the sum of a (row, key block)."""
    if ROWS == 1:
        at = masses + row * num_k + block
    else:
        at = scratch + block.to(tl.int64) * TILE_ROWS + lane
    return at


@triton.jit(do_not_specialize=["heads", "group", "seq_q", "seq_k", "num_q", "num_k", "num_columns", "tiles"])
def masses_kernel(
    rows, columns, masses, scratch, heads, group, seq_q, seq_k, num_q, num_k, tiles,
    PADDED_D: tl.constexpr, PATCH_Q: tl.constexpr, PATCH_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_BLOCKS: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of rows, `ROWS` for each query block, walks the columns that it sees, `COLUMNS` for each key block.
    `heads` are those of all samples.

    The walk leaves log2 Σ 2^score for every (row, key block): in the place of the masses where a query block has one
    row, else in the program's own part of `scratch`. A second walk, along these, divides by the sums of the rows.
    """
    BLOCKS: tl.constexpr = TILE_COLUMNS // COLUMNS
    lane, dim = tl.arange(0, TILE_ROWS), tl.arange(0, PADDED_D)
    within = tl.arange(0, TILE_COLUMNS)[None, :] * PADDED_D + dim[:, None]
    a_tile = tl.full([], TILE_COLUMNS * PADDED_D, tl.int64)
    scratch += tl.program_id(0).to(tl.int64) * num_k * TILE_ROWS
    programs, total_tiles = tl.num_programs(0), heads * tiles
    for place in range(tl.program_id(0), total_tiles, programs):
        # The longest tiles first, forwards and backwards in turn: all programs get about as much.
        turn = place // programs
        back = (turn % 2 == 1) & ((turn + 1) * programs <= total_tiles)
        unit = tl.where(back, (2 * turn + 1) * programs - 1 - place, place)
        head, tile = unit % heads, tiles - 1 - unit // heads
        num_rows = (num_q * ROWS).to(tl.int64)
        row = tile * TILE_ROWS + lane
        row_at = head * num_rows + tl.minimum(row, num_rows - 1)
        queries = tl.load(rows + row_at[:, None] * PADDED_D + dim)
        in_row = tl.maximum(tl.minimum(seq_q - row * PATCH_Q, PATCH_Q), 0)
        sees = tl.zeros([TILE_ROWS], tl.int32) + seq_k  # so many keys
        if CAUSAL:
            sees = tl.minimum(row * PATCH_Q + in_row, seq_q) + (seq_k - seq_q)
        fewest, most = tl.maximum(tl.min(sees, 0), 0), tl.maximum(tl.max(sees, 0), 0)
        num_clear = tl.minimum(fewest, seq_k) // (TILE_COLUMNS * PATCH_K)
        num_tiles = tl.cdiv(most, TILE_COLUMNS * PATCH_K)

        row_max = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        row_sum = tl.zeros([TILE_ROWS], tl.float32)
        keys_at = columns + (head // group) * (num_k * COLUMNS).to(tl.int64) * PADDED_D
        for MASKED in tl.static_range(2):
            for i in range(num_clear if MASKED else 0, num_tiles if MASKED else num_clear):
                column = tl.arange(0, TILE_COLUMNS) + i * TILE_COLUMNS
                keys = tl.load(keys_at + i * a_tile + within)
                scores = tl.dot(queries, keys, input_precision=PRECISION) * LOG2E
                if MASKED:  # a column counts as often as it has keys that the row sees
                    begin = column * PATCH_K
                    in_column = tl.minimum(seq_k - begin, PATCH_K)
                    count = tl.maximum(tl.minimum(sees[:, None] - begin[None, :], in_column[None, :]), 0)
                    visible_share = count.to(tl.float32) / PATCH_K
                    scores = tl.where(count > 0, scores, float("-inf"))
                if COLUMNS > 1:
                    parts = tl.reshape(scores, TILE_ROWS, BLOCKS, COLUMNS)
                    high = tl.max(parts, 2)
                    if MASKED:
                        high = tl.where(high == float("-inf"), 0.0, high)
                    terms = tl.exp2(parts - high[:, :, None])
                    if MASKED:
                        terms *= tl.reshape(visible_share, TILE_ROWS, BLOCKS, COLUMNS)
                    block_lse = high + tl.log2(tl.sum(terms, 2))
                elif MASKED:
                    block_lse = scores + tl.log2(visible_share)
                else:
                    block_lse = scores
                new_max = tl.maximum(row_max, tl.max(block_lse, 1))
                base = tl.where(new_max == float("-inf"), 0.0, new_max)
                row_sum = row_sum * tl.exp2(row_max - base) + tl.sum(tl.exp2(block_lse - base[:, None]), 1)
                row_max = new_max
                block = (tl.arange(0, BLOCKS) + i * BLOCKS)[None, :]
                sums = sum_at(masses, scratch, row_at[:, None], lane[:, None], block, num_k, TILE_ROWS, ROWS)
                tl.store(sums, block_lse, mask=(row < num_rows)[:, None] & (block < num_k))

        tl.debug_barrier()
        row_lse = tl.where(row_sum == 0.0, 0.0, row_max + tl.log2(row_sum))
        in_block = tl.minimum(seq_q - row // ROWS * (ROWS * PATCH_Q), ROWS * PATCH_Q)
        share = in_row.to(tl.float32) / tl.maximum(in_block, 1).to(tl.float32)
        query_block = tile * (TILE_ROWS // ROWS) + tl.arange(0, TILE_ROWS // ROWS)
        num_seen = tl.minimum(num_tiles * BLOCKS, num_k)
        for start in range(0, num_k, TILE_BLOCKS):
            own = (start + tl.arange(0, TILE_BLOCKS))[:, None]
            sums = sum_at(masses, scratch, row_at[None, :], lane[None, :], own, num_k, TILE_ROWS, ROWS)
            valid = (own < num_seen) & (row < num_rows)[None, :]
            weights = tl.exp2(tl.load(sums, mask=valid, other=float("-inf")) - row_lse[None, :]) * share[None, :]
            if ROWS > 1:
                weights = tl.sum(tl.reshape(weights, TILE_BLOCKS, TILE_ROWS // ROWS, ROWS), 2)
            at = (head * num_rows // ROWS + query_block)[None, :] * num_k + own
            tl.store(masses + at, weights, mask=(own < num_k) & (query_block < num_q)[None, :])
        tl.debug_barrier()  # before the next tile writes over the scratch


@triton.jit
def weights_at(masses, forced, row, query, column, end, num_k):
    """int32 that orders blocks as their masses do: forced ones before all others, −1 where the row does not see.

    `row`, `query` and `end` are columns of a tile, or numbers; `column` is its row.
    """
    valid = column < end
    mass = tl.load(masses + row.to(tl.int64) * num_k + column, mask=valid, other=0.0)
    is_forced = tl.load(forced + query.to(tl.int64) * num_k + column, mask=valid, other=0) != 0
    bits = tl.minimum(mass.to(tl.int32, bitcast=True) & 0x7FFFFFFF, FORCED - 1)
    return tl.where(valid, tl.where(is_forced, FORCED, bits), -1)


@triton.jit
def with_digit(counts, weights, prefix, DIGIT: tl.constexpr, SIZE: tl.constexpr):
    """How often each value of a digit occurs among the weights whose digits before it are `prefix`."""
    SHIFT: tl.constexpr = 24 - 8 * DIGIT
    flat = tl.reshape(weights, SIZE)
    digit = (flat >> SHIFT) & (BINS - 1)
    if DIGIT == 0:
        matches = flat >= 0
    else:
        matches = (flat >> (SHIFT + 8)) == prefix
    if DIGIT < 2:
        counts += tl.histogram(digit, BINS, mask=matches)
    else:  # few are left: most tiles have none of them
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


@triton.jit(do_not_specialize=["num_rows", "num_heads", "num_q", "num_k"])
def teams_kernel(
    masses, forced, ends, limits, found, num_rows, num_heads, num_q, num_k, HEADS: tl.constexpr, TILE: tl.constexpr
):
    """The heads of a row that share a budget: the last weight it keeps, and of each row how many blocks are heavier,
    and how many that are as heavy it keeps. `found` is int32 [3, rows]."""
    pid = tl.program_id(0)
    query = num_q - 1 - pid % num_q  # the longest first
    head = tl.arange(0, HEADS)
    row = (pid // num_q * num_heads + head) * num_q + query
    end = tl.load(ends + query)
    ends_of = tl.where(head < num_heads, end, 0)[:, None]
    column = tl.arange(0, TILE)[None, :]
    threshold, wanted = end * 0, tl.load(limits + query)
    for DIGIT in tl.static_range(DIGITS):
        counts = tl.zeros([BINS], tl.int32)
        for start in range(0, end, TILE):
            weights = weights_at(masses, forced, row[:, None], query, start + column, ends_of, num_k)
            counts = with_digit(counts, weights, threshold, DIGIT, HEADS * TILE)
        threshold, wanted = narrowed(counts, threshold, wanted)
    heavier, equal = tl.zeros([HEADS], tl.int32), tl.zeros([HEADS], tl.int32)
    for start in range(0, end, TILE):
        weights = weights_at(masses, forced, row[:, None], query, start + column, ends_of, num_k)
        heavier += tl.sum((weights > threshold).to(tl.int32), 1)
        equal += tl.sum((weights == threshold).to(tl.int32), 1)
    before = tl.cumsum(equal, 0) - equal
    allowed = tl.minimum(tl.maximum(wanted - before, 0), equal)
    valid = head < num_heads
    tl.store(found + row, threshold + head * 0, mask=valid)
    tl.store(found + num_rows + row, heavier, mask=valid)
    tl.store(found + 2 * num_rows + row, allowed, mask=valid)


@triton.jit(do_not_specialize=["wanted", "rows_per_sample", "num_q", "num_k"])
def digits_kernel(
    masses, forced, ends, counts, wanted, rows_per_sample, num_q, num_k,
    DIGIT: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
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
        weights = weights_at(masses, forced, row[:, None], query[:, None], column, end[:, None], num_k)
        mine = with_digit(mine, weights, prefix, DIGIT, GROUP * TILE)
    at = counts + (DIGIT * batch + sample) * BINS + tl.arange(0, BINS)
    tl.atomic_add(at, mine, mask=mine > 0, sem="relaxed")


@triton.jit(do_not_specialize=["wanted", "num_rows", "rows_per_sample", "num_q", "num_k"])
def counts_kernel(
    masses, forced, ends, counts, found, wanted, num_rows, rows_per_sample, num_q, num_k,
    GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """As the end of `teams_kernel`, but with all blocks that are as heavy: whose turn it is, the rows before decide."""
    sample, batch = tl.program_id(1), tl.num_programs(1)
    threshold, _ = narrowed_by(counts, sample, batch, wanted, DIGITS)
    place = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    row, query = sample * rows_per_sample + place, place % num_q
    valid = place < rows_per_sample
    end = tl.load(ends + query, mask=valid, other=0)
    heavier, equal = tl.zeros([GROUP], tl.int32), tl.zeros([GROUP], tl.int32)
    for start in range(0, tl.max(end, 0), TILE):
        column = start + tl.arange(0, TILE)[None, :]
        weights = weights_at(masses, forced, row[:, None], query[:, None], column, end[:, None], num_k)
        heavier += tl.sum((weights > threshold).to(tl.int32), 1)
        equal += tl.sum((weights == threshold).to(tl.int32), 1)
    tl.store(found + row, threshold + place * 0, mask=valid)
    tl.store(found + num_rows + row, heavier, mask=valid)
    tl.store(found + 2 * num_rows + row, equal, mask=valid)


@triton.jit(do_not_specialize=["wanted", "num_rows", "rows_per_sample", "batch"])
def offsets_kernel(
    found, counts, offsets, wanted, num_rows, rows_per_sample, batch, SHARED: tl.constexpr, TILE: tl.constexpr
):
    """One program: the rows one after another, and with a SHARED budget what each keeps of the equally heavy blocks."""
    done = batch * 0
    tl.store(offsets, done)
    for sample in range(batch):
        left = wanted
        if SHARED:
            _, left = narrowed_by(counts, sample, batch, wanted, DIGITS)
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


@triton.jit(do_not_specialize=["num_rows", "num_q", "num_k"])
def lists_kernel(
    masses, forced, ends, last_full, found, offsets, splits, indices, work, num_rows, num_q, num_k,
    TILE: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """The list of one row, and its place in the order of work of its head: `BlockList`, `BlockList.work`.

    NEAR rows are a neighbourhood, and a power of two.
    """
    row = tl.program_id(0)
    query = row % num_q
    threshold, allowed = tl.load(found + row), tl.load(found + 2 * num_rows + row)
    begin, stop = tl.load(offsets + row), tl.load(offsets + row + 1)
    end, full_up_to = tl.load(ends + query), tl.load(last_full + query)
    place, split, lane = begin, begin, tl.arange(0, TILE)
    for start in range(0, end, TILE):
        column = start + lane
        weights = weights_at(masses, forced, row, query, column, end, num_k)
        equal = (weights == threshold).to(tl.int32)
        kept = ((weights > threshold) | ((equal > 0) & (tl.cumsum(equal, 0) <= allowed))).to(tl.int32)
        tl.store(indices + place + tl.cumsum(kept, 0) - 1, column, mask=kept > 0)
        allowed -= tl.sum(equal, 0)
        place += tl.sum(kept, 0)
        split += tl.sum(tl.where(column <= full_up_to, kept, 0), 0)
    tl.store(splits + row, split)
    first_row, near = row - query, query // NEAR * NEAR
    lengths, valid = lengths_near(offsets + first_row, near, num_q, NEAR)
    longest, other = tl.max(lengths, 0), near + tl.arange(0, NEAR)
    earlier = (lengths > stop - begin) | ((lengths == stop - begin) & (other < query))
    before = tl.sum((earlier & valid).to(tl.int32), 0)
    for start in range(0, num_q, NEAR):
        lengths, valid = lengths_near(offsets + first_row, start, num_q, NEAR)
        its_longest = tl.max(lengths, 0)
        if (its_longest > longest) | ((its_longest == longest) & (start < near)):
            before += tl.minimum(num_q - start, NEAR)
    at = work + (first_row + before) * 4
    tl.store(at, query)
    tl.store(at + 1, begin)
    tl.store(at + 2, split)
    tl.store(at + 3, stop)


def can_pool(head_dim: int, dtype: torch.dtype, blocks: tuple[int, int], patch: tuple[int, int]) -> bool:
    """Whether `masses` has room for these patches of these blocks."""
    parts = [block // size for block, size in zip(blocks, patch, strict=True) if block % size == 0]
    return padded_dim(head_dim) * dtype.itemsize <= ROW_BYTES and len(parts) == 2 and max(parts) <= MAX_PARTS


def masses(
    q: Tensor, k: Tensor, blocks: tuple[int, int], patch: tuple[int, int], *, is_causal: bool, scale: float
) -> Tensor:
    """`ops.scores.estimated_masses` of `MeanPooled(*patch)`, without masks."""
    q, k = contiguous_rows(q), contiguous_rows(k)
    (batch, seq_q, heads, head_dim), (seq_k, heads_kv) = q.shape, k.shape[1:3]
    num_q, num_k = ceil_div(seq_q, blocks[0]), ceil_div(seq_k, blocks[1])
    of_q, of_k = blocks[0] // patch[0], blocks[1] // patch[1]
    padded = padded_dim(head_dim)
    rows = q.new_empty(batch * heads * num_q * of_q, padded)
    # The last tile may reach beyond the columns of its head, where it sees nothing: into the next one's, or the spare.
    columns = q.new_empty(batch * heads_kv * num_k * of_k + TILE_COLUMNS.value, padded)
    made = torch.empty(batch, heads, num_q, num_k, dtype=torch.float32, device=q.device)
    spread_q, spread_k = (min(max(size // 4, 1), POOLED_AT_ONCE.value) for size in patch)
    units_q = batch * heads * ceil_div(num_q * of_q * spread_q, POOLED_AT_ONCE.value)
    units_k = batch * heads_kv * ceil_div(num_k * of_k * spread_k, POOLED_AT_ONCE.value)
    # Few rows are spread over many small tiles; large tiles read the columns less often.
    wide = padded * q.dtype.itemsize > ROW_BYTES // 2
    tile = max(of_q, min(32 * of_q, 64 if wide else 128))
    options = {"num_warps": 8, "maxnreg": 128} if tile == 128 else {"num_warps": 4}
    options["num_stages"] = (2 if wide else 3) - (q.dtype == torch.float32)  # whose products take more room
    tiles = ceil_div(num_q * of_q, tile)
    programs, scratch = batch * heads * tiles, made
    if of_q > 1:
        programs = min(programs, WAVES * num_processors(q.device), max(1, SCRATCH // (num_k * tile)))
        scratch = torch.empty(programs, num_k, tile, dtype=torch.float32, device=q.device)

    def do() -> list[Launched | None]:
        pooled = launch(
            pool_kernel, (units_q + units_k,), (q, k, rows, columns),
            (*q.stride()[:3], *k.stride()[:3],
             heads, heads_kv, seq_q, seq_k, num_q * of_q, num_k * of_k, units_q, scale),
            D=head_dim, PADDED_D=padded, PATCH_Q=patch[0], PATCH_K=patch[1], SPREAD_Q=spread_q, SPREAD_K=spread_k,
            num_warps=2,
        )  # fmt: skip
        walked = launch(
            masses_kernel, (programs,), (rows, columns, made, scratch),
            (batch * heads, heads // heads_kv, seq_q, seq_k, num_q, num_k, tiles),
            PADDED_D=padded, PATCH_Q=patch[0], PATCH_K=patch[1], ROWS=of_q, COLUMNS=of_k,
            TILE_ROWS=tile, TILE_BLOCKS=32, CAUSAL=is_causal, PRECISION=precision, **options,
        )  # fmt: skip
        return [pooled, walked]

    precision = precision_of(q.dtype)
    key = q.device, like(q), like(k), blocks, patch, is_causal, scale, precision
    tensors = [q, k, rows, columns, made, *([scratch] if of_q > 1 else [])]
    repeat(_noted, key, tensors, (), do)
    return made


def lists(
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
        masses: float32 [batch, lists, query blocks, key blocks].
        forced: uint8 [query blocks, key blocks], 1 for a block that is kept before all others.
        ends, last_full: [query blocks]: how many blocks a row sees, and the last of them that is full.
        team: "row", "heads" for the heads of a row together, or "sample" for all heads and rows.
        limits: int32 [query blocks], how many a team keeps; None for "sample".
        places: how many all teams of a sample keep.
        notes: what is remembered of calls that differ in the masses alone.
    """
    batch, num_heads, num_q, num_k = masses.shape
    num_rows = batch * num_heads * num_q
    masses, shared = masses.contiguous(), team == "sample"
    rows_per_sample = num_heads * num_q

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
        sizes: dict[str, Any] = {"GROUP": GROUP, "TILE": WEIGHTS // GROUP, "num_warps": 4}
        numbers = rows_per_sample, num_q, num_k
        digits = range(DIGITS.value)
        counted = [launch(digits_kernel, grid, data, (places, *numbers), DIGIT=digit, **sizes) for digit in digits]
        return [*counted, launch(counts_kernel, grid, (*data, found), (places, num_rows, *numbers), **sizes)]

    def of_rows() -> list[Launched | None]:
        together = num_heads if team == "heads" else 1
        of_team = triton.next_power_of_2(together)
        sizes = {"HEADS": of_team, "TILE": max(32, min(512, WEIGHTS // of_team)), "num_warps": 4}
        data, numbers = (masses, forced, ends, limits, found), (num_rows, together, num_q, num_k)
        return [launch(teams_kernel, (num_rows // together,), data, numbers, **sizes)]

    def do() -> list[Launched | None]:
        chosen = of_samples() if shared else of_rows()
        placed = launch(
            offsets_kernel, (1,), (found, counts, offsets),
            (places, num_rows, rows_per_sample if shared else num_rows, batch if shared else 1),
            SHARED=shared, TILE=4096, num_warps=16,
        )  # fmt: skip
        listed = launch(
            lists_kernel, (num_rows,),
            (masses, forced, ends, last_full, found, offsets, splits, indices, work), (num_rows, num_q, num_k),
            TILE=256, NEAR=neighbourhood(1), num_warps=2,
        )  # fmt: skip
        return [*chosen, placed, listed]

    kept = [forced, ends, last_full, *([] if limits is None else [limits])]
    repeat(notes, (masses.shape, masses.data_ptr() % 16 == 0), tensors, kept, do)
    return BlockList(offsets, splits, indices, offsets.new_empty(0)), work
