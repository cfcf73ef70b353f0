"""Choosing blocks on a GPU: the same choice as on a CPU, without a wait, and in a CUDA graph."""

import pytest
import torch

from dilated_attention_pytorch import (
    Antidiagonal,
    BlockGate,
    BlockSparseAdaptive,
    CumulativeMass,
    MeanPooled,
    RelativeThreshold,
    SharedBudget,
    TopK,
    block_masses,
    block_sparse_attention,
    kept_mass,
    select_blocks,
)
from dilated_attention_pytorch.ops import select
from dilated_attention_pytorch.ops.grids import grid_of
from dilated_attention_pytorch.ops.scores import estimated_masses
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


SERVED = [scorer for name, scorer in SCORERS.items() if name != "exact"]  # at most 64 rows a block
FUSED = SELECTORS[:3]  # budgets that are known beforehand


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


def normal(*shape, dtype):
    return torch.randn(*shape, device="cuda").to(dtype)


def far_from(got, want):
    return (got.double() - want).abs().max().item()


def fused(q, k, scorer, blocks, is_causal, scale):
    from dilated_attention_pytorch.kernels import select_features, select_masses

    features = select._features_of(select_features, scorer, q, k, blocks, scale)
    return select_masses.fused_masses(q, k, blocks, features, is_causal=is_causal, scale=scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scorer", [*SERVED, MeanPooled(16, 16)], ids=str)
@pytest.mark.parametrize("blocks", [(128, 128), (64, 16), (16, 16)], ids=str)
def test_masses_by_kernels(blocks, scorer, dtype):
    """About as far from the truth as the operators in the same dtype, whatever the lengths and head dimension."""
    cases = [(1, 1, 64), (100, 100, 80), (129, 1000, 128), (1000, 300, 128), (4096, 4096, 128), (1500, 1500, 24)]
    for seq_q, seq_k, head_dim in cases:
        for is_causal in (False, True):
            q, k = normal(2, seq_q, 4, head_dim, dtype=dtype), normal(2, seq_k, 2, head_dim, dtype=dtype)
            got = fused(q, k, scorer, blocks, is_causal, 0.5)
            call = {"scorer": scorer, "blocks": blocks, "is_causal": is_causal, "scale": 0.5}
            want = estimated_masses(q.double(), k.double(), **call)
            assert far_from(got, want) <= 2 * far_from(estimated_masses(q, k, **call), want) + 5e-6


@pytest.mark.parametrize("head_dim", [128, 256])
def test_masses_at_65536_tokens(head_dim):
    q, k = normal(1, 65536, 4, head_dim, dtype=torch.bfloat16), normal(1, 65536, 2, head_dim, dtype=torch.bfloat16)
    for scorer in (MeanPooled(), MeanPooled(16, 16), MeanPooled(4, 4), Antidiagonal(8)):
        got = fused(q, k, scorer, (128, 128), True, 1.0)
        call = {"scorer": scorer, "blocks": (128, 128), "is_causal": True, "scale": 1.0}
        want = estimated_masses(q.float(), k.float(), **call).double()
        assert far_from(got, want) <= 2 * far_from(estimated_masses(q, k, **call), want) + 5e-6
        seen = torch.ones_like(want[0, 0]).tril().bool()
        assert (got[:, :, ~seen] == 0).all()
        torch.testing.assert_close(got.sum(-1), torch.ones_like(got[..., 0]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["different", "tied", "nan"])
@pytest.mark.parametrize("selector", [*FUSED, SharedBudget(1.0), TopK(0.1, across_heads=True)], ids=repr)
def test_lists_by_kernels(selector, kind):
    """Given the masses: exactly the lists of the first of equally heavy blocks, and their order of work."""
    from tests.selection import assert_first_kept

    for lengths, blocks, lists in [
        ((1, 1), (16, 16), 1), ((700, 900), (64, 16), 4), ((9000, 9000), (16, 16), 3), ((65536, 65536), (128, 128), 16),
    ]:  # fmt: skip
        for is_causal in (False, True):
            grid = grid_of(lengths, blocks, is_causal, 1, 1, torch.device("cuda", 0))
            masses = torch.rand(2, lists, *grid.visible.shape, device="cuda")
            masses = (masses * 3).round() if kind == "tied" else masses if kind == "different" else masses * 0
            given = masses / masses if kind == "nan" else masses
            assert_first_kept(selector, masses, given, grid)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("selector", FUSED, ids=repr)
@pytest.mark.parametrize("scorer", ["mean", "patches", "minmax", "antidiagonal", MeanPooled(16, 16)], ids=str)
def test_a_choice_by_kernels_is_as_good(scorer, selector, dtype, monkeypatch):
    """As many blocks as by the operators, of the same mass; and each sample as if it were alone."""
    for seq, block_size, per_kv_head in [(700, (64, 16), False), (5000, (128, 32), True), (4096, 64, False)]:
        q, k = normal(2, seq, 4, 64, dtype=dtype), normal(2, seq, 2, 64, dtype=dtype)
        call = {"scorer": scorer, "selector": selector, "block_size": block_size, "is_causal": True}
        call |= {"per_kv_head": per_kv_head, "scale": 0.5}
        layout = select_blocks(q, k, **call)
        ours = layout.to_block_mask()
        assert torch.equal(select_blocks(q[1:], k[1:], **call).to_block_mask(), ours[1:])
        with monkeypatch.context() as patched:
            patched.setattr(select, "_has_kernels", lambda *args: False)
            theirs = select_blocks(q, k, **call).to_block_mask()
        blocks = (layout.block_q, layout.block_k)
        truth = estimated_masses(q.double(), k.double(), select.scorer_of(scorer), blocks, is_causal=True, scale=0.5)
        truth = truth.unflatten(1, (2, -1)).mean(2) if per_kv_head else truth
        kept, kept_by_operators = ((truth * mask).sum((1, 2, 3)) for mask in (ours, theirs))
        assert torch.equal(ours.sum((1, 2, 3)), theirs.sum((1, 2, 3)))
        torch.testing.assert_close(kept, kept_by_operators, rtol=1e-3, atol=0)
        assert (ours != theirs).sum() <= 0.03 * theirs.sum()


def test_no_new_selection_kernel_for_a_new_length():
    from dilated_attention_pytorch.kernels import select_features, select_lists, select_masses

    compiled = [
        select_features.pool_kernel, select_masses.masses_kernel,
        select_lists.teams_kernel, select_lists.digits_kernel, select_lists.counts_kernel,
        select_lists.offsets_kernel, select_lists.lists_kernel, select_lists.order_kernel,
    ]  # fmt: skip

    def choose(seq, batch):
        for selector in FUSED:
            for scorer in ("mean", "patches", "antidiagonal"):
                q, k = (normal(batch, seq, heads, 64, dtype=torch.bfloat16) for heads in (4, 2))
                select_blocks(q, k, scorer=scorer, selector=selector, block_size=64, is_causal=True)

    def made():
        return [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in compiled]

    choose(700, 1)
    before = made()
    for seq, batch in ((1, 2), (64, 3), (1000, 1), (16384, 2)):
        choose(seq, batch)
    assert made() == before
