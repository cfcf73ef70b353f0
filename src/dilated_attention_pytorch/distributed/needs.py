"""What the ranks of a ring need of each other: which keys, and the layouts of what they compute with them.

A pattern of token rules (windows, documents, chunks, global tokens, in any union and intersection that sees runs of
keys) is answered in closed form: the runs of key blocks that each rank's rows touch follow from a few numbers a row,
for all ranks at once (`pieces`). So are the branches of dilated attention, token by token (`branch_needs`). Then nobody
has to ask. For rules on blocks, lists of heads and layouts a rank builds its own rows and asks the owners.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..backends.dropout import places_of_blocks
from ..layout import BlockLayout
from ..layout.lists import BlockList
from ..layout.row_runs import RowRuns
from ..patterns import Branches, Pattern
from ..patterns.blocks import ceil_div
from .branch_needs import items_of_mask, kept_keys, most_of_branches, needs_of_branches
from .pieces import edges_of
from .work import NOTHING, Items, Needs, Part, Work, by_owner


def needs_of(work: Work, rank: int) -> dict[tuple[int, bool], Needs]:
    """What a rank needs of each rank, itself included; True stands for what all ranks get at once. Builds the rows of
    this rank and no others."""
    if isinstance(work.what, Branches):
        return needs_of_branches(work, rank)
    return _needs_of_runs(work, rank) if work.row_runs is not None else _needs_of_blocks(work, rank)


def asked_of(work: Work, rank: int, target: int) -> Items:
    """What a rank needs of this one, of its own tokens, where that has a closed form."""
    if isinstance(work.what, Branches):
        return items_of_mask(kept_keys(work, target, rank).to(work.device))
    of_pair = (work.pieces[:, 0] == target) & (work.pieces[:, 1] == rank)
    return _lying(work, work.pieces[of_pair & (work.pieces[:, 4] == 0)])


def broadcast_of(work: Work, rank: int) -> Items:
    """What all other ranks need of this one, of its own tokens, and get at once."""
    if work.row_runs is None:
        return NOTHING
    to_one = work.pieces[:, 0] == (1 if rank == 0 else 0)
    return _lying(work, work.pieces[to_one & (work.pieces[:, 1] == rank) & (work.pieces[:, 4] == 1)])


def broadcasts(work: Work) -> dict[int, int]:
    """The ranks that send something to all others at once, ascending, and how many tokens."""
    if work.row_runs is None:
        return {}
    to_all, block = work.pieces[work.pieces[:, 4] == 1], work.blocks[1]
    sources, counts = torch.unique(to_all[:, 1]), {}
    for source in sources.tolist():
        once = to_all[(to_all[:, 1] == source) & (to_all[:, 0] == (1 if source == 0 else 0))]
        counts[source] = int((once[:, 3] - once[:, 2]).sum()) * block
    return counts


def most_between(work: Work) -> list[int]:
    """The most tokens that a rank needs of another, or a bound, by their distance: the same on every rank."""
    return by_distance(most_of_branches(work) if isinstance(work.what, Branches) else tokens_between(work))


def tokens_between(work: Work) -> Tensor:
    """int64 [asking, owning]: the tokens that ranks need of each other and do not get with all others, of a pattern of
    token rules."""
    size, block = work.placements[1].world_size, work.blocks[1]
    asker, owner, start, stop, to_all = work.pieces.unbind(1)
    length = (stop * block).clamp(max=work.lengths[1]) - start * block
    apart = (to_all == 0) & (asker != owner)
    tokens = torch.zeros(size * size, dtype=torch.int64)
    return tokens.index_add_(0, (asker * size + owner)[apart], length[apart]).view(size, size)


def by_distance(tokens: Tensor) -> list[int]:
    """The largest of those that ranks need of each other, [asking, owning], at each distance from 0."""
    ranks = torch.arange(len(tokens))
    return [int(tokens[ranks, (ranks - distance) % len(tokens)].max()) for distance in range(len(tokens))]


def _lying(work: Work, sent: Tensor) -> Items:
    """The tokens of pieces, as they lie in the shard of their owner."""
    block = work.blocks[1]
    edges, first = edges_of(work.placements[1], block)
    run = torch.searchsorted(edges, sent[:, 2].contiguous(), right=True) - 1
    start = (sent[:, 2] - edges[run]) * block + first[run]
    length = (sent[:, 3] * block).clamp(max=work.lengths[1]) - sent[:, 2] * block
    return Items(tuple(slice(a, a + n) for a, n in zip(start.tolist(), length.tolist(), strict=True)))


def _needs_of_runs(work: Work, rank: int) -> dict[tuple[int, bool], Needs]:
    """One part for each rank: the blocks that are needed of it, which are stored one after the other."""
    assert work.row_runs is not None
    place_q, place_k = work.placements
    rows = work.row_runs.take(place_q.blocks(rank, work.blocks[0]))
    needs = {}
    dense: dict[tuple[int, int], BlockLayout] = {}
    bounds = rows.key_bounds(work.device)
    own = work.pieces[work.pieces[:, 0] == rank]
    for source, everyone in torch.unique(own[:, [1, 4]], dim=0).tolist():
        columns = own[(own[:, 1] == source) & (own[:, 4] == everyone)][:, 2:4]
        if source == rank:  # they lie there already
            starts = [(run.start // work.blocks[1], ceil_div(run.stop, work.blocks[1])) for run in place_k.tokens(rank)]
            columns = torch.tensor(starts)
        needs[source, bool(everyone)] = _need_of_runs(work, rows, columns, bounds, dense)
    return needs


def _need_of_runs(
    work: Work, rows: RowRuns, columns: Tensor, bounds: Tensor, dense: dict[tuple[int, int], BlockLayout]
) -> Needs:
    within = rows.rows_within(columns)
    some = rows.take(torch.arange(within.start, within.stop))
    queries = slice(within.start * work.blocks[0], within.stop * work.blocks[0])
    layout = some.layout(columns, bounds[:, queries], dense)
    stored = torch.cat([torch.arange(start, stop) for start, stop in columns.tolist()])
    part = Part(
        layout=layout,
        queries=slice(queries.start, queries.start + layout.seq_q),
        keys=slice(0, layout.seq_k),
        places=places_of_blocks(some.query_blocks, stored, work.blocks).to(work.device),
    )
    return Needs([part], layout.seq_k, Items((slice(0, layout.seq_k),)))


def _needs_of_blocks(work: Work, rank: int) -> dict[tuple[int, bool], Needs]:
    """The same of rows that are built, each block for the heads that need it."""
    (place_q, place_k), device = work.placements, work.device
    own_queries, own_keys = (
        place.blocks(rank, size).to(device) for place, size in zip(work.placements, work.blocks, strict=True)
    )
    if isinstance(work.what, BlockLayout):
        rows = work.what.take(own_queries)
    else:
        assert isinstance(work.what, Pattern)
        rows = BlockLayout.from_pattern(
            work.what, place_q.seq, place_k.seq, block_size=work.blocks, device=device, query_blocks=own_queries
        )
    which, row, column, rule = rows.entries()
    needs = {}
    for source, here in by_owner(column, work):
        # The lists of what this rank has, so that what follows costs what they hold.
        of_source = BlockList.pack(
            which[here].long() * rows.num_q_blocks + row[here], column[here], rule[here] >= 0, rule[here],
            rows.by_query.num_rows,
        )  # fmt: skip
        query_blocks = torch.arange(int(row[here].min()), int(row[here].max()) + 1, device=device)
        stored = own_keys if source == rank else torch.unique(column[here]).long()
        layout = replace(rows, by_query=of_source, checked=True).take(query_blocks, stored)
        start = int(query_blocks[0]) * work.blocks[0]
        part = Part(
            layout=layout,
            queries=slice(start, start + layout.seq_q),
            keys=slice(0, layout.seq_k),
            places=places_of_blocks(own_queries[query_blocks], stored, work.blocks),
        )
        codes = _codes(rows, which[here], column[here], work)
        needs[source, False] = Needs([part], layout.seq_k, items_of(codes, stored, work), codes)
    return needs


def _codes(rows: BlockLayout, which: Tensor, column: Tensor, work: Work) -> Tensor:
    lists = rows.num_heads or 1
    if lists == 1:
        return torch.unique(column).long()
    head = which.long() % lists * work.heads_kv // lists
    return torch.unique(column.long() * work.heads_kv + head)


def items_of(codes: Tensor, stored: Tensor, work: Work) -> Items:
    """The keys of these codes, as they lie where these blocks are stored one after the other."""
    block, head = (codes, None) if work.is_shared else (codes // work.heads_kv, codes % work.heads_kv)
    tokens = block[:, None] * work.blocks[1] + torch.arange(work.blocks[1], device=codes.device)
    inside = tokens < work.lengths[1]
    place = torch.searchsorted(stored, block)[:, None] * work.blocks[1] + (tokens - tokens[:, :1])
    return Items(place[inside], None if head is None else head[:, None].expand_as(tokens)[inside])
