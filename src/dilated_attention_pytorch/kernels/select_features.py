"""What `select_masses` multiplies: rows that stand for queries and columns that stand for keys, scorer by scorer.

Those of `MeanPooled`, `MinMaxBound` and `Moments` are made by `pool_kernel`, which reads every token once; those of
`Antidiagonal` and `SampledRows` are read where queries and keys lie; those of any other scorer are given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..caches import register_container
from ..patterns.blocks import ceil_div
from .common import load_rows
from .configs import padded_dim
from .launch import _device, contiguous_rows
from .launcher import MOST, Launched, launch, like, repeat

MAX_PARTS = 64  # rows of a block, which a tile must hold
ROW_BYTES = 512  # of a row or column; with the tiles they must fit the shared memory of any GPU
MAX_STRIDE = 1 << 20  # from token to token; those of a tile are 32-bit numbers
POOLED_AT_ONCE = tl.constexpr(32)  # tokens
MEAN, MOMENTS, BOX, ALL = (tl.constexpr(n) for n in range(4))
KINDS = {"mean": MEAN, "box": BOX, "moments": MOMENTS, "all": ALL}
_noted: dict[Any, Any] = {}
register_container(_noted, "kernels.select_features._noted", "launches of `patches`, to be done again", bound=MOST)


@triton.jit
def pool(
    x, out, unit, x_b, x_s, x_h, heads, seq, num_patches, num_places, scale,
    D: tl.constexpr, PADDED_D: tl.constexpr, PATCH: tl.constexpr, SPREAD: tl.constexpr, KIND: tl.constexpr,
    QUERIES: tl.constexpr, WIDTH: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """Features of a few patches of one head, from their mean times `scale`. `SPREAD` lanes share a patch.

    Where ORDER patches make a block (else it is 0), they are stored as `hopper_select` takes them: a thread that holds
    the places 8j + 2t and 8j + 2t + 1 of every tile of 128 then has all of a block, and of neighbouring ones.
    """
    PATCHES: tl.constexpr = POOLED_AT_ONCE // SPREAD
    EXTREMES: tl.constexpr = KIND >= BOX and not QUERIES
    units = tl.cdiv(num_patches, PATCHES)
    head, place = unit % heads, unit // heads
    sample, first = (place // units).to(tl.int64), place % units * PATCHES
    lane = tl.arange(0, PATCHES * SPREAD)
    begin = (first + lane // SPREAD) * PATCH + lane % SPREAD
    own = x + sample * x_b + head.to(tl.int64) * x_h
    total = tl.zeros([PATCHES * SPREAD, PADDED_D], tl.float32)
    high = tl.full([PATCHES * SPREAD, PADDED_D], float("-inf"), tl.float32)
    low = tl.full([PATCHES * SPREAD, PADDED_D], float("inf"), tl.float32)
    for i in tl.static_range(0, PATCH, SPREAD):
        valid = begin + i < seq
        value = load_rows(own, begin + i, x_s, valid, D, PADDED_D).to(tl.float32)
        total += value
        if EXTREMES:
            high = tl.maximum(high, tl.where(valid[:, None], value, float("-inf")))
            low = tl.minimum(low, tl.where(valid[:, None], value, float("inf")))
    patch = first + tl.arange(0, PATCHES)
    num_valid = tl.maximum(tl.minimum(seq - patch * PATCH, PATCH), 1).to(tl.float32)[:, None]
    mean = tl.sum(tl.reshape(total, PATCHES, SPREAD, PADDED_D), 1) / num_valid * scale
    where = patch
    if ORDER:
        block, part = patch % 128 // ORDER, patch % ORDER
        PER_THREAD: tl.constexpr = 32 // ORDER
        where = patch // 128 * 128 + block % PER_THREAD * (4 * ORDER) + part // 2 * 8
        where += block // PER_THREAD * 2 + part % 2
    at = ((sample * heads + head) * num_places + where)[:, None] * WIDTH + tl.arange(0, PADDED_D)
    stored = (patch < num_patches)[:, None]
    one, two = mean, mean
    if EXTREMES:
        some = (patch * PATCH < seq)[:, None]
        one = tl.where(some, tl.max(tl.reshape(high, PATCHES, SPREAD, PADDED_D), 1), 0.0)
        two = tl.where(some, tl.min(tl.reshape(low, PATCHES, SPREAD, PADDED_D), 1), 0.0)
        if KIND == ALL:
            tl.store(out + at + 2 * PADDED_D, two.to(out.dtype.element_ty), mask=stored)
            one, two = mean, one
    elif KIND == BOX:
        one, two = tl.maximum(mean, 0.0), tl.minimum(mean, 0.0)
    elif KIND == MOMENTS:
        if QUERIES:
            two = mean * mean * 0.5
        else:  # about the mean, and so read again
            around = tl.reshape(tl.broadcast_to(mean[:, None, :], (PATCHES, SPREAD, PADDED_D)), total.shape)
            total = tl.zeros([PATCHES * SPREAD, PADDED_D], tl.float32)
            for i in tl.static_range(0, PATCH, SPREAD):
                valid = begin + i < seq
                away = load_rows(own, begin + i, x_s, valid, D, PADDED_D).to(tl.float32) - around
                total += tl.where(valid[:, None], away * away, 0.0)
            two = tl.sum(tl.reshape(total, PATCHES, SPREAD, PADDED_D), 1) / num_valid
    tl.store(out + at, one.to(out.dtype.element_ty), mask=stored)
    if WIDTH != PADDED_D:
        tl.store(out + at + PADDED_D, two.to(out.dtype.element_ty), mask=stored)


@triton.jit(
    do_not_specialize=["heads", "heads_kv", "seq_q", "seq_k", "num_rows", "num_columns", "num_places", "units_q"]
)
def pool_kernel(
    q, k, rows, columns, q_b, q_s, q_h, k_b, k_s, k_h,
    heads, heads_kv, seq_q, seq_k, num_rows, num_columns, num_places, units_q, scale,
    D: tl.constexpr, PADDED_D: tl.constexpr, PATCH_Q: tl.constexpr, PATCH_K: tl.constexpr,
    SPREAD_Q: tl.constexpr, SPREAD_K: tl.constexpr, KIND: tl.constexpr, WIDTH_Q: tl.constexpr, WIDTH_K: tl.constexpr,
    ORDER: tl.constexpr,
):  # fmt: skip
    """Rows from queries, times the scale, and columns from keys: [batch · heads, patches, PADDED_D or twice that]."""
    unit = tl.program_id(0)
    if unit < units_q:
        pool(
            q, rows, unit, q_b, q_s, q_h, heads, seq_q, num_rows, num_rows, scale,
            D, PADDED_D, PATCH_Q, SPREAD_Q, KIND, True, WIDTH_Q, 0,
        )  # fmt: skip
    else:
        pool(
            k, columns, unit - units_q, k_b, k_s, k_h, heads_kv, seq_k, num_columns, num_places, 1.0,
            D, PADDED_D, PATCH_K, SPREAD_K, KIND, False, WIDTH_K, ORDER,
        )  # fmt: skip


class Operand(NamedTuple):
    """Where the rows, or columns, of a scorer lie: a part of head h of a sample at `x` + its four strides.

    Attributes:
        patch: tokens that a row stands for.
        step, first: row r begins at token r · step + first, of `tokens` (`load_part`).
    """

    x: Tensor
    strides: tuple[int, int, int, int]  # of samples, heads, tokens, parts
    patch: int
    step: int
    first: int
    tokens: int


class Pooled(NamedTuple):
    """Of patches: of "mean" their means, of "box" and "moments" what `MinMaxBound` and `Moments` make."""

    kind: str
    patch: tuple[int, int]

    def fits(self, head_dim: int, dtype: torch.dtype, blocks: tuple[int, int]) -> bool:
        width = padded_dim(head_dim) * (1 if self.kind == "mean" else 2)
        return _fits(width, dtype, blocks, self.patch)

    def on_hopper(self, q: Tensor, blocks: tuple[int, int]) -> bool:
        """Whether `hopper_select` takes it: whole tiles for warpgroups, and blocks that are a thread's own."""
        of_q, of_k = blocks[0] // self.patch[0], blocks[1] // self.patch[1]
        width = padded_dim(q.shape[3]) * (1 if self.kind == "mean" else 2)
        on_device = _device(q.device, min(width, 256), q.dtype.itemsize)[1]
        return on_device and width in (64, 128) and of_q >= 4 and 4 <= of_k <= 32

    def operands(self, q: Tensor, k: Tensor, blocks: tuple[int, int], scale: float) -> Operands:
        heads, heads_kv = q.shape[2], k.shape[2]
        rows, columns, make = _pooling(q, k, blocks, self.patch, self.kind, scale, self.on_hopper(q, blocks))
        (_, num_rows, _, width), (_, num_columns, _, _) = rows.shape, columns.shape
        of_rows = (heads * num_rows * width, num_rows * width, width, 0)
        of_columns = (heads_kv * num_columns * width, num_columns * width, width, 0)
        return Operands(
            Operand(rows, of_rows, self.patch[0], 1, 0, num_rows),
            Operand(columns, of_columns, self.patch[1], 1, 0, num_columns),
            width, 1, 0, 1.0, make, [q, k],
        )  # fmt: skip


