"""`merge_attention` is attention over the keys of all parts together."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention_pytorch import BlockLayout, Full, block_sparse_attention, merge_attention
from dilated_attention_pytorch.ops.merge import _merge


@given(st.integers(0, 99), st.lists(st.integers(1, 40), min_size=1, max_size=5), st.booleans())
@settings(max_examples=40)
def test_equals_attention_over_all_keys(seed, parts, with_empty_rows):
    torch.manual_seed(seed)
    seq = sum(parts)
    q = torch.randn(2, 9, 3, 4, dtype=torch.float64)
    k, v = (torch.randn(2, seq, 3, 4, dtype=torch.float64) for _ in range(2))
    padding = torch.zeros(2, seq, dtype=torch.bool)
    if with_empty_rows:
        padding[0, parts[0] :] = True
        padding[1] = True
    pieces = zip(k.split(parts, 1), v.split(parts, 1), padding.split(parts, 1), strict=True)
    partial = [block_sparse_attention(q, a, b, Full(), key_padding_mask=mask, return_lse=True) for a, b, mask in pieces]
    out, lse = merge_attention(*zip(*partial, strict=True))
    want = block_sparse_attention(q, k, v, Full(), key_padding_mask=padding, return_lse=True, backend="reference")
    torch.testing.assert_close((out, lse), want, rtol=0, atol=1e-12)


def parts(dtype=torch.float64):
    outs = [torch.randn(1, 3, 2, 4, dtype=dtype, requires_grad=True) for _ in range(3)]
    lses = [torch.randn(1, 2, 3, dtype=torch.float64 if dtype == torch.float64 else torch.float32) for _ in range(3)]
    return outs, [x.requires_grad_() for x in lses]


def test_gradients():
    outs, lses = parts()
    arguments = (*outs, *lses)
    assert torch.autograd.gradcheck(lambda *x: merge_attention(x[:3], x[3:]), arguments)
    assert torch.autograd.gradgradcheck(lambda *x: merge_attention(x[:3], x[3:]), arguments)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_opcheck(dtype):
    torch.library.opcheck(_merge, parts(dtype))


def test_rows_that_are_empty_in_some_or_all_parts():
    outs = [torch.ones(1, 2, 1, 3), torch.zeros(1, 2, 1, 3)]
    lses = [torch.tensor([[[0.5, -torch.inf]]]), torch.full((1, 1, 2), -torch.inf)]
    out, lse = merge_attention(outs, lses)
    assert torch.equal(out, torch.tensor([1.0, 0.0]).view(1, 2, 1, 1).expand(1, 2, 1, 3))
    assert lse.tolist() == [[[0.5, -torch.inf]]]


def test_empty_rows_have_no_gradient_and_hide_what_is_in_them():
    outs = [torch.full((1, 2, 1, 3), torch.nan, requires_grad=True), torch.ones(1, 2, 1, 3, requires_grad=True)]
    lses = [torch.full((1, 1, 2), -torch.inf), torch.tensor([[[0.5, -torch.inf]]])]
    lses = [lse.requires_grad_() for lse in lses]
    out, lse = merge_attention(outs, lses)
    assert torch.equal(out[:, 0], torch.ones(1, 1, 3))
    assert torch.equal(out[:, 1], torch.zeros(1, 1, 3))
    lse.square().sum().backward()
    assert lses[1].grad.tolist() == [[[1.0, 0.0]]]


def test_a_key_in_two_parts_counts_twice():
    q, k, v = (torch.randn(1, 5, 1, 4, dtype=torch.float64) for _ in range(3))
    part = block_sparse_attention(q, k, v, Full(), return_lse=True)
    out, lse = merge_attention([part[0]] * 2, [part[1]] * 2)
    torch.testing.assert_close(out, part[0])
    torch.testing.assert_close(lse, part[1] + torch.tensor(2.0, dtype=torch.float64).log())


def test_compiles():
    outs, lses = parts(torch.float32)
    compiled = torch.compile(lambda a, b: merge_attention(a, b), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(outs, lses), merge_attention(outs, lses))


BAD = {
    "integers": (
        lambda o, s: ([x.long() for x in o], s),
        "outs must be float64, .* got torch.int64",
    ),
    "numbers": (lambda o, s: (o, [1, 2, 3]), r"lses must be a sequence of tensors, got \[1, 2, 3\]"),
    "nothing": (lambda o, s: ([], []), "same length, at least 1, got 0 and 0"),
    "lengths": (lambda o, s: (o, s[:2]), "same length, at least 1, got 3 and 2"),
    "rank": (lambda o, s: ([x[0] for x in o], s), r"outs must be tensors \(batch, seq, heads, head_dim\)"),
    "shapes": (lambda o, s: ([o[0], o[1][:, :2], o[2]], s), "outs must agree in shape"),
    "dtypes": (lambda o, s: ([o[0], o[1].float(), o[2]], s), "outs must agree in shape, dtype"),
    "lse shape": (lambda o, s: (o, [s[0].mT, *s[1:]]), r"lses must have shape \[1, 2, 3\]"),
    "lse dtype": (lambda o, s: (o, [x.half() for x in s]), "dtype torch.float64"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    change, message = BAD[name]
    with pytest.raises((ValueError, TypeError), match=message):
        merge_attention(*change(*parts()))


def test_layout_parts_merge_to_the_whole():
    """Two halves of the blocks, each attended alone: what a ring does."""
    q, k, v = (torch.randn(1, 96, 2, 8, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(6, 6) < 0.7
    half = torch.rand(6, 6) < 0.5
    outs = [
        block_sparse_attention(q, k, v, BlockLayout.from_block_mask(part, 16), return_lse=True)
        for part in (mask & half, mask & ~half)
    ]
    out, lse = merge_attention(*zip(*outs, strict=True))
    want = block_sparse_attention(q, k, v, BlockLayout.from_block_mask(mask, 16), return_lse=True, backend="reference")
    torch.testing.assert_close((out, lse), want, rtol=0, atol=1e-12)
