"""Bytes by arithmetic: every tensor that an attention call holds, and when. Nothing is allocated.

A call goes through `PHASES`; an `Item` is alive in some of them, and the peak is the largest sum of a phase. The level
it is counted from is that before q, k and v exist.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, gcd
from typing import NamedTuple

import torch

from ..layout import BlockLayout
from ..layout.branches import cheapest_blocks
from ..layout.build import CHUNK, WHOLE, Term, documents_of, terms_of
from ..layout.eager import plain_cache
from ..patterns import Branches, Pattern, PerHead
from ..patterns.blocks import BlockPattern, ceil_div, mix32
from ..patterns.tokens import EVERYTHING, Interval

PHASES = ("layout", "forward", "projection", "backward", "projection backward")
KINDS = ("tensors", "gradients", "parameters", "lists", "workspace", "ring")

# How `backends.tiling` cuts work; a test holds them equal to the constants there.
PIECE = 1024
TILE_SCORES = 1 << 20
RANGE_COPIED = 1 << 20
RANGE_DIRECT = 1 << 19
SHARED_OUT = 1 << 26
HEADS_A_COPY = 4
REUSE = 2
ACCELERATOR = 32

# Rows of a layout that are counted one by one in each stretch where its rules do not change; the others are like them.
SAMPLED = 64
# Fewer, but no less than eight, where rows are so long that more blocks than this would be looked at.
LOOKED_AT = 1 << 15


class Item(NamedTuple):
    """Something that takes memory, and the phases in which it is there."""

    name: str
    kind: str
    bytes: int
    phases: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The tensors of a call."""

    batch: int
    seq_q: int
    seq_k: int
    heads: int
    heads_kv: int
    head_dim: int
    dtype: torch.dtype

    @property
    def q(self) -> int:
        return self.batch * self.seq_q * self.heads * self.head_dim * self.dtype.itemsize

    @property
    def k(self) -> int:
        return self.batch * self.seq_k * self.heads_kv * self.head_dim * self.dtype.itemsize

    @property
    def lse(self) -> int:
        return self.batch * self.heads * self.seq_q * self.compute

    @property
    def compute(self) -> int:
        """Bytes of a number that is computed with."""
        return 8 if self.dtype == torch.float64 else 4


@dataclass(frozen=True, kw_only=True)
class ListSize:
    """How long the lists of a layout are; `of` measures one or counts what a pattern would give."""

    block_q: int
    block_k: int
    num_q_blocks: int
    num_k_blocks: int
    num_lists: int
    list_heads: int  # lists a sample
    blocks: int  # of all lists
    widest: int  # blocks of the longest row
    partial: int  # partial blocks of a row, at most
    candidates: int  # looked at in building at a time, at most
    intervals: int
    named: bool  # whether every block names its rule
    documents: int  # tokens of the table of documents
    kind: str | None
    num_residues: int = 1  # blocks take every so many-th token, as in `layout.branches`

    @classmethod
    def of(
        cls, what: Pattern | BlockLayout, seq_q: int, seq_k: int, block_size: int | tuple[int, int] = 128
    ) -> ListSize:
        return _of_layout(what) if isinstance(what, BlockLayout) else _of_pattern(what, seq_q, seq_k, block_size)

    def shared_by(self, ranks: int) -> ListSize:
        """The part of one rank: its rows."""
        if ranks == 1:
            return self
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("num_q_blocks", "num_k_blocks", "blocks", "documents"):
            fields[name] = ceil_div(fields[name], ranks)
        return ListSize(**fields)

    @property
    def rows(self) -> int:
        return self.num_lists * self.num_q_blocks

    @property
    def columns(self) -> int:
        return self.num_lists * self.num_k_blocks

    def by(self, rows: int, *, work_order: bool) -> int:
        """Bytes of the lists in one orientation, with the order of work if that is kept."""
        return 4 * (2 * rows + 1 + self.blocks * (2 if self.named else 1) + (4 * rows if work_order else 0))

    @property
    def rules(self) -> int:
        return 20 * self.num_lists * self.intervals * ((1 << self.intervals) - 1) + 8 * self.documents


def _of_layout(layout: BlockLayout) -> ListSize:
    lists = layout.by_query
    return ListSize(
        block_q=layout.block_q,
        block_k=layout.block_k,
        num_q_blocks=layout.num_q_blocks,
        num_k_blocks=layout.num_k_blocks,
        num_lists=layout.num_lists,
        list_heads=layout.num_heads or 1,
        blocks=len(lists.indices),
        widest=int(lists.offsets.diff().max()),
        partial=int((lists.offsets[1:] - lists.splits).max()),
        candidates=0,
        intervals=layout.rules.shape[1],
        named=lists.rule_ids.numel() > 0,
        documents=layout.documents.shape[1],
        kind=layout.kind,
        num_residues=layout.num_residues,
    )


