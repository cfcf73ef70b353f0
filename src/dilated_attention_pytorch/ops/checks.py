"""Every argument is checked here, before anything is computed: the message names it, the rule and the value."""

from __future__ import annotations

import warnings
from typing import Unpack

import torch
from torch import Tensor

from ..layout import BlockLayout
from ..layout.checks import check_device
from ..options import CallOptions, OptionKeywords
from ..patterns import Branches, Pattern, PerHead, SparsePatternConfig
from ..patterns.base import constant_in_graphs, shown
from .bias import Shard, bias_of_call

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DEFAULT_BLOCK_SIZE = 128
MANY_HEADS = 256  # more than any model has
HEADS_FIRST = (
    'If yours are (batch, heads, seq, head_dim), call the operator with layout="bhsd", or a module with transpose(1, 2)'
)

_warned_of_order = False


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = []
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        check_dense(name, x)
        shape = x.shape
        shapes.append(shape)
        if len(shape) != 4:
            raise ValueError(f"{name} must have shape (batch, seq, heads, head_dim), got {list(shape)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be float64, float32, bfloat16 or float16, got {x.dtype}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have the dtype of q, {q.dtype}, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")
        if 0 in shape:
            raise ValueError(f"{name} must not be empty, got shape {list(shape)}")
        if shape[0] != shapes[0][0]:
            raise ValueError(f"{name} must have the batch size of q, {shapes[0][0]}, got {shape[0]}")
        if name == "k" and shape[3] != shapes[0][3]:
            raise ValueError(f"k must have the head_dim of q, {shapes[0][3]}, got {shape[3]}")
    (_, seq_k, heads_kv, _), heads = shapes[1], shapes[0][2]
    if shapes[1][:3] != shapes[2][:3]:
        raise ValueError(
            f"k and v must have the same shape but for head_dim, got {list(shapes[1])} and {list(shapes[2])}"
        )
    swapped = heads_kv >= MANY_HEADS and heads_kv >= 4 * seq_k
    if heads % heads_kv:
        hint = f". {HEADS_FIRST}" if swapped else ""
        raise ValueError(f"heads of q must be a multiple of heads of k, got {heads} and {heads_kv}{hint}")
    if swapped:
        _warn_of_order(heads_kv, seq_k)


def check_dense(name: str, x: Tensor) -> None:
    if x.layout is not torch.strided:
        raise TypeError(f"{name} must be dense, got a tensor of layout {x.layout}")


@constant_in_graphs
def _warn_of_order(heads: int, tokens: int) -> None:
    """Once: models have up to 128 heads, and a cache or a sequence as many tokens as that at least."""
    global _warned_of_order
    if not _warned_of_order:
        _warned_of_order = True
        warnings.warn(
            f"k has {heads} heads of {tokens} tokens: it is read as (batch, seq, heads, head_dim). {HEADS_FIRST}",
            stacklevel=5,
        )


def tokens_first(layout: str, *tensors: Tensor) -> list[Tensor]:
    """The tensors of a call with another `layout` than "bshd" as (batch, seq, heads, head_dim): views of them."""
    if layout != "bhsd":
        raise ValueError(
            "layout must be 'bshd' for tensors of (batch, seq, heads, head_dim) or 'bhsd' for (batch, heads, seq, "
            f"head_dim), got {shown(layout)}"
        )
    for name, x in zip("qkv", tensors, strict=True):
        if not isinstance(x, Tensor) or x.ndim != 4:
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must have shape (batch, heads, seq, head_dim), got {got}")
        check_dense(name, x)
    return [x.transpose(1, 2) for x in tensors]


def check_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return head_dim**-0.5
    if not isinstance(scale, int | float) or isinstance(scale, bool):
        raise TypeError(f"scale must be a number or None, got {type(scale).__name__}")
    if not abs(scale) <= torch.finfo(torch.float32).max:
        raise ValueError(f"scale must be finite, got {scale}")
    return float(scale)


