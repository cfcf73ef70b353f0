"""`block_sparse_attention`: one softmax over the allowed keys of every row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType, NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends.base import Extras, compute_dtype
from ..layout import BlockLayout
from ..memory import active_source, drawing_from
from ..patterns import Pattern
from .checks import check_qkv, check_scale, refuse_branches, resolve_layout, tokens_first
from .choose import BY_NAME, check_backend, check_call, choose_for, leave_autocast
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
    layout: str = "bshd",
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
        layout: "bshd", or "bhsd" for q, k, v and out of (batch, heads, seq, head_dim). They are read through transposed
            views, not copied; kernels are fastest where the heads of a token lie together in memory, as in the views
            that `x.unflatten(-1, (heads, head_dim)).transpose(1, 2)` makes of a projection.

    Returns:
        out like q, or (out, lse). A query that may see no key gives out 0, lse −inf (or its sink) and no gradient.
    """
    if layout != "bshd":
        q, k, v = tokens_first(layout, q, k, v)
    q, k, v, autocast_off = leave_autocast(q, k, v)
    kind, what = None, layout_or_pattern
    if isinstance(what, BlockLayout | Pattern) and nobody_looks_on(q, k, v):
        others = key_padding_mask, document_ids, softcap, alibi_slopes, sinks
        kind = _kind((q, k, v), (is_causal, scale, dropout_p, return_lse, backend), others)
    with autocast_off:
        if kind is not None and isinstance(what, Pattern):
            check_backend(backend)
            check_qkv(q, k, v)
            check_scale(scale, q.shape[3])
            what, is_causal = resolve_layout(q, k, what, is_causal), False
        known = None if kind is None else what.notes.get(kind)  # type: ignore[union-attr]
        if known is None:
            check_backend(backend)
            refuse_branches(what)
            whole, extras = check_call(
                q,
                k,
                v,
                what,
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
            chosen = choose_for(q, k, whole, extras, backend, return_lse or sinks is not None)
            if kind is not None:
                what.note(kind, _Known(extras, chosen, hasattr(chosen, "attention"), None))  # type: ignore[union-attr]
            out, lse = run(q, k, v, whole, extras, chosen, sinks=sinks)
        else:
            out, lse = _run_known(q, k, v, what, is_causal, kind, known)  # type: ignore[arg-type]
    if layout != "bshd":
        out = out.transpose(1, 2)
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


class _Known(NamedTuple):
    """What a layout remembers of a kind of call, which need not be checked again."""

    extras: Extras
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
        return known.backend.attention(q, k, v, whole, known.extras)
    out, lse = _run_eagerly(q, k, v, (whole,), known.extras, known.backend)
    if not training and known.backend.ordered:
        again = known.backend.again(q, k, v, whole, known.extras)
        if again is not None:
            layout.note(kind, known._replace(again=again))
    return out, lse


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    extras: Extras,
    backend: str,
    *,
    return_lse: bool,
    sinks: Tensor | None = None,
    parts: Sequence[BlockLayout] = (),
) -> tuple[Tensor, Tensor | None]:
    """A checked call, run by the backend that is chosen for it; lse may be None where it was not asked for."""
    chosen = choose_for(q, k, layout, extras, backend, return_lse or sinks is not None)
    return run(q, k, v, layout, extras, chosen, sinks=sinks, parts=parts)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    extras: Extras,
    backend: ModuleType,
    *,
    sinks: Tensor | None = None,
    parts: Sequence[BlockLayout] = (),
) -> tuple[Tensor, Tensor | None]:
    """The same by this backend.

    Args:
        sinks: as in `block_sparse_attention`.
        parts: layouts that add up to `layout`. The gradient then takes each part's share of a row for a constant.
    """
    if sinks is not None:
        out, lse = run(q, k, v, layout, extras, backend, parts=parts)
        assert lse is not None
        return with_sinks(out, lse, sinks)
    if extras.dropout_p > 0.0:
        extras = extras._replace(seed=torch.randint(2**31, (), device=q.device))
    if hasattr(backend, "attention"):  # differentiable as it is
        if parts:
            return with_constant_shares([backend.attention(q, k, v, part, extras) for part in parts])
        return backend.attention(q, k, v, layout, extras)
    if nobody_looks_on(q, k, v):
        return _run_eagerly(q, k, v, (layout, *parts), extras, backend)
    _refuse_forward_mode(q, k, v)
    layouts = _flattened((layout, *parts), backend, _training(q, k, v))
    return _forward(q, k, v, *layouts, *extras, backend.name)


