"""Decoding: a program takes the query heads of one key head for one new token and a part of the blocks that they see.

The parts of a row are merged by a second, small kernel: one token has few rows, and the keys of each must be shared out
to fill a GPU.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout.rows import CacheRows
from . import launcher
from .common import LOG2E, apply_score_mods, cap_kind, count_tiles, load_rows, load_work, pairs_allowed, tile_at
from .configs import padded_dim
from .forward import exponential
from .launch import contiguous_rows, num_processors, precision_of

TILE_BYTES = 1 << 14  # of the keys of a step
MAX_PARTS = 128
QUERY_BYTES = 1 << 14  # of the query heads of a program; with the keys they must fit the shared memory of any GPU
PROGRAMS_PER_PROCESSOR = 2  # programs that one has room for at a time


@triton.jit(do_not_specialize=[
    "new", "heads", "heads_kv", "capacity", "num_lists", "num_intervals", "num_pages", "pages_per_sample", "page_size",
    "num_parts",
])  # fmt: skip
def decode_kernel(
    q, k, v, part_out, part_lse, lengths, work, indices, rule_ids, rules, padding, pages, slopes,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h,
    new, heads, heads_kv, capacity, num_lists, num_intervals, num_pages, pages_per_sample, page_size,
    num_parts, scale, cap,
    D: tl.constexpr, PADDED_D: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, OWN: tl.constexpr,
    ROWS: tl.constexpr, NEGATIVE_SCALE: tl.constexpr, ONE_INTERVAL: tl.constexpr, PADDING: tl.constexpr,
    PAGED: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, PRECISION: tl.constexpr, BASE_E: tl.constexpr,
):  # fmt: skip
    """out and lse of a part of a row, for `OWN` heads that share a list and a key head (`ROWS` with padding)."""
    units = heads // OWN
    pid, part = tl.program_id(0), tl.program_id(1)
    token, head = pid // units, pid % units * OWN
    sample, t = token // new, token % new
    key_head = head // (heads // heads_kv)
    length = tl.load(lengths + sample)
    ahead, start, split, stop = load_work(work, token * num_lists + head // (heads // num_lists))
    position = length - new + t

    lane = tl.arange(0, ROWS)
    valid_head = lane < OWN
    own = head + tl.minimum(lane, OWN - 1)
    sample_64 = sample.to(tl.int64)
    queries = load_rows(q + sample_64 * q_b + t.to(tl.int64) * q_s, own, q_h, valid_head, D, PADDED_D)
    exp_scale, slope = scale, 0.0
    if SOFTCAP or ALIBI:
        exp_scale = 1.0
    if ALIBI:
        slope = tl.load(slopes + own)[:, None]

    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_D], tl.float32)
    num_full, masked_from, num_masked = count_tiles(start, split, stop, BLOCK, TILE)
    num_tiles = num_full + num_masked
    begin, end = num_tiles * part // num_parts, num_tiles * (part + 1) // num_parts
    GATHERED: tl.constexpr = TILE > BLOCK
    for MASKED in tl.static_range(2):
        first = masked_from if MASKED else start
        from_tile = tl.maximum(begin - num_full, 0) if MASKED else begin
        to_tile = end - num_full if MASKED else tl.minimum(end, num_full)
        for i in range(from_tile, to_tile):
            entry, _, key = tile_at(indices, first, i, stop, BLOCK, TILE)
            in_cache = key < length  # the cache may have no room behind it
            key_64 = key.to(tl.int64)
            if PAGED:
                page_at = pages + sample_64 * pages_per_sample + key // page_size
                page = tl.load(page_at, mask=in_cache, other=0).to(tl.int64)
                missing = (page < 0) | (page >= num_pages)
                page = tl.where(missing, 0, page)
                k_at, v_at = page * k_b + key_64 % page_size * k_s, page * v_b + key_64 % page_size * v_s
            else:
                k_at, v_at = sample_64 * k_b + key_64 * k_s, sample_64 * v_b + key_64 * v_s
            keys = load_rows(k + key_head.to(tl.int64) * k_h, k_at, 1, in_cache, D, PADDED_D)
            seen = in_cache & pairs_allowed(
                position + ahead + key * 0, key, entry, split, stop, sample,
                rule_ids, rules, rules, padding, rules, num_intervals, capacity, capacity,
                MASKED, GATHERED, True, ONE_INTERVAL, False, PADDING, 0,
            )  # fmt: skip
            # What nobody sees may be anything, and 0 times NaN is NaN.
            values = load_rows(v + key_head.to(tl.int64) * v_h, v_at, 1, seen, D, PADDED_D)
            scores = tl.dot(queries, keys.T, input_precision=PRECISION)
            if NEGATIVE_SCALE:
                scores = -scores
            if SOFTCAP or ALIBI:
                scores, _ = apply_score_mods(
                    scores * scale, (position - key[None, :]).to(tl.float32), slope, cap, SOFTCAP, ALIBI, BASE_E
                )  # fmt: skip
            scores = tl.where(seen[None, :], scores, float("-inf"))
            if PAGED:  # garbage must not look like a result
                scores = tl.where((missing & seen)[None, :], float("nan"), scores)
            new_max = tl.maximum(row_max, tl.max(scores, 1) * exp_scale)
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = exponential(scores * exp_scale - base[:, None], BASE_E)
            shrink = exponential(row_max - base, BASE_E)
            row_sum = row_sum * shrink + tl.sum(weights, 1)
            acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision=PRECISION)
            row_max = new_max

    empty = row_sum == 0.0
    acc = acc / tl.where(empty, 1.0, row_sum)[:, None]
    row_lse = row_max + tl.log(row_sum) if BASE_E else (row_max + tl.log2(row_sum)) / LOG2E
    at = (token.to(tl.int64) * heads + own) * num_parts + part
    tl.store(part_lse + at, tl.where(empty, float("-inf"), row_lse), mask=valid_head)
    column = tl.arange(0, PADDED_D)
    tl.store(part_out + at[:, None] * D + column, acc, mask=valid_head[:, None] & (column < D))


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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page_table: Tensor | None,
    lengths: Tensor,
    capacity: int,
    rows: CacheRows,
    scale: float,
    key_padding_mask: Tensor | None,
    softcap: float,
    slopes: Tensor | None,
) -> tuple[Tensor, Tensor]:
    q, k, v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
    batch, new, heads, head_dim = q.shape
    heads_kv, padded = k.shape[2], padded_dim(head_dim)
    own = 1 if rows.num_lists > heads_kv else _heads_per_program(heads // heads_kv, padded * q.element_size())
    tile = min(64, TILE_BYTES // (padded * q.element_size()))
    base_e = q.dtype == torch.float32
    units_per_nat = 1.0 if base_e else math.log2(math.e)
    programs, slots = batch * new * (heads // own), PROGRAMS_PER_PROCESSOR * num_processors(q.device)
    num_parts = _num_parts(programs, triton.cdiv(rows.most * rows.block, tile), slots)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, new, dtype=torch.float32, device=q.device)
    part_out = torch.empty(batch, new, heads, num_parts, head_dim, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(batch, new, heads, num_parts, dtype=torch.float32, device=q.device)
    unused = rows.work
    launcher.launch(
        decode_kernel, (programs, num_parts),
        (
            q, k, v, part_out, part_lse, lengths, rows.work, rows.indices, rows.rule_ids, rows.rules,
            unused if key_padding_mask is None else key_padding_mask.contiguous().view(torch.uint8),
            unused if page_table is None else page_table.contiguous(),
            unused if slopes is None else slopes * units_per_nat,
        ),
        (
            *(stride for x in (q, k, v) for stride in x.stride()[:3]),
            new, heads, heads_kv, capacity, rows.num_lists, rows.rules.shape[1],
            k.shape[0], 0 if page_table is None else page_table.shape[1], k.shape[1], num_parts,
            max(abs(scale) * units_per_nat, 1e-30), softcap * units_per_nat,
        ),
        D=head_dim, PADDED_D=padded, BLOCK=rows.block, TILE=tile, OWN=own, ROWS=max(16, triton.next_power_of_2(own)),
        NEGATIVE_SCALE=scale < 0, ONE_INTERVAL=rows.rules.shape[1] == 1, PADDING=key_padding_mask is not None,
        PAGED=page_table is not None, SOFTCAP=cap_kind(softcap), ALIBI=slopes is not None,
        PRECISION=precision_of(q.dtype), BASE_E=base_e, num_warps=4, num_stages=3,
    )  # fmt: skip
    launcher.launch(
        merge_kernel, (batch * new * heads,), (part_out, part_lse, out, lse), (new, heads, num_parts),
        D=head_dim, PADDED_D=padded, PARTS=triton.next_power_of_2(num_parts), num_warps=4,
    )  # fmt: skip
    return out, lse


def _heads_per_program(group: int, bytes_per_head: int) -> int:
    """How many query heads of a key head one program takes: all, or a part of them where there is no room for more."""
    room = max(16, QUERY_BYTES // bytes_per_head)
    return max(n for n in range(1, group + 1) if group % n == 0 and triton.next_power_of_2(n) <= room)


@lru_cache(maxsize=1024)
def _num_parts(programs: int, tiles: int, slots: int) -> int:
    """As few as fill the GPU: rounds of so many programs at a time, of which the last is nearly full."""

    def utilization(parts: int) -> float:
        return min(programs * parts / (triton.cdiv(programs * parts, slots) * slots), 0.95)

    return max(range(1, max(1, min(tiles, MAX_PARTS)) + 1), key=utilization)
