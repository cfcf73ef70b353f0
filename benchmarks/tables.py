"""Records as tables: what a benchmark prints when it ends, and what README and docs/ show (`make docs-tables`).

`TABLES` has a function for a section of a record, by name: "gpu.kernels" is the section `kernels` of gpu.json. It gives
the head and the rows. The single figures that sentences cite are in benchmarks/values.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Section = Mapping[str, Any]
Rows = Sequence[Sequence[str]]
Table = tuple[Sequence[str], Rows]

NONE = "–"
NUMBER = re.compile(r"[\d.,/ +−–-]*[%×]?( \(.*\))?")


def markdown(head: Sequence[str], rows: Rows) -> str:
    """A table that can be read as text too; columns of numbers are flush right."""
    rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    right = [all(NUMBER.fullmatch(row[i]) for row in rows) for i in range(len(head))]
    widths = [max(3, *(len(row[i]) for row in (head, *rows))) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        each = zip(cells, widths, right, strict=True)
        return "| " + " | ".join(f"{cell:>{w}}" if r else f"{cell:<{w}}" for cell, w, r in each) + " |"

    rule = "|" + "|".join("-" * (w + 1) + (":" if r else "-") for w, r in zip(widths, right, strict=True)) + "|"
    return "\n".join((line(head), rule, *map(line, rows)))


def origin(section: Section) -> str:
    """Which machine, versions, commit and command a section is of, as far as it says so."""
    of = section["provenance"]
    parts = [of.get("gpu") or f"{of['cpu']}, {of['threads']} thread{'s' if of['threads'] > 1 else ''}"]
    parts += [f"{name} {of[name].partition('+')[0]}" for name in ("torch", "triton") if of.get(name)]
    parts += [of["date"].partition("T")[0], f"commit {of['commit'][:7]}"]
    return ", ".join(parts) + (f": `{of['command']}`" if of["command"] else "")


def as_text(record: str, sections: Mapping[str, Section]) -> str:
    """All tables of these sections of a record."""
    return "\n\n".join(
        f"{name}\n\n{markdown(*table(sections[section]))}"
        for name, table in TABLES.items()
        for of, section in [name.split(".", 1)]
        if of == record and section in sections
    )


def fixed(value: float | None, digits: int = 2) -> str:
    return NONE if value is None else f"{value:,.{digits}f}"


def percent(value: float, digits: int = 0) -> str:
    return f"{100 * value:,.{digits}f} %"


def yes(value: bool) -> str:
    return "yes" if value else "no"


def megabytes(value: float | None, digits: int = 0) -> str:
    return NONE if value is None else fixed(value / 1e6, digits)


def by(rows: Iterable[Mapping[str, Any]], *keys: str) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    return {tuple(row[key] for key in keys): row for row in rows}


# --- cpu -------------------------------------------------------------------------------------------------------------


def cpu_forward(section: Section) -> Table:
    head = ["tokens", "density", "this library", "FlexAttention", "× Flex", "× Flex, its own order", "dense SDPA",
            "× dense", "matmul"]  # fmt: skip
    rows = [
        [f"{row['tokens']:,}", percent(row["real_density"], 1), fixed(row["ours"]["gflops"], 0),
         fixed(row["flex"] and row["flex"]["gflops"], 0), fixed(row["flex_ratio"]), fixed(row["flex_own_order_ratio"]),
         fixed(row["dense"]["gflops"], 0) + (" (scaled)" if row["dense"]["extrapolated"] else ""),
         fixed(row["dense_ratio"]), fixed(row["matmul_gflops"], 0)]
        for row in section["rows"]
    ]  # fmt: skip
    return head, rows


def cpu_training(section: Section) -> Table:
    head = ["tokens", "density", "GFLOP/s", "ms", "× dense", "× least time"]
    rows = [
        [f"{row['tokens']:,}", percent(row["real_density"], 1), fixed(row["ours"]["gflops"], 0),
         fixed(row["ours"]["median"] * 1e3, 0), fixed(row["dense_ratio"]), fixed(row["floor"]["times_floor"], 1)]
        for row in section["rows"]
    ]  # fmt: skip
    return head, rows


def cpu_memory(section: Section) -> Table:
    head = ["step", "tokens", "tensors that must exist, MB", "peak, MB", "peak ÷ tensors"]
    rows = [
        [row["kind"], f"{row['tokens']:,}", megabytes(row["needed_bytes"]), megabytes(row["peak_bytes"]),
         fixed(row["ratio"], 3)]
        for row in section["rows"]
    ]  # fmt: skip
    return head, rows


def cpu_flat(section: Section) -> Table:
    lengths = sorted({row["tokens"] for row in section["rows"]})
    found = by(section["rows"], "pattern", "tokens")
    names = dict.fromkeys(row["pattern"] for row in section["rows"])
    head = ["8 blocks a row, µs a token", *(f"{tokens:,}" for tokens in lengths)]
    return head, [
        [name, *(fixed(found[name, n]["microseconds_per_token"], 1) for n in lengths)] for name in names
    ]  # fmt: skip


# --- gpu -------------------------------------------------------------------------------------------------------------


def layout_name(row: Mapping[str, Any]) -> str:
    """Without the share, which has a column of its own."""
    name = re.sub(r" \d+ %$", "", row["name"])
    return name if row["block"] == 128 else f"{name}, blocks of {row['block']}"


def flex_of(way: Mapping[str, Any]) -> tuple[float | None, str]:
    """FlexAttention's time ÷ ours in its default configuration, else tuned, which is marked."""
    if "flex" in way:
        return way["flex"]["ratio"], ""
    tuned = way.get("flex, max-autotune")
    return (tuned["ratio"], " (tuned)") if tuned else (None, "")


