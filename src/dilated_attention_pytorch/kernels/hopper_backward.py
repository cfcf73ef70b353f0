"""The backward kernels for Hopper, warp-specialised in Gluon: the twins of those in `backward.py`.

As in `hopper_forward`, a program keeps its multiprocessor, one warp fetches and two warpgroups compute. Each warpgroup
owns 64 of a tile's 128 rows (keys for dk and dv, queries for dq), which stay in shared memory while the other side goes
by in tiles of `STREAM` rows; two tensors each: (k, v) and (q, dout), or the other way round.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .common import (
    add_pair_multiplicity,
    apply_score_mods,
    dropout_keeps,
    dropout_key_hash,
    dropout_query_hash,
    key_bounds,
    list_of,
    log_multiplicity,
    query_bounds,
    signed_distance,
)
from .forward import VARYING
from .hopper_forward import (
    BYTES,
    RENAMED,
    ROWS,
    TILE,
    VARYING_STEPS,
    as_block,
    load_block,
    pairs_seen,
    reaching,
    split_residue,
    tile_of,
    token_of,
    tokens_of,
)
from .tile_scheduler import num_turns


@gluon.jit
def _row_of(sample, head, block, start, split, stop, offsets, splits, num_blocks, lists_per_sample, heads_per_list,
            OWN_LISTS: gl.constexpr):  # fmt: skip
    """Where the list of a query head starts, turns partial and stops: its key head's, unless heads have their own."""
    if OWN_LISTS:
        row = list_of(sample, head, lists_per_sample, heads_per_list) * num_blocks + block
        start, split, stop = gl.load(offsets + row), gl.load(splits + row), gl.load(offsets + row + 1)
    return start, split, stop


