"""The self-check passes over gloo, under torchrun, and fails where something is wrong."""

import json
import subprocess
import sys

import pytest
import torch

from dilated_attention_pytorch.distributed import check
from tests.distributed.processes import ByRank

CPU = torch.device("cpu")


def torchrun(*options):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "dilated_attention_pytorch.distributed.check", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_it_passes(tmp_path):
    run = torchrun("--tokens", "256", "--trace", str(tmp_path / "trace"))
    assert run.returncode == 0, run.stderr[-3000:]
    *lines, last = run.stdout.splitlines()
    results = json.loads(last)
    assert (results["ok"], results["ranks"], results["backend"]) == (True, 2, "gloo")
    names = ["exactness", "bytes", "bandwidth", "overlap", "faults"]
    assert [line.split()[:2] for line in lines[-5:]] == [[name, "ok"] for name in names]
    for each in results["exactness"]["of_ranks"]:
        assert each["largest_error"].keys() == check.cases(600).keys()
        assert max(each["largest_error"].values()) < 1e-12
    assert sum(each["sent"]["causal"] for each in results["bytes"]["of_ranks"]) == check.SHARD * 2 * 4 * 64 * 4
    assert all(each["bytes_a_second"] > 1e6 for each in results["bandwidth"]["of_ranks"])
    assert json.loads((tmp_path / "trace.1.json").read_text())["traceEvents"]


def test_it_says_how_it_is_started(capsys, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit):
        check.main([])
    assert "start it with torchrun" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit):
        check.main(["--share-gpu"])
    assert "--share-gpu needs a GPU, and nccl one for each process; this machine has 0" in capsys.readouterr().err


def checked(group, name, broken):
    """Whether a check passes on this rank while attention over the ring is broken in some way."""
    attend = check.attend

    def wrong(what, q, k, v, **options):
        if "group" not in options or broken is None:
            return attend(what, q, k, v, **options)
        if broken == "inexact":
            return attend(what, q, k, v, **options) * (1 + 1e-9)
        if broken == "sends twice":
            attend(what, q, k, v, **options)
            return attend(what, q, k, v, **options)
        return attend(what, q, k, v, **{**options, "dropout_p": 0.0})  # "forgives"

    check.attend = wrong
    try:
        return getattr(check, name)(group, CPU)["ok"]
    finally:
        check.attend = attend


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "broken"), [("exactness", "inexact"), ("traffic", "sends twice"), ("faults", "forgives")]
)
def test_what_is_wrong_is_found(ranks, name, broken):
    assert ranks.run(2, checked, name, None) == [True, True]
    assert False in ranks.run(2, checked, name, ByRank([broken, broken]))
