"""Tensors of (batch, heads, seq, head_dim): `layout="bhsd"` takes them, and where they come in by mistake is said."""

import inspect
import warnings

import pytest
import torch
from hypothesis import given, settings

import dilated_attention_pytorch as dap
from dilated_attention_pytorch import (
    BlockLayout,
    Branches,
    Causal,
    Full,
    SlidingWindow,
    block_sparse_attention,
    decode_attention,
    dilated_attention,
    explain,
)
from dilated_attention_pytorch.ops import checks
from tests.strategies import cases, dilated_cases

OPERATORS = [block_sparse_attention, dilated_attention, decode_attention, explain]
BRANCHES = {"segment_lengths": [16, 64], "dilation_rates": [1, 2]}


def inputs(seq=100, heads=4, heads_kv=2, seq_q=None, dtype=torch.float64):
    shapes = (seq_q or seq, heads), (seq, heads_kv), (seq, heads_kv)
    return [torch.randn(2, *shape, 8, dtype=dtype) for shape in shapes]


def heads_first(tensors):
    return [x.transpose(1, 2).contiguous() for x in tensors]


def same_in_both(case, attend):
    """Results and gradients, to the bit: from contiguous tensors, and from views of (batch, seq, heads, head_dim)."""
    leaves = [x.detach().requires_grad_() for x in (case.q, case.k, case.v)]
    out, lse = attend(*leaves, "bshd")
    finite = torch.where(lse == -torch.inf, 0.0, lse)
    want = [out, lse, *torch.autograd.grad((out, finite), leaves, (case.do, case.dlse))]
    for order in (torch.Tensor.contiguous, lambda x: x):
        leaves = [order(x.detach().transpose(1, 2)).requires_grad_() for x in (case.q, case.k, case.v)]
        out, lse = attend(*leaves, "bhsd")
        assert out.shape == (*leaves[0].shape[:-1], leaves[2].shape[-1])
        finite = torch.where(lse == -torch.inf, 0.0, lse)
        grads = torch.autograd.grad((out, finite), leaves, (case.do.transpose(1, 2), case.dlse))
        got = [out.transpose(1, 2), lse, *(x.transpose(1, 2) for x in grads)]
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


