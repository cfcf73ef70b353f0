"""The forward kernel: a tile of queries walks its list of key blocks with a running softmax."""

import triton
import triton.language as tl

from .bias import VARYING_BIAS, bias_of_pairs
from .common import (
    LOG2E,
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
    pairs_allowed,
    signed_distance,
    store_rows,
    tile_at,
    token_at,
    walked_units,
)

# Lengths, counts and rates change from call to call: no new kernel for a new value of them.
VARYING = (
    "lists_per_sample", "heads_per_list", "seq_q", "seq_k", "num_blocks", "num_intervals", "threshold", "heads",
    "group", "num_branches", "num_residues", *VARYING_BIAS,
)  # fmt: skip


@triton.jit
def exponential(exponent, BASE_E: tl.constexpr):
    """exp, or exp2 where the exponent is in units of log2 already."""
    return tl.exp2(exponent * LOG2E if BASE_E else exponent)


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    q, k, v, out, lse,
    indices, rule_ids, work, rules, documents, branches, padding, document_ids, seed, slopes, bitmaps,
    table, codes, terms, dense,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h,
    heads, group, seq_q, seq_k, num_blocks, lists_per_sample, heads_per_list, num_intervals, num_branches, num_residues,
    scale, cap, threshold, keep_scale,
    slopes_b, table_b, table_h, table_size, codes_b, terms_b, terms_h, dense_b, dense_h, dense_q, dense_k,
    D: tl.constexpr, PADDED_D: tl.constexpr, D_V: tl.constexpr, PADDED_D_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr, PACK: tl.constexpr, TMA: tl.constexpr, NEGATIVE_SCALE: tl.constexpr,
    HAS_RULE_IDS: tl.constexpr, ONE_INTERVAL: tl.constexpr, DOCUMENTS: tl.constexpr, PADDING: tl.constexpr,
    DOCUMENT_IDS: tl.constexpr, DROPOUT: tl.constexpr, DILATED: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, PRECISION: tl.constexpr, BASE_E: tl.constexpr, BITMAPS: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """out and lse of one tile: `TILE_Q` queries of `PACK` heads that share a list and a key head.

    Scores are in units of log2, which saves a product a score (`scale` has the factor log2(e)), or BASE_E in single
    precision, where its rounding would show. The sign of the scale is in NEGATIVE_SCALE.
    """
    TILES_PER_BLOCK: tl.constexpr = BLOCK_Q // TILE_Q
    pid = tl.program_id(0)
    num_tiles = num_blocks * TILES_PER_BLOCK
    place, pack = pid % num_tiles, pid // num_tiles
    packs_per_sample = heads // PACK
    sample, head = pack // packs_per_sample, pack % packs_per_sample * PACK
    list_id = list_of(sample, head, lists_per_sample, heads_per_list)
    row = list_id * num_blocks + place // TILES_PER_BLOCK
    block, start, split, stop = load_work(work, row, PADDING)
    partial_from = load_masked_from(work, row, split, PADDING)
    if block >= num_blocks:  # another kernel has the rows of this call (`united.py`)
        return

    lane = tl.arange(0, PACK * TILE_Q)
    own = block * BLOCK_Q + place % TILES_PER_BLOCK * TILE_Q + lane % TILE_Q
    query = token_at(own, seq_q, num_residues, BLOCK_Q, DILATED)
    query_head = head + lane // TILE_Q
    valid = query < seq_q
    key_head = head // group
    sample_64 = sample.to(tl.int64)
    k_base, v_base = sample_64 * k_b + key_head.to(tl.int64) * k_h, sample_64 * v_b + key_head.to(tl.int64) * v_h
    at = query.to(tl.int64) * q_s + query_head.to(tl.int64) * q_h
    queries = load_rows(q + sample_64 * q_b, at, 1, valid, D, PADDED_D)

    exp_scale, slope, origin = scale, 0.0, 0
    if SOFTCAP or ALIBI or BIAS:  # scores are scaled before they are modified
        exp_scale = 1.0
    if ALIBI:
        slope, origin = tl.load(slopes + query_head)[:, None], tl.min(query, 0)
    if DROPOUT:
        query_hash = dropout_query_hash(seed, sample * heads + query_head, query, query)[:, None]
    row_max = tl.full([PACK * TILE_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([PACK * TILE_Q], tl.float32)
    acc = tl.zeros([PACK * TILE_Q, PADDED_D_V], tl.float32)
    num_full, masked_from, num_masked = count_tiles(start, partial_from, stop, BLOCK_K, TILE_K)

    GATHERED: tl.constexpr = TILE_K > BLOCK_K
    for MASKED in tl.static_range(2):
        first = masked_from if MASKED else start
        for i in range(num_masked if MASKED else num_full):
            entry, begin, places = tile_at(indices, first, i, stop, BLOCK_K, TILE_K)
            key = token_at(places, seq_k, num_residues, BLOCK_K, DILATED)
            keys = load_tile(k, k_base, sample, key_head, begin, key, k_s, seq_k, D, PADDED_D, TILE_K, TMA)
            scores = tl.dot(queries, keys.T, input_precision=PRECISION)
            if NEGATIVE_SCALE:
                scores = -scores
            if SOFTCAP or ALIBI or BIAS:
                scores, _ = apply_score_mods(
                    scores * scale, signed_distance(query[:, None], key[None, :], origin, seq_q, seq_k), slope, cap,
                    SOFTCAP, ALIBI, BASE_E,
                )  # fmt: skip
            if BIAS:
                scores += bias_of_pairs(
                    query[:, None], key[None, :], sample, query_head[:, None], slopes, table, codes, terms, dense,
                    slopes_b, table_b, table_h, table_size, codes_b, terms_b, terms_h,
                    dense_b, dense_h, dense_q, dense_k, seq_q, seq_k, BIAS, BASE_E,
                )  # fmt: skip
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
                scores = tl.where(seen, scores, float("-inf"))
            scores, log_m = apply_multiplicity(
                scores, entry, query[:, None], key[None, :], list_id, rule_ids, branches, num_branches, seq_q, seq_k,
                exp_scale, MASKED, DILATED, BASE_E,
            )  # fmt: skip
            new_max = tl.maximum(row_max, tl.max(scores, 1) * exp_scale)
            base = new_max
            if MASKED or DOCUMENT_IDS or BIAS:  # a row may have seen nothing so far
                base = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = exponential(scores * exp_scale - (base - log_m)[:, None], BASE_E)
            shrink = exponential(row_max - base, BASE_E)
            row_sum = row_sum * shrink + tl.sum(weights, 1)
            if DROPOUT:
                keeps = dropout_keeps(query_hash, dropout_key_hash(seed, key, key)[None, :], threshold)
                weights = tl.where(keeps, weights * keep_scale, 0.0)
            values = load_tile(v, v_base, sample, key_head, begin, key, v_s, seq_k, D_V, PADDED_D_V, TILE_K, TMA)
            acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision=PRECISION)
            row_max = new_max

    empty = row_sum == 0.0
    acc = acc / tl.where(empty, 1.0, row_sum)[:, None]
    at = ((sample_64 * seq_q + query) * heads + query_head) * D_V
    store_rows(out, at, 1, valid, acc, D_V, PADDED_D_V)
    row_lse = row_max + tl.log(row_sum) if BASE_E else (row_max + tl.log2(row_sum)) / LOG2E
    row_lse = tl.where(empty, float("-inf"), row_lse)
    tl.store(lse + (sample_64 * heads + query_head) * seq_q + query, row_lse, mask=valid)