@gluon.jit
def _fetch(
    own_a, own_b, stream_a, stream_b, of_rows, buffers, barriers, lists, steps,
    D: gl.constexpr, OWN_BLOCK: gl.constexpr, BLOCK: gl.constexpr, STREAM: gl.constexpr, NUM_STAGES: gl.constexpr,
    OWN_LISTS: gl.constexpr, OF_KEYS: gl.constexpr, DILATED: gl.constexpr,
):  # fmt: skip
    own_buffers_a, own_buffers_b, stream_buffers_a, stream_buffers_b, lse_buffers, delta_buffers = buffers
    own_ready, own_empty, ready, empty = barriers
    (
        offsets, splits, indices, work, batch, heads, group, num_blocks, lists_per_sample, heads_per_list,
        schedule, num_residues, walked,
    ) = lists  # fmt: skip
    own_step_a, own_step_b, step_a, step_b = steps
    tile_heads = heads // group if OF_KEYS else heads
    TILES_PER_BLOCK: gl.constexpr = BLOCK // STREAM
    step = 0
    for turn in range(num_turns(schedule)):
        # A tile of keys is walked by every query head of its key head, a tile of queries by its key head alone.
        first_list_head = group if OF_KEYS else 1
        sample, head, residue, own, block, start, split, stop = tile_of(
            turn, schedule, work, tile_heads, num_blocks, num_residues,
            lists_per_sample, heads_per_list, first_list_head, OWN_BLOCK, DILATED,
        )  # fmt: skip
        mbarrier.wait(own_empty, (turn & 1) ^ 1)
        mbarrier.expect(own_ready, 2 * TILE * D * BYTES)
        for half in gl.static_range(2):
            row, column = own + half * ROWS, head * D
            at = [sample, row, column + residue * own_step_a]
            load_block(own_a, at, own_ready, as_block(own_buffers_a.index(half), own_a))
            at = [sample, row, column + residue * own_step_b]
            load_block(own_b, at, own_ready, as_block(own_buffers_b.index(half), own_b))
        for member in range(group if OF_KEYS else 1):
            other = head * group + member if OF_KEYS else head // group
            begin, _, end = _row_of(
                sample, other, block, start, split, stop, offsets, splits, num_blocks, lists_per_sample, heads_per_list,
                OWN_LISTS,
            )  # fmt: skip
            for i in range((end - begin) * TILES_PER_BLOCK):
                index = gl.load(indices + begin + i // TILES_PER_BLOCK)
                first = index * BLOCK + i % TILES_PER_BLOCK * STREAM  # in the order of blocks
                other_residue, row = split_residue(index, walked, DILATED)
                row = row * BLOCK + i % TILES_PER_BLOCK * STREAM
                place = step % NUM_STAGES
                bar = ready.index(place)
                mbarrier.wait(empty.index(place), (step // NUM_STAGES & 1) ^ 1)
                if OF_KEYS:
                    mbarrier.expect(bar, 2 * STREAM * D * BYTES + 2 * STREAM * 4)
                    of_head = sample * heads + other
                    load_block(of_rows, [of_head, first], bar, lse_buffers.index(place))
                    of_head += batch * heads
                    load_block(of_rows, [of_head, first], bar, delta_buffers.index(place))
                else:
                    mbarrier.expect(bar, 2 * STREAM * D * BYTES)
                at = [sample, row, other * D + other_residue * step_a]
                load_block(stream_a, at, bar, as_block(stream_buffers_a.index(place), stream_a))
                at = [sample, row, other * D + other_residue * step_b]
                load_block(stream_b, at, bar, as_block(stream_buffers_b.index(place), stream_b))
                step += 1


@gluon.jit
def as_row(buffer):
    """A buffer [1, n] as [n]."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if RENAMED:
        row = buffer.reinterpret(buffer.dtype, [buffer.shape[1]], layout)
    else:
        row = buffer._reinterpret(buffer.dtype, [buffer.shape[1]], layout)
    return row


@gluon.jit
def _store(x, value, sample, row, head, seq, heads, column, D: gl.constexpr):
    """Rows of one head of a contiguous [batch, seq, heads, D]."""
    at = ((sample.to(gl.int64) * seq + row) * heads + head) * D
    at = gl.expand_dims(at, 1) + gl.expand_dims(column, 0)
    gl.store(x + at, value.to(x.dtype.element_ty), mask=gl.expand_dims(row < seq, 1))


@gluon.jit
def _compute_dkv(
    WHO: gl.constexpr, dk, dv, buffers, barriers, masks, lists, numbers,
    D: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, STREAM: gl.constexpr, NUM_STAGES: gl.constexpr,
    NEGATIVE_SCALE: gl.constexpr, HAS_RULE_IDS: gl.constexpr, ONE_INTERVAL: gl.constexpr, DOCUMENTS: gl.constexpr,
    PADDING: gl.constexpr, DOCUMENT_IDS: gl.constexpr, DILATED: gl.constexpr, SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr, DROPOUT: gl.constexpr, OWN_LISTS: gl.constexpr,
):  # fmt: skip
    k_buffers, v_buffers, q_buffers, g_buffers, lse_buffers, delta_buffers = buffers
    own_ready, own_empty, ready, empty = barriers
    rule_ids, rules, documents, branches, padding, document_ids, seed, slopes = masks
    (
        offsets, splits, indices, work, batch, heads, group, num_blocks, lists_per_sample, heads_per_list,
        schedule, num_residues, walked,
    ) = lists  # fmt: skip
    seq_q, seq_k, num_intervals, num_branches, scale, scale_out, cap, threshold, keep_scale = numbers
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STREAM, 16])  # keys × queries
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, GRADS, 2)
    TILES_PER_BLOCK: gl.constexpr = BLOCK_Q // STREAM
    HAS_CALL_MASK: gl.constexpr = PADDING or DOCUMENT_IDS
    HAS_SCORE_MODS: gl.constexpr = SOFTCAP or ALIBI
    # A key is seen by `reach` queries after `first` too, whatever the block.
    BOUNDED: gl.constexpr = ONE_INTERVAL and not (HAS_RULE_IDS or DOCUMENTS or HAS_CALL_MASK)
    dtype: gl.constexpr = k_buffers.dtype
    heads_kv = heads // group
    key_lane = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    query_lane = gl.arange(0, STREAM, gl.SliceLayout(0, SCORES))
    nothing = gl.zeros([ROWS, STREAM], gl.float32, SCORES)
    k, v = k_buffers.index(WHO), v_buffers.index(WHO)
    step = 0
    for turn in range(num_turns(schedule)):
        sample, key_head, residue, own, block, start, split, stop = tile_of(
            turn, schedule, work, heads_kv, num_blocks, num_residues,
            lists_per_sample, heads_per_list, group, BLOCK_K, DILATED,
        )  # fmt: skip
        key = gl.expand_dims(token_of(own + WHO * ROWS + key_lane, residue, num_residues, DILATED), 1)
        first, reach = key, key
        if BOUNDED:
            first, last = query_bounds(key, rules, seq_q, seq_k)
            first, reach = reaching(first, last)
        origin, key_hash = token_of(own, residue, num_residues, DILATED) - (seq_k - seq_q), key
        if DROPOUT:
            key_hash = dropout_key_hash(seed, key, own)
        dkeys = gl.zeros([ROWS, D], gl.float32, GRADS)
        dvalues = gl.zeros([ROWS, D], gl.float32, GRADS)
        mbarrier.wait(own_ready, turn & 1)
        for member in range(group):
            head = key_head * group + member
            begin, turns_partial, end = _row_of(
                sample, head, block, start, split, stop, offsets, splits, num_blocks, lists_per_sample, heads_per_list,
                OWN_LISTS,
            )  # fmt: skip
            list_id = list_of(sample, head, lists_per_sample, heads_per_list)
            exp_scale, slope = scale, 0.0
            if HAS_SCORE_MODS:
                exp_scale = 1.0
            if ALIBI:
                slope = gl.load(slopes + head)
            num_full, num = (turns_partial - begin) * TILES_PER_BLOCK, (end - begin) * TILES_PER_BLOCK
            for MASKED in gl.static_range(2):
                if MASKED:
                    low, high = num_full, num
                else:
                    low, high = 0, num_full
                for i in range(low, high):
                    place = step % NUM_STAGES
                    # Asked for now, read when the scores are there.
                    if MASKED or HAS_CALL_MASK or HAS_SCORE_MODS or DROPOUT:
                        other = gl.load(indices + begin + i // TILES_PER_BLOCK)
                    multiplicity = 1
                    if DILATED:
                        multiplicity = gl.load(rule_ids + begin + i // TILES_PER_BLOCK)
                    mbarrier.wait(ready.index(place), step // NUM_STAGES & 1)
                    q, grad = q_buffers.index(place), g_buffers.index(place)
                    pending_scores = warpgroup_mma(k, q.permute((1, 0)), nothing, use_acc=False, is_async=True)
                    pending_dweights = warpgroup_mma(v, grad.permute((1, 0)), nothing, use_acc=False, is_async=True)
                    scores = warpgroup_mma_wait(1, deps=[pending_scores])
                    if NEGATIVE_SCALE:
                        scores = -scores
                    if HAS_SCORE_MODS or DROPOUT:
                        query = tokens_of(other, i, query_lane, walked, num_residues, BLOCK_Q, STREAM, DILATED)
                    if HAS_SCORE_MODS:
                        scores = scores * scale
                        distance = signed_distance(query, key, origin, seq_q, seq_k)
                        scores, softcap_grad = apply_score_mods(scores, distance, slope, cap, SOFTCAP, ALIBI, False)
                    row_lse = as_row(lse_buffers.index(place)).load(gl.SliceLayout(0, SCORES))
                    if DILATED:
                        row_lse = row_lse - log_multiplicity(multiplicity, False)
                        if MASKED and DILATED == 2:
                            query = tokens_of(other, i, query_lane, walked, num_residues, BLOCK_Q, STREAM, DILATED)
                            scores = add_pair_multiplicity(
                                scores,
                                multiplicity,
                                query,
                                key,
                                list_id,
                                branches,
                                num_branches,
                                seq_q,
                                seq_k,
                                exp_scale,
                                False,
                            )
                    weights = gl.exp2(scores * exp_scale - gl.expand_dims(row_lse, 0))
                    if MASKED or HAS_CALL_MASK:  # noqa: SIM102
                        if begin < end:  # always so: see `hopper_forward`
                            query = tokens_of(other, i, query_lane, walked, num_residues, BLOCK_Q, STREAM, DILATED)
                            seen = pairs_seen(
                                query, query, key, first, reach, begin + i // TILES_PER_BLOCK, turns_partial, end,
                                sample, rule_ids, rules, documents, padding, document_ids, num_intervals, seq_q, seq_k,
                                BOUNDED, MASKED, False, HAS_RULE_IDS, ONE_INTERVAL, DOCUMENTS, PADDING, DOCUMENT_IDS,
                            )  # fmt: skip
                            weights = gl.where(seen, weights, 0.0)
                    dropped = weights
                    if DROPOUT:
                        if begin < end:
                            query_hash = dropout_query_hash(seed, sample * heads + head, query, other * BLOCK_Q)
                            # The sign says whether a weight is kept: a mask would be packed until it is used again.
                            weights = gl.where(dropout_keeps(query_hash, key_hash, threshold), weights, -weights)
                        dropped = gl.where(weights < 0.0, 0.0, weights)  # NaN is not lost
                    operand = gl.convert_layout(dropped.to(dtype), OPERAND)
                    if SOFTCAP:
                        weights *= softcap_grad
                    row_delta = as_row(delta_buffers.index(place)).load(gl.SliceLayout(0, SCORES))
                    dweights = warpgroup_mma_wait(0, deps=[pending_dweights])
                    if DROPOUT:
                        dweights = gl.where(weights > 0.0, dweights, 0.0)
                        weights = gl.abs(weights)
                        row_delta *= 1 / keep_scale
                    pending_dvalues = warpgroup_mma(operand, grad, dvalues, is_async=True)
                    dscores = weights * (dweights - gl.expand_dims(row_delta, 0))
                    pending_dkeys = warpgroup_mma(
                        gl.convert_layout(dscores.to(dtype), OPERAND), q, dkeys, is_async=True
                    )
                    dvalues, dkeys = warpgroup_mma_wait(0, deps=[pending_dvalues, pending_dkeys])
                    mbarrier.arrive(empty.index(place), count=1)
                    step += 1
        mbarrier.arrive(own_empty, count=1)
        lane = gl.arange(0, ROWS, gl.SliceLayout(1, GRADS))
        column = gl.arange(0, D, gl.SliceLayout(0, GRADS))
        token = token_of(own + WHO * ROWS + lane, residue, num_residues, DILATED)
        if DROPOUT:  # what all dropout_keeps weights are multiplied by
            dkeys, dvalues = dkeys * keep_scale, dvalues * keep_scale
        _store(dk, dkeys * scale_out, sample, token, key_head, seq_k, heads_kv, column, D)
        _store(dv, dvalues, sample, token, key_head, seq_k, heads_kv, column, D)


@gluon.jit
def _compute_dq(
    WHO: gl.constexpr, dq, lse, delta, buffers, barriers, masks, lists, numbers,
    D: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, STREAM: gl.constexpr, NUM_STAGES: gl.constexpr,
    NEGATIVE_SCALE: gl.constexpr, HAS_RULE_IDS: gl.constexpr, ONE_INTERVAL: gl.constexpr, DOCUMENTS: gl.constexpr,
    PADDING: gl.constexpr, DOCUMENT_IDS: gl.constexpr, DILATED: gl.constexpr, SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    q_buffers, g_buffers, k_buffers, v_buffers, lse_buffers, delta_buffers = buffers
    own_ready, own_empty, ready, empty = barriers
    rule_ids, rules, documents, branches, padding, document_ids, seed, slopes = masks
    (
        offsets, splits, indices, work, batch, heads, group, num_blocks, lists_per_sample, heads_per_list,
        schedule, num_residues, walked,
    ) = lists  # fmt: skip
    seq_q, seq_k, num_intervals, num_branches, scale, scale_out, cap, threshold, keep_scale = numbers
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STREAM, 16])  # queries × keys
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, GRADS, 2)
    TILES_PER_BLOCK: gl.constexpr = BLOCK_K // STREAM
    HAS_CALL_MASK: gl.constexpr = PADDING or DOCUMENT_IDS
    HAS_SCORE_MODS: gl.constexpr = SOFTCAP or ALIBI
    BOUNDED: gl.constexpr = ONE_INTERVAL and not (HAS_RULE_IDS or HAS_CALL_MASK)
    dtype: gl.constexpr = q_buffers.dtype
    query_lane = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    key_lane = gl.arange(0, STREAM, gl.SliceLayout(0, SCORES))
    nothing = gl.zeros([ROWS, STREAM], gl.float32, SCORES)
    q, grad = q_buffers.index(WHO), g_buffers.index(WHO)
    step = 0
    for turn in range(num_turns(schedule)):
        sample, head, residue, own, _, start, split, stop = tile_of(
            turn, schedule, work, heads, num_blocks, num_residues, lists_per_sample, heads_per_list, 1, BLOCK_Q, DILATED
        )
        row = own + WHO * ROWS + query_lane
        query = gl.expand_dims(token_of(row, residue, num_residues, DILATED), 1)
        list_id = list_of(sample, head, lists_per_sample, heads_per_list)
        of_head = (sample.to(gl.int64) * heads + head) * (num_blocks * BLOCK_Q)
        of_row = of_head + residue * (num_blocks // num_residues * BLOCK_Q) + row
        row_lse, row_delta = gl.load(lse + of_row), gl.load(delta + of_row)
        first, reach = query, query
        if BOUNDED:
            first, last = key_bounds(query, 0, 0, rules, documents, num_intervals, seq_q, seq_k, DOCUMENTS)
            first, reach = reaching(first, last)
        exp_scale, slope, query_hash = scale, 0.0, query
        origin = token_of(own, residue, num_residues, DILATED)
        if HAS_SCORE_MODS:
            exp_scale = 1.0
        if ALIBI:
            slope = gl.load(slopes + head)
        if DROPOUT:
            query_hash = dropout_query_hash(seed, sample * heads + head, query, own)
            row_delta *= 1 / keep_scale
        dqueries = gl.zeros([ROWS, D], gl.float32, GRADS)
        num_full, num = (split - start) * TILES_PER_BLOCK, (stop - start) * TILES_PER_BLOCK
        mbarrier.wait(own_ready, turn & 1)
        for MASKED in gl.static_range(2):
            if MASKED:
                low, high = num_full, num
            else:
                low, high = 0, num_full
            for i in range(low, high):
                place = step % NUM_STAGES
                if MASKED or HAS_CALL_MASK or HAS_SCORE_MODS or DROPOUT:
                    other = gl.load(indices + start + i // TILES_PER_BLOCK)
                multiplicity = 1
                if DILATED:
                    multiplicity = gl.load(rule_ids + start + i // TILES_PER_BLOCK)
                mbarrier.wait(ready.index(place), step // NUM_STAGES & 1)
                k, v = k_buffers.index(place), v_buffers.index(place)
                pending_scores = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
                pending_dweights = warpgroup_mma(grad, v.permute((1, 0)), nothing, use_acc=False, is_async=True)
                scores = warpgroup_mma_wait(1, deps=[pending_scores])
                if NEGATIVE_SCALE:
                    scores = -scores
                if HAS_SCORE_MODS or DROPOUT:
                    key = tokens_of(other, i, key_lane, walked, num_residues, BLOCK_K, STREAM, DILATED)
                if HAS_SCORE_MODS:
                    scores = scores * scale
                    distance = signed_distance(query, key, origin, seq_q, seq_k)
                    scores, softcap_grad = apply_score_mods(scores, distance, slope, cap, SOFTCAP, ALIBI, False)
                lowered = row_lse
                if DILATED:
                    lowered = row_lse - log_multiplicity(multiplicity, False)
                    if MASKED and DILATED == 2:
                        key = tokens_of(other, i, key_lane, walked, num_residues, BLOCK_K, STREAM, DILATED)
                        scores = add_pair_multiplicity(
                            scores,
                            multiplicity,
                            query,
                            key,
                            list_id,
                            branches,
                            num_branches,
                            seq_q,
                            seq_k,
                            exp_scale,
                            False,
                        )
                weights = gl.exp2(scores * exp_scale - gl.expand_dims(lowered, 1))
                if MASKED or HAS_CALL_MASK:  # noqa: SIM102
                    if start < stop:
                        key = tokens_of(other, i, key_lane, walked, num_residues, BLOCK_K, STREAM, DILATED)
                        seen = pairs_seen(
                            key, query, key, first, reach, start + i // TILES_PER_BLOCK, split, stop, sample,
                            rule_ids, rules, documents, padding, document_ids, num_intervals, seq_q, seq_k,
                            BOUNDED, MASKED, False, HAS_RULE_IDS, ONE_INTERVAL, DOCUMENTS, PADDING, DOCUMENT_IDS,
                        )  # fmt: skip
                        weights = gl.where(seen, weights, 0.0)
                if SOFTCAP:
                    weights *= softcap_grad
                dweights = warpgroup_mma_wait(0, deps=[pending_dweights])
                if DROPOUT:
                    keeps = dropout_keeps(query_hash, dropout_key_hash(seed, key, other * BLOCK_K), threshold)
                    dweights = gl.where(keeps, dweights, 0.0)
                dscores = weights * (dweights - gl.expand_dims(row_delta, 1))
                pending_dqueries = warpgroup_mma(
                    gl.convert_layout(dscores.to(dtype), OPERAND), k, dqueries, is_async=True
                )
                dqueries = warpgroup_mma_wait(0, deps=[pending_dqueries])
                mbarrier.arrive(empty.index(place), count=1)
                step += 1
        mbarrier.arrive(own_empty, count=1)
        lane = gl.arange(0, ROWS, gl.SliceLayout(1, GRADS))
        column = gl.arange(0, D, gl.SliceLayout(0, GRADS))
        token = token_of(own + WHO * ROWS + lane, residue, num_residues, DILATED)
        if DROPOUT:
            dqueries = dqueries * keep_scale
        _store(dq, dqueries * scale_out, sample, token, head, seq_q, heads, column, D)


@gluon.jit(do_not_specialize=[*VARYING, *VARYING_STEPS])
def backward_kernel(
    q, k, v, grad, of_rows, lse, delta, dq, dk, dv,
    offsets, splits, indices, rule_ids, work, rules, documents, branches, padding, document_ids, seed, slopes,
    batch, heads, group, seq_q, seq_k, num_blocks, lists_per_sample, heads_per_list, num_intervals, num_branches,
    num_residues, total_tiles, tiles_per_head, first_tile, tile_order, walked, q_step, k_step, v_step, g_step,
    scale, scale_out, cap, threshold, keep_scale,
    D: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, STREAM: gl.constexpr, NUM_STAGES: gl.constexpr,
    NEGATIVE_SCALE: gl.constexpr, HAS_RULE_IDS: gl.constexpr, ONE_INTERVAL: gl.constexpr, DOCUMENTS: gl.constexpr,
    PADDING: gl.constexpr, DOCUMENT_IDS: gl.constexpr, DILATED: gl.constexpr, SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr, DROPOUT: gl.constexpr, OWN_LISTS: gl.constexpr, OF_KEYS: gl.constexpr,
):  # fmt: skip
    """dk and dv (OF_KEYS; the lists are those by key) or dq.

    `q`, `k`, `v` and `grad` are descriptors, and `of_rows` one of `lse` and `delta` together.
    """
    OWN_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], q.dtype)
    STREAM_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([STREAM, D], q.dtype)
    own_buffers_a = gl.allocate_shared_memory(q.dtype, [2, ROWS, D], OWN_LAYOUT)
    own_buffers_b = gl.allocate_shared_memory(q.dtype, [2, ROWS, D], OWN_LAYOUT)
    stream_buffers_a = gl.allocate_shared_memory(q.dtype, [NUM_STAGES, STREAM, D], STREAM_LAYOUT)
    stream_buffers_b = gl.allocate_shared_memory(q.dtype, [NUM_STAGES, STREAM, D], STREAM_LAYOUT)
    lse_buffers = gl.allocate_shared_memory(gl.float32, [NUM_STAGES, 1, STREAM], of_rows.layout)
    delta_buffers = gl.allocate_shared_memory(gl.float32, [NUM_STAGES, 1, STREAM], of_rows.layout)
    own_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    own_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(own_ready, count=1)
    mbarrier.init(own_empty, count=2)
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    buffers = (own_buffers_a, own_buffers_b, stream_buffers_a, stream_buffers_b, lse_buffers, delta_buffers)
    barriers = (own_ready, own_empty, ready, empty)
    masks = (rule_ids, rules, documents, branches, padding, document_ids, seed, slopes)
    lists = (
        offsets, splits, indices, work, batch, heads, group, num_blocks, lists_per_sample, heads_per_list,
        (total_tiles, tiles_per_head, first_tile, tile_order), num_residues, walked,
    )  # fmt: skip
    numbers = (seq_q, seq_k, num_intervals, num_branches, scale, scale_out, cap, threshold, keep_scale)
    if OF_KEYS:
        gl.warp_specialize([
            (_compute_dkv, (
                0, dk, dv, buffers, barriers, masks, lists, numbers, D, BLOCK_Q, BLOCK_K, STREAM, NUM_STAGES,
                NEGATIVE_SCALE, HAS_RULE_IDS, ONE_INTERVAL, DOCUMENTS, PADDING, DOCUMENT_IDS, DILATED, SOFTCAP, ALIBI,
                DROPOUT, OWN_LISTS,
            )),
            (_compute_dkv, (
                1, dk, dv, buffers, barriers, masks, lists, numbers, D, BLOCK_Q, BLOCK_K, STREAM, NUM_STAGES,
                NEGATIVE_SCALE, HAS_RULE_IDS, ONE_INTERVAL, DOCUMENTS, PADDING, DOCUMENT_IDS, DILATED, SOFTCAP, ALIBI,
                DROPOUT, OWN_LISTS,
            )),
            (_fetch, (
                k, v, q, grad, of_rows, buffers, barriers, lists, (k_step, v_step, q_step, g_step),
                D, BLOCK_K, BLOCK_Q, STREAM, NUM_STAGES, OWN_LISTS, True, DILATED,
            )),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_compute_dq, (
                0, dq, lse, delta, buffers, barriers, masks, lists, numbers, D, BLOCK_Q, BLOCK_K, STREAM, NUM_STAGES,
                NEGATIVE_SCALE, HAS_RULE_IDS, ONE_INTERVAL, DOCUMENTS, PADDING, DOCUMENT_IDS, DILATED, SOFTCAP, ALIBI,
                DROPOUT,
            )),
            (_compute_dq, (
                1, dq, lse, delta, buffers, barriers, masks, lists, numbers, D, BLOCK_Q, BLOCK_K, STREAM, NUM_STAGES,
                NEGATIVE_SCALE, HAS_RULE_IDS, ONE_INTERVAL, DOCUMENTS, PADDING, DOCUMENT_IDS, DILATED, SOFTCAP, ALIBI,
                DROPOUT,
            )),
            (_fetch, (
                q, grad, k, v, of_rows, buffers, barriers, lists, (q_step, g_step, k_step, v_step),
                D, BLOCK_Q, BLOCK_K, STREAM, NUM_STAGES, False, False, DILATED,
            )),
        ], [4, 1], [240, 24])  # fmt: skip
