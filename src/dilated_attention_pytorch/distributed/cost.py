"""What a ring costs, by arithmetic: bytes, steps and time of any pattern on any number of devices.

The bytes are those of the exchange plan, which is made here for one rank after the other without any communication;
tests compare them with what rings of processes really send. Time is a model: each step computes at the given rate while
the next step's keys arrive at the given bandwidth. What fits is `memory.plan_memory`'s to say.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..layout import BlockLayout
from ..layout.branches import cheapest_blocks
from ..patterns import Branches, Causal, Pattern
from ..patterns.base import check_int
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
        full_ring_bytes: what passing all keys and values around would be, and also what gathering them all would.
        forward_seconds, backward_seconds: by the model.
        balance: work of the slowest rank ÷ mean work.
    """

    seq: int
    world_size: int
    tokens: int
    steps: int
    received_bytes: int
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
        num_ranks: how many ranks, evenly spread and the last among them, are looked at.
    """
    for name, value in (("heads", heads), ("head_dim", head_dim), ("batch", batch), ("itemsize", itemsize)):
        check_int(name, value, least=1)
    heads_kv = heads if heads_kv is None else heads_kv
    placement = Placement.contiguous(seq, world_size, block_size=block_size) if placement is None else placement
    blocks, num_residues = (block_size, block_size), 1
    if isinstance(what, Branches):
        block, num_residues = cheapest_blocks(what, seq, cut=placement.cut or None)
        blocks = block, block
    elif isinstance(what, BlockLayout):
        blocks, what = what.blocks, what.causal if is_causal else what
    else:
        what = what & Causal() if is_causal else what
        size = min((*what.block_sizes, block_size, placement.block_size))
        blocks = size, size
    work = Work(
        what=what,
        is_causal=is_causal,
        placements=(placement, placement),
        blocks=blocks,
        num_residues=num_residues,
        heads=heads,
        heads_kv=heads_kv,
        device=torch.device("cpu"),
    )
    looked_at = min(num_ranks, world_size)
    ranks = [(world_size - 1) * (i + 1) // looked_at for i in range(looked_at)]
    a_key = 2 * batch * head_dim * itemsize  # of one head, with its value
    seen = [
        _RankCost.of(work, rank, needs_of(work, rank), (flops, bandwidth, latency), a_key, batch, head_dim)
        for rank in ranks
    ]
    tokens = max(placement.num_tokens(rank) for rank in range(world_size))
    mean = sum(cost.work for cost in seen) / len(seen)
    return RingCost(
        seq=seq,
        world_size=world_size,
        tokens=tokens,
        steps=max(len(cost.received) for cost in seen),
        received_bytes=max(sum(cost.received) for cost in seen),
        full_ring_bytes=(seq - min(placement.num_tokens(rank) for rank in range(world_size))) * heads_kv * a_key,
        forward_seconds=max(cost.forward for cost in seen),
        backward_seconds=max(cost.backward for cost in seen),
        balance=max(cost.work for cost in seen) / mean,
    )


@dataclass(frozen=True)
class _RankCost:
    work: float
    received: list[int]
    forward: float
    backward: float

    @classmethod
    def of(
        cls,
        work: Work,
        rank: int,
        needs: dict[int, Needs],
        rates: tuple[float, float, float],
        a_key: int,
        batch: int,
        head_dim: int,
    ) -> _RankCost:
        per_second, bandwidth, latency = rates
        size, shared = work.placements[1].world_size, share_lists(work)
        products, received, seconds = [0.0], [], []
        for distance in range(size):
            need = needs.get((rank - distance) % size)
            if need is None:
                continue
            pairs = sum(
                part.layout.num_active_blocks * work.blocks[0] * work.blocks[1] * (work.heads // part.layout.num_lists)
                for part in need.parts
            )
            flops = 4.0 * pairs * head_dim * batch
            if distance == 0:
                products[0] = flops
                continue
            keys = len(items_of(need.codes, need.stored, shared, work)) * (work.heads_kv if shared else 1)
            products.append(flops)
            received.append(keys * a_key)
            seconds.append(keys * a_key / bandwidth + latency)
        compute = [flops / per_second for flops in products]
        return cls(
            sum(products),
            received,
            _pipelined(compute, seconds),
            # Five products instead of two; keys again, and gradients back.
            _pipelined([2.5 * t for t in compute], [2.0 * t for t in seconds]),
        )


def _pipelined(compute: list[float], arrive: list[float]) -> float:
    """The end of the last step: step i starts when i − 1 is done and its keys, asked for when i − 1 began, are here."""
    began, done = 0.0, compute[0]
    for length, arrival in zip(compute[1:], arrive, strict=True):
        began = max(done, began + arrival)
        done = began + length
    return done
