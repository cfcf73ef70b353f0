"""The forward kernel for Hopper, warp-specialised in Gluon: the twin of `forward.py`, which is the one to read first.

A program keeps one multiprocessor for the whole call and takes tiles of 128 queries in turn. One warp fetches (the
query tile, then key and value blocks, into rings of buffers), two warpgroups compute, 64 queries each. In each of them
the scores of a block are on the matrix units while the weights of the one before are multiplied with the values, and
the first scores of the next tile while the tile before is written out:

    fetching warp   K0  V0  K1  V1  K2  V2 ...
    warpgroup 0     [S0] softmax0  [S1 O0] softmax1  [S2 O1] softmax2 ...           [S: scores of a block, q kᵀ
    warpgroup 1          [S0] softmax0  [S1 O0] softmax1  [S2 O1] softmax2 ...       O: weights of a block times v]

What is in brackets is on the matrix units. The warpgroups take turns at them (`take_turn`, `hand_over`), so that one
computes weights while the other multiplies.

    guard                     arrives                        waits                                  count
    queries.ready             the copy engine                each warpgroup, before a tile          1
    queries.empty             each warpgroup, when the       the fetching warp, Q_STAGES tiles      2
                              tile is written out (its       later
                              buffer held the output)
    keys.ready, values.ready  the copy engine                each warpgroup, before S, before O     1
    keys.empty, values.empty  each warpgroup, after S, O     the fetching warp, KV_STAGES blocks    2
                                                             later
    bar 14, bar 15            a warpgroup that hands over    the other one, in `take_turn`          256 threads

`hopper_common` says how rings count, and where the registers go.

A scheduler has two warps to choose from, so time is how long one of them takes from block to block, and not what the
units could do. Hence the care for the order of things; `docs/dev/LOG.md` has the numbers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .common import (
    add_pair_multiplicity,
    apply_score_mods,
    dropout_keeps,
    dropout_key_hash,
    dropout_query_hash,
    key_bounds,
    log_multiplicity,
    signed_distance,
)
from .forward import VARYING
from .hopper_bits import bit_words, bounded_words, hide_by_bits, hide_united, rule_of
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
    store_block,
)
from .hopper_gather import fetch_part, first_to_fetch, gathered_key_hash, next_to_fetch


@aggregate
class Rings:
    queries: Ring
    keys: Ring
    values: Ring
    outs: gl.shared_memory_descriptor  # one for each warpgroup; the queries' own where heads of v are as wide


@gluon.jit
def tile_for(lists, turn, WHO: gl.constexpr):
    """The tile of a turn: one for both warpgroups, or that of one of them."""
    if lists.OWN_BLOCK < TILE:
        tile = lists.tile_alone(turn, WHO)
    else:
        tile = lists.tile(turn, lists.heads, 1)
    return tile


@gluon.jit
def _fetch(
    WHO: gl.constexpr, KEYS: gl.constexpr, VALUES: gl.constexpr, q, k, v, rings, lists,
    D: gl.constexpr, D_V: gl.constexpr,
):  # fmt: skip
    """Queries with KEYS, VALUES, or all of it."""
    HALVES: gl.constexpr = 1 if lists.OWN_BLOCK < TILE else 2
    queries, keys, values = rings.queries, rings.keys, rings.values
    step, turns = 0, lists.turns()
    tile = tile_for(lists, 0, WHO)
    block = first_to_fetch(lists, tile)
    for turn in range(turns):
        # Reading lists takes as long as a block of work: the next tile and the next block are asked for in time.
        next_tile = tile_for(lists, turn + 1, WHO)
        if KEYS:
            bar = queries.acquire(turn, HALVES * ROWS * D * BYTES)
            for half in gl.static_range(HALVES):
                buffer = queries.buffers.index(HALVES * queries.place(turn) + half)
                at = [tile.sample, tile.row + half * ROWS, tile.residue, tile.head, 0]
                load_block(q, at, bar, as_block(buffer, q))
        head = tile.head // lists.group
        num = gl.maximum(lists.num_parts_up(tile.stop - tile.start), 1)
        for i in range(num):
            next_block = next_to_fetch(lists, tile, next_tile, i + 1, num)
            if KEYS:
                fetch_part(k, keys, step, lists, block, i, tile.sample, head, D)
            if VALUES:
                fetch_part(v, values, step, lists, block, i, tile.sample, head, D_V)
            step += 1
            block = next_block
        tile = next_tile


# Barriers of the hardware, which are quicker than those in memory; Triton takes the first numbers for itself. An
# assembler line must have a value that it reads and one that it makes.
TAKES = gl.constexpr(("bar.sync 14, 256; mov.u32 $0, 0;", "bar.sync 15, 256; mov.u32 $0, 0;"))
HANDS = gl.constexpr(("bar.arrive 15, 256; mov.u32 $0, 0;", "bar.arrive 14, 256; mov.u32 $0, 0;"))


@gluon.jit
def take_turn(WHO: gl.constexpr, ALONE: gl.constexpr):
    """Wait until the other warpgroup has handed over. Those with lists of their own wait for nobody."""
    if not ALONE:
        gl.inline_asm_elementwise(TAKES[WHO], "=r,r", [gl.program_id(0)], gl.int32, is_pure=False, pack=1)


@gluon.jit
def hand_over(WHO: gl.constexpr, ALONE: gl.constexpr):
    if not ALONE:
        gl.inline_asm_elementwise(HANDS[WHO], "=r,r", [gl.program_id(0)], gl.int32, is_pure=False, pack=1)


@aggregate
class Rows:
    """What a warpgroup knows of its 64 queries before it meets a key."""

    token: gl.tensor  # of the sequence, as are keys
    place: gl.tensor  # in the tile, as a column
    query: gl.tensor  # the same as a column
    first: gl.tensor  # where BOUNDED, a query sees the keys from `first` to `first + reach`, whatever the block
    reach: gl.tensor
    list_id: gl.tensor
    exp_scale: gl.tensor  # scores times this are exponents of 2
    slope: gl.tensor
    origin: gl.tensor
    hash: gl.tensor


@gluon.jit
def rows_of(tile, lane, HALF: gl.constexpr, lists, masks, mods, FINE: gl.constexpr):
    BOUNDED: gl.constexpr = masks.ONE_INTERVAL and not masks.HAS_RULE_IDS
    token = lists.token(tile.row + HALF * ROWS + lane, tile.residue)
    query = gl.expand_dims(token, 1)
    list_id = lists.list_of(tile.sample, tile.head)
    first, reach = query, query
    if BOUNDED:
        first, last = key_bounds(
            query, 0, 0, masks.rules, masks.documents, masks.num_intervals, masks.seq_q, masks.seq_k, masks.DOCUMENTS
        )
        first, reach = reaching(first, last)
    exp_scale, slope, query_hash = mods.scale, 0.0, query
    if mods.SOFTCAP or mods.ALIBI:  # scores are scaled before they are modified
        exp_scale = 1.0
    origin = lists.token(tile.row, tile.residue)
    if mods.ALIBI:
        slope = gl.load(mods.slopes + tile.head)
    if mods.DROPOUT:
        stream = tile.sample * lists.heads + tile.head
        query_hash = dropout_query_hash(mods.seed, stream, query, query if FINE else tile.row)
    place = gl.expand_dims(HALF * ROWS + lane, 1)
    return Rows(token, place, query, first, reach, list_id, exp_scale, slope, origin, query_hash)


@gluon.jit
def modify(scores, key, rows, masks, mods):
    """Scores with softcap and ALiBi applied."""
    scores = scores * mods.scale
    distance = signed_distance(rows.query, key, rows.origin, masks.seq_q, masks.seq_k)
    return apply_score_mods(scores, distance, rows.slope, mods.cap, mods.SOFTCAP, mods.ALIBI, False)[0]


@gluon.jit
def hide(
    scores, key, entry, multiplicity, rows, tile, masks, ANY: gl.constexpr, GATHERED: gl.constexpr,
    DILATED: gl.constexpr,
):  # fmt: skip
    """Scores with −inf where a pair is not allowed. The block is partial, or ANY: full, partial, not there at all; of
    GATHERED ones each has a state of its own."""
    SIMPLE: gl.constexpr = masks.ONE_INTERVAL and not (masks.HAS_RULE_IDS or masks.DOCUMENT_IDS)
    seen = masks.allowed(
        key, rows.query, key, rows.first, rows.reach, entry, tile.split, tile.stop, tile.sample,
        SIMPLE and (GATHERED or not ANY), True, ANY,
    )  # fmt: skip
    if SIMPLE and GATHERED:
        seen = (seen | (entry < tile.split)) & (entry < tile.stop)
    scores = gl.where(seen, scores, float("-inf"))
    if DILATED == 2:
        scores = add_pair_multiplicity(
            scores, multiplicity, rows.query, key, rows.list_id, masks.branches, masks.num_branches,
            masks.seq_q, masks.seq_k, rows.exp_scale, False,
        )  # fmt: skip
    return scores


@gluon.jit
def drop(weights, block, key, key_lane, rows, lists, mods):
    if lists.BLOCK < lists.STREAM:
        key_hash = gathered_key_hash(mods.seed, block, key, key_lane, lists)
    else:
        key_hash = dropout_key_hash(mods.seed, key, block * lists.BLOCK)
    return weights * gl.where(dropout_keeps(rows.hash, key_hash, mods.threshold), mods.keep_scale, 0.0)


@gluon.jit
def first_softmax(scores, log_m, rows):
    """Weights of a tile's first block, their sum, and the maximum of the exponents."""
    row_max = max_of_rows(scores) * rows.exp_scale
    base = gl.where(row_max == float("-inf"), 0.0, row_max)
    weights = gl.exp2(scores * rows.exp_scale - gl.expand_dims(base - log_m, 1))
    return weights, gl.sum(weights, 1), row_max


