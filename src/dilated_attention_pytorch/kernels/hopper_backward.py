"""The backward kernels for Hopper, warp-specialised in Gluon: the twins of those in `backward.py`.

As in `hopper_forward`, a program keeps its multiprocessor, one warp fetches and two warpgroups compute. Each warpgroup
owns 64 of a tile's 128 rows (keys for dk and dv, queries for dq), which stay in shared memory while the other side goes
by in tiles of `STREAM` rows; two tensors each: (k, v) and (q, dout), or the other way round.

    guard         arrives                              waits                                        count
    own.ready     the copy engine: a tile's 128 rows   each warpgroup, before a tile                1
                  of two tensors
    own.empty     each warpgroup, after a tile         the fetching warp, before the next one       2
    stream.ready  the copy engine: STREAM rows of      each warpgroup, before its first products    1
                  two tensors, and for dk and dv       of the part
                  their lse and delta
    stream.empty  each warpgroup, after the last       the fetching warp, NUM_STAGES parts later    2
                  product with the part

`hopper_common` says how rings count, and where the registers go.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from .common import (
    HIDDEN,
    add_pair_multiplicity,
    dropout_keeps,
    dropout_key_hash,
    dropout_query_hash,
    key_bounds,
    log_multiplicity,
    words_of,
)
from .forward import VARYING
from .hopper_common import (
    BYTES,
    COMPUTE_REGS,
    FETCH_REGS,
    ROWS,
    TILE,
    VARYING_STEPS,
    Lists,
    Masks,
    Ring,
    ScoreMods,
    aggregate,
    as_block,
    load_block,
    new_barriers,
    reaching,
    real_keys,
)
from .hopper_dkv import Sums, compute_dkv, modify
from .hopper_large import OF_KEYS as LARGE_KEYS
from .hopper_large import compute_alone

DS_STAGES = gl.constexpr(2)


@aggregate
class Rings:
    """Buffers of two tensors, a and b, of the side that stays and of the one that goes by. One ring of barriers serves
    both; its own buffers are those of a."""

    own: Ring
    own_b: gl.shared_memory_descriptor
    stream: Ring
    stream_b: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor


@aggregate
class HeadLists:
    """Where lists start and turn partial, for heads that follow lists of their own (OWN_LISTS). Where tiles are keys
    and some are padding (PADDING), lists of blocks without a real key are empty."""

    offsets: gl.tensor
    splits: gl.tensor
    bits: gl.tensor  # `padding.key_bits`
    OWN_LISTS: gl.constexpr
    PADDING: gl.constexpr

    @gluon.jit
    def entries(self, tile, head, lists):
        """Where the list of a query head starts, turns partial and stops: its key head's, or its own."""
        start, split, stop = tile.start, tile.split, tile.stop
        if self.OWN_LISTS:
            row = lists.list_of(tile.sample, head) * lists.num_blocks + tile.block
            start, split = gl.load(self.offsets + row), gl.load(self.splits + row)
            stop = gl.load(self.offsets + row + 1)
        if self.PADDING:
            state = gl.load(words_of(self.bits, tile.sample, tile.block, lists.num_blocks, lists.OWN_BLOCK) - 1)
            start = gl.where(state == HIDDEN, stop, start)
            split = gl.maximum(split, start)
        return start, split, stop


