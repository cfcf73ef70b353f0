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
from .base import compute_dtype, results_of

SHORT = 32  # tokens of a run below which gathering is quicker than products of runs


class Cache(NamedTuple):
    """Keys and values of all tokens so far.

    Attributes:
        k, v: (batch, capacity, heads_kv, head_dim), or pages (pages, page_size, heads_kv, head_dim); v of any width.
        page_table: int [batch, pages of a sample], the page of each run of page_size tokens; None without pages.
        lengths: int32 or int64 [batch], tokens that there are.
    """

    k: Tensor
    v: Tensor
    page_table: Tensor | None
    lengths: Tensor

    def runs(self, first: int, stop: int) -> list[slice | Tensor]:
        """The tokens from `first` to before `stop`, as `pieces` gives them."""
        if self.page_table is None:
            return [slice(first, stop)]
        size = self.k.shape[1]
        if size < SHORT:
            return [torch.arange(first, stop, device=self.k.device)]
        edges = [first, *range((first // size + 1) * size, stop, size), stop]
        return [slice(*edge) for edge in pairwise(edges)]

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


class Place(NamedTuple):
    """A query: its number in the call, where it stands, and how many tokens its sample has."""

    number: int
    position: int
    length: int


def capacity_of(k: Tensor, page_table: Tensor | None) -> int:
    """Tokens that a sample has room for."""
    return k.shape[1] * (1 if page_table is None else page_table.shape[1])


def decode(q: Tensor, cache: Cache, rows: CacheRows, options: CallOptions) -> tuple[Tensor, Tensor]:
    """out, as wide as v, and lse (batch, heads, new); q is (batch, new, heads, head_dim), the last of each sample.

    The host reads the lengths: those on a GPU are waited for.
    """
    batch, new, heads, _ = q.shape
    dtype, parts = compute_dtype(q.dtype), rows.num_lists
    out, lse = results_of(q, cache.v)
    lengths = cache.lengths.tolist()
    for i in range(batch * new):
        sample, t = divmod(i, new)
        at = Place(i, lengths[sample] - new + t, lengths[sample])
        hidden = None if options.key_padding_mask is None else options.key_padding_mask[sample]
        for part in range(parts):
            own, own_kv = (_share(n, part, parts) for n in (heads, cache.k.shape[2]))
            pieces = _pieces_seen(rows, part, at, cache, hidden)
            keys, values = (
                [cache.take(x[:, :, own_kv], sample, piece).to(dtype).transpose(0, 1) for piece in pieces]
                for x in (cache.k, cache.v)
            )
            query = q[sample, t, own].to(dtype).unflatten(0, (own_kv.stop - own_kv.start, -1)) * options.scale
            scores = torch.cat([query @ k.mT for k in keys] or [query[..., :0]], dim=-1)
            if options.softcap:
                scores = options.softcap * torch.tanh(scores / options.softcap)
            if options.bias is not None:
                assert options.bias.slopes is not None  # there is nothing else in decoding
                distance = (at.position - _tokens(pieces, q.device)).abs()
                scores = scores - options.bias.slopes[0, own].view(len(query), -1, 1) * distance
            weights = torch.softmax(scores, -1).split([v.shape[1] for v in values], dim=-1) if pieces else ()
            nothing = query.new_zeros(*query.shape[:-1], cache.v.shape[-1])
            mixed = sum((w @ v for w, v in zip(weights, values, strict=True)), nothing)
            out[sample, t, own], lse[sample, own, t] = mixed.flatten(0, 1).to(q.dtype), scores.logsumexp(-1).flatten()
    return out, lse


def decode_listed(
    q: Tensor, cache: Cache, rows: CacheRows, options: CallOptions, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """The same for rows of blocks alone, one for each query and list (`layout.rows.rows_of_blocks`), at the cost of the
    places that `indices` has. The host reads nothing: lengths and rows stay on the device."""
    (batch, new, heads, _), dtype = q.shape, compute_dtype(q.dtype)
    lists, capacity, num_rows = rows.num_lists, capacity_of(cache.k, cache.page_table), len(rows.work)
    group, heads_kv = heads // lists, cache.k.shape[2]
    place = torch.arange(len(rows.indices), dtype=rows.work.dtype, device=q.device)
    row = torch.searchsorted(rows.work[:, 3].contiguous(), place, right=True)  # num_rows for a place without a block
    there, row = row < num_rows, row.clamp(max=num_rows - 1)
    token, part = row // lists, row % lists
    sample, length = token // new, cache.lengths.long()[token // new][:, None]
    key = rows.indices.long()[:, None] * rows.block + torch.arange(rows.block, device=q.device)
    position = length - new + (token % new)[:, None]
    seen = there[:, None] & (key >= 0) & (key < length) & (key < capacity)
    if is_causal:
        seen &= key <= position
    at = key.clamp(0, capacity - 1)
    if options.key_padding_mask is not None:
        seen &= ~options.key_padding_mask[sample[:, None], at]
    where, missing = (sample[:, None], at), None
    if cache.page_table is not None:
        num_pages, size = cache.k.shape[:2]
        page = torch.where(seen, cache.page_table[sample[:, None], at // size].long(), 0)
        missing = (page < 0) | (page >= num_pages)
        where = page.masked_fill(missing, 0), at % size
    own_kv = (part * heads_kv // lists)[:, None]
    keys, values = (x[*where, own_kv].to(dtype) for x in (cache.k, cache.v))  # [places, block, head_dim]
    queries = q.view(batch * new, lists, group, -1)[token, part].to(dtype) * options.scale
    scores = queries @ keys.mT  # [places, heads of the list, block]
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.bias is not None:
        assert options.bias.slopes is not None  # there is nothing else in decoding
        slopes = options.bias.slopes.view(lists, group)[part]
        scores = scores - slopes[..., None] * (position - key).abs()[:, None]
    # What nobody sees may be anything, and 0 times NaN is NaN.
    scores, values = scores.masked_fill(~seen[:, None], -torch.inf), values.masked_fill(~seen[..., None], 0.0)
    if missing is not None:  # garbage must not look like a result
        scores = scores.masked_fill(missing[:, None], torch.nan)
    top = scores.new_full((num_rows, group), -torch.inf)
    top = top.scatter_reduce(0, row[:, None].expand(-1, group), scores.amax(-1), "amax")
    base = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp(scores - base[row][..., None])
    total = torch.zeros_like(top).index_add(0, row, weights.sum(-1))
    mixed = scores.new_zeros(num_rows, group, values.shape[2]).index_add(0, row, weights @ values)
    out = (mixed / torch.where(total == 0.0, 1.0, total)[..., None]).view(batch, new, heads, -1)
    lse = torch.where(total == 0.0, -torch.inf, base + total.log()).view(batch, new, heads)
    no_length = ((cache.lengths < new) | (cache.lengths > capacity))[:, None, None]
    out, lse = out.masked_fill(no_length[..., None], torch.nan), lse.masked_fill(no_length, torch.nan)
    return out.to(q.dtype), lse.transpose(1, 2).contiguous()


def _share(num: int, part: int, parts: int) -> slice:
    """Which of `num` heads follow list `part`: several, or one that several lists share."""
    first = num * part // parts
    return slice(first, max(num * (part + 1) // parts, first + 1))


def _tokens(pieces: list[slice | Tensor], device: torch.device) -> Tensor:
    runs = (x if isinstance(x, Tensor) else torch.arange(x.start, x.stop, device=device) for x in pieces)
    return torch.cat([*runs, torch.empty(0, dtype=torch.int64, device=device)])


def _pieces_seen(rows: CacheRows, which: int, at: Place, cache: Cache, hidden: Tensor | None) -> list[slice | Tensor]:
    """The keys that a query sees by list `which`, each once, in pieces of the cache."""
    ranges = rows.ranges(which, at.position, at.length)
    token = _tokens_of_row(rows, which, at, ranges) if len(rows.work) else None
    if hidden is None:
        runs = [piece for first, stop in ranges for piece in cache.runs(first, stop)]
        return runs if token is None else [*runs, *cache.pieces(token)]
    seen = _tokens([*(slice(*run) for run in ranges), *([] if token is None else [token])], hidden.device)
    return cache.pieces(seen[~hidden[seen]])


def _tokens_of_row(rows: CacheRows, which: int, at: Place, ranges: list[tuple[int, int]]) -> Tensor:
    """The keys of the query's row of blocks that are in none of these ranges, ascending."""
    ahead, start, split, stop = rows.row(at.number, which, at.position)
    token = rows.indices[start:stop, None].long() * rows.block
    token = token + torch.arange(rows.block, device=token.device)
    seen = token < at.length
    for first, behind in ranges:
        seen &= (token < first) | (token >= behind)
    if split < stop:
        query, nothing = torch.tensor(ahead + at.position, device=HOST), rows.rules.new_empty(2, 0)
        partial, allowed = token[split - start :], torch.zeros_like(seen[split - start :])
        rule = rows.rules[rows.rule_ids[split:stop]] if len(rows.rule_ids) else rows.rules[:1]
        for interval in rule.unbind(1):
            first_key, last_key = key_bounds(interval, query, at.length, at.length, nothing)
            allowed |= (partial >= first_key[:, None]) & (partial <= last_key[:, None])
        seen[split - start :] &= allowed
    return token[seen].sort().values
