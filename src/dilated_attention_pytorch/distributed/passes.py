"""The forward and backward pass of a call over a ring, once the ranks have agreed on it (`ring.Agreed`).

Keys and values of one rank after the other arrive while those before them are computed. Each part of the keys gives
(out, lse), merged in float32; in backward each part, given the whole out and lse, gives its exact share of the
gradients, and dk and dv travel back the way the keys came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..backends.base import compute_dtype
from ..backends.dropout import in_whole, seed_of_part
from ..backends.sizes import Shape
from ..ops.merge import merge_parts
from ..options import Bias, CallOptions
from .exchange import Pending, add_up, broadcast, exchange
from .plan import Step
from .work import Items, Part

if TYPE_CHECKING:
    from .ring import Agreed


def arriving(agreed: Agreed, k: Tensor, v: Tensor) -> Iterator[tuple[Step | None, list[Tensor]]]:
    """The own keys, values and masks (no step), then what each step receives, while the next are already under way.

    Who lets go of what one step received before asking for the next holds two shards of them at most.
    """
    plan, group, options = agreed.plan, agreed.group, agreed.options
    tensors = [k, v, *of_keys(options).values()]
    what = "the exchange of keys and values"

    def begin(step: Step) -> Pending:
        if step.target is None:
            is_source = step.source == dist.get_rank(group)
            sent = [step.sent.of(x) for x in tensors] if is_source else _buffers(step.received, tensors)
            return broadcast(group, what, step.source, sent)
        send = receive = None
        if len(step.sent):
            send = step.target, [step.sent.of(x) for x in tensors]
        if len(step.received):
            receive = step.source, _buffers(step.received, tensors)
        return exchange(group, what, tag=agreed.tag, send=send, receive=receive)

    under_way = deque(begin(step) for step in plan.steps[: plan.begun[0]])
    leaving: deque[Pending] = deque()
    yield None, tensors
    agreed.settle()
    for here, step in enumerate(plan.steps):
        received = under_way[0].wait()
        leaving.append(under_way.popleft())
        under_way.extend(begin(following) for following in plan.steps[plan.begun[here] : plan.begun[here + 1]])
        if received and not step.in_order:
            # Keys that nobody counts lie between those that came: what they are must be a number.
            stored = [x.new_zeros(x.shape[0], step.stored_tokens, *x.shape[2:]) for x in tensors]
            for x, given in zip(stored, received, strict=True):
                step.received.put(x, given)
            received = stored
            del stored
        yield step, received
        del received
        if len(leaving) > 1:
            leaving.popleft().finish()
    for sent in leaving:
        sent.finish()


def _buffers(items: Items, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.new_empty(items.shape_of(x)) for x in tensors]


def of_keys(options: CallOptions) -> dict[str, Tensor]:
    """What travels with keys and values, by its name: (batch or 1, tokens), terms of a bias with heads behind."""
    bias = options.bias or Bias()
    given = {
        "key_padding_mask": options.key_padding_mask,
        "document_ids": options.document_ids,
        "key_codes": bias.key_codes,
        "key_terms": None if bias.key_terms is None else bias.key_terms.transpose(1, 2).contiguous(),
    }
    return {name: x for name, x in given.items() if x is not None}


def _of_part(part: Part, stored: list[Tensor], options: CallOptions) -> tuple[Tensor, Tensor, CallOptions]:
    """Keys, values and options of one part of a call."""
    keys, values, *more = (x[:, part.keys] for x in stored)
    of_part = dict(zip(of_keys(options), more, strict=True))
    ids = of_part.get("document_ids")
    if ids is not None:
        assert options.document_ids is not None
        ids = torch.cat((ids, options.document_ids[:, part.queries]), dim=1)
    seed = None if options.seed is None else seed_of_part(options.seed, part.places)
    bias = None if options.bias is None else _bias_of_part(part, options.bias, of_part)
    places = None if bias is None or bias.slopes is None else part.places
    padding = of_part.get("key_padding_mask")
    return (
        keys,
        values,
        options._replace(key_padding_mask=padding, document_ids=ids, seed=seed, places=places, bias=bias),
    )


def _bias_of_part(part: Part, bias: Bias, of_part: dict[str, Tensor]) -> Bias:
    changes = {"key_codes": of_part.get("key_codes")}
    if "key_terms" in of_part:
        changes["key_terms"] = of_part["key_terms"].transpose(1, 2).contiguous()
    if bias.query_codes is not None:
        changes["query_codes"] = bias.query_codes[:, part.queries]
    if bias.query_terms is not None:
        changes["query_terms"] = bias.query_terms[:, :, part.queries]
    if bias.dense is not None:
        changes["dense"] = bias.dense[:, :, part.queries].index_select(3, _columns(part))
    return bias._replace(**changes)


def _columns(part: Part) -> Tensor:
    """The numbers that a part's keys have in the whole."""
    key = torch.arange(part.layout.seq_k, device=part.places.device)
    return in_whole(part.places, torch.zeros_like(key), key)[1]


