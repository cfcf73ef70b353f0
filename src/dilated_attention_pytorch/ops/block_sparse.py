"""`block_sparse_attention`: one softmax over the allowed keys of every row."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from ..layout import BlockLayout
from ..options import OptionKeywords
from ..patterns import Pattern
from .attend import attend
from .bias import ScoreBias
from .checks import check_lists, check_qkv, check_scale, refuse_branches, tokens_first
from .choose import check_backend, check_call, choose_for, leave_autocast
from .fast_path import call_key, remember, run_known
from .named import NamedLayout, layout_of
from .weights import BlockSparseWeights, attention_weights


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout_or_pattern: BlockLayout | Pattern,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    key_padding_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: ScoreBias | None = None,
    sinks: Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    layout: str = "bshd",
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over the pairs that a layout or pattern allows (union: a key counts once).

    Args:
        q: (batch, seq_q, heads, head_dim), float64, float32, bfloat16 or float16.
        k, v: (batch, seq_k, heads_kv, head_dim) with heads a multiple of heads_kv. v may have a head_dim of its own,
            as in the latent attention of DeepSeek; out then has that.
        layout_or_pattern: a `BlockLayout` for these lengths, or a pattern (its layout is built once and remembered;
            blocks of 128 tokens unless the pattern is written in blocks of its own).
        is_causal: also hide every key that comes after the query; the last query is aligned with the last key.
        scale: multiplier of the scores, head_dim ** -0.5 by default.
        dropout_p: share of the weights that is dropped, in [0, 1). The draw depends on a seed from PyTorch's
            generator and on (sample, head, query, key) alone.
        key_padding_mask: bool (batch, seq_k), True where a key is padding and hidden, as in `nn.MultiheadAttention`.
        document_ids: int (batch, seq_k): tokens see each other only if their ids are equal. Queries are the last
            seq_q of these tokens.
        softcap: scores s, scaled, become softcap · tanh(s / softcap), as in Gemma 2. Positive.
        alibi_slopes: (heads,): after that, a score falls by the slope of its head for each token between query and
            key. The same as `ScoreBias.slopes`. Scores are float32: one at distance d is rounded by up to
            slope · d / 2²⁴.
        bias: a `ScoreBias`, added to the scores after softcap: tables of relative distance, slopes, a number for each
            key, or for each pair, and sums of these. Its tensors get their gradients.
        sinks: (heads,): a score for each head that joins the softmax of every row and brings no value, as in gpt-oss;
            lse then counts it. It gets its gradient, and its column is never dropped.
        deterministic: whether the gradients of two equal calls must have equal bits. None, the default, is what
            `torch.use_deterministic_algorithms` said. Where it is False, the warp-specialised backward for Hopper adds
            up dq in any order, which is faster; all others give equal bits always. out has equal bits in any case.
        return_lse: also return the log-sum-exp of each row, (batch, heads, seq_q), float32 (float64 for float64).
        backend: "auto", or the one to use: "sdpa", "triton", "blockwise", "reference". One that cannot run is an error.
        layout: "bshd", or "bhsd" for q, k, v and out of (batch, heads, seq, head_dim). They are read through transposed
            views, not copied; kernels are fastest where the heads of a token lie together in memory, as in the views
            that `x.unflatten(-1, (heads, head_dim)).transpose(1, 2)` makes of a projection.

    Returns:
        out like q with the head_dim of v, or (out, lse). A query that may see no key gives out 0, lse −inf (or its
        sink) and no gradient.
    """
    if layout != "bshd":
        q, k, v = tokens_first(layout, q, k, v)
    q, k, v, autocast_off = leave_autocast(q, k, v)
    key, what = None, layout_or_pattern
    if isinstance(what, BlockLayout | Pattern):
        others = key_padding_mask, document_ids, softcap, alibi_slopes, bias, sinks
        key = call_key(
            q, k, v, is_causal=is_causal, scale=scale, dropout_p=dropout_p, return_lse=return_lse, backend=backend,
            deterministic=deterministic, others=others,
        )  # fmt: skip
    with autocast_off:
        if key is not None and isinstance(what, Pattern):
            check_backend(backend)
            check_qkv(q, k, v)
            check_scale(scale, q.shape[3])
            check_lists(q, k, what)
            what, is_causal = layout_of(what, is_causal, q.shape[1], k.shape[1], q.shape[2], q.device), False
        known = None if key is None else what.call_cache.get(key)  # type: ignore[union-attr]
        if known is None:
            check_backend(backend)
            refuse_branches(what)
            whole, options = check_call(
                q,
                k,
                v,
                what,
                is_causal=is_causal,
                scale=scale,
                dropout_p=dropout_p,
                key_padding_mask=key_padding_mask,
                document_ids=document_ids,
                softcap=softcap,
                alibi_slopes=alibi_slopes,
                bias=bias,
                sinks=sinks,
                deterministic=deterministic,
                return_lse=return_lse,
            )
            chosen = choose_for(q, k, v, whole, options, backend, return_lse)
            if key is not None:
                remember(what, key, options, chosen)  # type: ignore[arg-type]
            out, lse = attend(q, k, v, whole, options, chosen)
        else:
            out, lse = run_known(q, k, v, what, is_causal, key, known)  # type: ignore[arg-type]
    if layout != "bshd":
        out = out.transpose(1, 2)
    if not return_lse:
        return out
    assert lse is not None
    return out, lse


def attention_with_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout_or_pattern: BlockLayout | Pattern,
    *,
    is_causal: bool = False,
    backend: str = "auto",
    **options: Unpack[OptionKeywords],
) -> tuple[Tensor, BlockSparseWeights]:
    """`block_sparse_attention` and the weights before dropout, in memory proportional to the active blocks."""
    q, k, v, autocast_off = leave_autocast(q, k, v)
    check_backend(backend)
    refuse_branches(layout_or_pattern)
    with autocast_off:
        layout, checked = check_call(q, k, v, layout_or_pattern, is_causal=is_causal, return_lse=True, **options)
        if isinstance(layout, NamedLayout):  # which blocks there are decides the shape of the weights
            layout = layout.constant()
        out, lse = attend(q, k, v, layout, checked, choose_for(q, k, v, layout, checked, backend, return_lse=True))
        assert lse is not None
        return out, attention_weights(q, k, lse, layout, checked)
