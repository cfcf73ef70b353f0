"""What `options.Bias` adds to a tile of scores, and the sums of its gradient.

BIAS says of which kinds a bias is: TABLE, TERMS, DENSE and SLOPES, added up. A slope for each head and nothing else is
ALIBI, which all kernels know (`common.apply_score_mods`), the warp-specialised ones too. WANTED says of which kinds a
gradient is asked for. The kernel of dq, which has the gradients of a row's scores, sums them:

    SLOPES   by row, in the order of the keys; rows are summed outside
    TABLE    by entry, and
    TERMS    by key: in whole multiples of a power of two, so small that they lose less than single precision does, and
             so large that no sum of them overflows. Their order does not matter: atomic additions are reproducible
    DENSE    each pair has its place. Samples and heads that share it are launched one after the other

So every sum is bitwise the same in every run. `bias_arguments` has the host's part.
"""

import triton
import triton.language as tl

from .common import LOG2E

TABLE, TERMS, DENSE, SLOPES = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4), tl.constexpr(8)

# Strides and sizes that a bias brings: no new kernel for a new value of them. Those of a dense bias within a head say
# how it is read.
VARYING_BIAS = (
    "slopes_b", "table_b", "table_h", "table_size", "codes_b", "terms_b", "terms_h", "dense_b", "dense_h",
    "d_dense_b", "d_dense_h", "first_sample", "first_head", "own_heads",
)  # fmt: skip


@triton.jit
def place_in_table(query, key, sample, codes, codes_b, table_size, seq_q, seq_k):
    """The entry of each pair; `codes` are those of the queries of a sample and then those of its keys."""
    codes += sample.to(tl.int64) * codes_b
    of_query = tl.load(codes + query, mask=query < seq_q, other=0)
    of_key = tl.load(codes + seq_q + key, mask=key < seq_k, other=0)
    return tl.minimum(tl.maximum(of_key - of_query, 0), table_size - 1)


@triton.jit
def bias_of_pairs(
    query, key, sample, head, slopes, table, codes, terms, dense,
    slopes_b, table_b, table_h, table_size, codes_b, terms_b, terms_h, dense_b, dense_h, dense_q, dense_k, seq_q, seq_k,
    BIAS: tl.constexpr, BASE_E: tl.constexpr,
):  # fmt: skip
    """What is added to the scores of pairs, in the units of the exponent: `query`, `key` and `head` broadcast to them.

    `terms` are those of queries and then those of keys: two large numbers, of which first the difference is made.
    """
    sample, head, query_64 = sample.to(tl.int64), head.to(tl.int64), query.to(tl.int64)
    seen_q, seen_k = query < seq_q, key < seq_k
    total = ((query + key) * 0).to(tl.float32)
    if SLOPES & BIAS:
        ahead = (query + (seq_k - seq_q) - key).to(tl.float32)
        at = slopes + sample * slopes_b + head * 2
        total -= tl.where(ahead > 0, tl.load(at), tl.load(at + 1)) * tl.abs(ahead)
    if TABLE & BIAS:
        place = place_in_table(query, key, sample, codes, codes_b, table_size, seq_q, seq_k)
        total += tl.load(table + sample * table_b + head * table_h + place)
    if TERMS & BIAS:
        at = terms + sample * terms_b + head * terms_h
        of_query = tl.load(at + query, mask=seen_q, other=0.0)
        total += of_query + tl.load(at + seq_q + key, mask=seen_k, other=0.0)
    if DENSE & BIAS:
        at = dense + sample * dense_b + head * dense_h + query_64 * dense_q + key.to(tl.int64) * dense_k
        total += tl.load(at, mask=seen_q & seen_k, other=0.0).to(tl.float32)
    return total if BASE_E else total * LOG2E


@triton.jit
def in_whole_numbers(x, unit):
    """Multiples of 1 / unit."""
    return tl.floor(x * unit + 0.5).to(tl.int64)


@triton.jit
def add_gradients(
    gradient, before, behind, query, key, there, sample, head, codes, d_table, d_terms, d_dense, unit,
    table_b, table_h, table_size, codes_b, terms_b, terms_h, d_dense_b, d_dense_h, seq_q, seq_k,
    WANTED: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Add the gradients of a tile's scores to all sums that are wanted, and return those of its rows: of distances to
    keys before the query, and to keys behind it.

    Args:
        query, key: [queries, 1] and [1, keys].
        there: whether a key's block is one of the list.
        SHARED: whether another launch has added to the dense gradient.
    """
    sample, head = sample.to(tl.int64), head.to(tl.int64)
    if SLOPES & WANTED:
        ahead = (query + (seq_k - seq_q) - key).to(tl.float32)
        before += tl.sum(gradient * tl.maximum(ahead, 0.0), 1)
        behind += tl.sum(gradient * tl.maximum(-ahead, 0.0), 1)
    if TABLE & WANTED:
        place = place_in_table(query, key, sample, codes, codes_b, table_size, seq_q, seq_k)
        at = d_table + sample * table_b + head * table_h
        nearest, farthest = tl.min(tl.min(place, 1), 0), tl.max(tl.max(place, 1), 0)
        if nearest == farthest:  # all beyond the end of the table
            tl.atomic_add(at + nearest, in_whole_numbers(tl.sum(tl.sum(gradient, 1), 0), tl.load(unit)), sem="relaxed")
        else:
            tl.atomic_add(at + place, in_whole_numbers(gradient, tl.load(unit)), mask=gradient != 0.0, sem="relaxed")
    if TERMS & WANTED:
        at = d_terms + sample * terms_b + head * terms_h + seq_q + key
        of_keys = in_whole_numbers(tl.sum(gradient, 0)[None, :], tl.load(unit))
        tl.atomic_add(at, of_keys, mask=there & (key < seq_k), sem="relaxed")
    if DENSE & WANTED:
        at = d_dense + sample * d_dense_b + head * d_dense_h + query.to(tl.int64) * seq_k + key
        seen = there & (query < seq_q) & (key < seq_k)
        if SHARED:
            gradient += tl.load(at, mask=seen, other=0.0)
        tl.store(at, gradient.to(d_dense.dtype.element_ty), mask=seen)
    return before, behind
