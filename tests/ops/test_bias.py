"""`ScoreBias`: each kind against attention written out, its gradients, and its company. Generated calls have biases too
(`tests/strategies.py`), so every backend is compared with the reference; here the reference is compared with others."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from dilated_attention_pytorch import (
    Causal,
    Full,
    GlobalTokens,
    ScoreBias,
    SlidingWindow,
    block_sparse_attention,
    dilated_attention,
    explain,
)
from dilated_attention_pytorch.memory import measure_peak
from dilated_attention_pytorch.nn import BlockSparseAttention
from dilated_attention_pytorch.ops import attention_with_weights, kept_mass
from dilated_attention_pytorch.testing import assert_exact
from tests.strategies import biases, cases, dilated_cases

BATCH, SEQ, HEADS = 2, 36, 4
PLACE = torch.arange(SEQ)
AHEAD = PLACE - PLACE[:, None]


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def places(shape):
    """Coordinates of the tokens of a grid, [tokens, dimensions]."""
    return torch.stack(torch.meshgrid(*map(torch.arange, shape), indexing="ij"), -1).flatten(0, -2)


def of_grid(table, shape):
    """One pair after the other, as a definition reads: [heads, queries, keys]."""
    at, middle = places(shape), [size // 2 for size in table.shape[1:]]
    rows = []
    for query in at:
        offsets = [(query, key) for key in at]
        entries = [
            tuple(max(0, min(2 * m, int(b - a) + m)) for a, b, m in zip(x, y, middle, strict=True)) for x, y in offsets
        ]
        rows.append(torch.stack([table[(slice(None), *entry)] for entry in entries], -1))
    return torch.stack(rows, 1)


def forgotten(gates):
    """Sums of log gates behind each key, up to the query; 0 for keys that are hidden."""
    later = (PLACE[None, None] > PLACE[None, :, None]) & (PLACE[None, None] <= PLACE[:, None, None])
    return torch.einsum("bhl,qkl->bhqk", gates, later.to(gates.dtype))


# By name: the bias of a tensor, the tensor, and what is added to scores, [batch or 1, heads or 1, queries, keys].
KINDS = {
    "slopes": (ScoreBias.slopes, (HEADS,), lambda x: -x[:, None, None] * AHEAD.abs()),
    "slopes of samples": (ScoreBias.slopes, (BATCH, HEADS), lambda x: -x[..., None, None] * AHEAD.abs()),
    "signed slopes": (
        lambda x: ScoreBias.slopes(x, signed=True),
        (HEADS,),
        lambda x: x[:, None, None] * AHEAD,
    ),
    "table": (ScoreBias.table, (HEADS, 11), lambda x: x[:, (AHEAD + 5).clamp(0, 10)]),
    "table of samples": (
        lambda x: ScoreBias.table(x, zero=20),
        (BATCH, 1, 21),
        lambda x: x[:, :, (AHEAD + 20).clamp(0, 20)],
    ),
    "table of places": (
        lambda x: ScoreBias.table(x, positions=PLACE // 3 * 2),
        (HEADS, 9),
        lambda x: x[:, (PLACE // 3 * 2 - (PLACE // 3 * 2)[:, None] + 4).clamp(0, 8)],
    ),
    "line": (lambda x: ScoreBias.grid(x, (SEQ,)), (HEADS, 7), lambda x: of_grid(x, (SEQ,))),
    "plane": (lambda x: ScoreBias.grid(x, (4, 9)), (HEADS, 7, 17), lambda x: of_grid(x, (4, 9))),
    "clipped plane": (lambda x: ScoreBias.grid(x, (4, 9)), (HEADS, 3, 5), lambda x: of_grid(x, (4, 9))),
    "space": (lambda x: ScoreBias.grid(x, (3, 2, 6)), (1, 5, 3, 7), lambda x: of_grid(x, (3, 2, 6))),
    "keys": (ScoreBias.keys, (BATCH, HEADS, SEQ), lambda x: x[:, :, None]),
    "keys for all": (ScoreBias.keys, (1, 1, SEQ), lambda x: x[:, :, None]),
    "forget": (ScoreBias.forget, (BATCH, HEADS, SEQ), forgotten),
    "dense": (ScoreBias.dense, (BATCH, HEADS, SEQ, SEQ), lambda x: x),
    "dense for all samples": (ScoreBias.dense, (1, HEADS, SEQ, SEQ), lambda x: x),
    "dense for all heads": (ScoreBias.dense, (BATCH, 1, SEQ, SEQ), lambda x: x),
}


@pytest.fixture
def qkv():
    return [normal(BATCH, SEQ, heads, 8) for heads in (HEADS, 2, 2)]


def written_out(q, k, v, added, allowed, softcap=None):
    k, v = (x.repeat_interleave(HEADS // k.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = (scores + added).masked_fill(~allowed, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
@pytest.mark.parametrize("name", KINDS)
def test_equals_attention_written_out(qkv, name, backend):
    """Order of operations: scale, softcap, bias, mask; and the gradient of the tensor as it was given."""
    make, shape, added = KINDS[name]
    x = normal(*shape)
    window, allowed = SlidingWindow(20, 0), (AHEAD <= 0) & (AHEAD >= -20)
    bias = make(x)
    for _ in range(2):  # a bias serves any number of steps
        got = block_sparse_attention(*qkv, window, bias=bias, softcap=2.0, return_lse=True, backend=backend)
        want = written_out(*qkv, added(x), allowed, 2.0)
        torch.testing.assert_close(got, want, atol=1e-10, rtol=0)
        flowing = [torch.randn_like(each) for each in want]
        got, want = (torch.autograd.grad(each, [*qkv, x], flowing) for each in (got, want))
        torch.testing.assert_close(got, want, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", KINDS)
def test_gradcheck(name):
    make, shape, _ = KINDS[name]
    q, k, v = (normal(BATCH, SEQ, heads, 2) for heads in (HEADS, 2, 2))

    def attend(q, k, v, x):
        return block_sparse_attention(q, k, v, SlidingWindow(9, 3), bias=make(x), return_lse=True)

    assert torch.autograd.gradcheck(attend, (q, k, v, normal(*shape)), fast_mode=True)


@st.composite
def biased(draw, calls):
    """A call of these and a bias of any kinds."""
    case = draw(calls)
    (batch, seq_q, heads, _), seq_k = case.q.shape, case.k.shape[1]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return replace(case, bias=draw(biases(batch, heads, seq_q, seq_k, generator)))


@given(biased(cases(dropout=True, most=100) | dilated_cases(dropout=True, most=100)))
@settings(max_examples=80)
def test_any_call(case):
    assert_exact(case, "blockwise")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_any_call_in_lower_precision(dtype):
    @given(biased(cases(most=80) | dilated_cases(most=80)))
    @settings(max_examples=60)
    def check(case):
        assert_exact(case.to(dtype), "blockwise")

    check()


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 20), (6, 4), (32, 1000)])
def test_buckets_of_t5(buckets, max_distance, bidirectional):
    """Those of transformers, whose table has buckets first."""
    attention = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    table, place = normal(buckets, 1), torch.arange(700)
    bucket = attention._relative_position_bucket(place - place[:, None], bidirectional, buckets, max_distance)
    scores = ScoreBias.t5(table.T, bidirectional=bidirectional, max_distance=max_distance)
    q = torch.zeros(1, 700, 1, 1, dtype=torch.float64)
    _, lse = block_sparse_attention(q, q, q, Causal(), bias=scores, return_lse=True)
    want = table[bucket, 0].masked_fill(place > place[:, None], -torch.inf).logsumexp(-1)
    torch.testing.assert_close(lse[0, 0], want, atol=1e-10, rtol=0)
    _, lse = block_sparse_attention(q, q, q, Full(), bias=scores, return_lse=True)
    torch.testing.assert_close(lse[0, 0], table[bucket, 0].logsumexp(-1), atol=1e-10, rtol=0)


def test_the_table_of_swin():
    """Of query − key, with heads last: flipped it is a grid's."""
    swin = pytest.importorskip("transformers.models.swin.modeling_swin")
    bias = swin.SwinRelativePositionBias(HEADS, (6, 6)).double()
    torch.nn.init.normal_(bias.relative_position_bias_table)
    table = bias.relative_position_bias_table.detach().T.unflatten(1, (11, 11)).flip(1, 2)
    q, k, v = (normal(1, SEQ, HEADS, 8) for _ in range(3))
    got = block_sparse_attention(q, k, v, Full(), bias=ScoreBias.grid(table, (6, 6)))
    want, _ = written_out(q, k, v, bias(), torch.ones(SEQ, SEQ, dtype=torch.bool))
    torch.testing.assert_close(got, want, atol=1e-10, rtol=0)


