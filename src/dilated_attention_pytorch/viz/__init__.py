"""Pictures of layouts, weights and memory: in the terminal, or as PNG and SVG with matplotlib.

    print(draw_text(layout))
    plot_layout([("window", a), ("documents", b)], "layouts.png")
    plot_weights(weights, "weights.svg", head=3)
    plot_memory(plan_memory(pattern, 131072, training=True), "memory.png")
    plot_kept_mass(kept, "kept.png")

Blocks have three states: full (every pair of tokens is allowed, no mask is read), partial (a rule decides inside the
block; the last key block of a sequence that does not fill it is always partial) and empty (not computed). Where there
are more blocks than room, a cell stands for a group of them: full or empty if all of them are, else partial.

Figures follow matplotlib's style: `with matplotlib.style.context("dark_background"):` makes dark ones. Nothing here
needs matplotlib until a figure is drawn: `pip install matplotlib`.
"""

from .figures import plot_kept_mass, plot_layout, plot_weights
from .memory import plot_memory
from .states import State, block_states
from .style import COLOURS, DARK_COLOURS
from .text import SYMBOLS, draw_text

__all__ = [
    "COLOURS",
    "DARK_COLOURS",
    "SYMBOLS",
    "State",
    "block_states",
    "draw_text",
    "plot_kept_mass",
    "plot_layout",
    "plot_memory",
    "plot_weights",
]
