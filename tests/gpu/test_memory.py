"""Memory on a GPU: planned peaks, pools that leave it to PyTorch's allocator, copies of cached layouts."""

import gc
import threading

import pytest
import torch

from dilated_attention_pytorch import (
    AttentionBuffers,
    BlockSparseAttention,
    BlockSparseHierarchical,
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    BufferType,
    Causal,
    DilatedBlocks,
    Full,
    GlobalTokens,
    MemoryPool,
    PerHead,
    PersistentPatternCache,
    RandomBlocks,
    SlidingWindow,
    SparsePatternConfig,
    block_sparse_attention,
    max_sequence_length,
    plan_memory,
)
from dilated_attention_pytorch.layout import clear_layout_cache
from dilated_attention_pytorch.memory import AttentionConfig, Device, measure_peak

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

N = 131072
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
HEADS = PerHead(tuple(RandomBlocks(5, seed=head) for head in range(8)))

# (pattern, tokens, heads, heads_kv, head_dim, batch, dtype, backend): each forward and training, 44 in all.
CASES = {
    "window": (SlidingWindow(511, 0), N, 8, 8, 64, 1, BF16, "auto"),
    "window, 128": (SlidingWindow(511, 0), N, 8, 8, 128, 1, BF16, "auto"),
    "window, float32": (SlidingWindow(511, 0), N, 8, 8, 64, 1, F32, "auto"),
    "window, batch": (SlidingWindow(511, 0), N // 4, 8, 8, 64, 3, F16, "auto"),
    "window, odd": (SlidingWindow(511, 300), N + 77, 8, 8, 64, 1, BF16, "auto"),
    "window, narrow heads": (SlidingWindow(511, 300), N, 8, 8, 32, 1, BF16, "auto"),
    "window, head 80": (SlidingWindow(511, 300), N, 8, 8, 80, 1, BF16, "auto"),
    "random": (RandomBlocks(20), N, 8, 8, 64, 1, BF16, "auto"),
    "random, grouped": (RandomBlocks(20), N, 8, 2, 64, 1, BF16, "auto"),
    "random, one key head": (RandomBlocks(20), N, 8, 1, 128, 1, BF16, "auto"),
    "random, small blocks": (RandomBlocks(40, block_size=16), N, 8, 8, 64, 1, BF16, "auto"),
    "random, blocks of 256": (RandomBlocks(10, block_size=256), N, 8, 8, 64, 1, BF16, "auto"),
    "per head": (HEADS, N, 8, 8, 64, 1, BF16, "auto"),
    "dilated": (DilatedBlocks((2048, 4096, 8192), (1, 2, 4), 0.02, 128), N, 8, 8, 64, 1, BF16, "auto"),
    "dilated, causal": (DilatedBlocks((2048, 8192), (1, 2), 0.02, 128, True) & Causal(), N, 8, 8, 64, 1, BF16, "auto"),
    "global": (SlidingWindow(255, 255) | GlobalTokens(64, queries=True), N, 8, 8, 64, 1, BF16, "auto"),
    "million": (SlidingWindow(1023, 0), 1 << 20, 8, 8, 64, 1, BF16, "auto"),
    "dense": (Full(), 16384, 8, 8, 64, 1, BF16, "auto"),
    "causal": (Causal(), 16384, 8, 8, 128, 1, BF16, "auto"),
    "dense by triton": (Full(), 16384, 8, 8, 64, 1, BF16, "triton"),
    "blockwise": (SlidingWindow(511, 0), N, 8, 8, 64, 1, BF16, "blockwise"),
    "reference": (SlidingWindow(511, 0), 4096, 8, 8, 64, 1, F32, "reference"),
}


def measured(pattern, tokens, heads, heads_kv, head_dim, batch, dtype, backend, training):
    """Peak above the state before q, k, v; a short call of the same kind first, to compile."""
    for length in (1024, tokens):
        clear_layout_cache()
        gc.collect()
        torch.cuda.empty_cache()
        with measure_peak("cuda") as peak:
            tensors = [
                torch.ones(batch, length, h, head_dim, dtype=dtype, device="cuda", requires_grad=training)
                for h in (heads, heads_kv, heads_kv)
            ]
            out = block_sparse_attention(*tensors, pattern, backend=backend)
            if training:
                out.backward(torch.ones_like(out))
        del tensors, out
    return peak.peak_bytes


# The kernels of PyTorch, the plain-PyTorch backend and the definition choose temporaries of their own.
LOOSE = {"dense": 0.15, "causal": 0.15, "blockwise": 0.15, "reference": 0.15}


@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("name", CASES)
def test_the_planned_peak_is_the_measured_one(name, training):
    torch.use_deterministic_algorithms(False)
    pattern, tokens, heads, heads_kv, head_dim, batch, dtype, backend = CASES[name]
    config = AttentionConfig(pattern=pattern, heads=heads, heads_kv=heads_kv, head_dim=head_dim, backend=backend)
    plan = plan_memory(config, tokens, batch, dtype, training, device="cuda")
    got = measured(*CASES[name], training)
    assert plan.peak_bytes == pytest.approx(got, rel=LOOSE.get(name, 0.03))


@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
def test_projections_are_in_the_plan(training):
    torch.use_deterministic_algorithms(False)
    for length in (1024, N):
        clear_layout_cache()
        gc.collect()
        with measure_peak("cuda") as peak:
            module = BlockSparseRingMultiheadDilatedAttention(512, 8, sparsity_ratio=0.02, device="cuda", dtype=BF16)
            module.requires_grad_(training)
            x = torch.ones(1, length, 512, device="cuda", dtype=BF16, requires_grad=training)
            out = module(x, x, x)
            if training:
                out.backward(torch.ones_like(out))
        del x, out
    plan = plan_memory(module, N, 1, BF16, training, device="cuda")
    assert plan.peak_bytes == pytest.approx(peak.peak_bytes, rel=0.05)


def test_the_longest_sequence_runs_and_a_longer_one_does_not():
    """With a limit of 2 GiB on the process, and the planner told so."""
    torch.use_deterministic_algorithms(False)
    gc.collect()
    clear_layout_cache()
    torch.cuda.empty_cache()
    begun, limit = torch.cuda.memory_reserved(), 2 << 30
    total = torch.cuda.get_device_properties(0).total_memory
    longest = max_sequence_length(SlidingWindow(511, 0), limit, dtype=BF16, training=True, device="cuda")

    def step(tokens):
        q, k, v = (torch.ones(1, tokens, 8, 64, dtype=BF16, device="cuda", requires_grad=True) for _ in range(3))
        out = block_sparse_attention(q, k, v, SlidingWindow(511, 0))
        out.backward(torch.ones_like(out))
        torch.cuda.synchronize()

    torch.cuda.set_per_process_memory_fraction((begun + limit + (64 << 20)) / total)
    try:
        step(int(longest * 0.97))
        clear_layout_cache()
        gc.collect()
        torch.cuda.empty_cache()
        with pytest.raises(torch.OutOfMemoryError):
            step(int(longest * 1.1))
        gc.collect()
        torch.cuda.empty_cache()
        step(longest // 2)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_the_seeds_two_configurations_take_the_same():
    torch.use_deterministic_algorithms(False)
    configs = [
        BlockSparseRingDilatedAttention([2048], [1], SparsePatternConfig(sparsity_ratio=0.01, block_size=64)),
        BlockSparseRingDilatedAttention(
            [65536, 131072], [1, 2], SparsePatternConfig(sparsity_ratio=0.02, block_size=256)
        ),
    ]
    peaks = [measured(m.pattern(), N, 8, 8, 64, 1, F16, "auto", False) for m in configs]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.02)


def test_the_hierarchical_pattern_takes_what_the_others_take():
    torch.use_deterministic_algorithms(False)
    patterns = [BlockSparseRingDilatedAttention(sparsity_ratio=r).pattern() for r in (0.1, 0.05, 0.01)]
    peaks = [
        measured(p, 16384, 8, 8, 64, 1, F16, "auto", False) for p in (BlockSparseHierarchical().pattern(), *patterns)
    ]
    assert peaks[0] <= 1.05 * min(peaks[1:])


def test_a_pool_leaves_the_gpu_to_pytorchs_allocator():
    pool = MemoryPool(pool_size=2)
    before = torch.cuda.memory_allocated()
    tensors = [pool.take((1 << 20,), F32, "cuda") for _ in range(5)]
    assert len({x.data_ptr() for x in tensors}) == 5
    assert pool.get_buffer_stats()["buffers"] == 0
    del tensors
    assert torch.cuda.memory_allocated() == before
    for _ in range(20):
        pool.take((1 << 20,), F32, "cuda")
    stats = pool.get_buffer_stats()
    assert stats["cache_hit_rate"] > 0.5
    assert stats["hits"] >= 20


def test_another_stream_never_gets_memory_that_is_still_read():
    """A slow reader on one stream, the same sizes taken and overwritten on another: the reader sees its own values."""
    pool, slow = MemoryPool(), torch.cuda.Stream()
    busy = torch.randn(4096, 4096, device="cuda")
    results = []
    for i in range(20):
        x = pool.take((1 << 20,), F32, "cuda").fill_(i)
        slow.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(slow):
            _ = busy @ busy
            results.append(x.sum())
        x.record_stream(slow)
        del x
        pool.take((1 << 20,), F32, "cuda").fill_(-1.0)
    torch.cuda.synchronize()
    assert [float(r) for r in results] == [i * float(1 << 20) for i in range(20)]


@pytest.mark.parametrize("manager", [False, True])
def test_training_with_a_pool_gives_the_same_bits(manager):
    pool = MemoryPool()
    pooled = BlockSparseAttention(SlidingWindow(200, 3), enable_memory_pool=pool, enable_buffer_manager=manager)
    plain = BlockSparseAttention(SlidingWindow(200, 3))
    for step in range(6):
        shape = (1 + step % 3, 300 + 217 * step % 900, 4, 64)
        tensors = [torch.randn(shape, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3)]
        outs = [module(*tensors) for module in (plain, pooled)]
        assert torch.equal(*outs)
        grads = [torch.autograd.grad(out.square().sum(), tensors) for out in outs]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert pooled.get_buffer_stats()["cache_hit_rate"] > 0.0


def test_buffers_by_type():
    buffers = AttentionBuffers(MemoryPool())
    buffers.preallocate_buffers(1, 4096, 8, 64, BF16, "cuda")
    assert (buffers.get(BufferType.OUTPUT, (100,), F32, "cuda") == 0).all()
    assert buffers.get_buffer_stats()["by_type"]["OUTPUT"]["requests"] == 2


def test_threads_share_a_pool_on_the_gpu():
    pool, wrong = MemoryPool(), []
    module = BlockSparseAttention(SlidingWindow(100, 3), enable_memory_pool=pool)
    q, k, v = (torch.randn(1, 700, 4, 64, device="cuda", dtype=BF16) for _ in range(3))
    want = module(q, k, v)

    def work():
        for _ in range(20):
            if not torch.equal(module(q, k, v), want):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not wrong


def test_a_cached_layout_is_copied_to_the_gpu_and_is_one_entry(tmp_path):
    cache = PersistentPatternCache(directory=tmp_path)
    here = cache.layout(SlidingWindow(40, 3), 1000, block_size=64)
    there = cache.layout(SlidingWindow(40, 3), 1000, block_size=64, device="cuda")
    assert there.device.type == "cuda"
    assert cache.stats()["built"] == 1
    assert len(cache) == 1
    for a, b in zip(here.flatten()[0], there.flatten()[0], strict=True):
        assert torch.equal(a, b.cpu())
    fresh = PersistentPatternCache(directory=tmp_path).layout(SlidingWindow(40, 3), 1000, block_size=64, device="cuda")
    assert all(torch.equal(a, b) for a, b in zip(there.flatten()[0], fresh.flatten()[0], strict=True))


def test_the_current_device_is_known():
    device = Device.of()
    assert device.type == "cuda"
    assert device.name == torch.cuda.get_device_name()
    assert device.capability == torch.cuda.get_device_capability()
