"""A call over a ring as an operator of `torch.library`, for whoever traces or intercepts PyTorch.

A graph holds the text of the call: the group by its name, the pattern, who holds which tokens. When the operator runs,
the ranks agree and exchange as in an eager call (`ring.Call`); its backward is a call of its own, on which they agree
again. So a graph of `torch.compile` goes through the ring, and selective activation checkpointing keeps what it gives:

    torch.ops.dilated_attention_pytorch.ring_forward.default
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

from ..backends.base import results_of
from ..layout import BlockLayout
from ..ops.attend import with_constant_shares, with_sinks
from ..ops.choose import leave_autocast
from ..ops.operators import asked_of_bias, no_second_derivative
from ..options import CallOptions, OptionKeywords
from ..patterns import Branches, Pattern
from ..patterns.base import check_flag, constant_in_graphs, value_of
from .agreement import broadcast_refusal
from .exchange import Group, check_group
from .passes import forward_over_ring, gradients_over_ring
from .ring import Call, check_options_of_ring
from .shard import Placement


@constant_in_graphs
def name_rank_and_size(group: Group) -> tuple[str, int, int]:
    group = check_group(group)
    return group.group_name, group.rank(), group.size()


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    whats: Sequence[BlockLayout | Pattern | Branches],
    name_and_rank: tuple[str, int],
    placement: Placement | None,
    agreement: str,
    *,
    is_causal: bool,
    return_lse: bool,
    backend: str,
    **options: Unpack[OptionKeywords],
) -> tuple[Tensor, Tensor]:
    """`ring.attend`, in operators; of the group with this name, and this rank of it."""
    name, rank = name_and_rank
    check_flag("return_lse", return_lse)
    check_flag("is_causal", is_causal)
    q, k, v, autocast_off = leave_autocast(q, k, v)
    with autocast_off:
        checked = check_options_of_ring(q, k, v, placement, rank, **options)
        if checked.dropout_p:  # one draw for all, which the backward has too
            checked = checked._replace(seed=torch.randint(2**31, (), device=q.device))
        of_call = checked._replace(sinks=None).flatten()
        who = "" if placement is None else placement.text
        told = [name, who, agreement, str(int(is_causal)), backend]
        texts = ["\n".join([*told, what.text]) for what in whats]  # type: ignore[union-attr]  # no layouts come here
        results = [ring_forward(q, k, v, *of_call, text) for text in texts]
        out, lse = results[0] if len(results) == 1 else with_constant_shares(results)
        return (out, lse) if checked.sinks is None else with_sinks(out, lse, checked.sinks[:, None])


class _Read:
    """A call, of what an operator is given."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, tensors: list[Tensor], given: str, numbers: list[float], text: str
    ) -> None:
        name, placement, self.agreement, is_causal, backend, what = text.split("\n")
        options = CallOptions.unflatten(tensors, given, numbers)
        self.seed, self.group = options.seed, _resolve_process_group(GroupName(name))
        who = value_of(placement) if placement else None
        bare = options._replace(seed=None)
        self._make = q, k, v, value_of(what), self.group, who, is_causal == "1", backend, bare

    def run(self, compute: Any) -> Any:
        with broadcast_refusal(self.group):
            return Call(*self._make).run(self.agreement, self.seed, compute)


@torch.library.custom_op("dilated_attention_pytorch::ring_forward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def ring_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: list[Tensor],
    given: str,
    numbers: list[float],
    text: str,
) -> tuple[Tensor, Tensor]:
    call = _Read(q, k, v, tensors, given, numbers, text)
    return call.run(lambda agreed: forward_over_ring(q, k, v, agreed))


@torch.library.custom_op(
    "dilated_attention_pytorch::ring_backward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def ring_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tensors: list[Tensor],
    given: str,
    numbers: list[float],
    text: str,
    wanted: str,
) -> list[Tensor]:
    call = _Read(q, k, v, tensors, given, numbers, text)
    return call.run(lambda agreed: [*gradients_over_ring(do, dlse, q, k, v, out, lse, agreed, wanted.split())])


@ring_forward.register_fake
def _(q, k, v, *rest):  # type: ignore[no-untyped-def]
    return results_of(q, v)


@ring_backward.register_fake
def _(do, dlse, q, k, v, out, lse, tensors, given, numbers, text, wanted):  # type: ignore[no-untyped-def]
    bias = CallOptions.unflatten(tensors, given, numbers).bias
    more = [getattr(bias, name) for name in wanted.split()]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, *more)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, tensors, *ctx.of_call = inputs
    ctx.save_for_backward(q, k, v, *output, *tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    do = torch.zeros_like(out) if do is None else do
    given, *_ = ctx.of_call
    asked = asked_of_bias(given, ctx.needs_input_grad[3])
    wanted = " ".join(name for name in asked if name)
    dq, dk, dv, *more = ring_backward(do, dlse, q, k, v, out, lse, tensors, *ctx.of_call, wanted)
    of_bias = iter(more)
    return dq, dk, dv, [next(of_bias) if name else None for name in asked], None, None, None


ring_forward.register_autograd(_differentiate, setup_context=_save)
ring_backward.register_autograd(no_second_derivative)
