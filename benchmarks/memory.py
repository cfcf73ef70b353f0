"""The memory benchmark: planned against measured peaks, and what a pool gives, on a CPU or a GPU.

    python benchmarks/memory.py                   # all of it on this machine's device, about 10 minutes on 2 cores
    python benchmarks/memory.py --device cpu      # options: harness.py
    MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184 python benchmarks/memory.py --device cpu --only pool \
        --out benchmarks/results/memory_cpu_malloc.json   # what glibc does when told to keep large blocks

plan     Over 40 configurations, forward and training: the peak that `plan_memory` gives, beside the measured one, above
         the state before q, k and v exist. The layout is built in the call. `error` is planned ÷ measured − 1.
pool     The seeds' workload: samples 1 to 4, lengths 256 to 2048, and 4K to 64K, in random order; and one small shape
         again and again. `speedup` is the time without a pool ÷ with it (medians of turns), `hit_rate` that after the
         first turn, `extra_peak` the peak with it ÷ without it − 1.
buffers  A buffer of 1 to 256 MiB taken and written: `torch.empty` beside the pool. CPU only.
seeds    The seeds' two configurations at 131,072 tokens, and their variants at 16,384: measured peaks, forward.

Before anything is timed the output is compared with float64 attention of some rows, and with a pool bit by bit with the
output without. The summary has every claim beside its target.
"""

from __future__ import annotations

import gc
import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cases import Inputs, check_rows
from dilated_attention_pytorch import (
    BlockLayout,
    BlockSparseHierarchical,
    BlockSparseRingDilatedAttention,
    Causal,
    DilatedBlocks,
    Full,
    GlobalTokens,
    MemoryPool,
    Pattern,
    PerHead,
    RandomBlocks,
    SlidingWindow,
    SparsePatternConfig,
    block_sparse_attention,
    hierarchical,
    plan_memory,
)
from dilated_attention_pytorch.layout import clear_layout_cache
from dilated_attention_pytorch.memory import AttentionConfig, drawing_from, measure_peak
from dilated_attention_pytorch.testing.timing import interleave, seconds
from harness import Benchmark, Gate, Job, Record, SkipSectionError, largest, run

TARGETS = {"cpu": {"plan": 0.10, "speedup": 1.5}, "cuda": {"plan": 0.03, "speedup": 0.98}}
HIT_RATE, EXTRA_PEAK, OVERHEAD = 0.95, 0.15, 0.02


@dataclass(frozen=True)
class Setting:
    """Where and how large."""

    device: str
    quick: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device == "cpu" else torch.bfloat16

    def tensors(self, *shape: int, dtype: torch.dtype | None = None, training: bool = False, number: int = 3) -> Any:
        made = [torch.randn(*shape, device=self.device, dtype=dtype or self.dtype) for _ in range(number)]
        return [x.requires_grad_(training) for x in made]


@dataclass(frozen=True)
class Case:
    name: str
    pattern: Pattern
    tokens: int
    heads: int = 8
    heads_kv: int = 8
    head_dim: int = 64
    batch: int = 1
    dtype: torch.dtype | None = None
    backend: str = "auto"


