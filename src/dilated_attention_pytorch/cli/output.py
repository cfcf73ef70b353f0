"""What the commands share: progress, tables that lose nothing, and results that are also JSON.

A command is a function that takes a console to talk to and returns its result as plain values; `--json` prints those
on stdout and sends the talking to stderr.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

Document = dict[str, Any]


class FailedError(RuntimeError):
    """The command has a result, but not the one that was hoped for: it is printed, and the exit status is 1."""

    def __init__(self, message: str, document: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.document = dict(document)


def table(*left: str, right: tuple[str, ...] = (), title: str | None = None) -> Table:
    """A table with columns of words, then columns of numbers; on a narrow terminal cells fold and nothing is cut."""
    made = Table(title=title)
    for name in left:
        made.add_column(name, overflow="fold")
    for name in right:
        made.add_column(name, justify="right", overflow="fold")
    return made


@contextmanager
def steps(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    """A function to announce each step: a progress bar in a terminal, plain lines in a pipe."""
    if not console.is_terminal:
        yield lambda text: console.print(f"  {text} ...", markup=False, soft_wrap=True)
        return
    columns = (TextColumn("  {task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total)
        done = iter(range(total))
        yield lambda text: progress.update(task, description=text, completed=next(done))


@contextmanager
def one_thread() -> Iterator[None]:
    """For tensors so small that threads only wait for each other, and for long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def can_draw() -> bool:
    """Whether matplotlib is there."""
    return find_spec("matplotlib") is not None


NO_PICTURE = "No picture: matplotlib is not installed (pip install matplotlib)."
