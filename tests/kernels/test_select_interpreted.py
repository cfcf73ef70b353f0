"""Choosing blocks by the kernels, in Triton's interpreter: the same as by the operators that define it."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from dilated_attention_pytorch import (
    Antidiagonal,
    BlockGate,
    CumulativeMass,
    MeanPooled,
    MinMaxBound,
    Moments,
    SampledRows,
    SharedBudget,
    TopK,
    block_sparse_attention,
    select_blocks,
)
from dilated_attention_pytorch.ops import select
from dilated_attention_pytorch.ops.grids import grid_of
from dilated_attention_pytorch.ops.scores import estimated_masses
from tests.selection import assert_first_kept, first_kept

pytest.importorskip("triton", reason="needs triton, which there is for Linux alone")
if torch.cuda.is_available():
    pytest.skip("needs a machine without a CUDA device: tests/gpu has the same there", allow_module_level=True)

from dilated_attention_pytorch.kernels import select_features, select_lists, select_masses

SELECTORS = [SharedBudget(0.3), TopK(0.3), TopK(0.3, even=True, across_heads=True)]
FUSED = [
    MeanPooled(), MeanPooled(4, 4), MeanPooled(None, 8), MinMaxBound(), MinMaxBound(4, 8), Moments(1), Antidiagonal(8),
    Antidiagonal(4), SampledRows(8),
]  # fmt: skip


class Twice:
    """Every query beside itself, every key beside nothing: features twice as wide as a head."""

    def features(self, queries, keys, scale):
        rows, columns = queries.tokens.flatten(1, 2) * scale, keys.tokens.flatten(1, 2)
        return torch.cat((rows, rows), dim=-1), torch.cat((columns, torch.zeros_like(columns)), dim=-1)


@pytest.fixture
def by_kernels(monkeypatch):
    """The kernels serve float32 here too; what they are asked for is in the list."""
    asked = []
    for name, module, function in (
        ("masses", select_masses, "fused_masses"), ("lists", select_lists, "heaviest_blocks"),
    ):  # fmt: skip
        run = getattr(module, function)
        monkeypatch.setattr(module, function, lambda *a, name=name, run=run, **k: (asked.append(name), run(*a, **k))[1])
    monkeypatch.setattr(select, "_has_kernels", lambda device, dtype, head_dim: dtype == torch.float32)
    return asked


def inputs(seq_q, seq_k=None, dtype=torch.float32, batch=2, head_dim=24):
    q = torch.randn(batch, seq_q, 4, head_dim, dtype=torch.float64)
    return (2 * q).to(dtype), (2 * torch.randn(batch, seq_k or seq_q, 2, head_dim, dtype=torch.float64)).to(dtype)


def fused_masses(q, k, scorer, blocks, is_causal, forced=None):
    features = select._features_of(select_features, scorer, q, k, blocks, 0.3)
    return select_masses.fused_masses(q, k, blocks, features, is_causal=is_causal, scale=0.3, forced=forced)


@pytest.mark.slow
@settings(max_examples=16)
@given(
    st.tuples(st.integers(1, 200), st.integers(1, 200)) | st.integers(1, 300).map(lambda n: (n, n)),
    st.sampled_from([(16, 16), (32, 16), (16, 64), (64, 16), (128, 128)]), st.sampled_from(FUSED), st.booleans(),
    st.integers(0, 2**31),
)  # fmt: skip
def test_masses(sizes, blocks, scorer, is_causal, seed):
    torch.manual_seed(seed)
    q, k = inputs(*sizes)
    got = fused_masses(q, k, scorer, blocks, is_causal)
    want = estimated_masses(q.double(), k.double(), scorer, blocks, is_causal=is_causal, scale=0.3)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=4e-6)


@pytest.mark.slow
@pytest.mark.parametrize("scorer", [*FUSED, MeanPooled(1, 16)], ids=str)
def test_half_precision_masses(scorer):
    """About as far from the truth as the operators, whose features are rounded alike, and their scores too."""
    q, k = inputs(200, dtype=torch.float16, batch=1)
    want = estimated_masses(q.double(), k.double(), scorer, (32, 16), is_causal=True, scale=0.3)
    plain = estimated_masses(q, k, scorer, (32, 16), is_causal=True, scale=0.3)
    error = (fused_masses(q, k, scorer, (32, 16), True).double() - want).abs().max()
    assert error <= 2 * (plain.double() - want).abs().max() + 1e-6


def test_a_scorer_of_ones_own():
    """By its features: a gate that has learned something, and one whose features are wider than a head."""
    q, k = inputs(150)
    gate = BlockGate(4, 24, 2)
    for parameter in gate.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    for scorer in (gate, Twice()):
        got = fused_masses(q, k, scorer, (64, 16), True)
        want = estimated_masses(q, k, scorer, (64, 16), is_causal=True, scale=0.3)
        torch.testing.assert_close(got, want, rtol=0, atol=4e-6)


@pytest.mark.parametrize("of_block", [4, 8, 16, 32])
def test_columns_in_order(of_block):
    """As `hopper_select` has them, which the interpreter does not run: the column in each place, and where the sums of
    a thread's columns go."""
    q, k = inputs(40, 700, batch=1, head_dim=16)
    blocks, patch = (16, of_block * 2), (2, 2)
    made = [select_features._pooling(q, k, blocks, patch, "mean", 1.0, in_order) for in_order in (False, True)]
    for _, _, make in made:
        make()
    (_, columns, _), (_, ordered, _) = made
    place = torch.arange(ordered.shape[1])
    within, per_thread = place % 128, 32 // of_block
    block = within % 8 // 2 * per_thread + within // (4 * of_block)
    column = place // 128 * 128 + block * of_block + within % (4 * of_block) // 8 * 2 + within % 2
    there = column < columns.shape[1]
    assert torch.equal(ordered[:, there], columns[:, column[there]])
    terms = torch.rand(128)
    found = terms.view(per_thread, of_block // 2, 4, 2).sum((1, 3)).T.flatten()  # a row: the thread's columns, and next
    want = torch.zeros(128 // of_block).index_add(0, block[:128], terms)
    torch.testing.assert_close(found, want)


def test_weights_of_16_bits():
    """Weights order blocks as their masses do, to one in 2048, and forced ones are the heaviest."""
    q, k = inputs(200, dtype=torch.float16)
    masses = fused_masses(q, k, MeanPooled(4, 4), (16, 16), True)
    grid = grid_of((200, 200), (16, 16), True, 1, 1, q.device)
    weights = fused_masses(q, k, MeanPooled(4, 4), (16, 16), True, grid.forced.view(torch.uint8)).int() & 0xFFFF
    free = (grid.visible & ~grid.forced).expand_as(weights)
    assert (weights[grid.forced.expand_as(weights)] == 0xFFFF).all()
    exponent, fraction = weights[free] // 1024 - 63, weights[free] % 1024
    read = (1 + fraction / 1024) * 2.0**exponent
    torch.testing.assert_close(read.double(), masses[free].double(), rtol=2.0**-11, atol=2.0**-63)


@pytest.mark.slow
@pytest.mark.parametrize("programs", [2, 3, 5])
def test_tiles_are_dealt_out(programs, monkeypatch):
    """However few programs share them, there and back: each is done once."""
    q, k = inputs(600, batch=1)
    want = estimated_masses(q.double(), k.double(), MeanPooled(4, 16), (16, 16), is_causal=True, scale=0.3)
    monkeypatch.setattr(select_masses, "WAVES", 1)
    monkeypatch.setattr(select_masses, "num_processors", lambda device: programs)
    got = fused_masses(q, k, MeanPooled(4, 16), (16, 16), True)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("scorer", [MeanPooled(4, 4), Antidiagonal(8)], ids=str)
def test_strided_inputs(scorer):
    q, k = inputs(100)
    want = fused_masses(q, k, scorer, (32, 16), True)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    k = k.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(fused_masses(q, k, scorer, (32, 16), True), want)


@pytest.mark.slow
@settings(max_examples=12)
@given(
    st.tuples(st.integers(1, 200), st.integers(1, 300)) | st.integers(1, 300).map(lambda n: (n, n)),
    st.sampled_from([(16, 16), (64, 16), (32, 128)]),
    st.sampled_from([*SELECTORS, SharedBudget(1.0), SharedBudget(0.001), TopK(0.2, across_heads=True)]),
    st.booleans(), st.sampled_from([1, 2, 3]), st.sampled_from(["different", "tied", "nothing", "nan"]),
    st.integers(0, 2**31), st.sampled_from([1, 4, 256]),
)  # fmt: skip
def test_lists(sizes, blocks, selector, is_causal, lists, kind, seed, near):
    """Given the masses, exactly the lists that the operators make; where masses tie, of the first blocks."""
    torch.manual_seed(seed)
    grid = grid_of(sizes, blocks, is_causal, 1, 1, torch.device("cpu"))
    masses = torch.rand(2, lists, *grid.visible.shape)
    masses = {"different": masses, "tied": (masses * 3).round(), "nothing": masses * 0, "nan": masses * 0}[kind]
    given = masses / masses if kind == "nan" else masses
    with patch("dilated_attention_pytorch.layout.lists.NEAR", near):
        assert_first_kept(selector, masses, given, grid)


@pytest.mark.slow
@pytest.mark.parametrize("selector", SELECTORS, ids=repr)
@pytest.mark.parametrize("call", [{"block_size": 16}, {"block_size": (64, 16), "sink": 0, "per_kv_head": True}])
def test_the_same_choice(selector, call, by_kernels, monkeypatch):
    """As without the kernels, through the attention that follows; each sample as if it were alone."""
    q, k = inputs(150)
    call |= {"selector": selector, "is_causal": True}
    layout = select_blocks(q, k, **call)
    assert by_kernels == ["masses", "lists"]
    replace(layout)  # the constructor refuses lists that are not a layout
    mask = layout.to_block_mask()
    assert torch.equal(select_blocks(q[1:], k[1:], **call).to_block_mask(), mask[1:])
    out = block_sparse_attention(q, k, k, layout, backend="triton")
    torch.testing.assert_close(out, block_sparse_attention(q, k, k, layout, backend="reference"), rtol=0, atol=1e-5)
    monkeypatch.undo()
    plain = select_blocks(q, k, **call)
    assert torch.equal(mask, plain.to_block_mask())
    assert torch.equal(layout.query_work, plain.query_work)


@pytest.mark.slow
@pytest.mark.parametrize("selector", SELECTORS, ids=repr)
def test_a_choice_in_half_precision(selector, by_kernels, monkeypatch):
    """Through weights of 16 bits. Masses that are off by a factor of e^δ at most may swap blocks whose true masses are
    within e^2δ of each other, and no others."""
    monkeypatch.setattr(select, "_has_kernels", lambda device, dtype, head_dim: dtype == torch.float16)
    q, k = inputs(300, dtype=torch.float16, batch=1)
    call = {"selector": selector, "block_size": 16, "is_causal": True, "scale": 0.3}
    chosen = select_blocks(q, k, **call).to_block_mask()
    assert by_kernels == ["masses", "lists"]
    grid = grid_of((300, 300), (16, 16), True, 1, 1, q.device)
    assert chosen.sum() == selector.max_blocks(grid, 4)
    truth = estimated_masses(q.double(), k.double(), MeanPooled(4, 4), (16, 16), is_causal=True, scale=0.3)
    masses = fused_masses(q, k, MeanPooled(4, 4), (16, 16), True)
    free = (grid.visible & ~grid.forced).expand_as(chosen)
    delta = (masses.double().log() - truth.log())[free].abs().max() + 2.0**-11
    assert delta < 0.05
    swapped = chosen != first_kept(selector, truth, grid)
    assert (swapped & ~free).sum() == 0
    teams = truth.flatten(1)[:, None] if isinstance(selector, SharedBudget) else truth.transpose(1, 2).flatten(2)
    if not isinstance(selector, SharedBudget) and not selector.across_heads:
        teams = truth
    of_teams = lambda mask: mask.transpose(1, 2).flatten(2) if teams.shape[-1] == 4 * 19 else mask.view_as(teams)  # noqa: E731
    least = teams.masked_fill(~of_teams(chosen & free), torch.inf).amin(-1)
    most = teams.masked_fill(~of_teams(~chosen & free), 0.0).amax(-1)
    assert (most <= least * (2 * delta).exp()).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scorer", "selector"), [("mean", TopK(0.5)), ("patches", TopK(0.5, even=True, across_heads=True))]
)
def test_a_causal_choice_never_looks_ahead(scorer, selector, by_kernels):
    q, k = inputs(192, batch=1)
    other_q, other_k = q.clone(), k.clone()
    other_q[:, 128:], other_k[:, 128:] = inputs(64, batch=1)
    call = {"scorer": scorer, "selector": selector, "block_size": 16, "is_causal": True, "sink": 0}
    before, after = (select_blocks(a, b, **call).to_block_mask() for a, b in ((q, k), (other_q, other_k)))
    assert torch.equal(before[:, :, :8], after[:, :, :8])
    assert not torch.equal(before, after)


@pytest.mark.slow
def test_who_is_served(by_kernels):
    """The kernels take what they have; the rest goes the way of the operators."""
    q, k = inputs(64)
    call = {"selector": SharedBudget(0.5), "block_size": 16}
    served = [
        (call, ["masses", "lists"]),
        (call | {"scorer": "minmax"}, ["masses", "lists"]),
        (call | {"scorer": "antidiagonal"}, ["masses", "lists"]),
        (call | {"scorer": "antidiagonal", "scale": -1.0}, ["lists"]),  # the largest score is no longer the heaviest
        (call | {"scorer": MeanPooled(1, 1), "block_size": 128}, ["lists"]),  # more rows a block than a tile has
        (call | {"selector": CumulativeMass(0.5)}, ["masses"]),
        (call | {"key_padding_mask": torch.zeros(2, 64, dtype=torch.bool)}, []),
        (call | {"document_ids": torch.zeros(2, 64, dtype=torch.int64)}, []),
    ]
    for options, expected in served:
        by_kernels.clear()
        select_blocks(q, k, **options)
        assert by_kernels == expected
    by_kernels.clear()
    select_blocks(q.double(), k.double(), **call)
    assert by_kernels == []
    torch.compile(select_blocks, backend="eager")(q, k, **call)  # by an operator, which finds them when it runs
    assert by_kernels == ["masses", "lists"]
    with pytest.raises(ValueError, match="must divide the block, 16 tokens, got 3"):
        select_blocks(q, k, scorer=MeanPooled(3, 4), **call)


def test_who_traces_or_transforms_sees_the_operators(monkeypatch):
    monkeypatch.setattr(select, "_has_kernels", lambda *args: True)
    q, seen = torch.randn(2, 1, 64, 2, 16), []

    def look(x):
        seen.append(select._kernels(x))
        return x

    look(q[0])
    torch.func.vmap(look)(q)
    with FakeTensorMode():
        look(torch.empty(1, 64, 2, 16))
    assert seen == [(select_features, select_masses, select_lists), None, None]
