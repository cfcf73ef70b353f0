"""The command `dilated-attention`. It needs typer and rich, which nothing else in the package imports.

    dilated-attention demo                                  what the library claims, shown on this machine
    dilated-attention show 'window:512 | global:64'         a pattern, drawn, with its density and cost
    dilated-attention explore                               the same in a browser, with knobs
    dilated-attention plan longnet --tokens 1000000         what a call holds, and what fits
    dilated-attention bench window:256                      ours beside what else is installed
    dilated-attention train TEXT                            a byte-level LongNet of any file
    dilated-attention fidelity TEXT                         what a choice of blocks keeps of a real model's attention
    dilated-attention doctor                                what is installed, which backend runs, and a self-check

Every command takes `--json` (stdout is then one JSON document, words go to stderr) and `--debug`.
Exit status: 0, 1 for an error (one line on stderr; the traceback with --debug), 2 for arguments that make no sense.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with these arguments, by default those of the process, and exit."""
    try:
        from .app import app
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("typer", "rich"):
            raise
        sys.exit(f"error: dilated-attention needs {missing}: pip install typer rich")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal without block characters gets question marks and not an error.
            stream.reconfigure(errors="replace")
    app(args=None if argv is None else list(argv), prog_name="dilated-attention")
