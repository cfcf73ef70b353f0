"""`dilated-attention plan`: what it prints is what the planner says."""

import re
from pathlib import Path

import pytest
import torch

from dilated_attention_pytorch import Full, SparsePatternConfig, hierarchical
from dilated_attention_pytorch.cli import main, plan
from dilated_attention_pytorch.memory import max_sequence_length, plan_memory
from dilated_attention_pytorch.memory.devices import as_text
from dilated_attention_pytorch.patterns.config import HIERARCHICAL_PRESETS


@pytest.fixture
def command(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")

    def run(*argv):
        try:
            main(("plan", *argv))
        except SystemExit as stop:
            printed = capsys.readouterr()
            return stop.code, printed.out, printed.err
        raise AssertionError("the command must exit")

    return run


def test_the_table_is_the_plan(command):
    code, out, err = command("--tokens", "100000", "--training", "--device", "H200", "dilated_sparse:0.02")
    assert (code, err) == (0, "")
    config = SparsePatternConfig(sparsity_ratio=0.02)
    plan = plan_memory(config, 100000, 1, torch.bfloat16, True, device="H200")
    for item in plan.items:
        row = next(line for line in out.splitlines() if line.startswith(f"│ {item.name} "))
        assert row.count(as_text(item.bytes)) == len(item.phases)
    (total,) = (line for line in out.splitlines() if line.startswith("│ all of them"))
    assert as_text(plan.peak_bytes) in total
    longest = max_sequence_length(config, "H200", dtype=torch.bfloat16, training=True)
    # The answer comes before how it is made up.
    assert out.startswith(
        f"100,000 tokens take {as_text(plan.peak_bytes)} and fit 139.4 GiB on H200.\nLongest sequence"
    )
    assert "GTX 1080" not in out
    assert f"Longest sequence in 139.4 GiB on H200, 1 device(s): {longest:,} tokens." in out
    assert "keep 1.0% of the blocks" in out


def test_the_tables_of_the_design_documents(command):
    code, out, _ = command("--device", "A100", "--tables")
    assert code == 0
    rows = {cells[0]: cells[1:] for cells in re.findall(r"^│ (.+?) +│ (.+?) +│ (.+?) +│$", out, re.MULTILINE)}
    options = {"dtype": torch.float16, "device": "GTX 1080"}
    patterns = {
        "Dense": Full(),
        "99% Sparse": SparsePatternConfig(sparsity_ratio=0.01),
        "Hierarchical": hierarchical(HIERARCHICAL_PRESETS["standard"]),
    }
    for name, documented in (("Dense", "0.539 GB"), ("99% Sparse", "0.531 GB"), ("Hierarchical", "2.208 GB")):
        planned = plan_memory(patterns[name], 16384, **options).peak_bytes / 1e9
        assert rows[name] == (documented, f"{planned:.3f} GB")
    ring = max_sequence_length(patterns["99% Sparse"], "A100", dtype=torch.float16, world_size=8)
    assert rows["8 x A100"] == ("8M+", f"{ring:,}")


def test_what_does_not_fit_is_an_error_that_says_what_would(command):
    code, _, err = command("--tokens", "9000000", "--training", "--budget", "2", "--device", "A100")
    assert code == 1
    tokens = int(
        re.fullmatch(r"error: 9,000,000 tokens take .* 2\.0 GiB on A100; ([\d,]+) tokens do\n", err)[1].replace(",", "")
    )
    code, _, err = command("--tokens", str(tokens), "--training", "--budget", "2", "--device", "A100")
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (("--dtype", "int8"), 2, "must be one of float64"),
        (("--tokens", "0"), 2, "--tokens"),
        (("--device", "abacus"), 1, "error: device must be 'cpu'"),
        (("dilated_sparse:0.1/2048",), 1, "must have the same length"),
        (("dilated_sparse:0.1/a,b/1",), 1, "segments of dilated_sparse must be integers"),
        (("windw:3",), 1, "error: pattern 'windw:3': 'windw' is none of full"),
        (("longnet", "--block-size", "64"), 1, "block_size is chosen by dilated attention itself"),
        (("window:3 ; full", "--heads", "8"), 1, "heads must be the pattern's 2, got 8"),
    ],
)
def test_arguments_that_make_no_sense(command, argv, code, message):
    got, _, err = command(*argv)
    assert got == code
    assert message in err


def test_segments_and_dense(command):
    code, out, _ = command("dilated_sparse:0.02/65536,131072/1,2")
    assert code == 0
    assert "lists by query" in out
    code, out, _ = command("full", "--causal", "--tokens", "4096", "--device", "H200")
    assert code == 0
    assert "sdpa backend" in out
    assert "dense attention" in out


def test_the_ring_of_the_docs_is_the_planned_one():
    """docs/ring.md, and the same rows in the command."""
    page = (Path(__file__).parents[2] / "docs" / "ring.md").read_text(encoding="utf-8")
    ring = plan.documented_tables()[-1]
    cells = [list(column.cells) for column in ring.columns]
    assert len(cells[0]) == 3
    for row in zip(*cells, strict=True):
        assert f"| {' | '.join(row)} |" in page
    alone = next(iter(plan.documented_tables()[2].columns[-1].cells))
    assert f"less than one alone ({alone} tokens)" in page
