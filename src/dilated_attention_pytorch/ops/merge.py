"""`merge_attention`: attention over the union of disjoint sets of keys, from the attention over each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends.base import compute_dtype
from ..patterns.base import shown
from .checks import DTYPES, check_dense


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge partial results exactly, in float32 (float64 for float64); differentiable in all arguments.

    Args:
        outs: tensors (batch, seq, heads, head_dim) of one shape and dtype.
        lses: the natural log-sum-exp of each, (batch, heads, seq); −inf marks a row without keys.

    Returns:
        (out, lse) of attention over all the keys together. A key that stands in two parts counts twice.
    """
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, Sequence) or not all(isinstance(part, Tensor) for part in parts):
            raise TypeError(f"{name} must be a sequence of tensors, got {shown(parts)}")
        for part in parts:
            check_dense(name, part)
    outs, lses = list(outs), list(lses)
    if not outs or len(outs) != len(lses):
        raise ValueError(f"outs and lses must have the same length, at least 1, got {len(outs)} and {len(lses)}")
    first = outs[0]
    if first.ndim != 4:
        raise ValueError(f"outs must be tensors (batch, seq, heads, head_dim), got {list(first.shape)}")
    if first.dtype not in DTYPES:
        raise TypeError(f"outs must be float64, float32, bfloat16 or float16, got {first.dtype}")
    batch, seq, heads, _ = first.shape
    for out, lse in zip(outs, lses, strict=True):
        if out.shape != first.shape or out.dtype != first.dtype or out.device != first.device:
            raise ValueError(
                f"outs must agree in shape, dtype and device, got {list(first.shape)} {first.dtype} {first.device} "
                f"and {list(out.shape)} {out.dtype} {out.device}"
            )
        if lse.shape != (batch, heads, seq) or lse.dtype != compute_dtype(first.dtype) or lse.device != first.device:
            raise ValueError(
                f"lses must have shape {[batch, heads, seq]}, dtype {compute_dtype(first.dtype)} and device "
                f"{first.device}, got {list(lse.shape)} {lse.dtype} {lse.device}"
            )
    return _merge(outs, lses)


def _shares(lses: Sequence[Tensor], lse: Tensor) -> list[Tensor]:
    """exp(lse_i − lse) as (batch, seq, heads, 1), 0 where the row is empty."""
    top = torch.where(lse == -torch.inf, 0.0, lse)
    return [torch.exp(part - top).transpose(1, 2)[..., None] for part in lses]


def merge_parts(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """`merge_attention` of checked arguments, unknown to autograd and the compiler; its first call loads nothing."""
    lse = torch.logsumexp(torch.stack(lses), dim=0)
    mixed = torch.zeros_like(outs[0], dtype=lse.dtype, memory_format=torch.contiguous_format)
    for out, share in zip(outs, _shares(lses, lse), strict=True):
        mixed.addcmul_(torch.where(share == 0, 0.0, out.to(lse.dtype)), share)  # empty rows have no weight
    return mixed.to(outs[0].dtype), lse


_merge = torch.library.custom_op("dilated_attention_pytorch::merge_attention", merge_parts, mutates_args=())


@_merge.register_fake
def _(outs, lses):  # type: ignore[no-untyped-def]
    return torch.empty_like(outs[0], memory_format=torch.contiguous_format), torch.empty_like(
        lses[0], memory_format=torch.contiguous_format
    )


def _save(ctx: Any, inputs: tuple[list[Tensor], list[Tensor]], output: tuple[Tensor, Tensor]) -> None:
    outs, lses = inputs
    ctx.save_for_backward(*outs, *lses, *output)
    ctx.parts = len(outs)


def _differentiate(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    *parts, out, lse = ctx.saved_tensors
    outs, lses = parts[: ctx.parts], parts[ctx.parts :]
    dlse = dlse.masked_fill(lse == -torch.inf, 0.0)  # an empty row has no gradient
    douts, dlses = [], []
    for part, share in zip(outs, _shares(lses, lse), strict=True):
        douts.append((dout * share).to(part.dtype))
        moved = (dout.to(lse.dtype) * (part.to(lse.dtype) - out.to(lse.dtype))).sum(-1)
        dlses.append(share[..., 0].transpose(1, 2) * (moved.transpose(1, 2) + dlse))
    return douts, dlses


_merge.register_autograd(_differentiate, setup_context=_save)
