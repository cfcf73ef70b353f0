"""Ranges: token rules by which a query sees one run of keys that follows from its position.

`range_at(position)` is the definition: the first key that a query sees, and the key behind the last. Neither ever moves
back from one query to the next, which is what layouts are built by. Ranges of any form, and those of a batch, are data
of a layout: `BlockLayout.from_key_ranges`.
"""

from __future__ import annotations

import abc
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from .base import Pattern, check_int, check_sequence, shown
from .tokens import UNBOUNDED, Causal, GlobalTokens, SlidingWindow

if TYPE_CHECKING:
    from torch import Tensor

# What no query sees: nothing is before key 0.
NO_KEYS = (0, 0)


class RangePattern(Pattern, abc.ABC):
    """A token rule whose keys are one range; see the module's text."""

    @abc.abstractmethod
    def range_at(self, position: int) -> tuple[int, int]:
        """The first key that the query at a position sees, and the key behind the last."""

    @property
    def total(self) -> int | None:
        """Tokens of the sequence that it is written for; None if it is for any."""
        return None

    @property
    def may_skip(self) -> bool:
        """Whether there may be keys between those of a query and those of the next that neither sees."""
        return False

    def allows(self, query: int, key: int, seq_q: int, seq_k: int) -> bool:
        start, stop = self.range_at(query + seq_k - seq_q)
        return start <= key < stop


@dataclass(frozen=True)
class Documents(RangePattern):
    """Packed sequences: documents of these `lengths`, one after the other; no query sees another document."""

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", _lengths("lengths", self.lengths, "document"))
        super().__post_init__()

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor) -> Documents:
        """From cumulative lengths, int32 or int64 [documents + 1]: 0, the end of the first document, of the second, …

        Two that are equal, as padding of such a tensor is, are no document.
        """
        ends = _row_of_ints("cu_seqlens", cu_seqlens).tolist()
        if len(ends) < 2 or ends[0] != 0 or any(b < a for a, b in pairwise(ends)) or ends[-1] == 0:
            raise ValueError(
                f"cu_seqlens must begin with 0, not descend and end with the number of tokens, got {ends[:20]}"
            )
        return cls(tuple(b - a for a, b in pairwise(ends) if b > a))

    @classmethod
    def from_ids(cls, ids: Tensor) -> Documents:
        """From the document of each token, integers [tokens]: a document ends where the next number is another."""
        ids = _row_of_ints("ids", ids)
        if not len(ids):
            raise ValueError("ids must have a token at least, got a tensor of shape [0]")
        starts = [0, *((ids[1:] != ids[:-1]).nonzero().flatten() + 1).tolist()]
        if len(ids[starts].unique()) < len(starts):
            raise ValueError(
                f"ids must have every number in one run of tokens, got {ids[starts][:20].tolist()} in turn"
            )
        return cls(tuple(b - a for a, b in pairwise([*starts, len(ids)])))

    @property
    def starts(self) -> tuple[int, ...]:
        """The first token of each document, and the end of the last."""
        return (0, *accumulate(self.lengths))

    @property
    def total(self) -> int:
        return sum(self.lengths)

    def range_at(self, position: int) -> tuple[int, int]:
        starts = self.starts
        number = bisect_right(starts, position)
        return (starts[number - 1], starts[number]) if 0 < number < len(starts) else NO_KEYS


@dataclass(frozen=True)
class Chunks(RangePattern):
    """Chunks of `size` tokens: a query sees all of its own chunk and of the `left` chunks before it, None of them for
    all. With `& Causal()` no later token, as in Llama 4; alone with `left=None` a block-causal mask."""

    size: int
    left: int | None = 0

    def __post_init__(self) -> None:
        check_int("size", self.size, least=1)
        if self.left is not None:
            check_int("left", self.left, least=0)
        super().__post_init__()

    def range_at(self, position: int) -> tuple[int, int]:
        if position < 0:
            return NO_KEYS
        chunk = position // self.size
        return 0 if self.left is None else max(0, chunk - self.left) * self.size, (chunk + 1) * self.size


@dataclass(frozen=True)
class KeyRanges(RangePattern):
    """The queries of stretch i, of `lengths[i]` tokens, see the keys from `starts[i]` to before `stops[i]`.

    Without `lengths` every token is a stretch. Neither starts nor stops may descend, and the lengths must add up to
    seq_k. The value holds all of them: for ranges of every token of a long sequence, of any form, or of a batch, use
    `BlockLayout.from_key_ranges`.
    """

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("starts", "stops"):
            check_sequence(name, getattr(self, name), "ints")
            values = tuple(getattr(self, name))
            object.__setattr__(self, name, values)
            for value in values:
                check_int(f"every number of {name}", value, least=0)
            if any(b < a for a, b in pairwise(values)):
                raise ValueError(f"{name} must not descend (BlockLayout.from_key_ranges takes any), got {values[:20]}")
        lengths = self.lengths if self.lengths != () else (1,) * len(self.starts)
        object.__setattr__(self, "lengths", _lengths("lengths", lengths, "stretch"))
        if not len(self.starts) == len(self.stops) == len(self.lengths):
            sizes = len(self.starts), len(self.stops), len(self.lengths)
            raise ValueError(f"starts, stops and lengths must have the same length, got {', '.join(map(str, sizes))}")
        super().__post_init__()

    @property
    def total(self) -> int:
        return sum(self.lengths)

    @property
    def may_skip(self) -> bool:
        return any(start > stop for start, stop in zip(self.starts, (0, *self.stops), strict=False))

    def range_at(self, position: int) -> tuple[int, int]:
        number = bisect_right((0, *accumulate(self.lengths)), position) - 1
        return (self.starts[number], self.stops[number]) if 0 <= number < len(self.starts) else NO_KEYS