def test_tokens_of_a_grid_in_another_order(qkv):
    table, order = normal(HEADS, 7, 17), torch.randperm(SEQ)
    moved = [x[:, order] for x in qkv]
    got = block_sparse_attention(*moved, Full(), bias=ScoreBias.grid(table, (4, 9), tokens=order))
    want = block_sparse_attention(*qkv, Full(), bias=ScoreBias.grid(table, (4, 9)))
    torch.testing.assert_close(got, want[:, order], atol=1e-10, rtol=0)


def test_queries_at_the_end():
    q, k, v = normal(1, 5, HEADS, 8), normal(1, SEQ, HEADS, 8), normal(1, SEQ, HEADS, 8)
    tensors = normal(HEADS, 9), normal(1, HEADS, SEQ), normal(HEADS), normal(HEADS, 7, 17)
    bias = ScoreBias.table(tensors[0]) + ScoreBias.forget(tensors[1]) + ScoreBias.slopes(tensors[2])
    for each in (bias, ScoreBias.grid(tensors[3], (4, 9))):
        all_q = torch.cat((torch.randn(1, SEQ - 5, HEADS, 8, dtype=torch.float64), q), dim=1)
        got = block_sparse_attention(q, k, v, Causal(), bias=each)
        want = block_sparse_attention(all_q, k, v, Causal(), bias=each)[:, SEQ - 5 :]
        torch.testing.assert_close(got, want, atol=1e-10, rtol=0)


