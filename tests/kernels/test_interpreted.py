"""The plain kernels in Triton's interpreter, small shapes: the same code as on a GPU, every feature, exact.

float32 and float16: the interpreter's bfloat16 is not a GPU's (`tests/gpu` has it). Default tiles gather several of
these small blocks; small tiles cut them and take the way of the copy engine.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch.nn.functional import pad

from dilated_attention_pytorch import (
    BlockLayout,
    Branches,
    GlobalTokens,
    Neighborhood,
    PerHead,
    ScoreBias,
    SlidingTiles,
    SlidingWindow,
    block_sparse_attention,
    explain,
)
from dilated_attention_pytorch.backends import triton as triton_backend
from dilated_attention_pytorch.layout import branches, clear_layout_cache
from dilated_attention_pytorch.options import CallOptions
from dilated_attention_pytorch.testing import Case, assert_exact, oracle, results
from tests.strategies import cases, dilated_cases

pytest.importorskip("triton", reason="needs triton, which there is for Linux alone")
if torch.cuda.is_available():
    reason = (
        "needs a machine without a CUDA device: with one, kernels are compiled for it, and tests/gpu runs them there"
    )
    pytest.skip(reason, allow_module_level=True)

from dilated_attention_pytorch.kernels import launch
from dilated_attention_pytorch.kernels.backward import round_kernel, rows_kernel
from dilated_attention_pytorch.kernels.configs import Config, Configs

SMALL = Configs(*[Config(16, 16, 4, 1)] * 3)


@pytest.fixture
def small_tiles(monkeypatch):
    ways = set()
    walked = launch.Call._walked

    def spy(self, *args):
        found = walked(self, *args)
        ways.add(found[0])
        return found

    monkeypatch.setattr(launch, "_device", lambda *args: (True, False, SMALL))
    monkeypatch.setattr(launch.Call, "_walked", spy)
    return ways


@pytest.mark.slow
@given(cases(most=60))
@settings(max_examples=12)
def test_gathered_blocks(case):
    assert_exact(case.to(torch.float32), "triton")


@pytest.mark.slow
def test_cut_blocks(small_tiles):
    """The copy engine takes heads that need no filling up."""

    @given(cases(most=60) | cases(most=60, head_dim=16))
    @settings(max_examples=12)
    def check(case):
        assert_exact(case.to(torch.float32), "triton")

    check()
    assert small_tiles == {True, False}  # by the copy engine, and by address


@pytest.mark.slow
@given(cases(most=40))
@settings(max_examples=8)
def test_half_precision(case):
    assert_exact(case.to(torch.float16), "triton")


def make_case(head_dim=16, **options):
    shape = (2, 50, 4, head_dim)
    q, do = torch.randn(shape), torch.randn(shape)
    k, v = torch.randn(2, 50, 2, head_dim), torch.randn(2, 50, 2, head_dim)
    layout = BlockLayout.from_pattern(SlidingWindow(20, 3) | GlobalTokens(2), 50, block_size=16)
    return Case(q, k, v, layout, do, torch.randn(2, 4, 50), **options)


@pytest.mark.slow
@pytest.mark.parametrize("small", [False, True])
def test_dropout(small, request):
    """The draw is the reference's."""
    if small:
        request.getfixturevalue("small_tiles")
    case = make_case(dropout_p=0.4)
    for got, want in zip(results(case, "triton"), oracle(case), strict=True):
        assert torch.allclose(got.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [0.5, 128.0, 129.0, 1e7])
def test_caps_of_any_size_in_half_precision(softcap):
    """(No derived tolerance: eager PyTorch overflows in these.)"""
    case = make_case(softcap=softcap).to(torch.float16)
    for got, want in zip(results(case, "triton"), oracle(case), strict=True):
        assert (got.double() - want).norm() <= 1e-3 * want.norm()


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "scale"), [(3, 0.5), (24, 0.0), (24, -0.2), (64, 0.5)])
def test_any_head_dim_and_scale(head_dim, scale):
    assert_exact(make_case(head_dim, scale=scale), "triton")


@pytest.mark.slow
@pytest.mark.parametrize("head_dim_v", [3, 16, 40])
def test_values_of_another_width(head_dim_v, small_tiles):
    """By the copy engine where both widths are its own."""
    case = make_case(32)
    case = replace(case, v=torch.randn(2, 50, 2, head_dim_v), do=torch.randn(2, 50, 4, head_dim_v))
    assert_exact(case, "triton")
    assert small_tiles == {head_dim_v == 16}


@pytest.mark.slow
def test_inputs_as_they_lie():
    """Strided heads and a last dimension that is not contiguous."""
    case = make_case()
    q = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    k = case.k.transpose(2, 3).contiguous().transpose(2, 3)
    do = torch.ones(()).expand_as(q)
    assert_exact(Case(q, k, case.v, case.layout, do, case.dlse), "triton")