def plan_cases(setting: Setting) -> list[Case]:
    """Patterns × lengths × shapes; those of a CPU are short enough to take seconds."""
    unit = 512 if setting.quick else 16384 if setting.device == "cpu" else 262144
    block = 64 if setting.quick else 128
    patterns = {
        "window": SlidingWindow(511, 0),
        "random": RandomBlocks(10, block_size=block),
        "dilated": DilatedBlocks((2048, 4096, 8192), (1, 2, 4), 0.02, block),
        "hierarchical": hierarchical(((1, 512), (4, 2048)), block_size=block),
        "window | global": SlidingWindow(255, 255) | GlobalTokens(64, queries=True),
    }
    cases = [Case(name, pattern, unit * n) for name, pattern in patterns.items() for n in (1, 2)]
    half = torch.float16 if setting.device == "cuda" else torch.bfloat16
    window, few = patterns["window"], RandomBlocks(2, block_size=block)
    per_head = PerHead(tuple(RandomBlocks(5, seed=head, block_size=block) for head in range(8)))
    cases += [
        Case("window, half", window, 2 * unit, dtype=half),
        Case("window, batch 3", window, unit, batch=3),
        Case("window, odd length", window, unit + 77),
        Case("random, grouped heads", patterns["random"], 2 * unit, heads_kv=2),
        Case("random, one key head", patterns["random"], 2 * unit, heads_kv=1),
        Case("random, head 128", patterns["random"], unit, head_dim=128),
        Case("few blocks", few, 2 * unit),
        Case("per head", per_head, unit),
        Case("small blocks", RandomBlocks(20, block_size=16), unit),
        Case("dense", Full(), min(unit, 8192)),
        Case("causal", Causal(), min(unit, 8192)),
        Case("reference", window, min(unit, 2048), backend="reference"),
    ]
    return cases


def setting_of(job: Job) -> Setting:
    return Setting(job.device, job.quick)


def plan(job: Job) -> Record:
    rows, setting = [], setting_of(job)
    for case, training in itertools.product(plan_cases(setting), (False, True)):
        options: dict[str, Any] = {"heads": case.heads, "heads_kv": case.heads_kv, "head_dim": case.head_dim}
        dtype = case.dtype or (torch.float32 if case.backend == "reference" else setting.dtype)
        config = AttentionConfig(pattern=case.pattern, backend=case.backend, **options)
        planned = plan_memory(config, case.tokens, case.batch, dtype, training, device=setting.device)
        measured = _peak(setting, case, dtype, training)
        rows.append(
            {
                "name": case.name,
                "tokens": case.tokens,
                "training": training,
                "backend": planned.backend,
                "dtype": str(dtype).removeprefix("torch."),
                "planned": planned.peak_bytes,
                "measured": measured,
                "error": planned.peak_bytes / measured - 1,
            }
        )
        job.say(
            f"plan: {case.name}, {case.tokens:,}, {'training' if training else 'forward'}: {rows[-1]['error']:+.1%}"
        )
    return {"rows": rows, "worst": max(abs(row["error"]) for row in rows), "configurations": len(rows)}


def _peak(setting: Setting, case: Case, dtype: torch.dtype, training: bool) -> int:
    """Measured in a call whose like, shorter, was made before: the first loads and compiles."""
    shapes = [(case.batch, case.tokens, h, case.head_dim) for h in (case.heads, case.heads_kv, case.heads_kv)]
    for tokens in (min(case.tokens, 1024), case.tokens):
        clear_layout_cache()
        gc.collect()
        with measure_peak(setting.device) as peak:
            tensors = [
                torch.ones(shape[0], tokens, *shape[2:], dtype=dtype, device=setting.device, requires_grad=training)
                for shape in shapes
            ]
            out = block_sparse_attention(*tensors, case.pattern, backend=case.backend)
            assert isinstance(out, Tensor)
            if training:
                out.backward(torch.ones_like(out))
        del tensors, out
    return peak.peak_bytes


WINDOW = SlidingWindow(255, 0)


def workloads(setting: Setting) -> dict[str, list[tuple[int, int]]]:
    """(samples, tokens) of every call of a turn, in random order."""
    draw = random.Random(0)
    short = [(batch, tokens) for batch in (1, 2, 4) for tokens in (256, 512, 768, 1024, 1536, 2048)]
    long = [(1, tokens) for tokens in (4096, 8192, 16384, 32768, 65536)] * 2
    if setting.quick:
        short, long = [(1, 256), (2, 384)], [(1, 1024), (1, 512)]
    draw.shuffle(short)
    draw.shuffle(long)
    return {"256 to 2048": short, "4K to 64K": long, "1024 alone": [(1, 1024)] * (2 if setting.quick else 20)}