def forward_over_ring(q: Tensor, k: Tensor, v: Tensor, agreed: Agreed) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's queries."""
    batch, seq, heads, _ = q.shape
    out = q.new_zeros(batch, seq, heads, v.shape[3], dtype=compute_dtype(q.dtype))
    lse = out.new_full((batch, heads, seq), -torch.inf)
    for step, stored in arriving(agreed, k, v):
        for part in agreed.plan.own if step is None else step.parts:
            own = part.queries
            part_out, part_lse = forward_of_part(q[:, own], part, stored, agreed)
            out[:, own], lse[:, :, own] = merge_parts([out[:, own], part_out.to(out.dtype)], [lse[:, :, own], part_lse])
        del stored
    return out.to(q.dtype), lse


def forward_of_part(q: Tensor, part: Part, stored: list[Tensor], agreed: Agreed) -> tuple[Tensor, Tensor]:
    keys, values, of_part = _of_part(part, stored, agreed.options)
    return agreed.backend.forward(q, keys, values, part.layout, of_part)


def gradients_over_ring(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    agreed: Agreed,
    wanted: Sequence[str] = (),
) -> tuple[Tensor, ...]:
    """dq of this rank's queries, dk and dv of its keys and values, whoever attended to them; then of the tensors of the
    bias that are wanted, of this rank's queries, and of its keys those of `key_terms`."""
    dq, dk, dv = (x.new_zeros(x.shape, dtype=compute_dtype(x.dtype)) for x in (q, k, v))
    of_bias = _OfBias(agreed.options.bias, wanted)
    own_grads = [dk, dv, *of_bias.terms]
    returning = _Returning(agreed, own_grads, k.dtype)
    for step, stored in arriving(agreed, k, v):
        grads = own_grads
        if step is not None:
            grads = [x.new_zeros(x.shape[0], step.stored_tokens, *x.shape[2:]) for x in grads]
        for part in agreed.plan.own if step is None else step.parts:
            own = part.queries
            keys, values, of_part = _of_part(part, stored, agreed.options)
            part_dq, *found = agreed.backend.backward(
                do[:, own],
                None if dlse is None else dlse[:, :, own],
                q[:, own],
                keys,
                values,
                out[:, own],
                lse[:, :, own],
                part.layout,
                of_part,
                *of_bias.asked,
            )
            dq[:, own] += part_dq
            for grad, given in zip(grads, of_bias.add(part, found), strict=True):
                grad[:, part.keys] += given
            del keys, values, of_part, found
        del stored
        if step is not None:
            returning.begin(step, grads)
    returning.end()
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *of_bias.results(dlse, lse)


