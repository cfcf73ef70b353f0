"""The forward kernel for Hopper that walks runs: `hopper_forward` for dilated attention of any segments and lengths.

One warp fetches the parts of runs, two warpgroups compute, 64 queries each, as in `hopper_forward`, which says how they
take turns at the matrix units. `hopper_runs_common` says what a tile and a run are.

    guard                     arrives                   waits                                  count
    keys.ready, values.ready  the copy engine           each warpgroup, before S, before O     1
    keys.empty, values.empty  each warpgroup, after     the fetching warp, STAGES parts later  2
                              S, O
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .hopper_common import BYTES, ROWS, Ring, aggregate, new_barriers
from .hopper_forward import hand_over, max_of_rows, take_turn
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
    "q_b", "q_s", "q_h", "heads", "group", "seq", "repeats", "total_tiles", "tiles_per_head", "first_tile",
    "tile_order", "scale",
)  # fmt: skip


@aggregate
class Rings:
    keys: Ring
    values: Ring


@gluon.jit
def _fetch(keys_of, values_of, rings, plan, TILE_K: gl.constexpr, PADDED: gl.constexpr, NUM: gl.constexpr):
    keys, values = rings.keys, rings.values
    step = 0
    for turn in range(plan.turns()):
        tile = plan.tile(turn)
        head = tile.head // plan.group
        run = plan.runs + tile.run * RUN_FIELDS
        which, dilation, column = gl.load(run), gl.load(run + 1), gl.load(run + 2)
        first, length = gl.load(run + 3), gl.load(run + 4)
        x = 0
        for i in range(tile.parts):
            row, view_column = place_in_view(first + x, column, dilation, plan.seq)
            at = [tile.sample, row, view_column, head, 0]
            bar = keys.acquire(step, TILE_K * PADDED * BYTES)
            fetch_part(keys_of, which, at, bar, keys.buffers.index(keys.place(step)), NUM)
            bar = values.acquire(step, TILE_K * PADDED * BYTES)
            fetch_part(values_of, which, at, bar, values.buffers.index(values.place(step)), NUM)
            step += 1
            x += TILE_K
            if (x >= length) & (i + 1 < tile.parts):
                run += RUN_FIELDS
                which, dilation, column = gl.load(run), gl.load(run + 1), gl.load(run + 2)
                first, length = gl.load(run + 3), gl.load(run + 4)
                x = 0


@gluon.jit
def _hide(scores, x, key_lane, run, high, TILE_K: gl.constexpr):
    """Scores of the part from row `x` of a run on, −inf where a query does not see the key."""
    if x + TILE_K > run[5]:
        seen = gl.expand_dims(key_lane, 0) < gl.expand_dims(high - x, 1)
        scores = gl.where(seen, scores, float("-inf"))
    return scores


@gluon.jit
def _softmax(scores, row_sum, row_max, scale, x, key_lane, run, plan):
    new_max = gl.maximum(row_max, max_of_rows(scores) * scale)
    base = gl.where(new_max == float("-inf"), 0.0, new_max)
    shrink = gl.exp2(row_max - base)
    weights = gl.exp2(scores * scale - gl.expand_dims(base, 1))
    weights = times_counted(weights, x, key_lane, run[8], run[9], run[10], plan)
    return weights, row_sum * shrink + gl.sum(weights, 1), new_max, shrink


@gluon.jit
def _compute(
    WHO: gl.constexpr, q, out, lse, strides, heads, scale, q_buffers, rings, plan,
    D: gl.constexpr, PADDED: gl.constexpr, TILE_K: gl.constexpr, CAUSAL: gl.constexpr, NEGATIVE_SCALE: gl.constexpr,
):  # fmt: skip
    keys, values = rings.keys, rings.values
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_K, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PADDED, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    LOADED: gl.constexpr = row_layout(PADDED)
    dtype: gl.constexpr = q_buffers.dtype
    KEPT: gl.constexpr = gl.float32 if PADDED <= 64 else dtype  # see `hopper_forward`
    no_scores = gl.zeros([ROWS, TILE_K], gl.float32, SCORES)
    lane = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES)) + WHO * ROWS
    loaded_lane = gl.arange(0, ROWS, gl.SliceLayout(1, LOADED)) + WHO * ROWS
    key_lane = gl.arange(0, TILE_K, gl.SliceLayout(0, SCORES))
    q_b, q_s, q_h = strides
    step, turns = 0, plan.turns()
    buffer = q_buffers.index(WHO)
    if WHO == 1:
        hand_over(WHO, False)
    tile = plan.tile(0)
    loaded_token = gl.load(tile.rows + loaded_lane)
    queries = load_rows(q, loaded_token, tile.sample, tile.head, q_b, q_s, q_h, D, PADDED)
    for turn in range(turns):
        buffer.store(queries)
        fence_async_shared()
        token = gl.load(tile.rows + lane)
        index = tile.run
        run = load_run(plan.runs, index)
        keys.wait(step)
        pending = warpgroup_mma(
            buffer, keys.buffers.index(keys.place(step)).permute((1, 0)), no_scores, use_acc=False, is_async=True
        )
        low, high = bounds_of(run, token, CAUSAL, False)
        scores = warpgroup_mma_wait(0, deps=[pending])
        keys.release(step)
        if NEGATIVE_SCALE:
            scores = -scores
        scores = _hide(scores, 0, key_lane, run, high, TILE_K)
        none = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        weights, row_sum, row_max, shrink = _softmax(scores, gl.zeros_like(none), none, scale, 0, key_lane, run, plan)
        weights = weights.to(KEPT)
        acc = gl.zeros([ROWS, PADDED], gl.float32, ACC)
        x = TILE_K
        for i in range(1, tile.parts):
            here, before = step + i, step + i - 1
            keys.wait(here)
            take_turn(WHO, False)
            pending_scores = warpgroup_mma(
                buffer, keys.buffers.index(keys.place(here)).permute((1, 0)), no_scores, use_acc=False, is_async=True
            )
            operand = gl.convert_layout(weights.to(dtype), WEIGHTS)
            values.wait(before)
            pending_acc = warpgroup_mma(operand, values.buffers.index(values.place(before)), acc, is_async=True)
            hand_over(WHO, False)
            if x >= run[3]:
                index += 1
                run = load_run(plan.runs, index)
                low, high = bounds_of(run, token, CAUSAL, False)
                x = 0
            scores = warpgroup_mma_wait(1, deps=[pending_scores])
            if NEGATIVE_SCALE:
                scores = -scores
            scores = _hide(scores, x, key_lane, run, high, TILE_K)
            weights, row_sum, row_max, shrink = _softmax(scores, row_sum, row_max, scale, x, key_lane, run, plan)
            acc, operand = warpgroup_mma_wait(0, deps=[pending_acc, operand])
            keys.release(here)
            values.release(before)
            weights = weights.to(KEPT)
            acc = acc * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, ACC)), 1)
            x += TILE_K
        last = step + tile.parts - 1
        step += tile.parts
        operand = gl.convert_layout(weights.to(dtype), WEIGHTS)
        values.wait(last)
        take_turn(WHO, False)
        pending_acc = warpgroup_mma(operand, values.buffers.index(values.place(last)), acc, is_async=True)
        hand_over(WHO, False)
        # What the next tile starts with is asked for before this one is written out.
        next_tile = plan.tile(turn + 1)
        next_token = gl.load(next_tile.rows + loaded_lane)
        queries = load_rows(q, next_token, next_tile.sample, next_tile.head, q_b, q_s, q_h, D, PADDED)
        acc = warpgroup_mma_wait(0, deps=[pending_acc])
        values.release(last)
        empty = row_sum == 0.0
        inverse = 1.0 / gl.where(empty, 1.0, row_sum)
        acc = acc * gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, ACC)), 1)
        buffer.store(acc.to(dtype))  # these queries have served
        result = buffer.load(LOADED)
        store_rows(out, result, loaded_token, tile.sample, tile.head, plan.seq, heads, D, PADDED)
        row_lse = gl.where(empty, float("-inf"), (row_max + gl.log2(row_sum)) * 0.6931471805599453)
        of_head = (tile.sample.to(gl.int64) * heads + tile.head) * plan.seq
        gl.store(lse + of_head + token, row_lse, mask=token >= 0)
        tile, loaded_token = next_tile, next_token
    if WHO == 0:
        take_turn(WHO, False)


@gluon.jit(do_not_specialize=VARYING)
def runs_forward_kernel(
    k0, k1, k2, k3, k4, k5, v0, v1, v2, v3, v4, v5, q, out, lse, work, rows, runs, tables,
    q_b, q_s, q_h, heads, group, seq, repeats, total_tiles, tiles_per_head, first_tile, tile_order, scale,
    D: gl.constexpr, PADDED: gl.constexpr, TILE_K: gl.constexpr, STAGES: gl.constexpr, DILATIONS: gl.constexpr,
    CAUSAL: gl.constexpr, NEGATIVE_SCALE: gl.constexpr,
):  # fmt: skip
    """`k0` to `v5` are what `describe_view` makes, of each dilation; strides of q are in units of 8 numbers."""
    ROW_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, PADDED], k0.dtype)
    KEY_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_K, PADDED], k0.dtype)
    q_buffers = gl.allocate_shared_memory(k0.dtype, [2, ROWS, PADDED], ROW_LAYOUT)
    k_buffers = gl.allocate_shared_memory(k0.dtype, [STAGES, TILE_K, PADDED], KEY_LAYOUT)
    v_buffers = gl.allocate_shared_memory(k0.dtype, [STAGES, TILE_K, PADDED], KEY_LAYOUT)
    keys = Ring(k_buffers, new_barriers(STAGES), new_barriers(STAGES), STAGES)
    values = Ring(v_buffers, new_barriers(STAGES), new_barriers(STAGES), STAGES)
    for place in gl.static_range(STAGES):
        keys.init(place)
        values.init(place)
    rings = Rings(keys, values)
    plan = Plan(work, rows, runs, tables, (total_tiles, tiles_per_head, first_tile, tile_order), group, seq, repeats, 3)
    strides = (q_b, q_s, q_h)
    gl.warp_specialize([
        (_compute, (0, q, out, lse, strides, heads, scale, q_buffers, rings, plan, D, PADDED, TILE_K, CAUSAL,
                    NEGATIVE_SCALE)),
        (_compute, (1, q, out, lse, strides, heads, scale, q_buffers, rings, plan, D, PADDED, TILE_K, CAUSAL,
                    NEGATIVE_SCALE)),
        (_fetch, ((k0, k1, k2, k3, k4, k5), (v0, v1, v2, v3, v4, v5), rings, plan, TILE_K, PADDED, DILATIONS)),
    ], [4, 1], [COMPUTE_REGS, FETCH_REGS])  # fmt: skip
