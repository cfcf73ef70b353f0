"""The exchange plan: which keys a rank needs of each other, and which each other needs of it.

A rank builds the layout of its own rows alone, cuts it by the owner of the keys, and asks the owners for what it needs;
the answers to that question are the plan's sends. Made once for a layout, remembered, the same on every rank.

What travels is counted in key blocks: for all heads where they share their lists, else for each key head by itself, so
that a head that keeps every fourth token asks for every fourth token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..backends.dropout import places_of_blocks, places_of_runs
from ..layout import BlockLayout, layout_of_branches
from ..layout.branches import take_keys
from ..layout.rules import num_tokens
from ..patterns import Branches, Pattern
from ..patterns.blocks import ceil_div
from .control import gather_numbers, swap
from .exchange import RingError
from .shard import Placement

CAPACITY = 100


@dataclass(frozen=True, kw_only=True)
class Work:
    """What attention over the whole sequence is, as the ranks agree on it.

    Attributes:
        what: its layout, pattern or branches; `is_causal` is for branches alone, the others know.
        placements: who holds which queries and which keys.
        blocks, num_residues: of the layout; shards are whole blocks of all residue classes.
        heads, heads_kv: of queries and keys.
    """

    what: BlockLayout | Pattern | Branches
    is_causal: bool
    placements: tuple[Placement, Placement]
    blocks: tuple[int, int]
    num_residues: int
    heads: int
    heads_kv: int
    device: torch.device

    @property
    def unit(self) -> int:
        """Keys that are stored together: a block of every class."""
        return self.blocks[1] * self.num_residues

    def tokens_of(self, key_block: Tensor) -> Tensor:
        """Key numbers [blocks, block_k]."""
        lane = torch.arange(self.blocks[1], device=key_block.device)
        per_residue = ceil_div(self.placements[1].seq, self.unit)
        row, residue = key_block % per_residue, key_block // per_residue
        return (row[:, None] * self.blocks[1] + lane) * self.num_residues + residue[:, None]


@dataclass(frozen=True, eq=False, kw_only=True)
class Part:
    """Some of a rank's queries against some keys of one rank.

    Attributes:
        layout: over these queries and keys alone.
        queries: the rank's own tokens that the layout speaks of.
        keys: and those of what is stored of the other rank's.
        places: where both stand in the whole, for dropout.
    """

    layout: BlockLayout
    queries: slice
    keys: slice
    places: Tensor


@dataclass(frozen=True, eq=False)
class Items:
    """Keys that travel: tokens, for all heads or each of one head, as they lie in a tensor (batch, tokens, heads, D).

    Attributes:
        tokens, heads: int64 [items]; heads is None where all heads travel.
        every: the tokens without repetition, for what has no heads.
    """

    tokens: Tensor
    heads: Tensor | None
    every: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def of(self, x: Tensor) -> Tensor:
        """A contiguous copy of the items of a tensor (batch, tokens) or (batch, tokens, heads, D)."""
        if x.ndim == 2:
            return x.index_select(1, self.every)
        return x.index_select(1, self.tokens) if self.heads is None else x[:, self.tokens, self.heads].contiguous()

    def shape_of(self, x: Tensor) -> tuple[int, ...]:
        if x.ndim == 2:
            return x.shape[0], len(self.every)
        return x.shape[0], len(self), *(x.shape[2:] if self.heads is None else x.shape[3:])

    def put(self, x: Tensor, given: Tensor) -> None:
        """Make these the items of a tensor."""
        if x.ndim == 2:
            x[:, self.every] = given
        else:
            x[self._places] = given

    def add(self, x: Tensor, given: Tensor) -> None:
        """Add these to the items of a tensor (batch, tokens, heads, D)."""
        x[self._places] += given.to(x.dtype)

    @property
    def _places(self) -> tuple[slice | Tensor, ...]:
        return (slice(None), self.tokens) if self.heads is None else (slice(None), self.tokens, self.heads)


@dataclass(eq=False)
class Needs:
    """What a rank needs of one rank.

    Attributes:
        codes: key blocks, or key block · heads_kv + key head, ascending.
        stored: the units, ascending, that the keys are stored in one after the other.
    """

    codes: Tensor
    stored: Tensor
    parts: list[Part] = field(default_factory=list)


@dataclass(frozen=True, eq=False, kw_only=True)
class Step:
    """One exchange: receive what `parts` need of `source`, send to `target` what it needs; either may be nothing.

    Attributes:
        received: where the keys that come are stored, among `stored_tokens`.
        sent: which of the own keys go.
    """

    source: int
    target: int
    parts: tuple[Part, ...]
    stored_tokens: int
    received: Items
    sent: Items

    @cached_property
    def in_order(self) -> bool:
        """Whether what is received is what is stored, token by token."""
        every = torch.arange(self.stored_tokens, device=self.received.tokens.device)
        return self.received.heads is None and torch.equal(self.received.tokens, every)


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """What one rank computes, receives and sends.

    Attributes:
        number: tells plans apart, the same on every rank.
        own: the parts that need no other rank.
        steps: the others, by distance in the ring; distances at which no rank needs anything are not there. All ranks
            have the same distances in the same order, so messages between two ranks never overtake each other.
    """

    number: int
    own: tuple[Part, ...]
    steps: tuple[Step, ...]


def needs_of(work: Work, rank: int) -> dict[int, Needs]:
    """What a rank needs of each rank, itself included. Builds the rows of this rank and no others."""
    return _needs_of_branches(work, rank) if isinstance(work.what, Branches) else _needs_of_blocks(work, rank)


def _needs_of_blocks(work: Work, rank: int) -> dict[int, Needs]:
    """One part for each rank: the blocks that are needed of it, gathered."""
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
    which, row, column, _ = rows.entries()
    needs = {}
    for source, here in _by_owner(column, work):
        query_blocks = torch.arange(int(row[here].min()), int(row[here].max()) + 1, device=device)
        # The own keys lie there already; of others only what is needed comes.
        stored = own_keys if source == rank else torch.unique(column[here]).long()
        layout = rows.take(query_blocks, stored)
        start = int(query_blocks[0]) * work.blocks[0]
        part = Part(
            layout=layout,
            queries=slice(start, start + layout.seq_q),
            keys=slice(0, layout.seq_k),
            places=places_of_blocks(own_queries[query_blocks], stored, work.blocks),
        )
        needs[source] = Needs(_codes(rows, which[here], column[here], work), stored, [part])
    return needs


def _needs_of_branches(work: Work, rank: int) -> dict[int, Needs]:
    """A part for every run of own queries and every run of the other's keys: neighbours, as segments are."""
    assert isinstance(work.what, Branches)
    place_q, place_k = work.placements
    needs: dict[int, Needs] = {}
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
        entry = rows.by_query.row_of_entry()
        which, column = entry // rows.num_q_blocks, rows.by_query.indices
        unit = column % (rows.num_k_blocks // work.num_residues)
        for source, here in _by_owner(unit * (work.unit // work.blocks[1]), work):
            for start, stop in ((r.start, r.stop) for r in runs_of[source]):
                inside = here & (unit * work.unit >= start) & (unit * work.unit < stop)
                if not inside.any():
                    continue
                first, last = int(unit[inside].min()), int(unit[inside].max())
                keys = range(first * work.unit, min((last + 1) * work.unit, stop))
                layout = take_keys(rows, keys)
                part = Part(
                    layout=layout,
                    queries=slice(begin, begin + len(queries)),
                    keys=slice(keys.start, keys.stop),  # of the whole; of what is stored below
                    places=places_of_runs(queries.start, keys.start, work.device),
                )
                need = needs.setdefault(source, Needs(column.new_empty(0).long(), column.new_empty(0).long()))
                need.parts.append(part)
                need.codes = torch.cat((need.codes, _codes(rows, which[inside], column[inside], work)))
                need.stored = torch.cat((need.stored, torch.arange(first, last + 1, device=work.device)))
        begin += len(queries)
    for source, need in needs.items():
        need.codes = torch.unique(need.codes)
        need.stored = place_k.blocks(rank, work.unit).to(work.device) if source == rank else torch.unique(need.stored)
        need.parts = [_stored(part, need.stored, work.unit) for part in need.parts]
    return needs


def _stored(part: Part, stored: Tensor, unit: int) -> Part:
    start = int(torch.searchsorted(stored, part.keys.start // unit)) * unit
    keys = slice(start, start + part.layout.seq_k)
    return Part(layout=part.layout, queries=part.queries, keys=keys, places=part.places)


def _by_owner(key_block: Tensor, work: Work) -> Iterator[tuple[int, Tensor]]:
    """Each rank that holds some of these key blocks (of one class), and which of them."""
    place = work.placements[1]
    owners = place.owner(key_block.long() * work.blocks[1] // place.block_size)
    for source in torch.unique(owners).tolist():
        yield source, owners == source


def _codes(rows: BlockLayout, which: Tensor, column: Tensor, work: Work) -> Tensor:
    lists = rows.num_heads or 1
    if lists == 1:
        return torch.unique(column).long()
    head = which.long() % lists * work.heads_kv // lists
    return torch.unique(column.long() * work.heads_kv + head)


def items_of(codes: Tensor, stored: Tensor, shared: bool, work: Work) -> Items:
    """The keys of these codes, as they lie where these units are stored one after the other."""
    block, head = (codes, None) if shared else (codes // work.heads_kv, codes % work.heads_kv)
    tokens = work.tokens_of(block)
    inside = tokens < work.placements[1].seq
    place = torch.searchsorted(stored, tokens // work.unit) * work.unit + tokens % work.unit
    heads = None if head is None else head[:, None].expand_as(tokens)[inside]
    place = place[inside]
    return Items(place, heads, place if heads is None else torch.unique(place))


def make_plan(number: int, work: Work, group: dist.ProcessGroup) -> Plan:
    """The plan of this rank. All ranks of the group call it together."""
    rank, size, what = dist.get_rank(group), dist.get_world_size(group), "the exchange of plans"
    needs = needs_of(work, rank)
    nothing = torch.empty(0, dtype=torch.int64)
    codes = [needs[source].codes.cpu() if source in needs and source != rank else nothing for source in range(size)]
    counts = gather_numbers(group, [len(each) for each in codes], what)
    asked_by = swap(group, codes, counts[:, rank].tolist(), what)
    ranks = torch.arange(size)
    own = work.placements[1].blocks(rank, work.unit).to(work.device)
    shared = share_lists(work)
    steps = []
    for distance in range(1, size):
        if not counts[ranks, (ranks - distance) % size].any():
            continue
        source, target = (rank - distance) % size, (rank + distance) % size
        asked = asked_by[target].to(work.device)
        first = work.tokens_of(asked if shared else asked // work.heads_kv)[:, 0]
        if not torch.isin(first // work.unit, own).all():
            raise RingError(f"rank {target} asks rank {rank} for keys that it does not hold")
        need = needs.get(source, Needs(nothing.to(work.device), nothing.to(work.device)))
        steps.append(
            Step(
                source=source,
                target=target,
                parts=tuple(need.parts),
                stored_tokens=num_tokens(need.stored, work.unit, work.placements[1].seq),
                received=items_of(need.codes, need.stored, shared, work),
                sent=items_of(asked, own, shared, work),
            )
        )
    return Plan(number=number, own=tuple(needs[rank].parts) if rank in needs else (), steps=tuple(steps))


def share_lists(work: Work) -> bool:
    """Whether all heads need the same keys."""
    if isinstance(work.what, BlockLayout):
        return (work.what.num_heads or 1) == 1
    if isinstance(work.what, Branches):
        return len({work.what.of_head(head, work.heads) for head in range(work.heads)}) == 1
    return len(getattr(work.what, "patterns", ())) <= 1


_plans: WeakKeyDictionary[dist.ProcessGroup, OrderedDict[Hashable, Plan]] = WeakKeyDictionary()


def remembered_plan(group: dist.ProcessGroup, key: Hashable) -> Plan | None:
    plans = _plans.get(group)
    if plans is None or key not in plans:
        return None
    plans.move_to_end(key)
    return plans[key]


def remember_plan(group: dist.ProcessGroup, key: Hashable, plan: Plan) -> None:
    plans = _plans.setdefault(group, OrderedDict())
    plans[key] = plan
    plans.move_to_end(key)
    if len(plans) > CAPACITY:
        plans.popitem(last=False)
