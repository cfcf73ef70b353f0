"""`split_budget`: layers that need more blocks get more, and together no more than before."""

from itertools import product

import pytest
import torch

from dilated_attention_pytorch import CumulativeMass, SharedBudget, TopK, split_budget
from dilated_attention_pytorch.ops import budget
from dilated_attention_pytorch.ops.grids import grid_of

EVEN = TopK(0.25, even=True, across_heads=True)


def masses_of(sharpness, tokens=1024, heads=3, texts=2, block=16, is_causal=True):
    """The sharper, the fewer blocks hold the mass of a row."""
    num = tokens // block
    scores = torch.randn(texts, heads, num, num) * sharpness
    return scores.masked_fill(torch.ones(num, num).triu(1).bool() & is_causal, -torch.inf).softmax(-1)


def spent_and_kept(masses, selectors, tokens=1024, block=16, is_causal=True):
    grid = grid_of((tokens, tokens), (block, block), is_causal, 1, 1, torch.device("cpu"))
    spent, kept = 0, 0.0
    for each, selector in zip(masses, selectors, strict=True):
        keep = selector.keep(each, grid) & grid.visible
        spent += int(keep[0].sum())
        kept += float((each * keep).sum(dtype=torch.float64))
    return spent, kept


@pytest.mark.parametrize("selector", [EVEN, TopK(0.5), SharedBudget(0.3)])
def test_layers_that_look_at_more_get_more(selector):
    masses = [masses_of(sharpness) for sharpness in (0.0, 3.0, 9.0)]
    found = split_budget(masses, selector, tokens=1024, block_size=16, is_causal=True)
    assert found[0].share > found[1].share > found[2].share
    assert [type(each) for each in found] == [type(selector)] * 3
    (spent, kept), (before, less) = (spent_and_kept(masses, each) for each in (found, [selector] * 3))
    assert 0.95 * before < spent <= before
    assert kept > 1.02 * less


@pytest.mark.slow
@pytest.mark.parametrize("selector", [TopK(0.25), TopK(0.25, even=True), EVEN, SharedBudget(0.25), TopK(0.8)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("blocks", "heads"), [(32, 4), (64, 9)])
@pytest.mark.parametrize("sharpness", [(3.0, 0.5, 0.5, 0.5), (1.0, 1.0, 1.0, 1.0), (0.5, 4.0)])
def test_never_more_blocks_and_never_less_mass(selector, is_causal, blocks, heads, sharpness):
    """Where blocks come whole, many a step gains nothing."""
    call = {"tokens": 16 * blocks, "is_causal": is_causal}
    masses = [masses_of(each, 16 * blocks, heads, texts=1, is_causal=is_causal) for each in sharpness]
    found = split_budget(masses, selector, block_size=16, **call)
    (spent, kept), (before, less) = (spent_and_kept(masses, each, **call) for each in (found, [selector] * len(masses)))
    assert spent <= before
    assert kept >= less


def test_heads_count():
    masses = [masses_of(2.0, heads=1), masses_of(2.0, heads=16)]
    found = split_budget(masses, SharedBudget(0.25), tokens=1024, block_size=16, is_causal=True)
    assert spent_and_kept(masses, found)[0] <= spent_and_kept(masses, [SharedBudget(0.25)] * 2)[0]


def test_no_other_split_keeps_more(monkeypatch):
    """Against all of them, up to the last step, which may not fit."""
    monkeypatch.setattr(budget, "STEPS", 4)
    masses = [masses_of(sharpness) for sharpness in (1.0, 3.0, 6.0)]
    found = split_budget(masses, SharedBudget(0.24), tokens=1024, block_size=16, is_causal=True)
    most, _ = spent_and_kept(masses, [SharedBudget(0.24)] * 3)
    tried = [
        spent_and_kept(masses, [SharedBudget(0.06 * x) for x in split]) for split in product(range(1, 11), repeat=3)
    ]
    best = max(kept for spent, kept in tried if spent <= most)
    assert spent_and_kept(masses, found)[1] == pytest.approx(best, rel=2e-3)


def test_one_layer_everything_and_no_more_than_is_forced_are_left_as_they_are():
    for selector, layers in ((EVEN, 1), (SharedBudget(1.0), 3), (TopK(0.6), 1), (TopK(0.01), 3)):
        masses = [masses_of(layer) for layer in range(layers)]
        found = split_budget(masses, selector, tokens=1024, block_size=16, is_causal=True)
        assert found == [selector] * layers  # and not one that keeps as many at this length


def test_shares_serve_at_other_lengths():
    masses = [masses_of(sharpness, tokens=2048, texts=1) for sharpness in (0.5, 2.0, 2.0, 4.0)]
    for selector in (EVEN, TopK(0.25), TopK(0.05, even=True), SharedBudget(0.1)):
        found = split_budget(masses, selector, tokens=2048, block_size=16, is_causal=True)
        grid = grid_of((8192, 8192), (16, 16), True, 1, 1, torch.device("cpu"))
        assert sum(each.max_blocks(grid, 3) for each in found) == pytest.approx(
            4 * selector.max_blocks(grid, 3), rel=0.1
        )


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
    with pytest.raises(ValueError, match="masses must have a tensor for each layer, got none"):
        split_budget([], EVEN, **call)
    with pytest.raises(ValueError, match="masses must be of the same texts, got 2 and, for layer 1, 1"):
        split_budget([masses[0], masses[0][:1]], EVEN, **call)
    for bad in (torch.nan, -1.0):
        spoilt = masses[0].clone()
        spoilt[0, 0, 0, 0] = bad
        with pytest.raises(ValueError, match=r"masses must be 0 or more, and not all of them 0, got .* for layer 1"):
            split_budget([masses[0], spoilt], EVEN, **call)
    with pytest.raises(ValueError, match=r"got a sum of 0.0 for layer 0"):
        split_budget([masses[0] * 0], EVEN, **call)
