"""The operator among its neighbours: torch.library, torch.compile, autocast, checkpointing, gradcheck."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dilated_attention_pytorch import (
    BlockLayout,
    Causal,
    Documents,
    Full,
    GlobalTokens,
    RandomBlocks,
    ScoreBias,
    SlidingWindow,
    block_sparse_attention,
)
from dilated_attention_pytorch.backends import blockwise
from dilated_attention_pytorch.layout import clear_layout_cache
from dilated_attention_pytorch.memory import measure_peak
from dilated_attention_pytorch.ops import operators
from dilated_attention_pytorch.ops.checks import check_options
from dilated_attention_pytorch.ops.named import NamedLayout


def qkv(seq=100, heads=4, heads_kv=2, batch=2, head_dim=8, head_dim_v=None, dtype=torch.float32,
        requires_grad=True):  # fmt: skip
    widths = head_dim, head_dim, head_dim if head_dim_v is None else head_dim_v
    shapes = [(batch, seq, *of_one) for of_one in zip((heads, heads_kv, heads_kv), widths, strict=True)]
    return [torch.randn(s, dtype=dtype, requires_grad=requires_grad) for s in shapes]


def random_layout(seed, seq=100, density=0.5):
    n = -(-seq // 16)
    mask = torch.rand(n, n, generator=torch.Generator().manual_seed(seed)) < density
    return BlockLayout.from_block_mask(mask, 16, seq_q=seq, seq_k=seq)


# All of them with a gradient.
LEARNED = [
    torch.rand(shape, requires_grad=True) for shape in ((2, 4), (4, 8), (1, 4, 100), (2, 1, 100), (2, 1, 100, 100))
]
EVERY_BIAS = (
    ScoreBias.slopes(LEARNED[0], signed=True)
    + ScoreBias.t5(LEARNED[1])
    + ScoreBias.keys(LEARNED[2])
    + ScoreBias.forget(LEARNED[3])
    + ScoreBias.dense(LEARNED[4])
)
OPTIONS = {
    "plain": {},
    "padding": {"key_padding_mask": torch.arange(100).expand(2, -1) > 70},
    "documents": {"document_ids": (torch.arange(100) // 30).expand(2, -1).contiguous()},
    "dropout": {"dropout_p": 0.3},
    "shaped": {"softcap": 2.0, "alibi_slopes": torch.tensor([0.5, 0.1, 0.0, 1.0])},
    "biased": {"bias": EVERY_BIAS},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("by", ["lists", "names"])
def test_opcheck(by, name):
    pattern = SlidingWindow(30, 0) | GlobalTokens(3)
    q, k, v = qkv(head_dim_v=5)
    options = check_options(q, k, scale=0.3, **OPTIONS[name])
    options = options._replace(seed=torch.tensor(7) if options.dropout_p else None)
    layout = NamedLayout(pattern, False, 100, 100, 4, q.device)
    if by == "lists":
        layout = BlockLayout.from_pattern(pattern, 100, block_size=16)
    arguments = (q, k, v, *operators.flattened([layout], blockwise, False), *options.flatten(), "blockwise")
    forward, backward = {"lists": operators.OF_LISTS, "names": operators.OF_NAMES}[by]
    torch.library.opcheck(forward, arguments)
    wanted = " ".join(options.learned())
    with torch.no_grad():
        out, lse = forward(*arguments)
        given = torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse, *arguments[3:], wanted
        torch.library.opcheck(backward, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.4}], ids=str)
def test_gradcheck(options):
    layout = random_layout(3, seq=40)
    q, k, v = qkv(seq=40, heads=2, heads_kv=1, batch=1, head_dim=3, head_dim_v=2, dtype=torch.float64)

    def attend(*qkv):
        torch.manual_seed(1)
        out, lse = block_sparse_attention(*qkv, layout, return_lse=True, backend="blockwise", **options)
        return out, torch.where(lse == -torch.inf, 0.0, lse)

    assert torch.autograd.gradcheck(attend, (q, k, v))


def test_a_second_derivative_is_a_clear_error():
    q, k, v = qkv(seq=20)
    out = block_sparse_attention(q, k, v, random_layout(0, seq=20), backend="blockwise")
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative; use backend='reference'"):
        grad.sum().backward()


def test_the_reference_can_be_differentiated_twice():
    q, k, v = qkv(seq=6, heads=1, heads_kv=1, batch=1, head_dim=2, dtype=torch.float64)
    layout = BlockLayout.from_pattern(SlidingWindow(2, 1), 6, block_size=16)
    assert torch.autograd.gradgradcheck(lambda *x: block_sparse_attention(*x, layout, backend="reference"), (q, k, v))


class TestCompile:
    @pytest.mark.parametrize("head_dim_v", [8, 13])
    def test_equals_eager_with_gradients(self, head_dim_v):
        q, k, v = qkv(head_dim_v=head_dim_v)
        compiled = torch.compile(block_sparse_attention, fullgraph=True, backend="aot_eager")
        for layout in (random_layout(1), BlockLayout.from_pattern(Documents((40, 60)), 100, block_size=16)):
            want = block_sparse_attention(q, k, v, layout, is_causal=True, return_lse=True)
            got = compiled(q, k, v, layout, is_causal=True, return_lse=True)
            grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out, _ in (want, got)]
            for a, b in zip((*want, *grads[0]), (*got, *grads[1]), strict=True):
                assert torch.equal(a, b)

    @pytest.mark.parametrize(("used", "zeros"), [("out", 0), ("both", 0), ("lse", 1)])
    def test_no_zeros_for_a_gradient_of_lse_that_nobody_asked_for(self, used, zeros):
        torch._dynamo.reset()
        graphs = []
        tensors, layout = qkv(), random_layout(4)

        def loss(*tensors):
            out, lse = block_sparse_attention(*tensors, layout, return_lse=True)
            return {"out": out.sum(), "both": out.sum() + lse.sum(), "lse": lse.sum()}[used]

        def keep(graph, inputs):
            graphs.append(graph)
            return make_boxed_func(graph)

        compiled = torch.compile(loss, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
        grads = [torch.autograd.grad(f(*tensors), tensors) for f in (loss, compiled)]
        assert all(map(torch.equal, *grads))
        _, backward = graphs
        made = [str(node.target) for node in backward.graph.nodes if node.op == "call_function"]
        assert sum("zeros" in name for name in made) == zeros

    @pytest.mark.parametrize("is_causal", [False, True])
    def test_a_new_layout_does_not_recompile(self, is_causal):
        """Other blocks, and another number of them."""
        torch._dynamo.reset()
        counter = CompileCounter()
        q, k, v = qkv(requires_grad=False)
        compiled = torch.compile(block_sparse_attention, fullgraph=True, backend=counter)
        for seed, density in enumerate((0.5, 0.5, 0.2, 0.9)):
            layout = random_layout(seed, density=density)
            got = compiled(q, k, v, layout, is_causal=is_causal)
            want = block_sparse_attention(q, k, v, layout, is_causal=is_causal, backend="reference")
            torch.testing.assert_close(got, want)
        for window in (3, 20, 50):
            layout = BlockLayout.from_pattern(SlidingWindow(window, 4), 100, block_size=16)
            before = counter.frame_count
            compiled(q, k, v, layout, is_causal=is_causal)
        assert counter.frame_count == before
        assert before <= 2  # random masks share one graph, windows another only if their tables differ in shape

    def test_a_pattern_inside_the_graph(self):
        """The layout is a constant of the graph, and what is remembered of it is real."""
        clear_layout_cache()
        torch._dynamo.reset()
        q, k, v = qkv()
        for pattern in (SlidingWindow(17, 3), RandomBlocks(2, block_size=16), Full()):
            compiled = torch.compile(
                lambda q, k, v, pattern=pattern: block_sparse_attention(q, k, v, pattern, is_causal=True),
                fullgraph=True,
                backend="aot_eager",
            )
            got = compiled(q, k, v)
            want = block_sparse_attention(q, k, v, pattern, is_causal=True, backend="reference")
            torch.testing.assert_close(got, want)

    @pytest.mark.slow
    def test_inductor(self):
        q, k, v = qkv(seq=40, requires_grad=False)
        layout = random_layout(2, seq=40)

        @torch.compile(fullgraph=True)
        def model(q, k, v):
            return block_sparse_attention(q * 2, k, v, layout).sum(-1)

        want = block_sparse_attention(q * 2, k, v, layout, backend="reference").sum(-1)
        torch.testing.assert_close(model(q, k, v), want)


def test_several_lengths_compile():
    """A layout is a constant of its graph, so every length has a graph."""
    torch._dynamo.reset()
    compiled = torch.compile(block_sparse_attention, fullgraph=True, backend="aot_eager")
    for seq in (64, 80, 100):
        q, k, v = qkv(seq=seq)
        want = block_sparse_attention(q, k, v, SlidingWindow(9, 0), backend="reference")
        torch.testing.assert_close(compiled(q, k, v, SlidingWindow(9, 0)), want)


@pytest.mark.parametrize("is_causal", [False, True])
def test_evaluating_first_does_not_spoil_training(is_causal):
    """What is remembered was made in inference mode; autograd refuses to save such tensors."""
    clear_layout_cache()
    q, k, v = qkv()
    layout = random_layout(9)
    for what in (SlidingWindow(5, 0), layout):
        with torch.inference_mode():
            block_sparse_attention(q, k, v, what, is_causal=is_causal)
        block_sparse_attention(q, k, v, what, is_causal=is_causal).sum().backward()
    with torch.inference_mode():
        lists = random_layout(10).by_key
    assert not lists.indices.is_inference()


def test_forward_mode_is_refused_and_not_dropped():
    """PyTorch gives a zero tangent for an operator without a formula."""
    q, k, v = qkv(requires_grad=False)

    def attend(x, backend):
        return block_sparse_attention(x, k, v, SlidingWindow(4, 0), backend=backend)

    with pytest.raises(RuntimeError, match="no forward-mode derivative; use backend='reference'"):
        torch.func.jvp(lambda x: attend(x, "auto"), (q,), (torch.ones_like(q),))
    _, tangent = torch.func.jvp(lambda x: attend(x, "reference"), (q,), (torch.ones_like(q),))
    assert tangent.abs().max() > 0


def test_an_infinite_gradient_of_an_empty_row_is_no_gradient():
    """The square of lse, a common penalty, has an infinite gradient where lse is −inf."""
    q, k, v = qkv()
    padding = torch.zeros(2, 100, dtype=torch.bool)
    padding[0, :16] = True
    _, lse = block_sparse_attention(q, k, v, SlidingWindow(3, 0), key_padding_mask=padding, return_lse=True)
    assert (lse == -torch.inf).any()
    lse.square().sum().backward()
    assert q.grad.isfinite().all()
    assert k.grad.isfinite().all()
    assert (q.grad[0, :16] == 0).all()


def test_lists_of_one_sample_serve_every_sample():
    q, k, v = qkv(heads_kv=4)
    mask = torch.rand(1, 4, 7, 7) < 0.5
    layout = BlockLayout.from_block_mask(mask, 16, seq_q=100, seq_k=100)
    want = BlockLayout.from_block_mask(mask[0], 16, seq_q=100, seq_k=100)
    assert torch.equal(block_sparse_attention(q, k, v, layout), block_sparse_attention(q, k, v, want))


def test_huge_values_in_several_pieces_do_not_overflow():
    q, k, v = (torch.randn(1, 4096, 1, 8) for _ in range(3))
    v = torch.where(torch.arange(4096)[:, None, None] % 2048 < 1024, 3e38, -3e38).expand_as(v)
    out = block_sparse_attention(q, k, v, Full(), backend="blockwise")
    assert out.isfinite().all()


def test_a_strided_head_dim_stays_linear_in_memory():
    """PyTorch's own dense attention takes its quadratic kernel for such tensors: 1 GiB of scores here."""
    q = torch.randn(1, 16, 1, 16384).permute(0, 3, 2, 1)
    block_sparse_attention(q[:, :64], q[:, :64], q[:, :64], Full())
    with measure_peak() as peak:
        block_sparse_attention(q, q, q, Full())
    assert peak.peak_bytes < 200e6


