"""What pages show beside Python blocks (tests/test_docs.py): notebooks are run, commands as far as is cheap.

Of a command it is checked that there is such a target, script, option or extra; `dilated-attention plan` is run. The
versions agree, the reference has every public name, and cited figures are those of the records.
"""

import json
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path

import pytest

import dilated_attention_pytorch
from dilated_attention_pytorch import compat
from dilated_attention_pytorch.cli import main
from tests.test_public_api import ELSEWHERE

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
FENCED = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
SHELL = ("bash", "")
TOOLS = ("dilated-attention", "make", "pip", "pytest", "python", "torchrun")
INLINE = re.compile(rf"`((?:[A-Z_]+=\S+ )?(?:{'|'.join(TOOLS)}) [^`]+)`")


def name_of(path):
    return str(path.relative_to(ROOT))


def blocks(path, language):
    return [code for kind, code in FENCED.findall(path.read_text()) if kind == language]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells)  # made by `make docs`, not kept
    namespace = {}
    for cell in cells:
        code = "".join(line for line in cell["source"] if not line.startswith("%matplotlib"))
        exec(compile(code, str(path), "exec"), namespace)


def test_there_are_notebooks():
    assert len(NOTEBOOKS) == 3


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_every_block_is_of_a_kind_that_is_run(path):
    assert {kind for kind, _ in FENCED.findall(path.read_text())} <= {"python", *SHELL}


SHOWN = sorted(
    {
        (name_of(path), command)
        for path in PAGES
        for command in [
            *(line for kind in SHELL for code in blocks(path, kind) for line in code.splitlines() if line),
            *INLINE.findall(path.read_text()),
        ]
    }
)


@pytest.mark.parametrize(("page", "command"), SHOWN, ids=[f"{page}: {command}" for page, command in SHOWN])
def test_command_is_right(page, command, capsys):
    for part in command.split("&&"):
        words = [word for word in shlex.split(part, comments=True) if "…" not in word]
        check_command([word for word in words if not re.fullmatch(r"[A-Z_]+=.*", word)], capsys)


def check_command(words, capsys):
    tool, *rest = words
    options = [word.split("=")[0] for word in rest if word.startswith("--")]
    if tool == "make":
        assert set(rest) <= makefile_targets()
    elif tool == "pip":
        assert rest[0] in ("install", "uninstall")
        extras = {extra for word in rest for found in re.findall(r"\[(.*)\]", word) for extra in found.split(",")}
        assert extras <= set(project()["optional-dependencies"])
    elif tool == "python" and rest[0].endswith(".py"):
        source = (ROOT / rest[0]).read_text()
        assert all(f'"{option}"' in source for option in options)
    elif tool == "dilated-attention":
        help_text = command_help(rest[0], capsys)
        assert all(re.search(rf"{option}\b", help_text) for option in options)
        if rest[0] == "plan" and "--tokens" in rest:
            assert exit_status(rest) == 0
    else:
        assert tool in TOOLS
        assert not rest or rest[0] in ("-m", "--max-restarts")


@cache
def makefile_targets():
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@cache
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def command_help(command, capsys):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")  # no option is cut off
        patch.setenv("TERMINAL_WIDTH", "200")
        assert exit_status([command, "--help"]) == 0
    return capsys.readouterr().out


def exit_status(arguments):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    return stopped.value.code or 0


def test_the_readme_shows_the_two_commands_first():
    assert [line.split("#")[0].strip() for line in blocks(ROOT / "README.md", "bash")[0].splitlines()] == [
        "make demo",
        "make test",
    ]


def test_workflows_call_targets_of_the_makefile():
    called = set()
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        called |= set(re.findall(r"run: make ([\w-]+)", path.read_text()))
    assert {"demo", "docs", "release-check", "test"} == called <= makefile_targets()


