"""`AttentionBuffers`: the pool with a type for each buffer.

There are ten types, each with a `Strategy`. A buffer that a backend requests by name (`blockwise` names its workspace
"queries", "keys", "scores", …) is counted under its type, so `get_buffer_stats` breaks down the workspace of a call.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from threading import Lock
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..patterns.base import check_flag, check_int
from .pool import MemoryPool, shared_pool


class BufferType(enum.Enum):
    """What a buffer holds."""

    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    OUTPUT = "output"
    SCORES = "scores"
    WEIGHTS = "weights"
    TEMP = "temp"
    COMM = "comm"
    MASK = "mask"
    CACHE = "cache"


class Strategy(NamedTuple):
    """How buffers of a type are allocated.

    Attributes:
        zeroed: filled with zeros when handed out.
        reused: taken from the pool; otherwise allocated each time, for buffers that are held for long anyway.
    """

    zeroed: bool = False
    reused: bool = True


STRATEGIES: Mapping[BufferType, Strategy] = MappingProxyType(
    {kind: Strategy() for kind in BufferType}
    | {
        BufferType.OUTPUT: Strategy(zeroed=True),  # rows that are never written are 0
        BufferType.CACHE: Strategy(reused=False),  # held across calls, so the pool could not reuse it
    }
)

# The type of each named workspace of `backends.blockwise`; all others are TEMP.
_NAMED = {
    "queries": BufferType.QUERY,
    "keys": BufferType.KEY,
    "values": BufferType.VALUE,
    "scores": BufferType.SCORES,
    "dweights": BufferType.WEIGHTS,
}


class AttentionBuffers:
    """Buffers for attention, by type.

    Args:
        pool: where buffers come from; by default the pool that all modules share.
        reuse: if False, allocate each time and only count.
        strategies: overrides of `STRATEGIES`, by type.
    """

    def __init__(
        self,
        pool: MemoryPool | None = None,
        *,
        reuse: bool = True,
        strategies: Mapping[BufferType, Strategy] | None = None,
    ) -> None:
        if pool is not None and not isinstance(pool, MemoryPool):
            raise TypeError(f"pool must be a MemoryPool, got {type(pool).__name__}")
        check_flag("reuse", reuse)
        for kind in strategies or ():
            check_type(kind)
        self.pool = shared_pool() if pool is None else pool
        self.reuse = reuse
        self.strategies = {**STRATEGIES, **(strategies or {})}
        self._reset()

    def _reset(self) -> None:
        self._lock = Lock()
        self._profile: dict[BufferType, dict[str, int]] = {}

    def get(
        self, kind: BufferType, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> Tensor:
        """A contiguous tensor that is not in use elsewhere, allocated by the strategy of its type."""
        strategy = self.strategies[check_type(kind)]
        self.watch(torch.device(device))
        if self.reuse and strategy.reused:
            given = self.pool.take(shape, dtype, device)
        else:
            given = torch.empty(tuple(shape), dtype=dtype, device=device)
        with self._lock:
            profile = self._profile.setdefault(kind, {"requests": 0, "bytes": 0, "largest": 0})
            profile["requests"] += 1
            profile["bytes"] += given.nbytes
            profile["largest"] = max(profile["largest"], given.nbytes)
        return given.zero_() if strategy.zeroed else given

    def buffer(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """`get`, for a backend's named workspace."""
        return self.get(_NAMED.get(name, BufferType.TEMP), (numel,), dtype, device)

    def watch(self, device: torch.device) -> None:
        """Include this device in `get_buffer_stats`."""
        self.pool.watch(device)

    def preallocate_buffers(
        self,
        batch_size: int,
        seq_len: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        """Allocate the workspace of a call of these sizes ahead of the call.

        On a CPU this is one key head and the tiles of `backends.blockwise`, for any batch size. On a GPU the output is
        allocated once, so that PyTorch's allocator caches memory for it.
        """
        sizes = {"batch_size": batch_size, "seq_len": seq_len, "num_heads": num_heads, "head_dim": head_dim}
        for name, value in sizes.items():
            check_int(name, value, least=1)
        where = torch.device("cpu" if device is None else device)
        if where.type != "cpu":
            self.get(BufferType.OUTPUT, (batch_size, seq_len, num_heads, head_dim), dtype, where)
            return
        from ..backends.tiling import largest_buffers  # imports this package

        size = 8 if dtype == torch.float64 else 4
        wanted = largest_buffers(seq_len, head_dim)
        self.pool.preallocate(size * numbers for numbers in wanted if size * numbers >= self.pool.min_bytes)

    def preallocate_learned(self) -> None:
        """Allocate the buffers that were live at the peak so far."""
        self.pool.preallocate(self.pool.learned)

    def get_buffer_stats(self) -> dict[str, Any]:
        """The statistics of the pool, and requests and bytes by type."""
        with self._lock:
            profile = {kind.name: dict(counts) for kind, counts in self._profile.items()}
        return {**self.pool.get_buffer_stats(), "by_type": profile}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_profile")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()


def check_type(kind: object) -> BufferType:
    if not isinstance(kind, BufferType):
        raise TypeError(f"kind must be a BufferType, {[one.name for one in BufferType]}, got {kind!r}")
    return kind
