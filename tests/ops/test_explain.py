"""`explain` says how much of the way a call goes; the switch of the fast path."""

import pytest
import torch

from dilated_attention_pytorch import (
    BlockLayout,
    Branches,
    SlidingWindow,
    block_sparse_attention,
    dilated_attention,
    explain,
)
from dilated_attention_pytorch.layout import clear_layout_cache
from dilated_attention_pytorch.ops import attend, choose, set_fast_path
from dilated_attention_pytorch.ops.checks import check_options

WHOLE = "checked in every call"


@pytest.fixture
def qkv():
    clear_layout_cache()
    return torch.randn(3, 1, 64, 2, 8).unbind()


OPERATORS = {
    "pattern": (
        SlidingWindow(9, 0),
        lambda qkv, **options: block_sparse_attention(*qkv, SlidingWindow(9, 0), **options),
    ),
    "branches": (
        Branches([16, 64], [1, 2]),
        lambda qkv, **options: dilated_attention(*qkv, segment_lengths=[16, 64], dilation_rates=[1, 2], **options),
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_a_call_like_one_before_skips_the_checks(name, qkv, monkeypatch):
    what, operator = OPERATORS[name]
    assert explain(*qkv, what).path == "checked now; the next call like this one skips the checks"
    first = operator(qkv)
    assert explain(*qkv, what).path == "skips the checks, like a call before it"
    assert "path" in str(explain(*qkv, what))
    monkeypatch.setattr(choose, "check_options", lambda *args, **options: pytest.fail("checked again"))
    assert torch.equal(operator(qkv), first)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"dropout_p": 0.5}, {"sinks": torch.zeros(2)}], ids=str)
def test_a_call_with_options_goes_the_whole_way(name, options, qkv):
    what, operator = OPERATORS[name]
    operator(qkv, **options)
    assert explain(*qkv, what, **options).path.startswith(WHOLE)


@pytest.mark.parametrize("name", OPERATORS)
def test_the_switch(name, qkv, monkeypatch):
    what, operator = OPERATORS[name]
    want = operator(qkv)
    set_fast_path(False)
    try:
        assert explain(*qkv, what).path.startswith(WHOLE)
        checked = []
        check = choose.check_options
        monkeypatch.setattr(
            choose, "check_options", lambda *args, **options: checked.append(1) or check(*args, **options)
        )
        assert torch.equal(operator(qkv), want)
        assert checked
    finally:
        set_fast_path(True)
    with pytest.raises(TypeError, match="enabled must be True or False, got 'off'"):
        set_fast_path("off")


@pytest.mark.parametrize("change", ["dtype", "strides", "scale", "is_causal", "return_lse", "deterministic", "length"])
def test_another_kind_of_call_is_checked(change, qkv):
    """A key that forgot one of these would run a call with the options of another."""
    what, operator = OPERATORS["pattern"]
    operator(qkv)
    changes = {"scale": 0.3, "is_causal": True, "return_lse": True, "deterministic": False}
    options = {change: changes[change]} if change in changes else {}
    if change == "dtype":
        qkv = [x.double() for x in qkv]
    if change == "strides":
        qkv = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv]
    if change == "length":
        qkv = [x[:, :60] for x in qkv]
    assert explain(*qkv, what, **options).path.startswith("checked now")
    got, want = (operator(qkv, **options, backend=backend) for backend in ("auto", "reference"))
    torch.testing.assert_close(got, want)


def test_gradients_of_a_known_call(qkv):
    """The first call is without gradients: what is remembered of it must not leave the second without a graph."""
    _, operator = OPERATORS["pattern"]
    operator(qkv)
    learning = [x.clone().requires_grad_() for x in qkv]
    assert attend.asks_gradients(*learning)
    got = torch.autograd.grad(operator(learning).sum(), learning)
    want = torch.autograd.grad(operator(learning, backend="reference").sum(), learning)
    torch.testing.assert_close(got, want)


def test_determinism_is_that_of_pytorch_unless_it_is_given(qkv):
    """The tests are run with deterministic algorithms."""
    what, operator = OPERATORS["pattern"]
    operator(qkv)
    assert explain(*qkv, what, deterministic=True).path.startswith("skips the checks")
    assert check_options(*qkv[:2]).deterministic
    assert not check_options(*qkv[:2], deterministic=False).deterministic
    torch.use_deterministic_algorithms(False)
    assert explain(*qkv, what).path.startswith("checked now")
    assert not check_options(*qkv[:2]).deterministic
    assert check_options(*qkv[:2], deterministic=True).deterministic


def test_bitmaps_are_named_with_what_they_take():
    mask = torch.rand(64, 64) < 0.5
    q = torch.randn(1, 64, 2, 8)
    found = explain(q, q, q, BlockLayout.from_mask(mask, 32))
    assert found.bitmaps == "4 of 4 partial blocks (512 bytes)"
    assert "bitmaps" in str(found)
    assert "bitmaps" not in str(explain(q, q, q, BlockLayout.from_block_mask(mask[:2, :2], 32)))
