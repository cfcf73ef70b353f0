"""The commands and their options; what each does is in the module of its name."""

# No `from __future__ import annotations`: typer reads them.
from pathlib import Path
from typing import Annotated, Optional

import torch
import typer
from rich.console import Console
from rich.markup import escape

import dilated_attention_pytorch

from ..patterns.naming import NAMES, form_of
from ..planning import AttentionConfig
from . import bench as bench_module
from . import demo as demo_module
from . import doctor as doctor_module
from . import explore as explore_module
from . import plan as plan_module
from . import show as show_module
from .call import DTYPES, FILE, Call, blocks_of
from .command import Debug, Device, Json, app, device_of, dtype_of, reported
from .output import Document

KNOWN_NAMES = "\n    ".join(
    line for name, known in NAMES.items() for line in (escape(form_of(name)), f"  {known.meaning}")
)


def _call(
    pattern: str, tokens: int | None, block_size: str | None, is_causal: bool, heads: int | None, head_dim: int,
    dtype: torch.dtype, default_tokens: int,
) -> Call:  # fmt: skip
    """The call that the options name; a saved layout brings its lengths, blocks and heads."""
    if not pattern.endswith(FILE):
        return Call.named(
            pattern,
            tokens=default_tokens if tokens is None else tokens,
            block_size=None if block_size is None else blocks_of(block_size),
            is_causal=is_causal,
            heads=heads,
            head_dim=head_dim,
            dtype=dtype,
        )
    if not all(given is None for given in (tokens, block_size, heads)):
        raise ValueError(f"--tokens, --block-size and --heads are those of the file {pattern}: leave them out")
    return Call.saved(pattern, is_causal=is_causal, head_dim=head_dim, dtype=dtype)


Pattern = Annotated[
    str, typer.Argument(help="Its name, see `show --help`; or a file of a PersistentPatternCache.", metavar="PATTERN")
]
Causal = Annotated[bool, typer.Option("--causal", help="No query sees a later key.")]
HeadDim = Annotated[int, typer.Option(min=1, help="Width of a head.")]
Dtype = Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")]
Heads = Annotated[
    Optional[int],  # noqa: UP045 - typer prints this one as an int
    typer.Option(min=1, help="Query heads.", show_default="8, or as many as the pattern has"),
]
BlockSize = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="Tokens a block, as 64, or of query x key blocks, as 64x16.", show_default="128"),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"dilated-attention-pytorch {dilated_attention_pytorch.__version__}")
        raise typer.Exit


@app.callback()
def command(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Long-context attention for PyTorch: exact for the pattern you declare, linear in memory.

    Begin with `demo`, draw a pattern with `show`, play with `explore`, ask `doctor` if something is odd.
    """


@app.command()
def demo(
    tokens: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1024, help="Length of the long run.", show_default="65536; 4096 with --quick"),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the pictures.", file_okay=False)] = Path("demo_output"),
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: seconds, and times that mean little.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Check exactness here and now, draw patterns, and race a long sequence against dense attention, on the CPU.

    \b
    dilated-attention demo
    dilated-attention demo --quick --json > demo.json
    """
    reported(
        lambda console: demo_module.run(console, tokens=tokens, out=out, quick=quick), as_json=as_json, debug=debug
    )


@app.command(
    help=f"""Draw a pattern: in the terminal, as PNG or SVG, with its density, its cost and the Python to paste.

    \b
    dilated-attention show window:256
    dilated-attention show 'window:256 | global:64' --causal --out mask.png
    dilated-attention show longnet:256,512,1024/1,2,4 --head 0 --head 3
    dilated-attention show 'window:128 ; window:512 ; full' --json

    Patterns are named as below. They combine with & (both allow), | or + (one of them allows) and parentheses; between
    the patterns of different heads stands a semicolon.

    \b
    {KNOWN_NAMES}"""
)
def show(
    pattern: Pattern,
    tokens: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Length of the sequence.", show_default="2048"),
    ] = None,
    block_size: BlockSize = None,
    causal: Causal = False,
    heads: Heads = None,
    head: Annotated[
        Optional[list[int]],  # noqa: UP045
        typer.Option(help="Draw this one; may be given several times.", show_default="all that differ"),
    ] = None,
    head_dim: HeadDim = 64,
    dtype: Dtype = "float32",
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Also a picture; the ending says how, .png or .svg.", dir_okay=False),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    reported(
        lambda console: show_module.run(
            console,
            _call(pattern, tokens, block_size, causal, heads, head_dim, dtype_of(dtype), default_tokens=2048),
            heads=head or (),
            out=out,
        ),
        as_json=as_json,
        debug=debug,
    )


