"""`BlockLayout.take`: some rows and columns of blocks as a layout of their own, in which the same pairs are allowed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .checks import check_rows
from .lists import BlockList
from .rules import moved, num_tokens

if TYPE_CHECKING:
    from .layout import BlockLayout


def take(layout: BlockLayout, query_blocks: Tensor, key_blocks: Tensor | None) -> BlockLayout:
    """See `BlockLayout.take`."""
    check_rows("query_blocks", query_blocks, layout.num_q_blocks, layout.device)
    if key_blocks is not None:
        check_rows("key_blocks", key_blocks, layout.num_k_blocks, layout.device)
    which, row, column, rule = layout.entries()
    kept, row = _places(query_blocks, row)
    documents, seq_k = layout.documents, layout.seq_k
    if documents.numel():
        documents = documents[:, tokens_of(query_blocks, layout.block_q, layout.seq_q)].contiguous()
    if key_blocks is not None:
        found, column = _places(key_blocks, column)
        kept &= found
        seq_k = num_tokens(key_blocks, layout.block_k, layout.seq_k)
        inside, place = _places(key_blocks, documents // layout.block_k)
        within = torch.where(inside, documents % layout.block_k, 0)
        documents = (place * layout.block_k + within).clamp(max=seq_k).int()
    row, column, rule = (which * len(query_blocks) + row)[kept], column[kept], rule[kept]
    taken = replace(
        layout,
        seq_q=num_tokens(query_blocks, layout.block_q, layout.seq_q),
        seq_k=seq_k,
        by_query=BlockList.pack(row, column, rule >= 0, rule, layout.num_lists * len(query_blocks)),
        documents=documents,
        kind=None,
        checked=True,
    )
    return _with_own_bitmaps(renumbered(taken, query_blocks, layout.seq_q, key_blocks, layout.seq_k))


def _with_own_bitmaps(layout: BlockLayout) -> BlockLayout:
    """Without the bitmaps that no rule of it names."""
    if not len(layout.bitmaps):
        return layout
    number = -1 - layout.rules[..., 4].long()
    used, place = torch.unique(number.clamp(min=-1), return_inverse=True)
    kept, rules = used[used >= 0], layout.rules.clone()
    named = torch.where(number >= 0, -1 - (place - (len(used) - len(kept))), layout.rules[..., 4])
    rules[..., 4] = named.int()
    return replace(layout, rules=rules, bitmaps=layout.bitmaps[kept], checked=True)


def renumbered(
    layout: BlockLayout, query_blocks: Tensor, seq_q: int, key_blocks: Tensor | None, seq_k: int
) -> BlockLayout:
    """The layout with rules that were written for the whole, of these lengths, adapted to its own block numbers."""
    ahead = (layout.seq_q - seq_q) - (layout.seq_k - seq_k)
    query_by = (query_blocks - torch.arange(layout.num_q_blocks, device=layout.device)) * layout.block_q + ahead
    counted = torch.arange(layout.num_k_blocks, device=layout.device)
    key_by = ((counted if key_blocks is None else key_blocks) - counted) * layout.block_k
    which, row, column, rule = layout.entries()
    partial = rule >= 0
    if not partial.any():
        return replace(layout, rules=layout.rules[:1], by_query=layout.by_query.unnamed(), checked=True)
    # A rule for every different (old rule, step of the query block, step of the key block).
    query_steps, query_step = torch.unique(query_by, return_inverse=True)
    key_steps, key_step = torch.unique(key_by, return_inverse=True)
    used = (rule.long() * len(query_steps) + query_step[row]) * len(key_steps) + key_step[column]
    used, named = torch.unique(used.masked_fill(~partial, int(used[partial][0])), return_inverse=True)
    of_key, used = used % len(key_steps), used // len(key_steps)
    of_query, old = used % len(query_steps), used // len(query_steps)
    rules = moved(layout.rules[old], query_steps[of_query][:, None], key_steps[of_key][:, None]).int()
    row = which * layout.num_q_blocks + row
    names = named if len(rules) > 1 else None
    by_query = BlockList.pack(row, column, partial, names, layout.by_query.num_rows)
    return replace(layout, rules=rules, by_query=by_query, checked=True)


def tokens_of(blocks: Tensor, block: int, seq: int) -> Tensor:
    """The tokens of these blocks, in order."""
    tokens = (blocks[:, None] * block + torch.arange(block, device=blocks.device)).flatten()
    return tokens[: num_tokens(blocks, block, seq)]


def _places(chosen: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """Which of these numbers are in the ascending list `chosen`, and their positions there."""
    place = torch.searchsorted(chosen.contiguous(), number.long())
    return torch.isin(number, chosen), place
