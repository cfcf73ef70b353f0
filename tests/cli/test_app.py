"""The command: what it prints, writes and returns."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
from matplotlib.image import imread

import dilated_attention_pytorch
from dilated_attention_pytorch import SlidingWindow, plan_memory
from dilated_attention_pytorch.cli import demo, main
from tests.cli.commands import run

COMMAND = "from dilated_attention_pytorch.cli import main; main()"


def exit_code(*argv: str) -> int | str | None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    return stop.value.code


@pytest.mark.slow
def test_quick_demo_in_a_pipe(tmp_path):
    out = tmp_path / "made" / "here"
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "demo", "--quick", "--out", str(out)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", done.stdout), "control characters"
    assert done.stdout.count("  checking documents, causal ...\n") == 1
    rows = re.findall(r"^│ (.+?) +│ (yes|no) +│((?: *\d\.\de[-+]\d\d │){4})$", done.stdout, re.MULTILINE)
    assert [(name, causal) for name, causal, _ in rows] == [(n, c) for n in demo.CHECKED for c in ("no", "yes")]
    errors = [float(x) for _, _, cells in rows for x in cells.replace("│", " ").split()]
    assert 0 < max(errors) < 1e-10
    assert f"Worst error {max(errors):.1e}" in done.stdout
    assert "dense" in done.stdout
    assert "scaled, not measured" in done.stdout
    assert "536,870,912 bytes" in done.stdout  # 8 heads, 4096 squared, 4 bytes
    learned = re.findall(r"^│ (LongNet|window|dense) +│.*│ +3 │ +\d+ s │ +(\d+\.\d)% │$", done.stdout, re.MULTILINE)
    assert [kind for kind, _ in learned] == ["LongNet", "window", "dense"]
    assert done.stdout.splitlines()[-2] == f"Written: {out / 'patterns.png'}, {out / 'recall.png'}"
    picture = imread(out / "patterns.png")
    assert min(picture.shape[:2]) > 1000
    for name in ("patterns.png", "recall.png"):
        assert imread(out / name)[..., :3].std() > 0.05


def wrong(offset: float):
    """The real attention with one number of the blockwise result moved."""
    right = demo.block_sparse_attention

    def attention(*args, backend="auto", **kwargs):
        out = right(*args, backend=backend, **kwargs)
        if backend == "blockwise" and kwargs["is_causal"]:
            moved = torch.zeros_like(out)
            moved[1, 200, 3, 5] = offset
            out = out + moved
        return out

    return attention


@pytest.mark.slow
@pytest.mark.parametrize("offset", [1e-9, float("nan")])
def test_a_wrong_result_ends_the_demo_with_status_1(monkeypatch, tmp_path, capsys, offset):
    monkeypatch.setattr(demo, "block_sparse_attention", wrong(offset))
    assert exit_code("demo", "--quick", "--out", str(tmp_path / "out")) == 1
    printed = capsys.readouterr()
    assert re.fullmatch(r"error: not exact: .* is off by (1\.0e-09|inf), more than 1e-10\n", printed.err)
    assert f"{offset:.1e}" in printed.out
    assert not (tmp_path / "out").exists()


def test_an_error_below_the_tolerance_passes(monkeypatch):
    monkeypatch.setattr(demo, "block_sparse_attention", wrong(1e-11))
    demo._check_exactness(demo.Console())


def test_a_wrong_gradient_ends_the_demo(monkeypatch):
    right = demo.block_sparse_attention

    def attention(q, k, v, *args, backend, **kwargs):
        if backend == "blockwise":
            k = k * 1.0
            k.register_hook(lambda grad: grad * (1 + 1e-6))
        return right(q, k, v, *args, backend=backend, **kwargs)

    monkeypatch.setattr(demo, "block_sparse_attention", attention)
    with pytest.raises(RuntimeError, match="not exact"):
        demo._check_exactness(demo.Console())


def test_a_layout_that_is_not_the_pattern_ends_the_demo():
    pattern, other = demo.CHECKED["documents"], demo.CHECKED["sliding window"]
    layout = demo.BlockLayout.from_pattern(other, demo.CHECK_TOKENS, block_size=16)
    with pytest.raises(RuntimeError, match="the layout of documents is wrong about query"):
        demo._check_mask("documents", pattern, layout)


def test_errors_are_one_line_and_debug_shows_all(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(demo, "_check_exactness", lambda console: None)
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    out = str(in_the_way / "below")
    assert exit_code("demo", "--quick", "--out", out) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "below" in err
    with pytest.raises(NotADirectoryError):
        main(("demo", "--quick", "--out", out, "--debug"))


@pytest.mark.slow
def test_demo_json_and_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(demo, "QUICK", (1024, 256, 1))
    code, out, err = run("demo", "--quick", "--json", "--out", str(tmp_path / "out"))
    assert code == 0, err
    found = json.loads(out)
    assert [(row["pattern"], row["is_causal"]) for row in found["exactness"]] == [
        (name, is_causal) for name in demo.CHECKED for is_causal in (False, True)
    ]
    assert max(max(row["errors"]) for row in found["exactness"]) < demo.TOLERANCE
    race = found["race"]
    assert race["dense_scaled"]["forward"] == race["dense"]["forward"] * 16
    assert {len(row["right"]) for row in found["recall"].values()} == {1}
    assert found["written"] == []
    assert not (tmp_path / "out").exists()
    assert "No picture: matplotlib is not installed" in err


def test_plan_json():
    arguments = ("plan", "window:512", "--tokens", "100000", "--device", "H200", "--training", "--json")
    code, out, _ = run(*arguments)
    assert code == 0
    found = json.loads(out)
    plan = plan_memory(SlidingWindow(512, 512), 100000, 1, torch.bfloat16, True, device="H200")
    assert (found["peak_bytes"], found["peak_phase"], found["fits"]) == (plan.peak_bytes, plan.peak_phase, True)
    assert sum(item["bytes"] for item in found["items"] if plan.peak_phase in item["phases"]) == plan.peak_bytes
    code, out, err = run(*arguments, "--budget", "0.1")
    assert code == 1
    assert not json.loads(out)["fits"]
    assert f"{json.loads(out)['longest']:,} tokens do" in err.splitlines()[-1]


def test_train_json(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 4)
    small = "--steps 2 --seq-len 16 --batch 1 --dim 8 --layers 1 --heads 2 --segment-lengths 8 --dilation-rates 1"
    code, out, err = run("train", str(text), "--out", str(tmp_path / "run"), *small.split(), "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["steps"] == 2
    assert found["held_out_bits_a_byte"] > 0
    assert all((tmp_path / "run" / name).exists() for name in ("model.safetensors", "checkpoint.safetensors"))
    assert f"{found['held_out_bits_a_byte']:.3f} bits a byte" in err


def test_every_command_has_json_debug_and_examples():
    commands = ("demo", "show", "explore", "plan", "bench", "doctor", "train", "generate", "perplexity", "fidelity")
    commands += ("tasks", "calibrate")
    code, listed, _ = run("--help")
    assert code == 0
    for command in commands:
        assert f" {command} " in listed
        code, out, _ = run(command, "--help")
        assert code == 0
        assert "--json" in out
        assert "--debug" in out
        assert f" dilated-attention {command}" in out.split("Options")[0].partition("Usage")[2].partition("\n")[2]


def test_examples_of_the_help_are_commands():
    """They are read, and not run."""
    from typer.main import get_command

    from dilated_attention_pytorch.cli.app import app

    commands = get_command(app).commands
    for name, command in commands.items():
        examples = re.findall(r"^ *dilated-attention (\w+.*)$", command.help, re.MULTILINE)
        assert len(examples) >= 2, name
        for example in examples:
            of, *arguments = shlex.split(example.partition(" > ")[0])
            assert of == name
            command.make_context(name, arguments)


def test_the_version(capsys):
    assert run("--version") == (0, f"dilated-attention-pytorch {dilated_attention_pytorch.__version__}\n", "")


@pytest.mark.slow
def test_the_package_is_the_command():
    code = [sys.executable, "-m", "dilated_attention_pytorch", "--version"]
    done = subprocess.run(code, capture_output=True, text=True, check=True)
    assert done.stdout == f"dilated-attention-pytorch {dilated_attention_pytorch.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "status", "line"),
    [
        (["shw"], 2, "error: No such command 'shw'. Did you mean 'show'? (see dilated-attention --help)"),
        (
            ["show", "full", "--tokns", "3"],
            2,
            "error: No such option: --tokns. Did you mean --tokens? (see dilated-attention show --help)",
        ),
        (["plan", "windw:3"], 1, "; did you mean 'window'?"),
        (["bench", "full", "--against", "fex"], 1, "; did you mean 'flex'?"),
        (["show"], 2, "error: Missing argument 'PATTERN'. (see dilated-attention show --help)"),
        (["show", "full", "--tokens", "many"], 2, "(see dilated-attention show --help)"),
    ],
    ids=str,
)
def test_an_error_is_one_line_and_names_what_was_meant(argv, status, line):
    code, out, err = run(*argv)
    assert (code, out, err.count("\n")) == (status, "", 1)
    assert err.startswith("error: ")
    assert err.endswith(f"{line}\n")


def test_an_interrupt_is_no_traceback(monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("dilated_attention_pytorch.cli.show.run", stopped)
    assert run("show", "full") == (130, "", "")


def test_arguments_that_make_no_sense_are_status_2(capsys):
    assert exit_code("demo", "--tokens", "5") == 2
    assert "1024" in capsys.readouterr().err
    assert exit_code("nothing") == 2


def test_help_names_every_option(capsys):
    assert exit_code("demo", "--help") == 0
    printed = capsys.readouterr().out
    assert all(option in printed for option in ("--tokens", "--out", "--quick", "--debug"))


@pytest.mark.slow
@pytest.mark.parametrize("module", ["typer", "rich"])
def test_without_typer_or_rich_one_line_says_what_to_install(module):
    hide = f"import sys; sys.modules[{module!r}] = None; "
    done = subprocess.run([sys.executable, "-c", hide + COMMAND], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"error: dilated-attention needs {module}: pip install typer rich\n"


def test_importing_the_command_imports_neither_typer_nor_rich():
    code = "import sys, dilated_attention_pytorch.cli; sys.exit(bool({'typer', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_dense_time_grows_with_the_square_and_memory_with_the_length():
    assert demo.Measured(1.0, 2.0, 100).scaled(8) == demo.Measured(64.0, 128.0, 800)
    assert demo.Measured(1.0, 2.0, None).scaled(8).cells()[-1] == "not measured"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0.0 B"), (1023, "1,023.0 B"), (1 << 20, "1.0 MiB"), (2**37, "128.0 GiB")]
)
def test_bytes_are_readable(count, text):
    assert demo._bytes(count) == text


def test_fidelity_without_a_model_says_what_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    text = tmp_path / "text.txt"
    text.write_text("words")
    assert exit_code("fidelity", str(text)) == 1
    assert "error: a real model needs transformers" in capsys.readouterr().err
