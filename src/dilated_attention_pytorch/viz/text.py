"""`draw_text`: a layout in the terminal."""

from __future__ import annotations

from types import MappingProxyType

from ..layout import BlockLayout
from .states import State, picture

SYMBOLS = MappingProxyType({State.FULL: "█", State.PARTIAL: "▒", State.EMPTY: "·"})


def draw_text(layout: BlockLayout, head: int = 0, width: int = 64, *, sample: int = 0) -> str:
    """Draw the blocks of one head, queries downwards and keys to the right, and a line that explains the symbols.

    Args:
        width: columns of the terminal to use at most. A cell takes two, which makes it about square; with more than
            width // 2 blocks a side, a cell stands for a group of blocks.
    """
    if width < 2:
        raise ValueError(f"width must be at least 2 columns, got {width}")
    cells, _, note, *_ = picture(layout, width // 2, head=head, sample=sample)
    lines = ["".join(2 * SYMBOLS[State(state)] for state in row) for row in cells.tolist()]
    lines.append("  ".join(f"{symbol} {state.name.lower()}" for state, symbol in SYMBOLS.items()))
    return "\n".join([*lines, note] if note else lines)
