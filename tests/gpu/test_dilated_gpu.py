"""Dilated attention on a GPU: every path of the kernels against the oracle."""

import random

import pytest
import torch

from dilated_attention_pytorch import Branches, dilated_attention
from dilated_attention_pytorch.testing import Case, assert_exact
from tests.gpu.norms import assert_near

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

EVEN = Branches((512, 1024, 2048), (1, 2, 4))
UNEVEN = Branches((300, 1024, 4096), (2, 6, 12))


def case_of(branches, *, seq=2048, seq_q=None, heads=4, heads_kv=4, head_dim=64, dtype=torch.bfloat16, **options):
    q, do = torch.randn(2, 1, seq_q or seq, heads, head_dim, device="cuda", dtype=dtype)
    k, v = torch.randn(2, 1, seq, heads_kv, head_dim, device="cuda", dtype=dtype)
    dlse = torch.randn(1, heads, seq_q or seq, device="cuda")
    return Case(q, k, v, branches, do, dlse, **options)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("branches", [EVEN, UNEVEN, Branches((128, 512), (4, 8)), Branches((256, 1000), (1, 3))])
def test_hopper(branches, head_dim, is_causal):
    """A length that every number of classes divides: what the copy engine reaches."""
    torch.manual_seed(0)
    assert_exact(case_of(branches, seq=2304, head_dim=head_dim, is_causal=is_causal), "triton")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("branches", [EVEN, UNEVEN])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_plain(dtype, branches, is_causal):
    torch.manual_seed(0)
    assert_exact(case_of(branches, seq=1537, head_dim=80, heads_kv=2, dtype=dtype, is_causal=is_causal), "triton")


def test_grouped_heads_and_padding():
    torch.manual_seed(0)
    hidden = torch.rand(1, 2048, device="cuda") < 0.2
    assert_exact(case_of(EVEN, heads_kv=2, key_padding_mask=hidden, is_causal=True), "triton")


def test_packed_tensors():
    """Queries, keys and values that lie beside each other in memory."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2048, 3, 4, 64, device="cuda", dtype=torch.bfloat16).unbind(2)
    do, dlse = torch.randn(1, 2048, 4, 64, device="cuda").bfloat16(), torch.randn(1, 4, 2048, device="cuda")
    assert_exact(Case(q, k, v, EVEN, do, dlse, is_causal=True), "triton")


@pytest.mark.parametrize("is_causal", [False, True])
def test_detached(is_causal):
    torch.manual_seed(0)
    assert_exact(case_of(EVEN, is_causal=is_causal, detach_branch_weights=True), "triton")


def test_dropout_equals_the_reference():
    torch.manual_seed(0)
    case = case_of(EVEN, seq=1024, dtype=torch.float32, head_dim=16)
    found = []
    for backend in ("triton", "reference"):
        torch.manual_seed(5)
        out = dilated_attention(
            case.q, case.k, case.v, segment_lengths=[256, 512], dilation_rates=[1, 2], dropout_p=0.3, backend=backend
        )
        found.append(out)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("branches", "scale"), [(EVEN, None), (UNEVEN, -0.1)])
def test_shaped_and_dropped(branches, scale, head_dim):
    torch.manual_seed(0)
    slopes = torch.tensor([0.03, 0.01, 0.003, 0.0], device="cuda")
    options = {"scale": scale, "softcap": 1.5, "alibi_slopes": slopes, "dropout_p": 0.3}
    assert_near(case_of(branches, seq=2304, heads_kv=2, head_dim=head_dim, is_causal=True, **options))


def test_compiled():
    torch.manual_seed(0)
    case = case_of(EVEN, is_causal=True)

    def attend(q, k, v):
        return dilated_attention(q, k, v, segment_lengths=[512, 1024], dilation_rates=[1, 2], is_causal=True)

    leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
    found = []
    for run in (attend, torch.compile(attend, fullgraph=True)):
        out = run(*leaves)
        found.append((out, *torch.autograd.grad(out, leaves, case.do)))
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("part", range(15))
def test_random_calls(part):
    for i in range(10):
        chance = random.Random(part * 1000 + i)
        torch.manual_seed(chance.randrange(2**31))
        seq, heads_kv = chance.randrange(1, 800), chance.randrange(1, 4)
        seq_q = chance.choice([seq, seq, chance.randrange(1, 800)])
        heads = heads_kv * chance.choice([1, 2])
        num = chance.randrange(1, 4)
        branches = Branches(
            [chance.choice([64, 100, 256, 512, 700]) for _ in range(num)],
            [chance.choice([1, 2]), *(chance.choice([1, 2, 3, 4]) for _ in range(num - 1))],
            chance.choice(["interleaved", "grouped"]),
        )
        case = case_of(branches, seq=seq, seq_q=seq_q, heads=heads, heads_kv=heads_kv, is_causal=chance.random() < 0.5)
        try:
            assert_exact(case, "triton")
        except AssertionError as error:
            raise AssertionError(f"part {part}, call {i}: {branches} {seq_q} {seq}: {error}") from error
