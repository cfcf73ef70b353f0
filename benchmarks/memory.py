"""The memory benchmark: planned against measured peaks, and what a pool gives, on a CPU or a GPU.

    python benchmarks/memory.py                   # all of it on this machine's device, about 10 minutes on 2 cores
    python benchmarks/memory.py --quick           # tiny sizes, to see that it works
    python benchmarks/memory.py --only plan pool  # one or more of plan, pool, buffers, seeds
    python benchmarks/memory.py --device cpu
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
output without; a difference ends the run with exit status 1. Writes --out (benchmarks/results/memory_cpu.json or
memory_cuda.json); tables on stdout, progress on stderr, the last line on stdout is the summary as JSON.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from cases import HERE, GateError, Inputs, environment, expected, write_json
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
from report import table

TARGETS = {"cpu": {"plan": 0.10, "speedup": 1.5}, "cuda": {"plan": 0.03, "speedup": 0.98}}
HIT_RATE, EXTRA_PEAK, OVERHEAD = 0.95, 0.15, 0.02
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # largest error ÷ largest value


@dataclass(frozen=True)
class Setting:
    """Where and how large."""

    device: str
    quick: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device == "cpu" else torch.bfloat16

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

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


def plan(setting: Setting) -> dict[str, Any]:
    rows = []
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
        say(f"plan: {case.name}, {case.tokens:,}, {'training' if training else 'forward'}: {rows[-1]['error']:+.1%}")
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


def pool(setting: Setting) -> dict[str, Any]:
    rows = []
    turns = 2 if setting.quick else 5
    for (name, calls), training in itertools.product(workloads(setting).items(), (False, True)):
        inputs = {
            call: setting.tensors(*call, 8, 64, training=training, number=3)
            for call in dict.fromkeys((batch, tokens) for batch, tokens in calls)
        }
        _gate(setting, inputs)
        mine = MemoryPool(pool_size=64)
        contenders = {"plain": nullcontext, "pool": partial(drawing_from, mine)}
        for using in contenders.values():
            _turn(setting, calls, inputs, using, training)
        warm = mine.get_buffer_stats()
        times: dict[str, list[float]] = {which: [] for which in contenders}
        for _ in range(turns):
            for which, using in contenders.items():
                times[which].append(_turn(setting, calls, inputs, using, training))
        now = mine.get_buffer_stats()
        asked = now["hits"] + now["misses"] - warm["hits"] - warm["misses"]
        peaks = {}
        for which, using in contenders.items():
            mine.clear()
            with measure_peak(setting.device) as peak:
                _turn(setting, calls, inputs, using, training)
            peaks[which] = peak.peak_bytes
        medians = {which: statistics.median(values) for which, values in times.items()}
        rows.append(
            {
                "workload": name,
                "training": training,
                "calls": len(calls),
                "times": times,
                "speedup": medians["plain"] / medians["pool"],
                "requests": asked,
                "hit_rate": 1 - (now["misses"] - warm["misses"]) / asked if asked else None,
                "bytes_held": now["bytes_held"],
                "peaks": peaks,
                "extra_peak": peaks["pool"] / peaks["plain"] - 1,
            }
        )
        say(f"pool: {name}, {'training' if training else 'forward'}: {rows[-1]['speedup']:.3f} x")
    return {"rows": rows}


def _turn(
    setting: Setting,
    calls: Sequence[tuple[int, int]],
    inputs: dict[tuple[int, int], list[Tensor]],
    using: Callable[[], AbstractContextManager[Any]],
    training: bool,
) -> float:
    setting.synchronize()
    start = perf_counter()
    for call in calls:
        with using():
            out = block_sparse_attention(*inputs[call], WINDOW)
            assert isinstance(out, Tensor)
            if training:
                torch.autograd.grad(out, inputs[call], out.detach())
        del out
    setting.synchronize()
    return perf_counter() - start


def _gate(setting: Setting, inputs: dict[tuple[int, int], list[Tensor]]) -> None:
    """With a pool the same bits; and those right, in the first and last block of rows."""
    mine = MemoryPool(min_bytes=0)
    for (_, tokens), tensors in inputs.items():
        q, k, v = (x.detach() for x in tensors)
        plain = block_sparse_attention(q, k, v, WINDOW)
        with drawing_from(mine):
            for _ in range(2):
                if not torch.equal(block_sparse_attention(q, k, v, WINDOW), plain):
                    raise GateError(f"{tokens} tokens: with a pool the output differs")
        layout = BlockLayout.from_pattern(WINDOW, tokens, block_size=128, device=setting.device)
        rows = [0, layout.num_q_blocks - 1]
        first = [x[:1] for x in (q, k, v)]
        want = expected(Inputs(tuple(first), first[0]), layout, rows)["out"]
        at = torch.cat([torch.arange(r * 128, min((r + 1) * 128, tokens), device=q.device) for r in rows])
        got = plain[:1, at].double()
        error = float((got - want).abs().max() / want.abs().max())
        if not error < TOLERANCE[q.dtype]:
            raise GateError(f"{tokens} tokens: off by {error:.1e}")


def buffers(setting: Setting) -> dict[str, Any]:
    rows = []
    mine = MemoryPool(max_bytes=1 << 30)
    for mebibytes in (1, 4) if setting.quick else (1, 4, 16, 64, 256):
        numbers = mebibytes << 18
        contenders: dict[str, Callable[[], Tensor]] = {
            "empty": partial(torch.empty, numbers),
            "pool": partial(mine.take, (numbers,), torch.float32),
        }
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(9):
            for name, take in contenders.items():
                start = perf_counter()
                take().fill_(1.0)
                times[name].append(perf_counter() - start)
        medians = {name: statistics.median(values[1:]) for name, values in times.items()}
        rows.append({"MiB": mebibytes, "medians": medians, "speedup": medians["empty"] / medians["pool"]})
        say(f"buffers: {mebibytes} MiB: {rows[-1]['speedup']:.2f} x")
    return {"rows": rows}


def seeds(setting: Setting) -> dict[str, Any]:
    """Measured, forward: the two configurations that differed by 2 ×, and the hierarchical pattern that took 4 ×."""
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
        say(f"seeds: {name}, {length:,}: {peak.peak_bytes / 2**20:.1f} MiB")
    peaks = {row["name"]: row["peak"] for row in rows}
    pair = [peaks["segments [2048]"], peaks["segments [65536, 131072]"]]
    return {
        "rows": rows,
        "two_configurations": max(pair) / min(pair) - 1,
        "hierarchical": peaks["hierarchical"] / max(peaks[f"{n}% sparse"] for n in (90, 95, 99)),
    }


SECTIONS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "plan": plan, "pool": pool, "buffers": buffers, "seeds": seeds,
}  # fmt: skip


def summary(record: dict[str, Any], device: str) -> dict[str, Any]:
    """claim → value, target and whether it is met."""
    found: dict[str, Any] = {}

    def claim(name: str, value: float, target: float, *, more: bool) -> None:
        found[name] = {"value": value, "target": target, "met": value >= target if more else value <= target}

    if "plan" in record:
        claim("planned peak, worst error", record["plan"]["worst"], TARGETS[device]["plan"], more=False)
    for row in record.get("pool", {}).get("rows", ()):
        which = f"{row['workload']}, {'training' if row['training'] else 'forward'}"
        if row["workload"] == "1024 alone":
            claim(f"overhead, {which}", 1 / row["speedup"] - 1, OVERHEAD, more=False)
            continue
        claim(f"speedup, {which}", row["speedup"], TARGETS[device]["speedup"], more=True)
        claim(f"extra peak, {which}", row["extra_peak"], EXTRA_PEAK, more=False)
        if row["hit_rate"] is not None:
            claim(f"hit rate, {which}", row["hit_rate"], HIT_RATE, more=True)
    if "seeds" in record:
        claim("two configurations, difference", record["seeds"]["two_configurations"], 0.02, more=False)
        claim("hierarchical, times the others", record["seeds"]["hierarchical"], 1.05, more=False)
    return found


def as_text(record: dict[str, Any]) -> Iterator[str]:
    def mebibytes(count: int) -> str:
        return f"{count / 2**20:,.1f}"

    if "plan" in record:
        rows = [
            [row["name"], f"{row['tokens']:,}", "yes" if row["training"] else "no", row["backend"], row["dtype"],
             mebibytes(row["planned"]), mebibytes(row["measured"]), f"{row['error']:+.1%}"]
            for row in record["plan"]["rows"]
        ]  # fmt: skip
        head = ["pattern", "tokens", "training", "backend", "dtype", "planned MiB", "measured MiB", "error"]
        yield table("Peak memory, planned and measured", head, rows)
    if "pool" in record:
        rows = [
            [row["workload"], "yes" if row["training"] else "no",
             *(f"{statistics.median(row['times'][name]) * 1e3:.1f}" for name in ("plain", "pool")),
             f"{row['speedup']:.3f}", "-" if row["hit_rate"] is None else f"{row['hit_rate']:.1%}",
             *(mebibytes(row["peaks"][name]) for name in ("plain", "pool")), f"{row['extra_peak']:+.1%}"]
            for row in record["pool"]["rows"]
        ]  # fmt: skip
        head = ["workload", "training", "plain ms", "pool ms", "speedup", "hits", "plain MiB", "pool MiB", "extra"]
        yield table("The seeds' workload, without and with a pool", head, rows)
    if "buffers" in record:
        rows = [
            [str(row["MiB"]), *(f"{seconds * 1e3:.2f}" for seconds in row["medians"].values()), f"{row['speedup']:.2f}"]
            for row in record["buffers"]["rows"]
        ]
        yield table("A buffer taken and written", ["MiB", "torch.empty ms", "pool ms", "speedup"], rows)
    if "seeds" in record:
        rows = [[row["name"], f"{row['tokens']:,}", mebibytes(row["peak"])] for row in record["seeds"]["rows"]]
        yield table("The seeds' configurations, forward", ["configuration", "tokens", "peak MiB"], rows)
    rows = [
        [name, f"{claim['value']:.3f}", f"{claim['target']:.3f}", "met" if claim["met"] else "missed"]
        for name, claim in record["summary"].items()
    ]
    title = "Targets (quick: sizes that mean nothing)" if record["quick"] else "Targets"
    yield table(title, ["claim", "value", "target", ""], rows)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="the commit, where the tree has no .git")
    args = parser.parse_args(argv)
    setting = Setting(args.device, args.quick)
    name = f"memory_{args.device}{'-quick' if args.quick else ''}.json"
    out = args.out or HERE / "results" / name
    record: dict[str, Any] = {"environment": environment(), "device": args.device, "quick": args.quick}
    if args.commit:
        record["environment"]["commit"] = args.commit
    if args.device == "cuda":
        record["environment"]["gpu"] = torch.cuda.get_device_name()
    record["environment"]["malloc_settings"] = {k: v for k, v in sorted(os.environ.items()) if k.startswith("MALLOC_")}
    try:
        for section in args.only:
            if section == "buffers" and args.device != "cpu":
                continue
            record[section] = SECTIONS[section](setting)
            record["summary"] = summary(record, args.device)
            out.parent.mkdir(parents=True, exist_ok=True)
            write_json(out, record)
    except GateError as error:
        print(f"wrong result: {error}", file=sys.stderr)
        return 1
    print("\n\n".join(as_text(record)))
    print(json.dumps(record["summary"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
