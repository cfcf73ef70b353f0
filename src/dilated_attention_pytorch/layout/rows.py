"""What single queries see of a growing cache: intervals of keys, found from the length alone, and rows of key blocks.

A token rule gives a query one interval of keys: the length and the query's place are all that is needed to find them,
and nothing is built. What a pattern says in blocks is a row of a table. Most block rules have the same row at every
length: their table is built once for a capacity (`rows_of_capacity`) and read at the query's place, on the device,
whatever the length is. Rows that depend on the number of blocks (`BlockPattern.depends_on_length`) are built for the
lengths of a call (`rows_of_lengths`), which the host must know for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..caches import cached
from ..patterns import And, Blocks, Pattern, PerHead
from ..patterns.blocks import BlockPattern, ceil_div
from ..patterns.tokens import EVERYTHING, UNBOUNDED, Interval
from .eager import plain_cache
from .layout import BlockLayout
from .lists import HOST, BlockList, send
from .rules import NOTHING
from .terms import Term, terms_of


@dataclass(frozen=True, eq=False)
class CacheRows:
    """The keys that a query at some position sees, list by list: those of some intervals, and those of a row of blocks.

    Attributes:
        intervals: int32 [num_lists, any, 5], of each list; a power of two of them, or none. `of_list` is the same on
            the host, without the unused places.
        work: int32 [rows, 4]: of each row by how much a query's position goes up before the rules are asked, and its
            first entry, first partial entry and end. Empty for a pattern without block rules.
        indices, rule_ids: of a `BlockList`: the key blocks of all entries, and the rules of partial ones (empty where
            all share rule 0). A key that is also in an interval counts once.
        rules: int32 [num_rules, intervals, 5], see `layout.rules`.
        block: tokens of a key block.
        rows_per_list: rows of a list, of which a query takes that of its own block; 0 where `work` has a row for every
            query and list of the call, in this order.
        most: at most so many keys are seen by a query, if there are as many.
        call_cache: what kernels remember of calls, as long as this is there.
    """

    intervals: Tensor
    of_list: tuple[tuple[Interval, ...], ...]
    work: Tensor
    indices: Tensor
    rule_ids: Tensor
    rules: Tensor
    block: int
    rows_per_list: int
    most: int
    call_cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def num_lists(self) -> int:
        """Lists of a query: one for all heads, or one for each."""
        return len(self.of_list)

    def ranges(self, which: int, position: int, length: int) -> list[tuple[int, int]]:
        """First key and the one behind the last of each run that the intervals of a list let a query see, ascending."""
        found = []
        for left, right, key_stop, query_stop, _ in self.of_list[which]:
            if position < query_stop:
                found.append((max(position - left, 0), min(position + right + 1, key_stop, length)))
        found.sort()
        runs, behind = [], 0
        for first, stop in found:
            first = max(first, behind)
            if first < stop:
                runs.append((first, stop))
                behind = stop
        return runs

    def row(self, query: int, which: int, position: int) -> list[int]:
        """The row of `work` for the call's query number `query`."""
        at = (
            which * self.rows_per_list + position // self.block
            if self.rows_per_list
            else query * self.num_lists + which
        )
        return self.work[at].tolist()


def depends_on_length(pattern: Pattern) -> bool:
    """Whether rows must be built for every length: see `BlockPattern.depends_on_length`."""
    if isinstance(pattern, BlockPattern):
        return pattern.depends_on_length
    parts = pattern.patterns if isinstance(pattern, PerHead) else getattr(pattern, "parts", ())
    return any(depends_on_length(part) for part in parts)


def rows_of_capacity(pattern: Pattern, capacity: int, block: int, device: torch.device) -> CacheRows:
    """Of a pattern whose rows do not depend on the length, for all lengths up to the capacity."""
    heads = _heads(pattern)
    if not any(_blocks_of(head) for head in heads):
        return _intervals_of(heads, block, device)
    # A power of two: caches that grow by a token at a time share a table.
    num_rows = 1 << (ceil_div(capacity, block) - 1).bit_length()
    return _table_of(heads, num_rows, block, device)


