"""Every example runs, small; and what the docs show of the study is what its record holds."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_here():
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {
        "perplexity",
        "distill_gate",
        "recall",
        "train_ring",  # tests/distributed/test_example.py runs it
        "accelerate_train",
        "lightning_train",
    }


def test_recall(monkeypatch, tmp_path, capsys):
    """The task is right, and all three ways of training run."""
    recall = load("recall")
    tokens, targets = recall.batch_of(2, 16, 16, "cpu")
    for row, target in zip(tokens.tolist(), targets.tolist(), strict=True):
        shown = dict(zip(row[:32:2], row[1:32:2], strict=True))
        assert [target[i] for i in range(32, 64, 2)] == [shown[row[i]] for i in range(32, 64, 2)]
        assert [target[i] for i in range(32, 64, 2)] == row[33::2]
        assert set(target[:32] + target[33::2]) == {-100}
        blocks = [row[i : i + 16 : 2] for i in range(0, 64, 16)]  # keys; those of a block are asked for together
        assert sorted(map(sorted, blocks[:2])) == sorted(map(sorted, blocks[2:]))
    out = tmp_path / "recall.json"
    small = ["--pairs", "16", "--width", "16", "--batch", "4", "--steps", "4", "--checks", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["recall.py", *small])
    recall.main()
    rows = json.loads(out.read_text())["rows"]
    assert [row["way"] for row in rows] == ["dense", "schedule", "sparse"]
    assert [row["opening"] for row in rows] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("needs", ["accelerate", "lightning"])
def test_training_with(needs):
    """It learns. Lightning is not installed with the rest: `make test-lightning`."""
    pytest.importorskip(needs)
    if needs == "accelerate":
        pytest.importorskip("transformers")
    losses = load(f"{needs}_train").main([str(ROOT / "README.md"), "--steps", "12", "--seq", "128", "--width", "32"])
    assert len(losses) == 12
    assert sum(losses[-3:]) < 0.95 * sum(losses[:3])


RECORD = ROOT / "benchmarks" / "results" / "perplexity.json"


def test_the_docs_show_the_record():
    study, record = load("perplexity"), json.loads(RECORD.read_text())
    assert study.table(record) in (ROOT / "docs" / "adaptive.md").read_text()
    dense = {(r["text"], r["tokens"]): r["perplexity"] for r in record["rows"] if r["rule"] == "dense"}
    for row in record["rows"]:
        assert row["ratio"] == pytest.approx(row["perplexity"] / dense[row["text"], row["tokens"]])


def test_fixed_patterns_of_the_study_keep_what_they_say():
    from dilated_attention_pytorch import BlockLayout

    study = load("perplexity")
    for name in ("local", "sink + local", "dilated", "hierarchical"):
        for density in (0.125, 0.25, 0.5):
            layout = BlockLayout.from_pattern(study.pattern_of(name, density, 2048), 2048, block_size=64)
            assert not torch.triu(layout.to_dense(), 1).any()
            assert 0.7 * density < layout.density * 2 < 1.35 * density, (name, density, layout.density * 2)
