"""Memory that is handed out, reused and measured. How much a call will need is computed in `planning`."""

from typing import TYPE_CHECKING, Any

from ..caches import CacheInfo, cache_report, clear_caches
from .buffers import AttentionBuffers, BufferType, Strategy
from .devices import GPUS, Device, available_memory
from .meter import Peak, can_measure, measure_peak
from .pool import MemoryPool, active_source, drawing_from, shared_pool

if TYPE_CHECKING:
    from ..planning import AttentionConfig, MemoryPlan, Recommendation, max_sequence_length, plan_memory, recommend

__all__ = [
    "GPUS",
    "AttentionBuffers",
    "AttentionConfig",
    "BufferType",
    "CacheInfo",
    "Device",
    "MemoryPlan",
    "MemoryPool",
    "Peak",
    "Recommendation",
    "Strategy",
    "active_source",
    "available_memory",
    "cache_report",
    "can_measure",
    "clear_caches",
    "drawing_from",
    "max_sequence_length",
    "measure_peak",
    "plan_memory",
    "recommend",
    "shared_pool",
]


def __getattr__(name: str) -> Any:
    """The public names of `planning`, resolved lazily because `planning` imports this package."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .. import planning

    return getattr(planning, name)
