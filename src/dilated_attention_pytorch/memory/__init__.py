"""How much memory something takes: `measure_peak`, the one meter of the demo, the benchmarks and the tests."""

from .meter import Peak, can_measure, measure_peak

__all__ = ["Peak", "can_measure", "measure_peak"]