class Antidiagonals(NamedTuple):
    """Tokens `stride` at a time, side by side; those of a row the other way round."""

    stride: int

    def fits(self, head_dim: int, dtype: torch.dtype, blocks: tuple[int, int]) -> bool:
        return _fits(padded_dim(head_dim), dtype, blocks, (self.stride, self.stride))

    def operands(self, q: Tensor, k: Tensor, blocks: tuple[int, int], scale: float) -> Operands:
        q, k, step = _near(q), _near(k), self.stride
        (q_b, q_t, q_h, _), (k_b, k_t, k_h, _) = q.stride(), k.stride()
        return Operands(
            Operand(q, (q_b, q_h, q_t, -q_t), step, step, step - 1, q.shape[1]),
            Operand(k, (k_b, k_h, k_t, k_t), step, step, 0, k.shape[1]),
            q.shape[3], step, 1, scale / step, None, [],
        )  # fmt: skip


class Sampled(NamedTuple):
    """The last query of every `stride`, and all keys."""

    stride: int

    def fits(self, head_dim: int, dtype: torch.dtype, blocks: tuple[int, int]) -> bool:
        return _fits(padded_dim(head_dim), dtype, blocks, (self.stride, 1))

    def operands(self, q: Tensor, k: Tensor, blocks: tuple[int, int], scale: float) -> Operands:
        q, k = _near(q), _near(k)
        (q_b, q_t, q_h, _), (k_b, k_t, k_h, _) = q.stride(), k.stride()
        return Operands(
            Operand(q, (q_b, q_h, q_t, 0), self.stride, self.stride, self.stride - 1, q.shape[1]),
            Operand(k, (k_b, k_h, k_t, 0), 1, 1, 0, k.shape[1]),
            q.shape[3], 1, 0, scale, None, [],
        )  # fmt: skip


