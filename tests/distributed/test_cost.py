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
    """The most bytes that a rank received forward, and sent. What it sends back, backward, beyond what it sent forward
    is what it received."""
    size = placement.world_size
    x, keys = torch.randn(2, SEQ, 4, 8, dtype=torch.float64), torch.randn(2, SEQ, 2, 8, dtype=torch.float64)
    shards = ByRank()
    for rank in range(size):
        q, k = (torch.cat([t[:, run] for run in placement.tokens(rank)], 1) for t in (x, keys))
        shards.append((q, k, k, q, torch.zeros(2, 4, q.shape[1]), {}))
    sent, back = zip(*(bytes_ for *_, bytes_ in ranks.run(size, attend, shards, *rest)), strict=True)
    return max(b - a for a, b in zip(sent, back, strict=True)), max(sent)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_bytes_are_those_of_a_real_ring(ranks, name, size, kind):
    placement = getattr(Placement, kind)(SEQ, size, block_size=32)
    cost = ring_cost(PATTERNS[name], SEQ, size, **DEVICE, placement=placement, block_size=32, **SHAPE)
    options = {"placement": placement}
    assert (cost.received_bytes, cost.sent_bytes) == measured(ranks, placement, work.attend, PATTERNS[name], options)
    assert cost.full_ring_bytes == (SEQ - min(placement.num_tokens(r) for r in range(size))) * 2 * 2 * 2 * 8 * 8
    assert cost.tokens == max(placement.num_tokens(r) for r in range(size))


def test_bytes_of_branches_are_those_of_a_real_ring(ranks):
    branches = {"segment_lengths": (64, 256), "dilation_rates": (1, 4)}
    placement = Placement.contiguous(SEQ, 4, block_size=32)
    cost = ring_cost(Branches(**branches), SEQ, 4, **DEVICE, placement=placement, is_causal=True, **SHAPE)
    options = {**branches, "placement": placement, "is_causal": True}
    expected = measured(ranks, placement, work.attend_dilated_counted, options)
    assert (cost.received_bytes, cost.sent_bytes) == expected


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


def exhaustive(pattern, size, block):
    """Bytes that each rank receives of each, from the block mask: [ranks, ranks], of one head and one value a key."""
    mask = BlockLayout.from_pattern(pattern, size * block, block_size=block).to_block_mask()
    return mask.long().fill_diagonal_(0) * 2 * 2 * block * 16 * 2  # keys and values of 2 heads × 16, half precision


ONE_BLOCK_A_RANK = {
    "back": SlidingWindow(300, 0),
    "forth": SlidingWindow(0, 300),
    "both": SlidingWindow(200, 200),
    "global": GlobalTokens(128) | SlidingWindow(200, 0),
    "causal": Causal(),
    "anticausal": SlidingWindow(0, None),
    "full": Full(),
}


@pytest.mark.parametrize("name", ONE_BLOCK_A_RANK)
@pytest.mark.parametrize("num_ranks", [3, 4, 8, 24])
def test_a_sample_of_the_ranks_finds_the_most_that_any_does(name, num_ranks):
    """Looking at some ranks used to leave out the first, which sees most where a query looks ahead, and counted what
    ranks receive but not what they send: global tokens come from one rank, to all others."""
    size, pattern = 24, ONE_BLOCK_A_RANK[name]
    cost = ring_cost(pattern, size * 128, size, **DEVICE, heads=2, head_dim=16, num_ranks=num_ranks)
    table = exhaustive(pattern, size, 128)
    assert cost.received_bytes == table.sum(1).max()
    assert cost.steps == (table > 0).sum(1).max()
    if name == "global":  # once, to all
        table[2:, 0] = 0
    assert cost.sent_bytes == table.sum(0).max()


@pytest.mark.parametrize("name", ["back", "global", "causal", "full"])
def test_time_of_messages_both_ways(name):
    """Where computing takes no time, each step is its larger message; backward each way carries both."""
    size, rates = 12, {"flops": 1e30, "bandwidth": 1e9, "latency": 1e-6}
    cost = ring_cost(ONE_BLOCK_A_RANK[name], size * 128, size, **rates, heads=2, head_dim=16, num_ranks=size)
    table = exhaustive(ONE_BLOCK_A_RANK[name], size, 128)
    forward, backward, to_all = [], [], 0
    if name == "global":  # the first block goes to all at once, before all else
        to_all = int(table[1, 0])
        table[:, 0] = 0
    for rank in range(size):
        steps = [(0, to_all) if rank == 0 else (to_all, 0)]
        steps += [(table[rank, (rank - d) % size], table[(rank + d) % size, rank]) for d in range(1, size)]
        steps = [(int(received), int(sent)) for received, sent in steps if received or sent]
        forward.append(sum(max(step) / 1e9 + 1e-6 for step in steps))
        backward.append(sum(sum(step) / 1e9 + 2e-6 for step in steps))
    assert cost.forward_seconds == pytest.approx(max(forward))
    assert cost.backward_seconds == pytest.approx(max(backward))
