"""`dilated-attention generate`: text of a model, as it is drawn."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from ..models import LongNetLM
from ..models.sampling import Sampling
from .models import ByteTokenizer, Found, ends
from .output import Document
from .printing import decoded_bytes, decoded_tokens, escaped
from .rules import Fixed, Rule, check_rules, in_model

START = "\n"  # the prompt if there is none


@dataclass(frozen=True, kw_only=True)
class Draws:
    """How tokens are drawn, see `Sampling`; without a seed every time otherwise."""

    max_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int | None

    def sampling(self, device: str) -> tuple[Sampling, int | None]:
        """And the seed that it has."""
        if self.temperature == 0.0:
            if self.seed is not None:
                raise ValueError(f"--seed has no meaning with --temperature 0, got {self.seed}")
            return Sampling(temperature=0.0, top_k=self.top_k, top_p=self.top_p), None
        seed = secrets.randbits(31) if self.seed is None else self.seed
        draw = torch.Generator(device).manual_seed(seed)
        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, generator=draw), seed


def run(
    console: Console, model: str, *, prompt: str, draws: Draws, rule: Rule | None, echo: bool, device: str
) -> Document:
    """Stream to the console; how fast it was goes to stderr, so that a pipe gets the text and nothing else."""
    sampling, seed = draws.sampling(device)
    found = Found.named(model)
    if rule is not None:
        if found.is_longnet and isinstance(rule, Fixed):
            raise ValueError(f"--pattern is for models of transformers: {found.name} has the branches it learned with")
        check_rules([rule], found)
    tokenizer = found.tokenizer()
    ids = tokenizer.encode(prompt or START)
    network = found.load(device)
    given = torch.tensor([ids], device=device)
    counted = Counted(
        _tokens(network, given, draws.max_tokens, sampling)
        if found.is_longnet
        else _tokens_of_transformers(network, given, draws.max_tokens, sampling, rule)
    )
    if isinstance(tokenizer, ByteTokenizer):
        # The prompt may end inside of a character.
        pieces = decoded_bytes(chain(ids, counted) if echo else counted)
    else:
        shown = [prompt] if echo else []
        pieces = chain(shown, decoded_tokens(ids, counted, tokenizer.decode))
    started = perf_counter()
    text = "".join(_shown(console, pieces))
    seconds = perf_counter() - started
    rate = counted.count / seconds
    drawn = "the most likely each" if seed is None else f"seed {seed}"
    print(f"{counted.count} tokens, {rate:,.1f} a second; {drawn}", file=sys.stderr)
    return {"model": found.name, "prompt": prompt, "text": text, "tokens": counted.count, "seed": seed, "rate": rate}


class Counted:
    """Tokens as they pass by."""

    def __init__(self, tokens: Iterator[int]) -> None:
        self.tokens, self.count = tokens, 0

    def __iter__(self) -> Iterator[int]:
        for token in self.tokens:
            self.count += 1
            yield token


def _tokens(model: LongNetLM, ids: Tensor, count: int, sampling: Sampling) -> Iterator[int]:
    for token in model.stream(ids, count, **vars(sampling)):
        yield int(token)


@torch.no_grad()
def _tokens_of_transformers(
    model: Any, ids: Tensor, count: int, sampling: Sampling, rule: Rule | None
) -> Iterator[int]:
    """Until the model says that it ends."""
    stop = ends(model)
    with nullcontext() if rule is None else in_model(model, rule):
        cache = _cache(model) if isinstance(rule, Fixed) else None
        for _ in range(count):
            try:
                out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            except IndexError:
                raise ValueError(
                    "the prompt and --max-tokens must fit the positions that the model has, "
                    f"{model.config.max_position_embeddings}"
                ) from None
            cache = out.past_key_values
            ids = sampling.draw(out.logits[:, -1].float())
            if int(ids) in stop:
                return
            yield int(ids)


def _cache(model: Any) -> Any:
    """One that drops what the pattern no longer sees; where there is no such thing, that of the model."""
    from ..integrations.huggingface import PatternCache

    try:
        cache = PatternCache(model.config)
    except ValueError as error:
        print(f"the cache keeps all keys: {error}", file=sys.stderr)
        return None
    print(cache, file=sys.stderr)
    return cache


def _shown(console: Console, pieces: Iterable[str]) -> Iterator[str]:
    """Written as they come; on a terminal without control characters."""
    for piece in pieces:
        console.file.write(escaped(piece) if console.is_terminal else piece)
        console.file.flush()
        yield piece
    console.file.write("\n")