def test_autocast_runs_in_its_dtype():
    q, k, v = qkv()
    layout = random_layout(4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = block_sparse_attention(q, k, v, layout, return_lse=True)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    low = [x.bfloat16() for x in (q, k, v)]
    assert torch.equal(out, block_sparse_attention(*low, layout))
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        double = block_sparse_attention(*(x.double() for x in (q, k, v)), layout)
    assert double.dtype == torch.float64


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_draws_the_same_dropout(use_reentrant):
    layout = random_layout(5)
    q, k, v = qkv()

    def attend(q, k, v):
        return block_sparse_attention(q, k, v, layout, dropout_p=0.5)

    grads = []
    for run in (attend, lambda *x: checkpoint(attend, *x, use_reentrant=use_reentrant)):
        torch.manual_seed(11)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        run(*leaves).square().sum().backward()
        grads.append([x.grad for x in leaves])
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_a_pattern_and_its_layout_are_the_same_call():
    q, k, v = qkv(seq=300)
    pattern = SlidingWindow(100, 10) | GlobalTokens(5)
    layout = BlockLayout.from_pattern(pattern, 300, block_size=128)
    assert torch.equal(block_sparse_attention(q, k, v, pattern), block_sparse_attention(q, k, v, layout))


def test_the_block_size_does_not_change_a_token_pattern():
    q, k, v = qkv(seq=150, dtype=torch.float64)
    outs = [
        block_sparse_attention(q, k, v, BlockLayout.from_pattern(SlidingWindow(33, 0), 150, block_size=size))
        for size in (16, 64, (128, 16), (32, 256))
    ]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=0, atol=1e-12)


