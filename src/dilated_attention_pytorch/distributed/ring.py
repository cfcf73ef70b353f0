"""`ring_block_sparse_attention` and `ring_dilated_attention`: the plain operators over a sequence spread over ranks.

A call goes in three parts: the ranks agree that they make the same call (`agreement`), the exchange plan is found or
made (`plan`), and then keys and values of one rank after the other arrive while those before them are computed
(`_Ring`). Each part of the keys gives (out, lse), merged in float32; in backward each part, given the whole out and
lse, gives its exact share of the gradients, and dk and dv travel back the way the keys came.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import gcd
from types import ModuleType
from typing import Any, NamedTuple, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..backends.base import Request, compute_dtype
from ..backends.dropout import seed_of_part
from ..backends.sizes import Shape
from ..layout import BlockLayout
from ..layout.branches import cheapest_blocks
from ..memory import active_source, drawing_from
from ..ops import block_sparse_attention, dilated_attention
from ..ops.attend import with_constant_shares, with_sinks
from ..ops.checks import (
    DEFAULT_BLOCK_SIZE,
    check_lists,
    check_options,
    check_qkv,
    refuse_branches,
)
from ..ops.choose import choose, leave_autocast
from ..ops.merge import merge_parts
from ..options import NUMBERS, TENSORS, CallOptions, OptionKeywords
from ..patterns import Branches, Causal, Pattern
from ..patterns.base import check_flag
from ..patterns.blocks import BLOCK_SIZES
from ..patterns.branches import check_heads
from .agreement import agree, broadcast_refusal, digest, fingerprint, untraced
from .exchange import Group, Pending, check_device, check_group, exchange, start
from .plan import Part, Plan, Step, Work, make_plan, remember_plan, remembered_plan
from .shard import Placement, check_placement

# What a plan depends on, of what the ranks agree on; another batch, or a call without gradients, takes the same.
OF_THE_PLAN = ("pattern", "is_causal", "placement", "heads")


@untraced
def ring_block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout_or_pattern: BlockLayout | Pattern,
    *,
    group: Group,
    placement: Placement | None = None,
    is_causal: bool = False,
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
        is_causal, return_lse, backend: as in `block_sparse_attention`. Backends "sdpa" and "reference" have no backward
            for a part of the keys and cannot run.
        options: as in `block_sparse_attention`, but `alibi_slopes`, which a ring refuses. `key_padding_mask` and
            `document_ids` are of this rank's keys, (batch, tokens of the shard). The seed of dropout is drawn by the
            first rank, so that the draw is that of the plain operator there. `sinks` are the same on every rank and get
            the gradient of this rank's queries.
    """
    call: Any = {"is_causal": is_causal, "return_lse": return_lse, "backend": backend, **options}
    group = check_group(group)
    with broadcast_refusal(group):
        if dist.get_world_size(group) == 1:
            _check_alone(placement, group, q, k, v)
            return block_sparse_attention(q, k, v, layout_or_pattern, **call)
        refuse_branches(layout_or_pattern)
        out, lse = _attend(q, k, v, [layout_or_pattern], group, placement, **call)
        return (out, lse) if return_lse else out


@untraced
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
    return_lse: bool = False,
    backend: str = "auto",
    **options: Unpack[OptionKeywords],
) -> Tensor | tuple[Tensor, Tensor]:
    """`dilated_attention` over a ring: every rank gives and gets its own shard, and the result is the same.

    A rank receives the keys of its queries' segments, and of those only what each head keeps: a branch (w, r) costs at
    most w / r keys of each head, however long the sequence is.

    Args:
        q, k, v, group, placement, options: as in `ring_block_sparse_attention`, but there are no `document_ids`. Shards
            whose starts are multiples of 128 · lcm(dilation_rates) are computed with the fewest mixed blocks.
        segment_lengths, dilation_rates, head_offsets, detach_branch_weights: as in `dilated_attention`; so are
            is_causal, return_lse and backend.
    """
    call: Any = {"is_causal": is_causal, "return_lse": return_lse, "backend": backend, **options}
    group = check_group(group)
    with broadcast_refusal(group):
        if dist.get_world_size(group) == 1:
            _check_alone(placement, group, q, k, v)
            return dilated_attention(
                q, k, v, segment_lengths=segment_lengths, dilation_rates=dilation_rates, head_offsets=head_offsets,
                detach_branch_weights=detach_branch_weights, **call,
            )  # fmt: skip
        if options.get("document_ids") is not None:
            raise TypeError("document_ids is no option of dilated attention")
        check_flag("detach_branch_weights", detach_branch_weights)
        branches = Branches(segment_lengths, dilation_rates, head_offsets)
        if isinstance(q, Tensor) and q.ndim == 4:  # anything else is refused below
            check_heads(branches.dilation_rates, q.shape[2])
        parts = branches.alone() if detach_branch_weights and len(branches) > 1 else [branches]
        out, lse = _attend(q, k, v, parts, group, placement, **call)
        return (out, lse) if return_lse else out


