"""`split_budget`: layers that need more blocks get more, and together no more than before."""

from itertools import product

import pytest
import torch

from dilated_attention_pytorch import CumulativeMass, SharedBudget, TopK, split_budget
from dilated_attention_pytorch.ops import budget
from dilated_attention_pytorch.ops.select import grid_of

EVEN = TopK(0.25, even=True, across_heads=True)


def masses_of(sharpness, tokens=1024, heads=3, texts=2, block=16):
    """The sharper, the fewer blocks hold the mass of a row."""
    num = tokens // block
    scores = torch.randn(texts, heads, num, num) * sharpness
    return scores.masked_fill(torch.ones(num, num).triu(1).bool(), -torch.inf).softmax(-1)


def kept(masses, selectors, tokens=1024, block=16):
    grid = grid_of((tokens, tokens), (block, block), True, 1, 1, torch.device("cpu"))
    parts = [
        (each * selector.keep(each, grid)).sum() / each.sum() for each, selector in zip(masses, selectors, strict=True)
    ]
    return float(sum(parts))


@pytest.mark.parametrize("selector", [EVEN, TopK(0.3), SharedBudget(0.3)])
def test_layers_that_look_at_more_get_more(selector):
    masses = [masses_of(sharpness) for sharpness in (0.0, 3.0, 9.0)]
    found = split_budget(masses, selector, tokens=1024, block_size=16, is_causal=True)
    assert found[0].share > found[1].share > found[2].share
    assert sum(each.share for each in found) == pytest.approx(3 * selector.share)
    assert [type(each) for each in found] == [type(selector)] * 3
    assert kept(masses, found) > kept(masses, [selector] * 3) + 1e-3


def test_no_other_split_keeps_more(monkeypatch):
    """Against all of them. Gains fall from step to step, so that taking the largest first is best."""
    monkeypatch.setattr(budget, "STEPS", 4)
    masses = [masses_of(sharpness) for sharpness in (1.0, 3.0, 6.0)]
    selector = SharedBudget(0.24)
    found = split_budget(masses, selector, tokens=1024, block_size=16, is_causal=True)
    steps = range(2, 11)
    best = max(
        kept(masses, [SharedBudget(0.06 * step) for step in split])
        for split in product(steps, repeat=3)
        if sum(split) == 12
    )
    assert kept(masses, found) == pytest.approx(best, abs=2e-3)


def test_one_layer_everything_and_no_more_than_is_forced_are_left_as_they_are():
    for selector, layers in ((EVEN, 1), (SharedBudget(1.0), 3), (TopK(0.6), 1), (TopK(0.01), 3)):
        masses = [masses_of(layer) for layer in range(layers)]
        for each in split_budget(masses, selector, tokens=1024, block_size=16, is_causal=True):
            assert each.share == pytest.approx(selector.share)


def test_bad_arguments():
    masses = [masses_of(1.0)]
    call = {"tokens": 1024, "block_size": 16, "is_causal": True}
    with pytest.raises(TypeError, match=r"selector must be TopK\(share\) or SharedBudget\(share\), got CumulativeMass"):
        split_budget(masses, CumulativeMass(0.9), **call)
    with pytest.raises(TypeError, match="masses must be a sequence with a tensor for each layer, got Tensor"):
        split_budget(masses[0], EVEN, **call)
    with pytest.raises(ValueError, match=r"\[texts, heads, 8, 8\], as 128 tokens have blocks, got .* for layer 0"):
        split_budget(masses, EVEN, **call | {"tokens": 128})
    with pytest.raises(ValueError, match=r"got torch.int64 \[2, 3, 64, 64\] for layer 1"):
        split_budget([masses[0], masses[0].long()], EVEN, **call)
