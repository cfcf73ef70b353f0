"""`prefill`: a prompt that no rank reads alone, for models of transformers that are registered over a ring."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ..distributed import Placement, shard_batch, unshard_sequence
from ..distributed.exchange import Group, check_group
from ..patterns.blocks import BLOCK_SIZES


@torch.no_grad()
def prefill(
    model: PreTrainedModel, input_ids: Tensor, *, group: Group, placement: Placement | None = None
) -> DynamicCache:
    """The cache of a prompt but for its last token: `model.generate(input_ids, past_key_values=cache)` goes on.

    All ranks of the ring call it together, and `generate` after it. Each computes its part of the prompt, and has the
    keys and values of all of it in the end; the tokens that follow each rank attends for by itself. So they must
    sample alike: `do_sample=False`, or the same seed on every rank.

    Args:
        model: with the name of a pattern that is registered with this group.
        input_ids: (batch, seq), the whole prompts, of one length.
        group: the ring.
        placement: of all tokens but the last; by default one run for each rank.
    """
    group = check_group(group)
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or input_ids.shape[1] < 2:
        got = list(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise ValueError(f"input_ids must be (batch, seq) of at least 2 tokens, got {got}")
    if placement is None:
        placement = Placement.contiguous(input_ids.shape[1] - 1, group.size(), block_size=BLOCK_SIZES[0])
    own, _ = shard_batch({"input_ids": input_ids[:, :-1]}, group, placement)
    part, whole = DynamicCache(), DynamicCache()
    model.base_model(**own, past_key_values=part, use_cache=True)
    for number, layer in enumerate(part.layers):
        assert isinstance(layer, DynamicLayer)
        assert layer.keys is not None
        assert layer.values is not None
        keys, values = (unshard_sequence(x, placement, group=group, dim=2) for x in (layer.keys, layer.values))
        layer.keys = layer.values = None
        whole.update(keys, values, number)
    return whole