@gluon.jit
def next_softmax(scores, row_sum, row_max, multiplicity, rows, MAY_SEE_NOTHING: gl.constexpr, DILATED: gl.constexpr):
    """The same of another block, and by how much what was added up before it shrinks."""
    new_max = gl.maximum(row_max, max_of_rows(scores) * rows.exp_scale)
    base = new_max
    if MAY_SEE_NOTHING:
        base = gl.where(new_max == float("-inf"), 0.0, new_max)
    shrink = gl.exp2(row_max - base)
    if DILATED:
        base = base - log_multiplicity(multiplicity, False)
    weights = gl.exp2(scores * rows.exp_scale - gl.expand_dims(base, 1))
    return weights, row_sum * shrink + gl.sum(weights, 1), new_max, shrink


@gluon.jit
def max_of_rows(x):
    """The largest of each row; halves against each other first: one long chain of maxima would wait for itself."""
    wide = x
    for _ in gl.static_range(4 if x.shape[1] == 128 else 3):  # until a thread has two numbers
        left, right = gl.split(gl.permute(gl.reshape(wide, [wide.shape[0], 2, wide.shape[1] // 2]), (0, 2, 1)))
        wide = gl.maximum(left, right)
    return gl.convert_layout(gl.max(wide, 1), gl.SliceLayout(1, x.type.layout), assert_trivial=True)


@gluon.jit
def _compute(
    WHO: gl.constexpr, out, lse, bitmaps, rings, lists, masks, mods, D: gl.constexpr, D_V: gl.constexpr,
    FINE: gl.constexpr, BITMAPS: gl.constexpr,
):  # fmt: skip
    queries, keys, values = rings.queries, rings.keys, rings.values
    # With one buffer of queries a tile's first scores wait until the tile before has left.
    EARLY: gl.constexpr = queries.NUM_STAGES > 1
    TILE_K: gl.constexpr = lists.STREAM
    GATHERED: gl.constexpr = lists.BLOCK < TILE_K
    DILATED: gl.constexpr = lists.DILATED
    ALONE: gl.constexpr = lists.OWN_BLOCK < TILE
    HALVES: gl.constexpr = 1 if ALONE else 2  # of a tile, and which one is this warpgroup's
    HALF: gl.constexpr = 0 if ALONE else WHO
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_K, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D_V, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    HAS_CALL_MASK: gl.constexpr = masks.DOCUMENT_IDS
    HAS_SCORE_MODS: gl.constexpr = mods.SOFTCAP or mods.ALIBI
    dtype: gl.constexpr = queries.buffers.dtype
    # As what weights wait for their turn: ptxas keeps rounded ones with their pairs the wrong way round, and to turn
    # them takes 32 instructions a block. Large heads leave no registers for more.
    KEPT: gl.constexpr = gl.float32 if D_V <= 64 else dtype
    no_scores = gl.zeros([ROWS, TILE_K], gl.float32, SCORES)
    lane = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    key_lane = gl.arange(0, TILE_K, gl.SliceLayout(0, SCORES))

    step, turns = 0, lists.turns()
    if WHO == 1:
        hand_over(WHO, ALONE)
    tile = tile_for(lists, 0, WHO)
    if EARLY:
        queries.wait(0)
        keys.wait(0)
        pending = warpgroup_mma(
            queries.buffers.index(HALF), keys.buffers.index(0).permute((1, 0)), no_scores, use_acc=False, is_async=True
        )
    for turn in range(turns):
        # What the next tile is: asked for now, read when this one is done.
        next_tile = tile_for(lists, turn + 1, WHO)
        q = queries.buffers.index(queries.place(turn) * HALVES + HALF)
        rows = rows_of(tile, lane, HALF, lists, masks, mods, FINE)
        num_full = lists.num_parts(tile.masked_from - tile.start)
        # A row without keys has one block, of which it sees nothing.
        num = gl.maximum(lists.num_parts_up(tile.stop - tile.start), 1)
        if not EARLY:
            queries.wait(turn)
            keys.wait(step)
            pending = warpgroup_mma(
                q, keys.buffers.index(keys.place(step)).permute((1, 0)), no_scores, use_acc=False, is_async=True
            )

        block = lists.blocks_of(tile.start, tile.stop, 0, True)
        multiplicity, log_m = 1, 0.0
        if DILATED:
            multiplicity = gl.load(masks.rule_ids + tile.start, mask=tile.start < tile.stop, other=1)
            log_m = log_multiplicity(multiplicity, False)
        if BITMAPS:
            rule, named = rule_of(tile.start, tile.stop, masks)
            words = bit_words(named, 0, tile, bitmaps, lists, no_scores, HALF)
        scores = warpgroup_mma_wait(0, deps=[pending])
        keys.release(step)
        if mods.NEGATIVE_SCALE:
            scores = -scores
        if HAS_SCORE_MODS or mods.DROPOUT:
            key = lists.tokens(block, 0, key_lane)
        if HAS_SCORE_MODS:
            scores = modify(scores, key, rows, masks, mods)
        if FINE:
            words = lists.words_of(masks.rule_ids, tile.start, tile.stop, 0)
            key = lists.tokens(block, 0, key_lane)
            # That something besides a loop's bound asks for `num_full` is needed, too: what a loop carries, and only
            # bounds ask for, Triton 3.6 takes for dead, and keeps the first tile's.
            if num_full == 0:
                scores = hide_united(scores, key, words, block, 0, key_lane, rows, tile, lists, masks, True, FINE)
            else:
                scores = hide_united(scores, key, words, block, 0, key_lane, rows, tile, lists, masks, False, FINE)
        elif HAS_CALL_MASK or num_full == 0:
            key = lists.tokens(block, 0, key_lane)
            entry = lists.entry(tile.start, 0, key_lane)
            scores = hide(scores, key, entry, multiplicity, rows, tile, masks, True, GATHERED, DILATED)
            if BITMAPS:
                scores = hide_by_bits(scores, words, entry < tile.split)
            if masks.PADDING:
                real = real_keys(masks.padding, tile, block, 0, key_lane, lists)
                scores = gl.where(real, scores, float("-inf"))
        weights, row_sum, row_max = first_softmax(scores, log_m, rows)
        if mods.DROPOUT:
            weights = drop(weights, block, key, key_lane, rows, lists, mods)
        weights = weights.to(KEPT)
        if EARLY and turn > 0:  # by now the tile before has left its buffer
            tma.store_wait(0)
            queries.release(turn - 1)
        acc = gl.zeros([ROWS, D_V], gl.float32, ACC)
        for MASKED in gl.static_range(2):
            if MASKED:
                begin, end = gl.maximum(num_full, 1), num
                if BITMAPS:
                    rule, named = rule_of(lists.entry(tile.start, begin, 0), tile.stop, masks)
                # The same queries, by an address that does not look the same (no list ends before it starts): else
                # ptxas reads here what it has computed before the loop over full blocks, even where there are none.
                q = queries.buffers.index(queries.place(turn) * HALVES + HALF + (tile.start > tile.stop).to(gl.int32))
            else:
                begin, end = 1, num_full
            for i in range(begin, end):
                here, before = step + i, step + i - 1
                # Asked for now, read when scores are there.
                if MASKED or HAS_CALL_MASK or mods.ALIBI or mods.DROPOUT or (FINE and masks.PADDING):
                    block = lists.blocks_of(tile.start, tile.stop, i, False)
                if BITMAPS and MASKED:
                    words = bit_words(named, i, tile, bitmaps, lists, no_scores, HALF)
                if FINE:
                    words_here = lists.words_of(masks.rule_ids, tile.start, tile.stop, i)
                if DILATED:
                    multiplicity = gl.load(masks.rule_ids + lists.entry(tile.start, i, 0))
                keys.wait(here)
                take_turn(WHO, ALONE)
                pending_scores = warpgroup_mma(
                    q, keys.buffers.index(keys.place(here)).permute((1, 0)), no_scores, use_acc=False, is_async=True
                )
                operand = gl.convert_layout(weights.to(dtype), WEIGHTS)
                values.wait(before)
                pending_acc = warpgroup_mma(operand, values.buffers.index(values.place(before)), acc, is_async=True)
                hand_over(WHO, ALONE)
                if BITMAPS and MASKED:
                    rule_here = rule
                    rule, named = rule_of(lists.entry(tile.start, i + 1, 0), tile.stop, masks)
                scores = warpgroup_mma_wait(1, deps=[pending_scores])
                if mods.NEGATIVE_SCALE:
                    scores = -scores
                if HAS_SCORE_MODS or mods.DROPOUT:
                    key = lists.tokens(block, i, key_lane)
                if HAS_SCORE_MODS:
                    scores = modify(scores, key, rows, masks, mods)
                if FINE:
                    if MASKED or HAS_CALL_MASK:
                        key = lists.tokens(block, i, key_lane)
                    scores = hide_united(
                        scores, key, words_here, block, i, key_lane, rows, tile, lists, masks, MASKED, FINE
                    )  # fmt: skip
                elif BITMAPS and MASKED and not HAS_CALL_MASK:
                    words = bounded_words(words, rule_here, block, i, tile, lists, masks, HALF)
                    whole = False
                    if masks.PADDING:
                        whole = lists.entry(tile.start, i, key_lane) < tile.split
                    scores = hide_by_bits(scores, words, whole)
                elif MASKED or HAS_CALL_MASK:
                    # Always so; but what is behind a branch is not computed early, to be kept until it is needed.
                    partial = tile.start < tile.stop
                    if masks.PADDING and not HAS_CALL_MASK:
                        partial = lists.ends_behind(tile.start, i, tile.split)
                    if partial:
                        key = lists.tokens(block, i, key_lane)
                        entry = lists.entry(tile.start, i, key_lane)
                        ANY: gl.constexpr = GATHERED or not MASKED or (masks.PADDING and HAS_CALL_MASK)
                        scores = hide(scores, key, entry, multiplicity, rows, tile, masks, ANY, GATHERED, DILATED)
                    if BITMAPS and MASKED:
                        whole = False
                        if masks.PADDING:
                            whole = lists.entry(tile.start, i, key_lane) < tile.split
                        scores = hide_by_bits(scores, words, whole)
                if MASKED and masks.PADDING and not FINE:
                    real = real_keys(masks.padding, tile, block, i, key_lane, lists)
                    scores = gl.where(real, scores, float("-inf"))
                weights, row_sum, row_max, shrink = next_softmax(
                    scores, row_sum, row_max, multiplicity, rows, MASKED or HAS_CALL_MASK or FINE > 0, DILATED
                )
                if mods.DROPOUT:
                    weights = drop(weights, block, key, key_lane, rows, lists, mods)
                acc, operand = warpgroup_mma_wait(0, deps=[pending_acc, operand])
                keys.release(here)
                values.release(before)
                weights = weights.to(KEPT)
                acc = acc * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, ACC)), 1)

        last = step + num - 1
        step += num
        operand = gl.convert_layout(weights.to(dtype), WEIGHTS)
        values.wait(last)
        take_turn(WHO, ALONE)
        pending_acc = warpgroup_mma(operand, values.buffers.index(values.place(last)), acc, is_async=True)
        if EARLY:
            next_turn = turn + 1
            if next_turn < turns:
                queries.wait(next_turn)
                keys.wait(step)
            # After the last tile this multiplies what is left in the buffers, and nobody reads the result.
            pending = warpgroup_mma(
                queries.buffers.index(queries.place(next_turn) * HALVES + HALF),
                keys.buffers.index(keys.place(step)).permute((1, 0)), no_scores, use_acc=False, is_async=True,
            )  # fmt: skip
        hand_over(WHO, ALONE)
        acc = warpgroup_mma_wait(1 if EARLY else 0, deps=[pending_acc])
        values.release(last)

        empty = row_sum == 0.0
        inverse = 1.0 / gl.where(empty, 1.0, row_sum)
        acc = acc * gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, ACC)), 1)
        if D == D_V:
            o = q  # these queries have served; no other warpgroup reads them
        else:
            o = rings.outs.index(HALF)
        o.store(acc.to(dtype))
        fence_async_shared()
        store_block(out, [tile.sample, tile.row + HALF * ROWS, tile.residue, tile.head, 0], as_block(o, out))
        row_lse = gl.where(empty, float("-inf"), (row_max + gl.log2(row_sum)) * 0.6931471805599453)
        of_head = (tile.sample.to(gl.int64) * lists.heads + tile.head) * masks.seq_q
        gl.store(lse + of_head + rows.token, row_lse, mask=rows.token < masks.seq_q)
        if not EARLY:
            tma.store_wait(0)
            queries.release(turn)
        tile = next_tile
    if WHO == 0:
        take_turn(WHO, ALONE)
    if EARLY:
        warpgroup_mma_wait(0, deps=[pending])
    tma.store_wait(0)


