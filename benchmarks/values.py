"""Figures that sentences of README and docs/ cite, and tables of several records (`make docs-tables`).

    <!-- value: gpu.tflops random 64 16 forward -->128<!-- /value -->

names a function of `VALUES` and its words. `Records` reads benchmarks/results; a record of `--quick` is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tables import Section, Table, fixed, percent

RESULTS = Path(__file__).resolve().parent / "results"
Row = Mapping[str, Any]
WAYS = ("forward", "backward")


class Records:
    """The records of a folder, read once each."""

    def __init__(self, folder: Path = RESULTS) -> None:
        self._folder = folder
        self._read: dict[str, dict[str, Any]] = {}

    def section(self, record: str, name: str) -> Section:
        if record not in self._read:
            self._read[record] = json.loads((self._folder / f"{record}.json").read_text(encoding="utf-8"))
        section = self._read[record][name]
        if section["provenance"]["quick"]:
            raise ValueError(f"{record}.json must hold full runs, got {name} of a run with --quick")
        return section

    def rows(self, record: str, name: str) -> list[Row]:
        return self.section(record, name)["rows"]

    def example(self, name: str) -> dict[str, Any]:
        """The record of a script in examples/, which has no sections."""
        return json.loads((self._folder / f"{name}.json").read_text(encoding="utf-8"))


def only(rows: Iterable[Row], **wanted: Any) -> Row:
    (found,) = (row for row in rows if all(row[key] == value for key, value in wanted.items()))
    return found


def span(values: Iterable[float], digits: int) -> str:
    """ "1.16–1.39", or one figure where both ends read the same."""
    found = list(values)
    ends = dict.fromkeys((fixed(min(found), digits), fixed(max(found), digits)))
    return "–".join(ends)


# --- gpu -------------------------------------------------------------------------------------------------------------


def kernel(records: Records, name: str, head_dim: str, block: str, way: str) -> Row:
    return only(records.rows("gpu", "kernels"), name=name, head_dim=int(head_dim), block=int(block))[way]


def tflops(records: Records, name: str, head_dim: str, block: str, way: str) -> str:
    return fixed(kernel(records, name, head_dim, block, way)["ours"]["tflops"], 0)


def gpu_ratio(records: Records, rival: str, name: str, head_dim: str, block: str, way: str, digits: str = "2") -> str:
    return fixed(kernel(records, name, head_dim, block, way)[rival]["ratio"], int(digits))


def gpu_ratios(
    records: Records, rival: str, head_dim: str, way: str, least_density: str = "0", digits: str = "2"
) -> str:
    """Over the layouts of blocks of 128."""
    rows = [row for row in records.rows("gpu", "kernels") if (row["head_dim"], row["block"]) == (int(head_dim), 128)]
    dense_enough = [row[way] for row in rows if row["density"] >= float(least_density)]
    return span((each[rival]["ratio"] for each in dense_enough if rival in each), int(digits))


def small_block_ratios(records: Records, rival: str, way: str) -> str:
    rows = [row[way] for row in records.rows("gpu", "kernels") if row["block"] < 64]
    return span((row[rival]["ratio"] for row in rows if rival in row), 2)


def times_slower(records: Records, name: str, block: str, way: str) -> str:
    """Blocks of 64 ÷ smaller ones, TFLOP/s at D=64."""
    rates = [kernel(records, name, "64", each, way)["ours"]["tflops"] for each in ("64", block)]
    return fixed(rates[0] / rates[1], 1)


def host_time(records: Records, name: str) -> str:
    return fixed(only(records.rows("gpu", "calls"), name=name)["microseconds"], 0)


def busy_ratios(records: Records, contender: str) -> str:
    """Time beside another program ÷ time alone, over all lengths, forward and training."""
    rows = [*records.rows("busy", "forward"), *records.rows("busy", "training")]
    ratios = [row["ratio"] for row in rows if row["contender"] == contender]
    return f"{fixed(min(ratios))}–{fixed(max(ratios))}"


def layout_ms(records: Records, name: str, tokens: str, key: str, digits: str = "2") -> str:
    return fixed(only(records.rows("gpu", "layouts"), name=name, tokens=int(tokens))[key], int(digits))


def layouts_ms(records: Records, tokens: str, key: str) -> str:
    return span((row[key] for row in records.rows("gpu", "layouts") if row["tokens"] == int(tokens)), 2)


def layouts_share(records: Records, tokens: str, key: str) -> str:
    """Of the forward that they serve."""
    rows = [row for row in records.rows("gpu", "layouts") if row["tokens"] == int(tokens)]
    return span((100 * row[key] / row["forward_ms"] for row in rows), 1) + " %"


def variant(records: Records, name: str, tokens: str, way: str) -> str:
    return fixed(only(records.rows("gpu", "seeds"), name=name, tokens=int(tokens))[f"{way}_ms"])


def variants(records: Records, tokens: str, way: str) -> str:
    """Without the dense one."""
    rows = [row for row in records.rows("gpu", "seeds") if row["tokens"] == int(tokens) and row["name"] != "dense"]
    return span((row[f"{way}_ms"] for row in rows), 2)


def by_length(records: Records, name: str) -> list[Row]:
    return [row for row in records.rows("gpu", "lengths") if row["name"] == name]


def longest(records: Records, key: str) -> str:
    return f"{max(row['tokens'] for row in records.rows('gpu', 'lengths') if key in row):,}"


def drift(records: Records, name: str) -> str:
    """How far the time of a token moves over the lengths."""
    times = [row["forward_ns"] for row in by_length(records, name)]
    return percent(max(times) / min(times) - 1, 1)


def machine_matmul(records: Records) -> str:
    return fixed(records.section("gpu", "kernels")["ceilings"]["matmul_tflops"], 0)


# --- the others ------------------------------------------------------------------------------------------------------


def dilated_speed(records: Records, device: str, way: str, digits: str = "1") -> str:
    return span((row[way]["ratio"] for row in records.rows(f"dilated_{device}", "rows")), int(digits))


def dilated_memory(records: Records, device: str, who: str) -> str:
    return span((row["forward"][f"{who}_extra"] for row in records.rows(f"dilated_{device}", "rows")), 1)


def dilated_rate(records: Records, tokens: str, head_dim: str, causal: str, way: str) -> str:
    rows = records.rows("dilated_cuda", "rows")
    row = only(rows, tokens=int(tokens), head_dim=int(head_dim), causal=causal == "causal")
    return fixed(row[way]["tflops"], 0)


def dilated_ns(records: Records, key: str, causal: str) -> str:
    """From 32K tokens on."""
    rows = [row for row in records.rows("dilated_cuda", "lengths") if row["tokens"] >= 2**15]
    return span((row[key] for row in rows if row["causal"] == (causal == "causal")), 1)


def cpu_ratios(records: Records, key: str, digits: str = "2") -> str:
    """Of sparse layouts; full ones go to PyTorch's own kernel."""
    return span((row[key] for row in records.rows("cpu", "forward") if row["density"] < 1), int(digits))