def gpu_kernels(section: Section) -> Table:
    head = ["layout", "D", "density"]
    head += [f"{way}{x}" for way in ("forward", "backward") for x in ("", ", × Flex", ", × cuDNN")]
    rows = []
    for row in section["rows"]:
        cells = [layout_name(row), str(row["head_dim"]), percent(row["density"])]
        for way in (row["forward"], row["backward"]):
            ratio, mark = flex_of(way)
            cells += [fixed(way["ours"]["tflops"], 0), fixed(ratio) + mark, fixed(way.get("cudnn", {}).get("ratio"))]
        rows.append(cells)
    return head, rows


OPTION_NAMES = {"alibi": "ALiBi slopes"}


def gpu_options(section: Section) -> Table:
    head = ["layout", "D", "option"]
    head += [f"{way}{x}" for way in ("forward", "backward") for x in (", ms", ", × Flex", ", × plain kernels")]
    rows = [
        [row["name"], str(row["head_dim"]), OPTION_NAMES.get(row["option"], row["option"]),
         *(fixed(row.get(key)) for way in ("forward", "backward")
           for key in (f"{way}_ms", f"{way}, flex", f"{way}, plain kernels"))]
        for row in section["rows"]
    ]  # fmt: skip
    return head, rows


def gpu_lengths(section: Section) -> Table:
    head = ["layout", "tokens", "forward, ns a token", "training step, ns a token", "forward, peak ÷ tensors",
            "training step, peak ÷ tensors"]  # fmt: skip
    keys = {"forward_ns": 1, "training_ns": 1, "forward_peak": 4, "training_peak": 4}
    return head, [
        [row["name"], f"{row['tokens']:,}", *(fixed(row.get(key), digits) for key, digits in keys.items())]
        for row in section["rows"]
    ]


def gpu_layouts(section: Section) -> Table:
    head = ["layout", "tokens", "alone, ms", "of a busy device, ms", "its forward, ms", "alone ÷ forward",
            "busy ÷ forward", "`create_block_mask`, ms"]  # fmt: skip
    rows = [
        [row["name"], f"{row['tokens']:,}", *(fixed(row[key]) for key in ("build_ms", "device_ms", "forward_ms")),
         *(percent(row[key] / row["forward_ms"], 1) for key in ("build_ms", "device_ms")),
         fixed(row.get("create_block_mask_ms"), 0)]
        for row in section["rows"]
    ]  # fmt: skip
    return head, rows


