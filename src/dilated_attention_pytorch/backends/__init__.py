"""Implementations of (q, k, v, layout) → (out, lse)."""
