"""How far back a causal pattern sees: `look_back` says which keys a cache must keep for all tokens that may follow.

Those are the first keys of the sequence, which every token sees, and the last ones, a window. Everything between them
can be dropped. The window then lies right behind the first keys, at positions that are smaller than its own by what was
dropped, and the pattern finds the same keys there: a token rule counts from the query or from the beginning, and a
query stays behind all that is counted from the beginning. A block rule counts in blocks, or in segments: there the
number of dropped keys must be a multiple of `step`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import singledispatch
from math import lcm

from ..caches import cached
from ..patterns import Causal, DilatedBlocks, GlobalBlocks, LocalBlocks, Pattern, PerHead
from ..patterns.blocks import BlockPattern
from ..patterns.tokens import UNBOUNDED
from .terms import Term, terms_of


@dataclass(frozen=True)
class LookBack:
    """What causal queries see of keys that are behind them.

    Attributes:
        first: keys at the beginning of the sequence.
        back: keys before a query, itself not included.
        step: keys are dropped by multiples of this.
    """

    first: int
    back: int
    step: int = 1

    def dropped(self, length: int) -> int:
        """How many keys no query behind `length` tokens sees, in whole steps: those from `first` on."""
        return max(length - self.first - self.back, 0) // self.step * self.step

    def __or__(self, other: LookBack) -> LookBack:
        first, back = max(self.first, other.first), max(self.back, other.back)
        return LookBack(first, back, lcm(self.step, other.step))


@cached(128, "how far back patterns see")
def look_back(pattern: Pattern) -> LookBack | None:
    """Of a pattern that no query sees the future by; None if there is no bound, or if positions of their own count."""
    if isinstance(pattern, PerHead):
        return _all(look_back(head) for head in pattern.patterns)
    return _all(_of_term(term) for term in terms_of(pattern & Causal()))


def _all(found: Iterable[LookBack | None]) -> LookBack | None:
    """What keeps enough for each of them."""
    whole = LookBack(0, 0)
    for each in found:
        if each is None:
            return None
        whole |= each
    return whole


def _of_term(term: Term) -> LookBack | None:
    """One bound is enough: from the beginning or from the query, by the interval or by a block rule."""
    if term.ranges or term.grids:
        return None
    left, _, key_stop, query_stop, _ = term.interval
    firsts, backs, step = [key_stop, query_stop], [left], 1
    for rule in term.rules:
        bounds = bounds_of(rule)
        if bounds is None:
            return None
        first, back, of_rule = bounds
        firsts.append(first)
        backs.append(back)
        step = lcm(step, of_rule)
    if min(*firsts, *backs) >= UNBOUNDED:
        return None
    # Every bound counts: a position that a rule asks for must not come before it by what was dropped.
    first, back = (max((x for x in bounds if x < UNBOUNDED), default=0) for bounds in (firsts, backs))
    return LookBack(max(first, 0), max(back, 0), step)


@singledispatch
def bounds_of(rule: BlockPattern) -> tuple[int, int, int] | None:
    """`first`, `back` (either may be UNBOUNDED) and `step` of a block rule; None if it counts otherwise."""
    return None


@bounds_of.register
def _(rule: LocalBlocks) -> tuple[int, int, int]:
    back, _ = rule.reach
    return UNBOUNDED, (back * rule.stride + 1) * rule.block_size - 1, rule.block_size


@bounds_of.register
def _(rule: GlobalBlocks) -> tuple[int, int, int]:
    size = rule.block_size
    return -(-rule.tokens // size) * size, UNBOUNDED, size


@bounds_of.register
def _(rule: DilatedBlocks) -> tuple[int, int, int] | None:
    if rule.depends_on_length:
        return None
    segments = [segment * rule.block_size for segment, _ in rule.branches]
    return UNBOUNDED, max(segments) - 1, lcm(*segments)
