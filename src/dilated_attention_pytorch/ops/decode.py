"""`decode_attention`: the last tokens of sequences against a cache of all their keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..backends import decoding, triton
from ..backends.base import Request, compute_dtype
from ..backends.decoding import Cache, capacity_of
from ..layout.build import documents_of
from ..layout.eager import is_plain_eager, plain_cache
from ..layout.lists import HOST
from ..layout.rows import rows_at
from ..options import CallOptions
from ..patterns import Causal, Pattern
from ..patterns.base import check_flag, check_int, shown, value_of
from ..patterns.blocks import ceil_div
from .attend import with_sinks
from .checks import DEFAULT_BLOCK_SIZE, check_lists, check_options, check_qkv, tokens_first
from .choose import leave_autocast

BACKENDS = ("auto", "triton", "blockwise")


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    *,
    lengths: Sequence[int] | Tensor | None = None,
    page_table: Tensor | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    layout: str = "bshd",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the last tokens of each sample over a cache, at the cost of the blocks that they see.

    A token sees what it sees in `block_sparse_attention` of its whole sequence: row p of the pattern for the query at
    position p. For inference: there is no gradient.

    Args:
        q: (batch, new, heads, head_dim): the last `new` tokens of each sample, one or a few.
        k, v: (batch, capacity, heads_kv, head_dim), the tokens so far with those of q among them; or with a
            page_table (pages, page_size, heads_kv, head_dim).
        pattern: of any kind but packed documents.
        lengths: tokens of each sample, all of the capacity by default. A list of ints costs nothing; a tensor on a GPU
            is waited for.
        page_table: int32 or int64 (batch, pages of a sample): the page that holds each run of page_size tokens. Places
            beyond the length of a sample are never read. A page that does not exist is an error on a CPU, and NaN for
            its sample on a GPU.
        is_causal: whether a token sees none that comes after it.
        key_padding_mask: bool (batch, capacity), True where a key is padding and hidden.
        scale, softcap, alibi_slopes, sinks, return_lse: as in `block_sparse_attention`.
        backend: "auto", "triton" or "blockwise".
        layout: "bshd", or "bhsd" for q, out and a cache of (batch, heads, seq, head_dim) or (pages, heads, page_size,
            head_dim), read as it lies.

    Returns:
        out like q, or (out, lse) with lse (batch, heads, new).
    """
    if layout != "bshd":
        q, k, v = tokens_first(layout, q, k, v)
    q, k, v, autocast_off = leave_autocast(q, k, v)
    _check_cache(q, k, v, page_table)
    check_flag("is_causal", is_causal)
    check_flag("return_lse", return_lse)
    if not isinstance(pattern, Pattern):
        raise TypeError(f"pattern must be a Pattern, got {type(pattern).__name__}")
    check_lists(q, k, pattern)
    if documents_of(pattern):
        raise ValueError(f"pattern must not have packed documents, which are of one length, got {pattern}")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise RuntimeError("decode_attention has no gradient: use torch.no_grad(), or block_sparse_attention to train")
    capacity = capacity_of(k, page_table)
    lengths = _checked_lengths(lengths, q, capacity)
    _check_padding(key_padding_mask, q, capacity)
    options = check_options(q, k, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks)
    options = options._replace(key_padding_mask=key_padding_mask, sinks=None)
    name = _chosen(backend, q)
    run = _decode if is_plain_eager(q, k, v) else _decode_op
    with autocast_off:
        out, lse = run(q, k, v, lengths, page_table, *options.flatten(), pattern.text, is_causal, name)
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
    if layout != "bshd":
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    page_table: Tensor | None,
    tensors: list[Tensor],
    given: str,
    numbers: list[float],
    pattern: str,
    is_causal: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    new = q.shape[1]
    read, block = _of_text(pattern, is_causal)
    counts = tuple(lengths.tolist())
    capacity = capacity_of(k, page_table)
    for count in counts:
        if not new <= count <= capacity:
            raise ValueError(f"lengths must be from {new} (the new tokens) to {capacity} (the capacity), got {count}")
    if page_table is not None and not page_table.is_cuda:
        _check_pages(page_table, counts, k)
    cache = Cache(k, v, page_table, _on_device(counts, q.device))
    rows = rows_at(read, counts, new, block, q.device)
    options = CallOptions.unflatten(tensors, given, numbers)
    return (triton.decode if backend == "triton" else decoding.decode)(q, cache, rows, options)


_decode_op = torch.library.custom_op(
    "dilated_attention_pytorch::decode", _decode, mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)


