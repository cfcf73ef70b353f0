"""What every backend is given.

A backend is a module with a `name`, `can_run(request) → (ok, reason)` and either `attention` (differentiable as it is)
or `forward`, `backward` and `ordered`: whether layouts come with `query_work` and, where gradients will be asked for,
`by_key` and `key_work` at hand. An ordered one also has `again`: a shorter way for calls like one before. Tensors are
(batch, seq, heads, head_dim), lse is (batch, heads, seq_q); its gradient is None where nobody asked for lse. Every
backend has `workspace(request)`, what it allocates (`sizes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Extras(NamedTuple):
    """What a call brings besides q, k, v and the layout.

    Attributes:
        scale: multiplier of the scores.
        key_padding_mask: bool [batch, seq_k], True where the key is padding and nobody sees it.
        document_ids: int [batch, any], equal where tokens may see each other; keys are the first seq_k of them and
            queries the last seq_q: either all seq_k, or [keys, queries] with seq_k + seq_q of them.
        dropout_p, seed: share of weights dropped, and int64 for `backends.dropout`; seed is None without dropout.
        softcap: scores s become softcap · tanh(s / softcap); 0 leaves them as they are.
        slopes: [heads], in the compute dtype; then a score falls by the slope of its head for each token between
            query and key (ALiBi).
    """

    scale: float
    key_padding_mask: Tensor | None = None
    document_ids: Tensor | None = None
    dropout_p: float = 0.0
    seed: Tensor | None = None
    softcap: float = 0.0
    slopes: Tensor | None = None

    @property
    def shaped(self) -> bool:
        """Whether scores are more than scaled products."""
        return self.softcap > 0.0 or self.slopes is not None


@dataclass(frozen=True, kw_only=True)
class Request:
    """A call as far as the choice of a backend depends on it."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    kind: str | None = None  # of the layout, after is_causal
    square: bool = False  # seq_q == seq_k
    grouped: bool = False  # fewer key heads than query heads
    dropout: bool = False
    masked: bool = False
    shaped: bool = False
    named: bool = False  # by the caller, not looked for
    return_lse: bool = False
    capability: tuple[int, int] | None = None  # of a GPU that is planned for and need not be here; None: ask the device


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Softmax and sums run in float32, float64 inputs in float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def aligned_queries(document_ids: Tensor, seq_q: int) -> Tensor:
    """The ids of the queries: the last seq_q."""
    return document_ids[:, document_ids.shape[1] - seq_q :]