def cpu_training_ratios(records: Records, least_blocks: str = "0", most_blocks: str = "inf") -> str:
    rows = records.rows("cpu", "training")
    kept = [row for row in rows if float(least_blocks) <= row["blocks_a_row"] < float(most_blocks)]
    return span((row["dense_ratio"] for row in kept), 2)


def cpu_floor(records: Records, section: str) -> str:
    rows = [row for row in records.rows("cpu", section) if row["density"] < 1]
    return span((row["floor"]["times_floor"] for row in rows), 1)


def cpu_memory(records: Records, kind: str) -> str:
    return fixed(only(records.rows("cpu", "memory"), kind=kind)["ratio"], 3)


def flex_compile(records: Records) -> str:
    return span((row["compile_seconds"] for row in records.section("cpu", "forward")["flex_compile"]), 0)


def decoding(records: Records, device: str, tokens: str, share: str, batch: str, key: str, digits: str = "0") -> str:
    """`key` is a contender, whose time is given in µs, or "MB" of active keys and values, or "GB/s"."""
    rows = records.rows(f"decode_{device}", "decode")
    row = only(rows, tokens=int(tokens), share=float(share), batch=int(batch))
    scaled = {"MB": row["bytes_of_active_blocks"] / 1e6, "GB/s": row["bandwidth"] / 1e9}
    return fixed(scaled[key] if key in scaled else 1e6 * row["seconds"][key], int(digits))


def _choices(records: Records, tokens: int = 65536) -> list[dict[str, Any]]:
    """The rows of one length."""
    return [row for row in records.rows("adaptive_gpu", "selection") if row["tokens"] == tokens]


def selection(records: Records, key: str, digits: str) -> str:
    return span((row[key] for row in _choices(records)), int(digits))


def selection_shares(records: Records, digits: str = "0") -> str:
    return span((100 * row["ratio"] for row in _choices(records)), int(digits)) + " %"


def selection_share(records: Records, scorer: str, spread: str, block: str, digits: str = "1") -> str:
    rows = _choices(records)
    return percent(only(rows, scorer=scorer, spread=spread, block=[*map(int, block.split("x"))])["ratio"], int(digits))