def test_minus_infinity_hides_a_pair(qkv):
    seen = torch.rand(BATCH, 1, SEQ, SEQ) < 0.3
    seen[0, 0, 7] = False
    bias = ScoreBias.dense(torch.zeros(seen.shape).masked_fill(~seen, -torch.inf))
    out, lse = block_sparse_attention(*qkv, Full(), bias=bias, return_lse=True)
    assert (out[0, 7] == 0).all()
    assert (lse[0, :, 7] == -torch.inf).all()
    want, _ = written_out(*qkv, 0.0, seen.index_fill(2, torch.tensor(7), True))
    keep = PLACE != 7
    torch.testing.assert_close(out[:, keep], want[:, keep], atol=1e-10, rtol=0)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), qkv))


@pytest.mark.parametrize("keyword", ["alibi_slopes", "bias"])
def test_slopes_by_either_keyword(qkv, keyword):
    """`alibi_slopes` is one of the kinds of bias, and learns like these."""
    slopes = normal(HEADS)
    given = {"alibi_slopes": slopes} if keyword == "alibi_slopes" else {"bias": ScoreBias.slopes(slopes)}
    out = block_sparse_attention(*qkv, Causal(), **given)
    want, _ = written_out(*qkv, -slopes[:, None, None] * AHEAD.abs(), AHEAD <= 0)
    torch.testing.assert_close(out, want, atol=1e-10, rtol=0)
    got, want = (torch.autograd.grad(x.square().sum(), slopes) for x in (out, want))
    torch.testing.assert_close(got, want, atol=1e-10, rtol=0)


@pytest.mark.parametrize("kind", ["block-sparse", "dilated"])
def test_only_the_bias_learns(qkv, kind):
    """q, k and v ask for nothing, and the bias gets what it gets where they do."""
    table, bare = normal(HEADS, 9), [x.detach() for x in qkv]

    def attend(q, k, v):
        bias = ScoreBias.table(table)
        if kind == "block-sparse":
            return block_sparse_attention(q, k, v, SlidingWindow(9, 9), bias=bias)
        branches = {"segment_lengths": [16, 32], "dilation_rates": [1, 2]}
        return dilated_attention(q, k, v, **branches, bias=bias, detach_branch_weights=True)

    got, want = (torch.autograd.grad(attend(*given).square().sum(), table) for given in (bare, qkv))
    torch.testing.assert_close(got, want, atol=1e-12, rtol=0)
    assert want[0].abs().sum() > 0


