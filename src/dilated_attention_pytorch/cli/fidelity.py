"""`dilated-attention fidelity`: what a pattern, or a choice of blocks, keeps of a real model's attention."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from ..ops import block_sparse_attention, kept_mass
from ..patterns import Branches, Causal
from ..viz import plot_kept_mass
from . import models
from .output import NO_PICTURE, Document, can_draw, steps, table
from .rules import Chosen, Fixed, check_rules, share_of_causal


def run(
    console: Console, text: Path, *, tokens: int, model: str | None, rule: Fixed | Chosen, device: str, out: Path
) -> Document:
    """Measure on the model's own queries and keys, its own attention all the way; print a table and save a picture."""
    found = models.Found.named(model)
    check_rules([rule], found)
    if isinstance(rule, Fixed) and isinstance(rule.pattern, Branches):
        raise ValueError(f"{rule.name} counts a key once for each branch, and mass is counted once: name a pattern")
    if found.is_longnet:
        raise ValueError(f"fidelity is of dense attention, which {found.name}, a LongNet, does not have")
    ids = models.token_ids(found.tokenizer(), text, tokens).to(device)
    network = found.load(device)
    kept: list[Tensor] = []
    shares: list[float] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        announce(f"layer {layer}")
        layout = (
            rule.layout(q.shape[1], q.shape[2], q.device)
            if isinstance(rule, Fixed)
            else rule.layout(layer, q, k, scale)
        )
        kept.append(kept_mass(q, k, layout, is_causal=True, scale=scale)[0])
        shares.append(share_of_causal(layout))
        result = block_sparse_attention(q, k, v, Causal(), scale=scale)
        assert isinstance(result, Tensor)
        return result

    with steps(console, models.num_layers(network)) as announce, models.attention_of(network, attend), torch.no_grad():
        network(ids, use_cache=False, logits_to_keep=1)
    mass = torch.stack(kept)  # [layers, heads, queries]
    by_head = mass.mean(-1)
    made = table(
        right=("layer", "mean", "worst head", "its mass", "queries below 0.5"), title=f"Kept mass: {rule.name}"
    )
    for layer, heads in enumerate(by_head):
        worst = int(heads.argmin())
        low = (mass[layer] < 0.5).float().mean()
        made.add_row(str(layer), f"{heads.mean():.3f}", str(worst), f"{heads[worst]:.3f}", f"{low:.1%}")
    console.print(made)
    share = sum(shares) / len(shares)
    console.print(
        f"{tokens} tokens of {text.name}: mean kept mass {by_head.mean():.4f} with {share:.1%} of the causal pairs",
        markup=False,
    )
    document = {
        "model": found.name,
        "tokens": tokens,
        "rule": rule.name,
        "kept_mass": by_head.mean().item(),
        "share_of_pairs": share,
        "by_head": by_head.tolist(),
    }
    if not can_draw():
        console.print(NO_PICTURE, markup=False)
        return document
    out.mkdir(parents=True, exist_ok=True)
    plot_kept_mass(by_head, out / "kept_mass.png", title=rule.name)
    console.print(f"Written: {out / 'kept_mass.png'}", soft_wrap=True)
    return {**document, "written": [str(out / "kept_mass.png")]}
