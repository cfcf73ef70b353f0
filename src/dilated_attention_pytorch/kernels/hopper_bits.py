"""What single bits hide in the forward for Hopper: pairs of a block by `layout.bitmaps`, small rows by `United.words`.

Words are asked for before the scores are there. A thread reads those of its own scores: their layout is that of the
scores, split into units of keys, and to spread the bits over them moves nothing.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .common import key_bounds
from .hopper_common import ROWS, real_keys, spread, within


@gluon.jit
def rule_of(entry, stop, masks):
    """The rule of a partial block, and what it names: −1 − the number of a bitmap."""
    rule = stop * 0
    if masks.HAS_RULE_IDS:
        rule = gl.load(masks.rule_ids + gl.maximum(gl.minimum(entry, stop - 1), 0))
    return rule, gl.load(masks.rules + rule * masks.num_intervals * 5 + 4)


@gluon.jit
def bit_words(named, i, tile, bitmaps, lists, like, HALF: gl.constexpr):
    """The words of a part's pairs, [rows, units of 16 keys]: each thread those of its scores, which are laid out as
    `like` is. Where no bitmap is named, all bits are set."""
    UNITS: gl.constexpr = lists.STREAM // 16
    layout: gl.constexpr = gl.SliceLayout(2, gl.reshape(like, [ROWS, UNITS, 16]).type.layout)
    row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, layout)), 1) + (tile.row % lists.OWN_BLOCK + HALF * ROWS)
    unit = gl.expand_dims(gl.arange(0, UNITS, gl.SliceLayout(0, layout)), 0)
    unit = unit + i % (lists.BLOCK // lists.STREAM) * UNITS
    at = gl.maximum(-1 - named, 0).to(gl.int64) * (lists.OWN_BLOCK * (lists.BLOCK // 16))
    inside = row * (lists.BLOCK // 16) + unit
    return gl.load(bitmaps + at + inside, mask=(inside >= 0) & (named < 0), other=-1).to(gl.int32)


@gluon.jit
def bounded_words(words, rule, block, i, tile, lists, masks, HALF: gl.constexpr):
    """Words without the pairs that the bounds of a rule hide: fewer steps than to compare every pair."""
    of_rows: gl.constexpr = gl.SliceLayout(1, words.type.layout)
    of_units: gl.constexpr = gl.SliceLayout(0, words.type.layout)
    row = tile.row + HALF * ROWS + gl.expand_dims(gl.arange(0, ROWS, of_rows), 1)
    _, key = lists.part(block, i)
    key = key + gl.expand_dims(gl.arange(0, words.shape[1], of_units), 0) * 16
    first, last = key_bounds(
        row, rule, 0, masks.rules, masks.documents, masks.num_intervals, masks.seq_q, masks.seq_k, masks.DOCUMENTS
    )
    below = gl.minimum(gl.maximum(first - key, 0), 16)
    inside = gl.minimum(gl.maximum(last + 1 - key, 0), 16)
    return words & ((1 << inside) - 1) & (-1 << below)


@gluon.jit
def hide_by_bits(scores, words, whole):
    """Scores with −inf where a bit is not set, but for blocks that are `whole`."""
    cube: gl.constexpr = gl.reshape(scores, [words.shape[0], words.shape[1], 16]).type.layout
    lane = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, cube)))
    bits = (gl.expand_dims(words, 2) >> gl.expand_dims(gl.expand_dims(lane, 0), 1)) & 1
    seen = gl.convert_layout(gl.reshape(bits, scores.shape), scores.type.layout, assert_trivial=True) != 0
    return gl.where(seen | whole, scores, float("-inf"))


@gluon.jit
def hide_united(
    scores, key, words, block, i, key_lane, rows, tile, lists, masks, MASKED: gl.constexpr, FINE: gl.constexpr
):  # fmt: skip
    """Scores of part `i` of united rows, with −inf where a pair is not allowed: `words` say which rows see each block,
    or all of it."""
    word = gl.expand_dims(spread(words, key_lane // lists.BLOCK), 0)
    part = rows.place // FINE
    seen = (word >> part) & 1 != 0
    if MASKED:
        seen = seen & (((word >> (part + 8)) & 1 != 0) | within(key, rows.first, rows.reach))
    if masks.PADDING:
        seen = seen & real_keys(masks.padding, tile, block, i, key_lane, lists)
    if masks.DOCUMENT_IDS:
        seen = seen & masks.allowed(
            key, rows.query, key, rows.first, rows.reach, 0, 0, 0, tile.sample, False, False, False
        )  # fmt: skip
    return gl.where(seen, scores, float("-inf"))