def lists_of_branches(branches: Branches, seq_len: int, heads: int, is_causal: bool) -> ListSize:
    """Of dilated attention, branch by branch: a block that several branches hold is counted for each, a bound."""
    block, num_residues = cheapest_blocks(branches, seq_len, None, None)
    per_residue = ceil_div(ceil_div(seq_len, num_residues), block)
    num_lists = heads if len({branches.of_head(head, heads) for head in range(heads)}) > 1 else 1
    per_row, widest = 0.0, 0
    for segment, dilation in zip(branches.segment_lengths, branches.dilation_rates, strict=True):
        shared = gcd(dilation, num_residues)  # one in so many residues is kept, of queries and of keys
        across = segment < seq_len and segment % (block * num_residues) > 0  # blocks lie across the ends of segments
        rows = ceil_div(min(segment, seq_len), block * num_residues) + across
        per_row += (((rows + 1) / 2) if is_causal else rows) * num_residues / shared**2
        widest += rows * num_residues // shared
    blocks = ceil(per_row * num_residues * per_residue)
    dense = len(branches) == 1 and branches.segment_lengths[0] >= seq_len and branches.dilation_rates[0] == 1
    return ListSize(
        block_q=block,
        block_k=block,
        num_q_blocks=num_residues * per_residue,
        num_k_blocks=num_residues * per_residue,
        num_lists=num_lists,
        list_heads=num_lists,
        blocks=num_lists * blocks,
        widest=widest,
        partial=min(widest, 2 * len(branches)),
        candidates=blocks,
        intervals=1,
        named=True,
        documents=0,
        kind=("causal" if is_causal else "full") if dense else None,
        num_residues=num_residues,
    )


@plain_cache(256)
def _of_pattern(pattern: Pattern, seq_q: int, seq_k: int, block_size: int | tuple[int, int]) -> ListSize:
    block_q, block_k = (block_size, block_size) if isinstance(block_size, int) else block_size
    heads = pattern.patterns if isinstance(pattern, PerHead) else (pattern,)
    packing = next(iter(documents_of(pattern)), None)
    grid = _Grid(seq_q, seq_k, block_q, block_k, () if packing is None else packing.starts)
    counted = {head: grid.count(terms_of(head)) for head in dict.fromkeys(heads)}
    terms = terms_of(heads[0])
    rules = {term.interval for head in counted for term in terms_of(head)}
    intervals = max(len({term.interval for term in terms_of(head)}) for head in counted)
    blocks = sum(counted[head][0] for head in heads)
    alone = len(counted) == 1 and len(terms) == 1 and not terms[0].rules
    return ListSize(
        block_q=block_q,
        block_k=block_k,
        num_q_blocks=grid.rows,
        num_k_blocks=grid.columns,
        num_lists=len(heads),
        list_heads=len(heads),
        blocks=blocks,
        widest=max(widest for _, widest in counted.values()),
        partial=2 * len(rules - {EVERYTHING}) + (1 if seq_k % block_k else 0),
        candidates=min(CHUNK, max(total * len(terms_of(head)) for head, (total, _) in counted.items())),
        intervals=intervals,
        named=blocks > 0 and (len(counted) > 1 or intervals > 1),
        documents=0 if packing is None else seq_q,
        kind=WHOLE.get(terms[0].interval) if alone else None,
    )


