"""`dilated-attention show`: a pattern or a saved layout, drawn, with its density and cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.columns import Columns
from rich.console import Console, Group
from rich.text import Text

from ..layout import BlockLayout
from ..memory.devices import as_text
from ..viz import draw_text, plot_layout
from .call import Call
from .output import Document, table

WIDTH = 64  # columns of a drawing
MOST_HEADS = 4  # drawn in the terminal unless they are asked for
ENDINGS = (".png", ".svg")


def run(console: Console, call: Call, *, heads: Sequence[int] = (), out: Path | None = None) -> Document:
    """Draw it in the terminal, and as a picture if `out` says where."""
    if out is not None and out.suffix not in ENDINGS:
        raise ValueError(f"--out must end in {' or '.join(ENDINGS)}, got {out.name!r}")
    layout = call.layout()
    own = layout.num_heads or 1
    for head in heads:
        if not 0 <= head < call.heads:
            raise ValueError(f"--head must be from 0 to {call.heads - 1}, got {head}")
    chosen = list(heads) or list(range(own))
    _draw(console, layout, chosen if heads else chosen[:MOST_HEADS])
    if not heads and own > MOST_HEADS:
        console.print(f"{own - MOST_HEADS} heads more; --head draws those that you name.")
    figures = call.figures(layout)
    console.print(_table(figures))
    if not isinstance(call.what, BlockLayout):
        figures["code"] = call.code()
        console.print("In Python:", style="bold")
        console.print(figures["code"], markup=False, soft_wrap=True, end="")
    if out is not None:
        titles = [call.name if len(chosen) == 1 and own == 1 else f"{call.name}, head {head}" for head in chosen]
        out.parent.mkdir(parents=True, exist_ok=True)
        plot_layout([(title, layout) for title in titles], out, head=chosen)
        console.print(f"Written: {out}", soft_wrap=True)
        figures["picture"] = str(out)
    return figures


def _draw(console: Console, layout: BlockLayout, heads: Sequence[int]) -> None:
    """Side by side where there is room."""
    apart = 3
    width = min(WIDTH, max(16, (console.width + apart) // len(heads) - apart), console.width)
    several = (layout.num_heads or 1) > 1
    drawings = [
        Group(*([Text(f"head {head}", style="bold")] if several else []), Text(draw_text(layout, head, width)))
        for head in heads
    ]
    console.print(Columns(drawings, padding=(0, apart)))


def _table(figures: Document) -> object:
    cost, rows = figures["cost"], []
    block_q, block_k = figures["block_size"]
    blocks = "x".join(map(str, figures["blocks_a_side"]))
    lists = f", in {figures['lists']} lists" if figures["lists"] > 1 else ""
    rows += [
        ("tokens", f"{figures['tokens']:,}, {figures['heads']} heads x {figures['head_dim']}, {figures['dtype']}"),
        ("blocks", f"{blocks} of {block_q} x {block_k} tokens{lists}"),
        (
            "active blocks",
            f"{figures['active_blocks']:,}: {figures['full_blocks']:,} full, {figures['partial_blocks']:,} partial",
        ),
    ]
    if figures["lists"] > 1:
        by_list = ", ".join(f"{count:,}" for count in figures["active_blocks_by_list"])
        rows.append(("by head", by_list))
    rows += [
        ("density", f"{figures['density']:.2%} of the pairs, {figures['block_density']:.2%} of the blocks"),
        ("forward", f"{_flops(cost['forward_flops'])}, {as_text(cost['forward_bytes'])} moved at the least"),
        ("backward", f"{_flops(cost['backward_flops'])}, {as_text(cost['backward_bytes'])} moved at the least"),
    ]
    made = table("", "", title=figures["pattern"] + (", causal" if figures["is_causal"] else ""))
    made.show_header = False
    for row in rows:
        made.add_row(*row)
    return made


def _flops(count: float) -> str:
    units = ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:,.1f} {units[0]}"
