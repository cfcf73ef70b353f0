"""Selectors: which blocks of a layer's estimated masses to keep."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ..layout.eager import plain_cache
from ..patterns.base import Value, check_flag
from ..patterns.blocks import check_ratio

# Mass 1 as an integer.
_ONE = 2**40


@dataclass(frozen=True, eq=False)
class Grid:
    """The blocks of a call that may be kept, and those that must be.

    Attributes:
        visible, forced: bool [query blocks, key blocks], `visible` with (batch, 1) before them where masks hide blocks.
        ends: int32 [query blocks]: a row sees the blocks before that one, masks aside.
        last_full: [query blocks], the last key block whose pairs are all visible; −1 for none.
        num_visible, num_forced: how many there are in each row, masks aside: budgets are counted on these, so that
            the host knows them.
        own: int64 [batch, query blocks], key blocks that each row of a sample sees, where samples may be shorter than
            the call; 0 behind their ends. Budgets are then counted on these.
    """

    visible: Tensor
    forced: Tensor
    ends: Tensor
    last_full: Tensor
    num_visible: tuple[int, ...]
    num_forced: tuple[int, ...]
    own: Tensor | None = None

    def priority(self, masses: Tensor) -> Tensor:
        """The masses with forced blocks before and invisible ones behind all others."""
        return masses.masked_fill(self.forced, torch.inf).masked_fill(~self.visible, -1.0)


class Selector(Protocol):
    """Which blocks of `masses` [batch, lists, query blocks, key blocks] to keep.

    `keep` gives a bool mask; what cannot be seen may be in it, for nothing. `max_blocks` bounds how many blocks of a
    sample it keeps, an int that depends on no input. `opened` is the selector on its way (0) to keeping all (1).
    """

    def keep(self, masses: Tensor, grid: Grid) -> Tensor: ...

    def max_blocks(self, grid: Grid, lists: int) -> int: ...

    def opened(self, opening: float) -> Selector: ...


@dataclass(frozen=True)
class SharedBudget(Value):
    """The heaviest `share` of all visible blocks of a layer, whichever head and row they are in.

    How many blocks a row gets depends on what the other rows need, later ones too. Where a causal model must learn
    nothing at all from that, use `TopK`.
    """

    share: float

    def __post_init__(self) -> None:
        check_ratio("share", self.share)
        super().__post_init__()

    def opened(self, opening: float) -> SharedBudget:
        return replace(self, share=_towards_one(self.share, opening))

    def max_blocks(self, grid: Grid, lists: int) -> int:
        return max(round(self.share * sum(grid.num_visible) * lists), sum(grid.num_forced) * lists)

    def keep(self, masses: Tensor, grid: Grid) -> Tensor:
        return _first(grid.priority(masses).flatten(1), self.max_blocks(grid, masses.shape[1])).view_as(masses)


@dataclass(frozen=True)
class TopK(Value):
    """The heaviest blocks of each row; a row depends on no other.

    Args:
        share: of the visible blocks, over all rows.
        even: every row gets the same number (all of its blocks, if it has fewer), chosen to meet the share; else
            every row the same share of its own.
        across_heads: the heads of a row compete for its blocks; else each head has as many.
    """

    share: float
    even: bool = False
    across_heads: bool = False

    def __post_init__(self) -> None:
        check_ratio("share", self.share)
        check_flag("even", self.even)
        check_flag("across_heads", self.across_heads)
        super().__post_init__()

    def opened(self, opening: float) -> TopK:
        return replace(self, share=_towards_one(self.share, opening))

    def counts(self, grid: Grid, lists: int) -> list[int]:
        """Blocks of each row: of one head, or of all that compete for them."""
        total = self.share * sum(grid.num_visible)
        level = _level(grid.num_visible, total) if self.even else 0.0
        lists = lists if self.across_heads else 1
        counts = []
        for visible, forced in zip(grid.num_visible, grid.num_forced, strict=True):
            wanted = min(level, visible) if self.even else self.share * visible
            counts.append(max(round(wanted * lists), forced * lists, min(visible, 1)))
        return counts

    def limits(self, visible: Tensor, forced: Tensor, lists: int, level: Tensor | None = None) -> Tensor:
        """`counts` on the device, of rows that see and must keep so many blocks: int64, like `visible` [..., rows].

        Args:
            level: what `even` gives a row, [...]; by default that of these rows, whose blocks must not become fewer
                up to the first row that sees none.
        """
        wanted = visible.double()
        if not self.even:
            wanted = self.share * wanted
        else:
            wanted = wanted.minimum((even_level(visible, self.share) if level is None else level)[..., None])
        lists = lists if self.across_heads else 1
        return (wanted * lists).round().long().maximum(forced * lists).maximum(visible.clamp(max=1))

    def max_blocks(self, grid: Grid, lists: int) -> int:
        return sum(self.counts(grid, lists)) * (1 if self.across_heads else lists)

    def keep(self, masses: Tensor, grid: Grid) -> Tensor:
        counts = self.counts(grid, masses.shape[1])
        limits = _on_device(tuple(counts), masses.device)
        if grid.own is not None:
            column = torch.arange(masses.shape[-1], device=masses.device)
            forced = (grid.forced & (column < grid.own[..., None])).sum(-1)
            limits = torch.minimum(limits, self.limits(grid.own, forced, masses.shape[1]))
            limits = limits if self.across_heads else limits[:, None]
        priority = grid.priority(masses)
        if not self.across_heads:
            return _first(priority, max(counts), limits)
        kept = _first(priority.transpose(1, 2).flatten(2), max(counts), limits)
        return kept.unflatten(2, (masses.shape[1], -1)).transpose(1, 2)


@dataclass(frozen=True)
class CumulativeMass(Value):
    """In each row the heaviest blocks, until they hold `mass` of it; of all blocks of a layer at most a share."""

    mass: float
    at_most: float = 1.0

    def __post_init__(self) -> None:
        check_ratio("mass", self.mass, "a row's attention")
        check_ratio("at_most", self.at_most)
        super().__post_init__()

    def opened(self, opening: float) -> Selector:
        if opening == 1.0:
            return SharedBudget(1.0)  # rounded masses may add up to 1 before the last block
        return CumulativeMass(_towards_one(self.mass, opening), _towards_one(self.at_most, opening))

    def max_blocks(self, grid: Grid, lists: int) -> int:
        return SharedBudget(self.at_most).max_blocks(grid, lists)

    def keep(self, masses: Tensor, grid: Grid) -> Tensor:
        order = grid.priority(masses).sort(dim=-1, descending=True, stable=True).indices
        ordered = (masses.gather(-1, order) * _ONE).long()  # sums of integers are the same in any order
        before = ordered.cumsum(-1) - ordered  # a block is wanted while those before it hold too little
        wanted = torch.zeros_like(masses, dtype=torch.bool).scatter(-1, order, before < round(self.mass * _ONE))
        return _at_most(self, masses, wanted, grid)


@dataclass(frozen=True)
class RelativeThreshold(Value):
    """In each row the blocks with at least `ratio` of its largest mass; of all blocks of a layer at most a share."""

    ratio: float
    at_most: float = 1.0

    def __post_init__(self) -> None:
        check_ratio("ratio", self.ratio, "a row's largest mass")
        check_ratio("at_most", self.at_most)
        super().__post_init__()

    def opened(self, opening: float) -> Selector:
        if opening == 1.0:
            return SharedBudget(1.0)
        return RelativeThreshold(self.ratio * (1.0 - opening), _towards_one(self.at_most, opening))

    def max_blocks(self, grid: Grid, lists: int) -> int:
        return SharedBudget(self.at_most).max_blocks(grid, lists)

    def keep(self, masses: Tensor, grid: Grid) -> Tensor:
        return _at_most(self, masses, masses >= self.ratio * masses.amax(-1, keepdim=True), grid)


def _towards_one(share: float, opening: float) -> float:
    return share + (1.0 - share) * opening


def _at_most(selector: CumulativeMass | RelativeThreshold, masses: Tensor, wanted: Tensor, grid: Grid) -> Tensor:
    wanted = wanted | grid.forced
    if selector.at_most == 1.0:
        return wanted
    return SharedBudget(selector.at_most).keep(masses.masked_fill(~wanted, -0.5), grid) & wanted


def _first(priority: Tensor, most: int, limits: Tensor | None = None) -> Tensor:
    """True for the `most` largest values of the last dimension; of a row of the one before it, its limit of them."""
    chosen = priority.topk(min(most, priority.shape[-1]), sorted=limits is not None).indices
    keep = torch.zeros_like(priority, dtype=torch.bool)
    if limits is None:
        return keep.scatter_(-1, chosen, True)
    rank = torch.arange(chosen.shape[-1], device=priority.device)
    return keep.scatter_(-1, chosen, (rank < limits[..., None]).expand_as(chosen))


def _level(sizes: tuple[int, ...], total: float) -> float:
    """The level with Σ min(level, size) = total."""
    before, left = 0, len(sizes)
    for size in sorted(sizes):
        if size * left >= total - before:
            return (total - before) / left
        before, left = before + size, left - 1
    return float(max(sizes))


def even_level(sizes: Tensor, share: float) -> Tensor:
    """`_level` of each row of ascending sizes with zeros behind them, in the same steps: float64 [...]; the total is a
    share of their sum."""
    before = sizes.cumsum(-1) - sizes
    total = (share * sizes.sum(-1, dtype=torch.float64))[..., None]
    left = (sizes > 0).sum(-1, keepdim=True) - torch.arange(sizes.shape[-1], device=sizes.device)
    found = (left > 0) & (sizes * left >= total - before)
    at = found.int().argmax(-1, keepdim=True)
    level = ((total - before) / left.clamp(min=1)).gather(-1, at).squeeze(-1)
    return torch.where(found.any(-1), level, sizes.amax(-1).double())


@plain_cache(64, "budgets of rows, on their device")
def _on_device(counts: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(counts, device=device)
