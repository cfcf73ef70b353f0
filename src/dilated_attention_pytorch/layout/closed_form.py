"""Layouts of token rules on a GPU, where every term is an interval of keys: their tables, and room for their blocks.

The lists of such a pattern are made by `kernels.layouts`, in a few launches and without a wait: how many blocks there
are is known to the device alone, so `indices` have room for as many as there can be. `layout.build` makes the same
lists, for every pattern and device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatch
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..caches import cached
from ..patterns import Chunks, Documents, KeyRanges, RangePattern
from ..patterns.blocks import ceil_div
from ..patterns.ranges import KeysBetween, QueriesBetween
from ..patterns.tokens import UNBOUNDED, Interval
from .eager import is_plain_eager, plain_cache
from .lists import HOST, BlockList, send
from .ranges import bounds_of
from .rules import NOTHING
from .terms import Term, rule_table

MOST_PLACES = 1 << 24  # of a list whose blocks are not counted: 64 MiB
DEVICES = ("cuda",)  # where it is quicker than `layout.build`
HAVE_KERNELS = find_spec("triton") is not None and torch.version.hip is None


class Tables(NamedTuple):
    """The terms of lists, on a device."""

    terms: Tensor  # int32 [lists, terms, 5]
    rules: Tensor  # `BlockLayout.rules`
    bases: Tensor | None  # int32 [lists], the first rule of each list; None where there is one rule


def can_build(device: torch.device) -> bool:
    """Whether the kernels may run there now: not for a graph, whose tensors have no numbers yet."""
    if device.type not in DEVICES or not HAVE_KERNELS or not is_plain_eager():
        return False
    return device.type != "cuda" or (_compiles(device) and not torch.cuda.is_current_stream_capturing())


@cached(64, "whether Triton compiles for a device")
def _compiles(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 8


@plain_cache(256, "tables of terms, by their intervals")
def tables_of(different: tuple[tuple[Interval, ...], ...], of_head: tuple[int, ...], device: torch.device) -> Tables:
    """Of the intervals of different heads, and which of these each head has. They are the same for all lengths."""
    width, rules, first_rule = max(map(len, different)), list[list[Interval]](), list[int]()
    for intervals in different:
        first_rule.append(len(rules))
        rules += [[*rule, *[NOTHING] * (width - len(rule))] for rule in rule_table(list(intervals))]
    terms = [[*different[i], *[NOTHING] * (width - len(different[i]))] for i in of_head]
    bases = [first_rule[i] for i in of_head]
    # One by one: kernels are compiled anew for a tensor whose address is no multiple of 16.
    found = [send((torch.tensor(x, dtype=torch.int32, device=HOST),), device)[0] for x in (terms, rules, bases)]
    return Tables(found[0], found[1], found[2] if len(rules) > 1 else None)


@dataclass(frozen=True, eq=False)
class ClosedForm:
    """What a layout keeps of how it was made, for its lists by key: a `kernels.layouts.Spans`."""

    spans: Any
    bases: Tensor | None
    capacity: int

    def tensors(self) -> list[Tensor]:
        return [self.spans.numbers]

    def by_key(self, num_columns: int) -> tuple[BlockList, Tensor]:
        """The lists by key, and their order of work."""
        from ..kernels import layouts

        return layouts.filled(layouts.column_spans(self.spans, num_columns), self.bases, self.capacity)


def lists_of(
    tables: Tables, documents: Tensor, lengths: tuple[int, int], blocks: tuple[int, int], most: int
) -> tuple[BlockList, Tensor, ClosedForm]:
    """The lists by query, their order of work, and what the lists by key are made of.

    Args:
        most: blocks that there may be. There is room for all of them, unless that is so much that they are counted.
    """
    from ..kernels import layouts

    spans = layouts.row_spans(tables.terms, documents, lengths, blocks, ceil_div(lengths[0], blocks[0]))
    # Waiting is cheaper than a gigabyte. It happens where documents are data, and long ones are allowed for.
    capacity = spans.total() if most > MOST_PLACES else most
    by_query, work = layouts.filled(spans, tables.bases, capacity)
    return by_query, work, ClosedForm(spans, tables.bases, capacity)


def ranges_of_queries(
    ranges: Sequence[Sequence[RangePattern]], lengths: tuple[int, int], device: torch.device
) -> Tensor:
    """`BlockLayout.documents`: of each of these ranges, all of whose rules hold, what it is for every query."""
    behind = lengths[1] - lengths[0]
    built = can_build(device)
    tables = [_table_of(rules[0]) if len(rules) == 1 and built else None for rules in ranges]
    if not all(tables):
        position = torch.arange(behind, lengths[1], dtype=torch.int32, device=device)
        bounds = [bounds_of(rules, position) for rules in ranges]
        return bounds[0] if len(bounds) == 1 else torch.cat(bounds)
    from ..kernels import layouts

    documents = torch.empty(2 * len(ranges), lengths[0], dtype=torch.int32, device=device)
    for i, found in enumerate(tables):
        assert found is not None
        numbers, num, starts_at, stops_at = found
        (table,) = send((torch.tensor(numbers, dtype=torch.int32, device=HOST),), device)
        layouts.of_stretches(table, num, starts_at, stops_at, behind, documents[2 * i : 2 * i + 2])
    return documents


def _table_of(rule: RangePattern) -> tuple[Sequence[int], int, int, int] | None:
    """Edges of stretches, and behind them their starts and stops: the numbers, how many stretches, and where starts
    and stops begin; None where the rule has no stretches."""
    if isinstance(rule, Documents):
        return rule.starts, len(rule.lengths), 0, 1
    if isinstance(rule, KeyRanges):
        num, bounds = len(rule.lengths), (min(n, UNBOUNDED) for n in (*rule.starts, *rule.stops))
        return (0, *accumulate(rule.lengths), *bounds), num, num + 1, 2 * num + 1
    return None


def most_blocks(of_heads: Sequence[Sequence[Term]], lengths: tuple[int, int], blocks: tuple[int, int]) -> list[int]:
    """At least as many blocks as the list of each head has; for a term that is an interval alone about as many."""
    everything = ceil_div(lengths[0], blocks[0]) * ceil_div(lengths[1], blocks[1])
    return [min(everything, sum(_most_of(term, lengths, blocks) for term in terms)) for terms in of_heads]


def _most_of(term: Term, lengths: tuple[int, int], blocks: tuple[int, int]) -> int:
    found = [_of_interval(term.interval, lengths, blocks)]
    return min(found + [_of_range(rule, lengths, blocks, term.interval.right) for rule in term.ranges])


def _of_interval(interval: Interval, lengths: tuple[int, int], blocks: tuple[int, int]) -> int:
    (seq_q, seq_k), (block_q, block_k) = lengths, blocks
    left, right, key_stop, query_stop, _ = interval
    behind, key_stop = seq_k - seq_q, min(key_stop, seq_k)
    # Rows that begin before `query_stop`, and whose first key is before `key_stop`.
    before = min(query_stop, seq_k, key_stop + left) - behind
    rows = min(max(0, ceil_div(before, block_q)), ceil_div(seq_q, block_q))
    columns = ceil_div(key_stop, block_k)
    reached = _sum_of_quotients(behind + block_q + right + block_k - 1, block_q, block_k, rows, columns)
    return reached - _sum_of_quotients(behind - left, block_q, block_k, rows, columns)


def _sum_of_quotients(first: int, step: int, divisor: int, num: int, most: int) -> int:
    """Σ (first + i · step) // divisor for i < num, where each counts for 0 at least and for `most` at most; step and
    divisor are powers of two."""
    low = min(max(0, ceil_div(-first, step)), num)  # those before are below 0
    high = min(max(low, ceil_div(most * divisor - first, step)), num)  # those from here on are too large
    total = (num - high) * most
    if step >= divisor:
        step //= divisor
        return total + (high - low) * (first // divisor) + step * (high * (high - 1) - low * (low - 1)) // 2
    # All from `first // step` on in steps of one, by how many of these make a divisor.
    many, start = divisor // step, first // step
    return total + _sum_up_to(start + high, many) - _sum_up_to(start + low, many)


def _sum_up_to(stop: int, divisor: int) -> int:
    """Σ x // divisor for 0 ≤ x < stop."""
    whole = stop // divisor
    return divisor * whole * (whole - 1) // 2 + whole * (stop - whole * divisor)


