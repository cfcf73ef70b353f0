"""`BlockLayout.from_tree`: drafts that branch, verified in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..patterns.base import check_int, shown
from .checks import check_sizes
from .tiles import TileGrid, Tiles

if TYPE_CHECKING:
    from .layout import BlockLayout


def from_tree(cls: type[BlockLayout], parents: Tensor, seq_k: int, block_size: int | tuple[int, int]) -> BlockLayout:
    """See `BlockLayout.from_tree`."""
    trees = _checked(parents, seq_k)
    samples, nodes = trees.shape
    context = seq_k - nodes
    lengths, blocks = check_sizes(nodes, seq_k, block_size)
    grid = TileGrid(*lengths, *blocks, parents.device)
    place, behind = _places(trees)

    def allowed(which: Tensor, query_block: Tensor, key_block: Tensor) -> Tensor:
        query, key = grid.queries(query_block).clamp(max=nodes - 1), grid.keys(key_block)
        of_tree, sample = (key - context).clamp(0, nodes - 1), which[:, None]
        of_query = place[sample, query][:, :, None]
        inside = (place[sample, of_tree][:, None] <= of_query) & (of_query < behind[sample, of_tree][:, None])
        return (key < context)[:, None] | inside

    tiles = Tiles(grid, samples)
    for row, column in grid.all_blocks(samples):
        of_context = (column + 1) * grid.block_k <= context
        tiles.add_full(row[of_context], column[of_context])
        tiles.evaluate(row[~of_context], column[~of_context], allowed)
    return tiles.layout(cls, None, samples if samples > 1 else None)


def _checked(parents: Tensor, seq_k: int) -> Tensor:
    """As [samples, nodes]."""
    if not isinstance(parents, Tensor):
        raise TypeError(f"parents must be a tensor, got {shown(parents)}")
    if parents.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"parents must be int32 or int64, got {parents.dtype}")
    if parents.ndim not in (1, 2) or 0 in parents.shape:
        raise ValueError(f"parents must have shape [nodes] or [batch, nodes], got {list(parents.shape)}")
    check_int("seq_k", seq_k, least=parents.shape[-1])
    trees = parents.reshape(-1, parents.shape[-1])
    wrong = (trees < -1) | (trees >= torch.arange(trees.shape[1], device=trees.device))
    if wrong.any():
        node = int(wrong.nonzero()[0, 1])
        raise ValueError(f"parents must be nodes before their own, or -1, got {int(trees[wrong][0])} for node {node}")
    return trees


def _places(trees: Tensor) -> tuple[Tensor, Tensor]:
    """int64 [samples, nodes] twice: the place of each node in an order in which its descendants follow it, and the
    place behind the last of them."""
    places, ends = [], []
    for parents in trees.tolist():
        size = [1] * len(parents)
        for node in range(len(parents) - 1, -1, -1):
            if parents[node] >= 0:
                size[parents[node]] += size[node]
        place, free = [0] * len(parents), [0] * (len(parents) + 1)  # free[-1]: among the roots
        for node, parent in enumerate(parents):
            place[node] = free[parent]
            free[parent] += size[node]
            free[node] = place[node] + 1
        places.append(place)
        ends.append([a + b for a, b in zip(place, size, strict=True)])
    return torch.tensor(places, device=trees.device), torch.tensor(ends, device=trees.device)
