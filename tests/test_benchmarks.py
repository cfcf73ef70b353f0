"""The benchmark: it runs, records what its numbers depend on, and times nothing that is wrong."""

import json
import os
import statistics
import subprocess
import sys
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
def cpu(monkeypatch):
    """The module of the command, with sizes that take a moment."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import cpu

    tiny = replace(cpu.QUICK, forward={256: 1}, training={256: 1}, flat={256: 1}, whole=256, matmul_side=64)
    monkeypatch.setattr(cpu, "QUICK", tiny)
    monkeypatch.setattr(cpu.Probes, "floats", 1 << 10)
    return cpu


@pytest.fixture
def cases(cpu):
    import cases

    return cases


def test_quick_run(tmp_path):
    out = tmp_path / "made" / "cpu.json"
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "cpu.py", "--quick", "--skip-flex", "--out", out],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        # Threads of a busy machine mostly wait for each other.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text(encoding="utf-8"))
    assert json.loads(done.stdout.splitlines()[-1]) == record["summary"]
    assert str(Path.home()) not in out.read_text(encoding="utf-8")
    assert out.with_suffix(".png").stat().st_size > 10_000

    machine = record["environment"]
    assert machine["torch"] == torch.__version__
    assert machine["threads"] == 1
    assert machine["thread_settings"]["OMP_NUM_THREADS"] == "1"
    assert all(machine[name] for name in ("library", "commit", "date", "python", "system", "cpu"))
    assert record["skip_flex"]
    assert "--skip-flex" in record["forward"]["flex_note"]

    assert {check["case"].split(",")[0] for check in record["gate"]} == {"forward", "training", "flat"}
    assert all(0 <= check["error"] <= check["tolerance"] for check in record["gate"])

    forward, training = record["forward"]["rows"], record["training"]["rows"]
    assert [(row["tokens"], row["dense"]["extrapolated"]) for row in training] == [(2048, False), (4096, True)]
    assert {row["tokens"] for row in forward if row["dense"]["extrapolated"]} == {4096}
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
    assert set(record["summary"]["targets"]) == {"full_density_ratio", "training_ratio"} | memory | flat


def moved(function, offset):
    """The function with one number of its result moved."""

    def wrong(*args, **kwargs):
        out = function(*args, **kwargs)
        return out + torch.zeros_like(out).index_fill_(1, torch.tensor([1]), offset)

    return wrong


@pytest.mark.parametrize("section", ["forward", "training"])
@pytest.mark.parametrize("contender", ["block_sparse_attention", "scaled_dot_product_attention"])
@pytest.mark.parametrize("offset", [1e-3, float("nan")])
def test_a_wrong_contender_ends_the_run_before_it_is_timed(
    cpu, monkeypatch, tmp_path, capsys, section, contender, offset
):
    def never(*args):
        pytest.fail("timed")

    monkeypatch.setattr(cpu, contender, moved(getattr(cpu, contender), offset))
    monkeypatch.setattr(cpu, "interleave", never)
    assert cpu.main(["--quick", "--skip-flex", "--only", section, "--out", str(tmp_path / "x.json")]) == 1
    name = "ours 0.1" if contender == "block_sparse_attention" else "dense"
    assert f": {name} differs from float64 in 2 query blocks by " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("which", ["dq", "dk", "dv"])
def test_a_wrong_gradient_ends_the_run(cpu, monkeypatch, tmp_path, capsys, which):
    def wrong(*tensors_and_layout):
        *tensors, layout = tensors_and_layout
        place = ["dq", "dk", "dv"].index(which)
        tensors[place] = tensors[place] * 1.0
        tensors[place].register_hook(lambda grad: grad * 1.001)
        return block_sparse_attention(*tensors, layout)

    monkeypatch.setattr(cpu, "block_sparse_attention", wrong)
    assert cpu.main(["--quick", "--only", "training", "--out", str(tmp_path / "x.json")]) == 1
    assert f"training, 256 tokens, {which}: ours 0.1 differs" in capsys.readouterr().err


def stand_in(q, k, v, block_mask):
    """What compiled FlexAttention computes. (Not compiled, it does not look at the blocks, only at a mask_mod.)"""
    mask = block_mask.to_dense().bool().repeat_interleave(128, dim=2).repeat_interleave(128, dim=3)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask)


def test_a_wrong_flex_ends_the_run(cpu, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch, "compile", lambda function, **kwargs: function)
    monkeypatch.setattr(cpu, "flex_attention", stand_in)
    run = ["--quick", "--only", "forward", "--out", str(tmp_path / "x.json")]
    assert cpu.main(run) == 0
    record = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    row = record["forward"]["rows"][0]
    assert row["flex_ratio"] == pytest.approx(row["flex"]["median"] / row["ours"]["median"])
    assert "compile_seconds" in record["forward"]["flex_compile"][0]
    assert "flex_ratio" in record["summary"]["targets"]
    monkeypatch.setattr(cpu, "flex_attention", lambda q, k, v, block_mask: scaled_dot_product_attention(q, k, v))
    assert cpu.main(run) == 1
    assert "flex 0.1 differs" in capsys.readouterr().err


def test_a_part_does_not_replace_the_full_record(cpu):
    def name(*argv):
        return cpu.arguments(argv).out.relative_to(BENCHMARKS).as_posix()

    assert name() == "results/cpu.json"
    assert name("--quick", "--only", "flat") == "results/cpu-quick-flat.json"


def test_targets_are_judged_by_the_worst_case_and_only_in_a_full_run(cpu):
    def memory(ratio, quick=False):
        row = {"kind": "forward", "ratio": ratio}
        record = {"memory": {"rows": [row]}, "quick": quick, "skip_flex": False, "gate": [], "seconds": 0}
        return cpu.summarise({**record, "environment": {}})["targets"]["memory_forward"]["met"]

    assert [memory(1.15), memory(1.16), memory(1.0, quick=True)] == [True, False, None]
    rows = [{"dense_ratio": ratio, "matmul_gflops": 1.0} for ratio in (0.9, 0.6, 0.8)]
    record = {"training": {"rows": rows}, "quick": False, "skip_flex": False, "gate": [], "seconds": 0}
    found = cpu.summarise({**record, "environment": {}})["targets"]["training_ratio"]
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


def test_the_commit_says_when_the_tree_is_dirty(cases, monkeypatch, tmp_path):
    def git(*args):
        identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        subprocess.run(["git", "-C", tmp_path, *identity, *args], check=True, capture_output=True)

    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    monkeypatch.setattr(cases, "HERE", tmp_path / "benchmarks")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert cases.commit() == "unknown"
    git("init")
    git("commit", "--allow-empty", "-m", "first")
    (results / "cpu.json").write_text("{}")
    clean = cases.commit()
    assert len(clean) == 40
    (tmp_path / "new.py").write_text("")
    assert cases.commit() == f"{clean}-dirty"


def test_the_gpu_figures_in_the_docs_are_those_of_the_record(tmp_path):
    """Every row of the page's GPU table, number for number; and the report of the record can be made."""
    root = BENCHMARKS.parent
    record = json.loads((BENCHMARKS / "results" / "gpu.json").read_text(encoding="utf-8"))
    page = (root / "docs" / "performance.md").read_text(encoding="utf-8").partition("## GPU")[2]
    page, _, dilated = page.partition("## Dilated attention")
    lines = [
        [cell.strip() for cell in line.strip("| ").split("|")] for line in page.splitlines() if line.startswith("| ")
    ]
    table = [cells for cells in lines if len(cells) == 9 and cells[1].isdigit() and cells[2].endswith("%")]
    assert len(table) == len(record["kernels"])
    for row in record["options"]:
        cells = [row["name"], str(row["head_dim"]), row["option"].replace("alibi", "ALiBi slopes")]
        for way in ("forward", "backward"):
            flex = row.get(f"{way}, flex")
            plain = f"{row[f'{way}, plain kernels']:.2f}"
            cells += [f"{row[f'{way}_ms']:.2f}", "–" if flex is None else f"{flex:.2f}", plain]
        assert cells in lines

    def shown(row, way):
        flex = row[way].get("flex") or row[way].get("flex, max-autotune")
        ratios = [f"{rival['ratio']:.2f}" if rival else "" for rival in (flex, row[way].get("cudnn"))]
        return [f"{row[way]['ours']['tflops']:.0f}", *ratios]

    made = {
        (row["name"].split(" %")[0].removesuffix(" 1").removesuffix(" 20").removesuffix(" 50"), str(row["head_dim"]),
         row["block"], f"{100 * row['density']:.0f} %"): [*shown(row, "forward"), *shown(row, "backward")]
        for row in record["kernels"]
    }  # fmt: skip
    for layout, head_dim, density, *numbers in table:
        name, _, block = layout.removesuffix(" (16K, our kernel)").partition(", blocks of ")
        cut = [number.replace(" (autotuned)", "").replace("–", "") for number in numbers]
        assert cut == made[name, head_dim, int(block or 128), density]
    for row in json.loads((BENCHMARKS / "results" / "dilated.json").read_text(encoding="utf-8"))["rows"]:
        cells = [f"{row['tokens']:,}", str(row["head_dim"]), "yes" if row["causal"] else "no"]
        for way in ("forward", "backward"):
            cells += [f"{row[way]['tflops']:.0f}", f"{row[way]['ratio']:.2f}"]
        assert f"| {' | '.join(cells)} | {row['step']['ratio']:.2f} | " in dilated
    command = [sys.executable, BENCHMARKS / "gpu_report.py", tmp_path / "gpu.json"]
    (tmp_path / "gpu.json").write_text(json.dumps(record), encoding="utf-8")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"{record['kernels'][0]['forward']['ours']['tflops']:.0f}" in done.stdout
    assert (tmp_path / "gpu.png").stat().st_size > 10_000


