"""Estimated masses of blocks, in one or two launches: `ops.scores.estimated_masses`, without masks.

`masses_kernel` multiplies the rows and columns of `select_features`, takes a softmax along each row, and sums by block.
Of the products nothing is stored: a program keeps sums by block for the rows of its tile. On Hopper `hopper_select`
does the same for patches.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..caches import register_container
from ..patterns.blocks import ceil_div
from .common import LOG2E
from .configs import padded_dim
from .launch import HAVE_GLUON, contiguous_rows, has_room, num_processors, precision_of
from .launcher import MOST, Launched, launch, like, repeat
from .select_features import Features, Given, Pooled, Tile, tile_of
from .select_lists import UNIT, as_weights

if HAVE_GLUON:
    from . import hopper_common, hopper_select

WAVES = 2  # programs of `masses_kernel` for each processor,
SCRATCH = 1 << 29  # and bytes that all of them may store
HEADROOM = tl.constexpr(9.0)  # the largest term of a tile is 2⁹, so that sums of 64 are large float16 numbers
_noted: dict[Any, Any] = {}
register_container(_noted, "kernels.select_masses._noted", "launches of `fused_masses`, to be done again", bound=MOST)


@triton.jit
def load_part(
    x, index, part, x_t, x_p, num, tokens, start,
    D: tl.constexpr, PADDED_D: tl.constexpr, STEP: tl.constexpr, FIRST: tl.constexpr, TURN: tl.constexpr,
    BOUNDED: tl.constexpr,
):  # fmt: skip
    """One part of rows (or columns) `start + index`, [rows, PADDED_D]; `x` is that of row `start`.

    Row r begins at token r · STEP + FIRST; its parts are TURN tokens apart, and zero where there is no such token. Rows
    without parts of their own tokens (TURN is 0) end with the last token. BOUNDED where there may be fewer rows.
    """
    dim = tl.arange(0, PADDED_D)
    if BOUNDED:
        index = tl.minimum(start + index, num - 1) - start
    token = index * STEP + FIRST
    if BOUNDED and TURN == 0:
        token = tl.minimum(start * STEP + token, tokens - 1) - start * STEP
    at = x + part.to(tl.int64) * x_p + (token * x_t)[:, None] + dim
    if BOUNDED and TURN != 0:
        valid = (start * STEP + token + part * TURN < tokens)[:, None]
        if PADDED_D == D:
            value = tl.load(at, mask=valid, other=0.0)
        else:
            value = tl.load(at, mask=valid & (dim < D), other=0.0)
    elif PADDED_D == D:
        value = tl.load(at)
    else:
        value = tl.load(at, mask=dim < D, other=0.0)
    return value


@triton.jit
def by_block(x, ROWS: tl.constexpr, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of the columns of each block, whose places `columns_of_tile` gave: additions of one thread."""
    if COLUMNS == 1:
        sums = x
    elif COLUMNS < 4 or BLOCKS < 4:
        sums = tl.sum(tl.reshape(x, ROWS, BLOCKS, COLUMNS), 2)
    else:
        parts = tl.reshape(x, ROWS, BLOCKS // 4, COLUMNS // 2, 4, 2)
        parts = tl.permute(parts, 0, 1, 3, 2, 4)
        sums = tl.sum(tl.reshape(parts, ROWS, BLOCKS, COLUMNS), 2)
    return sums


@triton.jit
def columns_of_tile(BLOCKS: tl.constexpr, COLUMNS: tl.constexpr):
    """The columns in the places of a tile. The matrix units give each thread two of every eight neighbours; a block's
    columns are dealt out so that all of them are one thread's."""
    place = tl.arange(0, BLOCKS * COLUMNS)
    if COLUMNS >= 4 and BLOCKS >= 4:
        within = place % (4 * COLUMNS)
        block = place // (4 * COLUMNS) * 4 + within % 8 // 2
        place = block * COLUMNS + within // 8 * 2 + within % 2
    return place


@triton.jit(
    do_not_specialize=[
        "heads", "group", "all_heads", "seq_q", "seq_k", "num_q", "num_k", "tokens_q", "tokens_k", "tiles", "tiles_k",
        "units",
    ]
)  # fmt: skip
def masses_kernel(
    rows, columns, masses, sums, peaks, forced, r_b, r_h, r_t, r_p, c_b, c_h, c_t, c_p,
    heads, group, all_heads, seq_q, seq_k, num_q, num_k, tokens_q, tokens_k, tiles, tiles_k, units, scale,
    D: tl.constexpr, PADDED_D: tl.constexpr, PARTS: tl.constexpr, PATCH_Q: tl.constexpr, PATCH_K: tl.constexpr,
    STEP_Q: tl.constexpr, STEP_K: tl.constexpr, FIRST_Q: tl.constexpr, TURN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    CAUSAL: tl.constexpr, WHOLE: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For a tile of rows, `ROWS` to a query block, loop over the columns that it sees, `COLUMNS` to a key block.

    The first loop leaves Σ 2^(score − peak) for every (row, key block) in the program's own part of `sums`, and the
    peak of each row and tile of columns in `peaks`. A second loop divides by the sums of the rows, and adds up rows.
    WHOLE where blocks that a row does not see are wanted as well, as zeros. Where masses are int16, they are stored
    `as_weights`. A row stands for PATCH_Q queries, a column for PATCH_K keys; steps and turns are those of `load_part`.
    """
    BLOCKS: tl.constexpr = TILE_COLUMNS // COLUMNS
    QUERY_BLOCKS: tl.constexpr = TILE_ROWS // ROWS
    UNROLLED: tl.constexpr = 4 if ROWS > 4 else ROWS
    AT_ONCE: tl.constexpr = 4096 // QUERY_BLOCKS // BLOCKS  # tiles of columns in the second loop
    lane = tl.arange(0, TILE_ROWS)
    order = columns_of_tile(BLOCKS, COLUMNS)
    num_rows, num_columns = num_q * ROWS, num_k * COLUMNS
    width = tiles_k * BLOCKS  # of a row of sums
    sums += tl.program_id(0).to(tl.int64) * tiles_k * (BLOCKS * TILE_ROWS)
    peaks += tl.program_id(0).to(tl.int64) * tiles_k * TILE_ROWS
    programs, total_tiles = tl.num_programs(0), all_heads * tiles
    for place in range(tl.program_id(0), total_tiles, programs):
        # The longest tiles first, forwards and backwards in turn: all programs get about as much.
        turn = place // programs
        back = (turn % 2 == 1) & ((turn + 1) * programs <= total_tiles)
        unit = tl.where(back, (2 * turn + 1) * programs - 1 - place, place)
        any_head, tile = unit % all_heads, tiles - 1 - unit // all_heads
        sample, head, zero = (any_head // heads).to(tl.int64), any_head % heads, tile * 0
        row = tile * TILE_ROWS + lane
        in_row = tl.maximum(tl.minimum(seq_q - row * PATCH_Q, PATCH_Q), 0)
        sees = tl.zeros([TILE_ROWS], tl.int32) + seq_k  # so many keys
        if CAUSAL:
            sees = tl.minimum(row * PATCH_Q + in_row, seq_q) + (seq_k - seq_q)
        fewest, most = tl.maximum(tl.min(sees, 0), 0), tl.maximum(tl.max(sees, 0), 0)
        num_clear = tl.minimum(fewest, seq_k) // (TILE_COLUMNS * PATCH_K)
        num_tiles = tl.cdiv(tl.minimum(most, seq_k), TILE_COLUMNS * PATCH_K)
        own_rows = rows + sample * r_b + head.to(tl.int64) * r_h + (tile * TILE_ROWS * STEP_Q).to(tl.int64) * r_t
        own_columns = columns + sample * c_b + (head // group).to(tl.int64) * c_h
        if PARTS == 1:
            queries = load_part(
                own_rows, lane, zero, r_t, r_p, num_rows, tokens_q, tile * TILE_ROWS,
                D, PADDED_D, STEP_Q, FIRST_Q, -TURN, True,
            )  # fmt: skip

        row_max = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        row_sum = tl.zeros([TILE_ROWS], tl.float32)
        for MASKED in tl.static_range(2):
            for i in range(num_clear if MASKED else 0, num_tiles if MASKED else num_clear):
                begin = zero + i * TILE_COLUMNS
                these = own_columns + (begin * STEP_K).to(tl.int64) * c_t
                if PARTS == 1:
                    keys = load_part(
                        these, order, zero, c_t, c_p, num_columns, tokens_k, begin,
                        D, PADDED_D, STEP_K, 0, TURN, MASKED,
                    )  # fmt: skip
                    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
                else:
                    scores = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
                    for part in range(PARTS):
                        some = load_part(
                            own_rows, lane, zero + part, r_t, r_p, num_rows, tokens_q, tile * TILE_ROWS,
                            D, PADDED_D, STEP_Q, FIRST_Q, -TURN, True,
                        )  # fmt: skip
                        keys = load_part(
                            these, order, zero + part, c_t, c_p, num_columns, tokens_k, begin,
                            D, PADDED_D, STEP_K, 0, TURN, MASKED,
                        )  # fmt: skip
                        scores = tl.dot(some, tl.trans(keys), scores, input_precision=PRECISION)
                if MASKED:  # a column counts as often as it has keys that the row sees
                    first_key = (begin + order) * PATCH_K
                    in_column = tl.minimum(seq_k - first_key, PATCH_K)
                    count = tl.maximum(tl.minimum(sees[:, None] - first_key[None, :], in_column[None, :]), 0)
                    scores = tl.where(count > 0, scores, float("-inf"))
                new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
                peak = tl.where(new_max == float("-inf"), 0.0, new_max) - HEADROOM
                terms = tl.exp2(scores * scale - peak[:, None])
                if MASKED:
                    terms *= count.to(tl.float32) * (1.0 / PATCH_K)
                of_blocks = by_block(terms, TILE_ROWS, BLOCKS, COLUMNS).to(sums.dtype.element_ty)
                # Of what is stored, so that the masses of a row add up to 1.
                row_sum = row_sum * tl.exp2(row_max - HEADROOM - peak) + tl.sum(of_blocks.to(tl.float32), 1)
                row_max = new_max
                at = lane[:, None] * width + i * BLOCKS + tl.arange(0, BLOCKS)
                tl.store(sums + at, of_blocks)
                tl.store(peaks + i * TILE_ROWS + lane, peak)

        row_lse = tl.where(row_sum == 0.0, 0.0, row_max - HEADROOM + tl.log2(row_sum))
        in_block = tl.minimum(seq_q - row // ROWS * (ROWS * PATCH_Q), ROWS * PATCH_Q)
        share = in_row.to(tl.float32) / tl.maximum(in_block, 1).to(tl.float32)
        tl.debug_barrier()
        for start in range(0, num_tiles, 16):  # peaks become factors
            which = start + tl.arange(0, 16)[:, None]
            at = peaks + which * TILE_ROWS + lane[None, :]
            factor = tl.exp2(tl.load(at, mask=which < num_tiles, other=0.0) - row_lse[None, :]) * share[None, :]
            tl.store(at, factor, mask=which < num_tiles)
        tl.debug_barrier()
        first_block = tile * QUERY_BLOCKS + tl.arange(0, QUERY_BLOCKS)
        found = masses + (any_head.to(tl.int64) * num_q + first_block)[:, None, None] * units * UNIT
        for start in range(0, tl.cdiv(num_k, BLOCKS) if WHOLE else num_tiles, AT_ONCE):
            which = start + tl.arange(0, AT_ONCE)
            known = which < num_tiles
            of_tile = which[:, None] * BLOCKS + tl.arange(0, BLOCKS)[None, :]
            weights = tl.zeros([QUERY_BLOCKS, AT_ONCE, BLOCKS], tl.float32)
            for some in range(0, ROWS, UNROLLED):
                for r in tl.static_range(UNROLLED):
                    line = tl.arange(0, QUERY_BLOCKS) * ROWS + some + r
                    factor = tl.load(peaks + which[None, :] * TILE_ROWS + line[:, None], mask=known[None, :], other=0.0)
                    at = sums + line[:, None, None] * width + of_tile[None, :, :]
                    value = tl.load(at, mask=known[None, :, None], other=0.0)
                    weights += value.to(tl.float32) * factor[:, :, None]
            there = (first_block < num_q)[:, None, None] & (of_tile < units * UNIT)[None, :, :]
            if masses.dtype.element_ty == tl.int16:
                at = forced + first_block.to(tl.int64)[:, None, None] * num_k + of_tile[None, :, :]
                known_too = there & (of_tile < num_k)[None, :, :]
                weights = as_weights(weights, tl.load(at, mask=known_too, other=0) != 0)
            tl.store(found + of_tile[None, :, :], weights, mask=there)
        tl.debug_barrier()  # before the next tile writes over the sums


def fused_masses(
    q: Tensor,
    k: Tensor,
    blocks: tuple[int, int],
    features: Features,
    *,
    is_causal: bool,
    scale: float,
    forced: Tensor | None = None,
) -> Tensor:
    """`ops.scores.estimated_masses` of a scorer with these features, without masks.

    Args:
        features: `fits` must be true of them.
        forced: uint8 [query blocks, key blocks], for `select_lists`: weights are wanted, int16, in which those are the
            heaviest; what a row does not see holds anything.
    """
    q, k = contiguous_rows(q), contiguous_rows(k)
    (batch, seq_q, heads, _), (seq_k, heads_kv) = q.shape, k.shape[1:3]
    num_q, num_k = ceil_div(seq_q, blocks[0]), ceil_div(seq_k, blocks[1])
    by = features.operands(q, k, blocks, scale)
    rows, columns = by.rows, by.columns
    of_q, of_k = blocks[0] // rows.patch, blocks[1] // columns.patch
    on_hopper = isinstance(features, Pooled) and features.on_hopper(q, blocks)
    tile = Tile(128, 128, {}) if on_hopper else tile_of(by.width, q.dtype, of_q, of_k, by.parts, has_room(q.device))
    of_tile = tile.columns // of_k
    tiles, tiles_k = ceil_div(num_q * of_q, tile.rows), ceil_div(num_k, of_tile)
    # Sums are added up over the rows of a block: each may be coarse, if the products are.
    kept = torch.float16 if of_q > 1 and q.dtype.itemsize == 2 else torch.float32
    bytes_each = tiles_k * of_tile * tile.rows * kept.itemsize
    waves = 1 if on_hopper else WAVES
    programs = min(batch * heads * tiles, waves * num_processors(q.device), max(1, SCRATCH // bytes_each))
    made_as, unit = (torch.float32, 1) if forced is None else (torch.int16, UNIT)
    units = ceil_div(num_k, unit)
    made = torch.empty(batch, heads, num_q, units * unit, dtype=made_as, device=q.device)
    sums = torch.empty(programs, tile.rows, tiles_k * of_tile, dtype=kept, device=q.device)
    peaks = torch.empty(programs, tiles_k, tile.rows, dtype=torch.float32, device=q.device)
    results = made, sums, peaks, sums if forced is None else forced
    sizes = heads, heads // heads_kv, batch * heads, seq_q, seq_k, num_q, num_k
    common = {"PATCH_Q": rows.patch, "PATCH_K": columns.patch, "COLUMNS": of_k, "CAUSAL": is_causal, "UNIT": unit}
    common["WHOLE"] = forced is None

    def do() -> list[Launched | None]:
        pooled = by.make() if by.make else []
        if on_hopper:
            described = (
                hopper_common.describe(rows.x, 64, 1, by.width), hopper_common.describe(columns.x, 128, 1, by.width),
            )  # fmt: skip
            multiplied = launch(
                hopper_select.masses_kernel, (programs,), (*described, *results),
                (*sizes, tiles, tiles_k, units, by.scale * LOG2E.value),
                D=by.width, PER_BLOCK=of_q, STAGES=4, HEADROOM=HEADROOM.value, **common, num_warps=4, maxnreg=168,
            )  # fmt: skip
        else:
            multiplied = launch(
                masses_kernel, (programs,), (rows.x, columns.x, *results),
                (*rows.strides, *columns.strides, *sizes, rows.tokens, columns.tokens, tiles, tiles_k, units,
                 by.scale * LOG2E.value),
                D=by.width, PADDED_D=padded_dim(by.width), PARTS=by.parts, STEP_Q=rows.step, STEP_K=columns.step,
                FIRST_Q=rows.first, TURN=by.turn, ROWS=of_q, TILE_ROWS=tile.rows, TILE_COLUMNS=tile.columns,
                PRECISION=precision, **common, **tile.options,
            )  # fmt: skip
        return [*pooled, multiplied]

    precision = precision_of(q.dtype)
    tensors = [*by.made_of, rows.x, columns.x, made, sums, peaks, *([] if forced is None else [forced])]
    kind = (Given, features.patch) if isinstance(features, Given) else features
    key = kind, like(q), like(k), like(rows.x), like(columns.x), q.device, blocks, is_causal, scale, made_as, precision
    repeat(_noted, key, tensors, (), do)
    return made[..., :num_k]
