"""`decode_attention`: the last tokens of sequences against a cache of all their keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends import decoding, triton
from ..backends.base import Request, compute_dtype, results_of
from ..backends.decoding import Cache, capacity_of
from ..caches import cached
from ..layout.eager import is_plain_eager, plain_cache
from ..layout.lists import HOST, send
from ..layout.rows import depends_on_length, rows_of_blocks, rows_of_capacity, rows_of_lengths
from ..layout.terms import grids_of, has_ranges
from ..options import Bias, CallOptions
from ..patterns import Causal, Full, Pattern
from ..patterns.base import check_flag, check_int, shown, value_of
from ..patterns.blocks import ceil_div
from .attend import with_sinks
from .cache_blocks import CacheBlocks
from .checks import DEFAULT_BLOCK_SIZE, check_lists, check_options, check_qkv, tokens_first
from .choose import leave_autocast
from .explain import Explanation
from .fast_path import DecodingCall, decoding_key, known_decoding, remember_decoding

BACKENDS = ("auto", "triton", "blockwise")


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | CacheBlocks,
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
            page_table (pages, page_size, heads_kv, head_dim). v may have a head_dim of its own, that of out.
        pattern: of any kind but those with ranges of keys (`Documents`, `Chunks`, `KeyRanges`, `GlobalTokens(at=…)`);
            or the blocks that each token sees, such as `BlockSummaries.choose` gives. The host never reads those.
        lengths: tokens of each sample, a list of ints or int32 or int64 (batch,); by default all of the capacity. Those
            on the host are checked. A tensor on a GPU is read by the kernels alone: nothing waits for it, a CUDA graph
            of the call serves all lengths, and one that is out of range gives NaN for its sample. Two things do wait:
            a pattern that chooses blocks by the length (`RandomBlocks`, a `DilatedBlocks` with a budget) and backend
            "blockwise"; while a graph is captured they raise. `explain_decode` says what holds for a call.
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
        out like q with the head_dim of v, or (out, lse) with lse (batch, heads, new).
    """
    if layout != "bshd":
        q, k, v = tokens_first(layout, q, k, v)
    q, k, v, autocast_off = leave_autocast(q, k, v)
    tensors = q, k, v, page_table, key_padding_mask, alibi_slopes, sinks
    key = decoding_key(tensors, lengths, pattern, (is_causal, return_lse), (scale, softcap), backend)
    known = None if key is None else known_decoding(key)
    if known is None:
        check_flag("return_lse", return_lse)
        numbers, name = _checked(
            q, k, v, pattern, page_table, is_causal, backend, key_padding_mask,
            scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        )  # fmt: skip
    else:
        numbers, name = known.options, known.backend
    lengths = _checked_lengths(lengths, q, capacity_of(k, page_table), in_graph=torch.compiler.is_compiling())
    slopes = None if alibi_slopes is None else Bias(alibi_slopes.to(compute_dtype(q.dtype))[None, :, None])
    options = numbers._replace(key_padding_mask=key_padding_mask, bias=slopes)
    with autocast_off:
        if key is not None or is_plain_eager(q, k, v):
            if known is None:
                known = _call_of(_what(pattern), is_causal, q, k, page_table, numbers, name)
                if key is not None:
                    remember_decoding(key, known)
            out, lse = _run(q, Cache(k, v, page_table, lengths), known, options)
        elif isinstance(pattern, CacheBlocks):
            about = pattern.offsets, pattern.indices, pattern.block_size, pattern.num_lists
            out, lse = _blocks_op(q, k, v, lengths, page_table, *options.flatten(), *about, is_causal, name)
        else:
            # A CUDA graph takes no tensors of the host; lengths there that are none of its numbers must be read.
            of_host = q.is_cuda and not lengths.is_cuda
            run = _waiting_op if name != "triton" or of_host or depends_on_length(pattern) else _decode_op
            out, lse = run(q, k, v, lengths, page_table, *options.flatten(), pattern.text, is_causal, name)
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks[:, None])
    if layout != "bshd":
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def explain_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | CacheBlocks,
    *,
    lengths: Sequence[int] | Tensor | None = None,
    page_table: Tensor | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
    layout: str = "bshd",
) -> Explanation:
    """Which backend `decode_attention` would run, and whether the host reads the lengths. Computes nothing."""
    if layout != "bshd":
        q, k, v = tokens_first(layout, q, k, v)
    q, k, v, _ = leave_autocast(q, k, v)
    _, name = _checked(
        q, k, v, pattern, page_table, is_causal, backend, key_padding_mask,
        scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
    )  # fmt: skip
    lengths = _checked_lengths(lengths, q, capacity_of(k, page_table))
    ok, reason = _can_run(q, v, named=backend == "triton")
    named = "" if backend == "auto" else "named by the caller; "
    reasons = {
        "triton": f"chosen: {named}{reason}" if name == "triton" else f"cannot: {reason}",
        "blockwise": "runs everywhere",
    }
    if name == "blockwise":
        reasons["blockwise"] = f"chosen: {named}{reasons['blockwise']}"
        if ok:
            reasons["triton"] = f"not chosen, another was named: {reason}"
    if lengths.device.type == "cpu":
        path = "lengths are on the host: they are checked, and a CUDA graph keeps them as they are"
    elif isinstance(pattern, CacheBlocks) or (name == "triton" and not depends_on_length(pattern)):
        path = "lengths stay on the GPU: nothing waits for them, and one CUDA graph serves all of them"
    else:
        why = "backend 'blockwise'" if name != "triton" else "the pattern chooses blocks by the length"
        path = f"the host waits for the lengths in every call, and no CUDA graph can be captured: {why}"
    return Explanation(name, reasons, path=path)


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern | CacheBlocks,
    page_table: Tensor | None,
    is_causal: bool,
    backend: str,
    key_padding_mask: Tensor | None,
    **options: Any,
) -> tuple[CallOptions, str]:
    """The numbers among the options of a call, and its backend, with everything checked but the lengths."""
    _check_cache(q, k, v, page_table)
    check_flag("is_causal", is_causal)
    _check_pattern(q, k, pattern)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise RuntimeError("decode_attention has no gradient: use torch.no_grad(), or block_sparse_attention to train")
    capacity = capacity_of(k, page_table)
    if q.shape[1] > capacity:
        raise ValueError(f"q must have at most {capacity} tokens, which the cache has room for, got {q.shape[1]}")
    _check_padding(key_padding_mask, q, capacity)
    checked = check_options(q, k, **options)
    if checked.learned():
        raise RuntimeError("decode_attention has no gradient: alibi_slopes must not ask for one")
    return checked._replace(bias=None, sinks=None), _chosen(backend, q, v)


