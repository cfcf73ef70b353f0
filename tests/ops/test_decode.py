"""`decode_attention` equals the last rows of attention over the whole sequence."""

import io
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention_pytorch import (
    Causal,
    DilatedBlocks,
    Documents,
    Full,
    GlobalBlocks,
    GlobalTokens,
    LocalBlocks,
    PerHead,
    RandomBlocks,
    SlidingWindow,
    block_sparse_attention,
    decode_attention,
)
from dilated_attention_pytorch.layout.rows import depends_on_length
from dilated_attention_pytorch.layout.terms import has_ranges
from dilated_attention_pytorch.memory import clear_caches
from dilated_attention_pytorch.ops import explain_decode, set_fast_path
from dilated_attention_pytorch.options import CallOptions
from dilated_attention_pytorch.patterns.blocks import BlockPattern
from tests.strategies import atoms, patterns

CAPACITY, HEAD_DIM = 160, 4
ATOMS = atoms(None).filter(lambda pattern: not has_ranges(pattern))
WINDOW = SlidingWindow(20, 0)


def whole_rows(q, k, v, pattern, lengths, padding=None, **options):
    """out and lse of the last tokens of each sample, from the definition."""
    new, outs, lses = q.shape[1], [], []
    for sample, length in enumerate(lengths):
        queries = torch.randn(1, length, *q.shape[2:], dtype=q.dtype)
        queries[0, length - new :] = q[sample]
        keys, values = (x[sample : sample + 1, :length] for x in (k, v))
        hidden = None if padding is None else padding[sample : sample + 1, :length]
        out, lse = block_sparse_attention(
            queries, keys, values, pattern, key_padding_mask=hidden, return_lse=True, backend="reference", **options
        )
        outs.append(out[:, length - new :])
        lses.append(lse[:, :, length - new :])
    return torch.cat(outs), torch.cat(lses)


def in_pages(x, size, generator):
    """A cache as pages in any order, among others that hold NaN, and the table of them."""
    batch, capacity = x.shape[:2]
    each = -(-capacity // size)
    order = torch.randperm(2 * batch * each, generator=generator)[: batch * each]
    pages = torch.full((2 * batch * each, size, *x.shape[2:]), torch.nan, dtype=x.dtype)
    padded = torch.cat((x, x.new_zeros(batch, each * size - capacity, *x.shape[2:])), dim=1)
    pages[order] = padded.reshape(batch * each, size, *x.shape[2:])
    return pages, order.view(batch, each)


@st.composite
def calls(draw):
    heads_kv = draw(st.integers(1, 2))
    heads, batch, new = heads_kv * draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 5]))
    pattern = draw(patterns(None).filter(lambda pattern: not has_ranges(pattern)))
    if draw(st.integers(0, 4)) == 0:
        each = ATOMS
        pattern = PerHead(tuple(draw(each) for _ in range(draw(st.sampled_from([heads, heads_kv])))))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    options = {"is_causal": draw(st.booleans()), "scale": draw(st.sampled_from([None, -0.5]))}
    if draw(st.booleans()) and draw(st.booleans()):
        options |= {"softcap": 1.5, "alibi_slopes": normal(heads), "sinks": normal(heads)}
    return {
        "q": normal(batch, new, heads, HEAD_DIM),
        "k": normal(batch, CAPACITY, heads_kv, HEAD_DIM),
        "v": normal(batch, CAPACITY, heads_kv, draw(st.sampled_from([HEAD_DIM, HEAD_DIM, 1, 7, 24]))),
        "pattern": pattern,
        "lengths": [draw(st.integers(new, CAPACITY)) for _ in range(batch)],
        "padding": torch.rand(batch, CAPACITY, generator=generator) < 0.3 if draw(st.booleans()) else None,
        "page": draw(st.sampled_from([None, None, 16, 7])),
        "generator": generator,
        "options": options,
    }