class TestHeadsFirst:
    @given(cases())
    @settings(max_examples=40)
    def test_block_sparse(self, case):
        names = ["is_causal", "scale", "key_padding_mask", "document_ids", "softcap", "alibi_slopes", "bias", "sinks"]
        options = {name: getattr(case, name) for name in names}

        def attend(q, k, v, layout):
            return block_sparse_attention(q, k, v, case.layout, **options, return_lse=True, layout=layout)

        same_in_both(case, attend)

    @given(dilated_cases())
    @settings(max_examples=40)
    def test_dilated(self, case):
        names = [
            "is_causal",
            "scale",
            "key_padding_mask",
            "softcap",
            "alibi_slopes",
            "bias",
            "sinks",
            "detach_branch_weights",
        ]
        options = {name: getattr(case, name) for name in names}
        options |= {n: getattr(case.layout, n) for n in ("segment_lengths", "dilation_rates", "head_offsets")}

        def attend(q, k, v, layout):
            return dilated_attention(q, k, v, **options, return_lse=True, layout=layout)

        same_in_both(case, attend)

    @pytest.mark.parametrize("pattern", [Full(), Causal(), SlidingWindow(9, 0)], ids=str)
    def test_every_backend(self, pattern):
        tensors = inputs()
        for backend in ("auto", "blockwise", "reference"):
            want = block_sparse_attention(*tensors, pattern, backend=backend)
            got = block_sparse_attention(*heads_first(tensors), pattern, backend=backend, layout="bhsd")
            torch.testing.assert_close(got.transpose(1, 2), want, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("training", [False, True])
    def test_calls_that_are_like_one_before(self, training):
        """The layout remembers calls: those of the other order and of other strides are others."""
        layout = BlockLayout.from_pattern(SlidingWindow(20, 5), 100, block_size=16)
        for _ in range(3):
            for dtype in (torch.float32, torch.float64):
                tensors = [x.requires_grad_(training) for x in inputs(dtype=dtype)]
                want = block_sparse_attention(*tensors, layout)
                for first in (heads_first(tensors), [x.transpose(1, 2) for x in tensors]):
                    got = block_sparse_attention(*first, layout, layout="bhsd")
                    assert torch.equal(got.transpose(1, 2), want)

    @pytest.mark.parametrize("new", [1, 5])
    def test_decoding(self, new):
        q, k, v = inputs(seq_q=new, heads=6)
        options = {"lengths": [100, 40], "return_lse": True}
        want, lse = decode_attention(q, k, v, SlidingWindow(30, 0), **options)
        got, lse_got = decode_attention(*heads_first((q, k, v)), SlidingWindow(30, 0), **options, layout="bhsd")
        assert torch.equal(got.transpose(1, 2), want)
        assert torch.equal(lse_got, lse)

    def test_decoding_over_pages(self):
        (q,), (k, v) = inputs(seq_q=2)[:1], torch.randn(2, 9, 16, 2, 8, dtype=torch.float64)
        table = torch.randperm(9)[:8].view(2, 4)
        options = {"lengths": [50, 64], "page_table": table}
        want = decode_attention(q, k, v, SlidingWindow(30, 0), **options)
        got = decode_attention(*heads_first((q, k, v)), SlidingWindow(30, 0), **options, layout="bhsd")
        assert torch.equal(got.transpose(1, 2), want)

    def test_explained(self):
        q, k, v = inputs(seq_q=70)
        for what, options in ((SlidingWindow(9, 0), {}), (Full(), {}), (Branches([16, 64], [1, 2]), {})):
            want = explain(q, k, v, what, **options)
            assert explain(*heads_first((q, k, v)), what, **options, layout="bhsd") == want

    @pytest.mark.parametrize("dynamic", [False, None])
    def test_compiled_whole(self, dynamic):
        pattern = SlidingWindow(20, 0)

        def attend(q, k, v):
            one = block_sparse_attention(q * 2, k, v, pattern, layout="bhsd")
            return one + dilated_attention(q, k, v, **BRANCHES, is_causal=True, layout="bhsd")

        torch._dynamo.reset()
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for seq in (100, 130):
            leaves = [x.requires_grad_() for x in heads_first(inputs(seq, dtype=torch.float32))]
            found = []
            for run in (attend, compiled):
                out = run(*leaves)
                found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
            for got, want in zip(*found, strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=1e-6)

    def test_gradcheck(self):
        leaves = [x[:1, :, :, :3].requires_grad_() for x in heads_first(inputs(seq=5, heads=2))]

        def attend(q, k, v):
            return block_sparse_attention(q, k, v, Causal(), backend="blockwise", layout="bhsd")

        torch.autograd.gradcheck(attend, leaves)

    def test_autocast(self):
        tensors = inputs(dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = block_sparse_attention(*heads_first(tensors), SlidingWindow(20, 0), layout="bhsd")
            want = block_sparse_attention(*tensors, SlidingWindow(20, 0))
        assert got.dtype == torch.bfloat16
        assert torch.equal(got.transpose(1, 2), want)

    @pytest.mark.parametrize("operator", OPERATORS)
    def test_every_operator_has_it(self, operator):
        parameter = inspect.signature(operator).parameters["layout"]
        assert (parameter.default, parameter.kind) == ("bshd", inspect.Parameter.KEYWORD_ONLY)


def swapped(heads, seq, heads_kv=None):
    """Tensors of (batch, heads, seq, head_dim) as someone else makes them."""
    return [torch.randn(1, n, seq, 8) for n in (heads, heads_kv or heads, heads_kv or heads)]


@pytest.fixture
def not_warned(monkeypatch):
    monkeypatch.setattr(checks, "_warned_of_order", False)


WARNING = r"k has {} heads of {} tokens: it is read as \(batch, seq, heads, head_dim\). If .* layout=\"bhsd\""


@pytest.mark.usefixtures("not_warned")
class TestMistaken:
    CALLS = {  # noqa: RUF012
        "block_sparse_attention": lambda q, k, v: block_sparse_attention(q, k, v, SlidingWindow(9, 0)),
        "dilated_attention": lambda q, k, v: dilated_attention(q, k, v, **BRANCHES),
        "explain": lambda q, k, v: explain(q, k, v, Causal()),
        "BlockSparseAttention": lambda q, k, v: dap.BlockSparseAttention(Causal())(q, k, v),
        "DilatedAttention": lambda q, k, v: dap.DilatedAttention([64], [1])(q, k, v),
        "BlockSparseAdaptive": lambda q, k, v: dap.BlockSparseAdaptive(block_size=16)(q, k, v),
    }  # fmt: skip

    @pytest.mark.parametrize("name", CALLS)
    def test_is_said_once_with_the_remedy(self, name):
        """(1, 8, 4096, 64) was taken as 8 tokens of 4,096 heads, and what came back had the shape that was given."""
        run = self.CALLS[name]
        with pytest.warns(UserWarning, match=WARNING.format(256, 2)):
            run(*swapped(2, 256))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(*swapped(2, 256))
            run(*swapped(1, 300))

    @pytest.mark.parametrize(("heads", "seq", "heads_kv"), [(8, 512, 8), (8, 256, 2), (64, 256, 64), (1, 256, 1)])
    def test_whatever_the_heads(self, heads, seq, heads_kv):
        with pytest.warns(UserWarning, match=WARNING.format(seq, heads_kv)):
            block_sparse_attention(*swapped(heads, seq, heads_kv), SlidingWindow(9, 0))

    def test_compiled(self):
        torch._dynamo.reset()
        compiled = torch.compile(dap.BlockSparseAttention(Causal()), fullgraph=True, backend="eager")
        with pytest.warns(UserWarning, match=WARNING.format(256, 2)):
            compiled(*swapped(2, 256))

    @pytest.mark.parametrize("heads", [1, 8, 64, 128])
    @pytest.mark.parametrize("seq_q", [1, 2, 16, 300])
    @pytest.mark.parametrize("seq_k", [1, 2, 16, 300, 1024])
    def test_short_sequences_and_decoding_are_no_mistake(self, heads, seq_q, seq_k):
        """No model has more than 128 heads; of a single token neither."""
        q = torch.randn(2, seq_q, heads, 8, device="meta")
        k = torch.randn(2, seq_k, heads, 8, device="meta")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checks.check_qkv(q, k, k)

    def test_not_in_the_order_that_was_told(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            block_sparse_attention(*swapped(2, 256), SlidingWindow(9, 0), layout="bhsd")
            decode_attention(torch.randn(1, 8, 1, 8), *torch.randn(2, 1, 8, 512, 8), Causal(), layout="bhsd")

    @pytest.mark.filterwarnings("ignore:k has 512 heads")
    def test_errors_name_the_remedy_too(self):
        layout = BlockLayout.from_pattern(Causal(), 512, block_size=128)
        with pytest.raises(
            ValueError, match=r"lengths \(512, 512\), but .* \(8, 8\) tokens. If yours .* layout=\"bhsd"
        ):
            block_sparse_attention(*swapped(8, 512), layout)
        with pytest.raises(ValueError, match=r"multiple of heads of k, got 1 and 512. If yours .* layout=\"bhsd"):
            decode_attention(torch.randn(1, 8, 1, 8), *torch.randn(2, 1, 8, 512, 8), Causal())
