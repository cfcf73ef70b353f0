"""What a second busy program costs a call on a CPU: ours, dense SDPA and compiled FlexAttention, in turns.

    python benchmarks/busy.py                 # all of it, some minutes; options: harness.py
    python benchmarks/busy.py --skip-flex     # without FlexAttention, which needs a C++ compiler

float32, batch 1, 8 heads × 64, blocks of 128: a row sees its own block, the two before it and the first. Every call is
timed once while the other program sleeps and once while it counts, as a process of its own with one thread; `ratio` is
the median time with it ÷ the median time without. With c cores and c threads a fair share of the machine makes 1 + 1/c
of a call that loses none of its own time. What else runs on the machine (`load_before`) is in both times.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from cases import Inputs, flex_mask
from dilated_attention_pytorch import BlockLayout, Causal, GlobalBlocks, LocalBlocks, block_sparse_attention
from dilated_attention_pytorch.testing.timing import Timing, seconds
from harness import Benchmark, Job, Record, SkipSectionError, run

HEADS, HEAD_DIM, BLOCK = 8, 64, 128
PATTERN = LocalBlocks(256, block_size=BLOCK, causal=True) | GlobalBlocks(BLOCK, block_size=BLOCK)
TOKENS, REPEATS = (512, 1024, 4096), 9

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Busy:
    """A program that counts, when it may."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        self.process.send_signal(signal.SIGSTOP)

    @contextmanager
    def counting(self) -> Iterator[None]:
        self.process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGSTOP)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def contenders(layout: BlockLayout, *, flex: bool) -> dict[str, Attend]:
    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block_sparse_attention(q, k, v, layout)  # type: ignore[return-value]

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    found: dict[str, Attend] = {"ours": ours, "dense SDPA": dense}
    if flex:
        compiled, blocks = torch.compile(flex_attention, dynamic=False), flex_mask(layout.to_block_mask(), BLOCK)

        def flexible(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return compiled(q, k, v, block_mask=blocks).transpose(1, 2)

        found["FlexAttention"] = flexible
    return found


def section(job: Job, *, training: bool) -> Record:
    if not hasattr(signal, "SIGSTOP"):
        raise SkipSectionError("a process cannot be stopped and continued here")
    rows, busy = [], Busy()
    try:
        for tokens in TOKENS[:1] if job.quick else TOKENS:
            layout = BlockLayout.from_pattern(PATTERN, tokens, block_size=BLOCK)
            inputs = Inputs.make(tokens, HEADS, HEAD_DIM)
            calls = contenders(layout, flex=not (training or job.args.skip_flex))
            _gate(job, inputs, layout, calls)
            timed = {name: _call(attend, inputs, training=training) for name, attend in calls.items()}
            rows += [{"tokens": tokens, "contender": name, **row} for name, row in _race(job, timed, busy).items()]
    finally:
        busy.end()
    return {"rows": rows}


def _gate(job: Job, inputs: Inputs, layout: BlockLayout, calls: dict[str, Attend]) -> None:
    q, k, v = inputs.ours
    exact = [x.double() for x in inputs.ours]
    whole = {False: layout, True: BlockLayout.from_pattern(Causal(), q.shape[1], block_size=BLOCK)}
    for name, attend in calls.items():
        with torch.no_grad():
            want = block_sparse_attention(*exact, whole[name == "dense SDPA"])
            job.gate.check(f"{q.shape[1]} tokens", name, "float64", attend(q, k, v), want)  # type: ignore[arg-type]


def _call(attend: Attend, inputs: Inputs, *, training: bool) -> Callable[[], object]:
    leaves = [x.clone().requires_grad_(training) for x in inputs.ours]

    def once() -> None:
        with torch.set_grad_enabled(training):
            out = attend(*leaves)
        if training:
            torch.autograd.grad(out, leaves, inputs.grad)

    return once


def _race(job: Job, timed: dict[str, Callable[[], object]], busy: Busy) -> dict[str, Record]:
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in timed}
    for call in timed.values():
        call()
    for turn in range(1 if job.quick else REPEATS):
        job.say(f"turn {turn + 1}")
        for name, call in timed.items():
            times[name][0].append(seconds(call))
            with busy.counting():
                times[name][1].append(seconds(call))
    found = {}
    for name, (alone, beside) in times.items():
        quiet, loaded = Timing(tuple(alone)), Timing(tuple(beside))
        found[name] = {"quiet": quiet.record(), "busy": loaded.record(), "ratio": loaded.median / quiet.median}
    return found


def forward(job: Job) -> Record:
    return section(job, training=False)


def training(job: Job) -> Record:
    return section(job, training=True)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--skip-flex", action="store_true", help="leave FlexAttention out")


def summary(record: Record) -> dict[str, Any]:
    """The worst ratio of each contender."""
    rows = [row for name in record for row in record[name]["rows"]]
    return {
        "worst_ratio": {
            who: max(r["ratio"] for r in rows if r["contender"] == who) for who in {r["contender"] for r in rows}
        }
    }


BENCHMARK = Benchmark(
    name="busy", about=__doc__, sections={"forward": forward, "training": training}, options=options, summary=summary
)


if __name__ == "__main__":
    raise SystemExit(run(BENCHMARK))
