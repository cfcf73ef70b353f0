"""Decoding on a GPU: the kernels against plain PyTorch in float64."""

import pytest
import torch

from dilated_attention_pytorch import (
    Causal,
    GlobalTokens,
    PerHead,
    RandomBlocks,
    SlidingWindow,
    decode_attention,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PATTERNS = {
    "window": SlidingWindow(1000, 0) | GlobalTokens(5),
    "random": RandomBlocks(20, block_size=128) | SlidingWindow(100, 0),
    "small blocks": RandomBlocks(50, block_size=16),
    "all": Causal(),
    "per head": PerHead((SlidingWindow(64, 0), RandomBlocks(4), Causal(), GlobalTokens(9)) * 2),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 80])
@pytest.mark.parametrize("name", PATTERNS)
def test_equals_plain_pytorch(name, head_dim, dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    lengths, page = [5000, 17, 4096, 129], 64

    def normal(*shape):
        return torch.randn(*shape, device="cuda", generator=generator).to(dtype)

    q, k, v = normal(4, 3, 8, head_dim), normal(4, 5056, 2, head_dim), normal(4, 5056, 2, head_dim)
    padding = torch.rand(4, 5056, device="cuda", generator=generator) < 0.1
    options = {"lengths": lengths, "softcap": 20.0, "sinks": normal(8).float(), "key_padding_mask": padding}
    options |= {"alibi_slopes": torch.full((8,), 1e-3, device="cuda")}
    want = decode_attention(*(x.double() for x in (q, k, v)), PATTERNS[name], backend="blockwise", **options)
    got = decode_attention(q, k, v, PATTERNS[name], **options)
    # Eager in the same precision rounds the weights and the products; so may we.
    allowed = 4 * torch.finfo(dtype).eps * float(v.abs().max()) + 2e-5
    assert float((got.double() - want).abs().max()) <= allowed
    order = torch.randperm(4 * 79, device="cuda", generator=generator)
    pages = [torch.empty(4 * 79, page, 2, head_dim, device="cuda", dtype=dtype) for _ in "kv"]
    for x, into in zip((k, v), pages, strict=True):
        into[order] = x.view(4 * 79, page, 2, head_dim)
    paged = decode_attention(q, *pages, PATTERNS[name], page_table=order.view(4, 79), **options)
    assert torch.equal(paged, got)