@untraced
def whole_length(tokens: int, group: dist.ProcessGroup, placement: Placement | None) -> int:
    """Tokens of a sequence of which each rank holds so many. Without a placement all ranks call it together."""
    if isinstance(placement, Placement):
        return placement.seq
    return int(agree(group, {"pattern": "one that a schedule opens"}, tokens, more=True).sum())


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    whats: Sequence[BlockLayout | Pattern | Branches],
    group: dist.ProcessGroup,
    placement: Placement | None,
    *,
    is_causal: bool,
    return_lse: bool,
    backend: str,
    **options: Unpack[OptionKeywords],
) -> tuple[Tensor, Tensor]:
    """The attention of a checked and agreed call; of several that add up, mixed by shares that get no gradient."""
    check_flag("return_lse", return_lse)
    q, k, v, autocast_off = leave_autocast(q, k, v)
    with autocast_off:
        calls = [_Call(q, k, v, what, group, placement, is_causal, backend, options) for what in whats]
        # One draw for all: a key that counts in two of them is kept or dropped as one.
        seed = int(torch.randint(2**31, (), device=q.device)) if calls[0].options.dropout_p else 0
        results = []
        for call in calls:
            plan, agreed = call.agreed(seed)
            results.append(_Ring.apply(q, k, v, plan, group, agreed, call.backend))
        out, lse = results[0] if len(results) == 1 else with_constant_shares(results)
        sinks = calls[0].options.sinks
        return (out, lse) if sinks is None else with_sinks(out, lse, sinks)


