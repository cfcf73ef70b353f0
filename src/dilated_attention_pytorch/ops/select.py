"""`select_blocks`: the blocks that matter for these queries and keys, as a layout, on the device, without a host sync.

    layout = select_blocks(q, k, selector=SharedBudget(0.25), block_size=(64, 16), is_causal=True)
    out = block_sparse_attention(q, k, v, layout)

One path: estimated masses (`ops.scores`) → a selector keeps some → a layout with a fixed number of places, however many
were kept. Of all blocks only the masses are ever stored.

On a CUDA device `kernels.select_masses` and `kernels.select_lists` compute the same in a few launches: the masses of
all scorers (those of the table in `ops.scores` from tokens, others from their features), and the lists of `TopK` and
`SharedBudget`. What is written here defines them, and does everything else: other selectors, key padding and
documents, float64, calls under a trace or transform.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends.base import Request
from ..backends.triton import can_run
from ..caches import cached
from ..layout import BlockLayout, BlockList
from ..layout.checks import block_pair
from ..layout.eager import is_plain_eager, plain_cache
from ..layout.lists import HOST
from ..patterns.base import check_flag, check_int, did_you_mean, shown, value_of
from ..patterns.blocks import ceil_div
from ..patterns.tokens import EVERYTHING, Interval
from .checks import check_masks, check_qkv, check_scale
from .grids import extra_places, grid_of, listed, masked_grid, own_blocks
from .named import Opened
from .scores import (
    Antidiagonal,
    Blocked,
    MeanPooled,
    MinMaxBound,
    Moments,
    SampledRows,
    Scorer,
    estimated_masses,
    features_of,
)
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

BY_NAME = (MeanPooled, MinMaxBound, Moments, Antidiagonal, SampledRows)  # scorers that their text tells
POOLED = {MeanPooled: "mean", MinMaxBound: "box", Moments: "moments"}  # what the kernels make, and call it
OURS = (SharedBudget, TopK, CumulativeMass, RelativeThreshold)


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
    lengths: Tensor | None = None,
    dense_below: int = 0,
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
        lengths: int32 or int64 [batch], the tokens of each sample, where rows are padded at their ends (q and k of the
            same tokens). What is behind counts for nothing, budgets of `TopK` included: a sample chooses what it
            would choose alone. Give the padding to the attention as well.
        dense_below: samples of at most so many tokens keep all their blocks.
    """
    _check(q, k, is_causal, key_padding_mask, document_ids)
    _check_own_lengths(q, k, lengths, selector)
    check_int("dense_below", dense_below, least=0)
    blocks, scorer, scale = block_pair(block_size), scorer_of(scorer), check_scale(scale, q.shape[3])
    check_int("sink", sink, least=0)
    check_int("local", local, least=0)
    check_flag("per_kv_head", per_kv_head)
    chosen_by: Any
    chosen_by, opening = selector if isinstance(selector, Opened) else (selector, None)
    check_selector(chosen_by)
    how = _How(*blocks, is_causal, sink, local, per_kv_head, scale, dense_below)
    if lengths is None and max(q.shape[1], k.shape[1]) <= dense_below:
        chosen_by, opening = SharedBudget(1.0), None
    traced = not is_plain_eager(q, k) and type(chosen_by) in OURS  # another is traced itself, for these lengths alone
    choose = _choose_by_operator if traced else _choose
    masks = key_padding_mask, document_ids, lengths
    by_query, rule, work = choose(q, k, scorer, chosen_by, opening, how, *masks)
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
        bitmaps=rule.new_empty(0, 0, 0, dtype=torch.int16),
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
    dense_below: int