def _run_eagerly(
    q: Tensor, k: Tensor, v: Tensor, layouts: Sequence[BlockLayout], extras: Extras, backend: ModuleType
) -> tuple[Tensor, Tensor]:
    """The same where nobody looks on, by a backend with a backward of its own; the parts stand behind the whole."""
    _refuse_forward_mode(q, k, v)
    training = _training(q, k, v)
    if backend.ordered:
        for each in layouts:
            each.order(by_key=training)
    if not training:
        return backend.forward(q, k, v, layouts[0], extras)
    return _Attention.apply(q, k, v, layouts, extras, backend)


def _training(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def _flattened(layouts: Sequence[BlockLayout], backend: ModuleType, training: bool) -> tuple[list[Tensor], list[int]]:
    """Layouts, one behind the other, with the order of work that the backend walks them in."""
    ordered = backend.ordered
    tensors: list[Tensor] = []
    sizes: list[int] = []
    for layout in layouts:
        more_tensors, more_sizes = layout.flatten(ordered=ordered, by_key=ordered and training)
        tensors, sizes = tensors + more_tensors, sizes + more_sizes
    return tensors, sizes


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


def nobody_looks_on(*tensors: Tensor) -> bool:
    """Whether this is plain eager PyTorch: no graph is traced, no mode or transform intercepts, no subclass, data
    in every tensor.

    Then the way through the dispatcher, most of the time of a short call, has no one to serve.
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or any(type(x) not in (Tensor, torch.nn.Parameter) or x.is_meta for x in tensors)
    )


class _Attention(torch.autograd.Function):
    """The operator below for eager calls. Masks stand apart from `extras`, so that a change of them is noticed."""

    @staticmethod
    def forward(  # with ctx, not with setup_context, which would take as long as the rest
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layouts: Sequence[BlockLayout],
        extras: Extras,
        backend: ModuleType,
    ) -> tuple[Tensor, Tensor]:
        out, lse = backend.forward(q, k, v, layouts[0], extras)
        masks = extras.key_padding_mask, extras.document_ids, extras.seed, extras.slopes
        ctx.save_for_backward(q, k, v, out, lse, *masks)
        ctx.layouts, ctx.extras, ctx.backend, ctx.source = layouts, extras, backend, active_source()
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, key_padding_mask, document_ids, seed, slopes = ctx.saved_tensors
        masks = {"key_padding_mask": key_padding_mask, "document_ids": document_ids, "seed": seed, "slopes": slopes}
        if do is None:
            do = torch.zeros_like(out)
        given, extras = (do, dlse, q, k, v, out, lse), ctx.extras._replace(**masks)
        seen = given if dlse is not None else (do, q, k, v, out, lse)
        if torch.is_grad_enabled() or not nobody_looks_on(*seen):  # the operator knows what to do then
            layouts = _flattened(ctx.layouts, ctx.backend, training=True)
            return *_backward(*given, *layouts, *extras, ctx.backend.name), None, None, None
        with drawing_from(ctx.source):  # as the forward did, in whichever thread this is
            return *_gradients(*given, ctx.layouts, extras, ctx.backend), None, None, None


def _gradients(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layouts: Sequence[BlockLayout],
    extras: Extras,
    backend: ModuleType,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv; the layouts are the whole and the parts of `attend`."""
    whole, *parts = layouts
    if not parts:
        return backend.backward(do, dlse, q, k, v, out, lse, whole, extras)
    # With the lse of the whole, the weights of a part are its own times its share of the row: a constant.
    dtype = compute_dtype(q.dtype)
    dq, dk, dv = (torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format) for x in (q, k, v))
    for part in parts:
        part_out, _ = backend.forward(q, k, v, part, extras)
        more = backend.backward(do, dlse, q, k, v, part_out, lse, part, extras)
        for total, x in zip((dq, dk, dv), more, strict=True):
            total += x
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


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
    scale: float | None = None,
    dropout_p: float = 0.0,
    key_padding_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, BlockSparseWeights]:
    """`block_sparse_attention` and the weights before dropout, in memory proportional to the active blocks."""
    q, k, v, autocast_off = leave_autocast(q, k, v)
    check_backend(backend)
    refuse_branches(layout_or_pattern)
    with autocast_off:
        layout, extras = check_call(
            q,
            k,
            v,
            layout_or_pattern,
            is_causal=is_causal,
            scale=scale,
            dropout_p=dropout_p,
            key_padding_mask=key_padding_mask,
            document_ids=document_ids,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            return_lse=True,
        )
        out, lse = attend(q, k, v, layout, extras, backend, return_lse=True, sinks=sinks)
        assert lse is not None
        return out, attention_weights(q, k, lse, layout, extras)


