"""Which backend runs a call: a short ordered list of `can_run`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, Unpack

import torch
from torch import Tensor

from ..backends import blockwise, reference, sdpa, triton
from ..backends.base import Request
from ..layout import BlockLayout
from ..options import CallOptions, OptionKeywords
from ..patterns import Branches, Pattern
from ..patterns.base import check_flag, did_you_mean, shown
from .checks import check_options, check_qkv
from .named import NamedLayout, resolve_layout

# The first that can run is chosen. The reference is the definition; it is quadratic and runs only when named.
ORDERED: tuple[ModuleType, ...] = (sdpa, triton, blockwise)
BY_NAME: dict[str, ModuleType] = {backend.name: backend for backend in (*ORDERED, reference)}


def check_backend(backend: str) -> str:
    if not isinstance(backend, str) or (backend != "auto" and backend not in BY_NAME):
        meant = did_you_mean(str(backend), BY_NAME)
        raise ValueError(f"backend must be one of {['auto', *BY_NAME]}, got {shown(backend)}{meant}")
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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout | NamedLayout,
    options: CallOptions,
    backend: str,
    return_lse: bool,
) -> ModuleType:
    named = backend != "auto"
    return choose(backend, Request.of(q, k, v, options, kind=layout.kind, return_lse=return_lse, named=named))


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
