"""Which backend runs a call: a short ordered list of `can_run`, and a way to ask it why."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..backends import blockwise, reference, sdpa, triton
from ..backends.base import Extras, Request
from ..layout import BlockLayout
from ..patterns import Branches, Pattern
from ..patterns.base import check_flag
from ..patterns.branches import check_heads
from .checks import (
    check_dropout,
    check_masks,
    check_qkv,
    check_scale,
    check_sinks,
    check_slopes,
    check_softcap,
    resolve_layout,
    tokens_first,
)

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


def request_of(q: Tensor, k: Tensor, layout: BlockLayout, extras: Extras, *, return_lse: bool, backend: str) -> Request:
    return Request(
        device=q.device,
        dtype=q.dtype,
        kind=layout.kind,
        square=q.shape[1] == k.shape[1],
        grouped=q.shape[2] != k.shape[2],
        head_dim=q.shape[3],
        dropout=extras.dropout_p > 0.0,
        masked=extras.key_padding_mask is not None or extras.document_ids is not None,
        shaped=extras.shaped,
        named=backend != "auto",
        return_lse=return_lse,
    )


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


def choose_for(q: Tensor, k: Tensor, layout: BlockLayout, extras: Extras, backend: str, return_lse: bool) -> ModuleType:
    return choose(backend, request_of(q, k, layout, extras, return_lse=return_lse, backend=backend))


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout_or_pattern: BlockLayout | Pattern | Branches,
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
) -> Explanation:
    """Which backend `block_sparse_attention` would run with the same arguments, and why no other. Computes nothing.

    With `Branches` in place of the pattern, the same for `dilated_attention`.
    """
    if layout != "bshd":
        q, k, v = tokens_first(layout, q, k, v)
    q, k, v, _ = leave_autocast(q, k, v)
    whole, extras = check_call(
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
        return_lse=return_lse,
    )
    if isinstance(layout_or_pattern, Branches):
        check_heads(layout_or_pattern.dilation_rates, q.shape[2])
    request = request_of(q, k, whole, extras, return_lse=return_lse or sinks is not None, backend=backend)
    chosen = choose(backend, request).name
    reasons = {}
    for name, module in BY_NAME.items():
        ok, reason = module.can_run(replace(request, named=name == backend))
        if name == chosen:
            named = "named by the caller; " if backend != "auto" else ""
            reasons[name] = f"chosen: {named}{reason}"
        else:
            passed = "another was named" if backend != "auto" else f"{chosen} comes first"
            reasons[name] = f"not chosen, {passed}: {reason}" if ok else f"cannot: {reason}"
    return Explanation(chosen, reasons)


def leave_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, AbstractContextManager[Any]]:
    """Inside an autocast region attention takes its dtype, once, and then computes as it does elsewhere.

    `scaled_dot_product_attention` does the same. Left on, autocast would round every product inside to that dtype.
    """
    device_type = q.device.type if isinstance(q, Tensor) else "cpu"
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
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
    scale: float | None,
    dropout_p: float,
    key_padding_mask: Tensor | None,
    document_ids: Tensor | None = None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    return_lse: bool,
) -> tuple[BlockLayout, Extras]:
    """All arguments of a call checked; its layout and the rest. The dropout seed is still to be drawn."""
    check_qkv(q, k, v)
    check_flag("is_causal", is_causal)
    check_flag("return_lse", return_lse)
    check_masks(q, k, key_padding_mask, document_ids)
    check_sinks(sinks, q)
    extras = Extras(
        scale=check_scale(scale, q.shape[3]),
        key_padding_mask=key_padding_mask,
        document_ids=document_ids,
        dropout_p=check_dropout(dropout_p),
        softcap=check_softcap(softcap),
        slopes=check_slopes(alibi_slopes, q),
    )
    return resolve_layout(q, k, layout_or_pattern, is_causal), extras