@gluon.jit
def new_rings(
    dtype: gl.constexpr, D: gl.constexpr, D_V: gl.constexpr, TILE_K: gl.constexpr, Q_STAGES: gl.constexpr,
    KV_STAGES: gl.constexpr, ALONE: gl.constexpr,
):  # fmt: skip
    """For both warpgroups, or for one that works alone."""
    CONSUMERS: gl.constexpr = 1 if ALONE else 2
    ROW_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], dtype)
    KEY_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_K, D], dtype)
    VALUE_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_K, D_V], dtype)
    q_buffers = gl.allocate_shared_memory(dtype, [CONSUMERS * Q_STAGES, ROWS, D], ROW_LAYOUT)
    k_buffers = gl.allocate_shared_memory(dtype, [KV_STAGES, TILE_K, D], KEY_LAYOUT)
    v_buffers = gl.allocate_shared_memory(dtype, [KV_STAGES, TILE_K, D_V], VALUE_LAYOUT)
    outs = q_buffers
    if D != D_V:
        OUT_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D_V], dtype)
        outs = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, D_V], OUT_LAYOUT)
    queries = Ring(q_buffers, new_barriers(Q_STAGES), new_barriers(Q_STAGES), Q_STAGES)
    keys = Ring(k_buffers, new_barriers(KV_STAGES), new_barriers(KV_STAGES), KV_STAGES)
    values = Ring(v_buffers, new_barriers(KV_STAGES), new_barriers(KV_STAGES), KV_STAGES)
    for place in gl.static_range(Q_STAGES):
        queries.init(place, 1, CONSUMERS)
    for place in gl.static_range(KV_STAGES):
        keys.init(place, 1, CONSUMERS)
        values.init(place, 1, CONSUMERS)
    return Rings(queries, keys, values, outs)


