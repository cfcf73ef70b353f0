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
from .plan import Needs, Work, items_of, needs_of, share_lists
from .shard import Placement


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
    batch: int = 1,
    itemsize: int = 2,
    is_causal: bool = False,
    placement: Placement | None = None,
    block_size: int = 128,
    flops: float,
    bandwidth: float,
    latency: float = 10e-6,
    num_ranks: int = 8,
) -> RingCost:
    """The cost of a layer of attention over a ring.

    Args:
        what: a layout, a pattern, or `Branches` for dilated attention.
        placement: who holds which tokens; contiguous by default.
        flops: floating-point operations a second that attention reaches on a device.
        bandwidth, latency: bytes a second between devices, each way, and seconds that a message takes besides.
        num_ranks: how many ranks, evenly spread from the first to the last, are looked at. A rank that is not is taken
            to receive at each distance the most that any of them does there, and of each of them the least that they
            do.
    """
    heads_kv = heads if heads_kv is None else heads_kv
    numbers = {
        "seq": seq, "world_size": world_size, "heads": heads, "heads_kv": heads_kv, "head_dim": head_dim,
        "batch": batch, "itemsize": itemsize, "num_ranks": num_ranks,
    }  # fmt: skip
    rates = {"flops": flops, "bandwidth": bandwidth, "latency": latency}
    _check_numbers(numbers, rates)
    _check_what(what, seq, heads, heads_kv)
    check_flag("is_causal", is_causal)
    check_block_size("block_size", block_size)
    placement = Placement.contiguous(seq, world_size, block_size=block_size) if placement is None else placement
    _check_placement(placement, seq, world_size)
    work = _work_of(what, placement, is_causal, block_size, heads, heads_kv)
    ranks = _spread(min(num_ranks, world_size), world_size)
    shared, a_key = share_lists(work), 2 * batch * head_dim * itemsize  # a key: of one head, with its value
    needs, messages = {rank: needs_of(work, rank) for rank in ranks}, _Messages(world_size)
    for rank, of_rank in needs.items():
        messages.received[rank] = {
            source: len(items_of(need.codes, need.stored, shared, work)) * (heads_kv if shared else 1) * a_key
            for source, need in of_rank.items()
            if source != rank
        }
    in_pairs = flops / (4.0 * head_dim * batch), bandwidth, latency
    seen = [_RankCost.of(work, rank, needs[rank], messages, in_pairs) for rank in ranks]
    tokens = max(placement.num_tokens(rank) for rank in range(world_size))
    mean = sum(cost.work for cost in seen) / len(seen)
    return RingCost(
        seq=seq,
        world_size=world_size,
        tokens=tokens,
        steps=max(map(len, messages.received.values())),
        received_bytes=max(sum(received.values()) for received in messages.received.values()),
        sent_bytes=max(sum(messages.sent(rank)) for rank in ranks),
        full_ring_bytes=(seq - min(placement.num_tokens(rank) for rank in range(world_size))) * heads_kv * a_key,
        forward_seconds=max(cost.forward for cost in seen),
        backward_seconds=max(cost.backward for cost in seen),
        balance=max(cost.work for cost in seen) / mean,
    )


def _check_numbers(numbers: dict[str, int], rates: dict[str, float]) -> None:
    for name, number in numbers.items():
        check_int(name, number, least=1)
    for name, rate in rates.items():
        if not isinstance(rate, int | float) or isinstance(rate, bool):
            raise TypeError(f"{name} must be a number, got {rate!r}")
        positive = rate > 0 or (name == "latency" and rate == 0)
        if not (positive and rate < inf):
            raise ValueError(
                f"{name} must be finite and {'not negative' if name == 'latency' else 'positive'}, got {rate}"
            )


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


@dataclass(frozen=True)
class _Messages:
    """Bytes of keys and values between ranks, forward.

    Attributes:
        received: by the ranks that were looked at, of each rank that sends them something.
    """

    world_size: int
    received: dict[int, dict[int, int]] = field(default_factory=dict)

    def sent(self, rank: int) -> list[int]:
        """To the rank at each distance, from 1."""
        of_rank = [received.get(rank, 0) for other, received in self.received.items() if other != rank]
        least, most = min(of_rank, default=0), self._most_by_distance
        targets = ((rank + distance) % self.world_size for distance in range(1, self.world_size))
        return [
            self.received[target].get(rank, 0) if target in self.received else max(least, most[distance])
            for distance, target in enumerate(targets, start=1)
        ]

    @cached_property
    def _most_by_distance(self) -> list[int]:
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
        cls, work: Work, rank: int, needs: dict[int, Needs], messages: _Messages, rates: tuple[float, float, float]
    ) -> _RankCost:
        """`rates`: pairs of queries and keys a second, bytes a second and seconds a message."""
        per_second, bandwidth, latency = rates
        size = messages.world_size
        pairs = [0] * size
        for distance in range(size):
            for part in getattr(needs.get((rank - distance) % size), "parts", ()):
                blocks = part.layout.num_active_blocks * (work.heads // part.layout.num_lists)
                pairs[distance] += blocks * work.blocks[0] * work.blocks[1]
        compute, forward, backward = [pairs[0] / per_second], [], []
        for distance, sent in enumerate(messages.sent(rank), start=1):
            received = messages.received[rank].get((rank - distance) % size, 0)
            if received or sent:
                compute.append(pairs[distance] / per_second)
                forward.append(max(received, sent) / bandwidth + latency)
                # Keys again; and gradients the other way, so that both ways carry the same.
                backward.append((received + sent) / bandwidth + 2 * latency)
        # Five products backward instead of two.
        return cls(sum(pairs), _pipelined(compute, forward), _pipelined([2.5 * t for t in compute], backward))


def _pipelined(compute: list[float], arrive: list[float]) -> float:
    """The end of the last step: step i starts when i − 1 is done and its keys, asked for when i − 1 began, are here."""
    began, done = 0.0, compute[0]
    for length, arrival in zip(compute[1:], arrive, strict=True):
        began = max(done, began + arrival)
        done = began + length
    return done
