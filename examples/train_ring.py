"""Train a small LongNet language model on a sequence split over ranks; any number of ranks resumes a checkpoint.

    torchrun --nproc-per-node 4 examples/train_ring.py --steps 20 --checkpoints ring_checkpoints
    torchrun --nproc-per-node 2 --max-restarts 3 examples/train_ring.py --steps 40 --checkpoints ring_checkpoints
    torchrun --nproc-per-node 2 examples/train_ring.py --check

Each rank holds its tokens and a copy of the parameters; attention fetches the keys that its tokens need from the ranks
that hold them. The loss is a mean over all tokens, so a rank's part of it is a sum over its own divided by all, and the
gradients of the parameters are summed over the ring. `--check` compares them with those of one process.

A checkpoint is written beside its place and moved there when every rank is done: one that has the name `step-…` is
whole. On start the newest is read, by however many ranks there are; so `torchrun --max-restarts` goes on where a killed
run stopped, and ends with the loss of one that was not disturbed. The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.functional import cross_entropy

from dilated_attention_pytorch import DilatedAttention, Placement, shard_sequence

VOCABULARY, WIDTH, HEADS, LAYERS = 64, 64, 4, 2
SEGMENTS, DILATIONS = (128, 512), (1, 4)
BLOCK = 64  # tokens that are never split


class Layer(nn.Module):
    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention = DilatedAttention(SEGMENTS, DILATIONS, ring_group=group)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, placement: Placement | None) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)) for part in self.project(self.before_attention(x)).chunk(3, dim=-1))
        x = x + self.out(self.attention(q, k, v, is_causal=True, placement=placement).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class LongNet(nn.Module):
    """Tokens and their positions in, logits out; over a ring, of this rank's tokens."""

    def __init__(self, tokens: int, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(tokens, WIDTH)
        self.layers = nn.ModuleList(Layer(group) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor, placement: Placement | None = None) -> Tensor:
        x = self.embed(tokens) + self.position(positions)
        for layer in self.layers:
            x = layer(x, placement)
        return self.head(x)


def make_batch(tokens: int, step: int) -> tuple[Tensor, Tensor]:
    """A sequence to predict, the same on every rank: a phrase of 32 letters again and again, some of them wrong."""
    phrase = torch.randint(VOCABULARY, (32,), generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(1 + step)
    text = phrase.repeat(tokens // 32 + 1)[: tokens + 1]
    noise = torch.rand(tokens + 1, generator=draw) < 0.05
    text = torch.where(noise, torch.randint(VOCABULARY, (tokens + 1,), generator=draw), text)[None]
    return text[:, :-1], text[:, 1:]


class Run:
    """A model, its optimiser and its place in the ring."""

    def __init__(self, tokens: int, group: dist.ProcessGroup | None, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.tokens, self.group, self.step = tokens, group, 0
        self.model = LongNet(tokens, group).to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        # Causal: the last tokens have the most to do, so each rank takes some from the front and some from the back.
        size = 1 if group is None else dist.get_world_size(group)
        self.placement = None if group is None else Placement.zigzag(tokens, size, block_size=BLOCK)

    def gradients(self) -> float:
        """The loss of this step's batch, its gradients in the parameters."""
        text, target = make_batch(self.tokens, self.step)
        positions = torch.arange(self.tokens)[None]
        if self.group is not None and self.placement is not None:
            text, target, positions = (
                shard_sequence(x, self.placement, group=self.group) for x in (text, target, positions)
            )
        self.optimizer.zero_grad()
        logits = self.model(text, positions, self.placement)
        loss = cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum") / self.tokens
        loss.backward()
        total = loss.detach()
        if self.group is not None:
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad, group=self.group)
            dist.all_reduce(total, group=self.group)
        return float(total)

    def train_step(self) -> float:
        loss = self.gradients()
        self.optimizer.step()
        self.step += 1
        return loss

    def save(self, folder: Path) -> None:
        """All ranks together."""
        path, unfinished = folder / f"step-{self.step:06d}", folder / f"unfinished-{self.step:06d}"
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save(
            {"model": model, "optimizer": optimizer, "step": self.step},
            checkpoint_id=unfinished,
            process_group=self.group,
        )
        if dist.get_rank(self.group) == 0 and not path.exists():
            os.replace(unfinished, path)
        dist.barrier(self.group)

    def load(self, folder: Path) -> None:
        """The newest whole checkpoint, if there is one; whatever the number of ranks that wrote it."""
        whole = sorted(folder.glob("step-*"))
        if whole:
            model, optimizer = get_state_dict(self.model, self.optimizer)
            state = {"model": model, "optimizer": optimizer, "step": 0}
            dcp.load(state, checkpoint_id=whole[-1], process_group=self.group)
            set_state_dict(
                self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
            self.step = state["step"]


def train(
    group: dist.ProcessGroup,
    *,
    steps: int,
    tokens: int = 1024,
    dtype: torch.dtype = torch.float32,
    checkpoints: Path | None = None,
    every: int = 5,
    quiet: bool = True,
) -> list[float]:
    """Train up to step `steps`, from the newest checkpoint if there is one; the losses of the steps that were made."""
    run = Run(tokens, group, dtype)
    if checkpoints is not None:
        run.load(checkpoints)
    losses = []
    while run.step < steps:
        losses.append(run.train_step())
        if checkpoints is not None and run.step % every == 0:
            run.save(checkpoints)
        if not quiet and dist.get_rank(group) == 0:
            print(f"step {run.step}: loss {losses[-1]:.4f}", flush=True)
    return losses


def check(group: dist.ProcessGroup, tokens: int = 1024) -> float:
    """The largest difference of a gradient over the ring from that of one process, in float64."""
    ring, alone = Run(tokens, group, torch.float64), Run(tokens, None, torch.float64)
    ring.gradients()
    alone.gradients()
    both = zip(ring.model.parameters(), alone.model.parameters(), strict=True)
    return max(float((a.grad - b.grad).abs().max()) for a, b in both)


def join(timeout: timedelta) -> dist.ProcessGroup:
    """All processes that torchrun started. What an attempt before a restart left in the store is not to be found."""
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    store = dist.PrefixStore(f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    group = dist.group.WORLD
    assert group is not None
    return group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--checkpoints", type=Path, default=None, help="folder; without one nothing is saved")
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds after which a silent rank counts as dead")
    parser.add_argument("--check", action="store_true", help="compare the gradients with one process, then stop")
    args = parser.parse_args()
    group = join(timedelta(seconds=args.timeout))
    torch.set_num_threads(1)
    result: dict[str, float | int] = {"world_size": dist.get_world_size(group)}
    if args.check:
        result["largest_difference"] = check(group, args.tokens)
    else:
        losses = train(
            group, steps=args.steps, tokens=args.tokens, checkpoints=args.checkpoints, every=args.every, quiet=False
        )
        result |= {"step": args.steps, "loss": losses[-1] if losses else float("nan")}
    if dist.get_rank(group) == 0:
        print(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
