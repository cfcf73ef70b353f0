"""The forward kernel for Hopper, warp-specialised in Gluon: the twin of `forward.py`, which is the one to read first.

A program keeps one multiprocessor for the whole call and takes tiles of 128 queries in turn. One warp fetches (the
query tile, then key and value blocks, into rings of buffers), two warpgroups compute, 64 queries each. In each of them
the scores of a block are on the matrix units while the weights of the one before are multiplied with the values, and
the first scores of the next tile while the tile before is written out.

Barriers: `*_ready` says that a buffer is filled, `*_empty` that both warpgroups have done with it. Their phase is the
parity of the turn: how often the ring went round, counted over all tiles. The warpgroups hand their products to the
matrix units in turns (`take_turn`, `hand_over`), so that one computes weights while the other multiplies.

A scheduler has two warps to choose from, so time is how long one of them takes from block to block, and not what the
units could do. Hence the care for the order of things; `docs/dev/LOG.md` has the numbers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .common import (
    add_pair_multiplicity,
    apply_score_mods,
    dropout_keeps,
    dropout_key_hash,
    dropout_query_hash,
    key_bounds,
    list_of,
    load_work,
    log_multiplicity,
    pairs_allowed,
    signed_distance,
)
from .forward import VARYING
from .launcher import MOST, described_again
from .tile_scheduler import num_turns, scheduled_tile

PLAIN_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
# Names that Triton 3.9 changed.
RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
load_block = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_block = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
BYTES = gl.constexpr(2)  # of a number
ROWS = gl.constexpr(64)  # of a warpgroup
TILE = gl.constexpr(2 * ROWS.value)


def describe(x: Tensor, rows: int, num_residues: int) -> TensorDescriptor:
    """For the copy engine: `rows` tokens of one head of x [batch, seq, heads, D], every `num_residues`-th.

    Those ≡ r modulo `num_residues` lie in the columns from `r · x.stride(1)` on.
    """
    batch, seq, heads, head_dim = x.shape
    of_sample, step = x.stride()[:2]
    shape = batch, seq // num_residues, (num_residues - 1) * step + heads * head_dim
    return _described(x, shape, (of_sample, step * num_residues, 1), (1, rows, head_dim))


def describe_rows(of_rows: Tensor, num: int) -> TensorDescriptor:
    """`num` numbers of a row of of_rows [2, batch, heads, padded_q], as a matrix of all its rows."""
    padded_q = of_rows.shape[-1]
    return _described(of_rows, (of_rows.numel() // padded_q, padded_q), (padded_q, 1), (1, num))


_known: dict[tuple[object, ...], dict[str, Any]] = {}


def _described(x: Tensor, shape: Sequence[int], strides: Sequence[int], block: Sequence[int]) -> TensorDescriptor:
    """The first one like it is checked by Triton; another tensor in its place needs no more than that."""
    key = x.dtype, shape, strides, block
    fields = _known.get(key)
    if fields is None:
        layout = PLAIN_LAYOUT
        if x.dtype in DTYPES:
            layout = gl.NVMMASharedLayout.get_default_for(list(block), DTYPES[x.dtype])
        made = TensorDescriptor(x, list(shape), list(strides), list(block), layout)
        if len(_known) >= MOST:
            _known.clear()
        fields = _known[key] = {**vars(made), "base": None}
    return described_again(TensorDescriptor, fields, x)


@gluon.jit
def as_block(buffer, descriptor):
    """A buffer [rows, D] in the shape of a descriptor's block, [1, rows, D]."""
    if RENAMED:
        block = buffer.reinterpret(descriptor.dtype, descriptor.block_type.shape, descriptor.layout)
    else:
        block = buffer._reinterpret(descriptor.dtype, descriptor.block_type.shape, descriptor.layout)
    return block


@gluon.jit
def split_residue(block, blocks_per_residue, DILATED: gl.constexpr):
    """The residue class whose tokens a block takes, and the number of the block in that class."""
    if DILATED:
        residue = block // blocks_per_residue
        block = block - residue * blocks_per_residue
    else:
        residue = 0
    return residue, block


@gluon.jit
def token_of(row, residue, num_residues, DILATED: gl.constexpr):
    if DILATED:
        token = row * num_residues + residue
    else:
        token = row
    return token


