"""Layouts as FlexAttention's block masks, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..patterns.base import check_int
from ..patterns.blocks import BLOCK_SIZES, ceil_div
from ..patterns.tokens import UNBOUNDED, Interval
from .bitmaps import NO_BITMAPS, bit_at
from .checks import check_sizes
from .layout import BlockLayout
from .lists import BlockList
from .rules import NO_BRANCHES, NO_DOCUMENTS, key_bounds
from .tiles import MaskMod, TileGrid, Tiles, of_tiles

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# In the table of rules: a block that is not active, and a full one.
INACTIVE, FULL = -2, -1


def to_flex(layout: BlockLayout, num_heads: int | None = None) -> BlockMask:
    """See `BlockLayout.to_flex_block_mask`."""
    from torch.nn.attention.flex_attention import BlockMask

    if layout.dilated:
        raise ValueError("a key of dilated attention may count several times, which a block mask cannot say")
    batch, heads = layout.batch_size or 1, layout.num_heads or 1
    table = torch.full((batch * heads, layout.num_q_blocks, layout.num_k_blocks), INACTIVE, device=layout.device)
    which, query_block, key_block, rule = layout.entries()
    table[which, query_block, key_block] = rule.long()
    table = table.view(batch, heads, *table.shape[1:])
    if num_heads is not None:
        check_int("num_heads", num_heads, least=1)
        if num_heads % heads:
            raise ValueError(f"num_heads must be a multiple of the layout's {heads}, got {num_heads}")
        table = table.repeat_interleave(num_heads // heads, dim=1) if heads > 1 else table
    mask = BlockMask.from_kv_blocks(
        *_listed(table >= 0),
        *_listed(table == FULL),
        BLOCK_SIZE=layout.blocks,
        mask_mod=_mask_mod(layout, table),
        seq_lengths=layout.lengths,
    )
    mask.mask_mod.of_layout = layout  # type: ignore[attr-defined]  # the way back
    return mask


def _listed(active: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row are active, and which, the active ones first."""
    return active.sum(-1, dtype=torch.int32), active.int().argsort(dim=-1, descending=True, stable=True).int()


