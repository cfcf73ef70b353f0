"""Launches that are done again with other tensors: what reaches the kernels is what a first call would have sent."""

import gc
import weakref
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from dilated_attention_pytorch import BlockLayout, LocalBlocks, SlidingWindow, block_sparse_attention

pytest.importorskip("triton", reason="needs triton, which there is for Linux alone")
if torch.cuda.is_available():
    pytest.skip("needs a machine without a CUDA device: tests/gpu has the same there", allow_module_level=True)

from dilated_attention_pytorch.kernels import decode, launch, launcher
from dilated_attention_pytorch.layout.rows import rows_of_capacity
from dilated_attention_pytorch.options import Bias, CallOptions

KERNELS = ("forward_kernel", "rows_kernel", "dq_kernel", "dkv_kernel")


class Compiled:
    """Stands for a kernel and for what Triton compiles of it: keeps what it is launched with."""

    def __init__(self, kernel, sent):
        self.arg_names, self.sent = kernel.arg_names, sent

    def __getitem__(self, grid):
        def run(*args, **constants):
            rest = [constants[name] for name in self.arg_names[len(args) :]]
            self.sent.append((self, next(iter(grid)), [*args, *rest]))
            return self

        return run


def recorded(monkeypatch, compiled):
    """What kernels of this kind are launched with from now on."""
    sent = []
    for name in KERNELS:
        monkeypatch.setattr(launch, name, compiled(getattr(launch, name), sent))
    monkeypatch.setattr(launcher, "_compiled", {})
    return sent


@pytest.fixture
def sent(monkeypatch):
    monkeypatch.setattr(launcher.Direct, "of", lambda compiled, grid: None)
    return recorded(monkeypatch, Compiled)


def inputs(seed, heads_first=False):
    torch.manual_seed(seed)
    shape = (2, 4, 256, 32) if heads_first else (2, 256, 4, 32)
    found = [torch.randn(shape, dtype=torch.float16) for _ in range(4)]
    return [x.transpose(1, 2) for x in found] if heads_first else found


def both_ways(layout, tensors, extras):
    q, k, v, do = tensors
    out, lse = launch.forward(q, k, v, layout, extras)
    return launch.backward(do, torch.ones_like(lse), q, k, v, out, lse, layout, extras)


def as_plain(x):
    if isinstance(x, torch.Tensor):
        return x.dtype, x.shape, x.stride(), x.storage_offset()
    if hasattr(x, "base"):
        return *as_plain(x.base), *(value for name, value in vars(x).items() if name != "base")
    return x


def test_a_call_like_one_before_sends_the_same_with_its_own_tensors(sent, monkeypatch):
    layout, extras = BlockLayout.from_pattern(SlidingWindow(60, 9), 256, block_size=64), CallOptions(0.25)
    calls = [inputs(seed) for seed in range(4)]
    made = []
    original = launch.Call.__init__
    monkeypatch.setattr(launch.Call, "__init__", lambda self, *a, **k: (made.append(self), original(self, *a, **k))[1])
    for tensors in calls:
        both_ways(layout, tensors, extras)
    assert len(made) == 4  # two forwards and two backwards; the other calls were replayed
    size = len(sent) // len(calls)
    rounds = [sent[i : i + size] for i in range(0, len(sent), size)]
    assert size == len(KERNELS)
    for before, after in pairwise(rounds):
        for (kernel, grid, mine), (other, other_grid, theirs) in zip(before, after, strict=True):
            assert kernel is other
            assert grid == other_grid
            assert [as_plain(x) for x in mine] == [as_plain(x) for x in theirs]
    owned = {id(x) for x in layout.tensors()}
    for tensors, launches in zip(calls, rounds, strict=True):
        bases = [
            x if isinstance(x, torch.Tensor) else getattr(x, "base", None) for _, _, data in launches for x in data
        ]
        bases = [x for x in bases if x is not None and id(x) not in owned]
        for given in tensors:
            assert any(x is given for x in bases)
        for strangers in calls:
            assert strangers is tensors or not any(x is y for x in bases for y in strangers)