def check(call, backend, dtype, tolerance):
    q, k, v = (call[name].to(dtype) for name in ("q", "k", "v"))
    want = whole_rows(
        *(x.double() for x in (q, k, v)), *(call[n] for n in ("pattern", "lengths", "padding")), **call["options"]
    )
    padding, table = call["padding"], None
    if call["page"]:
        state = call["generator"].get_state()
        k, table = in_pages(k, call["page"], call["generator"])
        call["generator"].set_state(state)
        v, _ = in_pages(v, call["page"], call["generator"])
        if padding is not None:
            padding = torch.nn.functional.pad(padding, (0, table.shape[1] * call["page"] - CAPACITY))
    got = decode_attention(
        q, k, v, call["pattern"], lengths=call["lengths"], page_table=table, key_padding_mask=padding, return_lse=True,
        backend=backend, **call["options"],
    )  # fmt: skip
    assert got[0].dtype == dtype
    torch.testing.assert_close(tuple(x.double() for x in got), want, atol=tolerance, rtol=0)


@pytest.mark.slow
@given(calls())
@settings(max_examples=150)
def test_equals_the_last_rows_of_the_whole(call):
    check(call, "blockwise", torch.float64, 1e-10)


@given(calls())
@settings(max_examples=8)
def test_the_kernels_do_so_too(call):
    pytest.importorskip("triton", reason="needs triton, which there is for Linux alone")
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a CUDA device: tests/gpu runs the kernels there")
    call["options"].pop("alibi_slopes", None)  # random ones reach scores of hundreds, whose rounding shows
    check(call, "triton", torch.float32, 2e-6)


def test_many_query_heads_of_one_key_head_in_the_kernels():
    """Those that do not fit one program are shared out; 128 of 256 numbers in float32 asked for 320 KiB of memory."""
    kernels = pytest.importorskip("dilated_attention_pytorch.kernels.decode", reason="needs triton")
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a CUDA device: tests/gpu runs the kernels there")
    assert [kernels._heads_per_program(group, 256 * 4) for group in (1, 12, 24, 128)] == [1, 12, 12, 16]
    assert [kernels._heads_per_program(group, 128 * 2) for group in (8, 71, 96, 128)] == [8, 1, 48, 64]
    q, k, v = torch.randn(1, 1, 48, 200), torch.randn(1, 70, 2, 200), torch.randn(1, 70, 2, 200)
    for pattern in (SlidingWindow(40, 0), PerHead((SlidingWindow(40, 0), Full()))):
        want = decode_attention(q.double(), k.double(), v.double(), pattern, alibi_slopes=torch.arange(48.0) / 99)
        got = decode_attention(q, k, v, pattern, alibi_slopes=torch.arange(48.0) / 99, backend="triton")
        torch.testing.assert_close(got.double(), want, atol=5e-6, rtol=0)


def cache(batch=2, capacity=300, heads=4, heads_kv=2, dtype=torch.float32):
    k, v = (torch.randn(batch, capacity, heads_kv, 8, dtype=dtype) for _ in range(2))
    return torch.randn(batch, 1, heads, 8, dtype=dtype), k, v


def test_token_by_token_equals_the_whole_sequence():
    _, k, v = cache(capacity=290, dtype=torch.float64)
    queries = torch.randn(2, 290, 4, 8, dtype=torch.float64)
    pattern = SlidingWindow(40, 0) | GlobalTokens(3) | LocalBlocks(64, block_size=64, causal=True)
    want = block_sparse_attention(queries, k, v, pattern, is_causal=True, backend="reference")
    for position in range(290):
        got = decode_attention(queries[:, position : position + 1], k, v, pattern, lengths=[position + 1] * 2)
        torch.testing.assert_close(got, want[:, position : position + 1], atol=1e-10, rtol=0)


