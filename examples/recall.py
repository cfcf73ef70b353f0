"""Does a model that learns with sparse attention recall as well as a dense one? With the schedule, and without it.

    python examples/recall.py --pairs 32 --batch 32 --steps 600 --backend reference --out recall_schedule.json

A sequence shows pairs of a key and a value, then all keys once more; after each the model must name its value. Blocks
of pairs are asked for in another order, and so are the pairs of a block: which block matters is for the content to
say, and it is one for all queries of a block, since blocks are what is chosen. Two layers of attention over blocks
that are chosen from the content, trained three ways: dense (measured dense), closed step by step by a
`SparsitySchedule`, and sparse from the first step on (both measured sparse).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dilated_attention_pytorch import BlockSparseAdaptive, SparsitySchedule

KINDS = 128  # keys, and as many values


def batch_of(size: int, pairs: int, block: int, device: str) -> tuple[Tensor, Tensor]:
    """Tokens (size, 4 · pairs), and for every token the value that comes next, or −100 where nothing is asked."""
    together = block // 2
    keys = torch.rand(size, KINDS, device=device).argsort(1)[:, :pairs]
    values = torch.randint(KINDS, (size, pairs), device=device) + KINDS
    blocks = torch.rand(size, pairs // together, 1, device=device).argsort(1)
    order = (blocks * together + torch.rand(size, pairs // together, together, device=device).argsort(2)).flatten(1)
    shown = torch.stack((keys, values), 2).flatten(1)
    asked = torch.stack((keys.gather(1, order), values.gather(1, order)), 2).flatten(1)
    targets = torch.full((size, 4 * pairs), -100, device=device)
    targets[:, 2 * pairs :: 2] = asked[:, 1::2]
    return torch.cat((shown, asked), 1), targets


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, share: float, block: int, backend: str) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(2 * width, 3 * width), nn.Linear(width, width)
        self.attention = BlockSparseAdaptive(share, block_size=block, sink=0, local=0, backend=backend)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        before = nn.functional.pad(h, (0, 0, 1, -1))  # a token knows the one before it
        q, k, v = self.qkv(torch.cat((h, before), -1)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(self.attention(q, k, v, is_causal=True).flatten(2))
        return x + self.mlp(x)


def train(way: str, args: argparse.Namespace) -> dict[str, object]:
    torch.manual_seed(args.seed)
    layers = [Layer(args.width, args.heads, args.share, args.block, args.backend) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(2 * KINDS, args.width), *layers, nn.Linear(args.width, 2 * KINDS))
    model = model.to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, weight_decay=0.0)
    schedule = SparsitySchedule(model, steps=max(1, args.steps // 2), dense_steps=args.steps // 4)
    if way == "sparse":
        schedule.load_state_dict({**schedule.state_dict(), "closed": schedule.steps})
    started = time.perf_counter()
    for step in range(args.steps):
        tokens, targets = batch_of(args.batch, args.pairs, args.block, args.device)
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if way == "schedule":
            schedule.step()
        if step % 100 == 99:
            print(f"{way}: step {step + 1}, loss {loss.item():.3f}, opening {schedule.opening:.2f}", flush=True)
    right = asked = 0
    with torch.no_grad():
        for _ in range(args.checks):
            tokens, targets = batch_of(args.batch, args.pairs, args.block, args.device)
            guess = model(tokens).argmax(-1)
            right += int(((guess == targets) & (targets >= 0)).sum())
            asked += int((targets >= 0).sum())
    return {"way": way, "opening": schedule.opening, "accuracy": right / asked,
            "seconds": round(time.perf_counter() - started, 1)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    sizes = {"--pairs": 64, "--width": 64, "--heads": 2, "--block": 16, "--batch": 64, "--steps": 2000, "--checks": 20}
    for name, value in sizes.items():
        parser.add_argument(name, type=int, default=value)
    parser.add_argument("--share", type=float, default=0.4, help="of the causal blocks that is kept")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="auto", help="on a CPU a matrix of pairs, 'reference', is fastest here")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.pairs % (args.block // 2):
        parser.error(f"--pairs must fill blocks of {args.block} tokens, got {args.pairs}")
    rows = [train(way, args) for way in ("dense", "schedule", "sparse")]
    options = {name: value for name, value in vars(args).items() if name != "out"}
    record = {"command": "python examples/recall.py", "torch": torch.__version__, "options": options, "rows": rows}
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
