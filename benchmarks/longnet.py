"""A training step of a LongNet: tokens a second, the share of the device's matmul rate, memory.

    python benchmarks/longnet.py                            # on an H200; options: harness.py
    python benchmarks/longnet.py --tokens 32768 262144      # some lengths
    python benchmarks/longnet.py --only compiled            # each layer by torch.compile; compiling takes a minute
    python benchmarks/longnet.py --profile step.json        # a Chrome trace of the first step, and where its time went

step      `LongNetLM(LongNetConfig())`, the paper's base model, beside the same with dilations that are powers of two:
          forward, backward and AdamW, one sequence a step, bfloat16 autocast. Beyond 32,768 tokens with checkpoints
          that keep attention.
compiled  The same step with every layer compiled as a whole, beside the plain one.

`share` is the rate of the products that a step needs ÷ that of a large square product on this device
(`matmul_flops`). It needs 6 FLOPs for each parameter of a matrix and token (`matrix_flops`), and attention's two
products forward and five backward over the pairs that the branches allow, each counted once (`attention_flops`); what
checkpoints compute again is not counted. Before anything is timed the loss and all gradients of two layers are compared
with those of the reference in float64.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch import LongNetConfig, LongNetLM
from dilated_attention_pytorch.cli.utilization import Products, matmul_rate
from dilated_attention_pytorch.memory import measure_peak
from dilated_attention_pytorch.testing.timing import seconds
from harness import Benchmark, Job, Record, norm, run
from profiles import profiled

TOKENS = (32768, 262144, 1048576)
PLAIN = 32768  # so many tokens at the most are trained without checkpoints
BRANCHES = {"paper": (1, 2, 4, 6, 12), "powers of two": (1, 2, 4, 8, 16)}
TINY_BRANCHES = {"paper": (1, 3), "powers of two": (1, 2)}
TINY: dict[str, Any] = {"dim": 32, "num_layers": 2, "num_heads": 2, "segment_lengths": (32, 64)}
CHECKED = 4096


def is_tiny(job: Job) -> bool:
    return job.quick or job.device == "cpu"


def lengths(job: Job) -> tuple[int, ...]:
    return tuple(job.args.tokens) if job.args.tokens else (128, 256) if is_tiny(job) else TOKENS


def config_of(job: Job, name: str, tokens: int) -> LongNetConfig:
    checkpointing = "attention" if tokens > PLAIN else False
    shape, dilations = (TINY, TINY_BRANCHES[name]) if is_tiny(job) else ({}, BRANCHES[name])
    return LongNetConfig(**shape, dilation_rates=dilations, checkpointing=checkpointing)


def step_of(job: Job, model: LongNetLM, optimizer: torch.optim.Optimizer, ids: Tensor) -> Tensor:
    with torch.autocast(job.device, dtype=torch.bfloat16, enabled=job.device == "cuda"):
        loss = model.loss(ids[:, :-1], ids[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def check(job: Job, name: str) -> None:
    """The loss and all gradients of a few layers against the definition in float64."""
    config = config_of(job, name, 0)
    tokens = 128 if is_tiny(job) else CHECKED
    shape = {**vars(config), "num_layers": 2}
    torch.manual_seed(0)
    model = LongNetLM(LongNetConfig(**shape)).to(job.device)
    exact = LongNetLM(LongNetConfig(**{**shape, "backend": "reference"})).to(job.device).double()
    exact.load_state_dict({key: x.double() for key, x in model.state_dict().items()})
    ids = torch.randint(config.vocab_size, (1, tokens + 1), device=job.device)
    with torch.autocast(job.device, dtype=torch.bfloat16, enabled=job.device == "cuda"):
        loss = model.loss(ids[:, :-1], ids[:, 1:])
    right = exact.loss(ids[:, :-1], ids[:, 1:])
    loss.backward()
    right.backward()
    tolerance = 5e-2 if job.device == "cuda" else 1e-4  # products of two layers and back, in bfloat16
    off = abs(loss.item() / right.item() - 1)
    job.gate.accept(f"{name}, {tokens} tokens, loss", "ours", "float64", off, tolerance)
    worst = max(norm(p.grad, x.grad) for p, x in zip(model.parameters(), exact.parameters(), strict=True)
                if p.grad is not None and x.grad is not None)  # fmt: skip
    job.gate.accept(f"{name}, {tokens} tokens, gradients", "ours", "float64", worst, tolerance)


def timed(job: Job, model: LongNetLM, ids: Tensor) -> tuple[list[float], int]:
    """Seconds of some steps after one that warms up, and the peak of memory in it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=job.device == "cuda")
    step = partial(step_of, job, model, optimizer, ids)
    with measure_peak(job.device) as peak:
        loss = step()
    times = [seconds(step, job.device) for _ in range(job.args.steps)]
    if job.args.profile:
        profiled(job, step, job.args.profile)
        job.args.profile = None
    assert bool(torch.isfinite(loss))
    return times, peak.peak_bytes


def row_of(job: Job, name: str, tokens: int, rate: float, is_compiled: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    config = config_of(job, name, tokens)
    model = LongNetLM(config).to(job.device).train()
    if is_compiled:
        for layer in model.layers:
            layer.compile(fullgraph=True)
    ids = torch.randint(config.vocab_size, (1, tokens + 1), device=job.device)
    times, peak = timed(job, model, ids)
    products, each = Products.of(model, tokens), statistics.median(times)
    row = {
        "branches": name, "tokens": tokens, "compiled": is_compiled, "checkpointing": config.checkpointing,
        "parameters": sum(p.numel() for p in model.parameters()), "seconds": each, "times": times,
        "tokens_per_second": tokens / each, "matrix_flops": products.matrices * tokens,
        "attention_flops": products.attention * tokens, "share": products.of_token * tokens / each / rate,
        "peak_bytes": peak,
    }  # fmt: skip
    job.say("{branches}, {tokens:,} tokens: {seconds:.3f} s, {tokens_per_second:,.0f} tokens/s, ".format(**row)
            + f"{row['share']:.1%} of the matmul rate, {peak / 1e9:.1f} GB")  # fmt: skip
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return row


def measured(job: Job, cases: list[tuple[str, int, bool]]) -> Record:
    for name in dict.fromkeys(name for name, _, _ in cases):
        check(job, name)
    rate = matmul_rate(job.device)
    return {"matmul_flops": rate, "rows": [row_of(job, name, tokens, rate, way) for name, tokens, way in cases]}


def step(job: Job) -> Record:
    first, *more = lengths(job)
    names = job.args.branches or list(BRANCHES)
    return measured(job, [(name, first, False) for name in names] + [(names[0], tokens, False) for tokens in more])


def compiled(job: Job) -> Record:
    name = (job.args.branches or list(BRANCHES))[0]
    return measured(job, [(name, lengths(job)[0], way) for way in (False, True)])


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, nargs="+", help=f"of a step; {', '.join(map(str, TOKENS))}")
    parser.add_argument("--branches", choices=BRANCHES, nargs="+", help=f"{', '.join(BRANCHES)}; all by default")
    parser.add_argument("--profile", type=Path, help="write a Chrome trace of the first model's step there")
    parser.add_argument("--steps", type=int, default=3, help="that are timed")


BENCHMARK = Benchmark(
    name="longnet",
    about=__doc__,
    sections={"step": step, "compiled": compiled},
    devices=("cpu", "cuda"),
    options=options,
)


if __name__ == "__main__":
    raise SystemExit(run(BENCHMARK))
