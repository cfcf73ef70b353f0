"""Build wheel and sdist, look into them, and use the wheel where nothing else of this repository is.

    python tools/release_check.py python3.11 python3.12 python3.13

Interpreters that are not there are named and left out; none at all is an error. Needs `build`; torch is installed
once an interpreter, in the version of constraints.txt.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = "dilated_attention_pytorch"

# What an installed wheel must do with torch alone: import, attend forward and backward, and say what a command needs.
USE = """
import sys, torch, dilated_attention_pytorch as dap
from importlib.metadata import version
assert dap.__version__ == version("dilated-attention-pytorch") == sys.argv[1], dap.__version__
assert "site-packages" in dap.__file__, dap.__file__
assert not {"typer", "matplotlib", "safetensors"} & set(sys.modules)
torch.manual_seed(0)
q, k, v = (torch.randn(1, 200, 2, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
out = dap.block_sparse_attention(q, k, v, dap.SlidingWindow(30, 0))
place = torch.arange(200)
near = (place[:, None] >= place) & (place[:, None] - place <= 30)
scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 4
dense = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~near, -torch.inf).softmax(-1), v)
assert torch.allclose(out, dense, rtol=0, atol=1e-10)
for mine, want in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, dense))):
    assert torch.allclose(mine, want, rtol=0, atol=1e-10)
"""


def main() -> None:
    interpreters = {name: path for name in sys.argv[1:] if (path := shutil.which(name))}
    for name in sys.argv[1:]:
        if name not in interpreters:
            print(f"{name}: not here, not checked")
    if not interpreters:
        sys.exit(f"error: none of {sys.argv[1:]} is here")
    version = re.search(r'^__version__ = "(.*)"', (ROOT / "src" / PACKAGE / "__init__.py").read_text(), re.MULTILINE)
    assert version is not None
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", ROOT / "dist", ROOT)  # the wheel is built from the sdist
    (wheel,), (sdist,) = (list((ROOT / "dist").glob(ending)) for ending in ("*.whl", "*.tar.gz"))
    check_contents(wheel, sdist, version[1])
    for name, interpreter in interpreters.items():
        use_alone(interpreter, wheel, version[1])
        print(f"{name}: {wheel.name} installs, imports and attends")


def check_contents(wheel: Path, sdist: Path, version: str) -> None:
    """The wheel holds the package and nothing else, the sdist every file that git knows."""
    prefix = f"{PACKAGE}-{version}"
    tracked = run("git", "-C", ROOT, "ls-files").split()
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if not name.startswith(f"{prefix}.dist-info/")}
        entry_points = archive.read(f"{prefix}.dist-info/entry_points.txt").decode()
    same(found, {name.removeprefix("src/") for name in tracked if name.startswith("src/")}, wheel.name)
    assert "dilated-attention = dilated_attention_pytorch.cli:main" in entry_points
    with tarfile.open(sdist) as archive:
        found = {name.removeprefix(f"{prefix}/") for name in archive.getnames()} - {"PKG-INFO"}
    same(found, set(tracked), sdist.name)


def same(found: set[str], expected: set[str], name: str) -> None:
    if found != expected:
        sys.exit(f"error: {name} lacks {sorted(expected - found)} and should not have {sorted(found - expected)}")


def use_alone(interpreter: str, wheel: Path, version: str) -> None:
    """A fresh environment in a folder of its own; `-I` keeps the current folder and PYTHONPATH out."""
    with tempfile.TemporaryDirectory() as folder:
        run(interpreter, "-m", "venv", folder)
        python = Path(folder) / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel)
        run(python, "-m", "pip", "check")
        run(python, "-I", "-W", "error::DeprecationWarning:dilated_attention_pytorch", "-c", USE, version, cwd=folder)
        command = subprocess.run([Path(folder) / "bin" / "dilated-attention"], capture_output=True, text=True)
        last = command.stderr.splitlines()[-1:]  # torch may warn before that it found no NumPy
        if command.returncode != 1 or not "".join(last).startswith("error: dilated-attention needs typer"):
            sys.exit(f"error: the command must say that it needs typer, got {command.returncode}: {command.stderr}")


def run(*command: str | Path, cwd: str | Path = ROOT) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {' '.join(map(str, command))[:200]}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
