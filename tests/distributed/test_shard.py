"""Placements: whole blocks, each held once, equal tokens, equal work; and the way into shards and back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch import (
    BlockLayout,
    Causal,
    DilatedBlocks,
    Documents,
    Full,
    GlobalTokens,
    Placement,
    SlidingWindow,
)
from dilated_attention_pytorch.distributed.shard import row_work
from tests.distributed import work
from tests.distributed.processes import ByRank

KINDS = ["contiguous", "zigzag", "balanced"]


def make(kind, seq, size, block=16, pattern=None):
    if kind == "balanced":
        return Placement.balanced(pattern or Causal(), seq, size, block_size=block)
    return getattr(Placement, kind)(seq, size, block_size=block)


def tokens(placement, rank):
    return [t for run in placement.tokens(rank) for t in range(run.start, run.stop)]


@given(st.data())
def test_every_token_is_held_once_in_whole_blocks(data):
    size, block = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([16, 32]))
    seq = data.draw(st.integers((size - 1) * block + 1, 800))
    placement = make(data.draw(st.sampled_from(KINDS)), seq, size, block)
    held = [tokens(placement, rank) for rank in range(size)]
    assert sorted(t for each in held for t in each) == list(range(seq))
    assert all(each == sorted(each) and len(each) == placement.num_tokens(rank) for rank, each in enumerate(held))
    for rank, each in enumerate(held):
        assert {t // block for t in each} == set(placement.blocks(rank).tolist())
        assert {t // 16 for t in each} == set(placement.blocks(rank, 16).tolist())
        assert (placement.owner(placement.blocks(rank)) == rank).all()
    counts = [len(placement.blocks(rank)) for rank in range(size)]
    assert max(counts) - min(counts) <= max(1, len(placement.starts) // size)  # a block for each chunk of a rank


def test_literal_placements():
    assert Placement.contiguous(100, 3, block_size=16).tokens(1) == [slice(32, 64)]
    assert Placement.of_lengths([32, 16, 50], block_size=16).tokens(2) == [slice(48, 98)]
    zigzag = Placement.zigzag(16 * 8, 2, block_size=16)
    assert [zigzag.tokens(rank) for rank in range(2)] == [[slice(0, 32), slice(96, 128)], [slice(32, 96)]]
    # Causal: 1 + 2 + … + 8 blocks; the heaviest quarter goes with the lightest.
    balanced = Placement.balanced(Causal(), 16 * 8, 2, block_size=16)
    assert [balanced.tokens(rank) for rank in range(2)] == [[slice(0, 32), slice(96, 128)], [slice(32, 96)]]
    # A window is balanced as it comes: nothing is moved away from its neighbours.
    assert Placement.balanced(SlidingWindow(30, 30), 1600, 4, block_size=16) == Placement.contiguous(
        1600, 4, block_size=16
    )


CAUSAL = {
    "causal": Causal(),
    "window": SlidingWindow(500, 0),
    "documents": Documents((2000, 100, 100, 3000, 1200, 1600, 192)) & Causal(),
    "global": (GlobalTokens(64) | SlidingWindow(100, 0)) & Causal(),
    "dilated": DilatedBlocks((512, 2048, 8192), (1, 2, 4), 0.2, 16, causal=True),
}


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_the_slowest_rank_has_at_most_a_tenth_more_than_the_mean(name, size):
    """Counted from the layout of the whole, which the placement never builds."""
    seq = 8192
    placement = Placement.balanced(CAUSAL[name], seq, size, block_size=16)
    layout = BlockLayout.from_pattern(CAUSAL[name], seq, block_size=16)
    blocks = layout.by_query.offsets.diff().double()
    assert torch.equal(row_work(CAUSAL[name], seq, 16).double(), blocks)
    assert torch.equal(row_work(layout, seq, 16).double(), blocks)
    load = [float(blocks[placement.blocks(rank)].sum()) for rank in range(size)]
    assert max(load) <= 1.1 * sum(load) / size, load
    assert placement.load(blocks).tolist() == load
    held = [placement.num_tokens(rank) for rank in range(size)]
    assert max(held) <= 1.1 * seq / size  # memory is shared out as well


def test_balanced_by_coarser_blocks_and_causal_by_flag():
    pattern = Full()
    coarse = Placement.balanced(pattern, 4096, 4, is_causal=True, block_size=128)
    work_of = row_work(pattern & Causal(), 4096, 128)
    assert work_of.tolist() == [i + 1 for i in range(32)]
    assert coarse.load(work_of).max() <= 1.1 * coarse.load(work_of).mean()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [1, 2])
def test_shards_and_back(ranks, kind, dim):
    """And the gradient: each rank weighs the whole tensor in its own way; what comes back is the sum of the weights."""
    placement = make(kind, 150, 3)
    shape = [2, 150, 4] if dim == 1 else [2, 4, 150]
    whole, weights = torch.randn(shape), torch.randn(3, *shape)
    index = [torch.tensor(tokens(placement, rank)) for rank in range(3)]
    parts = ByRank(whole.index_select(dim, i) for i in index)
    for rank, (shard, got, grad) in enumerate(ranks.run(3, work.unshard, whole, placement, ByRank(weights), dim)):
        assert torch.equal(shard, parts[rank])
        assert torch.equal(got, whole)
        torch.testing.assert_close(grad, weights.sum(0).index_select(dim, index[rank]))


BAD = {
    "every one of 4 ranks must hold a block, but 3 blocks of 16 tokens leave rank 0 without": lambda: (
        Placement.contiguous(40, 4, block_size=16)
    ),
    "shards must be whole blocks of 16 tokens": lambda: Placement.of_lengths([20, 20], block_size=16),
    "the length of rank 1 must be at least 1": lambda: Placement.of_lengths([16, 0], block_size=16),
    "block_size must be one of": lambda: Placement.zigzag(100, 2, block_size=10),
    "seq must be at least 1": lambda: Placement.contiguous(0, 2),
    "rank must be from 0 to 1, got 2": lambda: Placement.contiguous(100, 2, block_size=16).tokens(2),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_placements(message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        BAD[message]()


def test_bad_shards(ranks):
    ranks.run(2, work.bad_shards)
