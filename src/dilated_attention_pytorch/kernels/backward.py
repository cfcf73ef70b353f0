"""The backward kernels: dq by rows of the layout, dk and dv by its columns. No sums in free
order: bitwise reproducible.

The weights are computed again from the scores and lse. `rows_kernel` makes lse, in the units of the scores, and delta
for whole blocks; with delta = Σ out · dout − dlse, a row's score gradients are weights · (dout · value − delta).
"""

import triton
import triton.language as tl

from .bias import SLOPES, add_gradients, bias_of_pairs
from .common import (
    HIDDEN,
    LOG2E,
    UNIT,
    apply_multiplicity,
    apply_score_mods,
    count_tiles,
    dropout_keeps,
    dropout_key_hash,
    dropout_query_hash,
    list_of,
    load_masked_from,
    load_rows,
    load_tile,
    load_work,
    padded_length,
    pairs_allowed,
    signed_distance,
    store_rows,
    tile_at,
    token_at,
    walked_rows,
    walked_units,
    words_of,
)
from .forward import VARYING, exponential


@triton.jit(do_not_specialize=["heads", "seq_q", "padded_q", "num_residues"])
def rows_kernel(
    out, grad, dlse, lse, row_lse, delta, sums, g_b, g_s, g_h, heads, seq_q, padded_q, num_residues,
    D: tl.constexpr, PADDED_D: tl.constexpr, TILE: tl.constexpr, BASE_E: tl.constexpr, DLSE: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """What the other kernels need of each row, for a tile of queries of one head: lse in their units, and delta.

    It is stored in the order of blocks. Rows without keys, and those that fill up the last block, get +inf, so that no
    weight comes of them, and 0.
    """
    num_tiles = padded_q // TILE
    head_id = tl.program_id(0) // num_tiles
    sample, head = (head_id // heads).to(tl.int64), head_id % heads
    place = tl.program_id(0) % num_tiles * TILE + tl.arange(0, TILE)
    query = place % (padded_q // num_residues) * num_residues + place // (padded_q // num_residues)
    valid = query < seq_q
    outs = load_rows(out + (sample * seq_q * heads + head) * D, query, heads * D, valid, D, PADDED_D)
    grads = load_rows(grad + sample * g_b + head.to(tl.int64) * g_h, query, g_s, valid, D, PADDED_D)
    at = (sample * heads + head) * seq_q + query
    value = tl.sum(outs.to(tl.float32) * grads.to(tl.float32), 1)
    if DLSE:
        value -= tl.load(dlse + at, mask=valid, other=0.0)
    natural = tl.load(lse + at, mask=valid, other=float("-inf"))
    empty = natural == float("-inf")
    at = (sample * heads + head) * padded_q + place
    tl.store(row_lse + at, tl.where(empty, float("inf"), natural if BASE_E else natural * LOG2E))
    tl.store(delta + at, tl.where(empty, 0.0, value))
    if SUMS:  # what another kernel adds dq to, so many numbers a row
        lane = tl.arange(0, TILE * SUMS)
        of_tile = (sample * heads + head) * padded_q + tl.program_id(0) % num_tiles * TILE
        tl.store(sums + of_tile * SUMS + lane, tl.zeros([TILE * SUMS], tl.float32))


@triton.jit
def sums_in_order(numbers):
    """64 queries × 64 columns of dq from [8, 128, 4] as the threads of a warpgroup of Hopper add them up: 8 columns at
    a time, 4 numbers a thread; a thread has the columns 2 · (thread % 4) and the next, of row thread // 4 of the 16 of
    its warp and of the eighth row after it."""
    threads = tl.reshape(numbers, [8, 4, 8, 4, 2, 2])  # columns / 8, warp, row, column / 2, row / 8, column
    return tl.reshape(tl.permute(threads, (1, 4, 2, 0, 3, 5)), [64, 64])


@triton.jit(do_not_specialize=["heads", "seq_q", "padded_q", "num_residues"])
def round_kernel(sums, dq, heads, seq_q, padded_q, num_residues, scale_out, D: tl.constexpr, WIDTH: tl.constexpr):
    """dq of 64 queries and 64 columns from its float32 sums, which stand in the order of blocks and are D wide."""
    part, unit = tl.program_id(0) % (D // 64), tl.program_id(0) // (D // 64)
    head_id, tile = unit // (padded_q // 64), unit % (padded_q // 64)
    sample, head = (head_id // heads).to(tl.int64), head_id % heads
    numbers = tl.load(sums + tl.program_id(0).to(tl.int64) * 4096 + tl.arange(0, 4096))
    place = tile * 64 + tl.arange(0, 64)
    query = place % (padded_q // num_residues) * num_residues + place // (padded_q // num_residues)
    at = ((sample * seq_q + query) * heads + head) * WIDTH
    column = part * 64 + tl.arange(0, 64)
    value = (sums_in_order(numbers) * scale_out).to(dq.dtype.element_ty)
    there = (query < seq_q)[:, None]
    if D > WIDTH:
        there &= (column < WIDTH)[None, :]
    tl.store(dq + at[:, None] + column[None, :], value, mask=there)


@triton.jit(do_not_specialize=VARYING)
def dq_kernel(
    q, k, v, grad, lse, delta, dq, d_slopes, d_table, d_terms, d_dense, unit,
    indices, rule_ids, work, rules, documents, branches, padding, document_ids, seed, slopes, bitmaps,
    table, codes, terms, dense,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, g_b, g_s, g_h,
    heads, group, seq_q, seq_k, num_blocks, lists_per_sample, heads_per_list, num_intervals, num_branches, num_residues,
    scale, scale_out, cap, threshold, keep_scale,
    slopes_b, table_b, table_h, table_size, codes_b, terms_b, terms_h, dense_b, dense_h, dense_q, dense_k,
    d_dense_b, d_dense_h, first_sample, first_head, own_heads,
    D: tl.constexpr, PADDED_D: tl.constexpr, D_V: tl.constexpr, PADDED_D_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, PACK: tl.constexpr, TMA: tl.constexpr, NEGATIVE_SCALE: tl.constexpr,
    HAS_RULE_IDS: tl.constexpr, ONE_INTERVAL: tl.constexpr, DOCUMENTS: tl.constexpr, PADDING: tl.constexpr,
    DOCUMENT_IDS: tl.constexpr, DROPOUT: tl.constexpr, DILATED: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, PRECISION: tl.constexpr, BASE_E: tl.constexpr, BITMAPS: tl.constexpr,
    BIAS: tl.constexpr, WANTED: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """dq of one tile: the walk of the forward kernel. What is WANTED of the gradient of a bias is summed on the way.

    A launch has `own_heads` heads of some samples.
    """
    TILES_PER_BLOCK: tl.constexpr = BLOCK_Q // TILE_Q
    pid = tl.program_id(0)
    num_tiles = num_blocks * TILES_PER_BLOCK
    place, pack = pid % num_tiles, pid // num_tiles
    packs_per_sample = own_heads // PACK
    sample, head = first_sample + pack // packs_per_sample, first_head + pack % packs_per_sample * PACK
    list_id = list_of(sample, head, lists_per_sample, heads_per_list)
    row = list_id * num_blocks + place // TILES_PER_BLOCK
    block, start, split, stop = load_work(work, row, PADDING)
    partial_from = load_masked_from(work, row, split, PADDING)

    lane = tl.arange(0, PACK * TILE_Q)
    own = block * BLOCK_Q + place % TILES_PER_BLOCK * TILE_Q + lane % TILE_Q
    query = token_at(own, seq_q, num_residues, BLOCK_Q, DILATED)
    query_head = head + lane // TILE_Q
    valid = query < seq_q
    key_head = head // group
    sample_64, query_64, head_64 = sample.to(tl.int64), query.to(tl.int64), query_head.to(tl.int64)
    k_base, v_base = sample_64 * k_b + key_head.to(tl.int64) * k_h, sample_64 * v_b + key_head.to(tl.int64) * v_h
    queries = load_rows(q + sample_64 * q_b, query_64 * q_s + head_64 * q_h, 1, valid, D, PADDED_D)
    grads = load_rows(grad + sample_64 * g_b, query_64 * g_s + head_64 * g_h, 1, valid, D_V, PADDED_D_V)
    of_row = (sample_64 * heads + query_head) * (num_blocks * BLOCK_Q) + own
    row_lse, row_delta = tl.load(lse + of_row), tl.load(delta + of_row)

    exp_scale, slope, origin = scale, 0.0, 0
    if SOFTCAP or ALIBI or BIAS:
        exp_scale = 1.0
    if ALIBI:
        slope, origin = tl.load(slopes + query_head)[:, None], tl.min(query, 0)
    if DROPOUT:
        query_hash = dropout_query_hash(seed, sample * heads + query_head, query, query)[:, None]
    if WANTED:
        before, behind = tl.zeros([TILE_Q], tl.float32), tl.zeros([TILE_Q], tl.float32)
    dqueries = tl.zeros([PACK * TILE_Q, PADDED_D], tl.float32)
    num_full, masked_from, num_masked = count_tiles(start, partial_from, stop, BLOCK_K, TILE_K)
    GATHERED: tl.constexpr = TILE_K > BLOCK_K
    for MASKED in tl.static_range(2):
        first = masked_from if MASKED else start
        for i in range(num_masked if MASKED else num_full):
            entry, begin, places = tile_at(indices, first, i, stop, BLOCK_K, TILE_K)
            key = token_at(places, seq_k, num_residues, BLOCK_K, DILATED)
            keys = load_tile(k, k_base, sample, key_head, begin, key, k_s, seq_k, D, PADDED_D, TILE_K, TMA)
            values = load_tile(v, v_base, sample, key_head, begin, key, v_s, seq_k, D_V, PADDED_D_V, TILE_K, TMA)
            scores = tl.dot(queries, keys.T, input_precision=PRECISION)
            if NEGATIVE_SCALE:
                scores = -scores
            softcap_grad = 1.0
            if SOFTCAP or ALIBI or BIAS:
                scores, softcap_grad = apply_score_mods(
                    scores * scale, signed_distance(query[:, None], key[None, :], origin, seq_q, seq_k), slope, cap,
                    SOFTCAP, ALIBI, BASE_E,
                )  # fmt: skip
            if BIAS:
                scores += bias_of_pairs(
                    query[:, None], key[None, :], sample, query_head[:, None], slopes, table, codes, terms, dense,
                    slopes_b, table_b, table_h, table_size, codes_b, terms_b, terms_h,
                    dense_b, dense_h, dense_q, dense_k, seq_q, seq_k, BIAS, BASE_E,
                )  # fmt: skip
            scores, log_m = apply_multiplicity(
                scores, entry, query[:, None], key[None, :], list_id, rule_ids, branches, num_branches, seq_q, seq_k,
                exp_scale, MASKED, DILATED, BASE_E,
            )  # fmt: skip
            weights = exponential(scores * exp_scale - (row_lse - log_m)[:, None], BASE_E)
            if MASKED or DOCUMENT_IDS:
                bit_entry, bit_unit = 0, 0
                if BITMAPS and MASKED:
                    bit_entry, bit_unit = walked_units(first, i, BLOCK_K, TILE_K)
                seen = pairs_allowed(
                    query[:, None], key[None, :], entry[None, :] if GATHERED else entry, split, stop, sample,
                    rule_ids, rules, documents, padding, document_ids, num_intervals, seq_q, seq_k,
                    MASKED, GATHERED or PADDING, HAS_RULE_IDS, ONE_INTERVAL, DOCUMENTS, PADDING and MASKED,
                    DOCUMENT_IDS,
                    bit_entry, own[:, None] % BLOCK_Q, bit_unit, bitmaps, BLOCK_Q, BLOCK_K, BITMAPS if MASKED else 0,
                )  # fmt: skip
                weights = tl.where(seen, weights, 0.0)
            dweights = tl.dot(grads, values.T, input_precision=PRECISION)
            if DROPOUT:
                keeps = dropout_keeps(query_hash, dropout_key_hash(seed, key, key)[None, :], threshold)
                dweights = tl.where(keeps, dweights * keep_scale, 0.0)
            dscores = weights * (dweights - row_delta[:, None])
            if WANTED:
                there = entry[None, :] < stop if GATHERED else key[None, :] >= 0
                before, behind = add_gradients(
                    dscores, before, behind, query[:, None], key[None, :], there, sample, head, codes,
                    d_table, d_terms, d_dense, unit, table_b, table_h, table_size, codes_b, terms_b, terms_h,
                    d_dense_b, d_dense_h, seq_q, seq_k, WANTED, SHARED,
                )  # fmt: skip
            dscores *= softcap_grad
            dqueries = tl.dot(dscores.to(keys.dtype), keys, dqueries, input_precision=PRECISION)

    at = ((sample_64 * seq_q + query) * heads + query_head) * D
    store_rows(dq, at, 1, valid, dqueries * scale_out, D, PADDED_D)
    if SLOPES & WANTED:
        padded_q = num_blocks * BLOCK_Q
        at = d_slopes + (sample_64 * heads + head) * (2 * padded_q) + own
        tl.store(at, before)
        tl.store(at + padded_q, behind)


@triton.jit(do_not_specialize=VARYING)
def dkv_kernel(
    q, k, v, grad, lse, delta, dk, dv,
    offsets, splits, indices, rule_ids, work, rules, documents, branches, padding, document_ids, seed, slopes, bitmaps,
    table, codes, terms, dense,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, g_b, g_s, g_h,
    heads, group, seq_q, seq_k, num_blocks, lists_per_sample, heads_per_list, num_intervals, num_branches, num_residues,
    scale, scale_out, cap, threshold, keep_scale,
    slopes_b, table_b, table_h, table_size, codes_b, terms_b, terms_h, dense_b, dense_h, dense_q, dense_k,
    D: tl.constexpr, PADDED_D: tl.constexpr, D_V: tl.constexpr, PADDED_D_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, PACK: tl.constexpr, TMA: tl.constexpr, NEGATIVE_SCALE: tl.constexpr,
    HAS_RULE_IDS: tl.constexpr, ONE_INTERVAL: tl.constexpr, DOCUMENTS: tl.constexpr, PADDING: tl.constexpr,
    DOCUMENT_IDS: tl.constexpr, DROPOUT: tl.constexpr, DILATED: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, PRECISION: tl.constexpr, BASE_E: tl.constexpr, BITMAPS: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys: it walks the query blocks that see it, for each query head of its key head.

    The lists are those by key. Scores stand as keys × queries, so that every product takes its operands as they lie.
    `padding` is what `padding.key_bits` makes. What keys that are padding get is not kept: they need no mask.
    """
    TILES_PER_BLOCK: tl.constexpr = BLOCK_K // TILE_K
    pid = tl.program_id(0)
    num_tiles = num_blocks * TILES_PER_BLOCK
    place, head_id = pid % num_tiles, pid // num_tiles
    heads_kv = heads // group
    sample, key_head = head_id // heads_kv, head_id % heads_kv
    first_list = list_of(sample, key_head * group, lists_per_sample, heads_per_list)
    block, _, _, _ = load_work(work, first_list * num_blocks + place // TILES_PER_BLOCK)

    own = block * BLOCK_K + place % TILES_PER_BLOCK * TILE_K + tl.arange(0, TILE_K)
    key = token_at(own, seq_k, num_residues, BLOCK_K, DILATED)
    valid_key = key < seq_k
    sample_64, key_head_64 = sample.to(tl.int64), key_head.to(tl.int64)
    keys = load_rows(k + sample_64 * k_b + key_head_64 * k_h, key, k_s, valid_key, D, PADDED_D)
    values = load_rows(v + sample_64 * v_b + key_head_64 * v_h, key, v_s, valid_key, D_V, PADDED_D_V)

    exp_scale, origin = scale, 0
    if SOFTCAP or ALIBI or BIAS:
        exp_scale = 1.0
    if ALIBI:
        origin = tl.min(key, 0) - (seq_k - seq_q)
    if DROPOUT:
        key_hash = dropout_key_hash(seed, key, key)[:, None]
    own_unit = (place % TILES_PER_BLOCK * (TILE_K // 16) + tl.arange(0, TILE_K // 16))[:, None]
    if PADDING:
        words = words_of(padding, sample, block, num_blocks, BLOCK_K)
    padded_q = padded_length(seq_q, num_residues, BLOCK_Q)
    dkeys = tl.zeros([TILE_K, PADDED_D], tl.float32)
    dvalues = tl.zeros([TILE_K, PADDED_D_V], tl.float32)
    GATHERED: tl.constexpr = TILE_Q > BLOCK_Q
    for member in range(group):
        head = key_head * group + member
        slope = 0.0
        if ALIBI:
            slope = tl.load(slopes + head)
        list_id = list_of(sample, head, lists_per_sample, heads_per_list)
        row = list_id * num_blocks + block
        q_base, g_base = sample_64 * q_b + head.to(tl.int64) * q_h, sample_64 * g_b + head.to(tl.int64) * g_h
        of_head = (sample_64 * heads + head) * padded_q
        start, split, stop = tl.load(offsets + row), tl.load(splits + row), tl.load(offsets + row + 1)
        if PADDING:
            start = tl.where(tl.load(words - 1) == HIDDEN, stop, start)
            split = tl.maximum(start, split)
        num_full, masked_from, num_masked = count_tiles(start, split, stop, BLOCK_Q, TILE_Q)
        for MASKED in tl.static_range(2):
            first = masked_from if MASKED else start
            for i in range(num_masked if MASKED else num_full):
                entry, begin, places = tile_at(indices, first, i, stop, BLOCK_Q, TILE_Q)
                query = token_at(places, seq_q, num_residues, BLOCK_Q, DILATED)
                queries = load_tile(q, q_base, sample, head, begin, query, q_s, seq_q, D, PADDED_D, TILE_Q, TMA)
                grads = load_tile(grad, g_base, sample, head, begin, query, g_s, seq_q, D_V, PADDED_D_V, TILE_Q, TMA)
                row_lse, row_delta = tl.load(lse + of_head + places), tl.load(delta + of_head + places)
                scores = tl.dot(keys, queries.T, input_precision=PRECISION)
                if NEGATIVE_SCALE:
                    scores = -scores
                softcap_grad = 1.0
                if SOFTCAP or ALIBI or BIAS:
                    scores, softcap_grad = apply_score_mods(
                        scores * scale, signed_distance(query[None, :], key[:, None], origin, seq_q, seq_k), slope, cap,
                        SOFTCAP, ALIBI, BASE_E,
                    )  # fmt: skip
                if BIAS:
                    scores += bias_of_pairs(
                        query[None, :], key[:, None], sample, head, slopes, table, codes, terms, dense,
                        slopes_b, table_b, table_h, table_size, codes_b, terms_b, terms_h,
                        dense_b, dense_h, dense_q, dense_k, seq_q, seq_k, BIAS, BASE_E,
                    )  # fmt: skip
                scores, log_m = apply_multiplicity(
                    scores, entry, query[None, :], key[:, None], list_id, rule_ids, branches, num_branches,
                    seq_q, seq_k, exp_scale, MASKED, DILATED, BASE_E,
                )  # fmt: skip
                weights = exponential(scores * exp_scale - (row_lse - log_m)[None, :], BASE_E)
                if MASKED or DOCUMENT_IDS:
                    bit_entry, bit_row = 0, 0
                    if BITMAPS and MASKED:
                        bit_entry, bit_row = walked_rows(first, i, BLOCK_Q, TILE_Q)
                    seen = pairs_allowed(
                        query[None, :], key[:, None], entry[None, :] if GATHERED else entry, split, stop, sample,
                        rule_ids, rules, documents, padding, document_ids, num_intervals, seq_q, seq_k,
                        MASKED, GATHERED, HAS_RULE_IDS, ONE_INTERVAL, DOCUMENTS, False, DOCUMENT_IDS,
                        bit_entry, bit_row, own_unit, bitmaps, BLOCK_Q, BLOCK_K, 2 * BITMAPS if MASKED else 0,
                    )  # fmt: skip
                    weights = tl.where(seen, weights, 0.0)
                dweights = tl.dot(values, grads.T, input_precision=PRECISION)
                dropped = weights
                if DROPOUT:
                    query_hash = dropout_query_hash(seed, sample * heads + head, query, query)[None, :]
                    keeps = dropout_keeps(query_hash, key_hash, threshold)
                    dropped = tl.where(keeps, weights * keep_scale, 0.0)
                    dweights = tl.where(keeps, dweights * keep_scale, 0.0)
                dvalues = tl.dot(dropped.to(grads.dtype), grads, dvalues, input_precision=PRECISION)
                dscores = weights * (dweights - row_delta[None, :]) * softcap_grad
                dkeys = tl.dot(dscores.to(queries.dtype), queries, dkeys, input_precision=PRECISION)

    if PADDING:
        in_block = own % BLOCK_K
        real = (tl.load(words + in_block // UNIT).to(tl.int32) >> (in_block % UNIT) & 1)[:, None] != 0
        dkeys, dvalues = tl.where(real, dkeys, 0.0), tl.where(real, dvalues, 0.0)
    at = (sample_64 * seq_k + key) * heads_kv + key_head
    store_rows(dk, at * D, 1, valid_key, dkeys * scale_out, D, PADDED_D)
    store_rows(dv, at * D_V, 1, valid_key, dvalues, D_V, PADDED_D_V)
