"""Attention as operators of `torch.library`, for whoever traces, transforms or intercepts PyTorch.

There are two of each, of the same code. `block_sparse_forward` and `_backward` are given the lists of layouts, one
behind the other, and `sizes`. `pattern_forward` and `_backward` are given `names` instead and find the layouts when
they run (`ops.named`): not in a CUDA graph, which would hold on to lists that the cache may forget.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..backends.base import compute_dtype
from ..layout import BlockLayout
from ..options import CallOptions
from .choose import BY_NAME
from .named import NamedLayout, layouts_of, names_of


def flattened(
    layouts: Sequence[BlockLayout | NamedLayout], backend: ModuleType, training: bool
) -> tuple[list[Tensor], list[int], str]:
    """The whole and its parts, as the operators take them: with the order of work that the backend walks them in."""
    named = [layout for layout in layouts if isinstance(layout, NamedLayout)]
    if named and not named[0].lasts:
        return names_of(named)
    needs_work_order = backend.needs_work_order
    tensors: list[Tensor] = []
    sizes: list[int] = []
    for layout in layouts:
        lists = layout.constant() if isinstance(layout, NamedLayout) else layout
        more_tensors, more_sizes = lists.flatten(work_order=needs_work_order, by_key=needs_work_order and training)
        tensors, sizes = tensors + more_tensors, sizes + more_sizes
    return tensors, sizes, ""


def _found(q: Tensor, k: Tensor, lists: Sequence[Tensor], sizes: Sequence[int], names: str) -> list[BlockLayout]:
    return layouts_of(q, k, lists, sizes, names) if names else BlockLayout.unflatten_all(lists, sizes)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: list[Tensor],
    sizes: list[int],
    names: str,
    tensors: list[Tensor],
    given: str,
    numbers: list[float],
    backend: str,
) -> tuple[Tensor, Tensor]:
    options = CallOptions.unflatten(tensors, given, numbers)
    whole, *_ = _found(q, k, layout, sizes, names)
    return BY_NAME[backend].forward(q, k, v, whole, options)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, seq_q, heads, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty(batch, heads, seq_q, dtype=compute_dtype(q.dtype))


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
    names: str,
    tensors: list[Tensor],
    given: str,
    numbers: list[float],
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    options = CallOptions.unflatten(tensors, given, numbers)
    return gradients(do, dlse, q, k, v, out, lse, _found(q, k, layout, sizes, names), options, BY_NAME[backend])


def _fake_backward(do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def gradients(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layouts: Sequence[BlockLayout],
    options: CallOptions,
    backend: ModuleType,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv; the layouts are the whole and the parts of `attend`."""
    whole, *parts = layouts
    if not parts:
        return backend.backward(do, dlse, q, k, v, out, lse, whole, options)
    # With the lse of the whole, the weights of a part are its own times its share of the row: a constant.
    dtype = compute_dtype(q.dtype)
    dq, dk, dv = (torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format) for x in (q, k, v))
    for part in parts:
        part_out, _ = backend.forward(q, k, v, part, options)
        more = backend.backward(do, dlse, q, k, v, part_out, lse, part, options)
        for total, x in zip((dq, dk, dv), more, strict=True):
            total += x
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, layout, sizes, names, tensors, given, numbers, backend = inputs
    ctx.save_for_backward(q, k, v, *output, *layout, *tensors)
    ctx.of_layout = len(layout), sizes, names
    ctx.of_options, ctx.backend = (given, numbers), backend
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, *rest = ctx.saved_tensors
    num, *of_layout = ctx.of_layout
    layout, tensors = rest[:num], rest[num:]
    do = torch.zeros_like(out) if do is None else do
    grads = backward(do, dlse, q, k, v, out, lse, layout, *of_layout, tensors, *ctx.of_options, ctx.backend)
    return *grads, [None] * len(layout), None, None, [None] * len(tensors), None, None, None


def _no_second_derivative(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError("attention has no second derivative; use backend='reference' to differentiate twice")


def _registered(kind: str, **options: Any) -> tuple[Any, Any]:
    """The operators that are called `kind`."""
    forward, backward = (
        torch.library.custom_op(f"dilated_attention_pytorch::{kind}_{which}", function, mutates_args=(), **options)
        for which, function in (("forward", _forward), ("backward", _backward))
    )
    forward.register_fake(_fake_forward)
    backward.register_fake(_fake_backward)
    forward.register_autograd(_differentiate, setup_context=_save)
    backward.register_autograd(_no_second_derivative)
    return forward, backward


OF_LISTS = _registered("block_sparse")
OF_NAMES = _registered("pattern", tags=(torch.Tag.cudagraph_unsafe,))


def forward(q: Tensor, k: Tensor, v: Tensor, layout: list[Tensor], sizes: list[int], names: str, *rest: Any) -> Any:
    """out and lse: `layout`, `sizes` and `names` are `flattened`, the rest the flattened options and the backend's
    name."""
    return (OF_NAMES if names else OF_LISTS)[0](q, k, v, layout, sizes, names, *rest)


def backward(*args: Any) -> Any:
    """dq, dk and dv, of the same and what the forward gave."""
    return (OF_NAMES if args[9] else OF_LISTS)[1](*args)
