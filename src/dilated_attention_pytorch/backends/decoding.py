"""Single queries against long caches of keys and values, in plain PyTorch: only the keys that a query sees are read."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout.lists import HOST
from ..layout.rows import CacheRows
from ..layout.rules import key_bounds
from ..options import CallOptions
from .base import compute_dtype

SHORT = 32  # tokens of a run below which gathering is quicker than products of runs


class Cache(NamedTuple):
    """Keys and values of all tokens so far.

    Attributes:
        k, v: (batch, capacity, heads_kv, head_dim), or pages (pages, page_size, heads_kv, head_dim).
        page_table: int [batch, pages of a sample], the page of each run of page_size tokens; None without pages.
        lengths: int32 [batch], tokens that there are.
    """

    k: Tensor
    v: Tensor
    page_table: Tensor | None
    lengths: Tensor

    def pieces(self, token: Tensor) -> list[slice | Tensor]:
        """Some tokens, ascending, as runs that lie together; as they are where runs would be short."""
        apart = token.diff() != 1
        if self.page_table is not None:
            page = token // self.k.shape[1]
            apart |= page.diff() != 0
        edges = [0, *(apart.nonzero()[:, 0] + 1).tolist(), len(token)]
        if len(edges) * SHORT > len(token):
            return [token] if len(token) else []
        return [slice(int(token[a]), int(token[b - 1]) + 1) for a, b in pairwise(edges)]

    def take(self, x: Tensor, sample: int, piece: slice | Tensor) -> Tensor:
        """Keys or values of a piece, (tokens, heads_kv, head_dim); a run is a view."""
        if self.page_table is None:
            return x[sample, piece]
        size = x.shape[1]
        if isinstance(piece, Tensor):
            return x[self.page_table[sample, piece // size].long(), piece % size]
        page, first = divmod(piece.start, size)
        return x[int(self.page_table[sample, page]), first : first + piece.stop - piece.start]


def capacity_of(k: Tensor, page_table: Tensor | None) -> int:
    """Tokens that a sample has room for."""
    return k.shape[1] * (1 if page_table is None else page_table.shape[1])


def decode(q: Tensor, cache: Cache, rows: CacheRows, options: CallOptions) -> tuple[Tensor, Tensor]:
    """out like q and lse (batch, heads, new); q is (batch, new, heads, head_dim), the last tokens of each sample."""
    batch, new, heads, _ = q.shape
    dtype, parts = compute_dtype(q.dtype), rows.num_lists
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, new, dtype=dtype, device=q.device)
    lengths = cache.lengths.tolist()
    for i in range(batch * new):
        sample, t = divmod(i, new)
        position = lengths[sample] - new + t
        for part in range(parts):
            token = _tokens_seen(rows, i, part, position, lengths[sample])
            if options.key_padding_mask is not None:
                token = token[~options.key_padding_mask[sample, token]]
            own, own_kv = (_share(n, part, parts) for n in (heads, cache.k.shape[2]))
            pieces = cache.pieces(token)
            keys, values = (
                [cache.take(x[:, :, own_kv], sample, piece).to(dtype).transpose(0, 1) for piece in pieces]
                for x in (cache.k, cache.v)
            )
            query = q[sample, t, own].to(dtype).unflatten(0, (own_kv.stop - own_kv.start, -1)) * options.scale
            scores = torch.cat([query @ k.mT for k in keys] or [query[..., :0]], dim=-1)
            if options.softcap:
                scores = options.softcap * torch.tanh(scores / options.softcap)
            if options.alibi_slopes is not None:
                scores = scores - options.alibi_slopes[own].view(len(query), -1, 1) * (position - token).abs()
            weights = torch.softmax(scores, -1).split([v.shape[1] for v in values], dim=-1) if pieces else ()
            mixed = sum((w @ v for w, v in zip(weights, values, strict=True)), torch.zeros_like(query))
            out[sample, t, own], lse[sample, own, t] = mixed.flatten(0, 1).to(q.dtype), scores.logsumexp(-1).flatten()
    return out, lse


def _share(num: int, part: int, parts: int) -> slice:
    """Which of `num` heads follow list `part`: several, or one that several lists share."""
    first = num * part // parts
    return slice(first, max(num * (part + 1) // parts, first + 1))


def _tokens_seen(rows: CacheRows, i: int, part: int, position: int, length: int) -> Tensor:
    """The keys that query `i` sees by list `part`, ascending."""
    ahead, start, split, stop = rows.work[i * rows.num_lists + part].tolist()
    token = rows.indices[start:stop, None].long() * rows.block
    token = token + torch.arange(rows.block, device=token.device)
    seen = token < length
    if split < stop:
        query, nothing = torch.tensor(ahead + position, device=HOST), rows.rules.new_empty(2, 0)
        allowed = torch.zeros_like(seen[split - start :])
        for interval in rows.rules[rows.rule_ids[split:stop]].unbind(1):
            first, last = key_bounds(interval, query, length, length, nothing)
            partial = token[split - start :]
            allowed |= (partial >= first[:, None]) & (partial <= last[:, None])
        seen[split - start :] &= allowed
    return token[seen].sort().values