class _Call:
    """A call of this rank, checked before any other rank hears of it."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        what: BlockLayout | Pattern | Branches,
        group: dist.ProcessGroup,
        placement: Placement | None,
        is_causal: bool,
        backend: str,
        options: OptionKeywords,
    ) -> None:
        check_qkv(q, k, v)
        check_device(group, q.device, "q")
        check_flag("is_causal", is_causal)
        check_lists(q, k, what)
        self.options = check_options(q, k, **options)
        if self.options.alibi_slopes is not None:
            raise ValueError(
                "alibi_slopes are not possible over a ring: a part of the keys does not know how far away it is"
            )
        if self.options.document_ids is not None and q.shape[1] != k.shape[1]:
            raise ValueError(
                f"document_ids over a ring needs queries and keys of the same tokens, got {q.shape[1]} and {k.shape[1]}"
            )
        if placement is not None:
            _check_placement(placement, group, q, k)
        self.backend = _choose(backend, q, k, self.options)
        self.group, self.placement, self.device = group, placement, q.device
        self.lengths, self.heads = (q.shape[1], k.shape[1]), (q.shape[2], k.shape[2])
        self.what, self.is_causal = what, is_causal
        learning = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        self.description = {
            "pattern": fingerprint(what),
            "is_causal": str(is_causal),
            "placement": "by the lengths of the shards" if placement is None else fingerprint(placement),
            "batch": str(q.shape[0]),
            "heads": f"{q.shape[2]} of queries, {k.shape[2]} of keys",
            "head_dim": str(q.shape[3]),
            "dtype": str(q.dtype),
            "device": q.device.type,
            **{name: str(getattr(self.options, name)) for name in NUMBERS},
            **{name: _kind_of_tensor(getattr(self.options, name)) for name in TENSORS},
            "gradients": "asked for" if learning else "not asked for",
            "backend": self.backend.name,
        }

    def agreed(self, seed: int) -> tuple[Plan, CallOptions]:
        """The plan, and the seed of dropout, on which all ranks agree: the first rank's."""
        key = self.what, self.is_causal, self.placement, self.lengths, self.heads, self.device
        remembered = remembered_plan(self.group, key)
        number = 0 if remembered is None else remembered.number
        of_all = agree(self.group, self.description, number, seed, *self.lengths)
        start(self.group, self.device)
        numbers, seeds, lengths = of_all[:, 0], of_all[:, 1], of_all[:, 2:].T.tolist()
        number = digest(*(self.description[name] for name in OF_THE_PLAN), lengths)
        options = self.options._replace(sinks=None)
        if options.dropout_p:
            options = options._replace(seed=seeds[0].to(self.device))
        # A rank may have forgotten what another remembers: then all make it again.
        if remembered is not None and (numbers == number).all():
            return remembered, options
        plan = make_plan(number, self._work(lengths), self.group)
        remember_plan(self.group, key, plan)
        return plan, options

    def _work(self, lengths: list[list[int]]) -> Work:
        """Of the lengths of all ranks' queries and of their keys."""
        cut = gcd(*(start for of in lengths for start in accumulate(of[:-1])))
        if self.placement is not None:
            places = self.placement, self.placement
            cut = self.placement.cut
        else:
            size = max((size for size in BLOCK_SIZES if cut % size == 0), default=None)
            if size is None:
                raise ValueError(
                    f"shards must be multiples of {BLOCK_SIZES[0]} tokens, all but the last, got {lengths[0]} queries "
                    f"and {lengths[1]} keys; shard_sequence cuts them so"
                )
            places = (
                Placement.of_lengths(lengths[0], block_size=size),
                Placement.of_lengths(lengths[1], block_size=size),
            )
        seqs = places[0].seq, places[1].seq
        what, num_residues = self.what, 1
        if isinstance(what, Branches):
            block, num_residues = cheapest_blocks(what, max(seqs), cut=cut)
            blocks = block, block
        elif isinstance(what, BlockLayout):
            what, blocks = (what.causal if self.is_causal else what), what.blocks
            if what.lengths != seqs:
                raise ValueError(
                    f"layout_or_pattern is a layout for lengths {what.lengths}, but the shards of q and k have {seqs} "
                    "tokens together"
                )
            if cut % max(blocks):
                raise ValueError(
                    f"shards must be whole blocks of the layout, {blocks}, but start at multiples of {cut}"
                )
        else:
            what = what & Causal() if self.is_causal else what
            # Any finer blocks do; the coarsest that the shards are made of.
            most = min((*what.block_sizes, places[0].block_size), default=DEFAULT_BLOCK_SIZE)
            block = max(size for size in BLOCK_SIZES if size <= min(most, DEFAULT_BLOCK_SIZE) and cut % size == 0)
            blocks = block, block
        return Work(
            what=what,
            is_causal=self.is_causal,
            placements=places,
            blocks=blocks,
            num_residues=num_residues,
            heads=self.heads[0],
            heads_kv=self.heads[1],
            device=self.device,
        )


def _kind_of_tensor(x: Tensor | None) -> str:
    return "none" if x is None else f"given, {x.dtype}"


def _choose(backend: str, q: Tensor, k: Tensor, options: CallOptions) -> ModuleType:
    chosen = choose(backend, Request.of(q, k, options, kind=None, return_lse=True, named=backend != "auto"))
    if not hasattr(chosen, "backward"):
        raise ValueError(f"backend {chosen.name!r} cannot run over a ring: it has no backward for a part of the keys")
    return chosen


def _check_placement(placement: Placement, group: dist.ProcessGroup, q: Tensor, k: Tensor) -> None:
    check_placement(placement, group)
    rank = dist.get_rank(group)
    for name, x in (("q", q), ("k", k)):
        if x.shape[1] != placement.num_tokens(rank):
            raise ValueError(
                f"{name} must have the {placement.num_tokens(rank)} tokens of rank {rank} in its placement, "
                f"got {x.shape[1]}"
            )


def _check_alone(placement: Placement | None, group: dist.ProcessGroup, q: Tensor, k: Tensor, v: Tensor) -> None:
    if placement is not None:
        check_qkv(*leave_autocast(q, k, v)[:3])
        _check_placement(placement, group, q, k)


