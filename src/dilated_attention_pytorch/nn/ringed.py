"""The option of a module that spreads its sequence over the ranks of a group. Unused, it costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from ..distributed import Placement
from ..distributed.agreement import broadcast_refusal, untraced
from ..distributed.exchange import Group, Shared, check_group
from ..distributed.ring import whole_length

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
        return forward(*args, **options) if module._ring is None else _over_ring(forward, *args, **options)

    return call


@untraced
def _over_ring(forward: Callable[..., T], module: Any, *args: Any, **options: Any) -> T:
    with broadcast_refusal(check_group(module.ring_group)):
        return forward(module, *args, **options)