@torch.library.custom_op("dilated_attention_pytorch::block_sparse_forward", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: list[Tensor],
    sizes: list[int],
    scale: float,
    key_padding_mask: Tensor | None,
    document_ids: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
    softcap: float,
    slopes: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    extras = Extras(scale, key_padding_mask, document_ids, dropout_p, seed, softcap, slopes)
    whole, *_ = BlockLayout.unflatten_all(layout, sizes)
    return BY_NAME[backend].forward(q, k, v, whole, extras)


@_forward.register_fake
def _(q, k, v, layout, sizes, scale, key_padding_mask, document_ids, dropout_p, seed, softcap, slopes, backend):  # type: ignore[no-untyped-def]
    batch, seq_q, heads, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty(batch, heads, seq_q, dtype=compute_dtype(q.dtype))


@torch.library.custom_op("dilated_attention_pytorch::block_sparse_backward", mutates_args=())
def _backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: list[Tensor],
    sizes: list[int],
    scale: float,
    key_padding_mask: Tensor | None,
    document_ids: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
    softcap: float,
    slopes: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    extras = Extras(scale, key_padding_mask, document_ids, dropout_p, seed, softcap, slopes)
    layouts = BlockLayout.unflatten_all(layout, sizes)
    return _gradients(do, dlse, q, k, v, out, lse, layouts, extras, BY_NAME[backend])


@_backward.register_fake
def _(do, dlse, q, k, v, *rest):  # type: ignore[no-untyped-def]
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, layout, sizes, scale, key_padding_mask, document_ids, dropout_p, seed, softcap, slopes, backend = inputs
    ctx.save_for_backward(q, k, v, *output, key_padding_mask, document_ids, seed, slopes, *layout)
    ctx.sizes, ctx.scale, ctx.dropout_p, ctx.softcap, ctx.backend = sizes, scale, dropout_p, softcap, backend
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, key_padding_mask, document_ids, seed, slopes, *layout = ctx.saved_tensors
    grads = _backward(
        torch.zeros_like(out) if do is None else do,
        dlse,
        q,
        k,
        v,
        out,
        lse,
        layout,
        ctx.sizes,
        ctx.scale,
        key_padding_mask,
        document_ids,
        ctx.dropout_p,
        seed,
        ctx.softcap,
        slopes,
        ctx.backend,
    )
    return *grads, [None] * len(layout), *[None] * 9


_forward.register_autograd(_differentiate, setup_context=_save)


def _no_second_derivative(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError("attention has no second derivative; use backend='reference' to differentiate twice")


_backward.register_autograd(_no_second_derivative)