def gpu_seeds(section: Section) -> Table:
    names = list(dict.fromkeys(row["name"] for row in section["rows"]))
    found = by(section["rows"], "tokens", "name")
    rows = []
    for tokens in dict.fromkeys(row["tokens"] for row in section["rows"]):
        of = [found.get((tokens, name), {}) for name in names]
        rows.append([f"{tokens:,}", *(f"{fixed(x.get('forward_ms'))} / {fixed(x.get('backward_ms'))}" for x in of)])
    return ["forward / backward, ms, by tokens", *names], rows


def gpu_calls(section: Section) -> Table:
    found = {row["name"]: row["microseconds"] for row in section["rows"]}
    names = {"ours": "this library, a layout", "ours, a pattern": "this library, a pattern", "sdpa": "PyTorch's SDPA"}
    rows = [
        [shown, fixed(found[name], 0), fixed(found.get(f"{name}, forward and backward"), 0)]
        for name, shown in names.items()
    ]
    return ["µs of the host for a call", "forward", "forward and backward"], rows


# --- the others ------------------------------------------------------------------------------------------------------


def dilated_rows(section: Section) -> Table:
    unit, scale = ("TFLOP/s", 1) if section["provenance"]["device"] == "cuda" else ("GFLOP/s", 1000)
    head = ["tokens", "D", "causal", f"forward, {unit}", "×", f"backward, {unit}", "×", "training step ×",
            "memory, ours", "memory, composed"]  # fmt: skip
    rows = []
    for row in section["rows"]:
        cells = [f"{row['tokens']:,}", str(row["head_dim"]), yes(row["causal"])]
        for way in ("forward", "backward"):
            cells += [fixed(row[way]["tflops"] * scale, 0), fixed(row[way]["ratio"])]
        extra = [row["forward"][f"{who}_extra"] for who in ("ours", "composed")]
        rows.append([*cells, fixed(row["step"]["ratio"]), *map(fixed, extra)])
    return head, rows


def dilated_lengths(section: Section) -> Table:
    found = by(section["rows"], "tokens", "causal")
    head = ["tokens", "forward, ns a token", "causal", "training step, ns a token", "causal"]
    return head, [
        [f"{tokens:,}", *(fixed(found[tokens, c][key], 1) for key in ("forward_ns", "step_ns") for c in (False, True))]
        for tokens in dict.fromkeys(row["tokens"] for row in section["rows"])
    ]


def decode(section: Section) -> Table:
    graphed = "ours, graph" in section["rows"][0]["seconds"]
    head = ["cached tokens", "active", "batch", "µs", "× dense", "GB/s"]
    head += ["of a copy", "of a copy of as many bytes", "µs from Python"] if graphed else []
    rows = []
    for row in section["rows"]:
        time = row["seconds"]["ours, graph" if graphed else "ours"]
        cells = [f"{row['tokens']:,}", percent(row["share"]), str(row["batch"]), fixed(1e6 * time, 0)]
        cells += [fixed(row["times_faster"], 0), fixed(row["bandwidth"] / 1e9, 0)]
        if graphed:
            cells += [percent(row["share_of_copy_limit"]), percent(row["share_of_copy_of_as_many"])]
            cells += [fixed(1e6 * row["seconds"]["ours"], 0)]
        rows.append(cells)
    return head, rows


def host_calls(section: Section) -> Table:
    times = section["microseconds"]
    names = [name for name in times if not name.endswith(", operator")]
    head = ["µs of our Python", "through the operator", "plain"]
    return head, [[name, fixed(times[f"{name}, operator"], 0), fixed(times[name], 0)] for name in names]


