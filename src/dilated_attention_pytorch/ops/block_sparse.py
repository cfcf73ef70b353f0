"""`block_sparse_attention`: one softmax over the allowed keys of every row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType, NoneType
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from ..layout import BlockLayout
from ..layout.eager import nobody_looks_on
from ..memory import active_source, drawing_from
from ..options import CallOptions, OptionKeywords
from ..patterns import Pattern
from .checks import check_lists, check_qkv, check_scale, refuse_branches
from .choose import check_backend, check_call, choose_for, leave_autocast
from .named import layout_of
from .operators import backward, flattened, forward, gradients
from .weights import BlockSparseWeights, attention_weights


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout_or_pattern: BlockLayout | Pattern,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    key_padding_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over the pairs that a layout or pattern allows (union: a key counts once).

    Args:
        q: (batch, seq_q, heads, head_dim), float64, float32, bfloat16 or float16.
        k, v: (batch, seq_k, heads_kv, head_dim) with heads a multiple of heads_kv.
        layout_or_pattern: a `BlockLayout` for these lengths, or a pattern (its layout is built once and remembered;
            blocks of 128 tokens unless the pattern is written in blocks of its own).
        is_causal: also hide every key that comes after the query; the last query is aligned with the last key.
        scale: multiplier of the scores, head_dim ** -0.5 by default.
        dropout_p: share of the weights that is dropped, in [0, 1). The draw depends on a seed from PyTorch's
            generator and on (sample, head, query, key) alone.
        key_padding_mask: bool (batch, seq_k), True where a key is padding and hidden, as in `nn.MultiheadAttention`.
        document_ids: int (batch, seq_k): tokens see each other only if their ids are equal. Queries are the last
            seq_q of these tokens.
        softcap: scores s, scaled, become softcap · tanh(s / softcap), as in Gemma 2. Positive.
        alibi_slopes: (heads,): after that, a score falls by the slope of its head for each token between query and
            key. No gradient. Scores are float32: one at distance d is rounded by up to slope · d / 2²⁴.
        sinks: (heads,): a score for each head that joins the softmax of every row and brings no value, as in gpt-oss;
            lse then counts it. It gets its gradient, and its column is never dropped.
        return_lse: also return the log-sum-exp of each row, (batch, heads, seq_q), float32 (float64 for float64).
        backend: "auto", or the one to use: "sdpa", "triton", "blockwise", "reference". One that cannot run is an error.

    Returns:
        out like q, or (out, lse). A query that may see no key gives out 0, lse −inf (or its sink) and no gradient.
    """
    q, k, v, autocast_off = leave_autocast(q, k, v)
    kind, layout = None, layout_or_pattern
    if isinstance(layout, BlockLayout | Pattern) and nobody_looks_on(q, k, v):
        others = key_padding_mask, document_ids, softcap, alibi_slopes, sinks
        kind = _kind((q, k, v), (is_causal, scale, dropout_p, return_lse, backend), others)
    with autocast_off:
        if kind is not None and isinstance(layout, Pattern):
            check_backend(backend)
            check_qkv(q, k, v)
            check_scale(scale, q.shape[3])
            check_lists(q, k, layout)
            layout, is_causal = layout_of(layout, is_causal, q.shape[1], k.shape[1], q.shape[2], q.device), False
        known = None if kind is None else layout.notes.get(kind)  # type: ignore[union-attr]
        if known is None:
            check_backend(backend)
            refuse_branches(layout)
            whole, options = check_call(
                q,
                k,
                v,
                layout,
                is_causal=is_causal,
                scale=scale,
                dropout_p=dropout_p,
                key_padding_mask=key_padding_mask,
                document_ids=document_ids,
                softcap=softcap,
                alibi_slopes=alibi_slopes,
                sinks=sinks,
                return_lse=return_lse,
            )
            chosen = choose_for(q, k, whole, options, backend, return_lse)
            if kind is not None:
                layout.note(kind, _Known(options, chosen, hasattr(chosen, "attention"), None))  # type: ignore[union-attr]
            out, lse = run(q, k, v, whole, options, chosen)
        else:
            out, lse = _run_known(q, k, v, layout, is_causal, kind, known)  # type: ignore[arg-type]
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


class _Known(NamedTuple):
    """What a layout remembers of a kind of call, which need not be checked again."""

    options: CallOptions
    backend: ModuleType
    differentiable: bool  # as it is
    again: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None  # the shortest way, without gradients


def _kind(tensors: Sequence[Tensor], values: tuple[Any, ...], others: tuple[object, ...]) -> tuple[object, ...] | None:
    """What makes two calls over a layout equal but for their numbers; None with arguments that must be looked at."""
    is_causal, scale, dropout_p, return_lse, backend = values
    usual = type(is_causal) is type(return_lse) is bool and type(backend) is str and type(dropout_p) is float
    usual = usual and dropout_p == 0.0 and type(scale) in (float, int, NoneType)
    if not usual or any(x is not None for x in others) or any(x.layout is not torch.strided for x in tensors):
        return None
    return *((x.device, x.dtype, x.shape, x.stride(), x.data_ptr() % 16 == 0) for x in tensors), *values