def _arriving(
    plan: Plan, group: dist.ProcessGroup, k: Tensor, v: Tensor, options: CallOptions
) -> Iterator[tuple[Step | None, list[Tensor]]]:
    """The own keys, values and masks (no step), then what each step receives, while the next is already under way.

    Who lets go of what one step received before asking for the next holds two buffers at most.
    """
    tensors = [x for x in (k, v, options.key_padding_mask, options.document_ids) if x is not None]

    def begin(step: Step) -> Pending:
        send = receive = None
        if len(step.sent):
            send = step.target, [step.sent.of(x) for x in tensors]
        if len(step.received):
            receive = step.source, [x.new_empty(step.received.shape_of(x)) for x in tensors]
        return exchange(group, "the exchange of keys and values", send=send, receive=receive)

    under_way = [begin(step) for step in plan.steps[:1]]
    yield None, tensors
    for here, step in enumerate(plan.steps):
        received = under_way.pop().wait()
        under_way = [begin(following) for following in plan.steps[here + 1 : here + 2]]
        if received and not step.in_order:
            stored = [x.new_empty(x.shape[0], step.stored_tokens, *x.shape[2:]) for x in tensors]
            for x, given in zip(stored, received, strict=True):
                step.received.put(x, given)
            received = stored
            del stored
        yield step, received
        del received


def _of_part(part: Part, stored: list[Tensor], options: CallOptions) -> tuple[Tensor, Tensor, CallOptions]:
    """Keys, values and options of one part of a call."""
    keys, values, *masks = (x[:, part.keys] for x in stored)
    padding = None if options.key_padding_mask is None else masks[0]
    ids = None
    if options.document_ids is not None:
        ids = torch.cat((masks[-1], options.document_ids[:, part.queries]), dim=1)
    seed = None if options.seed is None else seed_of_part(options.seed, part.places)
    return keys, values, options._replace(key_padding_mask=padding, document_ids=ids, seed=seed)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: Plan,
        group: dist.ProcessGroup,
        options: CallOptions,
        backend: ModuleType,
    ) -> tuple[Tensor, Tensor]:
        batch, seq, heads, _ = q.shape
        out = q.new_zeros(q.shape, dtype=compute_dtype(q.dtype))
        lse = out.new_full((batch, heads, seq), -torch.inf)
        for step, stored in _arriving(plan, group, k, v, options):
            for part in plan.own if step is None else step.parts:
                own = part.queries
                part_out, part_lse = _forward(backend, q[:, own], part, stored, options)
                out[:, own], lse[:, :, own] = merge_parts(
                    [out[:, own], part_out.to(out.dtype)], [lse[:, :, own], part_lse]
                )
            del stored
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest, ctx.source = (plan, group, options, backend), active_source()
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        with drawing_from(ctx.source):
            return _Ring._gradients(ctx, do, dlse)

    @staticmethod
    def _gradients(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        do = torch.zeros_like(out) if do is None else do
        plan, group, options, backend = ctx.rest
        dq, dk, dv = (x.new_zeros(x.shape, dtype=compute_dtype(x.dtype)) for x in (q, k, v))
        returning: tuple[Step, Pending] | None = None

        def take_back() -> None:
            """Add what another rank's queries gave for keys that they had from here."""
            if returning is not None:
                step, pending = returning
                for grad, given in zip((dk, dv), pending.wait(), strict=False):
                    step.sent.add(grad, given)

        for step, stored in _arriving(plan, group, k, v, options):
            grads = [dk, dv]
            if step is not None:
                grads = [dk.new_zeros(dk.shape[0], step.stored_tokens, *dk.shape[2:]) for _ in range(2)]
            for part in plan.own if step is None else step.parts:
                own = part.queries
                keys, values, of_part = _of_part(part, stored, options)
                part_dq, *part_dkv = backend.backward(
                    do[:, own],
                    None if dlse is None else dlse[:, :, own],
                    q[:, own],
                    keys,
                    values,
                    out[:, own],
                    lse[:, :, own],
                    part.layout,
                    of_part,
                )
                dq[:, own] += part_dq
                for grad, given in zip(grads, part_dkv, strict=True):
                    grad[:, part.keys] += given
                del keys, values, of_part
            del stored
            if step is None:
                continue
            take_back()
            send = receive = None
            if len(step.received):
                send = step.source, [step.received.of(grad).to(k.dtype) for grad in grads]
            if len(step.sent):
                receive = step.target, [x.new_empty(step.sent.shape_of(x)) for x in (k, v)]
            returning = step, exchange(group, "the exchange of gradients", send=send, receive=receive)
        take_back()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def _forward(
    backend: ModuleType, q: Tensor, part: Part, stored: list[Tensor], options: CallOptions
) -> tuple[Tensor, Tensor]:
    keys, values, of_part = _of_part(part, stored, options)
    return backend.forward(q, keys, values, part.layout, of_part)


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
    running = shape.q // shape.dtype.itemsize * shape.compute + shape.lse
    return RingWorkspace(2 * 2 * shape.k, running, 2 * 2 * (shape.k // shape.dtype.itemsize) * shape.compute)
