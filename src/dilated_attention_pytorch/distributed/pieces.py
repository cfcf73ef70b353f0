"""Who needs which key blocks of whom, in closed form: a table that every rank makes of the same numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout.row_runs import RowRuns
from ..patterns.blocks import ceil_div
from .shard import Placement

# Below so many ranks a broadcast takes a rank as many messages as one to each of the others.
MANY_RANKS = 4


def pieces_of(rows: RowRuns, place_q: Placement, place_k: Placement) -> Tensor:
    """int64 [any, 5]: the runs of key blocks that some rows of a rank touch, cut by who holds them: the rank that asks,
    the one that has them, first block, the one behind the last, and 1 if that goes to all ranks at once."""
    needed = rows.unions(place_q.owner(rows.query_blocks * rows.blocks[0] // place_q.block_size))
    edges, _ = edges_of(place_k, rows.blocks[1])
    asker, start, stop = needed.T.contiguous()
    first = torch.searchsorted(edges, start, right=True) - 1
    count = torch.searchsorted(edges, stop - 1, right=True) - first
    which = torch.repeat_interleave(count)
    run = torch.arange(len(which)) - (count.cumsum(0) - count)[which] + first[which]
    behind = torch.cat((edges[1:], edges.new_tensor([ceil_div(place_k.seq, rows.blocks[1])])))
    owner = torch.tensor(place_k.ranks)[run]
    start, stop = torch.maximum(start[which], edges[run]), torch.minimum(stop[which], behind[run])
    return _broadcast(torch.stack((asker[which], owner, start, stop), dim=1), place_k.world_size)


def _broadcast(pieces: Tensor, size: int) -> Tensor:
    """With what all ranks need of one, as global tokens, apart from the rest: if the rank that has the most to send is
    done in half the time when these go once, from rank to rank, and not from it to each."""
    asker, owner, start, stop = pieces.unbind(1)
    far = asker != owner
    bounds = torch.unique(pieces[far, 2:])
    at, behind = torch.searchsorted(bounds, start.contiguous()), torch.searchsorted(bounds, stop.contiguous())
    asked = torch.zeros(len(bounds) + 1, dtype=torch.int64)
    asked.index_add_(0, at[far], torch.ones_like(at[far])).index_add_(0, behind[far], -torch.ones_like(at[far]))
    by_all = asked.cumsum(0)[: len(bounds) - 1] == size - 1
    apart = torch.nn.functional.pad(pieces, (0, 1))
    if size < MANY_RANKS or not by_all.any():
        return apart
    sent, length = torch.zeros(size, dtype=torch.int64), bounds.diff()
    sent.index_add_(0, owner[far], (stop - start)[far])
    starts, order = start[far].sort()
    source = owner[far][order][torch.searchsorted(starts, bounds[:-1][by_all], right=True) - 1]
    rest = sent.index_add(0, source, -(size - 1) * length[by_all])
    if 2 * int(length[by_all].sum() + rest.max()) > int(sent.max()):
        return apart
    count = torch.where(far, behind - at, 1)
    which = torch.repeat_interleave(count)
    stretch = torch.arange(len(which)) - (count.cumsum(0) - count)[which] + at[which]
    cut = apart[which]
    here = far[which]
    cut[here, 2], cut[here, 3] = bounds[stretch[here]], bounds[stretch[here] + 1]
    cut[here, 4] = by_all[stretch[here]].long()
    new = torch.ones(len(cut), dtype=torch.bool)  # neighbours of a kind are one again
    new[1:] = (cut[1:, 2] != cut[:-1, 3]) | (cut[1:, [0, 1, 4]] != cut[:-1, [0, 1, 4]]).any(1)
    joined = cut[new]
    joined[:, 3] = cut[torch.cat((new[1:], new[:1])), 3]
    return joined


def edges_of(place: Placement, block: int) -> tuple[Tensor, Tensor]:
    """Of each run of a placement the first of its blocks of this size, and its first token among those of its rank."""
    first, held = [], [0] * place.world_size
    for start, stop, rank in zip(place.starts, (*place.starts[1:], place.num_blocks), place.ranks, strict=True):
        first.append(held[rank])
        held[rank] += (stop - start) * place.block_size
    return torch.tensor(place.starts) * (place.block_size // block), torch.tensor(first)
