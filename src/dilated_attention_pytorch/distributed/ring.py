"""How a call over a ring is made, once its arguments are known (`attention.py` has the public functions).

A call goes in three parts: the ranks agree that they make the same call (`agreement`), the exchange plan is found or
made (`plan`), and then keys and values of one rank after the other arrive while those before them are computed
(`passes`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import accumulate
from math import gcd
from types import ModuleType
from typing import Any, TypeVar, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..backends.base import Request
from ..layout import BlockLayout
from ..layout.branches import cheapest_blocks
from ..memory import active_source, drawing_from
from ..ops.attend import with_constant_shares, with_sinks
from ..ops.bias import Shard
from ..ops.checks import (
    DEFAULT_BLOCK_SIZE,
    check_lists,
    check_options,
    check_qkv,
)
from ..ops.choose import choose, leave_autocast
from ..options import NUMBERS, TENSORS, Bias, CallOptions, OptionKeywords
from ..patterns import Branches, Causal, Pattern
from ..patterns.base import check_flag
from ..patterns.blocks import BLOCK_SIZES
from .agreement import (
    Check,
    call_tag,
    digest,
    fingerprint,
    is_known,
    remember_kind,
    what_kind,
)
from .exchange import (
    backend_for,
    check_device,
    of_first_rank,
    start,
)
from .passes import forward_over_ring, gradients_over_ring
from .plan import Plan, make_plan, remember_plan, remembered_plan
from .shard import Placement, check_placement, positions_on
from .work import Work

T = TypeVar("T")

# What a plan depends on, of what the ranks agree on; another batch, or a call without gradients, takes the same.
OF_THE_PLAN = ("pattern", "is_causal", "placement", "heads")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    whats: Sequence[BlockLayout | Pattern | Branches],
    group: dist.ProcessGroup,
    placement: Placement | None,
    agreement: str,
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
        checked = check_options_of_ring(q, k, v, placement, dist.get_rank(group), **options)
        learned = checked.learned()

        def compute(agreed: Agreed) -> tuple[Tensor, Tensor]:
            return _Ring.apply(q, k, v, agreed, " ".join(learned), *learned.values())

        calls = [Call(q, k, v, what, group, placement, is_causal, backend, checked) for what in whats]
        # One draw for all: a key that counts in two of them is kept or dropped as one.
        seed = torch.randint(2**31, (), device=q.device) if checked.dropout_p else None
        results = [call.run(agreement, seed, compute) for call in calls]
        out, lse = results[0] if len(results) == 1 else with_constant_shares(results)
        return (out, lse) if checked.sinks is None else with_sinks(out, lse, checked.sinks[:, None])


# Terms of a bias that go by where tokens stand in the whole.
BY_PLACE = ("table", "t5", "grid", "dense")


def check_options_of_ring(
    q: Tensor, k: Tensor, v: Tensor, placement: Placement | None, rank: int, **options: Unpack[OptionKeywords]
) -> CallOptions:
    """The options of a call over a ring, of which this rank has some tokens."""
    check_qkv(q, k, v)
    given = options.get("bias")
    terms = getattr(given, "terms", ())
    for term in terms:
        if term.kind in BY_PLACE and placement is None:
            raise ValueError(
                f"bias over a ring needs a placement for a {term.kind}, which goes by where tokens stand, got {given!r}"
            )
        if term.kind == "forget" and not term.others[0]:
            raise ValueError(
                "bias over a ring must have the gates of forget summed over the whole sequence (summed=True), got "
                "those of each token"
            )
    shard = None
    by_place = any(term.kind in BY_PLACE for term in terms)
    if by_place and isinstance(placement, Placement) and rank < placement.world_size:  # else it is refused later
        _check_tokens(placement, rank, q=q, k=k)
        shard = Shard(positions_on(placement, rank, q.device), placement.seq)
    checked = check_options(q, k, shard, **options)
    names = {"document_ids": checked.document_ids, "alibi_slopes": options.get("alibi_slopes"), "bias": given}
    for name, x in names.items():
        if x is not None and q.shape[1] != k.shape[1]:
            raise ValueError(
                f"{name} over a ring needs queries and keys of the same tokens, got {q.shape[1]} and {k.shape[1]}"
            )
    return checked


class Call:
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
        options: CallOptions,
    ) -> None:
        check_device(group, q.device, "q")
        check_flag("is_causal", is_causal)
        check_lists(q, k, what)
        self.options = options
        if placement is not None:
            _check_placement(placement, group, q, k)
        self.backend = _choose(backend, q, k, v, self.options)
        self.group, self.placement, self.device = group, placement, q.device
        self.lengths, self.heads = (q.shape[1], k.shape[1]), (q.shape[2], k.shape[2])
        self.what, self.is_causal = what, is_causal
        learned = options.learned()
        learning = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *learned.values()))
        self.description = {
            "pattern": fingerprint(what),
            "is_causal": str(is_causal),
            "placement": "by the lengths of the shards" if placement is None else fingerprint(placement),
            "batch": str(q.shape[0]),
            "heads": f"{q.shape[2]} of queries, {k.shape[2]} of keys",
            "head_dim": f"{q.shape[3]} of queries and keys, {v.shape[3]} of values",
            "dtype": str(q.dtype),
            "device": q.device.type,
            **{name: str(getattr(self.options, name)) for name in NUMBERS},
            **{name: _kind_of_tensor(getattr(self.options, name)) for name in TENSORS},
            "bias": _kind_of_bias(options.bias),
            "gradients": " ".join(["asked for", *learned]) if learning else "not asked for",
            "backend": self.backend.name,
        }
        alike = {**self.description, "pattern": what_kind(what)}
        self.kind = digest(alike, self.device, self.lengths)

    def run(self, agreement: str, seed: Tensor | None, compute: Callable[[Agreed], T]) -> T:
        """What is computed of the call, once the ranks agree on it; the seed of dropout is the first rank's."""
        with self.agreed(agreement) as agreed:
            if seed is not None:
                seed = of_first_rank(self.group, seed, "the seed of dropout")
            agreed.options = self.options._replace(sinks=None, seed=seed)
            result = compute(agreed)
            agreed.settle()
        return result

    def agreed(self, agreement: str) -> Agreed:
        """The call as all ranks make it; or, where a message of another call cannot be taken for one of this, as this
        rank makes it, before it has heard of the others."""
        key = self.what, self.is_causal, self.placement, self.lengths, self.heads, self.device
        plan = remembered_plan(self.group, key)
        lengths = None if self.placement is None else [self.placement.lengths] * 2
        if agreement == "never":
            if lengths is None:
                raise ValueError('agreement="never" needs a placement: without one ranks ask each other for lengths')
            start(self.group, self.device)
            return Agreed(self, key, lengths, plan, None)
        check = Check(self.group, self.description, 0 if plan is None else plan.number, *self.lengths)
        with check:
            if lengths is None or agreement == "always" or not is_known(self.group, self.kind):
                lengths = check.settle()[:, 1:].T.tolist()
            agreed = Agreed(self, key, lengths, plan, check)
            told_apart = backend_for(self.group, self.device) == "gloo" and not self.options.dropout_p
            if not told_apart or any(step.target is None for step in agreed.plan.steps):
                agreed.settle()
                start(self.group, self.device)
        return agreed

    def work(self, lengths: list[list[int]]) -> Work:
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


