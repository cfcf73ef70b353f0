"""dk or dv alone on Hopper, warp-specialised: of heads so large that a warpgroup has no registers for both.

What `hopper_dkv.compute_dkv` does in one walk of a tile's queries is done in two launches, with eight products for the
whole backward in place of seven. A tile's result leaves through the buffer of the keys or values that it belongs to.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .common import BY_KEY
from .hopper_common import ROWS, as_block, barrier, store_block
from .hopper_dkv import dscores_of, keys_of, walk_of, weights_of

OF_KEYS, OF_VALUES = gl.constexpr(1), gl.constexpr(2)


@gluon.jit
def compute_alone(
    WHO: gl.constexpr, out, scale_out, rings, lists, head_lists, masks, mods, WIDTH: gl.constexpr, KIND: gl.constexpr
):  # fmt: skip
    """dk or dv, by KIND, of the 64 keys of a warpgroup. `out` describes it, in boxes of WIDTH."""
    stream = rings.stream
    STREAM: gl.constexpr = lists.STREAM
    PARTS: gl.constexpr = lists.BLOCK // STREAM
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STREAM, 16])  # keys × queries
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, GRADS, 2)
    BY_QUERY: gl.constexpr = masks.DOCUMENTS and masks.DOCUMENTS != BY_KEY
    BOUNDED: gl.constexpr = masks.ONE_INTERVAL and not (masks.HAS_RULE_IDS or BY_QUERY or masks.DOCUMENT_IDS)
    dtype: gl.constexpr = rings.own_b.dtype
    key_lane = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    query_lane = gl.arange(0, STREAM, gl.SliceLayout(0, SCORES))
    nothing = gl.zeros([ROWS, STREAM], gl.float32, SCORES)
    k, v = rings.own.buffers.index(WHO), rings.own_b.index(WHO)
    step = 0
    for turn in range(lists.turns()):
        tile = lists.tile(turn, lists.heads // lists.group, lists.group)
        keys = keys_of(tile, key_lane, WHO, lists, masks, mods, BOUNDED)
        sums = gl.zeros([ROWS, WIDTH], gl.float32, GRADS)
        rings.own.wait(turn)
        for member in range(lists.group):
            walk = walk_of(member, tile, lists, head_lists, mods)
            num_full, num = (walk.split - walk.begin) * PARTS, (walk.end - walk.begin) * PARTS
            for MASKED in gl.static_range(2):
                if MASKED:
                    low, high = num_full, num
                else:
                    low, high = 0, num_full
                for i in range(low, high):
                    place = stream.place(step)
                    other = gl.load(lists.indices + walk.begin + i // PARTS)
                    q, grad = stream.buffers.index(place), rings.stream_b.index(place)
                    stream.wait(step)
                    pending_scores = warpgroup_mma(k, q.permute((1, 0)), nothing, use_acc=False, is_async=True)
                    if KIND == OF_KEYS:
                        dweights = warpgroup_mma(v, grad.permute((1, 0)), nothing, use_acc=False, is_async=True)
                    scores = warpgroup_mma_wait(1 if KIND == OF_KEYS else 0, deps=[pending_scores])
                    weights, softcap_grad = weights_of(
                        scores, rings.lse.index(place), other, i, keys, walk, tile, query_lane, lists, masks, mods,
                        BOUNDED, MASKED,
                    )  # fmt: skip
                    if KIND == OF_KEYS:
                        if mods.SOFTCAP:
                            weights *= softcap_grad
                        dweights = warpgroup_mma_wait(0, deps=[dweights])
                        weights = dscores_of(weights, dweights, rings.delta.index(place), mods)
                        other_side = q
                    else:
                        if mods.DROPOUT:
                            weights = gl.where(weights < 0.0, 0.0, weights)  # NaN is not lost
                        other_side = grad
                    operand = gl.convert_layout(weights.to(dtype), OPERAND)
                    sums = warpgroup_mma_wait(0, deps=[warpgroup_mma(operand, other_side, sums, is_async=True)])
                    stream.release(step)
                    step += 1
        if mods.DROPOUT:  # what all kept weights are multiplied by
            sums = sums * mods.keep_scale
        if KIND == OF_KEYS:
            sums = sums * scale_out
            buffer = k
        else:
            buffer = v
        barrier()  # all warps have done with it
        buffer.store(sums.to(dtype))
        fence_async_shared()
        barrier()
        store_block(out, [tile.sample, tile.row + WHO * ROWS, tile.residue, tile.head, 0], as_block(buffer, out))
        tma.store_wait(0)
        barrier()
        rings.own.release(turn)
