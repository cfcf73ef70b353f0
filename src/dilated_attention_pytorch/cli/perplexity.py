"""`dilated-attention perplexity`: what a pattern, or a choice of blocks, costs a model that was trained without it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from torch import Tensor

from .models import Found, bytes_of, nats, num_layers, token_ids
from .output import Document, steps, table
from .rules import Fixed, Registered, Rule, check_rules, in_model, share_of_causal


@dataclass(frozen=True)
class Measured:
    """A text under a rule.

    Attributes:
        share: of the causal pairs of tokens, the mean of all layers; 1 for dense attention.
        nats: of all tokens but the first.
    """

    nats: float
    tokens: int
    bytes: int
    share: float
    seconds: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats / self.tokens)

    @property
    def bits_a_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes


def measure(model: Any, tokenizer: Any, ids: Tensor, rule: Rule | None) -> Measured:
    """The model's loss on these tokens, [1, tokens], as it is or under a rule."""
    started = perf_counter()
    with nullcontext() if rule is None else in_model(model, rule):
        loss = nats(model, ids)
    seconds = perf_counter() - started
    return Measured(loss, ids.shape[1] - 1, bytes_of(tokenizer, ids), _share(model, rule, ids), seconds)


def _share(model: Any, rule: Rule | None, ids: Tensor) -> float:
    if rule is None:
        return 1.0
    if isinstance(rule, Registered):
        return rule.share(ids.shape[1], model.config.get_text_config().num_attention_heads, num_layers(model))
    if not rule.shares:  # a pattern in a model of transformers, which does not pass by here
        assert isinstance(rule, Fixed)
        return share_of_causal(rule.layout(ids.shape[1], 1, ids.device))
    shares = [*rule.shares]
    rule.shares.clear()
    return sum(shares) / len(shares)


def run(
    console: Console, texts: Sequence[Path], *, tokens: int, model: str | None, rules: Sequence[Rule], device: str
) -> Document:
    """A table for each text: the model as it is, then under each rule."""
    if tokens < 2:
        raise ValueError(f"--tokens must be at least 2, since the first is not predicted, got {tokens}")
    found = Found.named(model)
    check_rules(rules, found)
    tokenizer = found.tokenizer()
    ids = {text: token_ids(tokenizer, text, tokens) for text in texts}
    network = found.load(device)
    own = Fixed.of(network.config.branches) if found.is_longnet else None
    base = "dense" if own is None else f"as trained, {own.name}"
    document: Document = {"model": found.name, "tokens": tokens, "texts": []}
    for text in texts:
        rows: list[Document] = []
        given = ids[text].to(device)
        with steps(console, 1 + len(rules)) as announce:
            for name, rule in ((base, own), *((rule.name, rule) for rule in rules)):
                announce(f"{text.name}: {name}")
                rows.append(_row(name, measure(network, tokenizer, given, rule), rows))
        about = {"text": text.name, "predicted_tokens": tokens - 1, "predicted_bytes": bytes_of(tokenizer, given)}
        document["texts"].append({**about, "rows": rows})
        made = table(
            "attention",
            right=("pairs kept", "perplexity", "ratio", "bits a byte", "seconds"),
            title=f"{text.name}: {found.name}, {tokens:,} tokens",
        )
        for row in rows:
            made.add_row(
                row["attention"],
                f"{row['share_of_pairs']:.1%}",
                f"{row['perplexity']:.4g}",
                f"{row['ratio']:.3f}",
                f"{row['bits_a_byte']:.3f}",
                f"{row['seconds']:.1f}",
            )
        console.print(made)
    console.print(
        "Pairs kept: of the causal ones. Ratio: to the perplexity of the first row. Bits a byte: of the text, so that "
        "models with other tokens can be compared."
    )
    return document


def _row(name: str, found: Measured, rows: Sequence[Document]) -> Document:
    return {
        "attention": name,
        "share_of_pairs": found.share,
        "perplexity": found.perplexity,
        "ratio": found.perplexity / (rows[0]["perplexity"] if rows else found.perplexity),
        "bits_a_byte": found.bits_a_byte,
        "seconds": found.seconds,
    }
