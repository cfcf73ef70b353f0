"""Dilated attention (LongNet) beside the way it is usually composed: gather, attend, scatter and mix, branch by branch.

    python benchmarks/dilated.py                   # on the GPU if there is one (2 minutes on an H200), else on the CPU
    python benchmarks/dilated.py --device cpu      # 16,384 tokens
    python benchmarks/dilated.py --only rows       # or lengths: time per token, 8K to 16M tokens
    python benchmarks/dilated.py --commit ID       # where the tree has no .git

Both get the same tensors. The composition is as fast as PyTorch makes it: strided views, one flash-attention call a
branch, its log-sum-exp for the mix, weights detached in training as in torchscale. Before anything is timed our output
and all gradients are compared with the float64 definition, and its output with ours; contenders take turns.

`tflops` counts the useful work: every key of every branch (two products forward, five backward), also where we read a
key once that several branches hold. `extra` is the peak above the inputs ÷ (out + lse); in training, ÷ (out, lse, the
gradients, and delta). Writes --out (benchmarks/results/dilated.json, dilated_cpu.json), a table, and a plot beside it.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from cases import HERE, GateError, environment, write_json
from dilated_attention_pytorch import Branches, dilated_attention
from dilated_attention_pytorch.memory import measure_peak
from dilated_attention_pytorch.testing.timing import gpu_seconds, seconds
from report import table

LONGNET = Branches((2048, 4096, 8192), (1, 2, 4))
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}  # ‖got − want‖ ÷ ‖want‖: rounding makes 4e-3 and 1e-6
ROUNDS = {"cuda": 7, "cpu": 3}


def ours(branches: Branches, is_causal: bool, q: Tensor, k: Tensor, v: Tensor, backend: str = "auto") -> Tensor:
    out = dilated_attention(
        q, k, v, segment_lengths=branches.segment_lengths, dilation_rates=branches.dilation_rates,
        is_causal=is_causal, backend=backend,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


def composed(branches: Branches, is_causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Lengths that divide; head h keeps the tokens ≡ h modulo the dilation."""
    batch, seq, heads, _ = q.shape
    head = torch.arange(heads, device=q.device)
    outs, lses = [], []
    for w, r in zip(branches.segment_lengths, branches.dilation_rates, strict=True):

        def kept(x: Tensor, w: int = w, r: int = r) -> Tensor:
            """[batch · segments, w / r, heads, D]"""
            return x.reshape(batch * seq // w, w // r, r, *x.shape[2:])[:, :, head % r, head]

        parts = (kept(x).transpose(1, 2) for x in (q, k, v))
        if q.device.type == "cuda":
            part, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*parts, is_causal=is_causal)
        else:
            part, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*parts, is_causal=is_causal)
        out = q.new_zeros(batch * seq // w, w // r, r, *q.shape[2:])
        out[:, :, head % r, head] = part.transpose(1, 2)
        of_rows = lse.new_full((batch * seq // w, w // r, r, heads), -1e8)
        of_rows[:, :, head % r, head] = lse.detach().transpose(1, 2)[:, : w // r]
        outs.append(out.view(q.shape))
        lses.append(of_rows.view(batch, seq, heads, 1))
    shares = torch.softmax(torch.stack(lses), 0).to(q.dtype)
    return sum(out * share for out, share in zip(outs, shares, strict=True))


def pairs_of(branches: Branches, seq: int, heads: int, is_causal: bool) -> int:
    """Pairs that count, as often as they count, of all heads; for lengths that divide."""
    total = 0
    for w, r in zip(branches.segment_lengths, branches.dilation_rates, strict=True):
        kept = min(w, seq) // r
        total += seq // min(w, seq) * (kept * (kept + 1) // 2 if is_causal else kept * kept)
    return heads * total


def check(branches: Branches, is_causal: bool, head_dim: int, dtype: torch.dtype, device: str) -> None:
    """Ours against the definition in float64, output and all gradients; the composition's output against ours."""
    seq = max(branches.segment_lengths)
    q, k, v, do = (torch.randn(1, seq, 2, head_dim, device=device).to(dtype) for _ in range(4))

    def run(attend: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in tensors[:3]]
        out = attend(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]

    got = run(partial(ours, branches, is_causal), q, k, v, do)
    want = run(partial(ours, branches, is_causal, backend="reference"), *(x.double() for x in (q, k, v, do)))
    for name, mine, right in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        _same(f"ours, {name}, D={head_dim}, causal={is_causal}", mine, right)
    _same(f"the composition, D={head_dim}, causal={is_causal}", composed(branches, is_causal, q, k, v), got[0])


def _same(name: str, got: Tensor, want: Tensor) -> None:
    error = float((got.double() - want.double()).norm() / want.double().norm())
    if not error <= TOLERANCE[got.dtype]:  # written so that NaN fails
        raise GateError(f"{name} is off by {error:.1e}")


def time_of(run: Callable[[], object], device: str) -> float:
    return gpu_seconds(run, max(1, min(10, int(2e-2 / gpu_seconds(run))))) if device == "cuda" else seconds(run)


def in_turns(runs: Mapping[str, Callable[[], object]], device: str) -> dict[str, float]:
    """Seconds of a call, the median of several turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(ROUNDS[device] + 1):
        for name, run in runs.items():
            taken = time_of(run, device)
            if turn:  # the first warms up
                times[name].append(taken)
    return {name: median(each) for name, each in times.items()}


def row_of(branches: Branches, tokens: int, head_dim: int, is_causal: bool, device: str) -> dict[str, Any]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    heads = 8
    q, k, v, do = (torch.randn(1, tokens, heads, head_dim, device=device, dtype=dtype) for _ in range(4))
    flops = 4 * head_dim * pairs_of(branches, tokens, heads, is_causal)
    row: dict[str, Any] = {"tokens": tokens, "head_dim": head_dim, "causal": is_causal}
    contenders = {"ours": partial(ours, branches, is_causal), "composed": partial(composed, branches, is_causal)}
    _same(f"the composition, {tokens} tokens", contenders["composed"](q, k, v), contenders["ours"](q, k, v))

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
        times = in_turns(ways.pop(way), device)
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
        forward = min(time_of(lambda: attend(q, k, v), "cuda") for _ in range(3))
    row = {"tokens": tokens, "causal": is_causal, "forward_ns": forward / tokens * 1e9}
    do = torch.randn_like(q)
    for x in (q, k, v):
        x.requires_grad_()
    step = min(time_of(lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), do), "cuda") for _ in range(3))
    row["step_ns"] = step / tokens * 1e9
    return row


def as_text(record: Mapping[str, Any]) -> str:
    machine, parts = record["environment"], []
    parts.append(f"{machine.get('gpu') or machine['cpu']}, torch {machine['torch']}, commit {machine['commit'][:12]}")
    head = ["tokens", "D", "causal", "way", "ours ms", "composed ms", "ratio", "TFLOP/s", "extra", "composed extra"]
    rows = [
        [f"{row['tokens']:,}", str(row["head_dim"]), str(row["causal"]), way, f"{row[way]['ours_ms']:.3f}",
         f"{row[way]['composed_ms']:.3f}", f"{row[way]['ratio']:.2f}", f"{row[way]['tflops']:.3g}",
         *(f"{row[way][name]:.3f}" if name in row[way] else "–" for name in ("ours_extra", "composed_extra"))]
        for row in record.get("rows", []) for way in ("forward", "backward", "step")
    ]  # fmt: skip
    if rows:
        parts.append(table("dilated attention", head, rows))
    head = ["tokens", "causal", "forward ns/token", "step ns/token"]
    rows = [
        [f"{row['tokens']:,}", str(row["causal"]), *(f"{row[n]:.2f}" for n in ("forward_ns", "step_ns"))]
        for row in record.get("lengths", [])
    ]
    if rows:
        parts.append(table("time per token", head, rows))
    return "\n\n".join(parts)


def draw(record: Mapping[str, Any], path: Path) -> Path | None:
    """Time per token by length. None without matplotlib, or with nothing to draw."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    if not record.get("lengths"):
        return None
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for is_causal, style in ((False, "-"), (True, "--")):
        rows = [row for row in record["lengths"] if row["causal"] == is_causal]
        for name, label, colour in (("forward_ns", "forward", "#0b6e99"), ("step_ns", "training step", "#d9730d")):
            axes.plot(
                [row["tokens"] for row in rows], [row[name] for row in rows], style, color=colour, marker="o",
                label=f"{label}{', causal' if is_causal else ''}",
            )  # fmt: skip
    axes.set(xscale="log", xlabel="tokens", ylabel="ns a token", ylim=(0, None),
             title="Dilated attention [2048, 4096, 8192] × [1, 2, 4], 8 heads × 64")  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 0.2))
    figure.savefig(path, dpi=120)
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=("rows", "lengths"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    args = parser.parse_args()
    device = args.device
    out = args.out or HERE / "results" / ("dilated.json" if device == "cuda" else "dilated_cpu.json")
    record: dict[str, Any] = {
        "environment": environment(),
        "command": f"python benchmarks/dilated.py --device {device}" + (f" --only {args.only}" if args.only else ""),
    }
    if args.commit:
        record["environment"]["commit"] = args.commit
    if device == "cuda":
        record["environment"]["gpu"] = torch.cuda.get_device_name()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    gate = LONGNET if device == "cuda" else Branches((512, 1024, 2048), (1, 2, 4))
    for is_causal in (False, True):
        for head_dim in (64, 128):
            check(gate, is_causal, head_dim, dtype, device)
    print("ours equals the definition, and the composition ours", flush=True)
    if args.only != "lengths":
        sizes = [(16384, 64)] if device == "cpu" else [(65536, 64), (2**20, 64), (65536, 128), (2**20, 128)]
        record["rows"] = []
        for tokens, head_dim in sizes:
            for is_causal in (False, True):
                record["rows"].append(row_of(LONGNET, tokens, head_dim, is_causal, device))
                write_json(out, record)
                gc.collect()
    if args.only != "rows" and device == "cuda":
        record["lengths"] = []
        for exponent in range(13, 25):
            for is_causal in (False, True):
                gc.collect()
                torch.cuda.empty_cache()
                record["lengths"].append(length_of(2**exponent, is_causal))
                write_json(out, record)
    print(as_text(record))
    draw(record, out.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
