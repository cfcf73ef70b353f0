"""The GPU benchmark: this library beside FlexAttention and dense cuDNN and flash attention, on the same tensors.

    python benchmarks/gpu.py                # all of it, about 5 minutes on an H200; options: harness.py
    python benchmarks/gpu.py --autotune     # FlexAttention with max-autotune too (minutes more)

Before a row is timed our output and gradients are compared with float64 attention of some rows, FlexAttention's with
ours. Contenders of a row take turns, several times over, since sustained work throttles on power: only ratios within a
row mean something. bfloat16, batch 1, 2048 ÷ D heads.

kernels  TFLOP/s of the active blocks, forward and backward (5 products counted; deterministic, as ours always is). A
         rival's `ratio` is its time ÷ ours; of dense attention, measured on 16,384 tokens, its time × the real density.
options  The same with a cap, ALiBi slopes or dropout, beside our plain kernels (those of other GPUs) and FlexAttention
         with a `score_mod`. Checked against the plain PyTorch backend in float32, dropout with the same seed.
lengths  Time per token and peak memory by length, 8 heads × 64, float16, 20 blocks a row, forward after a second of the
         same (the longest call takes half of one, and sustained work throttles on power); peak in units of what must
         exist: q, k, v, out and lse, and for a training step their gradients and delta.
layouts  Building a layout on the GPU beside the forward it serves, and `create_block_mask`: alone, from the call to the
         end, and as a part of a busy device's time, which is what a model pays.
seeds    The variants of the seeds' table: time and memory of forward and backward by length.
calls    What a call costs the host: the mean of 200 in a row, the best of five times.

Every section also has the ceilings of the device in that run: a large bfloat16 product and a large copy. "kernels" and
"options" are in benchmarks/gpu_kernels.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention

import plots
from cases import Inputs, check_rows
from dilated_attention_pytorch import (
    BlockLayout,
    DilatedBlocks,
    Full,
    Pattern,
    RandomBlocks,
    SlidingWindow,
    SparsePatternConfig,
    block_sparse_attention,
)
from dilated_attention_pytorch.memory import measure_peak
from dilated_attention_pytorch.testing.timing import gpu_seconds, seconds
from gpu_kernels import DEVICE, free_memory, kernels, medians, options, random_inputs
from harness import Benchmark, Job, Record, run


def sustained(run: Callable[[], object]) -> float:
    """Seconds of a call after a second of them: a long one throttles on power, and short ones are compared with it."""
    once = gpu_seconds(run)
    gpu_seconds(run, max(1, int(1.0 / once)))
    return gpu_seconds(run, max(1, int(0.5 / once)))


def lengths(job: Job) -> list[dict[str, Any]]:
    rows = []
    patterns = {"window": SlidingWindow(1279, 1279), "random": RandomBlocks(20)}
    sizes = ((1 / 16, True), (1, True), (4, True), (16, True), (32, False))
    for (million, training), (name, pattern) in itertools.product(sizes[:1] if job.quick else sizes, patterns.items()):
        if name == "random" and million == 4:
            continue
        rows.append(_length(job, name, pattern, int(million * 2**20), training))
        job.say("{name}, {tokens:,} tokens: forward {forward_ns:.1f} ns a token, peak {forward_peak:.4f}".format(
            **rows[-1]))  # fmt: skip
    if not job.quick:
        rows.append(_capped(job, 1_750_016, 8 * 10**9))
    return rows


def _length(job: Job, name: str, pattern: Pattern, tokens: int, training: bool) -> dict[str, Any]:
    free_memory()
    begun = torch.cuda.memory_allocated()
    layout = BlockLayout.from_pattern(pattern, tokens, block_size=128, device=DEVICE)
    _ = layout.query_work
    lists = torch.cuda.memory_allocated() - begun
    q, k, v = random_inputs(tokens, 8, 64, torch.float16, 3)
    tensor, of_rows = q.nbytes, tokens * 8 * 4
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        out = block_sparse_attention(q, k, v, layout)
    peak = torch.cuda.max_memory_allocated() - begun
    row = {"name": name, "tokens": tokens, "density": layout.block_density, "lists_bytes": lists,
           "forward_peak": peak / (4 * tensor + of_rows)}  # fmt: skip
    check_rows(job.gate, f"{name}, {tokens} tokens", layout, Inputs((q, k, v), q), out)
    del out
    with torch.no_grad():
        row["forward_ns"] = sustained(lambda: block_sparse_attention(q, k, v, layout)) / tokens * 1e9
    if training:
        _ = layout.key_work
        do = torch.randn_like(q)
        for x in (q, k, v):
            x.requires_grad_()

        def step() -> tuple[Tensor, ...]:
            out = block_sparse_attention(q, k, v, layout)
            return out.detach(), *torch.autograd.grad(out, (q, k, v), do)

        for _ in range(2 if tokens <= 2**22 else 1):  # the first may compile
            torch.cuda.reset_peak_memory_stats()
            grads: list[Tensor] = []
            row["training_ns"] = seconds(lambda grads=grads: grads.extend(step()), DEVICE) / tokens * 1e9
            row["training_peak"] = (torch.cuda.max_memory_allocated() - begun) / (8 * tensor + 2 * of_rows)
            finite = all(bool(x[:, :: tokens // 64].isfinite().all()) for x in grads)
            job.gate.accept(f"{name}, {tokens} tokens, gradients", "ours", "finite", 0.0 if finite else math.nan, 0.0)
            del grads
    return row


def _capped(job: Job, tokens: int, cap: int) -> dict[str, Any]:
    """A forward on a GPU that has `cap` bytes."""
    free_memory()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(cap / total)
    try:
        row = _length(job, "window", SlidingWindow(1279, 1279), tokens, training=False)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return {**row, "name": "window, in 8 GB"}


def layouts(job: Job) -> list[dict[str, Any]]:
    rows = []
    for tokens in (2**17,) if job.quick else (2**17, 2**20):
        q, k, v = random_inputs(tokens, 8, 64, torch.float16, 3)
        for name, pattern in {
            "window": SlidingWindow(1279, 1279), "random": RandomBlocks(20),
            "dilated": DilatedBlocks((4096, 16384, 65536), (1, 4, 16), 20 * 128 / tokens, 128),
        }.items():  # fmt: skip
            build = partial(BlockLayout.from_pattern, pattern, tokens, block_size=128, device=DEVICE)
            layout = build()
            attend = partial(block_sparse_attention, q, k, v, layout)
            with torch.no_grad():
                check_rows(job.gate, f"{name}, {tokens} tokens", layout, Inputs((q, k, v), q), attend())
            host = min(seconds(build, DEVICE) for _ in range(20))
            forward = min(gpu_seconds(attend) for _ in range(3))
            device = min(_device_seconds(build) for _ in range(5))
            rows.append({
                "name": name, "tokens": tokens, "build_ms": host * 1e3, "device_ms": device * 1e3,
                "forward_ms": forward * 1e3,
            })  # fmt: skip
            if tokens == 2**17 and name == "window":

                def near(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
                    return (query - key).abs() <= 1279

                make = partial(create_block_mask, near, None, None, tokens, tokens, _compile=True)
                make()
                rows[-1]["create_block_mask_ms"] = min(seconds(make, DEVICE) for _ in range(3)) * 1e3
            times = "built in {build_ms:.2f} ms, {device_ms:.2f} of the device's, forward {forward_ms:.2f}"
            job.say(f"{name}, {tokens:,} tokens: {times.format(**rows[-1])}")
    return rows


def _device_seconds(run: Callable[[], object]) -> float:
    """What a call takes of a device that is busy, so that the host is ahead of it: as inside a model."""
    torch.cuda.synchronize()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(10**7)  # some milliseconds
    start.record()
    run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1e-3


def seeds(job: Job) -> list[dict[str, Any]]:
    rows = []
    sizes = (4096, 8192, 16384, 32768, 65536, 131072, 524288)
    for tokens in sizes[:1] if job.quick else sizes:
        q, k, v, do = random_inputs(tokens, 8, 64, torch.float16)
        variants: dict[str, Pattern] = {"dense": Full()} if tokens <= 131072 else {}
        for kept in (0.1, 0.05, 0.01):
            config = SparsePatternConfig(pattern_type="dilated_sparse", sparsity_ratio=kept)
            variants[f"{1 - kept:.0%} sparse"] = config.pattern(
                segment_lengths=(2048, 4096, tokens), dilation_rates=(1, 2, 4)
            )
        variants["hierarchical"] = SparsePatternConfig(pattern_type="hierarchical").pattern()
        for name, pattern in variants.items():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]

            def forward(leaves: list[Tensor] = leaves, pattern: Pattern = pattern) -> Tensor:
                with torch.no_grad():
                    return block_sparse_attention(*leaves, pattern)

            layout = BlockLayout.from_pattern(pattern, tokens, block_size=128, device=DEVICE)
            check_rows(job.gate, f"{name}, {tokens} tokens", layout, Inputs((q, k, v), do), forward())
            out = block_sparse_attention(*leaves, pattern)
            backward = partial(torch.autograd.grad, out, leaves, do, retain_graph=True)
            backward()
            times = medians({"forward": forward, "backward": backward}, rounds=3)
            with measure_peak(DEVICE) as peak:
                forward()
            rows.append({
                "name": name, "tokens": tokens, "forward_ms": times["forward"] * 1e3,
                "backward_ms": times["backward"] * 1e3, "forward_mb": peak.peak_bytes / 1e6,
            })  # fmt: skip
            del out, backward
        job.say(
            f"{tokens:,} tokens: "
            + ", ".join(f"{r['name']} {r['forward_ms']:.2f}" for r in rows if r["tokens"] == tokens)
        )
    return rows


def calls(job: Job) -> list[dict[str, Any]]:
    """Short enough that the GPU always waits: time between launches is the host's."""
    q, k, v = random_inputs(256, 1, 64, num=3)
    layout = BlockLayout.from_pattern(SlidingWindow(100, 0), 256, block_size=128, device=DEVICE)
    turned = [x.transpose(1, 2) for x in (q, k, v)]

    def step(run: Callable[..., Tensor], tensors: list[Tensor]) -> Callable[[], object]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        do = torch.ones_like(leaves[0])
        return lambda: torch.autograd.grad(run(*leaves), leaves, do)

    runs = {
        "ours": lambda: block_sparse_attention(q, k, v, layout),
        "ours, a pattern": lambda: block_sparse_attention(q, k, v, SlidingWindow(100, 0)),
        "sdpa": lambda: scaled_dot_product_attention(*turned),
        "ours, forward and backward": step(lambda *x: block_sparse_attention(*x, layout), [q, k, v]),
        "sdpa, forward and backward": step(scaled_dot_product_attention, turned),
    }
    check_rows(job.gate, "calls, 256 tokens", layout, Inputs((q, k, v), q), runs["ours"]())
    rows = []
    for name, once in runs.items():

        def many(once: Callable[[], object] = once) -> None:
            for _ in range(200):
                once()

        many()
        rows.append({"name": name, "microseconds": min(seconds(many, DEVICE) for _ in range(5)) / 200 * 1e6})
    job.say(", ".join(f"{row['name']} {row['microseconds']:.0f} µs" for row in rows))
    return rows