class _OfBias:
    """The gradients of those tensors of a bias that are wanted, summed over the parts of a call.

    Attributes:
        asked: what a backend is asked for besides, if anything.
        terms: the gradient of this rank's `key_terms`, (batch or 1, tokens, heads or 1), which comes like that of keys.
    """

    def __init__(self, bias: Bias | None, wanted: Sequence[str]) -> None:
        self.wanted, self.bias = wanted, bias or Bias()
        names = [name for name in wanted if name != "query_terms"]  # what a row has in common changes its lse alone
        self.names, self.asked = names, ([names] if names else [])
        self.sums = {
            name: torch.zeros_like(x, dtype=x.dtype if name == "dense" else torch.float64)
            for name, x in self.bias.given(*names).items()
            if name != "key_terms"
        }
        x = self.bias.key_terms
        self.terms = [torch.zeros_like(x.transpose(1, 2))] if x is not None and "key_terms" in names else []

    def add(self, part: Part, found: Sequence[Tensor]) -> list[Tensor]:
        """What a part gave behind dq: the sums take theirs, and what is for keys is left."""
        dk, dv, *more = found
        of_keys = [dk, dv]
        for name, x in zip(self.names, more, strict=True):
            if name == "key_terms":
                of_keys.append(x.transpose(1, 2))
            elif name == "dense":
                self.sums[name][:, :, part.queries].index_add_(3, _columns(part), x)
            else:
                self.sums[name] += x
        return of_keys

    def results(self, dlse: Tensor | None, lse: Tensor) -> list[Tensor]:
        found = {name: x.to(getattr(self.bias, name).dtype) for name, x in self.sums.items()}
        if self.terms:
            found["key_terms"] = self.terms[0].transpose(1, 2)
        if "query_terms" in self.wanted:
            of_rows = torch.zeros_like(lse) if dlse is None else dlse.masked_fill(lse == -torch.inf, 0.0)
            assert self.bias.query_terms is not None
            found["query_terms"] = of_rows.sum_to_size(self.bias.query_terms.shape)
        return [found[name] for name in self.wanted]


class _Returning:
    """Gradients of keys and values on their way to the ranks that have these, and of the own from the others: those of
    keys and values in the dtype of these."""

    def __init__(self, agreed: Agreed, own: list[Tensor], dtype: torch.dtype) -> None:
        self._agreed, self._own = agreed, own
        self._dtypes = [dtype if x.ndim == 4 else x.dtype for x in own]
        self._under_way: tuple[Step, Pending] | None = None

    def begin(self, step: Step, grads: list[Tensor]) -> None:
        """Send those of what a step received, once those of the step before are here."""
        self.end()
        group, what = self._agreed.group, "the exchange of gradients"
        if step.target is None:
            is_source = step.source == dist.get_rank(group)
            if is_source:  # what the others give is added to nothing, and then to the own
                given = [x.new_zeros(step.sent.shape_of(x)) for x in self._own]
            else:
                given = [step.received.of(x) for x in grads]
            self._under_way = step, add_up(group, what, step.source, given)
            return
        send = receive = None
        if len(step.received):
            send = step.source, [step.received.of(x).to(d) for x, d in zip(grads, self._dtypes, strict=True)]
        if len(step.sent):
            kinds = zip(self._own, self._dtypes, strict=True)
            receive = step.target, [x.new_empty(step.sent.shape_of(x), dtype=d) for x, d in kinds]
        self._under_way = step, exchange(group, what, tag=self._agreed.tag + 1, send=send, receive=receive)

    def end(self) -> None:
        if self._under_way is not None:
            step, pending = self._under_way
            for grad, given in zip(self._own, pending.wait(), strict=False):
                step.sent.add(grad, given)
            pending.finish()
            self._under_way = None


class RingWorkspace(NamedTuple):
    """Bytes that a rank holds besides its shards and what a backend allocates, at most.

    Attributes:
        received: two buffers of a shard's keys and values, forward and backward.
        running: out and lse in the compute dtype, forward.
        returning: dk and dv in the compute dtype, twice, backward.
    """

    received: int
    running: int
    returning: int


def workspace(shape: Shape) -> RingWorkspace:
    """Of a rank whose shards have this shape."""
    running, keys_and_values = shape.out // shape.dtype.itemsize * shape.compute + shape.lse, shape.k + shape.v
    return RingWorkspace(2 * keys_and_values, running, 2 * (keys_and_values // shape.dtype.itemsize) * shape.compute)
