"""`explain`: which backend and which kernels a call would run on, and why."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Unpack

from torch import Tensor

from ..backends.base import Request
from ..layout import BlockLayout
from ..layout.tiles import bitmaps_text
from ..options import OptionKeywords
from ..patterns import Branches, Pattern
from ..patterns.branches import check_heads
from .checks import tokens_first
from .choose import BY_NAME, check_call, choose, leave_autocast
from .fast_path import call_key
from .named import NamedLayout


@dataclass(frozen=True)
class Explanation:
    """The backend of a call, and why each other one is not it. Prints as a small table.

    Attributes:
        chosen: the name of the backend.
        reasons: by backend, why it is or is not chosen.
        kernels: which kernels run forward and backward and why, where the backend has several.
        path: how much of the way a call like this goes, here and now: see `ops/fast_path.py`.
        bitmaps: of a layout that has some, how many and what they take; else empty.
    """

    chosen: str
    reasons: dict[str, str]
    kernels: dict[str, str] = field(default_factory=dict)
    path: str = "every call is checked"
    bitmaps: str = ""

    def __str__(self) -> str:
        rows = self.reasons | self.kernels | ({"bitmaps": self.bitmaps} if self.bitmaps else {}) | {"path": self.path}
        width = max(map(len, rows))
        mark = {name: "→" if name == self.chosen else " " for name in rows}
        return "\n".join(f"{mark[name]} {name:{width}}  {reason}" for name, reason in rows.items())


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
    request = Request.of(q, k, v, checked, kind=whole.kind, return_lse=return_lse, named=named)
    backend_of_call = choose(backend, request)
    chosen = backend_of_call.name
    reasons = {}
    for name, module in BY_NAME.items():
        ok, reason = module.can_run(replace(request, named=name == backend))
        if name == chosen:
            reasons[name] = f"chosen: {'named by the caller; ' if named else ''}{reason}"
        else:
            passed = "another was named" if named else f"{chosen} comes first"
            reasons[name] = f"not chosen, {passed}: {reason}" if ok else f"cannot: {reason}"
    kernels = {}
    if hasattr(backend_of_call, "kernels_of") and isinstance(whole, BlockLayout):
        kernels = backend_of_call.kernels_of(q, k, v, whole, checked)
    others = [value for name, value in options.items() if name not in ("scale", "dropout_p", "deterministic")]
    key = call_key(
        q, k, v, is_causal=is_causal, scale=options.get("scale"), dropout_p=checked.dropout_p, return_lse=return_lse,
        backend=backend, deterministic=options.get("deterministic"), others=others,
    )  # fmt: skip
    bitmaps = bitmaps_text(whole) if isinstance(whole, BlockLayout) else ""
    return Explanation(chosen, reasons, kernels, _path(layout_or_pattern, whole, key), bitmaps)


def _path(
    layout_or_pattern: BlockLayout | Pattern | Branches, whole: BlockLayout | NamedLayout, key: object | None
) -> str:
    holder = layout_or_pattern if isinstance(layout_or_pattern, BlockLayout) else whole
    if key is None or not isinstance(holder, BlockLayout):
        return "checked in every call: it is traced, or has masks, dropout, score modifications or sinks"
    known = holder.call_cache.get(key)
    if known is None:
        return "checked now; the next call like this one skips the checks"
    if known.replay is None:
        return "skips the checks, like a call before it"
    return "skips the checks; without gradients the launches of a call before it are replayed"
