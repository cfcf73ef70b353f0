"""The GPU benchmark: this library beside FlexAttention and dense cuDNN and flash attention, on the same tensors.

    python benchmarks/gpu.py                       # all of it, about 5 minutes on an H200
    python benchmarks/gpu.py --only kernels        # one or more of kernels, options, lengths, layouts, seeds, calls
    python benchmarks/gpu.py --autotune            # FlexAttention with max-autotune too (minutes more)
    python benchmarks/gpu.py --commit ID           # where the tree has no .git

Before a row is timed our output and gradients are compared with float64 attention of some rows, FlexAttention's with
ours; a wrong one ends the run with exit status 1. Contenders of a row take turns, several times over, since sustained
work throttles on power: only ratios within a row mean something. bfloat16, batch 1, 2048 ÷ D heads.

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

Writes --out (benchmarks/results/gpu.json) after every section, a table on stdout, and plots beside it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from cases import HERE, GateError, Inputs, environment, expected, flex_mask, write_json
from dilated_attention_pytorch import (
    BlockLayout,
    Causal,
    DilatedBlocks,
    Full,
    Pattern,
    RandomBlocks,
    SlidingWindow,
    SparsePatternConfig,
    block_sparse_attention,
)
from dilated_attention_pytorch.kernels import launch
from dilated_attention_pytorch.memory import measure_peak
from dilated_attention_pytorch.testing.timing import gpu_seconds
from gpu_report import as_text, draw

TOLERANCE = 2e-2  # ‖got − want‖ ÷ ‖want‖ in bfloat16: rounding makes 4e-3, a missing block of 13 makes 0.2
DENSE = 16384
ROUNDS = 7
WIDTH = 2048


@dataclass(frozen=True)
class Case:
    name: str
    pattern: Pattern
    head_dim: int
    tokens: int = 32768
    block: int = 128
    flex: bool = True  # whether FlexAttention is a contender
    autotune: bool = False
    shared: int = 1  # query heads of a key head; where they are several, ours is timed alone


def cases() -> list[Case]:
    """5 % of 32,768 tokens unless it says something else."""
    dilated = DilatedBlocks((4096, 16384, 32768), (1, 4, 16), 0.05, 128)
    window = SlidingWindow(13 * 64, 13 * 64 - 1)
    return [
        Case("random", RandomBlocks(13), 128, autotune=True),
        Case("window", window, 128),
        Case("dilated", dilated, 128),
        Case("random", RandomBlocks(13), 64, autotune=True),
        Case("window", window, 64),
        Case("dilated", dilated, 64),
        Case("full", Full(), 128, tokens=DENSE, flex=False),
        Case("causal", Causal(), 128, tokens=DENSE, flex=False),
        Case("full", Full(), 64, tokens=DENSE, flex=False),
        Case("causal window 1024", SlidingWindow(1023, 0), 128),
        Case("causal window 1024", SlidingWindow(1023, 0), 64),
        Case("random", RandomBlocks(26, block_size=64), 64, block=64),
        Case("random", RandomBlocks(51, block_size=32), 64, block=32, flex=False),
        Case("random", RandomBlocks(102, block_size=16), 64, block=16, flex=False),
        *(
            Case("random, 4 heads a key head", RandomBlocks(n, block_size=block), 64, block=block, shared=4)
            for n, block in ((26, 64), (51, 32), (102, 16))
        ),
        Case("random 1 %", RandomBlocks(3), 128),
        Case("random 20 %", RandomBlocks(51), 128),
        Case("random 50 %", RandomBlocks(128), 128),
    ]


def seconds_of(contenders: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Seconds of a call of each, by CUDA events, in turns; as many calls at a time as take some milliseconds."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    calls = {name: max(1, min(20, int(5e-3 / gpu_seconds(run)))) for name, run in contenders.items()}
    for _ in range(rounds):
        for name, run in contenders.items():
            times[name].append(gpu_seconds(run, calls[name]))
    return times


def sustained(run: Callable[[], object]) -> float:
    """Seconds of a call after a second of them: a long one throttles on power, and short ones are compared with it."""
    once = gpu_seconds(run)
    gpu_seconds(run, max(1, int(1.0 / once)))
    return gpu_seconds(run, max(1, int(0.5 / once)))


def same(name: str, got: Tensor, want: Tensor) -> None:
    error = float((got.double() - want.double()).norm() / want.double().norm())
    if not error <= TOLERANCE:  # written so that NaN fails
        raise GateError(f"{name} is off by {error:.1e}")


def random_inputs(
    tokens: int, heads: int, head_dim: int, dtype: torch.dtype = torch.bfloat16, num: int = 4, shared: int = 1
) -> list[Tensor]:
    """q, k, v and dout, or the first `num` of these."""
    of_each = (heads, heads // shared, heads // shared, heads)[:num]
    return [torch.randn(1, tokens, each, head_dim, device="cuda", dtype=dtype) for each in of_each]


@dataclass
class Attention:
    """A contender: how it computes out, and in which order its tensors are."""

    run: Callable[[Tensor, Tensor, Tensor], Tensor]
    tensors: list[Tensor]
    heads_first: bool
    work: float = 1.0  # of its FLOPs, the part that ours does

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.run(*self.tensors[:3])

    def backward(self) -> Callable[[], tuple[Tensor, ...]]:
        leaves = [x.detach().requires_grad_() for x in self.tensors[:3]]
        out = self.run(*leaves)
        return partial(torch.autograd.grad, out, leaves, self.tensors[3], retain_graph=True)

    def natural(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2) if self.heads_first else x


def _dense(kernel: SDPBackend, is_causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(kernel):
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def _flex_mask(case: Case, layout: BlockLayout) -> BlockMask:
    if isinstance(case.pattern, SlidingWindow):
        left, right = case.pattern.left, case.pattern.right

        def near(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query - key <= left) & (key - query <= right)

        return create_block_mask(near, None, None, case.tokens, case.tokens, BLOCK_SIZE=case.block, _compile=True)
    mask = layout.to_block_mask().cpu()
    return flex_mask(mask, case.block).to("cuda")


def contenders_of(case: Case, layout: BlockLayout, tensors: list[Tensor], autotune: bool) -> dict[str, Attention]:
    found = {
        "ours": Attention(lambda q, k, v: block_sparse_attention(q, k, v, layout, backend="triton"), tensors, False)
    }
    if case.shared > 1:
        return found
    turned = [x.transpose(1, 2) for x in tensors]
    if case.flex:
        mask = _flex_mask(case, layout)
        modes = {"flex": None, "flex, max-autotune": "max-autotune-no-cudagraphs"}
        for name, mode in modes.items():
            # The default configuration fails for blocks of 64; the tuned one does not.
            wanted = case.block >= 128 if mode is None else case.block < 128 or (autotune and case.autotune)
            if not wanted:
                continue
            compiled = torch.compile(flex_attention, dynamic=False, mode=mode)
            found[name] = Attention(partial(compiled, block_mask=mask), turned, True)
    is_causal = case.pattern == Causal()
    short = [x[:, :DENSE].transpose(1, 2).contiguous() for x in tensors]
    for name, kernel in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        dense_pairs = DENSE * (DENSE + is_causal) / (1 + is_causal)
        pairs = layout.density * case.tokens**2
        found[name] = Attention(partial(_dense, kernel, is_causal), short, True, work=pairs / dense_pairs)
    return found


def _compile(index: int, autotune: bool) -> None:
    """Compile what a case needs, for the caches on disk."""
    torch._dynamo.config.recompile_limit = 64
    case = cases()[index]
    tensors = random_inputs(case.tokens, WIDTH // case.head_dim, case.head_dim, shared=case.shared)
    layout = BlockLayout.from_pattern(case.pattern, case.tokens, block_size=case.block, device="cuda")
    for each in contenders_of(case, layout, tensors, autotune).values():
        each.forward()
        each.backward()()


def kernels(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, range(len(cases())), itertools.repeat(args.autotune)))
    say("everything is compiled")
    for case in cases():
        heads = WIDTH // case.head_dim
        tensors = random_inputs(case.tokens, heads, case.head_dim, shared=case.shared)
        layout = BlockLayout.from_pattern(case.pattern, case.tokens, block_size=case.block, device="cuda")
        found = contenders_of(case, layout, tensors, args.autotune)
        row: dict[str, Any] = {
            "name": case.name, "head_dim": case.head_dim, "tokens": case.tokens, "block": case.block,
            "density": layout.density, "block_density": layout.block_density,
        }  # fmt: skip
        _check(case, layout, tensors, found)
        # What the active blocks cost; a rival's own blocks may be others only where they are the same pairs.
        flops = 4 * heads * case.head_dim * layout.num_active_blocks * case.block**2
        if case.name == "causal":
            flops = 4 * heads * case.head_dim * case.tokens * (case.tokens + 1) / 2
        for way, factor in (("forward", 1.0), ("backward", 2.5)):
            runs = {name: each.forward if way == "forward" else each.backward() for name, each in found.items()}
            times = {name: statistics.median(each) for name, each in seconds_of(runs).items()}
            row[way] = {
                name: {
                    "ms": times[name] * 1e3 * each.work,
                    "tflops": factor * flops / (times[name] * each.work) * 1e-12,
                    "ratio": times[name] * each.work / times["ours"],
                }
                for name, each in found.items()
            }
            del runs
        rows.append(row)
        say(f"{case.name}, D={case.head_dim}, block {case.block}: " + ", ".join(
            f"{way} {row[way]['ours']['tflops']:.0f} TFLOP/s (" + ", ".join(
                f"{name} {each['ratio']:.2f}" for name, each in row[way].items() if name != "ours") + ")"
            for way in ("forward", "backward")))  # fmt: skip
        del found, tensors
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def _check(case: Case, layout: BlockLayout, tensors: list[Tensor], found: dict[str, Attention]) -> None:
    """Rows of the output against float64, then everyone's gradients against ours, whose own are checked in rows."""
    which = [0, layout.num_q_blocks * 5 // 8, layout.num_q_blocks - 1]
    inputs = Inputs(tuple(tensors[:3]), tensors[3])
    at = torch.cat([torch.arange(r * case.block, (r + 1) * case.block, device="cuda") for r in which])
    only = torch.zeros_like(tensors[3])
    only[:, at] = tensors[3][:, at]
    want = expected(inputs, layout, which, gradients=True)
    ours = found["ours"]
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out = ours.run(*leaves)
    dq, dk, dv = torch.autograd.grad(out, leaves, only)
    for name, got in {"out": out[:, at], "dq": dq[:, at], "dk": dk, "dv": dv}.items():
        same(f"{case.name}: ours, {name}", got.detach(), want[name])
    grads = ours.backward()()
    for name in [name for name in found if name.startswith("flex")]:
        each = found[name]
        same(f"{case.name}: {name}, out", each.natural(each.forward()), out.detach())
        for part, got, mine in zip(("dq", "dk", "dv"), each.backward()(), grads, strict=True):
            same(f"{case.name}: {name}, {part}", each.natural(got), mine)


OPTIONS = ("softcap", "alibi", "dropout")
SOFTCAP = 20.0


def option_cases() -> list[tuple[Case, str]]:
    patterns = {"causal window 1024": SlidingWindow(1023, 0), "random": RandomBlocks(13)}
    return [
        (Case(name, pattern, head_dim), option)
        for head_dim in (128, 64)
        for name, pattern in patterns.items()
        for option in OPTIONS
    ]


class PlainKernels(Attention):
    """Ours, by the kernels of other GPUs."""

    def forward(self) -> Tensor:
        with _plain():
            return super().forward()

    def backward(self) -> Callable[[], tuple[Tensor, ...]]:
        with _plain():
            run = super().backward()

        def backward() -> tuple[Tensor, ...]:
            with _plain():
                return run()

        return backward


def _plain() -> Any:
    return patch.object(launch.Call, "_on_hopper", lambda *args: False)


def option_contenders(case: Case, option: str, tensors: list[Tensor]) -> dict[str, Attention]:
    """The last, the plain PyTorch backend in float32, is not timed."""
    layouts = [
        BlockLayout.from_pattern(case.pattern, case.tokens, block_size=case.block, device="cuda") for _ in range(2)
    ]
    slopes = 2.0 ** -torch.linspace(1, 8, tensors[0].shape[2], device="cuda")
    given = {"softcap": {"softcap": SOFTCAP}, "alibi": {"alibi_slopes": slopes}, "dropout": {"dropout_p": 0.1}}[option]

    def ours(layout: BlockLayout, backend: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if option == "dropout":
            torch.manual_seed(7)
        return block_sparse_attention(q, k, v, layout, backend=backend, **given)

    found = {
        "ours": Attention(partial(ours, layouts[0], "triton"), tensors, False),
        "plain kernels": PlainKernels(partial(ours, layouts[1], "triton"), tensors, False),
    }

    def capped(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return SOFTCAP * torch.tanh(score / SOFTCAP)

    def sloped(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score - slopes[h] * (query - key).abs()

    if option != "dropout":
        compiled = torch.compile(flex_attention, dynamic=False)
        change = capped if option == "softcap" else sloped
        run = partial(compiled, score_mod=change, block_mask=_flex_mask(case, layouts[0]))
        found["flex"] = Attention(run, [x.transpose(1, 2) for x in tensors], True)
    found["expected"] = Attention(partial(ours, layouts[1], "blockwise"), [x.float() for x in tensors], False)
    return found


def _compile_option(index: int) -> None:
    case, option = option_cases()[index]
    found = option_contenders(case, option, random_inputs(case.tokens, WIDTH // case.head_dim, case.head_dim))
    del found["expected"]
    for each in found.values():
        each.forward()
        each.backward()()


def options(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile_option, range(len(option_cases()))))
    for case, option in option_cases():
        tensors = random_inputs(case.tokens, WIDTH // case.head_dim, case.head_dim)
        found = option_contenders(case, option, tensors)
        reference = found.pop("expected")
        out, grads = reference.forward(), reference.backward()()
        row: dict[str, Any] = {"name": case.name, "option": option, "head_dim": case.head_dim}
        for name, each in found.items():
            same(f"{case.name}, {option}: {name}, out", each.natural(each.forward()), out)
            for part, got, want in zip(("dq", "dk", "dv"), each.backward()(), grads, strict=True):
                same(f"{case.name}, {option}: {name}, {part}", each.natural(got), want)
        for way in ("forward", "backward"):
            runs = {name: each.forward if way == "forward" else each.backward() for name, each in found.items()}
            times = {name: statistics.median(each) * 1e3 for name, each in seconds_of(runs).items()}
            row |= {f"{way}_ms": times["ours"]}
            row |= {f"{way}, {name}": times[name] / times["ours"] for name in times if name != "ours"}
        rows.append(row)
        say(", ".join(f"{key} {value:.2f}" if isinstance(value, float) else str(value) for key, value in row.items()))
        del found, reference, out, grads, tensors
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def lengths(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    patterns = {"window": SlidingWindow(1279, 1279), "random": RandomBlocks(20)}
    for million, training in ((1 / 16, True), (1, True), (4, True), (16, True), (32, False)):
        tokens = int(million * 2**20)
        for name, pattern in patterns.items():
            if training and million > 1 and name == "random" and million < 16:
                continue
            rows.append(_length(name, pattern, tokens, training))
            say(
                "{name}, {tokens:,} tokens: forward {forward_ns:.1f} ns a token, peak {forward_peak:.4f}".format(
                    **rows[-1]
                )
            )
    rows.append(_capped(1_750_016, 8 * 10**9))
    return rows


def _length(name: str, pattern: Pattern, tokens: int, training: bool) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    begun = torch.cuda.memory_allocated()
    layout = BlockLayout.from_pattern(pattern, tokens, block_size=128, device="cuda")
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
    which = [0, layout.num_q_blocks // 2, layout.num_q_blocks - 1]
    at = torch.cat([torch.arange(r * 128, (r + 1) * 128, device="cuda") for r in which])
    same(f"{name}, {tokens} tokens", out[:, at], expected(Inputs((q, k, v), q), layout, which)["out"])
    del out
    with torch.no_grad():
        row["forward_ns"] = sustained(lambda: block_sparse_attention(q, k, v, layout)) / tokens * 1e9
    if training:
        _ = layout.key_work
        do = torch.randn_like(q)
        for x in (q, k, v):
            x.requires_grad_()
        for _ in range(2 if tokens <= 2**22 else 1):  # the first may compile
            out = dq = dk = dv = None
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
            start = perf_counter()
            out = block_sparse_attention(q, k, v, layout)
            dq, dk, dv = torch.autograd.grad(out, (q, k, v), do)
            torch.cuda.synchronize()
            row["training_ns"] = (perf_counter() - start) / tokens * 1e9
        peak = torch.cuda.max_memory_allocated() - begun
        row["training_peak"] = peak / (8 * tensor + 2 * of_rows)
        if not all(bool(g[:, :: tokens // 64].isfinite().all()) for g in (dq, dk, dv)):
            raise GateError(f"{name}, {tokens} tokens: gradients are not finite")
        del out, dq, dk, dv, do
    return row


def _capped(tokens: int, cap: int) -> dict[str, Any]:
    """A forward on a GPU that has `cap` bytes."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(cap / total)
    try:
        row = _length("window", SlidingWindow(1279, 1279), tokens, training=False)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return {**row, "name": "window, in 8 GB"}


def layouts(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for tokens in (2**17, 2**20):
        q, k, v = random_inputs(tokens, 8, 64, torch.float16, 3)
        for name, pattern in {
            "window": SlidingWindow(1279, 1279), "random": RandomBlocks(20),
            "dilated": DilatedBlocks((4096, 16384, 65536), (1, 4, 16), 20 * 128 / tokens, 128),
        }.items():  # fmt: skip
            build = partial(BlockLayout.from_pattern, pattern, tokens, block_size=128, device="cuda")
            layout = build()
            attend = partial(block_sparse_attention, q, k, v, layout)
            attend()
            host = min(_host_seconds(build) for _ in range(20))
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
                rows[-1]["create_block_mask_ms"] = min(_host_seconds(make) for _ in range(3)) * 1e3
            times = "built in {build_ms:.2f} ms, {device_ms:.2f} of the device's, forward {forward_ms:.2f}"
            say(f"{name}, {tokens:,} tokens: {times.format(**rows[-1])}")
    return rows


def _host_seconds(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = perf_counter()
    run()
    torch.cuda.synchronize()
    return perf_counter() - start


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


def seeds(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for tokens in (4096, 8192, 16384, 32768, 65536, 131072, 524288):
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

            forward()
            out = block_sparse_attention(*leaves, pattern)
            backward = partial(torch.autograd.grad, out, leaves, do, retain_graph=True)
            backward()
            times = seconds_of({"forward": forward, "backward": backward}, rounds=3)
            with measure_peak("cuda") as peak:
                forward()
            rows.append({
                "name": name, "tokens": tokens, "forward_ms": statistics.median(times["forward"]) * 1e3,
                "backward_ms": statistics.median(times["backward"]) * 1e3, "forward_mb": peak.peak_bytes / 1e6,
            })  # fmt: skip
            del out, backward
        say(
            f"{tokens:,} tokens: "
            + ", ".join(f"{r['name']} {r['forward_ms']:.2f}" for r in rows if r["tokens"] == tokens)
        )
    return rows


def calls(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Short enough that the GPU always waits: time between launches is the host's."""
    q, k, v = random_inputs(256, 1, 64, num=3)
    layout = BlockLayout.from_pattern(SlidingWindow(100, 0), 256, block_size=128, device="cuda")
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
    rows = []
    for name, run in runs.items():

        def many(run: Callable[[], object] = run) -> None:
            for _ in range(200):
                run()

        many()
        rows.append({"name": name, "microseconds": min(_host_seconds(many) for _ in range(5)) / 200 * 1e6})
    say(", ".join(f"{row['name']} {row['microseconds']:.0f} µs" for row in rows))
    return rows


# Lengths come early: beside what the other sections leave behind, the longest would not fit into 8 GB.
SECTIONS: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
    "calls": calls, "lengths": lengths, "kernels": kernels, "options": options, "layouts": layouts, "seeds": seeds,
}  # fmt: skip


def ceilings() -> dict[str, float]:
    """What the device does at best: a large bfloat16 product, a large copy."""
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    source = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    times = seconds_of({"matmul": lambda: matrix @ matrix, "copy": lambda: target.copy_(source)})
    return {
        "matmul_tflops": 2 * 8192**3 / statistics.median(times["matmul"]) * 1e-12,
        "copy_tbytes": 2 * source.nbytes / statistics.median(times["copy"]) * 1e-12,
    }


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--autotune", action="store_true")
    parser.add_argument("--commit")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gpu.json")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    torch._dynamo.config.recompile_limit = 64
    machine = {
        **environment(),
        "gpu": torch.cuda.get_device_name(),
        "triton": triton.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }
    if args.commit:
        machine["commit"] = args.commit
    record: dict[str, Any] = {"environment": machine, "ceilings": ceilings()}
    try:
        for name in args.only:
            torch.manual_seed(0)
            record[name] = SECTIONS[name](args)
            write_json(args.out, record)
    except GateError as error:
        say(f"wrong answer: {error}")
        return 1
    print(as_text(record))
    draw(record, args.out.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