def _mask_mod(layout: BlockLayout, table: Tensor) -> MaskMod:
    """Whether single pairs are allowed, for FlexAttention to ask in partial blocks; right in all others too."""
    several_samples, several_lists = (int(n > 1) for n in table.shape[:2])
    (seq_q, seq_k), (block_q, block_k) = layout.lengths, layout.blocks
    rules, documents, bitmaps = layout.rules, layout.documents, layout.bitmaps

    def mask_mod(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        rule = table[sample * several_samples, head * several_lists, query // block_q, key // block_k]
        allowed = rule == FULL
        for t in range(rules.shape[1]):
            interval = rules[rule.clamp(min=0), t]
            first, last = key_bounds(interval, query, seq_q, seq_k, documents)
            inside = (rule >= 0) & (key >= first) & (key <= last)
            if len(bitmaps):
                inside = inside & bit_at(bitmaps, interval[..., 4], query % block_q, key % block_k)
            allowed = allowed | inside
        return allowed

    return mask_mod


def from_flex(mask: BlockMask) -> BlockLayout:
    """See `BlockLayout.from_flex_block_mask`."""
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(mask, BlockMask):
        raise TypeError(f"mask must be a BlockMask of FlexAttention, got {type(mask).__name__}")
    partial, full = _lists_of(mask)
    (seq_q, seq_k), blocks, device = mask.seq_lengths, mask.BLOCK_SIZE, mask.kv_num_blocks.device
    own = getattr(mask.mask_mod, "of_layout", None)
    if own is not None and (own.lengths, own.blocks, own.device) == ((seq_q, seq_k), blocks, device):
        again = to_flex(own)
        same = again.kv_num_blocks.shape == mask.kv_num_blocks.shape
        if same and all(map(torch.equal, _lists_of(again), (partial, full))):
            return own
    block_q, block_k = (_block_in(block) for block in blocks)
    check_sizes(seq_q, seq_k, (block_q, block_k))
    grid = TileGrid(seq_q, seq_k, block_q, block_k, device)
    if (block_q, block_k) == tuple(blocks):
        window = _window_of(mask.mask_mod, partial, grid)
        if window is not None:
            return _of_window(mask, window, partial, full, grid)
    return _of_bitmaps(mask, partial, full, grid)


def _block_in(block: int) -> int:
    """Our size of block for one of theirs: the largest that divides it, else one that does not."""
    return next((size for size in reversed(BLOCK_SIZES) if block % size == 0), 64)


def _shape_of(mask: BlockMask) -> tuple[int | None, int | None]:
    """Heads and samples of a layout."""
    batch, heads, _ = mask.kv_num_blocks.shape
    return (heads if heads > 1 or batch > 1 else None), (batch if batch > 1 else None)


def _of_window(mask: BlockMask, window: Interval, partial: Tensor, full: Tensor, grid: TileGrid) -> BlockLayout:
    """Of a mask whose partial blocks all have this one rule."""
    batch, heads, num_q = mask.kv_num_blocks.shape
    entries = torch.cat((full, partial))
    behind = (full[:, 3] + 1) * grid.block_k > grid.seq_k  # a rule of their own hides what is behind the end
    rules = [[window], [Interval()]] if behind.any() else [[window]]
    rule = torch.cat((behind.int() * 2 - 1, torch.zeros_like(partial[:, 3], dtype=torch.int32)))
    order = entries[:, 3].argsort(stable=True)
    entries, rule = entries[order], rule[order]
    row = (entries[:, 0] * heads + entries[:, 1]) * num_q + entries[:, 2]
    num_heads, batch_size = _shape_of(mask)
    return BlockLayout(
        seq_q=grid.seq_q,
        seq_k=grid.seq_k,
        block_q=grid.block_q,
        block_k=grid.block_k,
        by_query=BlockList.pack(row, entries[:, 3], rule >= 0, rule if len(rules) > 1 else None, batch * heads * num_q),
        num_heads=num_heads,
        batch_size=batch_size,
        rules=torch.tensor(rules, dtype=torch.int32, device=grid.device),
        documents=NO_DOCUMENTS.to(grid.device),
        branches=NO_BRANCHES.to(grid.device),
        bitmaps=NO_BITMAPS.to(grid.device),
    )


def _of_bitmaps(mask: BlockMask, partial: Tensor, full: Tensor, grid: TileGrid) -> BlockLayout:
    """Of any mask: a pair is allowed in a full block, and in a partial one where `mask_mod` says so.

    Our blocks are parts of theirs, or overlap several where no size of ours divides theirs.
    """
    batch, heads, num_rows = mask.kv_num_blocks.shape
    (their_q, their_k), num_columns = mask.BLOCK_SIZE, ceil_div(grid.seq_k, mask.BLOCK_SIZE[1])
    state = torch.full((batch, heads, num_rows, num_columns), INACTIVE, device=grid.device)
    state[partial.unbind(1)] = 0
    state[full.unbind(1)] = FULL
    answers = of_tiles(mask.mask_mod, grid)
    tiles = Tiles(grid, batch * heads)

    def allowed(which: Tensor, query_block: Tensor, key_block: Tensor) -> Tensor:
        sample, head = which // heads, which % heads
        query = grid.queries(query_block).clamp(max=grid.seq_q - 1) // their_q
        key = grid.keys(key_block).clamp(max=grid.seq_k - 1) // their_k
        here = state[sample[:, None, None], head[:, None, None], query[:, :, None], key[:, None]]
        return (here == FULL) | ((here > FULL) & answers(sample, head, query_block, key_block))

    for row, column in grid.all_blocks(batch * heads):
        which, query_block = row // grid.num_q, row % grid.num_q
        place = query_block * grid.block_q // their_q, column * grid.block_k // their_k
        corner = state[which // heads, which % heads, *place]
        divided = not (their_q % grid.block_q or their_k % grid.block_k)
        sure = corner == FULL if divided else torch.zeros_like(corner, dtype=torch.bool)
        asked = corner == 0 if divided else torch.ones_like(sure)
        tiles.add_full(row[sure], column[sure])
        tiles.evaluate(row[asked], column[asked], allowed)
    return tiles.layout(BlockLayout, *_shape_of(mask))


def _lists_of(mask: BlockMask) -> tuple[Tensor, Tensor]:
    """The entries of partial and of full blocks."""
    partial = _entries(mask.kv_num_blocks, mask.kv_indices)
    if mask.full_kv_num_blocks is None or mask.full_kv_indices is None:
        return partial, partial[:0]
    return partial, _entries(mask.full_kv_num_blocks, mask.full_kv_indices)


def _entries(counts: Tensor, indices: Tensor) -> Tensor:
    """int64 [entries, 4]: (sample, head, query block, key block)."""
    listed = torch.arange(indices.shape[-1], device=counts.device) < counts[..., None]
    at = listed.nonzero()
    return torch.cat((at[:, :3], indices[listed][:, None].long()), dim=1)


def _window_of(mask_mod: MaskMod, partial: Tensor, grid: TileGrid) -> Interval | None:
    """The one window of keys around each query that `mask_mod` is in all partial blocks; None if it is none."""
    if not len(partial):
        return Interval()
    answers, at_once = of_tiles(mask_mod, grid), partial.split(grid.at_once)
    left: int | None = None
    right: int | None = None
    begins, ends = partial.new_empty(0), partial.new_empty(0)
    for part in at_once:
        more = _edges(*_pairs(answers, part, grid))
        begins, ends = torch.cat((begins, more[0])), torch.cat((ends, more[1]))
        left, right = _the_only(-begins), _the_only(ends)
        if left is None or right is None:
            return None
    assert left is not None
    assert right is not None
    for part in at_once:
        ahead, allowed, there = _pairs(answers, part, grid)
        if not torch.equal((ahead >= -left) & (ahead <= right) & there, allowed):
            return None
    return Interval(left, right)


def _pairs(answers: MaskMod, partial: Tensor, grid: TileGrid) -> tuple[Tensor, Tensor, Tensor]:
    """Of all pairs of some blocks: how far the key is ahead of the query, whether it is allowed, and there."""
    query, key = grid.queries(partial[:, 2]), grid.keys(partial[:, 3])
    there = (query < grid.seq_q)[:, :, None] & (key < grid.seq_k)[:, None]
    ahead = key[:, None] - (query + (grid.seq_k - grid.seq_q))[:, :, None]
    return ahead, answers(*partial.unbind(1)) & there, there


def _edges(ahead: Tensor, allowed: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """How far ahead allowed keys begin and end within a block, each distance once."""
    begins, ends = allowed[..., 1:] & ~allowed[..., :-1], allowed[..., :-1] & ~allowed[..., 1:] & there[..., 1:]
    return ahead[..., 1:][begins].unique(), ahead[..., :-1][ends].unique()


def _the_only(values: Tensor) -> int | None:
    """The bound that all edges show, none if they differ; unbounded where there is no edge."""
    different = values.unique().tolist()
    return UNBOUNDED if not different else different[0] if len(different) == 1 else None
