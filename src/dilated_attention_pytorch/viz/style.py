"""Figures on a light and on a dark ground: they follow matplotlib's style.

with matplotlib.style.context("dark_background"):
    plot_layout(layout, "layout-dark.png")
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .states import State

# Blue and orange: told apart by everybody, and by their brightness in grey.
COLOURS = MappingProxyType({State.FULL: "#1f4e8c", State.PARTIAL: "#f5a742", State.EMPTY: "#eceff3"})
DARK_COLOURS = MappingProxyType({State.FULL: "#4f8fe0", State.PARTIAL: "#f5a742", State.EMPTY: "#333a47"})

# A dark page shows through.
_DARK_FILES = {
    "savefig.transparent": True,
    "text.color": "#d7dbe2",
    "axes.labelcolor": "#d7dbe2",
    "axes.edgecolor": "#8a93a3",
    "xtick.color": "#b4bbc7",
    "ytick.color": "#b4bbc7",
    "legend.facecolor": "#1e2129",
    "legend.edgecolor": "#8a93a3",
    "figure.facecolor": "#1e2129",
    "axes.facecolor": "#1e2129",
}


def is_dark() -> bool:
    """Whether figures made now have a dark ground."""
    from matplotlib import colors, rcParams

    red, green, blue = colors.to_rgb(rcParams["figure.facecolor"])
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.5


def colours() -> Mapping[State, str]:
    """A colour for each state of a block, on the present ground."""
    return DARK_COLOURS if is_dark() else COLOURS


def light_and_dark(path: Path) -> Iterator[Path]:
    """Twice a path to draw to: `path` in the present style, then NAME-dark in the style of a dark page.

    for each in light_and_dark(Path("layout.png")):
        plot_layout(layout, each)
    """
    from matplotlib import rc_context, style

    yield path
    dark: Any = _DARK_FILES
    with style.context("dark_background"), rc_context(dark):
        yield path.with_stem(f"{path.stem}-dark")
