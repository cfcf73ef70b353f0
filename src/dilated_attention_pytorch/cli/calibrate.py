"""`dilated-attention calibrate`: how a model should choose its blocks, found on a few texts and written to a file.

The model reads the texts with its own attention. For each layer the true masses of its blocks are compared with what
each candidate (a scorer and a block size) would keep at the budget; the cheapest candidate that keeps nearly as much as
the best one is taken. `split_budget` gives each layer its share; heads compete for it, so theirs follow the content. On
this device dense attention and the choice are timed at growing lengths, which gives `dense_below`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from ..nn import Adaptive
from ..ops import MeanPooled, TopK, block_masses, block_sparse_attention, split_budget
from ..ops.grids import grid_of
from ..patterns import Causal
from .models import Found, attention_of, num_layers, token_ids
from .output import Document, steps, table

NEAR = 0.005  # of kept mass, that a cheaper candidate may keep less than the best
LENGTHS = (512, 1024, 2048, 4096, 8192)  # at which dense attention and the choice are timed
# Scorers and block sizes, what is cheap to choose by first.
CANDIDATES: tuple[tuple[str, Any, tuple[int, int]], ...] = (
    ("mean", "mean", (64, 16)),
    ("minmax", "minmax", (64, 16)),
    ("patches", "patches", (64, 16)),
    ("patches", "patches", (16, 16)),
    ("patches 2x2", MeanPooled(2, 2), (16, 16)),
)


@dataclass
class Masses:
    """What was measured: by block size and layer the true masses of each text; of each candidate what it keeps."""

    share: float
    of_layers: dict[tuple[tuple[int, int], int], list[Tensor]] = field(default_factory=dict)
    kept: list[list[float]] = field(default_factory=lambda: [[] for _ in CANDIDATES])

    def look(self, layer: int, q: Tensor, k: Tensor, scale: float) -> None:
        true = {}
        for place, (_, scorer, block) in enumerate(CANDIDATES):
            call: Any = {"block_size": block, "is_causal": True, "scale": scale}
            if block not in true:
                true[block] = block_masses(q, k, **call)
                self.of_layers.setdefault((block, layer), []).append(true[block])
            guess = block_masses(q, k, scorer=scorer, **call)
            grid = grid_of((q.shape[1], q.shape[1]), block, True, 1, 1, q.device)
            keep = budget(self.share).keep(guess, grid) & grid.visible
            self.kept[place].append(float((true[block] * keep).sum(-1).mean()))

    def best(self) -> int:
        """The first candidate that keeps nearly as much as any."""
        means = [sum(kept) / len(kept) for kept in self.kept]
        return next(i for i, mean in enumerate(means) if mean >= max(means) - NEAR)


def budget(share: float) -> TopK:
    return TopK(share, even=True, across_heads=True)


def run(
    console: Console,
    model: str | None,
    texts: Sequence[Path],
    *,
    keep: float,
    tokens: int,
    out: Path,
    device: str,
    longest: int,
) -> Document:
    """Measure, print what was found, and write the file that `register` takes."""
    found = Found.named(model)
    if found.is_longnet:
        raise ValueError(f"calibrate is for models of transformers, and {found.name} is a LongNet")
    if not 0.0 < keep <= 1.0:
        raise ValueError(f"--keep must be the share of the causal blocks that is kept, in (0, 1], got {keep}")
    tokenizer = found.tokenizer()
    ids = [token_ids(tokenizer, text, tokens).to(device) for text in texts]
    network = found.load(device)
    masses, shapes = Masses(keep), {}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        masses.look(layer, q, k, scale)
        shapes["q"], shapes["k"] = q.shape[2:], k.shape[2:]
        dense = block_sparse_attention(q, k, v, Causal(), scale=scale)
        assert isinstance(dense, Tensor)
        return dense

    with steps(console, len(texts) + 1) as announce, torch.no_grad():
        for text, given in zip(texts, ids, strict=True):
            announce(f"{text.name}: masses of {num_layers(network)} layers")
            with attention_of(network, attend):
                network(given, use_cache=False, logits_to_keep=1)
        announce("how long dense attention is quicker")
        name, scorer, block = CANDIDATES[masses.best()]
        layers = [torch.cat(masses.of_layers[block, i]) for i in range(num_layers(network))]
        split = split_budget(layers, budget(keep), tokens=tokens, block_size=block, is_causal=True)
        dense_below, timed = crossover(Adaptive(keep, scorer=scorer, block_size=block), shapes, device, longest)
    made = table("scorer", "blocks", right=("kept mass",), title=f"{found.name}: {keep:.0%} of the blocks")
    kept = []
    for (other, _, size), each in zip(CANDIDATES, masses.kept, strict=True):
        kept.append({"scorer": other, "block_size": list(size), "kept_mass": round(sum(each) / len(each), 4)})
        made.add_row(other, f"{size[0]} x {size[1]}", f"{kept[-1]['kept_mass']:.4f}")
    console.print(made)
    shares = [round(float(each.share), 4) for each in split]
    document: Document = {
        "rule": {
            "share": keep,
            "scorer": scorer if isinstance(scorer, str) else scorer.text,
            "block_size": list(block),
            "dense_below": {torch.device(device).type: dense_below},
        },
        "layers": {str(i): {"share": share} for i, share in enumerate(shares)},
        "about": {
            "model": found.name,
            "texts": [text.name for text in texts],
            "tokens": tokens,
            "candidates": kept,
            "milliseconds": timed,
        },
    }
    console.print(
        f"Chosen: {name}, blocks {block[0]} x {block[1]}; layers keep {min(shares):.3f} to {max(shares):.3f}; "
        f"dense up to {dense_below} tokens here.",
        markup=False,
    )
    out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    console.print(f"Written: {out}", soft_wrap=True)
    return {**document, "written": [str(out)]}


def crossover(
    rule: Adaptive, shapes: dict[str, Any], device: str, longest: int
) -> tuple[int, dict[str, dict[str, float]]]:
    """The longest of the lengths at which dense attention is as quick, choosing included; and the times."""
    module, timed, last = rule.module(), {}, 0
    for length in (n for n in LENGTHS if n <= longest):
        q = torch.randn(1, length, *shapes["q"], device=device)
        k, v = (torch.randn(1, length, *shapes["k"], device=device) for _ in range(2))
        dense = milliseconds(lambda q=q, k=k, v=v: block_sparse_attention(q, k, v, Causal()), device)
        chosen = milliseconds(lambda q=q, k=k, v=v: module(q, k, v, is_causal=True), device)
        timed[str(length)] = {"dense": round(dense, 2), "chosen": round(chosen, 2)}
        if dense <= chosen:
            last = length
    return last, timed


def milliseconds(call: Any, device: str) -> float:
    """The best of three, after one to warm up."""
    times = []
    for _ in range(4):
        started = perf_counter()
        call()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(1000 * (perf_counter() - started))
    return min(times[1:])
