"""What ranks need of each other for the branches of dilated attention, in closed form, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from ..backends.dropout import places_of_runs
from ..layout import layout_of_branches
from ..layout.branches import take_keys
from ..layout.rules import num_tokens
from ..patterns import Branches
from ..patterns.blocks import ceil_div
from .shard import Placement
from .work import Items, Needs, Part, Work, by_owner


def needs_of_branches(work: Work, rank: int) -> dict[tuple[int, bool], Needs]:
    """A part for every run of own queries and every run of the other's keys: neighbours, as segments are.

    Of the keys of a part only those come that a head's queries count; the others are zeros, in blocks that are counted
    pair by pair.
    """
    assert isinstance(work.what, Branches)
    place_q, place_k = work.placements
    needs: dict[int, Needs] = {}
    units: dict[int, list[Tensor]] = {}
    runs_of = {source: place_k.tokens(source) for source in range(place_k.world_size)}
    begin = 0
    for run in place_q.tokens(rank):
        queries = range(run.start, run.stop)
        rows = layout_of_branches(
            work.what,
            place_q.seq,
            place_k.seq,
            num_heads=work.heads,
            is_causal=work.is_causal,
            block_size=work.blocks[0],
            num_residues=work.num_residues,
            device=work.device,
            queries=queries,
        )
        unit = rows.by_query.indices % (rows.num_k_blocks // work.num_residues)
        for source, here in by_owner(unit * (work.unit // work.blocks[1]), work):
            for start, stop in ((r.start, r.stop) for r in runs_of[source]):
                inside = unit[here]
                inside = inside[(inside * work.unit >= start) & (inside * work.unit < stop)]
                if not len(inside):
                    continue
                first, last = int(inside.min()), int(inside.max())
                keys = range(first * work.unit, min((last + 1) * work.unit, stop))
                part = Part(
                    layout=take_keys(rows, keys),
                    queries=slice(begin, begin + len(queries)),
                    keys=slice(keys.start, keys.stop),  # of the whole; of what is stored below
                    places=places_of_runs(queries.start, keys.start, work.device),
                )
                needs.setdefault(source, Needs()).parts.append(part)
                units.setdefault(source, []).append(torch.arange(first, last + 1))
        begin += len(queries)
    for source, need in needs.items():
        stored = place_k.blocks(rank, work.unit) if source == rank else torch.unique(torch.cat(units[source]))
        need.parts = [_stored(part, stored, work.unit) for part in need.parts]
        need.stored_tokens = num_tokens(stored, work.unit, place_k.seq)
        if source != rank:
            need.received = _received(work, rank, source, stored)
    return {(source, False): need for source, need in needs.items() if source == rank or len(need.received)}


def _stored(part: Part, stored: Tensor, unit: int) -> Part:
    start = int(torch.searchsorted(stored, part.keys.start // unit)) * unit
    return replace(part, keys=slice(start, start + part.layout.seq_k))


def _received(work: Work, rank: int, source: int, stored: Tensor) -> Items:
    """The keys of a rank that the branches of another count, as they lie where these units are stored."""
    items = items_of_mask(kept_keys(work, rank, source))
    whole = torch.cat([torch.arange(run.start, run.stop) for run in work.placements[1].tokens(source)])
    assert isinstance(items.tokens, Tensor)
    token = whole[items.tokens]
    place = torch.searchsorted(stored, token // work.unit) * work.unit + token % work.unit
    return Items(place.to(work.device), None if items.heads is None else items.heads.to(work.device))


def items_of_mask(kept: Tensor) -> Items:
    """Of a mask [lists, tokens]: for all heads if there is one list, else of the key head of each list."""
    if len(kept) == 1:
        return Items(kept[0].nonzero().flatten())
    tokens, heads = kept.T.nonzero().unbind(1)
    return Items(tokens, heads)


def kept_keys(work: Work, asker: int, owner: int) -> Tensor:
    """bool [key heads, tokens of the owner], or [1, …] if they are alike: the keys that count for a query of the asker.

    In each segment that both reach into: those that the branch keeps, if it keeps a query of the asker there, and with
    causal attention up to the last one."""
    assert isinstance(work.what, Branches)
    place_q, place_k = work.placements
    ahead = place_k.seq - place_q.seq
    queries = [(max(run.start + ahead, 0), run.stop + ahead) for run in place_q.tokens(asker)]
    keys = place_k.tokens(owner)
    lists = 1 if work.is_shared else work.heads_kv
    of_lists = dict.fromkeys(
        (head * lists // work.heads, work.what.of_head(head, work.heads)) for head in range(work.heads)
    )
    kept = torch.zeros(lists, sum(run.stop - run.start for run in keys), dtype=torch.bool)
    starts = accumulate((run.stop - run.start for run in keys), initial=0)
    for run, at in zip(keys, starts, strict=False):
        for which, branches in of_lists:
            for branch in branches:
                for start, stop in _progressions(branch, queries, run, work.is_causal):
                    kept[which, at + start - run.start : at + stop - run.start : branch[1]] = True
    return kept


def _progressions(
    branch: tuple[int, int, int], queries: Sequence[tuple[int, int]], keys: slice, is_causal: bool
) -> Iterator[tuple[int, int]]:
    """The first of a run of keys that a branch keeps in each segment for one of these queries, and where they end."""
    w, r, offset = branch
    for begin, end in queries:
        for segment in range(max(begin, keys.start) // w, (min(end, keys.stop) - 1) // w + 1) if end > 0 else ():
            first, behind = segment * w + offset, (segment + 1) * w
            last = min(end, behind) - 1
            last -= (last - first) % r
            start = first + max(0, ceil_div(keys.start - first, r)) * r
            stop = min(keys.stop, behind, last + 1 if is_causal else behind)
            if last >= max(begin, first) and start < stop:
                yield start, stop


def most_of_branches(work: Work) -> Tensor:
    """int64 [asking, owning]: tokens that ranks may need of each other: all, if a segment reaches into both."""
    assert isinstance(work.what, Branches)
    place_q, place_k = work.placements
    size = place_k.world_size
    tokens = torch.zeros(size, size, dtype=torch.int64)
    (asker, a, b), (owner, c, d) = _runs(place_q, place_k.seq - place_q.seq), _runs(place_k, 0)
    for w in dict.fromkeys(work.what.segment_lengths):
        reach = torch.maximum(a[:, None], c) // w <= (torch.minimum(b[:, None], d) - 1) // w
        row, column = (reach & (b[:, None] > 0)).nonzero().unbind(1)
        tokens[asker[row], owner[column]] = max(place_k.lengths)
    return tokens.fill_diagonal_(0)


def _runs(place: Placement, ahead: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each run of a placement its rank, its first position and the one behind the last."""
    runs = [
        (rank, run.start + ahead, run.stop + ahead) for rank in range(place.world_size) for run in place.tokens(rank)
    ]
    rank, start, stop = torch.tensor(runs).unbind(1)
    return rank, start.clamp(min=0), stop
