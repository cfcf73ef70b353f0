"""`SparsitySchedule`: what is attended from dense to sparse, by step and by feedback, and across a restart."""

from functools import reduce
from itertools import pairwise
from operator import or_

import pytest
import torch

from dilated_attention_pytorch import (
    BlockLayout,
    BlockSparseAdaptive,
    BlockSparseAttention,
    BlockSparseHierarchical,
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    Causal,
    CumulativeMass,
    Documents,
    GlobalTokens,
    LocalBlocks,
    PerHead,
    RandomBlocks,
    RelativeThreshold,
    SharedBudget,
    SlidingWindow,
    SparsitySchedule,
)
from tests import dense


def qkv(seq=160):
    return [torch.randn(1, seq, 2, 8, dtype=torch.float64) for _ in range(3)]


def whole(seq, is_causal):
    allowed = torch.ones(seq, seq, dtype=torch.bool)
    return allowed.tril() if is_causal else allowed


MODULES = {
    "pattern": lambda: BlockSparseAttention(SlidingWindow(3, 3)),
    "blocks": lambda: BlockSparseAttention(LocalBlocks(0, block_size=16)),
    "config": lambda: BlockSparseRingDilatedAttention([64], [2], sparsity_ratio=0.1, block_size=16),
    "topk": lambda: BlockSparseAdaptive(0.2, block_size=16),
    "shared": lambda: BlockSparseAdaptive(selector=SharedBudget(0.2), block_size=16),
    "mass": lambda: BlockSparseAdaptive(selector=CumulativeMass(0.4, at_most=0.5), block_size=16),
    "threshold": lambda: BlockSparseAdaptive(selector=RelativeThreshold(0.7, at_most=0.5), block_size=16),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_from_dense_to_the_module_itself(name, is_causal):
    module, plain = MODULES[name](), MODULES[name]()
    q, k, v = qkv()
    schedule = SparsitySchedule(torch.nn.Sequential(module), steps=4, dense_steps=1)
    everything = dense.attend(q, k, v, whole(160, is_causal))[0]
    far = []
    for step in range(7):
        assert schedule.opening == [1, 1, 0.75, 0.5, 0.25, 0, 0][step]
        out = module(q, k, v, is_causal)
        if step < 2:
            torch.testing.assert_close(out, everything, rtol=0, atol=1e-10)
        far.append((out - everything).abs().mean().item())
        schedule.step()
    assert torch.equal(out, plain(q, k, v, is_causal))
    assert far[5] > 1e-3
    if name in ("pattern", "blocks"):  # windows that shrink
        assert far == sorted(far)


def test_an_opened_pattern_by_hand():
    """Token rules widen by tokens, block rules by blocks."""
    token, block = torch.arange(64), torch.arange(64) // 16
    near = {
        SlidingWindow(3, 3): (token[:, None] - token).abs() <= 16,
        LocalBlocks(0, block_size=16): (block[:, None] - block).abs() <= 1,
    }
    for pattern, allowed in near.items():
        module = BlockSparseAttention(pattern)
        module.opening = 0.25
        q, k, v = qkv(64)
        for is_causal in (False, True):
            want = dense.attend(q, k, v, allowed & whole(64, is_causal))[0]
            torch.testing.assert_close(module(q, k, v, is_causal), want, rtol=0, atol=1e-10)


def test_a_pattern_that_looks_back_never_looks_ahead():
    """Without `is_causal` a schedule opened `SlidingWindow(3, 0)` to both sides: token 0 saw the last token, and a
    model whose pattern alone makes it causal was trained on the future. Each past result must be the same, bit for
    bit, whatever the last token is."""
    module = BlockSparseAttention(SlidingWindow(3, 0))
    q, k, v = qkv(96)
    other = [torch.cat((x[:, :-1], torch.randn(1, 1, 2, 8, dtype=x.dtype)), dim=1) for x in (q, k, v)]
    for opening in (1.0, 0.6, 0.1, 0.0):
        module.opening = opening
        assert torch.equal(module(q, k, v)[:, :-1], module(*other)[:, :-1])


def test_documents_stay_apart():
    """`Causal() & Documents(...)` was opened across its documents: the second began with a view of the first."""
    module = BlockSparseAttention(Causal() & Documents((40, 56)))
    q, k, v = qkv(96)
    want = module(q, k, v)
    for opening in (1.0, 0.6, 0.1):
        module.opening = opening
        assert torch.equal(module(q, k, v), want)


def test_as_many_token_rules_as_there_may_be():
    """A window of the schedule's own made seven of six token rules, and the call was refused."""
    module = BlockSparseAttention(reduce(or_, (SlidingWindow(i, 9 - i) for i in range(6))))
    SparsitySchedule(module, steps=4)
    q, k, v = qkv(96)
    backwards = torch.arange(96)[:, None] - torch.arange(96)
    reach = dense.attend(q, k, v, backwards.abs() < 96)[0]
    torch.testing.assert_close(module(q, k, v), reach, rtol=0, atol=1e-10)


SEQ = 160
PLACE, BLOCK = torch.arange(SEQ), torch.arange(SEQ) // 16
EVERYTHING = torch.ones(SEQ, SEQ, dtype=torch.bool)
BEFORE, BLOCKS_BEFORE = PLACE[:, None] >= PLACE, BLOCK[:, None] >= BLOCK
TOGETHER = (PLACE[:, None] < 70) == (PLACE < 70)
OPTIONS = {"block_size": 16, "dtype": torch.float64}

# Modules and what they can see with the schedule wide open, `is_causal` aside.
OPENED = {
    "window": (lambda: BlockSparseAttention(SlidingWindow(3, 5)), EVERYTHING),
    "backwards": (lambda: BlockSparseAttention(SlidingWindow(3, 0)), BEFORE),
    "forwards": (lambda: BlockSparseAttention(SlidingWindow(0, 3)), BEFORE.T),
    "documents": (lambda: BlockSparseAttention(SlidingWindow(3, 3) & Documents((70, 90))), TOGETHER),
    "prefix": (lambda: BlockSparseAttention(SlidingWindow(3, 0) | GlobalTokens(40)), BEFORE | (PLACE < 40)),
    "random": (lambda: BlockSparseAttention(RandomBlocks(2, block_size=16)), EVERYTHING),
    "random, looking back": (lambda: BlockSparseAttention(RandomBlocks(2, block_size=16) & Causal()), BEFORE),
    "blocks before": (lambda: BlockSparseAttention(LocalBlocks(16, block_size=16, causal=True)), BLOCKS_BEFORE),
    "heads": (
        lambda: BlockSparseAttention(PerHead((SlidingWindow(3, 0), LocalBlocks(16, block_size=16)))),
        torch.stack((BEFORE, EVERYTHING)),
    ),
    "hierarchical": (lambda: BlockSparseHierarchical([(1, 32), (3, 96)], block_size=16), EVERYTHING),
    "config": (MODULES["config"], EVERYTHING),
    "topk": (MODULES["topk"], EVERYTHING),
    "shared": (MODULES["shared"], EVERYTHING),
    "mass": (MODULES["mass"], EVERYTHING),
    "threshold": (MODULES["threshold"], EVERYTHING),
    "multihead": (lambda: BlockSparseRingMultiheadDilatedAttention(16, 2, [64], [2], **OPTIONS), EVERYTHING),
    "multihead, adaptive": (
        lambda: BlockSparseRingMultiheadDilatedAttention(16, 2, pattern_type="adaptive", **OPTIONS),
        EVERYTHING,
    ),
}  # fmt: skip
PADDING = torch.zeros(2, SEQ, dtype=torch.bool)
PADDING[0, 150:] = PADDING[1, 10:30] = True
IDS = torch.stack((PLACE // 60, PLACE // 100))
MASKS = {
    "no mask": ({}, torch.ones(2, 1, 1, 1, dtype=torch.bool)),
    "padding": ({"key_padding_mask": PADDING}, ~PADDING[:, None, None]),
    "ids": ({"document_ids": IDS}, (IDS[:, :, None] == IDS[:, None])[:, None]),
}


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", OPENED)
def test_every_module_closes_within_what_it_can_see(name, is_causal, masks):
    """Dense over all that it can see, then fewer and fewer pairs, then itself, bit for bit; at each opening exact
    attention over those pairs."""
    make, reach = OPENED[name]
    (options, unmasked), module = MASKS[masks], make()
    attention = getattr(module, "attention", module)
    if attention is module:
        given = q, k, v = [torch.randn(2, SEQ, 2, 8, dtype=torch.float64) for _ in range(3)]
    else:
        given = [torch.randn(2, SEQ, 16, dtype=torch.float64)] * 3
        q, k, v = module.project_in(*given)
    before = [module(*given, is_causal, **options), pairs(attention, q, k, is_causal, options) & unmasked]
    seen = []
    for opening in (1.0, 0.7, 0.3, 0.1, 0.0):
        attention.opening = opening
        seen.append(pairs(attention, q, k, is_causal, options) & unmasked)
        want = dense.attend(q, k, v, seen[-1])[0]
        want = want if attention is module else module.project_out(want)
        out = module(*given, is_causal, **options)
        torch.testing.assert_close(out, want, rtol=0, atol=1e-10)
    assert torch.equal(seen[0], (reach & whole(SEQ, is_causal) & unmasked).expand_as(seen[0]))
    assert torch.equal(out, before[0])
    assert torch.equal(seen[-1], before[1])
    for more, fewer in pairwise(seen):
        assert more.sum() >= fewer.sum()
        # Where a budget cuts what was wanted by mass, heavier blocks of other rows may take the place of some.
        assert name in ("mass", "threshold") or not (fewer & ~more).any()
    assert seen[0].sum() > seen[-1].sum() or (name, is_causal) == ("forwards", True)  # only itself, with either


def pairs(attention, q, k, is_causal, options):
    """The pairs of a call, [samples or 1, heads or 1, queries, keys], masks aside."""
    if isinstance(attention, BlockSparseAdaptive):
        return attention.layout(q, k, is_causal, **options).to_dense()
    pattern = attention.open_pattern(is_causal, SEQ)
    allowed = BlockLayout.from_pattern(pattern, SEQ, block_size=16).to_dense()
    return (allowed if allowed.ndim == 3 else allowed[None])[None]


def test_by_kept_mass():
    """Closes while enough is kept, opens where it is not, and never leaves [0, 1]."""
    module = BlockSparseAdaptive(0.2)
    schedule = SparsitySchedule(module, steps=3, kept_floor=0.9)
    told = [0.95, 0.9, 0.89, 0.95, 0.95, 0.95, 0.2, 0.2, 0.2, 0.2]
    want = [2, 1, 2, 1, 0, 0, 1, 2, 3, 3]
    for kept, thirds in zip(told, want, strict=True):
        schedule.step(kept=kept)
        assert schedule.opening == pytest.approx(thirds / 3)
        assert module.opening == schedule.opening


def test_checkpoint_and_resume():
    def build():
        torch.manual_seed(0)
        return BlockSparseRingMultiheadDilatedAttention(
            16, 2, pattern_type="adaptive", sparsity_ratio=0.2, block_size=16, dtype=torch.float64
        )

    model = build()
    schedule = SparsitySchedule(model, steps=10, dense_steps=2)
    for _ in range(6):
        schedule.step()
    saved = {"model": model.state_dict(), "schedule": schedule.state_dict()}
    resumed = build()
    again = SparsitySchedule(resumed, steps=10, dense_steps=2)
    resumed.load_state_dict(saved["model"])
    again.load_state_dict(saved["schedule"])
    x = torch.randn(1, 160, 16, dtype=torch.float64)
    for _ in range(8):
        assert again.opening == schedule.opening
        assert torch.equal(resumed(x, x, x, True), model(x, x, x, True))
        again.step()
        schedule.step()
    assert schedule.opening == 0


def test_kept_is_a_share_and_nothing_else():
    """NaN is below no floor: `step(kept=nan)` closed the schedule. A refused step changes nothing."""
    schedule = SparsitySchedule(BlockSparseAdaptive(0.2), steps=3, kept_floor=0.9)
    for bad, error in {
        torch.nan: "kept must be the share .* got nan",
        1.01: "kept must be the share .* got 1.01",
        -0.1: "kept must be the share .* got -0.1",
        True: "kept must be a number, .* got True",
        "0.9": "kept must be a number, .* got '0.9'",
        torch.ones(2, 3): r"kept must be a number, such as kept_mass\(...\).mean\(\), got a tensor of shape \[2, 3\]",
        torch.tensor(torch.nan): "kept must be the share .* got nan",
    }.items():
        with pytest.raises((TypeError, ValueError), match=error):
            schedule.step(kept=bad)
        assert (schedule.taken, schedule.opening) == (0, 1.0)
    for kept, opening in ((torch.tensor(0.95), 2 / 3), (1, 1 / 3), (torch.tensor(0.5, dtype=torch.float64), 2 / 3)):
        schedule.step(kept=kept)
        assert schedule.opening == pytest.approx(opening)


def test_a_state_of_another_schedule():
    """Counted steps alone say nothing: loaded into a schedule of 10 steps, the state of one that had closed 5 of 1000
    opened the model half as far as it had been. The settings travel with the state, and others are refused."""
    module = BlockSparseAdaptive(0.2)
    saved = SparsitySchedule(module, steps=1000, dense_steps=2, kept_floor=0.5)
    for _ in range(7):
        saved.step(kept=0.6)
    state = saved.state_dict()
    same = {"steps": 1000, "dense_steps": 2, "kept_floor": 0.5}
    for name, other in (("steps", 10), ("dense_steps", 0), ("kept_floor", None)):
        schedule = SparsitySchedule(module, **same | {name: other})
        message = rf"state is of a schedule with {name}={same[name]}, and this one has {name}={other}"
        with pytest.raises(ValueError, match=message):
            schedule.load_state_dict(state)
        assert (schedule.taken, schedule.closed, module.opening) == (0, 0, 1.0)
    schedule = SparsitySchedule(module, **same)
    for bad in ({"taken": 7, "closed": 5}, state | {"more": 1}, None):
        with pytest.raises(ValueError, match="state must be what state_dict gives"):
            schedule.load_state_dict(bad)
    for name, value in (("closed", 1001), ("taken", -1)):
        with pytest.raises(ValueError, match=f"{name} must be at .* got {value}"):
            schedule.load_state_dict(state | {name: value})
    schedule.load_state_dict(state)
    assert schedule.opening == saved.opening == module.opening == 1 - 5 / 1000


def test_a_module_of_somebody_else_that_has_an_opening():
    """Its `opening` is its own affair: it was overwritten."""

    class Morphology(torch.nn.Module):
        opening = "3 x 3"

    model = torch.nn.Sequential(BlockSparseAdaptive(0.2), Morphology())
    SparsitySchedule(model, steps=3)
    assert (model[0].opening, model[1].opening) == (1.0, "3 x 3")
