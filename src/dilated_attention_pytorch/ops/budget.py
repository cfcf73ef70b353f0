"""`split_budget`: how many blocks each layer of a model should keep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout.checks import block_pair
from ..patterns.base import check_flag, check_int, shown
from ..patterns.blocks import ceil_div
from .grids import grid_of
from .selectors import Grid, SharedBudget, TopK

# Shares that are tried for a layer: so many up to the selector's own (a power of two, so that it is among them),
STEPS = 16
# and up to so many times that.
MOST = 4


class Step(NamedTuple):
    """A selector for one layer: the blocks that a text costs, and the mass that all texts keep."""

    selector: TopK | SharedBudget
    blocks: int
    mass: float


@torch.no_grad()
def split_budget(
    masses: Sequence[Tensor],
    selector: TopK | SharedBudget,
    *,
    tokens: int,
    block_size: int | tuple[int, int],
    is_causal: bool = False,
    sink: int = 1,
    local: int = 1,
) -> list[TopK | SharedBudget]:
    """The selector with a share of its own for each layer: together they keep no more blocks of such texts than with
    the same one everywhere, and about as much mass as they can. The next block is then worth about the same in all.

    Some layers look at few blocks and some at many, on any text; so a few texts are enough to tell, and the shares
    serve for other lengths too, if nearly.

    Args:
        masses: for each layer `block_masses` of the same texts, [texts, heads, query blocks, key blocks].
        selector: `TopK` or `SharedBudget`; a layer gets from a sixteenth to four times its share, at most all
            blocks, and at least what is forced.
        tokens: of a text.
        block_size, is_causal, sink, local: as in `select_blocks`, the first as in `block_masses` too.
    """
    if type(selector) not in (TopK, SharedBudget):
        raise TypeError(f"selector must be TopK(share) or SharedBudget(share), got {shown(selector)}")
    blocks = block_pair(block_size)
    check_int("tokens", tokens, least=1)
    check_flag("is_causal", is_causal)
    check_int("sink", sink, least=0)
    check_int("local", local, least=0)
    _check_masses(masses, tokens, blocks)
    grid = grid_of((tokens, tokens), blocks, is_causal, sink, local, masses[0].device)
    steps = range(1, min(MOST * STEPS, math.floor(STEPS / selector.share)) + 1)
    tried = [replace(selector, share=selector.share * step / STEPS) for step in steps]
    layers = [_steps(tried, selector.share, of_layer, grid) for of_layer in masses]
    alike = [next(x for x in steps if x.selector == selector) for steps in layers]
    now, budget = [steps[0] for steps in layers], sum(map(_blocks, alike))
    # What a block gains falls along every hull: the largest gains of all layers come first, as long as there is room.
    hulls = [list(pairwise(_hull(steps))) for steps in layers]
    gains = [(_gain(*pair), layer, pair) for layer, hull in enumerate(hulls) for pair in hull]
    for _, layer, (before, after) in sorted(gains, key=lambda each: each[0], reverse=True):
        room = budget - sum(map(_blocks, now)) + before.blocks
        if now[layer] == before:  # else it stopped on its way
            now[layer] = max((x for x in layers[layer] if x.blocks <= min(room, after.blocks)), key=_blocks)
    # The last steps of the layers may not fit together: what is left over may be more than what was won.
    best = max(now, alike, key=lambda each: sum(step.mass for step in each))
    return [step.selector for step in best]


def _steps(tried: list[TopK | SharedBudget], share: float, masses: Tensor, grid: Grid) -> list[Step]:
    """From few blocks to many. Where several keep the same, which other lengths may tell apart: the one nearest to the
    share that was asked for."""
    steps: list[Step] = []
    for selector in tried:
        blocks = selector.max_blocks(grid, masses.shape[1])
        if not steps or blocks > steps[-1].blocks:
            kept = masses.where(selector.keep(masses, grid), 0.0).sum(dtype=torch.float64)
            steps.append(Step(selector, blocks, float(kept)))
        elif selector.share <= share:
            steps[-1] = steps[-1]._replace(selector=selector)
    return steps


def _hull(steps: list[Step]) -> list[Step]:
    """Those between which a block gains less and less. Blocks come whole: many a step gains nothing, and the one
    behind it much."""
    hull: list[Step] = []
    for step in steps:
        while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-1], step):
            hull.pop()
        hull.append(step)
    return hull


def _blocks(step: Step) -> int:
    return step.blocks


def _gain(before: Step, after: Step) -> float:
    return (after.mass - before.mass) / (after.blocks - before.blocks)


def _check_masses(masses: Sequence[Tensor], tokens: int, blocks: tuple[int, int]) -> None:
    if not isinstance(masses, Sequence):
        raise TypeError(f"masses must be a sequence with a tensor for each layer, got {type(masses).__name__}")
    if not masses:
        raise ValueError("masses must have a tensor for each layer, got none")
    wanted = [ceil_div(tokens, block) for block in blocks]
    for layer, each in enumerate(masses):
        good = isinstance(each, Tensor) and each.dim() == 4 and each.is_floating_point()
        if not good or list(each.shape[2:]) != wanted or not each.numel():
            what = f"{each.dtype} {list(each.shape)}" if isinstance(each, Tensor) else type(each).__name__
            raise ValueError(
                f"masses must be floating-point tensors [texts, heads, {wanted[0]}, {wanted[1]}], as {tokens} tokens "
                f"have blocks, got {what} for layer {layer}"
            )
        if len(each) != len(masses[0]):
            raise ValueError(
                f"masses must be of the same texts, got {len(masses[0])} and, for layer {layer}, {len(each)}"
            )
        if each.device != masses[0].device:
            raise ValueError(f"masses must be on one device, got {masses[0].device} and {each.device}")
        total = float(each.sum(dtype=torch.float64))
        if not (math.isfinite(total) and total > 0.0 and bool((each >= 0).all())):
            raise ValueError(f"masses must be 0 or more, and not all of them 0, got a sum of {total} for layer {layer}")
