"""How much memory something takes: planned by arithmetic, measured, and used again."""

from .devices import GPUS, Device, available_memory
from .meter import Peak, can_measure, measure_peak
from .plan import AttentionConfig, MemoryPlan, Recommendation, max_sequence_length, plan_memory, recommend

__all__ = [
    "GPUS",
    "AttentionConfig",
    "Device",
    "MemoryPlan",
    "Peak",
    "Recommendation",
    "available_memory",
    "can_measure",
    "max_sequence_length",
    "measure_peak",
    "plan_memory",
    "recommend",
]
