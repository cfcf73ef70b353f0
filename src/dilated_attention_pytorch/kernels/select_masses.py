"""Estimated masses of blocks in two launches: `ops.scores.estimated_masses` of `MeanPooled`, without masks.

pool_kernel     reads every token once: mean queries and mean keys of patches
masses_kernel   multiplies them, takes a softmax along each row, and sums by block
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..caches import register_container
from ..patterns.blocks import ceil_div
from .common import LOG2E, load_rows
from .configs import padded_dim
from .launch import contiguous_rows, num_processors, precision_of
from .launcher import MOST, Launched, launch, like, repeat

MAX_PARTS = 64  # rows or columns of a block, which a tile must hold
TILE_COLUMNS = tl.constexpr(64)
ROW_BYTES = 512  # of a row or column; with the tiles they must fit the shared memory of any GPU
POOLED_AT_ONCE = tl.constexpr(32)  # tokens
WAVES = 2  # programs of `masses_kernel` for each processor,
SCRATCH = 1 << 27  # and numbers that all of them may store
_noted: dict[Any, Any] = {}
register_container(_noted, "kernels.select_masses._noted", "launches of `pooled_masses`, to be done again", bound=MOST)


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
    """For a tile of rows, `ROWS` to a query block, loop over the columns that it sees, `COLUMNS` to a key block.
    `heads` are those of all samples.

    The first loop leaves log2 Σ 2^score for every (row, key block): in the place of the masses where a query block has
    one row, else in the program's own part of `scratch`. A second loop, over these, divides by the sums of the rows.
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


def can_pool(head_dim: int, dtype: torch.dtype, blocks: tuple[int, int], patch: tuple[int, int]) -> bool:
    """Whether `pooled_masses` has room for these patches of these blocks."""
    parts = [block // size for block, size in zip(blocks, patch, strict=True) if block % size == 0]
    return padded_dim(head_dim) * dtype.itemsize <= ROW_BYTES and len(parts) == 2 and max(parts) <= MAX_PARTS


def pooled_masses(
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
        multiplied = launch(
            masses_kernel, (programs,), (rows, columns, made, scratch),
            (batch * heads, heads // heads_kv, seq_q, seq_k, num_q, num_k, tiles),
            PADDED_D=padded, PATCH_Q=patch[0], PATCH_K=patch[1], ROWS=of_q, COLUMNS=of_k,
            TILE_ROWS=tile, TILE_BLOCKS=32, CAUSAL=is_causal, PRECISION=precision, **options,
        )  # fmt: skip
        return [pooled, multiplied]

    precision = precision_of(q.dtype)
    key = q.device, like(q), like(k), blocks, patch, is_causal, scale, precision
    tensors = [q, k, rows, columns, made, *([scratch] if of_q > 1 else [])]
    repeat(_noted, key, tensors, (), do)
    return made
