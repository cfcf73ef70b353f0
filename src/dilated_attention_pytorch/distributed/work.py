"""What there is to do (`Work`), and what a rank needs of another for it: layouts (`Part`) and keys (`Items`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ..layout import BlockLayout
from ..layout.row_runs import RowRuns
from ..patterns import Branches, Pattern
from .pieces import pieces_of
from .shard import Placement


@dataclass(frozen=True, kw_only=True)
class Work:
    """What attention over the whole sequence is, as the ranks agree on it.

    Attributes:
        what: its layout, pattern or branches; `is_causal` is for branches alone, the others know.
        placements: who holds which queries and which keys.
        blocks, num_residues: of the layout; shards are whole blocks of all residue classes.
        heads, heads_kv: of queries and keys.
    """

    what: BlockLayout | Pattern | Branches
    is_causal: bool
    placements: tuple[Placement, Placement]
    blocks: tuple[int, int]
    num_residues: int
    heads: int
    heads_kv: int
    device: torch.device

    @property
    def unit(self) -> int:
        """Keys that are stored together: a block of every class."""
        return self.blocks[1] * self.num_residues

    @property
    def lengths(self) -> tuple[int, int]:
        return self.placements[0].seq, self.placements[1].seq

    @cached_property
    def row_runs(self) -> RowRuns | None:
        """All rows of a pattern of token rules; None for anything else."""
        return RowRuns.of(self.what, self.lengths, self.blocks) if isinstance(self.what, Pattern) else None

    @property
    def is_closed(self) -> bool:
        """Whether every rank can say what any other needs."""
        return isinstance(self.what, Branches) or self.row_runs is not None

    @property
    def is_shared(self) -> bool:
        """Whether all heads need the same keys."""
        if isinstance(self.what, BlockLayout):
            return (self.what.num_heads or 1) == 1
        if isinstance(self.what, Branches):
            return len({self.what.of_head(head, self.heads) for head in range(self.heads)}) == 1
        return self.row_runs is not None or len(getattr(self.what, "patterns", ())) <= 1

    @cached_property
    def pieces(self) -> Tensor:
        """What all ranks need of each other, of a pattern of token rules."""
        assert self.row_runs is not None
        return pieces_of(self.row_runs, *self.placements)


@dataclass(frozen=True, eq=False, kw_only=True)
class Part:
    """Some of a rank's queries against some keys of one rank.

    Attributes:
        layout: over these queries and keys alone.
        queries: the rank's own tokens that the layout speaks of.
        keys: and those of what is stored of the other rank's.
        places: where both stand in the whole, for dropout and what a bias adds.
    """

    layout: BlockLayout
    queries: slice
    keys: slice
    places: Tensor


@dataclass(frozen=True, eq=False)
class Items:
    """Keys that travel: tokens, for all heads or each of one head, as they lie in a tensor (batch, tokens, heads, D).

    Attributes:
        tokens: int64 [items], or runs of tokens.
        heads: int64 [items]; None where all heads travel.
    """

    tokens: Tensor | tuple[slice, ...]
    heads: Tensor | None = None

    def __len__(self) -> int:
        if isinstance(self.tokens, tuple):
            return sum(run.stop - run.start for run in self.tokens)
        return len(self.tokens)

    @cached_property
    def every(self) -> Tensor | tuple[slice, ...]:
        """The tokens without repetition, for what has no heads."""
        return self.tokens if self.heads is None else torch.unique(self.tokens)

    def of(self, x: Tensor) -> Tensor:
        """A contiguous copy of the items of a tensor (batch, tokens, heads, D), or of one without heads to choose from,
        (batch, tokens) or (batch, tokens, any)."""
        chosen = self.every if x.ndim < 4 else self.tokens
        if isinstance(chosen, tuple):
            return torch.cat([x[:, run] for run in chosen], dim=1)
        if x.ndim < 4 or self.heads is None:
            return x.index_select(1, chosen)
        return x[:, chosen, self.heads].contiguous()

    def shape_of(self, x: Tensor) -> tuple[int, ...]:
        if x.ndim < 4:
            return x.shape[0], len(self) if isinstance(self.every, tuple) else len(self.every), *x.shape[2:]
        return x.shape[0], len(self), *(x.shape[2:] if self.heads is None else x.shape[3:])

    def put(self, x: Tensor, given: Tensor) -> None:
        """Make these the items of a tensor."""
        for place, part in self._parts(x, given):
            x[place] = part

    def add(self, x: Tensor, given: Tensor) -> None:
        """Add these to the items of such a tensor."""
        for place, part in self._parts(x, given):
            x[place] += part.to(x.dtype)

    def is_all_of(self, tokens: int) -> bool:
        """Whether these are the first so many tokens of all heads, in order."""
        return self.heads is None and self.tokens == (slice(0, tokens),)

    def tensors(self) -> list[Tensor]:
        return [x for x in (self.tokens, self.heads) if isinstance(x, Tensor)]

    def _parts(self, x: Tensor, given: Tensor) -> Iterator[tuple[tuple[slice | Tensor, ...], Tensor]]:
        """Where in a tensor which of the given items belong."""
        chosen = self.every if x.ndim < 4 else self.tokens
        if not isinstance(chosen, tuple):
            heads = () if x.ndim < 4 or self.heads is None else (self.heads,)
            yield (slice(None), chosen, *heads), given
            return
        lengths = [run.stop - run.start for run in chosen]
        for run, part in zip(chosen, given.split(lengths, dim=1), strict=True):
            yield (slice(None), run), part


NOTHING = Items(())


@dataclass(eq=False)
class Needs:
    """What a rank needs of one rank.

    Attributes:
        parts: what it computes with that.
        stored_tokens: how many tokens of the other are stored, one after the other.
        received: where what comes lies among these.
        codes: what the other is asked for, where it cannot know: key blocks, or key block · heads_kv + key head.
    """

    parts: list[Part] = field(default_factory=list)
    stored_tokens: int = 0
    received: Items = NOTHING
    codes: Tensor | None = None


def by_owner(key_block: Tensor, work: Work) -> Iterator[tuple[int, Tensor]]:
    """Each rank that holds some of these key blocks (of one class), and which of them, in their order."""
    place = work.placements[1]
    owners, order = place.owner(key_block.long() * work.blocks[1] // place.block_size).sort(stable=True)
    sources, counts = torch.unique_consecutive(owners, return_counts=True)
    yield from zip(sources.tolist(), order.split(counts.tolist()), strict=True)
