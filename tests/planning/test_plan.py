"""The planner: its peaks are those that are measured, its answers follow from them, its errors say what would do."""

import gc
from types import SimpleNamespace

import pytest
import torch

from dilated_attention_pytorch import (
    BlockLayout,
    BlockSparseHierarchical,
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    Branches,
    Causal,
    DilatedBlocks,
    Full,
    Neighborhood,
    PerHead,
    RandomBlocks,
    SlidingWindow,
    SparsePatternConfig,
    block_sparse_attention,
    create_block_sparse_attention,
    dilated_attention,
)
from dilated_attention_pytorch.backends import triton
from dilated_attention_pytorch.backends.base import Request
from dilated_attention_pytorch.layout import clear_layout_cache
from dilated_attention_pytorch.memory import GPUS, Device, can_measure, devices, measure_peak
from dilated_attention_pytorch.ops.choose import choose
from dilated_attention_pytorch.planning import AttentionConfig, max_sequence_length, plan_memory, recommend

GIB = 1 << 30
needs_linux = pytest.mark.skipif(not can_measure()[0], reason=can_measure()[1])


def test_a_plan_written_out():
    """Every byte of a small training call on a GPU, by hand."""
    plan = plan_memory(RandomBlocks(2), 1000, 2, torch.float16, True, heads=4, heads_kv=2, head_dim=32, device="A100")
    q, k, rows = 2 * 1000 * 4 * 32 * 2, 2 * 1000 * 2 * 32 * 2, 2 * 4 * 1000 * 4
    lists = 4 * (9 + 8 + 16 + 4 * 8)
    want = {
        "q": q,
        "k, v": 2 * k,
        "lists by query": lists + 20,
        "building the lists": 96 * 16 + 4 * (9 + 8 + 16),
        "out": q,
        "lse": rows,
        "lists by key": lists,
        "dout": q,
        "dq": q,
        "dk, dv": 2 * k,
        "triton workspace": 2 * 4 * 2 * 4 * 1024,
    }
    assert {item.name: item.bytes for item in plan.items} == {name: -(-n // 512) * 512 for name, n in want.items()}
    assert plan.backend == "triton"
    assert plan.peak_phase == "backward"
    building = next(item.bytes for item in plan.items if item.name == "building the lists")
    assert plan.peak_bytes == sum(item.bytes for item in plan.items) - building
    assert sum(plan.by_kind().values()) == plan.peak_bytes
    assert "peak" in str(plan)
    assert "triton backend; fits A100" in str(plan)


MEASURED = {
    "window": (SlidingWindow(511, 0), 32768, 4, 4, torch.float32),
    "random, grouped": (RandomBlocks(8), 32768, 8, 2, torch.float32),
    "dilated, half": (DilatedBlocks((2048, 4096), (1, 2), 0.02, 128), 65536, 4, 4, torch.bfloat16),
    "dense": (Full(), 4096, 16, 16, torch.float32),
}


def test_values_of_another_width_are_in_the_plan():
    """Against arithmetic; on a ring as well."""
    sizes = {"heads": 4, "heads_kv": 2, "head_dim": 48, "head_dim_v": 32}
    for world_size, of_ring in ((1, {}), (2, {"two receive buffers": 2 * (48 + 32) * 2, "running out and lse": None})):
        plan = plan_memory(SlidingWindow(255, 0), 1024, 1, torch.float32, True, world_size, device="A100", **sizes)
        tokens = 1024 // world_size
        want = {"q": 4 * 48, "k, v": 2 * (48 + 32), "out": 4 * 32, "dout": 4 * 32, "dq": 4 * 48, "dk, dv": 2 * 80}
        got = {item.name: item.bytes for item in plan.items}
        for name, numbers in (want | of_ring).items():
            if numbers is not None:
                assert got[name] == 4 * tokens * numbers, name
    with pytest.raises(ValueError, match="head_dim_v must be left out for a module with projections, got 32"):
        plan_memory(BlockSparseRingMultiheadDilatedAttention(256, 4), 1024, head_dim_v=32)


def measured(attend, sizes, dtype, training):
    """Peak of a call above the state before its tensors exist, first made smaller to load what first calls load: the
    code of a library is resident memory, too."""
    for shapes in *([(1, tokens, *shape[2:]) for shape in sizes] for tokens in (512, 4096)), sizes:
        clear_layout_cache()
        gc.collect()
        with measure_peak() as peak:
            tensors = [torch.ones(shape, dtype=dtype, requires_grad=training) for shape in shapes]
            out = attend(*tensors)
            if training:
                out.backward(torch.ones_like(out))
        del tensors, out
    return peak.peak_bytes


@pytest.mark.slow
@needs_linux
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("name", MEASURED)
def test_the_planned_peak_is_the_measured_one(name, training):
    pattern, tokens, heads, heads_kv, dtype = MEASURED[name]
    torch.use_deterministic_algorithms(False)  # else PyTorch touches memory that nobody uses
    sizes = [(1, tokens, h, 64) for h in (heads, heads_kv, heads_kv)]
    got = measured(lambda q, k, v: block_sparse_attention(q, k, v, pattern), sizes, dtype, training)
    plan = plan_memory(pattern, tokens, 1, dtype, training, heads=heads, heads_kv=heads_kv, device="cpu")
    assert plan.peak_bytes == pytest.approx(got, rel=0.1)


@pytest.mark.slow
@needs_linux
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
def test_the_planned_peak_of_dilated_attention_is_the_measured_one(training):
    torch.use_deterministic_algorithms(False)
    branches = Branches((1024, 2048), (1, 2))
    options = {"segment_lengths": [1024, 2048], "dilation_rates": [1, 2]}
    sizes = [(1, 32768, 4, 64)] * 3
    got = measured(lambda q, k, v: dilated_attention(q, k, v, **options), sizes, torch.float32, training)
    plan = plan_memory(branches, 32768, training=training, heads=4, device="cpu")
    assert plan.peak_bytes == pytest.approx(got, rel=0.1)


@pytest.mark.slow
@needs_linux
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
def test_projections_are_in_the_plan(training):
    torch.use_deterministic_algorithms(False)
    module = BlockSparseRingMultiheadDilatedAttention(256, 4, sparsity_ratio=0.05)
    if not training:
        module.requires_grad_(False)
    got = measured(lambda x: module(x, x, x), [(1, 32768, 256)], torch.float32, training)
    plan = plan_memory(module, 32768, training=training, device="cpu")
    held = sum(item.bytes for item in plan.items if item.kind == "parameters")
    # Freed workspace may stay with malloc while the last projection runs, or may not.
    lingering = 0 if training else plan.by_kind()["workspace"]
    assert 0.9 * (plan.peak_bytes - held - lingering) <= got <= 1.1 * (plan.peak_bytes - held)


def test_segment_lengths_do_not_change_the_peak():
    """The seeds' two configurations differed by a factor of 2; here the lists differ and nothing else."""
    small = BlockSparseRingDilatedAttention([2048], [1], SparsePatternConfig(sparsity_ratio=0.01, block_size=64))
    large = BlockSparseRingDilatedAttention(
        [65536, 131072], [1, 2], SparsePatternConfig(sparsity_ratio=0.02, block_size=256)
    )
    for training in (False, True):
        peaks = [plan_memory(m, 131072, 1, torch.float16, training, device="H200").peak_bytes for m in (small, large)]
        assert peaks[0] == pytest.approx(peaks[1], rel=0.02)


def test_the_hierarchical_pattern_takes_what_the_others_take():
    others = [BlockSparseRingDilatedAttention(sparsity_ratio=ratio) for ratio in (0.1, 0.05, 0.01)]
    for training in (False, True):
        peaks = [
            plan_memory(m, 16384, 1, torch.float16, training, device="H200").peak_bytes
            for m in (BlockSparseHierarchical(), *others)
        ]
        assert peaks[0] <= 1.05 * min(peaks[1:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads_kv", [4, 2])
@pytest.mark.parametrize("head_dim", [64, 320])
@pytest.mark.parametrize("where", ["cpu", "GTX 1080", "A100"])
def test_the_planner_takes_the_backend_that_a_call_would(monkeypatch, dtype, heads_kv, head_dim, where):
    device = Device.of(where)
    monkeypatch.setattr(triton, "INSTALLED", True)
    monkeypatch.setattr(triton, "_major", lambda index: device.capability[0])
    for pattern, kind in ((Full(), "full"), (Causal(), "causal"), (SlidingWindow(9, 9), None)):
        plan = plan_memory(pattern, 512, 1, dtype, heads=4, heads_kv=heads_kv, head_dim=head_dim, device=device)
        device_there = torch.device(device.type, 0)
        request = Request(
            device=device_there, dtype=dtype, kind=kind, square=True, grouped=heads_kv != 4, head_dim=head_dim
        )
        assert plan.backend == choose("auto", request).name


def test_what_is_installed_here_says_nothing_of_another_machine(monkeypatch):
    """A GPU by name is planned as a machine with Triton would run it; a GPU of this machine as this one does. (Of a GPU
    of this machine without Triton the planner said "triton", and planned too little.)"""
    monkeypatch.setattr(triton, "INSTALLED", False)
    monkeypatch.setattr(triton, "_major", lambda index: 9)
    there, here = (Device("GPU", "cuda", 1 << 34, (9, 0), here=at) for at in (None, torch.device("cuda", 0)))
    options = {"dtype": torch.bfloat16, "training": True}
    assert plan_memory(SlidingWindow(9, 9), 512, device=there, **options).backend == "triton"
    assert plan_memory(SlidingWindow(9, 9), 512, device=here, **options).backend == "blockwise"
    monkeypatch.setattr(triton, "INSTALLED", True)
    assert plan_memory(SlidingWindow(9, 9), 512, device=here, **options).backend == "triton"
    assert Device.of("cpu").here == torch.device("cpu")
    assert Device.of("A100").here is None


def test_modules_patterns_and_layouts_give_one_plan():
    config = SparsePatternConfig(sparsity_ratio=0.2, block_size=64)
    module = BlockSparseRingDilatedAttention(sparse_config=config)
    for is_causal in (False, True):
        pattern = module.pattern(is_causal)
        options = {"device": "A100", "training": True}
        plans = [
            plan_memory(module, 4096, is_causal=is_causal, **options),
            plan_memory(config, 4096, is_causal=is_causal, **options),
            plan_memory(pattern, 4096, **options),
        ]
        layout = BlockLayout.from_pattern(pattern, 4096, block_size=64)
        assert {plan.items for plan in plans} == {plans[0].items}
        built = plan_memory(layout, 4096, **options)
        assert built.peak_bytes == pytest.approx(plans[0].peak_bytes, rel=1e-4)


def test_a_ring_has_two_receive_buffers_and_a_share_of_everything_else():
    alone, ring = (
        plan_memory(RandomBlocks(8), 1 << 20, 1, torch.bfloat16, True, world, device="H200") for world in (1, 4)
    )
    items = {item.name: item.bytes for item in ring.items}
    k = (1 << 20) // 4 * 8 * 64 * 2
    assert items["two receive buffers"] == 2 * 2 * k
    assert items["q"] == k
    assert ring.shape.seq_q == 1 << 18
    shared = [item for item in ring.items if item.kind != "ring" and "backward" in item.phases]
    assert sum(item.bytes for item in shared) == pytest.approx(alone.peak_bytes / 4, rel=0.01)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("budget", ["GTX 1080", "H200", 3 * GIB])
def test_the_longest_sequence_is_the_last_that_fits(budget, training):
    options = {"dtype": torch.float16, "training": training}
    longest = max_sequence_length(RandomBlocks(10), budget, **options)
    device = Device.of(budget) if isinstance(budget, str) else Device("budget", Device.of(None).type, budget, (8, 0))
    assert plan_memory(RandomBlocks(10), longest, device=device, **options).fits
    assert not plan_memory(RandomBlocks(10), int(longest * 1.001) + 256, device=device, **options).fits


def test_a_budget_that_holds_nothing_says_how_little_that_is():
    with pytest.raises(ValueError, match=r"at least 256 tokens, which take .*, got 1,000\.0 B"):
        max_sequence_length(Full(), 1000)


def test_recommendations_follow_the_length():
    assert recommend(8191, "A100").options == {}
    for tokens, ratio in ((8192, 0.1), (16384, 0.05), (65535, 0.05), (65536, 0.01), (10**6, 0.01)):
        found = recommend(tokens, "A100", dtype=torch.float16)
        assert found.options["sparsity_ratio"] == ratio
        assert f"keep {ratio:.1%}" in found.reasons[0]
        module = create_block_sparse_attention(**found.options)
        assert plan_memory(module, tokens, dtype=torch.float16, device="A100").items == found.plan.items
        # A row's share of blocks is really there to be taken, in the middle of the sequence.
        blocks = -(-tokens // 128)
        pattern = module.pattern()
        assert len(list(pattern.key_blocks(blocks // 2, blocks))) == pattern.budget(blocks)


def test_a_ring_is_recommended_where_one_device_cannot_hold_it():
    found = recommend(20_000_000, "GTX 1080", dtype=torch.float16, training=True)
    assert found.world_size > 1
    assert found.plan.fits
    assert "One device cannot hold it" in found.reasons[-1]
    assert f"a ring of {found.world_size}" in found.reasons[-1]
    with pytest.raises(
        ValueError, match=r"20,000,000 does not fit GTX 1080.*a ring of 2 is not.*one device holds [\d,]+"
    ):
        recommend(20_000_000, "GTX 1080", dtype=torch.float16, training=True, max_world_size=2)


def test_every_gpu_is_known_by_name_whatever_its_case():
    for name in GPUS:
        assert Device.of(name.lower()).name == name
    assert 7 * GIB < Device.of("gtx 1080").budget < 8 * GIB
    assert Device.of("B200").budget > Device.of("H200").budget
    with pytest.raises(ValueError, match=r"H200.*got 'GTX 9999'"):
        Device.of("GTX 9999")


def test_the_cpu_has_what_the_system_says(monkeypatch, tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable: 64 kB\n")
    monkeypatch.setattr(devices, "_MEMINFO", meminfo)
    assert Device.of("cpu").budget == 65536
    monkeypatch.setattr(devices, "_MEMINFO", tmp_path / "none")
    assert Device.of("cpu").budget > GIB // 4


BAD = {
    "seq_len": (lambda: plan_memory(Full(), 0), ValueError, "seq_len must be at least 1"),
    "too long": (lambda: plan_memory(Full(), 2**30), ValueError, "seq_len must be at most"),
    "batch": (lambda: plan_memory(Full(), 9, 1.5), TypeError, "batch must be an int"),
    "dtype": (lambda: plan_memory(Full(), 9, dtype=torch.int8), TypeError, "dtype must be float64"),
    "training": (lambda: plan_memory(Full(), 9, training=1), TypeError, "training must be True or False"),
    "world_size": (lambda: plan_memory(Full(), 9, world_size=0), ValueError, "world_size"),
    "heads": (lambda: plan_memory(Full(), 9, heads=4, heads_kv=3), ValueError, "multiple of heads_kv, got 4 and 3"),
    "module": (lambda: plan_memory(torch.nn.Linear(2, 2), 9), TypeError, "module_or_config must be.*got Linear"),
    "per head": (lambda: plan_memory(PerHead((Full(), Causal())), 9), ValueError, "the pattern's 2, got 8"),
    "backend": (lambda: AttentionConfig(pattern=Full(), backend="fast"), ValueError, "backend must be one of"),
    "pattern": (lambda: AttentionConfig(pattern="full"), TypeError, "pattern must be a Pattern"),
    "layout": (
        lambda: plan_memory(BlockLayout.from_pattern(Full(), 32, block_size=16), 64), ValueError, "the layout, .32, 32",
    ),
    "projections": (
        lambda: plan_memory(BlockSparseRingMultiheadDilatedAttention(64, 4), 9, heads=8), ValueError,
        "heads must be that of the module, 4, got 8",
    ),
    "phase": (lambda: plan_memory(Full(), 9).by_kind("sideways"), ValueError, "phase must be one of"),
    "budget": (lambda: max_sequence_length(Full(), 1.5), TypeError, "budget must be bytes or a device"),
    "twice": (lambda: max_sequence_length(Full(), "H200", device="cpu"), ValueError, "not both"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()


def test_planning_allocates_nothing_and_needs_no_device(monkeypatch):
    """At 32 million tokens one tensor would be 64 GB; a plan makes none at all."""
    refuse = SimpleNamespace(called=0)

    class Refuse(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            refuse.called += 1
            return func(*args, **(kwargs or {}))

    with Refuse():
        plan_memory(BlockSparseRingDilatedAttention(), 1 << 25, training=True, device="H200")
        max_sequence_length(SlidingWindow(9, 9), "H200")
    assert refuse.called == 0


def test_a_grid_has_one_length():
    """Others were planned, and `plan` ended with the error of another length than the one that was asked about."""
    pattern = Neighborhood((4, 16, 16), (3, 5, 5), prefix=7) & Causal()
    assert max_sequence_length(pattern, 10**9) == 4 * 16 * 16 + 7
    with pytest.raises(ValueError, match="budget must hold at least 1031 tokens, which take"):
        max_sequence_length(pattern, 10**5)
    with pytest.raises(ValueError, match="prefix and shape of Neighborhood must have seq_k = 1024 tokens together"):
        plan_memory(pattern, 1024)