def _what(pattern: Pattern | CacheBlocks) -> str | CacheBlocks:
    return pattern if isinstance(pattern, CacheBlocks) else pattern.text


def _call_of(
    pattern: str | CacheBlocks,
    is_causal: bool,
    q: Tensor,
    k: Tensor,
    page_table: Tensor | None,
    numbers: CallOptions,
    backend: str,
) -> DecodingCall:
    """A checked call, for all that are like it."""
    if isinstance(pattern, CacheBlocks):
        most = min(len(pattern.indices) * pattern.block_size, capacity_of(k, page_table))
        lists = pattern.num_lists, pattern.block_size, most, is_causal
        rows = rows_of_blocks(pattern.offsets, pattern.indices, *lists)
        return DecodingCall(numbers, backend, Full(), pattern.block_size, rows, chosen=True, is_causal=is_causal)
    read, block = _of_text(pattern, is_causal)
    known = not depends_on_length(read)
    of_capacity = rows_of_capacity(read, capacity_of(k, page_table), block, q.device) if known else None
    return DecodingCall(numbers, backend, read, block, of_capacity)


def _run(q: Tensor, cache: Cache, call: DecodingCall, options: CallOptions) -> tuple[Tensor, Tensor]:
    """A checked call but for its lengths. Those on the host are checked; those on a GPU are neither checked nor waited
    for, where the kernels read them and no row of blocks depends on them."""
    new, capacity = q.shape[1], capacity_of(cache.k, cache.page_table)
    rows, lengths, counts = call.rows, cache.lengths, None
    if lengths.device.type == "cpu" or not (call.chosen or (rows is not None and call.backend == "triton")):
        counts = _read(lengths)
        _check_counts(counts, new, capacity)
        if lengths.device != q.device:
            cache = cache._replace(lengths=_on_device(counts, q.device))
    if cache.page_table is not None and not cache.page_table.is_cuda:
        assert counts is not None
        _check_pages(cache.page_table, counts, cache.k)
    if rows is None:
        assert counts is not None
        rows = rows_of_lengths(call.pattern, counts, new, call.block, q.device)
    if call.backend == "triton":
        return triton.decode(q, cache, rows, options)
    if call.chosen:
        return decoding.decode_listed(q, cache, rows, options, call.is_causal)
    return decoding.decode(q, cache, rows, options)


def _read(lengths: Tensor) -> tuple[int, ...]:
    """The lengths as numbers; a GPU is waited for."""
    if lengths.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "lengths on a GPU must be read here, which a CUDA graph cannot record: the pattern chooses its blocks by "
            "the length (RandomBlocks, a DilatedBlocks with a budget), or backend 'blockwise' runs. Give lengths as a "
            "list of ints, which the graph then keeps, or take another pattern"
        )
    return tuple(lengths.tolist())


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
    options = CallOptions.unflatten(tensors, given, numbers)
    call = _call_of(pattern, is_causal, q, k, page_table, options, backend)
    return _run(q, Cache(k, v, page_table, lengths), call, options)


