"""`dilated-attention train`: runs that are extended, gradients that are accumulated, logs and files."""

import csv
import json
import os
import stat
import subprocess
import sys
import types
from dataclasses import replace
from importlib.machinery import ModuleSpec

import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from dilated_attention_pytorch import LongNetLM
from dilated_attention_pytorch.cli import train, utilization
from dilated_attention_pytorch.cli.ranks import ranks_of_torchrun
from dilated_attention_pytorch.cli.training_log import Log, Row
from dilated_attention_pytorch.models.storage import load_tensors, save_tensors
from tests.cli.commands import run
from tests.cli.test_train import OPTIONS, text  # noqa: F401 - a fixture

SHAPE = "--seq-len 16 --batch 2 --dim 8 --layers 1 --heads 2 --segment-lengths 8 --dilation-rates 1 --device cpu"
SMALL = SHAPE.split()


@pytest.fixture
def trained(text, tmp_path):  # noqa: F811
    """The folder of a run of six steps."""
    out = tmp_path / "run"
    code, _, err = run("train", str(text), "--out", str(out), "--steps", "6", "--eval-every", "4", *SMALL)
    assert code == 0, err
    return out


def test_a_run_is_extended(trained, capsys):
    code, out, err = run("train", "--resume", str(trained), "--steps", "10")
    assert code == 0, err
    assert "Going on after step 6 of 10." in out
    tensors, about = load_tensors(trained / train.CHECKPOINT)
    assert (len(tensors["bits"]), about["step"], about["options"]["steps"]) == (10, 10, 10)
    assert tensors["curve"][:, 0].tolist() == [4, 6, 8, 10]
    rate = train._schedule(6, train.State.saved_options(trained / train.CHECKPOINT))
    assert f"The run was to have 6. From here on the learning rate is that of a run of 10, {1e-3 * rate:.2e}" in out
    # Given again there is nothing left to do, and nothing changes.
    before = (trained / train.MODEL).read_bytes()
    code, out, err = run("train", "--resume", str(trained))
    assert code == 0, err
    assert (trained / train.MODEL).read_bytes() == before


def test_an_extension_goes_on_from_what_was_there(text, tmp_path):  # noqa: F811
    """Its steps are those of the longer run, its beginning that of the shorter."""
    out = tmp_path / "run"
    options = replace(OPTIONS, steps=8)
    train.run(Console(quiet=True), text, out, options)
    state = train.State.resumed(out / train.CHECKPOINT, options)
    train.run(Console(quiet=True), text, out, replace(options, steps=10), extends=True)
    data, _ = train._split(text.read_bytes(), options, text)
    for step in (8, 9):
        state.train(step, data, replace(options, steps=10))
    tensors, _ = load_tensors(out / train.CHECKPOINT)
    for name, x in state.model.state_dict().items():
        assert torch.equal(tensors[f"model.{name}"], x)
    assert tensors["bits"].tolist() == state.bits


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--steps", "5"], "--steps must be at least the 6 that the run in"),
        (["--dim", "8"], "--dim is that of the run in"),
        (["--out", "other"], "--out is that of the run in"),
        (["--eval-every", "2"], "--eval-every is that of the run in"),
    ],
    ids=str,
)
def test_what_an_extension_cannot_change(trained, more, message):
    code, _, err = run("train", "--resume", str(trained), *more)
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith(f"error: {message}")


def test_an_extension_needs_the_same_file(trained, tmp_path):
    other = tmp_path / "other.txt"
    other.write_bytes(bytes(range(256)) * 8)
    code, _, err = run("train", str(other), "--resume", str(trained), "--steps", "8")
    assert code == 1
    assert "error: file must be what it was when the run began" in err


def test_a_checkpoint_of_another_version_is_named(trained):
    tensors, about = load_tensors(trained / train.CHECKPOINT)
    del about["options"]["accumulate"]
    save_tensors(trained / train.CHECKPOINT, tensors, about)
    code, _, err = run("train", "--resume", str(trained))
    assert code == 1
    assert "was not written by this version of `train`: give another --out" in err


