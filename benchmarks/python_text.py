"""A LongNet learns from Python's own sources, on one core: the curve of a run of `train`, and what `generate` samples.

    cat "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"/*.py > stdlib.txt
    dilated-attention train stdlib.txt --out run --steps 1500 --seq-len 512 --batch 4 --dim 192 --layers 3 \\
        --segment-lengths 128,512 --dilation-rates 1,4 --lr 0.003 --log csv      # stopped after step 600
    dilated-attention train --resume run --steps 1000 --log csv
    python benchmarks/python_text.py --run run

The commands before the last make the run; this script reads its folder, draws the samples, and writes the record.
`minutes` is the time of the steps, beside whatever else the machine did; `minutes_alone` that of as many steps at the
rate of the fastest twentieth of them.
"""

from __future__ import annotations

import argparse
import csv
import io
from pathlib import Path
from typing import Any

from rich.console import Console

from dilated_attention_pytorch.cli import generate, train
from harness import Benchmark, Job, Record, run

# What is asked; otherwise the options that `generate` has by default.
PROMPTS = ("class Stack:\n", "import os\n", "def read(self")
MODEL = ("dim", "num_layers", "num_heads", "segment_lengths", "dilation_rates")
MAX_TOKENS, TEMPERATURE, SEED = 500, 0.8, 0


def text(job: Job) -> Record:
    folder = job.args.run
    options = train.State.saved_options(folder / train.CHECKPOINT)
    state = train.State.resumed(folder / train.CHECKPOINT, options)
    tokens = options.accumulate * options.batch * options.seq_len
    rates = sorted(float(row["tokens_per_second"]) for row in rows_of(folder))
    fastest = rates[-max(1, len(rates) // 20)]
    return {
        "options": {name: getattr(options, name) for name in ("steps", "seq_len", "batch", "learning_rate", "file")},
        "model": {name: getattr(options.model, name) for name in MODEL},
        "parameters": sum(p.numel() for p in state.model.parameters()),
        "bytes_seen": tokens * len(state.bits),
        "minutes": round(sum(tokens / rate for rate in rates) / 60, 1),
        "minutes_alone": round(tokens * len(rates) / fastest / 60, 1),
        "curve": [{"step": step, "held_out_bits_a_byte": round(bits, 4)} for step, bits in state.curve],
        "samples": [sample(folder, prompt, 20 if job.quick else MAX_TOKENS) for prompt in PROMPTS],
    }


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "log.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def sample(folder: Path, prompt: str, count: int) -> dict[str, Any]:
    """What `generate` prints for a prompt."""
    draws = generate.Draws(max_tokens=count, temperature=TEMPERATURE, top_k=None, top_p=None, seed=SEED)
    quiet = Console(file=io.StringIO())
    found = generate.run(quiet, str(folder), prompt=prompt, draws=draws, rule=None, echo=True, device="cpu")
    return {"prompt": prompt, "temperature": TEMPERATURE, "seed": SEED, "text": found["text"]}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", type=Path, default=Path("run"), help="the folder of a finished run with --log csv")


BENCHMARK = Benchmark(name="python_text", about=__doc__, sections={"text": text}, untimed=("text",), options=options)


if __name__ == "__main__":
    raise SystemExit(run(BENCHMARK))
