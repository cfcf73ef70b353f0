"""Token rules as tensors: which keys a query sees inside a partial block.

`rules` is int32 [num_rules, num_intervals, 5]; a rule is the union of its intervals (`patterns.tokens.Interval`, one
per row; an unused row is empty). `documents` is int32 [2 · ranges, seq_q]: of each range of keys the first key of every
query, and the key behind the last, such as those of its document. An interval whose `key_range` is negative names a
bitmap (`layout.bitmaps`): it allows what its bounds and the bitmap allow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..patterns.tokens import UNBOUNDED, Interval

# Unused places of the table: no query is below 0 − UNBOUNDED, so nothing is seen.
NOTHING = Interval(query_stop=-(2**30))

NO_DOCUMENTS = torch.empty(2, 0, dtype=torch.int32)
NO_BRANCHES = torch.empty(0, 0, 5, dtype=torch.int32)


def key_bounds(interval: Tensor, query: Tensor, seq_q: int, seq_k: int, documents: Tensor) -> tuple[Tensor, Tensor]:
    """First and last key that each query sees; last < first where it sees none.

    Args:
        interval: [..., 5], broadcast against `query`.
        query: query numbers; those of `seq_q` and beyond stand for padding, and their bounds are unused.
    """
    left, right, key_stop, query_stop, key_range = interval.unbind(-1)
    position = query + (seq_k - seq_q)
    first = (position - left).clamp(min=0)
    last = torch.minimum(position + right, key_stop - 1).clamp(max=seq_k - 1)
    last = torch.where(position < query_stop, last, -1)
    if documents.numel():
        row, column = 2 * key_range.clamp(min=1).long() - 2, query.clamp(max=seq_q - 1).long()
        start, stop = documents[row, column], documents[row + 1, column]
        first = torch.where(key_range > 0, torch.maximum(first, start), first)
        last = torch.where(key_range > 0, torch.minimum(last, stop - 1), last)
    return first, last


def moved(interval: Tensor, query_by: Tensor, key_by: Tensor) -> Tensor:
    """The same intervals [..., 5] with positions of queries counted from `query_by` and those of keys from `key_by`."""
    query_by, key_by = torch.broadcast_tensors(query_by, key_by)
    steps = torch.stack((key_by - query_by, query_by - key_by, -key_by, -query_by), dim=-1)
    bounds, key_range = interval[..., :4], interval[..., 4:]
    new = torch.where(bounds == UNBOUNDED, UNBOUNDED, (bounds + steps).clamp(-UNBOUNDED, UNBOUNDED))
    return torch.cat((new, key_range.expand(*new.shape[:-1], 1)), dim=-1)


def num_tokens(blocks: Tensor, block: int, seq: int) -> int:
    """Tokens of these blocks (ascending) of a sequence, of which only the last block may be cut."""
    return 0 if not len(blocks) else len(blocks) * block - max(0, (int(blocks[-1]) + 1) * block - seq)
