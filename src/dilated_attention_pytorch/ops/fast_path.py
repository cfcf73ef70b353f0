"""The fast path: a call like one before skips the checks, and then everything up to the launch of its kernels.

A call has a key where plain eager PyTorch runs it without masks, dropout or score modifications: all that its checks,
its backend and its launches depend on, except the numbers in q, k and v. What is known of a key stands in the
`call_cache` of the layout, so it goes when the layout goes.

    a call ──no key─────────────────────────────▶ check, choose, run
      │ key
      ▼
    call_cache[key] ──missing──▶ check, choose, run ──▶ KnownCall(options, backend, replay=None)
      │ KnownCall
      ▼
    replay ──None, or gradients are asked for──▶ run by the known backend ──▶ KnownCall(…, replay), where the backend
      │                                                                       has recorded its launches
      ▼
    replay(q, k, v): new results and the recorded launches (`kernels/launcher.py`), nothing else

`set_fast_path(False)` sends every call the whole way, to find out whether a fault lies here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType, NoneType
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import BlockLayout
from ..layout.eager import is_plain_eager
from ..options import CallOptions
from ..patterns.base import check_flag
from .attend import asks_gradients, refuse_forward_mode, run_eagerly

_enabled = True


class KnownCall(NamedTuple):
    """What need not be found out again."""

    options: CallOptions
    backend: ModuleType
    replay: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None  # of calls without gradients


def set_fast_path(enabled: bool) -> None:
    """Whether calls like earlier ones may skip steps, which is the default. For the whole process."""
    global _enabled
    check_flag("enabled", enabled)
    _enabled = enabled


def call_key(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    return_lse: bool,
    backend: str,
    others: Sequence[object],
) -> tuple[object, ...] | None:
    """What makes two calls over a layout equal but for their numbers; None for a call that goes the whole way.

    Args:
        others: the options that have no place in the key; a call that brings one of them has none.
    """
    if not _enabled or any(x is not None for x in others) or not is_plain_eager(q, k, v):
        return None
    usual = type(is_causal) is type(return_lse) is bool and type(backend) is str and type(dropout_p) is float
    usual = usual and dropout_p == 0.0 and type(scale) in (float, int, NoneType)
    if not usual or any(x.layout is not torch.strided for x in (q, k, v)):
        return None
    like = ((x.device, x.dtype, x.shape, x.stride(), x.data_ptr() % 16 == 0) for x in (q, k, v))
    return *like, is_causal, scale, return_lse, backend


def remember(layout: BlockLayout, key: object, options: CallOptions, backend: ModuleType) -> None:
    """A call with this key was checked, and this backend was chosen for it."""
    layout.remember_call(key, KnownCall(options, backend))


def run_known(
    q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, is_causal: bool, key: object, known: KnownCall
) -> tuple[Tensor, Tensor | None]:
    """A call whose key is known; lse may be None where it was not asked for."""
    training = asks_gradients(q, k, v)
    if known.replay is not None and not training:
        refuse_forward_mode(q, k, v)
        return known.replay(q, k, v)
    whole = layout.causal if is_causal else layout
    if hasattr(known.backend, "attention"):  # differentiable as it is
        return known.backend.attention(q, k, v, whole, known.options)
    out, lse = run_eagerly(q, k, v, (whole,), known.options, known.backend)
    if not training and known.backend.needs_work_order:
        replay = known.backend.replay_for(q, k, v, whole, known.options)
        if replay is not None:
            layout.remember_call(key, known._replace(replay=replay))
    return out, lse
