"""The Triton kernels on a GPU: every path against the oracle. Most of the time goes into compiling: use `-n`."""

import itertools
import random

import pytest
import torch

from dilated_attention_pytorch import (
    BlockLayout,
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
    """The draw is the reference's, so the results are, within the rounding of the inputs' precision."""
    from dilated_attention_pytorch.testing import oracle, results

    case = make_case(SlidingWindow(300, 2), 0, torch.float16, head_dim, block)
    case = Case(case.q, case.k, case.v, case.layout, case.do, case.dlse, dropout_p=0.3)
    for name, got, want in zip(("out", "lse", "dq", "dk", "dv"), results(case, "triton"), oracle(case), strict=True):
        error = float((got.double() - want).norm() / want.norm())
        assert error < 2e-3, f"{name} is off by {error}"


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
