"""Layouts built on a GPU: those built on a CPU, and nobody waits."""

import pytest
import torch

from dilated_attention_pytorch import (
    BlockLayout,
    Causal,
    Chunks,
    DilatedBlocks,
    Documents,
    Full,
    GlobalBlocks,
    GlobalTokens,
    LocalBlocks,
    PerHead,
    RandomBlocks,
    SlidingWindow,
    block_sparse_attention,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

UNWAITED = {
    "window": SlidingWindow(1279, 1279),
    "causal": Causal(),
    "full": Full(),
    "documents": Documents((30000, 2768)) & SlidingWindow(1279, 0),
    "random": RandomBlocks(20),
    "dilated": DilatedBlocks((4096, 16384, 32768), (1, 4, 16), 20 / 256),
    "local": LocalBlocks(2560, 2),
    "global": GlobalBlocks(300),
    "heads": PerHead((SlidingWindow(9, 9), RandomBlocks(3))),
    "token rules": SlidingWindow(300, 0) | GlobalTokens(100, True) | GlobalTokens(at=(7000, 9999)) & Causal(),
    "token rules by head": PerHead((SlidingWindow(300, 0) | GlobalTokens(100), Causal(), Chunks(5000) & Causal())),
}
WAITED = {
    "union": SlidingWindow(300, 0) | GlobalTokens(100, True) | RandomBlocks(3),
    "intersection": RandomBlocks(9) & LocalBlocks(4096) & Causal(),
    "causal dilated": DilatedBlocks((4096, 16384), (1, 4), 0.1, causal=True),
}


def same(on_gpu, on_cpu):
    used = on_cpu.num_active_blocks
    got, want = on_gpu.flatten(by_key=True)[0], on_cpu.flatten(by_key=True)[0]
    for i, (mine, other) in enumerate(zip(got, want, strict=True)):
        entries = i in (2, 3, 11, 12)  # behind these there are spare places
        assert torch.equal((mine[:used] if entries else mine).cpu(), other)


@pytest.mark.parametrize("name", [*UNWAITED, *WAITED])
@pytest.mark.parametrize("tokens", [32768, 32768 - 5])
def test_the_lists_are_those_of_a_cpu(name, tokens):
    pattern = {**UNWAITED, **WAITED}[name]
    if name == "documents":
        tokens = 32768
    on_gpu, on_cpu = (
        BlockLayout.from_pattern(pattern, tokens, block_size=128, device=device) for device in ("cuda", "cpu")
    )
    assert len(on_gpu.by_query.indices) >= len(on_cpu.by_query.indices)
    same(on_gpu, on_cpu)
    same(on_gpu.causal, on_cpu.causal)


@pytest.mark.parametrize("name", UNWAITED)
def test_nobody_waits(name):
    torch.cuda.set_sync_debug_mode("error")
    try:
        layout = BlockLayout.from_pattern(UNWAITED[name], 32768, block_size=128, device="cuda")
        layout.flatten(by_key=True)
        layout.causal.flatten(by_key=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    same(layout, BlockLayout.from_pattern(UNWAITED[name], 32768, block_size=128))


@pytest.mark.parametrize("name", [*UNWAITED, *WAITED])
def test_the_same_where_order_must_not_matter(name):
    pattern = {**UNWAITED, **WAITED}[name]
    torch.use_deterministic_algorithms(True)
    try:
        layout = BlockLayout.from_pattern(pattern, 32768, block_size=128, device="cuda")
        _ = layout.key_work
    finally:
        torch.use_deterministic_algorithms(False)
    same(layout, BlockLayout.from_pattern(pattern, 32768, block_size=128))


@pytest.mark.parametrize("data", ["cu_seqlens", "document_ids"])
def test_documents_on_the_device_make_nobody_wait(data):
    lengths = (5000, 1, 20000, 7767)
    given = torch.tensor([0, *lengths, 0, 0]).cumsum(0).cuda()
    if data == "document_ids":
        given = torch.arange(4).repeat_interleave(torch.tensor(lengths)).int().cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layout = BlockLayout.from_documents(SlidingWindow(2000, 0), 32768, **{data: given}, block_size=128)
        layout.flatten(by_key=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    same(layout, BlockLayout.from_pattern(SlidingWindow(2000, 0) & Documents(lengths), 32768, block_size=128))


def test_a_new_length_compiles_nothing_and_keeps_nothing():
    from dilated_attention_pytorch.kernels import launcher

    pattern, tokens = SlidingWindow(500, 0) | GlobalTokens(10), [*range(2001, 2400, 7)]

    def step(n):
        q, k, v = torch.randn(3, 1, n, 2, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
        block_sparse_attention(q, k, v, pattern).sum().backward()

    for n in (4096, 2000):
        step(n)
    known = len(launcher._compiled)
    for n in tokens:
        step(n)
    assert len(launcher._compiled) == known


def test_no_layout_is_built_in_a_capture():
    """It would be empty until the graph runs, and remembered like that."""
    x = torch.zeros(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        with pytest.raises(RuntimeError, match="make the call once before"):
            BlockLayout.from_pattern(Causal(), 256, block_size=128, device="cuda")
    graph.replay()
    assert x.tolist() == [1, 1, 1]
