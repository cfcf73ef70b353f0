"""How much memory something takes: planned by arithmetic, measured, and used again."""

from .buffers import AttentionBuffers, BufferType, Strategy
from .devices import GPUS, Device, available_memory
from .meter import Peak, can_measure, measure_peak
from .plan import AttentionConfig, MemoryPlan, Recommendation, max_sequence_length, plan_memory, recommend
from .pool import MemoryPool, active_source, drawing_from, shared_pool

__all__ = [
    "GPUS",
    "AttentionBuffers",
    "AttentionConfig",
    "BufferType",
    "Device",
    "MemoryPlan",
    "MemoryPool",
    "Peak",
    "Recommendation",
    "Strategy",
    "active_source",
    "available_memory",
    "can_measure",
    "drawing_from",
    "max_sequence_length",
    "measure_peak",
    "plan_memory",
    "recommend",
    "shared_pool",
]
