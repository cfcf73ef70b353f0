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

from ..backends.base import compute_dtype, results_of
from ..layout import BlockLayout
from ..options import OF_BIAS, CallOptions
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
    return results_of(q, v)


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
    wanted: str,
) -> list[Tensor]:
    options, layouts = CallOptions.unflatten(tensors, given, numbers), _found(q, k, layout, sizes, names)
    return [*gradients(do, dlse, q, k, v, out, lse, layouts, options, BY_NAME[backend], wanted.split())]


def _fake_backward(do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    tensors, given, numbers, _, wanted = rest[-5:]
    bias = CallOptions.unflatten(tensors, given, numbers).bias
    more = [getattr(bias, name) for name in wanted.split()]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, *more)]


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
    wanted: Sequence[str] = (),
) -> tuple[Tensor, ...]:
    """dq, dk and dv, and the gradients of those tensors of the bias that are wanted; the layouts are the whole and the
    parts of `attend`."""
    asked = [name for name in wanted if name != "query_terms"]
    found = _summed(do, dlse, q, k, v, out, lse, layouts, options, backend, asked)
    if "query_terms" not in wanted:
        return found
    # What a row's scores have in common changes its lse alone.
    assert options.bias is not None
    assert options.bias.query_terms is not None
    of_rows = torch.zeros_like(lse) if dlse is None else dlse.masked_fill(lse == -torch.inf, 0.0)
    of_bias = dict(zip(asked, found[3:], strict=True))
    of_bias["query_terms"] = of_rows.sum_to_size(options.bias.query_terms.shape)
    return *found[:3], *(of_bias[name] for name in wanted)


def _summed(
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
    wanted: Sequence[str],
) -> tuple[Tensor, ...]:
    """`gradients` of what a backend is asked for, over all parts."""
    whole, *parts = layouts
    more: Any = (wanted,) if wanted else ()
    if not parts:
        return backend.backward(do, dlse, q, k, v, out, lse, whole, options, *more)
    # With the lse of the whole, the weights of a part are its own times its share of the row: a constant.
    of_bias = [getattr(options.bias, name) for name in wanted]
    dtype = compute_dtype(q.dtype)
    sums = [torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format) for x in (q, k, v, *of_bias)]
    for part in parts:
        part_out, _ = backend.forward(q, k, v, part, options)
        found = backend.backward(do, dlse, q, k, v, part_out, lse, part, options, *more)
        for total, x in zip(sums, found, strict=True):
            total += x
    return tuple(total.to(x.dtype) for total, x in zip(sums, (q, k, v, *of_bias), strict=True))


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
    (given, numbers), of_tensors = ctx.of_options, ctx.needs_input_grad[6]
    asked = asked_of_bias(given, of_tensors)
    options = tensors, given, numbers, ctx.backend, " ".join(name for name in asked if name)
    dq, dk, dv, *more = backward(do, dlse, q, k, v, out, lse, layout, *of_layout, *options)
    of_bias = iter(more)
    of_options = [next(of_bias) if each else None for each in asked]
    return dq, dk, dv, [None] * len(layout), None, None, of_options, None, None, None


def asked_of_bias(given: str, needed: Sequence[bool]) -> list[str]:
    """Of each tensor of flattened options its name in the bias, if its gradient is asked for, else nothing."""
    names = zip(given.split(), needed, strict=True)
    return [name.removeprefix(OF_BIAS) if each and name.startswith(OF_BIAS) else "" for name, each in names]


def no_second_derivative(ctx: Any, *grads: Any) -> None:
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
    backward.register_autograd(no_second_derivative)
    return forward, backward


OF_LISTS = _registered("block_sparse")
OF_NAMES = _registered("pattern", tags=(torch.Tag.cudagraph_unsafe,))


def attention_operators() -> list[Any]:
    """The operators of attention's forward pass, for `create_selective_checkpoint_contexts` to keep what they gave."""
    names = torch.ops.dilated_attention_pytorch
    return [names.block_sparse_forward.default, names.pattern_forward.default, names.ring_forward.default]


def forward(q: Tensor, k: Tensor, v: Tensor, layout: list[Tensor], sizes: list[int], names: str, *rest: Any) -> Any:
    """out and lse: `layout`, `sizes` and `names` are `flattened`, the rest the flattened options and the backend's
    name."""
    return (OF_NAMES if names else OF_LISTS)[0](q, k, v, layout, sizes, names, *rest)


def backward(*args: Any) -> Any:
    """dq, dk, dv and the gradients of the bias that are wanted, of the same and what the forward gave."""
    return (OF_NAMES if args[9] else OF_LISTS)[1](*args)
