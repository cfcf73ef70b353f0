"""Comparing an implementation with the oracle, with tolerances that are derived and not tuned."""

from .oracle import Case, assert_exact, errors_of_eager, oracle, results, tolerances

__all__ = ["Case", "assert_exact", "errors_of_eager", "oracle", "results", "tolerances"]
