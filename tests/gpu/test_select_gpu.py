"""Choosing blocks on a GPU: the same choice as on a CPU, without a wait, and in a CUDA graph."""

import pytest
import torch

from dilated_attention_pytorch import (
    BlockGate,
    BlockSparseAdaptive,
    CumulativeMass,
    RelativeThreshold,
    SharedBudget,
    TopK,
    block_masses,
    block_sparse_attention,
    kept_mass,
    select_blocks,
)
from dilated_attention_pytorch.ops.select import SCORERS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SELECTORS = [
    SharedBudget(0.3),
    TopK(0.3),
    TopK(0.3, even=True, across_heads=True),
    CumulativeMass(0.6),
    CumulativeMass(0.9, at_most=0.4),
    RelativeThreshold(0.3, at_most=0.4),
]
BLOCKS = [16, (64, 16), 128]


def inputs(seq=700, dtype=torch.float64):
    q = torch.randn(2, seq, 4, 64, dtype=torch.float64, device="cuda").to(dtype)
    return q, *(torch.randn(2, seq, 2, 64, dtype=torch.float64, device="cuda").to(dtype) for _ in "kv")


@pytest.mark.parametrize("block_size", BLOCKS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scorer", SCORERS)
def test_the_same_masses_and_choice_as_on_a_cpu(scorer, is_causal, block_size):
    q, k, _ = inputs()
    call = {"scorer": scorer, "block_size": block_size, "is_causal": is_causal}
    got, want = block_masses(q, k, **call), block_masses(q.cpu(), k.cpu(), **call)
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=1e-11)
    for selector in SELECTORS:
        chosen = select_blocks(q, k, selector=selector, **call).to_block_mask().cpu()
        assert torch.equal(chosen, select_blocks(q.cpu(), k.cpu(), selector=selector, **call).to_block_mask())


@pytest.mark.parametrize("block_size", BLOCKS)
@pytest.mark.parametrize("selector", SELECTORS, ids=repr)
def test_attention_over_a_choice(selector, block_size):
    """Ragged lists with spare places, per sample and head, through the kernels: forward and backward."""
    q, k, v = (x.requires_grad_() for x in inputs(dtype=torch.bfloat16))
    layout = select_blocks(q, k, selector=selector, block_size=block_size, is_causal=True)
    do = torch.randn_like(q)
    found = {}
    for backend in ("triton", "reference"):
        out = block_sparse_attention(q, k, v, layout, backend=backend)
        found[backend] = (out, *torch.autograd.grad(out, (q, k, v), do))
    for got, want in zip(found["triton"], found["reference"], strict=True):
        error = (got.double() - want.double()).norm() / want.double().norm()
        assert error < 2e-2
    kept = kept_mass(q, k, layout, is_causal=True)
    assert 0.1 < kept.mean() < 1


@pytest.mark.parametrize("scorer", [*SCORERS, "gate"])
def test_no_wait_for_the_device(scorer):
    """Selection, attention over it and its backward: nothing asks the device for a number."""
    q, k, v = (x.requires_grad_() for x in inputs(dtype=torch.bfloat16))
    scorer = BlockGate(4, 64, 2, device="cuda") if scorer == "gate" else scorer
    for selector in SELECTORS:
        module = BlockSparseAdaptive(selector=selector, scorer=scorer, block_size=(64, 16))
        module(q, k, v, True).sum().backward()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            module(q, k, v, True).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_in_a_cuda_graph():
    """The graph chooses anew for new inputs."""
    q, k, v = inputs(dtype=torch.bfloat16)
    module = BlockSparseAdaptive(0.3, block_size=64)
    stream = torch.cuda.Stream()
    with torch.no_grad():
        with torch.cuda.stream(stream):
            for _ in range(2):
                module(q, k, v, True)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = module(q, k, v, True)
        for x in (q, k, v):
            x.normal_()
        graph.replay()
        assert torch.equal(out, module(q, k, v, True))


def test_soft_gate():
    gate = BlockGate(4, 64, 2, device="cuda")
    for parameter in gate.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    module = BlockSparseAdaptive(0.4, scorer=gate, block_size=64, gate_strength=0.5)
    q, k, v = inputs(dtype=torch.bfloat16)
    found = {}
    for backend in ("auto", "reference"):
        module.backend = backend
        gate.zero_grad()
        out = module(q, k, v, True)
        out.float().square().sum().backward()
        found[backend] = [out, *(p.grad.clone() for p in gate.parameters())]
    for got, want in zip(found["auto"], found["reference"], strict=True):
        assert (got.double() - want.double()).norm() < 3e-2 * want.double().norm()
