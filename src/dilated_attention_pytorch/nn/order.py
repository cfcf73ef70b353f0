"""A module that puts the tokens of a grid into the order of tiles for its attention, and the output back.

This is an option of the module and not of the operator: it moves four tensors in every call, and what belongs to a
token, masks and ids, must move along. A model that can puts its tokens in order once (`tile_order`, `permute`), and
gives its layers the pattern `in_tiles`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..ops.checks import check_qkv
from ..ops.token_order import orders_of, permute, unpermute
from ..patterns import Pattern, PerHead
from ..patterns.base import shown
from ..patterns.space import GridOrder, GridPattern

# Options of a call with a value for every token, along dimension 1.
BY_TOKEN = ("key_padding_mask", "document_ids")
# Options by which places in the sequence count.
BY_PLACE = ("alibi_slopes", "bias")


class Reordering(NamedTuple):
    """The order, and the pattern of tokens that stand in it."""

    order: GridOrder
    pattern: Pattern

    @classmethod
    def of(cls, pattern: Pattern, order: int | Sequence[int]) -> Reordering:
        """Of a pattern of tokens that stand row by row."""
        heads = pattern.patterns if isinstance(pattern, PerHead) else (pattern,)
        tiled = []
        for head in heads:
            if not isinstance(head, GridPattern):
                raise ValueError(
                    f"order is for a pattern of a grid, such as Neighborhood or SlidingTiles, or for one of each head, "
                    f"got {shown(head)}"
                )
            if head.order is not None:
                raise ValueError(f"order must be given to the module or to the pattern, not to both, got {head}")
            tiled.append(head.in_tiles(order))
        orders = {head.token_order for head in tiled}
        if len(orders) > 1:
            raise ValueError(f"order needs heads of one shape and prefix, got {sorted(map(str, orders))}")
        return cls(orders.pop(), PerHead(tuple(tiled)) if isinstance(pattern, PerHead) else tiled[0])

    def check(self, is_causal: bool, with_weights: bool) -> None:
        if is_causal:
            raise ValueError("is_causal has no meaning beside order: tiles do not come one after the other in time")
        if with_weights:
            raise ValueError("return_attention_weights is not possible beside order: its blocks are those of the tiles")

    def of_call(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Any, ...]:
        """q, k, v and the options of a call, in order."""
        check_qkv(q, k, v)
        total = self.order.num_cells + self.order.prefix
        if q.shape[1] != total or k.shape[1] != total:
            raise ValueError(f"q and k must have the pattern's {total} tokens, got {q.shape[1]} and {k.shape[1]}")
        for name in BY_PLACE:
            if options.get(name) is not None:
                raise ValueError(f"{name} is not possible beside order: it goes by places in the sequence")
        order = orders_of(self.order, q.device)[0]
        moved = {name: permute(x, order) for name in BY_TOKEN if isinstance(x := options.get(name), Tensor)}
        return *(permute(x, order) for x in (q, k, v)), {**options, **moved}

    def back(self, out: Tensor) -> Tensor:
        return unpermute(out, orders_of(self.order, out.device)[0])
