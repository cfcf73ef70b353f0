"""Every mask that people have, by its recipe and by conversion: a dense softmax over the mask, gradients included."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from dilated_attention_pytorch import BlockLayout, block_sparse_attention
from tests import masks_table
from tests.masks_table import BLOCK, MASKS

DTYPE, TOLERANCE = torch.float64, 1e-10


def tensors(mask):
    generator = torch.Generator().manual_seed(0)
    lengths = (mask.seq_q, mask.seq_k, mask.seq_k, mask.seq_q)
    made = [torch.randn(2, n, 2, 8, generator=generator, dtype=DTYPE) for n in lengths]
    return [x.requires_grad_() for x in made[:3]], made[3]


def dense_attention(q, k, v, mask):
    """Without anything of ours. A query that sees nothing gives 0."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    weights = torch.where(mask.any(-1, keepdim=True), weights, 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def assert_same(out, want, inputs, do):
    torch.testing.assert_close(out, want, rtol=0, atol=TOLERANCE)
    grads, wanted = (torch.autograd.grad(x, inputs, do) for x in (out, want))
    for got, expected in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", MASKS)
def test_the_recipe(name):
    mask = MASKS[name]
    inputs, do = tensors(mask)
    what, options = mask.given()
    if "document_ids" in options:
        options["document_ids"] = options["document_ids"].expand(2, -1)
    out = block_sparse_attention(*inputs, what, **options)
    assert_same(out, dense_attention(*inputs, mask.dense()), inputs, do)


@pytest.mark.parametrize("name", MASKS)
def test_the_block_mask_of_flex_attention(name):
    mask = MASKS[name]
    lengths = mask.seq_q, mask.seq_k
    block_mask = create_block_mask(mask.mask_mod, mask.batch, mask.heads, *lengths, device="cpu", BLOCK_SIZE=BLOCK)
    layout = BlockLayout.from_flex_block_mask(block_mask)
    dense = mask.dense()
    assert torch.equal(layout.to_dense().view(dense.shape), dense)
    inputs, do = tensors(mask)
    assert_same(block_sparse_attention(*inputs, layout), dense_attention(*inputs, dense), inputs, do)


def test_masks_hide_something_and_show_something():
    for name, mask in MASKS.items():
        assert 0 < mask.dense().double().mean() < 1, name


def test_the_page_says_what_they_cost():
    found = masks_table.MARKED.search(masks_table.PAGE.read_text(encoding="utf-8"))
    assert found is not None
    assert masks_table.table() in found[0], "write it again: python -m tests.masks_table"