@pytest.mark.parametrize("length", [52, 150, 257])
def test_blocks_of_several_sizes(length):
    """How many fine blocks there are decides which of them a budget or a draw takes: the count of coarse ones must not
    round it up."""
    q, k, v = cache(batch=1, dtype=torch.float64)
    pattern = RandomBlocks(3, block_size=16) | DilatedBlocks((64, 256), (1, 2), 0.4, 16) | GlobalBlocks(9, 128)
    want, _ = whole_rows(q, k, v, pattern, [length])
    got = decode_attention(q, k, v, pattern, lengths=[length], is_causal=False)
    torch.testing.assert_close(got, want, atol=1e-10, rtol=0)


class OnGPU(torch.Tensor):
    """Lengths that say they are on a GPU, and that the host must not read."""

    @property
    def device(self):
        return torch.device("cuda", 0)

    def tolist(self):
        pytest.fail("the host read the lengths")

    item = __int__ = __bool__ = __index__ = cpu = numpy = tolist


# In a table of blocks, in intervals alone, both, and by head.
GROWING = {
    "intervals": SlidingWindow(20, 0) | GlobalTokens(3) | (SlidingWindow(40, 0) & GlobalTokens(50)),
    "blocks": LocalBlocks(64, block_size=32, causal=True) | DilatedBlocks((128,), (2,), 1.0, 16),
    "both": SlidingWindow(9, 0) | GlobalBlocks(20, 16) | (SlidingWindow(90, 0) & LocalBlocks(64, 2, block_size=32)),
    "heads": PerHead((SlidingWindow(20, 0), LocalBlocks(32, block_size=16), Full(), GlobalTokens(9, queries=True))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GROWING)
def test_the_kernels_find_the_rows_of_any_length(name, monkeypatch):
    """One set of launches for all lengths, over the borders of blocks, from lengths that the host never reads. A length
    that cannot be is NaN in its sample, whatever lies in memory there, and changes no other."""
    pytest.importorskip("triton", reason="needs triton, which there is for Linux alone")
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a CUDA device: tests/gpu runs the kernels there")
    from dilated_attention_pytorch.kernels import decode as kernels
    from dilated_attention_pytorch.kernels import launcher
    from dilated_attention_pytorch.ops import decode

    launched, launch = [], launcher.launch
    recorded = lambda kernel, grid, data, numbers, **constants: (  # noqa: E731
        launched.append((kernel, grid, numbers, constants)), launch(kernel, grid, data, numbers, **constants)
    )[1]  # fmt: skip
    monkeypatch.setattr(kernels.launcher, "launch", recorded)
    q, k, v = torch.randn(5, 2, 4, 8), torch.randn(5, 70, 2, 8), torch.randn(5, 70, 2, 8)
    call = decode._call_of(GROWING[name].text, True, q, k, None, CallOptions(0.4), "triton")
    for lengths in ([2, 17, 32, 33, 70], [64, 65, 71, 1, 47], [2**40, -5, 0, 3, 16]):
        on_gpu = torch.tensor(lengths).as_subclass(OnGPU)
        out, lse = decode._run(q, decode.Cache(k, v, None, on_gpu), call, call.options)
        for i, length in enumerate(lengths):
            if 2 <= length <= 70:
                one = (q[i : i + 1].double(), k[i : i + 1].double(), v[i : i + 1].double())
                want = whole_rows(*one, GROWING[name], [length], scale=0.4, is_causal=True)
                torch.testing.assert_close((out[i : i + 1].double(), lse[i : i + 1].double()), want, atol=5e-6, rtol=0)
            else:
                assert out[i].isnan().all()
                assert lse[i].isnan().all()
    first, *others = (launched[i : i + 2] for i in range(0, len(launched), 2))
    assert [kernel for kernel, *_ in first] == [kernels.decode_kernel, kernels.merge_kernel]
    assert all(other == first for other in others)


@given(ATOMS, st.integers(1, 12), st.integers(0, 11), st.integers(1, 8))
def test_rows_that_do_not_depend_on_the_length(rule, num_blocks, row, more):
    """Those of a longer sequence are the same but for blocks that the shorter one lacks."""
    if isinstance(rule, BlockPattern) and row < num_blocks:
        longer = set(rule.key_blocks(row, num_blocks + more))
        same = set(rule.key_blocks(row, num_blocks)) == {block for block in longer if block < num_blocks}
        assert same or rule.depends_on_length
        assert depends_on_length(rule & Causal()) == rule.depends_on_length


def test_a_call_like_one_before_skips_the_checks(monkeypatch):
    from dilated_attention_pytorch.ops import decode

    checked, check = [], decode._checked
    monkeypatch.setattr(decode, "_checked", lambda *args, **options: (checked.append(1), check(*args, **options))[1])
    q, k, v = cache(heads=4, heads_kv=2)
    slopes, hidden = torch.rand(4), torch.rand(2, 300) < 0.2
    kinds = [
        {}, {"is_causal": False}, {"scale": 0.3}, {"softcap": 2.0}, {"alibi_slopes": slopes}, {"sinks": slopes},
        {"key_padding_mask": hidden}, {"return_lse": True}, {"backend": "blockwise"}, {"pattern": WINDOW},
    ]  # fmt: skip
    clear_caches()
    for number, kind in enumerate(kinds):
        for length in (300, 290, 17):
            call = {"pattern": LocalBlocks(64, block_size=16) | WINDOW, "lengths": [length, 300 - length + 1]} | kind
            got = decode_attention(torch.randn_like(q), k.clone(), v.clone(), **call)
            assert got is not None
        assert len(checked) == number + 1
    try:
        set_fast_path(False)
        want = decode_attention(q, k, v, WINDOW, alibi_slopes=slopes, key_padding_mask=hidden)
        assert len(checked) == len(kinds) + 1
    finally:
        set_fast_path(True)
    for _ in range(2):
        got = decode_attention(q, k, v, WINDOW, alibi_slopes=slopes, key_padding_mask=hidden)
        assert torch.equal(got, want)
        assert torch.equal(decode_attention(q, k, v, WINDOW, alibi_slopes=2 * slopes), whole(q, k, v, 2 * slopes))


def whole(q, k, v, slopes):
    clear_caches()
    return decode_attention(q, k, v, WINDOW, alibi_slopes=slopes)


def test_lengths_that_are_waited_for_are_named():
    q, k, v = cache()
    on_host = explain_decode(q, k, v, WINDOW, lengths=[3, 4])
    assert on_host.chosen == "blockwise"
    assert "lengths are on the host" in on_host.path
    lengths = torch.tensor([3, 4]).as_subclass(OnGPU)
    waiting = explain_decode(q, k, v, WINDOW, lengths=lengths)
    assert "the host waits for the lengths in every call" in waiting.path
    assert "backend 'blockwise'" in waiting.path
    pytest.importorskip("triton", reason="needs triton, which there is for Linux alone")
    staying = explain_decode(q, k, v, WINDOW, lengths=lengths, backend="triton")
    assert staying.chosen == "triton"
    assert "one CUDA graph serves all of them" in staying.path
    choosing = explain_decode(q, k, v, RandomBlocks(3), lengths=lengths, backend="triton")
    assert "the pattern chooses blocks by the length" in choosing.path


def test_what_is_not_seen_is_not_read():
    """Keys outside of the window may be anything, memory that was never written for one."""
    q, k, v = cache()
    seen = slice(300 - 65, 300)
    clean = decode_attention(q, k, v, SlidingWindow(64, 0))
    for x in (k, v):
        kept = x[:, seen].clone()
        x.fill_(torch.nan)
        x[:, seen] = kept
    assert torch.equal(decode_attention(q, k, v, SlidingWindow(64, 0)), clean)


def test_strides_are_those_of_the_cache():
    """Caches of other libraries have the heads before the tokens."""
    q, k, v = cache()
    want = decode_attention(q, k, v, SlidingWindow(64, 0))
    heads_first = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    assert torch.equal(decode_attention(q, *heads_first, SlidingWindow(64, 0)), want)


def test_in_one_graph_whatever_the_lengths():
    q, k, v = cache()
    pattern, graphs = SlidingWindow(64, 0), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, backend=backend)
    def step(q, k, v, lengths):
        return decode_attention(q, k, v, pattern, lengths=lengths)

    for length in range(200, 250):
        lengths = [length, 300 - length]
        got = step(q, k, v, torch.tensor(lengths))
        assert torch.equal(got, decode_attention(q, k, v, pattern, lengths=lengths))
    assert len(graphs) == 1