@dataclass(frozen=True)
class _Grid:
    """Blocks of a row of a layout, in plain integers; `layout.build` says the same of all rows at once."""

    seq_q: int
    seq_k: int
    block_q: int
    block_k: int
    starts: Sequence[int]  # of documents

    @property
    def rows(self) -> int:
        return ceil_div(self.seq_q, self.block_q)

    @property
    def columns(self) -> int:
        return ceil_div(self.seq_k, self.block_k)

    def count(self, terms: Sequence[Term]) -> tuple[int, int]:
        """Active blocks in all rows and in the longest: exact for few rows, else from a sample of them."""
        total, widest = 0.0, 0
        for start, stop in pairwise(self._edges(terms)):
            middle = self._row(terms, (start + stop) // 2)
            samples = SAMPLED if all(not term.rules for term in terms) else LOOKED_AT // max(1, middle)
            picked = [self._row(terms, row) for row in _picked(start, stop, max(8, min(SAMPLED, samples)))]
            total += (stop - start) * sum(picked) / len(picked)
            widest = max(widest, *picked)
        return round(total), widest

    def _edges(self, terms: Sequence[Term]) -> list[int]:
        """Rows where a rule begins or ends: the first rows may see more than all others together."""
        stops = (term.interval.query_stop - (self.seq_k - self.seq_q) for term in terms)
        inside = {ceil_div(stop, self.block_q) for stop in stops if 0 < stop < self.seq_q}
        return sorted({0, self.rows, *inside})

    def _row(self, terms: Sequence[Term], row: int) -> int:
        runs, blocks = [], set()
        for term in terms:
            first, last = self._span(term.interval, row)
            if first > last:
                continue
            if not term.rules:
                runs.append((first, last))
                continue
            found = set.intersection(*(set(self._fine(rule, row)) for rule in term.rules))
            blocks |= {column for column in found if first <= column <= last}
        reached, total = -1, 0
        for first, last in sorted(runs):
            total += max(0, last - max(first - 1, reached))
            reached = max(reached, last)
        return total + sum(not any(first <= column <= last for first, last in runs) for column in blocks)

    def _span(self, interval: Interval, row: int) -> tuple[int, int]:
        """The columns that an interval touches, last < first for none."""
        shift = self.seq_k - self.seq_q
        head = row * self.block_q
        tail = min(head + self.block_q, self.seq_q, interval.query_stop - shift) - 1
        first, last = head + shift - interval.left, min(tail + shift + interval.right, interval.key_stop - 1)
        if interval.same_document:
            first = max(first, self._document(head + shift)[0])
            last = min(last, self._document(tail + shift)[1] - 1)
        first, last = max(0, first), min(last, self.seq_k - 1)
        return (first // self.block_k, last // self.block_k) if tail >= head and first <= last else (1, 0)

    def _document(self, position: int) -> tuple[int, int]:
        number = bisect_right(self.starts, position)
        return (self.starts[number - 1], self.starts[number]) if 0 < number < len(self.starts) else (0, 0)

    def _fine(self, rule: BlockPattern, row: int) -> Iterator[int]:
        coarse = row * self.block_q // rule.block_size + rule.shift(self.seq_q, self.seq_k)
        for block in rule.key_blocks(coarse, ceil_div(self.seq_k, rule.block_size)):
            start, stop = (n * rule.block_size // self.block_k for n in (block, block + 1))
            yield from range(start, min(stop, self.columns))


def _picked(start: int, stop: int, samples: int) -> list[int]:
    """All rows of a short stretch, else one from each of equal parts."""
    if stop - start <= samples:
        return list(range(start, stop))
    edges = [start + (stop - start) * i // samples for i in range(samples + 1)]
    return [a + mix32(a) % (b - a) for a, b in pairwise(edges)]


def attention_items(
    shape: Shape, lists: ListSize, *, backend: str, device: str, training: bool, threads: int = 1
) -> list[Item]:
    """What one call of attention holds, without its inputs.

    Args:
        backend: the one that runs: "sdpa", "triton", "blockwise" or "reference".
        device: "cpu" or "cuda".
        threads: those of PyTorch, on a CPU.
    """
    work_order, both = backend == "triton", backend == "triton" and training
    kept: tuple[str, ...] = ("forward", "backward") if training else ("forward",)
    always = ("layout", *kept)
    items = [
        Item("lists by query", "lists", lists.by(lists.rows, work_order=work_order) + lists.rules, always),
        Item("building the lists", "workspace", _building(lists, by_key=both), ("layout",)),
        Item("out", "tensors", shape.q, kept),
        Item("lse", "tensors", shape.lse, kept),
    ]
    if both:
        items.append(Item("lists by key", "lists", lists.by(lists.columns, work_order=True), always))
    if training:
        items += [
            Item("dout", "gradients", shape.q, ("backward",)),
            Item("dq", "gradients", shape.q, ("backward",)),
            Item("dk, dv", "gradients", 2 * shape.k, ("backward",)),
        ]
    workspace = {"sdpa": _sdpa, "triton": _triton, "blockwise": _blockwise, "reference": _reference}[backend]
    forward, backward = workspace(shape, lists, device, training, threads)
    items.append(Item(f"{backend} workspace", "workspace", forward, ("forward",)))
    if training:
        items.append(Item(f"{backend} workspace", "workspace", backward, ("backward",)))
    return [item for item in items if item.bytes]


def _building(lists: ListSize, *, by_key: bool) -> int:
    """A chunk of candidates as 64-bit numbers, the pieces beside their concatenation, and the sort for `by_key`."""
    first = 96 * lists.candidates + lists.by(lists.rows, work_order=False)
    return max(first, 40 * lists.blocks) if by_key else first


def _triton(shape: Shape, lists: ListSize, device: str, training: bool, threads: int) -> tuple[int, int]:
    """Backward: lse and delta of every row, padded to whole blocks, in float32."""
    return 0, 2 * 4 * shape.batch * shape.heads * lists.num_q_blocks * lists.block_q


def _sdpa(shape: Shape, lists: ListSize, device: str, training: bool, threads: int) -> tuple[int, int]:
    """On a GPU the backward sums dq in float32, in rows and columns rounded up, and keeps a number for each row.

    On a CPU each thread has a tile of scores, in the backward several, and copies of what is not float32.
    """
    if device == "cpu":
        narrow = 2 if shape.dtype.itemsize == 2 else 1
        return (threads * 3 * narrow) << 19, (threads * 3 * narrow) << 20
    rows, width = ceil_div(shape.seq_q, 128) * 128, ceil_div(shape.head_dim, 32) * 32
    return 0, 4 * shape.batch * shape.heads * rows * (width + 1)


def _reference(shape: Shape, lists: ListSize, device: str, training: bool, threads: int) -> tuple[int, int]:
    """The matrix of scores several times over, and its mask."""
    pairs = shape.batch * shape.heads * shape.seq_q * shape.seq_k
    mask = lists.num_lists * shape.seq_q * shape.seq_k
    wide = shape.compute * shape.batch * shape.head_dim * (shape.heads * (shape.seq_q + 2 * shape.seq_k))
    forward = 3 * shape.compute * pairs + 2 * mask + wide
    return forward, forward + 4 * shape.compute * pairs + wide


def _blockwise(shape: Shape, lists: ListSize, device: str, training: bool, threads: int) -> tuple[int, int]:
    """The named buffers of its scratch memory, as `backends.blockwise` sizes them, and its plans of tiles."""
    group = shape.heads // shape.heads_kv
    stacked = 1 if lists.list_heads > shape.heads_kv else group
    uses = group // stacked * lists.blocks / (lists.num_lists * lists.num_k_blocks)
    whole = shape.dtype.itemsize == shape.compute and shape.seq_k % lists.block_k == 0 and lists.num_residues == 1
    copied = uses > REUSE or not whole
    copy = 0 if whole and shape.heads_kv == 1 else lists.num_k_blocks * lists.block_k * shape.head_dim
    scores = lists.blocks // lists.num_lists * lists.block_q * lists.block_k * shape.heads
    apart = threads if device == "cpu" and scores >= SHARED_OUT else 1
    enlarge = 1 if device == "cpu" else ACCELERATOR
    plans = 4 * lists.blocks + 24 * lists.rows

    def share(of: int, in_parts: int, rows_held: int, scores_held: int) -> int:
        """Numbers in the buffers of one of so many shares of the call."""
        row = stacked * lists.block_q * shape.head_dim
        elements = int(enlarge / of * (RANGE_COPIED if copied else RANGE_DIRECT))
        num, in_parts = ceil_div(lists.num_q_blocks, lists.num_residues), ceil_div(in_parts, lists.num_residues)
        parts = ceil_div(num, max(1, elements // row))
        rows = ceil_div(num, min(num, ceil_div(parts, in_parts) * in_parts))
        keys = lists.block_k * min(max(1, PIECE // lists.block_k), max(1, lists.widest))
        of_piece = stacked * lists.block_q * keys
        pieces = min(rows, max(1, int(enlarge / of * TILE_SCORES) // of_piece))
        merged = lists.widest * lists.block_k > PIECE
        gathered, part = pieces * keys * shape.head_dim, pieces * row * (3 if merged else 0)
        masks = pieces * stacked * lists.block_q * min(keys, lists.partial * lists.block_k)
        return rows_held * rows * row + scores_held * pieces * of_piece + gathered + part + masks

    forward = apart * share(apart, 2 * apart if copied and apart > 1 else 1, 2, 1) + (2 * copy if copied else 0)
    heads = shape.heads_kv // HEADS_A_COPY if copied else shape.heads_kv
    backward_apart = max(1, min(heads, apart))
    copies = 2 * copy + 2 * lists.num_k_blocks * lists.block_k * shape.head_dim if copied else 0
    backward = backward_apart * (share(backward_apart, 1, 3, 2) + copies)
    return forward * shape.compute + plans, backward * shape.compute + backward_apart * plans


def peak_of(items: Iterable[Item]) -> dict[str, int]:
    """Bytes alive in each phase."""
    items = list(items)
    alive = {phase: sum(item.bytes for item in items if phase in item.phases) for phase in PHASES}
    return {phase: total for phase, total in alive.items() if total}
