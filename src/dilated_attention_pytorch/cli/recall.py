"""Associative recall: does a model find an answer that lies farther back than a window reaches?

A sequence starts with records, one a segment of the shortest length: a token that binds a key to a value, repeated
until the segment is full. It ends with a segment of questions: keys, at each of which the value that its record binds
is due. What lies between is filling. Three models of equal size learn it from the same initial parameters and samples:
LongNet, whose dilated branches alone connect question and record; the same with a sliding window that attends to at
least as many pairs of tokens; and the same with dense causal attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..layout.branches import layout_of_branches
from ..models import LongNetConfig, LongNetLM
from ..nn import BlockSparseAttention
from ..patterns import Branches, SlidingWindow

KINDS = ("LongNet", "window", "dense")
KEYS = VALUES = 8
# Tokens: filling, then a question for each key, then a record for each key and value.
FILLING, QUESTION, RECORD = 0, 1, 1 + KEYS
BACKEND = "reference"  # at a few hundred tokens a masked matrix is the fastest on a CPU
LEARNED, OVER = 0.98, 20  # a model is done when this share of the answers of so many steps was right


@dataclass(frozen=True)
class Study:
    """The task, the models and how they learn.

    Args:
        seq: tokens a sequence, the longest segment.
        segment: the shortest segment.
    """

    seq: int = 256
    segment: int = 16
    dim: int = 64
    heads: int = 4
    layers: int = 2
    batch: int = 16
    learning_rate: float = 6e-3
    warmup: int = 30

    @cached_property
    def branches(self) -> Branches:
        """Segments that grow fourfold, dilations that double: every branch costs a token the same."""
        count = 1
        while self.segment * 4 ** (count - 1) < self.seq:
            count += 1
        return Branches([self.segment * 4**i for i in range(count)], [2**i for i in range(count)])

    @property
    def distance(self) -> int:
        """From the first question back to the last record."""
        return self.seq - (KEYS + 1) * self.segment + 1

    @cached_property
    def cost(self) -> int:
        """Pairs of tokens that LongNet's heads attend to, each as often as it counts."""
        layout = layout_of_branches(self.branches, self.seq, num_heads=self.heads, is_causal=True)
        return int(layout.to_dense().sum())

    @cached_property
    def window(self) -> int:
        """Tokens that one of the local model sees, itself included: the fewest that cost as much as LongNet."""
        keys = range(1, self.seq + 1)
        return next(w for w in keys if self.heads * sum(min(i, w) for i in keys) >= self.cost)

    def sample(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Tokens (count, seq) and the answers (count, segment) that are due at the last of them."""
        tokens = torch.full((count, self.seq), FILLING)
        keys = torch.rand(count, KEYS, generator=generator).argsort(dim=1)
        values = torch.randint(VALUES, (count, KEYS), generator=generator)
        tokens[:, : KEYS * self.segment] = (RECORD + keys * VALUES + values).repeat_interleave(self.segment, dim=1)
        asked = torch.randint(KEYS, (count, self.segment), generator=generator)
        tokens[:, -self.segment :] = QUESTION + keys.gather(1, asked)
        return tokens, values.gather(1, asked)

    def model(self, kind: str) -> LongNetLM:
        branches = Branches([self.seq], [1]) if kind == "dense" else self.branches
        torch.manual_seed(0)
        model = LongNetLM(
            LongNetConfig(
                vocab_size=RECORD + KEYS * VALUES,
                dim=self.dim,
                num_layers=self.layers,
                num_heads=self.heads,
                hidden_dim=2 * self.dim,
                segment_lengths=branches.segment_lengths,
                dilation_rates=branches.dilation_rates,
                backend=BACKEND,
            )
        )
        if kind == "window":
            window = SlidingWindow(left=self.window - 1, right=0)
            for layer in model.layers:
                layer.attention.attention = BlockSparseAttention(window, backend=BACKEND)  # type: ignore[union-attr]
        return model

    def learn(self, model: nn.Module, steps: int) -> list[float]:
        """The share of right answers in each step's new samples, before the model learns from them."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
        draw = torch.Generator().manual_seed(1)
        shares: list[float] = []
        while len(shares) < steps and sum(shares[-OVER:]) < LEARNED * OVER:
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate * min(1.0, (len(shares) + 1) / self.warmup)
            tokens, answers = self.sample(self.batch, draw)
            logits = model(tokens)[:, -self.segment :]
            optimizer.zero_grad()
            cross_entropy(logits.flatten(0, 1), answers.flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            shares.append(_right(logits, answers))
        return shares

    @torch.no_grad()
    def test(self, model: nn.Module, count: int = 128) -> float:
        """The share of right answers in samples of another draw."""
        tokens, answers = self.sample(count, torch.Generator().manual_seed(2))
        return _right(model(tokens)[:, -self.segment :], answers)


def _right(logits: Tensor, answers: Tensor) -> float:
    return (logits[..., :VALUES].argmax(-1) == answers).float().mean().item()


def plot(study: Study, curves: Mapping[str, Sequence[float]], path: Path) -> None:
    """Right answers by step, the mean of `OVER` steps."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    labels = {
        "LongNet": f"LongNet, segments {list(study.branches.segment_lengths)}, dilations "
        f"{list(study.branches.dilation_rates)}",
        "window": f"sliding window of equal cost, {study.window} tokens",
        "dense": "dense",
    }
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for kind, colour in zip(KINDS, ("#2a8fc0", "#d9730d", "#808080"), strict=True):
        means = torch.tensor(curves[kind])
        means = means.unfold(0, min(OVER, len(means)), 1).mean(-1)
        steps = range(len(curves[kind]) - len(means) + 1, len(curves[kind]) + 1)
        axes.plot(steps, means, color=colour, label=labels[kind])
    axes.axhline(1 / VALUES, color=rcParams["text.color"], linestyle=":", linewidth=1, label="guessing")
    axes.set_title(f"Associative recall: {study.seq} tokens, the answer at least {study.distance} back")
    axes.set_xlabel("step")
    axes.set_ylabel(f"right answers, mean of {OVER} steps")
    axes.set_ylim(0, 1.03)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=120)
