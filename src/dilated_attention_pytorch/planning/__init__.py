"""How much memory a call will take, by arithmetic: plans, the longest sequence that fits, recommendations."""

from .plan import AttentionConfig, MemoryPlan, Recommendation, max_sequence_length, plan_memory, recommend

__all__ = [
    "AttentionConfig",
    "MemoryPlan",
    "Recommendation",
    "max_sequence_length",
    "plan_memory",
    "recommend",
]
