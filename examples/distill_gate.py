"""Teach a gate for every layer of a frozen model which blocks matter, from texts: minutes on a CPU.

    python examples/distill_gate.py train1.txt train2.py … --tokens 2048 --steps 48 --patch 1 2 --out gates.pt

The true block masses of the dense model are computed once for every text, blockwise. They say how a budget is best
split among the layers (`split_budget`), and the gates learn them by their Kullback–Leibler divergence. A gate that
learned is then averaged with the rule that it started as, since what it learned of a few texts holds for others in
part. Use other texts than those that you measure on.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor

from dilated_attention_pytorch import (
    BlockGate,
    Causal,
    TopK,
    block_masses,
    block_sparse_attention,
    gate_loss,
    split_budget,
)
from dilated_attention_pytorch.cli import models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--patch", type=int, nargs=2, default=[4, 4], help="queries and keys of a patch")
    parser.add_argument("--steps", type=int, default=48, help="steps of a layer, one text each")
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--out", type=Path, default=Path("gates.pt"))
    args = parser.parse_args()
    started = time.perf_counter()
    model, tokenizer = models.load_model(args.model)
    model.to(args.device)
    taught: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        masses = block_masses(q, k, block_size=args.block, is_causal=True, scale=scale)
        taught.setdefault(layer, []).append((q.half(), k.half(), masses.half()))
        out = block_sparse_attention(q, k, v, Causal(), scale=scale)
        assert isinstance(out, Tensor)
        return out

    with models.attention_of(model, attend), torch.no_grad():
        for text in args.texts:
            ids = models.token_ids(tokenizer, text, args.tokens).to(args.device)
            model(ids, use_cache=False, logits_to_keep=1)
            print(f"{text.name}: masses of {len(taught)} layers, {time.perf_counter() - started:.0f} s", flush=True)

    budgets = {}
    few = [lessons[:12] for _, lessons in sorted(taught.items())]  # enough for what all texts have in common
    by_layer = [torch.cat([masses for _, _, masses in lessons]).float() for lessons in few]
    for share in (0.125, 0.25):
        even = TopK(share, even=True, across_heads=True)
        split = split_budget(by_layer, even, tokens=args.tokens, block_size=args.block, is_causal=True)
        budgets[share] = [each.share for each in split]
        print(f"budgets for {share}, {time.perf_counter() - started:.0f} s", flush=True)
    del by_layer, few

    gates, divergence = [], []
    for layer, lessons in sorted(taught.items()):
        q, k, _ = lessons[0]
        patch = {"queries": args.patch[0], "keys": args.patch[1]}
        gate = BlockGate(q.shape[2], q.shape[3], k.shape[2], **patch, device=args.device)
        optimizer = torch.optim.Adam(gate.parameters(), lr=args.rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
        losses = []
        for step in range(args.steps):
            q, k, masses = (x.float() for x in lessons[step % len(lessons)])
            loss = gate_loss(gate, q, k, block_size=args.block, is_causal=True, masses=masses)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        quarter = max(1, args.steps // 4)
        first, last = (sum(part) / quarter for part in (losses[:quarter], losses[-quarter:]))
        print(f"layer {layer}: divergence {first:.3f} → {last:.3f}, {time.perf_counter() - started:.0f} s", flush=True)
        with torch.no_grad():
            for weight in gate.parameters():  # they started as 0
                weight.mul_(0.5)
        gates.append(gate.requires_grad_(False))
        divergence.append([first, last])
    about = {
        "texts": [text.name for text in args.texts], "tokens": args.tokens, "steps": args.steps, "rate": args.rate,
        "block": args.block, "patch": args.patch, "seconds": round(time.perf_counter() - started),
        "divergence": divergence,
    }  # fmt: skip
    torch.save({"gates": [gate.state_dict() for gate in gates], "budgets": budgets, "about": about}, args.out)


if __name__ == "__main__":
    main()
