"""Options of a module that let its workspace come from a pool. Unused, they cost nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..memory import AttentionBuffers, MemoryPool, shared_pool
from ..memory.pool import Source, drawing_from
from ..patterns.base import check_flag

T = TypeVar("T")

POOL_FIELDS = ("enable_memory_pool", "lightweight_pool", "enable_buffer_manager", "enable_buffer_reuse")


class Pooled:
    """Mixin of attention modules: call `set_buffers` in the constructor and `drawing` around the work.

    Attributes:
        memory_pool: there with `enable_memory_pool`.
        buffer_manager: there with `enable_buffer_manager`.
    """

    memory_pool: MemoryPool
    buffer_manager: AttentionBuffers
    _source: Source | None = None

    def set_buffers(
        self,
        enable_memory_pool: bool | MemoryPool = False,
        lightweight_pool: bool = False,
        enable_buffer_manager: bool = False,
        enable_buffer_reuse: bool | None = None,
    ) -> None:
        """
        Args:
            enable_memory_pool: draw workspace from the pool that all modules share, or from the one given here.
            lightweight_pool: from a small pool of this module's own, without statistics.
            enable_buffer_manager: draw it by type, and count by type.
            enable_buffer_reuse: False lets the manager count and allocate afresh; True, its default, use again.
        """
        own = isinstance(enable_memory_pool, MemoryPool)
        for name, flag in (
            ("enable_memory_pool", own or enable_memory_pool),
            ("lightweight_pool", lightweight_pool),
            ("enable_buffer_manager", enable_buffer_manager),
            ("enable_buffer_reuse", enable_buffer_reuse is None or enable_buffer_reuse),
        ):
            check_flag(name, flag)
        if lightweight_pool and (own or not enable_memory_pool):
            raise ValueError("lightweight_pool makes a pool of its own: it needs enable_memory_pool=True")
        if enable_buffer_reuse is not None and not enable_buffer_manager:
            raise ValueError("enable_buffer_reuse has no meaning without enable_buffer_manager=True")
        if isinstance(enable_memory_pool, MemoryPool):
            self.memory_pool = enable_memory_pool
        elif enable_memory_pool:
            self.memory_pool = MemoryPool(lightweight=True) if lightweight_pool else shared_pool()
        if enable_memory_pool:
            self._source = self.memory_pool
        if enable_buffer_manager:
            pool = self.memory_pool if enable_memory_pool else None
            self.buffer_manager = AttentionBuffers(pool, reuse=enable_buffer_reuse is not False)
            self._source = self.buffer_manager

    def drawing(self, q: Tensor, run: Callable[[], T]) -> T:
        """`run()`, and later its backward, with workspace from the buffers on the device of q. A compiled graph plans
        its own, and where something intercepts operators (a dispatch mode, say) the backward allocates afresh."""
        source = self._source
        if source is None or torch.compiler.is_compiling() or not isinstance(q, Tensor):  # which `run` refuses
            return run()
        source.watch(q.device)
        with drawing_from(source):
            return run()

    def get_buffer_stats(self) -> dict[str, Any]:
        """`cache_hit_rate`, hits, misses and bytes of the pool; with the buffer manager also `by_type`."""
        if self._source is None:
            raise RuntimeError("get_buffer_stats needs enable_memory_pool=True or enable_buffer_manager=True")
        return self._source.get_buffer_stats()


def only_pool_options(options: dict[str, Any]) -> dict[str, Any]:
    """The same, if they are keywords of `Pooled.set_buffers`."""
    unknown = sorted(set(options) - set(POOL_FIELDS))
    if unknown:
        raise TypeError(f"unknown keyword {unknown[0]!r}; beside its signature the class takes {list(POOL_FIELDS)}")
    return options


def split_pool_options(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keywords of `Pooled.set_buffers`, and the others."""
    pool = {name: value for name, value in options.items() if name in POOL_FIELDS}
    return pool, {name: value for name, value in options.items() if name not in POOL_FIELDS}