class Given(NamedTuple):
    """Rows (batch, R, heads, features), scale included, and columns (batch, C, heads_kv, features), of patches."""

    rows: Tensor
    columns: Tensor
    patch: tuple[int, int]

    def fits(self, head_dim: int, dtype: torch.dtype, blocks: tuple[int, int]) -> bool:
        return _fits(padded_dim(self.rows.shape[3]), dtype, blocks, self.patch)

    def operands(self, q: Tensor, k: Tensor, blocks: tuple[int, int], scale: float) -> Operands:
        found = []
        for x, size in zip((self.rows, self.columns), self.patch, strict=True):
            near = _near(x.to(q.dtype))
            b, t, h, _ = near.stride()
            found.append(Operand(near, (b, h, t, 0), size, 1, 0, x.shape[1]))
        return Operands(*found, self.rows.shape[3], 1, 0, 1.0, None, [])


def _pooling(
    q: Tensor, k: Tensor, blocks: tuple[int, int], patch: tuple[int, int], kind: str, scale: float, in_order: bool
) -> tuple[Tensor, Tensor, Callable[[], list[Launched | None]]]:
    """Rows and columns, [batch · heads, patches, 1, features], and what launches the kernel that makes them; columns in
    whole tiles, `in_order`, for `hopper_select`.
    """
    (batch, seq_q, heads, head_dim), (seq_k, heads_kv) = q.shape, k.shape[1:3]
    num_rows, num_columns = (
        ceil_div(seq, block) * (block // size) for seq, block, size in zip((seq_q, seq_k), blocks, patch, strict=True)
    )
    padded = padded_dim(head_dim)
    of_row, of_column = {"mean": (1, 1), "all": (1, 3)}.get(kind, (2, 2))
    num_places = ceil_div(num_columns, 128) * 128 if in_order else num_columns
    rows = q.new_empty(batch * heads, num_rows, 1, of_row * padded)
    columns = k.new_empty(batch * heads_kv, num_places, 1, of_column * padded)
    spread_q, spread_k = (min(max(size // 4, 1), POOLED_AT_ONCE.value) for size in patch)
    units_q = batch * heads * ceil_div(num_rows * spread_q, POOLED_AT_ONCE.value)
    units_k = batch * heads_kv * ceil_div(num_columns * spread_k, POOLED_AT_ONCE.value)

    def make() -> list[Launched | None]:
        pooled = launch(
            pool_kernel, (units_q + units_k,), (q, k, rows, columns),
            (*q.stride()[:3], *k.stride()[:3],
             heads, heads_kv, seq_q, seq_k, num_rows, num_columns, num_places, units_q, scale),
            D=head_dim, PADDED_D=padded, PATCH_Q=patch[0], PATCH_K=patch[1],
            SPREAD_Q=spread_q, SPREAD_K=spread_k, KIND=KINDS[kind].value,
            WIDTH_Q=rows.shape[3], WIDTH_K=columns.shape[3],
            ORDER=blocks[1] // patch[1] if in_order else 0, num_warps=max(2, padded // 64),
        )  # fmt: skip
        return [pooled]

    return rows, columns, make


def patches(
    q: Tensor, k: Tensor, blocks: tuple[int, int], patch: tuple[int, int], scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean queries times the scale, and mean, largest and smallest coordinates of keys, of patches: (batch, patches,
    heads, head_dim) each, in the dtype of q."""
    q, k = contiguous_rows(q), contiguous_rows(k)
    rows, columns, make = _pooling(q, k, blocks, patch, "all", scale, False)
    key = "patches", q.device, like(q), like(k), blocks, patch, scale
    repeat(_noted, key, [q, k, rows, columns], (), make)
    head_dim, padded = q.shape[3], padded_dim(q.shape[3])
    found = columns.view(len(k), k.shape[2], -1, 3, padded)[..., :head_dim].transpose(1, 2)
    of_keys = found.unbind(-2)
    return rows.view(len(q), q.shape[2], -1, padded).transpose(1, 2)[..., :head_dim], of_keys[0], of_keys[1], of_keys[2]


class Operands(NamedTuple):
    """What `masses_kernel` multiplies.

    Attributes:
        width, parts, turn: numbers of a part, how many there are, and from token to token (`load_part`).
        scale: of the products.
        make: launches what makes them of the tensors `made_of`, if they have to be made.
    """

    rows: Operand
    columns: Operand
    width: int
    parts: int
    turn: int
    scale: float
    make: Callable[[], list[Launched | None]] | None
    made_of: list[Tensor]


Features = Pooled | Antidiagonals | Sampled | Given


def _near(x: Tensor) -> Tensor:
    x = contiguous_rows(x)
    return x if abs(x.stride(1)) < MAX_STRIDE else x.contiguous()


def _fits(width: int, dtype: torch.dtype, blocks: tuple[int, int], patch: tuple[int, int]) -> bool:
    if width * dtype.itemsize > ROW_BYTES or any(block % size for block, size in zip(blocks, patch, strict=True)):
        return False
    of_q, of_k = blocks[0] // patch[0], blocks[1] // patch[1]
    tile = tile_of(width, dtype, of_q, of_k)
    return of_q <= min(MAX_PARTS, tile.rows) and of_k <= tile.columns


class Tile(NamedTuple):
    rows: int
    columns: int
    options: dict[str, int]


def tile_of(width: int, dtype: torch.dtype, of_q: int, of_k: int, parts: int = 1, roomy: bool = False) -> Tile:
    """Few rows are spread over many small tiles; large tiles read the columns less often. `roomy` where there is much
    shared memory."""
    wide, single = padded_dim(width) * dtype.itemsize > ROW_BYTES // 2, dtype == torch.float32
    tight = not roomy and (of_k > 64 or parts > 1)
    rows = max(of_q, min(32 * of_q, 64 if wide or tight else 128))
    columns = 128 if (roomy and rows == 128 and not single) or of_k > 64 else 64
    if wide:
        columns = 64
    if parts > 1:
        stages = (3 if roomy else 2) - single  # products of which take more room
        return Tile(rows, columns, {"num_warps": 8 if rows == 128 else 4, "num_stages": stages})
    options = {"num_warps": 8, "maxnreg": 128} if rows == 128 else {"num_warps": 4}
    options["num_stages"] = (2 if wide or columns == 128 else 3) - single
    return Tile(rows, columns, options)
