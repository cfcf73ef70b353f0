"""The benchmarks: they run, record what their numbers depend on, and time nothing that is wrong; the docs show them."""

import importlib
import json
import os
import re
import statistics
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from dilated_attention_pytorch import BlockLayout, RandomBlocks, SlidingWindow, block_sparse_attention
from dilated_attention_pytorch.memory import can_measure
from dilated_attention_pytorch.testing.timing import Timing, interleave

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def harness(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import harness

    return harness


@pytest.fixture
def cpu(harness, monkeypatch):
    """The module of the command, with sizes that take a moment."""
    import cpu

    tiny = replace(cpu.QUICK, forward={256: 1}, training={256: 1}, flat={256: 1}, whole=256, matmul_side=64)
    monkeypatch.setattr(cpu, "QUICK", tiny)
    monkeypatch.setattr(cpu.Probes, "floats", 1 << 10)
    return cpu


@pytest.fixture
def cases(harness):
    import cases

    return cases


@pytest.mark.slow
def test_quick_run(tmp_path):
    out = tmp_path / "made" / "cpu.json"
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "cpu.py", "--quick", "--skip-flex", "--out", out],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        # Threads of a busy machine mostly wait for each other.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    text = out.read_text(encoding="utf-8")
    record, summary = json.loads(text), json.loads(done.stdout.splitlines()[-1])
    assert str(Path.home()) not in text
    assert str(tmp_path) not in text
    assert out.with_suffix(".png").stat().st_size > 10_000

    assert list(record) == summary["sections"] == ["forward", "training", "memory", "flat"]
    for section in record.values():
        machine = section["provenance"]
        assert (machine["torch"], machine["threads"], machine["quick"]) == (torch.__version__, 1, True)
        assert machine["thread_settings"]["OMP_NUM_THREADS"] == "1"
        assert machine["command"] == "python benchmarks/cpu.py --quick --skip-flex"
        assert all(machine[name] for name in ("library", "commit", "date", "python", "system", "cpu", "device"))
    assert "--skip-flex" in record["forward"]["flex_note"]
    for name in ("cpu.forward", "cpu.training", "cpu.memory", "cpu.flat"):
        assert f"\n{name}\n\n| " in "\n" + done.stdout

    checks = [check for section in record.values() for check in section["gate"]]
    assert {check["case"].split(",")[0] for check in checks} == {"forward", "training", "flat"}
    assert all(0 <= check["error"] <= check["tolerance"] for check in checks)
    assert summary["gate"] == {"checks": len(checks), "worst": max(check["error"] for check in checks)}

    forward, training = record["forward"]["rows"], record["training"]["rows"]
    assert [(row["tokens"], row["dense"]["extrapolated"]) for row in training] == [(1024, False), (2048, True)]
    assert {row["tokens"] for row in forward if row["dense"]["extrapolated"]} == {2048}
    assert {row["backend"] for row in forward if row["density"] == 1.0} == {"sdpa"}
    assert {row["backend"] for row in forward if row["density"] < 1.0} == {"blockwise"}
    for row in forward + training:
        assert 0 < row["ours"]["min"] <= row["ours"]["median"] <= max(row["ours"]["times"])
        assert row["ours"]["gflops"] > 0
        assert row["matmul_share"] == pytest.approx(row["ours"]["gflops"] / row["matmul_gflops"])
        assert row["floor"]["times_floor"] > 0
        assert row["real_density"] == row["active_blocks"] / (row["tokens"] // 128) ** 2
    # q, k, v and out are there at the same time, so less than that cannot be right
    assert all(1.0 <= row["ratio"] < 2.0 for row in record["memory"]["rows"])
    assert len(record["flat"]["rows"]) == 4
    memory = {"memory_forward", "memory_training"} if can_measure()[0] else set()
    flat = {"flat_window", "flat_random"}
    assert set(summary["targets"]) == {"full_density_ratio", "training_ratio"} | memory | flat


def moved(function, offset):
    """The function with one number of its result moved."""

    def wrong(*args, **kwargs):
        out = function(*args, **kwargs)
        return out + torch.zeros_like(out).index_fill_(1, torch.tensor([1]), offset)

    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("section", ["forward", "training"])
@pytest.mark.parametrize("contender", ["block_sparse_attention", "scaled_dot_product_attention"])
@pytest.mark.parametrize("offset", [1e-3, float("nan")])
def test_a_wrong_contender_ends_the_run_before_it_is_timed(
    cpu, harness, monkeypatch, tmp_path, capsys, section, contender, offset
):
    def never(*args):
        pytest.fail("timed")

    monkeypatch.setattr(cpu, contender, moved(getattr(cpu, contender), offset))
    monkeypatch.setattr(cpu, "interleave", never)
    assert (
        harness.run(cpu.BENCHMARK, ["--quick", "--skip-flex", "--only", section, "--out", str(tmp_path / "x.json")])
        == 1
    )
    name = "ours 0.1" if contender == "block_sparse_attention" else "dense"
    assert f": {name} differs from float64 in 2 query blocks by " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("which", ["dq", "dk", "dv"])
def test_a_wrong_gradient_ends_the_run(cpu, harness, monkeypatch, tmp_path, capsys, which):
    def wrong(*tensors_and_layout):
        *tensors, layout = tensors_and_layout
        place = ["dq", "dk", "dv"].index(which)
        tensors[place] = tensors[place] * 1.0
        tensors[place].register_hook(lambda grad: grad * 1.001)
        return block_sparse_attention(*tensors, layout)

    monkeypatch.setattr(cpu, "block_sparse_attention", wrong)
    assert harness.run(cpu.BENCHMARK, ["--quick", "--only", "training", "--out", str(tmp_path / "x.json")]) == 1
    assert f"training, 256 tokens, {which}: ours 0.1 differs" in capsys.readouterr().err


def stand_in(q, k, v, block_mask):
    """What compiled FlexAttention computes. (Not compiled, it does not look at the blocks, only at a mask_mod.)"""
    mask = block_mask.to_dense().bool().repeat_interleave(128, dim=2).repeat_interleave(128, dim=3)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask)


