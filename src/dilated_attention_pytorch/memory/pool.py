"""`MemoryPool`: reuse of large CPU buffers, because fresh memory costs a page fault for every 4 KiB.

    pool = MemoryPool(pool_size=10)
    x = pool.take((4, 1000, 64), torch.float32)     # uninitialised, like torch.empty
    del x                                           # dropping the last reference returns it to the pool

There is no call that returns a buffer, so none can be forgotten or made too early: a buffer is free when only the pool
refers to its storage, by PyTorch's own reference count. A view, an autograd graph, a NumPy array or another thread that
still holds the storage keeps it in use.

Buffers are matched by size in bytes, not by shape: the smallest free one that is large enough is used. The pool holds
at most `pool_size` buffers and `max_bytes`, and evicts the least recently used first. When an allocation fails, it
frees every unused buffer and tries once more.

On a CUDA device `take` is `torch.empty`: PyTorch's allocator already caches buffers by size and stream, and unlike a
pool on top of it, it knows which streams still use them. `get_buffer_stats()` reads its counters.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from threading import RLock
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils import deterministic

from ..caches import register_cache
from ..patterns.base import check_flag, check_int
from .devices import available_memory

# Below this size malloc reuses freed memory itself, and is faster than any Python code.
SMALL = 1 << 20
SHARED_SIZE = 64  # buffers of the pool that modules share
# The share of the memory available at construction that a pool may hold,
SHARE = 0.25
# and the share of a new buffer that must stay available after allocating it.
SPARE = 0.05


class Source(Protocol):
    """What a backend allocates its workspace from."""

    def buffer(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor: ...

    def watch(self, device: torch.device) -> None: ...

    def get_buffer_stats(self) -> dict[str, Any]: ...


_active: ContextVar[Source | None] = ContextVar("dilated_attention_source", default=None)


def active_source() -> Source | None:
    """What workspace is allocated from in this context; None for plain allocation."""
    return _active.get()


@contextmanager
def drawing_from(source: Source | None) -> Iterator[None]:
    """Inside, backends of this thread take their workspace from `source`: a `MemoryPool` or an `AttentionBuffers`."""
    token = _active.set(source)
    try:
        yield
    finally:
        _active.reset(token)


class _Buffer:
    """Memory that the pool holds."""

    __slots__ = ("claimed", "nbytes", "storage")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.storage = torch.empty(nbytes, dtype=torch.uint8).untyped_storage()
        self.claimed = False  # between being found free and being handed out

    @property
    def free(self) -> bool:
        """Nothing else refers to the storage, in PyTorch (tensors, views, graphs) or in Python (the storage object)."""
        return (
            not self.claimed
            and torch._C._storage_Use_Count(self.storage._cdata) == 1
            and sys.getrefcount(self.storage) == _UNSHARED
            and not self.storage.is_shared()
        )

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A new tensor on the storage, not a view of another tensor."""
        strides = [1] * len(shape)
        for i in range(len(shape) - 2, -1, -1):
            strides[i] = strides[i + 1] * max(1, shape[i + 1])
        return torch.empty(0, dtype=dtype).set_(self.storage, 0, tuple(shape), tuple(strides))


def _count_references() -> int:
    """What `sys.getrefcount(buffer.storage)` returns inside `_Buffer.free` when only the buffer refers to it."""
    buffer = _Buffer(1)
    return sys.getrefcount(buffer.storage)


_UNSHARED = _count_references()


