"""`plot_memory`: what a planned call holds, phase by phase and kind by kind."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

from .figures import _new_figure, _saved

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# In the order in which they are stacked; neighbours differ in brightness too.
KIND_COLOURS = {
    "parameters": "#6b4c9a",
    "tensors": "#1f4e8c",
    "gradients": "#7fb2e5",
    "lists": "#f5a742",
    "ring": "#3c8d5a",
    "workspace": "#c9cdd4",
}


def plot_memory(
    plan: Any, path: str | PathLike[str] | None = None, *, measured: Mapping[str, int] | None = None
) -> Figure:
    """Draw the bytes that are alive in each phase of a `MemoryPlan`, stacked by kind.

    Args:
        plan: what `plan_memory` returns.
        path: where to save the figure; the ending says how, .png or .svg.
        measured: peaks by phase, drawn as marks beside the planned ones.

    Returns:
        The figure, of matplotlib.
    """
    phases = list(plan.phases)
    unknown = sorted(set(measured or ()) - set(phases))
    if unknown:
        raise ValueError(f"measured must name phases of the plan, {phases}, got {unknown[0]!r}")
    scale, unit = _unit(max(*plan.phases.values(), *(measured or {}).values()))
    figure = _new_figure(1.6 * len(phases) + 3.0, 4.2)
    from matplotlib import rcParams

    axis, ground = figure.subplots(), figure.get_facecolor()
    bottoms = [0.0] * len(phases)
    for kind, colour in KIND_COLOURS.items():
        heights = [plan.by_kind(phase).get(kind, 0) / scale for phase in phases]
        if any(heights):
            axis.bar(phases, heights, 0.98, bottoms, color=colour, edgecolor=ground, linewidth=0.5, label=kind)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for place, total in enumerate(bottoms):
        axis.annotate(f"{total:,.1f}", (place, total), ha="center", va="bottom", fontsize=9)
    if measured:
        axis.plot(
            [phases.index(phase) for phase in measured],
            [count / scale for count in measured.values()],
            "_",
            color=rcParams["text.color"],
            markersize=26,
            label="measured",
        )
    axis.set_ylabel(unit)
    axis.margins(y=0.12)
    axis.spines[["top", "right"]].set_visible(False)
    shape = plan.shape
    axis.set_title(
        f"{shape.seq_q:,} tokens, {shape.batch} x {shape.heads} heads x {shape.head_dim}, {plan.backend}", fontsize=10
    )
    figure.legend(loc="outside right upper", frameon=False)
    return _saved(figure, path)


def _unit(most: float) -> tuple[int, str]:
    return (1 << 30, "GiB") if most >= 1 << 30 else (1 << 20, "MiB") if most >= 1 << 20 else (1 << 10, "KiB")