def test_a_wrong_flex_ends_the_run(cpu, harness, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch, "compile", lambda function, **kwargs: function)
    monkeypatch.setattr(cpu, "flex_attention", stand_in)
    run = ["--quick", "--only", "forward", "--out", str(tmp_path / "x.json")]
    assert harness.run(cpu.BENCHMARK, run) == 0
    record = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    row = record["forward"]["rows"][0]
    assert row["flex_ratio"] == pytest.approx(row["flex"]["median"] / row["ours"]["median"])
    assert "compile_seconds" in record["forward"]["flex_compile"][0]
    assert "flex_ratio" in cpu.summary(record)["targets"]
    monkeypatch.setattr(cpu, "flex_attention", lambda q, k, v, block_mask: scaled_dot_product_attention(q, k, v))
    assert harness.run(cpu.BENCHMARK, run) == 1
    assert "flex 0.1 differs" in capsys.readouterr().err


def test_a_run_replaces_the_sections_it_measured_and_no_others(cpu, harness, monkeypatch, tmp_path):
    """Each section says by itself what it is of: after a second run, of another commit, the first one's sections keep
    their own. (Records used to have one environment, and by hand a list of sections that were of another run.)"""
    out = tmp_path / "cpu.json"
    first = ["--quick", "--only", "training", "flat", "--out", str(out), "--commit", "first"]
    assert harness.run(cpu.BENCHMARK, first) == 0
    before = json.loads(out.read_text(encoding="utf-8"))
    assert list(before) == ["training", "flat"]
    again = ["--quick", "--only", "flat", f"--out={out}", "--commit", "second"]
    assert harness.run(cpu.BENCHMARK, again) == 0
    after = json.loads(out.read_text(encoding="utf-8"))
    assert [section["provenance"]["commit"] for section in after.values()] == ["first", "second"]
    assert after["training"] == before["training"]
    assert after["flat"]["provenance"]["command"] == "python benchmarks/cpu.py --quick --only flat --commit second"


def test_a_quick_run_does_not_touch_the_record(cpu, harness):
    def name(*argv):
        return harness.arguments(cpu.BENCHMARK, argv).out.relative_to(BENCHMARKS).as_posix()

    assert name() == name("--only", "flat") == "results/cpu.json"
    assert name("--quick") == name("--quick", "--only", "flat") == "results/cpu-quick.json"


def test_a_section_that_checks_nothing_is_refused(harness, tmp_path):
    """Speed without a check of the result is no figure; only sections that are declared to time nothing go without."""
    benchmark = harness.Benchmark("made", "", {"fast": lambda job: {"rows": []}})
    with pytest.raises(AssertionError, match="section fast checked nothing"):
        harness.run(benchmark, ["--out", str(tmp_path / "x.json")])
    assert list(tmp_path.iterdir()) == []
    untimed = harness.Benchmark("made", "", benchmark.sections, untimed=("fast",))
    assert harness.run(untimed, ["--out", str(tmp_path / "x.json")]) == 0


