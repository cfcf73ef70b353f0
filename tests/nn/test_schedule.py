"""`SparsitySchedule`: what is attended from dense to sparse, by step and by feedback, and across a restart."""

import pytest
import torch

from dilated_attention_pytorch import (
    BlockSparseAdaptive,
    BlockSparseAttention,
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    CumulativeMass,
    LocalBlocks,
    RelativeThreshold,
    SharedBudget,
    SlidingWindow,
    SparsitySchedule,
    TopK,
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


def test_an_opened_pattern_is_the_pattern_and_a_window():
    module = BlockSparseAttention(LocalBlocks(0, block_size=16))
    module.opening = 0.25
    q, k, v = qkv(64)
    for is_causal in (False, True):
        distance = torch.arange(64)[:, None] - torch.arange(64)
        block = torch.arange(64) // 16
        allowed = ((distance.abs() <= 16) | (block[:, None] == block)) & whole(64, is_causal)
        want = dense.attend(q, k, v, allowed)[0]
        torch.testing.assert_close(module(q, k, v, is_causal), want, rtol=0, atol=1e-10)


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


def test_bad_arguments():
    model = BlockSparseAdaptive(selector=TopK(0.2))
    with pytest.raises(ValueError, match=r"model must hold a block-sparse attention module .*, got Linear"):
        SparsitySchedule(torch.nn.Linear(2, 2), steps=3)
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        SparsitySchedule(model, steps=0)
    with pytest.raises(ValueError, match=r"kept_floor must be .* got 1.5"):
        SparsitySchedule(model, steps=1, kept_floor=1.5)
    with pytest.raises(ValueError, match="kept must be given if and only if"):
        SparsitySchedule(model, steps=1).step(kept=0.3)
    with pytest.raises(ValueError, match="kept must be given if and only if"):
        SparsitySchedule(model, steps=1, kept_floor=0.5).step()
    with pytest.raises(ValueError, match="closed must be at most steps = 1, got 5"):
        SparsitySchedule(model, steps=1).load_state_dict({"taken": 9, "closed": 5})