def test_a_step_of_decoding_like_one_before_sends_the_same_with_its_own_tensors(sent, monkeypatch):
    """Other lengths too: they are no number of a launch."""
    for name in ("decode_kernel", "merge_kernel"):
        monkeypatch.setattr(decode, name, Compiled(getattr(decode, name), sent))
    rows = rows_of_capacity(SlidingWindow(60, 0) | LocalBlocks(64, block_size=16), 200, 16, torch.device("cpu"))
    made, original = [], decode._launches
    monkeypatch.setattr(decode, "_launches", lambda *args: (made.append(1), original(*args))[1])
    given = []
    for length in (200, 33, 17, 200):
        q, k, v = (torch.randn(1, n, heads, 32) for n, heads in ((1, 4), (200, 2), (200, 2)))
        mask, slopes = torch.zeros(1, 200, dtype=torch.bool), torch.ones(1, 4, 1)
        given.append((q, k, v, torch.tensor([length]), slopes))
        options = CallOptions(0.3, key_padding_mask=mask, bias=Bias(slopes))
        decode.launch(q, k, v, None, given[-1][3], rows, options)
    assert len(made) == 1
    rounds = [sent[i : i + 2] for i in range(0, len(sent), 2)]
    assert len(rounds) == 4
    for before, after in pairwise(rounds):
        for (kernel, grid, mine), (other, other_grid, theirs) in zip(before, after, strict=True):
            assert (kernel, grid) == (other, other_grid)
            assert [as_plain(x) for x in mine] == [as_plain(x) for x in theirs]
    for tensors, ((_, _, data), _) in zip(given, rounds, strict=True):
        for mine in tensors:
            assert any(x is mine for x in data)
        assert not any(x is y for x in data for strangers in given if strangers is not tensors for y in strangers)


@pytest.mark.parametrize("change", ["scale", "strides", "alignment", "padding", "copies"])
def test_another_kind_of_call_is_not_replayed(sent, monkeypatch, change):
    layout, extras = BlockLayout.from_pattern(SlidingWindow(60, 9), 256, block_size=64), CallOptions(0.25)
    for seed in range(3):
        both_ways(layout, inputs(seed), extras)
    tensors = inputs(7)
    if change == "scale":
        extras = CallOptions(0.5)
    if change == "strides":
        tensors = inputs(7, heads_first=True)
    if change == "alignment":
        tensors = [torch.randn(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape) for x in tensors]
    if change == "padding":
        extras = CallOptions(0.25, key_padding_mask=torch.zeros(2, 256, dtype=torch.bool))
    if change == "copies":
        tensors = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in tensors]
    monkeypatch.setattr(launcher.Replay, "__call__", lambda self, tensors: pytest.fail("a call was replayed"))
    for _ in range(3 if change in ("padding", "copies") else 1):
        both_ways(layout, tensors, extras)


def test_what_cannot_be_told_apart_is_not_remembered():
    x, y, kept = torch.ones(3), torch.ones(3), torch.ones(4)

    def replay(data, tensors):
        return launcher.Replay.of([launcher.Launched(launcher.Bound(print, (), None), data)], tensors, [kept])

    assert replay((x, y, kept), (x, y)) is not None
    assert replay((x, y, torch.ones(4)), (x, y)) is None  # whose is the last?
    assert replay((x, x, kept), (x, x)) is None  # which is which?


@pytest.mark.parametrize("same", ["q, k and v", "k and v"])
def test_calls_with_one_tensor_in_several_places_excuse_no_other(sent, same):
    layout, extras = BlockLayout.from_pattern(SlidingWindow(60, 9), 256, block_size=64), CallOptions(0.25)
    for seed in range(3):
        q, k, _, do = inputs(seed)
        both_ways(layout, (k if same == "q, k and v" else q, k, k, do), extras)
    q, k, v, do = inputs(7)
    for _ in range(3):
        del sent[:]
        both_ways(layout, (q, k, v, do), extras)
        _, _, data = sent[0]
        bases = [x if isinstance(x, torch.Tensor) else x.base for x in data[:3]]
        assert [x is y for x, y in zip(bases, (q, k, v), strict=True)] == [True] * 3


