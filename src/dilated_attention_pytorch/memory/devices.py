"""How much memory a device has: one of this machine, or a GPU by name."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

GIB = 1 << 30

# (GiB, compute capability), as the driver reports them.
GPUS: dict[str, tuple[float, tuple[int, int]]] = {
    "GTX 1080": (8, (6, 1)),
    "GTX 1080 Ti": (11, (6, 1)),
    "T4": (15, (7, 5)),
    "RTX 2080 Ti": (11, (7, 5)),
    "V100 16GB": (16, (7, 0)),
    "V100": (32, (7, 0)),
    "A10": (22.5, (8, 6)),
    "RTX 3090": (24, (8, 6)),
    "RTX 4090": (24, (8, 9)),
    "L4": (22.5, (8, 9)),
    "RTX 5090": (32, (12, 0)),
    "A40": (45, (8, 6)),
    "L40S": (45, (8, 9)),
    "RTX A6000": (48, (8, 6)),
    "A100 40GB": (40, (8, 0)),
    "A100": (80, (8, 0)),
    "H100": (80, (9, 0)),
    "H200": (140, (9, 0)),
    "B200": (179, (10, 0)),
}

# Memory of a GPU that the CUDA context takes before the first tensor.
CONTEXT = 600 << 20

_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class Device:
    """Where attention runs.

    Attributes:
        name: for messages.
        type: "cpu" or "cuda".
        budget: bytes that tensors may take.
        capability: of a GPU.
        here: the device itself, if it is one of this machine.
    """

    name: str
    type: str
    budget: int
    capability: tuple[int, int] = (0, 0)
    here: torch.device | None = None

    @classmethod
    def of(cls, device: Device | torch.device | str | None = None) -> Device:
        """A device, or a GPU of `GPUS` by name; by default the current GPU, or the CPU if there is none."""
        if isinstance(device, Device):
            return device
        known = {name.lower(): name for name in GPUS}
        if isinstance(device, str) and device.lower() in known:
            name = known[device.lower()]
            gibibytes, capability = GPUS[name]
            return cls(name, "cuda", int(gibibytes * GIB) - CONTEXT, capability)
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            found = torch.device(device)
        except RuntimeError:
            found = torch.device("meta")
        if found.type == "cpu":
            return cls("this CPU", "cpu", available_memory(), here=found)
        if found.type == "cuda" and torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(found)
            capability = properties.major, properties.minor
            return cls(properties.name, "cuda", properties.total_memory - CONTEXT, capability, found)
        raise ValueError(f"device must be 'cpu', a CUDA device that is there, or one of {list(GPUS)}, got {device!r}")


def available_memory(device: torch.device | str = "cpu") -> int:
    """Bytes that can still be allocated on a device."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in _MEMINFO.read_text().splitlines() if _MEMINFO.exists() else ():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def as_text(count: float) -> str:
    """Bytes in a readable unit."""
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while count >= 1024 and len(units) > 1:
        count, units = count / 1024, units[1:]
    return f"{count:,.1f} {units[0]}"