def busy(section: Section) -> Table:
    rows = [
        [f"{row['tokens']:,}", row["contender"], *(fixed(1e3 * row[way]["median"], 0) for way in ("quiet", "busy")),
         fixed(row["ratio"])]
        for row in section["rows"]
    ]  # fmt: skip
    return ["tokens", "", "ms alone", "ms beside another program", "×"], rows


def memory_plan(section: Section) -> Table:
    head = ["backend", "configurations", "largest error of the planned peak"]
    errors: dict[str, list[float]] = {}
    for row in section["rows"]:
        errors.setdefault(row["backend"], []).append(abs(row["error"]))
    return head, [[backend, str(len(each)), percent(max(each), 1)] for backend, each in errors.items()]


def memory_pool(section: Section) -> Table:
    head = ["lengths", "training", "time without ÷ with", "hits after the first turn", "peak with ÷ without"]
    rows = [
        [row["workload"], yes(row["training"]), fixed(row["speedup"]),
         NONE if row["hit_rate"] is None else percent(row["hit_rate"]), fixed(1 + row["extra_peak"])]
        for row in section["rows"]
    ]  # fmt: skip
    return head, rows


def memory_buffers(section: Section) -> Table:
    head = ["a buffer, MiB", "`torch.empty` and written, ms", "from the pool and written, ms", "÷"]
    rows = [
        [str(row["MiB"]), *(fixed(1e3 * row["medians"][name], 3) for name in ("empty", "pool")), fixed(row["speedup"])]
        for row in section["rows"]
    ]
    return head, rows


def memory_seeds(section: Section) -> Table:
    rows = [[row["name"], f"{row['tokens']:,}", megabytes(row["peak"])] for row in section["rows"]]
    return ["configuration of the design documents", "tokens", "peak of a forward, MB"], rows


def ring_rings(section: Section) -> Table:
    head = ["pattern", "tokens", "ranks", "sent, MB", "full ring or all-gather, MB", "times less", "peak of a rank, MB"]
    rows = [
        [row["pattern"], f"{row['tokens']:,}", str(row["ranks"]), megabytes(row["sent_bytes"], 1),
         megabytes(row["full_ring_bytes"]), fixed(row["times_less"], 1), megabytes(row["peak_bytes_of_a_rank"])]
        for row in section["rows"]
    ]  # fmt: skip
    return head, rows


def ring_plans(section: Section) -> Table:
    head = ["pattern", "placement", "the slowest rank's plan, ms", "it keeps at most, MB"]
    rows = [
        [row["pattern"], row["placement"], fixed(row["slowest_seconds"] * 1e3, 1), megabytes(row["most_bytes"], 1)]
        for row in section["rows"]
    ]
    return head, rows


def ring_balance(section: Section) -> Table:
    found = by(section["rows"], "pattern", "ranks", "placement")
    kinds = list(dict.fromkeys(row["placement"] for row in section["rows"]))
    cases = dict.fromkeys((row["pattern"], row["ranks"]) for row in section["rows"])
    head = ["slowest rank ÷ mean", "ranks", *kinds]
    return head, [
        [name, str(ranks), *(fixed(found[name, ranks, kind]["slowest_to_mean"]) for kind in kinds)]
        for name, ranks in cases
    ]


def ring_model(section: Section) -> Table:
    head = ["pattern", "tokens", "devices", "received by one, MB", "full ring, MB", "forward, ms", "backward, ms"]
    rows = [
        [row["pattern"], f"{row['seq']:,}", str(row["world_size"]),
         *(megabytes(row[key]) for key in ("received_bytes", "full_ring_bytes")),
         *(fixed(1e3 * row[key], 1) for key in ("forward_seconds", "backward_seconds"))]
        for row in section["rows"]
    ]  # fmt: skip
    return head, rows


def adaptive_selection(section: Section) -> Table:
    head = ["tokens", "scorer", "spread", "block", "select, ms", "its kernels, ms", "attend, ms", "select ÷ attend"]
    rows = [
        [f"{row['tokens']:,}", row["scorer"], row["spread"], "{} × {}".format(*row["block"]),
         *(fixed(row[key]) for key in ("select_ms", "select_device_ms", "attend_ms")), percent(row["ratio"], 1)]
        for row in section["rows"]
    ]  # fmt: skip
    return head, rows


