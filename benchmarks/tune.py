"""Which tiles the kernels should take on the GPU at hand: the tables of `kernels/configs.py`, made again.

    python benchmarks/tune.py --only plain      # all head dims and dtypes; options: harness.py
    python benchmarks/tune.py --only plain --head-dim 64 --dtype bfloat16
    python benchmarks/tune.py --only hopper     # the warp-specialised ones' own tables

For each head dim and dtype, and for the forward, dq and dk/dv kernels, every candidate that compiles and fits is first
compared with plain PyTorch and then timed, all in turns, on random blocks of 128 at 10 % of 16,384 tokens. Progress
names the best three, and the lines to put into the table where the best differs from what stands there. Nothing is
tuned when the library runs.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from cases import random_mask
from dilated_attention_pytorch import BlockLayout
from dilated_attention_pytorch.backends import blockwise
from dilated_attention_pytorch.kernels import configs, launch
from dilated_attention_pytorch.kernels.configs import Config
from dilated_attention_pytorch.options import CallOptions
from dilated_attention_pytorch.testing.timing import interleave
from harness import Benchmark, Gate, GateError, Job, Record, norm, run

HEAD_DIMS = (32, 64, 128, 256)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
TILES = {"forward": ("out", "lse"), "dq": ("dq",), "dkv": ("dk", "dv")}
PLAIN = [Config(*c) for c in itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3))]
HOPPER_FORWARD = list(itertools.product((64, 128), (1, 2, 3), (2, 3, 4)))
HOPPER_BACKWARD = list(itertools.product((32, 64, 128), (2, 3)))
TOLERANCE = 2e-2  # in every dtype

Run = Callable[[], tuple[Tensor, ...]]


class Problem:
    """One layout and its tensors; runs of each kernel with given tiles, and what they should give."""

    def __init__(self, head_dim: int, dtype: torch.dtype, tokens: int, device: str) -> None:
        heads = max(1, 2048 // head_dim) if device == "cuda" else 1
        mask = random_mask(tokens // 128, 0.1).to(device)
        self.layout = BlockLayout.from_block_mask(mask, 128)
        shape = (1, tokens, heads, head_dim)
        self.q, self.k, self.v, self.do = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
        self.extras = CallOptions(head_dim**-0.5)
        self.out, self.lse = blockwise.forward(self.q, self.k, self.v, self.layout, self.extras)
        self.dlse = torch.zeros_like(self.lse)
        grads = self._all(blockwise.backward)
        self.want = {"forward": (self.out, self.lse), "dq": grads[:1], "dkv": grads[1:]}

    def _all(self, backward: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        q, k, v, layout, extras = self.q, self.k, self.v, self.layout, self.extras
        return backward(self.do, self.dlse, q, k, v, self.out, self.lse, layout, extras)

    def plain(self, kernel: str, config: Config) -> Run:
        """That kernel alone, with these tiles."""
        call = launch.Call(self.q, self.k, self.v, self.layout, self.extras)
        call.hopper = False
        call.configs = call.configs._replace(**{kernel: config})
        if kernel == "forward":
            return call.forward
        taken = slice(0, 1) if kernel == "dq" else slice(1, 3)
        other = "_plain_dkv" if kernel == "dq" else "_plain_dq"

        def run() -> tuple[Tensor, ...]:
            with patch.object(call, other, lambda *args: None):
                return call.backward(self.do, self.dlse, self.out, self.lse)[0][taken]

        return run

    def hopper(self, kernel: str, settings: tuple[Any, ...]) -> Run:
        """The warp-specialised forward, or both backward walks, with these settings."""
        call = launch.Call(self.q, self.k, self.v, self.layout, self.extras)
        if not call.hopper:  # the plain kernels would run in their place
            raise GateError("the warp-specialised kernels cannot run on this GPU")
        table = {call.head_dim: settings}
        if kernel == "forward":
            with_table = patch.object(configs, "HOPPER_FORWARD", table)
        else:
            with_table = patch.object(launch, "HOPPER_BACKWARD", table)

        def run() -> tuple[Tensor, ...]:
            with with_table:
                if kernel == "forward":
                    return call.forward()
                return call.backward(self.do, self.dlse, self.out, self.lse)[0]

        return run


@dataclass(frozen=True)
class Trial:
    """How candidates are compared and timed."""

    gate: Gate
    rounds: int
    tokens: int
    device: str = "cuda"

    def seconds(self, title: str, runs: dict[Any, Run], want: tuple[Tensor, ...]) -> dict[Any, float]:
        """Seconds of every candidate that fits, the fastest first."""
        fit = {}
        for name, candidate in runs.items():
            try:
                got = candidate()
            except OutOfResources:
                continue
            error = max(norm(mine, theirs) for mine, theirs in zip(got, want, strict=True))
            self.gate.accept(title, str(tuple(name)), "plain PyTorch", error, TOLERANCE)
            fit[name] = candidate
        timings = interleave(fit, self.rounds, device=self.device)
        return dict(sorted(((name, timing.median) for name, timing in timings.items()), key=lambda item: item[1]))


def report(job: Job, title: str, times: dict[Any, float], now: Any) -> dict[str, Any]:
    best = next(iter(times))
    gain = f", {times[now] / times[best]:.2f} x what stands there" if now in times and best != now else ""
    job.say(f"{title}: {', '.join(f'{tuple(c)} {1e3 * s:.3f} ms' for c, s in list(times.items())[:3])}{gain}")
    return {"kernel": title, "now": now, "best": best, "seconds": [[list(c), s] for c, s in times.items()]}


def tune_plain(job: Job, trial: Trial, head_dim: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    problem = Problem(head_dim, dtype, trial.tokens, trial.device)
    capability = torch.cuda.get_device_capability() if trial.device == "cuda" else (9, 0)
    now, rows = configs.configs(capability, head_dim, dtype.itemsize), []
    for kernel in TILES:
        title = f"{kernel}, D={head_dim}, {dtype}"
        runs: dict[Any, Run] = {config: problem.plain(kernel, config) for config in PLAIN}
        times = trial.seconds(title, runs, problem.want[kernel])
        rows.append(report(job, title, times, getattr(now, kernel)))
    best = configs.Configs(*(row["best"] for row in rows))
    if best != now:
        parts = ", ".join(f"Config{tuple(config)}" for config in best)
        job.say(f"    {head_dim}: Configs({parts}),")
    return rows


def tune_hopper(job: Job, trial: Trial, head_dim: int) -> list[dict[str, Any]]:
    problem, rows = Problem(head_dim, torch.bfloat16, trial.tokens, "cuda"), []
    whole = {"forward": problem.want["forward"], "backward": (*problem.want["dq"], *problem.want["dkv"])}
    tables = {
        "forward": (HOPPER_FORWARD, configs.HOPPER_FORWARD),
        "backward": (HOPPER_BACKWARD, configs.HOPPER_BACKWARD),
    }
    for kernel, (candidates, now) in tables.items():
        title = f"Hopper {kernel}, D={head_dim}"
        runs: dict[Any, Run] = {settings: problem.hopper(kernel, settings) for settings in candidates}
        rows.append(report(job, title, trial.seconds(title, runs, whole[kernel]), now[head_dim]))
    return rows


def trial_of(job: Job) -> Trial:
    return Trial(job.gate, 1 if job.quick else job.args.rounds, 2048 if job.quick else job.args.tokens)


def plain(job: Job) -> Record:
    problems = itertools.product(job.args.head_dim, job.args.dtype)
    return {"rows": [row for dim, dtype in problems for row in tune_plain(job, trial_of(job), dim, DTYPES[dtype])]}


def hopper(job: Job) -> Record:
    return {"rows": [row for head_dim in configs.HOPPER_FORWARD for row in tune_hopper(job, trial_of(job), head_dim)]}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--head-dim", type=int, nargs="+", choices=HEAD_DIMS, default=HEAD_DIMS)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=5)


BENCHMARK = Benchmark(
    name="tune", about=__doc__, sections={"plain": plain, "hopper": hopper}, devices=("cuda",), options=options
)


if __name__ == "__main__":
    raise SystemExit(run(BENCHMARK))