def test_one_version_and_the_same_pythons_everywhere():
    version = re.escape(dilated_attention_pytorch.__version__)
    assert project()["dynamic"] == ["version"]
    assert re.search(rf"^version: {version}$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == version.replace("\\", "")
    classified = {c.split(" :: ")[-1] for c in project()["classifiers"] if re.search(r":: 3\.\d+$", c)}
    tested = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for where in (tested, makefile, (ROOT / "docs" / "policy.md").read_text()):
        assert classified == set(re.findall(r"3\.1\d\b", where))


def test_the_reference_has_every_public_name_once():
    pages = [path.read_text() for path in (ROOT / "docs" / "api").glob("*.md")]
    documented = [
        name for page in pages for name in re.findall(r"^::: dilated_attention_pytorch\.([\w.]+)$", page, re.M)
    ]
    assert len(documented) == len(set(documented))
    names = {name.rsplit(".", 1)[-1] for name in documented}
    assert {*dilated_attention_pytorch.__all__, *ELSEWHERE} <= names
    for old in compat.__all__:
        assert getattr(compat, old).__name__ in names


def test_the_table_of_old_names_has_them_all():
    rows = (ROOT / "docs" / "names.md").read_text()
    assert all(f"| `{old}` | `{getattr(compat, old).__name__}` |" in rows for old in compat.__all__)


def test_the_drawings_can_be_made_again(tmp_path):
    namespace = {"__name__": "drawings"}
    exec((ROOT / "docs" / "drawings.py").read_text(), namespace)
    namespace["draw"](tmp_path)
    concepts = (ROOT / "docs" / "concepts.md").read_text()
    for made in tmp_path.iterdir():
        assert f"(images/{made.name})" in concepts
    assert len(list(tmp_path.iterdir())) == concepts.count("(images/")


def record(name):
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())


