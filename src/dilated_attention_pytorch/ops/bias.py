"""`ScoreBias`: what is added to scores, in the terms that models have. They add up:

    bias = ScoreBias.t5(embedding.weight.T) + ScoreBias.keys(sizes.log())
    block_sparse_attention(q, k, v, pattern, bias=bias)

A term holds its tensor as it was given, so that a bias can be made once and used in every step of a training.
`bias_of_call` checks the terms against q and k and brings them to the form that backends know, `options.Bias`, by
PyTorch operators that autograd sees.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends.base import compute_dtype
from ..options import Bias
from ..patterns.base import check_flag, check_int, shown


class Term(NamedTuple):
    """One kind of bias: the name of the function of `ScoreBias` that made it, its tensor, and the other arguments."""

    kind: str
    tensor: Tensor
    others: tuple[Any, ...] = ()


class Shard(NamedTuple):
    """Of a call over a ring: where the tokens of this rank stand in the whole, int64 [tokens], and of how many. What
    goes by places needs it."""

    positions: Tensor
    seq: int


class ScoreBias:
    """What is added to scores after scale and softcap: a sum of terms, made by the functions below and by `+`.

    The tensors get their gradients. Heads are those of q. Dimensions called "or 1" may be 1, and then serve all samples
    or all heads. A query stands at the position of its token: the last one at the last key.
    """

    def __init__(self, terms: tuple[Term, ...]) -> None:
        if not isinstance(terms, tuple) or not all(isinstance(term, Term) for term in terms):
            raise TypeError(
                f"terms must be made by {', '.join(f'ScoreBias.{kind}' for kind in MADE)}, got {shown(terms)}"
            )
        self.terms = terms

    def __add__(self, other: ScoreBias) -> ScoreBias:
        if not isinstance(other, ScoreBias):
            return NotImplemented
        return ScoreBias((*self.terms, *other.terms))

    def __repr__(self) -> str:
        return " + ".join(f"ScoreBias.{term.kind}({list(term.tensor.shape)})" for term in self.terms)

    @classmethod
    def slopes(cls, slopes: Tensor, *, signed: bool = False) -> ScoreBias:
        """ALiBi: −slope · |query − key|, or, signed, slope · (key − query) as in FlexAttention's examples.

        Args:
            slopes: (heads,) or (batch or 1, heads).
        """
        check_flag("signed", signed)
        _check_tensor("slopes", slopes, 1, 2)
        return cls((Term("slopes", slopes, (signed,)),))

    @classmethod
    def table(cls, table: Tensor, *, zero: int | None = None, positions: Tensor | None = None) -> ScoreBias:
        """A number for each head and distance: table[head, zero + position of key − position of query], or the nearest
        entry that there is.

        Args:
            table: (heads or 1, entries), or (batch or 1, heads or 1, entries).
            zero: the entry of distance 0; the middle one by default.
            positions: where tokens stand, int (seq_k,) or (batch or 1, seq_k): queries are the last of these. By
                default one after the other.
        """
        _check_tensor("table", table, 2, 3)
        if table.shape[-1] == 0:
            raise ValueError(f"table must have entries, got shape {list(table.shape)}")
        if zero is None:
            zero = table.shape[-1] // 2
        check_int("zero", zero, least=0)
        if positions is not None:
            _check_places("positions", positions, 1, 2)
        return cls((Term("table", table, (zero, positions)),))

    @classmethod
    def t5(cls, table: Tensor, *, bidirectional: bool = True, max_distance: int = 128) -> ScoreBias:
        """T5's relative attention bias: a number for each head and bucket of distances, which grow with the distance.

        Args:
            table: (heads or 1, buckets): of a T5 model, `relative_attention_bias.weight.T`.
            bidirectional: whether keys behind the query have buckets of their own, as in an encoder.
            max_distance: from where on all distances share the last bucket.
        """
        _check_tensor("table", table, 2)
        check_flag("bidirectional", bidirectional)
        least = 4 if bidirectional else 2
        if table.shape[1] < least:
            raise ValueError(f"table must have {least} buckets or more, got shape {list(table.shape)}")
        check_int("max_distance", max_distance, least=1)
        buckets = table.shape[1] // 2 if bidirectional else table.shape[1]
        if max_distance <= buckets // 2:
            raise ValueError(
                f"max_distance must be more than the {buckets // 2} distances that have a bucket each, "
                f"got {max_distance}"
            )
        return cls((Term("t5", table, (bidirectional, max_distance)),))

    @classmethod
    def grid(cls, table: Tensor, shape: tuple[int, ...], *, tokens: Tensor | None = None) -> ScoreBias:
        """A number for each head and offset on a grid of one or more dimensions, as in Swin transformers.

        Args:
            table: (heads or 1, *offsets), an odd number of offsets along each dimension of the grid, the middle one for
                0: the entry is that of place of key − place of query, or the nearest that there is. (Swin's own table
                is of query − key: flip it.)
            shape: of the grid; its places, the last dimension fastest, are the tokens.
            tokens: int (seq_k,), the place of each token where they stand in another order.
        """
        if not isinstance(shape, tuple | list | torch.Size) or not shape:
            raise TypeError(f"shape must be a tuple of ints, got {shown(shape)}")
        for size in shape:
            check_int("shape", size, least=1)
        _check_tensor("table", table, 1 + len(shape))
        if any(size % 2 == 0 for size in table.shape[1:]):
            raise ValueError(f"table must have an odd number of offsets a dimension, got shape {list(table.shape)}")
        if tokens is not None:
            _check_places("tokens", tokens, 1)
        return cls((Term("grid", table, (tuple(shape), tokens)),))

    @classmethod
    def keys(cls, values: Tensor) -> ScoreBias:
        """A number for each key: (batch or 1, heads or 1, seq_k). The logs of sizes, say, of merged tokens (ToMe)."""
        _check_tensor("values", values, 3)
        return cls((Term("keys", values),))

    @classmethod
    def forget(cls, log_gates: Tensor, *, summed: bool = False) -> ScoreBias:
        """The forgetting transformer: a score gains the sum of the log gates of the tokens behind the key, up to and
        with that of the query. For causal attention.

        Args:
            log_gates: (batch or 1, heads or 1, seq_k), the log of each token's forget gate.
            summed: they are sums already, of each token's gate and all before it. Over a ring they must be.
        """
        check_flag("summed", summed)
        _check_tensor("log_gates", log_gates, 3)
        return cls((Term("forget", log_gates, (summed,)),))

    @classmethod
    def dense(cls, values: Tensor) -> ScoreBias:
        """A number for each pair: (batch or 1, heads or 1, seq_q, seq_k), read and differentiated in active blocks
        alone; −inf hides a pair. Its gradient is as large as it is. Over a ring a rank has the rows of its own queries,
        with all keys of the whole in their order."""
        _check_tensor("values", values, 4)
        return cls((Term("dense", values),))


def bias_of_call(
    bias: object, alibi_slopes: Tensor | None, q: Tensor, k: Tensor, shard: Shard | None = None
) -> Bias | None:
    """Checked, in the form of backends; `alibi_slopes` are checked before."""
    if bias is not None and not isinstance(bias, ScoreBias):
        raise TypeError(f"bias must be a ScoreBias or None, got {shown(bias)}")
    terms = () if bias is None else bias.terms
    if alibi_slopes is not None:
        terms = (*ScoreBias.slopes(alibi_slopes).terms, *terms)
    given: dict[str, Tensor] = {}
    for term in terms:
        if term.tensor.device != q.device:
            raise ValueError(f"bias must be on the device of q, {q.device}, got {term.kind} on {term.tensor.device}")
        for name, x in MADE[term.kind](q, k, shard, term.tensor, *term.others).items():
            if name == "table" and name in given:
                raise ValueError(f"bias must have one table at most: add their numbers up, got {bias!r}")
            given[name] = given[name] + x if name in given else x
    return Bias(**given) if given else None


def _slopes(q: Tensor, k: Tensor, shard: Shard | None, slopes: Tensor, signed: bool) -> dict[str, Tensor]:
    slopes = slopes.to(compute_dtype(q.dtype))
    slopes = slopes[None] if slopes.ndim == 1 else slopes
    _check_fits("slopes", slopes, q)
    slopes = slopes.expand(-1, q.shape[2])[..., None]
    # A sum of slopes with one side and with two: the one counts for both.
    return {"slopes": torch.cat((slopes, -slopes), dim=-1) if signed else slopes}


def _table(
    q: Tensor, k: Tensor, shard: Shard | None, table: Tensor, zero: int, positions: Tensor | None
) -> dict[str, Tensor]:
    table = table.to(compute_dtype(q.dtype))
    table = table[None] if table.ndim == 2 else table
    _check_fits("table", table, q, table.shape[2])
    seq_q, seq_k = q.shape[1], k.shape[1]
    if positions is None and shard is not None:
        keys = queries = shard.positions[None]
    elif positions is None:
        keys = torch.arange(seq_k, device=q.device)[None]
        queries = torch.arange(seq_k - seq_q, seq_k, device=q.device)[None]
    else:
        if positions.device != q.device:
            raise ValueError(f"bias must be on the device of q, {q.device}, got positions on {positions.device}")
        keys = positions[None] if positions.ndim == 1 else positions
        if keys.shape[1] != seq_k or not (len(keys) == 1 or len(keys) == q.shape[0]):
            raise ValueError(
                f"bias must have a position for each of {seq_k} keys, for {q.shape[0]} samples or for all, got shape "
                f"{list(positions.shape)}"
            )
        queries = _of_queries(keys, seq_q, "positions")
    return {"table": table, "query_codes": (queries - zero).to(torch.int32), "key_codes": keys.to(torch.int32)}


def _t5(
    q: Tensor, k: Tensor, shard: Shard | None, table: Tensor, bidirectional: bool, max_distance: int
) -> dict[str, Tensor]:
    ahead = torch.arange(-max_distance, max_distance + 1, device=table.device)
    of_distance = table[:, _t5_buckets(ahead, table.shape[1], bidirectional, max_distance)]
    return _table(q, k, shard, of_distance, max_distance, None)


def _grid(
    q: Tensor, k: Tensor, shard: Shard | None, table: Tensor, shape: tuple[int, ...], tokens: Tensor | None
) -> dict[str, Tensor]:
    """The numbers of places, in a grid so wide that their difference says how far apart they are in each dimension."""
    for dim, size in enumerate(shape, start=1):
        ahead, most = torch.arange(1 - size, size, device=table.device), table.shape[dim] // 2
        table = table.index_select(dim, ahead.clamp(-most, most) + most)
    if tokens is None and shard is not None:
        if shard.seq != prod(shape):
            raise ValueError(f"bias must have a grid of all {shard.seq} tokens of the ring, got shape {list(shape)}")
        tokens = shard.positions
    place = torch.arange(prod(shape), device=q.device) if tokens is None else tokens
    position, zero = torch.zeros_like(place), 0
    for dim, size in enumerate(shape):
        stride = prod(2 * each - 1 for each in shape[dim + 1 :])
        position = position + place // prod(shape[dim + 1 :]) % size * stride
        zero += (size - 1) * stride
    return _table(q, k, shard, table.flatten(1), zero, position)


def _keys(q: Tensor, k: Tensor, shard: Shard | None, values: Tensor) -> dict[str, Tensor]:
    _check_fits("keys", values, q, k.shape[1])
    return {"key_terms": values.to(compute_dtype(q.dtype))}


def _forget(q: Tensor, k: Tensor, shard: Shard | None, log_gates: Tensor, summed: bool) -> dict[str, Tensor]:
    _check_fits("forget", log_gates, q, k.shape[1])
    total = log_gates.to(compute_dtype(q.dtype))
    if not summed:
        total = total.cumsum(-1)
    return {"query_terms": _of_queries(total, q.shape[1], "gates"), "key_terms": -total}


def _dense(q: Tensor, k: Tensor, shard: Shard | None, values: Tensor) -> dict[str, Tensor]:
    _check_fits("dense", values, q, q.shape[1], k.shape[1] if shard is None else shard.seq)
    return {"dense": values}


# By kind, what makes fields of `Bias` of q, k, the tensor of a term and its other arguments.
MADE: dict[str, Callable[..., dict[str, Tensor]]] = {
    "slopes": _slopes,
    "table": _table,
    "t5": _t5,
    "grid": _grid,
    "keys": _keys,
    "forget": _forget,
    "dense": _dense,
}


def _of_queries(x: Tensor, seq_q: int, name: str) -> Tensor:
    """The last seq_q numbers of [..., seq_k]."""
    if seq_q > x.shape[-1]:
        raise ValueError(f"bias must have {name} for all {seq_q} queries, got {x.shape[-1]}")
    return x[..., x.shape[-1] - seq_q :]


def _check_tensor(name: str, x: object, *ndims: int) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {shown(x)}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {x.dtype}")
    if x.layout is not torch.strided:
        raise TypeError(f"{name} must be dense, got a tensor of layout {x.layout}")
    if x.ndim not in ndims:
        raise ValueError(f"{name} must have {' or '.join(map(str, ndims))} dimensions, got shape {list(x.shape)}")


def _check_places(name: str, x: object, *ndims: int) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor or None, got {shown(x)}")
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {x.dtype}")
    if x.ndim not in ndims:
        raise ValueError(f"{name} must have {' or '.join(map(str, ndims))} dimensions, got shape {list(x.shape)}")


def _check_fits(kind: str, x: Tensor, q: Tensor, *sizes: int) -> None:
    """Samples and heads as in q, or one for all; the rest of the shape as said."""
    batch, _, heads, _ = q.shape
    shape = x.shape
    fits = (shape[0] == 1 or shape[0] == batch) and (shape[1] == 1 or shape[1] == heads)
    if not fits or any(size != wanted for size, wanted in zip(shape[2:], sizes, strict=True)):
        wanted = ", ".join([f"{batch} or 1", f"{heads} or 1", *map(str, sizes)])
        raise ValueError(f"bias must have {kind} of shape ({wanted}), got {list(shape)}")


def _t5_buckets(ahead: Tensor, buckets: int, bidirectional: bool, max_distance: int) -> Tensor:
    """The bucket of each distance key − query: near ones have their own, far ones share, by the log of the distance."""
    first = torch.zeros_like(ahead)
    if bidirectional:
        buckets //= 2
        first = torch.where(ahead > 0, buckets, 0)
        far = ahead.abs()
    else:
        far = (-ahead).clamp(min=0)
    exact = buckets // 2
    share = torch.log(far.clamp(min=1).float() / exact) / log(max_distance / exact)  # as T5 rounds it
    shared = (exact + (share * (buckets - exact)).long()).clamp(max=buckets - 1)
    return first + torch.where(far < exact, far, shared)
