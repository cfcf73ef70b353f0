"""Decoding: a program takes the query heads of one key head for one new token and a part of the keys that they see.

The parts of a row are merged by a second, small kernel: one token has few rows, and the keys of each must be shared out
to fill a GPU. Which keys a row has is found here, from the length of the sample and what `layout.rows` says of the
pattern: nothing of a launch depends on a length, so the same launches serve all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..caches import cached
from ..layout.rows import CacheRows
from ..options import CallOptions
from . import launcher
from .common import LOG2E, apply_score_mods, cap_kind, count_tiles, load_rows, load_work, pairs_allowed, tile_at
from .configs import padded_dim
from .forward import exponential
from .launch import contiguous_rows, num_processors, precision_of, results

TILE_BYTES = 1 << 14  # of the keys of a step
MAX_PARTS = 128
QUERY_BYTES = 1 << 14  # of the query heads of a program; with the keys they must fit the shared memory of any GPU
PROGRAMS_PER_PROCESSOR = 2  # programs that one has room for at a time


@triton.jit
def key_ranges(intervals, position, length, NUM: tl.constexpr):
    """First key and the one behind the last of each interval of a query, without the keys of intervals before it."""
    which = tl.arange(0, NUM)
    at = intervals + which * 5
    first = tl.maximum(position - tl.load(at), 0)
    stop = tl.minimum(tl.minimum(position + tl.load(at + 1) + 1, tl.load(at + 2)), length)
    stop = tl.where(position < tl.load(at + 3), stop, 0)
    # In the order of their first keys each begins where all before it have ended.
    earlier = (first[None, :] < first[:, None]) | (
        (first[None, :] == first[:, None]) & (which[None, :] < which[:, None])
    )
    behind = tl.max(tl.where(earlier, stop[None, :], 0), 1)
    return tl.maximum(first, behind), stop


@triton.jit
def locate_keys(
    key, in_cache, sample, pages, k_b, k_s, v_b, v_s, num_pages, pages_per_sample, page_size, PAGED: tl.constexpr
):  # fmt: skip
    """Where keys and values lie, and which of them lie in a page that is not there."""
    key = key.to(tl.int64)
    if PAGED:
        at = pages + sample * pages_per_sample + key // page_size
        page = tl.load(at, mask=in_cache, other=0).to(tl.int64)
        missing = (page < 0) | (page >= num_pages)
        page = tl.where(missing, 0, page)
        k_at, v_at = page * k_b + key % page_size * k_s, page * v_b + key % page_size * v_s
    else:
        missing = key < 0
        k_at, v_at = sample * k_b + key * k_s, sample * v_b + key * v_s
    return k_at, v_at, missing


@triton.jit
def add_tile(
    row_max, row_sum, acc, queries, k, v, k_at, v_at, in_cache, seen, missing, ahead, slope, scale, exp_scale, cap,
    D: tl.constexpr, PADDED_D: tl.constexpr, D_V: tl.constexpr, PADDED_D_V: tl.constexpr,
    NEGATIVE_SCALE: tl.constexpr, PAGED: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    PRECISION: tl.constexpr, BASE_E: tl.constexpr,
):  # fmt: skip
    """The running softmax of all rows with a tile of keys more, of which those that are `seen` count."""
    keys = load_rows(k, k_at, 1, in_cache, D, PADDED_D)
    # Keys that no query sees may hold anything, and 0 times NaN is NaN.
    values = load_rows(v, v_at, 1, seen, D_V, PADDED_D_V)
    scores = tl.dot(queries, keys.T, input_precision=PRECISION)
    if NEGATIVE_SCALE:
        scores = -scores
    if SOFTCAP or ALIBI:
        scores, _ = apply_score_mods(scores * scale, ahead[None, :].to(tl.float32), slope, cap, SOFTCAP, ALIBI, BASE_E)
    scores = tl.where(seen[None, :], scores, float("-inf"))
    if PAGED:  # garbage must not look like a result
        scores = tl.where((missing & seen)[None, :], float("nan"), scores)
    new_max = tl.maximum(row_max, tl.max(scores, 1) * exp_scale)
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = exponential(scores * exp_scale - base[:, None], BASE_E)
    shrink = exponential(row_max - base, BASE_E)
    row_sum = row_sum * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision=PRECISION)
    return new_max, row_sum, acc


@triton.jit(do_not_specialize=[
    "new", "heads", "heads_kv", "capacity", "num_lists", "rows_per_list", "num_intervals", "num_pages",
    "pages_per_sample", "page_size", "num_parts",
])  # fmt: skip
def decode_kernel(
    q, k, v, part_out, part_lse, lengths, ranges, work, indices, rule_ids, rules, padding, pages, slopes,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h,
    new, heads, heads_kv, capacity, num_lists, rows_per_list, num_intervals, num_pages, pages_per_sample, page_size,
    num_parts, scale, cap, units,
    D: tl.constexpr, PADDED_D: tl.constexpr, D_V: tl.constexpr, PADDED_D_V: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, OWN: tl.constexpr, ROWS: tl.constexpr,
    RANGES: tl.constexpr, LISTS: tl.constexpr, HAS_RULE_IDS: tl.constexpr, ONE_INTERVAL: tl.constexpr,
    NEGATIVE_SCALE: tl.constexpr, PADDING: tl.constexpr, PAGED: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, PRECISION: tl.constexpr, BASE_E: tl.constexpr,
):  # fmt: skip
    """out and lse of a part of a row, for `OWN` heads that share a list and a key head (`ROWS` with padding).

    The keys of a row are those of `RANGES` intervals, then, with LISTS, those of full and of partial blocks that are in
    none of these; all parts have as many tiles of them, however long the sample is.
    """
    programs = heads // OWN
    pid, part = tl.program_id(0), tl.program_id(1)
    token, head = pid // programs, pid % programs * OWN
    sample, t = token // new, token % new
    key_head = head // (heads // heads_kv)
    list_id = head // (heads // num_lists)
    length = tl.load(lengths + sample)
    no_length = (length < new) | (length > capacity)
    length = tl.where(no_length, new, length).to(tl.int32)
    position = length - new + t

    lane, step = tl.arange(0, ROWS), tl.arange(0, TILE)
    valid_head = lane < OWN
    own = head + tl.minimum(lane, OWN - 1)
    sample_64 = sample.to(tl.int64)
    queries = load_rows(q + sample_64 * q_b + t.to(tl.int64) * q_s, own, q_h, valid_head, D, PADDED_D)
    k += key_head.to(tl.int64) * k_h
    v += key_head.to(tl.int64) * v_h
    exp_scale, slope = scale, 0.0
    if SOFTCAP or ALIBI:
        exp_scale = 1.0
    if ALIBI:
        slope = tl.load(slopes + own)[:, None] * units

    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_D_V], tl.float32)
    in_ranges, num_full, num_masked = 0, 0, 0
    if RANGES:
        range_first, range_stop = key_ranges(ranges + list_id * (RANGES * 5), position, length, RANGES)
        range_tiles = tl.cdiv(tl.maximum(range_stop - range_first, 0), TILE)
        in_ranges = tl.sum(range_tiles, 0)
    if LISTS:
        row = token * num_lists + list_id
        if rows_per_list > 0:
            row = list_id * rows_per_list + position // BLOCK
        ahead, start, split, stop = load_work(work, row)
        num_full, masked_from, num_masked = count_tiles(start, split, stop, BLOCK, TILE)
    num_tiles = in_ranges + num_full + num_masked
    begin, end = num_tiles * part // num_parts, num_tiles * (part + 1) // num_parts

    if RANGES:
        before = 0
        for i in range(RANGES):
            own_range = tl.arange(0, RANGES) == i
            first, behind = (
                tl.sum(tl.where(own_range, range_first, 0), 0),
                tl.sum(tl.where(own_range, range_stop, 0), 0),
            )
            count = tl.sum(tl.where(own_range, range_tiles, 0), 0)
            for tile in range(tl.maximum(begin - before, 0), tl.minimum(end - before, count)):
                key = first + tile * TILE + step
                seen = key < behind
                if PADDING:
                    seen &= tl.load(padding + sample_64 * capacity + key, mask=seen, other=1) == 0
                k_at, v_at, missing = locate_keys(
                    key, seen, sample_64, pages, k_b, k_s, v_b, v_s, num_pages, pages_per_sample, page_size, PAGED
                )  # fmt: skip
                row_max, row_sum, acc = add_tile(
                    row_max, row_sum, acc, queries, k, v, k_at, v_at, seen, seen, missing, position - key, slope,
                    scale, exp_scale, cap, D, PADDED_D, D_V, PADDED_D_V, NEGATIVE_SCALE, PAGED, SOFTCAP, ALIBI,
                    PRECISION, BASE_E,
                )  # fmt: skip
            before += count
    if LISTS:
        GATHERED: tl.constexpr = TILE > BLOCK
        begin, end = begin - in_ranges, end - in_ranges
        for MASKED in tl.static_range(2):
            first_entry = masked_from if MASKED else start
            from_tile = tl.maximum(begin - num_full, 0) if MASKED else tl.maximum(begin, 0)
            to_tile = end - num_full if MASKED else tl.minimum(end, num_full)
            for tile in range(from_tile, to_tile):
                entry, _, key = tile_at(indices, first_entry, tile, stop, BLOCK, TILE)
                in_cache = key < length  # the cache may have no room behind it
                seen = in_cache & pairs_allowed(
                    position + ahead + key * 0, key, entry, split, stop, sample,
                    rule_ids, rules, rules, padding, rules, num_intervals, capacity, capacity,
                    MASKED, GATHERED, HAS_RULE_IDS, ONE_INTERVAL, False, PADDING, 0,
                )  # fmt: skip
                if RANGES:  # a key counts once
                    counted = (key[:, None] >= range_first[None, :]) & (key[:, None] < range_stop[None, :])
                    seen &= tl.max(counted.to(tl.int32), 1) == 0
                k_at, v_at, missing = locate_keys(
                    key, in_cache, sample_64, pages, k_b, k_s, v_b, v_s, num_pages, pages_per_sample, page_size, PAGED
                )  # fmt: skip
                row_max, row_sum, acc = add_tile(
                    row_max, row_sum, acc, queries, k, v, k_at, v_at, in_cache, seen, missing, position - key, slope,
                    scale, exp_scale, cap, D, PADDED_D, D_V, PADDED_D_V, NEGATIVE_SCALE, PAGED, SOFTCAP, ALIBI,
                    PRECISION, BASE_E,
                )  # fmt: skip

    empty = row_sum == 0.0
    acc = acc / tl.where(empty, 1.0, row_sum)[:, None]
    row_lse = row_max + tl.log(row_sum) if BASE_E else (row_max + tl.log2(row_sum)) / LOG2E
    row_lse = tl.where(empty, float("-inf"), row_lse)
    # A length that cannot be must not look like a result either.
    row_lse = tl.where(no_length, float("nan"), row_lse)
    at = (token.to(tl.int64) * heads + own) * num_parts + part
    tl.store(part_lse + at, row_lse, mask=valid_head)
    column = tl.arange(0, PADDED_D_V)
    tl.store(part_out + at[:, None] * D_V + column, acc, mask=valid_head[:, None] & (column < D_V))


@triton.jit(do_not_specialize=["new", "heads", "num_parts"])
def merge_kernel(
    part_out, part_lse, out, lse, new, heads, num_parts, D: tl.constexpr, PADDED_D: tl.constexpr, PARTS: tl.constexpr
):
    """One head of one new token: its parts, weighted by their denominators."""
    pid = tl.program_id(0).to(tl.int64)
    part, column = tl.arange(0, PARTS), tl.arange(0, PADDED_D)
    lses = tl.load(part_lse + pid * num_parts + part, mask=part < num_parts, other=float("-inf"))
    row_max = tl.max(lses, 0)
    base = tl.where(row_max == float("-inf"), 0.0, row_max)
    shares = tl.exp(lses - base)
    row_sum = tl.sum(shares, 0)
    at = (pid * num_parts + part)[:, None] * D + column
    parts = tl.load(part_out + at, mask=(part < num_parts)[:, None] & (column < D), other=0.0)
    acc = tl.sum(parts * shares[:, None], 0) / tl.where(row_sum == 0.0, 1.0, row_sum)
    tl.store(out + pid * D + column, acc.to(out.dtype.element_ty), mask=column < D)
    token, head = pid // heads, pid % heads
    tl.store(
        lse + (token // new * heads + head) * new + token % new,
        tl.where(row_sum == 0.0, row_max, base + tl.log(row_sum)),
    )


def launch(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor | None, lengths: Tensor, rows: CacheRows, options: CallOptions
) -> tuple[Tensor, Tensor]:
    """out like q and lse (batch, heads, new); see `backends.decoding`. Lengths are read by the kernel alone."""
    q, k, v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
    padding, slopes = options.key_padding_mask, None if options.bias is None else options.bias.slopes
    if padding is not None:
        padding = padding.contiguous().view(torch.uint8)
    given = [None if x is None else x.contiguous() for x in (page_table, padding, slopes)]
    capacity = k.shape[1] * (1 if page_table is None else page_table.shape[1])
    (batch, new, heads, _), num_parts = q.shape, _parts_of(q, k, v, capacity, rows)
    out, lse = results(q, v)
    part_out = torch.empty(batch, new, heads, num_parts, v.shape[3], dtype=torch.float32, device=q.device)
    part_lse = torch.empty(batch, new, heads, num_parts, dtype=torch.float32, device=q.device)
    tensors = [q, k, v, out, lse, part_out, part_lse, lengths.contiguous(), *given]
    there = [x for x in tensors if x is not None]
    kinds = tuple(None if x is None else launcher.like(x) for x in tensors)
    key = q.device, kinds, options.scale, options.softcap, precision_of(q.dtype)
    kept = rows.intervals, rows.work, rows.indices, rows.rule_ids, rows.rules
    launcher.repeat(rows.call_cache, key, there, kept, lambda: _launches(tensors, capacity, rows, options))
    return out, lse


def _launches(
    tensors: Sequence[Any], capacity: int, rows: CacheRows, options: CallOptions
) -> list[launcher.Launched | None]:
    """`tensors` are those of `launch`."""
    q, k, v, out, lse, part_out, part_lse, lengths, *others = tensors
    paged, padded_keys, sloped = (x is not None for x in others)
    pages, padding, slopes = (rows.work if x is None else x for x in others)
    new, heads, head_dim = q.shape[1:]
    heads_kv, head_dim_v, num_parts = k.shape[2], v.shape[3], part_lse.shape[3]
    padded, padded_v = padded_dim(head_dim), padded_dim(head_dim_v)
    own, tile = _own_heads(q, k, v, rows), _tile(q, v)
    base_e = q.dtype == torch.float32
    units_per_nat = 1.0 if base_e else math.log2(math.e)
    programs = q.shape[0] * new * (heads // own)
    split = launcher.launch(
        decode_kernel, (programs, num_parts),
        (
            q, k, v, part_out, part_lse, lengths, rows.intervals, rows.work, rows.indices, rows.rule_ids, rows.rules,
            padding, pages, slopes,
        ),
        (
            *(stride for x in (q, k, v) for stride in x.stride()[:3]),
            new, heads, heads_kv, capacity, rows.num_lists, rows.rows_per_list, rows.rules.shape[1],
            k.shape[0], pages.shape[1], k.shape[1], num_parts,
            max(abs(options.scale) * units_per_nat, 1e-30), options.softcap * units_per_nat, units_per_nat,
        ),
        D=head_dim, PADDED_D=padded, D_V=head_dim_v, PADDED_D_V=padded_v, BLOCK=rows.block, TILE=tile, OWN=own,
        ROWS=max(16, triton.next_power_of_2(own)),
        RANGES=rows.intervals.shape[1], LISTS=len(rows.work) > 0, HAS_RULE_IDS=len(rows.rule_ids) > 0,
        ONE_INTERVAL=rows.rules.shape[1] == 1, NEGATIVE_SCALE=options.scale < 0, PADDING=padded_keys, PAGED=paged,
        SOFTCAP=cap_kind(options.softcap), ALIBI=sloped, PRECISION=precision_of(q.dtype), BASE_E=base_e,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    merged = launcher.launch(
        merge_kernel, (q.shape[0] * new * heads,), (part_out, part_lse, out, lse), (new, heads, num_parts),
        D=head_dim_v, PADDED_D=padded_v, PARTS=triton.next_power_of_2(num_parts), num_warps=4,
    )  # fmt: skip
    return [split, merged]


def _widest(q: Tensor, v: Tensor) -> int:
    """Bytes of a row of queries, keys or values."""
    return max(padded_dim(q.shape[3]), padded_dim(v.shape[3])) * q.element_size()


def _own_heads(q: Tensor, k: Tensor, v: Tensor, rows: CacheRows) -> int:
    """Heads of a program: all have the same keys."""
    heads, heads_kv = q.shape[2], k.shape[2]
    return 1 if rows.num_lists > heads_kv else _heads_per_program(heads // heads_kv, _widest(q, v))


def _tile(q: Tensor, v: Tensor) -> int:
    return min(64, TILE_BYTES // _widest(q, v))


def _parts_of(q: Tensor, k: Tensor, v: Tensor, capacity: int, rows: CacheRows) -> int:
    """Into how many parts rows are split: as if all were as long as they can be, since the host knows no lengths."""
    programs = q.shape[0] * q.shape[1] * (q.shape[2] // _own_heads(q, k, v, rows))
    slots = PROGRAMS_PER_PROCESSOR * num_processors(q.device)
    return _num_parts(programs, triton.cdiv(min(capacity, rows.most), _tile(q, v)), slots)


def _heads_per_program(group: int, bytes_per_head: int) -> int:
    """How many query heads of a key head one program takes: all, or a part of them where there is no room for more."""
    room = max(16, QUERY_BYTES // bytes_per_head)
    return max(n for n in range(1, group + 1) if group % n == 0 and triton.next_power_of_2(n) <= room)


@cached(1024, "into how many parts the rows of a decoding step are split")
def _num_parts(programs: int, tiles: int, slots: int) -> int:
    """As few as fill the GPU: rounds of so many programs at a time, of which the last is nearly full."""

    def utilization(parts: int) -> float:
        return min(programs * parts / (triton.cdiv(programs * parts, slots) * slots), 0.95)

    return max(range(1, max(1, min(tiles, MAX_PARTS)) + 1), key=utilization)
