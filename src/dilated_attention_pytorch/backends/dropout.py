"""Dropout that every backend, chunk order, device and world size draws alike.

Whether a weight is kept is a hash of the seed, the (sample, head) stream, the query and the key: nothing is stored
between forward and backward, and no order of work changes the draw.

A seed is int64 []. Where the tensors of a call are blocks of longer ones (`BlockLayout.take`), it is a table that also
says where each block stands in the whole: [seed, −1, log2 block_q, log2 block_k, query blocks, then for each query
block and each key block how many tokens later its tokens are numbered]. With 0 instead of −1 all queries, and all keys,
are as much later as the first. A plain seed padded with 5 zeros is the table of a call that is itself the whole.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..patterns.blocks import MASK32, mix32


def keep_mask(seed: Tensor, dropout_p: float, stream: Tensor | int, query: Tensor, key: Tensor) -> Tensor:
    """bool, broadcast over `stream`, `query` and `key` (int64): True where the weight stays."""
    if seed.ndim:
        query, key = in_whole(seed[1:], query, key)
        seed = seed[0]
    row = mix32(mix32(mix32(seed & MASK32) ^ stream) ^ query)
    return mix32(row ^ key) >= round(dropout_p * (MASK32 + 1))


def in_whole(places: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers that queries and keys of a part have in the whole, by all of a table but the seed."""
    within, shift_q, shift_k, keys_at = places[:4].unbind()
    later = places[4:]
    return query + later[(query >> shift_q) & within], key + later[keys_at + ((key >> shift_k) & within)]


def as_table(seed: Tensor) -> Tensor:
    """A seed in the form of a table, whichever it is."""
    return seed if seed.ndim else pad(seed[None], (0, 5))


def places_of_blocks(query_blocks: Tensor, key_blocks: Tensor, blocks: tuple[int, int]) -> Tensor:
    """All of the table but the seed, for a call whose blocks are these of the whole, ascending."""
    later = [
        (chosen - torch.arange(len(chosen), device=chosen.device)) * block
        for chosen, block in zip((query_blocks, key_blocks), blocks, strict=True)
    ]
    sizes = (-1, blocks[0].bit_length() - 1, blocks[1].bit_length() - 1, len(query_blocks))
    return torch.cat((query_blocks.new_tensor(sizes), *later))


def places_of_runs(first_query: int, first_key: int, device: torch.device) -> Tensor:
    """The same for neighbouring queries and neighbouring keys."""
    return torch.tensor([0, 0, 0, 1, first_query, first_key], device=device)


def seed_of_part(seed: Tensor, places: Tensor) -> Tensor:
    """The table for a part of a call."""
    return torch.cat((seed[None], places))
