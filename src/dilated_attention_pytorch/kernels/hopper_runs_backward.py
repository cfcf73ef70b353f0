"""The backward kernels for Hopper that walk runs: `hopper_backward` for dilated attention of any segments and lengths.

Each warpgroup owns 64 of a tile's 128 rows (keys for dk and dv, queries for dq), which it loads itself, while the parts
of runs go by: two tensors each, a and b, in a ring of its own each. lse and delta of queries stand in the order of
tokens; where queries go by, a warpgroup loads theirs, a thread each, and hands them round in shared memory. There the
multiplicity of a row is a part of its lse.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .hopper_common import BYTES, ROWS, Ring, aggregate, new_barriers
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
    "a_b", "a_s", "a_h", "b_b", "b_s", "b_h", "heads", "group", "seq", "padded", "repeats", "total_tiles",
    "tiles_per_head", "first_tile", "tile_order", "scale", "scale_out",
)  # fmt: skip


@aggregate
class Rings:
    """Buffers of two tensors, a and b, of the side that stays and of the one that goes by."""

    own_a: gl.shared_memory_descriptor
    own_b: gl.shared_memory_descriptor
    stream_a: Ring
    stream_b: Ring
    numbers: gl.shared_memory_descriptor  # lse and delta of each warpgroup


@gluon.jit
def _fetch(
    a_of, b_of, rings, plan,
    STREAM: gl.constexpr, PADDED: gl.constexpr, NUM: gl.constexpr, OF_KEYS: gl.constexpr,
):  # fmt: skip
    stream_a, stream_b = rings.stream_a, rings.stream_b
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
            bar = stream_a.acquire(step, STREAM * PADDED * BYTES)
            fetch_part(a_of, which, at, bar, stream_a.buffers.index(stream_a.place(step)), NUM)
            bar = stream_b.acquire(step, STREAM * PADDED * BYTES)
            fetch_part(b_of, which, at, bar, stream_b.buffers.index(stream_b.place(step)), NUM)
            step += 1
            x += STREAM
            if (x >= length) & (i + 1 < tile.parts):
                run += RUN_FIELDS
                which, dilation, column = gl.load(run), gl.load(run + 1), gl.load(run + 2)
                first, length = gl.load(run + 3), gl.load(run + 4)
                x = 0


@gluon.jit
def _compute(
    WHO: gl.constexpr, a, b, da, db, lse, delta, heads, padded, scale, scale_out, strides, rings, plan,
    D: gl.constexpr, PADDED: gl.constexpr, STREAM: gl.constexpr, CAUSAL: gl.constexpr, NEGATIVE_SCALE: gl.constexpr,
    OF_KEYS: gl.constexpr,
):  # fmt: skip
    """dk and dv (a, b: k, v; q and dout go by), or dq (a, b: q, dout; k and v go by).

    Scores and gradients of weights are [own rows, rows that go by], whichever are the queries.
    """
    ring_a, ring_b = rings.stream_a, rings.stream_b
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STREAM, 16])
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PADDED, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, GRADS, 2)
    LOADED: gl.constexpr = row_layout(PADDED)
    dtype: gl.constexpr = rings.own_b.dtype
    nothing = gl.zeros([ROWS, STREAM], gl.float32, SCORES)
    lane = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES)) + WHO * ROWS
    loaded_lane = gl.arange(0, ROWS, gl.SliceLayout(1, LOADED)) + WHO * ROWS
    stream_lane = gl.arange(0, STREAM, gl.SliceLayout(0, SCORES))
    number_lane = gl.arange(0, STREAM, gl.BlockedLayout([1], [32], [4], [0]))
    lse_rows, delta_rows = rings.numbers.index(2 * WHO), rings.numbers.index(2 * WHO + 1)
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
        of_head = (tile.sample.to(gl.int64) * heads + tile.head) * padded
        own_lse, own_delta = 0.0, 0.0
        if not OF_KEYS:
            own_lse = gl.load(lse + of_head + token, mask=token >= 0, other=float("inf"))
            own_delta = gl.load(delta + of_head + token, mask=token >= 0, other=0.0)
        index = tile.run
        run = load_run(plan.runs, index)
        low, high = bounds_of(run, token, CAUSAL, OF_KEYS)
        dilation, start = run[0], run[2] * run[0] + run[1]
        length, all_from, all_to = run[3], run[4], run[5]
        table, phase, period = run[8], run[9], run[10]
        d_a = gl.zeros([ROWS, PADDED], gl.float32, GRADS)
        d_b = gl.zeros([ROWS, PADDED], gl.float32, GRADS)
        x = 0
        for _ in range(tile.parts):
            place = ring_a.place(step)
            stream_a, stream_b = ring_a.buffers.index(place), ring_b.buffers.index(place)
            ring_a.wait(step)
            pending_scores = warpgroup_mma(own_a, stream_a.permute((1, 0)), nothing, use_acc=False, is_async=True)
            ring_b.wait(step)
            pending_dweights = warpgroup_mma(own_b, stream_b.permute((1, 0)), nothing, use_acc=False, is_async=True)
            if x >= length:
                index += 1
                next_run = load_run(plan.runs, index)
                low, high = bounds_of(next_run, token, CAUSAL, OF_KEYS)
                dilation, start = next_run[0], next_run[2] * next_run[0] + next_run[1]
                length, all_from, all_to = next_run[3], next_run[4], next_run[5]
                table, phase, period = next_run[8], next_run[9], next_run[10]
                x = 0
            if OF_KEYS:  # by all threads, while the scores are computed; behind the end of a run no query counts
                at = of_head + start + (number_lane + x) * dilation
                there = number_lane + x < length
                row_lse = gl.load(lse + at, mask=there, other=float("inf"))
                if period > 0:
                    row_lse -= gl.log2(gl.load(plan.tables + table + (phase + x) % period + number_lane))
                lse_rows.store(row_lse)
                delta_rows.store(gl.load(delta + at, mask=there, other=0.0))
            scores = warpgroup_mma_wait(1, deps=[pending_scores])
            if NEGATIVE_SCALE:
                scores = -scores
            if OF_KEYS:
                lowered = gl.expand_dims(lse_rows.load(gl.SliceLayout(0, SCORES)), 0)
                weights = gl.exp2(scores * scale - lowered)
            else:
                weights = gl.exp2(scores * scale - gl.expand_dims(own_lse, 1))
                weights = times_counted(weights, x, stream_lane, table, phase, period, plan)
            if (x < all_from) | (x + STREAM > all_to):
                other = gl.expand_dims(stream_lane + x, 0)
                seen = (other >= gl.expand_dims(low, 1)) & (other < gl.expand_dims(high, 1))
                weights = gl.where(seen, weights, 0.0)
            if OF_KEYS:
                operand = gl.convert_layout(weights.to(dtype), OPERAND)
                deltas = gl.expand_dims(delta_rows.load(gl.SliceLayout(0, SCORES)), 0)
            else:
                deltas = gl.expand_dims(own_delta, 1)
            dweights = warpgroup_mma_wait(0, deps=[pending_dweights])
            if OF_KEYS:
                pending_b = warpgroup_mma(operand, stream_b, d_b, is_async=True)
            dscores = weights * (dweights - deltas)
            pending_a = warpgroup_mma(gl.convert_layout(dscores.to(dtype), OPERAND), stream_a, d_a, is_async=True)
            if OF_KEYS:
                d_b, d_a = warpgroup_mma_wait(0, deps=[pending_b, pending_a])
            else:
                d_a = warpgroup_mma_wait(0, deps=[pending_a])
            ring_a.release(step)
            ring_b.release(step)
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
    a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5, a, b, da, db, lse, delta, work, rows, runs, tables,
    a_b, a_s, a_h, b_b, b_s, b_h, heads, group, seq, padded, repeats,
    total_tiles, tiles_per_head, first_tile, tile_order, scale, scale_out,
    D: gl.constexpr, PADDED: gl.constexpr, STREAM: gl.constexpr, STAGES: gl.constexpr, DILATIONS: gl.constexpr,
    CAUSAL: gl.constexpr, NEGATIVE_SCALE: gl.constexpr, OF_KEYS: gl.constexpr,
):  # fmt: skip
    """dk and dv of every query head (OF_KEYS), or dq. `a0` to `b5` describe what goes by; strides are in units of 8
    numbers; lse and delta are what `backward.rows_kernel` makes, [batch, heads, padded] in the order of tokens."""
    OWN_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, PADDED], a0.dtype)
    STREAM_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STREAM, PADDED], a0.dtype)
    own_a = gl.allocate_shared_memory(a0.dtype, [2, ROWS, PADDED], OWN_LAYOUT)
    own_b = gl.allocate_shared_memory(a0.dtype, [2, ROWS, PADDED], OWN_LAYOUT)
    stream_a = gl.allocate_shared_memory(a0.dtype, [STAGES, STREAM, PADDED], STREAM_LAYOUT)
    stream_b = gl.allocate_shared_memory(a0.dtype, [STAGES, STREAM, PADDED], STREAM_LAYOUT)
    numbers = gl.allocate_shared_memory(gl.float32, [4, STREAM], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ring_a = Ring(stream_a, new_barriers(STAGES), new_barriers(STAGES), STAGES)
    ring_b = Ring(stream_b, new_barriers(STAGES), new_barriers(STAGES), STAGES)
    for place in gl.static_range(STAGES):
        ring_a.init(place)
        ring_b.init(place)
    rings = Rings(own_a, own_b, ring_a, ring_b, numbers)
    FIELD: gl.constexpr = 3 if STREAM == 128 else 4
    schedule = (total_tiles, tiles_per_head, first_tile, tile_order)
    plan = Plan(work, rows, runs, tables, schedule, group, seq, repeats, FIELD)
    strides = (a_b, a_s, a_h, b_b, b_s, b_h)
    gl.warp_specialize([
        (_compute, (0, a, b, da, db, lse, delta, heads, padded, scale, scale_out, strides, rings, plan,
                    D, PADDED, STREAM, CAUSAL, NEGATIVE_SCALE, OF_KEYS)),
        (_compute, (1, a, b, da, db, lse, delta, heads, padded, scale, scale_out, strides, rings, plan,
                    D, PADDED, STREAM, CAUSAL, NEGATIVE_SCALE, OF_KEYS)),
        (_fetch, ((a0, a1, a2, a3, a4, a5), (b0, b1, b2, b3, b4, b5), rings, plan, STREAM, PADDED, DILATIONS, OF_KEYS)),
    ], [4, 1], [COMPUTE_REGS, FETCH_REGS])  # fmt: skip
