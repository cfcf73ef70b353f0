"""The backward kernels for Hopper that walk runs: `hopper_backward` for dilated attention of any segments and lengths.

Each warpgroup owns 64 of a tile's 128 rows (keys for dk and dv, queries for dq), which it loads itself, while the parts
of runs go by: two tensors each, and for dk and dv the lse and delta of the queries. The ring of parts is that of
`hopper_backward`.

`rows_of_runs_kernel` writes lse and delta once for each dilation, in the order of the columns of its view: there the
numbers of a run lie together. The first copy is in the order of tokens.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .common import LOG2E
from .common import load_rows as load_neighbours
from .hopper_common import BYTES, ROWS, Ring, aggregate, as_row, load_block, new_barriers
from .hopper_runs_common import (
    COMPUTE_REGS,
    FETCH_REGS,
    RUN_FIELDS,
    Plan,
    bounds_of,
    fetch_part,
    load_rows,
    load_run,
    place_in_view,
    row_layout,
    store_rows,
    times_counted,
)

VARYING = (
    "batch", "heads", "group", "seq", "padded", "copies", "repeats", "total_tiles", "tiles_per_head", "first_tile",
    "tile_order", "scale", "scale_out", "a_b", "a_s", "a_h", "b_b", "b_s", "b_h",
)  # fmt: skip


@triton.jit(do_not_specialize=["batch", "heads", "seq", "padded", "num"])
def rows_of_runs_kernel(
    out, grad, dlse, lse, of_rows, g_b, g_s, g_h, batch, heads, seq, padded, num,
    D: tl.constexpr, PADDED_D: tl.constexpr, TILE: tl.constexpr, DLSE: tl.constexpr,
    R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, R3: tl.constexpr, R4: tl.constexpr, R5: tl.constexpr,
    R6: tl.constexpr,
):  # fmt: skip
    """lse in units of log2 and delta of a tile of queries of one head: of_rows is [2, batch, heads, padded]. Rows
    without keys get +inf and 0."""
    num_tiles = (seq + TILE - 1) // TILE
    head_id = tl.program_id(0) // num_tiles
    sample, head = (head_id // heads).to(tl.int64), head_id % heads
    query = tl.program_id(0) % num_tiles * TILE + tl.arange(0, TILE)
    valid = query < seq
    outs = load_neighbours(out + (sample * seq * heads + head) * D, query, heads * D, valid, D, PADDED_D)
    grads = load_neighbours(grad + sample * g_b + head.to(tl.int64) * g_h, query, g_s, valid, D, PADDED_D)
    at = (sample * heads + head) * seq + query
    value = tl.sum(outs.to(tl.float32) * grads.to(tl.float32), 1)
    if DLSE:
        value -= tl.load(dlse + at, mask=valid, other=0.0)
    natural = tl.load(lse + at, mask=valid, other=float("-inf"))
    empty = natural == float("-inf")
    row_lse, value = tl.where(empty, float("inf"), natural * LOG2E), tl.where(empty, 0.0, value)
    first = (sample * heads + head) * padded
    dilations: tl.constexpr = (R0, R1, R2, R3, R4, R5, R6)
    for copy in tl.static_range(7):
        if copy < num:
            dilation: tl.constexpr = dilations[copy]
            column = query % dilation
            place = column * (seq // dilation) + tl.minimum(column, seq % dilation) + query // dilation
            at = first + copy * seq + place
            tl.store(of_rows + at, row_lse, mask=valid)
            tl.store(of_rows + batch.to(tl.int64) * heads * padded + at, value, mask=valid)


@aggregate
class Rings:
    """Buffers of two tensors, a and b, of the side that stays and of the one that goes by; `stream` guards both."""

    own_a: gl.shared_memory_descriptor
    own_b: gl.shared_memory_descriptor
    stream: Ring
    stream_b: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor


@gluon.jit
def _fetch(
    a_of, b_of, of_rows, batch, heads, copies, rings, plan,
    STREAM: gl.constexpr, PADDED: gl.constexpr, NUM: gl.constexpr, OF_KEYS: gl.constexpr,
):  # fmt: skip
    stream = rings.stream
    NUM_BYTES: gl.constexpr = 2 * STREAM * PADDED * BYTES + (2 * STREAM * 4 if OF_KEYS else 0)
    step = 0
    for turn in range(plan.turns()):
        tile = plan.tile(turn)
        head = tile.head
        if not OF_KEYS:
            head = tile.head // plan.group
        run = plan.runs + tile.run * RUN_FIELDS
        which, dilation, column = gl.load(run), gl.load(run + 1), gl.load(run + 2)
        first, length = gl.load(run + 3), gl.load(run + 4)
        x = 0
        for i in range(tile.parts):
            row, view_column = place_in_view(first + x, column, dilation, plan.seq)
            at = [tile.sample, row, view_column, head, 0]
            place = stream.place(step)
            bar = stream.acquire(step, NUM_BYTES)
            if OF_KEYS:
                of_head = tile.sample * heads + head
                number = (which + copies) * plan.seq + column * (plan.seq // dilation)
                number += gl.minimum(column, plan.seq % dilation) + first + x
                load_block(of_rows, [of_head, number], bar, rings.lse.index(place))
                load_block(of_rows, [of_head + batch * heads, number], bar, rings.delta.index(place))
            fetch_part(a_of, which, at, bar, stream.buffers.index(place), NUM)
            fetch_part(b_of, which, at, bar, rings.stream_b.index(place), NUM)
            step += 1
            x += STREAM
            if (x >= length) & (i + 1 < tile.parts):
                run += RUN_FIELDS
                which, dilation, column = gl.load(run), gl.load(run + 1), gl.load(run + 2)
                first, length = gl.load(run + 3), gl.load(run + 4)
                x = 0


@gluon.jit
def _compute(
    WHO: gl.constexpr, a, b, da, db, numbers, batch, heads, padded, scale, scale_out, strides, rings, plan,
    D: gl.constexpr, PADDED: gl.constexpr, STREAM: gl.constexpr, CAUSAL: gl.constexpr, NEGATIVE_SCALE: gl.constexpr,
    OF_KEYS: gl.constexpr,
):  # fmt: skip
    """dk and dv (a, b: k, v; q and dout go by), or dq (a, b: q, dout; k and v go by).

    Scores and gradients of weights are [own rows, rows that go by], whichever are the queries.
    """
    stream = rings.stream
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STREAM, 16])
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PADDED, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, GRADS, 2)
    LOADED: gl.constexpr = row_layout(PADDED)
    dtype: gl.constexpr = rings.own_b.dtype
    nothing = gl.zeros([ROWS, STREAM], gl.float32, SCORES)
    lane = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES)) + WHO * ROWS
    loaded_lane = gl.arange(0, ROWS, gl.SliceLayout(1, LOADED)) + WHO * ROWS
    stream_lane = gl.arange(0, STREAM, gl.SliceLayout(0, SCORES))
    own_a, own_b = rings.own_a.index(WHO), rings.own_b.index(WHO)
    a_b, a_s, a_h, b_b, b_s, b_h = strides
    step = 0
    for turn in range(plan.turns()):
        tile = plan.tile(turn)
        loaded_token = gl.load(tile.rows + loaded_lane)
        head = tile.head
        if OF_KEYS:
            head = tile.head // plan.group
        own_a.store(load_rows(a, loaded_token, tile.sample, head, a_b, a_s, a_h, D, PADDED))
        own_b.store(load_rows(b, loaded_token, tile.sample, head, b_b, b_s, b_h, D, PADDED))
        fence_async_shared()
        token = gl.load(tile.rows + lane)
        row_lse, row_delta = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, SCORES)), 0.0
        if not OF_KEYS:
            at = (tile.sample.to(gl.int64) * heads + tile.head) * padded + token
            row_lse = gl.load(numbers + at, mask=token >= 0, other=float("inf"))
            row_delta = gl.load(numbers + batch.to(gl.int64) * heads * padded + at, mask=token >= 0, other=0.0)
        index = tile.run
        run = load_run(plan.runs, index)
        low, high = bounds_of(run, token, CAUSAL, OF_KEYS)
        length, all_from, all_to = run[3], run[4], run[5]
        table, phase, period = run[8], run[9], run[10]
        d_a = gl.zeros([ROWS, PADDED], gl.float32, GRADS)
        d_b = gl.zeros([ROWS, PADDED], gl.float32, GRADS)
        x = 0
        for _ in range(tile.parts):
            place = stream.place(step)
            stream.wait(step)
            stream_a, stream_b = stream.buffers.index(place), rings.stream_b.index(place)
            pending_scores = warpgroup_mma(own_a, stream_a.permute((1, 0)), nothing, use_acc=False, is_async=True)
            pending_dweights = warpgroup_mma(own_b, stream_b.permute((1, 0)), nothing, use_acc=False, is_async=True)
            if x >= length:
                index += 1
                next_run = load_run(plan.runs, index)
                low, high = bounds_of(next_run, token, CAUSAL, OF_KEYS)
                length, all_from, all_to = next_run[3], next_run[4], next_run[5]
                table, phase, period = next_run[8], next_run[9], next_run[10]
                x = 0
            scores = warpgroup_mma_wait(1, deps=[pending_scores])
            if NEGATIVE_SCALE:
                scores = -scores
            if OF_KEYS:
                lowered = gl.expand_dims(as_row(rings.lse.index(place)).load(gl.SliceLayout(0, SCORES)), 0)
            else:
                lowered = gl.expand_dims(row_lse, 1)
            weights = gl.exp2(scores * scale - lowered)
            weights = times_counted(weights, x, stream_lane, table, phase, period, plan)
            if (x < all_from) | (x + STREAM > all_to):
                other = gl.expand_dims(stream_lane + x, 0)
                seen = (other >= gl.expand_dims(low, 1)) & (other < gl.expand_dims(high, 1))
                weights = gl.where(seen, weights, 0.0)
            if OF_KEYS:
                operand = gl.convert_layout(weights.to(dtype), OPERAND)
                deltas = gl.expand_dims(as_row(rings.delta.index(place)).load(gl.SliceLayout(0, SCORES)), 0)
            else:
                deltas = gl.expand_dims(row_delta, 1)
            dweights = warpgroup_mma_wait(0, deps=[pending_dweights])
            if OF_KEYS:
                pending_b = warpgroup_mma(operand, stream_b, d_b, is_async=True)
            dscores = weights * (dweights - deltas)
            pending_a = warpgroup_mma(gl.convert_layout(dscores.to(dtype), OPERAND), stream_a, d_a, is_async=True)
            if OF_KEYS:
                d_b, d_a = warpgroup_mma_wait(0, deps=[pending_b, pending_a])
            else:
                d_a = warpgroup_mma_wait(0, deps=[pending_a])
            stream.release(step)
            step += 1
            x += STREAM
        # What a warpgroup owns has served: results go through its buffers.
        own_a.store((d_a * scale_out).to(dtype))
        store_rows(da, own_a.load(LOADED), loaded_token, tile.sample, tile.head, plan.seq, heads, D, PADDED)
        if OF_KEYS:
            own_b.store(d_b.to(dtype))
            store_rows(db, own_b.load(LOADED), loaded_token, tile.sample, tile.head, plan.seq, heads, D, PADDED)


@gluon.jit(do_not_specialize=VARYING)
def runs_backward_kernel(
    a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5, of_rows, numbers, a, b, da, db, work, rows, runs,
    tables, a_b, a_s, a_h, b_b, b_s, b_h, batch, heads, group, seq, padded, copies,
    repeats, total_tiles, tiles_per_head, first_tile, tile_order, scale, scale_out,
    D: gl.constexpr, PADDED: gl.constexpr, STREAM: gl.constexpr, STAGES: gl.constexpr, DILATIONS: gl.constexpr,
    CAUSAL: gl.constexpr, NEGATIVE_SCALE: gl.constexpr, OF_KEYS: gl.constexpr,
):  # fmt: skip
    """dk and dv of every query head (OF_KEYS), or dq. `a0` to `b5` describe what goes by, `of_rows` describes
    `numbers`; strides are in units of 8 numbers. `copies`: of lse and delta before that of the smallest dilation."""
    OWN_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, PADDED], a0.dtype)
    STREAM_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STREAM, PADDED], a0.dtype)
    own_a = gl.allocate_shared_memory(a0.dtype, [2, ROWS, PADDED], OWN_LAYOUT)
    own_b = gl.allocate_shared_memory(a0.dtype, [2, ROWS, PADDED], OWN_LAYOUT)
    stream_a = gl.allocate_shared_memory(a0.dtype, [STAGES, STREAM, PADDED], STREAM_LAYOUT)
    stream_b = gl.allocate_shared_memory(a0.dtype, [STAGES, STREAM, PADDED], STREAM_LAYOUT)
    lse_rows = gl.allocate_shared_memory(gl.float32, [STAGES, 1, STREAM], of_rows.layout)
    delta_rows = gl.allocate_shared_memory(gl.float32, [STAGES, 1, STREAM], of_rows.layout)
    stream = Ring(stream_a, new_barriers(STAGES), new_barriers(STAGES), STAGES)
    for place in gl.static_range(STAGES):
        stream.init(place)
    rings = Rings(own_a, own_b, stream, stream_b, lse_rows, delta_rows)
    FIELD: gl.constexpr = 3 if STREAM == 128 else 4
    plan = Plan(
        work, rows, runs, tables, (total_tiles, tiles_per_head, first_tile, tile_order), group, seq, repeats, FIELD
    )
    strides = (a_b, a_s, a_h, b_b, b_s, b_h)
    gl.warp_specialize([
        (_compute, (0, a, b, da, db, numbers, batch, heads, padded, scale, scale_out, strides, rings, plan,
                    D, PADDED, STREAM, CAUSAL, NEGATIVE_SCALE, OF_KEYS)),
        (_compute, (1, a, b, da, db, numbers, batch, heads, padded, scale, scale_out, strides, rings, plan,
                    D, PADDED, STREAM, CAUSAL, NEGATIVE_SCALE, OF_KEYS)),
        (_fetch, ((a0, a1, a2, a3, a4, a5), (b0, b1, b2, b3, b4, b5), of_rows, batch, heads, copies, rings, plan,
                  STREAM, PADDED, DILATIONS, OF_KEYS)),
    ], [4, 1], [COMPUTE_REGS, FETCH_REGS])  # fmt: skip
