"""Layouts with bitmaps: any pairs at all, each different tile kept once, in memory for a few tiles at a time."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from dilated_attention_pytorch import BlockLayout, Causal, SlidingWindow, block_sparse_attention
from dilated_attention_pytorch.layout import bitmaps, tiles
from dilated_attention_pytorch.layout.bitmaps import UniqueBitmaps, bit_at, bits_of, packed, unpacked
from dilated_attention_pytorch.layout.checks import check_layout
from dilated_attention_pytorch.layout.size import ListSize
from dilated_attention_pytorch.testing import Case, assert_exact
from tests.strategies import BLOCKS, lengths, token_masks


@st.composite
def masks(draw):
    shape = *draw(st.sampled_from([(), (3,), (2, 3), (1, 2)])), *draw(lengths())
    return draw(token_masks(shape)), draw(st.sampled_from([*BLOCKS, (64, 16), (16, 128)]))


@given(masks())
@settings(max_examples=60)
def test_the_pairs_and_the_blocks(given):
    mask, (block_q, block_k) = given
    layout = BlockLayout.from_mask(mask, (block_q, block_k))
    seq_q, seq_k = mask.shape[-2:]
    check_layout(replace(layout, kind=None))
    assert torch.equal(layout.to_dense(), mask)
    assert torch.equal(layout.causal.to_dense(), mask.tril(seq_k - seq_q))
    assert round(layout.density * mask.numel()) == int(mask.sum())
    assert layout.kind == ("full" if mask.all() else None)
    # Empty blocks are not listed, full ones carry no bitmap, and of the others each different one is kept once.
    num = layout.num_lists, layout.num_q_blocks, layout.num_k_blocks
    padded = torch.zeros(num[0], num[1] * block_q, num[2] * block_k, dtype=torch.bool)
    padded[:, :seq_q, :seq_k] = mask.view(-1, seq_q, seq_k)
    cells = padded.view(num[0], num[1], block_q, num[2], block_k).transpose(2, 3)
    assert torch.equal(layout.to_block_mask().view(num), cells.flatten(3).any(3))
    real = torch.zeros_like(padded)
    real[:, :seq_q, :seq_k] = True
    real = real.view(num[0], num[1], block_q, num[2], block_k).transpose(2, 3)
    partial = cells.flatten(3).any(3) & (cells != real).flatten(3).any(3)
    assert len(layout.bitmaps) == (len(cells[partial].unique(dim=0)) if partial.any() else 0)
    assert tiles.num_partial(layout) == int(partial.sum())
    assert layout.evaluated == cells[..., 0, 0].numel()


@given(masks())
@settings(max_examples=30)
def test_parts_of_a_layout(given):
    mask, blocks = given
    layout = BlockLayout.from_mask(mask, blocks)
    rows, columns = torch.arange(layout.num_q_blocks)[::2], torch.arange(layout.num_k_blocks).flip(0)[::2].flip(0)
    part = layout.take(rows, columns)
    check_layout(part)
    query = torch.arange(mask.shape[-2])
    key = torch.arange(mask.shape[-1])
    query, key = query[torch.isin(query // blocks[0], rows)], key[torch.isin(key // blocks[1], columns)]
    assert torch.equal(part.to_dense(), mask[..., query, :][..., key])
    assert len(part.bitmaps) == len(part.bitmaps.unique(dim=0)) == len(part.rules[part.rules[..., 4] < 0].unique(dim=0))


@given(st.data())
@settings(max_examples=30)
def test_a_function_of_pairs_is_the_mask_that_it_makes(data):
    seq_q, seq_k = data.draw(lengths())
    batch, heads = data.draw(st.sampled_from([(None, None), (None, 2), (2, None), (1, 1), (2, 3)]))
    mask = data.draw(token_masks((batch or 1, heads or 1, seq_q, seq_k)))
    layout = BlockLayout.from_mask_mod(
        lambda b, h, q, k: mask[b, h, q, k], batch, heads, seq_q, seq_k, block_size=data.draw(st.sampled_from(BLOCKS))
    )
    assert torch.equal(layout.to_dense().view(mask.shape), mask)
    assert (layout.batch_size, layout.num_heads) == (
        batch,
        None if batch in (None, 1) and heads is None else heads or 1,
    )


def test_a_function_is_asked_for_a_few_blocks_at_a_time(monkeypatch):
    """Never for the whole matrix, nor for pairs of tokens that are not there."""
    monkeypatch.setattr(tiles, "PAIRS", 3 * 32 * 32)
    asked = []

    def rule(b, h, q, k):
        asked.append((q, k))
        return (q - k).abs() < 20

    # As FlexAttention asks: by vmap, over all dimensions at once.
    layout = BlockLayout.from_mask_mod(rule, None, None, 300, 500, block_size=32)
    assert len(asked) == 1 + -(-10 * 16 // 3)  # and once to see that it is such a function
    assert layout.evaluated == 10 * 16
    assert torch.equal(layout.to_dense(), (torch.arange(300)[:, None] - torch.arange(500)).abs() < 20)


def test_equal_tiles_are_one_bitmap_wherever_they_stand():
    """A window has few different tiles, however long it is; and what they cost is said."""
    sizes = {}
    for seq in (640, 1280):
        layout = BlockLayout.from_mask_mod(lambda b, h, q, k: (q - k).abs() <= 100, None, None, seq, block_size=64)
        sizes[seq] = len(layout.bitmaps), layout.bitmaps.nbytes
        text = f"evaluated={(seq // 64) ** 2}, bitmaps=4 of {tiles.num_partial(layout)} partial blocks (2048 bytes)"
        assert text in repr(layout)
    assert sizes[640] == sizes[1280] == (4, 4 * 64 * 64 // 8)
    by_sample = BlockLayout.from_mask(torch.rand(70, 70).lt(0.5).expand(2, 3, 70, 70), 32)
    assert len(by_sample.bitmaps) * 6 == tiles.num_partial(by_sample)


def test_bitmaps_with_one_hash_are_kept_apart(monkeypatch):
    monkeypatch.setattr(bitmaps, "_hashed", lambda words: words.new_zeros(len(words), dtype=torch.int64))
    allowed = torch.rand(9, 16, 32) < 0.5
    table = UniqueBitmaps(16, 32, allowed.device)
    for some in (allowed[:5], allowed[3:]):
        number = table.numbers_of(packed(some))
        assert torch.equal(unpacked(table.table()[number]), some)


def test_every_bit_has_its_place():
    allowed = torch.eye(16 * 32, dtype=torch.bool).view(-1, 16, 32)
    words = packed(allowed)
    assert words.shape == (512, 16, 2)
    assert torch.equal(unpacked(words), allowed)
    number = torch.arange(512)
    row, column = number // 32, number % 32
    assert bit_at(words, -1 - number, row, column).all()
    assert bit_at(words, -1 - number, row, (column + 1) % 32).logical_not().all()
    named = torch.tensor([0, -3, 1])
    assert torch.equal(bits_of(words, named), torch.stack((allowed[0] | True, allowed[2], allowed[0] | True)))


def call(mask, **options):
    seq_q, seq_k = mask.shape[-2:]
    q = torch.randn(2, seq_q, 4, 8, dtype=torch.float64)
    k, v = (torch.randn(2, seq_k, 2, width, dtype=torch.float64) for width in (8, 5))
    do, dlse = torch.randn(2, seq_q, 4, 5, dtype=torch.float64), torch.randn(2, 4, seq_q, dtype=torch.float64)
    return Case(q, k, v, BlockLayout.from_mask(mask, 16), do, dlse, **options)


@pytest.mark.parametrize("lists", [(1, 1), (1, 4), (1, 2), (2, 1), (2, 4), (2, 2)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients(lists, is_causal):
    mask = torch.rand(*lists, 70, 90) < 0.4
    mask[..., :5, :] = False  # rows without keys
    assert_exact(call(mask, is_causal=is_causal), "blockwise")
    padding = torch.rand(2, 90) < 0.3
    ids = torch.randint(0, 3, (2, 90)).sort(dim=1).values
    masked = {"key_padding_mask": padding, "document_ids": ids}
    assert_exact(
        call(mask, is_causal=is_causal, softcap=2.0, alibi_slopes=torch.rand(4).double(), **masked), "blockwise"
    )
    assert_exact(call(mask, is_causal=is_causal, dropout_p=0.3, sinks=torch.rand(4).double()), "blockwise")


def test_the_definition_is_a_dense_softmax_over_the_mask():
    """Without a look at `to_dense`."""
    mask = torch.rand(2, 4, 70, 90) < 0.4
    case = call(mask)
    scores = torch.einsum("bqhd,bkhd->bhqk", case.q, case.k.repeat_interleave(2, 2)) * 8**-0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)
    want = torch.einsum("bhqk,bkhd->bqhd", weights, case.v.repeat_interleave(2, 2))
    for backend in ("reference", "blockwise"):
        got = block_sparse_attention(case.q, case.k, case.v, case.layout, backend=backend)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_other_bitmaps_are_no_other_graph():
    compiled = CompileCounter()
    graph = torch.compile(lambda x, layout: block_sparse_attention(x, x, x, layout), fullgraph=True, backend=compiled)
    x = torch.randn(1, 80, 2, 8)
    for seed in range(3):
        mask = torch.rand(80, 80, generator=torch.Generator().manual_seed(seed)) < 0.3
        mask[:30, seed * 20 : seed * 20 + 32] = seed % 2 > 0  # as many blocks, other bitmaps, another number of them
        layout = BlockLayout.from_mask(mask, 16)
        torch.testing.assert_close(graph(x, layout), block_sparse_attention(x, x, x, layout, backend="reference"))
    assert compiled.frame_count == 1


def test_bytes():
    layout = BlockLayout.from_mask(torch.rand(130, 140) < 0.5, 32)
    size = ListSize.of(layout)
    assert size.rules == layout.bitmaps.nbytes + layout.rules.nbytes
    assert size.by(size.rows, work_order=False) == sum(x.nbytes for x in layout.by_query.tensors())
    assert (
        BlockLayout.from_mask(torch.ones(64, 64).bool().tril(-1), 32)
        .cost(batch=1, heads=1, head_dim=8, itemsize=4)
        .pairs
        == 64 * 63 // 2
    )


def test_combined_with_other_rules_the_mask_is_what_is_left():
    mask = torch.rand(100, 100) < 0.5
    both = BlockLayout.from_mask(
        mask & BlockLayout.from_pattern(SlidingWindow(20, 5), 100, block_size=16).to_dense(), 16
    )
    assert torch.equal(
        both.causal.to_dense(),
        mask & BlockLayout.from_pattern(Causal() & SlidingWindow(20, 5), 100, block_size=16).to_dense(),
    )


def test_the_default_device_is_not_asked():
    mask = torch.rand(70, 70) < 0.5
    want = BlockLayout.from_mask(mask, 16)
    with torch.device("meta"):
        got = BlockLayout.from_mask(mask, 16)
        also = BlockLayout.from_mask_mod(lambda b, h, q, k: mask[q, k], None, None, 70, block_size=16, device="cpu")
    for layout in (got, also):
        assert all(map(torch.equal, layout.flatten()[0], want.flatten()[0]))