@pytest.mark.parametrize("by", ["layout", "causal layout", "pattern", "causal pattern"])
def test_the_shortest_way_takes_calls_like_one_before_and_no_others(sent, monkeypatch, by):
    pattern = SlidingWindow(60, 9)
    layout = BlockLayout.from_pattern(pattern, 256, block_size=64) if by.endswith("layout") else pattern
    called, original = [], launch.forward
    monkeypatch.setattr(launch, "forward", lambda *args: (called.append(args), original(*args))[1])

    def call(tensors, **others):
        del sent[:]
        out = block_sparse_attention(*tensors[:3], layout, is_causal="causal" in by, backend="triton", **others)
        _, _, data = sent[0]
        bases = [x if isinstance(x, torch.Tensor) else x.base for x in data[:4]]
        assert [x is y for x, y in zip(bases, (*tensors[:3], out), strict=True)] == [True] * 4
        return out

    for seed in range(5):
        call(inputs(seed))
    assert len(called) == 2  # the second is remembered
    known = len(called)
    call(inputs(7, heads_first=True))
    call([torch.randn(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape) for x in inputs(7)])
    call(inputs(7), scale=0.5)
    call([x.requires_grad_() for x in inputs(7)])
    assert len(called) == known + 4
    call(inputs(8))
    assert len(called) == known + 4


def test_a_layout_goes_without_the_garbage_collector(sent):
    layout = BlockLayout.from_pattern(SlidingWindow(60, 9), 256, block_size=64)
    alive = weakref.ref(layout)
    gc.disable()
    try:
        for seed in range(3):
            q, k, v, do = inputs(seed)
            both_ways(layout, (q, k, v, do), CallOptions(0.25))
            for is_causal in (False, True):
                block_sparse_attention(q, k, v, layout, is_causal=is_causal, backend="reference")
        assert len(layout.call_cache) == 4
        del layout
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"is_causal": 1}, "is_causal"),
        ({"scale": [1.0]}, "scale"),
        ({"scale": True}, "scale"),
        ({"dropout_p": False}, "dropout_p"),
        ({"return_lse": 0}, "return_lse"),
        ({"backend": ["auto"]}, "backend"),
        ({"softcap": -1.0}, "softcap"),
        ({"key_padding_mask": torch.zeros(3, 3)}, "key_padding_mask"),
    ],
)
def test_a_call_that_was_checked_before_excuses_no_other(arguments, message):
    layout = BlockLayout.from_pattern(SlidingWindow(60, 9), 256, block_size=64)
    q, k, v, _ = inputs(0)
    for _ in range(2):
        block_sparse_attention(q, k, v, layout, scale=1.0)
        block_sparse_attention(q, k, v, layout, is_causal=True)
    with pytest.raises((TypeError, ValueError), match=message):
        block_sparse_attention(q, k, v, layout, **arguments)
    for wrong in ((q, k, v[:, :5]), (q.float(), k, v), (q[:, :, :3], k, v), (q, "k", v)):
        with pytest.raises((TypeError, ValueError)):
            block_sparse_attention(*wrong, layout)


def test_known_calls_are_few_and_go_with_the_layout():
    import copy
    import pickle

    layout = BlockLayout.from_pattern(SlidingWindow(60, 9), 256, block_size=64)
    q, k, v, _ = inputs(0)
    for scale in range(1, 600):
        block_sparse_attention(q[:, :, :1], k[:, :, :1], v[:, :, :1], layout, scale=scale, backend="reference")
    assert 0 < len(layout.call_cache) <= 256
    for other in (copy.deepcopy(layout), pickle.loads(pickle.dumps(layout))):
        assert other.call_cache == {}
    older = BlockLayout.__new__(BlockLayout)
    older.__setstate__({name: value for name, value in layout.__getstate__().items() if name != "call_cache"})
    assert torch.equal(block_sparse_attention(q, k, v, older), block_sparse_attention(q, k, v, layout))


def test_what_another_thread_made_first_stays():
    """Kernels may hold it already."""
    layout = BlockLayout.from_pattern(SlidingWindow(60, 9), 256, block_size=64)
    theirs, mine = torch.ones(2), torch.ones(2)

    def make():
        layout._derived["work of two"] = theirs
        return mine

    assert layout._derive("work of two", make) is theirs


