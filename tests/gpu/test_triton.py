"""The Triton kernels on a GPU: every path against the oracle. Most of the time goes into compiling: use `-n`."""

import itertools
import os
import random
from dataclasses import replace

import pytest
import torch

from dilated_attention_pytorch import (
    BlockLayout,
    Branches,
    DilatedBlocks,
    Documents,
    Full,
    GlobalTokens,
    PerHead,
    RandomBlocks,
    ScoreBias,
    SlidingWindow,
    block_sparse_attention,
)
from dilated_attention_pytorch.testing import Case, assert_exact, results
from tests.gpu.norms import assert_near

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SEQ = 800
PATTERNS = {
    "full": Full(),
    "window": SlidingWindow(200, 30),
    "window and global": SlidingWindow(300, 0) | GlobalTokens(5, queries=True),
    "documents": Documents((100, 1, 400, 299)) & SlidingWindow(None, 0),
    "random": RandomBlocks(2, block_size=256),
    "dilated": DilatedBlocks((256, 768), (1, 2), 0.4, 256),
    "per head": PerHead((SlidingWindow(90, 9), RandomBlocks(2, 5, 256), Full(), GlobalTokens(30))),
}
BLOCKS = [128, 64, 256, 16, 32, (128, 64), (128, 32), (64, 128)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def make_case(pattern, seed, dtype, head_dim, block, seq=SEQ, seq_q=None, lists=False):
    chance = random.Random(seed)
    torch.manual_seed(seed)
    batch, heads, seq_q = chance.choice([1, 2]), 4, seq_q or seq
    heads_kv = chance.choice([4, 1] if isinstance(pattern, PerHead) else [4, 2, 1])
    layout = BlockLayout.from_pattern(pattern, seq_q, seq, block_size=block, device="cuda")
    if lists:
        mask = torch.rand(batch, heads, layout.num_q_blocks, layout.num_k_blocks, device="cuda") < 0.3
        mask[:, :, 1] = False  # empty rows
        layout = BlockLayout.from_block_mask(mask, layout.blocks, seq_q=seq_q, seq_k=seq)

    def normal(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.float64)

    q, do = normal(batch, seq_q, heads, head_dim), normal(batch, seq_q, heads, head_dim)
    k, v = normal(batch, seq, heads_kv, head_dim), normal(batch, seq, heads_kv, head_dim)
    padding = torch.rand(batch, seq, device="cuda") < 0.2 if chance.random() < 0.3 else None
    ids = None
    if seq_q <= seq and chance.random() < 0.2:
        ids = torch.randint(0, 3, (batch, seq), device="cuda").sort(dim=1).values
    return Case(
        q, k, v, layout, do, normal(batch, heads, seq_q),
        is_causal=chance.random() < 0.4, key_padding_mask=padding, document_ids=ids,
        scale=chance.choice([None, None, -0.1, 0.2]),
    ).to(dtype)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 80, 256, 16])
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name, head_dim, dtype):
    block = BLOCKS[(list(PATTERNS).index(name) + head_dim // 16) % len(BLOCKS)]
    assert_exact(make_case(PATTERNS[name], head_dim, dtype, head_dim, block), "triton")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", PATTERNS)
def test_blocks_of_128(name, head_dim, dtype):
    """What the warp-specialised kernels take."""
    for seed in range(3):
        assert_exact(make_case(PATTERNS[name], seed, dtype, head_dim, 128), "triton")


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_lists_of_their_own(block):
    for seed, head_dim in itertools.product(range(2), (64, 128)):
        assert_exact(make_case(Full(), seed, torch.bfloat16, head_dim, block, lists=True), "triton")


@pytest.mark.parametrize("seq_q", [1, 77, 900])
def test_unequal_lengths(seq_q):
    for seed, head_dim in ((0, 64), (1, 128), (2, 40)):
        assert_exact(make_case(SlidingWindow(300, 2), seed, torch.bfloat16, head_dim, 128, seq_q=seq_q), "triton")


@pytest.mark.parametrize("head_dim", [64, 128, 48])
@pytest.mark.parametrize("block", [128, 32])
def test_dropout(head_dim, block):
    """The draw is the reference's."""
    case = make_case(SlidingWindow(300, 2), 0, torch.float16, head_dim, block)
    assert_near(Case(case.q, case.k, case.v, case.layout, case.do, case.dlse, dropout_p=0.3))


SLOPES = (0.1, 0.03, 0.01, 0.0)
ALL = {"softcap": 1.5, "alibi_slopes": SLOPES, "dropout_p": 0.3}
# What is more than scaled products, alone and together, with what the warp-specialised kernels tell apart.
SHAPED = {
    "softcap": ("window", 128, torch.bfloat16, {"softcap": 1.5, "is_causal": True}),
    "alibi": ("random", 128, torch.float16, {"alibi_slopes": SLOPES}),
    "dropout": ("window", (128, 64), torch.bfloat16, {"dropout_p": 0.6, "scale": -0.1}),
    "all": ("documents", 128, torch.bfloat16, {**ALL, "scale": -0.2}),
    "all, with padding": ("window and global", 128, torch.float16, {**ALL, "is_causal": True, "padding": 0.2}),
    "all, heads of their own": ("per head", 256, torch.float16, ALL),
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", SHAPED)
def test_shaped_and_dropped(name, head_dim):
    pattern, block, dtype, options = SHAPED[name]
    # Two samples; two query heads to a key head, or all four.
    case = make_case(PATTERNS[pattern], 0, dtype, head_dim, block)
    options = {"is_causal": False, "scale": None, "key_padding_mask": None, "document_ids": None, **options}
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.tensor(SLOPES, device="cuda")
    if "padding" in options:
        options["key_padding_mask"] = torch.rand(case.k.shape[:2], device="cuda") < options.pop("padding")
    assert_near(replace(case, **options))


def on_gpu(*shape):
    return torch.randn(*shape, device="cuda")


BIASES = {
    "slopes": lambda b, h, n: ScoreBias.slopes(on_gpu(h).abs() / 20),
    "signed slopes of samples": lambda b, h, n: ScoreBias.slopes(on_gpu(b, h) / 20, signed=True),
    "table": lambda b, h, n: ScoreBias.table(on_gpu(h, 301)),
    "t5": lambda b, h, n: ScoreBias.t5(on_gpu(h, 32)),
    "keys and gates": lambda b, h, n: ScoreBias.keys(on_gpu(b, 1, n)) + ScoreBias.forget(-on_gpu(1, h, n).abs() / 20),
    "dense": lambda b, h, n: ScoreBias.dense(on_gpu(b, h, n, n)),
    "dense for all samples": lambda b, h, n: ScoreBias.dense(on_gpu(1, h, n, n).bfloat16()),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", BIASES)
def test_biases(name, head_dim, dtype):
    """With their gradients, and these the same bits every time."""
    for block in (128, 32):
        case = make_case(PATTERNS["window and global"], 0, dtype, head_dim, block)
        (batch, _, heads, _), seq_k = case.q.shape, case.k.shape[1]
        case = replace(case, bias=BIASES[name](batch, heads, seq_k), is_causal=True)
        assert_exact(case, "triton")
        for first, second in zip(results(case, "triton"), results(case, "triton"), strict=True):
            assert torch.equal(first, second)


def test_strided_inputs():
    """Heads first in memory, a slice of a packed projection, a gradient of one number for all."""
    layout = BlockLayout.from_pattern(SlidingWindow(200, 0), SEQ, block_size=128, device="cuda")
    packed = torch.randn(2, SEQ, 4, 3 * 64, device="cuda", dtype=torch.bfloat16)
    heads_first = torch.randn(3, 2, 4, SEQ, 64, device="cuda", dtype=torch.bfloat16).transpose(2, 3)
    for q, k, v in (packed.split(64, dim=-1), heads_first):
        do = torch.ones((), device="cuda", dtype=torch.bfloat16).expand(q.shape)
        assert_exact(Case(q, k, v, layout, do, torch.zeros(2, 4, SEQ, device="cuda")), "triton")


def test_the_same_bits_every_time():
    case = make_case(SlidingWindow(300, 0), 5, torch.bfloat16, 128, 128)
    q, k, v = (x.requires_grad_() for x in (case.q, case.k, case.v))

    def run():
        out = block_sparse_attention(q, k, v, case.layout, backend="triton")
        return out, *torch.autograd.grad(out, (q, k, v), case.do)

    first = run()
    for _ in range(1000):  # a race would show sooner or later
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["window and global", "documents", "per head", "branches"])
def test_long_calls_are_several_launches(name, head_dim, monkeypatch):
    """As if 800 tokens were many: a launch of each kernel for every two blocks, done once, again, and replayed."""
    from dilated_attention_pytorch.kernels import launch, tile_scheduler
    from dilated_attention_pytorch.layout import lists

    monkeypatch.setattr(tile_scheduler, "MIN_TURNS", 1)
    monkeypatch.setattr(lists, "NEAR", 2)
    monkeypatch.setattr(launch, "num_processors", lambda device: 4)
    tile_scheduler.tile_schedules.cache_clear()
    if name == "branches":
        q, k, v, do = torch.randn(4, 1, 2816, 4, head_dim, device="cuda", dtype=torch.bfloat16)
        case = Case(q, k, v, Branches((512, 1408), (1, 2)), do, torch.randn(1, 4, 2816, device="cuda"), is_causal=True)
    else:
        case = make_case(PATTERNS[name], 3, torch.bfloat16, head_dim, 128)
    assert len(tile_scheduler.tile_schedules(7, 2, 4, 4)) == 3
    for _ in range(3):
        assert_exact(case, "triton")
    tile_scheduler.tile_schedules.cache_clear()


def random_pattern(chance, seq):
    """A union or an intersection of two of what there is."""
    cut = chance.randrange(1, seq) if seq > 1 else 0
    atoms = [
        Full(),
        SlidingWindow(chance.randrange(seq), chance.randrange(50)),
        GlobalTokens(chance.randrange(1, 40), queries=chance.random() < 0.5),
        RandomBlocks(chance.randrange(1, 4), chance.randrange(1000), 128),
        DilatedBlocks((128, 512), (1, 2), chance.choice([0.1, 0.5]), 128),
        Documents((cut, seq - cut)) if cut else Full(),
    ]
    pattern, other = chance.sample(atoms, 2)
    return chance.choice([pattern, pattern & other, pattern | other])


@pytest.mark.parametrize("part", range(15))
def test_random_calls(part):
    """As many as RANDOM_CALLS says: 10,000 before a release. Shapes vary freely, what needs a new kernel does not."""
    for i in range(int(os.environ.get("RANDOM_CALLS", 150)) // 15):
        chance = random.Random(part * 100_000 + i)
        torch.manual_seed(chance.randrange(2**31))
        head_dim, block, dtype = chance.choice(
            [(64, 128, torch.bfloat16), (128, 128, torch.float16), (64, 16, torch.float16)]
        )
        batch, heads_kv, group = chance.randrange(1, 3), chance.randrange(1, 3), chance.choice([1, 1, 2, 3])
        seq = chance.randrange(1, 700)
        seq_q = chance.choice([seq, seq, chance.randrange(1, 700)])
        layout = BlockLayout.from_pattern(random_pattern(chance, seq), seq_q, seq, block_size=block, device="cuda")
        q, do = torch.randn(2, batch, seq_q, heads_kv * group, head_dim, device="cuda", dtype=dtype)
        k, v = torch.randn(2, batch, seq, heads_kv, head_dim, device="cuda", dtype=dtype)
        padding = torch.rand(batch, seq, device="cuda") < chance.choice([0.1, 1.0]) if chance.random() < 0.2 else None
        dlse = torch.randn(batch, heads_kv * group, seq_q, device="cuda")
        case = Case(q, k, v, layout, do, dlse, is_causal=chance.random() < 0.3, key_padding_mask=padding)
        try:
            assert_exact(case, "triton")
        except AssertionError as error:
            raise AssertionError(f"part {part}, call {i}: {error}") from error


def window_case(seq=1024, head_dim=64, block=128):
    layout = BlockLayout.from_pattern(SlidingWindow(200, 0), seq, block_size=block, device="cuda")
    return torch.randn(3, 1, seq, 2, head_dim, device="cuda", dtype=torch.bfloat16), layout


def test_cuda_graph():
    (q, k, v), layout = window_case()
    block_sparse_attention(q, k, v, layout)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = block_sparse_attention(q, k, v, layout)
    for x in (q, k, v):
        x.normal_()
    graph.replay()
    assert torch.equal(out, block_sparse_attention(q, k, v, layout))


@pytest.mark.parametrize("by", ["layout", "pattern"])
def test_compiled_whole(by):
    """One graph, the same results, forward and backward."""
    inputs, layout = window_case()
    what = layout if by == "layout" else SlidingWindow(200, 0)

    def loss(q, k, v):
        return block_sparse_attention(q * 2, k, v, what).square().sum()

    def grads(run):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        return torch.autograd.grad(run(*leaves), leaves)

    for got, want in zip(grads(torch.compile(loss, fullgraph=True)), grads(loss), strict=True):
        assert torch.allclose(got, want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("block", [128, 64])
def test_no_new_kernel_for_a_new_length_or_layout(block):
    from dilated_attention_pytorch.kernels import backward, forward, hopper_backward, hopper_forward

    def compiled():
        kernels = (forward.forward_kernel, backward.dq_kernel, backward.dkv_kernel, backward.rows_kernel,
                   hopper_forward.forward_kernel, hopper_backward.backward_kernel)  # fmt: skip
        return [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels]

    def run(seq, left):
        layout = BlockLayout.from_pattern(SlidingWindow(left, 0), seq, block_size=block, device="cuda")
        q, k, v = (torch.randn(1, seq, 2, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
        block_sparse_attention(q, k, v, layout).sum().backward()

    run(1024, 100)
    before = compiled()
    for seq, left in ((1000, 100), (77, 5), (4096, 1000), (1, 1), (2048, 0)):
        run(seq, left)
    assert compiled() == before


@pytest.mark.parametrize(("block", "head_dim"), [(128, 64), (128, 128), (32, 64), (64, 80)])
def test_a_call_like_one_before_is_done_again_with_its_own_tensors(block, head_dim, monkeypatch):
    from dilated_attention_pytorch.kernels import launcher

    def layout():
        return BlockLayout.from_pattern(SlidingWindow(200, 30), 1024, block_size=block, device="cuda")

    def results(tensors, layout):
        leaves = [x.detach().requires_grad_() for x in tensors[:3]]
        out = block_sparse_attention(*leaves, layout)
        return out.detach(), *torch.autograd.grad(out, leaves, tensors[3])

    replays, original = [], launcher.Replay.__call__
    monkeypatch.setattr(launcher.Replay, "__call__", lambda self, x: (replays.append(self), original(self, x))[1])
    same = layout()
    for seed in range(4):
        torch.manual_seed(seed)
        tensors = [torch.randn(2, 1024, 4, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
        for got, want in zip(results(tensors, same), results(tensors, layout()), strict=True):
            assert torch.equal(got, want)
    assert len(replays) == 4  # of the third and fourth call, forward and backward


@pytest.mark.parametrize("by", ["layout", "causal layout", "pattern"])
def test_the_shortest_way_gives_the_same(by):
    """Addresses that come again, and addresses that do not; strides in between that others have."""
    pattern, is_causal = SlidingWindow(200, 30), by.startswith("causal")
    what = BlockLayout.from_pattern(pattern, 1024, block_size=128, device="cuda") if by != "pattern" else pattern
    kept = []
    for seed in range(8):
        torch.manual_seed(seed)
        q, k, v = torch.randn(3, 2, 1024, 4, 64, device="cuda", dtype=torch.bfloat16)
        if seed % 3 == 2:
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        fresh = BlockLayout.from_pattern(pattern, 1024, block_size=128, device="cuda")
        with torch.no_grad():
            out = block_sparse_attention(q, k, v, what, is_causal=is_causal)
            assert torch.equal(out, block_sparse_attention(q, k, v, fresh, is_causal=is_causal))
        kept.append(out if seed % 2 else q)
    if by == "layout":
        assert any(getattr(note, "replay", None) for note in what.call_cache.values())


def test_direct_launches_are_used_where_triton_is_known():
    from dilated_attention_pytorch.kernels import launcher

    (q, k, v), layout = window_case()
    for _ in range(3):
        block_sparse_attention(q, k, v, layout)
    (replay,) = [note for note in layout.call_cache.values() if isinstance(note, launcher.Replay)]
    known = getattr(launcher.driver, "_BASE_ARGS_FORMAT", None) == launcher._KNOWN_LAUNCHER
    assert (replay._direct is not None) == known


def test_no_wait_for_the_device():
    (q, k, v), layout = window_case()
    block_sparse_attention(q.requires_grad_(), k, v, layout).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        block_sparse_attention(q, k, v, layout).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