def test_cited_figures_are_those_of_the_records():
    """Pages beside docs/performance.md (tests/test_benchmarks.py) cite some; a new record asks for new sentences."""
    gpu, perplexity = record("gpu.json"), record("perplexity.json")["rows"]
    kernels = {(row["name"], row["head_dim"], row["block"]): row for row in gpu["kernels"]}
    rate = {key: f"{row['forward']['ours']['tflops']:.0f}" for key, row in kernels.items()}

    def against_flex(head_dim):
        row = kernels["random", head_dim, 128]
        ways = (row["forward"], row["backward"])
        return " | ".join(f"{way['ours']['tflops']:.0f} | {way['flex']['ratio']:.2f}" for way in ways)

    def against_cudnn(way):
        return f"{kernels['causal', 128, 128][way]['cudnn']['ratio']:.2f}"

    def short(way, unit=""):
        times = {row["name"]: row[f"{way}_ms"] for row in gpu["seeds"] if row["tokens"] == 4096}
        dense = times.pop("dense")
        return f"{min(times.values()):.2f}–{max(times.values()):.2f}{unit} against {dense:.2f}"

    def raised(rule, spread, block, density):
        key = {"rule": rule, "spread": spread, "block": block, "density": density, "tokens": 2048}
        rows = {row["text"]: row for row in perplexity if all(row[name] == value for name, value in key.items())}
        return [f"{100 * (rows[text]['ratio'] - 1):.2g} %" for text in ("gpl-3-lgpl-2.1.txt", "argparse.py")]

    small = f"{rate['random', 64, 16]} and {rate['random', 64, 32]} TFLOP/s at D=64, where blocks of 128 give "
    host = {call["name"]: call["microseconds"] for call in gpu["calls"]}
    sparse_1 = f"{kernels['random 1 %', 128, 128]['forward']['flex']['ratio']:.2f} × FlexAttention"
    selection = [100 * row["ratio"] for row in record("adaptive_gpu.json")["selection"]]
    decoding = [
        f"| {row['tokens']:,} | {row['share']:.0%} | {1e3 * row['seconds']['ours']:.1f} | {row['times_faster']:.0f} |"
        for row in record("decode_cpu.json")["rows"]
    ]
    decoding_gpu = [
        f"| {row['tokens']:,} | {100 * row['share']:.0f} % | {row['batch']} | "
        f"{1e6 * row['seconds']['ours, graph']:.0f} | {row['times_faster']:.0f} | "
        f"{row['bandwidth'] / 1e12:.2f} | {100 * row['share_of_copy_limit']:.0f} % |"
        for row in record("decode_gpu.json")["rows"]
    ]
    choosing = [
        f"| {row['scorer']} | {row['spread']} | {row['block'][0]} × {row['block'][1]} | {row['select_ms']:.2f} | "
        f"{row['select_device_ms']:.2f} | {row['attend_ms']:.2f} | {100 * row['ratio']:.0f} % |"
        for row in record("adaptive_gpu.json")["selection"]
    ]
    on_gpu = record("memory_cuda.json")
    pool_gpu = [
        f"| {row['workload']} | {'yes' if row['training'] else 'no'} | {row['speedup']:.2f} |"
        for row in on_gpu["pool"]["rows"]
    ]
    worst = 100 * on_gpu["summary"]["planned peak, worst error"]["value"]
    memory = record("memory_cpu.json")
    pool = [
        f"| {row['workload']} | {'yes' if row['training'] else 'no'} | {row['speedup']:.2f} | "
        f"{100 * row['hit_rate']:.0f} % | {1 + row['extra_peak']:.2f} |"
        for row in memory["pool"]["rows"]
    ]
    found = {claim: result["value"] for claim, result in memory["summary"].items()}
    host_alone = record("host.json")["microseconds"]
    plain = [name for name in host_alone if not name.endswith(", operator")]
    cited = {
        "compare.md": [
            *(f"| D={head_dim} | {against_flex(head_dim)} |" for head_dim in (128, 64)),
            small + rate["random", 64, 128],
            f"our kernel {against_cudnn('forward')} × cuDNN forward, {against_cudnn('backward')} backward",
            "| {:.0f} µs, {:.0f} with a pattern in place of a layout, {:.0f} forward and backward:".format(
                *(host[name] for name in ("ours", "ours, a pattern", "ours, forward and backward"))
            ),
            f"SDPA ({host['sdpa']:.0f} µs, {host['sdpa, forward and backward']:.0f})",
            sparse_1,
            f"takes {min(selection):.0f}–{max(selection):.0f} % of the forward",
        ],
        "decoding.md": [*(line.replace("%", " %", 1) for line in decoding), *decoding_gpu],
        "adaptive.md": [
            *choosing,
            "dense {} right, closed by the schedule {}, sparse from the first step on {}.".format(
                *(f"{100 * row['accuracy']:.1f} %" for row in record("recall_schedule.json")["rows"])
            ),
        ],
        "performance.md": [
            f"| {name} | {host_alone[f'{name}, operator']:.0f} | {host_alone[name]:.0f} |" for name in plain
        ],
        "memory.md": [
            *pool,
            *pool_gpu,
            f"On an H200, {len(on_gpu['plan']['rows'])} configurations: the worst is {worst:.1f} % off",
            f"{len(memory['plan']['rows'])} configurations, forward and training: the worst is "
            f"{100 * found['planned peak, worst error']:.1f} % off",
            f"differ by {100 * found['two configurations, difference']:.1f} %",
            f"takes {found['hierarchical, times the others']:.2f} × the memory",
            f"{memory['buffers']['rows'][-1]['speedup']:.1f} × as fast as `torch.empty`",
        ],
        "choosing.md": [
            f"{rate['random', 128, 128]} TFLOP/s forward at 5 % of 32K tokens, D=128",
            f"D=64: {rate['random', 64, 64]} TFLOP/s against {rate['random', 64, 128]} for 128",
            f"D=64: {rate['random', 64, 32]} and {rate['random', 64, 16]} TFLOP/s",
            sparse_1,
            f"forward takes {short('forward', ' ms')}, and a backward {short('backward')} (",
            "by {} on prose and {} on source code;".format(*raised("sink + local", "–", [64, 64], 0.25)),
            'chosen by `"patches"` by {} and {}.'.format(*raised("patches", "even", [16, 16], 0.25)),
            "it is {} and {} against".format(*raised("sink + local", "–", [64, 64], 0.125)),
            "against {} and {}.".format(*raised("patches", "even", [16, 16], 0.125)),
            "cost {} and {}, no less".format(*raised("antidiagonal", "same", [64, 64], 0.25)),
        ],
        "faq.md": [f"{rate['random', 64, 16]} TFLOP/s against {rate['random', 64, 128]} for blocks of 128 at D=64"],
    }
    for page, phrases in cited.items():
        text = " ".join((ROOT / "docs" / page).read_text().split())
        assert [phrase for phrase in phrases if phrase not in text] == [], page
