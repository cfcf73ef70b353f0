"""`dilated_attention` is one softmax over the multiset of its branches' keys."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, seed, settings

from dilated_attention_pytorch import Branches, block_sparse_attention, dilated_attention, explain, merge_attention
from dilated_attention_pytorch.layout import branches as layouts
from dilated_attention_pytorch.layout import clear_layout_cache, layout_of_branches
from dilated_attention_pytorch.testing import Case, assert_exact
from tests.strategies import dilated_cases

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "golden_longnet.npz")


@pytest.fixture
def small_blocks(monkeypatch):
    """Short sequences then have many blocks."""
    monkeypatch.setattr(layouts, "BLOCK_SIZES", (16,))
    clear_layout_cache()
    yield
    clear_layout_cache()


def inputs(seq=60, heads=4, heads_kv=None, batch=1, head_dim=8, dtype=torch.float64, seq_q=None):
    q = torch.randn(batch, seq_q or seq, heads, head_dim, dtype=dtype)
    k, v = torch.randn(2, batch, seq, heads_kv or heads, head_dim, dtype=dtype)
    return q, k, v


@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 3))])
def test_float64(part, small_blocks):
    """330 calls, in parts so that they can run side by side."""

    @seed(part)
    @given(dilated_cases(dropout=True))
    @settings(max_examples=110, derandomize=False, database=None)
    def check(case):
        assert_exact(case, "blockwise")

    check()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_lower_precision(dtype, small_blocks):
    @given(dilated_cases())
    @settings(max_examples=40)
    def check(case):
        assert_exact(case.to(dtype), "blockwise")

    check()


def test_large_blocks():
    q, k, v = inputs(seq=1100, heads=4)
    do, dlse = torch.randn_like(q), torch.randn(1, 4, 1100, dtype=q.dtype)
    for is_causal in (False, True):
        case = Case(q, k, v, Branches((256, 512, 1024), (1, 2, 4)), do, dlse, is_causal=is_causal)
        assert_exact(case, "blockwise")


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
@pytest.mark.parametrize("name", GOLDEN["cases"])
def test_torchscale(name, backend):
    """Outputs and gradients of torchscale's own code; the file says how they were made."""
    q, k, v, do = (torch.tensor(GOLDEN[f"{name}/{part}"]) for part in ("q", "k", "v", "grad_out"))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = dilated_attention(
        *leaves,
        segment_lengths=GOLDEN[f"{name}/segment_lengths"].tolist(),
        dilation_rates=GOLDEN[f"{name}/dilation_rates"].tolist(),
        is_causal=bool(GOLDEN[f"{name}/is_causal"]),
        head_offsets="grouped",
        detach_branch_weights=True,
        backend=backend,
    )
    found = (out.detach(), *torch.autograd.grad(out, leaves, do))
    for part, got in zip(("out", "dq_detached", "dk_detached", "dv_detached"), found, strict=True):
        assert (got - torch.tensor(GOLDEN[f"{name}/{part}"])).abs().max() < 1e-10, part


def test_reference_counts_as_the_branches_do():
    """The definition itself, against one query, key and head at a time."""
    which = Branches((7, 20, 33), (1, 3, 4), "grouped")
    q, k, v = inputs(seq=41, heads=3, seq_q=30)
    out, lse = dilated_attention(
        q, k, v, segment_lengths=[7, 20, 33], dilation_rates=[1, 3, 4], head_offsets="grouped", is_causal=True,
        return_lse=True, backend="reference",
    )  # fmt: skip
    for head in range(3):
        for i in range(30):
            keys = [j for j in range(i + 12) for _ in range(which.times(i + 11, j, head, 3))]
            scores = k[0, keys, head] @ q[0, i, head] * 8**-0.5
            assert torch.allclose(lse[0, head, i], torch.logsumexp(scores, 0))
            assert torch.allclose(out[0, i, head], torch.softmax(scores, 0) @ v[0, keys, head])


def test_branches_mixed_by_their_denominators():
    """LongNet's own formula: each branch alone, then merged."""
    q, k, v = inputs()
    whole = dilated_attention(q, k, v, segment_lengths=[16, 60], dilation_rates=[1, 4], return_lse=True)
    parts = [
        dilated_attention(q, k, v, segment_lengths=[w], dilation_rates=[r], return_lse=True)
        for w, r in ((16, 1), (60, 4))
    ]
    merged = merge_attention(*zip(*parts, strict=True))
    for got, want in zip(whole, merged, strict=True):
        torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


def test_one_segment_without_dilation_is_attention():
    q, k, v = inputs()
    got = dilated_attention(q, k, v, segment_lengths=[100], dilation_rates=[1], is_causal=True)
    want = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    torch.testing.assert_close(got, want.transpose(1, 2))
    assert explain(q, k, v, Branches([100], [1]), is_causal=True).chosen == "sdpa"


