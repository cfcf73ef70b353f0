"""The option of a module that spreads its sequence over the ranks of a group. Unused, it costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import wraps
from typing import Any, ParamSpec, Self, TypeVar

import torch.distributed as dist
from torch import Tensor

from ..distributed import Placement
from ..distributed.agreement import told_to_all
from ..distributed.attention import whole_length
from ..distributed.exchange import Group, Shared, check_group
from ..distributed.shard import check_placement, positions_on

P = ParamSpec("P")
T = TypeVar("T")


class Ringed:
    """Mixin of attention modules: call `set_ring` in the constructor and `ring_options` in forward, which is
    `heard_by_all`."""

    _ring: Shared | None = None

    def set_ring(self, ring_group: Group | None) -> None:
        self._ring = None if ring_group is None else Shared(check_group(ring_group))

    @property
    def ring_group(self) -> dist.ProcessGroup | None:
        """The ranks that the sequence is spread over; None for a ring of one."""
        return None if self._ring is None else self._ring.value

    def alone(self) -> Self:
        """The module on this rank by itself, with the same parameters."""
        if self._ring is None:
            return self
        module = copy(self)
        module._ring = None
        return module

    def positions(self, x: Tensor, placement: Placement | None) -> Tensor | None:
        """Where the tokens of x (batch, tokens, …) are in the whole sequence, int64 [tokens]: over a ring of their
        placement, which must then be given; None without a ring."""
        group = self.ring_group
        if group is None:
            self.ring_options(placement, with_weights=False)
            return None
        with told_to_all(group):
            if placement is None:
                raise ValueError("placement must be given over a ring: the one by which the tokens were cut")
            check_placement(placement, group)
            mine = placement.num_tokens(group.rank())
            if x.ndim < 2 or x.shape[1] != mine:
                raise ValueError(f"this rank must be given its {mine} tokens of the placement, got {list(x.shape)}")
        return positions_on(placement, group.rank(), x.device)

    def of_first_rank(self, x: Tensor) -> Tensor:
        """What the first rank has; every rank gives a tensor of the same kind."""
        if self.ring_group is not None:
            dist.broadcast(x, group=self.ring_group, group_src=0)
        return x

    def ring_options(self, placement: Placement | None, with_weights: bool) -> dict[str, Any]:
        """What the ring's operator takes besides; empty without a ring."""
        if self.ring_group is None:
            if placement is not None:
                raise ValueError("placement has no meaning without ring_group; leave it out")
            return {}
        if with_weights:
            raise ValueError("return_attention_weights is not possible over a ring: no rank has all keys of a row")
        return {"group": self.ring_group, "placement": placement}

    def whole_length(self, tokens: int, placement: Placement | None) -> int:
        """Tokens of the whole sequence, of which a call has so many on this rank."""
        return tokens if self.ring_group is None else whole_length(tokens, self.ring_group, placement)


def heard_by_all(forward: Callable[P, T]) -> Callable[P, T]:
    """A module's `forward` that tells the ranks of its ring whatever stops this one before they agree on the call."""

    @wraps(forward)
    def call(*args: P.args, **options: P.kwargs) -> T:
        module: Any = args[0]
        if module._ring is None:
            return forward(*args, **options)
        with told_to_all(module.ring_group):
            return forward(*args, **options)

    return call
