"""The CPU benchmark: this library beside compiled FlexAttention, dense SDPA and what the machine can do.

    python benchmarks/cpu.py                  # all of it, about 12 minutes on 2 cores; options: harness.py
    python benchmarks/cpu.py --skip-flex      # without FlexAttention, which needs a C++ compiler

One process, same inputs: float32, batch 1, 8 heads × 64, blocks of 128 tokens. Every contender's output is
compared with float64 attention before it is timed, and whole outputs with each other. Contenders take turns, and the
machine's plain 2048³ matmul and a large copy run beside each of them.

forward   Random blocks, the same for all. Ratios are of median times: `flex_ratio` is FlexAttention's time ÷ ours,
          `dense_ratio` is dense SDPA's time × the real density ÷ ours. FlexAttention's compilation is timed apart.
          All get the same tensors, (batch, seq, heads, head_dim), the rivals through transposed views; FlexAttention
          runs a second time on copies in its own order, not counting the copies: `flex_own_order_ratio`.
training  Forward and backward, `dense_ratio` as above. FlexAttention has no backward on a CPU.
memory    Peak of a fresh process above its state before q, k, v exist, in units of what must exist: q, k, v, out;
          with their gradients for a training step.
flat      Time per token of the forward at 8 blocks a row, by length.

Dense SDPA is measured up to 16,384 tokens; above that its time is scaled by the square of the length, and the record
says `extrapolated`. GFLOP/s count the active blocks. `times_floor` is our time over the larger of two least times:
the FLOPs at the matmul's rate, and the bytes at the copy's.

The summary has the worst case of each claim beside its target.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import plots
from cases import Inputs, Probes, expected, flex_mask, heads_first, random_mask, rows_to_check, tokens_of
from dilated_attention_pytorch import (
    AttentionCost,
    BlockLayout,
    Full,
    RandomBlocks,
    SlidingWindow,
    block_sparse_attention,
    explain,
)
from dilated_attention_pytorch.memory import can_measure, measure_peak
from dilated_attention_pytorch.testing.timing import Timing, interleave, seconds
from harness import Benchmark, Job, Record, SkipSectionError, run

HEADS, HEAD_DIM, BLOCK, ITEMSIZE = 8, 64, 128, 4
SHAPE = {"dtype": "float32", "batch": 1, "heads": HEADS, "head_dim": HEAD_DIM, "block": BLOCK}
MEMORY_BLOCKS = 10  # a row
FLAT_PATTERNS = {"window": SlidingWindow(left=7 * BLOCK, right=0), "random": RandomBlocks(8, block_size=BLOCK)}

# claim → (target, whether more is better). Flat: time per token ÷ that of the fastest length.
TARGETS = {
    "flex_ratio": (1.15, True),
    "full_density_ratio": (1 / 1.1, True),
    "training_ratio": (0.7, True),
    "memory_forward": (1.15, False),
    "memory_training": (1.25, False),
    "flat_window": (1.1, False),
    "flat_random": (1.1, False),
}


@dataclass(frozen=True)
class Plan:
    """Sizes; {tokens: repeats} where something is timed."""

    forward: Mapping[int, int]
    training: Mapping[int, int]
    flat: Mapping[int, int]
    dense_limit: int  # tokens up to which dense SDPA is measured
    memory_tokens: int
    whole: int  # tokens up to which the gate looks at every row
    matmul_side: int
    densities: Sequence[float] = (0.01, 0.05, 0.1)
    long_training_densities: Sequence[float] = (0.01, 0.05)  # beyond dense_limit


PLAN = Plan(
    forward={4096: 9, 8192: 5, 16384: 3, 32768: 3, 65536: 2},
    training={4096: 5, 8192: 3, 16384: 2, 65536: 2},
    flat={16384: 3, 65536: 3, 262144: 2, 524288: 2},
    dense_limit=16384,
    memory_tokens=131072,
    whole=4096,
    matmul_side=2048,
)
QUICK = Plan(
    forward={512: 2, 1024: 2, 2048: 2},
    training={1024: 2, 2048: 1},
    flat={1024: 2, 2048: 2},
    dense_limit=1024,
    memory_tokens=8192,
    whole=512,
    matmul_side=512,
    densities=(0.1,),
    long_training_densities=(0.1,),
)


def plan_of(job: Job) -> Plan:
    return QUICK if job.quick else PLAN


def race(
    probes: Probes, contenders: Mapping[str, Callable[[], object]], repeats: int | Mapping[str, int]
) -> tuple[dict[str, Timing], dict[str, float]]:
    """The contenders' timings, and the machine's rates meanwhile."""
    timings = interleave(contenders, repeats, probes.contenders())
    return timings, probes.rates(timings)


@dataclass(frozen=True)
class Case:
    """A layout to attend over, and the same blocks for FlexAttention."""

    density: float
    layout: BlockLayout
    flex_mask: BlockMask | None
    layout_seconds: float

    @classmethod
    def make(cls, tokens: int, density: float, *, flex: bool) -> Case:
        num_blocks = tokens // BLOCK
        mask = random_mask(num_blocks, density)
        start = perf_counter()
        if density == 1.0:
            layout = BlockLayout.from_pattern(Full(), tokens, block_size=BLOCK)
        else:
            layout = BlockLayout.from_block_mask(mask, BLOCK)
        took = perf_counter() - start
        return cls(density, layout, flex_mask(mask, BLOCK) if flex else None, took)

    @property
    def cost(self) -> AttentionCost:
        return self.layout.cost(batch=1, heads=HEADS, head_dim=HEAD_DIM, itemsize=ITEMSIZE)

    @property
    def record(self) -> dict[str, Any]:
        return {
            "tokens": self.layout.seq_q,
            "density": self.density,
            "real_density": self.layout.block_density,
            "blocks_a_row": self.layout.num_active_blocks / self.layout.num_q_blocks,
            "active_blocks": self.layout.num_active_blocks,
            "layout_seconds": self.layout_seconds,
        }


def dense_at(tokens: int, measured: Mapping[int, Timing]) -> dict[str, Any]:
    """Dense SDPA at a length: as measured, or scaled by the square of the length and marked so."""
    if tokens in measured:
        return {**measured[tokens].record(), "extrapolated": False}
    longest = max(measured)
    scaled = measured[longest].median * (tokens / longest) ** 2
    return {"median": scaled, "extrapolated": True, "measured_tokens": longest}


def floor(flops: int, nbytes: int, rates: Mapping[str, float], ours: float) -> dict[str, Any]:
    """The least time that the arithmetic and the traffic take on this machine, and how far ours is from it."""
    least = {"flops_seconds": flops / rates["matmul_flops"], "bytes_seconds": nbytes / rates["copy_bytes"]}
    return {"flops": flops, "bytes": nbytes, **least, "times_floor": ours / max(least.values())}


# --- forward ---------------------------------------------------------------------------------------------------------


def forward(job: Job) -> Record:
    plan = plan_of(job)
    probes = Probes(plan.matmul_side)
    rows, compiled, dense = [], [], {}
    for tokens, repeats in plan.forward.items():
        with torch.no_grad():
            inputs = Inputs.make(tokens, HEADS, HEAD_DIM)
            full = (1.0,) if tokens <= plan.dense_limit else ()
            cases = [Case.make(tokens, density, flex=not job.args.skip_flex) for density in (*plan.densities, *full)]
            contenders, owners = _forward_contenders(job, inputs, cases, compiled)
            _gate_forward(job, inputs, cases, contenders, owners)
            job.say(f"forward, {tokens} tokens: {repeats} × {len(contenders)} contenders")
            timings, rates = race(probes, contenders, repeats)
        if "dense" in timings:
            dense[tokens] = timings["dense"]
        for case in cases:
            backend = explain(*inputs.ours, case.layout).chosen
            rows.append({**_forward_row(case, timings, rates, dense_at(tokens, dense)), "backend": backend})
    note = "FlexAttention was left out with --skip-flex" if job.args.skip_flex else None
    return {
        "shape": SHAPE,
        "matmul_side": plan.matmul_side,
        "rows": rows,
        "flex_compile": compiled,
        "flex_note": note,
    }


def _forward_contenders(
    job: Job, inputs: Inputs, cases: Sequence[Case], compiled: list[dict[str, Any]]
) -> tuple[dict[str, Callable[[], Tensor]], dict[str, Case | None]]:
    """What is timed, each giving (batch, seq, heads, head_dim), and whose case it is; dense SDPA has none."""
    tokens, views = inputs.grad.shape[1], tuple(x.transpose(1, 2) for x in inputs.ours)
    contenders: dict[str, Callable[[], Tensor]] = {}
    owners: dict[str, Case | None] = {}
    flex = _compile_flex(job, views, cases[0], compiled) if not job.args.skip_flex else None
    for case in cases:
        ours = f"ours {case.density}"
        contenders[ours] = lambda case=case: block_sparse_attention(*inputs.ours, case.layout)
        owners[ours] = case
        if flex is not None:
            for theirs, tensors in (("flex", views), ("flex_own_order", inputs.heads_first)):
                contenders[f"{theirs} {case.density}"] = lambda case=case, tensors=tensors: flex(
                    *tensors, block_mask=case.flex_mask
                ).transpose(1, 2)
                owners[f"{theirs} {case.density}"] = case
    if tokens <= plan_of(job).dense_limit:
        contenders["dense"] = lambda: scaled_dot_product_attention(*views).transpose(1, 2)
        owners["dense"] = None
    return contenders, owners


def _compile_flex(
    job: Job, views: tuple[Tensor, ...], case: Case, compiled: list[dict[str, Any]]
) -> Callable[..., Tensor]:
    """FlexAttention compiled for this length; the first call minus a second one is what that takes."""
    tokens = views[0].shape[2]
    job.say(f"forward, {tokens} tokens: compiling FlexAttention")
    torch._dynamo.reset()
    flex = torch.compile(flex_attention, dynamic=False)
    first, second = (seconds(lambda: flex(*views, block_mask=case.flex_mask)) for _ in range(2))
    compiled.append({"tokens": tokens, "compile_seconds": first - second})
    return flex


def _gate_forward(
    job: Job,
    inputs: Inputs,
    cases: Sequence[Case],
    contenders: Mapping[str, Callable[[], Tensor]],
    owners: Mapping[str, Case | None],
) -> None:
    """Every contender against float64 in some rows, and FlexAttention and SDPA against ours in all."""
    tokens = inputs.grad.shape[1]
    job.say(f"forward, {tokens} tokens: checking {len(contenders)} contenders")
    for case in cases:
        rows = rows_to_check(case.layout, plan_of(job).whole)
        at, want = tokens_of(rows, BLOCK), expected(inputs, case.layout, rows)["out"]
        name, ours = f"forward, {tokens} tokens, density {case.density}", None
        # Ours comes first. Dense SDPA belongs to the layout that leaves nothing out.
        for contender, owner in owners.items():
            if owner is not case and not (owner is None and case.density == 1.0):
                continue
            got = contenders[contender]()
            job.gate.check(name, contender, f"float64 in {len(rows)} query blocks", got[:, at], want)
            if ours is None:
                ours = got
            else:
                job.gate.check(name, contender, "ours, all rows", got, ours)


def _forward_row(
    case: Case, timings: Mapping[str, Timing], rates: Mapping[str, float], dense: dict[str, Any]
) -> dict[str, Any]:
    cost, ours, flex = case.cost, timings[f"ours {case.density}"], timings.get(f"flex {case.density}")
    own = timings.get(f"flex_own_order {case.density}")
    flops = 4 * cost.block_pairs * HEAD_DIM
    dense_flops = flops / case.layout.block_density
    return {
        **case.record,
        "ours": {**ours.record(), "gflops": flops / ours.median / 1e9},
        "flex": None if flex is None else {**flex.record(), "gflops": flops / flex.median / 1e9},
        "flex_own_order": None if own is None else {**own.record(), "gflops": flops / own.median / 1e9},
        "dense": {**dense, "gflops": dense_flops / dense["median"] / 1e9},
        "matmul_gflops": rates["matmul_flops"] / 1e9,
        "copy_gbytes": rates["copy_bytes"] / 1e9,
        "flex_ratio": None if flex is None else flex.median / ours.median,
        "flex_own_order_ratio": None if own is None else own.median / ours.median,
        "dense_ratio": dense["median"] * case.layout.block_density / ours.median,
        "matmul_share": flops / ours.median / rates["matmul_flops"],
        "floor": floor(cost.forward_flops, cost.forward_bytes, rates, ours.median),
    }


# --- training --------------------------------------------------------------------------------------------------------


# An output gradient → a call that gives (out, dq, dk, dv).
Step = Callable[[Tensor], Callable[[], tuple[Tensor, ...]]]


def training(job: Job) -> Record:
    plan = plan_of(job)
    probes = Probes(plan.matmul_side)
    rows, dense = [], {}
    for tokens, repeats in plan.training.items():
        inputs = Inputs.make(tokens, HEADS, HEAD_DIM)
        measured = tokens <= plan.dense_limit
        densities = plan.densities if measured else plan.long_training_densities
        cases = {f"ours {density}": Case.make(tokens, density, flex=False) for density in densities}
        steps = {name: _our_step(inputs, case.layout) for name, case in cases.items()}
        layouts = {name: case.layout for name, case in cases.items()}
        if measured:
            steps["dense"] = _dense_step(inputs)
            layouts["dense"] = BlockLayout.from_pattern(Full(), tokens, block_size=BLOCK)
        _gate_training(job, inputs, steps, layouts)
        job.say(f"training, {tokens} tokens: {repeats} × {len(steps)} contenders")
        contenders = {name: step(inputs.grad) for name, step in steps.items()}
        timings, rates = race(probes, contenders, repeats)
        if measured:
            dense[tokens] = timings["dense"]
        rows += [_training_row(case, timings[name], rates, dense_at(tokens, dense)) for name, case in cases.items()]
    return {"shape": SHAPE, "rows": rows, "flex_note": "FlexAttention has no backward on a CPU"}


def _our_step(inputs: Inputs, layout: BlockLayout) -> Step:
    leaves = [x.clone().requires_grad_() for x in inputs.ours]

    def call(do: Tensor) -> tuple[Tensor, ...]:
        out = block_sparse_attention(*leaves, layout)
        return out.detach(), *torch.autograd.grad(out, leaves, do)

    return lambda do: partial(call, do)


def _dense_step(inputs: Inputs) -> Step:
    leaves = [x.requires_grad_() for x in inputs.heads_first]

    def call(do: Tensor) -> tuple[Tensor, ...]:
        out = scaled_dot_product_attention(*leaves)
        return tuple(x.transpose(1, 2) for x in (out.detach(), *torch.autograd.grad(out, leaves, do)))

    # Turning the gradient around is not the contender's to pay.
    return lambda do: partial(call, heads_first(do))


def _gate_training(job: Job, inputs: Inputs, steps: Mapping[str, Step], layouts: Mapping[str, BlockLayout]) -> None:
    """Output and gradients against float64, for an output gradient that is 0 outside the rows that are looked at.

    Such a gradient reaches every key that the rows see, and float64 needs these rows only.
    """
    tokens = inputs.grad.shape[1]
    job.say(f"training, {tokens} tokens: checking {len(steps)} contenders")
    for contender, step in steps.items():
        rows = rows_to_check(layouts[contender], plan_of(job).whole)
        at = tokens_of(rows, BLOCK)
        want = expected(inputs, layouts[contender], rows, gradients=True)
        do = torch.zeros_like(inputs.grad).index_copy_(1, at, inputs.grad[:, at])
        got = dict(zip(("out", "dq", "dk", "dv"), step(do)(), strict=True))
        for name in want:
            mine = got[name][:, at] if name in ("out", "dq") else got[name]
            case = f"training, {tokens} tokens, {name}"
            job.gate.check(case, contender, f"float64 in {len(rows)} query blocks", mine, want[name])


def _training_row(case: Case, ours: Timing, rates: Mapping[str, float], dense: dict[str, Any]) -> dict[str, Any]:
    cost = case.cost
    flops = 14 * cost.block_pairs * HEAD_DIM  # two products forward and five backward
    return {
        **case.record,
        "ours": {**ours.record(), "gflops": flops / ours.median / 1e9},
        "dense": {**dense, "gflops": flops / case.layout.block_density / dense["median"] / 1e9},
        "matmul_gflops": rates["matmul_flops"] / 1e9,
        "copy_gbytes": rates["copy_bytes"] / 1e9,
        "dense_ratio": dense["median"] * case.layout.block_density / ours.median,
        "matmul_share": flops / ours.median / rates["matmul_flops"],
        "floor": floor(
            cost.forward_flops + cost.backward_flops, cost.forward_bytes + cost.backward_bytes, rates, ours.median
        ),
    }


# --- memory ----------------------------------------------------------------------------------------------------------


def memory(job: Job) -> Record:
    ok, reason = can_measure()
    if not ok:
        raise SkipSectionError(reason)
    rows, plan = [], plan_of(job)
    for kind in ("forward", "training"):
        job.say(f"memory, {plan.memory_tokens} tokens: {kind}")
        # A fresh process each: what an earlier part of the run left behind is not there.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            rows.append(pool.submit(peak_of, kind, plan.memory_tokens, torch.get_num_threads()).result())
    return {"shape": SHAPE, "rows": rows}


def peak_of(kind: str, tokens: int, threads: int) -> dict[str, Any]:
    """Peak of one call above the state before its q, k, v exist."""
    torch.set_num_threads(threads)
    layout, small = (
        BlockLayout.from_pattern(RandomBlocks(MEMORY_BLOCKS, block_size=BLOCK), n, block_size=BLOCK)
        for n in (tokens, 2048)
    )
    _attend(kind, small)  # libraries are loaded and threads started at the first call
    with measure_peak() as peak:
        _attend(kind, layout)
    one = tokens * HEADS * HEAD_DIM * ITEMSIZE
    needed = one * {"forward": 4, "training": 8}[kind]
    return {
        "kind": kind,
        "tokens": tokens,
        "blocks_a_row": layout.num_active_blocks / layout.num_q_blocks,
        "needed_bytes": needed,
        "peak_bytes": peak.peak_bytes,
        "ratio": peak.peak_bytes / needed,
    }


def _attend(kind: str, layout: BlockLayout) -> None:
    q, k, v = (torch.randn(1, layout.seq_q, HEADS, HEAD_DIM, requires_grad=kind == "training") for _ in range(3))
    out = block_sparse_attention(q, k, v, layout)
    if kind == "training":
        out.backward(torch.randn_like(out))


# --- flat ------------------------------------------------------------------------------------------------------------


def flat(job: Job) -> Record:
    """Lengths take turns too: a slow minute of the machine must not look like a slow length."""
    plan = plan_of(job)
    probes = Probes(plan.matmul_side)
    inputs = Inputs.make(max(plan.flat), HEADS, HEAD_DIM)
    contenders, layouts, repeats = {}, {}, {}
    with torch.no_grad():
        for tokens, count in plan.flat.items():
            short = Inputs(tuple(x[:, :tokens] for x in inputs.ours), inputs.grad[:, :tokens])
            for name, pattern in FLAT_PATTERNS.items():
                layout = BlockLayout.from_pattern(pattern, tokens, block_size=BLOCK)
                layouts[name, tokens], repeats[name, tokens] = layout, count
                contenders[name, tokens] = lambda short=short, layout=layout: block_sparse_attention(
                    *short.ours, layout
                )
                job.say(f"flat, {name}, {tokens} tokens: checking")
                rows = rows_to_check(layout, plan_of(job).whole)
                got, want = contenders[name, tokens](), expected(short, layout, rows)["out"]
                where = f"float64 in {len(rows)} query blocks"
                job.gate.check(f"flat, {name}, {tokens} tokens", "ours", where, got[:, tokens_of(rows, BLOCK)], want)
                del got
        job.say(f"flat: {len(contenders)} contenders")
        timings, rates = race(probes, contenders, repeats)
    rows = [_flat_row(name, layouts[name, tokens], timings[name, tokens], rates) for name, tokens in contenders]
    return {"shape": SHAPE, "rows": rows}


def _flat_row(name: str, layout: BlockLayout, ours: Timing, rates: Mapping[str, float]) -> dict[str, Any]:
    cost = layout.cost(batch=1, heads=HEADS, head_dim=HEAD_DIM, itemsize=ITEMSIZE)
    return {
        "pattern": name,
        "tokens": layout.seq_q,
        "blocks_a_row": layout.num_active_blocks / layout.num_q_blocks,
        "ours": {**ours.record(), "gflops": 4 * cost.block_pairs * HEAD_DIM / ours.median / 1e9},
        "microseconds_per_token": ours.median / layout.seq_q * 1e6,
        "floor": floor(cost.forward_flops, cost.forward_bytes, rates, ours.median),
    }


# --- all of it -------------------------------------------------------------------------------------------------------


def summary(record: Record) -> Record:
    """The worst case of every claim beside its target. Tiny sizes are not judged."""
    targets = {}
    for name, values in _claims(record).items():
        target, more_is_better = TARGETS[name]
        worst = min(values) if more_is_better else max(values)
        met = worst >= target if more_is_better else worst <= target
        quick = any(section["provenance"]["quick"] for section in record.values())
        median = statistics.median(values)
        targets[name] = {"worst": worst, "median": median, "target": target, "met": None if quick else met}
    return {"targets": targets}


def _claims(record: Record) -> dict[str, list[float]]:
    """The figures of every claim that was measured, by the names of TARGETS."""
    rows = {name: record.get(name, {}).get("rows", []) for name in ("forward", "training", "memory", "flat")}
    claims = {
        "flex_ratio": [row["flex_ratio"] for row in rows["forward"] if row["flex_ratio"] is not None],
        "full_density_ratio": [row["dense_ratio"] for row in rows["forward"] if row["density"] == 1.0],
        "training_ratio": [row["dense_ratio"] for row in rows["training"]],
    }
    for row in rows["memory"]:
        claims[f"memory_{row['kind']}"] = [row["ratio"]]
    for name in FLAT_PATTERNS:
        times = [row["microseconds_per_token"] for row in rows["flat"] if row["pattern"] == name]
        claims[f"flat_{name}"] = [time / min(times) for time in times]
    return {name: values for name, values in claims.items() if values}


BENCHMARK = Benchmark(
    name="cpu",
    about=__doc__,
    sections={"forward": forward, "training": training, "memory": memory, "flat": flat},
    untimed=("memory",),
    options=lambda parser: parser.add_argument(
        "--skip-flex", action="store_true", help="leave out FlexAttention (it needs a C++ compiler)"
    ),
    summary=summary,
    draw=plots.cpu,
)


if __name__ == "__main__":
    # An empty cache: otherwise the compile time is that of finding an earlier run's kernel.
    with tempfile.TemporaryDirectory() as cache, patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=cache):
        raise SystemExit(run(BENCHMARK))
