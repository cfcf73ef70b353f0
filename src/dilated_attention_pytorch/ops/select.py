"""`select_blocks`: the blocks that matter for these queries and keys, as a layout, on the device, without a host sync.

    layout = select_blocks(q, k, selector=SharedBudget(0.25), block_size=(64, 16), is_causal=True)
    out = block_sparse_attention(q, k, v, layout)

One path: estimated masses (`ops.scores`) → a selector keeps some → a layout with a fixed number of places, however many
were kept. Of all blocks only the masses are ever stored.

On a CUDA device `kernels.select` computes the same in a few launches: the masses of `MeanPooled`, and the lists of
`TopK` and `SharedBudget`. What is written here defines them, and does everything else: other scorers and selectors, key
padding and documents, float64, `torch.compile`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..backends.base import Request, aligned_queries
from ..backends.triton import can_run
from ..layout import BlockLayout, BlockList
from ..layout.build import Span
from ..layout.checks import block_pair
from ..layout.eager import is_plain_eager, plain_cache
from ..layout.lists import HOST
from ..patterns.base import check_flag, check_int, shown
from ..patterns.blocks import check_ratio
from ..patterns.tokens import EVERYTHING, Interval
from .checks import check_masks, check_qkv, check_scale
from .scores import Antidiagonal, Blocked, MeanPooled, MinMaxBound, Moments, SampledRows, Scorer, estimated_masses

SCORERS: Mapping[str, Scorer] = MappingProxyType(
    {
        "mean": MeanPooled(),
        "patches": MeanPooled(4, 4),
        "minmax": MinMaxBound(),
        "moments": Moments(queries=1),
        "antidiagonal": Antidiagonal(),
        "sampled": SampledRows(),
        "exact": SampledRows(1),
    }
)


# Mass 1 as an integer.
_ONE = 2**40


@dataclass(frozen=True, eq=False)
class Grid:
    """The blocks of a call that may be kept, and those that must be.

    Attributes:
        visible, forced: bool [query blocks, key blocks], `visible` with (batch, 1) before them where masks hide blocks.
        ends: int32 [query blocks]: a row sees the blocks before that one, masks aside.
        last_full: [query blocks], the last key block whose pairs are all visible; −1 for none.
        num_visible, num_forced: how many there are in each row, masks aside: budgets are counted on these, so that
            the host knows them.
    """

    visible: Tensor
    forced: Tensor
    ends: Tensor
    last_full: Tensor
    num_visible: tuple[int, ...]
    num_forced: tuple[int, ...]

    def priority(self, masses: Tensor) -> Tensor:
        """The masses with forced blocks before and invisible ones behind all others."""
        return masses.masked_fill(self.forced, torch.inf).masked_fill(~self.visible, -1.0)


class Selector(Protocol):
    """Which blocks of `masses` [batch, lists, query blocks, key blocks] to keep.

    `keep` gives a bool mask; what cannot be seen may be in it, for nothing. `max_blocks` bounds how many blocks of a
    sample it keeps, an int that depends on no input. `opened` is the selector on its way (0) to keeping all (1).
    """

    def keep(self, masses: Tensor, grid: Grid) -> Tensor: ...

    def max_blocks(self, grid: Grid, lists: int) -> int: ...

    def opened(self, opening: float) -> Selector: ...


@dataclass(frozen=True)
class SharedBudget:
    """The heaviest `share` of all visible blocks of a layer, whichever head and row they are in.

    How many blocks a row gets depends on what the other rows need, later ones too. Where a causal model must learn
    nothing at all from that, use `TopK`.
    """

    share: float

    def __post_init__(self) -> None:
        check_ratio("share", self.share)

    def opened(self, opening: float) -> SharedBudget:
        return replace(self, share=_towards_one(self.share, opening))

    def max_blocks(self, grid: Grid, lists: int) -> int:
        return max(round(self.share * sum(grid.num_visible) * lists), sum(grid.num_forced) * lists)

    def keep(self, masses: Tensor, grid: Grid) -> Tensor:
        return _first(grid.priority(masses).flatten(1), self.max_blocks(grid, masses.shape[1])).view_as(masses)


@dataclass(frozen=True)
class TopK:
    """The heaviest blocks of each row; a row depends on no other.

    Args:
        share: of the visible blocks, over all rows.
        even: every row gets the same number (all of its blocks, if it has fewer), chosen to meet the share; else
            every row the same share of its own.
        across_heads: the heads of a row compete for its blocks; else each head has as many.
    """

    share: float
    even: bool = False
    across_heads: bool = False

    def __post_init__(self) -> None:
        check_ratio("share", self.share)
        check_flag("even", self.even)
        check_flag("across_heads", self.across_heads)

    def opened(self, opening: float) -> TopK:
        return replace(self, share=_towards_one(self.share, opening))

    def counts(self, grid: Grid, lists: int) -> list[int]:
        """Blocks of each row: of one head, or of all that compete for them."""
        total = self.share * sum(grid.num_visible)
        level = _level(grid.num_visible, total) if self.even else 0.0
        lists = lists if self.across_heads else 1
        counts = []
        for visible, forced in zip(grid.num_visible, grid.num_forced, strict=True):
            wanted = min(level, visible) if self.even else self.share * visible
            counts.append(max(round(wanted * lists), forced * lists, min(visible, 1)))
        return counts

    def max_blocks(self, grid: Grid, lists: int) -> int:
        return sum(self.counts(grid, lists)) * (1 if self.across_heads else lists)

    def keep(self, masses: Tensor, grid: Grid) -> Tensor:
        counts = self.counts(grid, masses.shape[1])
        limits = _on_device(tuple(counts), masses.device)
        priority = grid.priority(masses)
        if not self.across_heads:
            return _first(priority, max(counts), limits)
        kept = _first(priority.transpose(1, 2).flatten(2), max(counts), limits)
        return kept.unflatten(2, (masses.shape[1], -1)).transpose(1, 2)


@dataclass(frozen=True)
class CumulativeMass:
    """In each row the heaviest blocks, until they hold `mass` of it; of all blocks of a layer at most a share."""

    mass: float
    at_most: float = 1.0

    def __post_init__(self) -> None:
        check_ratio("mass", self.mass, "a row's attention")
        check_ratio("at_most", self.at_most)

    def opened(self, opening: float) -> Selector:
        if opening == 1.0:
            return SharedBudget(1.0)  # rounded masses may add up to 1 before the last block
        return CumulativeMass(_towards_one(self.mass, opening), _towards_one(self.at_most, opening))

    def max_blocks(self, grid: Grid, lists: int) -> int:
        return SharedBudget(self.at_most).max_blocks(grid, lists)

    def keep(self, masses: Tensor, grid: Grid) -> Tensor:
        order = grid.priority(masses).sort(dim=-1, descending=True, stable=True).indices
        ordered = (masses.gather(-1, order) * _ONE).long()  # sums of integers are the same in any order
        before = ordered.cumsum(-1) - ordered  # a block is wanted while those before it hold too little
        wanted = torch.zeros_like(masses, dtype=torch.bool).scatter(-1, order, before < round(self.mass * _ONE))
        return _at_most(self, masses, wanted, grid)


@dataclass(frozen=True)
class RelativeThreshold:
    """In each row the blocks with at least `ratio` of its largest mass; of all blocks of a layer at most a share."""

    ratio: float
    at_most: float = 1.0

    def __post_init__(self) -> None:
        check_ratio("ratio", self.ratio, "a row's largest mass")
        check_ratio("at_most", self.at_most)

    def opened(self, opening: float) -> Selector:
        if opening == 1.0:
            return SharedBudget(1.0)
        return RelativeThreshold(self.ratio * (1.0 - opening), _towards_one(self.at_most, opening))

    def max_blocks(self, grid: Grid, lists: int) -> int:
        return SharedBudget(self.at_most).max_blocks(grid, lists)

    def keep(self, masses: Tensor, grid: Grid) -> Tensor:
        return _at_most(self, masses, masses >= self.ratio * masses.amax(-1, keepdim=True), grid)


def _towards_one(share: float, opening: float) -> float:
    return share + (1.0 - share) * opening


def _at_most(selector: CumulativeMass | RelativeThreshold, masses: Tensor, wanted: Tensor, grid: Grid) -> Tensor:
    wanted = wanted | grid.forced
    if selector.at_most == 1.0:
        return wanted
    return SharedBudget(selector.at_most).keep(masses.masked_fill(~wanted, -0.5), grid) & wanted


def _first(priority: Tensor, most: int, limits: Tensor | None = None) -> Tensor:
    """True for the `most` largest values of the last dimension; of a row of the one before it, its limit of them."""
    chosen = priority.topk(min(most, priority.shape[-1]), sorted=limits is not None).indices
    keep = torch.zeros_like(priority, dtype=torch.bool)
    if limits is None:
        return keep.scatter_(-1, chosen, True)
    rank = torch.arange(chosen.shape[-1], device=priority.device)
    return keep.scatter_(-1, chosen, (rank < limits[:, None]).expand_as(chosen))


def _level(sizes: tuple[int, ...], total: float) -> float:
    """The level with Σ min(level, size) = total."""
    left = len(sizes)
    for size in sorted(sizes):
        if size * left >= total:
            return total / left
        total, left = total - size, left - 1
    return float(max(sizes))


@plain_cache(64)
def _on_device(counts: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(counts, device=device)


@plain_cache(64)
def grid_of(
    lengths: tuple[int, int], blocks: tuple[int, int], is_causal: bool, sink: int, local: int, device: torch.device
) -> Grid:
    """Made on the host, once for these lengths: its counts are ints, and a device need not be waited for."""
    (seq_q, seq_k), (block_q, block_k) = lengths, blocks
    interval = Interval(right=0) if is_causal else EVERYTHING
    span = Span.of(interval, torch.arange(seq_k - seq_q, seq_k, block_q, device=HOST), seq_k, blocks)
    column = torch.arange(-(-seq_k // block_k), device=HOST)
    visible = (column >= span.first[:, None]) & (column < span.stop[:, None])
    head = torch.arange(0, seq_q, block_q, device=HOST)
    tail = (head + block_q).clamp(max=seq_q) - 1
    near = (head + (seq_k - seq_q) - local) // block_k, (tail + (seq_k - seq_q) + local) // block_k
    forced = (column * block_k < sink) | ((column >= near[0][:, None]) & (column <= near[1][:, None]))
    forced = forced & visible
    return Grid(
        visible.to(device),
        forced.to(device),
        visible.sum(1, dtype=torch.int32).to(device),
        (span.stop_full - 1).clamp(min=-1, max=len(column) - 1).to(device),
        tuple(visible.sum(1).tolist()),
        tuple(forced.sum(1).tolist()),
    )


def _masked(
    grid: Grid, lengths: tuple[int, int], blocks: tuple[int, int], hidden: Tensor | None, ids: Tensor | None
) -> Grid:
    """The grid without blocks that nobody can see because of padding or documents."""
    visible = grid.visible
    if hidden is not None:
        seen = Blocked.of(hidden[:, :, None, None], blocks[1], hidden).real.any(2)
        visible = visible & seen[:, None, None]
    if ids is not None:
        # Apart, if all ids of the one are below all ids of the other: exact where ids ascend, as in packed sequences.
        each = zip((aligned_queries(ids, lengths[0]), ids), blocks, strict=True)
        queries, keys = (Blocked.of(x[:, :, None, None].double(), block) for x, block in each)
        low, high = ([x.extreme(sign)[..., 0, 0] for x in (queries, keys)] for sign in (-1, 1))
        apart = (low[0][:, :, None] > high[1][:, None]) | (high[0][:, :, None] < low[1][:, None])
        visible = visible & ~apart[:, None]
    return replace(grid, visible=visible)


def block_masses(
    q: Tensor,
    k: Tensor,
    *,
    scorer: str | Scorer = "exact",
    block_size: int | tuple[int, int] = 64,
    is_causal: bool = False,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """The share of attention that each query block gives each key block: float32 (float64 for float64) [batch, heads,
    query blocks, key blocks], rows adding up to 1. By default the true one, averaged over the queries of a block; else
    what a scorer estimates. In memory a chunk and the result, never the matrix of pairs. Differentiable.
    """
    _check(q, k, is_causal, key_padding_mask, None)
    blocks, scorer = block_pair(block_size), scorer_of(scorer)
    if scorer == SCORERS["exact"] and q.dtype in (torch.float16, torch.bfloat16):
        q, k = q.float(), k.float()
    scale = check_scale(scale, q.shape[3])
    return estimated_masses(q, k, scorer, blocks, is_causal=is_causal, scale=scale, hidden=key_padding_mask)


@torch.no_grad()
def select_blocks(
    q: Tensor,
    k: Tensor,
    *,
    scorer: str | Scorer = "patches",
    selector: Selector,
    block_size: int | tuple[int, int] = 64,
    is_causal: bool = False,
    sink: int = 1,
    local: int = 1,
    per_kv_head: bool = False,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> BlockLayout:
    """A layout for each sample and head: the blocks that `selector` keeps of what `scorer` estimates.

    No sample depends on another one. With `is_causal` no later block is kept, the layout is causal inside its blocks
    (give it to `block_sparse_attention` as it is), and no query block's estimates depend on tokens behind that block.

    Args:
        q, k: as in `block_sparse_attention`; k may have fewer heads.
        scorer: "mean", "patches" (means of 4 × 4 tokens), "minmax", "moments", "antidiagonal" (stride 8), "sampled"
            (every 8th query), "exact", or a `Scorer`, such as `nn.BlockGate`.
        selector: `SharedBudget`, `TopK`, `CumulativeMass` or `RelativeThreshold`.
        block_size: tokens a block, or (block_q, block_k).
        sink, local: always keep the blocks that hold the first `sink` keys, those that hold the block's own
            positions, and those within `local` tokens of these.
        per_kv_head: one choice for all query heads that share a key head, from their mean masses.
        scale, key_padding_mask, document_ids: as in the attention that follows. Blocks that masks hide are not kept;
            budgets do not count masks.
    """
    _check(q, k, is_causal, key_padding_mask, document_ids)
    blocks, scorer, scale = block_pair(block_size), scorer_of(scorer), check_scale(scale, q.shape[3])
    check_int("sink", sink, least=0)
    check_int("local", local, least=0)
    check_flag("per_kv_head", per_kv_head)
    check_selector(selector)
    lengths, masked = (q.shape[1], k.shape[1]), key_padding_mask is not None or document_ids is not None
    kernels = None if masked else _kernels(q)
    patch = _patch_of(scorer, blocks)
    if kernels and patch and kernels.can_pool(q.shape[3], q.dtype, blocks, patch):
        masses = kernels.masses(q, k, blocks, patch, is_causal=is_causal, scale=scale)
    else:
        masses = estimated_masses(q, k, scorer, blocks, is_causal=is_causal, scale=scale, hidden=key_padding_mask)
    if per_kv_head:
        masses = masses.unflatten(1, (k.shape[2], -1)).mean(2)
    grid = grid_of(lengths, blocks, is_causal, sink, local, q.device)
    if masked:
        grid = _masked(grid, lengths, blocks, key_padding_mask, document_ids)
        masses = masses.masked_fill(~grid.visible, 0.0)
        masses = masses / masses.sum(-1, keepdim=True).clamp(min=torch.finfo(masses.dtype).tiny)
    made = {}
    if kernels and (type(selector) is TopK or type(selector) is SharedBudget):
        team = _team(selector, grid, masses.shape[1])
        by_query, made["query_work"] = kernels.lists(masses, *team)
    else:
        keep = selector.keep(masses, grid) & grid.visible
        by_query = _listed(keep, grid.last_full, q.shape[0] * _places(selector, grid, masses.shape[1]))
    rules, documents, branches = _rules(is_causal, q.device)
    layout = BlockLayout(
        seq_q=lengths[0],
        seq_k=lengths[1],
        block_q=blocks[0],
        block_k=blocks[1],
        by_query=by_query,
        num_heads=masses.shape[1],
        batch_size=q.shape[0],
        rules=rules,
        documents=documents,
        branches=branches,
        checked=True,
    )
    layout._derived.update(made)
    return layout


def _places(selector: Selector, grid: Grid, lists: int) -> int:
    """Of a sample."""
    return min(selector.max_blocks(grid, lists), sum(grid.num_visible) * lists)


def _kernels(q: Tensor) -> ModuleType | None:
    """`kernels.select`, where a CUDA device and dtype have it; who traces or transforms sees the operators instead."""
    if not is_plain_eager(q) or not _has_kernels(q.device, q.dtype, q.shape[3]):
        return None
    from ..kernels import select  # loads triton

    return select


@lru_cache
def _has_kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    return can_run(Request(device=device, dtype=dtype, head_dim=head_dim))[0]


def _patch_of(scorer: Scorer, blocks: tuple[int, int]) -> tuple[int, int] | None:
    """Queries and keys of a patch, of the scorer that the kernels have."""
    return (scorer.queries or blocks[0], scorer.keys or blocks[1]) if type(scorer) is MeanPooled else None


class _Team(NamedTuple):
    """Who shares a budget, and all else that `kernels.select.lists` wants to know."""

    forced: Tensor
    ends: Tensor
    last_full: Tensor
    name: str
    limits: Tensor | None
    places: int
    notes: dict[Any, Any]


@plain_cache(64)
def _team(selector: TopK | SharedBudget, grid: Grid, lists: int) -> _Team:
    """Of a grid without masks, which is remembered itself."""
    places = _places(selector, grid, lists)
    name, limits = "sample", None
    if isinstance(selector, TopK):
        name = "heads" if selector.across_heads else "row"
        limits = torch.tensor(selector.counts(grid, lists), dtype=torch.int32, device=grid.ends.device)
    return _Team(grid.forced.view(torch.uint8), grid.ends, grid.last_full, name, limits, places, {})


def _listed(keep: Tensor, last_full: Tensor, places: int) -> BlockList:
    """The kept blocks as lists with so many places. Blocks ascend, and behind the last full one all are partial."""
    num_k = keep.shape[-1]
    count = keep.flatten().cumsum(0, dtype=torch.int32)
    ends = count.view(-1, num_k)
    offsets = torch.nn.functional.pad(ends[:, -1], (1, 0))
    up_to = last_full.expand(*keep.shape[:-1]).reshape(-1, 1)
    splits = torch.where(up_to[:, 0] < 0, offsets[:-1], ends.gather(1, up_to.clamp(min=0))[:, 0])
    # The p-th kept block stands where the count reaches p.
    wanted = torch.arange(1, places + 1, dtype=torch.int32, device=keep.device)
    indices = torch.searchsorted(count, wanted, out_int32=len(count) < 2**31) % num_k
    return BlockList(offsets, splits, indices.int(), offsets.new_empty(0))


@plain_cache(64)
def _rules(is_causal: bool, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Of a layout; its documents, none; its branches, none."""
    rule = torch.tensor([[Interval(right=0) if is_causal else EVERYTHING]], dtype=torch.int32, device=device)
    return rule, rule.new_empty(2, 0), rule.new_empty(0, 0, 3)


def scorer_of(scorer: str | Scorer) -> Scorer:
    if isinstance(scorer, str):
        if scorer not in SCORERS:
            raise ValueError(f"scorer must be one of {sorted(SCORERS)} or a Scorer, got {scorer!r}")
        return SCORERS[scorer]
    if isinstance(scorer, type) or not callable(getattr(scorer, "features", None)):
        raise TypeError(
            f"scorer must be one of {sorted(SCORERS)} or an object with features(queries, keys, scale), such as "
            f"MeanPooled(), got {shown(scorer)}"
        )
    return scorer


def check_selector(selector: Selector) -> Selector:
    methods = (callable(getattr(selector, name, None)) for name in ("keep", "max_blocks", "opened"))
    if isinstance(selector, type) or not all(methods):
        raise TypeError(f"selector must be SharedBudget(share), TopK(share) or another Selector, got {shown(selector)}")
    return selector


def _check(q: Tensor, k: Tensor, is_causal: bool, key_padding_mask: Tensor | None, document_ids: Tensor | None) -> None:
    check_qkv(q, k, k)
    check_flag("is_causal", is_causal)
    check_masks(q, k, key_padding_mask, document_ids)
