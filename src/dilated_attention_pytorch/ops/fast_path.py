"""The fast path: a call like one before skips the checks, and then everything up to the launch of its kernels.

A call of `block_sparse_attention` or `dilated_attention` has a key where plain eager PyTorch runs it without masks,
dropout or score modifications: all that its checks, its backend and its launches depend on, except the numbers in q, k
and v. What is known of a key stands in the `call_cache` of the layout, so it goes when the layout goes.

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

A call of `decode_attention` has a key with masks and score modifications too, and no layout: a table of the process has
what is known of it. Only the lengths are looked at in every call, and those on a GPU are not.

    a call ──no key──────────────▶ check, choose ───────────────┐
      │ key                                                     │
      ▼                                                         ▼
    _decoding[key] ──missing──▶ check, choose ──▶ DecodingCall ─┤
      │ DecodingCall(options, backend, rows of the pattern)     │
      ▼                                                         ▼
    lengths ────────────────────────────────────────────▶ the backend; launches of kernels are recorded in
                                                          `CacheRows.call_cache` and replayed (`launcher.repeat`)

`set_fast_path(False)` sends every call the whole way, to find out whether a fault lies here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType, NoneType
from typing import NamedTuple

import torch
from torch import Tensor

from ..caches import register_container
from ..layout import BlockLayout
from ..layout.eager import is_plain_eager
from ..layout.rows import CacheRows
from ..options import CallOptions
from ..patterns import Pattern
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
    deterministic: bool | None,
    others: Sequence[object],
) -> tuple[object, ...] | None:
    """What makes two calls over a layout equal but for their numbers; None for a call that takes the whole path.

    Args:
        others: the options that have no place in the key; a call that brings one of them has none.
    """
    if not _enabled or any(x is not None for x in others) or not is_plain_eager(q, k, v):
        return None
    usual = type(is_causal) is type(return_lse) is bool and type(backend) is str and type(dropout_p) is float
    usual = usual and dropout_p == 0.0 and type(scale) in (float, int, NoneType)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    usual = usual and type(deterministic) is bool
    if not usual or any(x.layout is not torch.strided for x in (q, k, v)):
        return None
    return *map(_like, (q, k, v)), is_causal, scale, return_lse, backend, deterministic


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


def _like(x: Tensor) -> tuple[object, ...]:
    """What a tensor must share with one before to pass the same checks and be launched in the same way."""
    return x.device, x.dtype, x.shape, x.stride(), x.data_ptr() % 16 == 0


class DecodingCall(NamedTuple):
    """What need not be found out again of a call of `decode_attention`.

    Attributes:
        options: without tensors.
        backend: its name.
        pattern, block: what the cache is read by, and the size of its blocks.
        rows: the rows of the pattern, where they do not depend on lengths.
        chosen: rows are blocks that were chosen for this call, and nothing else; with `is_causal` for tokens up to the
            query.
    """

    options: CallOptions
    backend: str
    pattern: Pattern
    block: int
    rows: CacheRows | None = None
    chosen: bool = False
    is_causal: bool = True


MOST_DECODING = 1024
_decoding: dict[object, DecodingCall] = {}
register_container(_decoding, "ops.fast_path._decoding", "checked calls of `decode_attention`", bound=MOST_DECODING)


def decoding_key(
    tensors: Sequence[Tensor | None],
    lengths: object,
    pattern: object,
    flags: tuple[bool, bool],
    numbers: tuple[float | None, float | None],
    backend: str,
) -> tuple[object, ...] | None:
    """As `call_key`, for `decode_attention`; `tensors` are all but the lengths, None where one is not given."""
    given = [x for x in tensors if x is not None]
    if not _enabled or not all(isinstance(x, Tensor) for x in given) or not isinstance(pattern, Pattern):
        return None
    usual = type(backend) is str and all(type(x) is bool for x in flags)
    usual = usual and all(type(x) in (float, int, NoneType) for x in numbers)
    if not usual or not is_plain_eager(*given, *([lengths] if isinstance(lengths, Tensor) else [])):
        return None
    learning = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    if learning or any(x.layout is not torch.strided for x in given):
        return None
    return *(None if x is None else _like(x) for x in tensors), pattern, *flags, *numbers, backend


def known_decoding(key: object) -> DecodingCall | None:
    return _decoding.get(key)


def remember_decoding(key: object, call: DecodingCall) -> None:
    """A call with this key was checked."""
    if len(_decoding) >= MOST_DECODING:
        _decoding.clear()
    _decoding[key] = call
