"""`BlockLayout.from_pattern` and `from_block_mask`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..patterns import Pattern
from ..patterns.base import check_int
from ..patterns.blocks import ceil_div
from ..patterns.tokens import EVERYTHING, Interval
from . import build
from .bitmaps import NO_BITMAPS, UniqueBitmaps
from .checks import block_pair, check_device, check_mask, check_rows, check_sizes
from .closed_form import can_build, lists_of, most_blocks, ranges_of_queries, tables_of
from .lists import HOST, BlockList, send
from .pairs import find_pairs
from .ranges import bounds_of
from .rules import NO_BRANCHES, NO_DOCUMENTS, NOTHING, num_tokens
from .slicing import renumbered, tokens_of
from .terms import MAX_INTERVALS, Written, check_grids, rule_table, written

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
    lengths, blocks = check_pattern(pattern, (seq_q, seq_q if seq_k is None else seq_k), block_size)
    terms, seq_k = written(pattern), lengths[1]
    heads, ranges = terms.heads, terms.ranges
    if num_heads is not None:
        check_int("num_heads", num_heads, least=1)
    if num_heads is not None and len(heads) not in (1, num_heads):
        raise ValueError(f"num_heads must be the pattern's {len(heads)} heads, got {num_heads}")
    device = check_device("cpu" if device is None else device)
    if query_blocks is not None:
        check_rows("query_blocks", query_blocks, ceil_div(seq_q, blocks[0]), device)
    documents = torch.empty_like(NO_DOCUMENTS, device=device)
    if ranges and query_blocks is None:
        documents = ranges_of_queries(ranges, lengths, device)
    elif ranges and query_blocks is not None:
        position = tokens_of(query_blocks, blocks[0], seq_q).int() + (seq_k - seq_q)
        documents = torch.cat([bounds_of(each, position) for each in ranges])
    if query_blocks is None and terms.closed and can_build(device):
        return closed_layout(cls, terms, documents, lengths, blocks)
    found = _find_lists(terms, lengths, blocks, device, query_blocks)
    layout = cls(
        seq_q=seq_q if query_blocks is None else num_tokens(query_blocks, blocks[0], seq_q),
        seq_k=seq_k,
        block_q=blocks[0],
        block_k=blocks[1],
        by_query=found.by_query,
        num_heads=len(heads) if len(heads) > 1 else None,
        rules=send((found.rules,), device)[0],
        documents=documents,
        ranges_ascend=True,  # as those of patterns do
        branches=torch.empty_like(NO_BRANCHES, device=device),
        bitmaps=found.bitmaps,
        evaluated=found.evaluated,
        kind=terms.kind(lengths) if query_blocks is None else None,
        checked=True,
    )
    return layout if query_blocks is None else renumbered(layout, query_blocks, seq_q, None, seq_k)


def check_pattern(
    pattern: Pattern, lengths: tuple[int, int], block_size: int | tuple[int, int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The lengths, and both block sizes, if a layout of them can have this pattern."""
    if not isinstance(pattern, Pattern):
        raise TypeError(f"pattern must be a Pattern, got {type(pattern).__name__}")
    lengths, blocks = check_sizes(*lengths, block_size)
    for size in pattern.block_sizes:
        if size % blocks[0] or size % blocks[1]:
            raise ValueError(
                f"block_size must divide the block size {size} that the pattern is written in, got {block_size}"
            )
    terms = written(pattern)
    for total in terms.totals:
        if total != lengths[1]:
            raise ValueError(f"the lengths of Documents and KeyRanges must add up to seq_k = {lengths[1]}, got {total}")
    if terms.has_grids:
        check_grids(pattern, lengths[1])
    return lengths, blocks


class _Lists(NamedTuple):
    """The lists of all heads one after the other, the table of their rules, on the host, and their bitmaps."""

    by_query: BlockList
    rules: Tensor
    bitmaps: Tensor
    evaluated: int


def closed_layout(
    cls: type[BlockLayout], terms: Written, documents: Tensor, lengths: tuple[int, int], blocks: tuple[int, int]
) -> BlockLayout:
    """In closed form, of terms whose ranges are `documents`."""
    intervals = tuple(tuple(term.interval for term in each) for each in terms.terms)
    tables, most = tables_of(intervals, terms.of_head, documents.device), most_blocks(terms.terms, lengths, blocks)
    capacity = sum(most[i] for i in terms.of_head)
    by_query, work, form = lists_of(tables, documents, lengths, blocks, capacity)
    layout = cls(
        seq_q=lengths[0],
        seq_k=lengths[1],
        block_q=blocks[0],
        block_k=blocks[1],
        by_query=by_query,
        num_heads=len(terms.heads) if len(terms.heads) > 1 else None,
        rules=tables.rules,
        documents=documents,
        ranges_ascend=True,
        branches=torch.empty_like(NO_BRANCHES, device=documents.device),
        bitmaps=torch.empty_like(NO_BITMAPS, device=documents.device),
        kind=terms.kind(lengths),
        checked=True,
    )
    layout._derived.update(query_work=work, closed_form=form)
    return layout


def _find_lists(
    of: Written,
    lengths: tuple[int, int],
    blocks: tuple[int, int],
    device: torch.device,
    query_blocks: Tensor | None,
) -> _Lists:
    table: list[list[Interval]] = []
    lists: dict[Pattern, BlockList] = {}
    heads, terms_of_head = of.heads, dict(zip(of.different, of.terms, strict=True))
    single = len(terms_of_head) == 1
    grids = [head for head, terms in terms_of_head.items() if any(term.grids for term in terms)]
    for head, terms in terms_of_head.items():
        if head in grids:
            continue
        intervals = list(dict.fromkeys(term.interval for term in terms))
        if len(intervals) > MAX_INTERVALS:
            raise ValueError(
                f"a pattern may be a union of at most {MAX_INTERVALS} different token rules, got "
                f"{len(intervals)}: {head}"
            )
        # A single rule needs no ids.
        named = None if single and len(intervals) == 1 else len(table)
        lists[head] = BlockList.concat(
            build.find_blocks(terms, intervals, lengths, blocks, device, named=named, query_blocks=query_blocks)
        )
        table += rule_table(intervals)
    bitmaps, evaluated = torch.empty_like(NO_BITMAPS, device=device), 0
    if grids:
        found = UniqueBitmaps(*blocks, device)
        for head in grids:
            lists[head], asked = find_pairs(terms_of_head[head], lengths, blocks, device, found, query_blocks)
            evaluated += asked
        for head in grids if len(found) else ():
            lists[head].rule_ids.add_(len(table))  # the rules that name a bitmap each are the last ones
        table += [[Interval(key_range=-1 - number)] for number in range(len(found))]
        table = table or [[EVERYTHING]]  # there must be one
        bitmaps = found.table()
    by_query = lists[heads[0]] if len(heads) == 1 else BlockList.concat(lists[head] for head in heads)
    width = max(len(rule) for rule in table)
    table = [rule + [NOTHING] * (width - len(rule)) for rule in table]
    rules = torch.tensor(table, dtype=torch.int32, device=HOST)
    return _Lists(by_query.unnamed() if grids and len(table) == 1 else by_query, rules, bitmaps, evaluated)


def from_block_mask(
    cls: type[BlockLayout],
    mask: Tensor,
    block_size: int | tuple[int, int],
    seq_q: int | None,
    seq_k: int | None,
) -> BlockLayout:
    """See `BlockLayout.from_block_mask`."""
    check_mask(mask, "nq, nk")
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
        bitmaps=NO_BITMAPS.to(mask.device),
        kind="full" if len(row) == mask.numel() else None,
        checked=True,
    )
