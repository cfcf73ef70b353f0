"""The only definitions of pairs, FLOPs and bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..patterns.base import check_int
from .rules import key_bounds

if TYPE_CHECKING:
    from .layout import BlockLayout

# Partial blocks counted at a time.
_CHUNK = 1 << 14
# Pairs of them, where pairs must be counted one by one.
_CELLS = 1 << 24


def num_pairs(layout: BlockLayout) -> int:
    """Allowed (query, key) pairs, over all lists of the layout, counted exactly."""
    if layout.dilated and layout.seq_q == layout.seq_k and not layout.branches[..., 3:].any():
        heads = Counter(tuple(map(tuple, branches)) for branches in layout.branches.tolist())
        return sum(alike * _pairs_of_branches(layout, branches) for branches, alike in heads.items())
    _, query_block, key_block, rule = layout.entries()
    rows = (layout.queries_of(torch.arange(layout.num_q_blocks, device=layout.device)) < layout.seq_q).sum(1)
    full = rule < 0
    total = int(rows[query_block[full]].sum()) * layout.block_k
    partial = (~full).nonzero()[:, 0]
    if layout.dilated or len(layout.bitmaps):
        for chunk in partial.split(max(1, _CELLS // (layout.block_q * layout.block_k))):
            real = layout.queries_of(query_block[chunk]) < layout.seq_q
            total += int(((layout.cells(chunk) > 0) & real[:, :, None]).sum())
        return total
    for chunk in partial.split(_CHUNK):
        total += _partial_pairs(layout, query_block[chunk], key_block[chunk], rule[chunk])
    return total


def _pairs_of_branches(layout: BlockLayout, branches: tuple[tuple[int, ...], ...]) -> int:
    """A pair is held by at least one branch: by inclusion and exclusion, in tokens and never in pairs.

    Tokens that several branches keep, and that each has in one segment, are paired by all of these branches.
    """
    causal = int(layout.rules[0, 0, 1]) == 0
    total = 0
    for size in range(1, len(branches) + 1):
        for chosen in combinations(branches, size):
            kept = torch.arange(layout.seq_q, dtype=torch.int32, device=layout.device)
            for segment, dilation, offset, *_ in chosen:
                kept = kept[kept % segment % dilation == offset]
            segments = torch.stack([kept // segment for segment, *_ in chosen])
            begins = (segments[:, 1:] != segments[:, :-1]).any(0)
            ends = torch.cat((begins, begins.new_ones(min(1, len(kept))))).nonzero()[:, 0] + 1
            together = ends.diff(prepend=ends.new_zeros(1))
            pairs = together * (together + 1) // 2 if causal else together * together
            total += int(pairs.sum()) * (1 if size % 2 else -1)
    return total


def _partial_pairs(layout: BlockLayout, query_block: Tensor, key_block: Tensor, rule: Tensor) -> int:
    """A query sees a union of intervals: count by inclusion and exclusion, in rows and never in pairs."""
    query = query_block[:, None] * layout.block_q + torch.arange(layout.block_q, device=layout.device)
    key = key_block[:, None] * layout.block_k
    bounds = [
        key_bounds(interval[:, None], query, layout.seq_q, layout.seq_k, layout.documents)
        for interval in layout.rules[rule].unbind(1)
    ]
    total = 0
    for size in range(1, len(bounds) + 1):
        for chosen in combinations(bounds, size):
            first = torch.stack([lo for lo, _ in chosen]).amax(0).maximum(key)
            last = torch.stack([hi for _, hi in chosen]).amin(0).minimum(key + (layout.block_k - 1))
            seen = torch.where(query < layout.seq_q, (last - first + 1).clamp(min=0), 0)
            total += int(seen.sum()) * (1 if size % 2 else -1)
    return total


@dataclass(frozen=True, kw_only=True)
class AttentionCost:
    """What attention over a layout must do and move, at the least.

    Attributes:
        pairs: allowed (query, key) pairs of all samples and heads.
        block_pairs: the same counting active blocks whole: what a kernel without masks inside a block computes.
        forward_flops, backward_flops: two and five matrix products over the allowed pairs.
        forward_bytes: q, k, v read once, out and lse written once, and the lists by query.
        backward_bytes: q, k, v, out, do, lse read, dq, dk, dv written, and both lists.
    """

    pairs: int
    block_pairs: int
    forward_flops: int
    backward_flops: int
    forward_bytes: int
    backward_bytes: int

    @classmethod
    def of(
        cls,
        layout: BlockLayout,
        *,
        batch: int,
        heads: int,
        heads_kv: int,
        head_dim: int,
        itemsize: int,
        head_dim_v: int | None = None,
    ) -> AttentionCost:
        width_v = head_dim if head_dim_v is None else head_dim_v
        sizes = {"batch": batch, "heads": heads, "head_dim": head_dim, "itemsize": itemsize, "head_dim_v": width_v}
        for name, value in sizes.items():
            check_int(name, value, least=1)
        copies, rest = divmod(batch * heads, layout.num_lists)
        if rest:
            raise ValueError(
                f"batch · heads = {batch * heads} must be a multiple of the layout's {layout.num_lists} lists"
            )
        pairs = copies * num_pairs(layout)
        q, out = (batch * heads * layout.seq_q * width * itemsize for width in (head_dim, width_v))
        kv = batch * heads_kv * layout.seq_k * (head_dim + width_v) * itemsize
        lse = batch * heads * layout.seq_q * (8 if itemsize == 8 else 4)
        spare = len(layout.by_query.indices) - layout.num_active_blocks
        lists = sum(t.numel() * t.element_size() for t in layout.by_query.tensors())
        lists += layout.bitmaps.nbytes
        lists -= spare * 4 * (1 + (layout.by_query.rule_ids.numel() > 0))  # spare places are not read
        return cls(
            pairs=pairs,
            block_pairs=copies * layout.num_active_blocks * layout.block_q * layout.block_k,
            forward_flops=2 * pairs * (head_dim + width_v),
            backward_flops=2 * pairs * (3 * head_dim + 2 * width_v),
            forward_bytes=q + out + kv + lse + lists,
            backward_bytes=2 * (q + out) + 2 * kv + lse + 2 * lists,
        )
