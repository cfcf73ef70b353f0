"""Block rules: written in blocks of `block_size` tokens; a block is allowed whole or not at all.

Each rule names the key blocks that a query block sees, `key_blocks(row, num_blocks)`, where `row` is the query block's
place among the key blocks (for equal lengths its own number) and `num_blocks` the number of key blocks.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

from .base import Pattern, check_flag, check_int, check_sequence, shown

BLOCK_SIZES = (16, 32, 64, 128, 256)
DILATIONS_FIRST = "Did you pass dilations first? Segment lengths come first"


def check_block_size(name: str, value: object) -> None:
    check_int(name, value, least=1)
    if value not in BLOCK_SIZES:
        raise ValueError(f"{name} must be one of {BLOCK_SIZES}, got {value}")


def check_ratio(name: str, value: object, of: str = "blocks kept") -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {shown(value)}")
    if not 0.0 < value <= 1.0:
        raise ValueError(f"{name} must be the share of {of}, in (0, 1], got {value}")


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class BlockPattern(Pattern):
    """Base of the block rules."""

    block_size: int

    @abc.abstractmethod
    def key_blocks(self, row: int, num_blocks: int) -> Iterable[int]:
        """The key blocks that query block `row` sees, each once."""

    @property
    def block_sizes(self) -> frozenset[int]:
        return frozenset((self.block_size,))

    @property
    def depends_on_length(self) -> bool:
        """Whether a row chooses other key blocks when keys are added behind all that it sees.

        One that does is no rule for sequences that grow: what its first tokens see is never settled.
        """
        return True

    def shift(self, seq_q: int, seq_k: int) -> int:
        """The place of query block 0 among the key blocks; the ends of both sequences are aligned, in whole blocks.

        A block of queries has one place. If seq_k − seq_q is not a multiple of the block size, some queries stand in
        the next block of keys already and are counted to the one before.
        """
        return (seq_k - seq_q) // self.block_size

    def allows(self, query: int, key: int, seq_q: int, seq_k: int) -> bool:
        row = query // self.block_size + self.shift(seq_q, seq_k)
        return key // self.block_size in self.key_blocks(row, ceil_div(seq_k, self.block_size))


@dataclass(frozen=True)
class LocalBlocks(BlockPattern):
    """Blocks within `window` tokens, every `stride`-th of them counted from the diagonal.

    Both ways: `|i − j| ≤ ceil(window / 2B)`. Causal looks back only: `0 ≤ i − j ≤ ceil(window / B)`.
    """

    window: int
    stride: int = 1
    block_size: int = 128
    causal: bool = False

    def __post_init__(self) -> None:
        check_int("window", self.window, least=0)
        check_int("stride", self.stride, least=1)
        check_block_size("block_size", self.block_size)
        check_flag("causal", self.causal)
        super().__post_init__()

    @property
    def depends_on_length(self) -> bool:
        return False

    @property
    def reach(self) -> tuple[int, int]:
        """How many strides back and forth."""
        span = self.block_size if self.causal else 2 * self.block_size
        steps = ceil_div(self.window, span) // self.stride
        return steps, 0 if self.causal else steps

    def key_blocks(self, row: int, num_blocks: int) -> Iterable[int]:
        back, forth = self.reach
        steps = (row + step * self.stride for step in range(-back, forth + 1))
        return [j for j in steps if 0 <= j < num_blocks]


def hierarchical(levels: Sequence[tuple[int, int]], *, block_size: int = 128, causal: bool = False) -> Pattern:
    """The union of levels (stride, window): within `window` tokens, every `stride`-th block."""
    return reduce(or_, (LocalBlocks(window, stride, block_size, causal) for stride, window in check_levels(levels)))


@dataclass(frozen=True)
class GlobalBlocks(BlockPattern):
    """Every query block sees the key blocks that hold the first `tokens` tokens."""

    tokens: int
    block_size: int = 128

    def __post_init__(self) -> None:
        check_int("tokens", self.tokens, least=1)
        check_block_size("block_size", self.block_size)
        super().__post_init__()

    @property
    def depends_on_length(self) -> bool:
        return False

    def key_blocks(self, row: int, num_blocks: int) -> Iterable[int]:
        return range(min(num_blocks, ceil_div(self.tokens, self.block_size)))


@dataclass(frozen=True)
class DilatedBlocks(BlockPattern):
    """Dilated segments at block level, within a budget of `max(1, round(sparsity_ratio · num_blocks))` blocks a row.

    A branch (segment_length, dilation) offers the blocks of the row's own segment at distances that are multiples of
    the dilation, nearest first (of two equally near, the earlier one). The diagonal comes first, then the branches
    in turn: each turn takes the next block of every branch, skips what was taken, and stops when the budget is spent.
    """

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    sparsity_ratio: float = 1.0
    block_size: int = 128
    causal: bool = False

    def __post_init__(self) -> None:
        check_branches(self.segment_lengths, self.dilation_rates)
        object.__setattr__(self, "segment_lengths", tuple(self.segment_lengths))
        object.__setattr__(self, "dilation_rates", tuple(self.dilation_rates))
        check_ratio("sparsity_ratio", self.sparsity_ratio)
        check_block_size("block_size", self.block_size)
        check_flag("causal", self.causal)
        super().__post_init__()

    @property
    def depends_on_length(self) -> bool:
        return self.sparsity_ratio < 1

    def budget(self, num_blocks: int) -> int:
        return max(1, round(self.sparsity_ratio * num_blocks))

    @property
    def branches(self) -> list[tuple[int, int]]:
        """(blocks a segment, dilation) of each branch."""
        return [
            (ceil_div(w, self.block_size), r) for w, r in zip(self.segment_lengths, self.dilation_rates, strict=True)
        ]

    def turns(self, num_blocks: int) -> int:
        """Each branch alone would spend the budget, or run dry, within so many turns."""
        longest = max(ceil_div(min(segment, num_blocks), dilation) for segment, dilation in self.branches)
        return min(self.budget(num_blocks), longest)

    def key_blocks(self, row: int, num_blocks: int) -> Iterable[int]:
        if row < 0:
            return ()
        taken: dict[int, None] = {}
        budget = self.budget(num_blocks)
        for turn in range(self.turns(num_blocks)):
            for segment, dilation in self.branches:
                start = row - row % segment
                back = (row - start) // dilation
                forth = 0 if self.causal else (min(start + segment, num_blocks) - 1 - row) // dilation
                both = min(back, forth)
                if turn <= 2 * both:
                    step = -((turn + 1) // 2) if turn % 2 else turn // 2
                else:
                    step = (turn - both) * (-1 if back > forth else 1)
                if turn <= back + forth and len(taken) < budget:
                    taken[row + step * dilation] = None
        return taken


@dataclass(frozen=True)
class Blocks(BlockPattern):
    """An explicit list of (query block, key block) pairs."""

    pairs: tuple[tuple[int, int], ...]
    block_size: int = 128

    def __post_init__(self) -> None:
        check_sequence("pairs", self.pairs, "(query block, key block)")
        for pair in self.pairs:
            check_sequence("every pair", pair, "two block numbers")
            if len(pair) != 2:
                raise ValueError(f"pairs must hold (query block, key block), got {pair!r}")
            for number in pair:
                check_int("every block number of pairs", number, least=0)
        object.__setattr__(self, "pairs", tuple(sorted({(i, j) for i, j in self.pairs})))
        check_block_size("block_size", self.block_size)
        super().__post_init__()

    @property
    def depends_on_length(self) -> bool:
        return False

    def shift(self, seq_q: int, seq_k: int) -> int:
        """The list is taken as it is, whatever the lengths."""
        return 0

    def key_blocks(self, row: int, num_blocks: int) -> Iterable[int]:
        return [j for i, j in self.pairs if i == row and j < num_blocks]


@dataclass(frozen=True)
class RandomBlocks(BlockPattern):
    """`blocks_per_row` random key blocks for every query block, spread evenly: one from each of as many equal parts.

    The choice depends on the seed, the row and the number of key blocks alone, so it is the same on every device.
    """

    blocks_per_row: int
    seed: int = 0
    block_size: int = 128

    def __post_init__(self) -> None:
        check_int("blocks_per_row", self.blocks_per_row, least=1)
        check_int("seed", self.seed, least=0)
        check_block_size("block_size", self.block_size)
        super().__post_init__()

    def key_blocks(self, row: int, num_blocks: int) -> Iterable[int]:
        count = min(self.blocks_per_row, num_blocks)
        for part in range(count):
            start, stop = part * num_blocks // count, (part + 1) * num_blocks // count
            yield start + mix32(mix32(mix32(self.seed) ^ (row & MASK32)) ^ part) % (stop - start)


MASK32 = 0xFFFFFFFF


def mix32(x):  # type: ignore[no-untyped-def]
    """A 32-bit integer hash that reads the same for Python ints and int64 tensors (no product leaves 63 bits)."""
    return fold32(stir32(fold32(x)))


def fold32(x):  # type: ignore[no-untyped-def]
    return x ^ (x >> 16)


def stir32(x):  # type: ignore[no-untyped-def]
    x = x * 0x045D9F3B
    x &= MASK32
    x ^= x >> 16
    x *= 0x045D9F3B
    x &= MASK32
    return x


def check_levels(levels: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    pairs = isinstance(levels, Sequence) and all(isinstance(pair, Sequence) and len(pair) == 2 for pair in levels)
    if not pairs or not levels:
        raise ValueError(f"levels must hold at least one (stride, window) pair and nothing else, got {levels!r}")
    return tuple((stride, window) for stride, window in levels)


def check_branches(segment_lengths: Sequence[int], dilation_rates: Sequence[int]) -> None:
    if not isinstance(segment_lengths, Sequence) or not isinstance(dilation_rates, Sequence):
        raise TypeError(
            "segment_lengths and dilation_rates must be sequences of ints, "
            f"got {shown(segment_lengths)}, {shown(dilation_rates)}"
        )
    if not segment_lengths or len(segment_lengths) != len(dilation_rates):
        raise ValueError(
            "segment_lengths and dilation_rates must have the same length, at least 1, "
            f"got {list(segment_lengths)} and {list(dilation_rates)}"
        )
    for length, rate in zip(segment_lengths, dilation_rates, strict=True):
        check_int("every segment length", length, least=1)
        check_int("every dilation rate", rate, least=1)
        if rate > length:
            raise ValueError(
                f"every dilation rate must be at most its segment length, got {rate} in a segment of {length}: "
                f"segment_lengths={list(segment_lengths)}, dilation_rates={list(dilation_rates)}. {DILATIONS_FIRST}"
            )