def adaptive_speedup(records: Records, way: str) -> str:
    rows = records.rows("adaptive_gpu", "adaptive")
    of_means = [row for row in rows if row["tokens"] == 131072 and row.get("scorer", "mean") == "mean"]
    return fixed(only(of_means, way=way)["speedup"], 1)


def seed_peaks(records: Records, device: str, key: str) -> str:
    found = records.section(f"memory_{device}", "seeds")[key]
    return percent(found, 2) if key == "two_configurations" else fixed(found)


def pool_overhead(records: Records, device: str) -> str:
    """Largest, of one small shape again and again."""
    rows = [row for row in records.rows(f"memory_{device}", "pool") if row["workload"] == "1024 alone"]
    return percent(max(1 / row["speedup"] - 1 for row in rows), 1)


def buffer_speedup(records: Records, mebibytes: str) -> str:
    return fixed(only(records.rows("memory_cpu", "buffers"), MiB=int(mebibytes))["speedup"], 1)


def balance(records: Records, pattern: str, ranks: str, placement: str) -> str:
    rows = records.rows("ring", "balance")
    return fixed(only(rows, pattern=pattern, ranks=int(ranks), placement=placement)["slowest_to_mean"])


def recalled(records: Records, kind: str) -> str:
    return percent(records.section("recall", "recall")["models"][kind]["right"], 1)


def scheduled(records: Records, way: str) -> str:
    return percent(only(records.example("recall_schedule")["rows"], way=way)["accuracy"], 1)


def perplexity(records: Records, text: str, rule: str, spread: str, block: str, density: str, tokens: str) -> str:
    """What a rule adds to the dense perplexity."""
    rows = records.example("perplexity")["rows"]
    shape = [*map(int, block.split("x"))]
    row = only(rows, text=text, rule=rule, spread=spread, block=shape, density=float(density), tokens=int(tokens))
    return percent(row["ratio"] - 1, 1)


def python_text(records: Records, key: str, digits: str = "0") -> str:
    """Of the run over Python's sources: a figure of the record, or its last `held_out_bits_a_byte`."""
    section = records.section("python_text", "text")
    return fixed((section if key in section else section["curve"][-1])[key], int(digits))


def python_sample(records: Records, number: str) -> str:
    """What was sampled after a prompt, its lines without blanks at their ends."""
    written = records.section("python_text", "text")["samples"][int(number)]["text"]
    return "\n".join(line.rstrip() for line in written.splitlines()).strip("\n")


TEXTS: dict[str, Callable[..., str]] = {"python_text": python_sample}


VALUES: dict[str, Callable[..., str]] = {
    "gpu.tflops": tflops,
    "gpu.ratio": gpu_ratio,
    "gpu.ratios": gpu_ratios,
    "gpu.small_block_ratios": small_block_ratios,
    "gpu.times_slower": times_slower,
    "gpu.host_time": host_time,
    "gpu.layout_ms": layout_ms,
    "gpu.layouts_ms": layouts_ms,
    "gpu.layouts_share": layouts_share,
    "gpu.variant": variant,
    "gpu.variants": variants,
    "gpu.longest": longest,
    "gpu.drift": drift,
    "gpu.matmul": machine_matmul,
    "busy.ratios": busy_ratios,
    "dilated.speed": dilated_speed,
    "dilated.memory": dilated_memory,
    "dilated.tflops": dilated_rate,
    "dilated.ns": dilated_ns,
    "cpu.ratios": cpu_ratios,
    "cpu.training_ratios": cpu_training_ratios,
    "cpu.floor": cpu_floor,
    "cpu.memory": cpu_memory,
    "cpu.flex_compile": flex_compile,
    "decode": decoding,
    "adaptive.select": selection,
    "adaptive.shares": selection_shares,
    "adaptive.share": selection_share,
    "adaptive.speedup": adaptive_speedup,
    "memory.seeds": seed_peaks,
    "memory.pool_overhead": pool_overhead,
    "memory.buffer_speedup": buffer_speedup,
    "ring.balance": balance,
    "recall.right": recalled,
    "recall_schedule.right": scheduled,
    "perplexity": perplexity,
    "python_text": python_text,
}


# --- tables of several records, and of records without sections ------------------------------------------------------


