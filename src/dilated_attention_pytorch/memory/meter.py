"""Peak memory of a block of code, above the level at its start.

    with measure_peak() as peak:          # or measure_peak("cuda")
        out = block_sparse_attention(q, k, v, pattern)
    print(peak.peak_bytes)

On a CPU this is the operating system's high-water mark of resident memory: it covers every allocator and every thread,
and only memory that was touched. The mark belongs to the process, so allocations of other threads count too, and two
measurements must not overlap. Only Linux can reset it; elsewhere `measure_peak` is an error, which `can_measure`
predicts. On a CUDA device the peak is that of PyTorch's allocator.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_RESET = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


class Peak:
    """The result of a measurement, available once its `with` block has ended."""

    def __init__(self) -> None:
        self._bytes: int | None = None

    @property
    def peak_bytes(self) -> int:
        """The highest level inside the block, minus the level at its entry."""
        if self._bytes is None:
            raise RuntimeError("peak_bytes is known after the with block has ended, not inside it")
        return self._bytes

    def __repr__(self) -> str:
        return f"Peak(peak_bytes={self._bytes})"


def can_measure(device: torch.device | str | None = None) -> tuple[bool, str]:
    """Whether `measure_peak(device)` works here, and what is missing if not."""
    kind = torch.device("cpu" if device is None else device).type
    if kind == "cuda":
        return torch.cuda.is_available(), "needs a CUDA device that PyTorch can use"
    if kind != "cpu":
        return False, f"can measure the memory of cpu and cuda, not of {kind}"
    ok = os.access(_RESET, os.W_OK) and os.access(_STATUS, os.R_OK)
    return ok, f"needs Linux, with a writable {_RESET} and a readable {_STATUS}"


@contextmanager
def measure_peak(device: torch.device | str | None = None) -> Iterator[Peak]:
    """Measure the block's peak memory on `device`, the CPU by default. RuntimeError where that is not possible."""
    ok, reason = can_measure(device)
    if not ok:
        raise RuntimeError(f"measure_peak {reason}")
    device = torch.device("cpu" if device is None else device)
    peak = Peak()
    gc.collect()
    level = _start_cuda(device) if device.type == "cuda" else _start_cpu()
    try:
        yield peak
    finally:
        peak._bytes = max(0, (_highest_cuda(device) if device.type == "cuda" else _status_bytes("VmHWM")) - level)


def _start_cpu() -> int:
    """Reset the high-water mark; returns the current level."""
    _give_back_free_memory()
    _RESET.write_text("5")
    return _status_bytes("VmRSS")


def _give_back_free_memory() -> None:
    """Freed memory that malloc caches is resident: the block would reuse it and appear to need less."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except AttributeError:
        return  # a C library without malloc_trim, such as musl, caches little of what is freed


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"measure_peak needs the field {field} in {_STATUS}, which this kernel does not write")


def _start_cuda(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _highest_cuda(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)