def rows_of_lengths(pattern: Pattern, lengths: Sequence[int], new: int, block: int, device: torch.device) -> CacheRows:
    """Of the last `new` tokens of each of these sequences, sample by sample."""
    # Rows change from block to block, not from token to token; what is behind the end of a sequence, the call hides.
    # Whole blocks of the finest rule: its choice, and that of all coarser ones, depends on how many there are.
    rows = tuple(
        (position // block, ceil_div(length, block) * block)
        for length in lengths
        for position in range(length - new, length)
    )
    return _rows_of(_heads(pattern), rows, block, device)


def _heads(pattern: Pattern) -> tuple[Pattern, ...]:
    return pattern.patterns if isinstance(pattern, PerHead) else (pattern,)


@cached(256, "intervals of keys that patterns without blocks let a query see")
def _ranges_of(head: Pattern) -> tuple[Interval, ...]:
    """The token rules of a pattern that stand alone, without those inside another one."""
    alone = [term.interval for term in terms_of(head) if not term.rules]
    return tuple(each for each in alone if not any(each & other == each for other in alone if other != each))


def _blocks_of(head: Pattern) -> list[Term]:
    """The other terms of a pattern, without those inside a token rule."""
    ranges = _ranges_of(head)
    return [t for t in terms_of(head) if t.rules and not any(t.interval & each == t.interval for each in ranges)]


@dataclass(frozen=True)
class _BlocksOf(And):
    """The part of a pattern, its only one, that is written in blocks."""


@terms_of.register
def _(pattern: _BlocksOf) -> list[Term]:
    return _blocks_of(pattern.parts[0])


def _in_blocks(heads: tuple[Pattern, ...], block: int) -> Pattern:
    parts = tuple(_BlocksOf((head,)) if _blocks_of(head) else Blocks((), block) for head in heads)
    return PerHead(parts) if len(parts) > 1 else parts[0]


@plain_cache(128, "token rules of patterns for decoding, on their device")
def _intervals_of(heads: tuple[Pattern, ...], block: int, device: torch.device) -> CacheRows:
    of_list = tuple(map(_ranges_of, heads))
    width = max(map(len, of_list))
    width = 1 << (width - 1).bit_length() if width else 0
    table = [[*each, *[NOTHING] * (width - len(each))] for each in of_list]
    intervals = torch.tensor(table, dtype=torch.int32, device=HOST).view(len(heads), width, 5)
    nothing = intervals.new_empty(0)
    widths = ((min(i.left + i.right + 1, i.key_stop) for i in each) for each in of_list)
    return CacheRows(
        intervals=send((intervals,), device)[0],
        of_list=of_list,
        work=nothing.new_empty(0, 4).to(device),
        indices=nothing.to(device),
        rule_ids=nothing.to(device),
        rules=nothing.new_empty(0, 0, 5).to(device),
        block=block,
        rows_per_list=0,
        most=max(min(sum(each), UNBOUNDED) for each in widths),
    )


@plain_cache(32, "rows of block patterns for decoding, for a capacity and device")
def _table_of(heads: tuple[Pattern, ...], num_rows: int, block: int, device: torch.device) -> CacheRows:
    layout = BlockLayout.from_pattern(_in_blocks(heads, block), num_rows * block, block_size=block, device=HOST)
    lists = layout.by_query
    return _with_lists(heads, lists, layout.rules, _work_of(lists), block, num_rows, device)


def _work_of(lists: BlockList, ahead: Tensor | int = 0) -> Tensor:
    ends = torch.stack((lists.offsets[:-1], lists.splits, lists.offsets[1:]), dim=1)
    return torch.cat((torch.zeros_like(ends[:, :1]) + ahead, ends), dim=1)


def _with_lists(
    heads: tuple[Pattern, ...],
    lists: BlockList,
    rules: Tensor,
    work: Tensor,
    block: int,
    rows_per_list: int,
    device: torch.device,
) -> CacheRows:
    """The intervals of a pattern, and rows of blocks on the host."""
    alone = _intervals_of(heads, block, device)
    work, indices, rule_ids, rules = send((work, lists.indices, lists.rule_ids, rules), device)
    longest = int(lists.offsets.diff().max())
    return replace(
        alone,
        work=work,
        indices=indices,
        rule_ids=rule_ids,
        rules=rules,
        rows_per_list=rows_per_list,
        most=min(alone.most + longest * block, UNBOUNDED),
    )


@plain_cache(128, "rows of block patterns that depend on the length, on their device")
def _rows_of(
    heads: tuple[Pattern, ...], rows: tuple[tuple[int, int], ...], block: int, device: torch.device
) -> CacheRows:
    pattern = _in_blocks(heads, block)
    entries, rules, ahead = [], [], []
    at: dict[tuple[int, int], int] = {}
    num_rules, num_lists = 0, len(heads)
    for row, length in dict.fromkeys(rows):
        layout = BlockLayout.from_pattern(
            pattern, length, block_size=block, query_blocks=torch.tensor([row], device=HOST)
        )
        which, _, column, rule = layout.entries()
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
    work = _work_of(lists, torch.tensor(ahead, dtype=torch.int32, device=HOST).repeat_interleave(num_lists)[:, None])
    of_query = torch.tensor([at[key] for key in rows], device=HOST)
    place = of_query[:, None] * num_lists + torch.arange(num_lists, device=HOST)
    return _with_lists(heads, lists, table, work[place.flatten()], block, 0, device)


def rows_of_blocks(
    offsets: Tensor, indices: Tensor, num_lists: int, block: int, most: int, is_causal: bool
) -> CacheRows:
    """Rows that are chosen anew for every call: of each query and list of it the blocks between two offsets. On the
    device, whatever they are."""
    work = torch.stack((offsets.new_zeros(()).expand(len(offsets) - 1), offsets[:-1], offsets[:-1], offsets[1:]), dim=1)
    nothing, rules = _nothing_and_rule(num_lists, is_causal, offsets.device)
    return CacheRows(
        intervals=nothing,
        of_list=((),) * num_lists,
        work=work,
        indices=indices,
        rule_ids=indices.new_empty(0),
        rules=rules,
        block=block,
        rows_per_list=0,
        most=min(most, UNBOUNDED),
    )


@plain_cache(64, "the token rule of blocks of a cache that are chosen, on a device")
def _nothing_and_rule(num_lists: int, is_causal: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    rule = torch.tensor([[Interval(right=0) if is_causal else EVERYTHING]], dtype=torch.int32, device=HOST)
    nothing, rules = send((rule.new_empty(num_lists, 0, 5), rule), device)
    return nothing, rules