def pool(job: Job) -> Record:
    setting = setting_of(job)
    rows = []
    for (name, calls), training in itertools.product(workloads(setting).items(), (False, True)):
        inputs = {
            call: setting.tensors(*call, 8, 64, training=training, number=3)
            for call in dict.fromkeys((batch, tokens) for batch, tokens in calls)
        }
        _check(job.gate, setting, inputs)
        mine = MemoryPool(pool_size=64)
        contenders = {"plain": nullcontext, "pool": partial(drawing_from, mine)}
        turns = {which: partial(_turn, calls, inputs, using, training) for which, using in contenders.items()}
        for turn in turns.values():
            turn()
        warm = mine.get_buffer_stats()
        # By the host's clock on a GPU too: what a pool costs there is the host's time.
        waiting = {which: partial(seconds, turn, setting.device) for which, turn in turns.items()}
        timings = interleave(waiting, 2 if setting.quick else 5)
        now = mine.get_buffer_stats()
        asked = now["hits"] + now["misses"] - warm["hits"] - warm["misses"]
        peaks = {}
        for which, turn in turns.items():
            mine.clear()
            with measure_peak(setting.device) as peak:
                turn()
            peaks[which] = peak.peak_bytes
        rows.append(
            {
                "workload": name,
                "training": training,
                "calls": len(calls),
                "times": {which: list(timing.times) for which, timing in timings.items()},
                "speedup": timings["plain"].median / timings["pool"].median,
                "requests": asked,
                "hit_rate": 1 - (now["misses"] - warm["misses"]) / asked if asked else None,
                "bytes_held": now["bytes_held"],
                "peaks": peaks,
                "extra_peak": peaks["pool"] / peaks["plain"] - 1,
            }
        )
        job.say(f"pool: {name}, {'training' if training else 'forward'}: {rows[-1]['speedup']:.3f} x")
    return {"rows": rows}


def _turn(
    calls: Sequence[tuple[int, int]],
    inputs: dict[tuple[int, int], list[Tensor]],
    using: Callable[[], AbstractContextManager[Any]],
    training: bool,
) -> None:
    for call in calls:
        with using():
            out = block_sparse_attention(*inputs[call], WINDOW)
            assert isinstance(out, Tensor)
            if training:
                torch.autograd.grad(out, inputs[call], out.detach())
        del out


def _check(gate: Gate, setting: Setting, inputs: dict[tuple[int, int], list[Tensor]]) -> None:
    """With a pool the same bits; and those right, in some blocks of rows."""
    mine = MemoryPool(min_bytes=0)
    for (_, tokens), tensors in inputs.items():
        q, k, v = (x.detach() for x in tensors)
        plain = block_sparse_attention(q, k, v, WINDOW)
        with drawing_from(mine):
            for _ in range(2):
                pooled = block_sparse_attention(q, k, v, WINDOW)
                error = 0.0 if torch.equal(pooled, plain) else largest(pooled, plain)
                gate.accept(f"{tokens} tokens", "with a pool", "the output without", error, 0)
        layout = BlockLayout.from_pattern(WINDOW, tokens, block_size=128, device=setting.device)
        first = tuple(x[:1] for x in (q, k, v))
        check_rows(gate, f"{tokens} tokens", layout, Inputs(first, first[0]), plain[:1])


def buffers(job: Job) -> Record:
    if job.device != "cpu":
        raise SkipSectionError("on a GPU the pool is PyTorch's own")
    rows = []
    mine = MemoryPool(max_bytes=1 << 30)
    for mebibytes in (1, 4) if job.quick else (1, 4, 16, 64, 256):
        numbers = mebibytes << 18
        take = {"empty": partial(torch.empty, numbers), "pool": partial(mine.take, (numbers,), torch.float32)}
        for name, taken in ((name, each()) for name, each in take.items()):
            job.gate.accept(f"{mebibytes} MiB", name, "its size", abs(taken.nbytes - (mebibytes << 20)), 0)
        timings = interleave({name: partial(_written, each) for name, each in take.items()}, 9)
        medians = {name: statistics.median(timing.times[1:]) for name, timing in timings.items()}
        rows.append({"MiB": mebibytes, "medians": medians, "speedup": medians["empty"] / medians["pool"]})
        job.say(f"buffers: {mebibytes} MiB: {rows[-1]['speedup']:.2f} x")
    return {"rows": rows}


