"""`split_budget`: how many blocks each layer of a model should keep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify, heapreplace

import torch
from torch import Tensor

from ..layout.checks import block_pair
from ..patterns.base import check_flag, check_int
from ..patterns.blocks import ceil_div
from .select import SharedBudget, TopK, grid_of

# A layer gets so many equal steps, on average,
STEPS = 16
# and at most so many times the mean.
MOST = 4


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
    """The selector with a share of its own for each layer: on average the selector's, and such that the layers keep as
    much mass as they can together. The next block is then worth about the same in all of them.

    Some layers look at few blocks and some at many, on any text; so a few texts are enough to tell.

    Args:
        masses: for each layer `block_masses` of the same texts, [texts, heads, query blocks, key blocks].
        selector: `TopK` or `SharedBudget`; a layer gets up to four times its share, and at least what is forced.
        tokens: of a text.
        block_size, is_causal, sink, local: as in `select_blocks`, the first as in `block_masses` too.
    """
    if type(selector) not in (TopK, SharedBudget):
        raise TypeError(f"selector must be TopK(share) or SharedBudget(share), got {selector!r}")
    blocks = block_pair(block_size)
    check_flag("is_causal", is_causal)
    check_int("sink", sink, least=0)
    check_int("local", local, least=0)
    check_int("tokens", tokens, least=1)
    _check_masses(masses, tokens, blocks)
    grid = grid_of((tokens, tokens), blocks, is_causal, sink, local, masses[0].device)
    # Below what is forced there is nothing to give or to take.
    first = min(STEPS, math.ceil(STEPS * sum(grid.num_forced) / (sum(grid.num_visible) * selector.share)))
    last = min(MOST * STEPS, math.floor(STEPS / selector.share))
    selectors = [replace(selector, share=selector.share * step / STEPS) for step in range(max(first, 1), last + 1)]
    worth = []
    for of_layer in masses:
        kept = [of_layer.where(each.keep(of_layer, grid), 0.0).sum() for each in selectors]
        worth.append([*(torch.stack(kept) / of_layer.sum()).tolist(), -math.inf])

    # The next step goes to the layer that gains the most by it.
    at = [0] * len(worth)
    waiting = [(of_layer[0] - of_layer[1], layer) for layer, of_layer in enumerate(worth)]
    heapify(waiting)
    for _ in range((STEPS - max(first, 1)) * len(worth)):
        _, layer = waiting[0]
        at[layer] += 1
        heapreplace(waiting, (worth[layer][at[layer]] - worth[layer][at[layer] + 1], layer))
    return [selectors[step] for step in at]


def _check_masses(masses: Sequence[Tensor], tokens: int, blocks: tuple[int, int]) -> None:
    if not isinstance(masses, Sequence) or not masses:
        raise TypeError(f"masses must be a sequence with a tensor for each layer, got {type(masses).__name__}")
    wanted = [ceil_div(tokens, block) for block in blocks]
    for layer, each in enumerate(masses):
        good = isinstance(each, Tensor) and each.dim() == 4 and each.is_floating_point()
        if not good or list(each.shape[2:]) != wanted or not each.numel():
            what = f"{each.dtype} {list(each.shape)}" if isinstance(each, Tensor) else type(each).__name__
            raise ValueError(
                f"masses must be floating-point tensors [texts, heads, {wanted[0]}, {wanted[1]}], as {tokens} tokens "
                f"have blocks, got {what} for layer {layer}"
            )
