"""A pattern as a union of terms, each one token interval and any number of other rules that must all hold."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import singledispatch
from itertools import product
from math import prod
from typing import NamedTuple

import torch

from ..caches import register_container
from ..patterns import (
    And,
    Chunks,
    Documents,
    Full,
    GlobalTokens,
    KeyRanges,
    Or,
    Pattern,
    PerHead,
    RangePattern,
    SlidingWindow,
)
from ..patterns.blocks import BlockPattern
from ..patterns.ranges import DataDocuments, KeysBetween, QueriesBetween, runs_of
from ..patterns.space import GridPattern
from ..patterns.tokens import EVERYTHING, UNBOUNDED, Interval
from .rules import NOTHING

# A block's rule is the set of intervals that reach it, so the table has a row for every set.
MAX_INTERVALS = 6

# An intersection of unions has a term for every choice of one part of each.
MAX_TERMS = 64


# Intervals that are a whole pattern, and its name.
WHOLE = {EVERYTHING: "full", EVERYTHING & Interval(right=0): "causal"}


@dataclass(frozen=True)
class Term:
    """Allowed where the interval allows, every range, every block rule and every pattern of a grid.

    A union with a grid in it is built by `layout.pairs`.
    """

    interval: Interval
    rules: tuple[BlockPattern, ...] = ()
    ranges: tuple[RangePattern, ...] = ()
    grids: tuple[GridPattern, ...] = ()

    @property
    def may_skip(self) -> bool:
        """Whether its tokens may leave out a block between the first key that a row of blocks sees and the last.

        They do not where every query sees itself or nothing, nor where a range is the same for all.
        """
        moving = [rule for rule in self.ranges if not isinstance(rule, KeysBetween)]
        of_itself = all(isinstance(rule, Chunks | Documents | DataDocuments) for rule in moving)
        left, right = self.interval.left, self.interval.right
        unbounded = left == right == UNBOUNDED and len(self.ranges) == 1 and not self.ranges[0].may_skip
        return bool(moving) and not unbounded and not (of_itself and min(left, right) >= 0)

    @property
    def is_interval(self) -> bool:
        """Whether it is an interval of keys for each query, so that the columns which a row of blocks sees are
        neighbours, and so are the rows that see a column."""
        gaps = any(
            isinstance(rule, KeyRanges) and any(map(int.__ge__, rule.starts, rule.stops)) for rule in self.ranges
        )
        return not (self.rules or self.grids or self.may_skip or gaps)


@singledispatch
def terms_of(pattern: Pattern) -> list[Term]:
    """The pattern as a union of terms."""
    raise TypeError(f"no layout can be built from a pattern of type {type(pattern).__name__}")


@terms_of.register
def _(pattern: Full) -> list[Term]:
    return [Term(EVERYTHING)]


@terms_of.register
def _(pattern: SlidingWindow) -> list[Term]:
    left, right = (
        UNBOUNDED if bound is None else max(-UNBOUNDED, min(bound, UNBOUNDED))
        for bound in (pattern.left, pattern.right)
    )
    return [Term(Interval(left, right))]


@terms_of.register
def _(pattern: GlobalTokens) -> list[Term]:
    count, terms = min(pattern.count, UNBOUNDED), []
    if count:
        terms = [Term(Interval(key_stop=count)), Term(Interval(query_stop=count))][: 1 + pattern.queries]
    for run in runs_of([position for position in pattern.at if position >= pattern.count]):
        terms.append(Term(EVERYTHING, ranges=(KeysBetween(*run),)))
        if pattern.queries:
            terms.append(Term(EVERYTHING, ranges=(QueriesBetween(*run),)))
    return terms


@terms_of.register
def _(pattern: RangePattern) -> list[Term]:
    return [Term(EVERYTHING, ranges=(pattern,))]


@terms_of.register
def _(pattern: GridPattern) -> list[Term]:
    return [Term(EVERYTHING, grids=(pattern,))]


@terms_of.register
def _(pattern: BlockPattern) -> list[Term]:
    return [Term(EVERYTHING, (pattern,))]


@terms_of.register
def _(pattern: Or) -> list[Term]:
    return list(dict.fromkeys(term for part in pattern.parts for term in terms_of(part)))


@terms_of.register
def _(pattern: And) -> list[Term]:
    joined = []
    parts = [terms_of(part) for part in pattern.parts]
    if prod(map(len, parts)) > MAX_TERMS:
        raise ValueError(f"a pattern may be a union of at most {MAX_TERMS} parts once written out, got {pattern}")
    for choice in product(*parts):
        interval = EVERYTHING
        for term in choice:
            interval = interval & term.interval
        interval = NOTHING if interval.left + interval.right < 0 else interval
        rules = dict.fromkeys(rule for term in choice for rule in term.rules)
        ranges, grids = (
            sorted(set().union(*(getattr(term, name) for term in choice)), key=lambda each: each.text)
            for name in ("ranges", "grids")
        )
        joined.append(Term(interval, tuple(rules), tuple(ranges), tuple(grids)))
    return list(dict.fromkeys(joined))


def kind_of(pattern: Pattern, lengths: tuple[int, int] | None = None) -> str | None:
    """`BlockLayout.kind`: "full" or "causal" if the pattern is that for all heads; with seq_q and seq_k, if it is that
    for these lengths, as a window is that reaches from one end to the other."""
    heads = set(pattern.patterns) if isinstance(pattern, PerHead) else {pattern}
    return _common_kind(map(terms_of, heads), lengths)


def _common_kind(of_heads: Iterable[list[Term]], lengths: tuple[int, int] | None) -> str | None:
    found = None
    for i, terms in enumerate(of_heads):
        kind = _kind_of_terms(terms, lengths)
        if kind is None or (i > 0 and kind != found):
            return None
        found = kind
    return found


def _kind_of_terms(terms: Iterable[Term], lengths: tuple[int, int] | None) -> str | None:
    terms = [term for term in terms if term.interval != NOTHING]
    intervals = [term.interval if lengths is None else _within(term.interval, *lengths) for term in terms]
    alone = {WHOLE.get(each) for term, each in zip(terms, intervals, strict=True) if term == Term(term.interval)}
    if "full" in alone:
        return "full"
    return "causal" if "causal" in alone and all(each.right <= 0 for each in intervals) else None


def _within(interval: Interval, seq_q: int, seq_k: int) -> Interval:
    """Without the bounds that no query and key of these lengths come to."""
    left, right, key_stop, query_stop, key_range = interval
    return Interval(
        UNBOUNDED if left >= seq_k - 1 else left,
        UNBOUNDED if right >= max(seq_q - 1, 1) else right,
        UNBOUNDED if key_stop >= seq_k else key_stop,
        UNBOUNDED if query_stop >= seq_k else query_stop,
        key_range,
    )


class Written(NamedTuple):
    """A pattern as terms, for any lengths.

    Attributes:
        heads: the pattern of each head.
        different: the different ones of these.
        of_head: which of these each head has.
        plain: the terms of each, as `terms_of` has them.
        terms: the same with intervals that name their ranges by number, where there is no grid.
        ranges: in the order of these numbers.
        totals: the tokens that ranges are written for.
        has_grids: whether some rule is of a grid.
        closed: whether lists can be made in closed form (`layout.closed_form`).
    """

    heads: tuple[Pattern, ...]
    different: tuple[Pattern, ...]
    of_head: tuple[int, ...]
    plain: list[list[Term]]
    terms: list[list[Term]]
    ranges: list[tuple[RangePattern, ...]]
    totals: tuple[int, ...]
    has_grids: bool
    closed: bool

    def kind(self, lengths: tuple[int, int]) -> str | None:
        """As `kind_of`."""
        return _common_kind(self.plain, lengths)


_written: dict[str, Written] = {}
MOST_WRITTEN = 256
register_container(_written, "layout.terms._written", "patterns as terms, by their text", bound=MOST_WRITTEN)


def written(pattern: Pattern) -> Written:
    """By its text, which is quicker to look up than the pattern."""
    if torch.compiler.is_dynamo_compiling():
        return _write(pattern)
    found = _written.get(pattern.text)
    if found is None:
        found = _write(pattern)
        if len(_written) >= MOST_WRITTEN:
            _written.clear()
        _written[pattern.text] = found
    return found


def _write(pattern: Pattern) -> Written:
    heads = pattern.patterns if isinstance(pattern, PerHead) else (pattern,)
    different = tuple(dict.fromkeys(heads))
    plain = [terms_of(head) for head in different]
    without = [i for i, terms in enumerate(plain) if not any(term.grids for term in terms)]
    of_heads, ranges = numbered(plain[i] for i in without)
    terms = [*plain]
    for i, of_head in zip(without, of_heads, strict=True):
        terms[i] = of_head
    totals = {each.total for each in ranges_of(pattern) if each.total is not None}
    return Written(
        heads,
        different,
        tuple(different.index(head) for head in heads),
        plain,
        terms,
        ranges,
        tuple(sorted(totals)),
        bool(grids_of(pattern)),
        all(len(each) <= MAX_INTERVALS and all(term.is_interval for term in each) for each in terms),
    )


def ranges_of(pattern: Pattern) -> set[RangePattern]:
    """The different rules of a pattern that are ranges."""
    return {rule for rule in _rules_of(pattern) if isinstance(rule, RangePattern)}


def grids_of(pattern: Pattern) -> set[GridPattern]:
    """The different rules of a pattern that are those of a grid."""
    return {rule for rule in _rules_of(pattern) if isinstance(rule, GridPattern)}


def check_grids(pattern: Pattern, seq_k: int) -> None:
    """Those of a pattern must be grids of so many tokens."""
    for grid in sorted(grids_of(pattern), key=lambda each: each.text):
        if grid.total != seq_k:
            raise ValueError(
                f"prefix and shape of {type(grid).__name__} must have seq_k = {seq_k} tokens together, got "
                f"{grid.prefix} and {grid.shape}, which are {grid.total}"
            )


def has_ranges(pattern: Pattern) -> bool:
    """Whether one of its terms has: `Term.ranges`."""
    rules = _rules_of(pattern)
    return any(isinstance(rule, RangePattern) or (isinstance(rule, GlobalTokens) and rule.at) for rule in rules)


def _rules_of(pattern: Pattern) -> set[Pattern]:
    parts = getattr(pattern, "parts", ()) or getattr(pattern, "patterns", ())
    return set().union(*(_rules_of(part) for part in parts)) if parts else {pattern}


def numbered(of_heads: Iterable[list[Term]]) -> tuple[list[list[Term]], list[tuple[RangePattern, ...]]]:
    """The terms of each head, whose intervals now name their range by its number, and the ranges in that order."""
    found: dict[tuple[RangePattern, ...], int] = {(): 0}
    heads = []
    for terms in of_heads:
        numbers = [found.setdefault(term.ranges, len(found)) for term in terms]
        heads.append(
            [replace(t, interval=t.interval._replace(key_range=n)) for t, n in zip(terms, numbers, strict=True)]
        )
    return heads, list(found)[1:]


def rule_table(intervals: list[Interval]) -> list[list[Interval]]:
    """Every set of intervals as one rule: number `bits − 1` holds the intervals whose bit is set."""
    return [
        [interval if bits >> i & 1 else NOTHING for i, interval in enumerate(intervals)]
        for bits in range(1, 1 << len(intervals))
    ]