@pytest.mark.slow
def test_a_part_of_a_longer_call():
    """A ring hands over its queries as parts of longer tensors, what the forward gave among them."""
    case = make_case()
    extras = CallOptions(16**-0.5)
    out, lse = triton_backend.forward(case.q, case.k, case.v, case.layout, extras)
    expected = triton_backend.backward(case.do, case.dlse, case.q, case.k, case.v, out, lse, case.layout, extras)
    do, q, out = (pad(x, (0, 0, 0, 0, 3, 7), value=torch.nan)[:, 3:-7] for x in (case.do, case.q, out))
    dlse, lse = (pad(x, (3, 7), value=torch.nan)[..., 3:-7] for x in (case.dlse, lse))
    got = triton_backend.backward(do, dlse, q, case.k, case.v, out, lse, case.layout, extras)
    for mine, want in zip(got, expected, strict=True):
        assert torch.equal(mine, want)


def test_it_is_chosen_by_name_alone():
    case = make_case()
    assert explain(case.q, case.k, case.v, case.layout).chosen == "blockwise"
    assert explain(case.q, case.k, case.v, case.layout, backend="triton").chosen == "triton"
    with pytest.raises(ValueError, match=r"no kernel for torch\.float64"):
        block_sparse_attention(case.q.double(), case.k.double(), case.v.double(), case.layout, backend="triton")


def test_the_precision_of_products_follows_pytorch():
    case, matmul = make_case(), torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        for dtype, precision in ((torch.float32, "tf32"), (torch.float16, "tf32x3")):
            q, k, v = (x.to(dtype) for x in (case.q, case.k, case.v))
            block_sparse_attention(q, k, v, case.layout, backend="triton")
            call = launch.Call(q, k, v, case.layout, CallOptions(1.0))
            assert call.flags["PRECISION"] == precision
    finally:
        matmul.fp32_precision = before


def test_rocm_is_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    case = make_case()
    with pytest.raises(ValueError, match="not ROCm"):
        block_sparse_attention(case.q, case.k, case.v, case.layout, backend="triton")


def test_a_triton_without_gluon_says_so(monkeypatch):
    """Hopper then runs the plain kernels: slower, and not in silence."""
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(launch, "HAVE_GLUON", False)
    monkeypatch.setattr(launch, "_capability", lambda device: (9, 0))
    with pytest.warns(UserWarning, match="Gluon"):
        _, hopper, _ = launch._device.__wrapped__(torch.device("cpu"), 64, 2)
    assert not hopper


@pytest.mark.slow
def test_dilated(small_tiles, monkeypatch):
    monkeypatch.setattr(branches, "BLOCK_SIZES", (16,))
    clear_layout_cache()

    @given(dilated_cases(most=60))
    @settings(max_examples=12)
    def check(case):
        assert_exact(case.to(torch.float32), "triton")

    check()
    clear_layout_cache()


def bitmap_case(lists, blocks, **options):
    mask = torch.rand(*lists, 50, 70) < 0.4
    mask[..., :40, :20] = True  # full blocks among them
    mask[..., 45, :] = False
    shapes = ((2, n, heads, 16) for n, heads in ((50, 4), (70, 2), (70, 2), (50, 4)))
    q, k, v, do = (torch.randn(shape) for shape in shapes)
    return Case(q, k, v, BlockLayout.from_mask(mask, blocks), do, torch.randn(2, 4, 50), **options)


@pytest.mark.slow
@pytest.mark.parametrize("heads_kv", [4, 1])
def test_dilated_in_small_blocks(monkeypatch, heads_kv):
    """As shards of a ring may need them. A usual tile would walk several, each with a multiplicity of its own."""
    monkeypatch.setattr(branches, "cheapest_blocks", lambda *args, **options: (16, 1))
    clear_layout_cache()
    draw = torch.Generator().manual_seed(0)
    shapes = (1, 70, 4, 8), (1, 70, heads_kv, 8), (1, 70, heads_kv, 8), (1, 70, 4, 8), (1, 4, 70)
    q, k, v, do, dlse = (torch.randn(shape, generator=draw) for shape in shapes)
    case = Case(q, k, v, Branches((20, 64), (1, 2)), do, dlse, is_causal=True)
    assert_exact(case, "triton")
    assert_exact(case.to(torch.float16), "triton")
    clear_layout_cache()


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [16, (16, 64), (64, 32)], ids=str)
@pytest.mark.parametrize("lists", [(4,), (2, 2)], ids=str)
def test_bitmaps(lists, blocks):
    """Tiles of several blocks, of one block, and parts of blocks; by rows and by columns."""
    assert_exact(bitmap_case(lists, blocks), "triton")


@pytest.mark.slow
def test_bitmaps_in_small_tiles_and_half_precision(small_tiles):
    case = bitmap_case((2, 4), (64, 32), is_causal=True, softcap=3.0)
    assert_exact(case, "triton")
    assert_exact(case.to(torch.float16), "triton")