def _choose(
    q: Tensor,
    k: Tensor,
    scorer: Scorer,
    selector: Selector,
    opening: Tensor | None,
    how: _How,
    key_padding_mask: Tensor | None,
    document_ids: Tensor | None,
    own_lengths: Tensor | None,
) -> tuple[BlockList, Tensor, Tensor | None]:
    """The lists, the rule of all partial blocks, and the order of work if it came along."""
    if opening is not None:
        selector = selector.opened(opening.item())
    blocks, is_causal, scale = (how.block_q, how.block_k), how.is_causal, how.scale
    lengths = operator.index(q.shape[1]), operator.index(k.shape[1])
    padded = None
    if own_lengths is not None:
        padded = torch.arange(lengths[1], device=q.device) >= own_lengths[:, None]
        key_padding_mask = padded if key_padding_mask is None else padded | key_padding_mask
    masked = key_padding_mask is not None or document_ids is not None
    kernels = None if masked else _kernels(q)
    listed_by_kernel = kernels is not None and type(selector) in (TopK, SharedBudget)
    fused = kernels and _features_of(kernels.features, scorer, q, k, blocks, scale)
    grid = grid_of(lengths, blocks, is_causal, how.sink, how.local, q.device)
    if kernels and fused:
        # Weights of 16 bits where products are no finer, and lists are all that comes of them.
        coarse = q.dtype.itemsize == 2 and listed_by_kernel and not how.per_kv_head
        forced = _forced(grid) if coarse else None
        masses = kernels.masses.fused_masses(q, k, blocks, fused, is_causal=is_causal, scale=scale, forced=forced)
    else:
        hidden = {"hidden": key_padding_mask, "padded": padded}
        masses = estimated_masses(q, k, scorer, blocks, is_causal=is_causal, scale=scale, **hidden)
    if how.per_kv_head:
        masses = masses.unflatten(1, (k.shape[2], -1)).mean(2)
    if masked:
        grid = masked_grid(grid, lengths, blocks, key_padding_mask, document_ids)
        masses = masses.masked_fill(~grid.visible, 0.0)
        masses = masses / masses.sum(-1, keepdim=True).clamp(min=torch.finfo(masses.dtype).tiny)
    if own_lengths is not None:
        grid = replace(grid, own=own_blocks(grid, blocks, own_lengths))
    rule = _rule(is_causal, q.device)
    if kernels and isinstance(selector, TopK | SharedBudget) and listed_by_kernel:
        team = _team(selector, grid, masses.shape[1])
        by_query, work = kernels.lists.heaviest_blocks(masses, *team)
        return by_query, rule, work
    keep = selector.keep(masses, grid) & grid.visible
    places = _places(selector, grid, masses.shape[1])
    if own_lengths is not None and how.dense_below:
        dense = (grid.own > 0) & (own_lengths <= how.dense_below)[:, None]  # type: ignore[operator]
        keep = keep | (dense[:, None, :, None] & grid.visible)
        places += extra_places(grid, blocks, how.dense_below, masses.shape[1], places)
    return listed(keep, grid.last_full, q.shape[0] * places), rule, None


def _choose_by_operator(
    q: Tensor,
    k: Tensor,
    scorer: Scorer,
    selector: Selector,
    opening: Tensor | None,
    how: _How,
    key_padding_mask: Tensor | None,
    document_ids: Tensor | None,
    own_lengths: Tensor | None,
) -> tuple[BlockList, Tensor, Tensor | None]:
    """The same under a trace, a mode or a transform: an operator, for lengths that may be symbolic."""
    features: list[Tensor] = []
    name = ""
    if type(scorer) in BY_NAME:
        name = scorer.text  # type: ignore[attr-defined]
    else:
        padded = None if own_lengths is None else torch.arange(k.shape[1], device=k.device) >= own_lengths[:, None]
        hidden = key_padding_mask if padded is None or key_padding_mask is None else padded | key_padding_mask
        hidden = padded if hidden is None else hidden
        blocked = Blocked.of(q, how.block_q, padded), Blocked.of(k, how.block_k, hidden)
        features = list(scorer.features(*blocked, how.scale))
    given = features, name, selector.text, opening  # type: ignore[attr-defined]
    masks = key_padding_mask, document_ids, own_lengths
    offsets, splits, indices, rule, *work = _choice(q, k, *given, *how, *masks)
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
    dense_below: int,
    key_padding_mask: Tensor | None,
    document_ids: Tensor | None,
    own_lengths: Tensor | None,
) -> list[Tensor]:
    how = _How(block_q, block_k, is_causal, sink, local, per_kv_head, scale, dense_below)
    asked = _Featured(*features) if features else value_of(scorer)
    masks = key_padding_mask, document_ids, own_lengths
    lists, rule, work = _choose(q, k, asked, value_of(selector), opening, how, *masks)
    results = [lists.offsets, lists.splits, lists.indices, rule.clone()]
    if not q.is_cuda:
        return results
    return [*results, lists.work(q.shape[0] * (k if per_kv_head else q).shape[2]) if work is None else work]


@_choice.register_fake
def _(q, k, features, scorer, selector, opening, *how_and_masks):  # type: ignore[no-untyped-def]
    how, own_lengths = _How(*how_and_masks[: len(_How._fields)]), how_and_masks[-1]
    (batch, seq_q, heads, _), seq_k = q.shape, k.shape[1]
    lists = k.shape[2] if how.per_kv_head else heads
    rows = batch * lists * ceil_div(seq_q, how.block_q)
    if opening is None and all(isinstance(n, int) for n in (batch, lists, seq_q, seq_k)):
        blocks = how.block_q, how.block_k
        grid = grid_of((seq_q, seq_k), blocks, how.is_causal, how.sink, how.local, HOST)
        places: Any = _places(value_of(selector), grid, lists)
        if own_lengths is not None and how.dense_below:
            places += extra_places(grid, blocks, how.dense_below, lists, places)
        places *= batch
    else:
        places = torch.library.get_ctx().new_dynamic_size()
    shapes = [(rows + 1,), (rows,), (places,), (1, 1, len(EVERYTHING)), *([(rows, 4)] if q.is_cuda else [])]
    return [q.new_empty(shape, dtype=torch.int32) for shape in shapes]


def _places(selector: Selector, grid: Grid, lists: int) -> int:
    """Of a sample."""
    return min(selector.max_blocks(grid, lists), sum(grid.num_visible) * lists)


