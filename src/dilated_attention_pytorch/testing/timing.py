"""Timing: what a number depends on, and contenders that take turns.

- `environment()` names versions, processor and threads.
- `interleave({name: callable}, repeats)` times all contenders in turn, again and again: a machine that slows down
  slows down all of them. Probes, the machine's own rates, run beside each.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import dilated_attention_pytorch

THREADING = ("OMP_", "GOMP_", "KMP_", "MKL_")


def environment() -> dict[str, Any]:
    """What a number depends on besides the code."""
    return {
        "library": dilated_attention_pytorch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "thread_settings": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(THREADING)},
        # Threads that wait for a thread without a core make small operators many times slower.
        "load_before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@dataclass(frozen=True)
class Timing:
    """Seconds of every call, in order."""

    times: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    @property
    def min(self) -> float:
        return min(self.times)

    def record(self) -> dict[str, Any]:
        return {"median": self.median, "min": self.min, "times": list(self.times)}


Contenders = Mapping[str, Callable[[], object]]


def interleave(
    contenders: Contenders, repeats: int | Mapping[str, int], probes: Contenders | None = None
) -> dict[str, Timing]:
    """Time all contenders in turn, `repeats` times over; a contender with fewer repeats is spread over the turns.

    Args:
        probes: timed once after every timing of a contender.
    """
    counts = dict.fromkeys(contenders, repeats) if isinstance(repeats, int) else repeats
    probes = probes or {}
    turns = max(counts.values())
    times: dict[str, list[float]] = {name: [] for name in (*contenders, *probes)}
    for turn in range(turns):
        for name, run in contenders.items():
            if (turn + 1) * counts[name] // turns == turn * counts[name] // turns:
                continue
            times[name].append(seconds(run))
            for probe, run_probe in probes.items():
                times[probe].append(seconds(run_probe))
    return {name: Timing(tuple(each)) for name, each in times.items()}


def seconds(run: Callable[[], object]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


def gpu_seconds(run: Callable[[], object], calls: int = 1) -> float:
    """Seconds of a call by CUDA events, after one that is not counted."""
    run()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1e-3 / calls
