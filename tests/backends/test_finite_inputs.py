"""How far a NaN or an infinity gets: what docs/exactness.md says of hidden keys, slopes and sinks, by backend."""

import pytest
import torch

from dilated_attention_pytorch import (
    Causal,
    LocalBlocks,
    SlidingWindow,
    block_sparse_attention,
    decode_attention,
    dilated_attention,
)

NAN, INF = float("nan"), float("inf")
BACKENDS = ["reference", "blockwise", "triton"]
NAMES = ("out", "lse", "dq", "dk", "dv")
SEQ, HIDDEN = 48, 20
BLOCK = set(range(16, 32))  # the queries, and the keys, whose block holds the hidden key
EVERYWHERE = set(range(SEQ))

# What is not finite: at which positions. The reference makes the whole matrix of scores, so all of it is one block.
REACHED = {
    ("reference", "k"): {"dq": EVERYWHERE},
    ("reference", "v"): {"out": EVERYWHERE, "dq": EVERYWHERE, "dk": EVERYWHERE - {HIDDEN}},
    ("blockwise", "k"): {"dq": BLOCK},
    ("blockwise", "v"): {"out": BLOCK, "dq": BLOCK, "dk": BLOCK},
    ("triton", "k"): {"dq": BLOCK},
    ("triton", "v"): {"out": BLOCK, "dq": BLOCK, "dk": BLOCK - {HIDDEN}},
}


@pytest.fixture(autouse=True)
def with_triton(request):
    if "triton" in request.node.name:
        pytest.importorskip("triton", reason="needs triton, which there is for Linux alone")


def attend(q, k, v, pattern, do=None, **options):
    """out, lse, dq, dk and dv."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out, lse = block_sparse_attention(q, k, v, pattern, return_lse=True, **options)
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out) if do is None else do)
    return dict(zip(NAMES, (out.detach(), lse.detach().transpose(1, 2), *grads), strict=True))


def qkv(heads=1):
    return {name: torch.randn(1, SEQ, heads, 16) for name in "qkv"}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("backend", "name", "bad"),
    [(*each, bad) for each in REACHED for bad in (NAN, INF) if bad != INF or each[0] != "triton"],  # which takes long
)
def test_a_key_that_nobody_sees(backend, name, bad):
    """A weight of 0 times NaN is NaN: of a hidden key in dq, of its value in out, dq and dk, for the queries whose
    blocks touch the key. lse, dv and all else is that of a finite key, bit for bit."""
    tensors, hidden = qkv(), torch.zeros(1, SEQ, dtype=torch.bool)
    hidden[:, HIDDEN] = True
    call = {"pattern": LocalBlocks(0, block_size=16), "key_padding_mask": hidden, "backend": backend}
    want = attend(**tensors, **call)
    tensors[name][:, HIDDEN] = bad
    got = attend(**tensors, **call)
    reached = {}
    for each in NAMES:
        wrong = ~got[each].isfinite().reshape(SEQ, -1).all(1)
        assert torch.equal(got[each][:, ~wrong], want[each][:, ~wrong]), each
        if wrong.any():
            reached[each] = set(wrong.nonzero().flatten().tolist())
    assert reached == REACHED[backend, name]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("backend", [*BACKENDS, "sdpa"])
def test_a_later_key(backend, name):
    """The same for a key that only later queries see. `sdpa` is PyTorch's, and free to stop NaN earlier."""
    tensors, do = qkv(), torch.ones(1, SEQ, 1, 16)
    do[:, -1] = 0.0
    want = attend(**tensors, pattern=Causal(), do=do, backend=backend) if backend != "sdpa" else None
    tensors[name][:, -1] = NAN
    q, k, v = (tensors[each].requires_grad_() for each in "qkv")
    out = block_sparse_attention(q, k, v, Causal(), backend=backend)
    (dq,) = torch.autograd.grad(out, q, do)
    reached = {each for each, x in (("out", out), ("dq", dq)) if not x[:, :-1].isfinite().all()}
    if want is None:
        assert reached <= {"out", "dq"}
        assert name == "v" or "out" not in reached
    else:
        assert reached == ({"dq"} if name == "k" else {"out", "dq"})
        if name == "k":
            assert torch.equal(out[:, :-1], want["out"][:, :-1])


OPERATORS = {
    **{
        f"block_sparse_attention, {backend}": lambda *x, backend=backend, **options: block_sparse_attention(
            *x, SlidingWindow(9, 0), backend=backend, return_lse=True, **options
        )
        for backend in BACKENDS
    },
    "dilated_attention": lambda *x, **options: dilated_attention(
        *x, segment_lengths=[16, 64], dilation_rates=[1, 2], return_lse=True, **options
    ),
    **{
        f"decode_attention, {backend}": lambda q, k, v, backend=backend, **options: decode_attention(
            q[:, -1:].detach(), k.detach(), v.detach(), SlidingWindow(9, 0), backend=backend, return_lse=True, **options
        )
        for backend in ("blockwise", "triton")
    },
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("operator", "name", "bad"),
    [
        (operator, name, bad)
        for operator in OPERATORS
        for name, bad in (("alibi_slopes", NAN), ("alibi_slopes", INF), ("sinks", NAN))
        # The kernels take long in the interpreter, and sinks are added behind them.
        if operator != "block_sparse_attention, triton" or (name, bad) == ("alibi_slopes", NAN)
    ],
)
def test_a_slope_or_sink_that_is_not_finite(operator, name, bad):
    """Values of tensors are not looked at, which would wait for a GPU: as everywhere in PyTorch, NaN gives NaN. It must
    give all of it: every row of its head in out, lse and gradients. The other heads are what they were, bit for bit."""
    q, k, v = (x.requires_grad_() for x in qkv(heads=3).values())
    good, spoilt = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.1, bad, 0.3])
    want = OPERATORS[operator](q, k, v, **{name: good})
    got = OPERATORS[operator](q, k, v, **{name: spoilt})
    if got[0].requires_grad:
        want, got = (
            [*each, *torch.autograd.grad(each[0], (q, k, v), torch.ones_like(each[0]))] for each in (want, got)
        )
    for ours, clean, heads in zip(got, want, (2, 1, 2, 2, 2), strict=False):
        ours, clean = ours.movedim(heads, 0), clean.movedim(heads, 0)
        assert ours[1].isnan().all()
        assert torch.equal(ours[[0, 2]], clean[[0, 2]])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("operator", [each for each in OPERATORS if each != "block_sparse_attention, triton"])
def test_an_infinite_sink_takes_all(operator):
    """It is the limit of large ones: nothing is left for the keys, and nothing is NaN. (One of −inf is none.)"""
    q, k, v = (x.requires_grad_() for x in qkv(heads=3).values())
    plain = OPERATORS[operator](q, k, v)
    out, lse = OPERATORS[operator](q, k, v, sinks=torch.tensor([-INF, INF, -INF]))
    assert (out[:, :, 1] == 0).all()
    assert (lse[:, 1] == INF).all()
    for got, want, heads in ((out, plain[0], 2), (lse, plain[1], 1)):
        assert torch.equal(got.movedim(heads, 0)[[0, 2]], want.movedim(heads, 0)[[0, 2]])
    if out.requires_grad:
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), (q, k, v)))
