"""What every kernel needs: where the next tile of a list lies, which of its pairs are allowed, which are dropped.

Scores are a tile of queries × keys (or keys × queries): `query` and `key` are token numbers in shapes that broadcast to
that tile, so the same functions serve both orders.

A list of blocks is walked in tiles of `TILE` tokens. Tiles are parts of one block or gather several; the full blocks
that fill whole tiles come first and need no mask, then the rest of the full ones together with the partial ones.

In layouts of dilated attention (DILATED; see `layout.branches`) blocks take every `num_residues`-th token, a tile is
never larger than a block, and `rule_ids` is the multiplicity of a block: how often its pairs count. DILATED is 2 where
some blocks are mixed.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
BY_KEY = tl.constexpr(3)  # of DOCUMENTS: what is read is not the range of each query but `BlockLayout.seen_by`
# Of a call with padding (`padding`): keys of a word of bits, and the states of blocks.
UNIT = tl.constexpr(16)
OPEN, MIXED, HIDDEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def list_of(sample, head, lists_per_sample, heads_per_list):
    """Which list of the layout a (sample, head) follows."""
    return sample * lists_per_sample + head // heads_per_list


@triton.jit
def load_work(work, at, PADDED: tl.constexpr = False):
    """The block, the first entry, the first partial entry and the end of a row: `BlockList.work`, or `PaddedLists.work`
    where PADDED."""
    at = work + at * (5 if PADDED else 4)
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def load_masked_from(work, at, split, PADDED: tl.constexpr):
    """The first entry of a row that is masked: the first partial one, or one before it with hidden keys."""
    if PADDED:
        split = tl.load(work + at * 5 + 4)
    return split


@triton.jit
def words_of(bits, sample, block, num_blocks, BLOCK: tl.constexpr):
    """Where the words of a key block stand in `padding.key_bits`; the state stands before them."""
    return bits + (sample.to(tl.int64) * num_blocks + block) * (1 + BLOCK // UNIT) + 1


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
def padded_length(seq, num_residues, BLOCK: tl.constexpr):
    """Tokens of whole blocks."""
    return num_residues * tl.cdiv(tl.cdiv(seq, num_residues), BLOCK) * BLOCK


@triton.jit
def token_at(place, seq, num_residues, BLOCK: tl.constexpr, DILATED: tl.constexpr):
    """The token at a place in the order of blocks."""
    if DILATED:
        rows = padded_length(seq, num_residues, BLOCK) // num_residues
        token = place % rows * num_residues + place // rows
    else:
        token = place
    return token


@triton.jit
def tile_at(indices, first, i, stop, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Tile `i` of the blocks from entry `first` on: its entry, its first place, and the places of its lanes.

    Where a tile gathers several blocks the entry is one for each lane, and there is no first place.
    """
    lane = tl.arange(0, TILE)
    if TILE <= BLOCK:
        entry = first + i // (BLOCK // TILE)
        begin = tl.load(indices + entry) * BLOCK + (i % (BLOCK // TILE)) * TILE
        place = begin + lane
    else:
        entry = first + i * (TILE // BLOCK) + lane // BLOCK
        begin = 0
        place = tl.load(indices + entry, mask=entry < stop, other=0) * BLOCK + lane % BLOCK
    return entry, begin, place


@triton.jit
def key_bounds(query, rule, t, rules, documents, num_intervals, seq_q, seq_k, DOCUMENTS: tl.constexpr):
    """First and last key that a query sees by interval `t` of a rule: `layout.rules.key_bounds`."""
    at = rules + (rule * num_intervals + t) * 5
    position = query + (seq_k - seq_q)
    first = tl.maximum(position - tl.load(at), 0)
    last = tl.minimum(position + tl.load(at + 1), tl.minimum(tl.load(at + 2), seq_k) - 1)
    last = tl.where(position < tl.load(at + 3), last, -1)
    if DOCUMENTS:
        key_range = tl.load(at + 4)
        known = tl.minimum(query, seq_q - 1)
        if DOCUMENTS == 2:  # there are several ranges
            documents += (tl.maximum(key_range, 1) - 1).to(tl.int64) * (2 * seq_q)
        first = tl.where(key_range > 0, tl.maximum(first, tl.load(documents + known)), first)
        last = tl.where(key_range > 0, tl.minimum(last, tl.load(documents + seq_q + known) - 1), last)
    return first, last


@triton.jit
def query_bounds(key, rules, seen_by, seq_q, seq_k, DOCUMENTS: tl.constexpr):
    """The other way round: first and last query that sees a key by a single rule. Of documents it is given
    `BlockLayout.seen_by`."""
    behind = seq_k - seq_q
    first = tl.maximum(key - tl.load(rules + 1) - behind, 0)
    last = tl.minimum(key + tl.load(rules), tl.load(rules + 3) - 1) - behind
    last = tl.where(key < tl.minimum(tl.load(rules + 2), seq_k), last, -1)
    if DOCUMENTS:
        key_range = tl.load(rules + 4)
        known = tl.minimum(key, seq_k - 1)
        first = tl.where(key_range > 0, tl.maximum(first, tl.load(seen_by + seq_k + known)), first)
        last = tl.where(key_range > 0, tl.minimum(last, tl.load(seen_by + known) - 1), last)
    return first, last


@triton.jit
def bits_allow(
    entry, row, unit, stop, t, rule_ids, rules, bitmaps, num_intervals,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, HAS_RULE_IDS: tl.constexpr, BITMAPS: tl.constexpr,
):  # fmt: skip
    """What the bitmaps allow that interval `t` of a tile's rules names (`layout.bitmaps`), as the tile stands: queries
    × keys, or keys × queries where BITMAPS is 2.

    Args:
        entry, row, unit: of every word of the tile its entry of the list, its query's row in the block, and which 16
            keys of the block it is; their shapes broadcast to that of the words. A word is read once for 16 pairs.
    """
    rule = entry * 0
    if HAS_RULE_IDS:
        rule = tl.load(rule_ids + tl.maximum(tl.minimum(entry, stop - 1), 0))
    named = tl.load(rules + (rule * num_intervals + t) * 5 + 4)
    at = tl.maximum(-1 - named, 0).to(tl.int64) * (BLOCK_Q * (BLOCK_K // 16))
    words = tl.load(bitmaps + at + row * (BLOCK_K // 16) + unit, mask=(named + row * 0 + unit * 0) < 0, other=-1)
    lane = tl.arange(0, 16)
    if BITMAPS == 2:
        bits = words.to(tl.int32)[:, None, :] >> lane[None, :, None]
        bits = bits.reshape(words.shape[0] * 16, words.shape[1])
    else:
        bits = words.to(tl.int32)[:, :, None] >> lane[None, None, :]
        bits = bits.reshape(words.shape[0], words.shape[1] * 16)
    return (bits & 1) != 0


@triton.jit
def walked_units(first, i, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Of tile `i` of a list of key blocks, the entry of every 16 keys, and which 16 of their block they are."""
    unit = tl.arange(0, TILE // 16)
    if TILE <= BLOCK:
        entry = first + i // (BLOCK // TILE) + unit * 0
        unit += i % (BLOCK // TILE) * (TILE // 16)
    else:
        entry = first + i * (TILE // BLOCK) + unit // (BLOCK // 16)
        unit = unit % (BLOCK // 16)
    return entry[None, :], unit[None, :]


@triton.jit
def walked_rows(first, i, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Of tile `i` of a list of query blocks, the entry of every query, and its row in the block."""
    lane = tl.arange(0, TILE)
    if TILE <= BLOCK:
        entry = first + i // (BLOCK // TILE) + lane * 0
        row = i % (BLOCK // TILE) * TILE + lane
    else:
        entry = first + i * (TILE // BLOCK) + lane // BLOCK
        row = lane % BLOCK
    return entry[None, :], row[None, :]


@triton.jit
def interval_allows(query, key, rule, t, rules, documents, num_intervals, seq_q, seq_k, DOCUMENTS: tl.constexpr):
    first, last = key_bounds(query, rule, t, rules, documents, num_intervals, seq_q, seq_k, DOCUMENTS)
    return (key >= first) & (key <= last)


@triton.jit
def pairs_allowed(
    query, key, entry, split, stop, sample,
    rule_ids, rules, documents, padding, document_ids, num_intervals, seq_q, seq_k,
    MASKED: tl.constexpr, GATHERED: tl.constexpr, HAS_RULE_IDS: tl.constexpr, ONE_INTERVAL: tl.constexpr,
    DOCUMENTS: tl.constexpr, PADDING: tl.constexpr, DOCUMENT_IDS: tl.constexpr,
    bit_entry=0, bit_row=0, bit_unit=0, bitmaps=0,
    BLOCK_Q: tl.constexpr = 0, BLOCK_K: tl.constexpr = 0, BITMAPS: tl.constexpr = 0,
):  # fmt: skip
    """The pairs of a tile that the layout's rules (where MASKED) and the call's own masks allow.

    `entry` is the place of each pair's block in the list; where tiles gather several, some may be full, others not
    there at all. `bit_entry`, `bit_row` and `bit_unit` are those of `bits_allow`, for layouts with bitmaps.
    """
    if not MASKED:
        allowed = (query >= 0) & (key >= 0)
    else:
        if HAS_RULE_IDS:
            rule = tl.load(rule_ids + tl.maximum(tl.minimum(entry, stop - 1), 0))
        else:
            rule = entry * 0
        allowed = interval_allows(query, key, rule, 0, rules, documents, num_intervals, seq_q, seq_k, DOCUMENTS)
        if BITMAPS:
            allowed &= bits_allow(
                bit_entry, bit_row, bit_unit, stop, 0, rule_ids, rules, bitmaps, num_intervals,
                BLOCK_Q, BLOCK_K, HAS_RULE_IDS, BITMAPS,
            )  # fmt: skip
        if not ONE_INTERVAL:
            for t in range(1, num_intervals):
                more = interval_allows(query, key, rule, t, rules, documents, num_intervals, seq_q, seq_k, DOCUMENTS)
                if BITMAPS:
                    more &= bits_allow(
                        bit_entry, bit_row, bit_unit, stop, t, rule_ids, rules, bitmaps, num_intervals,
                        BLOCK_Q, BLOCK_K, HAS_RULE_IDS, BITMAPS,
                    )  # fmt: skip
                allowed |= more
        if GATHERED:
            allowed = (allowed | (entry < split)) & (entry < stop)
    base = sample.to(tl.int64) * seq_k
    if PADDING:
        allowed &= tl.load(padding + base + key, mask=key < seq_k, other=1) == 0
    if DOCUMENT_IDS:
        # 1: queries are the last of the keys; 2: their ids stand behind those of the keys.
        num_ids = seq_k + seq_q if DOCUMENT_IDS == 2 else seq_k
        ids = document_ids + sample.to(tl.int64) * num_ids
        of_key = tl.load(ids + key, mask=key < seq_k, other=0)
        of_query = tl.load(ids + (num_ids - seq_q) + query, mask=query < seq_q, other=0)
        allowed &= of_key == of_query
    return allowed


@triton.jit
def pair_multiplicity(query, key, list_id, branches, num_branches, seq_q, seq_k):
    """How many branches of a list hold each pair: `BlockLayout.pair_multiplicity`."""
    position = query + (seq_k - seq_q)
    multiplicity = (query + key) * 0
    for t in range(num_branches):
        at = branches + (list_id * num_branches + t) * 5
        segment, dilation, offset = tl.load(at), tl.load(at + 1), tl.load(at + 2)
        query_at, key_at = position + tl.load(at + 3), key + tl.load(at + 4)
        of_query = tl.where((query_at >= 0) & (query_at % segment % dilation == offset), query_at // segment, -1)
        of_key = tl.where(key_at % segment % dilation == offset, key_at // segment, -2)
        multiplicity += (of_query == of_key).to(tl.int32)
    return multiplicity


@triton.jit
def add_pair_multiplicity(
    scores, multiplicity, query, key, list_id, branches, num_branches, seq_q, seq_k, scale, BASE_E: tl.constexpr
):  # fmt: skip
    """The scores of a mixed block (whose multiplicity is 0), each raised by the log of its pair's multiplicity."""
    if multiplicity == 0:
        of_pair = pair_multiplicity(query, key, list_id, branches, num_branches, seq_q, seq_k).to(tl.float32)
        log_m = tl.log(of_pair) if BASE_E else tl.log2(of_pair)  # −inf where the pair does not count
        scores = scores + log_m / scale
    return scores


@triton.jit
def log_multiplicity(multiplicity, BASE_E: tl.constexpr):
    """The log of a block's multiplicity, 0 for a mixed one."""
    at_least_once = tl.maximum(multiplicity, 1).to(tl.float32)
    return tl.log(at_least_once) if BASE_E else tl.log2(at_least_once)


@triton.jit
def apply_multiplicity(
    scores, entry, query, key, list_id, rule_ids, branches, num_branches, seq_q, seq_k, scale,
    MASKED: tl.constexpr, DILATED: tl.constexpr, BASE_E: tl.constexpr,
):  # fmt: skip
    """The scores of a tile, raised where its block is mixed, and the log of the block's multiplicity."""
    log_m = 0.0
    if DILATED:
        multiplicity = tl.load(rule_ids + entry)
        log_m = log_multiplicity(multiplicity, BASE_E)
        if MASKED and DILATED == 2:
            scores = add_pair_multiplicity(
                scores, multiplicity, query, key, list_id, branches, num_branches, seq_q, seq_k, scale, BASE_E
            )
    return scores, log_m


@triton.jit
def tanh(x):
    """Exact to a few units in the last place of float32, also where x is small."""
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    decay = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    ratio = (1 - decay) / (1 + decay)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -ratio, ratio))


SMALL_CAP = 128.0


def cap_kind(softcap: float) -> int:
    """0: none, 1: a small one, 2: a large one."""
    return int(softcap > 0.0) + int(softcap > SMALL_CAP)


@triton.jit
def signed_distance(query, key, origin, seq_q, seq_k):
    """How many tokens queries are ahead of keys: for each pair only the difference of two floats, exact near `origin`.

    To make floats of whole numbers takes as long as to exponentiate them.
    """
    return (query - origin).to(tl.float32) - (key - (seq_k - seq_q) - origin).to(tl.float32)


@triton.jit
def apply_score_mods(scores, ahead, slope, cap, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, BASE_E: tl.constexpr):
    """Scores with softcap and ALiBi applied, and the derivative of the softcap at each.

    The scores, `slope` and `cap` are in the units of the exponent; `ahead` is how far a query is ahead of a key;
    SOFTCAP is what `cap_kind` says.
    """
    softcap_grad = 1.0
    if SOFTCAP:
        if BASE_E or SOFTCAP == 2:
            share = tanh(scores * (1 / cap))
            scores = cap * share
            softcap_grad = 1 - share * share
        else:  # off by some 2⁻²² of the cap; of a small one far less than what scores of 16-bit numbers are off by
            denominator = 1 + tl.exp2(scores * (2 * LOG2E / cap))
            inverse = tl.rsqrt(denominator * denominator)  # in fewer steps than by a division
            scores = cap - 2 * cap * inverse
            softcap_grad = 4 * inverse * (1 - inverse)
    if ALIBI:
        scores -= slope * tl.abs(ahead)
    return scores, softcap_grad


@triton.jit
def fold32(x):
    return x ^ (x >> 16)


@triton.jit
def stir32(x):
    return fold32(x * 0x045D9F3B) * 0x045D9F3B


@triton.jit
def dropout_offset(seed, place, OF_KEYS: tl.constexpr):
    """By how much the tokens of a place's block are renumbered for the draw, by a seed in the form of a table."""
    at = (place >> tl.load(seed + 2 + OF_KEYS).to(tl.int32)) & tl.load(seed + 1).to(tl.int32)
    if OF_KEYS:
        at += tl.load(seed + 4).to(tl.int32)
    return tl.load(seed + 5 + at).to(tl.int32)


# `backends.dropout.keep_mask` in three parts: what a query or a key decides alone is not computed for every pair. Its
# hash, `patterns.blocks.mix32`, is a fold, a stir and a fold; folds go through `^`, and two of them undo each other.


@triton.jit
def dropout_query_hash(seed, stream, query, place):
    """`place` is a token of each one's block, or of the block that all are in."""
    query += dropout_offset(seed, place, 0)
    row = stir32(stir32(fold32(tl.load(seed).to(tl.uint32))) ^ fold32(stream.to(tl.uint32)))
    return stir32(row ^ fold32(query.to(tl.uint32)))


@triton.jit
def dropout_key_hash(seed, key, place):
    key += dropout_offset(seed, place, 1)
    return fold32(key.to(tl.uint32))


@triton.jit
def dropout_keeps(query_hash, key_hash, threshold):
    draw = fold32(stir32(query_hash ^ key_hash))
    return (draw >= threshold.to(tl.uint32)) & (threshold.to(tl.int64) < 1 << 32)  # all are dropped at 1 << 32


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