@singledispatch
def _of_range(rule: RangePattern, lengths: tuple[int, int], blocks: tuple[int, int], right: int) -> int:
    return ceil_div(lengths[0], blocks[0]) * ceil_div(lengths[1], blocks[1])


@_of_range.register
def _(rule: Documents, lengths: tuple[int, int], blocks: tuple[int, int], right: int) -> int:
    starts = rule.starts
    return _of_stretches(starts, starts, starts[1:], lengths, blocks, right <= 0)


@_of_range.register
def _(rule: KeyRanges, lengths: tuple[int, int], blocks: tuple[int, int], right: int) -> int:
    return _of_stretches((0, *accumulate(rule.lengths)), rule.starts, rule.stops, lengths, blocks, False)


def _of_stretches(
    edges: Sequence[int],
    starts: Sequence[int],
    stops: Sequence[int],
    lengths: tuple[int, int],
    blocks: tuple[int, int],
    causal: bool,
) -> int:
    """The rows of each stretch times the columns that it sees; where it sees itself up to each query, about half."""
    (block_q, block_k), (seq_q, seq_k) = blocks, lengths
    behind, total = seq_k - seq_q, 0
    for (edge, end), start, stop in zip(pairwise(edges), starts, stops, strict=False):
        rows = (end - behind - 1) // block_q - max(edge - behind, 0) // block_q + 1
        columns = (min(stop, seq_k) - 1) // block_k - start // block_k + 1
        if rows > 0 and columns > 0:
            half = rows * (rows + 1) * block_q // (2 * block_k) + 3 * rows
            total += min(rows * columns, half) if causal else rows * columns
    return total


@_of_range.register
def _(rule: Chunks, lengths: tuple[int, int], blocks: tuple[int, int], right: int) -> int:
    rows, columns = ceil_div(lengths[0], blocks[0]), ceil_div(lengths[1], blocks[1])
    if rule.left is None:
        return rows * columns
    widest = (rule.left + 2) * rule.size + blocks[0]  # tokens from the first chunk of a row to its last
    return rows * min(columns, widest // blocks[1] + 2)


@_of_range.register
def _(rule: KeysBetween, lengths: tuple[int, int], blocks: tuple[int, int], right: int) -> int:
    columns = ceil_div(min(rule.stop, lengths[1]), blocks[1]) - min(rule.start, lengths[1]) // blocks[1]
    return ceil_div(lengths[0], blocks[0]) * max(0, columns)


@_of_range.register
def _(rule: QueriesBetween, lengths: tuple[int, int], blocks: tuple[int, int], right: int) -> int:
    behind = lengths[1] - lengths[0]
    rows = ceil_div(min(rule.stop - behind, lengths[0]), blocks[0]) - max(0, rule.start - behind) // blocks[0]
    return max(0, rows) * ceil_div(lengths[1], blocks[1])
