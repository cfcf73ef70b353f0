"""Dilated attention (LongNet) beside the way it is usually composed: gather, attend, scatter and mix, branch by branch.

    python benchmarks/dilated.py                   # on the GPU if there is one (2 minutes on an H200), else on the CPU
    python benchmarks/dilated.py --device cpu      # options: harness.py

rows     65,536 and 1,048,576 tokens, on a CPU 16,384.
lengths  Time per token, 8K to 16M tokens. GPU only.
configurations  Those that people run: the paper's, a slide encoder's, geometric ones of even and uneven lengths.

Both get the same tensors. The composition is as fast as PyTorch makes it: strided views, one flash-attention call a
branch, its log-sum-exp for the mix, weights detached in training as in torchscale. Before anything is timed our output
and all gradients are compared with the float64 definition, and its output with ours; contenders take turns.

`tflops` counts the useful work: every key of every branch (two products forward, five backward), also where we read a
key once that several branches hold. `extra` is the peak above the inputs ÷ (out + lse); in training, ÷ (out, lse, the
gradients, and delta).
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import plots
from dilated_attention_pytorch import Branches, dilated_attention, explain
from dilated_attention_pytorch.memory import measure_peak
from dilated_attention_pytorch.testing.timing import interleave
from harness import Benchmark, Job, Record, SkipSectionError, run

LONGNET = Branches((2048, 4096, 8192), (1, 2, 4))
GATED = Branches((512, 1024, 2048), (1, 2, 4))  # for the check, where float64 takes its time
ROUNDS = {"cuda": 7, "cpu": 3}


def ours(branches: Branches, is_causal: bool, q: Tensor, k: Tensor, v: Tensor, backend: str = "auto") -> Tensor:
    out = dilated_attention(
        q, k, v, segment_lengths=branches.segment_lengths, dilation_rates=branches.dilation_rates,
        is_causal=is_causal, backend=backend,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


def composed(branches: Branches, is_causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Head h keeps the tokens ≡ h modulo the dilation. Where a segment does not divide the length, or a dilation its
    segment, it attends to padding as well; heads are filled up to a multiple of 64."""
    batch, seq, heads, width = q.shape
    q, k, v = (torch.nn.functional.pad(x, (0, -width % 64)) for x in (q, k, v))
    head = torch.arange(heads, device=q.device)
    outs, lses = [], []
    for w, r in zip(branches.segment_lengths, branches.dilation_rates, strict=True):
        w = min(w, seq)
        segments, rows = -(-seq // w), -(-w // r)

        def kept(x: Tensor, w: int = w, r: int = r, segments: int = segments, rows: int = rows) -> Tensor:
            """[batch · segments, rows, heads, D]"""
            x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, segments * w - seq)).reshape(-1, w, *x.shape[2:])
            x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, rows * r - w))
            return x.view(-1, rows, r, *x.shape[2:])[:, :, head % r, head]

        parts = (kept(x).transpose(1, 2) for x in (q, k, v))
        options = {"is_causal": is_causal, "scale": width**-0.5}
        if q.device.type == "cuda":
            part, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*parts, **options)
        else:
            part, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*parts, **options)
        out = q.new_zeros(batch * segments, rows, r, *q.shape[2:])
        out[:, :, head % r, head] = part.transpose(1, 2)
        of_rows = lse.new_full((batch * segments, rows, r, heads), -1e8)
        of_rows[:, :, head % r, head] = lse.detach().transpose(1, 2)[:, :rows]
        outs.append(out.flatten(1, 2)[:, :w].reshape(batch, -1, *q.shape[2:])[:, :seq])
        lses.append(of_rows.flatten(1, 2)[:, :w].reshape(batch, -1, heads, 1)[:, :seq])
    shares = torch.softmax(torch.stack(lses), 0).to(q.dtype)
    return sum(out * share for out, share in zip(outs, shares, strict=True))[..., :width]