@gluon.jit
def _fetch(
    own_a, own_b, stream_a, stream_b, of_rows, batch, rings, lists, head_lists,
    D: gl.constexpr, D_V: gl.constexpr, OF_KEYS: gl.constexpr,
):  # fmt: skip
    own, stream = rings.own, rings.stream
    tile_heads = lists.heads // lists.group if OF_KEYS else lists.heads
    STREAM: gl.constexpr = lists.STREAM
    PARTS: gl.constexpr = lists.BLOCK // STREAM
    STREAM_BYTES: gl.constexpr = STREAM * (D + D_V) * BYTES + (2 * STREAM * 4 if OF_KEYS else 0)
    step = 0
    for turn in range(lists.turns()):
        # A tile of keys is walked by every query head of its key head, a tile of queries by its key head alone.
        first_list_head = lists.group if OF_KEYS else 1
        tile = lists.tile(turn, tile_heads, first_list_head)
        bar = own.acquire(turn, TILE * (D + D_V) * BYTES)
        for half in gl.static_range(2):
            at = [tile.sample, tile.row + half * ROWS, tile.residue, tile.head, 0]
            load_block(own_a, at, bar, as_block(own.buffers.index(half), own_a))
            load_block(own_b, at, bar, as_block(rings.own_b.index(half), own_b))
        for member in range(lists.group if OF_KEYS else 1):
            other = tile.head * lists.group + member if OF_KEYS else tile.head // lists.group
            begin, _, end = head_lists.entries(tile, other, lists)
            for i in range((end - begin) * PARTS):
                index = gl.load(lists.indices + begin + i // PARTS)
                first = index * lists.BLOCK + i % PARTS * STREAM  # in the order of blocks
                residue, row = lists.part(index, i)
                place = stream.place(step)
                bar = stream.acquire(step, STREAM_BYTES)
                if OF_KEYS:
                    of_head = tile.sample * lists.heads + other
                    load_block(of_rows, [of_head, first], bar, rings.lse.index(place))
                    of_head += batch * lists.heads
                    load_block(of_rows, [of_head, first], bar, rings.delta.index(place))
                at = [tile.sample, row, residue, other, 0]
                load_block(stream_a, at, bar, as_block(stream.buffers.index(place), stream_a))
                load_block(stream_b, at, bar, as_block(rings.stream_b.index(place), stream_b))
                step += 1


@gluon.jit
def _store(x, value, tile, row, head, seq, heads, WIDTH: gl.constexpr):
    """Rows of one head of a contiguous [batch, seq, heads, WIDTH], of a tile that may be wider."""
    lane: gl.constexpr = gl.SliceLayout(0, value.type.layout)
    column = gl.expand_dims(gl.arange(0, value.shape[1], lane), 0)
    at = ((tile.sample.to(gl.int64) * seq + row) * heads + head) * WIDTH
    mask = gl.expand_dims(row < seq, 1)
    if value.shape[1] > WIDTH:
        mask = mask & (column < WIDTH)
    gl.store(x + (gl.expand_dims(at, 1) + column), value.to(x.dtype.element_ty), mask=mask)


@gluon.jit
def _compute_dq(
    WHO: gl.constexpr, dq, lse, delta, scale_out, rings, lists, masks, mods, D: gl.constexpr, WIDTH: gl.constexpr
):  # fmt: skip
    stream = rings.stream
    STREAM: gl.constexpr = lists.STREAM
    PARTS: gl.constexpr = lists.BLOCK // STREAM
    DILATED: gl.constexpr = lists.DILATED
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STREAM, 16])  # queries × keys
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, GRADS, 2)
    HAS_CALL_MASK: gl.constexpr = masks.DOCUMENT_IDS
    HAS_SCORE_MODS: gl.constexpr = mods.SOFTCAP or mods.ALIBI
    BOUNDED: gl.constexpr = masks.ONE_INTERVAL and not (masks.HAS_RULE_IDS or HAS_CALL_MASK)
    dtype: gl.constexpr = rings.own_b.dtype
    query_lane = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    key_lane = gl.arange(0, STREAM, gl.SliceLayout(0, SCORES))
    nothing = gl.zeros([ROWS, STREAM], gl.float32, SCORES)
    q, grad = rings.own.buffers.index(WHO), rings.own_b.index(WHO)
    step = 0
    for turn in range(lists.turns()):
        tile = lists.tile(turn, lists.heads, 1)
        row = tile.row + WHO * ROWS + query_lane
        query = gl.expand_dims(lists.token(row, tile.residue), 1)
        list_id = lists.list_of(tile.sample, tile.head)
        of_head = (tile.sample.to(gl.int64) * lists.heads + tile.head) * (lists.num_blocks * lists.OWN_BLOCK)
        of_row = of_head + tile.residue * (lists.num_blocks // lists.num_residues * lists.OWN_BLOCK) + row
        row_lse, row_delta = gl.load(lse + of_row), gl.load(delta + of_row)
        first, reach = query, query
        if BOUNDED:
            first, last = key_bounds(
                query, 0, 0, masks.rules, masks.documents, masks.num_intervals, masks.seq_q, masks.seq_k,
                masks.DOCUMENTS,
            )  # fmt: skip
            first, reach = reaching(first, last)
        exp_scale, slope, query_hash = mods.scale, 0.0, query
        origin = lists.token(tile.row, tile.residue)
        if HAS_SCORE_MODS:
            exp_scale = 1.0
        if mods.ALIBI:
            slope = gl.load(mods.slopes + tile.head)
        if mods.DROPOUT:
            query_hash = dropout_query_hash(mods.seed, tile.sample * lists.heads + tile.head, query, tile.row)
            row_delta *= 1 / mods.keep_scale
        dqueries = gl.zeros([ROWS, D], gl.float32, GRADS)
        num_full, num = (lists.masked_from(tile) - tile.start) * PARTS, (tile.stop - tile.start) * PARTS
        rings.own.wait(turn)
        for MASKED in gl.static_range(2):
            if MASKED:
                low, high = num_full, num
            else:
                low, high = 0, num_full
            for i in range(low, high):
                place = stream.place(step)
                if MASKED or HAS_CALL_MASK or HAS_SCORE_MODS or mods.DROPOUT:
                    other = gl.load(lists.indices + tile.start + i // PARTS)
                multiplicity = 1
                if DILATED:
                    multiplicity = gl.load(masks.rule_ids + tile.start + i // PARTS)
                stream.wait(step)
                k, v = stream.buffers.index(place), rings.stream_b.index(place)
                pending_scores = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
                pending_dweights = warpgroup_mma(grad, v.permute((1, 0)), nothing, use_acc=False, is_async=True)
                scores = warpgroup_mma_wait(1, deps=[pending_scores])
                if mods.NEGATIVE_SCALE:
                    scores = -scores
                if HAS_SCORE_MODS or mods.DROPOUT:
                    key = lists.tokens(other, i, key_lane)
                if HAS_SCORE_MODS:
                    scores, softcap_grad = modify(scores, query, key, origin, slope, masks, mods)
                lowered = row_lse
                if DILATED:
                    lowered = row_lse - log_multiplicity(multiplicity, False)
                    if MASKED and DILATED == 2:
                        key = lists.tokens(other, i, key_lane)
                        scores = add_pair_multiplicity(
                            scores, multiplicity, query, key, list_id, masks.branches, masks.num_branches,
                            masks.seq_q, masks.seq_k, exp_scale, False,
                        )  # fmt: skip
                weights = gl.exp2(scores * exp_scale - gl.expand_dims(lowered, 1))
                if MASKED or HAS_CALL_MASK:
                    entry = tile.start + i // PARTS
                    partial = tile.start < tile.stop  # always so: see `hopper_forward`
                    if masks.PADDING and not HAS_CALL_MASK:
                        partial = entry >= tile.split
                    if partial:
                        key = lists.tokens(other, i, key_lane)
                        seen = masks.allowed(
                            key, query, key, first, reach, entry, tile.split, tile.stop, tile.sample,
                            BOUNDED, MASKED, masks.PADDING and HAS_CALL_MASK,
                        )  # fmt: skip
                        weights = gl.where(seen, weights, 0.0)
                    if MASKED and masks.PADDING:
                        weights = gl.where(real_keys(masks.padding, tile, other, i, key_lane, lists), weights, 0.0)
                if mods.SOFTCAP:
                    weights *= softcap_grad
                dweights = warpgroup_mma_wait(0, deps=[pending_dweights])
                if mods.DROPOUT:
                    key_hash = dropout_key_hash(mods.seed, key, other * lists.BLOCK)
                    dweights = gl.where(dropout_keeps(query_hash, key_hash, mods.threshold), dweights, 0.0)
                dscores = weights * (dweights - gl.expand_dims(row_delta, 1))
                pending_dqueries = warpgroup_mma(
                    gl.convert_layout(dscores.to(dtype), OPERAND), k, dqueries, is_async=True
                )
                dqueries = warpgroup_mma_wait(0, deps=[pending_dqueries])
                stream.release(step)
                step += 1
        rings.own.release(turn)
        lane = gl.arange(0, ROWS, gl.SliceLayout(1, GRADS))
        token = lists.token(tile.row + WHO * ROWS + lane, tile.residue)
        if mods.DROPOUT:
            dqueries = dqueries * mods.keep_scale
        _store(dq, dqueries * scale_out, tile, token, tile.head, masks.seq_q, lists.heads, WIDTH)


@gluon.jit(do_not_specialize=[*VARYING, *VARYING_STEPS])
def backward_kernel(
    q, k, v, grad, of_rows, dk, dv, dq, lse, delta,
    offsets, splits, indices, rule_ids, work, rules, documents, branches, padding, document_ids, seed, slopes,
    batch, heads, group, seq_q, seq_k, num_blocks, lists_per_sample, heads_per_list, num_intervals, num_branches,
    num_residues, total_tiles, tiles_per_head, first_tile, tile_order, walked,
    scale, scale_out, cap, threshold, keep_scale,
    D: gl.constexpr, D_V: gl.constexpr, WIDTH: gl.constexpr,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, STREAM: gl.constexpr, NUM_STAGES: gl.constexpr,
    NEGATIVE_SCALE: gl.constexpr, HAS_RULE_IDS: gl.constexpr, ONE_INTERVAL: gl.constexpr, DOCUMENTS: gl.constexpr,
    PADDING: gl.constexpr, DOCUMENT_IDS: gl.constexpr, DILATED: gl.constexpr, SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr, DROPOUT: gl.constexpr, OWN_LISTS: gl.constexpr, OF_KEYS: gl.constexpr,
    ALONE: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """dk and dv (OF_KEYS; the lists are those by key), one of them where it is ALONE (`hopper_large`), or dq.

    `q`, `k`, `v` and `grad` are descriptors, and `of_rows` one of `lse` and `delta` together. D and D_V are the widths
    of boxes, WIDTH that of a head of q.
    """
    OWN_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], q.dtype)
    OWN_LAYOUT_V: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D_V], q.dtype)
    STREAM_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STREAM, D], q.dtype)
    STREAM_LAYOUT_V: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STREAM, D_V], q.dtype)
    own_a = gl.allocate_shared_memory(q.dtype, [2, ROWS, D], OWN_LAYOUT)
    own_b = gl.allocate_shared_memory(q.dtype, [2, ROWS, D_V], OWN_LAYOUT_V)
    stream_a = gl.allocate_shared_memory(q.dtype, [NUM_STAGES, STREAM, D], STREAM_LAYOUT)
    stream_b = gl.allocate_shared_memory(q.dtype, [NUM_STAGES, STREAM, D_V], STREAM_LAYOUT_V)
    lse_rows = gl.allocate_shared_memory(gl.float32, [NUM_STAGES, 1, STREAM], of_rows.layout)
    delta_rows = gl.allocate_shared_memory(gl.float32, [NUM_STAGES, 1, STREAM], of_rows.layout)
    own = Ring(own_a, new_barriers(1), new_barriers(1), gl.constexpr(1))
    stream = Ring(stream_a, new_barriers(NUM_STAGES), new_barriers(NUM_STAGES), NUM_STAGES)
    own.init(0)
    for place in gl.static_range(NUM_STAGES):
        stream.init(place)
    rings = Rings(own, own_b, stream, stream_b, lse_rows, delta_rows)
    sums = Sums(own, own_a, SUMS)  # unused
    if OF_KEYS and not ALONE:
        STAGE_WIDTH: gl.constexpr = max(D, D_V, 128)
        STAGE_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, STAGE_WIDTH], q.dtype)
        stage = gl.allocate_shared_memory(q.dtype, [2, ROWS, STAGE_WIDTH], STAGE_LAYOUT)
        ds = own
        if SUMS:
            DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, STREAM], q.dtype)
            of_ds = gl.allocate_shared_memory(q.dtype, [2 * DS_STAGES, ROWS, STREAM], DS_LAYOUT)
            ds = Ring(of_ds, new_barriers(DS_STAGES), new_barriers(DS_STAGES), DS_STAGES)
            for place in gl.static_range(DS_STAGES):
                ds.init(place, 2)
        sums = Sums(ds, stage, SUMS)
    OWN_BLOCK: gl.constexpr = BLOCK_K if OF_KEYS else BLOCK_Q
    BLOCK: gl.constexpr = BLOCK_Q if OF_KEYS else BLOCK_K
    lists = Lists(
        indices, work, heads, group, num_blocks, lists_per_sample, heads_per_list, num_residues, walked,
        (total_tiles, tiles_per_head, first_tile, tile_order), OWN_BLOCK, BLOCK, STREAM, DILATED,
        PADDING and not OF_KEYS,
    )  # fmt: skip
    head_lists = HeadLists(offsets, splits, padding, OWN_LISTS and OF_KEYS, PADDING and OF_KEYS)
    masks = Masks(
        rule_ids, rules, documents, branches, padding, document_ids, seq_q, seq_k, num_intervals, num_branches,
        HAS_RULE_IDS, ONE_INTERVAL, DOCUMENTS, PADDING, DOCUMENT_IDS,
    )  # fmt: skip
    mods = ScoreMods(scale, cap, slopes, seed, threshold, keep_scale, NEGATIVE_SCALE, SOFTCAP, ALIBI, DROPOUT)
    if OF_KEYS and ALONE:
        of_k: gl.constexpr = ALONE == LARGE_KEYS
        out = dk if of_k else dv
        WIDTH_OUT: gl.constexpr = D if of_k else D_V
        gl.warp_specialize([
            (compute_alone, (0, out, scale_out, rings, lists, head_lists, masks, mods, WIDTH_OUT, ALONE)),
            (compute_alone, (1, out, scale_out, rings, lists, head_lists, masks, mods, WIDTH_OUT, ALONE)),
            (_fetch, (k, v, q, grad, of_rows, batch, rings, lists, head_lists, D, D_V, True)),
        ], [4, 1], [COMPUTE_REGS, FETCH_REGS])  # fmt: skip
    elif OF_KEYS:
        gl.warp_specialize([
            (compute_dkv, (0, dk, dv, dq, scale_out, rings, sums, lists, head_lists, masks, mods, D, D_V)),
            (compute_dkv, (1, dk, dv, dq, scale_out, rings, sums, lists, head_lists, masks, mods, D, D_V)),
            (_fetch, (k, v, q, grad, of_rows, batch, rings, lists, head_lists, D, D_V, True)),
        ], [4, 1], [COMPUTE_REGS, FETCH_REGS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_compute_dq, (0, dq, lse, delta, scale_out, rings, lists, masks, mods, D, WIDTH)),
            (_compute_dq, (1, dq, lse, delta, scale_out, rings, lists, masks, mods, D, WIDTH)),
            (_fetch, (q, grad, k, v, of_rows, batch, rings, lists, head_lists, D, D_V, False)),
        ], [4, 1], [COMPUTE_REGS, FETCH_REGS])  # fmt: skip
