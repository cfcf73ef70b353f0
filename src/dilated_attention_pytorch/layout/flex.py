"""Layouts as FlexAttention's block masks, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..patterns.base import check_int
from ..patterns.tokens import UNBOUNDED, Interval
from .layout import BlockLayout
from .lists import BlockList
from .rules import NO_BRANCHES, NO_DOCUMENTS, key_bounds

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# In the table of rules: a block that is not active, and a full one.
INACTIVE, FULL = -2, -1

PAIRS = 1 << 22  # asked of a mask_mod at a time; bounds the temporary memory


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
    rules, documents, (seq_q, seq_k), (block_q, block_k) = layout.rules, layout.documents, layout.lengths, layout.blocks

    def mask_mod(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        rule = table[sample * several_samples, head * several_lists, query // block_q, key // block_k]
        allowed = rule == FULL
        for t in range(rules.shape[1]):
            first, last = key_bounds(rules[rule.clamp(min=0), t], query, seq_q, seq_k, documents)
            allowed = allowed | ((rule >= 0) & (key >= first) & (key <= last))
        return allowed

    return mask_mod


def from_flex(mask: BlockMask) -> BlockLayout:
    """See `BlockLayout.from_flex_block_mask`."""
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(mask, BlockMask):
        raise TypeError(f"mask must be a BlockMask of FlexAttention, got {type(mask).__name__}")
    batch, heads, num_q = mask.kv_num_blocks.shape
    partial, full = _lists_of(mask)
    (seq_q, seq_k), (block_q, block_k), device = mask.seq_lengths, mask.BLOCK_SIZE, mask.kv_num_blocks.device
    own = getattr(mask.mask_mod, "of_layout", None)
    if own is not None and (own.lengths, own.blocks, own.device) == ((seq_q, seq_k), (block_q, block_k), device):
        again = to_flex(own)
        same = again.kv_num_blocks.shape == mask.kv_num_blocks.shape
        if same and all(map(torch.equal, _lists_of(again), (partial, full))):
            return own
    window = _window_of(mask.mask_mod, partial, (seq_q, seq_k), (block_q, block_k))
    entries = torch.cat((full, partial))
    behind = (full[:, 3] + 1) * block_k > seq_k  # a rule of their own hides what is behind the end, and nothing else
    rules = [[window], [Interval()]] if behind.any() else [[window]]
    rule = torch.cat((behind.int() * 2 - 1, torch.zeros_like(partial[:, 3], dtype=torch.int32)))
    order = entries[:, 3].argsort(stable=True)
    entries, rule = entries[order], rule[order]
    row = (entries[:, 0] * heads + entries[:, 1]) * num_q + entries[:, 2]
    return BlockLayout(
        seq_q=seq_q,
        seq_k=seq_k,
        block_q=block_q,
        block_k=block_k,
        by_query=BlockList.pack(row, entries[:, 3], rule >= 0, rule if len(rules) > 1 else None, batch * heads * num_q),
        num_heads=heads if heads > 1 or batch > 1 else None,
        batch_size=batch if batch > 1 else None,
        rules=torch.tensor(rules, dtype=torch.int32, device=device),
        documents=NO_DOCUMENTS.to(device),
        branches=NO_BRANCHES.to(device),
    )


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


def _window_of(mask_mod: MaskMod, partial: Tensor, lengths: tuple[int, int], blocks: tuple[int, int]) -> Interval:
    """The one window of keys around each query that `mask_mod` is in all partial blocks. ValueError if it is none."""
    if not len(partial):
        return Interval()
    at_once = partial.split(max(1, PAIRS // (blocks[0] * blocks[1])))
    begins, ends = zip(*(_edges(*_pairs(mask_mod, part, lengths, blocks)) for part in at_once), strict=True)
    left, right = _the_only(-torch.cat(begins)), _the_only(torch.cat(ends))
    if left is not None and right is not None:
        for part in at_once:
            ahead, allowed, there = _pairs(mask_mod, part, lengths, blocks)
            if not torch.equal((ahead >= -left) & (ahead <= right) & there, allowed):
                break
        else:
            return Interval(left, right)
    raise ValueError(
        "mask must have no partial blocks but those of one causal rule or sliding window (or be made by "
        "to_flex_block_mask): what its mask_mod allows is no such rule; write it as a pattern instead"
    )


def _pairs(
    mask_mod: MaskMod, partial: Tensor, lengths: tuple[int, int], blocks: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Of all pairs of some blocks: how far the key is ahead of the query, whether it is allowed, and there."""
    (seq_q, seq_k), (block_q, block_k) = lengths, blocks
    query = partial[:, 2:3] * block_q + torch.arange(block_q, device=partial.device)
    key = partial[:, 3:4] * block_k + torch.arange(block_k, device=partial.device)
    of_keys = torch.vmap(mask_mod, in_dims=(None, None, None, 0))
    of_pairs = torch.vmap(torch.vmap(of_keys, in_dims=(None, None, 0, None)))
    asked = partial[:, 0], partial[:, 1], query.clamp(max=seq_q - 1), key.clamp(max=seq_k - 1)
    there = (query < seq_q)[:, :, None] & (key < seq_k)[:, None]
    ahead = key[:, None] - (query + (seq_k - seq_q))[:, :, None]
    return ahead, of_pairs(*asked) & there, there


def _edges(ahead: Tensor, allowed: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """How far ahead allowed keys begin and end within a block, each distance once."""
    begins, ends = allowed[..., 1:] & ~allowed[..., :-1], allowed[..., :-1] & ~allowed[..., 1:] & there[..., 1:]
    return ahead[..., 1:][begins].unique(), ahead[..., :-1][ends].unique()


def _the_only(values: Tensor) -> int | None:
    """The bound that all edges show, none if they differ; unbounded where there is no edge."""
    different = values.unique().tolist()
    return UNBOUNDED if not different else different[0] if len(different) == 1 else None
