"""What is derived from a layout on demand: its lists and ranges by key, the causal layout, masks."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..patterns.tokens import UNBOUNDED, Interval
from . import build
from .bitmaps import bits_of
from .eager import is_plain
from .lists import BlockList
from .rules import NO_DOCUMENTS, NOTHING, key_bounds

if TYPE_CHECKING:
    from .layout import BlockLayout

# Entries that one sort of `by_key` takes on a CPU.
SORTED_AT_ONCE = 1 << 20


def by_key(layout: BlockLayout) -> BlockList:
    """See `BlockLayout.by_key`."""
    form = layout._derived.get("closed_form")
    if form is not None and not torch.compiler.is_dynamo_compiling() and is_plain(layout.by_query.indices):
        lists, work = form.by_key(layout.num_k_blocks)
        layout._derived.setdefault("key_work", work)
        layout._derived.pop("closed_form", None)
        return lists
    query_block = layout.by_query.row_of_entry()
    partial = layout.by_query.is_partial(query_block)
    num_rows = layout.num_lists * layout.num_k_blocks
    row = torch.div(query_block, layout.num_q_blocks, rounding_mode="floor")
    row.mul_(layout.num_k_blocks).add_(layout.by_query.indices)
    row.masked_fill_(query_block == layout.by_query.num_rows, num_rows)
    query_block.remainder_(layout.num_q_blocks)
    rule = layout.by_query.rule_ids if layout.by_query.rule_ids.numel() else None
    # Sorting needs several times the memory of what is sorted: on a CPU sort a range of rows at a time. (On a
    # GPU that would synchronise.)
    parts = min(-(-len(row) // SORTED_AT_ONCE), num_rows) if layout.device.type == "cpu" else 1
    if parts <= 1:
        return BlockList.pack(row, query_block, partial, rule, num_rows)
    edges = [num_rows * part // parts for part in range(parts + 1)]
    pieces = []
    for start, stop in pairwise(edges):
        here = ((row >= start) & (row < stop)).nonzero()[:, 0]
        chosen = None if rule is None else rule[here]
        pieces.append(BlockList.pack(row[here] - start, query_block[here], partial[here], chosen, stop - start))
    return BlockList.concat(pieces)


def seen_by(layout: BlockLayout) -> Tensor:
    """See `BlockLayout.seen_by`."""
    if len(layout.documents) != 2 or not layout.documents.numel() or not layout.ranges_ascend:
        return torch.empty_like(NO_DOCUMENTS, device=layout.device)
    key = torch.arange(layout.seq_k, dtype=torch.int32, device=layout.device).expand(2, -1).contiguous()
    return torch.searchsorted(layout.documents, key, right=True, out_int32=True)


def causal(layout: BlockLayout) -> BlockLayout:
    """See `BlockLayout.causal`.

    Dropped blocks leave spare capacity in a graph, where shapes are static, and on a GPU, where trimming would
    synchronise.
    """
    row = layout.by_query.row_of_entry()
    partial = layout.by_query.is_partial(row)
    column, num_rows, num_rules = layout.by_query.indices, layout.by_query.num_rows, len(layout.rules)
    head = torch.arange(layout.seq_k - layout.seq_q, layout.seq_k, layout.block_q, device=layout.device)
    span = build.Span.of(Interval(right=0), head, layout.seq_k, layout.blocks)
    query_block = row % layout.num_q_blocks
    kept = (row < num_rows) & (column >= span.first[query_block]) & (column < span.stop[query_block])
    crossing = (column < span.first_full[query_block]) | (column >= span.stop_full[query_block])
    # A full block that the diagonal crosses takes a new rule, the last of the table: everything, so far.
    rule = layout.by_query.rule_ids if layout.by_query.rule_ids.numel() else torch.zeros_like(column)
    rule = torch.where(partial, rule, num_rules)
    row = torch.where(kept, row, num_rows)
    order = (row.long() * layout.num_k_blocks + column).argsort(stable=True)
    everything = torch.full_like(layout.rules[:1], UNBOUNDED)
    everything[:, 1:, 3].fill_(NOTHING.query_stop)
    everything[..., 4].fill_(0)
    rules = torch.cat((layout.rules, everything))
    causal_right = rules[..., 1:2].clamp(max=0)
    by_query = BlockList.pack(row[order], column[order], (partial | crossing)[order], rule[order], num_rows)
    known = not torch.compiler.is_dynamo_compiling() and is_plain(layout.by_query.indices)
    trim = layout.device.type == "cpu" and known
    return type(layout)(
        seq_q=layout.seq_q,
        seq_k=layout.seq_k,
        block_q=layout.block_q,
        block_k=layout.block_k,
        by_query=by_query.trimmed() if trim else by_query,
        num_heads=layout.num_heads,
        batch_size=layout.batch_size,
        rules=torch.cat((rules[..., :1], causal_right, rules[..., 2:]), dim=-1),
        documents=layout.documents,
        ranges_ascend=layout.ranges_ascend,
        branches=layout.branches,
        bitmaps=layout.bitmaps,
        evaluated=layout.evaluated,
        kind="causal" if layout.kind == "full" else None,
        checked=True,
    )


def dense(layout: BlockLayout) -> Tensor:
    """`BlockLayout.to_dense`, [lists, seq_q, seq_k]."""
    which, query_block, key_block, _ = layout.entries()
    cells = layout.cells()
    query, key = layout.queries_of(query_block), layout.keys_of(key_block)
    size = layout.num_residues * max(layout.num_q_blocks * layout.block_q, layout.num_k_blocks * layout.block_k)
    found = torch.zeros(layout.num_lists, size, size, dtype=cells.dtype, device=layout.device)
    found[which[:, None, None], query[:, :, None], key[:, None]] = cells
    return found[:, : layout.seq_q, : layout.seq_k]


def cells(layout: BlockLayout, chosen: Tensor | slice) -> Tensor:
    """See `BlockLayout.cells`."""
    which, query_block, key_block, rule = (x[chosen] for x in layout.entries())
    full = (rule < 0)[:, None, None]
    if not layout.dilated:
        return layout.token_mask(query_block, key_block, rule.clamp(min=0)) | full
    times = layout.by_query.rule_ids[: layout.num_active_blocks][chosen][:, None, None]
    times = torch.where(times > 0, times, layout.pair_multiplicity(which, query_block, key_block))
    return torch.where(full | layout.token_mask(query_block, key_block, torch.zeros_like(rule)), times, 0)


def token_mask(layout: BlockLayout, query_block: Tensor, key_block: Tensor, rule_id: Tensor) -> Tensor:
    """See `BlockLayout.token_mask`."""
    query, key = layout.queries_of(query_block), layout.keys_of(key_block)
    allowed = torch.zeros((), dtype=torch.bool, device=layout.device)
    for interval in layout.rules[rule_id].unbind(1):
        first, last = key_bounds(interval[:, None], query, layout.seq_q, layout.seq_k, layout.documents)
        inside = (key[:, None] >= first[:, :, None]) & (key[:, None] <= last[:, :, None])
        allowed = allowed | (inside & bits_of(layout.bitmaps, interval[:, 4]) if len(layout.bitmaps) else inside)
    return allowed


def pair_multiplicity(layout: BlockLayout, which: Tensor, query_block: Tensor, key_block: Tensor) -> Tensor:
    """See `BlockLayout.pair_multiplicity`."""
    position, key = layout.queries_of(query_block) + (layout.seq_k - layout.seq_q), layout.keys_of(key_block)
    held = torch.zeros((), dtype=torch.int32, device=layout.device)
    for segment, dilation, offset, query_by, key_by in (b.T[..., None] for b in layout.branches[which].unbind(1)):
        query_at, key_at = position + query_by, key + key_by
        kept_query = (query_at >= 0) & (query_at % segment % dilation == offset)
        of_query = torch.where(kept_query, query_at // segment, -1)
        of_key = torch.where(key_at % segment % dilation == offset, key_at // segment, -2)
        held = held + (of_query[:, :, None] == of_key[:, None])
    return held
