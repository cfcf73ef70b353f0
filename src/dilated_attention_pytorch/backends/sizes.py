"""The request and the result of `workspace`, by which the planner asks a backend what it allocates.

Every backend has `workspace(request)`: the bytes that it allocates besides its results. It is in the module that
allocates them, so that both are changed together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout.size import ListSize
from .base import compute_dtype


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The tensors of a call, and their bytes."""

    batch: int
    seq_q: int
    seq_k: int
    heads: int
    heads_kv: int
    head_dim: int
    dtype: torch.dtype
    head_dim_v: int | None = None  # of v and out, where it is another

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> Shape:
        (batch, seq_q, heads, head_dim), (_, seq_k, heads_kv, _), width_v = q.shape, k.shape, v.shape[3]
        return cls(
            batch=batch, seq_q=seq_q, seq_k=seq_k, heads=heads, heads_kv=heads_kv, head_dim=head_dim, dtype=q.dtype,
            head_dim_v=None if width_v == head_dim else width_v,
        )  # fmt: skip

    @property
    def width_v(self) -> int:
        """head_dim of v and out."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def q(self) -> int:
        return self.batch * self.seq_q * self.heads * self.head_dim * self.dtype.itemsize

    @property
    def k(self) -> int:
        return self.batch * self.seq_k * self.heads_kv * self.head_dim * self.dtype.itemsize

    @property
    def v(self) -> int:
        return self.k // self.head_dim * self.width_v

    @property
    def out(self) -> int:
        return self.q // self.head_dim * self.width_v

    @property
    def lse(self) -> int:
        return self.batch * self.heads * self.seq_q * self.compute

    @property
    def compute(self) -> int:
        """Bytes of a number in the compute dtype."""
        return compute_dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class SizeRequest:
    """A call as far as its memory depends on it.

    Attributes:
        device: "cpu" or "cuda".
        threads: those of PyTorch, on a CPU.
        capability: of a GPU; (0, 0) if nothing is known of it.
        deterministic: as in `CallOptions`.
    """

    shape: Shape
    lists: ListSize
    device: str
    threads: int = 1
    capability: tuple[int, int] = (0, 0)
    deterministic: bool = True


class Workspace(NamedTuple):
    """Peak bytes that a call allocates besides its results."""

    forward: int
    backward: int
