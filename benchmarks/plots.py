"""Pictures of the records. Each function draws one and returns its path, or None without matplotlib or without rows.

python benchmarks/plots.py [cpu gpu …]     # those of docs/images again, light and dark, from benchmarks/results
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dilated_attention_pytorch.cli import recall as task
from dilated_attention_pytorch.viz.style import light_and_dark

ROOT = Path(__file__).resolve().parent.parent

# With contrast on white and on the ground of a dark page.
COLOURS = {"ours": "#2a8fc0", "flex": "#d9730d", "dense": "#808080"}
LABELS = {"ours": "this library", "flex": "FlexAttention, compiled", "dense": "dense SDPA"}

Record = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]


def rows_of(record: Record, section: str) -> Rows:
    return record.get(section, {}).get("rows", [])


def new_figure(**options: Any) -> Any:
    from matplotlib.figure import Figure

    return Figure(**options)


def text_colour() -> str:
    from matplotlib import rcParams

    return rcParams["text.color"]


def can_draw(*needed: Rows) -> bool:
    return all(needed) and find_spec("matplotlib") is not None


def cpu(record: Record, path: Path) -> Path | None:
    """GFLOP/s by density, a panel for each length, and time per token by length."""
    forward, flat = rows_of(record, "forward"), rows_of(record, "flat")
    if not can_draw([*forward, *flat]):
        return None
    lengths = sorted({row["tokens"] for row in forward})
    figure = new_figure(figsize=(max(8.0, 2.8 * len(lengths)), 7.5), layout="constrained")
    machine = record["forward" if forward else "flat"]["provenance"]
    figure.suptitle(f"{machine['cpu']}, {machine['threads']} threads, float32, 8 heads × 64, torch {machine['torch']}")
    parts = iter(figure.subfigures(bool(forward) + bool(flat), 1, squeeze=False)[:, 0])
    if forward:
        axes = next(parts).subplots(1, len(lengths), sharey=True, squeeze=False)[0]
        for axis, tokens in zip(axes, lengths, strict=True):
            side = record["forward"]["matmul_side"]
            _draw_rates(axis, side, [row for row in forward if row["tokens"] == tokens])
        axes[0].set(ylabel="GFLOP/s over active blocks", ylim=(0, 1.1 * max(map(_highest, forward))))
        axes[0].legend(fontsize="small", loc="lower left")
    if flat:
        _draw_flat(next(parts).subplots(), flat)
    figure.savefig(path, dpi=120)
    return path


def _highest(row: Mapping[str, Any]) -> float:
    return max(row["matmul_gflops"], *(row[name]["gflops"] for name in ("ours", "flex", "dense") if row[name]))


def _draw_rates(axis: Any, matmul_side: int, rows: Rows) -> None:
    for name in ("ours", "flex"):
        found = [(row["real_density"], row[name]["gflops"]) for row in rows if row[name]]
        if found:
            axis.plot(*zip(*found, strict=True), "o-", color=COLOURS[name], label=LABELS[name])
    dense = rows[0]["dense"]
    style = ":" if dense["extrapolated"] else "-"
    axis.axhline(dense["gflops"], color=COLOURS["dense"], linestyle=style, label=f"{LABELS['dense']} (dotted: scaled)")
    axis.axhline(rows[0]["matmul_gflops"], color=text_colour(), linestyle="--", label=f"matmul {matmul_side}³")
    axis.set(xscale="log", xlim=(0.007, 1.4), xlabel="density", title=f"{rows[0]['tokens']:,} tokens")
    axis.set_xticks([0.01, 0.1, 1.0], ["1 %", "10 %", "100 %"])


def _draw_flat(axis: Any, rows: Rows) -> None:
    for pattern in dict.fromkeys(row["pattern"] for row in rows):
        found = [(row["tokens"], row["microseconds_per_token"]) for row in rows if row["pattern"] == pattern]
        axis.plot(*zip(*found, strict=True), "o-", label=f"{pattern}, 8 blocks a row")
    lengths = sorted({row["tokens"] for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{tokens:,}" for tokens in lengths])
    highest = max(row["microseconds_per_token"] for row in rows)
    axis.set(ylim=(0, 1.1 * highest), xlabel="tokens", ylabel="µs per token, forward")
    axis.legend(fontsize="small", loc="lower right")


def gpu(record: Record, path: Path) -> Path | None:
    """TFLOP/s by density, time and memory by length."""
    rows, lengths = rows_of(record, "kernels"), rows_of(record, "lengths")
    if not can_draw(rows, lengths):
        return None
    figure = new_figure(figsize=(13, 4.2), layout="constrained")
    machine = record["kernels"]["provenance"]
    figure.suptitle(f"{machine['gpu']}, torch {machine['torch']}, triton {machine['triton']}")
    density, time, memory = figure.subplots(1, 3)
    _draw_density(density, [r for r in rows if r["head_dim"] == 128 and r["name"].split()[0] in ("random", "full")])
    for name in ("window", "random"):
        found = [row for row in lengths if row["name"] == name]
        trained = [row for row in found if "training_ns" in row]
        for axis, quantity in ((time, "ns"), (memory, "peak")):
            for way, those, style in (("forward", found, "o-"), ("training", trained, "s--")):
                values = [row[f"{way}_{quantity}"] for row in those]
                axis.plot([row["tokens"] for row in those], values, style, label=f"{name}, {way}")
    for axis in (time, memory):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("tokens (8 heads × 64, float16, 20 blocks a row)")
        axis.legend(fontsize="small")
    time.set(ylabel="ns a token", ylim=(0, None), title="time")
    memory.set(ylabel="peak ÷ tensors that must exist", ylim=(0.98, 1.06), title="memory")
    figure.savefig(path, dpi=120)
    return path


def _draw_density(axis: Any, rows: Rows) -> None:
    rows = sorted(rows, key=lambda row: row["density"])
    rivals = {"ours": ("ours", "ours"), "flex": ("FlexAttention", "flex"), "cudnn": ("dense cuDNN", "dense")}
    for way, style in (("forward", "o-"), ("backward", "s--")):
        for name, (label, colour) in rivals.items():
            found = [(row["density"], row[way][name]["tflops"]) for row in rows if name in row[way]]
            axis.plot(*zip(*found, strict=True), style, color=COLOURS[colour], label=f"{label}, {way}")
    axis.set(xscale="log", xlabel="density", ylabel="TFLOP/s of active blocks", ylim=(0, None), title="D=128, bfloat16")
    axis.legend(fontsize="x-small")


def dilated(record: Record, path: Path) -> Path | None:
    """Time per token by length."""
    lengths = rows_of(record, "lengths")
    if not can_draw(lengths):
        return None
    figure = new_figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for is_causal, style in ((False, "-"), (True, "--")):
        rows = [row for row in lengths if row["causal"] == is_causal]
        for name, label, colour in (("forward_ns", "forward", "ours"), ("step_ns", "training step", "flex")):
            axes.plot(
                [row["tokens"] for row in rows], [row[name] for row in rows], style, color=COLOURS[colour], marker="o",
                label=f"{label}{', causal' if is_causal else ''}",
            )  # fmt: skip
    axes.set(xscale="log", xlabel="tokens", ylabel="ns a token", ylim=(0, None),
             title="Dilated attention [2048, 4096, 8192] × [1, 2, 4], 8 heads × 64")  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 0.2))
    figure.savefig(path, dpi=120)
    return path


def ring(record: Record, path: Path) -> Path | None:
    """Bytes sent and memory of a rank by the number of ranks, and the cost model."""
    rings, layers = rows_of(record, "rings"), rows_of(record, "model")
    if not can_draw(rings, layers):
        return None
    figure = new_figure(figsize=(15, 3.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    _draw_rings(left, middle, rings)
    _draw_model(right, layers)
    for axes in (middle, right):
        axes.yaxis.set_major_formatter("{x:g}")
    figure.savefig(path, dpi=120)
    return path


def _draw_rings(left: Any, middle: Any, rings: Rows) -> None:
    for name in dict.fromkeys(row["pattern"] for row in rings):
        mine = [row for row in rings if row["pattern"] == name]
        several = [row for row in mine if row["ranks"] > 1]
        share = [100 * row["sent_bytes"] / row["full_ring_bytes"] for row in several]
        label = f"{name}, {mine[0]['tokens']:,} tokens"
        left.plot([row["ranks"] for row in several], share, marker="o", label=label)
        if all(row["peak_bytes_of_a_rank"] for row in mine):
            peaks = [row["peak_bytes_of_a_rank"] / 1e6 for row in mine]
            middle.loglog([row["ranks"] for row in mine], peaks, marker="o", label=label)
    left.axhline(100, color=text_colour(), linestyle=":", label="full ring, all-gather")
    left.set(xlabel="ranks", ylabel="% of a full ring's bytes", title="sent, measured", ylim=(0, 105))
    left.legend(fontsize=7, loc="center right", bbox_to_anchor=(1, 0.72))
    middle.set(xlabel="ranks", ylabel="MB above a rank's q, k, v", title="peak memory of a rank, measured")
    sizes = sorted({row["ranks"] for row in rings})
    for axes in (left, middle):
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
    low, high = middle.get_ylim()
    middle.plot(sizes, [high / 1.2 / size for size in sizes], color=text_colour(), linestyle=":")
    middle.annotate("∝ 1 / ranks", (2.6, high / 1.2 / 2.6), ha="right", va="top", fontsize=7)
    middle.set_ylim(low, high)
    middle.set_yticks([mb for mb in (10, 20, 50, 100, 200, 400, 800) if low < mb < high])


def _draw_model(axes: Any, layers: Rows) -> None:
    for name in dict.fromkeys(row["pattern"] for row in layers):
        for seq in dict.fromkeys(row["seq"] for row in layers):
            mine = [row for row in layers if row["pattern"] == name and row["seq"] == seq]
            times = [1e3 * row["forward_seconds"] for row in mine]
            label = f"{name}, {seq / 2**20:,.0f}M tokens"
            axes.loglog([row["world_size"] for row in mine], times, marker="o", label=label)
    axes.set(xlabel="devices", ylabel="ms, forward of a layer", title="cost model, not measured")
    devices = sorted({row["world_size"] for row in layers})
    axes.set_xticks(devices, [str(size) for size in devices])
    axes.xaxis.minorticks_off()
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))


def recall(record: Record, path: Path) -> Path | None:
    """Right answers by step."""
    if not can_draw([*record]):
        return None
    found = record["recall"]
    task.plot(task.Study(**found["study"]), {kind: each["curve"] for kind, each in found["models"].items()}, path)
    return path


def perplexity(record: Record, path: Path) -> Path | None:
    """Ratio to the dense perplexity by share of the blocks."""
    if not can_draw(record.get("rows", [])):
        return None
    from examples.perplexity import plot

    plot(record, path)
    return path


def models(record: Record, path: Path) -> Path | None:
    """Time a token by length, a panel for each section and kind of step."""
    panels = [
        (f"{name}, {kind}" if kind else name, [row for row in rows_of(record, name) if row.get("kind") == kind])
        for name in record
        for kind in dict.fromkeys(row.get("kind") for row in rows_of(record, name))
    ]
    if not can_draw([row for _, rows in panels for row in rows]):
        return None
    figure = new_figure(figsize=(3.4 * min(4, len(panels)), 3.2 * -(-len(panels) // 4)), layout="constrained")
    axes = figure.subplots(-(-len(panels) // 4), min(4, len(panels)), squeeze=False).flatten()
    for axis, (title, rows) in zip(axes, panels, strict=False):
        for name in dict.fromkeys(name for row in rows for name in row["seconds"]):
            found = [(row["tokens"], 1e3 * row["seconds"][name]) for row in rows if name in row["seconds"]]
            colour = COLOURS["dense" if name.startswith("sdpa") else name.split(",")[0]]
            axis.loglog(*zip(*found, strict=True), "o--" if "," in name else "o-", color=colour, label=name)
        axis.set(title=title, xlabel="tokens", ylabel="ms a token" if "generation" in title else "ms")
        axis.legend(fontsize="x-small")
    for axis in axes[len(panels) :]:
        axis.remove()
    figure.savefig(path, dpi=120)
    return path


def both(draw: Callable[[Path], Path | None], path: Path) -> Path | None:
    """Draw for a light page and for a dark one, NAME-dark; the path of the first."""
    if find_spec("matplotlib") is None:
        return None
    light, _ = [draw(each) for each in light_and_dark(path)]
    return light


# A picture of docs/images, and the record that it is drawn from.
PICTURES: dict[str, tuple[Callable[[Record, Path], Path | None], str]] = {
    "cpu": (cpu, "cpu"),
    "dilated": (dilated, "dilated_cuda"),
    "gpu": (gpu, "gpu"),
    "perplexity": (perplexity, "perplexity"),
    "recall": (recall, "recall"),
    "ring": (ring, "ring"),
}


def main(names: Sequence[str], folder: Path) -> None:
    for name in names or PICTURES:
        draw, source = PICTURES[name]
        loaded = json.loads((ROOT / "benchmarks" / "results" / f"{source}.json").read_text(encoding="utf-8"))
        print(both(partial(draw, loaded), folder / f"{name}.png"))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # examples/
    main(sys.argv[1:], ROOT / "docs" / "images")