def test_scale_is_honoured():
    q, k, v = qkv()
    layout = random_layout(6)
    doubled = block_sparse_attention(2 * q, k, v, layout, scale=0.1)
    torch.testing.assert_close(doubled, block_sparse_attention(q, k, v, layout, scale=0.2))
    assert not torch.allclose(doubled, block_sparse_attention(q, k, v, layout))


def test_key_padding_hides_keys_and_nothing_else():
    q, k, v = qkv(requires_grad=False)
    padding = torch.zeros(2, 100, dtype=torch.bool)
    padding[1, 80:] = True
    out = block_sparse_attention(q, k, v, Full(), key_padding_mask=padding)
    assert torch.equal(out[0], block_sparse_attention(q[:1], k[:1], v[:1], Full(), backend="blockwise")[0])
    short = block_sparse_attention(q[1:], k[1:, :80], v[1:, :80], Full(), backend="reference")
    torch.testing.assert_close(out[1:], short)


def test_document_ids_equal_the_packed_pattern():
    q, k, v = qkv(requires_grad=False)
    lengths = (13, 40, 47)
    ids = torch.repeat_interleave(torch.tensor([5, 1, 9]), torch.tensor(lengths)).expand(2, -1)
    got = block_sparse_attention(q, k, v, Causal(), document_ids=ids)
    torch.testing.assert_close(got, block_sparse_attention(q, k, v, Documents(lengths) & Causal()))


