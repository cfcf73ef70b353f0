"""`dilated-attention train`: a run that was killed ends where it would have ended, and everything it says is so."""

import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from matplotlib.image import imread
from rich.console import Console
from torch.nn.functional import cross_entropy

from dilated_attention_pytorch import LongNetConfig, LongNetLM
from dilated_attention_pytorch.cli import main, train
from dilated_attention_pytorch.models.storage import load_tensors

MODEL = LongNetConfig(dim=16, num_layers=2, num_heads=2, segment_lengths=(8, 32), dilation_rates=(1, 2), dropout=0.1)
OPTIONS = train.Options(model=MODEL, steps=12, seq_len=32, batch=2, learning_rate=0.01, warmup=2, seed=3, device="cpu")


@pytest.fixture
def text(tmp_path):
    """Words drawn from a few: something to learn."""
    draw = random.Random(0)
    path = tmp_path / "words.txt"
    path.write_text(" ".join(draw.choice(["attention", "segment", "branch", "head"]) for _ in range(600)))
    return path


def command(text, out, *more):
    small = "--seq-len 64 --batch 2 --dim 16 --layers 2 --heads 2 --segment-lengths 8,64 --dilation-rates 1,2"
    options = [*small.split(), "--steps", "80", "--save-every", "4", "--dropout", "0.1", "--device", "cpu", *more]
    code = "from dilated_attention_pytorch.cli import main; main()"
    return [sys.executable, "-c", code, "train", str(text), "--out", str(out), *options]


def run(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        arguments, capture_output=True, text=True, encoding="utf-8", env=environment, timeout=120, check=False
    )


