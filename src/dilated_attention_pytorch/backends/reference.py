"""The definition: dense masked softmax, in plain PyTorch, on any device, differentiated by autograd.

In float64 this is the oracle that every other backend is compared with. It holds the whole matrix of scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import BlockLayout
from ..options import CallOptions
from .base import Request, aligned_queries, compute_dtype
from .bias import bias_of_pairs
from .dropout import keep_mask
from .sizes import SizeRequest, Workspace

name = "reference"


def can_run(request: Request) -> tuple[bool, str]:
    return True, "runs everything, in memory quadratic in the sequence; chosen by name only"


def counted_pairs(layout: BlockLayout, heads: int, options: CallOptions) -> Tensor:
    """How often each pair counts, broadcastable to [batch, heads, seq_q, seq_k]: bool, or int for dilated attention."""
    allowed = _held_pairs(layout) if layout.dilated else layout.to_dense()
    if layout.num_heads is not None:
        allowed = allowed.repeat_interleave(heads // layout.num_heads, dim=-3)
    elif layout.batch_size is not None:
        allowed = allowed[:, None]
    allowed = allowed.reshape((1,) * (4 - allowed.ndim) + allowed.shape)
    if options.key_padding_mask is not None:
        allowed = allowed * ~options.key_padding_mask[:, None, None, :]
    if options.document_ids is not None:
        queries, keys = aligned_queries(options.document_ids, layout.seq_q), options.document_ids[:, : layout.seq_k]
        allowed = allowed * (queries[:, None, :, None] == keys[:, None, None, :])
    return allowed


def _held_pairs(layout: BlockLayout) -> Tensor:
    """How many branches hold a pair, [lists, seq_q, seq_k], without a look at the lists of blocks."""
    key = torch.arange(layout.seq_k, device=layout.device)
    position = torch.arange(layout.seq_q, device=layout.device)[:, None] + (layout.seq_k - layout.seq_q)
    held = torch.zeros((), dtype=torch.int32, device=layout.device)
    for segment, dilation, offset, query_by, key_by in (b.T[..., None, None] for b in layout.branches.unbind(1)):
        query_at, key_at = position + query_by, key + key_by
        kept_query, kept_key = (x % segment % dilation == offset for x in (query_at, key_at))
        held = held + (kept_query & kept_key & (query_at // segment == key_at // segment) & (query_at >= 0))
    right = layout.rules[0, 0, 1]  # 0 where the layout is causal
    held = held * (key <= position + right)
    return held if layout.num_heads is not None else held[0]


def attention(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, options: CallOptions) -> tuple[Tensor, Tensor]:
    """One softmax over all allowed keys of a row, each as often as it counts. An empty row gives 0 and lse −inf."""
    batch, _seq_q, heads, _ = q.shape
    dtype = compute_dtype(q.dtype)
    k, v = (x.to(dtype).repeat_interleave(heads // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(dtype) * options.scale, k)
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.bias is not None:
        query, key = (torch.arange(n, device=q.device) for n in scores.shape[-2:])
        scores = scores + bias_of_pairs(options.bias, query[:, None], key[None], layout.seq_q, layout.seq_k)
    counts = counted_pairs(layout, heads, options)
    scores = scores.masked_fill(counts == 0, -torch.inf)
    top = scores.detach().amax(dim=-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp(scores - top) * counts
    total = weights.sum(dim=-1, keepdim=True)
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    lse = (top + total.log()).masked_fill(empty, -torch.inf).squeeze(-1)
    weights = weights / total
    if options.seed is not None:
        stream = torch.arange(batch * heads, device=q.device).view(batch, heads, 1, 1)
        query, key = (torch.arange(n, device=q.device) for n in scores.shape[-2:])
        kept = keep_mask(options.seed, options.dropout_p, stream, query[:, None], key)
        weights = weights * kept / (1.0 - options.dropout_p)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).to(q.dtype), lse


def workspace(request: SizeRequest) -> Workspace:
    """The matrix of scores several times over, its mask, and q, k and v for all heads in the compute dtype."""
    shape = request.shape
    pairs = shape.batch * shape.heads * shape.seq_q * shape.seq_k
    mask = request.lists.num_lists * shape.seq_q * shape.seq_k
    of_heads = (shape.seq_q + shape.seq_k) * shape.head_dim + shape.seq_k * shape.width_v
    wide = shape.compute * shape.batch * shape.heads * of_heads
    forward = 3 * shape.compute * pairs + 2 * mask + wide
    return Workspace(forward, forward + 4 * shape.compute * pairs + wide)
