"""How much memory a call will need, by arithmetic: plans, the longest sequence that fits, recommendations."""

from .advice import Recommendation, recommend
from .plan import AttentionConfig, MemoryPlan, max_sequence_length, plan_memory

__all__ = [
    "AttentionConfig",
    "MemoryPlan",
    "Recommendation",
    "max_sequence_length",
    "plan_memory",
    "recommend",
]
