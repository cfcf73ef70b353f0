"""Token rules: each lets a query see one interval of keys (or the union of a few).

That is all a kernel has to know about single tokens. `Interval` says which keys the query at position `p` sees:
from `p − left` to `p + right`, below `key_stop`, if `p < query_stop`, and inside its own document if `same_document`.
Intersections of intervals are intervals, so `&` never leaves the form.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from .base import Pattern, check_flag, check_int, check_sequence

# No bound. Sums of two positions and this stay inside int32.
UNBOUNDED = 2**30


class Interval(NamedTuple):
    """The keys that a query at position p sees; see the module's text."""

    left: int = UNBOUNDED
    right: int = UNBOUNDED
    key_stop: int = UNBOUNDED
    query_stop: int = UNBOUNDED
    same_document: int = 0

    def __and__(self, other: Interval) -> Interval:
        left, right, key_stop, query_stop, _ = (min(a, b) for a, b in zip(self, other, strict=True))
        return Interval(left, right, key_stop, query_stop, max(self.same_document, other.same_document))


EVERYTHING = Interval()


@dataclass(frozen=True)
class Full(Pattern):
    """Every query sees every key."""

    def allows(self, query: int, key: int, seq_q: int, seq_k: int) -> bool:
        return True


@dataclass(frozen=True)
class SlidingWindow(Pattern):
    """A query sees itself, `left` tokens before it and `right` after it, to the token. None is no bound."""

    left: int | None
    right: int | None

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), least=0)
        super().__post_init__()

    def allows(self, query: int, key: int, seq_q: int, seq_k: int) -> bool:
        distance = query + seq_k - seq_q - key
        return (self.left is None or distance <= self.left) and (self.right is None or -distance <= self.right)


def Causal() -> SlidingWindow:  # noqa: N802 - reads as a pattern
    """No query sees a later key: a sliding window without a left bound."""
    return SlidingWindow(left=None, right=0)


@dataclass(frozen=True)
class GlobalTokens(Pattern):
    """Every query sees the first `count` keys; with `queries=True` the first `count` queries also see every key."""

    count: int
    queries: bool = False

    def __post_init__(self) -> None:
        check_int("count", self.count, least=1)
        check_flag("queries", self.queries)
        super().__post_init__()

    def allows(self, query: int, key: int, seq_q: int, seq_k: int) -> bool:
        return key < self.count or (self.queries and query + seq_k - seq_q < self.count)


@dataclass(frozen=True)
class Documents(Pattern):
    """Packed sequences: documents of these `lengths`, one after the other; nobody sees into another document."""

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        check_sequence("lengths", self.lengths, "ints")
        object.__setattr__(self, "lengths", tuple(self.lengths))
        if not self.lengths:
            raise ValueError("lengths must name at least one document, got ()")
        for length in self.lengths:
            check_int("every document length", length, least=1)
        super().__post_init__()

    @property
    def starts(self) -> tuple[int, ...]:
        """The first token of each document, and the end of the last."""
        return (0, *accumulate(self.lengths))

    def allows(self, query: int, key: int, seq_q: int, seq_k: int) -> bool:
        starts = self.starts
        return bisect_right(starts, query + seq_k - seq_q) == bisect_right(starts, key)
