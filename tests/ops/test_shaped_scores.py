"""softcap, alibi_slopes and sinks, against attention written out in full."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dilated_attention_pytorch import (
    Causal,
    Full,
    GlobalTokens,
    SlidingWindow,
    block_sparse_attention,
    dilated_attention,
    explain,
)
from dilated_attention_pytorch.ops.block_sparse import attention_with_weights

SEQ, HEADS = 70, 4
PATTERN = SlidingWindow(20, 3) | GlobalTokens(2)
SLOPES = torch.tensor([0.5, 0.25, 0.0, 2.0], dtype=torch.float64)
SINKS = torch.tensor([0.3, -1.0, 5.0, 0.0], dtype=torch.float64)


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(0)
    shapes = (2, SEQ, HEADS, 8), (2, SEQ, 2, 8), (2, SEQ, 2, 8)
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def written_out(q, k, v, *, softcap=None, alibi_slopes=None, sinks=None):
    """The window of 20 back and 3 ahead and two global keys, densely; the sink as one more column."""
    k, v = (x.repeat_interleave(HEADS // 2, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    ahead = torch.arange(SEQ) - torch.arange(SEQ)[:, None]
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.view(1, -1, 1, 1) * ahead.abs()
    scores = scores.masked_fill(~((ahead >= -20) & (ahead <= 3) | (torch.arange(SEQ) < 2)), -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(2, -1, SEQ, 1)), dim=-1)
    lse = torch.logsumexp(scores, -1)
    return torch.einsum("bhqk,bkhd->bqhd", torch.softmax(scores, -1)[..., :SEQ], v), lse


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 0.8},
        {"alibi_slopes": SLOPES},
        {"sinks": SINKS},
        {"softcap": 2.0, "alibi_slopes": SLOPES, "sinks": SINKS},
    ],
    ids=lambda options: "+".join(options),
)
def test_equals_attention_written_out(qkv, options, backend):
    learned = {name: x.clone().requires_grad_() for name, x in options.items() if name != "softcap"}
    options = options | learned
    wanted = [*qkv, *learned.values()]
    out, lse = block_sparse_attention(*qkv, PATTERN, return_lse=True, backend=backend, **options)
    want_out, want_lse = written_out(*qkv, **options)
    torch.testing.assert_close((out, lse), (want_out, want_lse), atol=1e-10, rtol=0)
    do, dlse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad((out, lse), wanted, (do, dlse))
    want = torch.autograd.grad((want_out, want_lse), wanted, (do, dlse))
    torch.testing.assert_close(got, want, atol=1e-10, rtol=0)


def test_weights_have_the_same_scores(qkv):
    options = {"softcap": 2.0, "alibi_slopes": SLOPES, "sinks": SINKS}
    out, weights = attention_with_weights(*qkv, PATTERN, **options)
    values = qkv[2].repeat_interleave(2, dim=2)
    torch.testing.assert_close(torch.einsum("bhqk,bkhd->bqhd", weights.to_dense(), values), out, atol=1e-10, rtol=0)
    assert (weights.to_dense().sum(-1) < 1).all()  # the sinks have the rest


def test_a_row_without_keys_gives_its_sink():
    q, k, v = (torch.randn(1, 3, 2, 4, requires_grad=True) for _ in range(3))
    sinks = torch.tensor([1.0, -2.0], requires_grad=True)
    padding = torch.ones(1, 3, dtype=torch.bool)
    out, lse = block_sparse_attention(q, k, v, Full(), sinks=sinks, key_padding_mask=padding, return_lse=True)
    assert (out == 0).all()
    assert torch.equal(lse, sinks.detach()[None, :, None].expand(1, 2, 3))
    grads = torch.autograd.grad((out.sum(), lse.sum()), (q, sinks))
    assert (grads[0] == 0).all()
    assert torch.equal(grads[1], torch.tensor([3.0, 3.0]))


def test_a_sink_of_minus_infinity_is_none():
    """Also in a row without keys, where it leaves nothing at all."""
    q, k, v = (torch.randn(2, 3, 2, 4, requires_grad=True) for _ in range(3))
    sinks = torch.tensor([-torch.inf, 0.5], requires_grad=True)
    padding = torch.tensor([[True] * 3, [False] * 3])
    options = {"key_padding_mask": padding, "return_lse": True, "backend": "blockwise"}
    out, lse = block_sparse_attention(q, k, v, Full(), sinks=sinks, **options)
    plain, plain_lse = block_sparse_attention(q, k, v, Full(), **options)
    assert torch.equal(out[:, :, 0], plain[:, :, 0])
    assert torch.equal(lse[:, 0], plain_lse[:, 0])
    grads = torch.autograd.grad(out.sum() + lse[lse > -torch.inf].sum(), (q, k, v, sinks))
    assert all(grad.isfinite().all() for grad in grads)
    assert grads[3][0] == 0


def test_slopes_of_queries_that_stand_at_the_end():
    q, k, v = torch.randn(1, 2, 1, 4), torch.randn(1, 6, 1, 4), torch.eye(6)[None, :, None, :4]
    out = block_sparse_attention(q * 0, k, v, Causal(), alibi_slopes=torch.tensor([1.0]))
    for row, position in enumerate((4, 5)):
        weights = torch.softmax(-torch.tensor([float(position - j) for j in range(position + 1)]), 0)
        torch.testing.assert_close(out[0, row, 0], weights[:4])


@pytest.mark.parametrize("sign", ["signed", "distance"])
def test_alibi_of_flex_attention(sign):
    """There slope · (kv − q) with its sign, here −slope · |q − kv|: equal over earlier keys, and each is the other
    over later ones too once it is written as docs/from_flex.md says."""
    q, k, v = (torch.randn(1, 2, 60, 8, dtype=torch.float64) for _ in range(3))
    slopes, place = torch.tensor([0.3, 0.05], dtype=torch.float64), torch.arange(60.0, dtype=torch.float64)
    mods = {
        "signed": lambda score, b, h, i, j: score + slopes[h] * (j - i),
        "distance": lambda score, b, h, i, j: score - slopes[h] * (i - j).abs(),
    }
    ours = [x.transpose(1, 2) for x in (q, k, v)]
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 60, 60, device="cpu")
    causal = flex_attention(q, k, v, score_mod=mods[sign], block_mask=block_mask).transpose(1, 2)
    got = block_sparse_attention(*ours, Causal(), alibi_slopes=slopes)
    torch.testing.assert_close(got, causal, atol=1e-10, rtol=0)
    both = flex_attention(q, k, v, score_mod=mods[sign]).transpose(1, 2)
    if sign == "distance":
        got, lse = block_sparse_attention(*ours, Full(), alibi_slopes=slopes, return_lse=True)
    else:
        assert (block_sparse_attention(*ours, Full(), alibi_slopes=slopes) - both).abs().max() > 0.1
        wide = [torch.cat((ours[0] * 8**-0.5, slopes[:, None].expand(1, 60, 2, 1)), -1)]
        wide.append(torch.cat((ours[1], place.view(1, 60, 1, 1).expand(1, 60, 2, 1)), -1))
        wide.append(torch.nn.functional.pad(ours[2], (0, 1)))
        got, lse = block_sparse_attention(*wide, Full(), scale=1.0, return_lse=True)
        got, lse = got[..., :8], lse - slopes[:, None] * place
    torch.testing.assert_close(got, both, atol=1e-10, rtol=0)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * 8**-0.5
    scores = mods[sign](scores, 0, torch.arange(2)[:, None, None], torch.arange(60)[:, None], torch.arange(60))
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=1e-10, rtol=0)


def test_a_long_distance_hides_what_a_short_one_does_not():
    """Slopes are exact at distances that 16-bit numbers cannot tell apart."""
    q, k = torch.zeros(1, 1, 1, 2), torch.zeros(1, 4097, 1, 2)
    v = torch.zeros(1, 4097, 1, 2)
    v[:, 0, :, 0] = 1
    tiny = torch.tensor([1e-3])
    out = block_sparse_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), Full(), alibi_slopes=tiny)
    want = torch.softmax(-1e-3 * (4096 - torch.arange(4097.0)), 0)[0]
    torch.testing.assert_close(out[0, 0, 0, 0].float(), want, rtol=2**-8, atol=0)


def test_dense_layouts_leave_sdpa():
    q = torch.randn(1, 32, 2, 8)
    assert explain(q, q, q, Full()).chosen == "sdpa"
    for options in ({"softcap": 1.0}, {"alibi_slopes": torch.ones(2)}, {"sinks": torch.ones(2)}):
        assert explain(q, q, q, Full(), **options).chosen == "blockwise"
    reason = explain(q, q, q, Full(), softcap=1.0).reasons["sdpa"]
    assert reason == "cannot: softcap, alibi_slopes and bias are unknown there"


def test_in_one_graph(qkv):
    q, k, v = (x.detach().float() for x in qkv)

    def call(q, k, v, slopes, sinks):
        return block_sparse_attention(q, k, v, PATTERN, softcap=5.0, alibi_slopes=slopes, sinks=sinks)

    options = SLOPES.float(), SINKS.float()
    torch.testing.assert_close(
        torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v, *options), call(q, k, v, *options)
    )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"softcap": 0.0}, ValueError, "softcap must be positive and finite .*, got 0.0"),
        ({"softcap": float("nan")}, ValueError, "softcap must be positive and finite .*, got nan"),
        ({"softcap": 1e-50}, ValueError, "softcap must be positive and finite .*, got 1e-50"),  # 0 in float32
        ({"softcap": "30"}, TypeError, "softcap must be a number or None, got str"),
        ({"alibi_slopes": [0.5] * 4}, TypeError, "alibi_slopes must be a tensor or None, got list"),
        (
            {"alibi_slopes": torch.ones(2)},
            ValueError,
            r"alibi_slopes must have a number for each of 4 heads, got shape",
        ),
        ({"sinks": torch.ones(4, 1)}, ValueError, r"sinks must have a number for each of 4 heads, got shape \[4, 1\]"),
        ({"sinks": torch.ones(4, dtype=torch.int64)}, TypeError, "sinks must be floating point, got torch.int64"),
        ({"sinks": torch.ones(4, device="meta")}, ValueError, "sinks must be on the device of q, cpu, got meta"),
    ],
)
def test_bad_input(qkv, options, error, message):
    with pytest.raises(error, match=message):
        block_sparse_attention(*qkv, PATTERN, **options)
    with pytest.raises(error, match=message):
        dilated_attention(*qkv, segment_lengths=[16], dilation_rates=[1], **options)
