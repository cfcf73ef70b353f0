"""Every Python block of the README and the docs runs as it stands, top to bottom in one namespace a file."""

import re
import shlex
from pathlib import Path

import pytest

from dilated_attention_pytorch import BlockLayout, patterns
from dilated_attention_pytorch.patterns.naming import pattern_of
from dilated_attention_pytorch.viz import block_states

ROOT = Path(__file__).parent.parent
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in FILES if blocks(p)], ids=lambda p: p.name)
def test_code_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for code in blocks(path):
        exec(compile(code, str(path), "exec"), namespace)
    if path.name == "README.md":
        assert namespace["out"].shape == namespace["q"].shape


@pytest.mark.parametrize("path", sorted({*FILES, *ROOT.glob("*.md")}), ids=lambda p: p.name)
def test_links_and_pictures_exist(path):
    text = path.read_text()
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    missing = [target for target in targets if not (path.parent / target).exists()]
    assert not missing


def test_the_readme_names_the_two_commands_and_the_makefile_has_them():
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    for target in ("demo", "test"):
        assert f"make {target}" in readme
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    assert "make test" in (ROOT / ".ci" / "run").read_text()


COMMANDS = re.findall(r"^ *(?:\$ )?dilated-attention (\w+.*)$", "\n".join(p.read_text() for p in FILES), re.MULTILINE)


@pytest.mark.parametrize("line", sorted(set(COMMANDS)))
def test_commands_have_these_arguments(line, tmp_path, monkeypatch):
    """They are read, and not run."""
    from typer.main import get_command

    from dilated_attention_pytorch.cli.app import app

    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("words")
    name, *arguments = shlex.split(line.partition(" > ")[0], comments=True)
    command = get_command(app).commands[name]
    read = command.make_context(name, arguments).params.get("pattern")
    for pattern in [read] if isinstance(read, str) else read or ():
        pattern_of(pattern)


DRAWN = [
    drawn
    for page in ("patterns.md", "presets.md")
    for drawn in re.findall(r"^## `(.*)`\n\n.*\n\n((?:    .*\n)+)", (ROOT / "docs" / page).read_text(), re.MULTILINE)
]


@pytest.mark.parametrize(("expression", "drawing"), DRAWN, ids=[expression for expression, _ in DRAWN])
def test_patterns_are_drawn_as_they_are(expression, drawing):
    pattern = eval(expression, {}, vars(patterns))
    states = block_states(BlockLayout.from_pattern(pattern, 128, block_size=16)).tolist()
    assert [" ".join("·◪■"[state] for state in row) for row in states] == [
        line.strip() for line in drawing.splitlines()
    ]


def test_every_pattern_is_drawn():
    assert len(DRAWN) == 36