@torch.library.custom_op("dilated_attention_pytorch::decode_blocks", mutates_args=())
def _blocks_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    page_table: Tensor | None,
    tensors: list[Tensor],
    given: str,
    numbers: list[float],
    offsets: Tensor,
    indices: Tensor,
    block_size: int,
    num_lists: int,
    is_causal: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    options = CallOptions.unflatten(tensors, given, numbers)
    blocks = CacheBlocks(offsets, indices, block_size, num_lists)
    blocks.check(q, k)
    call = _call_of(blocks, is_causal, q, k, page_table, options, backend)
    return _run(q, Cache(k, v, page_table, lengths), call, options)


@_blocks_op.register_fake
def _(q, k, v, *rest):  # type: ignore[no-untyped-def]
    return results_of(q, v)


def _fake(q, k, v, lengths, page_table, tensors, given, numbers, pattern, is_causal, backend):  # type: ignore[no-untyped-def]
    return results_of(q, v)


# Only the second reads lengths on the host: a graph with the first in it can be a CUDA graph, for all lengths.
_decode_op = torch.library.custom_op("dilated_attention_pytorch::decode", _decode, mutates_args=())
_waiting_op = torch.library.custom_op(
    "dilated_attention_pytorch::decode_reading_lengths",
    _decode,
    mutates_args=(),
    tags=(torch.Tag.cudagraph_unsafe,),
)
_decode_op.register_fake(_fake)
_waiting_op.register_fake(_fake)


@plain_cache(128, "lengths of a decoding step, on their device")
def _on_device(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Once for all layers of a step."""
    return send((torch.tensor(counts, dtype=torch.int32, device=HOST),), device)[0]


@cached(128, "patterns that caches are read by, and their block sizes")
def _of_text(text: str, is_causal: bool) -> tuple[Pattern, int]:
    """The pattern that the cache is read by, and the size of its blocks."""
    pattern = value_of(text)
    block = min(pattern.block_sizes, default=DEFAULT_BLOCK_SIZE)
    return pattern & Causal() if is_causal else pattern, block


def _check_pattern(q: Tensor, k: Tensor, pattern: Pattern | CacheBlocks) -> None:
    if isinstance(pattern, CacheBlocks):
        pattern.check(q, k)
        return
    if not isinstance(pattern, Pattern):
        raise TypeError(f"pattern must be a Pattern or CacheBlocks, got {type(pattern).__name__}")
    check_lists(q, k, pattern)
    if grids_of(pattern):
        raise ValueError(f"pattern must be one for sequences that grow, which those of a grid are not, got {pattern}")
    if has_ranges(pattern):
        raise ValueError(
            f"pattern must not have ranges of keys (Documents, Chunks, KeyRanges, GlobalTokens(at=…)), got {pattern}"
        )


def _chosen(backend: str, q: Tensor, v: Tensor) -> str:
    """The kernels where they run, else plain PyTorch; one that is named and cannot is an error."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {list(BACKENDS)} for decoding, got {shown(backend)}")
    if backend == "blockwise":
        return backend
    ok, reason = _can_run(q, v, named=backend == "triton")
    if backend == "triton" and not ok:
        raise ValueError(f"backend 'triton' cannot run this call: {reason}")
    return "triton" if ok else "blockwise"


def _can_run(q: Tensor, v: Tensor, *, named: bool) -> tuple[bool, str]:
    """Whether the kernels do."""
    request = Request(device=q.device, dtype=q.dtype, head_dim=q.shape[3], head_dim_v=v.shape[3], named=named)
    return triton.can_run(request)


def _check_cache(q: Tensor, k: Tensor, v: Tensor, page_table: Tensor | None) -> None:
    if page_table is None:
        check_qkv(q, k, v)
        return
    if not isinstance(page_table, Tensor):
        raise TypeError(f"page_table must be a tensor or None, got {type(page_table).__name__}")
    pages = (isinstance(x, Tensor) and x.ndim == 4 and len(x) > 0 for x in (k, v))
    check_qkv(q, *(x[:1].expand(len(q), *x.shape[1:]) if ok else x for x, ok in zip((k, v), pages, strict=True)))
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k and v must have the same shape but for head_dim, got {list(k.shape)} and {list(v.shape)}")
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


def _check_counts(counts: Sequence[int], new: int, capacity: int) -> None:
    for count in counts:
        if not new <= count <= capacity:
            raise ValueError(f"lengths must be from {new} (the new tokens) to {capacity} (the capacity), got {count}")


def _checked_lengths(
    lengths: Sequence[int] | Tensor | None, q: Tensor, capacity: int, *, in_graph: bool = False
) -> Tensor:
    """int64 [batch], where it was; the values of tensors are checked once they are read. Numbers are checked here, and
    in a graph they are its own, on the device."""
    device = q.device if in_graph else HOST
    if lengths is None:
        return torch.full((len(q),), capacity, device=device)
    if isinstance(lengths, Tensor):
        if lengths.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"lengths must be int32 or int64, got {lengths.dtype}")
    elif isinstance(lengths, Sequence) and not isinstance(lengths, str):
        for length in lengths:
            check_int("lengths", length, least=1)
        _check_counts(lengths, q.shape[1], capacity)
        lengths = torch.tensor(lengths, dtype=torch.int64, device=device)
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
