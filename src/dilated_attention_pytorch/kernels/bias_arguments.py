"""A bias from the host's side: what the kernels of `bias` are given, and what becomes of the sums that they make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..options import Bias
from .bias import DENSE, SLOPES, TABLE, TERMS

KINDS = {
    "slopes": SLOPES.value,
    "table": TABLE.value,
    "query_terms": TERMS.value,
    "key_terms": TERMS.value,
    "dense": DENSE.value,
}


class BiasArguments:
    """A bias as kernels take it; `unused` stands for what is not given.

    Attributes:
        slopes: what ALIBI or SLOPES read.
        tensors, numbers: the arguments of kernels behind `bitmaps` and behind all other numbers.
        flags: ALIBI and BIAS.
    """

    def __init__(self, bias: Bias | None, seq_q: int, unused: Tensor, units_per_nat: float) -> None:
        self.bias = bias = Bias() if bias is None else bias
        kinds = 0 if bias.is_alibi else sum({KINDS[name] for name in bias.given(*KINDS)})
        self.flags = {"ALIBI": bias.is_alibi, "BIAS": kinds}
        self.slopes = table = codes = terms = dense = unused
        of_slopes, of_codes = 0, 0
        of_table, of_terms, of_dense = (0, 0, 0), (0, 0), (0, 0, 0, 0)
        if bias.slopes is not None and bias.is_alibi:
            self.slopes = bias.slopes * units_per_nat
        elif bias.slopes is not None:
            self.slopes = bias.slopes.expand(-1, -1, 2).contiguous()
            of_slopes, _ = _strides(self.slopes)
        if bias.table is not None:
            assert bias.query_codes is not None
            assert bias.key_codes is not None
            table, codes = bias.table.contiguous(), torch.cat((bias.query_codes, bias.key_codes), dim=1)
            of_table, of_codes = (*_strides(table), table.shape[2]), codes.stride(0) if len(codes) > 1 else 0
        if bias.query_terms is not None or bias.key_terms is not None:
            terms = _terms(bias, seq_q)
            of_terms = _strides(terms)
        if bias.dense is not None:
            dense = bias.dense
            of_dense = *_strides(dense), dense.stride(2), dense.stride(3)
        self.tensors = table, codes, terms, dense
        self.numbers = of_slopes, *of_table, of_codes, *of_terms, *of_dense


def _terms(bias: Bias, seq_q: int) -> Tensor:
    """Of queries, 0 where they have none, and then of keys: [batch or 1, heads or 1, seq_q + seq_k]."""
    of_keys, of_queries = bias.key_terms, bias.query_terms
    assert of_keys is not None
    if of_queries is None:
        of_queries = of_keys.new_zeros(1, 1, seq_q)
    shared = torch.broadcast_shapes(of_queries.shape[:2], of_keys.shape[:2])
    return torch.cat([x.expand(*shared, -1) for x in (of_queries, of_keys)], dim=-1)


def _strides(x: Tensor) -> tuple[int, int]:
    """From sample to sample and from head to head; 0 where all share one."""
    return x.stride(0) if len(x) > 1 else 0, x.stride(1) if x.shape[1] > 1 else 0


class Launch(NamedTuple):
    """The samples and heads of one launch."""

    first_sample: int
    samples: int
    first_head: int
    heads: int


class NoSums:
    """In the place of `BiasSums` where no gradient is wanted."""

    numbers: Any = (0, 0)
    flags: Any = {"WANTED": 0, "SHARED": False}  # noqa: RUF012 - read alone

    def __init__(self, unused: Tensor, batch: int, heads: int) -> None:
        self.tensors, self.of_all = (unused,) * 5, Launch(0, batch, 0, heads)

    def launches(self) -> Iterator[Launch]:
        yield self.of_all


class BiasSums:
    """Memory for the gradients that are `wanted`, and what is read from it in the end.

    Attributes:
        tensors, numbers: the arguments of the kernel behind those of the bias.
        flags: WANTED.
    """

    def __init__(
        self, given: BiasArguments, wanted: Sequence[str], heads: int, padded_q: int, keep_scale: float,
        do: Tensor, v: Tensor, dlse: Tensor | None, lse: Tensor,
    ) -> None:  # fmt: skip
        self.bias, self.wanted, self.seq_q = given.bias, wanted, do.shape[1]
        self.batch, self.heads = len(do), heads
        table, _, terms, _ = given.tensors
        slopes = d_table = d_terms = dense = unit = given.tensors[0]
        self.samples_at_once, self.heads_at_once = self.batch, heads
        of_dense = 0, 0
        if "slopes" in wanted:
            slopes = torch.empty(self.batch, heads, 2, padded_q, dtype=torch.float32, device=do.device)
        if "table" in wanted:
            d_table = torch.zeros(table.shape, dtype=torch.int64, device=do.device)
        if "key_terms" in wanted:
            d_terms = torch.zeros(terms.shape, dtype=torch.int64, device=do.device)
        if "table" in wanted or "key_terms" in wanted:
            unit = _unit(do, v, dlse, lse, keep_scale)
        if "dense" in wanted:
            assert self.bias.dense is not None
            shape = self.bias.dense.shape
            self.samples_at_once = 1 if shape[0] < self.batch else self.batch
            self.heads_at_once = 1 if shape[1] < heads else heads
            alone = (self.samples_at_once, self.heads_at_once) == (self.batch, heads)
            dtype = self.bias.dense.dtype if alone else torch.float32
            dense = torch.zeros(shape, dtype=dtype, device=do.device)
            of_dense = _strides(dense)
        kinds = sum({KINDS[name] for name in wanted})
        shared = (self.samples_at_once, self.heads_at_once) != (self.batch, heads)
        self.flags = {"WANTED": kinds, "SHARED": shared}
        self.sums = {"slopes": slopes, "table": d_table, "key_terms": d_terms, "dense": dense}
        self.unit, self.tensors, self.numbers = unit, (slopes, d_table, d_terms, dense, unit), of_dense

    def launches(self) -> Iterator[Launch]:
        """One after the other, where samples or heads share a dense bias."""
        samples, heads = self.samples_at_once, self.heads_at_once
        for first_sample, first_head in product(range(0, self.batch, samples), range(0, self.heads, heads)):
            yield Launch(first_sample, samples, first_head, heads)

    def results(self) -> list[Tensor]:
        """Gradients like the tensors of the bias."""
        return [self._result(name).to(getattr(self.bias, name).dtype) for name in self.wanted]

    def _result(self, name: str) -> Tensor:
        found, like = self.sums[name], getattr(self.bias, name)
        if name == "dense":
            return found
        if name == "slopes":  # a score falls by them
            of_heads = -found.sum(-1, dtype=torch.float64)
            return of_heads.sum_to_size(like.shape)
        found = found if name == "table" else found[..., self.seq_q :].sum_to_size(like.shape)
        return found / self.unit.double()


def _unit(do: Tensor, v: Tensor, dlse: Tensor | None, lse: Tensor, keep_scale: float) -> Tensor:
    """The power of two that gradients of scores are multiplied by: sums of all of them stay below 2⁶².

    The gradients of a row add up to twice the largest out · dout and dlse at most. NaN where there is NaN, or infinity,
    in what comes in: so the result is.
    """
    largest_do, largest_v = (torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).amax() for x in (do, v))
    of_row = 2.0 * keep_scale * largest_do.double() * largest_v.double()
    if dlse is not None:
        of_row = of_row + dlse.abs().amax()
    power = torch.floor(61.0 - torch.log2(of_row * lse.numel())).clamp(-100.0, 100.0)
    bad = ~of_row.isfinite() | lse.isnan().any()
    return torch.exp2(power).masked_fill(bad, torch.nan).float().reshape(1)
