"""`bench`: nothing wrong is timed, and what it says of a time is so."""

import json
import sys

import pytest
import torch
from matplotlib.image import imread
from torch.nn.attention import flex_attention

from dilated_attention_pytorch.cli import bench
from tests.cli.commands import run

SMALL = ("--tokens", "200", "--heads", "2", "--head-dim", "16", "--repeats", "2")


@pytest.mark.parametrize("pattern", ["window:30 | global:4", "longnet:32,128/1,2", "window:9 ; full"])
@pytest.mark.parametrize("training", [False, True])
def test_json_and_pictures(tmp_path, pattern, training):
    code, out, err = run(
        "bench", pattern, *SMALL, "--causal", "--against", "dense", "--json", "--out", str(tmp_path / "made"),
        *(["--training"] if training else []),
    )  # fmt: skip
    assert code == 0, err
    found = json.loads(out)
    assert json.loads((tmp_path / "made" / "bench.json").read_text()) == found
    assert imread(tmp_path / "made" / "bench.png")[..., :3].std() > 0.05
    assert set(found["contenders"]) == {"ours", "dense"}
    assert found["backend"] == "blockwise"
    for row in found["contenders"].values():
        assert set(row["errors"]) == ({"out", "dq", "dk", "dv"} if training else {"out"})
        assert 0 < max(row["errors"].values()) < 1e-4
        assert row["fastest"] == min(row["times"])
        assert len(row["times"]) == 2
    ours, dense = (found["contenders"][name]["seconds"] for name in ("ours", "dense"))
    assert found["contenders"]["dense"]["ratio"] == dense / ours
    cost = found["call"]["cost"]
    flops = cost["forward_flops"] + (cost["backward_flops"] if training else 0)
    assert found["contenders"]["ours"]["flops_a_second"] == pytest.approx(flops / ours)
    assert "dense SDPA" in err


def wrong_sdpa(*args, **kwargs):
    out = torch.nn.functional.scaled_dot_product_attention(*args, **kwargs)
    out = out.clone()
    out[..., -1, :] += 1e-3
    return out


def test_a_wrong_rival_is_not_timed_and_said_so(monkeypatch):
    monkeypatch.setattr(bench, "scaled_dot_product_attention", wrong_sdpa)
    code, out, err = run("bench", "window:30", *SMALL, "--against", "dense", "--json")
    assert code == 0
    found = json.loads(out)
    assert set(found["contenders"]) == {"ours"}
    assert "out is wrong by 1.0e-03" in found["absent"]["dense"]
    assert "Without dense: out is wrong" in err


@pytest.mark.parametrize("pattern", ["window:30", "longnet:32,128/1,2"])
def test_if_ours_is_wrong_there_is_no_result(monkeypatch, pattern):
    for name in ("block_sparse_attention", "dilated_attention"):
        right = getattr(bench, name)
        monkeypatch.setattr(bench, name, lambda *args, right=right, **kwargs: right(*args, **kwargs) * 1.001)
    code, out, err = run("bench", pattern, *SMALL, "--against", "none", "--json")
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith("error: out is wrong by ")


def test_flex_gets_the_same_pairs(monkeypatch):
    """Without the compiler, which takes its time: what it is given is right, head by head."""
    monkeypatch.setattr(bench, "_compiled", lambda function: function)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    code, out, _ = run(
        "bench", "window:30 ; causal & random:1", *SMALL, "--block-size", "16", "--against", "flex", "--json"
    )
    assert code == 0
    assert 0 < json.loads(out)["contenders"]["flex"]["errors"]["out"] < 1e-5


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["longnet:32/1", "--against", "flex"], "which no mask says"),
        (["full", "--against", "flex", "--dtype", "float64"], "float32"),
        (["full", "--against", "flex", "--training"], "no backward on this device"),
        (["full", "--against", "flash"], "flash_attn is not installed"),
        (["full", "--against", "xformers"], "xformers is not installed"),
    ],
)
def test_who_cannot_take_part(monkeypatch, arguments, reason):
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    code, out, err = run("bench", *arguments, *SMALL, "--json")
    assert code == 0
    (said,) = json.loads(out)["absent"].values()
    assert reason in said
    assert said in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--against", "magic"], "error: --against must be of dense, flex, flash, xformers, or none, got 'magic'"),
        (["--device", "cuda"], "error: --device must be cpu, or cuda where PyTorch finds a GPU, got 'cuda'"),
        (["windo"], "error: pattern 'windo'"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_errors_are_one_line(arguments, message):
    code, out, err = run("bench", *SMALL, *arguments)
    assert (code, out) == (1, "")
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, _ = run("bench", "full", *SMALL, "--against", "none", "--out", str(tmp_path))
    assert code == 0
    assert "No picture: matplotlib is not installed" in out
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]
