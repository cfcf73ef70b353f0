"""`dilated_attention`: LongNet's branches as one softmax over the multiset of their keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..backends.base import compute_dtype
from ..layout.eager import value_cache
from ..layout.zero_keys import check_zero_keys, log_zero_keys
from ..options import CallOptions
from ..patterns import Branches
from ..patterns.base import check_flag, shown
from ..patterns.blocks import check_branches
from ..patterns.branches import check_head_offsets, check_heads
from .attend import asks_gradients, attend
from .bias import ScoreBias
from .checks import check_qkv, tokens_first
from .choose import check_backend, check_call, choose_for, leave_autocast
from .fast_path import call_key, remember, run_known
from .named import layout_of, resolve_layout


def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    key_padding_mask: Tensor | None = None,
    head_offsets: str = "interleaved",
    detach_branch_weights: bool = False,
    padding: str | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: ScoreBias | None = None,
    sinks: Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    layout: str = "bshd",
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact dilated attention: branches mixed by their softmax denominators, which is one softmax over all their keys.

    Branch (w, r) cuts the sequence into segments of w tokens, the last as long as it is; in each, head h keeps the
    tokens at offset o(h) with step r, and those attend to each other. A key that m branches hold counts m times.

    Args:
        q: (batch, seq_q, heads, head_dim), float64, float32, bfloat16 or float16.
        k, v: (batch, seq_k, heads_kv, head_dim) with heads a multiple of heads_kv; v and out may be of a head_dim of
            their own. The last query stands at the
            position of the last key. Offsets are those of the query heads.
        segment_lengths, dilation_rates: w and r of each branch: positive integers with r ≤ w, the smallest r at most
            twice the number of heads, for any length. See `Branches`.
        is_causal: also hide every key that comes after the query.
        scale, key_padding_mask, softcap, alibi_slopes, bias, sinks, deterministic, return_lse, backend, layout: as in
            `block_sparse_attention`.
        dropout_p: share of the weights that is dropped, in [0, 1); a key that counts m times is kept or dropped as one.
        head_offsets: o(h): "interleaved", h mod r as in the paper, or "grouped", h // ceil(heads / r) as in torchscale.
        detach_branch_weights: leave the branches' mixing weights out of the gradient, as torchscale trains. The result
            is the same, the gradient is not that of the result.
        padding: "zero_keys" also attends to the zeros with which torchscale pads a sequence to whole segments and a
            segment to a multiple of its dilation, for models that were trained so; see `layout.zero_keys`. None, the
            default, attends to tokens alone.

    Returns:
        out like q with the head_dim of v, or (out, lse). A query that no branch keeps gives out 0, lse −inf and no
        gradient.
    """
    if layout != "bshd":
        q, k, v = tokens_first(layout, q, k, v)
    q, k, v, autocast_off = leave_autocast(q, k, v)
    check_backend(backend)
    check_flag("detach_branch_weights", detach_branch_weights)
    check_branches(segment_lengths, dilation_rates)
    check_head_offsets(head_offsets)
    check_padding(padding)
    branches, alone = _branches_of(tuple(segment_lengths), tuple(dilation_rates), head_offsets)
    parted = detach_branch_weights and len(alone) > 1
    parted = parted and (asks_gradients(q, k, v) or (torch.is_grad_enabled() and not bias is alibi_slopes is None))
    key = known = None
    if not parted:
        others = key_padding_mask, softcap, alibi_slopes, bias, sinks, padding
        key = call_key(
            q, k, v, is_causal=is_causal, scale=scale, dropout_p=dropout_p, return_lse=return_lse, backend=backend,
            deterministic=deterministic, others=others,
        )  # fmt: skip
    with autocast_off:
        if key is not None:
            check_qkv(q, k, v)
            lists = layout_of(branches, is_causal, q.shape[1], k.shape[1], q.shape[2], q.device)
            known = lists.call_cache.get(key)
        if known is not None:
            out, lse = run_known(q, k, v, lists, False, key, known)
        else:
            whole, options = check_call(
                q,
                k,
                v,
                branches,
                is_causal=is_causal,
                scale=scale,
                dropout_p=dropout_p,
                key_padding_mask=key_padding_mask,
                softcap=softcap,
                alibi_slopes=alibi_slopes,
                bias=bias,
                sinks=sinks,
                deterministic=deterministic,
                return_lse=return_lse,
            )
            check_heads(dilation_rates, q.shape[2])
            zero_keys = None if padding is None else _zero_keys(q, k, branches, is_causal, options, parted)
            chosen = choose_for(q, k, v, whole, options, backend, return_lse or padding is not None)
            if key is not None:
                remember(lists, key, options, chosen)
            parts = [resolve_layout(q, k, branch, is_causal) for branch in alone] if parted else []
            out, lse = attend(q, k, v, whole, options, chosen, parts=parts, zero_keys=zero_keys)
    if layout != "bshd":
        out = out.transpose(1, 2)
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


def check_padding(padding: object) -> None:
    if padding is not None and padding != "zero_keys":
        raise ValueError(f"padding must be 'zero_keys' or None, got {shown(padding)}")


def _zero_keys(q: Tensor, k: Tensor, branches: Branches, is_causal: bool, options: CallOptions, parted: bool) -> Tensor:
    """What `attend` takes, for all branches together or, `parted`, for each."""
    check_zero_keys(branches, q.shape[1], k.shape[1])
    if options.bias is not None:
        raise ValueError("padding='zero_keys' has no meaning with alibi_slopes or a bias: a zero key is at no distance")
    logs = log_zero_keys(branches, q.shape[1], q.shape[2], is_causal, q.device, compute_dtype(q.dtype))
    return logs if parted else logs.logsumexp(0, keepdim=True)


@value_cache(128, "`Branches` of calls, together and each alone")
def _branches_of(
    segment_lengths: tuple[int, ...], dilation_rates: tuple[int, ...], head_offsets: str
) -> tuple[Branches, list[Branches]]:
    """All branches, and each alone; the same objects every time."""
    branches = Branches(segment_lengths, dilation_rates, head_offsets)
    return branches, branches.alone()
