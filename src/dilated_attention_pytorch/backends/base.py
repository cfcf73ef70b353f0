"""What every backend is given.

A backend is a module with a `name`, `can_run(request) → (ok, reason)` and either `attention` (differentiable as it is)
or `forward`, `backward` and `needs_work_order`: whether layouts come with `query_work` and, where gradients will be
asked for, `by_key` and `key_work` at hand. One that needs them also has `replay_for`: a shorter way for calls like one
before. Tensors are (batch, seq, heads, head_dim), lse is (batch, heads, seq_q); its gradient is None where there is
none. v may be wider or narrower than q and k; out and its gradient are as wide as v (`results_of` makes them).
Every backend has `workspace(request)`, what it allocates (`sizes`).

`backward` is asked for the gradients of some tensors of `options.bias` by their names, `wanted`, and gives these behind
dq, dk and dv, in the shapes and dtypes of the tensors. The gradient of `query_terms` is not its business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from ..options import CallOptions

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A call as far as the choice of a backend depends on it."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    head_dim_v: int | None = None  # of v and out, where it is another
    kind: str | None = None  # of the layout, after is_causal
    square: bool = False  # seq_q == seq_k
    grouped: bool = False  # fewer key heads than query heads
    dropout: bool = False
    is_masked: bool = False
    has_score_mods: bool = False
    placed: bool = False  # a part whose tokens are told where they stand in the whole
    named: bool = False  # by the caller, not looked for
    return_lse: bool = False
    deterministic: bool = False  # gradients
    capability: tuple[int, int] | None = None  # of a GPU that is planned for and need not be here; None: ask the device

    @staticmethod
    def of(
        q: Tensor, k: Tensor, v: Tensor, options: CallOptions, *, kind: str | None, return_lse: bool, named: bool
    ) -> Request:
        return Request(
            device=q.device,
            dtype=q.dtype,
            kind=kind,
            square=q.shape[1] == k.shape[1],
            grouped=q.shape[2] != k.shape[2],
            head_dim=q.shape[3],
            head_dim_v=None if v.shape[3] == q.shape[3] else v.shape[3],
            dropout=options.dropout_p > 0.0,
            is_masked=options.is_masked,
            has_score_mods=options.has_score_mods,
            named=named,
            return_lse=return_lse or options.sinks is not None,
            deterministic=options.deterministic,
        )


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Softmax and sums run in float32, float64 inputs in float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def results_of(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """New out (batch, seq_q, heads, head_dim of v) and lse (batch, heads, seq_q)."""
    batch, seq_q, heads, _ = q.shape
    out = torch.empty(batch, seq_q, heads, v.shape[3], dtype=q.dtype, device=q.device)
    return out, torch.empty(batch, heads, seq_q, dtype=compute_dtype(q.dtype), device=q.device)


def in_fixed_order(backward: Callable[P, T]) -> Callable[P, T]:
    """A backward of PyTorch's own operators, whose sums on CUDA have a fixed order only where PyTorch is told so."""

    @wraps(backward)
    def run(*args: P.args, **keywords: P.kwargs) -> T:
        asked = any(isinstance(x, CallOptions) and x.deterministic for x in args)
        on_gpu = any(isinstance(x, Tensor) and x.is_cuda for x in args)
        if not (asked and on_gpu) or torch.are_deterministic_algorithms_enabled():
            return backward(*args, **keywords)
        torch.use_deterministic_algorithms(True)
        try:
            return backward(*args, **keywords)
        finally:
            torch.use_deterministic_algorithms(False)

    return run


def aligned_queries(document_ids: Tensor, seq_q: int) -> Tensor:
    """The ids of the queries: the last seq_q."""
    return document_ids[:, document_ids.shape[1] - seq_q :]
