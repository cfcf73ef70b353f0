"""LongNet on a GPU: near its float64 self on the CPU, the cache in bfloat16, and a training run that goes on."""

import dataclasses
import math
import random

import pytest
import torch

from dilated_attention_pytorch import LongNetConfig, LongNetLM
from dilated_attention_pytorch.models.longnet import KVCache

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CONFIG = LongNetConfig(
    vocab_size=64,
    dim=256,
    num_layers=2,
    num_heads=4,
    segment_lengths=(256, 512, 1024),
    dilation_rates=(1, 2, 4),
)


def tokens_of(seq):
    return torch.randint(CONFIG.vocab_size, (2, seq), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("seq", [1000, 2048])
def test_near_float64(seq):
    """float32 with all gradients, and the result under autocast to bfloat16."""
    torch.manual_seed(0)
    exact, tokens = LongNetLM(CONFIG).double(), tokens_of(seq)
    model = LongNetLM(CONFIG).cuda()
    model.load_state_dict(exact.state_dict())
    want, got = exact(tokens), model(tokens.cuda())
    assert (got.cpu().double() - want).norm() < 1e-4 * want.norm()
    wanted = torch.autograd.grad(want.square().mean(), list(exact.parameters()))
    grads = torch.autograd.grad(got.square().mean(), list(model.parameters()))
    for (name, _), a, b in zip(model.named_parameters(), grads, wanted, strict=True):
        assert (a.cpu().double() - b).norm() < 1e-3 * b.norm() + 1e-7, name
    with torch.autocast("cuda", dtype=torch.bfloat16):
        lower = model(tokens.cuda())
    assert lower.dtype == torch.bfloat16
    assert (lower.cpu().double() - want).norm() < 0.03 * want.norm()


def test_part_by_part_in_bfloat16():
    torch.manual_seed(0)
    model, tokens = LongNetLM(CONFIG).cuda().bfloat16().eval(), tokens_of(1100).cuda()
    with torch.no_grad():
        want = model(tokens).float()
        cache = KVCache(CONFIG.branches, 1100)
        parts = tokens.split([300, 400, *[1] * 50, 7, 1, 342], dim=1)
        got = torch.cat([model(part, cache=cache) for part in parts], dim=1).float()
    assert (got - want).norm() < 0.03 * want.norm()


def test_a_future_byte_never_changes_the_past():
    model, tokens = LongNetLM(CONFIG).cuda().bfloat16().eval(), tokens_of(1500).cuda()
    changed = tokens.clone()
    changed[:, 900] = (changed[:, 900] + 1) % CONFIG.vocab_size
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :900], after[:, :900])
    assert not torch.equal(before[:, 900], after[:, 900])


def test_training_goes_on_and_learns(tmp_path, monkeypatch):
    for name in ("rich", "safetensors"):
        pytest.importorskip(name, reason=f"needs {name}, which a bare GPU machine may lack")
    from rich.console import Console

    from dilated_attention_pytorch.cli import train
    from dilated_attention_pytorch.models.storage import load_tensors

    console, draw = Console(quiet=True), random.Random(0)
    text = tmp_path / "words.txt"
    text.write_text(" ".join(draw.choice(["attention", "segment", "branch", "head"]) for _ in range(5000)))
    options = train.Options(
        model=dataclasses.replace(CONFIG, vocab_size=256),
        steps=60,
        seq_len=1024,
        batch=2,
        learning_rate=2e-3,
        warmup=5,
        seed=0,
        device="cuda",
    )
    train.run(console, text, tmp_path / "whole", options)
    real = train.State.train

    def interrupted(self, step, *rest):
        if step == 25:
            raise KeyboardInterrupt
        return real(self, step, *rest)

    monkeypatch.setattr(train.State, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train.run(console, text, tmp_path / "stopped", options)
    monkeypatch.setattr(train.State, "train", real)
    train.run(console, text, tmp_path / "stopped", options)
    whole, stopped = (load_tensors(tmp_path / name / train.CHECKPOINT)[0]["bits"] for name in ("whole", "stopped"))
    assert whole[-5:].mean() < 2.0 / math.log(2)
    torch.testing.assert_close(stopped, whole, rtol=0.02, atol=0.02)
