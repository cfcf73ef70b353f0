"""Who holds which blocks of a sequence, and the way into shards and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..layout import BlockLayout
from ..layout.eager import plain_cache
from ..patterns import Causal, Pattern
from ..patterns.base import Value, check_flag, check_int
from ..patterns.blocks import ceil_div, check_block_size
from .agreement import agree, broadcast_refusal, fingerprint
from .exchange import Group, check_device, check_group, or_broken

# A placement is balanced if the slowest rank has no more than this times the mean work.
BALANCED = 1.05
MAX_CHUNKS = 64  # a rank, in `Placement.balanced`
ROWS_COUNTED = 1 << 14  # rows of blocks whose work is counted at a time


@dataclass(frozen=True)
class Placement(Value):
    """The ranks of a ring and the whole blocks of the sequence that each holds, in ascending order.

    Make one with `contiguous`, `of_lengths`, `zigzag` or `balanced`.

    Attributes:
        seq: tokens of the whole sequence.
        block_size: tokens a block; blocks are never split.
        world_size: how many ranks.
        starts, ranks: runs of blocks: from block `starts[i]` to the next start, rank `ranks[i]` holds them.
    """

    seq: int
    block_size: int
    world_size: int
    starts: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        check_int("seq", self.seq, least=1)
        check_block_size("block_size", self.block_size)
        check_int("world_size", self.world_size, least=1)
        if missing := sorted(set(range(self.world_size)) - set(self.ranks)):
            raise ValueError(
                f"every one of {self.world_size} ranks must hold a block, but {self.num_blocks} blocks of "
                f"{self.block_size} tokens leave rank {missing[0]} without; take smaller blocks or fewer ranks"
            )
        super().__post_init__()

    @classmethod
    def contiguous(cls, seq: int, world_size: int, *, block_size: int = 128) -> Placement:
        """One run of blocks for each rank, all as long as each other to a block."""
        return cls._of_chunks(seq, block_size, world_size, _equal(seq, block_size, world_size), range(world_size))

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], *, block_size: int = 128) -> Placement:
        """One run of so many tokens for each rank in turn; all but the last must be whole blocks."""
        for rank, length in enumerate(lengths):
            check_int(f"the length of rank {rank}", length, least=1)
            if length % block_size and rank < len(lengths) - 1:
                raise ValueError(
                    f"shards must be whole blocks of {block_size} tokens, all but the last, got {list(lengths)}; "
                    "shard_sequence cuts them so"
                )
        starts = (0, *accumulate(length // block_size for length in lengths[:-1]))
        return cls(sum(lengths), block_size, len(lengths), starts, tuple(range(len(lengths))))

    @classmethod
    def zigzag(cls, seq: int, world_size: int, *, block_size: int = 128) -> Placement:
        """Two runs for each rank, one from the front and its mirror image: equal work where attention is causal."""
        whole = _equal(seq, block_size, world_size)
        front = [ceil_div(size, 2) for size in whole]
        back = [size - half for size, half in zip(whole, front, strict=True)]
        order = [*range(world_size), *reversed(range(world_size))]
        return cls._of_chunks(seq, block_size, world_size, [*front, *reversed(back)], order)

    @classmethod
    def balanced(
        cls,
        layout_or_pattern: BlockLayout | Pattern,
        seq: int,
        world_size: int,
        *,
        is_causal: bool = False,
        block_size: int = 128,
    ) -> Placement:
        """Equal tokens and, by the active blocks of their rows, equal work, in as few runs as that takes.

        The sequence is cut into equal chunks, 1 a rank, then 2, 4, …; the heaviest go first, in rounds of one chunk a
        rank, to the rank with the least work so far. The first cut whose slowest rank has at most 1.05 × the mean work
        is taken; if none has, the best. Needs no communication: the work is counted a few rows at a time.
        """
        check_flag("is_causal", is_causal)
        work = row_work(layout_or_pattern, seq, block_size, is_causal=is_causal)
        total = torch.cat((work.new_zeros(1), work.cumsum(0)))
        best: tuple[float, Placement] | None = None
        parts = 1
        while parts <= MAX_CHUNKS and parts * world_size <= max(len(work), world_size):
            chunks = _equal(seq, block_size, parts * world_size)
            edges = torch.tensor([0, *accumulate(chunks)])
            order = _dealt_out((total[edges[1:]] - total[edges[:-1]]).tolist(), world_size)
            placement = cls._of_chunks(seq, block_size, world_size, chunks, order)
            load = placement.load(work)
            slowest = float(load.max() / load.mean())
            if best is None or slowest < best[0]:
                best = slowest, placement
            if slowest <= BALANCED:
                break
            parts *= 2
        assert best is not None
        return best[1]

    @classmethod
    def _of_chunks(
        cls, seq: int, block_size: int, world_size: int, chunks: Sequence[int], order: Sequence[int]
    ) -> Placement:
        """Chunks of so many blocks, each to the rank that `order` says; neighbours of one rank are one run."""
        runs: list[tuple[int, int]] = []
        for start, size, rank in zip(accumulate(chunks, initial=0), chunks, order, strict=False):
            if size and (not runs or runs[-1][1] != rank):
                runs.append((start, rank))
        return cls(seq, block_size, world_size, tuple(s for s, _ in runs), tuple(r for _, r in runs))

    @property
    def num_blocks(self) -> int:
        return ceil_div(self.seq, self.block_size)

    def owner(self, block: Tensor) -> Tensor:
        """The rank that holds each of these blocks."""
        starts, ranks = (torch.tensor(x, device=block.device) for x in (self.starts, self.ranks))
        return ranks[torch.searchsorted(starts, block, right=True) - 1]

    def blocks(self, rank: int, block_size: int | None = None) -> Tensor:
        """The blocks of a rank, int64, ascending; or blocks of another size, of which its runs are whole ones."""
        size = block_size or self.block_size
        return torch.cat([torch.arange(run.start // size, ceil_div(run.stop, size)) for run in self.tokens(rank)])

    @property
    def cut(self) -> int:
        """The largest number of tokens of which every run starts at a multiple."""
        return gcd(*self.starts) * self.block_size

    def tokens(self, rank: int) -> list[slice]:
        """The runs of tokens of a rank."""
        return [slice(a * self.block_size, min(b * self.block_size, self.seq)) for a, b in self._runs(rank)]

    def positions(self, rank: int) -> Tensor:
        """Where in the whole sequence each token of a rank is, int64."""
        return torch.cat([torch.arange(run.start, run.stop) for run in self.tokens(rank)])

    def num_tokens(self, rank: int) -> int:
        return sum(run.stop - run.start for run in self.tokens(rank))

    @property
    def lengths(self) -> list[int]:
        """The tokens of each rank."""
        return [self.num_tokens(rank) for rank in range(self.world_size)]

    def load(self, work: Tensor) -> Tensor:
        """The work of each rank, given that of each block; float64."""
        owners = self.owner(torch.arange(self.num_blocks))
        return torch.zeros(self.world_size, dtype=torch.float64).index_add_(0, owners, work.double())

    def _runs(self, rank: int) -> list[tuple[int, int]]:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be from 0 to {self.world_size - 1}, got {rank}")
        edges = pairwise((*self.starts, self.num_blocks))
        return [edge for edge, owner in zip(edges, self.ranks, strict=True) if owner == rank]


@plain_cache(16, "places of a rank's tokens in the whole sequence")
def positions_on(placement: Placement, rank: int, device: torch.device) -> Tensor:
    """`Placement.positions`, remembered."""
    return placement.positions(rank).to(device)


def _equal(seq: int, block_size: int, parts: int) -> list[int]:
    """The blocks of a sequence in parts as equal as can be."""
    check_int("seq", seq, least=1)
    check_block_size("block_size", block_size)
    check_int("world_size", parts, least=1)
    num_blocks = ceil_div(seq, block_size)
    return [num_blocks * (i + 1) // parts - num_blocks * i // parts for i in range(parts)]


def _dealt_out(work: list[int], world_size: int) -> list[int]:
    """The rank of each chunk: the heaviest first, one a rank in each round, to who has the least so far."""
    heaviest = sorted(range(len(work)), key=lambda chunk: -work[chunk])
    load, ranks = [0] * world_size, [0] * len(work)
    if len(work) == world_size:
        return list(range(world_size))
    for begin in range(0, len(work), world_size):
        lightest = sorted(range(world_size), key=lambda rank: load[rank])
        for chunk, rank in zip(heaviest[begin : begin + world_size], lightest, strict=True):
            ranks[chunk] = rank
            load[rank] += work[chunk]
    return ranks


@plain_cache(16, "numbers of blocks of rows, to balance shards by")
def row_work(layout_or_pattern: BlockLayout | Pattern, seq: int, block_size: int, *, is_causal: bool = False) -> Tensor:
    """int64 [blocks]: how many blocks of block_size² the queries of each block attend to, over all lists of heads."""
    num_rows = ceil_div(seq, block_size)
    if isinstance(layout_or_pattern, BlockLayout):
        layout = layout_or_pattern.causal if is_causal else layout_or_pattern
        return _work_of_rows(layout.to("cpu"), block_size)
    if not isinstance(layout_or_pattern, Pattern):
        raise TypeError(f"layout_or_pattern must be a BlockLayout or a Pattern, got {type(layout_or_pattern).__name__}")
    pattern = layout_or_pattern & Causal() if is_causal else layout_or_pattern
    own = min((*pattern.block_sizes, block_size))
    finer, num_fine = block_size // own, ceil_div(seq, own)
    parts = []
    for start in range(0, num_rows, ROWS_COUNTED):
        rows = torch.arange(start * finer, min((start + ROWS_COUNTED) * finer, num_fine))
        part = BlockLayout.from_pattern(pattern, seq, block_size=own, query_blocks=rows)
        parts.append(_work_of_rows(part, block_size))
    return torch.cat(parts)


def _work_of_rows(layout: BlockLayout, block_size: int) -> Tensor:
    """The active blocks of rows of `block_size` queries, in units of the layout's own blocks."""
    counts = layout.by_query.offsets.diff().view(layout.num_lists, -1).sum(0)
    finer = block_size // layout.block_q
    padded = torch.nn.functional.pad(counts, (0, -len(counts) % finer))
    return padded.view(-1, finer).sum(1)


