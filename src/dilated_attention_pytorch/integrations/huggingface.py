"""Patterns in models of Hugging Face transformers: `register` a pattern under a name, give the name to the model.

    from dilated_attention_pytorch import GlobalTokens, SlidingWindow
    from dilated_attention_pytorch.integrations.huggingface import register

    register("window", SlidingWindow(1024, 0) | GlobalTokens(4), layers={0: None})   # layer 0 stays dense
    model.set_attn_implementation("window")

What the model itself hides stays hidden: the future in a decoder, everything outside the model's own sliding window,
padding, and other documents of a packed row. Scale, dropout, softcap and sinks are the model's. What cannot be honoured
raises an error that names it.

Positions are counted from the first token of a row that is not padding, so a prompt that is padded on the left
generates what it generates alone. Generating with a cache gives what computing the whole sequence again would give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

try:
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
except ModuleNotFoundError as error:
    raise ImportError("transformers is not installed: pip install transformers") from error

from ..layout.eager import value_cache
from ..ops import block_sparse_attention, decode_attention
from ..ops.choose import check_backend
from ..patterns import And, Blocks, DilatedBlocks, Documents, Full, Or, Pattern, PerHead, RandomBlocks, SlidingWindow
from ..patterns.base import check_int
from ..patterns.blocks import BlockPattern, ceil_div

# Keywords that reach every attention of transformers and change nothing in it.
WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "labels",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "token_type_ids",
        "use_cache",
    }
)
# They say once more where documents begin and end, which the mask knows from position_ids.
OF_PACKING = frozenset({"cu_seq_lens_k", "cu_seq_lens_q", "max_length_k", "max_length_q", "seq_idx"})


def register(
    name: str,
    pattern: Pattern,
    *,
    layers: Mapping[int, Pattern | None] | None = None,
    length: int | None = None,
    backend: str = "auto",
) -> None:
    """Make `model.set_attn_implementation(name)`, or `attn_implementation=name`, compute attention over `pattern`.

    Args:
        name: any that transformers does not give a meaning to. A name that is registered again changes at once in
            every model that uses it.
        pattern: who may attend, of what the model allows.
        layers: another pattern for some layers, by number; None is dense.
        length: take patterns whose rows depend on the length of the sequence (`RandomBlocks`, a `DilatedBlocks` with a
            budget) as those of a sequence of this many tokens. Generating with a cache needs it for them: without it a
            longer sequence would change what its first tokens see. Longer sequences are then refused.
        backend: see `block_sparse_attention`.
    """
    _check_name(name)
    if length is not None:
        check_int("length", length, least=1)
    own = {} if layers is None else dict(layers)
    for number in own:
        check_int("every layer of layers", number, least=0)
    attention = _Attention(
        default=_layer(pattern, length),
        layers={number: _layer(Full() if p is None else p, length) for number, p in own.items()},
        length=length,
        backend=check_backend(backend),
    )
    AttentionInterface.register(name, attention.attend)
    AttentionMaskInterface.register(name, attention.mask)


def _check_name(name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {name!r}")
    for taken in ("flash", "paged|", "/"):  # transformers would load another kernel for these
        if taken in name:
            raise ValueError(f"name must not contain {taken!r}, which has a meaning in transformers, got {name!r}")
    if name in ("", "eager", "sdpa", "flex_attention"):
        raise ValueError(f"name must not be one that transformers uses itself, got {name!r}")


class _Layer(NamedTuple):
    """A pattern, and what must be known of it without asking it inside a graph."""

    pattern: Pattern
    anchored: bool  # does it depend on where the sequence begins?
    unsteady: str | None  # the part, if any, of which a row depends on the length of the sequence


def _layer(pattern: Pattern, length: int | None) -> _Layer:
    if not isinstance(pattern, Pattern):
        raise TypeError(f"pattern must be a Pattern, got {type(pattern).__name__}")
    if length is not None:
        pattern = _of_length(pattern, length)
    parts = list(_parts(pattern))
    anchored = not all(isinstance(part, Full | SlidingWindow) for part in parts)
    return _Layer(pattern, anchored, next((repr(part) for part in parts if _is_unsteady(part)), None))


def _parts(pattern: Pattern) -> Iterator[Pattern]:
    if isinstance(pattern, And | Or):
        inner = pattern.parts
    elif isinstance(pattern, PerHead):
        inner = pattern.patterns
    else:
        yield pattern
        return
    for part in inner:
        yield from _parts(part)


def _is_unsteady(part: Pattern) -> bool:
    return isinstance(part, RandomBlocks | Documents) or (isinstance(part, DilatedBlocks) and part.sparsity_ratio < 1)


def _of_length(pattern: Pattern, length: int) -> Pattern:
    """The same pattern, where parts that depend on the length of the sequence are those of `length` tokens."""
    if isinstance(pattern, And | Or):
        return type(pattern)(tuple(_of_length(part, length) for part in pattern.parts))
    if isinstance(pattern, PerHead):
        return PerHead(tuple(_of_length(part, length) for part in pattern.patterns))
    if not (isinstance(pattern, BlockPattern) and _is_unsteady(pattern)):
        return pattern
    num_blocks = ceil_div(length, pattern.block_size)
    pairs = ((row, column) for row in range(num_blocks) for column in pattern.key_blocks(row, num_blocks))
    return Blocks(tuple(pairs), pattern.block_size)


class Mask(Tensor):
    """What a model of transformers hides, in the place of its mask of queries × keys, which is never made.

    It has the shape and dtype of that mask, so that models pass it on, can be moved to a device, and no more.

    Attributes:
        is_causal: whether queries see no later key.
        window: how far back and forth queries see, in tokens; None is no bound.
        cached: whether keys lie in a cache and queries are the last of them.
        dropped: how many keys a cache has dropped before the first one.
        lengths: int64 [batch], how many keys there are, new ones included; a cache may have room for more. On the CPU.
        key_padding_mask: bool [batch, keys], True where nobody sees the key.
        first_tokens: int64 [batch], the first token of each row that is not padding; None if all are 0.
        real_lengths: lengths without what lies before the first token, where that is padding. On the CPU.
        document_ids: int64 [batch, keys] of packed documents.
    """

    COUNTS = ("lengths", "real_lengths")  # read to find blocks: on a GPU every layer would wait for them
    TENSORS = (*COUNTS, "key_padding_mask", "first_tokens", "document_ids")
    is_causal: bool
    window: tuple[int | None, int | None]
    cached: bool
    dropped: int
    lengths: Tensor
    key_padding_mask: Tensor | None
    first_tokens: Tensor | None
    real_lengths: Tensor | None
    document_ids: Tensor | None

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        device: torch.device,
        is_causal: bool,
        window: tuple[int | None, int | None],
        cached: bool,
        dropped: int,
        **tensors: Tensor | None,
    ) -> Mask:
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        self.is_causal, self.window, self.cached, self.dropped = is_causal, window, cached, dropped
        for name in cls.TENSORS:
            setattr(self, name, tensors.get(name))
        return self

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        names = [name for name in self.TENSORS if getattr(self, name) is not None]
        return names, (tuple(self.shape), self.device, self.is_causal, self.window, self.cached, self.dropped)

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, Any], context: tuple[Any, ...], *_: Any) -> Mask:
        return Mask(*context, **tensors)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        aten = torch.ops.aten
        if func not in (aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default):
            raise TypeError(f"a mask of {__name__} is for its attention alone and knows no {func}")
        mask, options = args[0], kwargs or {}
        if options.get("dtype", torch.bool) != torch.bool:
            raise TypeError(f"a mask of {__name__} is bool and cannot be made {options['dtype']}")
        names, (shape, device, *rest) = mask.__tensor_flatten__()
        device = options.get("device", device)
        moved = {name: getattr(mask, name).to("cpu" if name in cls.COUNTS else device) for name in names}
        return cls(shape, device, *rest, **moved)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Mask(shape={list(self.shape)}, is_causal={self.is_causal}, window={self.window})"


@dataclass(frozen=True)
class _Attention:
    """One registered name: the two functions that transformers calls."""

    default: _Layer
    layers: dict[int, _Layer]
    length: int | None
    backend: str

    @torch.compiler.disable
    def mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int | Tensor = 0,
        kv_offset: int = 0,
        mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
        attention_mask: Tensor | None = None,
        device: torch.device | str = "cpu",
        **of_other_masks: Any,
    ) -> Mask:
        """See `AttentionMaskInterface`: what a call of the model hides. Runs once a call, outside of any graph."""
        is_causal, window, document_ids = _understood(mask_function)
        length = int(q_offset) + q_length
        cached = length > q_length or kv_offset > 0
        if not is_causal and (cached or q_length != kv_length):
            raise ValueError(
                f"a pattern speaks of one sequence that attends to itself; got {q_length} queries from token "
                f"{int(q_offset)} on, {kv_length} keys, and no causal mask"
            )
        if self.length is not None and length > self.length:
            raise ValueError(f"registered for length={self.length}, got a sequence of {length} tokens")
        lengths = torch.full((batch_size,), length - kv_offset)
        tensors: dict[str, Tensor | None] = {"lengths": lengths, "document_ids": document_ids}
        if attention_mask is not None:
            if attention_mask.ndim != 2:
                raise ValueError(f"attention_mask must be (batch, seq), got {list(attention_mask.shape)}")
            seen = attention_mask[:, : kv_offset + kv_length]
            if not seen.all():
                hidden = ~pad(seen, (0, kv_offset + kv_length - seen.shape[1]))[:, kv_offset:]
                tensors["key_padding_mask"] = hidden if cached else hidden[:, :q_length]
                first_tokens = seen.int().argmax(1)
                if first_tokens.any():
                    tensors["first_tokens"], tensors["real_lengths"] = first_tokens, lengths - first_tokens.cpu()
        return Mask(
            (batch_size, 1, q_length, kv_length),
            torch.device(device),
            is_causal,
            window,
            cached,
            kv_offset if any(layer.anchored for layer in (self.default, *self.layers.values())) else 0,
            **tensors,
        )

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **keywords: Any,
    ) -> tuple[Tensor, None]:
        """See `AttentionInterface`: (batch, heads, seq, head_dim) in, (batch, seq, heads, head_dim) out."""
        mask = _mask_of(module, query, key, attention_mask)
        _refuse(mask, is_causal, sliding_window, keywords)
        layer = self._layer_of(module)
        pattern = _narrowed(layer.pattern, *mask.window)
        options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux, "backend": self.backend}
        qkv = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if mask.cached:
            _refuse_in_cache(layer, dropout)
            return _decode(*qkv, pattern, mask, layer.anchored, options), None
        return _attend(*qkv, pattern, mask, layer.anchored, options | {"dropout_p": dropout}), None

    def _layer_of(self, module: nn.Module) -> _Layer:
        if not self.layers:
            return self.default
        number = getattr(module, "layer_idx", None)
        if number is None:
            raise ValueError(
                f"layers= needs to know the number of a layer, and {type(module).__name__} has no layer_idx"
            )
        last = max(self.layers)
        if last >= module.config.num_hidden_layers:  # type: ignore[union-attr,operator]
            raise ValueError(f"layers names layer {last}, but the model has {module.config.num_hidden_layers}")  # type: ignore[union-attr]
        return self.layers.get(number, self.default)


def _understood(
    mask_function: Callable[..., Any],
) -> tuple[bool, tuple[int | None, int | None], Tensor | None]:
    """Whether a mask function of transformers is causal, how far it lets see, and the documents that it tells apart."""
    is_causal, left, right = False, None, None
    document_ids = None
    for kind, value in _leaves(mask_function):
        if kind == "causal":
            is_causal = True
        elif kind == "documents":
            document_ids = value
        elif kind == "window":
            left = value - 1
        elif kind == "window both ways":
            left = right = value
    return is_causal, (left, right), document_ids


def _leaves(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """The rules that a mask function is the intersection of, each with what it was made with."""
    code = getattr(function, "__code__", None)
    if code not in KINDS:
        raise ValueError(
            f"the model hides tokens by a rule that is not understood: {getattr(function, '__qualname__', function)}; "
            "causal and bidirectional masks, sliding windows, padding and packed documents are"
        )
    made_with = [cell.cell_contents for cell in function.__closure__ or ()]
    if KINDS[code] == "and":
        for part in made_with[0]:
            yield from _leaves(part)
    else:
        yield KINDS[code], made_with[0] if made_with else None


# A closure is known by its code, whatever it was made with.
KINDS = {
    masking_utils.causal_mask_function.__code__: "causal",
    masking_utils.bidirectional_mask_function.__code__: "everything",
    masking_utils.and_masks().__code__: "and",
    masking_utils.sliding_window_overlay(1).__code__: "window",
    masking_utils.sliding_window_bidirectional_overlay(1).__code__: "window both ways",
    masking_utils.packed_sequence_mask_function(torch.empty(0)).__code__: "documents",
}


def _mask_of(module: nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | None) -> Mask:
    """The mask, if it is one that `_Attention.mask` made for these queries and keys."""
    kind = type(module).__name__
    if "CrossAttention" in kind or getattr(module, "is_cross_attention", False):
        raise ValueError(f"a pattern speaks of one sequence that attends to itself; {kind} attends to another")
    if attention_mask is None:
        raise ValueError(f"{kind} got no mask, and nothing else says for sure what it may see")
    if not isinstance(attention_mask, Mask):
        raise ValueError(
            f"{kind} got a mask of its own, {type(attention_mask).__name__} {list(attention_mask.shape)}, which cannot "
            "be combined with a pattern: give attention_mask as (batch, seq), packed documents by position_ids"
        )
    if attention_mask.shape[-2:] != (query.shape[2], key.shape[2]):
        raise ValueError(
            f"the mask is for {list(attention_mask.shape[-2:])} queries and keys, but {kind} got "
            f"{[query.shape[2], key.shape[2]]}"
        )
    return attention_mask


def _refuse(mask: Mask, is_causal: bool | None, sliding_window: int | None, keywords: dict[str, Any]) -> None:
    if is_causal is not None and is_causal != mask.is_causal:
        raise ValueError(f"is_causal={is_causal}, but the model's mask says {mask.is_causal}")
    # The mask is what counts: some models name the window of an encoder with the token itself, some without.
    if sliding_window is not None and mask.window[0] not in (sliding_window - 1, sliding_window):
        raise ValueError(f"sliding_window={sliding_window}, but the model's mask says {mask.window}")
    for name, value in keywords.items():
        if value is None or value is False or name in WITHOUT_EFFECT:
            continue
        if name in OF_PACKING and mask.document_ids is not None:
            continue
        raise ValueError(f"{name}={value!r} cannot be honoured by attention over a pattern")


def _refuse_in_cache(layer: _Layer, dropout: float) -> None:
    if layer.unsteady is not None:
        raise ValueError(
            f"rows of {layer.unsteady} depend on the length of the sequence, which grows with a cache: "
            "register the pattern with length=, or generate with use_cache=False"
        )
    if dropout:
        raise ValueError(f"dropout must be 0 with a cache, got {dropout}")


def _attend(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, mask: Mask, anchored: bool, options: dict[str, Any]
) -> Tensor:
    """A whole sequence."""
    if mask.is_causal:  # a cache may have room for more
        k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
    hidden, first = mask.key_padding_mask, mask.first_tokens if anchored else None
    if first is not None and hidden is not None:
        q, k, v, hidden = (_turned(x, first) for x in (q, k, v, hidden))
    options = options | {"key_padding_mask": hidden, "document_ids": mask.document_ids}
    out = block_sparse_attention(q, k, v, pattern, is_causal=mask.is_causal, **options)
    assert isinstance(out, Tensor)
    return out if first is None else _turned(out, -first)


def _decode(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, mask: Mask, anchored: bool, options: dict[str, Any]
) -> Tensor:
    """New tokens against a cache: what their rows would be if the whole sequence was computed again."""
    hidden, lengths, first = mask.key_padding_mask, mask.lengths, mask.first_tokens
    if anchored and mask.dropped:
        # Back to where they were. Nobody looks at what the cache has dropped: it is outside of the model's window.
        k, v = (pad(x, (0, 0, 0, 0, mask.dropped, 0)) for x in (k, v))
        hidden = None if hidden is None else pad(hidden, (mask.dropped, 0))
    if anchored and first is not None and hidden is not None and mask.real_lengths is not None:
        k, v, hidden = (_turned(x, first) for x in (k, v, hidden))
        lengths = mask.real_lengths
    lengths = lengths + mask.dropped if anchored else lengths
    out = decode_attention(q, k, v, pattern, lengths=lengths, key_padding_mask=hidden, **options)
    assert isinstance(out, Tensor)
    return out


def _turned(x: Tensor, by: Tensor) -> Tensor:
    """(batch, seq, …) where token `by` of each row becomes its first, and those before it its last."""
    place = (torch.arange(x.shape[1], device=x.device) + by[:, None]) % x.shape[1]
    return torch.take_along_dim(x, place.reshape(*place.shape, *[1] * (x.ndim - 2)), dim=1)


def _narrowed(pattern: Pattern, left: int | None, right: int | None) -> Pattern:
    """A pattern inside the model's own window, the same object every time."""
    return pattern if left is None and right is None else _inside(pattern, left, right)


@value_cache
def _inside(pattern: Pattern, left: int | None, right: int | None) -> Pattern:
    return pattern & SlidingWindow(left, right)
