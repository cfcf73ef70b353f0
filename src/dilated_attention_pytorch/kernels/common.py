"""What every kernel needs: where the next tile of a list lies, which of its pairs are allowed, which are dropped.

Scores are a tile of queries × keys (or keys × queries): `query` and `key` are token numbers in shapes that broadcast to
that tile, so the same functions serve both orders.

A list of blocks is walked in tiles of `TILE` tokens. Tiles are parts of one block or gather several; the full blocks
that fill whole tiles come first and need no mask, then the rest of the full ones together with the partial ones.
"""

import triton
import triton.language as tl


@triton.jit
def list_of(sample, head, lists_a_sample, heads_a_list):
    """Which list of the layout a (sample, head) follows."""
    return sample * lists_a_sample + head // heads_a_list


@triton.jit
def load_work(work, at):
    """The block, the first entry, the first partial entry and the end of a row: `BlockList.work`."""
    at = work + at * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def count_tiles(start, split, stop, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """How many unmasked and masked tiles a row has, and the entry where the masked ones begin."""
    if TILE <= BLOCK:
        num_full = (split - start) * (BLOCK // TILE)
        masked_from = split
        num_masked = (stop - split) * (BLOCK // TILE)
    else:
        num_full = (split - start) // (TILE // BLOCK)
        masked_from = start + num_full * (TILE // BLOCK)
        num_masked = tl.cdiv(stop - masked_from, TILE // BLOCK)
    return num_full, masked_from, num_masked


@triton.jit
def tile_at(indices, first, i, stop, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Tile `i` of the blocks from entry `first` on: its entry, its first token, and the tokens of its lanes.

    Where a tile gathers several blocks the entry is one for each lane, and there is no first token.
    """
    lane = tl.arange(0, TILE)
    if TILE <= BLOCK:
        entry = first + i // (BLOCK // TILE)
        begin = tl.load(indices + entry) * BLOCK + (i % (BLOCK // TILE)) * TILE
        token = begin + lane
    else:
        entry = first + i * (TILE // BLOCK) + lane // BLOCK
        begin = 0
        token = tl.load(indices + entry, mask=entry < stop, other=0) * BLOCK + lane % BLOCK
    return entry, begin, token


@triton.jit
def interval_allows(query, key, rule, t, rules, documents, num_intervals, seq_q, seq_k, DOCUMENTS: tl.constexpr):
    """Interval `t` of a rule: `layout.rules.key_bounds` and the comparison with its bounds."""
    at = rules + (rule * num_intervals + t) * 5
    position = query + (seq_k - seq_q)
    first = tl.maximum(position - tl.load(at), 0)
    last = tl.minimum(position + tl.load(at + 1), tl.minimum(tl.load(at + 2), seq_k) - 1)
    last = tl.where(position < tl.load(at + 3), last, -1)
    if DOCUMENTS:
        same = tl.load(at + 4) > 0
        known = tl.minimum(query, seq_q - 1)
        first = tl.where(same, tl.maximum(first, tl.load(documents + known)), first)
        last = tl.where(same, tl.minimum(last, tl.load(documents + seq_q + known) - 1), last)
    return (key >= first) & (key <= last)


@triton.jit
def pairs_allowed(
    query, key, entry, split, stop, sample,
    rule_ids, rules, documents, padding, document_ids, num_intervals, seq_q, seq_k,
    MASKED: tl.constexpr, GATHERED: tl.constexpr, NAMED: tl.constexpr, SINGLE: tl.constexpr,
    DOCUMENTS: tl.constexpr, PADDING: tl.constexpr, DOCUMENT_IDS: tl.constexpr,
):  # fmt: skip
    """The pairs of a tile that the layout's rules (where MASKED) and the call's own masks allow.

    `entry` is the place of each pair's block in the list; where tiles gather several, some may be full, others not
    there at all.
    """
    allowed = (query >= 0) & (key >= 0)
    if MASKED:
        if NAMED:
            rule = tl.load(rule_ids + tl.maximum(tl.minimum(entry, stop - 1), 0))
        else:
            rule = entry * 0
        allowed &= interval_allows(query, key, rule, 0, rules, documents, num_intervals, seq_q, seq_k, DOCUMENTS)
        if not SINGLE:
            for t in range(1, num_intervals):
                allowed |= interval_allows(
                    query, key, rule, t, rules, documents, num_intervals, seq_q, seq_k, DOCUMENTS
                )
        if GATHERED:
            allowed = (allowed | (entry < split)) & (entry < stop)
    base = sample.to(tl.int64) * seq_k
    if PADDING:
        allowed &= tl.load(padding + base + key, mask=key < seq_k, other=1) == 0
    if DOCUMENT_IDS:
        of_key = tl.load(document_ids + base + key, mask=key < seq_k, other=0)
        of_query = tl.load(document_ids + base + (seq_k - seq_q) + query, mask=query < seq_q, other=0)
        allowed &= of_key == of_query
    return allowed


@triton.jit
def mix32(x):
    """`patterns.blocks.mix32` on uint32."""
    x = (x ^ (x >> 16)) * 0x045D9F3B
    x = (x ^ (x >> 16)) * 0x045D9F3B
    return x ^ (x >> 16)


@triton.jit
def kept(seed, stream, query, key, threshold):
    """`backends.dropout.keep_mask`."""
    row = mix32(mix32(mix32(tl.load(seed).to(tl.uint32)) ^ stream.to(tl.uint32)) ^ query.to(tl.uint32))
    return mix32(row ^ key.to(tl.uint32)).to(tl.int64) >= threshold


@triton.jit
def load_rows(x, row, stride, allowed, D: tl.constexpr, PADDED_D: tl.constexpr):
    """Rows of a matrix [*, D] as [rows, PADDED_D]; zeros in the padding and where a row is not allowed."""
    column = tl.arange(0, PADDED_D)
    at = x + row.to(tl.int64)[:, None] * stride + column[None, :]
    if PADDED_D == D:
        value = tl.load(at, mask=allowed[:, None], other=0.0)
    else:
        value = tl.load(at, mask=allowed[:, None] & (column < D)[None, :], other=0.0)
    return value


@triton.jit
def store_rows(x, row, stride, allowed, value, D: tl.constexpr, PADDED_D: tl.constexpr):
    column = tl.arange(0, PADDED_D)
    at = x + row.to(tl.int64)[:, None] * stride + column[None, :]
    if PADDED_D == D:
        tl.store(at, value.to(x.dtype.element_ty), mask=allowed[:, None])
    else:
        tl.store(at, value.to(x.dtype.element_ty), mask=allowed[:, None] & (column < D)[None, :])


@triton.jit
def load_tile(
    x, base, sample, head, begin, token, stride, seq, D: tl.constexpr, PADDED_D: tl.constexpr, TILE: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """A tile of tokens of one head: by the copy engine (`x` is a descriptor of [batch, seq, heads · D]) or by address
    (`x` is a pointer, `base` the place of the sample and head)."""
    if TMA:
        tile = x.load([sample, begin, head * D]).reshape(TILE, PADDED_D)
    else:
        tile = load_rows(x + base, token, stride, token < seq, D, PADDED_D)
    return tile
