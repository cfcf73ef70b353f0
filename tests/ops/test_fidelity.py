"""Kept mass: against the dense weights, and against the definition where there is nothing to keep."""

import pytest
import torch
from hypothesis import given, settings

from dilated_attention_pytorch import Causal, Full, SharedBudget, SlidingWindow, kept_mass, select_blocks
from dilated_attention_pytorch.backends import reference
from dilated_attention_pytorch.ops.named import resolve_layout
from dilated_attention_pytorch.options import CallOptions
from tests import dense
from tests.strategies import cases


@settings(max_examples=60)
@given(cases(shaped=False))
def test_kept_mass_is_the_dense_mass_on_the_pairs(case):
    masks = {"key_padding_mask": case.key_padding_mask, "document_ids": case.document_ids}
    got = kept_mass(case.q, case.k, case.layout, is_causal=case.is_causal, scale=case.scale, **masks)
    pairs = []
    for who in (case.layout, Full()):
        layout = resolve_layout(case.q, case.k, who, case.is_causal)
        pairs.append(reference.counted_pairs(layout, case.q.shape[2], CallOptions(1.0, **masks)))
    _, weights = dense.attend(case.q, case.k, case.v, pairs[1], case.scale)
    nothing = ~pairs[1].any(-1)
    want = (weights * pairs[0]).sum(-1).masked_fill(nothing, 1.0)
    torch.testing.assert_close(got, want.expand_as(got), rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_everything_keeps_everything(dtype):
    q, k = torch.randn(1, 100, 4, 8).to(dtype), torch.randn(1, 100, 2, 8).to(dtype)
    assert (kept_mass(q, k, Full()) == 1).all()
    torch.testing.assert_close(
        kept_mass(q, k, Causal(), is_causal=True),
        torch.ones(1, 4, 100).to(torch.float64 if dtype == torch.float64 else torch.float32),
    )
    assert (kept_mass(q, k, SlidingWindow(3, 3)) < 1).any()


def test_a_better_choice_keeps_more():
    """The true masses, with the same budget, keep more than any other choice of as many blocks."""
    q, k = (2 * torch.randn(1, 256, 2, 16, dtype=torch.float64) for _ in range(2))
    call = {"selector": SharedBudget(0.5), "block_size": 16, "is_causal": True}
    kept = {
        name: kept_mass(q, k, select_blocks(q, k, scorer=name, **call), is_causal=True).mean().item()
        for name in ("exact", "moments", "mean", "antidiagonal", "minmax", "sampled")
    }
    assert max(kept, key=lambda name: kept[name]) == "exact"
    assert 0.2 < min(kept.values()) < kept["exact"] < 1
