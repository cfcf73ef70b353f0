"""`ring_block_sparse_attention` and `ring_dilated_attention`: the plain operators over a sequence spread over ranks.

In plain eager PyTorch `ring.attend` runs them. In a graph of `torch.compile`, and where something intercepts PyTorch,
as selective activation checkpointing does, `operators.attend` does: the same, as an operator of `torch.library`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from ..layout import BlockLayout
from ..layout.eager import is_plain_eager
from ..ops import block_sparse_attention, dilated_attention
from ..ops.checks import refuse_branches
from ..options import OptionKeywords
from ..patterns import Branches, Pattern
from ..patterns.base import check_flag
from ..patterns.branches import check_heads
from . import operators, ring
from .agreement import agree, broadcast_refusal, check_agreement, untraced
from .exchange import Group, check_group
from .ring import check_alone
from .shard import Placement


def ring_block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout_or_pattern: BlockLayout | Pattern,
    *,
    group: Group,
    placement: Placement | None = None,
    is_causal: bool = False,
    agreement: str = "first",
    return_lse: bool = False,
    backend: str = "auto",
    **options: Unpack[OptionKeywords],
) -> Tensor | tuple[Tensor, Tensor]:
    """`block_sparse_attention` over a ring: every rank gives and gets its own shard, and the result is the same.

    All ranks of the group call it together, with the same arguments but for the shards; a difference is an error on
    every rank that names it. Only the key and value blocks that a rank's queries attend to travel.

    Args:
        q, k, v: this rank's shards, (batch, tokens of the shard, heads, head_dim).
        layout_or_pattern: of the whole sequence. From a pattern, a rank builds its own rows alone.
        group: the ring: a process group, or a DeviceMesh of one dimension.
        placement: who holds which tokens, of queries and keys alike. By default one run for each rank in order, as
            long as the shards are; all but the last must be multiples of 16 tokens.
        agreement: when the ranks compare what they do: "always" before they exchange anything, "first" so in the first
            call of a kind and then while they exchange, "never" not at all: then a difference is a hang or nonsense.
        is_causal, return_lse, backend: as in `block_sparse_attention`. Backends "sdpa" and "reference" have no backward
            for a part of the keys and cannot run.
        options: as in `block_sparse_attention`. `key_padding_mask`, `document_ids` and what a `bias` says of keys are
            of this rank's keys, (batch, tokens of the shard); a dense bias has the rows of this rank's queries and the
            keys of all. Slopes are for backend "blockwise"; tables and dense ones need a placement. What all ranks
            share, sinks and slopes, say, is the same on every rank and gets the gradient of this rank's queries. The
            seed of dropout is drawn by the first rank, so that the draw is that of the plain operator there.
    """
    call: Any = {"is_causal": is_causal, "return_lse": return_lse, "backend": backend, **options}
    in_graph = torch.compiler.is_dynamo_compiling() and isinstance(layout_or_pattern, Pattern)
    return (_in_graph if in_graph else _outside)(q, k, v, layout_or_pattern, group, placement, agreement, **call)


def ring_dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    group: Group,
    placement: Placement | None = None,
    is_causal: bool = False,
    head_offsets: str = "interleaved",
    detach_branch_weights: bool = False,
    agreement: str = "first",
    return_lse: bool = False,
    backend: str = "auto",
    **options: Unpack[OptionKeywords],
) -> Tensor | tuple[Tensor, Tensor]:
    """`dilated_attention` over a ring: every rank gives and gets its own shard, and the result is the same.

    A rank receives the keys of its queries' segments, and of those only what each head keeps: a branch (w, r) costs at
    most w / r keys of each head, however long the sequence is.

    Args:
        q, k, v, group, placement, agreement, options: as in `ring_block_sparse_attention`, but there are no
            `document_ids`. Shards whose starts are multiples of 128 · lcm(dilation_rates) are computed with the fewest
            mixed blocks.
        segment_lengths, dilation_rates, head_offsets, detach_branch_weights: as in `dilated_attention`; so are
            is_causal, return_lse and backend.
    """
    of_branches = {
        "segment_lengths": segment_lengths,
        "dilation_rates": dilation_rates,
        "head_offsets": head_offsets,
        "detach_branch_weights": detach_branch_weights,
    }
    call: Any = {"is_causal": is_causal, "return_lse": return_lse, "backend": backend, **options}
    in_graph = torch.compiler.is_dynamo_compiling()
    return (_in_graph if in_graph else _outside)(q, k, v, of_branches, group, placement, agreement, **call)


What = BlockLayout | Pattern | dict[str, Any]  # or the arguments that say which branches


def _in_graph(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    what: What,
    group: Group,
    placement: Placement | None,
    agreement: str,
    **call: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """As an operator."""
    name, rank, size = operators.name_rank_and_size(group)
    check_agreement(agreement)
    if size == 1:
        return _alone(q, k, v, what, **call)
    out, lse = operators.attend(q, k, v, _parts(q, what, call), (name, rank), placement, agreement, **call)
    return (out, lse) if call["return_lse"] else out


@untraced
def _outside(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    what: What,
    group: Group,
    placement: Placement | None,
    agreement: str,
    **call: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Of a graph."""
    group = check_group(group)
    with broadcast_refusal(group):
        if not isinstance(what, BlockLayout) and _is_intercepted(q, k, v):
            return _in_graph(q, k, v, what, group, placement, agreement, **call)
        check_agreement(agreement)
        if dist.get_world_size(group) == 1:
            check_alone(placement, group, q, k, v)
            return _alone(q, k, v, what, **call)
        out, lse = ring.attend(q, k, v, _parts(q, what, call), group, placement, agreement, **call)
        return (out, lse) if call["return_lse"] else out


def _is_intercepted(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a mode or a transform is to see one operator; but tensors of no device are for nobody."""
    return all(isinstance(x, Tensor) and not x.is_meta for x in (q, k, v)) and not is_plain_eager(q, k, v)


def _alone(q: Tensor, k: Tensor, v: Tensor, what: What, **call: Any) -> Tensor | tuple[Tensor, Tensor]:
    if isinstance(what, dict):
        return dilated_attention(q, k, v, **what, **call)
    return block_sparse_attention(q, k, v, what, **call)


def _parts(q: Tensor, what: What, options: dict[str, Any]) -> Sequence[BlockLayout | Pattern | Branches]:
    """What is attended to; several, if they are mixed by shares that get no gradient."""
    if not isinstance(what, dict):
        refuse_branches(what)
        return [what]
    if options.get("document_ids") is not None:
        raise TypeError("document_ids is no option of dilated attention")
    check_flag("detach_branch_weights", what["detach_branch_weights"])
    branches = Branches(what["segment_lengths"], what["dilation_rates"], what["head_offsets"])
    if isinstance(q, Tensor) and q.ndim == 4:  # anything else is refused later
        check_heads(branches.dilation_rates, q.shape[2])
    return branches.alone() if what["detach_branch_weights"] and len(branches) > 1 else [branches]


@untraced
def whole_length(tokens: int, group: dist.ProcessGroup, placement: Placement | None) -> int:
    """Tokens of a sequence of which each rank holds so many. Without a placement all ranks call it together."""
    if isinstance(placement, Placement):
        return placement.seq
    return int(agree(group, {"pattern": "one that a schedule opens"}, tokens, more=True).sum())
