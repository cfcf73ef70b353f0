"""Cross entropy of a language model without the logits of a whole sequence: for a million tokens and a vocabulary of
50,000 these would be 200 GB in float32, and as much again their gradient."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from ..backends.base import compute_dtype

IGNORED = -100  # a target that counts nothing
MOST_LOGITS = 1 << 24  # at a time: 64 MiB in float32


def summed_cross_entropy(features: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    """The sum of −log p(target) over all tokens whose target is not −100, in nats and at least float32.

    `head` gives the logits of some tokens at a time; in the backward pass it gives them again.

    Args:
        features: (batch, seq, dim).
        targets: int64 (batch, seq).
    """
    rows, wanted = features.flatten(0, 1), targets.flatten()
    at_a_time = max(1, MOST_LOGITS // head.out_features)
    if len(rows) <= at_a_time:
        return _of_some(rows, head, wanted)
    parts = zip(rows.split(at_a_time), wanted.split(at_a_time), strict=True)
    return sum((checkpoint(_of_some, x, head, y, use_reentrant=False) for x, y in parts), features.new_zeros(()))


def _of_some(features: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    logits = head(features)
    return cross_entropy(logits.to(compute_dtype(logits.dtype)), targets, ignore_index=IGNORED, reduction="sum")
