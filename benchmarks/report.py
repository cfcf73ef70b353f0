"""A benchmark record as tables and as a plot.

python benchmarks/report.py benchmarks/results/cpu.json    # print and draw a record again
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS = {"ours": "#0b6e99", "flex": "#d9730d", "dense": "#6b6b6b"}
LABELS = {"ours": "this library", "flex": "FlexAttention, compiled", "dense": "dense SDPA"}
FORWARD = ["tokens", "density", "real", "ours,ms", "flex,ms", "dense,ms", "GFLOP/s", "flex", "matmul"]
RATIOS = ["÷dense", "share", "×floor"]
TRAINING = ["tokens", "density", "real", "ours,ms", "dense,ms", "GFLOP/s"]
MEMORY = ["step", "tokens", "needed,MiB", "peak,MiB", "ratio"]
FLAT = ["pattern", "tokens", "blocks", "µs/token", "GFLOP/s", "×floor"]


def as_text(record: Mapping[str, Any]) -> str:
    """All tables, in plain text."""
    machine, gate = record["environment"], record["summary"]["gate"]
    parts = [
        f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}, commit {machine['commit']}",
        f"Load of the machine before the run: {machine['load_before']}",
        f"{gate['checks']} checks against float64 and each other, worst {gate['worst'] or 0.0:.0e}",
    ]
    for name, write in (("forward", _forward), ("training", _training), ("memory", _memory), ("flat", _flat)):
        if name in record:
            parts.append(write(record[name]))
    parts.append(_targets(record["summary"]["targets"], quick=record["quick"]))
    return "\n\n".join(parts)


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    return "\n".join((title, *lines))


def number(value: float | None, digits: int = 2, mark: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{mark}"


def milliseconds(timing: Mapping[str, Any] | None) -> str:
    if timing is None:
        return "-"
    return f"{timing['median'] * 1e3:.1f}" + ("*" if timing.get("extrapolated") else "")


def _forward(section: Mapping[str, Any]) -> str:
    rows = [
        [
            *_case(row),
            *(milliseconds(row[name]) for name in ("ours", "flex", "dense")),
            number(row["ours"]["gflops"], 1),
            number(row["flex"] and row["flex"]["gflops"], 1),
            number(row["matmul_gflops"], 1),
            number(row["flex_ratio"]),
            number(row["flex_own_order_ratio"]),
            *_ratios(row),
        ]
        for row in section["rows"]
    ]
    notes = [
        "÷flex, ÷dense: how many times as fast as FlexAttention, and as dense SDPA would be at this density",
        "÷own: as FlexAttention on copies in its own tensor order, the copies not counted",
        "share: of the matmul's rate. ×floor: time over the least that the machine allows. * extrapolated by n²",
    ]
    if section["flex_compile"]:
        times = ", ".join(f"{each['compile_seconds']:.1f} s at {each['tokens']}" for each in section["flex_compile"])
        notes.append(f"FlexAttention compiles for {times} tokens; this library does not compile")
    if section["flex_note"]:
        notes.append(section["flex_note"])
    return "\n".join((table("Forward", [*FORWARD, "÷flex", "÷own", *RATIOS], rows), *notes))


def _training(section: Mapping[str, Any]) -> str:
    rows = [
        [
            *_case(row),
            milliseconds(row["ours"]),
            milliseconds(row["dense"]),
            number(row["ours"]["gflops"], 1),
            *_ratios(row),
        ]
        for row in section["rows"]
    ]
    return table(f"Training: forward and backward. {section['flex_note']}", [*TRAINING, *RATIOS], rows)


def _case(row: Mapping[str, Any]) -> list[str]:
    return [str(row["tokens"]), f"{row['density']:.0%}", f"{row['real_density']:.1%}"]


def _ratios(row: Mapping[str, Any]) -> list[str]:
    return [number(row["dense_ratio"]), f"{row['matmul_share']:.0%}", number(row["floor"]["times_floor"])]


def _memory(section: Mapping[str, Any]) -> str:
    if "skipped" in section:
        return f"Memory: not measured, it {section['skipped']}"
    rows = [
        [
            row["kind"],
            str(row["tokens"]),
            _mebibytes(row["needed_bytes"]),
            _mebibytes(row["peak_bytes"]),
            number(row["ratio"]),
        ]
        for row in section["rows"]
    ]
    return table("Memory: peak beside the tensors that must exist", MEMORY, rows)


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.0f}"


def _flat(section: Mapping[str, Any]) -> str:
    rows = [
        [
            row["pattern"],
            str(row["tokens"]),
            number(row["blocks_a_row"]),
            number(row["microseconds_per_token"]),
            number(row["ours"]["gflops"], 1),
            number(row["floor"]["times_floor"]),
        ]
        for row in section["rows"]
    ]
    return table("Forward at a fixed number of blocks a row", FLAT, rows)


def _targets(targets: Mapping[str, Any], *, quick: bool) -> str:
    verdict = {True: "met", False: "MISSED", None: "not judged"}
    rows = [
        [name, *(number(t[key], 3) for key in ("worst", "median", "target")), verdict[t["met"]]]
        for name, t in targets.items()
    ]
    title = "Worst case of each claim" + (" (--quick is too small to judge)" if quick else "")
    return table(title, ["claim", "worst", "median", "target", ""], rows)


def draw(record: Mapping[str, Any], path: Path) -> Path | None:
    """GFLOP/s by density, a panel for each length, and time per token by length.

    None where there is nothing to draw, or no matplotlib to draw it.
    """
    forward, flat = (record.get(name, {}).get("rows", []) for name in ("forward", "flat"))
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    if not forward and not flat:
        return None
    lengths = sorted({row["tokens"] for row in forward})
    figure = Figure(figsize=(max(8.0, 2.8 * len(lengths)), 7.5), layout="constrained")
    machine = record["environment"]
    figure.suptitle(f"{machine['cpu']}, {machine['threads']} threads, float32, 8 heads × 64, torch {machine['torch']}")
    parts = iter(figure.subfigures(bool(forward) + bool(flat), 1, squeeze=False)[:, 0])
    if forward:
        axes = next(parts).subplots(1, len(lengths), sharey=True, squeeze=False)[0]
        for axis, tokens in zip(axes, lengths, strict=True):
            _draw_rates(axis, record["matmul_side"], [row for row in forward if row["tokens"] == tokens])
        axes[0].set(ylabel="GFLOP/s over active blocks", ylim=(0, 1.1 * max(map(_highest, forward))))
        axes[0].legend(fontsize="small", loc="lower left")
    if flat:
        _draw_flat(next(parts).subplots(), flat)
    figure.savefig(path, dpi=120)
    return path


def _highest(row: Mapping[str, Any]) -> float:
    return max(row["matmul_gflops"], *(row[name]["gflops"] for name in ("ours", "flex", "dense") if row[name]))


def _draw_rates(axis: Any, matmul_side: int, rows: Sequence[Mapping[str, Any]]) -> None:
    for name in ("ours", "flex"):
        found = [(row["real_density"], row[name]["gflops"]) for row in rows if row[name]]
        if found:
            axis.plot(*zip(*found, strict=True), "o-", color=COLOURS[name], label=LABELS[name])
    dense = rows[0]["dense"]
    style = ":" if dense["extrapolated"] else "-"
    axis.axhline(dense["gflops"], color=COLOURS["dense"], linestyle=style, label=f"{LABELS['dense']} (dotted: scaled)")
    axis.axhline(rows[0]["matmul_gflops"], color="black", linestyle="--", label=f"matmul {matmul_side}³")
    axis.set(xscale="log", xlim=(0.007, 1.4), xlabel="density", title=f"{rows[0]['tokens']:,} tokens")
    axis.set_xticks([0.01, 0.1, 1.0], ["1 %", "10 %", "100 %"])


def _draw_flat(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    for pattern in dict.fromkeys(row["pattern"] for row in rows):
        found = [(row["tokens"], row["microseconds_per_token"]) for row in rows if row["pattern"] == pattern]
        axis.plot(*zip(*found, strict=True), "o-", label=f"{pattern}, 8 blocks a row")
    lengths = sorted({row["tokens"] for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{tokens:,}" for tokens in lengths])
    highest = max(row["microseconds_per_token"] for row in rows)
    axis.set(ylim=(0, 1.1 * highest), xlabel="tokens", ylabel="µs per token, forward")
    axis.legend(fontsize="small", loc="lower right")


if __name__ == "__main__":
    source = Path(sys.argv[1])
    loaded = json.loads(source.read_text(encoding="utf-8"))
    draw(loaded, source.with_suffix(".png"))
    print(as_text(loaded))
