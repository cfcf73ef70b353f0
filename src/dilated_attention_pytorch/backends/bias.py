"""What `Bias` adds to the scores of some pairs, and its gradient from theirs, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..options import Bias

Pairs = tuple[Tensor, Tensor]


def bias_of_pairs(bias: Bias, query: Tensor, key: Tensor, seq_q: int, seq_k: int, whole: Pairs | None = None) -> Tensor:
    """[batch or 1, heads or 1, *pairs], differentiable.

    Args:
        query, key: their numbers, int64, in as many dimensions, which broadcast to the pairs. Numbers beyond the last
            get what that gets.
        whole: the same numbers in the whole, where the call is a part of one over a ring: slopes go by these.
    """
    query, key = query.clamp(max=seq_q - 1), key.clamp(max=seq_k - 1)
    parts = []
    if bias.slopes is not None:
        before, behind = _distances(query, key, seq_q, seq_k) if whole is None else _distances(*whole, 0, 0)
        slopes = bias.slopes.reshape(*bias.slopes.shape, *[1] * before.ndim)
        if bias.slopes.shape[2] == 1:
            parts.append(-slopes[:, :, 0] * (before + behind))
        else:
            parts.append(-slopes[:, :, 0] * before - slopes[:, :, 1] * behind)
    if bias.table is not None:
        place = _places(bias, query, key)
        if len(place) == 1:
            parts.append(bias.table[:, :, place[0]])
        else:
            table = bias.table.expand(len(place), -1, -1)
            of_heads = place.flatten(1)[:, None].expand(-1, table.shape[1], -1)
            parts.append(table.gather(2, of_heads).unflatten(2, place.shape[1:]))
    if bias.query_terms is not None or bias.key_terms is not None:
        terms = (bias.query_terms, query), (bias.key_terms, key)
        first, *more = [x[:, :, at] for x, at in terms if x is not None]
        parts.append(first + more[0] if more else first)  # of two large numbers first the difference
    if bias.dense is not None:
        parts.append(bias.dense[:, :, query, key])
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def of_one_sample(bias: Bias, sample: int, heads: slice) -> Bias:
    """The bias of some heads of a sample."""

    def part(name: str, x: Tensor) -> Tensor:
        x = x[sample : sample + 1] if len(x) > 1 else x
        return x[:, heads] if x.shape[1] > 1 and name in OF_HEADS else x

    return Bias(**{name: part(name, x) for name, x in bias.given(*Bias._fields).items()})


OF_HEADS = ("slopes", "table", "query_terms", "key_terms", "dense")


class BiasGradient:
    """Sums of the gradients of scores, for the tensors of a bias that are `wanted`: in float64, but that of the dense
    one, which is as large as that."""

    def __init__(self, bias: Bias, wanted: Iterable[str], dtype: torch.dtype) -> None:
        self.bias = bias
        self.sums = {
            name: torch.zeros_like(
                getattr(bias, name),
                dtype=dtype if name == "dense" else torch.float64,
                memory_format=torch.contiguous_format,
            )
            for name in wanted
        }

    def add(
        self,
        dscores: Tensor,
        sample: int,
        heads: slice,
        query: Tensor,
        key: Tensor,
        lengths: tuple[int, int],
        whole: Pairs | None = None,
    ) -> None:
        """Of pairs [num, heads, queries, keys] of a sample; every pair comes once.

        Args:
            query, key: [num, queries] and [num, keys]. The gradient is 0 where there is none.
            whole: the same in the whole, see `bias_of_pairs`.
        """
        seq_q, seq_k = lengths
        if whole is not None:
            whole = whole[0][:, :, None], whole[1][:, None]
        query, key = query.clamp(max=seq_q - 1)[:, :, None], key.clamp(max=seq_k - 1)[:, None]
        for name, total in self.sums.items():
            of_sample = total[sample if len(total) > 1 else 0]
            mine = of_sample[heads] if len(of_sample) > 1 else of_sample
            parts = dscores if len(mine) == dscores.shape[1] else dscores.sum(1, keepdim=True)
            if name == "slopes":
                far = _distances(query, key, seq_q, seq_k) if whole is None else _distances(*whole, 0, 0)
                before, behind = (x.to(parts.dtype)[:, None] for x in far)
                each = [before + behind] if mine.shape[1] == 1 else [before, behind]
                mine -= torch.stack([(parts * x).sum((0, 2, 3), dtype=total.dtype) for x in each], dim=-1)
            elif name == "table":
                place = _places(self.bias, query, key)
                place = place[sample if len(place) > 1 else 0].flatten()
                for one, part in zip(mine, parts.unbind(1), strict=True):
                    one.index_add_(0, place, part.flatten().to(total.dtype))
            elif name == "key_terms":
                of_keys = parts.sum(2, dtype=total.dtype).transpose(0, 1).flatten(1)
                mine.index_add_(1, key.flatten(), of_keys)
            elif name == "dense":
                head = torch.arange(len(mine), device=mine.device)[None, :, None, None]
                mine.index_put_((head, query[:, None], key[:, None]), parts, accumulate=True)
            else:
                raise NotImplementedError(name)

    def results(self) -> tuple[Tensor, ...]:
        return tuple(total.to(getattr(self.bias, name).dtype) for name, total in self.sums.items())


def _distances(query: Tensor, key: Tensor, seq_q: int, seq_k: int) -> tuple[Tensor, Tensor]:
    """How many tokens a key is before the query, and behind it."""
    before = query + (seq_k - seq_q) - key
    return before.clamp(min=0), (-before).clamp(min=0)


def _places(bias: Bias, query: Tensor, key: Tensor) -> Tensor:
    """Entries of the table, int64 [batch or 1, *pairs]."""
    assert bias.table is not None
    assert bias.query_codes is not None
    assert bias.key_codes is not None
    place = bias.key_codes.long()[:, key] - bias.query_codes.long()[:, query]
    return place.clamp(0, bias.table.shape[2] - 1)
