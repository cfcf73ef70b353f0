"""`BlockLayout.from_pattern` and `from_block_mask`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..patterns import Pattern, PerHead
from ..patterns.base import check_int
from ..patterns.blocks import ceil_div
from ..patterns.tokens import EVERYTHING, Interval
from . import build
from .checks import block_pair, check_device, check_rows, check_sizes
from .lists import HOST, BlockList, send
from .rules import NO_BRANCHES, NO_DOCUMENTS, NOTHING, document_bounds, num_tokens
from .slicing import renumbered, tokens_of

if TYPE_CHECKING:
    from .layout import BlockLayout


def from_pattern(
    cls: type[BlockLayout],
    pattern: Pattern,
    seq_q: int,
    seq_k: int | None,
    block_size: int | tuple[int, int],
    num_heads: int | None,
    device: torch.device | str | None,
    query_blocks: Tensor | None,
) -> BlockLayout:
    """See `BlockLayout.from_pattern`."""
    if not isinstance(pattern, Pattern):
        raise TypeError(f"pattern must be a Pattern, got {type(pattern).__name__}")
    seq_k = seq_q if seq_k is None else seq_k
    lengths, blocks = check_sizes(seq_q, seq_k, block_size)
    for size in pattern.block_sizes:
        if size % blocks[0] or size % blocks[1]:
            raise ValueError(
                f"block_size must divide the block size {size} that the pattern is written in, got {block_size}"
            )
    starts = _document_starts(pattern)
    heads = pattern.patterns if isinstance(pattern, PerHead) else (pattern,)
    if num_heads is not None:
        check_int("num_heads", num_heads, least=1)
    if num_heads is not None and len(heads) not in (1, num_heads):
        raise ValueError(f"num_heads must be the pattern's {len(heads)} heads, got {num_heads}")
    device = check_device("cpu" if device is None else device)
    if query_blocks is not None:
        check_rows("query_blocks", query_blocks, ceil_div(seq_q, blocks[0]), device)
    documents = torch.empty_like(NO_DOCUMENTS, device=device)
    if starts:
        if starts[-1] != seq_k:
            raise ValueError(f"the lengths of Documents must add up to seq_k = {seq_k}, got {starts[-1]}")
        position = torch.arange(seq_k - seq_q, seq_k, dtype=torch.int32, device=device)
        if query_blocks is not None:
            position = tokens_of(query_blocks, blocks[0], seq_q).int() + (seq_k - seq_q)
        documents = document_bounds(starts, position)
    by_query, rules = _find_lists(heads, lengths, blocks, device, starts, query_blocks)
    layout = cls(
        seq_q=seq_q if query_blocks is None else num_tokens(query_blocks, blocks[0], seq_q),
        seq_k=seq_k,
        block_q=blocks[0],
        block_k=blocks[1],
        by_query=by_query,
        num_heads=len(heads) if len(heads) > 1 else None,
        rules=send((rules,), device)[0],
        documents=documents,
        branches=torch.empty_like(NO_BRANCHES, device=device),
        kind=build.kind_of(pattern) if query_blocks is None else None,
        checked=True,
    )
    return layout if query_blocks is None else renumbered(layout, query_blocks, seq_q, None, seq_k)


def _document_starts(pattern: Pattern) -> tuple[int, ...]:
    """Of the `Documents` in a pattern; empty if there are none."""
    packings = build.documents_of(pattern)
    if len(packings) > 1:
        raise ValueError(f"a pattern may contain one packing of documents, got {len(packings)}: {packings}")
    return next(iter(packings)).starts if packings else ()


def _find_lists(
    heads: Sequence[Pattern],
    lengths: tuple[int, int],
    blocks: tuple[int, int],
    device: torch.device,
    starts: tuple[int, ...],
    query_blocks: Tensor | None,
) -> tuple[BlockList, Tensor]:
    """The lists of all heads one after the other, and the table of their rules, on the host."""
    table: list[list[Interval]] = []
    lists: dict[Pattern, BlockList] = {}
    single = len(set(heads)) == 1
    for head in dict.fromkeys(heads):
        terms = build.terms_of(head)
        intervals = list(dict.fromkeys(term.interval for term in terms))
        if len(intervals) > build.MAX_INTERVALS:
            raise ValueError(
                f"a pattern may be a union of at most {build.MAX_INTERVALS} different token rules, got "
                f"{len(intervals)}: {head}"
            )
        # A single rule needs no ids.
        named = None if single and len(intervals) == 1 else len(table)
        lists[head] = BlockList.concat(
            build.find_blocks(
                terms, intervals, lengths, blocks, device, named=named, starts=starts, query_blocks=query_blocks
            )
        )
        table += build.rule_table(intervals)
    by_query = lists[heads[0]] if len(heads) == 1 else BlockList.concat(lists[head] for head in heads)
    width = max(len(rule) for rule in table)
    table = [rule + [NOTHING] * (width - len(rule)) for rule in table]
    return by_query, torch.tensor(table, dtype=torch.int32, device=HOST)


def from_block_mask(
    cls: type[BlockLayout],
    mask: Tensor,
    block_size: int | tuple[int, int],
    seq_q: int | None,
    seq_k: int | None,
) -> BlockLayout:
    """See `BlockLayout.from_block_mask`."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise TypeError(f"mask must be a bool tensor, got {getattr(mask, 'dtype', type(mask).__name__)}")
    if mask.ndim not in (2, 3, 4):
        raise ValueError(
            f"mask must have shape [nq, nk], [heads, nq, nk] or [batch, heads, nq, nk], got {list(mask.shape)}"
        )
    if 0 in mask.shape:
        raise ValueError(f"mask must not be empty, got shape {list(mask.shape)}")
    num_q, num_k = mask.shape[-2:]
    block_q, block_k = block_pair(block_size)
    seq_q = num_q * block_q if seq_q is None else seq_q
    seq_k = num_k * block_k if seq_k is None else seq_k
    check_sizes(seq_q, seq_k, block_size)
    for name, seq, block, num in (("seq_q", seq_q, block_q, num_q), ("seq_k", seq_k, block_k, num_k)):
        if ceil_div(seq, block) != num:
            raise ValueError(f"{name} must need {num} blocks of {block} tokens, as the mask has, got {seq}")
    row, column = mask.reshape(-1, num_k).nonzero().unbind(1)
    partial = (column + 1) * block_k > seq_k
    num_rows = mask.numel() // num_k
    return cls(
        seq_q=seq_q,
        seq_k=seq_k,
        block_q=block_q,
        block_k=block_k,
        by_query=BlockList.pack(row, column, partial, None, num_rows),
        num_heads=mask.shape[-3] if mask.ndim > 2 else None,
        batch_size=mask.shape[0] if mask.ndim > 3 else None,
        rules=torch.tensor([[EVERYTHING]], dtype=torch.int32, device=mask.device),
        documents=NO_DOCUMENTS.to(mask.device),
        branches=NO_BRANCHES.to(mask.device),
        kind="full" if len(row) == mask.numel() else None,
        checked=True,
    )
