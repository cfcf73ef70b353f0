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


def as_text(record: Mapping[str, Any]) -> str:
    """All tables, in plain text."""
    machine = record["environment"]
    parts = [
        f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}, commit {machine['commit']}",
        f"{len(record['gate'])} checks against float64 and each other, worst {record['summary']['gate']['worst'] or 0:.0e}",
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


def _forward(section: Mapping[str, Any]) -> str:
    head = [
        "tokens",
        "density",
        "real",
        "ours,ms",
        "flex,ms",
        "dense,ms",
        "GFLOP/s",
        "flex",
        "matmul",
        "÷flex",
        "÷dense",
        "share",
        "×floor",
    ]
    rows = []
    for row in section["rows"]:
        flex, dense = row["flex"] or {}, row["dense"]
        rows.append(
            [
                str(row["tokens"]),
                f"{row['density']:.0%}",
                f"{row['real_density']:.1%}",
                number(row["ours"]["median"] * 1e3, 1),
                number(flex and flex["median"] * 1e3, 1) if flex else "-",
                number(dense["median"] * 1e3, 0, "*" if dense["extrapolated"] else ""),
                number(row["ours"]["gflops"], 1),
                number(flex.get("gflops"), 1),
                number(row["matmul_gflops"], 1),
                number(row["flex_ratio"]),
                number(row["dense_ratio"]),
                f"{row['matmul_share']:.0%}",
                number(row["floor"]["times_floor"]),
            ]
        )
    notes = ["÷flex, ÷dense: how many times as fast as FlexAttention, and as dense SDPA would be at this density"]
    notes.append("share: of the matmul's rate. ×floor: time over the least the machine allows. * extrapolated by n²")
    if section["flex_compile"]:
        times = ", ".join(f"{each['compile_seconds']:.1f} s at {each['tokens']}" for each in section["flex_compile"])
        notes.append(f"FlexAttention compiles for {times}; this library does not compile")
    if section["flex_note"]:
        notes.append(section["flex_note"])
    return "\n".join((table("Forward", head, rows), *notes))


def _training(section: Mapping[str, Any]) -> str:
    head = ["tokens", "density", "real", "ours,ms", "dense,ms", "GFLOP/s", "÷dense", "share", "×floor"]
    rows = [
        [
            str(row["tokens"]),
            f"{row['density']:.0%}",
            f"{row['real_density']:.1%}",
            number(row["ours"]["median"] * 1e3, 1),
            number(row["dense"]["median"] * 1e3, 0, "*" if row["dense"]["extrapolated"] else ""),
            number(row["ours"]["gflops"], 1),
            number(row["dense_ratio"]),
            f"{row['matmul_share']:.0%}",
            number(row["floor"]["times_floor"]),
        ]
        for row in section["rows"]
    ]
    return table(f"Training: forward and backward. {section['flex_note']}", head, rows)


def _memory(section: Mapping[str, Any]) -> str:
    if "skipped" in section:
        return f"Memory: not measured, it {section['skipped']}"
    rows = [
        [
            row["kind"],
            str(row["tokens"]),
            *(f"{row[f'{n}_bytes'] / 2**20:.0f}" for n in ("needed", "peak")),
            number(row["ratio"]),
        ]
        for row in section["rows"]
    ]
    return table(
        "Memory: peak beside the tensors that must exist", ["step", "tokens", "needed,MiB", "peak,MiB", "ratio"], rows
    )


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
    return table(
        "Forward at a fixed number of blocks a row",
        ["pattern", "tokens", "blocks", "µs/token", "GFLOP/s", "×floor"],
        rows,
    )


def _targets(targets: Mapping[str, Any], *, quick: bool) -> str:
    verdict = {True: "met", False: "MISSED", None: "not judged"}
    rows = [[name, number(t["worst"], 3), number(t["target"], 3), verdict[t["met"]]] for name, t in targets.items()]
    title = "Worst case of each claim" + (" (--quick is too small to judge)" if quick else "")
    return table(title, ["claim", "worst", "target", ""], rows)


def draw(record: Mapping[str, Any], path: Path) -> Path | None:
    """GFLOP/s by density, a panel for each length, and time per token by length. None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    forward, flat = (record.get(name, {}).get("rows", []) for name in ("forward", "flat"))
    lengths = sorted({row["tokens"] for row in forward})
    figure = Figure(figsize=(max(8, 2.6 * len(lengths)), 7), layout="constrained")
    top, bottom = figure.subfigures(2, 1)
    machine = record["environment"]
    figure.suptitle(f"{machine['cpu']}, {machine['threads']} threads, float32, 8 heads × 64, torch {machine['torch']}")
    if forward:
        axes = top.subplots(1, len(lengths), sharey=True, squeeze=False)[0]
        for axis, tokens in zip(axes, lengths, strict=True):
            _draw_rates(axis, tokens, [row for row in forward if row["tokens"] == tokens])
        axes[0].set_ylabel("GFLOP/s over active blocks")
        axes[0].legend(fontsize="small", loc="lower right")
    if flat:
        _draw_flat(bottom.subplots(), flat)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def _draw_rates(axis: Any, tokens: int, rows: Sequence[Mapping[str, Any]]) -> None:
    for name in ("ours", "flex"):
        found = [(row["real_density"], row[name]["gflops"]) for row in rows if row[name]]
        if found:
            axis.plot(*zip(*found, strict=True), "o-", color=COLOURS[name], label=LABELS[name])
    dense = rows[0]["dense"]
    style = ":" if dense["extrapolated"] else "-"
    axis.axhline(
        dense["gflops"], color=COLOURS["dense"], linestyle=style, label=f"{LABELS['dense']} (dotted: extrapolated)"
    )
    axis.axhline(rows[0]["matmul_gflops"], color="black", linestyle="--", label="matmul 2048³")
    axis.set(xscale="log", ylim=(0, None), xlabel="density", title=f"{tokens:,} tokens")


def _draw_flat(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    for pattern in dict.fromkeys(row["pattern"] for row in rows):
        found = [(row["tokens"], row["microseconds_per_token"]) for row in rows if row["pattern"] == pattern]
        axis.plot(*zip(*found, strict=True), "o-", label=f"{pattern}, 8 blocks a row")
    axis.set_xscale("log", base=2)
    axis.set(ylim=(0, None), xlabel="tokens", ylabel="µs per token, forward")
    axis.legend(fontsize="small", loc="lower right")


if __name__ == "__main__":
    source = Path(sys.argv[1])
    loaded = json.loads(source.read_text(encoding="utf-8"))
    draw(loaded, source.with_suffix(".png"))
    print(as_text(loaded))
