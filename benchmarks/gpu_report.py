"""Tables and plots of `benchmarks/gpu.py`'s record.

python benchmarks/gpu_report.py benchmarks/results/gpu.json   # both again, from the file
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from report import number, table

RIVALS = ("flex", "flex, max-autotune", "cudnn", "flash")


def as_text(record: Mapping[str, Any]) -> str:
    machine, ceilings = record["environment"], record["ceilings"]
    parts = [
        f"{machine['gpu']}, torch {machine['torch']}, triton {machine['triton']}, commit {machine['commit'][:12]}; "
        f"bfloat16 matmul {ceilings['matmul_tflops']:.0f} TFLOP/s, copy {ceilings['copy_tbytes']:.2f} TB/s"
    ]
    for way in ("forward", "backward"):
        rows = [
            [row["name"], str(row["head_dim"]), str(row["block"]), f"{row['density']:.3f}",
             f"{row[way]['ours']['tflops']:.0f}",
             *(number(row[way].get(name, {}).get("ratio")) for name in RIVALS)]
            for row in record.get("kernels", [])
        ]  # fmt: skip
        if rows:
            head = ["layout", "D", "block", "density", "TFLOP/s", *(f"÷ {name}" for name in RIVALS)]
            parts.append(table(f"{way}: ours, and the time of others ÷ ours (dense: × density)", head, rows))
    for name, title in (
        ("options", "with options: ms, and the time of others ÷ ours"), ("lengths", "by length"),
        ("layouts", "building layouts"), ("seeds", "the seeds' variants"), ("calls", "calls"),
    ):  # fmt: skip
        rows = record.get(name, [])
        if rows:
            head = list(dict.fromkeys(key for row in rows for key in row))
            parts.append(table(title, head, [[_cell(row.get(key)) for key in head] for row in rows]))
    return "\n\n".join(parts)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else "–" if value is None else str(value)


def draw(record: Mapping[str, Any], path: Path) -> Path | None:
    """TFLOP/s by density, time and memory by length. None without matplotlib, or with nothing to draw."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    rows, lengths = record.get("kernels", []), record.get("lengths", [])
    if not rows or not lengths:
        return None
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    machine = record["environment"]
    figure.suptitle(f"{machine['gpu']}, torch {machine['torch']}, triton {machine['triton']}")
    density, time, memory = figure.subplots(1, 3)
    _draw_density(density, [r for r in rows if r["head_dim"] == 128 and r["name"].split()[0] in ("random", "full")])
    for name in ("window", "random"):
        found = [row for row in lengths if row["name"] == name]
        where = [row["tokens"] for row in found]
        time.plot(where, [row["forward_ns"] for row in found], "o-", label=f"{name}, forward")
        trained = [row for row in found if "training_ns" in row]
        time.plot([r["tokens"] for r in trained], [r["training_ns"] for r in trained], "s--", label=f"{name}, training")
        memory.plot(where, [row["forward_peak"] for row in found], "o-", label=f"{name}, forward")
        memory.plot(
            [r["tokens"] for r in trained], [r["training_peak"] for r in trained], "s--", label=f"{name}, training"
        )
    for axis in (time, memory):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("tokens (8 heads × 64, float16, 20 blocks a row)")
        axis.legend(fontsize="small")
    time.set(ylabel="ns a token", ylim=(0, None), title="time")
    memory.set(ylabel="peak ÷ tensors that must exist", ylim=(0.98, 1.06), title="memory")
    figure.savefig(path, dpi=120)
    return path


def _draw_density(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    rows = sorted(rows, key=lambda row: row["density"])
    where = [row["density"] for row in rows]
    for way, style in (("forward", "o-"), ("backward", "s--")):
        axis.plot(where, [row[way]["ours"]["tflops"] for row in rows], style, color="C0", label=f"ours, {way}")
        flex = [(row["density"], row[way]["flex"]["tflops"]) for row in rows if "flex" in row[way]]
        axis.plot(*zip(*flex, strict=True), style, color="C1", label=f"FlexAttention, {way}")
        axis.plot(
            where,
            [row[way]["cudnn"]["tflops"] for row in rows],
            style,
            color="grey",
            alpha=0.7,
            label=f"dense cuDNN, {way}",
        )
    axis.set(xscale="log", xlabel="density", ylabel="TFLOP/s of active blocks", ylim=(0, None), title="D=128, bfloat16")
    axis.legend(fontsize="x-small")


if __name__ == "__main__":
    where = Path(sys.argv[1])
    found = json.loads(where.read_text(encoding="utf-8"))
    print(as_text(found))
    draw(found, where.with_suffix(".png"))
