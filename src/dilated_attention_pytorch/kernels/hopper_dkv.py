"""dk and dv on Hopper, warp-specialised, and with them dq where it may be added up in any order.

`compute_dkv` is what each of the two warpgroups of `hopper_backward` does with its 64 keys of a tile. A step is a part
of STREAM queries, with four products: S = K Qᵀ, dP = V dOᵀ, dV += P dO, dK += dS Q. Where there is no dq, S of the next
step is asked for before the rest of a step is waited for. Where there is, a fifth product takes its place:

    step s    S, dP ──▶ P ──▶ dV, dS(s) ──▶ dK ──▶ dq(s − 1) = dS(s − 1)ᵀ K ──▶ added to memory
                               └─▶ shared memory, for step s + 1

dq is a step behind, so that the matrix units have work while dS is written, and a warpgroup may be some half of a step
ahead of the other. dS goes through shared memory:

    guard     arrives                               waits                                        count
    ds.ready  each warpgroup, its dS is written     each warpgroup, before dq of that step       2
    ds.empty  each warpgroup, dq of the step is     each warpgroup, before it writes dS          2
              computed                              two steps later

How dq is summed (SUMS):

    HALVES  both warpgroups read both halves of dS, and each computes 64 × 64 numbers of dq: half of the columns of 64
            queries, or with heads of 64 half of the rows of 128 queries. One addition a number
    OWN     each multiplies its own dS with its own keys: nobody waits for the other, two additions a number

A warpgroup leaves its 64 × 64 numbers in its stage, from which the copy engine adds them to float32 sums in global
memory, in the order in which threads hold them: as rows and columns they would meet in the same banks.
`backward.round_kernel` puts them in order. The last dq of a tile follows its last step; dk and dv leave by the stage.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .common import (
    BY_KEY,
    MIXED,
    UNIT,
    add_pair_multiplicity,
    apply_score_mods,
    dropout_keeps,
    dropout_key_hash,
    dropout_query_hash,
    log_multiplicity,
    query_bounds,
    signed_distance,
    words_of,
)
from .hopper_common import (
    ROWS,
    Ring,
    add_block,
    aggregate,
    as_block,
    as_row,
    barrier,
    reaching,
    retyped,
    store_block,
)

NO_SUMS, HALVES, OWN = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
SUMS_IN_FLIGHT = gl.constexpr((0, 2, 1))  # products of dq, of each kind


@aggregate
class Keys:
    """What a warpgroup knows of its 64 keys before it meets a query."""

    key: gl.tensor  # as a column
    state: gl.tensor  # whether some of their block are padding
    real: gl.tensor  # which are not, as a column
    first: gl.tensor  # where BOUNDED, a key is seen by the queries from `first` to `first + reach`, whatever the block
    reach: gl.tensor
    origin: gl.tensor
    hash: gl.tensor


@aggregate
class Walk:
    """A query head of a tile: the list it follows, and what its scores are multiplied by and added to."""

    head: gl.tensor
    list_id: gl.tensor
    begin: gl.tensor
    split: gl.tensor
    end: gl.tensor
    exp_scale: gl.tensor  # scores times this are exponents of 2
    slope: gl.tensor


@aggregate
class Sums:
    """What the warpgroups of a program share and keep to add up dq. The stage serves dk and dv too."""

    ds: Ring  # of dS, in halves: those of step s are at 2 · place(s)
    stage: gl.shared_memory_descriptor  # of each warpgroup: 64 × 64 numbers of dq, or a 16-bit tile of dk or dv
    KIND: gl.constexpr


@gluon.jit
def keys_of(tile, lane, WHO: gl.constexpr, lists, masks, mods, BOUNDED: gl.constexpr):
    key = gl.expand_dims(lists.token(tile.row + WHO * ROWS + lane, tile.residue), 1)
    first, reach, state, real = key, key, 0, key
    if masks.PADDING:
        words = words_of(masks.padding, tile.sample, tile.block, lists.num_blocks, lists.OWN_BLOCK)
        place = tile.row % lists.OWN_BLOCK + WHO * ROWS + lane
        state = gl.load(words - 1)
        real = gl.expand_dims(gl.load(words + place // UNIT).to(gl.int32) >> (place % UNIT), 1) & 1
    if BOUNDED:
        first, last = query_bounds(key, masks.rules, masks.documents, masks.seq_q, masks.seq_k, masks.DOCUMENTS)
        first, reach = reaching(first, last)
    origin, key_hash = lists.token(tile.row, tile.residue) - (masks.seq_k - masks.seq_q), key
    if mods.DROPOUT:
        key_hash = dropout_key_hash(mods.seed, key, tile.row)
    return Keys(key, state, real, first, reach, origin, key_hash)


@gluon.jit
def walk_of(member, tile, lists, head_lists, mods):
    head = tile.head * lists.group + member
    begin, split, end = head_lists.entries(tile, head, lists)
    exp_scale, slope = mods.scale, 0.0
    if mods.SOFTCAP or mods.ALIBI:
        exp_scale = 1.0
    if mods.ALIBI:
        slope = gl.load(mods.slopes + head)
    return Walk(head, lists.list_of(tile.sample, head), begin, split, end, exp_scale, slope)


@gluon.jit
def _num_steps(tile, lists, head_lists):
    """Of all heads of a tile."""
    num = (tile.stop - tile.start) * lists.group
    if head_lists.OWN_LISTS or head_lists.PADDING:
        num = 0
        for member in range(lists.group):
            begin, _, end = head_lists.entries(tile, tile.head * lists.group + member, lists)
            num += end - begin
    return num * (lists.BLOCK // lists.STREAM)


@gluon.jit
def modify(scores, query, key, origin, slope, masks, mods):
    """Scores with softcap and ALiBi applied, and the derivative of the softcap."""
    scores = scores * mods.scale
    distance = signed_distance(query, key, origin, masks.seq_q, masks.seq_k)
    return apply_score_mods(scores, distance, slope, mods.cap, mods.SOFTCAP, mods.ALIBI, False)


@gluon.jit
def weights_of(
    scores, lse, other, i, keys, walk, tile, query_lane, lists, masks, mods,
    BOUNDED: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """The weights of a part before dropout, or their negatives where they are dropped, and the softcap's derivative.

    Args:
        lse: where it lies in shared memory.
        other: the block that part `i` lies in.
    """
    PARTS: gl.constexpr = lists.BLOCK // lists.STREAM
    DILATED: gl.constexpr = lists.DILATED
    HAS_SCORE_MODS: gl.constexpr = mods.SOFTCAP or mods.ALIBI
    entry, softcap_grad, multiplicity = walk.begin + i // PARTS, 1.0, 1
    if DILATED:
        multiplicity = gl.load(masks.rule_ids + entry)
    if mods.NEGATIVE_SCALE:
        scores = -scores
    if HAS_SCORE_MODS or mods.DROPOUT:
        query = lists.tokens(other, i, query_lane)
    if HAS_SCORE_MODS:
        scores, softcap_grad = modify(scores, query, keys.key, keys.origin, walk.slope, masks, mods)
    row_lse = as_row(lse).load(gl.SliceLayout(0, scores.type.layout))
    if DILATED:
        row_lse = row_lse - log_multiplicity(multiplicity, False)
        if MASKED and DILATED == 2:
            query = lists.tokens(other, i, query_lane)
            scores = add_pair_multiplicity(
                scores, multiplicity, query, keys.key, walk.list_id, masks.branches, masks.num_branches,
                masks.seq_q, masks.seq_k, walk.exp_scale, False,
            )  # fmt: skip
    weights = gl.exp2(scores * walk.exp_scale - gl.expand_dims(row_lse, 0))
    if masks.PADDING:  # noqa: SIM102
        if keys.state == MIXED:
            weights = gl.where(keys.real != 0, weights, 0.0)
    if MASKED or masks.DOCUMENT_IDS:  # noqa: SIM102
        if walk.begin < walk.end:  # always so: see `hopper_forward`
            query = lists.tokens(other, i, query_lane)
            seen = masks.allowed(
                query, query, keys.key, keys.first, keys.reach, entry, walk.split, walk.end, tile.sample,
                BOUNDED, MASKED, False,
            )  # fmt: skip
            weights = gl.where(seen, weights, 0.0)
    if mods.DROPOUT:  # noqa: SIM102
        if walk.begin < walk.end:
            stream_id = tile.sample * lists.heads + walk.head
            query_hash = dropout_query_hash(mods.seed, stream_id, query, other * lists.BLOCK)
            # The sign says whether a weight is kept: a mask would be packed until it is used again.
            keeps = dropout_keeps(query_hash, keys.hash, mods.threshold)
            weights = gl.where(keeps, weights, -weights)
    return weights, softcap_grad


@gluon.jit
def dscores_of(weights, dweights, delta, mods):
    row_delta = as_row(delta).load(gl.SliceLayout(0, dweights.type.layout))
    if mods.DROPOUT:
        dweights = gl.where(weights > 0.0, dweights, 0.0)
        weights = gl.abs(weights)
        row_delta *= 1 / mods.keep_scale
    return weights * (dweights - gl.expand_dims(row_delta, 0))


@gluon.jit
def _publish(dscores, step, WHO: gl.constexpr, sums):
    """Write dS where both warpgroups read it; what this one left in its stage has been read by then."""
    ds = sums.ds
    if sums.KIND == HALVES:
        ds.wait_empty(step)
    ds.buffers.index(2 * ds.place(step) + WHO).store(dscores)
    fence_async_shared()
    tma.store_wait(0)
    barrier()
    if sums.KIND == HALVES:
        mbarrier.arrive(ds.ready.index(ds.place(step)), count=1)


@gluon.jit
def _start_dq(place, WHO: gl.constexpr, rings, sums, D: gl.constexpr):
    """64 × 64 numbers of dq from dS at that place of its ring, as far as the matrix units have got."""
    PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    nothing = gl.zeros([ROWS, 64], gl.float32, PART)
    if sums.KIND == OWN:
        ds = sums.ds.buffers.index(2 * place + WHO).permute((1, 0))
        dq = warpgroup_mma(ds, rings.own.buffers.index(WHO), nothing, use_acc=False, is_async=True)
    else:
        dq = nothing
        for half in gl.static_range(2):
            ds, k = sums.ds.buffers.index(2 * place + half), rings.own.buffers.index(half)
            if D == 64:
                ds = ds.slice(WHO * ROWS, ROWS, 1)
            else:
                k = k.slice(WHO * 64, 64, 1)
            dq = warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=half == 1, is_async=True)
    return dq


@gluon.jit
def _target(other, i, WHO: gl.constexpr, tile, walk, lists, KIND: gl.constexpr, D: gl.constexpr):
    """Where the sums of a part begin: 16 rows of 256 numbers for 64 queries and 64 columns (`Call._sums`)."""
    first = other * lists.BLOCK + i % (lists.BLOCK // lists.STREAM) * lists.STREAM
    tiles = lists.walked * lists.num_residues * (lists.BLOCK // 64)
    part = ((tile.sample * lists.heads + walk.head) * tiles + first // 64) * (D // 64)
    if KIND == HALVES:
        part += WHO
    return part * 16


@gluon.jit
def _add(dq, target, total, WHO: gl.constexpr, sums):
    """Have the copy engine add 64 × 64 numbers to the sums, in the order in which threads hold them."""
    threads = gl.permute(gl.reshape(dq, [4, 2, 8, 8, 4, 2]), (3, 0, 2, 4, 1, 5))
    stage = as_block(sums.stage.index(WHO), total)
    stage.store(gl.reshape(threads, [16, 256]))
    fence_async_shared()
    barrier()
    add_block(total, [target, 0], stage)


@gluon.jit
def _store(x, value, tile, WHO: gl.constexpr, sums):
    """64 rows of one head, by the copy engine."""
    tma.store_wait(0)
    barrier()
    stage = retyped(sums.stage.index(WHO), x)
    stage.store(value.to(x.dtype))
    fence_async_shared()
    barrier()
    store_block(x, [tile.sample, tile.row + WHO * ROWS, tile.residue, tile.head, 0], as_block(stage, x))


@gluon.jit
def compute_dkv(
    WHO: gl.constexpr, dk, dv, total, scale_out, rings, sums, lists, head_lists, masks, mods,
    D: gl.constexpr, D_V: gl.constexpr,
):  # fmt: skip
    stream, ds = rings.stream, sums.ds
    STREAM: gl.constexpr = lists.STREAM
    PARTS: gl.constexpr = lists.BLOCK // STREAM
    SUMS: gl.constexpr = sums.KIND
    AHEAD: gl.constexpr = SUMS == NO_SUMS  # with dq too there are no registers for it
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STREAM, 16])  # keys × queries
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    GRADS_V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_V, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, GRADS, 2)
    OPERAND_V: gl.constexpr = gl.DotOperandLayout(0, GRADS_V, 2)
    IN_FLIGHT: gl.constexpr = SUMS_IN_FLIGHT[SUMS]
    # A key is seen by `reach` queries after `first` too, whatever the block.
    BY_QUERY: gl.constexpr = masks.DOCUMENTS and masks.DOCUMENTS != BY_KEY
    BOUNDED: gl.constexpr = masks.ONE_INTERVAL and not (masks.HAS_RULE_IDS or BY_QUERY or masks.DOCUMENT_IDS)
    dtype: gl.constexpr = rings.own_b.dtype
    heads_kv = lists.heads // lists.group
    key_lane = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    query_lane = gl.arange(0, STREAM, gl.SliceLayout(0, SCORES))
    nothing = gl.zeros([ROWS, STREAM], gl.float32, SCORES)
    k, v = rings.own.buffers.index(WHO), rings.own_b.index(WHO)
    step = 0
    for turn in range(lists.turns()):
        tile = lists.tile(turn, heads_kv, lists.group)
        keys = keys_of(tile, key_lane, WHO, lists, masks, mods, BOUNDED)
        first_step, last_step = step, step + _num_steps(tile, lists, head_lists)
        target = 0
        dkeys = gl.zeros([ROWS, D], gl.float32, GRADS)
        dvalues = gl.zeros([ROWS, D_V], gl.float32, GRADS_V)
        rings.own.wait(turn)
        if AHEAD:  # noqa: SIM102
            if step < last_step:
                stream.wait(step)
        # After the last step of a tile, scores are computed of what is in the buffer, and nobody reads them: products
        # behind a branch would be waited for at its end.
        scores = nothing
        if AHEAD:
            scores = warpgroup_mma(
                k, stream.buffers.index(stream.place(step)).permute((1, 0)), nothing, use_acc=False, is_async=True
            )
            scores = warpgroup_mma_wait(0, deps=[scores])
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
                    if not AHEAD:
                        stream.wait(step)
                        pending_scores = warpgroup_mma(k, q.permute((1, 0)), nothing, use_acc=False, is_async=True)
                    pending_dweights = warpgroup_mma(v, grad.permute((1, 0)), nothing, use_acc=False, is_async=True)
                    if not AHEAD:
                        scores = warpgroup_mma_wait(1, deps=[pending_scores])
                    weights, softcap_grad = weights_of(
                        scores, rings.lse.index(place), other, i, keys, walk, tile, query_lane, lists, masks, mods,
                        BOUNDED, MASKED,
                    )  # fmt: skip
                    kept = weights
                    if mods.DROPOUT:
                        kept = gl.where(weights < 0.0, 0.0, weights)  # NaN is not lost
                    operand = gl.convert_layout(kept.to(dtype), OPERAND_V)
                    if mods.SOFTCAP:
                        weights *= softcap_grad
                    dweights = warpgroup_mma_wait(0, deps=[pending_dweights])
                    pending_dvalues = warpgroup_mma(operand, grad, dvalues, is_async=True)
                    dscores = dscores_of(weights, dweights, rings.delta.index(place), mods).to(dtype)
                    pending_dkeys = warpgroup_mma(gl.convert_layout(dscores, OPERAND), q, dkeys, is_async=True)
                    if SUMS:
                        if SUMS == HALVES:  # noqa: SIM102
                            if step > first_step:
                                ds.wait(step - 1)
                        pending_dq = _start_dq(ds.place(step + ds.NUM_STAGES - 1), WHO, rings, sums, D)
                        _publish(dscores, step, WHO, sums)
                    dvalues, dkeys = warpgroup_mma_wait(IN_FLIGHT, deps=[pending_dvalues, pending_dkeys])
                    stream.release(step)
                    if AHEAD:
                        if step + 1 < last_step:
                            stream.wait(step + 1)
                        pending_scores = warpgroup_mma(
                            k, stream.buffers.index(stream.place(step + 1)).permute((1, 0)), nothing, use_acc=False,
                            is_async=True,
                        )  # fmt: skip
                    if SUMS:
                        dq = warpgroup_mma_wait(0, deps=[pending_dq])
                        if step > first_step:
                            if SUMS == HALVES:
                                ds.release(step - 1)
                            _add(dq, target, total, WHO, sums)
                        target = _target(other, i, WHO, tile, walk, lists, SUMS, D)
                    if AHEAD:
                        scores = warpgroup_mma_wait(0, deps=[pending_scores])
                    step += 1
        if SUMS:  # noqa: SIM102
            if step > first_step:
                if SUMS == HALVES:
                    ds.wait(step - 1)
                dq = warpgroup_mma_wait(0, deps=[_start_dq(ds.place(step - 1), WHO, rings, sums, D)])
                if SUMS == HALVES:
                    ds.release(step - 1)
                tma.store_wait(0)
                barrier()
                _add(dq, target, total, WHO, sums)
        rings.own.release(turn)
        if mods.DROPOUT:  # what all kept weights are multiplied by
            dkeys, dvalues = dkeys * mods.keep_scale, dvalues * mods.keep_scale
        _store(dk, dkeys * scale_out, tile, WHO, sums)
        _store(dv, dvalues, tile, WHO, sums)
    tma.store_wait(0)