def check_dropout(dropout_p: float, name: str = "dropout_p") -> float:
    if not isinstance(dropout_p, int | float) or isinstance(dropout_p, bool):
        raise TypeError(f"{name} must be a number, got {type(dropout_p).__name__}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"{name} must be in [0, 1), got {dropout_p}")
    return float(dropout_p)


def check_device_and_dtype(device: object, dtype: object) -> None:
    """`device` and `dtype` of a module without parameters, which takes them as PyTorch's own do: there is nothing to
    place."""
    if device is not None:
        check_device(device)
    if dtype is not None and dtype not in DTYPES:
        raise TypeError(f"dtype must be float64, float32, bfloat16, float16 or None, got {shown(dtype)}")


def check_softcap(softcap: float | None) -> float:
    if softcap is None:
        return 0.0
    if not isinstance(softcap, int | float) or isinstance(softcap, bool):
        raise TypeError(f"softcap must be a number or None, got {type(softcap).__name__}")
    if not 1e-30 <= softcap <= 1e30:  # float32 has room for it, and for its multiples
        raise ValueError(f"softcap must be positive and finite (1e-30 to 1e30), got {softcap}")
    return float(softcap)


def check_deterministic(deterministic: bool | None) -> bool:
    """None is what PyTorch was told for the whole process."""
    if deterministic is None:
        return torch.are_deterministic_algorithms_enabled()
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic must be True, False or None, got {shown(deterministic)}")
    return deterministic


def check_options(q: Tensor, k: Tensor, shard: Shard | None = None, **keywords: Unpack[OptionKeywords]) -> CallOptions:
    """The options of a call, all checked. The seed of dropout is still to be drawn."""
    unknown = sorted(set(keywords) - set(OptionKeywords.__annotations__))
    if unknown:
        raise TypeError(
            f"unknown keyword {unknown[0]!r}; the options of a call are {list(OptionKeywords.__annotations__)}"
        )
    key_padding_mask, document_ids = keywords.get("key_padding_mask"), keywords.get("document_ids")
    slopes, sinks = keywords.get("alibi_slopes"), keywords.get("sinks")
    check_masks(q, k, key_padding_mask, document_ids)
    _check_per_head("alibi_slopes", slopes, q)
    _check_per_head("sinks", sinks, q)
    return CallOptions(
        scale=check_scale(keywords.get("scale"), q.shape[3]),
        key_padding_mask=key_padding_mask,
        document_ids=document_ids,
        dropout_p=check_dropout(keywords.get("dropout_p", 0.0)),
        softcap=check_softcap(keywords.get("softcap")),
        deterministic=check_deterministic(keywords.get("deterministic")),
        sinks=sinks,
        bias=bias_of_call(keywords.get("bias"), slopes, q, k, shard),
    )


def _check_per_head(name: str, x: Tensor | None, q: Tensor) -> None:
    if x is None:
        return
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor or None, got {type(x).__name__}")
    if x.shape != (q.shape[2],):
        raise ValueError(f"{name} must have a number for each of {q.shape[2]} heads, got shape {list(x.shape)}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {x.dtype}")
    if x.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")


def check_masks(q: Tensor, k: Tensor, key_padding_mask: Tensor | None, document_ids: Tensor | None) -> None:
    batch, seq_q, seq_k = q.shape[0], q.shape[1], k.shape[1]
    for name, mask in (("key_padding_mask", key_padding_mask), ("document_ids", document_ids)):
        if mask is None:
            continue
        if not isinstance(mask, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(mask).__name__}")
        check_dense(name, mask)
        if mask.shape != (batch, seq_k):
            raise ValueError(f"{name} must have shape (batch, seq_k) = {[batch, seq_k]}, got {list(mask.shape)}")
        if mask.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {mask.device}")
    if key_padding_mask is not None and key_padding_mask.dtype != torch.bool:
        raise TypeError(f"key_padding_mask must be bool, True where a key is padding, got {key_padding_mask.dtype}")
    if document_ids is not None:
        if document_ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"document_ids must be int32 or int64, got {document_ids.dtype}")
        if seq_q > seq_k:
            raise ValueError(f"document_ids needs seq_q <= seq_k (queries are the last keys), got {seq_q} > {seq_k}")


def refuse_branches(layout_or_pattern: object) -> None:
    """A key counts once in block-sparse attention."""
    if isinstance(layout_or_pattern, Branches) or (
        isinstance(layout_or_pattern, BlockLayout) and layout_or_pattern.dilated
    ):
        raise TypeError(
            f"layout_or_pattern must not be one of dilated attention, where a key may count several times: call "
            f"dilated_attention, got {layout_or_pattern!r}"
        )


def check_lists(q: Tensor, k: Tensor, layout_or_pattern: BlockLayout | Pattern | Branches) -> None:
    """A layout or pattern for the heads and samples of these tensors, of whatever length."""
    heads, heads_kv = q.shape[2], k.shape[2]
    if isinstance(layout_or_pattern, SparsePatternConfig):
        raise TypeError(
            "layout_or_pattern must be a BlockLayout or a Pattern, got a SparsePatternConfig: pass config.pattern(...)"
        )
    if isinstance(layout_or_pattern, Pattern | Branches):
        if isinstance(layout_or_pattern, PerHead) and not _one_of(len(layout_or_pattern.patterns), heads, heads_kv):
            raise ValueError(
                f"layout_or_pattern must have a pattern for each of {heads} heads of q or {heads_kv} of k, "
                f"got {len(layout_or_pattern.patterns)}"
            )
        return
    if not isinstance(layout_or_pattern, BlockLayout):
        raise TypeError(f"layout_or_pattern must be a BlockLayout or a Pattern, got {type(layout_or_pattern).__name__}")
    layout = layout_or_pattern
    if layout.num_heads is not None and not _one_of(layout.num_heads, 1, heads, heads_kv):
        raise ValueError(
            f"layout_or_pattern must have lists for all heads together, {heads} heads of q or {heads_kv} of k, "
            f"got {layout.num_heads}"
        )
    if layout.batch_size is not None and not _one_of(layout.batch_size, 1, q.shape[0]):
        raise ValueError(f"layout_or_pattern must have lists for {q.shape[0]} samples, got {layout.batch_size}")
    if layout.device != q.device:
        raise ValueError(f"layout_or_pattern must be on the device of q, {q.device}, got {layout.device}")


def _one_of(number: int, *allowed: int) -> bool:
    """`number in allowed`, for sizes that may be symbolic."""
    return any(number == each for each in allowed)
