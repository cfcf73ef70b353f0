"""The attention weights of a block-sparse call, stored by active block and never as the dense matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..backends.base import aligned_queries, compute_dtype
from ..backends.bias import bias_of_pairs
from ..layout import BlockLayout
from ..options import CallOptions


class BlockSparseWeights(Mapping[str, Any]):
    """The weights as a mapping, with the keys of the design documents.

    Keys:
        block_indices: list of (query block, key block), every block that is active for some sample or head.
        block_values: list of tensors (batch, heads, block_q, block_k); rows and columns beyond the sequence, and
            blocks that are not active for a head, are 0.
        shape: (batch, heads, seq_q, seq_k) of the dense matrix.
        block_size: tokens a block, or (block_q, block_k).
    """

    def __init__(
        self, indices: list[tuple[int, int]], values: Tensor, shape: tuple[int, int, int, int], layout: BlockLayout
    ) -> None:
        self._values = values
        square = layout.block_q == layout.block_k
        self._items = {
            "block_indices": indices,
            "block_values": list(values.unbind(0)),
            "shape": shape,
            "block_size": layout.block_q if square else layout.blocks,
        }

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    # Like tensors, two of these are equal only if they are one.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"BlockSparseWeights({len(self['block_indices'])} blocks of {self['shape']})"

    def to_dense(self) -> Tensor:
        """The dense matrix (batch, heads, seq_q, seq_k): quadratic memory, for small sequences."""
        batch, heads, seq_q, seq_k = self["shape"]
        _, _, _, block_q, block_k = self._values.shape
        num_q, num_k = -(-seq_q // block_q), -(-seq_k // block_k)
        dense = self._values.new_zeros(num_q, num_k, batch, heads, block_q, block_k)
        if self["block_indices"]:
            query_block, key_block = torch.tensor(self["block_indices"], device=dense.device).unbind(1)
            dense = dense.index_put((query_block, key_block), self._values)
        dense = dense.permute(2, 3, 0, 4, 1, 5).reshape(batch, heads, num_q * block_q, num_k * block_k)
        return dense[:, :, :seq_q, :seq_k]

    def plot(self, path: str | None = None, *, sample: int = 0, head: int = 0) -> Any:
        """Draw the weights of one head (needs matplotlib); saved to `path` if one is given. Returns the figure."""
        from ..viz import plot_weights

        return plot_weights(self, path, sample=sample, head=head)


def attention_weights(
    q: Tensor, k: Tensor, lse: Tensor, layout: BlockLayout, options: CallOptions
) -> BlockSparseWeights:
    """exp(scores − lse) of every active block: the weights before dropout, in the compute dtype, differentiable.

    A pair of dilated attention has its weight as often as it counts. The layout's blocks are of neighbouring tokens.
    """
    batch, seq_q, heads, _ = q.shape
    which, query_block, key_block, _ = layout.entries()
    keys, inverse = torch.unique(query_block.long() * layout.num_k_blocks + key_block, return_inverse=True)
    rows, columns = keys // layout.num_k_blocks, keys % layout.num_k_blocks
    dtype = compute_dtype(q.dtype)
    queries = _blocks(q.to(dtype) * options.scale, layout.block_q)[rows]
    keys_ = _blocks(k.to(dtype).repeat_interleave(heads // k.shape[2], dim=2), layout.block_k)[columns]
    totals = _blocks(lse.transpose(1, 2)[..., None], layout.block_q)[rows]
    scores = queries @ keys_.mT
    query = rows[:, None] * layout.block_q + torch.arange(layout.block_q, device=q.device)
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.bias is not None:
        key = columns[:, None] * layout.block_k + torch.arange(layout.block_k, device=q.device)
        bias = bias_of_pairs(options.bias, query[:, :, None], key[:, None], seq_q, layout.seq_k)
        scores = scores + bias.permute(2, 0, 1, 3, 4)
    empty = totals == -torch.inf
    cells = layout.cells()
    times = torch.zeros(len(rows), layout.num_lists, *layout.blocks, dtype=cells.dtype, device=q.device)
    times[inverse, which] = cells
    times = times.view(len(rows), layout.batch_size or 1, layout.num_heads or 1, *layout.blocks)
    times = times.repeat_interleave(heads // times.shape[2], dim=2)
    mask = (times > 0) & (query < seq_q)[:, None, None, :, None] & ~empty
    if options.key_padding_mask is not None:
        hidden = _blocks(options.key_padding_mask[:, :, None, None], layout.block_k)[columns]
        mask = mask & ~hidden.mT
    if options.document_ids is not None:
        ids = options.document_ids[:, :, None, None]
        query_ids = _blocks(aligned_queries(ids, seq_q), layout.block_q)[rows]
        mask = mask & (query_ids == _blocks(ids, layout.block_k)[columns].mT)
    # Hidden before exp, not after: an overflow there would make NaN of its gradient.
    weights = torch.exp((scores - totals.masked_fill(empty, 0.0)).masked_fill(~mask, -torch.inf))
    weights = weights * times if layout.dilated else weights
    indices = list(zip(rows.tolist(), columns.tolist(), strict=True))
    return BlockSparseWeights(indices, weights, (batch, heads, seq_q, k.shape[1]), layout)


def _blocks(x: Tensor, block: int) -> Tensor:
    """(batch, seq, heads, D) as [num_blocks, batch, heads, block, D], zeros behind the end."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % block))
    return padded.unflatten(1, (-1, block)).permute(1, 0, 3, 2, 4)