def test_values_of_one_give_one_where_a_branch_reaches():
    q, k, v = inputs(dtype=torch.float32, seq=100, heads=2)
    out = dilated_attention(q, k, torch.ones_like(v), segment_lengths=[32], dilation_rates=[4])
    kept = torch.tensor([[t % 32 % 4 == head for head in range(2)] for t in range(100)])
    torch.testing.assert_close(out[0, ..., 0], kept.float())


def test_the_future_changes_nothing():
    q, k, v = inputs(dtype=torch.float32, seq=300)
    options = {"segment_lengths": [50, 128, 300], "dilation_rates": [1, 2, 6], "is_causal": True}
    before = dilated_attention(q, k, v, **options)
    for at in (1, 77, 150, 299):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[:, at:] = torch.randn_like(x[:, at:]) * 9
        assert torch.equal(dilated_attention(*changed, **options)[:, :at], before[:, :at])


def test_a_sample_does_not_depend_on_its_batch():
    q, k, v = inputs(dtype=torch.float32, batch=3, seq=200)
    options = {"segment_lengths": [64, 128], "dilation_rates": [1, 2]}
    whole = dilated_attention(q, k, v, **options)
    assert torch.equal(dilated_attention(*(x[1:2] for x in (q, k, v)), **options), whole[1:2])


def test_gradcheck():
    q, k, v = (x.requires_grad_() for x in inputs(seq=9, heads=2, head_dim=2))

    def attend(q, k, v):
        return dilated_attention(q, k, v, segment_lengths=[4, 9], dilation_rates=[1, 2], return_lse=True)

    torch.autograd.gradcheck(attend, (q, k, v))


def test_compiled_whole():
    q, k, v = (x.requires_grad_() for x in inputs(dtype=torch.float32, seq=200))
    for detach in (False, True):

        def attend(q, k, v, detach=detach):
            return dilated_attention(
                q * 2, k, v, segment_lengths=[64, 128], dilation_rates=[1, 2], detach_branch_weights=detach
            )

        found = []
        for run in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
            out = run(q, k, v)
            found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        for got, want in zip(*found, strict=True):
            assert torch.equal(got, want)


def test_autocast():
    q, k, v = inputs(dtype=torch.float32)
    options = {"segment_lengths": [16, 60], "dilation_rates": [1, 4]}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = dilated_attention(q, k, v, **options)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, dilated_attention(*(x.bfloat16() for x in (q, k, v)), **options))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"segment_lengths": [8, 16]}, ValueError, "same length, at least 1, got \\[8, 16\\] and \\[1\\]"),
        ({"segment_lengths": [], "dilation_rates": []}, ValueError, "at least 1"),
        ({"segment_lengths": [0]}, ValueError, "every segment length must be at least 1, got 0"),
        ({"dilation_rates": [-1]}, ValueError, "every dilation rate must be at least 1, got -1"),
        ({"dilation_rates": [1.5]}, TypeError, "every dilation rate must be an int, got 1.5"),
        ({"segment_lengths": 8}, TypeError, "must be sequences of ints, got 8"),
        ({"head_offsets": "random"}, ValueError, "head_offsets must be one of .* got 'random'"),
        ({"head_offsets": ["grouped"]}, ValueError, "head_offsets must be one of"),
        ({"detach_branch_weights": 1}, TypeError, "detach_branch_weights must be True or False, got 1"),
        ({"dropout_p": 1.0}, ValueError, "dropout_p must be in"),
        ({"key_padding_mask": torch.zeros(1, 3, dtype=torch.bool)}, ValueError, "key_padding_mask must have shape"),
        ({"backend": "flash"}, ValueError, "backend must be one of"),
        ({"backend": "sdpa"}, ValueError, "backend 'sdpa' cannot run this call"),
    ],
)
def test_bad_input(change, error, message):
    q, k, v = inputs()
    with pytest.raises(error, match=message):
        dilated_attention(q, k, v, **{"segment_lengths": [8], "dilation_rates": [1], **change})


def test_block_sparse_attention_refuses_branches():
    q, k, v = inputs()
    for what in (Branches([8], [1]), layout_of_branches(Branches([8], [1]), 60, num_heads=4)):
        with pytest.raises(TypeError, match="call dilated_attention"):
            block_sparse_attention(q, k, v, what)


def test_queries_before_the_first_key_see_nothing():
    """Also where everything else is dense, and PyTorch's own kernel could be asked."""
    q, k, v = inputs(seq=4, seq_q=10)
    out = dilated_attention(q, k, v, segment_lengths=[64], dilation_rates=[1])
    want = dilated_attention(q, k, v, segment_lengths=[64], dilation_rates=[1], backend="reference")
    torch.testing.assert_close(out, want)
    assert (out[:, :6] == 0).all()


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_detached_keeps_the_dtype(backend):
    q, k, v = (x.bfloat16().requires_grad_() for x in inputs())
    options = {"segment_lengths": [8, 16], "dilation_rates": [1, 2], "detach_branch_weights": True}
    out = dilated_attention(q, k, v, **options, backend=backend)
    assert out.dtype == torch.bfloat16
    assert {x.dtype for x in torch.autograd.grad(out.sum(), (q, k, v))} == {torch.bfloat16}
