"""`NamedLayout`: what stands for the layout of a pattern under a trace, a mode or a transform.

A graph holds the text of the pattern, and an operator finds the layout, or builds it, when it runs. So one graph serves
all lengths and all equal patterns, can be exported, and no tensor of a layout is ever traced.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..backends.reference import counted_pairs
from ..caches import cached
from ..layout import BlockLayout, layout_for, layout_for_branches
from ..layout.branches import kind_of_branches
from ..layout.eager import is_plain_eager, value_cache
from ..layout.terms import kind_of
from ..options import CallOptions
from ..patterns import Branches, Causal, Pattern
from ..patterns.base import constant_in_graphs, value_of
from ..patterns.opening import opened, window_of
from .checks import DEFAULT_BLOCK_SIZE, HEADS_FIRST, check_lists


class Opened(NamedTuple):
    """A pattern or a selector, and how far a schedule has opened it: float64 [], on the CPU.

    As a tensor, for in a graph of torch.compile a number would be a constant, and each step of the schedule a graph.
    """

    what: Any
    opening: Tensor


def layout_of(
    pattern: Pattern | Branches,
    is_causal: bool,
    seq_q: int,
    seq_k: int,
    heads: int,
    device: torch.device,
    opening: Tensor | None = None,
) -> BlockLayout:
    """From the cache of this process."""
    if isinstance(pattern, Branches):
        return layout_for_branches(pattern, seq_q, seq_k, heads, is_causal, device)
    if opening is not None:
        pattern = opened_once(pattern, window_of(opening.item(), max(seq_q, seq_k)))
    pattern = _made_causal(pattern) if is_causal else pattern
    block_size = min(pattern.block_sizes, default=DEFAULT_BLOCK_SIZE)
    return layout_for(pattern, seq_q, seq_k, block_size, device)


opened_once = value_cache(128, "patterns as a `SparsitySchedule` has opened them")(opened)


@cached(256, "patterns with `is_causal` in them")
def _made_causal(pattern: Pattern) -> Pattern:
    return pattern & Causal()


def resolve_layout(
    q: Tensor, k: Tensor, layout_or_pattern: BlockLayout | Pattern | Branches | Opened, is_causal: bool
) -> BlockLayout | NamedLayout:
    """The layout of a call, `is_causal` included; by its name under a trace, a mode or a transform."""
    what: Any
    what, opening = layout_or_pattern if isinstance(layout_or_pattern, Opened) else (layout_or_pattern, None)
    check_lists(q, k, what)
    seq_q, seq_k, heads = q.shape[1], k.shape[1], q.shape[2]
    if isinstance(what, Pattern | Branches):
        find = layout_of if is_plain_eager(q, k) else NamedLayout
        return find(what, is_causal, seq_q, seq_k, heads, q.device, opening)
    layout: BlockLayout = what
    if layout.lengths != (seq_q, seq_k):
        raise ValueError(
            f"layout_or_pattern is a layout for lengths {layout.lengths}, but q and k have {(seq_q, seq_k)} tokens"
            + (f". {HEADS_FIRST}" if layout.lengths == (heads, k.shape[2]) else "")
        )
    return layout.causal if is_causal else layout


@dataclass(frozen=True)
class NamedLayout:
    """The layout of a pattern for these heads and lengths, which may be symbolic.

    Attributes:
        opening: see `Opened`.
        kind: as in `BlockLayout`.
    """

    pattern: Pattern | Branches
    is_causal: bool
    seq_q: int
    seq_k: int
    num_heads: int
    device: torch.device
    opening: Tensor | None = None

    batch_size: ClassVar[None] = None
    dilated: ClassVar[bool] = False  # as far as `to_dense` is concerned, which counts for branches too

    @property
    def kind(self) -> str | None:
        if isinstance(self.pattern, Branches):
            return kind_of_branches(self.pattern, self.seq_q, self.seq_k, self.is_causal)
        if self.opening is not None:
            return None
        return _kind_of_text(self.pattern.text, self.is_causal)

    def to_dense(self) -> Tensor:
        """As `BlockLayout.to_dense`, for every head."""
        branches = isinstance(self.pattern, Branches)
        sizes = self.is_causal, self.seq_q, self.seq_k, self.num_heads
        return _dense(self.pattern.text, *sizes, torch.int32 if branches else torch.bool, self.device, self.opening)

    def built(self) -> BlockLayout:
        return layout_of(self.pattern, self.is_causal, self.seq_q, self.seq_k, self.num_heads, self.device)

    @property
    def lasts(self) -> bool:
        """Whether a graph may hold the lists: torch.compile made it for these lengths alone. A CUDA graph can then be
        made of it, and the lists live as long."""
        if not torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting() or self.opening is not None:
            return False
        from torch.fx.experimental.symbolic_shapes import has_static_value

        return has_static_value(self.seq_q) and has_static_value(self.seq_k) and has_static_value(self.num_heads)

    def constant(self) -> BlockLayout:
        """As a constant of a graph."""
        seq_q, seq_k, heads = (operator.index(n) for n in (self.seq_q, self.seq_k, self.num_heads))
        return BlockLayout.unflatten(
            *_as_constants(self.pattern.text, self.is_causal, seq_q, seq_k, heads, self.device)
        )


@torch.library.custom_op("dilated_attention_pytorch::dense_pattern", mutates_args=())
def _dense(
    text: str,
    is_causal: bool,
    seq_q: int,
    seq_k: int,
    heads: int,
    dtype: torch.dtype,
    device: torch.device,
    opening: Tensor | None,
) -> Tensor:
    layout = layout_of(value_of(text), is_causal, seq_q, seq_k, heads, device, opening)
    counts = counted_pairs(layout, heads, CallOptions(1.0))
    return counts.to(dtype, copy=True).expand(1, heads, seq_q, seq_k)[0].contiguous()


@_dense.register_fake
def _(text, is_causal, seq_q, seq_k, heads, dtype, device, opening):  # type: ignore[no-untyped-def]
    return torch.empty(heads, seq_q, seq_k, dtype=dtype, device=device)


@constant_in_graphs
def _kind_of_text(text: str, is_causal: bool) -> str | None:
    pattern = value_of(text)
    return kind_of(_made_causal(pattern) if is_causal else pattern)


@constant_in_graphs
def _as_constants(
    text: str, is_causal: bool, seq_q: int, seq_k: int, heads: int, device: torch.device
) -> tuple[list[Tensor], list[int], str | None]:
    layout = layout_of(value_of(text), is_causal, seq_q, seq_k, heads, device)
    walked = device.type == "cuda" and _kind_of_text(text, is_causal) is None
    return *layout.flatten(work_order=walked, by_key=walked), layout.kind


def names_of(layouts: Sequence[NamedLayout]) -> tuple[list[Tensor], list[int], str]:
    """All that an operator must be told to find them again, whose tensors have the lengths."""
    first, names = layouts[0], [layout.pattern.text for layout in layouts]
    return [] if first.opening is None else [first.opening], [int(first.is_causal)], "\n".join(names)


def layouts_of(q: Tensor, k: Tensor, opening: Sequence[Tensor], sizes: Sequence[int], names: str) -> list[BlockLayout]:
    """The inverse, in the operator."""
    of_call: Any = (bool(sizes[0]), q.shape[1], k.shape[1], q.shape[2], q.device, *opening)
    return [layout_of(value_of(name), *of_call) for name in names.split("\n")]