def adaptive_adaptive(section: Section) -> Table:
    head = ["causal", "tokens", "scorer", "block", "adaptive, ms", "dense cuDNN, ms", "×", "of it selecting"]
    rows = [
        [row["way"], f"{row['tokens']:,}", row.get("scorer", "mean"), "{} × {}".format(*row.get("block", (128, 128))),
         fixed(row["ours_ms"], 1), fixed(row["cudnn_ms"], 0), fixed(row["speedup"], 1),
         percent(row["selection_share"], 1)]
        for row in section["rows"]
    ]  # fmt: skip
    return head, rows


def adaptive_tasks(section: Section) -> Table:
    names = list(section["rows"][0]["tasks"])
    rows = [
        [row["attention"], *("{right} of {asked}".format(**row["tasks"][name]) for name in names)]
        for row in section["rows"]
    ]
    return [f"{section['rows'][0]['tokens']:,} tokens", *names], rows


def recall(section: Section) -> Table:
    rows = [[kind, str(each["steps"]), percent(each["right"], 1)] for kind, each in section["models"].items()]
    return ["model", "steps", "right"], rows


# --- bitmaps ---------------------------------------------------------------------------------------------------------


def bitmaps_stored(section: Section) -> Table:
    head = ["mask", "tokens", "partial blocks", "different bitmaps", "KiB", "KiB if each were kept"]
    rows = [
        [row["mask"], f"{row['tokens']:,}", f"{row['partial']:,}", f"{row['bitmaps']:,}",
         fixed(row["bytes"] / 1024, 0), fixed(row["bytes_apart"] / 1024, 0)]
        for row in section["rows"]
    ]  # fmt: skip
    return head, rows


def bitmaps_speed(section: Section) -> Table:
    head = ["", "tokens", "full blocks, ms", "all with bitmaps", "×", "one bitmap for all", "×"]
    rows = [
        [row["way"], f"{row['tokens']:,}", fixed(row["full_ms"], 1), fixed(row["different_ms"], 1), fixed(row["ratio"]),
         fixed(row["shared_ms"], 1), fixed(row["ratio_shared"])]
        for row in section["rows"]
    ]  # fmt: skip
    return head, rows


def python_text(section: Section) -> Table:
    steps = [[str(each["step"]), fixed(each["held_out_bits_a_byte"])] for each in section["curve"]]
    return ["step", "bits a byte of held-out text"], steps


# --- neighborhoods ---------------------------------------------------------------------------------------------------


def neighborhoods_layouts(section: Section) -> Table:
    head = ["pattern", "tokens", "blocks", "of all", "full", "bitmaps", "asked", "MB", "seconds"]
    rows = [
        [row["name"], *(f"{row[key]:,}" for key in ("tokens", "blocks")), percent(row["computed"], 1),
         percent(row["full"] / row["blocks"]), *(f"{row[key]:,}" for key in ("bitmaps", "asked")),
         megabytes(row["bytes"], 1), fixed(row["seconds"])]
        for row in section["rows"]
    ]  # fmt: skip
    return head, rows


def neighborhoods_video(section: Section) -> Table:
    head = ["pattern", "of all blocks", *(f"{way}, {what}" for way in ("forward", "backward")
            for what in ("ms", "× Flex", "÷ dense"))]  # fmt: skip
    rows = [
        [row["name"], percent(row["computed"], 1),
         *(text for way in ("forward", "backward") for text in (
             fixed(row[way]["ms"]["ours"]), fixed(row[way]["flex_ratio"]), percent(row[way]["share"], 1)))]
        for row in section["rows"]
    ]  # fmt: skip
    return head, rows


# --- longnet ---------------------------------------------------------------------------------------------------------


