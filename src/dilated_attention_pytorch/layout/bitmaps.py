"""Bitmaps: which single pairs a partial block allows, where no intervals of keys say it.

`BlockLayout.bitmaps` is int16 [bitmaps, block_q, block_k / 16]: bit i of word w in row r is the pair of query r and key
16 · w + i of the block. An interval of a rule whose `key_range` is −1 − b allows what its bounds *and* bitmap b allow
(`layout.rules`), so rules with bitmaps are moved, cut and made causal like all others. A bitmap is the same wherever
its block stands: equal ones are stored once, and any number of blocks, lists and samples name them.

Words of 16 keys fit every block size, and are the unit in which finer masks inside large blocks are written, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .lists import HOST

UNIT = 16  # keys of a word

NO_BITMAPS = torch.empty(0, 0, 0, dtype=torch.int16)


def packed(allowed: Tensor) -> Tensor:
    """int16 [blocks, block_q, block_k / 16] of bool [blocks, block_q, block_k]."""
    weight = torch.ones(UNIT, dtype=torch.int32, device=allowed.device) << torch.arange(
        UNIT, dtype=torch.int32, device=allowed.device
    )
    words = (allowed.unflatten(-1, (-1, UNIT)) * weight).sum(-1, dtype=torch.int32)
    return torch.where(words >= 1 << 15, words - (1 << 16), words).to(torch.int16)


def unpacked(words: Tensor) -> Tensor:
    """The inverse of `packed`."""
    lane = torch.arange(UNIT, dtype=torch.int16, device=words.device)
    return (words[..., None] >> lane).bitwise_and_(1).bool().flatten(-2)


def bits_of(bitmaps: Tensor, key_range: Tensor) -> Tensor:
    """bool [entries, block_q, block_k]: the bitmap that each entry's interval names, all True where it names none."""
    number = (-1 - key_range).clamp(min=0).long()
    return unpacked(bitmaps[number]) | (key_range >= 0)[:, None, None]


def bit_at(bitmaps: Tensor, key_range: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """The same for single pairs, by row and column of their block; all shapes broadcast."""
    number = (-1 - key_range).clamp(min=0).long()
    word = bitmaps[number, row.long(), column.long() // UNIT].int()
    return (key_range >= 0) | ((word >> (column % UNIT).int()) & 1).bool()


class UniqueBitmaps:
    """A growing table of different bitmaps.

    They are found by a hash and compared word by word, so that only equal ones are ever taken for one.
    """

    def __init__(self, block_q: int, block_k: int, device: torch.device) -> None:
        self._words = torch.empty(0, block_q, block_k // UNIT, dtype=torch.int16, device=device)
        self._count = 0
        self._hashes = torch.empty(0, dtype=torch.int64, device=device)  # ascending
        self._numbers = torch.empty(0, dtype=torch.int64, device=device)  # of the bitmaps with these hashes

    def __len__(self) -> int:
        return self._count

    def table(self) -> Tensor:
        """int16 [bitmaps, block_q, block_k / 16]."""
        return self._words[: self._count].clone()

    def numbers_of(self, words: Tensor) -> Tensor:
        """int64 [blocks]: the number of each of these bitmaps, which are added unless they are known."""
        if not len(words):
            return self._numbers.new_empty(0)
        hashes, same = torch.unique(_hashed(words), return_inverse=True)
        place = torch.arange(len(words), device=words.device)
        first = place.new_full(hashes.shape, len(words)).scatter_reduce_(0, same, place, "amin")
        number = torch.full_like(hashes, -1)
        if len(self._hashes):
            at = torch.searchsorted(self._hashes, hashes).clamp(max=len(self._hashes) - 1)
            number = torch.where(self._hashes[at] == hashes, self._numbers[at], number)
        new = number < 0
        number[new] = self._append(words[first[new]])
        self._hashes, order = torch.cat((self._hashes, hashes[new])).sort()
        self._numbers = torch.cat((self._numbers, number[new]))[order]
        number = number[same]
        other = (self._words[number] != words).flatten(1).any(1)  # of one hash, and not the same
        if other.any():
            number[other] = self._append(words[other])
        return number

    def _append(self, words: Tensor) -> Tensor:
        start, self._count = self._count, self._count + len(words)
        if self._count > len(self._words):
            room = self._words.new_empty(max(self._count, 2 * len(self._words)), *self._words.shape[1:])
            room[:start] = self._words[:start]
            self._words = room
        self._words[start : self._count] = words
        return torch.arange(start, self._count, device=words.device)


def _hashed(words: Tensor) -> Tensor:
    """int64 [blocks]."""
    whole = words.flatten(1).contiguous().view(torch.int64)
    generator = torch.Generator().manual_seed(0)
    shape = (2, whole.shape[1])
    salt, weight = torch.randint(-(2**63), 2**63 - 1, shape, generator=generator, device=HOST).to(words.device)
    mixed = whole ^ salt
    mixed = (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * 0x2545F4914F6CDD1D
    mixed = mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)
    return (mixed * (weight | 1)).sum(1)
