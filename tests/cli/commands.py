"""A command of `dilated-attention`, run in this process as in a pipe."""

import io
from contextlib import redirect_stderr, redirect_stdout

from dilated_attention_pytorch.cli import main


def run(*argv):
    """Exit status, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main(argv)
        except SystemExit as stop:
            return stop.code or 0, out.getvalue(), err.getvalue()
    raise AssertionError(f"the command must exit: {argv}")
