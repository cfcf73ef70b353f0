"""The plain-PyTorch backend on a GPU: the same exactness as on a CPU. Needs no hypothesis, so that it runs anywhere."""

import random
from dataclasses import replace

import pytest
import torch

from dilated_attention_pytorch import (
    BlockLayout,
    BlockSparseRingDilatedAttention,
    DilatedBlocks,
    Documents,
    Full,
    GlobalTokens,
    PerHead,
    RandomBlocks,
    SlidingWindow,
    block_sparse_attention,
)
from dilated_attention_pytorch.testing import Case, assert_exact

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PATTERNS = [
    Full(),
    SlidingWindow(40, 3),
    SlidingWindow(17, 0) | GlobalTokens(5, queries=True),
    Documents((100, 1, 56, 110)) & SlidingWindow(None, 0),
    RandomBlocks(3, block_size=32),
    DilatedBlocks((64, 256), (1, 2), 0.4, 32),
    PerHead((SlidingWindow(9, 9), RandomBlocks(2, 5, 32), Full(), GlobalTokens(30))),
]


def make_case(pattern, seed, dtype):
    chance = random.Random(seed)
    torch.manual_seed(seed)
    seq, heads, heads_kv, batch = 267, 4, chance.choice([4, 2, 1]), chance.choice([1, 2])
    if isinstance(pattern, PerHead):
        heads_kv = chance.choice([4, 1])
    layout = BlockLayout.from_pattern(pattern, seq, block_size=chance.choice([16, 32, (32, 16)]), device="cuda")
    q, do = (torch.randn(batch, seq, heads, 16, device="cuda", dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(batch, seq, heads_kv, 16, device="cuda", dtype=torch.float64) for _ in range(2))
    padding = torch.rand(batch, seq, device="cuda") < 0.2 if chance.random() < 0.5 else None
    dlse = torch.randn(batch, heads, seq, device="cuda", dtype=torch.float64)
    case = Case(q, k, v, layout, do, dlse, is_causal=chance.random() < 0.5, key_padding_mask=padding)
    return case.to(dtype)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: type(p).__name__)
def test_float64(pattern, seed):
    case = make_case(pattern, seed, torch.float64)
    assert_exact(replace(case, dropout_p=0.3) if seed == 3 else case, "blockwise")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: type(p).__name__)
def test_lower_precision(pattern, dtype):
    assert_exact(make_case(pattern, 7, dtype), "blockwise")


def test_dropout_draws_alike_on_both_devices():
    from dilated_attention_pytorch.backends.dropout import keep_mask

    n = torch.arange(300)
    here, there = (keep_mask(torch.tensor(5, device=d), 0.3, 2, n.to(d)[:, None], n.to(d)) for d in ("cpu", "cuda"))
    assert torch.equal(here, there.cpu())


@pytest.mark.parametrize("backend", ["auto", "blockwise"])
def test_compiled(backend):
    q, k, v = (torch.randn(1, 300, 4, 64, device="cuda", requires_grad=True) for _ in range(3))
    layout = BlockLayout.from_pattern(SlidingWindow(50, 0), 300, block_size=64, device="cuda")
    compiled = torch.compile(block_sparse_attention, fullgraph=True, backend="aot_eager")
    got, want = (run(q, k, v, layout, backend=backend) for run in (compiled, block_sparse_attention))
    assert torch.equal(got, want)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_compiled_module(is_causal):
    q, k, v = (torch.randn(1, 300, 4, 64, device="cuda", requires_grad=True) for _ in range(3))
    module = BlockSparseRingDilatedAttention(sparsity_ratio=0.5, block_size=64)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for length in (300, 200):
        tensors = [x[:, :length] for x in (q, k, v)]
        got, want = (m(*tensors, is_causal=is_causal) for m in (compiled, module))
        assert torch.equal(got, want)
        for a, b in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (got, want)), strict=True):
            assert torch.equal(a, b)


def test_dense_layouts_go_to_the_vendor_kernel():
    q, k, v = (torch.randn(1, 256, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    case = Case(q, k, v, BlockLayout.from_pattern(Full(), 256, block_size=64, device="cuda"), q, torch.zeros(1, 4, 256))
    for is_causal in (False, True):
        got = block_sparse_attention(q, k, v, case.layout, is_causal=is_causal)
        want = block_sparse_attention(
            *(x.double() for x in (q, k, v)), case.layout, is_causal=is_causal, backend="reference"
        )
        assert (got - want).abs().max() < 0.02
