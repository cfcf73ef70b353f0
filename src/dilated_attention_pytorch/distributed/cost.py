"""What a ring costs, by arithmetic: bytes, steps and time of any pattern on any number of devices.

The bytes are those of the exchange plan, which is made here for one rank after the other without any communication;
tests compare them with what rings of processes really send. Time is a model: each step computes at the given rate while
the next step's keys arrive at the given bandwidth. What fits is `planning.plan_memory`'s to say.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import inf

import torch

from ..layout import BlockLayout
from ..layout.branches import cheapest_blocks
from ..patterns import Branches, Causal, Pattern, PerHead
from ..patterns.base import check_flag, check_int
from ..patterns.blocks import check_block_size
from .needs import broadcasts, needs_of, tokens_between
from .shard import Placement
from .work import Needs, Work


@dataclass(frozen=True, kw_only=True)
class RingCost:
    """One layer of attention over a ring; of the slowest of the ranks that were looked at, where ranks differ.

    Attributes:
        tokens: a rank's part of the sequence.
        steps: exchanges in which a rank receives something.
        received_bytes: keys and values that a rank receives forward; backward receives them once more, and sends as
            many bytes of gradients back.
        sent_bytes: keys and values that a rank sends forward; backward sends them once more, and receives as many bytes
            of gradients. Exact if all ranks were looked at; see `ring_cost`.
        full_ring_bytes: what passing all keys and values around would be, and also what gathering them all would.
        forward_seconds, backward_seconds: by the model.
        balance: work of the slowest rank ÷ mean work.
    """

    seq: int
    world_size: int
    tokens: int
    steps: int
    received_bytes: int
    sent_bytes: int
    full_ring_bytes: int
    forward_seconds: float
    backward_seconds: float
    balance: float


def ring_cost(
    what: BlockLayout | Pattern | Branches,
    seq: int,
    world_size: int,
    *,
    heads: int,
    head_dim: int,
    heads_kv: int | None = None,
    head_dim_v: int | None = None,
    batch: int = 1,
    itemsize: int = 2,
    is_causal: bool = False,
    placement: Placement | None = None,
    block_size: int = 128,
    flops: float,
    bandwidth: float,
    latency: float = 10e-6,
    agreement: float = 0.0,
    num_ranks: int = 8,
) -> RingCost:
    """The cost of a layer of attention over a ring.

    Args:
        what: a layout, a pattern, or `Branches` for dilated attention.
        head_dim_v: of v, where it is another than that of q and k.
        placement: who holds which tokens; contiguous by default.
        flops: floating-point operations a second that attention reaches on a device.
        bandwidth, latency: bytes a second between devices, each way, and seconds that a message takes besides.
        agreement: seconds that a call waits to hear that all ranks make it; none where that travels with the exchange.
        num_ranks: how many ranks, evenly spread from the first to the last, are looked at; of patterns of token rules
            also those that receive and send most of all, and the bytes between all ranks. Else a rank that is not
            looked at is taken to receive at each distance the most that any of them does there, and of each of them the
            least that they do.
    """
    heads_kv = heads if heads_kv is None else heads_kv
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    numbers = {
        "seq": seq, "world_size": world_size, "heads": heads, "heads_kv": heads_kv, "head_dim": head_dim,
        "head_dim_v": head_dim_v, "batch": batch, "itemsize": itemsize, "num_ranks": num_ranks,
    }  # fmt: skip
    rates = {"flops": flops, "bandwidth": bandwidth, "latency": latency, "agreement": agreement}
    _check_numbers(numbers, rates)
    _check_what(what, seq, heads, heads_kv)
    check_flag("is_causal", is_causal)
    check_block_size("block_size", block_size)
    placement = Placement.contiguous(seq, world_size, block_size=block_size) if placement is None else placement
    _check_placement(placement, seq, world_size)
    work = _work_of(what, placement, is_causal, block_size, heads, heads_kv)
    ranks = _spread(min(num_ranks, world_size), world_size)
    a_token = heads_kv * batch * (head_dim + head_dim_v) * itemsize
    needs = {rank: needs_of(work, rank) for rank in ranks}
    messages = _Messages(world_size, {source: tokens * a_token for source, tokens in broadcasts(work).items()})
    if work.row_runs is not None:
        messages.received |= _of_pieces(work, a_token)
        ranks = sorted({*ranks, *messages.extremes()})
        needs |= {rank: needs_of(work, rank) for rank in ranks if rank not in needs}
    for rank in ranks:
        a_key = a_token if work.is_shared else a_token // heads_kv
        of_sources = {source: need for (source, everyone), need in needs[rank].items() if not everyone}
        messages.received[rank] = {
            source: len(need.received) * a_key for source, need in of_sources.items() if source != rank
        }
    rates_of_work = flops / (2.0 * (head_dim + head_dim_v) * batch), bandwidth, latency, agreement
    seen = [_RankCost.of(work, rank, needs[rank], messages, rates_of_work) for rank in ranks]
    tokens = max(placement.lengths)
    mean = sum(cost.work for cost in seen) / len(seen)
    return RingCost(
        seq=seq,
        world_size=world_size,
        tokens=tokens,
        steps=max(map(messages.num_received, ranks)),
        received_bytes=max(sum(messages.of_rank(rank)[0]) for rank in ranks),
        sent_bytes=max(sum(messages.of_rank(rank)[1]) for rank in ranks),
        full_ring_bytes=(seq - min(placement.lengths)) * a_token,
        forward_seconds=max(cost.forward for cost in seen),
        backward_seconds=max(cost.backward for cost in seen),
        balance=max(cost.work for cost in seen) / mean,
    )


def _of_pieces(work: Work, a_token: int) -> dict[int, dict[int, int]]:
    """Bytes that each rank receives of each other alone."""
    tokens = tokens_between(work)
    return {
        rank: {source: int(tokens[rank, source]) * a_token for source in tokens[rank].nonzero().flatten().tolist()}
        for rank in range(len(tokens))
    }


def _check_numbers(numbers: dict[str, int], rates: dict[str, float]) -> None:
    for name, number in numbers.items():
        check_int(name, number, least=1)
    for name, rate in rates.items():
        if not isinstance(rate, int | float) or isinstance(rate, bool):
            raise TypeError(f"{name} must be a number, got {rate!r}")
        may_be_none = name in ("latency", "agreement")
        if not ((rate > 0 or (may_be_none and rate == 0)) and rate < inf):
            raise ValueError(f"{name} must be finite and {'not negative' if may_be_none else 'positive'}, got {rate}")


def _check_what(what: object, seq: int, heads: int, heads_kv: int) -> None:
    if not isinstance(what, BlockLayout | Pattern | Branches):
        raise TypeError(f"what must be a BlockLayout, a Pattern or Branches, got {type(what).__name__}")
    if heads % heads_kv:
        raise ValueError(f"heads must be a multiple of heads_kv, got {heads} and {heads_kv}")
    lists = None
    if isinstance(what, BlockLayout):
        lists = what.num_heads
        if what.lengths != (seq, seq):
            raise ValueError(f"what must be a layout for seq, {seq} queries and keys, got one for {what.lengths}")
    elif isinstance(what, PerHead):
        lists = len(what.patterns)
    if lists not in (None, 1, heads, heads_kv):
        raise ValueError(f"what must have lists for all heads together, {heads} heads or {heads_kv}, got {lists}")


def _check_placement(placement: Placement, seq: int, world_size: int) -> None:
    if not isinstance(placement, Placement):
        raise TypeError(f"placement must be a Placement, got {type(placement).__name__}")
    if (placement.seq, placement.world_size) != (seq, world_size):
        raise ValueError(
            f"placement must be of seq and world_size, {seq} tokens on {world_size} ranks, got one of {placement.seq} "
            f"on {placement.world_size}"
        )


def _work_of(
    what: BlockLayout | Pattern | Branches,
    placement: Placement,
    is_causal: bool,
    block_size: int,
    heads: int,
    heads_kv: int,
) -> Work:
    blocks, num_residues = (block_size, block_size), 1
    if isinstance(what, Branches):
        block, num_residues = cheapest_blocks(what, placement.seq, cut=placement.cut or None)
        blocks = block, block
    elif isinstance(what, BlockLayout):
        blocks, what = what.blocks, what.causal if is_causal else what
    else:
        what = what & Causal() if is_causal else what
        size = min((*what.block_sizes, block_size, placement.block_size))
        blocks = size, size
    return Work(
        what=what,
        is_causal=is_causal,
        placements=(placement, placement),
        blocks=blocks,
        num_residues=num_residues,
        heads=heads,
        heads_kv=heads_kv,
        device=torch.device("cpu"),
    )


def _spread(number: int, world_size: int) -> list[int]:
    """So many ranks, from the first to the last; one alone is the last, which has the most to do in a causal model."""
    return [(world_size - 1) * i // (number - 1) for i in range(number)] if number > 1 else [world_size - 1]


@dataclass(eq=False)
class _Messages:
    """Bytes of keys and values between ranks, forward.

    Attributes:
        to_all: that a rank sends to all others at once.
        received: besides, by the ranks that were looked at, of each rank that sends them something.
    """

    world_size: int
    to_all: dict[int, int]
    received: dict[int, dict[int, int]] = field(default_factory=dict)

    def of_rank(self, rank: int) -> tuple[list[int], list[int]]:
        """What it receives and what it sends, step by step: what goes to all, then at each distance, from 1."""
        size, own = self.world_size, self.received[rank]
        received = [0 if source == rank else number for source, number in self.to_all.items()]
        sent = [number if source == rank else 0 for source, number in self.to_all.items()]
        received += [own.get((rank - distance) % size, 0) for distance in range(1, size)]
        return received, sent + self._sent(rank)

    def num_received(self, rank: int) -> int:
        return sum(number > 0 for number in self.of_rank(rank)[0])

    def extremes(self) -> set[int]:
        """Of all ranks those that receive most and send most."""
        sums = [[sum(each) for each in self.of_rank(rank)] for rank in range(self.world_size)]
        return {max(range(self.world_size), key=lambda rank: sums[rank][way]) for way in (0, 1)}

    def _sent(self, rank: int) -> list[int]:
        of_rank = [received.get(rank, 0) for other, received in self.received.items() if other != rank]
        least = min(of_rank, default=0)
        targets = ((rank + distance) % self.world_size for distance in range(1, self.world_size))
        return [
            self.received[target].get(rank, 0) if target in self.received else max(least, self._most[distance])
            for distance, target in enumerate(targets, start=1)
        ]

    @cached_property
    def _most(self) -> list[int]:
        """At each distance."""
        most = [0] * self.world_size
        for rank, received in self.received.items():
            for source, number in received.items():
                distance = (rank - source) % self.world_size
                most[distance] = max(most[distance], number)
        return most


@dataclass(frozen=True)
class _RankCost:
    work: int
    forward: float
    backward: float

    @classmethod
    def of(
        cls,
        work: Work,
        rank: int,
        needs: dict[tuple[int, bool], Needs],
        messages: _Messages,
        rates: tuple[float, float, float, float],
    ) -> _RankCost:
        """`rates`: pairs of queries and keys a second, bytes a second, seconds a message, and before the first."""
        per_second, bandwidth, latency, agreement = rates
        size = messages.world_size
        sources = [(source, True) for source in messages.to_all]
        sources += [((rank - distance) % size, False) for distance in range(1, size)]
        own = _pairs(work, needs.get((rank, False)))
        pairs, compute, forward, backward = own, [own / per_second], [], []
        for source, received, sent in zip(sources, *messages.of_rank(rank), strict=True):
            if received or sent:
                of_step = _pairs(work, needs.get(source)) if source[0] != rank else 0
                pairs += of_step
                compute.append(of_step / per_second)
                forward.append(max(received, sent) / bandwidth + latency)
                # Keys again; and gradients the other way, so that both ways carry the same.
                backward.append((received + sent) / bandwidth + 2 * latency)
        # Five products backward instead of two.
        return cls(pairs, agreement + _pipelined(compute, forward), _pipelined([2.5 * t for t in compute], backward))


def _pairs(work: Work, needs: Needs | None) -> int:
    """Pairs of queries and keys in the active blocks of all heads."""
    parts = needs.parts if needs is not None else []
    blocks = sum(part.layout.num_active_blocks * (work.heads // part.layout.num_lists) for part in parts)
    return blocks * work.blocks[0] * work.blocks[1]


def _pipelined(compute: list[float], arrive: list[float]) -> float:
    """The end of the last step: step i starts when i − 1 is done and its keys, asked for when i − 1 began, are here.

    Small steps are asked for earlier; what is on its way then takes as long, one after the other.
    """
    began, done = 0.0, compute[0]
    for length, arrival in zip(compute[1:], arrive, strict=True):
        began = max(done, began + arrival)
        done = began + length
    return done