class _Kernels(NamedTuple):
    """`kernels.select_features`, `select_masses` and `select_lists`."""

    features: ModuleType
    masses: ModuleType
    lists: ModuleType


def _kernels(q: Tensor) -> _Kernels | None:
    """Those for a CUDA device and dtype that has them; calls that are traced or transformed use the operators."""
    if not is_plain_eager(q) or not _has_kernels(q.device, q.dtype, q.shape[3]):
        return None
    from ..kernels import select_features, select_lists, select_masses  # loads triton

    return _Kernels(select_features, select_masses, select_lists)


@cached(128, "whether a device has kernels for selecting blocks")
def _has_kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    return can_run(Request(device=device, dtype=dtype, head_dim=head_dim))[0]


def _features_of(
    kernels: ModuleType, scorer: Scorer, q: Tensor, k: Tensor, blocks: tuple[int, int], scale: float
) -> Any:
    """What a scorer multiplies, as the kernel takes it; None where it has no room for that."""
    kind = type(scorer)
    found: Any = None
    if isinstance(scorer, MeanPooled | MinMaxBound | Moments) and kind in POOLED:
        found = kernels.Pooled(POOLED[kind], (scorer.queries or blocks[0], scorer.keys or blocks[1]))
    elif kind in (Antidiagonal, SampledRows):
        if scale > 0:
            found = (kernels.Antidiagonals if kind is Antidiagonal else kernels.Sampled)(scorer.stride)  # type: ignore[attr-defined]
    elif callable(getattr(scorer, "of_patches", None)):
        patch = scorer.scorer.queries or blocks[0], scorer.scorer.keys or blocks[1]  # type: ignore[attr-defined]
        if kernels.Pooled("mean", patch).fits(q.shape[3], q.dtype, blocks):
            made = scorer.of_patches(*kernels.patches(q, k, blocks, patch, scale))  # type: ignore[attr-defined]
            found = kernels.Given(*made, patch)
    else:
        found = kernels.Given(*features_of(scorer, Blocked.of(q, blocks[0]), Blocked.of(k, blocks[1]), q, k, scale))
    return found if found is not None and found.fits(q.shape[3], q.dtype, blocks) else None


class _Team(NamedTuple):
    """Who shares a budget, and what else `kernels.select_lists.heaviest_blocks` needs."""

    forced: Tensor
    ends: Tensor
    last_full: Tensor
    name: str
    limits: Tensor | None
    places: int
    notes: dict[Any, Any]


@plain_cache(64, "what the kernels of a selection need besides the masses")
def _team(selector: TopK | SharedBudget, grid: Grid, lists: int) -> _Team:
    """Of a grid without masks, which is remembered itself."""
    places = _places(selector, grid, lists)
    name, limits = "sample", None
    if isinstance(selector, TopK):
        name = "heads" if selector.across_heads else "row"
        limits = torch.tensor(selector.counts(grid, lists), dtype=torch.int32, device=grid.ends.device)
    return _Team(_forced(grid), grid.ends, grid.last_full, name, limits, places, {})


def _forced(grid: Grid) -> Tensor:
    return grid.forced.view(torch.uint8)


@plain_cache(64, "the token rule of selected blocks, on a device")
def _rule(is_causal: bool, device: torch.device) -> Tensor:
    """Of all partial blocks."""
    return torch.tensor([[Interval(right=0) if is_causal else EVERYTHING]], dtype=torch.int32, device=device)


def scorer_of(scorer: str | Scorer, name: str = "scorer") -> Scorer:
    if isinstance(scorer, str):
        if scorer not in SCORERS:
            meant = did_you_mean(scorer, SCORERS)
            raise ValueError(f"{name} must be one of {sorted(SCORERS)} or a Scorer, got {scorer!r}{meant}")
        return SCORERS[scorer]
    if isinstance(scorer, type) or not callable(getattr(scorer, "features", None)):
        raise TypeError(
            f"{name} must be one of {sorted(SCORERS)} or an object with features(queries, keys, scale), such as "
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


def _check_own_lengths(q: Tensor, k: Tensor, lengths: Tensor | None, selector: Any) -> None:
    if lengths is None:
        return
    if not isinstance(lengths, Tensor):
        raise TypeError(f"lengths must be a tensor or None, got {type(lengths).__name__}")
    if lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"lengths must be int32 or int64, got {lengths.dtype}")
    if lengths.shape != (len(q),):
        raise ValueError(f"lengths must be one for each of {len(q)} samples, got shape {list(lengths.shape)}")
    if lengths.device != q.device:
        raise ValueError(f"lengths must be on the device of q, {q.device}, got {lengths.device}")
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"lengths are of q and k of the same tokens, got {q.shape[1]} and {k.shape[1]}")
    by = selector.what if isinstance(selector, Opened) else selector
    if type(by) in OURS and type(by) is not TopK:
        raise ValueError(f"lengths need a selector whose rows have budgets of their own, TopK, got {by}")
