"""Run the notebooks of docs/ and store what they print and draw: `make notebooks`.

    python tools/run_notebooks.py [NAME …]      # by default all; "pretrained" needs a model, see the notebook

The site shows what is stored. Each notebook also stores a fingerprint of the cells that gave it, so that a test sees
where code was changed and not run again.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "docs" / "notebooks"


def fingerprint(notebook: Mapping[str, Any]) -> str:
    """Of the code of all cells, in order."""
    cells = ("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    return hashlib.sha256("\0".join(cells).encode()).hexdigest()


def run(path: Path) -> None:
    import nbformat
    from nbconvert.preprocessors import ExecutePreprocessor

    notebook = nbformat.read(path, as_version=4)
    ExecutePreprocessor(timeout=1200, kernel_name="python3").preprocess(
        notebook, {"metadata": {"path": str(path.parent)}}
    )
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata = {}
        if cell.cell_type == "code":
            # What libraries warn of while they load, and progress bars, differ from machine to machine.
            cell.outputs = _joined(each for each in cell.outputs if each.get("name") != "stderr")
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "fingerprint": fingerprint(notebook),
    }
    nbformat.write(notebook, path)


def _joined(outputs: Iterable[Any]) -> list[Any]:
    """Text that was printed in pieces, in one."""
    joined: list[Any] = []
    for each in outputs:
        if joined and each.output_type == joined[-1].output_type == "stream":
            joined[-1].text += each.text
        else:
            joined.append(each)
    return joined


def main(names: list[str]) -> None:
    for path in [FOLDER / f"{name}.ipynb" for name in names] or sorted(FOLDER.glob("*.ipynb")):
        run(path)
        print(path.relative_to(FOLDER.parent.parent))


if __name__ == "__main__":
    main(sys.argv[1:])