class Agreed:
    """A call on its way: how it is made, and what is still to be heard of the others.

    As a context: what stops this rank is raised after it has heard of the others, so that they do not wait for it.
    """

    def __init__(
        self, call: Call, key: Hashable, lengths: list[list[int]], plan: Plan | None, check: Check | None
    ) -> None:
        self.group, self.backend, self.options = call.group, call.backend, call.options
        self._call, self._key, self._lengths, self._check = call, key, lengths, check
        self._number = digest(*(call.description[name] for name in OF_THE_PLAN), lengths)
        self.tag = call_tag(call.group, 0) if check is None else check.tag
        if plan is None or plan.number != self._number:
            work = call.work(lengths)
            if check is not None and not work.is_closed:
                check.settle()  # all make it together
                self._check = None
                remember_kind(call.group, call.kind)
            plan = self._made(work)
        self.plan = plan

    def settle(self) -> None:
        """Hear of the others, if that has not been yet: a difference is an error. What another rank has forgotten is
        made again by all."""
        check, self._check = self._check, None
        if check is None:
            return
        others = check.settle()[:, 0]
        if not self.plan.is_closed and (others != self._number).any():
            self._made(self._call.work(self._lengths))
        remember_kind(self.group, self._call.kind)

    def _made(self, work: Work) -> Plan:
        plan = make_plan(self._number, work, self.group)
        remember_plan(self.group, self._key, plan)
        return plan

    def __enter__(self) -> Agreed:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, Exception):
            self.settle()


def _kind_of_tensor(x: Tensor | None) -> str:
    return "none" if x is None else f"given, {x.dtype}"


def _kind_of_bias(bias: Bias | None) -> str:
    """What all ranks have alike of it, and what of it must be alike."""
    if bias is None:
        return "none"
    whole = {"query_codes": 1, "key_codes": 1, "query_terms": 2, "key_terms": 2, "dense": 2}  # dimensions before tokens
    return ", ".join(f"{name} {list(x.shape[: whole.get(name)])}" for name, x in bias.given(*Bias._fields).items())


def _choose(backend: str, q: Tensor, k: Tensor, v: Tensor, options: CallOptions) -> ModuleType:
    request = Request.of(q, k, v, options, kind=None, return_lse=True, named=backend != "auto")
    chosen = choose(backend, replace(request, placed=options.bias is not None and options.bias.slopes is not None))
    if not hasattr(chosen, "backward"):
        raise ValueError(f"backend {chosen.name!r} cannot run over a ring: it has no backward for a part of the keys")
    return chosen


def _check_placement(placement: Placement, group: dist.ProcessGroup, q: Tensor, k: Tensor) -> None:
    check_placement(placement, group)
    _check_tokens(placement, dist.get_rank(group), q=q, k=k)


def _check_tokens(placement: Placement, rank: int, **tensors: Tensor) -> None:
    for name, x in tensors.items():
        if x.shape[1] != placement.num_tokens(rank):
            raise ValueError(
                f"{name} must have the {placement.num_tokens(rank)} tokens of rank {rank} in its placement, "
                f"got {x.shape[1]}"
            )


def check_alone(placement: Placement | None, group: dist.ProcessGroup, q: Tensor, k: Tensor, v: Tensor) -> None:
    if placement is not None:
        check_qkv(*leave_autocast(q, k, v)[:3])
        _check_placement(placement, group, q, k)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, agreed: Agreed, learned: str, *of_bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, lse = forward_over_ring(q, k, v, agreed)
        ctx.save_for_backward(q, k, v, out, lse, *of_bias)  # by which a change of them is noticed
        ctx.agreed, ctx.source, ctx.learned = agreed, active_source(), learned.split()
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *_ = ctx.saved_tensors
        do = torch.zeros_like(out) if do is None else do
        with drawing_from(ctx.source):
            dq, dk, dv, *more = gradients_over_ring(do, dlse, q, k, v, out, lse, ctx.agreed, ctx.learned)
        return dq, dk, dv, None, None, *more
