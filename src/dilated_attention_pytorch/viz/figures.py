"""`plot_layout` and `plot_weights`: figures with matplotlib, imported when one is drawn. No display is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from textwrap import fill
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..layout import BlockLayout
from ..patterns.blocks import ceil_div
from .states import State, picture
from .style import colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 3
PANEL_INCHES = 4.2
TITLE_LETTERS = 44  # as many as a panel is wide
DPI = 160
# Fewer than a panel has pixels: no cell falls between two of them.
MOST_CELLS = 512
# Blocks a side up to which lines between them help and do not hide them.
MOST_LINES = 64
MOST_WEIGHTS = 2048
# The largest weight ÷ the smallest that still has a colour of its own.
WEIGHT_RANGE = 1e4


def plot_layout(
    layouts: BlockLayout | Sequence[tuple[str, BlockLayout]],
    path: str | PathLike[str] | None = None,
    *,
    head: int | Sequence[int] = 0,
    sample: int = 0,
) -> Figure:
    """Draw the full, partial and empty blocks of a layout, or of several side by side.

    Args:
        layouts: a layout, or pairs (title, layout).
        path: where to save the figure; the ending says how, .png or .svg.
        head, sample: which list to show of layouts that have several; heads may differ from panel to panel.

    Returns:
        The figure, of matplotlib.
    """
    panels = [("Layout", layouts)] if isinstance(layouts, BlockLayout) else list(layouts)
    if not panels:
        raise ValueError("layouts must hold at least one (title, layout) pair, got none")
    heads = [head] * len(panels) if isinstance(head, int) else list(head)
    if len(heads) != len(panels):
        raise ValueError(f"head must be one for all or one for each of the {len(panels)} layouts, got {heads}")
    columns = min(COLUMNS, len(panels))
    rows = ceil_div(len(panels), columns)
    figure = _new_figure(columns * PANEL_INCHES, rows * (PANEL_INCHES + 0.3) + 0.4)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, (title, layout), which in zip(axes, panels, heads, strict=False):
        _draw_layout(axis, title, layout, which, sample)
    for axis in axes[len(panels) :]:
        axis.remove()
    _add_legend(figure)
    return _saved(figure, path)


def plot_weights(
    weights: Mapping[str, Any], path: str | PathLike[str] | None = None, *, sample: int = 0, head: int = 0
) -> Figure:
    """Draw the weights of one head as a heat map; what is not computed, or has no weight, stays blank.

    Colours are on a log scale, four decades below the largest weight. Sequences of more than 2048 tokens are drawn in
    cells that show their largest weight; the dense matrix is never made.

    Args:
        weights: `BlockSparseWeights`, or a mapping with its keys.
        path: where to save the figure; the ending says how, .png or .svg.
    """
    image, size = _weight_image(weights, sample, head)
    seq_q, seq_k = weights["shape"][2:]
    figure = _new_figure(7.0, 6.2)
    axis = figure.subplots()
    from matplotlib.colors import LogNorm

    highest = float(image.max()) or 1.0
    shown = axis.imshow(
        image.where(image > 0, torch.nan).numpy(),
        norm=LogNorm(highest / WEIGHT_RANGE, highest),
        cmap="viridis",
        extent=(0, image.shape[1] * size, image.shape[0] * size, 0),
        interpolation="none",
    )
    axis.set_facecolor(colours()[State.EMPTY])
    axis.set(xlim=(0, seq_k), ylim=(seq_q, 0), xlabel="key", ylabel="query")
    axis.set_title(f"Attention weights, sample {sample}, head {head}")
    label = "weight" if size == 1 else f"largest weight of {size} x {size} tokens"
    figure.colorbar(shown, ax=axis, label=label, extend="min")
    return _saved(figure, path)


def plot_kept_mass(
    kept: Tensor, path: str | PathLike[str] | None = None, *, title: str = "Attention mass kept"
) -> Figure:
    """Draw the share of dense attention's mass that a pattern keeps, by layer and head (`kept_mass`, averaged).

    Args:
        kept: [layers, heads], between 0 and 1.
        path: where to save the figure; the ending says how, .png or .svg.
    """
    if kept.ndim != 2 or not ((kept >= 0) & (kept <= 1)).all():
        raise ValueError(f"kept must be [layers, heads] with values from 0 to 1, got shape {list(kept.shape)}")
    layers, heads = kept.shape
    figure = _new_figure(max(3.5, 0.3 * heads + 2.0), max(2.5, 0.2 * layers + 1.2))
    axis = figure.subplots()
    shown = axis.imshow(kept.cpu().numpy(), cmap="viridis", vmin=0, vmax=1, aspect="auto", interpolation="none")
    axis.set(xlabel="head", ylabel="layer", title=title)
    axis.set_xticks(range(0, heads, ceil_div(heads, 16)))
    axis.set_yticks(range(0, layers, ceil_div(layers, 16)))
    figure.colorbar(shown, ax=axis, label="share of the mass")
    return _saved(figure, path)


def _draw_layout(axis: Axes, title: str, layout: BlockLayout, head: int, sample: int) -> None:
    from matplotlib.colors import ListedColormap

    cells, (height, width), note, *_ = picture(layout, MOST_CELLS, head=head, sample=sample)
    axis.imshow(
        cells.numpy(),
        cmap=ListedColormap([colours()[state] for state in State]),
        vmin=min(State),
        vmax=max(State),
        extent=(0, cells.shape[1] * width, cells.shape[0] * height, 0),
        interpolation="none",
    )
    axis.set(xlim=(0, layout.seq_k), ylim=(layout.seq_q, 0), xlabel="key", ylabel="query")
    axis.spines[:].set_position(("outward", 1))  # the frame would hide the outermost blocks of a large layout
    axis.set_xticks(_ticks(layout.seq_k, layout.block_k))
    axis.set_yticks(_ticks(layout.seq_q, layout.block_q))
    if max(cells.shape) <= MOST_LINES:
        axis.set_xticks(range(0, layout.seq_k, width), minor=True)
        axis.set_yticks(range(0, layout.seq_q, height), minor=True)
        axis.grid(which="minor", color=axis.figure.get_facecolor(), linewidth=0.6)
        axis.tick_params(which="minor", length=0)
    lines = [fill(text, TITLE_LETTERS) for text in (title, _caption(layout, note))]
    axis.set_title("\n".join(lines), fontsize=10)


def _ticks(tokens: int, block: int) -> range:
    """About four steps, of whole blocks."""
    blocks = ceil_div(tokens, block)
    return range(0, blocks * block + 1, ceil_div(blocks, 4) * block)


def _caption(layout: BlockLayout, note: str) -> str:
    """Density and block size. A panel shows one list; the density speaks of all."""
    block = str(layout.block_q) if layout.block_q == layout.block_k else f"{layout.block_q} x {layout.block_k}"
    lists = f", mean of {layout.num_lists} lists" if layout.num_lists > 1 else ""
    apart = f", {layout.num_residues} apart" if layout.num_residues > 1 else ""
    return f"density {layout.density:.1%}{lists}; blocks of {block} tokens{apart}" + (f", {note}" if note else "")


def _add_legend(figure: Figure) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=colour, edgecolor="#888888", label=state.name.lower()) for state, colour in colours().items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def _weight_image(weights: Mapping[str, Any], sample: int, head: int) -> tuple[Tensor, int]:
    """float32 cells of one head, the largest weight of each, and how many tokens a side a cell has."""
    batch, heads, seq_q, seq_k = weights["shape"]
    for name, value, count in (("sample", sample, batch), ("head", head, heads)):
        if not 0 <= value < count:
            raise IndexError(f"{name} must be from 0 to {count - 1}, as the weights have {count}, got {value}")
    size = ceil_div(max(seq_q, seq_k), MOST_WEIGHTS)
    block_size = weights["block_size"]
    block_q, block_k = (block_size, block_size) if isinstance(block_size, int) else block_size
    # Blocks may reach beyond the sequence, with zeros there: room for them, cut off at the end.
    image = torch.zeros(ceil_div(seq_q + block_q, size), ceil_div(seq_k + block_k, size))
    for (query_block, key_block), values in zip(weights["block_indices"], weights["block_values"], strict=True):
        row = (query_block * block_q + torch.arange(block_q)) // size
        column = (key_block * block_k + torch.arange(block_k)) // size
        block = values[sample, head].detach().float().cpu()
        cell = row[:, None] * image.shape[1] + column
        image.view(-1).scatter_reduce_(0, cell.flatten(), block.flatten(), "amax")
    return image[: ceil_div(seq_q, size), : ceil_div(seq_k, size)], size


def _new_figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError("drawing needs matplotlib: pip install matplotlib") from error
    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def _saved(figure: Figure, path: str | PathLike[str] | None) -> Figure:
    if path is not None:
        figure.savefig(path, dpi="figure")
    return figure
