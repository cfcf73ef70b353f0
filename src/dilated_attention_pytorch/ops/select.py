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

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends.base import Request, aligned_queries
from ..backends.triton import can_run
from ..layout import BlockLayout, BlockList
from ..layout.build import Span
from ..layout.checks import block_pair
from ..layout.eager import is_plain_eager, plain_cache
from ..layout.lists import HOST
from ..patterns.base import check_flag, check_int, shown, value_of
from ..patterns.blocks import ceil_div
from ..patterns.tokens import EVERYTHING, Interval
from .checks import check_masks, check_qkv, check_scale
from .named import Opened
from .scores import Antidiagonal, Blocked, MeanPooled, MinMaxBound, Moments, SampledRows, Scorer, estimated_masses
from .selectors import CumulativeMass, Grid, RelativeThreshold, Selector, SharedBudget, TopK

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

OURS = (SharedBudget, TopK, CumulativeMass, RelativeThreshold)


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
    selector: Selector | Opened,
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
    chosen_by: Any
    chosen_by, opening = selector if isinstance(selector, Opened) else (selector, None)
    check_selector(chosen_by)
    how = _How(*blocks, is_causal, sink, local, per_kv_head, scale)
    traced = not is_plain_eager(q, k) and type(chosen_by) in OURS  # another is traced itself, for these lengths alone
    choose = _choose_by_operator if traced else _choose
    by_query, rule, work = choose(q, k, scorer, chosen_by, opening, how, key_padding_mask, document_ids)
    layout = BlockLayout(
        seq_q=q.shape[1],
        seq_k=k.shape[1],
        block_q=blocks[0],
        block_k=blocks[1],
        by_query=by_query,
        num_heads=k.shape[2] if per_kv_head else q.shape[2],
        batch_size=q.shape[0],
        rules=rule,
        documents=rule.new_empty(2, 0),
        branches=rule.new_empty(0, 0, 3),
        checked=True,
    )
    if work is not None:
        layout._derived["query_work"] = work
    return layout


class _How(NamedTuple):
    """How blocks are chosen, apart from scorer, selector and masks."""

    block_q: int
    block_k: int
    is_causal: bool
    sink: int
    local: int
    per_kv_head: bool
    scale: float


def _choose(
    q: Tensor,
    k: Tensor,
    scorer: Scorer,
    selector: Selector,
    opening: Tensor | None,
    how: _How,
    key_padding_mask: Tensor | None,
    document_ids: Tensor | None,
) -> tuple[BlockList, Tensor, Tensor | None]:
    """The lists, the rule of all partial blocks, and the order of work if it came along."""
    if opening is not None:
        selector = selector.opened(opening.item())
    blocks, is_causal, scale = (how.block_q, how.block_k), how.is_causal, how.scale
    lengths = operator.index(q.shape[1]), operator.index(k.shape[1])
    masked = key_padding_mask is not None or document_ids is not None
    kernels = None if masked else _kernels(q)
    patch = _patch_of(scorer, blocks)
    if kernels and patch and kernels.can_pool(q.shape[3], q.dtype, blocks, patch):
        masses = kernels.masses(q, k, blocks, patch, is_causal=is_causal, scale=scale)
    else:
        masses = estimated_masses(q, k, scorer, blocks, is_causal=is_causal, scale=scale, hidden=key_padding_mask)
    if how.per_kv_head:
        masses = masses.unflatten(1, (k.shape[2], -1)).mean(2)
    grid = grid_of(lengths, blocks, is_causal, how.sink, how.local, q.device)
    if masked:
        grid = _masked(grid, lengths, blocks, key_padding_mask, document_ids)
        masses = masses.masked_fill(~grid.visible, 0.0)
        masses = masses / masses.sum(-1, keepdim=True).clamp(min=torch.finfo(masses.dtype).tiny)
    rule = _rule(is_causal, q.device)
    if kernels and (type(selector) is TopK or type(selector) is SharedBudget):
        team = _team(selector, grid, masses.shape[1])
        by_query, work = kernels.lists(masses, *team)
        return by_query, rule, work
    keep = selector.keep(masses, grid) & grid.visible
    return _listed(keep, grid.last_full, q.shape[0] * _places(selector, grid, masses.shape[1])), rule, None