@app.command()
def explore(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of 127.0.0.1; 0 takes a free one.")] = 8765,
    browser: Annotated[bool, typer.Option(help="Open a browser.")] = True,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Serve a page where patterns are picked and seen: mask, blocks, density, memory, Python. On this machine only.

    \b
    dilated-attention explore
    dilated-attention explore --port 0 --no-browser --json
    """
    # The address must be known before it ends, so it prints its own document.
    reported(
        lambda console: explore_module.run(console, port=port, browser=browser, as_json=as_json),
        as_json=False,
        debug=debug,
    )


@app.command()
def plan(
    pattern: Pattern = "dilated_sparse",
    tokens: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Length of the sequence, of all devices together.", show_default="131072"),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples.")] = 1,
    heads: Heads = None,
    heads_kv: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Key heads.", show_default="as many"),
    ] = None,
    head_dim: HeadDim = 64,
    dtype: Dtype = "bfloat16",
    training: Annotated[bool, typer.Option("--training", help="Forward and backward.")] = False,
    causal: Causal = False,
    block_size: BlockSize = None,
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
    tables: Annotated[
        bool, typer.Option("--tables", help="Also the tables of the design documents, for older GPUs, planned anew.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """What a call of attention holds in memory, and how long a sequence can be.

    Nothing is allocated: this is arithmetic on shapes, also for devices that are not here.

    \b
    dilated-attention plan --tokens 1000000 --device H200 --training
    dilated-attention plan window:4096 --tokens 500000 --device A100
    dilated-attention plan full --causal --tokens 32768 --json
    """

    def planned(console: Console) -> Document:
        call = _call(pattern, tokens, block_size, causal, heads, head_dim, dtype_of(dtype), default_tokens=131072)
        return plan_module.run(
            console,
            AttentionConfig(pattern=call.what, heads=call.heads, heads_kv=heads_kv, head_dim=head_dim, backend=backend),
            tokens=call.tokens,
            batch=batch,
            dtype=call.dtype,
            training=training,
            is_causal=causal,
            block_size=call.block_size,
            device=device,
            budget_gib=budget,
            world_size=world_size,
            tables=tables and not as_json,
        )

    reported(planned, as_json=as_json, debug=debug)


@app.command()
def bench(
    pattern: Pattern = "window:256",
    tokens: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Length of the sequence.", show_default="4096"),
    ] = None,
    block_size: BlockSize = None,
    causal: Causal = False,
    heads: Heads = None,
    head_dim: HeadDim = 64,
    dtype: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help=f"{', '.join(DTYPES)}.", show_default="float32, bfloat16 on a GPU"),
    ] = None,
    device: Device = None,
    training: Annotated[bool, typer.Option("--training", help="Forward and backward.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Turns of the contenders.")] = 5,
    against: Annotated[str, typer.Option(help="Rivals, with commas between them; or none.")] = ",".join(
        bench_module.RIVALS
    ),
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Folder for bench.json and bench.png.", file_okay=False, show_default="none"),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Time a call beside dense SDPA, FlexAttention, flash-attn and xformers, as far as they are there.

    Nothing is timed before its output, and with --training its gradients, agree with float64. A C++ compiler (on a
    CPU) or Triton (on a GPU) compiles FlexAttention, which takes the most of the default run.

    \b
    dilated-attention bench
    dilated-attention bench 'window:512 | global:64' --tokens 8192 --training --out results
    dilated-attention bench longnet:1024,4096/1,4 --tokens 8192 --against dense --json
    """

    def timed(console: Console) -> Document:
        where = device_of(device)
        number = dtype_of(dtype or ("bfloat16" if where.startswith("cuda") else "float32"))
        return bench_module.run(
            console,
            _call(pattern, tokens, block_size, causal, heads, head_dim, number, default_tokens=4096),
            device=where,
            training=training,
            repeats=repeats,
            rivals=() if against == "none" else against.split(","),
            out=out,
        )

    reported(timed, as_json=as_json, debug=debug)


@app.command()
def doctor(as_json: Json = False, debug: Debug = False) -> None:
    """What is installed, which backend runs and why no other, and whether results are right, in about ten seconds.

    \b
    dilated-attention doctor
    dilated-attention doctor --json > doctor.json
    """
    reported(doctor_module.run, as_json=as_json, debug=debug)


from . import adaptive_commands, model_commands  # noqa: E402, F401 - their commands come after these in the help
