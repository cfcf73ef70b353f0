"""The tokens of a grid in the order of tiles: neighbours in space are then neighbours in memory, and blocks are full.

    order = tile_order((30, 48, 80), (4, 4, 8), prefix=226)
    x = permute(x, order)                  # once, where the tokens enter the model; their positions go with them
    … layers over Neighborhood((30, 48, 80), (18, 24, 24), prefix=226, order=(4, 4, 8)) …
    x = unpermute(x, order)                # once, at the end

Whatever belongs to a token goes with it: embeddings of positions, padding masks. A model that cannot do so has
`BlockSparseAttention(pattern, order=…)`, which moves q, k, v and the output in every call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..layout.checks import check_device
from ..layout.eager import plain_cache
from ..patterns.base import check_int, shown
from ..patterns.space import GridOrder, check_shape, check_tile


def tile_order(
    shape: int | Sequence[int],
    tile: int | Sequence[int],
    prefix: int = 0,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """The order of a grid by tiles: tile after tile, row by row in each, then the tiles that a border cuts, and the
    prefix behind all of them.

    Args:
        shape: of the grid, one to three sizes: its tokens come row by row, behind the prefix.
        tile: tokens of a tile along each dimension, or one number for all. Where it has as many tokens as a block,
            the fewest blocks are seen.
        prefix: how many tokens stand before the grid, such as text.

    Returns:
        int64 [prefix + tokens of the grid]: entry i is the place, in the sequence as it was, of the token that now
        stands at i.
    """
    sizes = check_shape(shape)
    check_int("prefix", prefix, least=0)
    order = GridOrder(sizes, check_tile("tile", tile, sizes), prefix)
    return orders_of(order, check_device("cpu" if device is None else device))[0].clone()


def permute(x: Tensor, order: Tensor, dim: int = 1) -> Tensor:
    """The tokens of x, which lie along `dim`, in an order that `tile_order` made. Differentiable."""
    _check(x, order, dim)
    return _Taken.apply(x, order, inverse_of(order), dim)


def unpermute(x: Tensor, order: Tensor, dim: int = 1) -> Tensor:
    """The inverse of `permute`."""
    _check(x, order, dim)
    return _Taken.apply(x, inverse_of(order), order, dim)


def inverse_of(order: Tensor) -> Tensor:
    place = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter_(0, order, place)


@plain_cache(32, "orders of the tokens of grids by tiles, and their inverses, on their device")
def orders_of(order: GridOrder, device: torch.device) -> tuple[Tensor, Tensor]:
    """The order as `tile_order` gives it, and its inverse."""
    place = torch.arange(order.num_cells, device=device)
    of_grid = GridOrder(order.shape).place(order.coordinates(place)) + order.prefix
    found = torch.cat((of_grid, torch.arange(order.prefix, device=device)))
    return found, inverse_of(found)


def _check(x: Tensor, order: Tensor, dim: int) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, got {shown(x)}")
    if not isinstance(order, Tensor) or order.dtype != torch.int64:
        raise TypeError(f"order must be an int64 tensor, as tile_order makes it, got {shown(order)}")
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"dim must be an int, got {shown(dim)}")
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim must be a dimension of x, which has {x.ndim}, got {dim}")
    if order.shape != (x.shape[dim],):
        raise ValueError(f"order must have a place for each of the {x.shape[dim]} tokens, got {list(order.shape)}")
    if order.device != x.device:
        raise ValueError(f"order must be on the device of x, {x.device}, got {order.device}")


class _Taken(torch.autograd.Function):
    """A gather whose gradient is a gather, too: adding up, as that of `index_select`, is slow and in no fixed order."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, index: Tensor, inverse: Tensor, dim: int) -> Tensor:
        return x.index_select(dim, index)

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        _, index, inverse, ctx.dim = inputs
        ctx.save_for_backward(index, inverse)
        ctx.save_for_forward(index)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        index, inverse = ctx.saved_tensors
        return _Taken.apply(grad, inverse, index, ctx.dim), None, None, None

    @staticmethod
    def jvp(ctx, tangent, *_):  # type: ignore[no-untyped-def]
        (index,) = ctx.saved_tensors
        return tangent.index_select(ctx.dim, index)