def _choose_by_operator(
    q: Tensor,
    k: Tensor,
    scorer: Scorer,
    selector: Selector,
    opening: Tensor | None,
    how: _How,
    key_padding_mask: Tensor | None,
    document_ids: Tensor | None,
) -> tuple[BlockList, Tensor, Tensor | None]:
    """The same under a trace, a mode or a transform: an operator, for lengths that may be symbolic."""
    features: list[Tensor] = []
    name = ""
    if type(scorer) in (type(each) for each in SCORERS.values()):
        name = scorer.text  # type: ignore[attr-defined]
    else:
        blocked = Blocked.of(q, how.block_q), Blocked.of(k, how.block_k, key_padding_mask)
        features = list(scorer.features(*blocked, how.scale))
    given = features, name, selector.text, opening  # type: ignore[attr-defined]
    offsets, splits, indices, rule, *work = _choice(q, k, *given, *how, key_padding_mask, document_ids)
    return BlockList(offsets, splits, indices, offsets.new_empty(0)), rule, work[0] if work else None


@dataclass(frozen=True)
class _Featured:
    """A scorer that was asked already."""

    rows: Tensor
    columns: Tensor

    def features(self, queries: Blocked, keys: Blocked, scale: float) -> tuple[Tensor, Tensor]:
        return self.rows, self.columns


@torch.library.custom_op(
    "dilated_attention_pytorch::select_blocks", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def _choice(
    q: Tensor,
    k: Tensor,
    features: list[Tensor],
    scorer: str,
    selector: str,
    opening: Tensor | None,
    block_q: int,
    block_k: int,
    is_causal: bool,
    sink: int,
    local: int,
    per_kv_head: bool,
    scale: float,
    key_padding_mask: Tensor | None,
    document_ids: Tensor | None,
) -> list[Tensor]:
    how = _How(block_q, block_k, is_causal, sink, local, per_kv_head, scale)
    asked = _Featured(*features) if features else value_of(scorer)
    masks = key_padding_mask, document_ids
    lists, rule, work = _choose(q, k, asked, value_of(selector), opening, how, *masks)
    results = [lists.offsets, lists.splits, lists.indices, rule.clone()]
    if not q.is_cuda:
        return results
    return [*results, lists.work(q.shape[0] * (k if per_kv_head else q).shape[2]) if work is None else work]


@_choice.register_fake
def _(q, k, features, scorer, selector, opening, block_q, block_k, is_causal, sink, local, per_kv_head, scale, *masks):  # type: ignore[no-untyped-def]
    (batch, seq_q, heads, _), seq_k = q.shape, k.shape[1]
    lists = k.shape[2] if per_kv_head else heads
    rows = batch * lists * ceil_div(seq_q, block_q)
    if opening is None and all(isinstance(n, int) for n in (batch, lists, seq_q, seq_k)):
        grid = grid_of((seq_q, seq_k), (block_q, block_k), is_causal, sink, local, HOST)
        places = batch * _places(value_of(selector), grid, lists)
    else:
        places = torch.library.get_ctx().new_dynamic_size()
    shapes = [(rows + 1,), (rows,), (places,), (1, 1, len(EVERYTHING)), *([(rows, 4)] if q.is_cuda else [])]
    return [q.new_empty(shape, dtype=torch.int32) for shape in shapes]


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
    small: Any = {"out_int32": True} if len(count) < 2**31 else {}  # a symbolic bool is no argument
    indices = torch.searchsorted(count, wanted, **small) % num_k
    return BlockList(offsets, splits, indices.int(), offsets.new_empty(0))


@plain_cache(64)
def _rule(is_causal: bool, device: torch.device) -> Tensor:
    """Of all partial blocks."""
    return torch.tensor([[Interval(right=0) if is_causal else EVERYTHING]], dtype=torch.int32, device=device)


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
