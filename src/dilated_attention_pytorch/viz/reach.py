"""What a query depends on after so many layers of the same attention.

A layer lets a query see the keys that the layout allows it, in any head; through the next layer it also sees what
those saw. What a query has reached it keeps, as a residual stream does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import BlockLayout
from ..patterns.base import check_int
from .states import list_number

# Pairs of partial blocks that are looked at together.
_PAIRS = 1 << 24


def keys_of_query(layout: BlockLayout, query: int, *, head: int = 0, sample: int = 0) -> Tensor:
    """bool [seq_k] on the CPU: the keys that a query sees in one head."""
    chosen = torch.zeros(layout.seq_q, dtype=torch.bool, device=layout.device)
    chosen[_checked(layout, query)] = True
    which = layout.entries()[0]
    return _seen(layout, chosen, which == list_number(layout, head, sample)).cpu()


def layers_needed(layout: BlockLayout, query: int, layers: int, *, sample: int = 0) -> Tensor:
    """int16 [seq_k] on the CPU: after how many layers a query depends on each token, at most `layers`; 0 is never.

    Args:
        layout: of as many queries as keys; every layer has the same.
    """
    check_int("layers", layers, least=1)
    if layout.seq_q != layout.seq_k:
        raise ValueError(f"layers follow one another with as many queries as keys, got {layout.lengths}")
    which = layout.entries()[0]
    heads = layout.num_heads or 1
    mine = which // heads == (sample if (layout.batch_size or 1) > 1 else 0)
    new = torch.zeros(layout.seq_q, dtype=torch.bool, device=layout.device)
    new[_checked(layout, query)] = True
    asked = new.clone()
    needed = torch.zeros(layout.seq_k, dtype=torch.int16, device=layout.device)
    for layer in range(1, layers + 1):
        seen = _seen(layout, new, mine)
        needed[seen & (needed == 0)] = layer
        new = seen & ~asked
        if not new.any():
            break
        asked |= new
    return needed.cpu()


def _seen(layout: BlockLayout, queries: Tensor, entries: Tensor) -> Tensor:
    """bool [seq_k]: the keys that at least one of these queries sees, in these of the layout's entries."""
    _, query_block, key_block, rule = layout.entries()
    rows = layout.queries_of(torch.arange(layout.num_q_blocks, device=layout.device))
    asking = _at(queries, rows)
    entries = entries & asking.any(1)[query_block]
    found = torch.zeros(layout.num_k_blocks * layout.block_k + 1, dtype=torch.bool, device=layout.device)
    behind = len(found) - 1  # where padding goes
    full = key_block[entries & (rule < 0)].unique()
    found[layout.keys_of(full).clamp(max=behind)] = True
    partial = (entries & (rule >= 0)).nonzero()[:, 0]
    for chunk in partial.split(max(1, _PAIRS // (layout.block_q * layout.block_k))):
        seen = ((layout.cells(chunk) > 0) & asking[query_block[chunk]][:, :, None]).any(1)
        found[layout.keys_of(key_block[chunk])[seen].clamp(max=behind)] = True
    return found[: layout.seq_k]


def _at(chosen: Tensor, places: Tensor) -> Tensor:
    """Of these places; those behind the end are not."""
    padded = torch.cat((chosen, chosen.new_zeros(1)))
    return padded[places.clamp(max=len(chosen))]


def _checked(layout: BlockLayout, query: int) -> int:
    check_int("query", query, least=0)
    if query >= layout.seq_q:
        raise ValueError(f"query must be below {layout.seq_q}, got {query}")
    return query
