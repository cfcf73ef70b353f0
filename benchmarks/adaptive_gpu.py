"""Choosing blocks on a GPU: what it costs beside the attention it serves, and what adaptive attention gains over dense.

    python benchmarks/adaptive_gpu.py           # a few minutes; options: harness.py
    python benchmarks/adaptive_gpu.py --brief   # a minute: the rows that a change of these kernels concerns most

selection  Time of `select_blocks` ÷ time of the forward over its layout, causal, 10 % of the blocks, by length, scorer,
           selector and block. Targets at 65,536 tokens: means of blocks 0.10, patches 0.20. Beside it what its kernels
           take, without the host, and what it allocates.
adaptive   A whole adaptive call, selection and lists included, against dense causal cuDNN, 10 %: forward (targets of
           131,072 tokens: 5 ×) and training step (4 ×), and what share of the forward is selection.

bfloat16, batch 1, 16 heads × 128. Contenders of a row take turns. Before a row is timed, rows of its output are
compared with float64 attention over its layout.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any, NamedTuple

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
from dilated_attention_pytorch.ops.scores import Scorer
from gpu_kernels import DEVICE, ROUNDS, dense, medians, random_inputs
from harness import Benchmark, Job, Record, run

HEADS, HEAD_DIM, SHARE = 16, 128, 0.1
BRIEF_ROUNDS = 3
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


class Choice(NamedTuple):
    """A row of the section "selection"."""

    scorer: str
    block: tuple[int, int]
    tokens: int = 65536
    spread: str = "even"
    brief: bool = False


SCORERS: dict[str, str | Scorer] = {
    "mean": "mean",
    "minmax": "minmax",
    "patches 4x4": "patches",
    "patches 16x16": MeanPooled(16, 16),
    "antidiagonal 8": "antidiagonal",
    "antidiagonal 16": Antidiagonal(16),
    "sampled 8": "sampled",
}
SPREADS = {"even": EVEN, "shared": SharedBudget(SHARE), "same": TopK(SHARE)}
CHOICES = [
    Choice("patches 4x4", (64, 16), brief=True),
    Choice("patches 4x4", (16, 16), brief=True),
    Choice("patches 4x4", (128, 128), brief=True),
    Choice("mean", (128, 128), brief=True),
    Choice("minmax", (128, 128), brief=True),
    Choice("gate", (64, 16), brief=True),
    Choice("antidiagonal 8", (64, 16), brief=True),
    Choice("sampled 8", (128, 128)),
    Choice("minmax", (64, 16)),
    Choice("gate", (128, 128)),
    Choice("antidiagonal 16", (128, 128)),
    Choice("patches 16x16", (128, 128)),
    Choice("mean", (128, 128), spread="shared", brief=True),
    Choice("mean", (128, 128), spread="same", brief=True),
    Choice("mean", (64, 64), brief=True),
    Choice("mean", (128, 32), brief=True),
    Choice("patches 4x4", (64, 16), 16384, brief=True),
    Choice("patches 4x4", (16, 16), 16384),
    Choice("mean", (128, 128), 16384),
    Choice("antidiagonal 8", (64, 16), 16384),
    Choice("patches 4x4", (64, 16), 262144),
    Choice("mean", (128, 128), 262144),
    Choice("antidiagonal 8", (64, 16), 262144),
]


def selection(job: Job) -> Record:
    rows, tensors = [], random_inputs(16, HEADS, HEAD_DIM)
    for choice in CHOICES:
        if job.args.brief and not choice.brief:
            continue
        tokens = min(choice.tokens, 8192) if job.quick else choice.tokens
        if tensors[0].shape[1] != tokens:
            tensors = random_inputs(tokens, HEADS, HEAD_DIM)
        q, k, v, _ = tensors
        scorer = SCORERS.get(choice.scorer) or BlockGate(HEADS, HEAD_DIM, device=DEVICE).requires_grad_(False)
        call = {"scorer": scorer, "selector": SPREADS[choice.spread], "block_size": choice.block, "is_causal": True}
        choose = partial(select_blocks, q, k, **call)
        layout = choose()
        with torch.no_grad():
            attend = partial(block_sparse_attention, q, k, v, layout)
            check(job, "{scorer}, {spread}, {block}, {tokens}".format(**choice._asdict()), tensors, layout, attend())
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            choose()
            peak = torch.cuda.max_memory_allocated() - before
            times = medians({"select": choose, "attend": attend}, BRIEF_ROUNDS if job.args.brief else ROUNDS)
        row = {
            "scorer": choice.scorer, "spread": choice.spread, "block": list(choice.block), "tokens": tokens,
            "density": layout.density, "select_ms": times["select"] * 1e3, "attend_ms": times["attend"] * 1e3,
            "ratio": times["select"] / times["attend"], "select_device_ms": device_seconds(choose) * 1e3,
            "select_peak_mb": peak / 1e6,
        }  # fmt: skip
        rows.append(row)
        job.say(
            "{scorer}, {spread}, {block}, {tokens}: select {select_ms:.2f} ms ({select_device_ms:.2f} of the device), "
            "attend {attend_ms:.2f} ms, {ratio:.1%}".format(**row)
        )
        del layout, attend
    return {"rows": rows}


# Tokens, scorer, block, ways.
WHOLE_CALLS = [
    (131072, "mean", (128, 128), ("forward", "training")),
    (131072, "patches", (64, 16), ("forward", "training")),
    (65536, "patches", (64, 16), ("forward",)),
    (65536, "mean", (128, 128), ("forward",)),
    (16384, "patches", (64, 16), ("forward",)),
]


def adaptive(job: Job) -> Record:
    rows = []
    for usual, scorer, block, ways in WHOLE_CALLS:
        tokens = min(usual, 8192) if job.quick else usual
        tensors = random_inputs(tokens, HEADS, HEAD_DIM)
        module = BlockSparseAdaptive(SHARE, scorer=scorer, block_size=block)
        turned = [x.transpose(1, 2) for x in tensors]
        cudnn, ours = partial(dense, SDPBackend.CUDNN_ATTENTION, True), partial(module, is_causal=True)
        case = f"adaptive, {scorer}, {block}, {tokens}"
        check(job, case, tensors, module.layout(*tensors[:2], True), _forward(ours, tensors))
        for way in ways[:1] if job.args.brief else ways:
            attend = _forward if way == "forward" else _training
            runs = {"ours": partial(attend, ours, tensors), "cudnn": partial(attend, cudnn, turned)}
            runs["select"] = partial(module.layout, *tensors[:2], True)
            times = medians(runs, BRIEF_ROUNDS if job.args.brief else ROUNDS)
            row = {
                "way": way, "tokens": tokens, "share": SHARE, "scorer": scorer, "block": list(block),
                **{f"{n}_ms": t * 1e3 for n, t in times.items()},
                "speedup": times["cudnn"] / times["ours"], "selection_share": times["select"] / times["ours"],
            }  # fmt: skip
            rows.append(row)
            job.say(
                "{way}, {scorer}, {block}, {tokens}: ours {ours_ms:.2f} ms, cuDNN {cudnn_ms:.2f} ms, {speedup:.2f} ×; "
                "selection {selection_share:.1%}".format(**row)
            )
    return {"rows": rows}


def _forward(run: Any, inputs: list[Tensor]) -> Tensor:
    with torch.no_grad():
        return run(*inputs[:3])


def _training(run: Any, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    return torch.autograd.grad(run(*leaves), leaves, inputs[3])


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--brief", action="store_true", help="some rows, in fewer rounds: about a minute")


BENCHMARK = Benchmark(
    name="adaptive_gpu", about=__doc__, sections={"selection": selection, "adaptive": adaptive}, devices=("cuda",),
    options=options,
)  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(run(BENCHMARK))
