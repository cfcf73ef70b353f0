"""examples/train_ring.py: gradients of one process, checkpoints that any world size resumes."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_ring.py"


def example():
    spec = importlib.util.spec_from_file_location("train_ring", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gradients(group):
    return example().check(group, tokens=320)


def training(group, steps, folder=None):
    folder = None if folder is None else Path(folder)
    return example().train(group, steps=steps, tokens=320, dtype=torch.float64, checkpoints=folder, every=1)


def test_gradients_are_those_of_one_process(ranks):
    assert max(ranks.run(3, gradients)) <= 1e-10


def test_a_checkpoint_is_resumed_by_any_number_of_ranks(ranks, tmp_path):
    """3 ranks to step 1, 2 ranks to step 2, 4 ranks to step 3: the losses of one rank that was never stopped."""
    undisturbed = ranks.run(1, training, 3)[0]
    assert undisturbed[-1] < undisturbed[0]
    losses = []
    for size, steps in ((3, 1), (2, 2), (4, 3)):
        got = ranks.run(size, training, steps, str(tmp_path))
        assert all(each == got[0] for each in got)
        losses += got[0]
    assert len(losses) == 3
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(undisturbed), rtol=0, atol=1e-9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002", "step-000003"]


def torchrun(*args, env=None, script=EXAMPLE):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *args[: args.index("--")], str(script)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1", **(env or {})}
    run = subprocess.run(
        [*command, *args[args.index("--") + 1 :]], env=env, capture_output=True, text=True, timeout=400, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1]), run


@pytest.mark.stress
def test_under_torchrun(tmp_path):
    result, _ = torchrun("--nproc-per-node", "2", "--", "--check", "--tokens", "600")
    assert result["largest_difference"] <= 1e-10
    result, run = torchrun(
        "--nproc-per-node", "2", "--", "--steps", "6", "--checkpoints", str(tmp_path), "--every", "3"
    )
    assert re.search(r"step 6: loss", run.stdout)
    assert result["step"] == 6