def test_the_ring_figures_in_the_docs_are_those_of_the_record(monkeypatch):
    """The page's table; and that the record shows what the ring promises."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import ring

    page = (BENCHMARKS.parent / "docs" / "ring.md").read_text(encoding="utf-8")
    record = json.loads((BENCHMARKS / "results" / "ring.json").read_text(encoding="utf-8"))
    assert "\n" + "\n".join(ring.table(record)) + "\n\n" in page
    assert {row["ranks"] for row in record["rings"]} == {1, 2, 4, 8}
    assert all(row["sent_bytes"] == row["least_bytes"] for row in record["rings"])
    assert all(row["largest_difference"] < 1e-4 for row in record["rings"])
    of = {(row["pattern"], row["ranks"]): row for row in record["rings"]}
    assert of["local_window", 8]["times_less"] >= 10
    assert of["dilated_sparse 95 %", 8]["times_less"] >= 5
    for row in record["rings"]:  # n / p: so many tensors of a shard's size, and scratch
        shard = row["tokens"] / row["ranks"] * ring.HEADS * ring.HEAD_DIM * 4
        assert row["peak_bytes_of_a_rank"] <= 32 * shard + (32 << 20)
    balance = {(row["pattern"], row["ranks"], row["placement"]): row["slowest_to_mean"] for row in record["balance"]}
    assert max(slowest for (_, _, kind), slowest in balance.items() if kind == "balanced") <= 1.1
    told = f"{balance['causal', 8, 'contiguous']:.2f} × the mean contiguous, {balance['causal', 8, 'balanced']:.2f} ×"
    assert told in page


def test_the_fates_in_the_docs_are_those_of_the_record():
    page = (BENCHMARKS.parent / "docs" / "ring.md").read_text(encoding="utf-8")
    record = json.loads((BENCHMARKS / "results" / "ring_faults.json").read_text(encoding="utf-8"))
    kinds = record["kinds"]
    assert sum(kind["ranks"] for name, kind in kinds.items() if name.startswith("killed")) == 200
    for name, kind in kinds.items():
        assert f"| {name} | {kind['ranks']} | {kind['slowest_seconds']:.1f} |" in page
    assert kinds["hangs in attention"]["slowest_seconds"] >= record["timeout"]
    assert f"timeout of {record['timeout']:.0f} s" in page


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import memory

    return memory


@pytest.mark.skipif(not can_measure()[0], reason=can_measure()[1])
def test_quick_run_of_the_memory_benchmark(memory, tmp_path, capsys):
    torch.use_deterministic_algorithms(False)
    out = tmp_path / "memory.json"
    argv = ["--quick", "--device", "cpu", "--only", "pool", "buffers", "seeds", "--out", str(out)]
    assert memory.main(argv) == 0
    record = json.loads(out.read_text(encoding="utf-8"))
    printed = capsys.readouterr().out
    assert json.loads(printed.splitlines()[-1]) == record["summary"]
    assert {row["workload"] for row in record["pool"]["rows"]} == {"256 to 2048", "4K to 64K", "1024 alone"}
    for row in record["pool"]["rows"]:
        medians = [statistics.median(row["times"][name]) for name in ("plain", "pool")]
        assert row["speedup"] == pytest.approx(medians[0] / medians[1])
        assert row["peaks"]["plain"] > 0
    assert record["seeds"]["hierarchical"] > 0
    assert "quick: sizes that mean nothing" in printed
    assert len(memory.plan_cases(memory.Setting("cpu", False))) * 2 >= 40


def test_a_pool_that_changes_the_output_ends_the_memory_benchmark(memory, tmp_path, monkeypatch, capsys):
    right = memory.block_sparse_attention

    def wrong(q, k, v, pattern, **options):
        from dilated_attention_pytorch.memory import active_source

        out = right(q, k, v, pattern, **options)
        return out if active_source() is None else out + 1e-6

    monkeypatch.setattr(memory, "block_sparse_attention", wrong)
    argv = ["--quick", "--device", "cpu", "--only", "pool", "--out", str(tmp_path / "memory.json")]
    assert memory.main(argv) == 1
    assert "with a pool the output differs" in capsys.readouterr().err


def test_an_output_that_is_wrong_ends_the_memory_benchmark(memory, tmp_path, monkeypatch, capsys):
    right = memory.block_sparse_attention
    monkeypatch.setattr(memory, "block_sparse_attention", lambda *args, **options: right(*args, **options) * 1.001)
    argv = ["--quick", "--device", "cpu", "--only", "pool", "--out", str(tmp_path / "memory.json")]
    assert memory.main(argv) == 1
    assert "off by" in capsys.readouterr().err


def test_the_decoding_benchmark_refuses_a_wrong_answer(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import decode

    out = tmp_path / "decode.json"
    monkeypatch.setattr(sys, "argv", ["decode.py", "--tokens", "512", "--repeats", "1", "--out", str(out)])
    decode.main()
    rows = json.loads(out.read_text())["rows"]
    assert [row["share"] for row in rows] == [0.01, 0.1]
    assert all(row["error"] < 2e-5 and row["times_faster"] > 0 for row in rows)
    monkeypatch.setattr(decode, "decode_attention", lambda q, k, v, pattern: q)
    with pytest.raises(SystemExit, match=r"wrong: 512 tokens, share 0.01: error"):
        decode.main()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device, to interpret the kernels")
def test_tuning_tries_every_kernel_and_refuses_a_wrong_one(monkeypatch, capsys):
    pytest.importorskip("triton", reason="needs triton, which there is for Linux alone")
    monkeypatch.syspath_prepend(BENCHMARKS)
    import tune
    from dilated_attention_pytorch.kernels.configs import Config

    candidates = [Config(64, 64, 4, 1), Config(128, 64, 4, 1)]
    monkeypatch.setattr(tune, "PLAIN", candidates)
    seconds = iter(range(100, 0, -1))  # the last one is the fastest
    timing = {"seconds": lambda run: next(seconds), "rounds": 1}
    rows = tune.tune_plain(16, torch.float32, 256, "cpu", **timing)
    assert [row["kernel"].partition(",")[0] for row in rows] == ["forward", "dq", "dkv"]
    assert all(row["best"] == candidates[1] and len(row["seconds"]) == 2 for row in rows)
    assert "Configs(Config(128, 64, 4, 1), Config(128, 64, 4, 1), Config(128, 64, 4, 1))" in capsys.readouterr().out
    problem = tune.Problem(16, torch.float32, 256, "cpu")
    with pytest.raises(tune.GateError, match="is off by"):
        tune.tried({"wrong": lambda: (problem.out * 2, problem.lse)}, problem.want["forward"], **timing)
    with pytest.raises(tune.GateError, match="the warp-specialised kernels cannot run on this GPU"):
        problem.hopper("forward", (64, 1, 2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device: the launches are stubs")
def test_what_a_call_costs_the_host(tmp_path):
    pytest.importorskip("triton", reason="needs triton, which there is for Linux alone")
    env = {**os.environ, "TRITON_INTERPRET": "0"}  # in this process the kernels are made for the interpreter
    command = [sys.executable, "-W", "ignore", BENCHMARKS / "host.py", "--calls", "20", "--out", tmp_path / "host.json"]
    subprocess.run(command, check=True, env=env, capture_output=True)
    found = json.loads((tmp_path / "host.json").read_text())["microseconds"]
    ways = ("forward, pattern", "forward, layout", "forward in training", "backward")
    assert list(found) == [*ways, *(f"{way}, operator" for way in ways)]
    assert all(value > 1 for value in found.values())