def test_lse_is_the_natural_logarithm():
    """One key with score s: lse is s."""
    q, k, v = (torch.tensor([x]).view(1, 1, 1, 1) for x in (3.0, 5.0, 7.0))
    out, lse = block_sparse_attention(q, k, v, Full(), return_lse=True, scale=1.0)
    assert (out.item(), lse.item()) == (7.0, 15.0)
    out, lse = block_sparse_attention(q, k.repeat(1, 4, 1, 1), v.repeat(1, 4, 1, 1), Full(), return_lse=True, scale=1.0)
    assert lse.item() == pytest.approx(15.0 + torch.tensor(4.0).log().item())


class TestEager:
    """Plain calls go past the dispatcher; everything else goes through it, and gives the same."""

    @pytest.mark.parametrize("name", OPTIONS)
    def test_the_same_bits_with_somebody_looking_on(self, name):
        class LookingOn(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                seen.add(func.name())
                return func(*args, **(kwargs or {}))

        seen = set()
        pattern = SlidingWindow(30, 0) | GlobalTokens(3)
        tensors = qkv() + (LEARNED if name == "biased" else [])

        def call():
            torch.manual_seed(0)
            out, lse = block_sparse_attention(
                *tensors[:3], pattern, backend="blockwise", return_lse=True, **OPTIONS[name]
            )
            return out, lse, *torch.autograd.grad((out.square().sum(), lse.sum()), tensors)

        plain = call()
        with LookingOn():
            watched = call()
        assert seen >= {f"dilated_attention_pytorch::pattern_{way}" for way in ("forward", "backward")}
        assert all(map(torch.equal, plain, watched))

    def test_tensors_without_data(self):
        layout = random_layout(0).to("meta")
        q, k, v = (x.detach().to("meta").requires_grad_() for x in qkv())
        out = block_sparse_attention(q, k, v, layout)
        out.sum().backward()
        assert (out.shape, out.device.type) == (q.shape, "meta")
        assert (k.grad.shape, k.grad.device.type) == (k.shape, "meta")

    def test_a_backward_that_is_traced_is_one_graph(self):
        """The backward of an eager forward, by PyTorch's compiled autograd."""
        torch._dynamo.reset()
        tensors = qkv()
        want = torch.autograd.grad(block_sparse_attention(*tensors, SlidingWindow(30, 0)).sum(), tensors)
        loss = block_sparse_attention(*tensors, SlidingWindow(30, 0)).sum()
        counter = CompileCounter()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=counter, fullgraph=True)):
            loss.backward()
        assert counter.frame_count == 1
        assert all(map(torch.equal, (x.grad for x in tensors), want))

    def test_a_mask_that_is_changed_before_the_backward_is_noticed(self):
        q, k, v = qkv()
        padding = torch.zeros(2, 100, dtype=torch.bool)
        out = block_sparse_attention(q, k, v, SlidingWindow(30, 0), key_padding_mask=padding)
        padding[:, 5] = True
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    def test_saved_tensors_can_be_packed(self):
        """Offloading and activation checkpointing see what is kept."""
        tensors, packed = qkv(), []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x.shape) or x.clone(), lambda x: x):
            out = block_sparse_attention(*tensors, SlidingWindow(30, 0))
        out.sum().backward()
        assert packed[:4] == [*(x.shape for x in tensors), out.shape]

    def test_tangents_are_refused_without_gradients_too(self):
        q, k, v = qkv(requires_grad=False)
        with torch.autograd.forward_ad.dual_level(), torch.no_grad():
            dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
            with pytest.raises(RuntimeError, match="no forward-mode derivative"):
                block_sparse_attention(dual, k, v, SlidingWindow(30, 0))

    def test_functional_transforms_are_an_error_of_pytorch(self):
        """Operators with list arguments have none: loud, and not a gradient of something else."""
        q, k, v = qkv(requires_grad=False)
        with pytest.raises(RuntimeError, match="functorch transforms"):
            torch.func.grad(lambda q: block_sparse_attention(q, k, v, SlidingWindow(30, 0)).sum())(q)

    def test_a_backend_that_walks_lists_has_them_at_hand(self, monkeypatch):
        """As `backends.base` promises: by key only where gradients will be asked for."""
        monkeypatch.setattr(blockwise, "needs_work_order", True, raising=False)
        q, k, v = qkv()
        made = []
        for training in (False, True):
            layout = BlockLayout.from_pattern(SlidingWindow(30, 0), 100, block_size=16)
            with torch.set_grad_enabled(training):
                block_sparse_attention(q, k, v, layout, backend="blockwise")
            made.append(set(layout._derived))
        assert made == [{"query_work"}, {"query_work", "by_key", "key_work", "seen_by"}]
