"""How much attention a query block gives a key block, estimated without looking at every pair: the scorers.

A scorer turns queries into rows and keys into columns, a few of each for every block, such that the product of a row
and a column stands for the scores of the pairs behind them. The rest is the same for all: a softmax over the columns
that a row may see, summed by block.

| scorer | rows of a query block | columns of a key block |
|---|---|---|
| `MeanPooled` (MoBA) | means of its queries | means of its keys |
| `MinMaxBound` (Quest) | means of its queries | largest and smallest coordinates of its keys: a bound on any score |
| `Moments` | means of its queries, and their squares | means and variances of its keys |
| `Antidiagonal` (XAttention) | queries, `stride` at a time, last first | keys, `stride` at a time |
| `SampledRows` | one query of every `stride`, as it is | all its keys, as they are |
| `nn.BlockGate` | learned | learned |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ..backends.base import compute_dtype
from ..patterns.base import Value, check_int, shown
from ..patterns.blocks import ceil_div

# Estimated scores held at a time.
_CHUNK = 1 << 24


class Scorer(Protocol):
    """`features` gives rows (batch, R, heads, F), scale included, and columns (batch, C, heads_kv, F), with R and C
    multiples of the numbers of query blocks and key blocks. A row and a column know their own tokens and no others, so
    columns can be kept beside a cache of keys (`ops.cache_blocks`).
    """

    def features(self, queries: Blocked, keys: Blocked, scale: float) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Blocked:
    """Tokens in whole blocks.

    Attributes:
        tokens: (batch, blocks, block, heads, head_dim); 0 for what is not real.
        real: bool (batch or 1, blocks, block): where there is a token that some query may see.
        whole: all of them are real, as the host knows without looking.
    """

    tokens: Tensor
    real: Tensor
    whole: bool

    @classmethod
    def of(cls, x: Tensor, block: int, hidden: Tensor | None = None) -> Blocked:
        """Padded to whole blocks; `hidden` is bool (batch, seq)."""
        seq, spare = x.shape[1], -x.shape[1] % block
        real = torch.ones(1, seq, dtype=torch.bool, device=x.device) if hidden is None else ~hidden
        real = torch.nn.functional.pad(real, (0, spare)).unflatten(1, (-1, block))
        if hidden is not None:  # not by weights of 0: 0 · NaN is NaN
            x = x.masked_fill(hidden[..., None, None], 0)
        tokens = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, spare)) if spare else x
        return cls(tokens.unflatten(1, (-1, block)), real, hidden is None and not spare)

    @property
    def block(self) -> int:
        return self.real.shape[2]

    def parts(self, size: int) -> Blocked:
        """The same tokens in smaller blocks."""
        if self.block % size:
            raise ValueError(f"the stride of a scorer must divide the block, {self.block} tokens, got {size}")
        tokens, real = (x.flatten(1, 2).unflatten(1, (-1, size)) for x in (self.tokens, self.real))
        return Blocked(tokens, real, self.whole)

    def mean(self) -> Tensor:
        """(batch, blocks, heads, head_dim) in the compute dtype, over real tokens; 0 where there are none."""
        dtype = compute_dtype(self.tokens.dtype)
        if self.whole:
            return self.tokens.mean(2, dtype=dtype)
        weight = self.real.to(dtype) / self.real.sum(2, keepdim=True).clamp(min=1)
        return (self.tokens * weight[..., None, None]).sum(2)

    def extreme(self, sign: int) -> Tensor:
        """The largest (sign 1) or smallest (−1) coordinates of the real tokens; 0 where there are none."""
        if self.whole:
            return self.tokens.amax(2) if sign > 0 else self.tokens.amin(2)
        values = (self.tokens * sign).masked_fill(~self.real[..., None, None], -torch.inf).amax(2) * sign
        return values.masked_fill(values.isinf(), 0.0)

    def side_by_side(self) -> Tensor:
        """(batch, blocks, heads, block · head_dim): the tokens of every block in a row, 0 for a missing one."""
        return self.tokens.transpose(2, 3).flatten(3)


class Apart(Value):
    """A scorer whose rows come from the queries alone, and columns from the keys."""

    def features(self, queries: Blocked, keys: Blocked, scale: float) -> tuple[Tensor, Tensor]:
        return self.rows(queries, scale), self.columns(keys)

    def rows(self, queries: Blocked, scale: float) -> Tensor:
        raise NotImplementedError

    def columns(self, keys: Blocked) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class MeanPooled(Apart):
    """Mean queries times mean keys, of blocks (MoBA's rule) or of patches of `queries` × `keys` tokens in them."""

    queries: int | None = None
    keys: int | None = None

    def __post_init__(self) -> None:
        _check_parts(self)
        super().__post_init__()

    def rows(self, queries: Blocked, scale: float) -> Tensor:
        return queries.parts(self.queries or queries.block).mean() * scale

    def columns(self, keys: Blocked) -> Tensor:
        return keys.parts(self.keys or keys.block).mean()


@dataclass(frozen=True)
class MinMaxBound(Apart):
    """The largest score that a key in the box around a block's keys could have; or in boxes around `keys` of them."""

    queries: int | None = None
    keys: int | None = None

    def __post_init__(self) -> None:
        _check_parts(self)
        super().__post_init__()

    def rows(self, queries: Blocked, scale: float) -> Tensor:
        mean = queries.parts(self.queries or queries.block).mean() * scale
        return torch.cat((mean.clamp(min=0), mean.clamp(max=0)), dim=-1)

    def columns(self, keys: Blocked) -> Tensor:
        keys = keys.parts(self.keys or keys.block)
        return torch.cat((keys.extreme(1), keys.extreme(-1)), dim=-1)


@dataclass(frozen=True)
class Moments(Apart):
    """Mean and variance of a block's keys: log of the mean of exp(q·k) is q·mean + q²·variance / 2, to second order.

    Covariances between coordinates are left out. For blocks, or for patches of `queries` × `keys` tokens in them.
    """

    queries: int | None = None
    keys: int | None = None

    def __post_init__(self) -> None:
        _check_parts(self)
        super().__post_init__()

    def rows(self, queries: Blocked, scale: float) -> Tensor:
        rows = queries.parts(self.queries or queries.block).mean() * scale
        return torch.cat((rows, rows.square() / 2), dim=-1)

    def columns(self, keys: Blocked) -> Tensor:
        keys = keys.parts(self.keys or keys.block)
        mean = keys.mean()
        variance = replace(keys, tokens=(keys.tokens - mean[:, :, None]).square()).mean()
        return torch.cat((mean, variance), dim=-1)


@dataclass(frozen=True)
class Antidiagonal(Apart):
    """The mean score of every `stride`-th antidiagonal: a `stride`-th of all pairs, with every query and every key."""

    stride: int = 8

    def __post_init__(self) -> None:
        check_int("stride", self.stride, least=1)
        super().__post_init__()

    def rows(self, queries: Blocked, scale: float) -> Tensor:
        rows = queries.parts(self.stride)
        rows = replace(rows, tokens=rows.tokens.flip(2), real=rows.real.flip(2))
        return rows.side_by_side() * (scale / self.stride)

    def columns(self, keys: Blocked) -> Tensor:
        return keys.parts(self.stride).side_by_side()


@dataclass(frozen=True)
class SampledRows(Apart):
    """Every `stride`-th query against every key: for those queries the masses are true."""

    stride: int = 8

    def __post_init__(self) -> None:
        check_int("stride", self.stride, least=1)
        super().__post_init__()

    def rows(self, queries: Blocked, scale: float) -> Tensor:
        parts = queries.parts(self.stride)
        last = (parts.real.sum(2) - 1).clamp(min=0)  # queries are real up to the end of the sequence
        return parts.tokens.take_along_dim(last[..., None, None, None], dim=2).squeeze(2) * scale

    def columns(self, keys: Blocked) -> Tensor:
        return keys.tokens.flatten(1, 2)


def _check_parts(scorer: MeanPooled | MinMaxBound | Moments) -> None:
    for name in ("queries", "keys"):
        if getattr(scorer, name) is not None:
            check_int(name, getattr(scorer, name), least=1)


def estimated_masses(
    q: Tensor,
    k: Tensor,
    scorer: Scorer,
    blocks: tuple[int, int],
    *,
    is_causal: bool,
    scale: float,
    hidden: Tensor | None = None,
    padded: Tensor | None = None,
) -> Tensor:
    """float32 (float64 for float64) [batch, heads, query blocks, key blocks]: a query's share of attention for each
    key block, averaged over the rows of a query block. Differentiable. 0 where no query of the row may see a key.

    The memory is that of the result and a chunk.

    Args:
        hidden, padded: bool (batch, seq), keys and queries that do not count.
    """
    seq_q, seq_k, heads = q.shape[1], k.shape[1], q.shape[2]
    queries, keys = Blocked.of(q, blocks[0], padded), Blocked.of(k, blocks[1], hidden)
    num_q, num_k = (x.real.shape[1] for x in (queries, keys))
    rows, columns, (step, width) = features_of(scorer, queries, keys, q, k, scale)
    rows_a_block, columns_a_block = blocks[0] // step, blocks[1] // width
    # Products in the dtype of the inputs, as a matrix unit likes them; everything else in the compute dtype.
    rows = rows.to(q.dtype).permute(0, 2, 1, 3)  # [batch, heads, R, F]
    columns = columns.to(q.dtype).permute(0, 2, 3, 1)  # [batch, heads_kv, F, C]
    in_column = keys.parts(width).real.sum(2)  # keys that a column stands for, [batch or 1, C]
    in_row = queries.parts(step).real.sum(2)  # queries that a row stands for, [batch or 1, R]
    place = (torch.arange(in_row.shape[1], device=q.device) * step + in_row).clamp(max=seq_q) + (seq_k - seq_q)
    share = in_row.to(compute_dtype(q.dtype)).unflatten(1, (num_q, -1))
    share = share / share.sum(2, keepdim=True).clamp(min=1)
    masses = []
    at_once = max(1, _CHUNK // (q.shape[0] * heads * columns.shape[-1] * rows_a_block))
    for start in range(0, num_q, at_once):
        stop = min(start + at_once, num_q)
        run = slice(start * rows_a_block, stop * rows_a_block)
        # After the last query of the run there is nothing to see.
        seen = num_k
        if is_causal:
            seen = min(num_k, max(1, ceil_div(min(stop * blocks[0], seq_q) + seq_k - seq_q, blocks[1])))
        some = slice(seen * columns_a_block)
        grouped = rows[:, :, run].unflatten(1, (columns.shape[1], -1)).flatten(2, 3)
        scores = (grouped @ columns[..., some]).to(compute_dtype(q.dtype))
        scores = scores.unflatten(2, (-1, run.stop - run.start)).flatten(1, 2)
        count = in_column[:, None, some]
        if is_causal:
            first = torch.arange(seen * columns_a_block, device=q.device) * width
            count = torch.minimum(count, (place[:, run, None] - first).clamp(min=0))
        hidden_here = (count == 0)[:, None]
        scores = scores + count.clamp(min=1).to(scores.dtype).log()[:, None]
        # The lowest number and not −inf: a row that sees nothing has no NaN, in its gradient neither.
        weights = scores.masked_fill(hidden_here, torch.finfo(scores.dtype).min).softmax(-1)
        weights = weights.masked_fill(hidden_here, 0.0)
        weights = weights.unflatten(3, (seen, columns_a_block)).sum(-1).unflatten(2, (stop - start, rows_a_block))
        weights = (weights * share[:, None, start:stop, :, None]).sum(3)
        masses.append(torch.nn.functional.pad(weights, (0, num_k - seen)))
    return torch.cat(masses, dim=2)


def features_of(
    scorer: Scorer, queries: Blocked, keys: Blocked, q: Tensor, k: Tensor, scale: float
) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Rows and columns, which are checked, and how many tokens each of them stands for."""
    num_blocks, blocks = (queries.real.shape[1], keys.real.shape[1]), (queries.block, keys.block)
    rows, columns = scorer.features(queries, keys, scale)
    _check_features(rows, columns, q, k, num_blocks, blocks)
    patch = tuple(block * num // x.shape[1] for x, num, block in zip((rows, columns), num_blocks, blocks, strict=True))
    return rows, columns, (patch[0], patch[1])


def _check_features(
    rows: Tensor, columns: Tensor, q: Tensor, k: Tensor, num_blocks: tuple[int, int], blocks: tuple[int, int]
) -> None:
    """A scorer may be anybody's; rows and columns beyond whole blocks would be left out without a word."""
    for name, x, like, num, block in (
        ("rows", rows, q, num_blocks[0], blocks[0]),
        ("columns", columns, k, num_blocks[1], blocks[1]),
    ):
        good = isinstance(x, Tensor) and x.ndim == 4 and (x.shape[0], x.shape[2]) == (like.shape[0], like.shape[2])
        if not good or x.shape[1] % num or not x.shape[1] or block % (x.shape[1] // num):
            raise ValueError(
                f"scorer must give {name} (batch, a multiple of {num} blocks that divides their {block} tokens, heads, "
                f"features), got {shown(x)}"
            )
