"""Layouts as FlexAttention's block masks and back: the same pairs."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

from dilated_attention_pytorch import BlockLayout, Branches, GlobalTokens, RandomBlocks, SlidingWindow
from dilated_attention_pytorch import block_sparse_attention as attention
from dilated_attention_pytorch.layout import layout_of_branches, tiles
from dilated_attention_pytorch.layout.checks import check_layout
from dilated_attention_pytorch.layout.flex import _listed
from tests import strategies


@st.composite
def drawn(draw):
    seq_q, seq_k = draw(strategies.lengths())
    return draw(strategies.layouts(seq_q, seq_k, 2, 4, 2))


@given(drawn())
@settings(max_examples=60)
def test_the_same_pairs(layout):
    mask = layout.to_flex_block_mask()
    batch, heads = mask.kv_num_blocks.shape[:2]
    dense = create_mask(mask.mask_mod, batch, heads, *layout.lengths, device="cpu")
    assert torch.equal(dense, layout.to_dense().view(dense.shape))
    blocks = mask.to_dense().bool()
    assert torch.equal(blocks, layout.to_block_mask().view(blocks.shape))
    assert BlockLayout.from_flex_block_mask(mask) is layout


def test_the_same_attention():
    layout = BlockLayout.from_pattern(SlidingWindow(70, 9) | GlobalTokens(3), 300, block_size=(128, 64))
    q, k, v = (torch.randn(2, 300, 4, 16) for _ in range(3))
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    theirs = flex_attention(*heads_first, block_mask=layout.to_flex_block_mask()).transpose(1, 2)
    torch.testing.assert_close(theirs, attention(q, k, v, layout))


def test_lists_of_key_heads_for_all_query_heads():
    mask = torch.rand(2, 3, 3) < 0.5
    layout = BlockLayout.from_block_mask(mask, 16)
    flex = layout.to_flex_block_mask(num_heads=6)
    assert torch.equal(flex.to_dense()[0].bool(), mask.repeat_interleave(3, dim=0))
    with pytest.raises(ValueError, match="num_heads must be a multiple of the layout's 2, got 3"):
        layout.to_flex_block_mask(num_heads=3)


RULES = {
    "causal": (lambda b, h, q, k: q >= k, SlidingWindow(None, 0)),
    "window": (lambda b, h, q, k: (q - k).abs() <= 40, SlidingWindow(40, 40)),
    "causal window": (lambda b, h, q, k: (q >= k) & (q - k <= 100), SlidingWindow(100, 0)),
    "look ahead": (lambda b, h, q, k: k - q <= 7, SlidingWindow(None, 7)),
    "all": (lambda b, h, q, k: q >= 0, SlidingWindow(None, None)),
}


@pytest.mark.parametrize("seq", [128, 200, 513])
@pytest.mark.parametrize("name", RULES)
def test_rules_written_by_hand_are_found(name, seq):
    rule, pattern = RULES[name]
    mask = create_block_mask(rule, None, None, seq, seq, device="cpu", BLOCK_SIZE=64)
    layout = BlockLayout.from_flex_block_mask(mask)
    assert torch.equal(layout.to_dense(), BlockLayout.from_pattern(pattern, seq, block_size=64).to_dense())


def test_full_blocks_by_sample_and_head():
    blocks = torch.rand(2, 3, 4, 4) < 0.5
    layout = BlockLayout.from_block_mask(blocks, 32)
    mask = layout.to_flex_block_mask()
    mask.mask_mod.of_layout = None
    assert torch.equal(BlockLayout.from_flex_block_mask(mask).to_dense(), layout.to_dense())


def listed(partial, full, mask_mod, seq, block):
    """A mask with these blocks."""
    return BlockMask.from_kv_blocks(*_listed(partial), *_listed(full), BLOCK_SIZE=block, mask_mod=mask_mod,
                                    seq_lengths=(seq, seq))  # fmt: skip


def test_a_full_block_at_the_end_is_not_under_the_rule_of_partial_ones():
    """A global last block, seen by the first queries; the others are causal."""
    partial, full = torch.eye(3).bool()[None, None], torch.zeros(1, 1, 3, 3, dtype=torch.bool)
    full[..., 0, 2] = True
    layout = BlockLayout.from_flex_block_mask(listed(partial, full, RULES["causal"][0], 40, 16))
    want = torch.block_diag(*(torch.ones(n, n).tril() for n in (16, 16, 8))).bool()
    want[:16, 32:] = True
    assert torch.equal(layout.to_dense(), want)


def test_the_mask_mod_of_a_layout_in_another_mask():
    """The layout comes back only if all of the mask is its own: blocks, their size, and which of them are full."""
    layout = BlockLayout.from_pattern(SlidingWindow(20, 3) | GlobalTokens(5), 48, block_size=16)
    mask_mod, active = layout.to_flex_block_mask().mask_mod, layout.to_block_mask()[None, None]
    got = BlockLayout.from_flex_block_mask(listed(active & False, active, mask_mod, 48, 16)).to_dense()
    assert torch.equal(got, active[0, 0].repeat_interleave(16, 0).repeat_interleave(16, 1))
    larger = create_block_mask(mask_mod, None, None, 48, 48, device="cpu", BLOCK_SIZE=32)
    assert torch.equal(BlockLayout.from_flex_block_mask(larger).to_dense(), layout.to_dense())


def test_a_mask_mod_is_asked_for_a_few_blocks_at_a_time(monkeypatch):
    monkeypatch.setattr(tiles, "PAIRS", 3 * 16 * 16)
    mask = create_block_mask(RULES["window"][0], None, None, 200, 200, device="cpu", BLOCK_SIZE=16)
    asked, rule = [], mask.mask_mod
    mask.mask_mod = lambda b, h, q, k: asked.append(b) or rule(b, h, q, k)
    layout = BlockLayout.from_flex_block_mask(mask)
    assert torch.equal(
        layout.to_dense(), BlockLayout.from_pattern(SlidingWindow(40, 40), 200, block_size=16).to_dense()
    )
    assert len(asked) == 2 * -(-int(mask.kv_num_blocks.sum()) // 3)


NOISE = torch.rand(2, 3, 200, 230) < 0.5

ANY_RULES = {
    "comb": (lambda b, h, q, k: (q + k) % 3 > 0, None, None),
    "documents": (lambda b, h, q, k: (q >= k) & (q // 50 == k // 50), None, None),
    "prefix": (lambda b, h, q, k: (q >= k) | (k < 70), None, None),
    "by head": (lambda b, h, q, k: q - k >= h * 10, 1, 3),
    "by sample": (lambda b, h, q, k: (q - k).abs() <= 30 + 50 * b, 2, None),
    "a tensor of every pair": (lambda b, h, q, k: NOISE[b, h, q, k], 2, 3),
    "all": (lambda b, h, q, k: b.new_ones((), dtype=torch.bool), None, None),
    "nothing": (lambda b, h, q, k: b.new_zeros((), dtype=torch.bool), None, None),
}


@pytest.mark.parametrize("block", [16, 128, (64, 32), 48, 100, 7, 512], ids=str)
@pytest.mark.parametrize("name", ANY_RULES)
def test_every_mask(name, block):
    """Also of blocks that are none of ours: they are cut, or overlap."""
    rule, batch, heads = ANY_RULES[name]
    mask = create_block_mask(rule, batch, heads, 200, 230, device="cpu", BLOCK_SIZE=block)
    layout = BlockLayout.from_flex_block_mask(mask)
    check_layout(replace(layout, kind=None))
    dense = create_mask(rule, batch, heads, 200, 230, device="cpu")
    assert torch.equal(layout.to_dense().view(dense.shape), dense)


def test_partial_blocks_alone_are_asked_for_their_pairs():
    """A mask may say that a block is full, or empty, where its function says otherwise: its blocks are what counts."""
    full = torch.rand(1, 1, 4, 4) < 0.4
    partial = ~full & (torch.rand(1, 1, 4, 4) < 0.6)
    rule = ANY_RULES["comb"][0]
    for seq in (64, 60):
        want = create_mask(rule, None, None, seq, seq, device="cpu")[0, 0]
        inside = partial[0, 0].repeat_interleave(16, 0).repeat_interleave(16, 1)[:seq, :seq]
        whole = full[0, 0].repeat_interleave(16, 0).repeat_interleave(16, 1)[:seq, :seq]
        layout = BlockLayout.from_flex_block_mask(listed(partial, full, rule, seq, 16))
        assert torch.equal(layout.to_dense(), want & inside | whole)
        assert layout.evaluated == int(partial.sum())


def test_what_cannot_be_said_is_refused():
    layout = layout_of_branches(Branches((32, 64), (1, 2)), 64, num_heads=2)
    with pytest.raises(ValueError, match="may count several times, which a block mask cannot say"):
        layout.to_flex_block_mask()
    with pytest.raises(TypeError, match="mask must be a BlockMask of FlexAttention, got Tensor"):
        BlockLayout.from_flex_block_mask(torch.ones(2, 2))
    changed = BlockLayout.from_pattern(RandomBlocks(2, block_size=32) & SlidingWindow(50, 0), 200, block_size=32)
    mask = changed.to_flex_block_mask()
    mask.kv_num_blocks[0, 0, 5] = 0  # no longer the layout it was made of
    assert not BlockLayout.from_flex_block_mask(mask).to_block_mask()[5].equal(changed.to_block_mask()[5])