@pytest.mark.parametrize(("pattern", "waits"), [(WINDOW | LocalBlocks(64), False), (WINDOW | RandomBlocks(2), True)])
def test_a_graph_that_reads_no_lengths_may_be_a_cuda_graph(pattern, waits):
    pytest.importorskip("triton", reason="needs triton, which there is for Linux alone")
    q, k, v = cache()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def step(q, k, v, lengths, backend="triton"):
        return decode_attention(q, k, v, pattern, lengths=lengths, backend=backend)

    lengths = torch.tensor([290, 20])
    got = torch.compile(step, fullgraph=True, backend=backend)(q, k, v, lengths)
    torch.testing.assert_close(got, step(q, k, v, lengths, "blockwise"), atol=1e-5, rtol=0)
    (op,) = {node.target for node in graphs[0].graph.nodes if "dilated_attention_pytorch" in str(node.target)}
    assert (torch.Tag.cudagraph_unsafe in op.tags) == waits


def test_a_graph_has_no_lengths_of_the_host():
    """Those that nobody gave become a tensor of the device of q: a CUDA graph takes none of the host."""
    q, k, v = (torch.empty(2, n, 4, 16, device="meta") for n in (1, 64, 64))
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def step(q, k, v):
        return decode_attention(q, k, v, WINDOW)

    torch.compile(step, fullgraph=True, backend=backend)(q, k, v)
    (made,) = (node for node in graphs[0].graph.nodes if node.target is torch.full)
    assert made.kwargs["device"].type == "meta"
    with pytest.raises(ValueError, match="lengths must be from 1"):
        decode_attention(q, k, v, WINDOW, lengths=[30, 65])


