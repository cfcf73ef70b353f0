"""The command `dilated-attention`. It needs typer and rich, which nothing else in the package imports.

    dilated-attention demo                                  what the library claims, shown on this machine
    dilated-attention show 'window:512 | global:64'         a pattern, drawn, with its density and cost
    dilated-attention explore                               the same in a browser, with knobs
    dilated-attention plan longnet --tokens 1000000         what a call holds, and what fits
    dilated-attention bench window:256                      ours beside what else is installed
    dilated-attention train TEXT                            a byte-level LongNet of any file
    dilated-attention generate RUN --prompt TEXT            text of what was trained, or of a model of transformers
    dilated-attention perplexity TEXT --pattern window:512  what a pattern or a choice of blocks costs a trained model
    dilated-attention fidelity TEXT                         what it keeps of the model's attention, by layer and head
    dilated-attention doctor                                what is installed, which backend runs, and a self-check

`python -m dilated_attention_pytorch` is the same. Every command takes `--json` (stdout is then one JSON document, words
go to stderr) and `--debug`. Exit status: 0, 1 for an error (one line on stderr; the traceback with --debug), 2 for
arguments that make no sense (one line, too), 130 if it was interrupted.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Sequence
from typing import Any

NAME = "dilated-attention"


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
    sys.exit(_status(app, None if argv is None else list(argv)))


def _status(app: Any, argv: list[str] | None) -> int:
    """Exit status of a run; arguments that make no sense are one line on stderr, too."""
    from typer import Abort, BadParameter

    # Those of click, which typer may bring itself.
    errors: tuple[Any, ...] = BadParameter.__mro__[1:3]
    usage_error, any_error = errors
    try:
        return app(args=argv, prog_name=NAME, standalone_mode=False) or 0
    except any_error as error:
        message = error.format_message()
        if type(error).__name__ == "NoArgsIsHelpError":
            print(message)
        elif isinstance(error, usage_error):
            message = re.sub(r" ?\(Possible options?: (.*)\)", r". Did you mean \1?", " ".join(message.split()))
            where = NAME if error.ctx is None else error.ctx.command_path
            print(f"error: {message} (see {where} --help)", file=sys.stderr)
        else:
            print(f"error: {message}", file=sys.stderr)
        return error.exit_code
    except (Abort, KeyboardInterrupt):
        return 130