def ceilings() -> dict[str, float]:
    """What the device does at best: a large bfloat16 product, a large copy."""
    matrix = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    source = torch.randn(2**30, device=DEVICE, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    times = medians({"matmul": lambda: matrix @ matrix, "copy": lambda: target.copy_(source)})
    return {
        "matmul_tflops": 2 * 8192**3 / times["matmul"] * 1e-12,
        "copy_tbytes": 2 * source.nbytes / times["copy"] * 1e-12,
    }


def beside_ceilings(rows_of: Callable[[Job], list[dict[str, Any]]]) -> Callable[[Job], Record]:
    def section(job: Job) -> Record:
        least = ceilings()
        free_memory()
        return {"ceilings": least, "rows": rows_of(job)}

    return section


# Lengths come early: beside what the other sections leave behind, the longest would not fit into 8 GB.
BENCHMARK = Benchmark(
    name="gpu",
    about=__doc__,
    sections={
        name: beside_ceilings(rows_of)
        for name, rows_of in {
            "calls": calls, "lengths": lengths, "kernels": kernels, "options": options, "layouts": layouts,
            "seeds": seeds,
        }.items()
    },
    devices=("cuda",),
    options=lambda parser: parser.add_argument(
        "--autotune", action="store_true", help="FlexAttention with max-autotune too"
    ),
    draw=plots.gpu,
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(run(BENCHMARK))
