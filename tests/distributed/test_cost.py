"""The cost model: its bytes are those that rings of processes send, its time is what the model says."""

import pytest
import torch

from dilated_attention_pytorch import (
    BlockLayout,
    Causal,
    Full,
    GlobalTokens,
    PerHead,
    Placement,
    RandomBlocks,
    SlidingWindow,
    SparsePatternConfig,
)
from dilated_attention_pytorch.distributed import ring_cost
from dilated_attention_pytorch.distributed.cost import _pipelined
from dilated_attention_pytorch.patterns import Branches
from tests.distributed import work
from tests.distributed.processes import ByRank

DEVICE = {"flops": 1e12, "bandwidth": 1e9, "latency": 0.0}
SHAPE = {"heads": 4, "heads_kv": 2, "head_dim": 8, "batch": 2, "itemsize": 8}
SEQ = 640

PATTERNS = {
    "window": SlidingWindow(70, 10),
    "global": GlobalTokens(20) | SlidingWindow(30, 30),
    "random": RandomBlocks(3, block_size=32),
    "per head": PerHead((Causal(), SlidingWindow(10, 10), GlobalTokens(5), RandomBlocks(2, block_size=32))),
}


def measured(ranks, placement, attend, *rest):
    """The most bytes that a rank received forward: what it sends back, backward, beyond what it sent forward."""
    size = placement.world_size
    x, keys = torch.randn(2, SEQ, 4, 8, dtype=torch.float64), torch.randn(2, SEQ, 2, 8, dtype=torch.float64)
    shards = ByRank()
    for rank in range(size):
        q, k = (torch.cat([t[:, run] for run in placement.tokens(rank)], 1) for t in (x, keys))
        shards.append((q, k, k, q, torch.zeros(2, 4, q.shape[1]), {}))
    return max(backward - forward for *_, (forward, backward) in ranks.run(size, attend, shards, *rest))


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_bytes_are_those_of_a_real_ring(ranks, name, size, kind):
    placement = getattr(Placement, kind)(SEQ, size, block_size=32)
    cost = ring_cost(PATTERNS[name], SEQ, size, **DEVICE, placement=placement, block_size=32, **SHAPE)
    options = {"placement": placement}
    assert cost.received_bytes == measured(ranks, placement, work.attend, PATTERNS[name], options)
    assert cost.full_ring_bytes == (SEQ - min(placement.num_tokens(r) for r in range(size))) * 2 * 2 * 2 * 8 * 8
    assert cost.tokens == max(placement.num_tokens(r) for r in range(size))


def test_bytes_of_branches_are_those_of_a_real_ring(ranks):
    branches = {"segment_lengths": (64, 256), "dilation_rates": (1, 4)}
    placement = Placement.contiguous(SEQ, 4, block_size=32)
    cost = ring_cost(Branches(**branches), SEQ, 4, **DEVICE, placement=placement, is_causal=True, **SHAPE)
    options = {**branches, "placement": placement, "is_causal": True}
    assert cost.received_bytes == measured(ranks, placement, work.attend_dilated_counted, options)


def test_ten_times_less_for_a_window_and_five_for_a_sparse_dilated_pattern():
    window = SparsePatternConfig(pattern_type="local_window", local_window_size=512, block_size=128).pattern()
    config = SparsePatternConfig(pattern_type="dilated_sparse", sparsity_ratio=0.05, block_size=128)
    shape = {**DEVICE, "heads": 8, "head_dim": 64}
    for pattern, times in ((window, 10), (config.pattern(), 5)):
        cost = ring_cost(pattern, 60000, 8, **shape)  # segments do not end where shards do
        assert cost.full_ring_bytes >= times * cost.received_bytes > 0


def test_time_by_hand():
    assert _pipelined([3.0], []) == 3.0
    assert _pipelined([3.0, 1.0], [2.0]) == 4.0  # keys come while the own part is computed
    assert _pipelined([3.0, 1.0], [5.0]) == 6.0  # or later
    assert _pipelined([3.0, 1.0, 1.0], [5.0, 4.0]) == 10.0  # asked for at 5, here at 9
    full = ring_cost(Full(), 1024, 4, **DEVICE, heads=2, head_dim=16)
    pairs = 256 * 1024 * 2
    assert full.steps == 3
    assert full.received_bytes == full.full_ring_bytes == 768 * 2 * 2 * 16 * 2
    step, arrive = 4 * 256 * 256 * 2 * 16 / 1e12, 256 * 2 * 2 * 16 * 2 / 1e9
    assert arrive > step
    assert full.forward_seconds == pytest.approx(3 * arrive + step)
    cost = ring_cost(Full(), 1024, 4, flops=1e9, bandwidth=1e9, latency=0.0, heads=2, head_dim=16)
    assert cost.forward_seconds == pytest.approx(4 * pairs * 16 / 1e9)
    assert cost.backward_seconds == pytest.approx(10 * pairs * 16 / 1e9)


def test_balance_and_layouts():
    shape = {**DEVICE, "heads": 2, "head_dim": 16}
    layout = BlockLayout.from_pattern(Full(), 2048, block_size=128)
    contiguous = ring_cost(layout, 2048, 4, is_causal=True, **shape)
    assert contiguous.balance == pytest.approx((13 + 14 + 15 + 16) / (136 / 4))
    zigzag = ring_cost(layout, 2048, 4, is_causal=True, placement=Placement.zigzag(2048, 4), **shape)
    assert zigzag.balance == 1.0