@pytest.mark.slow
def test_a_killed_run_ends_where_an_undisturbed_one_does(text, tmp_path):
    whole = run(*command(text, tmp_path / "whole"))
    assert (whole.returncode, whole.stderr) == (0, "")
    killed, kills = tmp_path / "killed", 0
    while kills < 2:
        steps = _step_of(killed)
        process = subprocess.Popen(
            command(text, killed),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        while _step_of(killed) < steps + 8:
            assert process.poll() is None, "the run must be killed before it ends"
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        kills += 1
    reached = _step_of(killed)
    assert 0 < reached < 80
    assert not (killed / train.MODEL).exists()
    done = run(*command(text, killed))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Going on after step {reached} of 80." in done.stdout
    for name in (train.CHECKPOINT, train.MODEL):
        theirs, about = load_tensors(tmp_path / "whole" / name)
        ours, about_ours = load_tensors(killed / name)
        assert about_ours == about
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert len(load_tensors(killed / train.CHECKPOINT)[0]["bits"]) == 80


def _step_of(out):
    try:
        return load_tensors(out / train.CHECKPOINT)[1]["step"]
    except FileNotFoundError:
        return 0


def test_it_learns_and_says_so(text, tmp_path, capsys):
    out = tmp_path / "run"
    train.run(Console(), text, out, replace(OPTIONS, steps=40, model=replace(MODEL, dropout=0.0)))
    printed = capsys.readouterr().out
    bits = load_tensors(out / train.CHECKPOINT)[0]["bits"]
    assert bits[:3].mean() > 7.2
    assert bits[-3:].mean() < 5.0
    assert sorted(path.name for path in out.iterdir()) == [train.CHECKPOINT, train.PLOT, train.MODEL]
    assert imread(out / train.PLOT)[..., :3].std() > 0.05
    model = LongNetLM.load(out / train.MODEL).eval()
    data = text.read_bytes()
    held_out = torch.tensor(list(data[-max(33, len(data) // 20) :]))
    rows = held_out[: len(held_out) // 33 * 33].view(-1, 33)
    loss = cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).item()
    held_out = f"{loss / math.log(2):.3f}"
    assert f"Held-out bytes: {held_out} bits a byte." in printed
    assert re.search(rf"step 40: {bits[-1]:.3f} bits a byte \(held out {held_out}\), [\d,]+ tokens/s", printed)


def test_a_step_is_the_gradient_step_it_says(text):
    """The first step, by hand: its rows, its rate, AdamW from nothing, gradients cut at norm 1."""
    options = replace(OPTIONS, model=replace(MODEL, dropout=0.0), warmup=4)
    data, _ = train._split(text.read_bytes(), options, text)
    state = train.State.new(options, text)
    before = {name: p.detach().clone() for name, p in state.model.named_parameters()}
    torch.manual_seed(3 * 1_000_003 + 1)
    rows = torch.stack([data[i : i + 33].long() for i in torch.randint(len(data) - 32, (2,)).tolist()])
    loss = cross_entropy(state.model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    grads = torch.autograd.grad(loss, list(state.model.parameters()))
    norm = torch.sqrt(sum(g.square().sum() for g in grads))
    assert state.train(0, data, options) == pytest.approx(loss.item() / math.log(2))
    rate = 0.01 / 5
    for (name, p), grad in zip(state.model.named_parameters(), grads, strict=True):
        grad = grad / max(1.0, norm)
        decayed = before[name] * (1.0 - rate * 0.1 * (p.ndim > 1))
        torch.testing.assert_close(p.detach(), decayed - rate * grad / (grad.abs() + 1e-8), rtol=1e-3, atol=1e-5)


def test_rate_rises_and_falls():
    options = replace(OPTIONS, steps=102, warmup=2)
    rates = [train._schedule(step, options) for step in range(102)]
    assert rates[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert rates[52] == pytest.approx(0.55)
    assert rates[101] == pytest.approx(0.1, abs=1e-3)
    assert rates[2:] == sorted(rates[2:], reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 0.02}, r"learning_rate must be what it was when the run began, 0.01, .* got 0.02\. Give"),
        ({"steps": 13}, r"steps must be .*, 12, .* got 13\. `dilated-attention train --resume .*run --steps 13`"),
        ({"model": replace(MODEL, dropout=0.2)}, r"model must be .*, \{'dropout': 0.1\}, .* got \{'dropout': 0.2\}"),
    ],
    ids=str,
)
def test_another_run_does_not_go_on_from_this_one(text, tmp_path, change, message):
    train.run(Console(), text, tmp_path / "run", OPTIONS)
    with pytest.raises(ValueError, match=message):
        train.run(Console(), text, tmp_path / "run", replace(OPTIONS, **change))


def test_another_file_does_not_go_on_from_this_one(text, tmp_path):
    train.run(Console(), text, tmp_path / "run", OPTIONS)
    text.write_text(text.read_text()[:-1] + "!")
    with pytest.raises(ValueError, match=r"file must be what it was when the run began, \{'sha256': '"):
        train.run(Console(), text, tmp_path / "run", OPTIONS)


def test_an_interrupt_saves_the_step_it_has(text, tmp_path, monkeypatch, capsys):
    undisturbed = tmp_path / "undisturbed"
    train.run(Console(), text, undisturbed, OPTIONS)
    real = train.State.train

    def interrupted(self, step, *rest):
        if step == 5:
            raise KeyboardInterrupt
        return real(self, step, *rest)

    monkeypatch.setattr(train.State, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train.run(Console(), text, tmp_path / "run", OPTIONS)
    assert "Stopped after step 5; the same command goes on." in capsys.readouterr().out
    monkeypatch.setattr(train.State, "train", real)
    train.run(Console(), text, tmp_path / "run", OPTIONS)
    for name in (train.MODEL, train.CHECKPOINT):
        assert (tmp_path / "run" / name).read_bytes() == (undisturbed / name).read_bytes()


def test_a_loss_that_is_not_finite_ends_the_run(text, tmp_path):
    with pytest.raises(RuntimeError, match=r"the loss of step \d+ is (nan|inf): try a lower learning rate"):
        train.run(Console(), text, tmp_path / "run", replace(OPTIONS, learning_rate=1e30))


@pytest.mark.parametrize(
    ("more", "status", "message"),
    [
        (["--segment-lengths", "8;16"], 1, "--segment-lengths must be integers with commas between them, got '8;16'"),
        (["--dilation-rates", "1,2,4"], 1, "dilation_rates"),
        (["--seq-len", "5000"], 1, "text must have at least 10002 bytes for seq_len 5000, got"),
        (["--lr", "0"], 1, "learning_rate must be positive and finite, got 0.0"),
        (["--steps", "0"], 2, "--steps"),
    ],
    ids=str,
)
def test_bad_options(text, tmp_path, capsys, more, status, message):
    with pytest.raises(SystemExit) as stop:
        main(command(text, tmp_path / "run", *more)[3:])
    assert stop.value.code == status
    printed = capsys.readouterr().err
    assert message in printed
    assert status == 2 or printed.count("\n") == 1
    assert not (tmp_path / "run").exists()
