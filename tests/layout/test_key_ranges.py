"""Layouts of ranges that are data: the pairs that they say, no block too many, and no value of them in a graph."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from dilated_attention_pytorch import BlockLayout, Causal, Documents, block_sparse_attention, decode_attention
from dilated_attention_pytorch.layout.checks import check_layout
from dilated_attention_pytorch.patterns import Chunks, DocumentSinks, GlobalTokens, PrefixLM
from dilated_attention_pytorch.testing import Case, assert_exact
from tests.strategies import BLOCKS, bounds, lengths


def dense_of(starts, stops, seq_k):
    """[batch or 1, seq_q, seq_k]."""
    key = torch.arange(seq_k)
    seen = (key >= starts[..., None]) & (key < stops[..., None])
    return seen.any(1) if seen.ndim == 4 else seen.reshape(-1, *seen.shape[-2:])


@given(st.data())
@settings(max_examples=60)
def test_the_pairs_and_the_blocks(data):
    seq_q, seq_k = data.draw(lengths())
    starts, stops = data.draw(bounds(seq_q, seq_k, data.draw(st.integers(1, 3))))
    block_size = data.draw(st.sampled_from(BLOCKS))
    layout = BlockLayout.from_key_ranges(starts, stops, seq_k, block_size=block_size)
    check_layout(layout)
    want = dense_of(starts, stops, seq_k)
    assert torch.equal(layout.to_dense().view(want.shape), want)
    assert torch.equal(layout.causal.to_dense().view(want.shape), want.tril(seq_k - seq_q))
    # A block is active if a pair of it is seen, and full if all pairs of its queries are.
    num = layout.batch_size or 1, layout.num_q_blocks, layout.num_k_blocks
    padded = torch.zeros(num[0], num[1] * layout.block_q, num[2] * layout.block_k, dtype=torch.bool)
    padded[:, :seq_q, :seq_k] = want
    active = padded.view(num[0], num[1], layout.block_q, num[2], layout.block_k).any(4).any(2)
    padded[:, seq_q:] = True
    whole = padded.view(num[0], num[1], layout.block_q, num[2], layout.block_k).all(4).all(2)
    full = torch.zeros_like(active)
    which, row, column, _ = (x[layout.entries()[3] < 0] for x in layout.entries())
    full[which, row, column] = True
    assert torch.equal(layout.to_block_mask().view(num), active)
    assert torch.equal(full, active & whole)
    # With places to spare nothing is counted, and the pairs are the same.
    spare = BlockLayout.from_key_ranges(starts, stops, seq_k, block_size=block_size, capacity=1000)
    check_layout(spare)
    assert torch.equal(spare.to_dense().view(want.shape), want)


def test_prefixes_of_samples_are_those_of_the_pattern():
    place = torch.arange(90)
    layout = BlockLayout.from_key_ranges(
        torch.zeros(2, 90).int(), torch.stack([(place + 1).clamp(min=n) for n in (20, 55)]), block_size=16
    )
    for sample, prefix in enumerate((20, 55)):
        alone = BlockLayout.from_pattern(PrefixLM(prefix), 90, block_size=16)
        assert torch.equal(layout.to_dense()[sample], alone.to_dense())
        assert torch.equal(layout.to_block_mask()[sample], alone.to_block_mask())


def call(starts, stops, **options):
    q, k, v = (torch.randn(2, starts.shape[-1], heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    layout = BlockLayout.from_key_ranges(starts, stops, block_size=16)
    return Case(q, k, v, layout, torch.randn_like(q), torch.randn(2, 4, q.shape[1], dtype=torch.float64), **options)


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_of_ranges_of_every_sample(is_causal):
    generator = torch.Generator().manual_seed(3)
    starts = torch.randint(0, 100, (2, 3, 100), generator=generator)
    assert_exact(call(starts, starts + 9, is_causal=is_causal), "blockwise")


def test_a_later_token_changes_nothing_before_it_and_values_of_one_give_one():
    starts = torch.randint(0, 100, (2, 100), generator=torch.Generator().manual_seed(1))
    layout = BlockLayout.from_key_ranges(starts, starts + 30, block_size=16)
    q, k, v = (torch.randn(2, 100, 2, 8) for _ in range(3))

    def attend(v):
        return block_sparse_attention(q, k, v, layout, is_causal=True)

    before = attend(v)
    ones = attend(torch.ones_like(v))
    seen = layout.causal.to_dense().any(-1)[:, :, None, None].expand_as(ones)
    torch.testing.assert_close(ones, seen.float(), rtol=0, atol=1e-6)
    for x in (q, k, v):
        x[:, 60:] += 3 * torch.randn_like(x[:, 60:])
    after = attend(v)
    assert torch.equal(before[:, :60], after[:, :60])
    assert not torch.equal(before[:, 60:], after[:, 60:])


def test_other_ranges_are_no_other_graph():
    """Given as a layout, and built in the graph itself where there is room for all blocks."""
    compiled = CompileCounter()
    q, k, v = (torch.randn(2, 80, 2, 8) for _ in range(3))

    def inside(starts):
        layout = BlockLayout.from_key_ranges(starts, starts + 20, block_size=16, capacity=2 * 25)
        return block_sparse_attention(q, k, v, layout)

    graphs = {
        "given": torch.compile(
            lambda layout: block_sparse_attention(q, k, v, layout), fullgraph=True, backend=compiled
        ),
        "built": torch.compile(inside, fullgraph=True, backend=compiled),
    }
    for name, graph in graphs.items():
        compiled.clear()
        for seed in range(3):
            starts = torch.randint(0, 80, (2, 80), generator=torch.Generator().manual_seed(seed))
            layout = BlockLayout.from_key_ranges(starts, starts + 20, block_size=16)
            got = graph(layout if name == "given" else starts)
            torch.testing.assert_close(got, block_sparse_attention(q, k, v, layout, backend="reference"))
        assert compiled.frame_count == 1, name


REFUSED = {
    "documents": Documents((30, 40)),
    "sinks": DocumentSinks(3, (30, 40)),
    "chunks": Chunks(16) & Causal(),
    "global anywhere": Causal() | GlobalTokens(2, at=(40,)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_decoding_by_ranges_is_refused(name):
    q, k = torch.randn(1, 1, 2, 8), torch.randn(1, 70, 2, 8)
    with pytest.raises(ValueError, match=r"pattern must not have ranges of keys \(Documents, .*, got"):
        decode_attention(q, k, k, REFUSED[name])
