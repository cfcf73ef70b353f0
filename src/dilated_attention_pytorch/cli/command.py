"""What every command has: the application that it belongs to, its common options, and how a run of it ends."""

# No `from __future__ import annotations`: typer reads them.
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Optional

import torch
import typer
from rich.console import Console

from ..layout.checks import check_device
from .call import DTYPES
from .output import Document, FailedError

# What the machine or the arguments can bring about. Anything else is a bug, and keeps its traceback.
EXPECTED = (ImportError, MemoryError, OSError, RuntimeError, ValueError)

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich")

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout; words go to stderr.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Device = Annotated[
    Optional[str],  # noqa: UP045 - typer prints this one as a str
    typer.Option(help="cpu or cuda.", show_default="cuda if there is one, else cpu"),
]


def reported(run: Callable[[Console], Document], *, as_json: bool, debug: bool) -> None:
    """Run it. What can be expected to go wrong is one line on stderr and status 1."""
    console = Console(stderr=as_json, highlight=False)
    failure: Exception | None = None
    document: Document | None = None
    try:
        document = run(console)
    except EXPECTED as error:
        if debug:
            raise
        failure = error
        document = error.document if isinstance(error, FailedError) else None
    if as_json and document:  # of several processes one has it
        print(json.dumps(document, indent=1))
    if failure is not None:
        first, *_ = str(failure).splitlines() or [type(failure).__name__]
        print(f"error: {first}", file=sys.stderr)
        raise typer.Exit(1)


def device_of(text: str | None) -> str:
    """The device of that name, the GPU by default if there is one. ValueError if it is not here."""
    if text is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    device = check_device(text)
    here = {"cpu": 1, "cuda": torch.cuda.device_count()}
    if (device.index or 0) >= here.get(device.type, 0):
        raise ValueError(f"--device must be cpu, or cuda where PyTorch finds a GPU, got {text!r}")
    return text


def dtype_of(text: str) -> torch.dtype:
    if text not in DTYPES:
        raise typer.BadParameter(f"must be one of {', '.join(DTYPES)}", param_hint="--dtype")
    return DTYPES[text]


def check_text(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"TEXT must be a file, got {path}")


def given(context: typer.Context) -> list[str]:
    """The options and arguments that stand in the command line, by the names of their parameters."""
    return [
        name
        for name in context.params
        if getattr(context.get_parameter_source(name), "name", "") not in ("DEFAULT", "DEFAULT_MAP", "")
    ]


def refuse_given(context: typer.Context, allowed: set[str], why: str) -> None:
    """An option that would have no effect is an error."""
    for name in given(context):
        if name not in allowed:
            raise ValueError(f"--{name.replace('_', '-')} {why}")
