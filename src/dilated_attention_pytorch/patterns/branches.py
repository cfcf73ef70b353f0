"""LongNet's branches: who attends to whom in dilated attention, and how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .base import Value, shown
from .blocks import DILATIONS_FIRST, ceil_div, check_branches

HEAD_OFFSETS = ("interleaved", "grouped")


@dataclass(frozen=True)
class Branches(Value):
    """Branches (segment length w, dilation r): in each segment of w tokens a head keeps every r-th token.

    Kept tokens of a segment attend to each other; a key that several branches hold counts once for each. This is not a
    pattern (a pattern allows a pair or does not) but what `dilated_attention` computes over.

    Args:
        segment_lengths, dilation_rates: w and r of each branch, positive integers with r ≤ w. A head keeps every r-th
            token of a branch; the smallest r must be at most twice the number of heads, so that together they keep at
            least half of all tokens. The rows of a token that no head keeps in any branch are 0.
        head_offsets: which token of a segment a head keeps first: "interleaved", the paper's head mod r, or "grouped",
            torchscale's head // ceil(heads / r).
    """

    segment_lengths: Sequence[int]
    dilation_rates: Sequence[int]
    head_offsets: str = "interleaved"

    def __post_init__(self) -> None:
        check_branches(self.segment_lengths, self.dilation_rates)
        object.__setattr__(self, "segment_lengths", tuple(self.segment_lengths))
        object.__setattr__(self, "dilation_rates", tuple(self.dilation_rates))
        check_head_offsets(self.head_offsets)
        super().__post_init__()

    def __len__(self) -> int:
        return len(self.segment_lengths)

    def of_head(self, head: int, num_heads: int) -> tuple[tuple[int, int, int], ...]:
        """(segment length, dilation, offset) of each branch for one of `num_heads` query heads."""
        if self.head_offsets == "interleaved":
            offsets = [head % r for r in self.dilation_rates]
        else:
            offsets = [head // ceil_div(num_heads, r) for r in self.dilation_rates]
        return tuple(zip(self.segment_lengths, self.dilation_rates, offsets, strict=True))

    def alone(self) -> list[Branches]:
        """Each branch by itself."""
        return [
            Branches((w,), (r,), self.head_offsets)
            for w, r in zip(self.segment_lengths, self.dilation_rates, strict=True)
        ]

    def times(self, query: int, key: int, head: int, num_heads: int) -> int:
        """How often the query at position `query` counts the key at position `key`."""
        return sum(
            query // w == key // w and query % w % r == key % w % r == offset
            for w, r, offset in self.of_head(head, num_heads)
        )


def check_head_offsets(head_offsets: object) -> None:
    if not isinstance(head_offsets, str) or head_offsets not in HEAD_OFFSETS:
        raise ValueError(f"head_offsets must be one of {list(HEAD_OFFSETS)}, got {shown(head_offsets)}")


def check_heads(dilation_rates: Sequence[int], num_heads: int) -> None:
    """Refuse branches that leave most tokens to none of so many heads."""
    # Of the first r tokens of a segment min(heads, r) are some head's first; in groups, at least r / 2 of them.
    if min(dilation_rates) > 2 * num_heads:
        raise ValueError(
            f"dilation_rates must have one of at most {2 * num_heads}, twice the number of heads, or most tokens are "
            f"kept by no head and come out as 0, got {list(dilation_rates)}. {DILATIONS_FIRST}"
        )
