"""How the next token is drawn from logits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..patterns.base import check_int


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Temperature, then `top_k`, then `top_p`, in this order, as in transformers.

    Args:
        temperature: divides the logits; 0 takes the most likely token, and then nothing else may be given.
        top_k: draw from this many most likely tokens; from all by default.
        top_p: draw from the fewest most likely tokens whose probabilities, those left by `top_k`, sum to at least this;
            in (0, 1], and 1, or nothing, keeps all.
        generator: where the draws come from, PyTorch's own by default.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature)
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be at least 0 and finite, got {self.temperature}")
        if self.top_k is not None:
            check_int("top_k", self.top_k, least=1)
        if self.top_p is not None:
            _check_number("top_p", self.top_p)
            if not 0.0 < self.top_p <= 1.0:
                raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not isinstance(self.generator, torch.Generator | None):
            raise TypeError(f"generator must be a torch.Generator or None, got {type(self.generator).__name__}")
        if self.temperature == 0.0:
            for name in ("top_k", "top_p", "generator"):
                if (value := getattr(self, name)) is not None:
                    raise ValueError(
                        f"{name} has no meaning with temperature 0, which takes the most likely token, got {value}"
                    )

    def draw(self, logits: Tensor) -> Tensor:
        """One token a sample, (batch, vocab_size) → (batch, 1)."""
        if self.temperature == 0.0:
            return logits.argmax(dim=-1, keepdim=True)
        vocab_size = logits.shape[-1]
        likely, token = logits.topk(min(self.top_k or vocab_size, vocab_size))
        weights = (likely / self.temperature).softmax(dim=-1)
        if self.top_p is not None and self.top_p < 1.0:
            before = weights.cumsum(dim=-1) - weights  # of the tokens that are more likely; 0 for the first
            weights = weights.masked_fill(before >= self.top_p, 0.0)  # multinomial takes weights that do not sum to 1
        return token.gather(-1, torch.multinomial(weights, 1, generator=self.generator))


def _check_number(name: str, value: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}")
