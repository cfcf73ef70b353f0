"""Which backend runs a call: a short ordered list of `can_run`, and a way to ask it why."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Unpack

import torch
from torch import Tensor

from ..backends import blockwise, reference, sdpa, triton
from ..backends.base import Request
from ..layout import BlockLayout
from ..options import CallOptions, OptionKeywords
from ..patterns import Branches, Pattern
from ..patterns.base import check_flag
from ..patterns.branches import check_heads
from .checks import check_options, check_qkv, tokens_first
from .named import NamedLayout, resolve_layout

# The first that can run is chosen. The reference is the definition; it is quadratic and runs only when named.
ORDERED: tuple[ModuleType, ...] = (sdpa, triton, blockwise)
BY_NAME: dict[str, ModuleType] = {backend.name: backend for backend in (*ORDERED, reference)}


@dataclass(frozen=True)
class Explanation:
    """The backend of a call, and why each other one is not it. Prints as a small table."""

    chosen: str
    reasons: dict[str, str]

    def __str__(self) -> str:
        width = max(map(len, self.reasons))
        mark = {name: "→" if name == self.chosen else " " for name in self.reasons}
        return "\n".join(f"{mark[name]} {name:{width}}  {reason}" for name, reason in self.reasons.items())


def check_backend(backend: str) -> str:
    if not isinstance(backend, str) or (backend != "auto" and backend not in BY_NAME):
        raise ValueError(f"backend must be one of {['auto', *BY_NAME]}, got {backend!r}")
    return backend


def choose(backend: str, request: Request) -> ModuleType:
    """The backend that was named, or the first that can run. A named one that cannot is an error, never replaced."""
    if check_backend(backend) == "auto":
        return next(b for b in ORDERED if b.can_run(request)[0])
    ok, reason = BY_NAME[backend].can_run(request)
    if not ok:
        raise ValueError(f"backend {backend!r} cannot run this call: {reason}")
    return BY_NAME[backend]


def choose_for(
    q: Tensor, k: Tensor, layout: BlockLayout | NamedLayout, options: CallOptions, backend: str, return_lse: bool
) -> ModuleType:
    named = backend != "auto"
    return choose(backend, Request.of(q, k, options, kind=layout.kind, return_lse=return_lse, named=named))


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout_or_pattern: BlockLayout | Pattern | Branches,
    *,
    is_causal: bool = False,
    return_lse: bool = False,
    backend: str = "auto",
    layout: str = "bshd",
    **options: Unpack[OptionKeywords],
) -> Explanation:
    """Which backend `block_sparse_attention` would run with the same arguments, and why no other. Computes nothing.

    With `Branches` in place of the pattern, the same for `dilated_attention`.
    """
    if layout != "bshd":
        q, k, v = tokens_first(layout, q, k, v)
    q, k, v, _ = leave_autocast(q, k, v)
    whole, checked = check_call(q, k, v, layout_or_pattern, is_causal=is_causal, return_lse=return_lse, **options)
    if isinstance(layout_or_pattern, Branches):
        check_heads(layout_or_pattern.dilation_rates, q.shape[2])
    named = backend != "auto"
    request = Request.of(q, k, checked, kind=whole.kind, return_lse=return_lse, named=named)
    chosen = choose(backend, request).name
    reasons = {}
    for name, module in BY_NAME.items():
        ok, reason = module.can_run(replace(request, named=name == backend))
        if name == chosen:
            reasons[name] = f"chosen: {'named by the caller; ' if named else ''}{reason}"
        else:
            passed = "another was named" if named else f"{chosen} comes first"
            reasons[name] = f"not chosen, {passed}: {reason}" if ok else f"cannot: {reason}"
    return Explanation(chosen, reasons)


def has_autocast(device_type: str) -> bool:
    """Whether this is inside an autocast region for the device."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def leave_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, AbstractContextManager[Any]]:
    """Inside an autocast region attention takes its dtype, once, and then computes as it does elsewhere.

    `scaled_dot_product_attention` does the same. Left on, autocast would round every product inside to that dtype.
    """
    device_type = q.device.type if isinstance(q, Tensor) else "cpu"
    if not has_autocast(device_type):
        return q, k, v, nullcontext()
    dtype = torch.get_autocast_dtype(device_type)
    q, k, v = (
        x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in (q, k, v)
    )
    return q, k, v, torch.autocast(device_type, enabled=False)


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout_or_pattern: BlockLayout | Pattern | Branches,
    *,
    is_causal: bool,
    return_lse: bool,
    **options: Unpack[OptionKeywords],
) -> tuple[BlockLayout | NamedLayout, CallOptions]:
    """All arguments of a call checked; its layout and its options."""
    check_qkv(q, k, v)
    check_flag("is_causal", is_causal)
    check_flag("return_lse", return_lse)
    checked = check_options(q, k, **options)
    return resolve_layout(q, k, layout_or_pattern, is_causal), checked
