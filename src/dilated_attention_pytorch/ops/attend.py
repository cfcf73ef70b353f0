"""A checked call, from the choice of its backend to out and lse; its gradient in plain eager PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..layout import BlockLayout
from ..layout.eager import is_plain_eager
from ..memory import active_source, drawing_from
from ..options import CallOptions
from .named import NamedLayout
from .operators import backward, flattened, forward, gradients


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout | NamedLayout,
    options: CallOptions,
    backend: ModuleType,
    *,
    parts: Sequence[BlockLayout | NamedLayout] = (),
    zero_keys: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A checked call, run by the backend that was chosen for it; lse may be None where it was not asked for.

    Args:
        parts: layouts that add up to `layout`. The gradient then takes each part's share of a row for a constant.
        zero_keys: [1, or one a part; heads, seq_q]: the log of how many keys of score 0 and value 0 each row sees too.
    """
    if options.dropout_p > 0.0 and options.seed is None:
        options = options._replace(seed=torch.randint(2**31, (), device=q.device))
    if options.sinks is not None:
        bare = options._replace(sinks=None)
        out, lse = attend(q, k, v, layout, bare, backend, parts=parts, zero_keys=zero_keys)
        assert lse is not None
        return with_sinks(out, lse, options.sinks[:, None])
    if zero_keys is not None:  # inside a part they change its share, which is why it is then computed apart
        each = []
        for part, more in zip(parts or (layout,), zero_keys, strict=True):
            out, lse = attend(q, k, v, part, options, backend)
            assert lse is not None
            each.append(with_sinks(out, lse, more))
        return with_constant_shares(each) if parts else each[0]
    if hasattr(backend, "attention"):  # differentiable as it is
        if parts:
            return with_constant_shares([backend.attention(q, k, v, part, options) for part in parts])
        return backend.attention(q, k, v, layout, options)
    learned = options.learned().values()
    if is_plain_eager(q, k, v, *learned):
        return run_eagerly(q, k, v, (layout, *parts), options, backend)  # type: ignore[arg-type]  # none is named here
    refuse_forward_mode(q, k, v, *learned)
    layouts = flattened((layout, *parts), backend, asks_gradients(q, k, v, *learned))
    return forward(q, k, v, *layouts, *options.flatten(), backend.name)


def run_eagerly(
    q: Tensor, k: Tensor, v: Tensor, layouts: Sequence[BlockLayout], options: CallOptions, backend: ModuleType
) -> tuple[Tensor, Tensor]:
    """The same in plain eager PyTorch, by a backend with a backward of its own; the parts stand behind the whole."""
    learned = options.learned()
    refuse_forward_mode(q, k, v, *learned.values())
    training = asks_gradients(q, k, v, *learned.values())
    if backend.needs_work_order:
        for each in layouts:
            each.order(by_key=training)
    if not training:
        return backend.forward(q, k, v, layouts[0], options)
    return _Attention.apply(q, k, v, layouts, options, backend, " ".join(learned), *learned.values())


def asks_gradients(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Each row with one more score in its softmax, whose value is 0; differentiable in all three.

    Args:
        sinks: the scores, [heads, 1] or [heads, seq_q].
    """
    sinks = sinks.to(lse.dtype)
    # An empty row stays 0 whatever its share; −inf − −inf would make it, or its gradient, NaN.
    empty = lse == -torch.inf
    share = torch.sigmoid(torch.where(empty, torch.finfo(lse.dtype).min, lse) - sinks)
    nothing = empty & (sinks == -torch.inf)
    total = torch.logaddexp(lse, torch.where(nothing, 0.0, sinks)).masked_fill(nothing, -torch.inf)
    return (out * share.transpose(1, 2)[..., None]).to(out.dtype), total


def with_constant_shares(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Parts of a row's keys mixed by their denominators, which get no gradient; lse gets its own."""
    lse = torch.logsumexp(torch.stack([lse for _, lse in parts]), dim=0)
    shares = [torch.exp(part_lse - torch.where(lse == -torch.inf, 0.0, lse)).detach() for _, part_lse in parts]
    mixed = [part * share.transpose(1, 2)[..., None] for (part, _), share in zip(parts, shares, strict=True)]
    return torch.stack(mixed).sum(0).to(parts[0][0].dtype), lse


class _Attention(torch.autograd.Function):
    """The operator below for eager calls. Masks stand apart from `options`, so that a change of them is noticed, and
    behind all the tensors of the bias that get a gradient, whose names are `learned`."""

    @staticmethod
    def forward(  # with ctx, not with setup_context, which would take as long as the rest
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layouts: Sequence[BlockLayout],
        options: CallOptions,
        backend: ModuleType,
        learned: str,
        *of_bias: Tensor,
    ) -> tuple[Tensor, Tensor]:
        out, lse = backend.forward(q, k, v, layouts[0], options)
        tensors, *ctx.options = options.flatten()
        ctx.learned = learned
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        ctx.layouts, ctx.backend, ctx.source = layouts, backend, active_source()
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        if do is None:
            do = torch.zeros_like(out)
        given = do, dlse, q, k, v, out, lse
        seen = given if dlse is not None else (do, q, k, v, out, lse)
        if torch.is_grad_enabled() or not is_plain_eager(*seen):  # the operator knows what to do then
            layouts = flattened(ctx.layouts, ctx.backend, training=True)
            grads = backward(*given, *layouts, tensors, *ctx.options, ctx.backend.name, ctx.learned)
        else:
            with drawing_from(ctx.source):  # as the forward did, in whichever thread this is
                options = CallOptions.unflatten(tensors, *ctx.options)
                grads = gradients(*given, ctx.layouts, options, ctx.backend, ctx.learned.split())
        return *grads[:3], None, None, None, None, *grads[3:]


def refuse_forward_mode(*tensors: Tensor) -> None:
    """PyTorch would drop the tangents of an operator that has no formula for them, and say nothing."""
    if torch.compiler.is_compiling() or torch.autograd.forward_ad._current_level < 0:
        return
    if any(torch.autograd.forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError("attention has no forward-mode derivative; use backend='reference' for it")