def longnet(section: Section) -> Table:
    head = ["branches", "tokens", "a step, s", "tokens/s", "of the matmul rate", "attention's share", "peak, GB"]
    rows = [
        [row["branches"] + (", layers compiled" if row["compiled"] else ""), f"{row['tokens']:,}",
         fixed(row["seconds"], 3), f"{row['tokens_per_second']:,.0f}", percent(row["share"]),
         percent(row["attention_flops"] / (row["attention_flops"] + row["matrix_flops"])),
         fixed(row["peak_bytes"] / 1e9, 1)]
        for row in section["rows"]
    ]  # fmt: skip
    return head, rows


# --- models -----------------------------------------------------------------------------------------------------------


def models(section: Section) -> Table:
    """Of whole models; × is how many times faster ours is."""
    rows = section["rows"]
    names, kinds = list(dict.fromkeys(name for row in rows for name in row["seconds"])), any("kind" in r for r in rows)
    rivals = [name for name in names if name != "ours"]
    head = ["tokens", *(["what"] if kinds else []), *(f"{name}, ms" for name in names), *(f"× {n}" for n in rivals)]
    head += ["peak, GiB", *(f"{name}, GiB" for name in rivals)]
    found = []
    for row in rows:
        faster, peaks = row["times_faster"], row["peak_bytes"]
        found.append([
            f"{row['tokens']:,}", *([row["kind"]] if kinds else []),
            *(fixed(None if name not in row["seconds"] else 1e3 * row["seconds"][name], 1) for name in names),
            *(fixed(faster.get(name)) for name in rivals),
            *(fixed(None if name not in peaks else peaks[name] / 2**30, 1) for name in ("ours", *rivals)),
        ])  # fmt: skip
    return head, found


TABLES: dict[str, Callable[[Section], Table]] = {
    "bitmaps_cpu.stored": bitmaps_stored,
    "bitmaps_cpu.speed": bitmaps_speed,
    "bitmaps_cuda.stored": bitmaps_stored,
    "bitmaps_cuda.speed": bitmaps_speed,
    "cpu.forward": cpu_forward,
    "cpu.training": cpu_training,
    "cpu.memory": cpu_memory,
    "cpu.flat": cpu_flat,
    "gpu.kernels": gpu_kernels,
    "gpu.options": gpu_options,
    "gpu.lengths": gpu_lengths,
    "gpu.layouts": gpu_layouts,
    "gpu.seeds": gpu_seeds,
    "gpu.calls": gpu_calls,
    "dilated_cpu.rows": dilated_rows,
    "dilated_cuda.rows": dilated_rows,
    "dilated_cuda.lengths": dilated_lengths,
    "decode_cpu.decode": decode,
    "decode_cuda.decode": decode,
    "host.calls": host_calls,
    "busy.forward": busy,
    "busy.training": busy,
    **{
        f"memory_{device}.{section}": table
        for device in ("cpu", "cuda")
        for section, table in {
            "plan": memory_plan, "pool": memory_pool, "buffers": memory_buffers, "seeds": memory_seeds,
        }.items()
    },
    **{f"longnet_{device}.{section}": longnet for device in ("cpu", "cuda") for section in ("step", "compiled")},
    **{
        f"neighborhoods_{device}.{section}": table
        for device in ("cpu", "cuda")
        for section, table in {"layouts": neighborhoods_layouts, "video": neighborhoods_video}.items()
    },
    "ring.rings": ring_rings,
    "ring.plans": ring_plans,
    "ring.balance": ring_balance,
    "ring.model": ring_model,
    "adaptive_gpu.selection": adaptive_selection,
    "adaptive_gpu.adaptive": adaptive_adaptive,
    "adaptive_quality.dense": adaptive_tasks,
    "adaptive_quality.answers": adaptive_tasks,
    "recall.recall": recall,
    **{
        f"models_{device}.{section}": models
        for device in ("cpu", "cuda")
        for section in ("prefill", "generation", "training", "decoder", "encoder", "longnet")
    },
    "python_text.text": python_text,
}  # fmt: skip
