"""Dilated attention over runs: the kernels that walk rows which start anywhere, against the oracle."""

import random
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which there is for Linux alone")

from dilated_attention_pytorch import Branches, dilated_attention, explain
from dilated_attention_pytorch.kernels import runs
from dilated_attention_pytorch.testing import Case, assert_exact

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")]

PAPER, CHAIN = (1, 2, 4, 6, 12), (1, 2, 4, 8, 16)
UNEVEN = (256, 579, 1000, 2048, 9999)


cheaper = runs._too_much


@pytest.fixture(autouse=True)
def always():
    """Whatever would be cheaper: most of these calls are small. And heads of all widths that there are tiles for."""
    with patch.object(runs, "_too_much", lambda *given: ""), patch.object(runs, "WIDEST", 128):
        yield


def case_of(branches, seq, *, heads=3, heads_kv=None, head_dim=64, batch=1, dtype=torch.bfloat16, **options):
    def random_rows(num):
        return torch.randn(batch, seq, num, head_dim, device="cuda").to(dtype)

    q, k, v, do = (random_rows(n) for n in (heads, heads_kv or heads, heads_kv or heads, heads))
    return Case(q, k, v, branches, do, torch.randn(batch, heads, seq, device="cuda"), **options)


def check(case):
    kernels = explain(case.q, case.k, case.v, case.layout, is_causal=case.is_causal).kernels
    assert all(text.endswith("over runs of rows") for text in kernels.values()), kernels
    assert_exact(case, "triton")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [24, 40, 48, 64, 80, 96, 128])
def test_head_widths(head_dim, is_causal):
    torch.manual_seed(0)
    dtype = torch.float16 if head_dim in (24, 80) else torch.bfloat16
    check(case_of(Branches(UNEVEN, PAPER), 2001, head_dim=head_dim, dtype=dtype, is_causal=is_causal))


@pytest.mark.parametrize("dilations", [PAPER, CHAIN, (1, 3, 5, 7, 9), (2, 3, 4, 6, 12)])
@pytest.mark.parametrize("segments", [(256, 512, 1024, 2048, 4096), UNEVEN, (16, 32, 100, 333, 2047)])
def test_segments_and_dilations(segments, dilations):
    torch.manual_seed(0)
    check(case_of(Branches(segments, dilations), 2222, is_causal=True))


def test_samples_and_tensors_side_by_side():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 2050, 3, 2, 48, device="cuda", dtype=torch.bfloat16).unbind(2)
    do, dlse = torch.randn(2, 2050, 2, 48, device="cuda").bfloat16(), torch.randn(2, 2, 2050, device="cuda")
    check(Case(q, k, v, Branches(UNEVEN, CHAIN), do, dlse))


@pytest.mark.parametrize("options", [{"heads_kv": 2}, {"scale": -0.1}, {"detach_branch_weights": True}], ids=str)
def test_options(options):
    torch.manual_seed(0)
    check(case_of(Branches(UNEVEN, PAPER), 2049, heads=4, is_causal=True, **options))


@pytest.mark.parametrize("part", range(12))
def test_random_calls(part):
    for i in range(8):
        chance = random.Random(part * 1000 + i)
        torch.manual_seed(chance.randrange(2**31))
        dilations = [1, *(chance.choice([1, 2, 3, 4, 5, 6, 7, 8, 12]) for _ in range(2))]
        if len({*dilations}) != 3:
            continue  # one kernel for all of them
        seq = chance.randrange(128 * max(dilations), 5001)
        segments = [chance.randrange(r, chance.choice([64, 600, 6000])) for r in dilations]
        branches = Branches(segments, dilations, chance.choice(["interleaved", "grouped"]))
        case = case_of(branches, seq, heads=2, head_dim=48, is_causal=part % 2 == 1)
        try:
            check(case)
        except AssertionError as error:
            raise AssertionError(f"part {part}, call {i}: {branches} {seq}: {error}") from error


def test_again_and_in_a_graph():
    """The same bits from a call that is replayed, and from torch.compile, whose graph holds the plan."""
    torch.manual_seed(0)
    case = case_of(Branches(UNEVEN, PAPER), 2001, is_causal=True)

    def attend(q, k, v):
        return dilated_attention(q, k, v, segment_lengths=UNEVEN, dilation_rates=PAPER, is_causal=True)

    leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
    found = []
    for run in (attend, attend, attend, torch.compile(attend, fullgraph=True)):
        out = run(*leaves)
        found.append((out, *torch.autograd.grad(out, leaves, case.do)))
        with torch.no_grad():
            assert torch.equal(run(*leaves), out)
    for others in found[1:]:
        for got, want in zip(others, found[0], strict=True):
            assert torch.equal(got, want)


def test_cheaper_as_blocks():
    """Where segments and lengths are even blocks are walked, and `explain` says why."""
    q = torch.randn(1, 32768, 4, 64, device="cuda", dtype=torch.bfloat16)
    branches = Branches((2048, 4096, 8192, 16384, 32768), CHAIN)
    with patch.object(runs, "_too_much", cheaper):
        kernels = explain(q, q, q, branches).kernels
        assert all("blocks have less work" in text for text in kernels.values()), kernels
        odd = q[:, :32767]
        assert all(text.endswith("over runs of rows") for text in explain(odd, odd, odd, branches).kernels.values())