@dataclass(frozen=True)
class DataDocuments(RangePattern):
    """Documents whose lengths stand in a tensor: the same pattern for every packing (`BlockLayout.from_documents`)."""

    def range_at(self, position: int) -> tuple[int, int]:
        raise TypeError("these documents are data: ask the layout that BlockLayout.from_documents has made of them")


@dataclass(frozen=True)
class KeysBetween(RangePattern):
    """Every query sees the keys from `start` to before `stop`."""

    start: int
    stop: int

    def range_at(self, position: int) -> tuple[int, int]:
        return self.start, self.stop


@dataclass(frozen=True)
class QueriesBetween(RangePattern):
    """The queries from position `start` to before `stop` see every key."""

    start: int
    stop: int

    def range_at(self, position: int) -> tuple[int, int]:
        return (0 if position < self.stop else UNBOUNDED), (UNBOUNDED if position >= self.start else 0)


def PrefixLM(prefix: int | Sequence[int], documents: Sequence[int] | None = None) -> Pattern:  # noqa: N802
    """Causal, but the first `prefix` tokens see each other and are seen by all.

    Args:
        prefix: how many; with `documents` one number for each of them, or one for all.
        documents: lengths of packed documents, each with a prefix of its own.
    """
    if documents is None:
        check_int("prefix", prefix, least=0)
        return Causal() | GlobalTokens(prefix) if prefix else Causal()  # type: ignore[arg-type]
    packing = Documents(documents)  # type: ignore[arg-type]
    return packing & Causal() | _first_of(packing, "prefix", prefix)


def DocumentSinks(sinks: int | Sequence[int], documents: Sequence[int]) -> Pattern:  # noqa: N802
    """In packed `documents` of these lengths, every query sees the first `sinks` keys of its own document: one number
    for each of them, or one for all."""
    return _first_of(Documents(documents), "sinks", sinks)  # type: ignore[arg-type]


def BlockDiffusion(length: int, block: int) -> Pattern:  # noqa: N802
    """The training mask of block diffusion (BD3-LM): `length` noised tokens, then as many clean ones, in blocks.

    A noised token sees the noised ones of its own block and the clean ones of the blocks before it; a clean token sees
    the clean ones of its own block and of those before it.
    """
    check_int("length", length, least=1)
    check_int("block", block, least=1)
    edges = [*range(0, length, block), length]
    sizes = tuple(b - a for a, b in pairwise(edges)) * 2
    clean = [length + stop for stop in edges[1:]]
    own = KeyRanges((*edges[:-1], *[length] * len(clean)), (*edges[1:], *clean), sizes)
    before = [length + start for start in edges[:-1]]
    nothing = [2 * length] * len(clean)
    return own | KeyRanges((*[length] * len(before), *nothing), (*before, *nothing), sizes)


def VerticalSlash(columns: Sequence[int], diagonals: Sequence[int]) -> Pattern:  # noqa: N802
    """Causal: every query sees the keys at `columns` and those at the distances `diagonals` before it (0 is itself).

    Neighbouring columns, and neighbouring diagonals, are one token rule; a pattern may unite six.
    """
    for name, numbers in (("columns", columns), ("diagonals", diagonals)):
        check_sequence(name, numbers, "ints")
        for number in numbers:
            check_int(f"every number of {name}", number, least=0)
    slashes: list[Pattern] = [SlidingWindow(stop - 1, -start) for start, stop in runs_of(diagonals)]
    if columns:
        slashes.append(GlobalTokens(at=tuple(columns)) & Causal())
    if not slashes:
        raise ValueError("columns and diagonals must not both be empty, got () and ()")
    pattern = slashes[0]
    for slash in slashes[1:]:
        pattern = pattern | slash
    return pattern


def runs_of(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbouring numbers together: the first of each run, and the one behind its last."""
    ordered = sorted(set(numbers))
    edges = [i for i, (a, b) in enumerate(pairwise(ordered), 1) if b != a + 1]
    return [(ordered[a], ordered[b - 1] + 1) for a, b in pairwise([0, *edges, len(ordered)]) if b > a]


def _first_of(packing: Documents, name: str, counts: int | Sequence[int]) -> Pattern:
    """The first tokens of each document are seen by all queries of it."""
    if isinstance(counts, int):
        counts = (counts,) * len(packing.lengths)
    check_sequence(name, counts, "ints, or an int")
    if len(counts) != len(packing.lengths):
        raise ValueError(f"{name} must have a number for each of {len(packing.lengths)} documents, got {len(counts)}")
    starts = packing.starts[:-1]
    for count in counts:
        check_int(f"every number of {name}", count, least=0)
    stops = [start + min(n, length) for start, n, length in zip(starts, counts, packing.lengths, strict=True)]
    return KeyRanges(starts, tuple(stops), packing.lengths)


def _row_of_ints(name: str, x: Tensor) -> Tensor:
    """On the host."""
    if str(getattr(x, "dtype", None)) not in ("torch.int32", "torch.int64"):
        raise TypeError(f"{name} must be a tensor of int32 or int64, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got {list(x.shape)}")
    return x.cpu()


def _lengths(name: str, lengths: Sequence[int], of: str) -> tuple[int, ...]:
    check_sequence(name, lengths, "ints")
    if not lengths:
        raise ValueError(f"{name} must name at least one {of}, got {shown(lengths)}")
    for length in lengths:
        check_int(f"every {of} length", length, least=1)
    return tuple(lengths)
