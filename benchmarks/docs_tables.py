"""Tables and figures of README and docs/, written from benchmarks/results: `make docs-tables`.

    <!-- table: gpu.kernels -->                     <!-- value: gpu.tflops random 128 128 forward -->633<!-- /value -->

    (what the records say, with their origin)

    <!-- /table -->

What stands between two marks is replaced: a table of benchmarks/tables.py, or of several records; a figure of
benchmarks/values.py; or, with `text`, what a model wrote. A mark without its end, or with a name that nothing has, is
an error. tests/test_benchmarks.py fails while a page differs from its records.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tables import TABLES, markdown, origin
from values import JOINT_TABLES, TEXTS, VALUES, Records

ROOT = Path(__file__).resolve().parent.parent
MARKED = re.compile(r"<!-- (table|value|text): (.*?) -->(.*?)<!-- /\1 -->", re.DOTALL)
MARK = re.compile(r"<!-- (?:(?:table|value|text): .*?|/(?:table|value|text)) -->")


def pages(root: Path = ROOT) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def rewritten(text: str, records: Records) -> str:
    """A page with what the records say between its marks."""
    for kind, name, inside in MARKED.findall(text):
        if MARK.search(inside):
            raise ValueError(f"every mark must end before the next begins, got <!-- {kind}: {name} --> which does not")
    if len(MARK.findall(text)) != 2 * len(MARKED.findall(text)):
        raise ValueError(f"every mark must have its end, got {sorted(set(MARK.findall(MARKED.sub('', text))))}")
    return MARKED.sub(lambda found: _filled(found[1], found[2], records), text)


def _filled(kind: str, name: str, records: Records) -> str:
    if kind == "value":
        inside = _value(name, records)
    else:
        inside = f"\n\n{_table(name, records) if kind == 'table' else _text(name, records)}\n\n"
    return f"<!-- {kind}: {name} -->{inside}<!-- /{kind} -->"


def _table(name: str, records: Records) -> str:
    if name in JOINT_TABLES:
        return markdown(*JOINT_TABLES[name](records))
    if name not in TABLES:
        raise ValueError(f"a table must be of {', '.join([*JOINT_TABLES, *TABLES])}, got {name!r}")
    record, section = name.split(".", 1)
    found = records.section(record, section)
    return f"{markdown(*TABLES[name](found))}\n\n{origin(found)}"


def _value(text: str, records: Records) -> str:
    name, *words = shlex.split(text)
    if name not in VALUES:
        raise ValueError(f"a value must be of {', '.join(VALUES)}, got {name!r}")
    return VALUES[name](records, *words)


def _text(text: str, records: Records) -> str:
    name, *words = shlex.split(text)
    if name not in TEXTS:
        raise ValueError(f"a text must be of {', '.join(TEXTS)}, got {name!r}")
    return f"```text\n{TEXTS[name](records, *words)}\n```"


def main() -> None:
    records = Records()
    for page in pages():
        old = page.read_text(encoding="utf-8")
        new = rewritten(old, records)
        if new != old:
            page.write_text(new, encoding="utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