def _written(take: Callable[[], Tensor]) -> None:
    take().fill_(1.0)


def seeds(job: Job) -> Record:
    """Measured, forward: the two configurations that differed by 2 ×, and the hierarchical pattern that took 4 ×."""
    setting = setting_of(job)
    tokens, short = (2048, 1024) if setting.quick else (131072, 16384)
    config = partial(SparsePatternConfig, pattern_type="dilated_sparse")
    small, large = config(sparsity_ratio=0.01, block_size=64), config(sparsity_ratio=0.02, block_size=256)
    modules = {
        "segments [2048]": (BlockSparseRingDilatedAttention([2048], [1], small), tokens),
        "segments [65536, 131072]": (BlockSparseRingDilatedAttention([65536, 131072], [1, 2], large), tokens),
        "90% sparse": (BlockSparseRingDilatedAttention(sparsity_ratio=0.1), short),
        "95% sparse": (BlockSparseRingDilatedAttention(sparsity_ratio=0.05), short),
        "99% sparse": (BlockSparseRingDilatedAttention(sparsity_ratio=0.01), short),
        "hierarchical": (BlockSparseHierarchical(), short),
    }
    rows = []
    for name, (module, length) in modules.items():
        for size in (512, length):
            clear_layout_cache()
            gc.collect()
            with measure_peak(setting.device) as peak, torch.no_grad():
                q, k, v = setting.tensors(1, size, 8, 64)
                out = module(q, k, v)
            del q, k, v, out
        rows.append({"name": name, "tokens": length, "peak": peak.peak_bytes})
        job.say(f"seeds: {name}, {length:,}: {peak.peak_bytes / 2**20:.1f} MiB")
    peaks = {row["name"]: row["peak"] for row in rows}
    pair = [peaks["segments [2048]"], peaks["segments [65536, 131072]"]]
    return {
        "rows": rows,
        "two_configurations": max(pair) / min(pair) - 1,
        "hierarchical": peaks["hierarchical"] / max(peaks[f"{n}% sparse"] for n in (90, 95, 99)),
    }


def summary(record: Record) -> Record:
    """Every claim: its value, its target, and whether it is met. Tiny sizes are not judged."""
    found: Record = {}
    quick = any(section["provenance"]["quick"] for section in record.values())

    def claim(name: str, value: float, target: float, *, more: bool) -> None:
        met = value >= target if more else value <= target
        found[name] = {"value": value, "target": target, "met": None if quick else met}

    targets = TARGETS[next(iter(record.values()))["provenance"]["device"]] if record else {}
    if "plan" in record:
        claim("planned peak, worst error", record["plan"]["worst"], targets["plan"], more=False)
    for row in record.get("pool", {}).get("rows", ()):
        which = f"{row['workload']}, {'training' if row['training'] else 'forward'}"
        if row["workload"] == "1024 alone":
            claim(f"overhead, {which}", 1 / row["speedup"] - 1, OVERHEAD, more=False)
            continue
        claim(f"speedup, {which}", row["speedup"], targets["speedup"], more=True)
        claim(f"extra peak, {which}", row["extra_peak"], EXTRA_PEAK, more=False)
        if row["hit_rate"] is not None:
            claim(f"hit rate, {which}", row["hit_rate"], HIT_RATE, more=True)
    if "seeds" in record:
        claim("two configurations, difference", record["seeds"]["two_configurations"], 0.02, more=False)
        claim("hierarchical, times the others", record["seeds"]["hierarchical"], 1.05, more=False)
    return {"claims": found}


BENCHMARK = Benchmark(
    name="memory",
    about=__doc__,
    sections={"plan": plan, "pool": pool, "buffers": buffers, "seeds": seeds},
    untimed=("plan", "seeds"),
    devices=("cpu", "cuda"),
    summary=summary,
)


if __name__ == "__main__":
    raise SystemExit(run(BENCHMARK))
