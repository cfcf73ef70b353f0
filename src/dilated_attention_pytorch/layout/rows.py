"""The keys of single queries in growing sequences: one row of the pattern's layout each, built without the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..patterns import Pattern
from ..patterns.blocks import ceil_div
from .eager import plain_cache
from .layout import BlockLayout
from .lists import HOST, BlockList
from .rules import NOTHING


@dataclass(frozen=True, eq=False)
class CacheRows:
    """Lists of key blocks for some queries, each the row that the layout of its whole sequence has for it.

    Attributes:
        work: int32 [queries · num_lists, 4]: of each query and list, by how much the query's position goes up before
            the rules are asked, and its first entry, first partial entry and end.
        indices, rule_ids: of a `BlockList`: the key blocks of all entries, and the rules of partial ones.
        rules: int32 [num_rules, intervals, 5], see `layout.rules`.
        block: tokens of a key block.
        num_lists: lists of a query: one for all heads, or one for each.
        most: blocks of the longest row.
    """

    work: Tensor
    indices: Tensor
    rule_ids: Tensor
    rules: Tensor
    block: int
    num_lists: int
    most: int


def rows_at(pattern: Pattern, lengths: Sequence[int], new: int, block: int, device: torch.device) -> CacheRows:
    """The rows of the last `new` tokens of each of these sequences, sample by sample."""
    # Rows change from block to block, not from token to token; what is behind the end of a sequence, the call hides.
    # Whole blocks of the finest rule: its choice, and that of all coarser ones, depends on how many there are.
    rows = tuple(
        (position // block, ceil_div(length, block) * block)
        for length in lengths
        for position in range(length - new, length)
    )
    return _rows_of(pattern, rows, block, device)


@plain_cache(128)
def _rows_of(pattern: Pattern, rows: tuple[tuple[int, int], ...], block: int, device: torch.device) -> CacheRows:
    entries, rules, ahead = [], [], []
    at: dict[tuple[int, int], int] = {}
    num_rules = num_lists = 0
    for row, length in dict.fromkeys(rows):
        layout = BlockLayout.from_pattern(
            pattern, length, block_size=block, query_blocks=torch.tensor([row], device=HOST)
        )
        which, _, column, rule = layout.entries()
        num_lists = layout.num_lists
        entries.append((len(at) * num_lists + which, column, torch.where(rule >= 0, rule + num_rules, -1)))
        rules.append(layout.rules)
        num_rules += len(layout.rules)
        at[row, length] = len(at)
        ahead.append(length - (row + 1) * block)
    row_of, column, rule = (torch.cat(parts) for parts in zip(*entries, strict=True))
    lists = BlockList.pack(row_of, column, rule >= 0, rule, len(at) * num_lists)
    width = max(table.shape[1] for table in rules)
    nothing = torch.tensor(NOTHING, dtype=torch.int32, device=HOST)
    table = torch.cat([torch.cat((t, nothing.expand(len(t), width - t.shape[1], 5)), dim=1) for t in rules])
    first = torch.tensor([at[key] for key in rows], device=HOST)
    ends = torch.stack((lists.offsets[:-1], lists.splits, lists.offsets[1:]), dim=1).unflatten(0, (-1, num_lists))
    shift = torch.tensor(ahead, dtype=torch.int32, device=HOST)[:, None, None].expand(-1, num_lists, 1)
    return CacheRows(
        work=torch.cat((shift, ends), dim=2)[first].flatten(0, 1).to(device),
        indices=lists.indices.to(device),
        rule_ids=lists.rule_ids.to(device),
        rules=table.to(device),
        block=block,
        num_lists=num_lists,
        most=int(lists.offsets.diff().max()),
    )