def test_in_one_graph_for_all_values(qkv):
    q, k, v = (x.detach().float().requires_grad_() for x in qkv)
    counter = CompileCounter()

    def attend(q, k, v, slopes, table, keys, dense):
        bias = ScoreBias.slopes(slopes, signed=True) + ScoreBias.t5(table) + ScoreBias.keys(keys)
        return block_sparse_attention(q, k, v, SlidingWindow(9, 9), bias=bias + ScoreBias.dense(dense)).square().sum()

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    counted = torch.compile(attend, fullgraph=True, backend=counter)
    for _ in range(3):
        shapes = (BATCH, HEADS), (HEADS, 8), (1, HEADS, SEQ), (1, HEADS, SEQ, SEQ)
        tensors = [q, k, v, *(torch.randn(shape, requires_grad=True) for shape in shapes)]
        counted(*tensors)
        got, want = (torch.autograd.grad(call(*tensors), tensors) for call in (compiled, attend))
        torch.testing.assert_close(got, want)
    assert counter.frame_count == 1


def test_a_bias_as_an_argument_of_a_graph(qkv):
    q, k, v = (x.detach().float() for x in qkv)
    bias = ScoreBias.table(torch.randn(HEADS, 9)) + ScoreBias.slopes(torch.rand(HEADS))

    def attend(bias):
        return block_sparse_attention(q, k, v, SlidingWindow(9, 9), bias=bias)

    torch.testing.assert_close(torch.compile(attend, fullgraph=True, backend="aot_eager")(bias), attend(bias))


def test_autocast_and_checkpoint(qkv):
    q, k, v = (x.detach().float().requires_grad_() for x in qkv)
    table = torch.randn(HEADS, 9, requires_grad=True)

    def attend(q, k, v, table):
        return block_sparse_attention(q, k, v, SlidingWindow(9, 9), bias=ScoreBias.table(table))

    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(q, k, v, table)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, attend(*(x.bfloat16() for x in (q, k, v)), table))
    (grad,) = torch.autograd.grad(out.float().sum(), table)
    assert grad.dtype == torch.float32
    again = checkpoint(attend, q, k, v, table, use_reentrant=False)
    got, want = (torch.autograd.grad(x.square().sum(), (q, table)) for x in (again, attend(q, k, v, table)))
    torch.testing.assert_close(got, want, atol=0, rtol=0)


def test_weights_masses_and_modules_know_it(qkv):
    bias = ScoreBias.t5(normal(HEADS, 8)) + ScoreBias.keys(normal(BATCH, 1, SEQ))
    pattern = SlidingWindow(9, 3) | GlobalTokens(2)
    out, weights = attention_with_weights(*qkv, pattern, bias=bias)
    values = qkv[2].repeat_interleave(2, dim=2)
    torch.testing.assert_close(torch.einsum("bhqk,bkhd->bqhd", weights.to_dense(), values), out, atol=1e-10, rtol=0)
    assert torch.equal(BlockSparseAttention(pattern)(*qkv, bias=bias), out)
    _, dense = attention_with_weights(*qkv, Full(), bias=bias)
    seen = (AHEAD <= 3) & (AHEAD >= -9) | (PLACE < 2)
    kept = kept_mass(*(x.detach() for x in qkv[:2]), pattern, bias=bias)
    torch.testing.assert_close(kept, (dense.to_dense() * seen).sum(-1), atol=1e-10, rtol=0)


def test_memory_is_that_of_tiles():
    """Forward and backward of a long call: a small part of what its scores would take."""
    seq = 8192
    q, k, v = (torch.randn(1, seq, 1, 8, requires_grad=True) for _ in range(3))
    table, keys = torch.randn(1, 257, requires_grad=True), torch.randn(1, 1, seq, requires_grad=True)

    def step():
        bias = ScoreBias.table(table) + ScoreBias.keys(keys)
        out = block_sparse_attention(q, k, v, SlidingWindow(256, 0), bias=bias)
        torch.autograd.grad(out.sum(), (q, k, v, table, keys))

    step()
    with measure_peak() as peak:
        step()
    assert peak.peak_bytes <= 4 * seq * seq / 4


def test_who_computes_it():
    q = torch.randn(1, 32, 2, 8)
    told = explain(q, q, q, Full(), bias=ScoreBias.slopes(torch.ones(2)))
    assert told.chosen == "blockwise"
    assert told.reasons["sdpa"] == "cannot: softcap, alibi_slopes and bias are unknown there"
    assert "score modifications" in told.path


def test_a_bias_says_what_it_is():
    bias = ScoreBias.slopes(torch.ones(4)) + ScoreBias.t5(torch.ones(4, 32))
    assert repr(bias) == "ScoreBias.slopes([4]) + ScoreBias.t5([4, 32])"
    with pytest.raises(TypeError):
        bias + 1
