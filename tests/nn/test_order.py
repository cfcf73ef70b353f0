"""A module that orders the tokens of a grid by tiles inside: the same attention, of tokens that stay where they are."""

import pytest
import torch

from dilated_attention_pytorch import (
    BlockSparseAttention,
    Causal,
    Neighborhood,
    PerHead,
    ScoreBias,
    SlidingTiles,
    block_sparse_attention,
)

VIDEO = Neighborhood((4, 6, 5), (2, 3, 5), prefix=7)
TILES = SlidingTiles((4, 6, 5), (2, 2, 3), (4, 2, 6), prefix=7)


def tensors(heads=2, batch=2):
    generator = torch.Generator().manual_seed(0)
    shape = (batch, VIDEO.total, heads, 8)
    return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("pattern", [VIDEO, TILES, PerHead((VIDEO, TILES))], ids=["one", "tiles", "per head"])
@pytest.mark.parametrize("masked", [False, True])
def test_it_is_the_attention_of_the_pattern(pattern, masked):
    masks = {}
    if masked:
        generator = torch.Generator().manual_seed(1)
        masks["key_padding_mask"] = torch.rand(2, VIDEO.total, generator=generator) < 0.3
        masks["document_ids"] = torch.randint(0, 3, (2, VIDEO.total), generator=generator)
    inputs = tensors()
    module = BlockSparseAttention(pattern, order=(2, 3, 4))
    got = module(*inputs, **masks)
    want = block_sparse_attention(*inputs, pattern, backend="reference", **masks)
    do = torch.randn_like(want)
    pairs = zip(
        (got, *torch.autograd.grad(got, inputs, do)), (want, *torch.autograd.grad(want, inputs, do)), strict=True
    )
    for mine, right in pairs:
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-10)
    assert "reorders its tokens" in repr(module)


def test_it_compiles():
    module, inputs = BlockSparseAttention(VIDEO, order=3), tensors()
    with torch.no_grad():
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*inputs), module(*inputs), rtol=0, atol=1e-12)


def test_a_schedule_opens_it():
    module, inputs = BlockSparseAttention(VIDEO, order=3), tensors()
    module.opening = 1.0
    want = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in inputs)).transpose(1, 2)
    torch.testing.assert_close(module(*inputs), want, rtol=0, atol=1e-10)


def test_what_is_refused():
    module, inputs = BlockSparseAttention(VIDEO, order=3), tensors()
    cases = {
        "is_causal has no meaning beside order": lambda: module(*inputs, is_causal=True),
        "return_attention_weights is not possible beside order": lambda: module(*inputs, False, True),
        "alibi_slopes is not possible beside order": lambda: module(*inputs, alibi_slopes=torch.ones(2).double()),
        "bias is not possible beside order": lambda: module(*inputs, bias=ScoreBias.slopes(torch.ones(2).double())),
        "q and k must have the pattern's 127 tokens, got 5 and 127": lambda: module(inputs[0][:, :5], *inputs[1:]),
        "order is for a pattern of a grid": lambda: BlockSparseAttention(VIDEO & Causal(), order=3),
        "to the module or to the pattern, not to both": lambda: BlockSparseAttention(TILES.in_tiles(), order=3),
        "order needs heads of one shape and prefix": lambda: BlockSparseAttention(
            PerHead((VIDEO, Neighborhood((127,), 3))), order=3
        ),
        "order must be at most as large as the shape": lambda: BlockSparseAttention(VIDEO, order=7),
    }
    for message, run in cases.items():
        with pytest.raises(ValueError, match=message):
            run()