class LikeTriton36(Compiled):
    """With the launcher that Triton 3.6 has: in C, behind a function that encodes descriptors."""

    function, packed_metadata = 123, (4, 1, 0)

    def in_c(self, *args):
        self.sent.append(args)

    @property
    def run(self):
        def wrap(launcher, tensordesc_meta):
            def inner(*args):
                pytest.fail(f"{launcher} was to be called without {inner}, which encodes {tensordesc_meta}")

            return inner

        described = [{"number": i} for i in range(2)]
        return SimpleNamespace(
            launch=self.in_c
            if self.arg_names[0] == "out"
            else wrap(self.in_c, described),  # `rows_kernel` has no descriptors
            global_scratch_size=0,
            profile_scratch_size=0,
            launch_cooperative_grid=False,
            launch_pdl=False,
        )


@pytest.fixture
def sent_directly(monkeypatch):
    monkeypatch.setattr(launcher, "_stream", lambda device: "stream")
    monkeypatch.setattr(launcher.driver, "_BASE_ARGS_FORMAT", "iiiKKppOOOOOO", raising=False)
    encoded = lambda x, meta: [("encoded", x.base.data_ptr(), meta["number"]), *x.shape, *x.strides]  # noqa: E731
    monkeypatch.setattr(launcher.driver, "make_tensordesc_arg", encoded)
    return recorded(monkeypatch, LikeTriton36)


def test_direct_launches_send_what_triton_would(sent_directly, monkeypatch):
    layout, extras, sent = (
        BlockLayout.from_pattern(SlidingWindow(60, 9), 256, block_size=64),
        CallOptions(0.25),
        sent_directly,
    )
    results, gradients, made = launch.results, launch._gradients, []

    def kept(results):
        made.extend(results)
        return results

    monkeypatch.setattr(launch, "results", lambda *args: kept(results(*args)))
    monkeypatch.setattr(
        launch, "_gradients", lambda *args, **kwargs: (lambda g, r: (kept(g), kept(r)))(*gradients(*args, **kwargs))
    )
    rounds = []
    for seed in range(4):
        q, k, v, do = inputs(seed)
        del sent[:], made[:]
        out, lse = launch.forward(q, k, v, layout, extras)
        dlse = torch.ones_like(lse)
        launch.backward(do, dlse, q, k, v, out, lse, layout, extras)
        rounds.append(([*sent], [x.data_ptr() for x in (q, k, v, do, dlse, *made)]))
    by_triton, _ = rounds[0]  # the first call compiles
    one_by_one, addresses = rounds[1]
    assert len(by_triton) == len(one_by_one) == len(KERNELS)
    for args, (_, programs, arguments) in zip(one_by_one, by_triton, strict=True):
        grid, stream, *head = args[0:3], args[3], *args[4:13]
        assert (grid, stream) == ((programs, 1, 1), "stream")
        assert head == [123, False, False, None, None, (4, 1, 0), None, None, None]
        expected = []
        for x in arguments:
            if isinstance(x, torch.Tensor):
                expected.append(None)
            else:
                expected += [None, *x.shape, *x.strides] if hasattr(x, "base") else [x]
        assert len(args[13:]) == len(expected)
        for got, want in zip(args[13:], expected, strict=True):
            if want is None:
                assert type(got) is int or got[0] == "encoded"
            else:
                assert got == want
    for replayed, others in rounds[2:]:
        now = dict(zip(addresses, others, strict=True))

        def moved(x, now=now):
            return ("encoded", now[x[1]], x[2]) if type(x) is tuple and x[0] == "encoded" else now.get(x, x)

        assert replayed == [tuple(map(moved, args)) for args in one_by_one]


def test_who_listens_to_launches_hears_of_them(sent_directly, monkeypatch):
    """Triton tells a profiler of launches that go through its own Python."""
    layout, extras = BlockLayout.from_pattern(SlidingWindow(60, 9), 256, block_size=64), CallOptions(0.25)
    monkeypatch.setattr(launcher, "launch_hooks_active", lambda: True)
    for seed in range(4):
        both_ways(layout, inputs(seed), extras)
    assert all(isinstance(args[0], LikeTriton36) for args in sent_directly)


@pytest.mark.parametrize("hook", [None, print])
def test_hooks_need_not_be_chains(sent_directly, monkeypatch, hook):
    layout, extras = BlockLayout.from_pattern(SlidingWindow(60, 9), 256, block_size=64), CallOptions(0.25)
    for seed in range(2):
        both_ways(layout, inputs(seed), extras)
    monkeypatch.setattr(launcher.triton.knobs.runtime, "launch_enter_hook", hook)
    del sent_directly[:]
    both_ways(layout, inputs(2), extras)
    by_triton = [isinstance(args[0], LikeTriton36) for args in sent_directly]
    assert by_triton == [hook is not None] * len(KERNELS)


