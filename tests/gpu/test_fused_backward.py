"""`deterministic=False` on Hopper: one kernel for all gradients, against the oracle with every feature."""

import os
import random
from dataclasses import replace

import pytest
import torch

from dilated_attention_pytorch import BlockLayout, Branches, Full, SlidingWindow, block_sparse_attention, explain
from dilated_attention_pytorch.testing import Case, assert_exact
from tests.gpu.norms import assert_near
from tests.gpu.test_triton import PATTERNS, SHAPED, SLOPES, make_case, random_pattern

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")]


def fused(case):
    """The case without determinism, once it is sure what will run."""
    case = replace(case, deterministic=False)
    if isinstance(case.layout, BlockLayout):
        named = explain(case.q, case.k, case.v, case.layout, backend="triton", deterministic=False).kernels
        assert "any order" in named["backward"]
    return case


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name, head_dim, dtype):
    """Several calls over one layout, the last of them a replay: sums that were not zeroed again would double."""
    for seed in range(3):
        case = fused(make_case(PATTERNS[name], seed, dtype, head_dim, 128))
        for _ in range(3 if seed == 0 else 1):
            assert_exact(case, "triton")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block", [128, 256, (64, 128)], ids=str)
def test_lists_of_their_own(block, head_dim):
    for seed in range(2):
        assert_exact(fused(make_case(Full(), seed, torch.bfloat16, head_dim, block, lists=True)), "triton")


@pytest.mark.parametrize("seq_q", [1, 77, 900])
def test_unequal_lengths(seq_q):
    for seed, head_dim in ((0, 64), (1, 128)):
        case = make_case(SlidingWindow(300, 2), seed, torch.bfloat16, head_dim, 128, seq_q=seq_q)
        assert_exact(fused(case), "triton")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", SHAPED)
def test_shaped_and_dropped(name, head_dim):
    pattern, block, dtype, options = SHAPED[name]
    block = (128, 128) if block == (128, 64) else block  # keys of 64 are for the plain kernel
    case = make_case(PATTERNS[pattern], 0, dtype, head_dim, block)
    options = {"is_causal": False, "scale": None, "key_padding_mask": None, "document_ids": None, **options}
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.tensor(SLOPES, device="cuda")
    if "padding" in options:
        options["key_padding_mask"] = torch.rand(case.k.shape[:2], device="cuda") < options.pop("padding")
    assert_near(fused(replace(case, **options)))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("segments", [(512, 1408), (100, 704)], ids=str)
def test_dilated(segments, causal, head_dim):
    """Residue classes; and segments that mixed blocks come of."""
    q, k, v, do = torch.randn(4, 1, 2816, 4, head_dim, device="cuda", dtype=torch.bfloat16)
    dlse = torch.randn(1, 4, 2816, device="cuda")
    assert_exact(fused(Case(q, k, v, Branches(segments, (1, 2)), do, dlse, is_causal=causal)), "triton")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["window and global", "random", "per head"])
def test_programs_take_many_tiles(name, head_dim, monkeypatch):
    """As if there were three processors: what a tile leaves to the next is met at this size too."""
    from dilated_attention_pytorch.kernels import launch

    monkeypatch.setattr(launch, "num_processors", lambda device: 3)
    for seed in range(2):
        assert_exact(fused(make_case(PATTERNS[name], seed, torch.bfloat16, head_dim, 128)), "triton")
    assert_exact(fused(make_case(Full(), 2, torch.bfloat16, head_dim, 128, lists=True)), "triton")


@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_repeats_are_near_the_deterministic_result(head_dim):
    """A race would show sooner or later."""
    case = make_case(PATTERNS["random"], 5, torch.bfloat16, head_dim, 128, seq=8000)
    q, k, v = (x.requires_grad_() for x in (case.q, case.k, case.v))

    def run(deterministic):
        out = block_sparse_attention(q, k, v, case.layout, backend="triton", deterministic=deterministic)
        return torch.autograd.grad(out, (q, k, v), case.do)

    first = run(True)
    assert all(torch.equal(a, b) for a, b in zip(first, run(True), strict=True))
    for _ in range(500):
        for got, want in zip(run(False), first, strict=True):
            error = float((got.float() - want.float()).norm() / want.float().norm())
            assert error < 5e-3


@pytest.mark.parametrize("head_dim", [64, 128])
def test_captured_backward(head_dim):
    """A CUDA graph zeroes the sums itself."""
    case = make_case(PATTERNS["window"], 1, torch.bfloat16, head_dim, 128)
    q, k, v = (x.requires_grad_() for x in (case.q, case.k, case.v))

    def run():
        out = block_sparse_attention(q, k, v, case.layout, backend="triton", deterministic=False)
        return torch.autograd.grad(out, (q, k, v), case.do)

    for _ in range(3):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    with torch.no_grad():
        for x in (q, k, v):
            x.normal_()
    for _ in range(3):
        graph.replay()
    for got, want in zip(captured, run(), strict=True):
        torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


def test_compiled_whole():
    case = make_case(PATTERNS["window"], 1, torch.bfloat16, 64, 128)

    def grads(function):
        leaves = [x.detach().clone().requires_grad_() for x in (case.q, case.k, case.v)]
        return torch.autograd.grad(function(*leaves), leaves)

    def loss(q, k, v):
        return block_sparse_attention(q * 2, k, v, case.layout, deterministic=False).square().sum()

    for got, want in zip(grads(torch.compile(loss, fullgraph=True)), grads(loss), strict=True):
        torch.testing.assert_close(got, want, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("part", range(8))
def test_random_calls(part):
    for i in range(int(os.environ.get("RANDOM_CALLS", 80)) // 8):
        chance = random.Random(part * 100_000 + i)
        torch.manual_seed(chance.randrange(2**31))
        head_dim, dtype = chance.choice([(64, torch.bfloat16), (128, torch.float16)])
        batch, heads_kv, group = chance.randrange(1, 3), chance.randrange(1, 3), chance.choice([1, 1, 2, 3])
        seq = chance.randrange(1, 700)
        seq_q = chance.choice([seq, seq, chance.randrange(1, 700)])
        layout = BlockLayout.from_pattern(random_pattern(chance, seq), seq_q, seq, block_size=128, device="cuda")
        q, do = torch.randn(2, batch, seq_q, heads_kv * group, head_dim, device="cuda", dtype=dtype)
        k, v = torch.randn(2, batch, seq, heads_kv, head_dim, device="cuda", dtype=dtype)
        dlse = torch.randn(batch, heads_kv * group, seq_q, device="cuda")
        case = Case(q, k, v, layout, do, dlse, is_causal=chance.random() < 0.3, deterministic=False)
        try:
            assert_exact(case, "triton")
        except AssertionError as error:
            raise AssertionError(f"part {part}, call {i}: {error}") from error
