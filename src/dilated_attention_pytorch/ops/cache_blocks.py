"""Blocks of a cache, chosen anew for every token: `BlockSummaries` beside the keys, `CacheBlocks` for the attention.

    summaries = BlockSummaries(scorer="minmax", block_size=(64, 16))
    blocks = summaries.choose(q, k, lengths=lengths, selector=TopK(0.25, even=True, across_heads=True))
    out = decode_attention(q, k, v, blocks, lengths=lengths)          # exact, over those blocks

What a scorer needs to know of a block's keys, its columns, is kept beside the cache. A step computes the columns of the
blocks that hold its new tokens, compares its queries with all columns, and keeps the heaviest blocks: its cost is that
of the columns and of the blocks that are kept. All of it is on the device, with shapes that depend on the capacity of
the cache alone. Key blocks are those of `select_blocks`: a prompt and the tokens behind it choose among the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..backends.base import compute_dtype
from ..layout.checks import block_pair
from ..patterns.base import check_flag, check_int, shown
from ..patterns.blocks import ceil_div, check_block_size
from .checks import check_qkv, check_scale
from .grids import listed
from .scores import Blocked, Scorer
from .select import check_selector, scorer_of
from .selectors import TopK, even_level


@dataclass(frozen=True, eq=False)
class CacheBlocks:
    """The key blocks that each new token sees of a cache, list by list; for `decode_attention`, in place of a pattern.

    Attributes:
        offsets: int32 [batch · new · num_lists + 1]: where the blocks of a token and list begin in `indices`; samples
            first, then new tokens, then lists.
        indices: int32, the blocks, each once in a list; those behind the last offset are not looked at. Tokens that a
            sample does not have are not seen.
        block_size: tokens of a block.
        num_lists: lists of a token: a multiple of the key heads that divides the query heads.
    """

    offsets: Tensor
    indices: Tensor
    block_size: int
    num_lists: int

    def __post_init__(self) -> None:
        check_block_size("block_size", self.block_size)
        check_int("num_lists", self.num_lists, least=1)
        for name in ("offsets", "indices"):
            x = getattr(self, name)
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a tensor, got {shown(x)}")
            if x.dtype != torch.int32 or x.ndim != 1:
                raise ValueError(f"{name} must be int32 with one dimension, got {x.dtype} {list(x.shape)}")
        if self.offsets.device != self.indices.device:
            raise ValueError(
                f"offsets and indices must be on one device, got {self.offsets.device} and {self.indices.device}"
            )

    def check(self, q: Tensor, k: Tensor) -> None:
        """Refuse blocks that are not for this call. Values on a CPU are looked at; a GPU is not waited for."""
        batch, new, heads, _ = q.shape
        if heads % self.num_lists or self.num_lists % k.shape[2]:
            raise ValueError(
                f"blocks must have lists for the {k.shape[2]} key heads, or for parts of them that divide the {heads} "
                f"query heads, got {self.num_lists}"
            )
        rows = batch * new * self.num_lists
        if len(self.offsets) != rows + 1:
            raise ValueError(
                f"blocks must be for {batch} samples, {new} new tokens and {self.num_lists} lists: {rows + 1} offsets, "
                f"got {len(self.offsets)}"
            )
        if self.offsets.device != q.device:
            raise ValueError(f"blocks must be on the device of q, {q.device}, got {self.offsets.device}")
        if self.offsets.device.type == "cpu" and not torch.compiler.is_compiling():
            first, last = int(self.offsets[0]), int(self.offsets[-1])
            if first != 0 or last > len(self.indices) or bool((self.offsets.diff() < 0).any()):
                raise ValueError(
                    f"offsets of blocks must ascend from 0 to at most the {len(self.indices)} indices, got "
                    f"{shown(self.offsets.tolist()[:8])}"
                )
            if last and int(self.indices[:last].min()) < 0:
                raise ValueError(f"indices of blocks must be at least 0, got {int(self.indices[:last].min())}")


class BlockSummaries:
    """What a scorer knows of the keys in a cache, block by block, kept up to date as the cache grows.

    Args:
        scorer, block_size: as in `select_blocks`. Mean-pooled, min/max and moment scorers and a `BlockGate` keep less
            than the keys themselves; "antidiagonal", "sampled" and "exact" keep a copy of them.
    """

    def __init__(self, scorer: str | Scorer = "minmax", block_size: int | tuple[int, int] = 64) -> None:
        self.scorer, self.blocks = scorer_of(scorer), block_pair(block_size)
        self.columns: Tensor | None = None  # (batch, blocks, columns of a block, heads_kv, features)

    def build(self, k: Tensor, lengths: Tensor, key_padding_mask: Tensor | None = None) -> None:
        """From all keys of a cache, (batch, capacity, heads_kv, head_dim), of which samples have so many."""
        place = torch.arange(k.shape[1], device=k.device)
        hidden = place >= lengths[:, None]
        if key_padding_mask is not None:
            hidden = hidden | key_padding_mask
        keys = Blocked.of(k, self.blocks[1], hidden)
        self.columns = columns_of(self.scorer, keys).unflatten(1, (keys.real.shape[1], -1)).to(k.dtype).contiguous()

    @torch.no_grad()
    def choose(
        self,
        q: Tensor,
        k: Tensor,
        *,
        lengths: Tensor,
        selector: TopK,
        sink: int = 1,
        local: int = 1,
        per_kv_head: bool = False,
        scale: float | None = None,
        key_padding_mask: Tensor | None = None,
        dense_below: int = 0,
    ) -> CacheBlocks:
        """The blocks of the last tokens of each sample, which the cache holds already.

        In the first call, and where the cache has another batch, all keys are read; then those of the blocks that hold
        new tokens.

        Args:
            q, k, lengths, key_padding_mask: as in `decode_attention`; lengths as a tensor on the device of q.
            selector: `TopK`. With `even` a token gets as many blocks as it would as the last one of a whole sequence.
            sink, local, per_kv_head, scale, dense_below: as in `select_blocks`.
        """
        self._check(q, k, lengths, selector, key_padding_mask)
        check_int("sink", sink, least=0)
        check_int("local", local, least=0)
        check_int("dense_below", dense_below, least=0)
        check_flag("per_kv_head", per_kv_head)
        self._update(q, k, lengths, key_padding_mask)
        assert self.columns is not None
        return chosen_blocks(
            q, self.columns, lengths, self.scorer, selector, self.blocks, capacity=k.shape[1], heads_kv=k.shape[2],
            sink=sink, local=local, per_kv_head=per_kv_head, scale=check_scale(scale, q.shape[3]),
            key_padding_mask=key_padding_mask, dense_below=dense_below,
        )  # fmt: skip

    def _update(self, q: Tensor, k: Tensor, lengths: Tensor, key_padding_mask: Tensor | None) -> None:
        if self.columns is None or len(self.columns) != len(k) or self.columns.device != k.device:
            self.build(k, lengths, key_padding_mask)
            return
        columns = self.with_room(k.shape[1])
        update_columns(columns, k, lengths, q.shape[1], self.scorer, self.blocks[1], key_padding_mask)

    def with_room(self, capacity: int) -> Tensor:
        """The columns, for a cache that has grown: with room for as much again."""
        kept = self.columns
        assert kept is not None
        if kept.shape[1] * self.blocks[1] < capacity:
            num_blocks = max(ceil_div(capacity, self.blocks[1]), 2 * kept.shape[1])
            more = kept.new_zeros(len(kept), num_blocks - kept.shape[1], *kept.shape[2:])
            kept = self.columns = torch.cat((kept, more), dim=1)
        return kept

    def _check(self, q: Tensor, k: Tensor, lengths: Tensor, selector: TopK, key_padding_mask: Tensor | None) -> None:
        check_qkv(q, k, k)
        if type(check_selector(selector)) is not TopK:
            raise ValueError(f"selector must be TopK(share) to choose for single tokens, got {shown(selector)}")
        if not isinstance(lengths, Tensor) or lengths.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"lengths must be an int32 or int64 tensor, got {shown(lengths)}")
        if lengths.shape != (len(q),) or lengths.device != q.device:
            raise ValueError(
                f"lengths must be one for each of {len(q)} samples on {q.device}, got {list(lengths.shape)} on "
                f"{lengths.device}"
            )
        if key_padding_mask is not None and (
            not isinstance(key_padding_mask, Tensor)
            or key_padding_mask.dtype != torch.bool
            or key_padding_mask.shape != k.shape[:2]
        ):
            raise ValueError(
                f"key_padding_mask must be bool (batch, capacity) = {list(k.shape[:2])}, got {shown(key_padding_mask)}"
            )


def columns_of(scorer: Scorer, keys: Blocked) -> Tensor:
    """Those of `Scorer.features`, from the keys alone."""
    alone: Any = getattr(scorer, "columns", None)
    return alone(keys) if callable(alone) else scorer.features(keys, keys, 1.0)[1]


def update_columns(
    columns: Tensor, k: Tensor, lengths: Tensor, new: int, scorer: Scorer, block: int, hidden: Tensor | None
) -> None:
    """The columns of all blocks that hold one of the `new` last tokens of a sample, in place."""
    touched = ceil_div(new - 1, block) + 1  # at the most
    first = (lengths.long() - new).clamp(min=0) // block
    which = (first[:, None] + torch.arange(touched, device=k.device)).clamp(max=ceil_div(k.shape[1], block) - 1)
    token = which[..., None] * block + torch.arange(block, device=k.device)  # [batch, touched, block]
    sample = torch.arange(len(k), device=k.device)[:, None]
    at = token.clamp(max=k.shape[1] - 1)
    real = token < lengths[:, None, None]
    if hidden is not None:
        real = real & ~hidden[sample[..., None], at]
    tokens = k[sample[..., None], at].masked_fill(~real[..., None, None], 0)
    found = columns_of(scorer, Blocked(tokens, real, False)).unflatten(1, (touched, -1))
    columns[sample, which] = found.to(columns.dtype)


def chosen_blocks(
    q: Tensor,
    columns: Tensor,
    lengths: Tensor,
    scorer: Scorer,
    selector: TopK,
    blocks: tuple[int, int],
    *,
    capacity: int,
    heads_kv: int,
    sink: int,
    local: int,
    per_kv_head: bool,
    scale: float,
    key_padding_mask: Tensor | None,
    dense_below: int,
) -> CacheBlocks:
    """See `BlockSummaries.choose`; columns are up to date."""
    (batch, new, heads, _), block = q.shape, blocks[1]
    num_blocks = ceil_div(capacity, block)
    columns = columns[:, :num_blocks]
    place = torch.arange(num_blocks, device=q.device)
    position = lengths.long()[:, None] - new + torch.arange(new, device=q.device)  # [batch, new]
    visible = place <= (position // block)[..., None]  # [batch, new, num_blocks]
    masses = _masses(q, columns, position, scorer, blocks, scale, key_padding_mask)
    lists = heads
    if per_kv_head:
        masses, lists = masses.unflatten(2, (heads_kv, -1)).mean(3), heads_kv
    near = (position - local) // block, (position + local) // block
    forced = (place * block < sink) | ((place >= near[0][..., None]) & (place <= near[1][..., None]))
    forced = forced & visible
    num_visible, num_forced = visible.sum(-1), forced.sum(-1)
    level = even_level(_rows_so_far(position, num_blocks * block, blocks), selector.share) if selector.even else None
    limits = selector.limits(num_visible[..., None], num_forced[..., None], lists, level)[..., 0]
    limits = torch.where(lengths[:, None] <= dense_below, num_visible * (lists if selector.across_heads else 1), limits)
    most = _most(selector, blocks, num_blocks, lists, sink, local, dense_below)
    priority = masses.masked_fill(forced[:, :, None], torch.inf).masked_fill(~visible[:, :, None], -1.0)
    flat = priority.flatten(2)[:, :, None] if selector.across_heads else priority
    order = flat.topk(min(most, flat.shape[-1]), sorted=True).indices
    rank = torch.arange(order.shape[-1], device=q.device) < limits[..., None, None]
    keep = torch.zeros_like(flat, dtype=torch.bool).scatter_(-1, order, rank.expand_as(order))
    keep = keep.reshape(batch, new, lists, num_blocks) & visible[:, :, None]
    places = batch * new * min(most * (1 if selector.across_heads else lists), lists * num_blocks)
    found = listed(keep, torch.full_like(place[:1], -1), places)
    return CacheBlocks(found.offsets, found.indices, block, lists)


def _masses(
    q: Tensor,
    columns: Tensor,
    position: Tensor,
    scorer: Scorer,
    blocks: tuple[int, int],
    scale: float,
    hidden: Tensor | None,
) -> Tensor:
    """[batch, new, heads, blocks]: the share of attention that a token is estimated to give to each block behind it."""
    new = q.shape[1]
    rows = _rows(q, scorer, blocks, scale).to(q.dtype)  # [batch, new, heads, F]
    num_blocks, columns_a_block, heads_kv = columns.shape[1:4]
    width, dtype = blocks[1] // columns_a_block, compute_dtype(q.dtype)
    grouped = rows.unflatten(2, (heads_kv, -1)).permute(0, 2, 1, 3, 4).flatten(2, 3)  # [batch, kv, new · group, F]
    scores = grouped @ columns.flatten(1, 2).permute(0, 2, 3, 1).to(q.dtype)
    scores = scores.to(dtype).unflatten(2, (new, -1)).permute(0, 2, 1, 3, 4).flatten(2, 3)  # [batch, new, heads, C]
    first = torch.arange(num_blocks * columns_a_block, device=q.device) * width
    # Columns that end behind the token may know later ones. Its own block is kept anyway.
    count = (first + width <= position[..., None] + 1) * width  # keys that a column stands for
    if hidden is not None:
        spare = num_blocks * blocks[1] - hidden.shape[1]
        real = torch.nn.functional.pad(~hidden, (0, spare)).unflatten(1, (-1, width)).sum(2)
        count = count.minimum(real[:, None])
    scores = scores + count.clamp(min=1).to(dtype).log()[:, :, None]
    nothing = (count == 0)[:, :, None]
    weights = scores.masked_fill(nothing, torch.finfo(dtype).min).softmax(-1).masked_fill(nothing, 0.0)
    return weights.unflatten(3, (num_blocks, -1)).sum(-1)


def _rows(q: Tensor, scorer: Scorer, blocks: tuple[int, int], scale: float) -> Tensor:
    """[batch, new, heads, F]: the row of each token for itself, the only real one of a block."""
    part: Any = getattr(scorer, "scorer", scorer)  # a gate has one
    size = getattr(part, "queries", None) or getattr(part, "stride", None)
    known = size is not None or hasattr(part, "queries")
    size = (size or 1) if known else blocks[0]
    tokens = torch.nn.functional.pad(q[:, :, None], (0, 0, 0, 0, 0, size - 1))
    real = torch.arange(size, device=q.device).expand(1, q.shape[1], size) == 0
    queries = Blocked(tokens, real, size == 1)
    alone: Any = getattr(scorer, "rows", None)
    rows: Tensor = alone(queries, scale) if callable(alone) else scorer.features(queries, queries, scale)[0]
    return rows.unflatten(1, (q.shape[1], -1))[:, :, 0]


def _rows_so_far(position: Tensor, capacity: int, blocks: tuple[int, int]) -> Tensor:
    """[…, query blocks]: the key blocks that each query block sees of a causal sequence that ends at a position."""
    head = torch.arange(0, capacity, blocks[0], device=position.device)
    stop = (head + blocks[0]).minimum(position[..., None] + 1)
    return (-(-stop // blocks[1])).masked_fill(head > position[..., None], 0)


def _most(
    selector: TopK, blocks: tuple[int, int], num_blocks: int, lists: int, sink: int, local: int, dense_below: int
) -> int:
    """A bound on the blocks of a token: of one list, or of all that compete."""
    competing = lists if selector.across_heads else 1
    forced = min(ceil_div(sink, blocks[1]) + ceil_div(2 * local, blocks[1]) + 2, num_blocks)
    dense = min(num_blocks, ceil_div(dense_below, blocks[1]))
    # With `even` a token gets less than the share of its blocks.
    wanted = math.ceil(selector.share * num_blocks * competing) + 1
    return min(max(wanted, forced * competing, dense * competing, 1), num_blocks * competing)