def test_accumulated_gradients_are_those_of_the_large_batch(text):  # noqa: F811
    options = replace(OPTIONS, model=replace(OPTIONS.model, dropout=0.0))
    data, _ = train._split(text.read_bytes(), options, text)
    states = []
    for batch, accumulate in ((6, 1), (2, 3)):
        state = train.State.new(options, text)
        torch.optim.AdamW.step, step = lambda *_: None, torch.optim.AdamW.step
        try:
            state.train(0, data, replace(options, batch=batch, accumulate=accumulate))
        finally:
            torch.optim.AdamW.step = step
        states.append(state)
    one, parts = states
    assert parts.bits == pytest.approx(one.bits, rel=1e-6)
    for (name, p), q in zip(one.model.named_parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_held_out_bytes_are_looked_at_as_often_as_is_said(trained):
    """And what is looked at is not trained on: the last share of the file, or a sample at the least."""
    tensors, _ = load_tensors(trained / train.CHECKPOINT)
    assert tensors["curve"][:, 0].tolist() == [4, 6]
    options = train.State.saved_options(trained / train.CHECKPOINT)
    data = bytes(range(200)) * 5
    for share, held_out in ((0.25, 250), (0.01, 17)):
        kept, out = train._split(data, replace(options, held_out=share), trained)
        assert bytes(kept.tolist()) + bytes(out.tolist()) == data
        assert len(out) == held_out


def test_many_held_out_bytes_are_sampled_from_everywhere(text):  # noqa: F811
    options = replace(OPTIONS, seq_len=1, batch=1)
    state = train.State.new(options, text)
    seen = []
    features = state.model._features
    state.model._features = lambda rows, *rest: (seen.extend(rows.flatten().tolist()), 0 * features(rows, *rest))[1]
    held_out = torch.arange(200, dtype=torch.uint8)  # rows of two bytes
    assert state._evaluate(held_out, options) == pytest.approx(8.0)  # nothing known is 8 bits a byte
    assert seen == [2 * (i * 100 // 8) for i in range(8)]


@pytest.mark.skipif(os.name != "posix", reason="permissions are those of POSIX")
@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_files_have_the_usual_permissions(tmp_path, mask):
    before = os.umask(mask)
    try:
        path = tmp_path / "x.safetensors"
        save_tensors(path, {"x": torch.zeros(1)}, {})
        save_tensors(path, {"x": torch.ones(1)}, {})
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def test_the_csv_log(text, tmp_path):  # noqa: F811
    out = tmp_path / "run"
    arguments = ("train", str(text), "--out", str(out), "--steps", "6", "--eval-every", "3", "--log", "csv", *SMALL)
    code, printed, err = run(*arguments, "--json")
    assert code == 0, err
    with (out / "log.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    bits = load_tensors(out / train.CHECKPOINT)[0]["bits"].tolist()
    assert [float(row["bits_a_byte"]) for row in rows] == pytest.approx(bits, abs=1e-6)
    found = json.loads(printed)
    curve = {str(point["step"]): f"{point['held_out_bits_a_byte']:.6f}" for point in found["curve"]}
    assert {row["step"]: row["held_out_bits_a_byte"] for row in rows if row["held_out_bits_a_byte"]} == curve
    assert set(curve) == {"3", "6"}
    assert str(out / "log.csv") in found["written"]


def test_a_log_goes_on_where_the_checkpoint_is(tmp_path):
    """Lines of steps that are taken again are replaced, and one that was cut off."""
    row = Row(1, 8.0, None, 1e-3, 100.0)
    with Log(tmp_path, ["csv"], 0) as log:
        for step in (1, 2, 3):
            log.write(row._replace(step=step))
    with (tmp_path / "log.csv").open("a") as file:
        file.write("4,8.0")
    with Log(tmp_path, ["csv"], 2) as log:
        log.write(row._replace(step=3, bits_a_byte=7.0, held_out_bits_a_byte=6.0))
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert lines == [
        "step,bits_a_byte,held_out_bits_a_byte,learning_rate,tokens_per_second",
        "1,8.000000,,1.000000e-03,100.0",
        "2,8.000000,,1.000000e-03,100.0",
        "3,7.000000,6.000000,1.000000e-03,100.0",
    ]


def test_tensorboard_is_asked_for_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    (tmp_path / "empty").touch()
    code, _, err = run("train", str(tmp_path / "empty"), "--log", "tensorboard", *SMALL)
    assert (code, err) == (1, "error: --log tensorboard needs tensorboard: pip install tensorboard\n")
    code, _, err = run("train", str(tmp_path / "empty"), "--log", "cvs", *SMALL)
    assert (code, err) == (1, "error: --log must be one of csv, tensorboard, got 'cvs'; did you mean 'csv'?\n")


def test_the_tensorboard_log(text, tmp_path, monkeypatch):  # noqa: F811
    """With its writer replaced: it need not be installed."""
    seen = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            seen.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            seen.append((name, step, value))

        def close(self):
            seen.append("closed")

    board = types.ModuleType("tensorboard")
    board.__spec__ = ModuleSpec("tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboard", board)
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    out = tmp_path / "run"
    code, _, err = run("train", str(text), "--out", str(out), "--steps", "2", "--log", "tensorboard", *SMALL)
    assert code == 0, err
    bits = load_tensors(out / train.CHECKPOINT)[0]["bits"].tolist()
    assert seen[0] == (str(out / "tensorboard"), 1)
    assert [x for x in seen if x[0] == "bits_a_byte"] == [("bits_a_byte", i + 1, b) for i, b in enumerate(bits)]
    assert [x[1] for x in seen if x[0] == "held_out_bits_a_byte"] == [2]
    assert seen[-1] == "closed"


def test_the_flops_of_a_token_are_those_that_pytorch_counts():
    """Of the matrices; attention's are pair by pair."""
    model = LongNetLM(replace(OPTIONS.model, backend="reference"))
    counter = FlopCounterMode(display=False)
    with counter:
        model.loss(tokens := torch.zeros(1, 64, dtype=torch.int64), tokens).backward()
    counts = counter.get_flop_counts()["Global"]
    linear = sum(n for op, n in counts.items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    config = model.config
    keys = [(h, i, j) for h in range(config.num_heads) for i in range(64) for j in range(i + 1)]
    pairs = sum(config.branches.times(i, j, h, config.num_heads) > 0 for h, i, j in keys)
    attention = config.num_layers * 2 * 7 * config.head_dim * pairs
    assert utilization.Products.of(model, 64).of_token * 64 == linear + attention


def test_the_matmul_rate_is_a_time_turned_round(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(utilization, "perf_counter", lambda: next(clock))
    assert utilization.matmul_rate("cpu") == 2 * 1024**3


def torchrun(text, out, *more, processes=2):  # noqa: F811
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    small = [*SMALL, "--accumulate", "2", "--eval-every", "3", "--json"]
    done = subprocess.run(
        [*command, "dilated_attention_pytorch", "train", str(text), "--out", str(out), *small, *more],
        capture_output=True, text=True, encoding="utf-8", timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_processes_train_as_one_with_the_larger_batch(text, tmp_path):  # noqa: F811
    code, out, err = torchrun(text, tmp_path / "two", "--steps", "4")
    assert code == 0, err
    assert json.loads(out)["steps"] == 4  # one document: the first process talks alone
    assert "on 2 processes, cpu" in err
    large = [*SMALL, "--batch", "4", "--accumulate", "2", "--eval-every", "3", "--steps", "4"]
    assert run("train", str(text), "--out", str(tmp_path / "one"), *large)[0] == 0
    (two, about), (one, _) = (load_tensors(tmp_path / name / train.CHECKPOINT) for name in ("two", "one"))
    assert about["options"]["ranks"] == 2
    torch.testing.assert_close(two["bits"], one["bits"], rtol=1e-5, atol=0)
    torch.testing.assert_close(two["curve"], one["curve"], rtol=1e-5, atol=0)
    assert one["bits"][-1] < one["bits"][0]

    # It goes on by as many processes, and by no other number.
    code, _, err = run("train", "--resume", str(tmp_path / "two"), "--steps", "5")
    assert code == 1
    assert "ranks must be what it was when the run began, 2, to go on from" in err
    assert "`torchrun --nproc-per-node 2 -m dilated_attention_pytorch train …` has as many" in err
    code, out, err = torchrun(text, tmp_path / "two", "--steps", "4")
    assert (code, json.loads(out)["began_at"]) == (0, 4), err


def test_processes_need_a_gpu_each(monkeypatch):
    given = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0", "RANK": "0", "TORCHELASTIC_RUN_ID": "x"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    wanted = r"--device must be cuda, with a GPU for each of the 2 processes of torchrun here, or cpu; got 'cuda' and 1"
    with pytest.raises(ValueError, match=wanted), ranks_of_torchrun("cuda"):
        pass


@pytest.mark.slow
def test_compiled_layers_train_as_they_are(text, tmp_path, monkeypatch):  # noqa: F811
    compiled, graphs = torch.nn.Module.compile, []
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda layer, **how: compiled(layer, **how, backend=noted_by(graphs))
    )
    both = []
    for name in ("plain", "compiled"):
        options = replace(OPTIONS, steps=3, compiled=name == "compiled")
        train.run(Console(quiet=True), text, tmp_path / name, options)
        both.append(load_tensors(tmp_path / name / train.CHECKPOINT)[0])
    assert len(graphs) >= OPTIONS.model.num_layers
    torch.testing.assert_close(both[1]["bits"], both[0]["bits"], rtol=1e-5, atol=0)
    assert LongNetLM.load(tmp_path / "compiled" / train.MODEL).state_dict().keys() == {
        name.removeprefix("model.") for name in both[0] if name.startswith("model.")
    }


def noted_by(graphs):
    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    return backend