def test_what_a_section_found_is_kept_when_a_later_one_is_wrong(harness, tmp_path, capsys):
    def right(job):
        job.gate.check("a case", "ours", "the truth", torch.ones(2), torch.ones(2))
        return {"rows": [1]}

    def wrong(job):
        job.gate.check("a case", "theirs", "the truth", torch.full((2,), torch.nan), torch.ones(2))

    benchmark = harness.Benchmark("made", "", {"first": right, "second": wrong})
    assert harness.run(benchmark, ["--out", str(tmp_path / "x.json")]) == 1
    assert capsys.readouterr().err.endswith("error: a case: theirs differs from the truth by NaN, more than 2e-05\n")
    record = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    assert list(record) == ["first"]
    assert record["first"]["rows"] == [1]
    assert [check["error"] for check in record["first"]["gate"]] == [0.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_gate_lets_rounding_pass_and_a_missing_block_not(harness, dtype):
    """One of 13 blocks missing is the smallest mistake of the benchmarks' layouts; rounding is that of the dtype."""
    exact = torch.randn(100, 13, dtype=torch.float64)
    gate = harness.Gate()
    gate.check("rounded", "ours", "float64", exact.sum(1).to(dtype), exact.sum(1))
    with pytest.raises(harness.GateError, match="a block missing: ours differs from float64 by "):
        gate.check("a block missing", "ours", "float64", exact[:, 1:].sum(1).to(dtype), exact.sum(1))
    assert [check["error"] <= check["tolerance"] for check in gate.checks] == [True, False]


SCRIPTS = (
    "adaptive_gpu",
    "adaptive_quality",
    "bitmaps",
    "busy",
    "cpu",
    "decode",
    "dilated",
    "gpu",
    "host",
    "longnet",
    "memory",
    "models",
    "neighborhoods",
    "python_text",
    "recall",
    "ring",
    "small_blocks",
    "tune",
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_has_the_same_options(script, harness, monkeypatch):
    """Without a GPU, too; an unknown section and a missing device are errors before anything starts."""
    pytest.importorskip("triton", reason="needs triton, which there is for Linux alone")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    benchmark = importlib.import_module(script).BENCHMARK
    sections = list(benchmark.sections)
    args = harness.arguments(benchmark, ["--only", sections[-1], "--quick", "--out", "x.json", "--commit", "abc"])
    assert (args.only, args.quick, args.out, args.commit) == ([sections[-1]], True, Path("x.json"), "abc")
    assert harness.arguments(benchmark, []).only == sections
    assert args.device == ("cuda" if "cuda" in benchmark.devices else "cpu")
    assert set(benchmark.untimed) <= set(sections)
    with pytest.raises(SystemExit):
        harness.arguments(benchmark, ["--only", "nothing"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if benchmark.devices == ("cuda",):
        with pytest.raises(SystemExit):
            harness.arguments(benchmark, [])


def test_every_script_is_tried():
    others = {"cases", "docs_tables", "gpu_kernels", "harness", "plain_model", "plots", "profiles", "tables", "values"}
    assert {path.stem for path in BENCHMARKS.glob("*.py")} - others == set(SCRIPTS)


def test_targets_are_judged_by_the_worst_case_and_only_in_a_full_run(cpu):
    def judged(name, rows, quick=False):
        return cpu.summary({name: {"provenance": {"quick": quick}, "rows": rows}})["targets"]

    def memory(ratio, quick=False):
        return judged("memory", [{"kind": "forward", "ratio": ratio}], quick)["memory_forward"]["met"]

    assert [memory(1.15), memory(1.16), memory(1.0, quick=True)] == [True, False, None]
    rows = [{"dense_ratio": ratio, "matmul_gflops": 1.0} for ratio in (0.9, 0.6, 0.8)]
    found = judged("training", rows)["training_ratio"]
    assert found == {"worst": 0.6, "median": 0.8, "target": 0.7, "met": False}


def test_contenders_take_turns():
    calls = []
    contenders = {name: lambda name=name: calls.append(name) for name in "abc"}
    timings = interleave(contenders, {"a": 2, "b": 4, "c": 1}, {"probe": lambda: calls.append("-")})
    assert "".join(calls) == "b-a-b-b-a-b-c-"
    assert [len(timings[name].times) for name in ("a", "b", "c", "probe")] == [2, 4, 1, 7]
    timing = Timing((3.0, 1.0, 2.0, 9.0))
    assert timing.record() == {"median": 2.5, "min": 1.0, "times": [3.0, 1.0, 2.0, 9.0]}


def test_random_masks_are_exact_seeded_and_the_same_for_flex(cases):
    mask = cases.random_mask(32, 0.1)
    assert mask.sum(1).tolist() == [3] * 32
    assert cases.random_mask(32, 0.001).sum(1).tolist() == [1] * 32
    assert cases.random_mask(8, 1.0).all()
    assert mask.equal(cases.random_mask(32, 0.1))
    assert not mask.equal(cases.random_mask(32, 0.1, seed=1))
    flex = cases.flex_mask(mask, 128)
    assert flex.seq_lengths == (4096, 4096)
    assert flex.to_dense()[0, 0].bool().equal(mask)
    assert int(flex.kv_num_blocks.sum()) == 0  # all of them full


@pytest.mark.parametrize("pattern", [SlidingWindow(40, 3), RandomBlocks(3, block_size=16)], ids=str)
def test_what_the_gate_expects_is_the_reference(cases, pattern):
    inputs = cases.Inputs.make(160, 2, 8)
    layout = BlockLayout.from_pattern(pattern, 160, block_size=16)
    rows = [0, 5, 9]
    at = cases.tokens_of(rows, 16)
    got = cases.expected(inputs, layout, rows, gradients=True)
    leaves = [x.double().requires_grad_() for x in inputs.ours]
    out = block_sparse_attention(*leaves, layout, backend="reference")
    do = torch.zeros_like(out).index_copy_(1, at, inputs.grad[:, at].double())
    dq, dk, dv = torch.autograd.grad(out, leaves, do)
    for name, want in {"out": out[:, at], "dq": dq[:, at], "dk": dk, "dv": dv}.items():
        torch.testing.assert_close(got[name], want, rtol=0, atol=1e-12)
    assert cases.expected(inputs, layout, rows)["out"].equal(got["out"])


def test_the_commit_says_when_the_tree_is_dirty(harness, monkeypatch, tmp_path):
    def git(*args):
        identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        subprocess.run(["git", "-C", tmp_path, *identity, *args], check=True, capture_output=True)

    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    monkeypatch.setattr(harness, "HERE", tmp_path / "benchmarks")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert harness.commit() == "unknown"
    git("init")
    git("commit", "--allow-empty", "-m", "first")
    (results / "cpu.json").write_text("{}")
    clean = harness.commit()
    assert len(clean) == 40
    (tmp_path / "new.py").write_text("")
    assert harness.commit() == f"{clean}-dirty"


RECORDS = ("adaptive_gpu", "bitmaps_cpu", "busy", "cpu", "decode_cpu", "decode_cuda", "dilated_cpu", "dilated_cuda",
           "gpu", "host", "memory_cpu", "memory_cuda", "python_text", "recall", "ring")  # fmt: skip


@pytest.mark.parametrize("record", RECORDS)
def test_every_section_of_a_record_says_what_it_is_of(record):
    """A null command: it was not recorded, before every section had to."""
    for name, section in record_of(record).items():
        machine = section["provenance"]
        assert {"command", "quick"} <= set(machine), name
        assert not machine["quick"], name
        assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", machine["commit"]), name
        assert all(machine[key] for key in ("date", "torch", "library", "python", "device", "cpu", "threads")), name
        assert (machine["device"] == "cuda") == ("gpu" in machine), name
        assert "/" not in (machine["command"] or "").replace("benchmarks/", ""), name


def record_of(name):
    return json.loads((BENCHMARKS / "results" / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture
def docs_tables(harness):
    import docs_tables

    return docs_tables


def test_the_docs_show_the_records(docs_tables):
    """`make docs-tables` has nothing to change: tables and marked figures are those of the records."""
    records, shown = docs_tables.Records(), []
    for page in docs_tables.pages():
        text = page.read_text(encoding="utf-8")
        assert docs_tables.rewritten(text, records) == text, f"{page.name}: make docs-tables"
        shown += [name for _, name, _ in docs_tables.MARKED.findall(text)]
    assert {"headline", "gpu.kernels", "cpu.forward", "dilated_cuda.rows", "ring.rings"} <= set(shown)
    assert len(shown) > 100


# What a measurement is given in, and speeds beside others.
FIGURE = re.compile(r"\d[\d.,–]*\s(?:[TG]FLOP(?:/s)?|[µmn]s|[TG]B/s)(?!\w)|\d\.\d\d+(?:–[\d.]+)? ×")


def test_no_figure_is_typed(docs_tables):
    """A measurement stands between marks, or in the log. Targets are not measured, and code is not text."""
    pages = [page for page in docs_tables.pages() if "dev" not in page.parts and page.stem != "huggingface_models"]
    assert len(pages) > 20
    for page in pages:
        text = docs_tables.MARKED.sub("", page.read_text(encoding="utf-8"))
        text = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
        text = re.sub(r"^## Targets that are missed\n.*?(?=^## )", "", text, flags=re.DOTALL | re.MULTILINE)
        assert FIGURE.findall(text) == [], page.name


@pytest.mark.parametrize("typed", ["it took 23 µs", "at 1.76 × the speed", "633 TFLOP/s", "13.5–14.7 ns a token"])
def test_a_typed_figure_is_found(typed):
    assert FIGURE.search(typed)


@pytest.mark.slow
def test_the_ring_page_shows_what_is_planned():
    from dilated_attention_pytorch.cli.plan import documented_tables

    single, ring = documented_tables()[-2:]
    page = (BENCHMARKS.parent / "docs" / "ring.md").read_text(encoding="utf-8")
    for row in zip(*(column.cells for column in ring.columns), strict=True):
        assert f"| {' | '.join(row)} |" in page
    alone = dict(zip(single.columns[0].cells, single.columns[-1].cells, strict=True))
    assert f"reach less than one alone ({alone['GTX 1080']} tokens)" in page


def test_a_page_follows_its_record(docs_tables, tmp_path):
    """Another figure in the record is another figure in the page: in a table, in a sentence, with its origin."""
    record = record_of("gpu")
    case = {"name": "random", "head_dim": 128, "block": 128}
    (row,) = [row for row in record["kernels"]["rows"] if case.items() <= row.items() and 0.04 < row["density"] < 0.06]
    page = (
        "A <!-- value: gpu.tflops random 128 128 forward -->1<!-- /value --> b\n\n"
        "<!-- table: gpu.kernels --><!-- /table -->\n"
    )
    row["forward"]["ours"]["tflops"] = 4321.4
    record["kernels"]["provenance"]["commit"] = "f" * 40
    (tmp_path / "gpu.json").write_text(json.dumps(record), encoding="utf-8")
    made = docs_tables.rewritten(page, docs_tables.Records(tmp_path))
    assert made.startswith("A <!-- value: gpu.tflops random 128 128 forward -->4,321<!-- /value --> b\n\n<!-- table: ")
    (line,) = [line for line in made.splitlines() if line.startswith("| random ") and "4,321" in line]
    assert [cell.strip() for cell in line.strip("|").split("|")][:4] == ["random", "128", "5 %", "4,321"]
    assert "commit fffffff" in made
    assert docs_tables.rewritten(made, docs_tables.Records(tmp_path)) == made
    record["kernels"]["provenance"]["quick"] = True
    (tmp_path / "gpu.json").write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(ValueError, match=r"gpu\.json must hold full runs, got kernels of a run with --quick"):
        docs_tables.rewritten(page, docs_tables.Records(tmp_path))


def test_a_text_is_shown_as_it_was_written(docs_tables, tmp_path):
    """In a block of its own, without blanks at the ends of lines; Markdown in it stays as it is."""
    provenance = {"quick": False}
    samples = [{"text": "no"}, {"text": "\n# a   \n  *b*\n\n"}]
    record = {"text": {"provenance": provenance, "samples": samples}}
    (tmp_path / "python_text.json").write_text(json.dumps(record), encoding="utf-8")
    made = docs_tables.rewritten("x\n\n<!-- text: python_text 1 --> <!-- /text -->\n", docs_tables.Records(tmp_path))
    assert made == "x\n\n<!-- text: python_text 1 -->\n\n```text\n# a\n  *b*\n```\n\n<!-- /text -->\n"


@pytest.mark.slow
def test_the_run_over_sources_is_read(harness, tmp_path, monkeypatch):
    """A run of `train`, killed and extended, is read as one: its curve, its times, samples that the seed decides."""
    import python_text
    from dilated_attention_pytorch.cli import main

    monkeypatch.chdir(tmp_path)
    Path("words.txt").write_text("def f(self):\n    return 1\n" * 200)
    words = "--seq-len 32 --batch 2 --dim 16 --layers 1 --heads 2 --segment-lengths 16 --dilation-rates 1 --log csv"
    first = ["train", "words.txt", "--out", "run", "--steps", "4", "--eval-every", "2", *words.split()]
    for arguments in (first, ["train", "--resume", "run", "--steps", "6", "--log", "csv"]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert not stopped.value.code
    assert harness.run(python_text.BENCHMARK, ["--quick", "--run", "run", "--out", "a.json"]) == 0
    found = json.loads(Path("a.json").read_text())["text"]
    assert [each["step"] for each in found["curve"]] == [2, 4, 6]
    assert found["bytes_seen"] == 6 * 2 * 32
    assert 0 <= found["minutes_alone"] <= found["minutes"]
    assert [each["text"].startswith(each["prompt"]) for each in found["samples"]] == [True] * len(python_text.PROMPTS)
    assert found["samples"] == [python_text.sample(Path("run"), prompt, 20) for prompt in python_text.PROMPTS]


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("<!-- table: gpu.nothing --><!-- /table -->", "a table must be of headline, .*, got 'gpu.nothing'"),
        ("<!-- text: nothing 1 --><!-- /text -->", "a text must be of python_text, got 'nothing'"),
        ("<!-- value: gpu.nothing 1 -->2<!-- /value -->", "a value must be of gpu.tflops, .*, got 'gpu.nothing'"),
        ("<!-- table: gpu.kernels -->", "every mark must have its end, got .*gpu.kernels"),
        ("<!-- /value -->", "every mark must have its end, got .*/value"),
        (
            "<!-- table: gpu.calls --> <!-- table: gpu.kernels --><!-- /table -->",
            "every mark must end before the next begins, got <!-- table: gpu.calls -->",
        ),
    ],
)
def test_a_wrong_mark_is_an_error(docs_tables, page, message):
    with pytest.raises(ValueError, match=message):
        docs_tables.rewritten(page, docs_tables.Records())


ENDS = ("", "-dark")


@pytest.mark.slow
def test_the_pictures_can_be_drawn_again(harness, tmp_path, monkeypatch):
    imread = pytest.importorskip("matplotlib.image", reason="needs matplotlib").imread
    import plots

    monkeypatch.syspath_prepend(BENCHMARKS.parent)  # examples/
    plots.main([], tmp_path)
    assert {path.stem for path in tmp_path.iterdir()} == {f"{name}{end}" for name in plots.PICTURES for end in ENDS}
    for name, (draw, _) in plots.PICTURES.items():
        light, dark = (imread(tmp_path / f"{name}{end}.png") for end in ENDS)
        assert light.shape[:2] == dark.shape[:2]
        assert light[..., :3].mean() > 0.8  # on white
        assert dark[..., 3].mean() < 0.3  # on the page's own ground
        ink = dark[dark[..., 3] > 0.9][:, :3]
        assert (ink.mean(1) > 0.25).mean() > 0.7  # and bright
        assert draw({}, tmp_path / "none.png") is None


def test_the_record_shows_what_the_ring_promises(harness):
    import ring

    record = record_of("ring")
    rings = record["rings"]["rows"]
    assert {row["ranks"] for row in rings} == {1, 2, 4, 8}
    assert all(row["sent_bytes"] == row["least_bytes"] for row in rings)
    assert all(row["largest_difference"] < 1e-4 for row in rings)
    of = {(row["pattern"], row["ranks"]): row for row in rings}
    assert of["local_window", 8]["times_less"] >= 10
    assert of["dilated_sparse 95 %", 8]["times_less"] >= 5
    for row in rings:  # n / p: so many tensors of a shard's size, and scratch
        shard = row["tokens"] / row["ranks"] * ring.HEADS * ring.HEAD_DIM * 4
        assert row["peak_bytes_of_a_rank"] <= 32 * shard + (32 << 20)
    balanced = [row["slowest_to_mean"] for row in record["balance"]["rows"] if row["placement"] == "balanced"]
    assert max(balanced) <= 1.1


def test_the_record_shows_what_was_killed():
    record = record_of("ring_faults")
    page = (BENCHMARKS.parent / "docs" / "ring.md").read_text(encoding="utf-8")
    assert sum(kind["ranks"] for name, kind in record["kinds"].items() if name.startswith("killed")) == 200
    assert record["kinds"]["hangs in attention"]["slowest_seconds"] >= record["timeout"]
    assert f"timeout of {record['timeout']:.0f} s" in page


@pytest.fixture
def memory(harness):
    import memory

    return memory


@pytest.mark.slow
@pytest.mark.skipif(not can_measure()[0], reason=can_measure()[1])
def test_quick_run_of_the_memory_benchmark(memory, harness, tmp_path, capsys):
    torch.use_deterministic_algorithms(False)
    out = tmp_path / "memory.json"
    argv = ["--quick", "--device", "cpu", "--only", "pool", "buffers", "seeds", "--out", str(out)]
    assert harness.run(memory.BENCHMARK, argv) == 0
    record = json.loads(out.read_text(encoding="utf-8"))
    claims = json.loads(capsys.readouterr().out.splitlines()[-1])["claims"]
    assert len(claims) == 14
    assert {claim["met"] for claim in claims.values()} == {None}  # such sizes are not judged
    assert {row["workload"] for row in record["pool"]["rows"]} == {"256 to 2048", "4K to 64K", "1024 alone"}
    for row in record["pool"]["rows"]:
        medians = [statistics.median(row["times"][name]) for name in ("plain", "pool")]
        assert row["speedup"] == pytest.approx(medians[0] / medians[1])
        assert row["peaks"]["plain"] > 0
    assert record["seeds"]["hierarchical"] > 0
    assert len(memory.plan_cases(memory.Setting("cpu", False))) * 2 >= 40


def test_a_pool_that_changes_the_output_ends_the_memory_benchmark(memory, harness, tmp_path, monkeypatch, capsys):
    right = memory.block_sparse_attention

    def wrong(q, k, v, pattern, **options):
        from dilated_attention_pytorch.memory import active_source

        out = right(q, k, v, pattern, **options)
        return out if active_source() is None else out + 1e-6

    monkeypatch.setattr(memory, "block_sparse_attention", wrong)
    argv = ["--quick", "--device", "cpu", "--only", "pool", "--out", str(tmp_path / "memory.json")]
    assert harness.run(memory.BENCHMARK, argv) == 1
    assert "with a pool differs from the output without by" in capsys.readouterr().err


def test_an_output_that_is_wrong_ends_the_memory_benchmark(memory, harness, tmp_path, monkeypatch, capsys):
    right = memory.block_sparse_attention
    monkeypatch.setattr(memory, "block_sparse_attention", lambda *args, **options: right(*args, **options) * 1.001)
    argv = ["--quick", "--device", "cpu", "--only", "pool", "--out", str(tmp_path / "memory.json")]
    assert harness.run(memory.BENCHMARK, argv) == 1
    assert "ours differs from float64 in" in capsys.readouterr().err


def test_the_decoding_benchmark_refuses_a_wrong_answer(harness, monkeypatch, tmp_path, capsys):
    import decode

    out = tmp_path / "decode.json"
    argv = ["--device", "cpu", "--tokens", "512", "--repeats", "1", "--out", str(out)]
    assert harness.run(decode.BENCHMARK, argv) == 0
    rows = json.loads(out.read_text())["decode"]["rows"]
    assert [row["share"] for row in rows] == [0.01, 0.1]
    assert all(row["error"] < 2e-5 and row["times_faster"] > 0 for row in rows)
    monkeypatch.setattr(decode, "decode_attention", lambda q, k, v, pattern: q)
    assert harness.run(decode.BENCHMARK, argv) == 1
    assert "512 tokens, share 0.01, batch 1: ours differs from float64 of a head by" in capsys.readouterr().err


def test_the_neighborhoods_benchmark_refuses_a_wrong_layout_and_a_wrong_answer(harness, monkeypatch, tmp_path, capsys):
    import neighborhoods

    out = tmp_path / "x.json"
    argv = ["--device", "cpu", "--quick", "--out", str(out)]
    assert harness.run(neighborhoods.BENCHMARK, argv) == 0
    record = json.loads(out.read_text())
    assert [row["bitmaps"] > 0 for row in record["layouts"]["rows"]] == [True, False]
    assert {check["contender"] for check in record["video"]["gate"]} == {"the layout", "ours", "flex"}
    assert all(row["forward"]["ms"]["ours"] > 0 for row in record["video"]["rows"])
    right = neighborhoods.block_sparse_attention
    monkeypatch.setattr(neighborhoods, "block_sparse_attention", lambda *args: right(*args) * 1.001)
    assert harness.run(neighborhoods.BENCHMARK, [*argv, "--only", "video"]) == 1
    assert "ours differs from float64 in" in capsys.readouterr().err
    others = neighborhoods.Neighborhood((4, 8, 16), (2, 4, 7), order=(2, 4, 8))
    case = neighborhoods.cases(quick=True)[0]
    layout = BlockLayout.from_pattern(others, others.total, block_size=64)
    assert neighborhoods.wrong_pairs(others, layout) == 0
    assert neighborhoods.wrong_pairs(case.pattern, layout) > 0


@pytest.mark.parametrize("wrong", [None, "ours", "composed"])
def test_the_dilated_benchmark_refuses_a_wrong_answer(harness, monkeypatch, tmp_path, capsys, wrong):
    import dilated
    import tables

    row = {way: {"ratio": 1.0} for way in ("forward", "backward", "step")}
    monkeypatch.setattr(dilated, "row_of", lambda *args: row)
    monkeypatch.setattr(dilated, "GATED", dilated.Branches((32, 64, 128), (1, 2, 4)))
    monkeypatch.setitem(tables.TABLES, "dilated_cpu.rows", lambda section: (["rows"], []))
    if wrong is not None:
        right = getattr(dilated, wrong)
        worse = lambda *args, **kwargs: right(*args, **kwargs) * (1 if "backend" in kwargs else 1.001)  # noqa: E731
        monkeypatch.setattr(dilated, wrong, worse)
    status = harness.run(dilated.BENCHMARK, ["--device", "cpu", "--quick", "--out", str(tmp_path / "x.json")])
    assert status == (wrong is not None)
    said = {"ours": "out: ours differs from float64", "composed": "the composition differs from ours", None: "skipped"}
    assert said[wrong] in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device, to interpret the kernels")
def test_tuning_tries_every_kernel_and_refuses_a_wrong_one(harness, monkeypatch, capsys):
    pytest.importorskip("triton", reason="needs triton, which there is for Linux alone")
    import tune
    from dilated_attention_pytorch.kernels.configs import Config

    candidates = [Config(64, 64, 4, 1), Config(128, 64, 4, 1)]
    monkeypatch.setattr(tune, "PLAIN", candidates)
    times = iter(range(100, 0, -1))  # the last one is the fastest
    monkeypatch.setattr(
        tune, "interleave", lambda runs, rounds, device: {name: Timing((float(next(times)),)) for name in runs}
    )
    job = harness.Job(Namespace(quick=True), "cpu")
    trial = tune.Trial(job.gate, rounds=1, tokens=256, device="cpu")
    rows = tune.tune_plain(job, trial, 16, torch.float32)
    assert [row["kernel"].partition(",")[0] for row in rows] == ["forward", "dq", "dkv"]
    assert all(row["best"] == candidates[1] and len(row["seconds"]) == 2 for row in rows)
    assert "Configs(Config(128, 64, 4, 1), Config(128, 64, 4, 1), Config(128, 64, 4, 1))" in capsys.readouterr().err
    problem = tune.Problem(16, torch.float32, 256, "cpu")
    with pytest.raises(harness.GateError, match=r"forward: \(1, 2\) differs from plain PyTorch"):
        trial.seconds("forward", {(1, 2): lambda: (problem.out * 2, problem.lse)}, problem.want["forward"])
    with pytest.raises(harness.GateError, match="the warp-specialised kernels cannot run on this GPU"):
        problem.hopper("forward", (64, 1, 2))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device: the launches are stubs")
def test_what_a_call_costs_the_host(tmp_path):
    pytest.importorskip("triton", reason="needs triton, which there is for Linux alone")
    env = {**os.environ, "TRITON_INTERPRET": "0"}  # in this process the kernels are made for the interpreter
    command = [sys.executable, "-W", "ignore", BENCHMARKS / "host.py", "--quick", "--out", tmp_path / "host.json"]
    subprocess.run(command, check=True, env=env, capture_output=True)
    found = json.loads((tmp_path / "host.json").read_text())["calls"]["microseconds"]
    ways = ("forward, pattern", "forward, layout", "forward in training", "backward")
    assert list(found) == [*ways, *(f"{way}, operator" for way in ways)]
    assert all(value > 1 for value in found.values())


@pytest.mark.slow
def test_quick_run_of_whole_models(harness, tmp_path, capsys):
    import models

    out, trace = tmp_path / "x.json", tmp_path / "trace.json"
    argv = ["--quick", "--device", "cpu", "--out", str(out), "--profile", str(trace)]
    assert harness.run(models.BENCHMARK, argv) == 0
    record, said = json.loads(out.read_text(encoding="utf-8")), capsys.readouterr()
    assert list(record) == ["prefill", "generation", "training", "decoder", "encoder"]
    for name, kinds in (("prefill", 1), ("generation", 1), ("training", 1), ("decoder", 2), ("encoder", 2)):
        assert [set(row["seconds"]) for row in record[name]["rows"]] == [{"ours", "sdpa"}] * 2 * kinds
    assert out.with_suffix(".png").stat().st_size > 10_000
    for name in record:
        assert f"models_cpu.{name}" in said.out
    assert "| tokens | what     | ours, ms | sdpa, ms | × sdpa | peak, GiB | sdpa, GiB |" in said.out
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert "a step: attention" in said.err


def test_a_wrong_model_is_not_timed(harness, tmp_path, monkeypatch, capsys):
    import models

    register = models.register
    monkeypatch.setattr(models, "register", lambda name, pattern: register(name, SlidingWindow(30, 0)))
    argv = ["--quick", "--device", "cpu", "--only", "prefill", "--out", str(tmp_path / "x.json")]
    assert harness.run(models.BENCHMARK, argv) == 1
    assert "96 tokens, logits: ours differs from a dense mask" in capsys.readouterr().err


def test_without_transformers_models_of_plain_pytorch_are_left(harness, tmp_path, monkeypatch, capsys):
    import models

    monkeypatch.setattr(models, "LlamaForCausalLM", None)
    out = tmp_path / "x.json"
    argv = ["--quick", "--device", "cpu", "--brief", "--only", "training", "encoder", "--out", str(out)]
    assert harness.run(models.BENCHMARK, argv) == 0
    record, said = json.loads(out.read_text(encoding="utf-8")), capsys.readouterr()
    assert list(record) == ["encoder"]
    assert "training: skipped, it needs transformers" in said.err
    assert {check["case"] for check in record["encoder"]["gate"]} == {
        "96 tokens, outputs",
        "96 tokens, gradient of a weight",
    }


def test_a_wrong_plain_model_is_not_timed(harness, tmp_path, monkeypatch, capsys):
    import models

    dense_mask = models.dense_mask
    monkeypatch.setattr(models, "dense_mask", lambda pattern, *rest: dense_mask(SlidingWindow(30, 0), *rest))
    argv = ["--quick", "--device", "cpu", "--only", "decoder", "--out", str(tmp_path / "x.json")]
    assert harness.run(models.BENCHMARK, argv) == 1
    assert "96 tokens, outputs: ours differs from a dense mask" in capsys.readouterr().err