def headline(records: Records) -> Table:
    flex_forward, flex_backward = (gpu_ratio(records, "flex", "random", "128", "128", way) for way in WAYS)
    forward, backward = (dilated_speed(records, "cuda", way) for way in WAYS)
    composed, ours = (dilated_memory(records, "cuda", who) for who in ("composed", "ours"))
    return ["forward", "speed", "compared with"], [
        ["H200, random blocks, 5 % of 32K tokens", f"{flex_forward} ×",
         f"compiled FlexAttention on the same tensors (backward {flex_backward} ×)"],
        ["H200, LongNet's dilated attention, 64K and 1M tokens", f"{forward} ×",
         f"flash attention on each branch (backward {backward} ×); memory {ours} × the output, not {composed} ×"],
        ["2 CPU cores, random blocks, 1 to 10 % of 4K to 64K tokens", f"{cpu_ratios(records, 'flex_ratio')} ×",
         "compiled FlexAttention on the same tensors "
         f"({cpu_ratios(records, 'flex_own_order_ratio')} × with the heads first, copies not counted)"],
    ]  # fmt: skip


def against_flex(records: Records) -> Table:
    head = ["", "forward, TFLOP/s", "× FlexAttention", "backward, TFLOP/s", "× FlexAttention"]
    return head, [
        [f"D={head_dim}", *(cell for way in ("forward", "backward") for cell in (
            tflops(records, "random", head_dim, "128", way), gpu_ratio(records, "flex", "random", head_dim, "128", way)
        ))]
        for head_dim in ("128", "64")
    ]  # fmt: skip


def ring_faults(records: Records) -> Table:
    kinds = records.example("ring_faults")["kinds"]
    head = ["a rank", "how often", "the slowest survivor raised after, s"]
    return head, [[name, str(kind["ranks"]), fixed(kind["slowest_seconds"], 1)] for name, kind in kinds.items()]


PROSE, SOURCE = "gpl-3-lgpl-2.1.txt", "argparse.py"  # the texts of perplexity.json
# What adaptive.md compares first: what a reader sees, and the rule, its spread and its block.
COMPARED = {
    "the true masses, not estimated": ("exact", "even", 16),
    "`MeanPooled(1, 2)`, a share for each layer": ("patches 1x2", "layers", 16),
    "`MeanPooled(1, 2)`": ("patches 1x2", "even", 16),
    '`"patches"`, the default': ("patches", "even", 16),
    '`"antidiagonal"` (XAttention)': ("antidiagonal", "even", 16),
    '`"mean"`, every head the same number, blocks of 64 (MoBA)': ("mean", "same", 64),
    "window and first tokens, fixed": ("sink + local", "–", 64),
    "window, fixed": ("local", "–", 64),
}


def perplexity_at(records: Records, density: float) -> Table:
    """What each rule adds to the dense perplexity, on prose and on source code."""
    lengths = ("2048", "4096", "8192")
    head = [
        "blocks chosen by",
        *(f"{kind}, {int(tokens) // 1024}K" for kind in ("prose", "code") for tokens in lengths),
    ]
    measured = {
        (row["rule"], row["spread"], row["block"][0], row["density"]) for row in records.example("perplexity")["rows"]
    }
    rows = []
    for name, (rule, spread, block) in COMPARED.items():
        if (rule, spread, block, density) not in measured:
            continue
        words = rule, spread, f"{block}x{block}", str(density)
        found = [perplexity(records, text, *words, tokens) for text in (PROSE, SOURCE) for tokens in lengths]
        rows.append([name, *found])
    return head, rows


def perplexity_rows(records: Records) -> Table:
    """Ratios to the dense perplexity, a row for a rule and a column for a text and a length."""
    rows = records.example("perplexity")["rows"]
    dense = {(row["text"], row["tokens"]): row["perplexity"] for row in rows if row["rule"] == "dense"}
    columns = sorted(dense, key=lambda column: (column[0] != PROSE, column[1]))
    ratios: dict[tuple[Any, ...], dict[tuple[str, int], float]] = {}
    for row in rows:
        if row["rule"] != "dense":
            key = -row["density"], row["rule"], row["spread"], tuple(row["block"])
            ratios.setdefault(key, {})[row["text"], row["tokens"]] = row["ratio"]
    head = ["kept", "rule", "budget", "block"]
    head += [f"{text}, {tokens:,} ({dense[text, tokens]:.2f})" for text, tokens in columns]
    return head, [
        [percent(-density, 1), rule, spread, "{} × {}".format(*block), *(fixed(found.get(each), 3) for each in columns)]
        for (density, rule, spread, block), found in sorted(ratios.items())
    ]


JOINT_TABLES: dict[str, Callable[[Records], Table]] = {
    "headline": headline,
    "against_flex": against_flex,
    "ring_faults": ring_faults,
    "perplexity.quarter": lambda records: perplexity_at(records, 0.25),
    "perplexity.eighth": lambda records: perplexity_at(records, 0.125),
    "perplexity.rows": perplexity_rows,
}