@gluon.jit(do_not_specialize=[*VARYING, *VARYING_STEPS])
def forward_kernel(
    q, k, v, out, lse,
    indices, rule_ids, work, rules, documents, branches, padding, document_ids, seed, slopes, bitmaps,
    heads, group, seq_q, seq_k, num_blocks, lists_per_sample, heads_per_list, num_intervals, num_branches, num_residues,
    total_tiles, tiles_per_head, first_tile, tile_order, walked,
    scale, cap, threshold, keep_scale,
    D: gl.constexpr, D_V: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, TILE_K: gl.constexpr,
    Q_STAGES: gl.constexpr, KV_STAGES: gl.constexpr, NEGATIVE_SCALE: gl.constexpr,
    HAS_RULE_IDS: gl.constexpr, ONE_INTERVAL: gl.constexpr, DOCUMENTS: gl.constexpr, PADDING: gl.constexpr,
    DOCUMENT_IDS: gl.constexpr, DILATED: gl.constexpr, SOFTCAP: gl.constexpr, ALIBI: gl.constexpr,
    DROPOUT: gl.constexpr, FINE: gl.constexpr, BITMAPS: gl.constexpr,
):  # fmt: skip
    """`q`, `k`, `v` and `out` are what `describe` makes; `total_tiles` to `tile_order` are a `TileSchedule`, `walked`
    is the number of key blocks of a residue class. D and D_V are the widths of boxes, at least those of heads.
    FINE is 0, or the small block of which BLOCK_Q unites several: then `rule_ids` are `United.words`."""
    ALONE: gl.constexpr = BLOCK_Q < TILE
    rings = new_rings(q.dtype, D, D_V, TILE_K, Q_STAGES, KV_STAGES, ALONE)
    lists = Lists(
        indices, work, heads, group, num_blocks, lists_per_sample, heads_per_list, num_residues, walked,
        (total_tiles, tiles_per_head, first_tile, tile_order), BLOCK_Q, BLOCK_K, TILE_K, DILATED,
        PADDING and not FINE,
    )  # fmt: skip
    masks = Masks(
        rule_ids, rules, documents, branches, padding, document_ids, seq_q, seq_k, num_intervals, num_branches,
        HAS_RULE_IDS, ONE_INTERVAL, DOCUMENTS, PADDING, DOCUMENT_IDS,
    )  # fmt: skip
    mods = ScoreMods(scale, cap, slopes, seed, threshold, keep_scale, NEGATIVE_SCALE, SOFTCAP, ALIBI, DROPOUT)
    others = rings
    if ALONE:
        others = new_rings(q.dtype, D, D_V, TILE_K, Q_STAGES, KV_STAGES, ALONE)
    if BLOCK_K >= TILE_K and not ALONE:
        gl.warp_specialize([
            (_compute, (0, out, lse, bitmaps, rings, lists, masks, mods, D, D_V, FINE, BITMAPS)),
            (_compute, (1, out, lse, bitmaps, others, lists, masks, mods, D, D_V, FINE, BITMAPS)),
            (_fetch, (0, True, True, q, k, v, rings, lists, D, D_V)),
        ], [4, 1], [COMPUTE_REGS, FETCH_REGS])  # fmt: skip
    elif BLOCK_K >= TILE_K:
        gl.warp_specialize([
            (_compute, (0, out, lse, bitmaps, rings, lists, masks, mods, D, D_V, FINE, BITMAPS)),
            (_compute, (1, out, lse, bitmaps, others, lists, masks, mods, D, D_V, FINE, BITMAPS)),
            (_fetch, (0, True, True, q, k, v, rings, lists, D, D_V)),
            (_fetch, (1, True, True, q, k, v, others, lists, D, D_V)),
        ], [4, 1, 1], [COMPUTE_REGS, FETCH_REGS, FETCH_REGS])  # fmt: skip
    elif not ALONE:  # boxes are so many instructions that those of keys, or of values, are enough for a warp
        gl.warp_specialize([
            (_compute, (0, out, lse, bitmaps, rings, lists, masks, mods, D, D_V, FINE, BITMAPS)),
            (_compute, (1, out, lse, bitmaps, others, lists, masks, mods, D, D_V, FINE, BITMAPS)),
            (_fetch, (0, True, False, q, k, v, rings, lists, D, D_V)),
            (_fetch, (0, False, True, q, k, v, rings, lists, D, D_V)),
        ], [4, 1, 1], [COMPUTE_REGS, FETCH_REGS, FETCH_REGS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_compute, (0, out, lse, bitmaps, rings, lists, masks, mods, D, D_V, FINE, BITMAPS)),
            (_compute, (1, out, lse, bitmaps, others, lists, masks, mods, D, D_V, FINE, BITMAPS)),
            (_fetch, (0, True, False, q, k, v, rings, lists, D, D_V)),
            (_fetch, (0, False, True, q, k, v, rings, lists, D, D_V)),
            (_fetch, (1, True, False, q, k, v, others, lists, D, D_V)),
            (_fetch, (1, False, True, q, k, v, others, lists, D, D_V)),
        ], [4, 1, 1, 1, 1], [COMPUTE_REGS, FETCH_REGS, FETCH_REGS, FETCH_REGS, FETCH_REGS])  # fmt: skip
