"""Pool options of modules: the same bits, forward and backward, and memory that is used again."""

import copy
import io

import pytest
import torch

from dilated_attention_pytorch import (
    AttentionBuffers,
    BlockSparseAttention,
    BlockSparseHierarchical,
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    MemoryPool,
    RandomBlocks,
    SlidingWindow,
    create_block_sparse_attention,
)
from dilated_attention_pytorch.backends import blockwise
from dilated_attention_pytorch.memory import active_source, shared_pool


def own_pool():
    return MemoryPool(pool_size=32, min_bytes=0, max_bytes=1 << 28)


def options_of(kind):
    return {
        "pool": {"enable_memory_pool": own_pool()},
        "shared": {"enable_memory_pool": True},
        "lightweight": {"enable_memory_pool": True, "lightweight_pool": True},
        "manager": {"enable_memory_pool": own_pool(), "enable_buffer_manager": True},
        "manager, fresh": {"enable_buffer_manager": True, "enable_buffer_reuse": False},
    }[kind]


KINDS = ["pool", "shared", "lightweight", "manager", "manager, fresh"]


def qkv(seq, batch=1, dtype=torch.float32):
    return [torch.randn(batch, seq, 4, 16, dtype=dtype, requires_grad=True) for _ in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pattern", [SlidingWindow(70, 3), RandomBlocks(2, block_size=32)], ids=["copied", "direct"])
def test_training_steps_of_changing_shape_give_the_same_bits(pattern, kind):
    plain, pooled = BlockSparseAttention(pattern), BlockSparseAttention(pattern, **options_of(kind))
    for step in range(6):
        tensors = qkv(100 + 61 * step % 200, batch=1 + step % 3, dtype=torch.float64 if step == 4 else torch.float32)
        outs = [module(*tensors, is_causal=step % 2 == 1) for module in (plain, pooled)]
        assert torch.equal(*outs)
        grads = [torch.autograd.grad(out.square().sum(), tensors) for out in outs]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
        assert active_source() is None


def test_the_backward_draws_from_the_pool_too():
    pool = own_pool()
    module = BlockSparseAttention(SlidingWindow(70, 3), enable_memory_pool=pool)
    out = module(*qkv(300))
    before = pool.get_buffer_stats()
    out.sum().backward()
    after = pool.get_buffer_stats()
    assert after["hits"] + after["misses"] > before["hits"] + before["misses"]
    assert after["bytes_in_use"] == 0


def test_a_backward_that_fails_leaves_nothing_behind():
    module = BlockSparseAttention(SlidingWindow(40, 0), enable_memory_pool=own_pool())
    q, k, v = qkv(200)
    changed = q * 1
    out = module(changed, k, v)
    changed.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    assert active_source() is None


def test_gradients_accumulate_and_graphs_wait():
    """Two graphs alive at once, their backwards in the other order, a third forward between them."""
    module = BlockSparseAttention(SlidingWindow(40, 0), enable_memory_pool=own_pool())
    plain = BlockSparseAttention(SlidingWindow(40, 0))
    tensors = qkv(200)
    for attention in (module, plain):
        for x in tensors:
            x.grad = None
        first, second = attention(*tensors).square().sum(), attention(*(2 * x for x in tensors)).square().sum()
        second.backward()
        attention(*qkv(333))
        first.backward()
        if attention is module:
            pooled = [x.grad.clone() for x in tensors]
    assert all(torch.equal(a, x.grad) for a, x in zip(pooled, tensors, strict=True))


def test_outputs_that_are_kept_stay_as_they_are():
    module = BlockSparseAttention(SlidingWindow(40, 0), enable_memory_pool=own_pool())
    kept = [(module(*tensors), tensors) for tensors in (qkv(150 + i) for i in range(5))]
    plain = BlockSparseAttention(SlidingWindow(40, 0))
    for out, tensors in kept:
        assert torch.equal(out, plain(*tensors))


def test_hits_after_warm_up():
    pool = own_pool()
    module = BlockSparseAttention(SlidingWindow(40, 0), enable_memory_pool=pool)
    lengths = [100, 400, 250, 399, 101, 300]
    with torch.no_grad():
        for seq in lengths:
            module(*qkv(seq))
        before = pool.get_buffer_stats()
        for seq in lengths * 3:
            module(*qkv(seq))
    after = pool.get_buffer_stats()
    requests = after["hits"] + after["misses"] - before["hits"] - before["misses"]
    assert requests > 50
    assert (after["misses"] - before["misses"]) / requests <= 0.05
    assert module.get_buffer_stats()["cache_hit_rate"] > 0.8


def test_stats_by_type_name_what_the_workspace_is():
    module = BlockSparseAttention(SlidingWindow(40, 0), enable_memory_pool=own_pool(), enable_buffer_manager=True)
    module(*qkv(200)).sum().backward()
    stats = module.get_buffer_stats()
    assert {"QUERY", "KEY", "VALUE", "SCORES", "WEIGHTS", "TEMP"} <= stats["by_type"].keys()
    assert stats["by_type"]["QUERY"]["largest"] == 200 // 128 * 128 * 16 * 4 + 128 * 16 * 4


def test_preallocated_buffers_serve_the_first_call():
    pool = MemoryPool(pool_size=16, max_bytes=1 << 30)
    module = BlockSparseAttention(SlidingWindow(255, 0), enable_memory_pool=pool, enable_buffer_manager=True)
    module.buffer_manager.preallocate_buffers(1, 16384, 4, 16)
    before = pool.get_buffer_stats()["misses"]
    with torch.no_grad():
        module(*(torch.randn(1, 16384, 4, 16) for _ in range(3)))
    stats = pool.get_buffer_stats()
    assert stats["misses"] == before
    assert stats["hits"] > 0


def test_modules_share_one_pool_unless_told_otherwise():
    first, second = (BlockSparseAttention(SlidingWindow(9, 9), enable_memory_pool=True) for _ in range(2))
    assert first.memory_pool is second.memory_pool is shared_pool()
    light = BlockSparseAttention(SlidingWindow(9, 9), enable_memory_pool=True, lightweight_pool=True)
    assert light.memory_pool is not shared_pool()


MODULES = {
    "pattern": lambda **options: BlockSparseAttention(SlidingWindow(9, 9), **options),
    "ring": lambda **options: BlockSparseRingDilatedAttention(sparsity_ratio=0.5, **options),
    "hierarchical": lambda **options: BlockSparseHierarchical(**options),
    "multihead": lambda **options: BlockSparseRingMultiheadDilatedAttention(32, 4, **options),
    "factory": lambda **options: create_block_sparse_attention("base", sparsity_ratio=0.5, **options),
    "factory, hierarchical": lambda **options: create_block_sparse_attention("hierarchical", **options),
    "factory, multihead": lambda **options: create_block_sparse_attention(
        "multihead", embed_dim=8, num_heads=2, **options
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_every_module_has_the_options(name):
    pool = own_pool()
    module = MODULES[name](enable_memory_pool=pool, enable_buffer_manager=True, enable_buffer_reuse=True)
    assert isinstance(module.buffer_manager, AttentionBuffers)
    width = getattr(module, "embed_dim", None)
    tensors = qkv(300) if width is None else [torch.randn(1, 300, width) for _ in range(3)]
    module(*tensors)
    assert pool.get_buffer_stats()["misses"] > 0
    assert 0.0 <= module.get_buffer_stats()["cache_hit_rate"] <= 1.0


@pytest.mark.parametrize("name", MODULES)
def test_features_that_are_not_used_are_not_there(monkeypatch, name):
    module = MODULES[name]()
    assert not hasattr(module, "buffer_manager")
    assert not hasattr(module, "memory_pool")
    with pytest.raises(RuntimeError, match="get_buffer_stats needs enable_memory_pool"):
        module.get_buffer_stats()
    sources = []
    init = blockwise.Scratch.__init__
    monkeypatch.setattr(
        blockwise.Scratch, "__init__", lambda self, like: (init(self, like), sources.append(self._source))[0]
    )
    width = getattr(module, "embed_dim", None)
    module(*(qkv(300) if width is None else [torch.randn(1, 300, width) for _ in range(3)]))
    assert set(sources) == {None}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lightweight_pool": True}, ValueError, "lightweight_pool.*needs enable_memory_pool=True"),
        ({"lightweight_pool": True, "enable_memory_pool": own_pool()}, ValueError, "a pool of its own"),
        ({"enable_buffer_reuse": True}, ValueError, "without enable_buffer_manager"),
        ({"enable_memory_pool": 3}, TypeError, "enable_memory_pool must be True or False"),
        ({"enable_buffer_manager": "yes"}, TypeError, "enable_buffer_manager must be True or False"),
        ({"enable_memory_pools": True}, TypeError, "enable_memory_pools"),
    ],
)
@pytest.mark.parametrize("name", ["pattern", "ring", "hierarchical"])
def test_bad_options(name, options, error, message):
    with pytest.raises(error, match=message):
        MODULES[name](**options)


def test_modules_with_a_pool_can_be_copied_and_saved():
    module = BlockSparseRingMultiheadDilatedAttention(32, 4, enable_memory_pool=own_pool(), enable_buffer_manager=True)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    x = torch.randn(1, 100, 32)
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert torch.equal(other(x, x, x), module(x, x, x))
        assert other.buffer_manager is other.attention.buffer_manager
        assert other.memory_pool is not module.memory_pool
    assert module.state_dict().keys() == BlockSparseRingMultiheadDilatedAttention(32, 4).state_dict().keys()


def test_a_compiled_module_plans_its_own_memory():
    pool = own_pool()
    module = BlockSparseRingDilatedAttention(sparsity_ratio=0.5, block_size=64, enable_memory_pool=pool)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    tensors = qkv(200)
    assert torch.equal(compiled(*tensors), module(*tensors))


def test_autocast_and_weights():
    module = BlockSparseRingDilatedAttention(sparsity_ratio=0.5, enable_memory_pool=own_pool())
    plain = BlockSparseRingDilatedAttention(sparsity_ratio=0.5)
    tensors = qkv(200)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(*tensors), plain(*tensors))
    for (out, weights), (want, want_weights) in [
        [m(*tensors, return_attention_weights=True) for m in (module, plain)],
    ]:
        assert torch.equal(out, want)
        assert torch.equal(weights.to_dense(), want_weights.to_dense())


def test_the_seeds_advice_runs_on_a_block_sparse_module(capsys):
    """Their snippets on preallocation and monitoring, verbatim; they wrote them for another class."""
    from tests.test_seeds import SNIPPETS, run

    module = BlockSparseRingDilatedAttention(enable_buffer_manager=True, enable_buffer_reuse=True)
    names = {"attention": module, "batch_size": 1, "seq_len": 4096, "num_heads": 4, "head_dim": 64}
    run(SNIPPETS["004", 2], names)
    assert module.buffer_manager.pool.bytes_held > 0
    module(*qkv(300))
    run(SNIPPETS["004", 3], names)
    assert capsys.readouterr().out.startswith("Cache hit rate: ")
