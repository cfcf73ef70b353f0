"""`doctor`: it says what is so, and a wrong result makes it fail."""

import json

import pytest
import torch

from dilated_attention_pytorch import explain
from dilated_attention_pytorch.cli import doctor
from dilated_attention_pytorch.testing import oracle
from dilated_attention_pytorch.testing.timing import hint_of_load
from tests.cli.commands import run


def test_a_healthy_machine():
    code, out, err = run("doctor", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["passed"]
    assert found["packages"]["torch"] == torch.__version__
    assert found["checks_left"] == 0
    done = {(check["backend"], check["dtype"]) for check in found["checks"] if check["device"] == "cpu"}
    assert done == {(b, d) for b in ("blockwise", "sdpa") for d in ("float64", "float32", "bfloat16")}
    q = torch.zeros(1, 150, 8, 64)
    pattern, is_causal = doctor.CALLS["dilated"]
    (mine,) = (each for each in found["backends"] if each["call"] == "dilated" and each["device"] == "cpu")
    assert mine["why"] == explain(q, q, q, pattern, is_causal=is_causal).reasons
    assert mine["chosen"] == "blockwise"
    report = {each["name"]: each for each in found["caches"]}
    assert 1 <= report["layout.cache._cache"]["entries"] <= report["layout.cache._cache"]["bound"]
    assert report["layout.cache._cache"]["nbytes"] > 0
    for word in (
        "layout.cache._cache",
        "torch",
        "→ blockwise",
        "cannot: ",
        "Self-check",
        f"{len(found['checks'])} checks",
    ):
        assert word in err


def moved(right, place, offset):
    """The real results with one number of blockwise moved."""

    def results(case, backend, seed=0):
        got = right(case, backend, seed)
        if backend != "blockwise":
            return got
        wrong = got[place].clone()
        wrong.view(-1)[77] += offset
        return (*got[:place], wrong, *got[place + 1 :])

    return results


@pytest.mark.parametrize(("place", "offset"), [(0, 0.1), (3, float("nan"))])
def test_a_wrong_result_is_status_1_and_named(monkeypatch, place, offset):
    module = __import__("dilated_attention_pytorch.testing.oracle", fromlist=["results"])
    monkeypatch.setattr(doctor, "DTYPES", {"cpu": (torch.float64,) * 3})
    monkeypatch.setattr(module, "results", moved(module.results, place, offset))
    code, out, err = run("doctor", "--json")
    assert code == 1
    found = json.loads(out)
    assert not found["passed"]
    failed = [check for check in found["checks"] if not check["passed"]]
    assert {check["backend"] for check in failed} == {"blockwise"}
    assert len(failed) == 3 * len(doctor.CHECKED)
    name = ("out", "lse", "dq", "dk", "dv")[place]
    assert f"{name} of blockwise in torch.float64 is off by" in failed[0]["error"]
    assert err.splitlines()[-1] == f"error: 12 of 15 checks failed: {failed[0]['error']}"


def test_what_raises_is_a_failed_check(monkeypatch):
    def broken(case, backend):
        raise KeyError("no kernel\nmore")

    monkeypatch.setattr(doctor, "assert_exact", broken)
    (check, *_) = doctor._checked("cpu", torch.float32, "everything before a token")
    assert not check["passed"]
    assert check["error"].startswith("everything before a token, cpu: ")
    assert "\n" not in check["error"]


def test_it_stops_in_time(monkeypatch):
    monkeypatch.setattr(doctor, "LIMIT", -1.0)
    code, out, err = run("doctor", "--json")
    assert code == 0
    assert json.loads(out)["checks"] == []
    assert json.loads(out)["checks_left"] == 12
    assert "12 were left" in err


def test_the_stand_in_for_lse_is_the_call_itself():
    case = doctor._case(*doctor.CHECKED["everything before a token"], torch.float64, "cpu")
    alone = doctor._WithoutLse(**{**vars(case), "dlse": torch.zeros_like(case.dlse)})
    for got, want in zip(oracle(alone), oracle(doctor.Case(**vars(alone))), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("load", "threads", "settings", "says"),
    [
        (0.2, 4, {}, []),
        (None, 4, {}, []),
        (99.0, 1, {}, ["busy (load 99.0"]),
        (99.0, 4, {"OMP_WAIT_POLICY": "PASSIVE"}, ["busy (load 99.0"]),
        (
            99.0,
            4,
            {"OMP_WAIT_POLICY": "ACTIVE"},
            ["busy (load 99.0", "its 4 threads may stall", "OMP_WAIT_POLICY=PASSIVE"],
        ),
        (99.0, 4, {}, ["busy (load 99.0", "its 4 threads may stall", "OMP_WAIT_POLICY=PASSIVE"]),
    ],
)
def test_a_busy_machine(load, threads, settings, says):
    hint = hint_of_load({"load_before": load, "threads": threads, "thread_settings": settings})
    assert (hint is None) == (not says)
    assert all(words in hint for words in says)
    assert len(says) == 3 or hint is None or "stall" not in hint