def shard_sequence(x: Tensor, placement: Placement, *, group: Group, dim: int = 1) -> Tensor:
    """This rank's part of a tensor that every rank holds whole. Differentiable. Nothing is communicated."""
    group = check_group(group)
    check_placement(placement, group)
    _check_tokens(x, dim, placement.seq, "the placement's")
    return _shard(x, placement, dist.get_rank(group), dim)


def _check_tokens(x: Tensor, dim: int, tokens: int, whose: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, got {type(x).__name__}")
    check_int("dim", dim, least=-x.ndim)
    if dim >= x.ndim:
        raise ValueError(f"dim must be less than the {x.ndim} dimensions of x, got {dim}")
    if x.shape[dim] != tokens:
        raise ValueError(f"x must have {whose} {tokens} tokens in dim {dim}, got {list(x.shape)}")


def _shard(x: Tensor, placement: Placement, rank: int, dim: int) -> Tensor:
    runs = [x.narrow(dim, run.start, run.stop - run.start) for run in placement.tokens(rank)]
    return runs[0] if len(runs) == 1 else torch.cat(runs, dim)


def unshard_sequence(x: Tensor, placement: Placement, *, group: Group, dim: int = 1) -> Tensor:
    """The whole tensor, on every rank, of the parts that the ranks hold.

    Differentiable: what flows back is the gradient of the sum of all ranks' losses, as in the ring itself. All ranks of
    the group call it together; a difference is an error on every rank that names it.
    """
    group = check_group(group)
    with broadcast_refusal(group):
        check_placement(placement, group)
        _check_tokens(x, dim, placement.num_tokens(dist.get_rank(group)), "this rank's")
        check_device(group, x.device, "x")
        agree(
            group,
            {
                "placement": fingerprint(placement),
                "dim": str(dim),
                "shape but for the tokens": str([size for i, size in enumerate(x.shape) if i != dim % x.ndim]),
                "dtype": str(x.dtype),
                "layout": str(x.layout),
                "device": x.device.type,
                "gradients": "asked for" if torch.is_grad_enabled() and x.requires_grad else "not asked for",
            },
        )
        return _Unshard.apply(x, placement, group, dim)


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, placement: Placement, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.rest = placement, group, dim
        counts = [placement.num_tokens(rank) for rank in range(placement.world_size)]
        x = x.movedim(dim, 0)
        padded = torch.cat((x, x.new_zeros(max(counts) - len(x), *x.shape[1:]))).contiguous()
        parts = [torch.empty_like(padded) for _ in counts]
        with or_broken("the gathering of shards"):
            dist.all_gather(parts, padded, group=group)
        whole = x.new_empty(placement.seq, *x.shape[1:])
        for rank, part in enumerate(parts):
            at = 0
            for run in placement.tokens(rank):
                whole[run] = part[at : at + run.stop - run.start]
                at += run.stop - run.start
        return whole.movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        placement, group, dim = ctx.rest
        grad = grad.clone(memory_format=torch.contiguous_format)
        with or_broken("the sum of gradients"):
            dist.all_reduce(grad, group=group)
        return _shard(grad, placement, dist.get_rank(group), dim).contiguous(), None, None, None


def check_placement(placement: Placement, group: dist.ProcessGroup) -> None:
    if not isinstance(placement, Placement):
        raise TypeError(f"placement must be a Placement, got {type(placement).__name__}")
    if placement.world_size != dist.get_world_size(group):
        raise ValueError(
            f"placement is for {placement.world_size} ranks, but the group has {dist.get_world_size(group)}"
        )
