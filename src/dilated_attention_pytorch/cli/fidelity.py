"""`dilated-attention fidelity`: what a choice of blocks keeps of a real model's attention, by layer and head."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from ..ops import TopK, block_sparse_attention, kept_mass, select_blocks
from ..patterns import Causal
from ..viz import plot_kept_mass
from . import models
from .output import NO_PICTURE, Document, can_draw, steps, table


def run(
    console: Console,
    text: Path,
    *,
    tokens: int,
    model: str | None,
    scorer: str,
    keep: float,
    block_size: tuple[int, int],
    out: Path,
) -> Document:
    """Measure on the model's own queries and keys, dense attention all the way; print a table and save a picture."""
    selector = TopK(keep, even=True, across_heads=True)
    network, tokenizer = models.load_model(model)
    ids = models.token_ids(tokenizer, text, tokens)
    kept: list[Tensor] = []
    shares: list[float] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        announce(f"layer {layer}")
        layout = select_blocks(
            q, k, scorer=scorer, selector=selector, block_size=block_size, is_causal=True, scale=scale
        )
        kept.append(kept_mass(q, k, layout, is_causal=True, scale=scale)[0])
        shares.append(layout.density * 2 * tokens / (tokens + 1))
        result = block_sparse_attention(q, k, v, Causal(), scale=scale)
        assert isinstance(result, Tensor)
        return result

    layers = network.config.num_hidden_layers
    with steps(console, layers) as announce, models.attention_of(network, attend), torch.no_grad():
        network(ids, use_cache=False, logits_to_keep=1)
    mass = torch.stack(kept)  # [layers, heads, queries]
    by_head = mass.mean(-1)
    title = f"Kept mass: {scorer}, {keep:.1%} of the causal blocks of {block_size[0]} x {block_size[1]}"
    made = table(right=("layer", "mean", "worst head", "its mass", "queries below 0.5"), title=title)
    for layer, heads in enumerate(by_head):
        worst = int(heads.argmin())
        low = (mass[layer] < 0.5).float().mean()
        made.add_row(str(layer), f"{heads.mean():.3f}", str(worst), f"{heads[worst]:.3f}", f"{low:.1%}")
    console.print(made)
    share = sum(shares) / len(shares)
    console.print(
        f"{tokens} tokens of {text.name}: mean kept mass {by_head.mean():.4f} with {share:.1%} of the causal pairs"
    )
    document = {
        "tokens": tokens,
        "scorer": scorer,
        "keep": keep,
        "block_size": list(block_size),
        "kept_mass": by_head.mean().item(),
        "share_of_pairs": share,
        "by_head": by_head.tolist(),
    }
    if not can_draw():
        console.print(NO_PICTURE, markup=False)
        return document
    out.mkdir(parents=True, exist_ok=True)
    title = f"{scorer}, {keep:.1%} of blocks {block_size[0]} x {block_size[1]}"
    plot_kept_mass(by_head, out / "kept_mass.png", title=title)
    console.print(f"Written: {out / 'kept_mass.png'}", soft_wrap=True)
    return {**document, "written": [str(out / "kept_mass.png")]}