@pytest.mark.parametrize("other", [{}, {"global_scratch_size": 8}, {"launch": lambda *args: None}])
def test_another_triton_launches_in_its_own_way(sent_directly, monkeypatch, other):
    """Arguments in another order, scratch memory, a launcher that cannot be found."""
    original = LikeTriton36.run.fget
    monkeypatch.setattr(
        LikeTriton36, "run", property(lambda self: SimpleNamespace(**{**vars(original(self)), **other}))
    )
    if not other:
        monkeypatch.setattr(launcher.driver, "_BASE_ARGS_FORMAT", "iiiKKOOOOOO")
    layout, extras = BlockLayout.from_pattern(SlidingWindow(60, 9), 256, block_size=64), CallOptions(0.25)
    for seed in range(4):
        both_ways(layout, inputs(seed), extras)
    assert all(isinstance(args[0], LikeTriton36) for args in sent_directly)


def test_a_full_cache_of_calls_loses_nothing_that_is_there(sent):
    layout = BlockLayout.from_pattern(SlidingWindow(60, 9), 256, block_size=64)
    q, k, v, _ = (x.float() for x in inputs(0))
    for _ in range(3):
        block_sparse_attention(q, k, v, layout, backend="triton")
    while len(layout.call_cache) < 256:
        layout.remember_call(len(layout.call_cache), "")
    for _ in range(3):
        block_sparse_attention(q, k, v, layout, backend="triton")
    assert len(layout.call_cache) == 256


class Kernel:
    """Of two tensors and four numbers, of which Triton looks closer at the last two."""

    arg_names = ("x", "y", "length", "scale", "step", "stride", "WIDTH")
    params = tuple(SimpleNamespace(do_not_specialize=name in ("length", "scale")) for name in arg_names)

    def __init__(self):
        self.compiled, self.sent = [], []

    def __getitem__(self, grid):
        def run(*args, **constants):
            self.compiled.append((args[2:], constants))
            self.sent.append((grid, *args, *constants.values()))
            return self.Code(self.sent)

        return run

    class Code:
        def __init__(self, sent):
            self.sent = sent

        def __getitem__(self, grid):
            return lambda *args: self.sent.append((grid, *args))


def test_another_length_compiles_nothing_and_is_no_new_entry(monkeypatch):
    """What is launched has the numbers and the grid of each call all the same."""
    monkeypatch.setattr(launcher, "_compiled", {})
    monkeypatch.setattr(launcher.Direct, "of", lambda compiled, grid: None)
    kernel, x = Kernel(), torch.zeros(64)
    for length in (100, 7, 1, 16, 4096):
        for _ in range(2):
            again = launcher.launch(kernel, (length, 2), (x, x), (length, 0.5 * length, 32 * length, 3), WIDTH=64)
        assert kernel.sent[-1] == ((length, 2, 1), x, x, length, 0.5 * length, 32 * length, 3, 64)
        again.bound.run(x, x, *again.bound.rest)
        assert kernel.sent[-1] == kernel.sent[-2]
    assert len(kernel.compiled) == len(launcher._compiled) == 1


@pytest.mark.parametrize(
    "numbers",
    [(2**31, 0.5, 32, 3), (100, 1, 32, 3), (100, 0.5, 33, 3), (100, 0.5, 1, 3), (100, 0.5, 32, 1), (100, 0.5, 32, 16)],
)
def test_what_triton_compiles_anew_is_compiled(monkeypatch, numbers):
    monkeypatch.setattr(launcher, "_compiled", {})
    monkeypatch.setattr(launcher.Direct, "of", lambda compiled, grid: None)
    kernel, x = Kernel(), torch.zeros(64)
    for given in ((100, 0.5, 32, 3), numbers):
        launcher.launch(kernel, (1,), (x, x), given, WIDTH=64)
    launcher.launch(kernel, (1,), (x, x), numbers, WIDTH=32)
    launcher.launch(kernel, (1,), (x[1:], x), numbers, WIDTH=32)
    assert [sent for sent, _ in kernel.compiled] == [(100, 0.5, 32, 3), numbers, numbers, numbers]
