"""The ranges of a pattern for many queries at once: `range_at` of each rule on tensors of positions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import singledispatch
from itertools import accumulate

import torch
from torch import Tensor

from ..patterns import Chunks, Documents, KeyRanges, RangePattern
from ..patterns.ranges import KeysBetween, QueriesBetween
from ..patterns.tokens import UNBOUNDED
from .lists import HOST, send

# Bounds are int32: of numbers above this, all mean the same.
Bounds = tuple[Tensor, Tensor]


def bounds_of(ranges: Sequence[RangePattern], position: Tensor) -> Tensor:
    """int32 [2, *position]: the first key that each query sees by all of these rules, and the key behind the last."""
    starts, stops = zip(*(_bounds(rule, position.int()) for rule in ranges), strict=True)
    return torch.stack((_all_of(torch.maximum, starts), _all_of(torch.minimum, stops)))


def _all_of(both, tensors):  # type: ignore[no-untyped-def]
    found = tensors[0]
    for tensor in tensors[1:]:
        found = both(found, tensor)
    return found


@singledispatch
def _bounds(rule: RangePattern, position: Tensor) -> Bounds:
    """The same as the rule's own `range_at`."""
    raise TypeError(f"no layout can be built from ranges of type {type(rule).__name__}")


@_bounds.register
def _(rule: Documents, position: Tensor) -> Bounds:
    starts = rule.starts
    return _of_stretches(starts, starts[:-1], starts[1:], position)


@_bounds.register
def _(rule: KeyRanges, position: Tensor) -> Bounds:
    return _of_stretches((0, *accumulate(rule.lengths)), rule.starts, rule.stops, position)


def _of_stretches(edges: Sequence[int], starts: Sequence[int], stops: Sequence[int], position: Tensor) -> Bounds:
    """A query before the first stretch sees nothing."""
    given = (
        torch.tensor([min(n, UNBOUNDED) for n in x], dtype=torch.int32, device=HOST) for x in (edges, starts, stops)
    )
    at, first, behind = send(tuple(given), position.device)
    number = (torch.searchsorted(at, position, right=True) - 1).clamp_(0, len(starts) - 1)
    outside = position < 0
    return first[number].masked_fill(outside, 0), behind[number].masked_fill(outside, 0)


@_bounds.register
def _(rule: Chunks, position: Tensor) -> Bounds:
    size = min(rule.size, UNBOUNDED)
    chunk = position.clamp(min=0) // size
    stop = ((chunk + 1) * size).masked_fill(position < 0, 0)
    if rule.left is None:
        return torch.zeros_like(stop), stop
    return (chunk - min(rule.left, UNBOUNDED)).clamp(min=0) * size, stop


@_bounds.register
def _(rule: KeysBetween, position: Tensor) -> Bounds:
    start, stop = (torch.full_like(position, min(n, UNBOUNDED)) for n in (rule.start, rule.stop))
    return start, stop


@_bounds.register
def _(rule: QueriesBetween, position: Tensor) -> Bounds:
    start = torch.where(position < min(rule.stop, UNBOUNDED), 0, UNBOUNDED)
    stop = torch.where(position >= min(rule.start, UNBOUNDED), UNBOUNDED, 0)
    return start.int(), stop.int()


def edges_within(ranges: Sequence[RangePattern], seq: int) -> Tensor:
    """int32, ascending: the positions from which on one of these rules gives queries other ranges than before."""
    found = [each for rule in ranges for each in _edges(rule, seq)]
    return torch.tensor(sorted({edge for edge in found if 0 <= edge < seq}), dtype=torch.int32, device=HOST)


@singledispatch
def _edges(rule: RangePattern, seq: int) -> Iterable[int]:
    raise TypeError(f"no layout can be built from ranges of type {type(rule).__name__}")


@_edges.register
def _(rule: Documents, seq: int) -> Iterable[int]:
    return rule.starts


@_edges.register
def _(rule: KeyRanges, seq: int) -> Iterable[int]:
    return accumulate(rule.lengths, initial=0)


@_edges.register
def _(rule: Chunks, seq: int) -> Iterable[int]:
    return range(0, seq, rule.size)


@_edges.register
def _(rule: KeysBetween, seq: int) -> Iterable[int]:
    return ()


@_edges.register
def _(rule: QueriesBetween, seq: int) -> Iterable[int]:
    return rule.start, rule.stop
