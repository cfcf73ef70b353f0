"""Token rules: each lets a query see one interval of keys (or the union of a few).

That is all a kernel has to know about single tokens. `Interval` says which keys the query at position `p` sees:
from `p − left` to `p + right`, below `key_stop`, if `p < query_stop`, and inside its range of keys if `key_range` names
one (`ranges`). Intersections of intervals are intervals, so `&` never leaves the form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .base import LARGEST, Pattern, check_flag, check_int, check_sequence

# No bound. Sums of two positions and this stay inside int32.
UNBOUNDED = 2**30


class Interval(NamedTuple):
    """The keys that a query at position p sees; see the module's text."""

    left: int = UNBOUNDED
    right: int = UNBOUNDED
    key_stop: int = UNBOUNDED
    query_stop: int = UNBOUNDED
    key_range: int = 0  # 1 is the first of the ranges of a layout, 0 none, −1 the first of its bitmaps

    def __and__(self, other: Interval) -> Interval:
        """Of two that name no range yet: a layout numbers them."""
        return Interval(*(min(a, b) for a, b in zip(self, other, strict=True)))


EVERYTHING = Interval()


@dataclass(frozen=True)
class Full(Pattern):
    """Every query sees every key."""

    def allows(self, query: int, key: int, seq_q: int, seq_k: int) -> bool:
        return True


@dataclass(frozen=True)
class SlidingWindow(Pattern):
    """A query sees itself, `left` tokens before it and `right` after it, to the token. None is no bound.

    A negative bound leaves out that many of the nearest, the query itself first: (None, −1) sees what is before it, and
    (7, −7) the seventh token before it.
    """

    left: int | None
    right: int | None

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), least=-LARGEST)
        if self.left is not None and self.right is not None and self.left + self.right < 0:
            raise ValueError(f"left + right must be at least 0, or nothing is seen, got {self.left} and {self.right}")
        super().__post_init__()

    def allows(self, query: int, key: int, seq_q: int, seq_k: int) -> bool:
        distance = query + seq_k - seq_q - key
        return (self.left is None or distance <= self.left) and (self.right is None or -distance <= self.right)


def Causal() -> SlidingWindow:  # noqa: N802 - reads as a pattern
    """No query sees a later key: a sliding window without a left bound."""
    return SlidingWindow(left=None, right=0)


def StrictlyCausal() -> SlidingWindow:  # noqa: N802
    """A query sees what is before it, and not itself: a sliding window that ends one token before."""
    return SlidingWindow(left=None, right=-1)


@dataclass(frozen=True)
class GlobalTokens(Pattern):
    """Every query sees the first `count` keys, and those at the positions `at`; with `queries=True` the queries there
    also see every key."""

    count: int = 0
    queries: bool = False
    at: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_sequence("at", self.at, "ints")
        for position in self.at:
            check_int("every position of at", position, least=0)
        object.__setattr__(self, "at", tuple(sorted(set(self.at))))
        check_int("count", self.count, least=0 if self.at else 1)
        check_flag("queries", self.queries)
        super().__post_init__()

    def allows(self, query: int, key: int, seq_q: int, seq_k: int) -> bool:
        return self._is_global(key) or (self.queries and self._is_global(query + seq_k - seq_q))

    def _is_global(self, position: int) -> bool:
        return (position < self.count and self.count > 0) or position in self.at