class MemoryPool:
    """See the module docstring.

    Args:
        pool_size: maximum number of buffers held.
        max_bytes: maximum bytes held; by default a quarter of the memory that is available now.
        min_bytes: smaller requests are allocated normally.
        lightweight: record no statistics and no peak.
    """

    def __init__(
        self,
        pool_size: int = 10,
        *,
        max_bytes: int | None = None,
        min_bytes: int = SMALL,
        lightweight: bool = False,
    ) -> None:
        check_int("pool_size", pool_size, least=1)
        check_int("min_bytes", min_bytes, least=0)
        check_flag("lightweight", lightweight)
        if max_bytes is not None:
            check_int("max_bytes", max_bytes, least=1)
        if not hasattr(torch._C, "_storage_Use_Count"):
            raise RuntimeError(
                f"MemoryPool needs a PyTorch that counts the users of a storage, got {torch.__version__}"
            )
        self.pool_size = pool_size
        self.max_bytes = int(SHARE * available_memory()) if max_bytes is None else max_bytes
        self.min_bytes = min_bytes
        self.lightweight = lightweight
        self._reset()

    def _reset(self) -> None:
        self._lock = RLock()  # the garbage collector may run anything while it is held
        self._buffers: list[_Buffer] = []  # the least recently used first
        self._learned: list[int] = []
        self._most_in_use = 0
        self._counts = {"hits": 0, "misses": 0, "small": 0, "cuda": 0}
        self._cuda_start: dict[int, tuple[int, int]] = {}
        _pools.add(self)

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """A contiguous, uninitialised tensor that is not in use elsewhere."""
        device = torch.device(device)
        if device.type != "cpu":
            self._count_cuda(device)
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < max(1, self.min_bytes):
            self._count("small")
            return torch.empty(tuple(shape), dtype=dtype)
        with self._lock:
            buffer = self._claim(nbytes)
            self._count("misses" if buffer is None else "hits")
            if buffer is None:
                buffer = self._add(nbytes)
            try:
                tensor = buffer.tensor(shape, dtype)
            finally:
                buffer.claimed = False
        if torch.are_deterministic_algorithms_enabled() and deterministic.fill_uninitialized_memory:  # type: ignore[attr-defined]
            tensor.fill_(torch.nan if dtype.is_floating_point else 0)
        return tensor

    def buffer(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """`take`, for a backend's named workspace."""
        return self.take((numel,), dtype, device)

    def _claim(self, nbytes: int) -> _Buffer | None:
        """The smallest free buffer that is large enough, marked as taken."""
        found, in_use = None, []
        for buffer in self._buffers:
            if not buffer.free:
                in_use.append(buffer.nbytes)
            elif buffer.nbytes >= nbytes and (found is None or buffer.nbytes < found.nbytes):
                found = buffer
        if found is not None:
            found.claimed = True
            self._buffers.remove(found)
            self._buffers.append(found)
        if not self.lightweight:
            total = sum(in_use) + nbytes
            if total > self._most_in_use:
                self._most_in_use, self._learned = total, sorted((*in_use, bucket(nbytes)))
        return found

    def _add(self, nbytes: int) -> _Buffer:
        """A new buffer, held by the pool if there is room beside those in use; else by the caller alone."""
        size = bucket(nbytes)
        self._make_room(size)
        try:
            buffer = _Buffer(size)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            self.clear()
            buffer = _Buffer(size)
        buffer.claimed = True
        if len(self._buffers) < self.pool_size and self.bytes_held + size <= self.max_bytes:
            self._buffers.append(buffer)
        return buffer

    def _make_room(self, size: int) -> None:
        """Evict free buffers, the least recently used first, until one of `size` fits."""
        limit = min(self.max_bytes, self.bytes_held + int(available_memory() / (1 + SPARE)))
        for buffer in list(self._buffers):
            if len(self._buffers) < self.pool_size and self.bytes_held + size <= limit:
                return
            if buffer.free:
                self._buffers.remove(buffer)

    @property
    def bytes_held(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def preallocate(self, sizes: Iterable[int]) -> None:
        """Allocate free buffers of at least these sizes in bytes, as far as the bounds allow."""
        with self._lock:
            held = [self._claim(size) or self._add(size) for size in sorted(sizes, reverse=True)]
            for buffer in held:
                buffer.tensor((buffer.nbytes,), torch.uint8).zero_()  # take the page faults now and not in a call
                buffer.claimed = False

    @property
    def learned(self) -> list[int]:
        """Sizes of the buffers live at the peak so far: what to `preallocate` for the same workload."""
        return list(self._learned)

    def clear(self) -> None:
        """Free every buffer that is not in use."""
        with self._lock:
            self._buffers = [buffer for buffer in self._buffers if not buffer.free]

    def get_buffer_stats(self) -> dict[str, Any]:
        """Hits, misses, the hit rate, and what is held.

        On CUDA a hit is an allocation that PyTorch's allocator served from memory it had cached. Requests below
        `min_bytes` are neither.
        """
        with self._lock:
            hits, misses = self._counts["hits"], self._counts["misses"]
            in_use = sum(buffer.nbytes for buffer in self._buffers if not buffer.free)
            record = {"small": self._counts["small"], "buffers": len(self._buffers), "bytes_held": self.bytes_held}
            for index, (allocations, fresh) in self._cuda_start.items():
                now_allocations, now_fresh = _cuda_counters(index)
                misses += now_fresh - fresh
                hits += max(0, now_allocations - allocations - (now_fresh - fresh))
        rate = hits / (hits + misses) if hits + misses else 0.0
        return {"cache_hit_rate": rate, "hits": hits, "misses": misses, **record, "bytes_in_use": in_use}

    def _count(self, what: str) -> None:
        if not self.lightweight:
            self._counts[what] += 1

    def _count_cuda(self, device: torch.device) -> None:
        """Remember the allocator's counters at the pool's first use of the device."""
        index = torch.cuda.current_device() if device.index is None else device.index
        if not self.lightweight and index not in self._cuda_start:
            with self._lock:
                self._cuda_start[index] = _cuda_counters(index)

    def watch(self, device: torch.device) -> None:
        """Include this device in `get_buffer_stats`."""
        if device.type == "cuda":
            self._count_cuda(device)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (shared_pool, ()) if self is _shared else super().__reduce_ex__(protocol)

    def __getstate__(self) -> dict[str, Any]:
        """The settings only: a copy of a pool, or one in another process, has its own buffers."""
        return {name: getattr(self, name) for name in ("pool_size", "max_bytes", "min_bytes", "lightweight")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def __repr__(self) -> str:
        return f"MemoryPool(pool_size={self.pool_size}, max_bytes={self.max_bytes}, lightweight={self.lightweight})"


_pools: WeakSet[MemoryPool] = WeakSet()
_shared: MemoryPool | None = None


def shared_pool() -> MemoryPool:
    """The pool that modules share by default."""
    global _shared
    if _shared is None:
        _shared = MemoryPool(pool_size=SHARED_SIZE)
    return _shared


register_cache(
    "memory.pool._shared",
    "buffers of the pool that modules share",
    bound=SHARED_SIZE,
    entries=lambda: 0 if _shared is None else len(_shared._buffers),
    clear=lambda: None if _shared is None else _shared.clear(),
    nbytes=lambda: 0 if _shared is None else _shared.bytes_held,
)


def bucket(nbytes: int) -> int:
    """The next of eight sizes per octave, at most an eighth larger."""
    step = 1 << max(12, nbytes.bit_length() - 4)
    return -(-nbytes // step) * step


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed because memory ran out."""
    kinds = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return kinds or "allocate memory" in str(error) or "not enough memory" in str(error)


def _cuda_counters(index: int) -> tuple[int, int]:
    """Allocations so far, and how many of them went to the driver."""
    stats = torch.cuda.memory_stats(index)
    return stats.get("allocation.all.allocated", 0), stats.get("num_device_alloc", 0)


def _new_locks() -> None:
    """A forked child has none of its parent's threads: a lock that one of them held would never be released."""
    for pool in list(_pools):
        pool._lock = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_locks)
