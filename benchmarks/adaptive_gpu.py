"""Choosing blocks on a GPU: what it costs beside the attention it serves, and what adaptive attention gains over dense.

    python benchmarks/adaptive_gpu.py       # a few minutes; options: harness.py

selection  Time of `select_blocks` ÷ time of the forward over its layout, 65,536 tokens, causal, 10 % of the blocks, by
           scorer, selector and block. The target is 0.10. Beside it what its kernels take, without the host.
adaptive   A whole adaptive call, selection and lists included, against dense causal cuDNN, 131,072 tokens, 10 %:
           forward (target 5 ×) and training step (target 4 ×), and what share of the forward is selection.

bfloat16, batch 1, 16 heads × 128. Contenders of a row take turns. Before a row is timed, rows of its output are
compared with float64 attention over its layout.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from cases import Inputs, check_rows
from dilated_attention_pytorch import (
    Antidiagonal,
    BlockGate,
    BlockLayout,
    BlockSparseAdaptive,
    MeanPooled,
    SharedBudget,
    TopK,
    block_sparse_attention,
    select_blocks,
)
from gpu_kernels import DEVICE, dense, medians, random_inputs
from harness import Benchmark, Job, Record, run

HEADS, HEAD_DIM, SHARE = 16, 128, 0.1
EVEN = TopK(SHARE, even=True, across_heads=True)


def check(job: Job, name: str, tensors: list[Tensor], layout: BlockLayout, out: Tensor) -> None:
    """The first head, whose lists are the first lists."""
    q, k, v, do = (x[:, :, :1] for x in tensors)
    check_rows(job.gate, name, layout, Inputs((q, k, v), do), out[:, :, :1])


def device_seconds(run: Any, calls: int = 10) -> float:
    """Of the kernels of a call, by PyTorch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    return sum(event.device_time_total for event in profile.key_averages()) / calls * 1e-6


def selection(job: Job) -> Record:
    tokens = 8192 if job.quick else 65536
    gate = BlockGate(HEADS, HEAD_DIM, queries=None, keys=None, device=DEVICE).requires_grad_(False)
    scorers = {
        "mean": "mean",
        "minmax": "minmax",
        "gate": gate,
        "patches 32x32": MeanPooled(32, 32),
        "patches 16x16": MeanPooled(16, 16),
        "patches 4x4": MeanPooled(4, 4),
        "antidiagonal 16": Antidiagonal(16),
    }
    calls = [(name, "even", EVEN, (128, 128)) for name in scorers]
    calls += [("mean", "shared", SharedBudget(SHARE), (128, 128)), ("mean", "same", TopK(SHARE), (128, 128))]
    calls += [("mean", "even", EVEN, (64, 64)), ("mean", "even", EVEN, (128, 32))]
    tensors = random_inputs(tokens, HEADS, HEAD_DIM)
    q, k, v, _ = tensors
    rows = []
    for name, spread, selector, block in calls:
        choose = partial(select_blocks, q, k, scorer=scorers[name], selector=selector, block_size=block, is_causal=True)
        layout = choose()
        with torch.no_grad():
            attend = partial(block_sparse_attention, q, k, v, layout)
            check(job, f"{name}, {spread}, {block}", tensors, layout, attend())
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            choose()
            peak = torch.cuda.max_memory_allocated() - before
            times = medians({"select": choose, "attend": attend})
        row = {
            "scorer": name, "spread": spread, "block": list(block), "tokens": tokens, "density": layout.density,
            "select_ms": times["select"] * 1e3, "attend_ms": times["attend"] * 1e3,
            "ratio": times["select"] / times["attend"], "select_device_ms": device_seconds(choose) * 1e3,
            "select_peak_mb": peak / 1e6,
        }  # fmt: skip
        rows.append(row)
        job.say(
            "{scorer}, {spread}, {block}: select {select_ms:.2f} ms ({select_device_ms:.2f} of the device), "
            "attend {attend_ms:.2f} ms, {ratio:.1%}".format(**row)
        )
        del layout, attend
    return {"rows": rows}


def adaptive(job: Job) -> Record:
    tokens = 8192 if job.quick else 131072
    tensors = random_inputs(tokens, HEADS, HEAD_DIM)
    module = BlockSparseAdaptive(SHARE, scorer="mean", block_size=128)
    turned = [x.transpose(1, 2) for x in tensors]
    cudnn = partial(dense, SDPBackend.CUDNN_ATTENTION, True)

    def forward(run: Any, inputs: list[Tensor]) -> Tensor:
        with torch.no_grad():
            return run(*inputs[:3])

    def training(run: Any, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        return torch.autograd.grad(run(*leaves), leaves, inputs[3])

    ours = partial(module, is_causal=True)
    check(job, "adaptive", tensors, module.layout(*tensors[:2], True), forward(ours, tensors))
    rows = []
    for way, attend in (("forward", forward), ("training", training)):
        runs = {"ours": partial(attend, ours, tensors), "cudnn": partial(attend, cudnn, turned)}
        runs["select"] = partial(module.layout, *tensors[:2], True)
        times = medians(runs)
        row = {
            "way": way, "tokens": tokens, "share": SHARE, **{f"{n}_ms": t * 1e3 for n, t in times.items()},
            "speedup": times["cudnn"] / times["ours"], "selection_share": times["select"] / times["ours"],
        }  # fmt: skip
        rows.append(row)
        line = "{way}: ours {ours_ms:.2f} ms, cuDNN {cudnn_ms:.2f} ms, {speedup:.2f} ×; selection {selection_share:.1%}"
        job.say(line.format(**row))
    return {"rows": rows}


BENCHMARK = Benchmark(
    name="adaptive_gpu", about=__doc__, sections={"selection": selection, "adaptive": adaptive}, devices=("cuda",)
)


if __name__ == "__main__":
    raise SystemExit(run(BENCHMARK))
