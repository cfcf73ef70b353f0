"""Timing: what a number depends on, and contenders that take turns. `cli/bench.py` and `benchmarks/` use it.

- `environment(device)` names versions, processor, GPU and threads.
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
from functools import partial
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import dilated_attention_pytorch

THREADING = ("OMP_", "GOMP_", "KMP_", "MKL_")
ALLOCATING = ("MALLOC_", "THP_MEM_ALLOC_", "PYTORCH_ALLOC_")


def environment(device: str = "cpu") -> dict[str, Any]:
    """What a number measured on this device depends on besides the code."""
    return {
        "library": dilated_attention_pytorch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "thread_settings": _settings(THREADING),
        "malloc_settings": _settings(ALLOCATING),
        # Threads that wait for a thread without a core make small operators many times slower.
        "load_before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        **_gpu(device),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _settings(prefixes: tuple[str, ...]) -> dict[str, str]:
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(prefixes)}


def _gpu(device: str) -> dict[str, Any]:
    if not device.startswith("cuda"):
        return {}
    return {"gpu": torch.cuda.get_device_name(device), "cudnn": torch.backends.cudnn.version()}


def hint_of_load(found: Mapping[str, Any]) -> str | None:
    """What to know of times that were taken in such an `environment`; None where the machine was quiet enough."""
    load, cores = found["load_before"], os.cpu_count() or 1
    if load is None or load <= cores / 2:
        return None
    busy = f"The machine was busy (load {load} on {cores} cores): the times say little."
    if found["threads"] == 1 or found["thread_settings"].get("OMP_WAIT_POLICY", "").lower() == "passive":
        return busy
    return (
        f"{busy} Operators that PyTorch splits over its {found['threads']} threads may stall, each waiting for one "
        "without a core: OMP_WAIT_POLICY=PASSIVE in the environment lets them sleep meanwhile."
    )


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
    contenders: Contenders,
    repeats: int | Mapping[str, int],
    probes: Contenders | None = None,
    *,
    device: str = "cpu",
    on_turn: Callable[[int], object] | None = None,
) -> dict[str, Timing]:
    """Time all contenders in turn, `repeats` times over; a contender with fewer repeats is spread over the turns.

    Args:
        probes: timed once after every timing of a contender.
        device: where the contenders run. On a CPU a timing is one call by the host's clock, and whoever needs a warm-up
            has had it; on a GPU it is the mean of 1 to 20 calls in a row by CUDA events, after one that is not counted.
        on_turn: called with the number of each turn, from 0, before it begins.
    """
    counts = dict.fromkeys(contenders, repeats) if isinstance(repeats, int) else repeats
    probes = probes or {}
    turns = max(counts.values())
    timers = {name: _timer(run, device) for name, run in {**contenders, **probes}.items()}
    times: dict[str, list[float]] = {name: [] for name in timers}
    for turn in range(turns):
        if on_turn is not None:
            on_turn(turn)
        for name in contenders:
            if (turn + 1) * counts[name] // turns == turn * counts[name] // turns:
                continue
            for timed in (name, *probes):
                times[timed].append(timers[timed]())
    return {name: Timing(tuple(each)) for name, each in times.items()}


def _timer(run: Callable[[], object], device: str) -> Callable[[], float]:
    if not device.startswith("cuda"):
        return partial(seconds, run)
    return partial(gpu_seconds, run, max(1, min(20, int(5e-3 / gpu_seconds(run)))))


def seconds(run: Callable[[], object], device: str = "cpu") -> float:
    """Seconds of one call by the host's clock, from an idle device until the result is there."""
    _wait_for(device)
    start = perf_counter()
    run()
    _wait_for(device)
    return perf_counter() - start


def _wait_for(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


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