@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict):
    """A graph named its pattern by a number, which is another one's elsewhere, so export was refused. It holds the
    pattern's text now."""

    class Step(torch.nn.Module):
        def forward(self, q, k, v):
            return decode_attention(q, k, v, WINDOW)

    tensors = cache()
    file = io.BytesIO()
    torch.export.save(torch.export.export(Step(), tensors, strict=strict), file)
    file.seek(0)
    assert torch.equal(torch.export.load(file).module()(*tensors), Step()(*tensors))


def test_a_plain_call_loads_no_compiler():
    """The first call of a registered operator does, for seconds."""
    code = (
        "import sys, torch\n"
        "from dilated_attention_pytorch import SlidingWindow, block_sparse_attention, decode_attention\n"
        "k = torch.randn(1, 300, 2, 8)\n"
        "decode_attention(k[:, -1:], k, k, SlidingWindow(64, 0))\n"
        "q = k.clone().requires_grad_()\n"
        "block_sparse_attention(q, k, k, SlidingWindow(64, 0)).sum().backward()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_page_that_is_not_there_is_nan_in_the_kernels(monkeypatch):
    pytest.importorskip("triton", reason="needs triton, which there is for Linux alone")
    from dilated_attention_pytorch.ops import decode

    monkeypatch.setattr(decode, "_check_pages", lambda *args: None)  # as on a GPU, where values are not looked at
    pages = torch.randn(4, 16, 2, 8)
    q, table = torch.randn(2, 1, 4, 8), torch.tensor([[0, 1], [2, 9]])
    out = decode_attention(q, pages, pages, Full(), page_table=table, backend="triton")
    assert out[0].isfinite().all()
    assert out[1].isnan().all()


@pytest.mark.parametrize("backend", ["triton", "blockwise"])
def test_what_nobody_sees_may_be_anything(monkeypatch, backend):
    """Pages behind a window that were given back, padding, and what else is in the page of a missing one."""
    if backend == "triton":
        pytest.importorskip("triton", reason="needs triton, which there is for Linux alone")
    from dilated_attention_pytorch.ops import decode

    monkeypatch.setattr(decode, "_check_pages", lambda *args: None)
    q, pages = torch.randn(1, 1, 2, 16), torch.randn(2, 10, 16, 2, 16)
    pages[:, 0] = torch.nan
    pages[:, 3, :7] = torch.nan  # before the window of 41 tokens
    pages[1, 5, 11] = torch.nan  # padding
    hidden = torch.zeros(1, 128, dtype=torch.bool)
    hidden[:, 7 * 16 + 11] = True
    table = torch.tensor([[-1, -1, -1, -1, -1, 3, 4, 5]])
    out = decode_attention(q, *pages, SlidingWindow(40, 0), page_table=table, key_padding_mask=hidden, backend=backend)
    seen = [t for t in range(87, 128) if not hidden[0, t]]
    k, v = (torch.stack([x[table[0, t // 16], t % 16] for t in seen]) for x in pages)
    weights = torch.softmax(torch.einsum("hd,thd->ht", q[0, 0], k) / 4, -1)
    torch.testing.assert_close(out[0, 0], torch.einsum("ht,thd->hd", weights, v), rtol=1e-4, atol=1e-5)


Q, K, V = cache()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"lengths": [300]}, ValueError, r"lengths must be one for each of 2 samples, got shape \[1\]"),
        ({"lengths": [301, 3]}, ValueError, r"lengths must be from 1 .* to 300 \(the capacity\), got 301"),
        ({"lengths": [0, 3]}, ValueError, "lengths must be at least 1, got 0"),
        ({"lengths": torch.tensor([0, 3])}, ValueError, "lengths must be from 1"),
        ({"lengths": torch.tensor([1.0, 3.0])}, TypeError, "lengths must be int32 or int64, got torch.float32"),
        ({"lengths": 300}, TypeError, "lengths must be a sequence of ints, a tensor or None, got int"),
        ({"pattern": "window"}, TypeError, "pattern must be a Pattern or CacheBlocks, got str"),
        ({"pattern": Documents((100, 200))}, ValueError, "pattern must not have ranges of keys"),
        ({"pattern": PerHead((Full(),) * 3)}, ValueError, "must have a pattern for each of 4 heads of q or 2 of k"),
        ({"q": Q.double()}, TypeError, "k must have the dtype of q, torch.float64"),
        ({"q": Q.clone().requires_grad_()}, RuntimeError, "decode_attention has no gradient"),
        ({"key_padding_mask": torch.zeros(2, 299, dtype=torch.bool)}, ValueError, r"\(batch, capacity\) = \[2, 300\]"),
        ({"key_padding_mask": torch.zeros(2, 300)}, TypeError, "key_padding_mask must be bool"),
        (
            {"page_table": torch.zeros(3, 2, dtype=torch.int32)},
            ValueError,
            r"page_table must have shape \(batch, pages\)",
        ),
        ({"page_table": torch.zeros(2, 2)}, TypeError, "page_table must be int32 or int64, got torch.float32"),
        (
            {"page_table": torch.tensor([[0], [2]])},
            ValueError,
            r"page_table must name pages 0 to 1, got \[2\] for sample",
        ),
        (
            {"page_table": torch.tensor([[0], [0]]), "k": K[:0], "v": V[:0]},
            ValueError,
            r"k must not be empty, got shape \[0, 300, 2, 8\]",
        ),
        ({"backend": "sdpa"}, ValueError, "backend must be one of .* for decoding, got 'sdpa'"),
        ({"is_causal": 1}, TypeError, "is_causal must be"),
    ],
)
def test_bad_input(change, error, message):
    good = {"q": Q, "k": K, "v": V, "pattern": Causal() & RandomBlocks(2, block_size=64)}
    decode_attention(**good)  # a call like one before skips checks
    call = good | change
    with pytest.raises(error, match=message):
        decode_attention(**call)