def _run_known(
    q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, is_causal: bool, kind: object, known: _Known
) -> tuple[Tensor, Tensor | None]:
    training = _training(q, k, v)
    if known.again is not None and not training:
        _refuse_forward_mode(q, k, v)
        return known.again(q, k, v)
    whole = layout.causal if is_causal else layout
    if known.differentiable:
        return known.backend.attention(q, k, v, whole, known.options)
    out, lse = _run_eagerly(q, k, v, (whole,), known.options, known.backend)
    if not training and known.backend.needs_work_order:
        again = known.backend.again(q, k, v, whole, known.options)
        if again is not None:
            layout.note(kind, known._replace(again=again))
    return out, lse


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    options: CallOptions,
    backend: str,
    *,
    return_lse: bool,
    parts: Sequence[BlockLayout] = (),
) -> tuple[Tensor, Tensor | None]:
    """A checked call, run by the backend that is chosen for it; lse may be None where it was not asked for."""
    chosen = choose_for(q, k, layout, options, backend, return_lse)
    return run(q, k, v, layout, options, chosen, parts=parts)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    options: CallOptions,
    backend: ModuleType,
    *,
    parts: Sequence[BlockLayout] = (),
) -> tuple[Tensor, Tensor | None]:
    """The same by this backend.

    Args:
        parts: layouts that add up to `layout`. The gradient then takes each part's share of a row for a constant.
    """
    if options.sinks is not None:
        out, lse = run(q, k, v, layout, options._replace(sinks=None), backend, parts=parts)
        assert lse is not None
        return with_sinks(out, lse, options.sinks)
    if options.dropout_p > 0.0:
        options = options._replace(seed=torch.randint(2**31, (), device=q.device))
    if hasattr(backend, "attention"):  # differentiable as it is
        if parts:
            return with_constant_shares([backend.attention(q, k, v, part, options) for part in parts])
        return backend.attention(q, k, v, layout, options)
    if nobody_looks_on(q, k, v):
        return _run_eagerly(q, k, v, (layout, *parts), options, backend)
    _refuse_forward_mode(q, k, v)
    layouts = flattened((layout, *parts), backend, _training(q, k, v))
    return forward(q, k, v, *layouts, *options.flatten(), backend.name)


def _run_eagerly(
    q: Tensor, k: Tensor, v: Tensor, layouts: Sequence[BlockLayout], options: CallOptions, backend: ModuleType
) -> tuple[Tensor, Tensor]:
    """The same where nobody looks on, by a backend with a backward of its own; the parts stand behind the whole."""
    _refuse_forward_mode(q, k, v)
    training = _training(q, k, v)
    if backend.needs_work_order:
        for each in layouts:
            each.order(by_key=training)
    if not training:
        return backend.forward(q, k, v, layouts[0], options)
    return _Attention.apply(q, k, v, layouts, options, backend)


def _training(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Each row with one more score in its softmax, whose value is 0; differentiable in all three."""
    sinks = sinks.to(lse.dtype)[:, None]
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
    """The operator below for eager calls. Masks stand apart from `options`, so that a change of them is noticed."""

    @staticmethod
    def forward(  # with ctx, not with setup_context, which would take as long as the rest
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layouts: Sequence[BlockLayout],
        options: CallOptions,
        backend: ModuleType,
    ) -> tuple[Tensor, Tensor]:
        out, lse = backend.forward(q, k, v, layouts[0], options)
        tensors, *ctx.options = options.flatten()
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
        if torch.is_grad_enabled() or not nobody_looks_on(*seen):  # the operator knows what to do then
            layouts = flattened(ctx.layouts, ctx.backend, training=True)
            return *backward(*given, *layouts, tensors, *ctx.options, ctx.backend.name), None, None, None
        with drawing_from(ctx.source):  # as the forward did, in whichever thread this is
            options = CallOptions.unflatten(tensors, *ctx.options)
            return *gradients(*given, ctx.layouts, options, ctx.backend), None, None, None


def _refuse_forward_mode(*tensors: Tensor) -> None:
    """PyTorch would drop the tangents of an operator that has no formula for them, and say nothing."""
    if torch.compiler.is_compiling() or torch.autograd.forward_ad._current_level < 0:
        return
    if any(torch.autograd.forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError("attention has no forward-mode derivative; use backend='reference' for it")


def attention_with_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout_or_pattern: BlockLayout | Pattern,
    *,
    is_causal: bool = False,
    backend: str = "auto",
    **options: Unpack[OptionKeywords],
) -> tuple[Tensor, BlockSparseWeights]:
    """`block_sparse_attention` and the weights before dropout, in memory proportional to the active blocks."""
    q, k, v, autocast_off = leave_autocast(q, k, v)
    check_backend(backend)
    refuse_branches(layout_or_pattern)
    with autocast_off:
        layout, checked = check_call(q, k, v, layout_or_pattern, is_causal=is_causal, return_lse=True, **options)
        out, lse = attend(q, k, v, layout, checked, backend, return_lse=True)
        assert lse is not None
        return out, attention_weights(q, k, lse, layout, checked)