@_decode_op.register_fake
def _(q, k, v, lengths, page_table, tensors, given, numbers, pattern, is_causal, backend):  # type: ignore[no-untyped-def]
    batch, new, heads, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty(batch, heads, new, dtype=compute_dtype(q.dtype))


@plain_cache(128)
def _on_device(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Once for all layers of a step."""
    return torch.tensor(counts, dtype=torch.int32, device=HOST).to(device)


@lru_cache(maxsize=128)
def _of_text(text: str, is_causal: bool) -> tuple[Pattern, int]:
    """The pattern that the cache is read by, and the size of its blocks."""
    pattern = value_of(text)
    block = min(pattern.block_sizes, default=DEFAULT_BLOCK_SIZE)
    return pattern & Causal() if is_causal else pattern, block


def _chosen(backend: str, q: Tensor) -> str:
    """The kernels where they run, else plain PyTorch; one that is named and cannot is an error."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {list(BACKENDS)} for decoding, got {shown(backend)}")
    if backend == "blockwise":
        return backend
    named = backend == "triton"
    ok, reason = triton.can_run(Request(device=q.device, dtype=q.dtype, head_dim=q.shape[3], named=named))
    if named and not ok:
        raise ValueError(f"backend 'triton' cannot run this call: {reason}")
    return "triton" if ok else "blockwise"


def _check_cache(q: Tensor, k: Tensor, v: Tensor, page_table: Tensor | None) -> None:
    if page_table is None:
        check_qkv(q, k, v)
        return
    if not isinstance(page_table, Tensor):
        raise TypeError(f"page_table must be a tensor or None, got {type(page_table).__name__}")
    pages = (isinstance(x, Tensor) and x.ndim == 4 and len(x) > 0 for x in (k, v))
    check_qkv(q, *(x[:1].expand(len(q), *x.shape[1:]) if ok else x for x, ok in zip((k, v), pages, strict=True)))
    if k.shape != v.shape:
        raise ValueError(f"k and v must have the same shape, got {list(k.shape)} and {list(v.shape)}")
    if page_table.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"page_table must be int32 or int64, got {page_table.dtype}")
    if page_table.ndim != 2 or len(page_table) != len(q) or not page_table.shape[1]:
        raise ValueError(f"page_table must have shape (batch, pages) with batch {len(q)}, got {list(page_table.shape)}")
    if page_table.device != q.device:
        raise ValueError(f"page_table must be on the device of q, {q.device}, got {page_table.device}")


def _check_pages(page_table: Tensor, counts: tuple[int, ...], pages: Tensor) -> None:
    """The pages that are read exist."""
    num_pages, size = pages.shape[:2]
    for sample, count in enumerate(counts):
        used = page_table[sample, : ceil_div(count, size)]
        if not ((used >= 0) & (used < num_pages)).all():
            raise ValueError(
                f"page_table must name pages 0 to {num_pages - 1}, got {used.tolist()} for sample {sample}"
            )


def _checked_lengths(lengths: Sequence[int] | Tensor | None, q: Tensor, capacity: int) -> Tensor:
    """int64 [batch], where it was; the values are checked once they are read."""
    if lengths is None:
        return torch.full((len(q),), capacity, device=HOST)
    if isinstance(lengths, Tensor):
        if lengths.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"lengths must be int32 or int64, got {lengths.dtype}")
    elif isinstance(lengths, Sequence) and not isinstance(lengths, str):
        for length in lengths:
            check_int("lengths", length, least=1)
        lengths = torch.tensor(lengths, dtype=torch.int64, device=HOST)
    else:
        raise TypeError(f"lengths must be a sequence of ints, a tensor or None, got {type(lengths).__name__}")
    if lengths.shape != (len(q),):
        raise ValueError(f"lengths must be one for each of {len(q)} samples, got shape {list(lengths.shape)}")
    return lengths


def _check_padding(key_padding_mask: Tensor | None, q: Tensor, capacity: int) -> None:
    if key_padding_mask is None:
        return
    if not isinstance(key_padding_mask, Tensor):
        raise TypeError(f"key_padding_mask must be a tensor, got {type(key_padding_mask).__name__}")
    if key_padding_mask.dtype != torch.bool:
        raise TypeError(f"key_padding_mask must be bool, True where a key is padding, got {key_padding_mask.dtype}")
    if key_padding_mask.shape != (len(q), capacity):
        raise ValueError(
            f"key_padding_mask must have shape (batch, capacity) = {[len(q), capacity]}, got "
            f"{list(key_padding_mask.shape)}"
        )
    if key_padding_mask.device != q.device:
        raise ValueError(f"key_padding_mask must be on the device of q, {q.device}, got {key_padding_mask.device}")
