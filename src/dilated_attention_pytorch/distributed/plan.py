"""The exchange plan: which keys a rank needs of each other, and which each other needs of it.

Where what a rank needs has a closed form (`needs`), every rank makes its plan by itself. Else a rank asks the owners
for what its rows need, and the answers to that question are the plan's sends: all ranks make such a plan together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..caches import register_cache
from .control import gather_numbers, swap
from .exchange import RingError
from .needs import asked_of, broadcast_of, broadcasts, by_distance, items_of, most_between, needs_of
from .work import NOTHING, Items, Needs, Part, Work


@dataclass(frozen=True, eq=False, kw_only=True)
class Step:
    """One exchange: receive what `parts` need of `source`, send to `target` what it needs; either may be nothing.

    Attributes:
        target: None where all ranks receive the same of `source`, at once.
        received: where the keys that come are stored, among `stored_tokens`.
        sent: which of the own keys go.
    """

    source: int
    target: int | None
    parts: tuple[Part, ...]
    stored_tokens: int
    received: Items
    sent: Items

    @cached_property
    def in_order(self) -> bool:
        """Whether what is received is what is stored, token by token."""
        return self.received.is_all_of(self.stored_tokens)


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """What one rank computes, receives and sends.

    Attributes:
        number: tells plans apart, the same on every rank.
        own: the parts that need no other rank.
        steps: the others: what one rank sends to all, by that rank, then the messages between two ranks, by distance in
            the ring; distances at which no rank needs anything are not there.
        is_closed: whether every rank makes it by itself.
        begun: how many steps have begun before the own parts are computed, before the first step is, and so on.

    All ranks have the same steps, in the same order, and begin them at the same places, so messages between two ranks
    never overtake each other.
    """

    number: int
    is_closed: bool
    own: tuple[Part, ...]
    steps: tuple[Step, ...]
    begun: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that it holds, those that calls have derived included."""
        held: dict[int, Tensor] = {}
        for items in (items for step in self.steps for items in (step.received, step.sent)):
            held |= {id(x): x for x in items.tensors()}
        for part in (*self.own, *(part for step in self.steps for part in step.parts)):
            held |= {id(x): x for x in (*part.layout.tensors(), part.places)}
        return sum(x.numel() * x.element_size() for x in held.values())


def make_plan(number: int, work: Work, group: dist.ProcessGroup) -> Plan:
    """The plan of this rank. All ranks of the group call it together, unless `work.is_closed`."""
    rank = dist.get_rank(group)
    if work.is_closed:
        return plan_of(number, work, rank)
    needs = needs_of(work, rank)
    asked, most = _asked(work, group, {source: need for (source, _), need in needs.items() if source != rank})
    return _planned(number, work, rank, needs, asked, most)


def plan_of(number: int, work: Work, rank: int) -> Plan:
    """The plan of any rank, of what has a closed form."""
    others = [target for target in range(work.placements[1].world_size) if target != rank]
    asked = {target: asked_of(work, rank, target) for target in others}
    return _planned(number, work, rank, needs_of(work, rank), asked, most_between(work))


def _planned(
    number: int,
    work: Work,
    rank: int,
    needs: dict[tuple[int, bool], Needs],
    asked: dict[int, Items],
    most: list[int],
) -> Plan:
    size = work.placements[1].world_size
    steps, tokens = [], []
    for source, length in broadcasts(work).items():
        need = needs.get((source, True), Needs())
        steps.append(_step(source, None, need, broadcast_of(work, rank) if source == rank else NOTHING))
        tokens.append(length)
    for distance in range(1, size):
        if most[distance]:
            source, target = (rank - distance) % size, (rank + distance) % size
            steps.append(_step(source, target, needs.get((source, False), Needs()), asked[target]))
            tokens.append(most[distance])
    own = needs.get((rank, False), Needs())
    shard = max(work.placements[1].lengths)
    return Plan(
        number=number,
        is_closed=work.is_closed,
        own=tuple(own.parts),
        steps=tuple(steps),
        begun=_begun(tokens, shard),
    )


def _begun(tokens: list[int], most: int) -> tuple[int, ...]:
    """How many steps, which carry so many tokens, are begun at each place: one ahead of what is computed, and further
    ahead while no more than so many tokens are on their way."""
    begun, number = [], 0
    for here in range(len(tokens) + 1):
        number = max(number, min(here + 1, len(tokens)))
        while number < len(tokens) and sum(tokens[here : number + 1]) <= most:
            number += 1
        begun.append(number)
    return tuple(begun)


def _step(source: int, target: int | None, need: Needs, sent: Items) -> Step:
    return Step(
        source=source,
        target=target,
        parts=tuple(need.parts),
        stored_tokens=need.stored_tokens,
        received=need.received,
        sent=sent,
    )


def _asked(work: Work, group: dist.ProcessGroup, needs: dict[int, Needs]) -> tuple[dict[int, Items], list[int]]:
    """What each rank asks of this one, of its own tokens, where nobody knows what another needs; and `most_between`."""
    rank, size, what = dist.get_rank(group), dist.get_world_size(group), "the exchange of plans"
    codes = [torch.empty(0, dtype=torch.int64) for _ in range(size)]
    for source, need in needs.items():
        assert need.codes is not None
        codes[source] = need.codes.cpu()
    counts = gather_numbers(group, [len(each) for each in codes], what)
    asked_by = swap(group, codes, counts[:, rank].tolist(), what)
    own = work.placements[1].blocks(rank, work.blocks[1]).to(work.device)
    asked = {}
    for target, given in enumerate(asked_by):
        if target != rank:
            of_target = given.to(work.device)
            block = of_target if work.is_shared else of_target // work.heads_kv
            if not torch.isin(block, own).all():
                raise RingError(f"rank {target} asks rank {rank} for keys that it does not hold")
            asked[target] = items_of(of_target, own, work)
    tokens = -(-counts * work.blocks[1] // (1 if work.is_shared else work.heads_kv))
    return asked, by_distance(tokens)


_plans: WeakKeyDictionary[dist.ProcessGroup, OrderedDict[Hashable, Plan]] = WeakKeyDictionary()
MOST_BYTES = 256 << 20


def _remembered() -> list[Plan]:
    return [plan for plans in [*_plans.values()] for plan in [*plans.values()]]


register_cache(
    "distributed.plan._plans",
    f"exchange plans of rings, up to {MOST_BYTES >> 20} MiB in each process group",
    bound=None,
    entries=lambda: len(_remembered()),
    clear=_plans.clear,
    nbytes=lambda: sum(plan.nbytes for plan in _remembered()),
)


def remembered_plan(group: dist.ProcessGroup, key: Hashable) -> Plan | None:
    plans = _plans.get(group)
    if plans is None or key not in plans:
        return None
    plans.move_to_end(key)
    return plans[key]


def remember_plan(group: dist.ProcessGroup, key: Hashable, plan: Plan) -> None:
    """The newest are kept; the last one always is. A plan grows when it is used: by the lists that backward needs."""
    plans = _plans.setdefault(group, OrderedDict())
    plans[key] = plan
    plans.move_to_end(key)
    total = sum(each.nbytes for each in plans.values())
    while total > MOST_BYTES and len(plans) > 1:
        total -= plans.popitem(last=False)[1].nbytes
