"""A pattern on its way to dense attention: what `nn.SparsitySchedule` opens, and what stays as it is.

Windows and block rules make attention sparse: they widen. Documents, global tokens and the side on which a rule sees
nothing belong to the task: they stay. So an opened pattern shows no query a later key that its rules keep from it, and
no key of another document.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil

from .base import And, Or, Pattern, PerHead
from .blocks import BlockPattern, Blocks, DilatedBlocks, GlobalBlocks, LocalBlocks, ceil_div
from .space import GridPattern, Neighborhood
from .tokens import SlidingWindow

# Windows that a schedule may open, between none and everything: each is a layout of its own.
OPENINGS = 32


def window_of(opening: float, tokens: int) -> int:
    """The window that an opening, a share in (0, 1], stands for in a sequence of so many tokens."""
    return ceil(opening * OPENINGS) * ceil_div(tokens, OPENINGS)


def opened(pattern: Pattern, window: int) -> Pattern:
    """What the pattern allows and what, as far as its rules reach to a side at all, lies within `window` tokens.

    - `SlidingWindow`: a bound is at least `window`; one of 0, or below, stays.
    - `LocalBlocks`, `DilatedBlocks`, `RandomBlocks`, `Blocks`: so are the blocks within `window` tokens, those behind
      the diagonal alone if the rule has no others.
    - `Neighborhood`, `SlidingTiles`: so is a box around each query, along every dimension as large a share of the grid
      as `window` is of its tokens; not behind the query along a causal dimension.
    - `Full`, `Documents`, `Chunks`, `KeyRanges`, `GlobalTokens` and `GlobalBlocks` stay.

    It has no more token rules than the pattern, since each window widens where it stands. It grows with `window`; with
    one that is as long as the sequence it is dense but for what stays.
    """
    if isinstance(pattern, PerHead):
        return PerHead(tuple(opened(each, window) for each in pattern.patterns))
    wide = _map_rules(partial(_widened, window=window), pattern)
    near = _map_rules(partial(_around_diagonal, window=window), wide)
    return wide if near == wide else wide | near


def _map_rules(change: Callable[[Pattern, bool], Pattern], pattern: Pattern, causal: bool = False) -> Pattern:
    """Each rule changed; the function is told whether another rule hides all later keys from the same queries."""
    if isinstance(pattern, And):
        windows = [part for part in pattern.parts if isinstance(part, SlidingWindow)]
        causal = causal or any(part.right is not None and part.right <= 0 for part in windows)
    if isinstance(pattern, And | Or):
        return type(pattern)(tuple(_map_rules(change, part, causal) for part in pattern.parts))
    return change(pattern, causal)


def _widened(rule: Pattern, causal: bool, window: int) -> Pattern:
    if not isinstance(rule, SlidingWindow):
        return rule
    left, right = (max(bound, window) if bound and bound > 0 else bound for bound in (rule.left, rule.right))
    return SlidingWindow(left, right)


def _around_diagonal(rule: Pattern, causal: bool, window: int) -> Pattern:
    """In place of a block rule, the blocks within a window; in that of a grid's rule, a box."""
    if isinstance(rule, GridPattern):
        return _box(rule, window)
    if not isinstance(rule, BlockPattern) or isinstance(rule, GlobalBlocks):
        return rule
    if isinstance(rule, Blocks):
        nearest = min((row - column for row, column in rule.pairs), default=1)
        if nearest > 0 and not causal:  # no block on the diagonal, which would show later keys
            return rule
        back_only = nearest >= 0
    else:
        back_only = isinstance(rule, LocalBlocks | DilatedBlocks) and rule.causal
    return LocalBlocks(window if back_only else 2 * window, block_size=rule.block_size, causal=back_only)


def _box(rule: GridPattern, window: int) -> Neighborhood:
    """What is near in a grid, along every dimension as large a share of it as `window` is of all its tokens."""
    causal = rule.causal if isinstance(rule, Neighborhood) else (False,) * len(rule.shape)
    reach = [min(size, ceil_div(window * size, rule.total)) for size in rule.shape]
    sides = tuple(r + 1 if back_only else 2 * r + 1 for r, back_only in zip(reach, causal, strict=True))
    return Neighborhood(rule.shape, sides, causal=causal, prefix=rule.prefix, order=rule.order, border="cut")