KINDS_OF_BIAS = {
    "slopes": lambda n: ScoreBias.slopes(torch.rand(4)),
    "signed slopes of samples": lambda n: ScoreBias.slopes(torch.rand(2, 4), signed=True),
    "table": lambda n: ScoreBias.table(torch.randn(4, 21)),
    "short table of samples": lambda n: ScoreBias.table(torch.randn(2, 1, 3)),
    "grid": lambda n: ScoreBias.grid(torch.randn(4, 5, 9), (5, 10)),
    "keys": lambda n: ScoreBias.keys(torch.randn(2, 1, n)),
    "forget": lambda n: ScoreBias.forget(-torch.rand(1, 4, n)),
    "dense": lambda n: ScoreBias.dense(torch.randn(2, 4, n, n)),
    "dense for all": lambda n: ScoreBias.dense(torch.randn(1, 1, n, n)),
}


OTHER_SHAPES = ("signed slopes of samples", "short table of samples", "dense for all")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "small"),
    [
        pytest.param(name, i % 2 == 0, marks=pytest.mark.stress if name in OTHER_SHAPES else ())
        for i, name in enumerate(KINDS_OF_BIAS)
    ],
)
def test_biases(name, small, request):
    """Each kind alone, with its gradient, and bitwise the same in a second run: tiles of several blocks, and of one."""
    if small:
        request.getfixturevalue("small_tiles")
    case = make_case(bias=KINDS_OF_BIAS[name](50), softcap=2.0)
    assert_exact(case, "triton")
    for first, second in zip(results(case, "triton"), results(case, "triton"), strict=True):
        assert torch.equal(first, second)


@pytest.mark.slow
def test_a_gradient_of_what_is_not_a_number_is_none():
    """Sums in whole numbers have no NaN of their own."""
    for bad, name in ((torch.nan, "q"), (torch.nan, "do"), (torch.inf, "v")):
        case = make_case(bias=KINDS_OF_BIAS["table"](50))
        tensor = getattr(case, name).clone()
        tensor[0, 7, 0] = bad
        assert results(replace(case, **{name: tensor}), "triton")[-1].isnan().all()


OF_A_GRID = {
    "in tiles, behind text": Neighborhood((3, 6, 5), (2, 3, 4), prefix=7, order=(2, 3, 3)),
    "dilated, causal in time": Neighborhood((4, 24), (2, 5), dilation=(1, 3), causal=(True, False)) | GlobalTokens(2),
    "by head": PerHead((SlidingTiles((8, 12), (4, 3), (8, 9)), Neighborhood((8, 12), 5))) & SlidingWindow(60, 40),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_A_GRID)
def test_patterns_of_a_grid(name):
    pattern = OF_A_GRID[name]
    total = 97 if "text" in name else 96
    layout = BlockLayout.from_pattern(pattern, total, block_size=32)
    assert len(layout.bitmaps)
    q, k, v, do = (torch.randn(1, total, 2, 16) for _ in range(4))
    assert_exact(Case(q, k, v, layout, do, torch.randn(1, 2, total)), "triton")


@pytest.mark.parametrize("num_residues", [1, 2])
def test_sums_of_dq_begin_at_zero_and_are_put_in_order(num_residues):
    """What surrounds the fused backward for Hopper, which the interpreter does not know: 64 × 64 numbers of dq stand in
    the order in which a warpgroup holds them, thread by thread, and tiles in the order of blocks."""
    batch, heads, seq, padded, head_dim, scale = 2, 3, 300, 512, 128, 0.5
    out, do = torch.randn(2, batch, seq, heads, head_dim)
    sums, lse = torch.empty(batch, heads, padded, head_dim), torch.randn(batch, heads, seq)
    row_lse, delta = torch.empty(2, batch, heads, padded)
    rows_kernel[(padded // 64 * batch * heads,)](
        out, do, lse, lse, row_lse, delta, sums, *do.stride()[:3], heads, seq, padded, num_residues,
        D=head_dim, PADDED_D=head_dim, TILE=64, BASE_E=False, DLSE=False, SUMS=head_dim,
    )  # fmt: skip
    assert torch.equal(sums, torch.zeros_like(sums))
    # Where a thread's four numbers of each 8 columns are, by the PTX manual (the accumulator of wgmma.m64nNk16).
    thread = torch.arange(128)[:, None]
    row = thread // 32 * 16 + thread % 32 // 4 + torch.tensor([0, 0, 8, 8])
    column = thread % 4 * 2 + torch.tensor([0, 1, 0, 1])
    of_rows = torch.randn(batch, heads, padded, head_dim)
    tiles = of_rows.view(batch, heads, padded // 64, 64, head_dim // 64, 64)
    held = [tiles[:, :, :, row, :, column + 8 * step] for step in range(8)]  # [128, 4, batch, heads, tiles, parts]
    sums.view(-1)[:] = torch.stack(held).permute(3, 4, 5, 6, 0, 1, 2).flatten()
    dq = torch.empty(batch, seq, heads, head_dim)
    round_kernel[(sums.numel() // 4096,)](sums, dq, heads, seq, padded, num_residues, scale, D=head_dim, WIDTH=head_dim)
    place = torch.arange(padded)
    token = place % (padded // num_residues) * num_residues + place // (padded // num_residues)
    there = token < seq
    want = torch.empty_like(dq)
    want[:, token[there]] = scale * of_rows[:, :, there].transpose(1, 2)
    assert torch.equal(dq, want)
