"""The recall study: the task is what it says, only dilated branches solve it, and the record shows it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dilated_attention_pytorch import Branches
from dilated_attention_pytorch.cli import demo, recall
from dilated_attention_pytorch.cli.recall import KEYS, RECORD, VALUES, Study

ROOT = Path(__file__).parents[2]
STUDIES = [Study(), demo.RECALL]


@pytest.mark.parametrize("study", STUDIES, ids=str)
def test_an_answer_is_the_value_in_the_record_of_the_key(study):
    tokens, answers = study.sample(50, torch.Generator().manual_seed(0))
    assert tokens.shape == (50, study.seq)
    for row, due in zip(tokens.tolist(), answers.tolist(), strict=True):
        records = [row[i * study.segment : (i + 1) * study.segment] for i in range(KEYS)]
        assert all(len(set(record)) == 1 for record in records)
        bound = dict(divmod(record[0] - RECORD, VALUES) for record in records)
        assert len(bound) == KEYS
        questions = [key - 1 for key in row[-study.segment :]]
        assert [bound[key] for key in questions] == due
        assert set(row[KEYS * study.segment : -study.segment]) == {0}
        assert study.seq - study.segment - KEYS * study.segment + 1 == study.distance
    assert answers.unique().tolist() == list(range(VALUES))


@pytest.mark.parametrize("study", STUDIES, ids=str)
def test_dilated_branches_alone_connect_question_and_record(study):
    branches, heads = study.branches, study.heads
    dilated = Branches(branches.segment_lengths[1:], branches.dilation_rates[1:])
    local = Branches(branches.segment_lengths[:1], branches.dilation_rates[:1])
    for question in range(study.seq - study.segment, study.seq):
        for record in range(KEYS):
            keys = range(record * study.segment, (record + 1) * study.segment)
            held = [sum(b.times(question, k, h, heads) for k in keys for h in range(heads)) for b in (local, dilated)]
            assert held[0] == 0
            assert held[1] > 0


@pytest.mark.parametrize("study", STUDIES, ids=str)
def test_the_window_costs_as_much_and_does_not_reach(study):
    def cost(window):
        return study.heads * sum(min(i + 1, window) for i in range(study.seq))

    pairs = sum(
        study.branches.times(i, j, h, study.heads)
        for i in range(study.seq)
        for j in range(i + 1)
        for h in range(study.heads)
    )
    assert study.cost == pairs
    assert cost(study.window - 1) < pairs <= cost(study.window)
    assert study.layers * (study.window - 1) < study.distance


def test_models_differ_in_their_attention_alone():
    study = Study(seq=64, segment=4, dim=16)
    models = {kind: study.model(kind).double() for kind in recall.KINDS}
    states = [model.state_dict() for model in models.values()]
    for name, value in states[0].items():
        assert all(torch.equal(state[name], value) for state in states[1:])
    tokens, _ = study.sample(1, torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, : KEYS * study.segment] = RECORD
    moved = {kind: bool((model(tokens) != model(changed))[:, -study.segment :].any()) for kind, model in models.items()}
    assert moved == {"LongNet": True, "window": False, "dense": True}


@pytest.mark.slow
def test_it_learns():
    """The smallest case with dense attention, as far as it is learned: seconds."""
    study = Study(seq=64, segment=4, dim=32)
    model = study.model("dense")
    shares = study.learn(model, 400)
    assert len(shares) < 400
    assert sum(shares[:10]) / 10 < 0.3
    assert study.test(model) > 0.9


def test_the_command_writes_the_record(tmp_path):
    out = tmp_path / "recall.json"
    small = ["--steps", "2", "--seq", "64", "--segment", "4", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "recall.py", *small],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())["recall"]
    assert record["provenance"]["command"] == "python benchmarks/recall.py --steps 2 --seq 64 --segment 4"
    assert {kind: len(each["curve"]) for kind, each in record["models"].items()} == dict.fromkeys(recall.KINDS, 2)
    assert out.with_suffix(".png").stat().st_size > 10_000


def test_the_record_shows_it():
    record = json.loads((ROOT / "benchmarks" / "results" / "recall.json").read_text())["recall"]
    right = {kind: each["right"] for kind, each in record["models"].items()}
    assert right["LongNet"] > 0.9
    assert right["dense"] > 0.9
    assert right["window"] < 2 / VALUES