def pairs_of(branches: Branches, seq: int, heads: int, is_causal: bool) -> int:
    """Pairs that count, as often as they count, of all heads."""
    total = 0
    for w, r, offset in itertools.chain.from_iterable(branches.of_head(head, heads) for head in range(heads)):
        for times, tokens in ((seq // w, w), (1, seq % w)):
            kept = max(0, -(-(tokens - offset) // r))
            total += times * (kept * (kept + 1) // 2 if is_causal else kept * kept)
    return total


def check(job: Job) -> None:
    """Ours against the definition in float64, output and all gradients; the composition's output against ours."""
    on_gpu = job.device == "cuda"
    branches = LONGNET if on_gpu and not job.quick else GATED
    seq, dtype = max(branches.segment_lengths), torch.bfloat16 if on_gpu else torch.float32
    for is_causal, head_dim in itertools.product((False, True), (64, 128)):
        q, k, v, do = (torch.randn(1, seq, 2, head_dim, device=job.device).to(dtype) for _ in range(4))

        def results(attend: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
            leaves = [x.detach().requires_grad_() for x in tensors[:3]]
            out = attend(*leaves)
            return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]

        got = results(partial(ours, branches, is_causal), q, k, v, do)
        exact = partial(ours, branches, is_causal, backend="reference")
        want = results(exact, *(x.double() for x in (q, k, v, do)))
        case = f"D={head_dim}, causal={is_causal}"
        for name, mine, right in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
            job.gate.check(f"{case}, {name}", "ours", "float64", mine, right)
        job.gate.check(case, "the composition", "ours", composed(branches, is_causal, q, k, v), got[0])


def row_of(job: Job, branches: Branches, tokens: int, head_dim: int, is_causal: bool) -> dict[str, Any]:
    device = job.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    heads = 8
    q, k, v, do = (torch.randn(1, tokens, heads, head_dim, device=device, dtype=dtype) for _ in range(4))
    flops = 4 * head_dim * pairs_of(branches, tokens, heads, is_causal)
    row: dict[str, Any] = {"tokens": tokens, "head_dim": head_dim, "causal": is_causal}
    contenders = {"ours": partial(ours, branches, is_causal), "composed": partial(composed, branches, is_causal)}
    case = f"{tokens} tokens, D={head_dim}, causal={is_causal}"
    job.gate.check(case, "the composition", "ours", contenders["composed"](q, k, v), contenders["ours"](q, k, v))

    def forward(attend: Callable[..., Tensor]) -> Tensor:
        with torch.no_grad():
            return attend(q, k, v)

    def step(attend: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(attend(*leaves), leaves, do)

    def backward(attend: Callable[..., Tensor]) -> Callable[[], object]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return partial(torch.autograd.grad, attend(*leaves), leaves, do, retain_graph=True)

    must = {"forward": q.nbytes + tokens * heads * 4, "step": 4 * q.nbytes + 2 * tokens * heads * 4}
    ways: dict[str, dict[str, Callable[[], object]]] = {
        "forward": {name: partial(forward, attend) for name, attend in contenders.items()},
        "backward": {name: backward(attend) for name, attend in contenders.items()},
        "step": {name: partial(step, attend) for name, attend in contenders.items()},
    }
    for way, factor in (("forward", 1.0), ("backward", 2.5), ("step", 3.5)):
        runs = ways.pop(way)
        for attend in runs.values():
            attend()
        times = {name: each.median for name, each in interleave(runs, ROUNDS[device], device=device).items()}
        row[way] = {
            "ours_ms": times["ours"] * 1e3,
            "composed_ms": times["composed"] * 1e3,
            "ratio": times["composed"] / times["ours"],
            "tflops": factor * flops / times["ours"] * 1e-12,
        }
        if way in must:
            for name, attend in contenders.items():
                run = partial(forward if way == "forward" else step, attend)
                with measure_peak(device) as peak:
                    kept = run()
                row[way][f"{name}_extra"] = peak.peak_bytes / must[way]
                del kept
    return row


def length_of(tokens: int, is_causal: bool) -> dict[str, Any]:
    """8 heads × 64, float16, forward; and a training step as far as it fits."""
    q, k, v = (torch.randn(1, tokens, 8, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    attend = partial(ours, LONGNET, is_causal)
    with torch.no_grad():
        forward = interleave({"forward": lambda: attend(q, k, v)}, 3, device="cuda")["forward"].min
    row = {"tokens": tokens, "causal": is_causal, "forward_ns": forward / tokens * 1e9}
    do = torch.randn_like(q)
    for x in (q, k, v):
        x.requires_grad_()
    row["step_ns"] = (
        interleave({"step": lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), do)}, 3, device="cuda")["step"].min
        / tokens
        * 1e9
    )
    return row


def rows(job: Job) -> Record:
    check(job)
    if job.quick:
        branches, sizes = Branches((256, 512, 1024), (1, 2, 4)), [(2048, 64)]
    else:
        branches = LONGNET
        sizes = [(16384, 64)] if job.device == "cpu" else [(65536, 64), (2**20, 64), (65536, 128), (2**20, 128)]
    found = []
    for (tokens, head_dim), is_causal in itertools.product(sizes, (False, True)):
        found.append(row_of(job, branches, tokens, head_dim, is_causal))
        gc.collect()
        ratios = ", ".join(f"{way} {found[-1][way]['ratio']:.2f} x" for way in ("forward", "backward", "step"))
        job.say(f"{tokens:,} tokens, D={head_dim}, causal {is_causal}: {ratios}")
    return {"rows": found}


def lengths(job: Job) -> Record:
    if job.device == "cpu":
        raise SkipSectionError("it is for a GPU")
    check(job)
    found = []
    for exponent, is_causal in itertools.product(range(13, 14 if job.quick else 25), (False, True)):
        gc.collect()
        torch.cuda.empty_cache()
        found.append(length_of(2**exponent, is_causal))
        job.say("{tokens:,} tokens, causal {causal}: {forward_ns:.1f}, {step_ns:.1f} ns a token".format(**found[-1]))
    return {"rows": found}


LONG = (2048, 4096, 8192, 16384, 32768)
SLIDES = Branches((1024, 5792, 32768, 185363, 1048576), (1, 2, 4, 8, 16))
PAPER, GEOMETRIC = Branches(LONG, (1, 2, 4, 6, 12)), Branches(LONG, (1, 2, 4, 8, 16))
# What people run: name, branches, heads, head_dim, causal, tokens, and whether the composition is raced.
CONFIGURATIONS = [
    ("LongNet, the paper's", PAPER, 12, 64, True, (32768, 131072), False),
    ("LongNet, the paper's", PAPER, 12, 128, True, (32768, 131072), False),
    ("LongNet, geometric", GEOMETRIC, 12, 64, True, (32768, 32772), False),
    ("LongNet, geometric", GEOMETRIC, 12, 128, True, (32768, 32772), False),
    ("slide encoder", SLIDES, 16, 48, False, (10_000, 60_000, 200_000), True),
]
SMALL = [Branches((256, 579, 1000, 2048, 9999), rates) for rates in ((1, 2, 4, 6, 12), (1, 2, 4, 8, 16))]


def check_configurations(job: Job) -> None:
    """Ours against float64 for the dilations, widths and masks that are timed, with segments as uneven, on few
    tokens."""
    dtype, seq = (torch.bfloat16, 2222) if job.device == "cuda" else (torch.float32, 400)
    cases = [*itertools.product(SMALL, ((64, True), (128, True), (48, False)))]
    for branches, (head_dim, is_causal) in cases if job.device == "cuda" else cases[:1]:
        tensors = [torch.randn(1, seq, 3, head_dim, device=job.device).to(dtype) for _ in range(4)]

        def results(backend: str, precision: torch.dtype, tensors: list[Tensor], branches: Branches, causal: bool):  # type: ignore[no-untyped-def]
            leaves = [x.detach().to(precision).requires_grad_() for x in tensors[:3]]
            out = ours(branches, causal, *leaves, backend=backend)
            return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3].to(precision))]

        got = results("auto", dtype, tensors, branches, is_causal)
        want = results("reference", torch.float64, tensors, branches, is_causal)
        case = f"{branches.dilation_rates}, D={head_dim}, causal={is_causal}"
        for name, mine, right in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
            job.gate.check(f"{case}, {name}", "ours", "float64", mine, right)


def configuration(
    job: Job, name: str, branches: Branches, heads: int, head_dim: int, is_causal: bool, tokens: int, raced: bool
) -> dict[str, Any]:
    dtype = torch.bfloat16 if job.device == "cuda" else torch.float32
    q, k, v, do = (torch.randn(1, tokens, heads, head_dim, device=job.device, dtype=dtype) for _ in range(4))
    flops = 4 * head_dim * pairs_of(branches, tokens, heads, is_causal)
    row: dict[str, Any] = {"name": name, "tokens": tokens, "heads": heads, "head_dim": head_dim, "causal": is_causal}
    row["kernels"] = explain(q, k, v, branches, is_causal=is_causal).kernels
    contenders = {"ours": partial(ours, branches, is_causal)}
    if raced:
        contenders["composed"] = partial(composed, branches, is_causal)

    def forward(attend: Callable[..., Tensor]) -> Tensor:
        with torch.no_grad():
            return attend(q, k, v)

    def backward(attend: Callable[..., Tensor]) -> Callable[[], object]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return partial(torch.autograd.grad, attend(*leaves), leaves, do, retain_graph=True)

    forward(contenders["ours"])
    with measure_peak(job.device) as peak:
        out = backward(contenders["ours"])()
    row["peak_bytes"] = peak.peak_bytes
    del out
    for way, factor in (("forward", 1.0), ("backward", 2.5)):
        runs = {each: partial(forward, f) if way == "forward" else backward(f) for each, f in contenders.items()}
        for once in runs.values():
            once()
        for each, times in interleave(runs, ROUNDS[job.device], device=job.device).items():
            row[f"{way}_{each}_ms"] = times.median * 1e3
        row[f"{way}_tflops"] = factor * flops / row[f"{way}_ours_ms"] * 1e-9
    return row


def configurations(job: Job) -> Record:
    check_configurations(job)
    found = []
    small = job.quick or job.device == "cpu"
    for name, branches, heads, head_dim, is_causal, sizes, raced in CONFIGURATIONS[-1:] if small else CONFIGURATIONS:
        for tokens in (2048,) if small else sizes:
            found.append(configuration(job, name, branches, heads, head_dim, is_causal, tokens, raced))
            gc.collect()
            job.say(f"{name}, {tokens:,} × {head_dim}: {found[-1]['forward_ours_ms']:.2f} ms")
    return {"rows": found}


BENCHMARK = Benchmark(
    name="dilated",
    about=__doc__,
    sections={"rows": rows, "lengths": lengths, "configurations": configurations},
    devices=("cpu", "cuda"),
    draw=plots.dilated,
)


if __name__ == "__main__":
    raise SystemExit(run(BENCHMARK))
