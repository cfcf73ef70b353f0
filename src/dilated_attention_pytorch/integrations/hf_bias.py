"""What models add to scores by `position_bias`, T5 and its kin: one number for each pair of the tokens of a call."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import pad

from ..ops import ScoreBias
from .hf_mask import Facts, turned


def check_position_bias(
    module: nn.Module, query: Tensor, key: Tensor, facts: Facts, position_bias: Tensor | None, *, chooses: bool
) -> None:
    """`chooses`: whether the layer chooses its blocks."""
    if position_bias is None:
        return
    kind, (batch, heads, queries, _), keys = type(module).__name__, query.shape, key.shape[2]
    shape = position_bias.shape
    if len(shape) != 4 or shape[0] not in (1, batch) or shape[1] not in (1, heads) or shape[2:] != (queries, keys):
        raise ValueError(
            f"position_bias={list(shape)} cannot be honoured: {kind} has {batch} samples, {heads} heads, {queries} "
            f"queries and {keys} keys"
        )
    if chooses:
        raise ValueError(f"position_bias cannot be honoured where blocks are chosen, which does not see it ({kind})")
    if facts.placement is not None:
        raise ValueError(f"position_bias cannot be honoured over a ring ({kind})")
    if facts.cached and facts.recomputed is None:
        raise ValueError(f"position_bias cannot be honoured with a cache: generate with use_cache=False ({kind})")


def of_same_tokens(position_bias: Tensor, facts: Facts, first: Tensor | None, batch: int, earlier: int) -> ScoreBias:
    """The bias of the tokens that attention is computed of.

    Args:
        position_bias: (batch or 1, heads or 1, queries, keys), as the model gives it.
        first: the first real token of each sample, which rows are turned to; None if they are not.
        earlier: queries that were put before those of the call.
    """
    bias = position_bias
    if facts.recomputed is not None:
        bias = pad(bias[..., : facts.recomputed], (facts.dropped, 0, earlier, 0))
    elif facts.is_causal:  # a cache may have room for more
        bias = bias[..., : bias.shape[2]]
    if first is not None:
        by_query = turned(bias.expand(batch, -1, -1, -1).transpose(1, 2), first)
        bias = turned(by_query.transpose(1, 3), first).permute(0, 2, 3, 1)
    return ScoreBias.dense(bias)