@gluon.jit
def tile_of(
    turn, schedule, work, heads, num_blocks, num_residues, lists_per_sample, heads_per_list, list_heads,
    BLOCK: gl.constexpr, DILATED: gl.constexpr,
):  # fmt: skip
    """Sample, head, residue class and first row in it, block and list of the tile of a turn; the list is that of query
    head `head · list_heads`."""
    TILES_PER_BLOCK: gl.constexpr = BLOCK // TILE
    place, head_id = scheduled_tile(turn, schedule)
    sample, head = head_id // heads, head_id % heads
    rows_before = list_of(sample, head * list_heads, lists_per_sample, heads_per_list) * num_blocks
    block, start, split, stop = load_work(work, rows_before + place // TILES_PER_BLOCK)
    residue, row = split_residue(block, num_blocks // num_residues, DILATED)
    return sample, head, residue, row * BLOCK + place % TILES_PER_BLOCK * TILE, block, start, split, stop


@gluon.jit
def _fetch(
    q, k, v, buffers, barriers, lists, D: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr,
    TILE_K: gl.constexpr, Q_STAGES: gl.constexpr, KV_STAGES: gl.constexpr, DILATED: gl.constexpr,
):  # fmt: skip
    q_buffers, k_buffers, v_buffers = buffers
    q_ready, q_empty, k_ready, k_empty, v_ready, v_empty = barriers
    indices, work, heads, group, num_blocks, lists_per_sample, heads_per_list, schedule, num_residues, walked, steps = (
        lists
    )
    q_step, k_step, v_step = steps
    TILES_PER_BLOCK: gl.constexpr = BLOCK_K // TILE_K
    step, turns = 0, num_turns(schedule)
    sample, head, residue, query, _, start, _, stop = tile_of(
        0, schedule, work, heads, num_blocks, num_residues, lists_per_sample, heads_per_list, 1, BLOCK_Q, DILATED
    )
    block = gl.load(indices + start, mask=start < stop, other=0)
    for turn in range(turns):
        # Reading lists takes as long as a block of work: the next tile and the next block are asked for in time.
        next_sample, next_head, next_residue, next_query, _, next_start, _, next_stop = tile_of(
            turn + 1,
            schedule,
            work,
            heads,
            num_blocks,
            num_residues,
            lists_per_sample,
            heads_per_list,
            1,
            BLOCK_Q,
            DILATED,
        )
        place = turn % Q_STAGES
        mbarrier.wait(q_empty.index(place), (turn // Q_STAGES & 1) ^ 1)
        mbarrier.expect(q_ready.index(place), TILE * D * BYTES)
        for half in gl.static_range(2):
            buffer = q_buffers.index(2 * place + half)
            at = [sample, query + half * ROWS, head * D + residue * q_step]
            load_block(q, at, q_ready.index(place), as_block(buffer, q))
        column = head // group * D
        num = gl.maximum((stop - start) * TILES_PER_BLOCK, 1)
        for i in range(num):
            ends = i + 1 == num
            entry = gl.where(ends, next_start, start + (i + 1) // TILES_PER_BLOCK)
            next_block = gl.load(indices + entry, mask=entry < gl.where(ends, next_stop, stop), other=0)
            key_residue, row = split_residue(block, walked, DILATED)
            row = row * BLOCK_K + i % TILES_PER_BLOCK * TILE_K
            place, phase = step % KV_STAGES, step // KV_STAGES & 1
            mbarrier.wait(k_empty.index(place), phase ^ 1)
            mbarrier.expect(k_ready.index(place), TILE_K * D * BYTES)
            at = [sample, row, column + key_residue * k_step]
            load_block(k, at, k_ready.index(place), as_block(k_buffers.index(place), k))
            mbarrier.wait(v_empty.index(place), phase ^ 1)
            mbarrier.expect(v_ready.index(place), TILE_K * D * BYTES)
            at = [sample, row, column + key_residue * v_step]
            load_block(v, at, v_ready.index(place), as_block(v_buffers.index(place), v))
            step += 1
            block = next_block
        sample, head, residue, query = next_sample, next_head, next_residue, next_query
        start, stop = next_start, next_stop


# Barriers of the hardware, which are quicker than those in memory; Triton takes the first numbers for itself. An
# assembler line must have a value that it reads and one that it makes.
TAKES = gl.constexpr(("bar.sync 14, 256; mov.u32 $0, 0;", "bar.sync 15, 256; mov.u32 $0, 0;"))
HANDS = gl.constexpr(("bar.arrive 15, 256; mov.u32 $0, 0;", "bar.arrive 14, 256; mov.u32 $0, 0;"))


@gluon.jit
def take_turn(WHO: gl.constexpr):
    """Wait until the other warpgroup has handed over."""
    gl.inline_asm_elementwise(TAKES[WHO], "=r,r", [gl.program_id(0)], gl.int32, is_pure=False, pack=1)


@gluon.jit
def hand_over(WHO: gl.constexpr):
    gl.inline_asm_elementwise(HANDS[WHO], "=r,r", [gl.program_id(0)], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _compute(
    WHO: gl.constexpr, out, lse, buffers, barriers, masks, lists, numbers,
    D: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, TILE_K: gl.constexpr,
    Q_STAGES: gl.constexpr, KV_STAGES: gl.constexpr, NEGATIVE_SCALE: gl.constexpr,
    HAS_RULE_IDS: gl.constexpr, ONE_INTERVAL: gl.constexpr, DOCUMENTS: gl.constexpr, PADDING: gl.constexpr,
    DOCUMENT_IDS: gl.constexpr, DILATED: gl.constexpr, SOFTCAP: gl.constexpr, ALIBI: gl.constexpr,
    DROPOUT: gl.constexpr,
):  # fmt: skip
    q_buffers, k_buffers, v_buffers = buffers
    q_ready, q_empty, k_ready, k_empty, v_ready, v_empty = barriers
    rule_ids, rules, documents, branches, padding, document_ids, seed, slopes = masks
    indices, work, heads, group, num_blocks, lists_per_sample, heads_per_list, schedule, num_residues, walked, _ = lists
    seq_q, seq_k, num_intervals, num_branches, scale, cap, threshold, keep_scale = numbers
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_K, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    TILES_PER_BLOCK: gl.constexpr = BLOCK_K // TILE_K
    HAS_CALL_MASK: gl.constexpr = PADDING or DOCUMENT_IDS
    HAS_SCORE_MODS: gl.constexpr = SOFTCAP or ALIBI
    # A query sees keys `first` to `first + reach`, whatever the block.
    BOUNDED: gl.constexpr = ONE_INTERVAL and not HAS_RULE_IDS
    dtype: gl.constexpr = q_buffers.dtype
    # As what weights wait for their turn: ptxas keeps rounded ones with their pairs the wrong way round, and to turn
    # them takes 32 instructions a block. Large heads leave no registers for more.
    KEPT: gl.constexpr = gl.float32 if D <= 64 else dtype
    no_scores = gl.zeros([ROWS, TILE_K], gl.float32, SCORES)
    lane = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    key_lane = gl.arange(0, TILE_K, gl.SliceLayout(0, SCORES))

    step, turns = 0, num_turns(schedule)
    if WHO == 1:
        hand_over(WHO)
    sample, head, residue, query_from, _, start, split, stop = tile_of(
        0, schedule, work, heads, num_blocks, num_residues, lists_per_sample, heads_per_list, 1, BLOCK_Q, DILATED
    )
    mbarrier.wait(q_ready.index(0), 0)
    mbarrier.wait(k_ready.index(0), 0)
    pending = warpgroup_mma(
        q_buffers.index(WHO), k_buffers.index(0).permute((1, 0)), no_scores, use_acc=False, is_async=True
    )
    for turn in range(turns):
        # What the next tile is: asked for now, read when this one is done.
        next_sample, next_head, next_residue, next_query, _, next_start, next_split, next_stop = tile_of(
            turn + 1,
            schedule,
            work,
            heads,
            num_blocks,
            num_residues,
            lists_per_sample,
            heads_per_list,
            1,
            BLOCK_Q,
            DILATED,
        )
        q = q_buffers.index(turn % Q_STAGES * 2 + WHO)
        row = token_of(query_from + WHO * ROWS + lane, residue, num_residues, DILATED)
        query = gl.expand_dims(row, 1)
        list_id = list_of(sample, head, lists_per_sample, heads_per_list)
        first, reach = query, query
        if BOUNDED:
            first, last = key_bounds(query, 0, 0, rules, documents, num_intervals, seq_q, seq_k, DOCUMENTS)
            first, reach = reaching(first, last)
        exp_scale, slope, query_hash = scale, 0.0, query
        if HAS_SCORE_MODS:  # scores are scaled before they are modified
            exp_scale = 1.0
        origin = token_of(query_from, residue, num_residues, DILATED)
        if ALIBI:
            slope = gl.load(slopes + head)
        if DROPOUT:
            query_hash = dropout_query_hash(seed, sample * heads + head, query, query_from)
        num_full = (split - start) * TILES_PER_BLOCK
        num = gl.maximum(
            (stop - start) * TILES_PER_BLOCK, 1
        )  # a row without keys has one block, of which it sees nothing

        block = gl.load(indices + start, mask=start < stop, other=0)
        multiplicity, log_m = 1, 0.0
        if DILATED:
            multiplicity = gl.load(rule_ids + start, mask=start < stop, other=1)
            log_m = log_multiplicity(multiplicity, False)
        scores = warpgroup_mma_wait(0, deps=[pending])
        mbarrier.arrive(k_empty.index(step % KV_STAGES), count=1)
        if NEGATIVE_SCALE:
            scores = -scores
        if HAS_SCORE_MODS or DROPOUT:
            key = tokens_of(block, 0, key_lane, walked, num_residues, BLOCK_K, TILE_K, DILATED)
        if HAS_SCORE_MODS:
            scores = scores * scale
            distance = signed_distance(query, key, origin, seq_q, seq_k)
            scores = apply_score_mods(scores, distance, slope, cap, SOFTCAP, ALIBI, False)[0]
        if HAS_CALL_MASK or num_full == 0:
            key = tokens_of(block, 0, key_lane, walked, num_residues, BLOCK_K, TILE_K, DILATED)
            scores = _hide(
                scores, query, first, reach, key, start, split, stop, sample, list_id, multiplicity, exp_scale,
                rule_ids, rules, documents, branches, padding, document_ids, num_intervals, num_branches, seq_q, seq_k,
                True, HAS_RULE_IDS, ONE_INTERVAL, DOCUMENTS, PADDING, DOCUMENT_IDS, DILATED,
            )  # fmt: skip
        row_max = max_of_rows(scores) * exp_scale
        base = gl.where(row_max == float("-inf"), 0.0, row_max)
        weights = gl.exp2(scores * exp_scale - gl.expand_dims(base - log_m, 1))
        row_sum = gl.sum(weights, 1)
        if DROPOUT:
            key_hash = dropout_key_hash(seed, key, block * BLOCK_K)
            weights *= gl.where(dropout_keeps(query_hash, key_hash, threshold), keep_scale, 0.0)
        weights = weights.to(KEPT)
        if turn > 0:  # by now the tile before has left its buffer
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index((turn - 1) % Q_STAGES), count=1)
        acc = gl.zeros([ROWS, D], gl.float32, ACC)
        for MASKED in gl.static_range(2):
            if MASKED:
                begin, end = gl.maximum(num_full, 1), num
                # The same queries, by an address that does not look the same (no list ends before it starts): else
                # ptxas reads here what it has computed before the loop over full blocks, even where there are none.
                q = q_buffers.index(turn % Q_STAGES * 2 + WHO + (start > stop).to(gl.int32))
            else:
                begin, end = 1, num_full
            for i in range(begin, end):
                here, before = step + i, step + i - 1
                if MASKED or HAS_CALL_MASK or ALIBI or DROPOUT:  # asked for now, read when the scores are there
                    block = gl.load(indices + start + i // TILES_PER_BLOCK)
                if DILATED:
                    multiplicity = gl.load(rule_ids + start + i // TILES_PER_BLOCK)
                place, place_before = here % KV_STAGES, before % KV_STAGES
                mbarrier.wait(k_ready.index(place), here // KV_STAGES & 1)
                take_turn(WHO)
                pending_scores = warpgroup_mma(
                    q, k_buffers.index(place).permute((1, 0)), no_scores, use_acc=False, is_async=True
                )
                operand = gl.convert_layout(weights.to(dtype), WEIGHTS)
                mbarrier.wait(v_ready.index(place_before), before // KV_STAGES & 1)
                pending_acc = warpgroup_mma(operand, v_buffers.index(place_before), acc, is_async=True)
                hand_over(WHO)
                scores = warpgroup_mma_wait(1, deps=[pending_scores])
                if NEGATIVE_SCALE:
                    scores = -scores
                if HAS_SCORE_MODS or DROPOUT:
                    key = tokens_of(block, i, key_lane, walked, num_residues, BLOCK_K, TILE_K, DILATED)
                if HAS_SCORE_MODS:
                    scores = scores * scale
                    distance = signed_distance(query, key, origin, seq_q, seq_k)
                    scores = apply_score_mods(scores, distance, slope, cap, SOFTCAP, ALIBI, False)[0]
                if MASKED or HAS_CALL_MASK:  # noqa: SIM102
                    # Always so; but what is behind a branch is not computed early, to be kept until it is needed.
                    if start < stop:
                        key = tokens_of(block, i, key_lane, walked, num_residues, BLOCK_K, TILE_K, DILATED)
                        scores = _hide(
                            scores, query, first, reach, key, start + i // TILES_PER_BLOCK, split, stop, sample,
                            list_id, multiplicity, exp_scale, rule_ids, rules, documents, branches, padding,
                            document_ids, num_intervals, num_branches, seq_q, seq_k,
                            not MASKED, HAS_RULE_IDS, ONE_INTERVAL, DOCUMENTS, PADDING, DOCUMENT_IDS, DILATED,
                        )  # fmt: skip
                new_max = gl.maximum(row_max, max_of_rows(scores) * exp_scale)
                base = new_max
                if MASKED or HAS_CALL_MASK:
                    base = gl.where(new_max == float("-inf"), 0.0, new_max)
                shrink = gl.exp2(row_max - base)
                if DILATED:
                    base = base - log_multiplicity(multiplicity, False)
                weights = gl.exp2(scores * exp_scale - gl.expand_dims(base, 1))
                row_sum = row_sum * shrink + gl.sum(weights, 1)
                if DROPOUT:
                    key_hash = dropout_key_hash(seed, key, block * BLOCK_K)
                    weights *= gl.where(dropout_keeps(query_hash, key_hash, threshold), keep_scale, 0.0)
                row_max = new_max
                acc, operand = warpgroup_mma_wait(0, deps=[pending_acc, operand])
                mbarrier.arrive(k_empty.index(place), count=1)
                mbarrier.arrive(v_empty.index(place_before), count=1)
                weights = weights.to(KEPT)
                acc = acc * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, ACC)), 1)

        last = step + num - 1
        step += num
        operand = gl.convert_layout(weights.to(dtype), WEIGHTS)
        mbarrier.wait(v_ready.index(last % KV_STAGES), last // KV_STAGES & 1)
        take_turn(WHO)
        pending_acc = warpgroup_mma(operand, v_buffers.index(last % KV_STAGES), acc, is_async=True)
        next_turn = turn + 1
        if next_turn < turns:
            mbarrier.wait(q_ready.index(next_turn % Q_STAGES), next_turn // Q_STAGES & 1)
            mbarrier.wait(k_ready.index(step % KV_STAGES), step // KV_STAGES & 1)
        # After the last tile this multiplies what is left in the buffers, and nobody reads the result.
        pending = warpgroup_mma(
            q_buffers.index(next_turn % Q_STAGES * 2 + WHO), k_buffers.index(step % KV_STAGES).permute((1, 0)),
            no_scores, use_acc=False, is_async=True,
        )  # fmt: skip
        hand_over(WHO)
        acc = warpgroup_mma_wait(1, deps=[pending_acc])
        mbarrier.arrive(v_empty.index(last % KV_STAGES), count=1)

        empty = row_sum == 0.0
        inverse = 1.0 / gl.where(empty, 1.0, row_sum)
        acc = acc * gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, ACC)), 1)
        q.store(acc.to(dtype))  # these queries have served; no other warpgroup reads them
        fence_async_shared()
        store_block(out, [sample, query_from + WHO * ROWS, (residue * heads + head) * D], as_block(q, out))
        row_lse = gl.where(empty, float("-inf"), (row_max + gl.log2(row_sum)) * 0.6931471805599453)
        gl.store(lse + (sample.to(gl.int64) * heads + head) * seq_q + row, row_lse, mask=row < seq_q)
        sample, head, residue, query_from = next_sample, next_head, next_residue, next_query
        start, split, stop = next_start, next_split, next_stop
    if WHO == 0:
        take_turn(WHO)
    warpgroup_mma_wait(0, deps=[pending])
    tma.store_wait(0)


@gluon.jit
def reaching(first, last):
    """The numbers from `first` to `last` as `within` wants them: the first, and how far the last is from it."""
    first = gl.where(last < first, 2147483647, first)  # nothing gets there
    return first, gl.maximum(last - first, 0)


@gluon.jit
def within(x, first, reach):
    """One compare for two."""
    return (x - first).to(gl.uint32) <= reach.to(gl.uint32)


@gluon.jit
def pairs_seen(
    x, query, key, first, reach, entry, split, stop, sample,
    rule_ids, rules, documents, padding, document_ids, num_intervals, seq_q, seq_k,
    BOUNDED: gl.constexpr, MASKED: gl.constexpr, ANY: gl.constexpr, HAS_RULE_IDS: gl.constexpr,
    ONE_INTERVAL: gl.constexpr, DOCUMENTS: gl.constexpr, PADDING: gl.constexpr, DOCUMENT_IDS: gl.constexpr,
):  # fmt: skip
    """The pairs that are allowed: where BOUNDED, those with `x`, the walked side, `within` the bounds of the other."""
    if BOUNDED:
        seen = within(x, first, reach)
    else:
        seen = pairs_allowed(
            query, key, entry, split, stop, sample,
            rule_ids, rules, documents, padding, document_ids, num_intervals, seq_q, seq_k,
            MASKED, ANY, HAS_RULE_IDS, ONE_INTERVAL, DOCUMENTS, PADDING, DOCUMENT_IDS,
        )  # fmt: skip
    return seen


@gluon.jit
def max_of_rows(x):
    """The largest of each row; halves against each other first: one long chain of maxima would wait for itself."""
    wide = x
    for _ in gl.static_range(4 if x.shape[1] == 128 else 3):  # until a thread has two numbers
        left, right = gl.split(gl.permute(gl.reshape(wide, [wide.shape[0], 2, wide.shape[1] // 2]), (0, 2, 1)))
        wide = gl.maximum(left, right)
    return gl.convert_layout(gl.max(wide, 1), gl.SliceLayout(1, x.type.layout), assert_trivial=True)


@gluon.jit
def tokens_of(block, i, lane, walked, num_residues, BLOCK: gl.constexpr, TILE: gl.constexpr, DILATED: gl.constexpr):
    """The tokens of tile `i` of a list, a part of this block, as a row."""
    residue, row = split_residue(block, walked, DILATED)
    first = row * BLOCK + i % (BLOCK // TILE) * TILE
    return gl.expand_dims(token_of(first + lane, residue, num_residues, DILATED), 0)


@gluon.jit
def _hide(
    scores, query, first, reach, key, entry, split, stop, sample, list_id, multiplicity, scale,
    rule_ids, rules, documents, branches, padding, document_ids, num_intervals, num_branches, seq_q, seq_k,
    ANY: gl.constexpr, HAS_RULE_IDS: gl.constexpr, ONE_INTERVAL: gl.constexpr, DOCUMENTS: gl.constexpr,
    PADDING: gl.constexpr, DOCUMENT_IDS: gl.constexpr, DILATED: gl.constexpr,
):  # fmt: skip
    """Scores with −inf where a pair is not allowed. The block is partial, or ANY: full, partial, not there at all."""
    BOUNDED: gl.constexpr = ONE_INTERVAL and not (HAS_RULE_IDS or ANY or PADDING or DOCUMENT_IDS)
    seen = pairs_seen(
        key, query, key, first, reach, entry, split, stop, sample,
        rule_ids, rules, documents, padding, document_ids, num_intervals, seq_q, seq_k,
        BOUNDED, True, ANY, HAS_RULE_IDS, ONE_INTERVAL, DOCUMENTS, PADDING, DOCUMENT_IDS,
    )  # fmt: skip
    scores = gl.where(seen, scores, float("-inf"))
    if DILATED == 2:
        scores = add_pair_multiplicity(
            scores, multiplicity, query, key, list_id, branches, num_branches, seq_q, seq_k, scale, False
        )
    return scores


VARYING_STEPS = (
    "total_tiles", "tiles_per_head", "first_tile", "tile_order", "batch", "walked",
    "q_step", "k_step", "v_step", "g_step",
)  # fmt: skip


@gluon.jit(do_not_specialize=[*VARYING, *VARYING_STEPS])
def forward_kernel(
    q, k, v, out, lse,
    indices, rule_ids, work, rules, documents, branches, padding, document_ids, seed, slopes,
    heads, group, seq_q, seq_k, num_blocks, lists_per_sample, heads_per_list, num_intervals, num_branches, num_residues,
    total_tiles, tiles_per_head, first_tile, tile_order, walked, q_step, k_step, v_step,
    scale, cap, threshold, keep_scale,
    D: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, TILE_K: gl.constexpr,
    Q_STAGES: gl.constexpr, KV_STAGES: gl.constexpr, NEGATIVE_SCALE: gl.constexpr,
    HAS_RULE_IDS: gl.constexpr, ONE_INTERVAL: gl.constexpr, DOCUMENTS: gl.constexpr, PADDING: gl.constexpr,
    DOCUMENT_IDS: gl.constexpr, DILATED: gl.constexpr, SOFTCAP: gl.constexpr, ALIBI: gl.constexpr,
    DROPOUT: gl.constexpr,
):  # fmt: skip
    """`q`, `k`, `v` and `out` are what `describe` makes; `total_tiles` to `tile_order` are a `TileSchedule`, `walked`
    is the number of key blocks of a residue class, and steps lead from one class to the next."""
    ROW_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], q.dtype)
    KEY_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_K, D], q.dtype)
    q_buffers = gl.allocate_shared_memory(q.dtype, [2 * Q_STAGES, ROWS, D], ROW_LAYOUT)
    k_buffers = gl.allocate_shared_memory(q.dtype, [KV_STAGES, TILE_K, D], KEY_LAYOUT)
    v_buffers = gl.allocate_shared_memory(q.dtype, [KV_STAGES, TILE_K, D], KEY_LAYOUT)
    q_ready = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [KV_STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [KV_STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [KV_STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [KV_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(q_ready.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(KV_STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    buffers = (q_buffers, k_buffers, v_buffers)
    barriers = (q_ready, q_empty, k_ready, k_empty, v_ready, v_empty)
    masks = (rule_ids, rules, documents, branches, padding, document_ids, seed, slopes)
    steps = (q_step, k_step, v_step)
    lists = (
        indices, work, heads, group, num_blocks, lists_per_sample, heads_per_list,
        (total_tiles, tiles_per_head, first_tile, tile_order), num_residues, walked, steps,
    )  # fmt: skip
    numbers = (seq_q, seq_k, num_intervals, num_branches, scale, cap, threshold, keep_scale)
    gl.warp_specialize([
        (_compute, (
            0, out, lse, buffers, barriers, masks, lists, numbers, D, BLOCK_Q, BLOCK_K, TILE_K, Q_STAGES, KV_STAGES,
            NEGATIVE_SCALE, HAS_RULE_IDS, ONE_INTERVAL, DOCUMENTS, PADDING, DOCUMENT_IDS, DILATED, SOFTCAP, ALIBI,
            DROPOUT,
        )),
        (_compute, (
            1, out, lse, buffers, barriers, masks, lists, numbers, D, BLOCK_Q, BLOCK_K, TILE_K, Q_STAGES, KV_STAGES,
            NEGATIVE_SCALE, HAS_RULE_IDS, ONE_INTERVAL, DOCUMENTS, PADDING, DOCUMENT_IDS, DILATED, SOFTCAP, ALIBI,
            DROPOUT,
        )),
        (_fetch, (q, k, v, buffers, barriers, lists, D, BLOCK_Q, BLOCK_K, TILE_K, Q_STAGES, KV_STAGES, DILATED)),
    ], [4, 1], [240, 24])  # fmt: skip
