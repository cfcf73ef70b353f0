"""Every example runs, small; and what the docs show of the study is what its record holds."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent


def load(name):
    spec = importlib.util.spec_from_file_location(f"examples.{name}", ROOT / "examples" / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look
    spec.loader.exec_module(module)
    return module


def test_every_example_is_here():
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {
        "perplexity",
        "distill_gate",
        "recall",
        "train_ring",  # tests/distributed/test_example.py runs it
        "train_mesh",  # and tests/distributed/test_training.py this
        "accelerate_train",
        "lightning_train",
        "slide_encoder",
        "adaptive_generate",  # tests/integrations/test_real_model.py and test_hf_adaptive.py
    }


@pytest.mark.slow
def test_slide_encoder(tmp_path, capsys):
    load("slide_encoder").main(["--tiles", "60", "--out", str(tmp_path / "slide.png")])
    printed = capsys.readouterr().out
    assert "4 attention modules replaced; 60 tiles and a class token" in printed
    assert printed.count("of its attention to 1 % of the tiles") == 4
    assert (tmp_path / "slide.png").read_bytes().startswith(b"\x89PNG")


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


def test_ratios_of_the_record_are_to_the_dense_perplexity():
    record = json.loads(RECORD.read_text())
    dense = {(r["text"], r["tokens"]): r["perplexity"] for r in record["rows"] if r["rule"] == "dense"}
    for row in record["rows"]:
        assert row["ratio"] == pytest.approx(row["perplexity"] / dense[row["text"], row["tokens"]])


@pytest.mark.slow
def test_the_study_runs(monkeypatch, tmp_path):
    """All kinds of rows, on a model that is made here; a row that is there is not run again."""
    pytest.importorskip("transformers")
    from tests.cli.tiny import WORDS, huggingface_folder

    study, out = load("perplexity"), tmp_path / "record.json"
    folder, text = huggingface_folder(tmp_path / "model"), tmp_path / "words.txt"
    text.write_text(WORDS)
    rows = [{"rule": "exact", "spread": "even", "block": (16, 16), "density": 0.5}]
    rows += [{"rule": "sink + local", "spread": "–", "block": (64, 64), "density": 0.5}]
    monkeypatch.setattr(study, "rules", lambda: iter(rows))
    arguments = [str(text), "--tokens", "256", "--model", str(folder), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["perplexity.py", *arguments])
    study.main()
    record = json.loads(out.read_text())
    assert [row["rule"] for row in record["rows"]] == ["dense", "exact", "sink + local"]
    assert [row["share"] < 0.8 for row in record["rows"]] == [False, True, True]
    assert all(abs(row["ratio"] - 1) > 1e-4 for row in record["rows"][1:])
    monkeypatch.setattr(study.perplexity, "measure", None)
    study.main()
    assert json.loads(out.read_text()) == record


def test_gates_and_budgets_of_layers_reach_their_layers():
    study = load("perplexity")
    torch.manual_seed(0)
    q, k = torch.randn(1, 64, 2, 8), torch.randn(1, 64, 2, 8)
    learned = {"gates": [study.SCORERS["mean"], study.SCORERS["exact"]], "budgets": {0.5: [1.0, 0.25]}}
    row = {"rule": "gate", "spread": "layers", "block": (16, 16), "density": 0.5}
    rule = study.rule_of(row, 64, learned)
    for layer, (scorer, share) in enumerate(zip(learned["gates"], learned["budgets"][0.5], strict=True)):
        selector = study.TopK(share, even=True, across_heads=True)
        want = study.Chosen("", scorer, selector, (16, 16)).layout(layer, q, k, 0.3)
        assert torch.equal(rule.layout(layer, q, k, 0.3).to_dense(), want.to_dense())


def test_fixed_patterns_of_the_study_keep_what_they_say():
    from dilated_attention_pytorch import BlockLayout

    study = load("perplexity")
    for name in ("local", "sink + local", "dilated", "hierarchical"):
        for density in (0.125, 0.25, 0.5):
            layout = BlockLayout.from_pattern(study.pattern_of(name, density, 2048), 2048, block_size=64)
            assert not torch.triu(layout.to_dense(), 1).any()
            assert 0.7 * density < layout.density * 2 < 1.35 * density, (name, density, layout.density * 2)
