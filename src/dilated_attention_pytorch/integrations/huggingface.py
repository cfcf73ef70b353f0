"""Patterns in models of Hugging Face transformers: `register` a pattern under a name, give the name to the model.

    from dilated_attention_pytorch import GlobalTokens, SlidingWindow
    from dilated_attention_pytorch.integrations.huggingface import register, verify

    register("window", SlidingWindow(1024, 0) | GlobalTokens(4), layers={0: None})   # layer 0 stays dense
    model.set_attn_implementation("window")
    verify(model)   # every layer called

What the model itself hides stays hidden: the future in a decoder, everything outside the model's own sliding window or
chunk, padding, and other documents of a packed row. Scale, dropout, softcap and sinks are the model's. What cannot be
honoured raises an error that names it: cross-attention, and models that compute attention themselves, above all.

Positions are counted from the first token of a row that is not padding, so a prompt that is padded on the left
generates what it generates alone. Generating with a cache gives what computing the whole sequence again would give.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

try:
    from transformers import AttentionInterface, AttentionMaskInterface
except ModuleNotFoundError as error:
    raise ImportError("transformers is not installed: pip install transformers") from error

from ..layout.eager import value_cache
from ..ops import block_sparse_attention, decode_attention
from ..ops.choose import check_backend
from ..patterns import And, Blocks, DilatedBlocks, Documents, Full, Or, Pattern, PerHead, RandomBlocks, SlidingWindow
from ..patterns.base import check_int, constant_in_graphs
from ..patterns.blocks import BlockPattern, ceil_div
from .hf_mask import Facts, Mask, Unmasked, mask_of_call
from .hf_models import Calls, keep, verify

__all__ = ["register", "verify"]

SomeTensor = TypeVar("SomeTensor", Tensor, Tensor | None)

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
    if not isinstance(layers, Mapping | None):
        raise TypeError(f"layers must map numbers of layers to patterns, as in {{0: None}}, got {layers!r}")
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
    keep(name)


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


@dataclass(frozen=True)
class _Attention:
    """One registered name: the two functions that transformers calls."""

    default: _Layer
    layers: dict[int, _Layer]
    length: int | None
    backend: str

    @torch.compiler.disable
    def mask(self, *call: Any, **keywords: Any) -> Mask:
        """See `AttentionMaskInterface`: what a call of the model hides. Runs once a call, outside of any graph."""
        anchored = any(layer.anchored for layer in (self.default, *self.layers.values()))
        return mask_of_call(*call, **keywords, anchored=anchored, longest=self.length)

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
        Calls.add()
        mask = _mask_of(module, query, key, attention_mask, is_causal)
        _refuse(module, mask.facts, is_causal, sliding_window, keywords)
        layer = self._layer_of(module)
        pattern = _narrowed(layer.pattern, *mask.facts.window)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": s_aux, "backend": self.backend}
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        narrow = value.shape[-1] != key.shape[-1]  # as in the latent attention of DeepSeek
        if narrow:
            head_dim = max(key.shape[-1], value.shape[-1])
            q, k, v = (pad(x, (0, head_dim - x.shape[-1])) for x in (q, k, v))
        if mask.facts.cached:
            _refuse_in_cache(layer, dropout)
        if isinstance(mask, Mask) and mask.facts.cached and mask.facts.recomputed is None:
            out = _decode(q, k, v, pattern, mask, layer.anchored, options)
        else:
            out = _attend(q, k, v, pattern, mask, layer.anchored, options | {"dropout_p": dropout})
        return out[..., : value.shape[-1]] if narrow else out, None

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


def _mask_of(
    module: nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | None, is_causal: bool | None
) -> Mask | type[Unmasked]:
    """What these queries see of these keys, if it is said for sure and they are one sequence."""
    kind = type(module).__name__
    if attention_mask is not None and not isinstance(attention_mask, Mask):
        raise ValueError(
            f"{kind} got a mask of its own, {type(attention_mask).__name__} {list(attention_mask.shape)}, which cannot "
            "be combined with a pattern: give attention_mask as (batch, seq), packed documents by position_ids"
        )
    facts = None if attention_mask is None else attention_mask.facts
    if getattr(module, "is_cross_attention", False) or (facts is not None and facts.crosses):
        raise ValueError(f"a pattern speaks of one sequence that attends to itself; {kind} attends to another")
    if (facts is None or not (facts.is_causal or facts.crosses is False)) and _takes_another(type(module)):
        raise ValueError(
            f"a pattern speaks of one sequence that attends to itself; {kind} may attend to another, and got no mask "
            "that says whose keys it has"
        )
    if attention_mask is None:
        causal = getattr(module, "is_causal", None) if is_causal is None else is_causal
        if causal is not False or query.shape[2] != key.shape[2]:
            raise ValueError(
                f"{kind} got no mask, and nothing else says for sure what {query.shape[2]} queries may see of "
                f"{key.shape[2]} keys"
            )
        return Unmasked
    if attention_mask.shape[-2:] != (query.shape[2], key.shape[2]):
        raise ValueError(
            f"the mask is for {list(attention_mask.shape[-2:])} queries and keys, but {kind} got "
            f"{[query.shape[2], key.shape[2]]}"
        )
    return attention_mask


# Parameters of the forward of attention modules, of one sequence that attends to itself.
OF_ONE_SEQUENCE = frozenset(
    {
        "attention_mask",
        "cu_seqlens",
        "hidden_states",
        "kwargs",
        "max_seqlen",
        "output_attentions",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "position_mask",
        "self",
    }
)


@constant_in_graphs
def _takes_another(kind: type[nn.Module]) -> bool:
    """Whether such modules can be called with another sequence to attend to."""
    return not OF_ONE_SEQUENCE.issuperset(_parameters(kind))  # type: ignore[arg-type]


@lru_cache
def _parameters(kind: type) -> tuple[str, ...]:
    return tuple(signature(kind.forward).parameters)  # type: ignore[attr-defined]


def _refuse(
    module: nn.Module, facts: Facts, is_causal: bool | None, sliding_window: int | None, keywords: dict[str, Any]
) -> None:
    kind = type(module).__name__
    if is_causal is not None and is_causal != facts.is_causal:
        raise ValueError(f"{kind} got is_causal={is_causal}, but the model's mask says {facts.is_causal}")
    # The mask is what counts: some models name the window of an encoder with the token itself, some without.
    if sliding_window is not None and facts.window[0] not in (sliding_window - 1, sliding_window):
        raise ValueError(f"{kind} got sliding_window={sliding_window}, but the model's mask says {facts.window}")
    for name, value in keywords.items():
        if value is None or value is False or name in WITHOUT_EFFECT:
            continue
        if name in OF_PACKING and facts.packed:
            continue
        shown = f"tensor {list(value.shape)}" if isinstance(value, Tensor) and value.numel() > 8 else repr(value)
        raise ValueError(f"{name}={shown} cannot be honoured by attention over a pattern ({kind})")


def _refuse_in_cache(layer: _Layer, dropout: float) -> None:
    if layer.unsteady is not None:
        raise ValueError(
            f"rows of {layer.unsteady} depend on the length of the sequence, which grows with a cache: "
            "register the pattern with length=, or generate with use_cache=False"
        )
    if dropout:
        raise ValueError(f"dropout must be 0 with a cache, got {dropout}")


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    mask: Mask | type[Unmasked],
    anchored: bool,
    options: dict[str, Any],
) -> Tensor:
    """A whole sequence, or what the last tokens of one get of it."""
    hidden, ids, first = mask.key_padding_mask, mask.document_ids, mask.first_tokens if anchored else None
    earlier = 0
    if mask.facts.recomputed is not None:
        k, v = (_put_back(x[:, : mask.facts.recomputed], mask.facts.dropped) for x in (k, v))
        cut = (None if x is None else x[:, : mask.facts.recomputed] for x in (hidden, ids))
        hidden, ids = (_put_back(x, mask.facts.dropped) for x in cut)
        earlier = k.shape[1] - q.shape[1]
        q = _put_back(q, earlier)
    elif mask.facts.is_causal:  # a cache may have room for more
        k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
    if first is not None:
        q, k, v = (_turned(x, first) for x in (q, k, v))
        hidden, ids = (_turned(x, first) for x in (hidden, ids))
    options = options | {"key_padding_mask": hidden, "document_ids": ids}
    out = block_sparse_attention(q, k, v, pattern, is_causal=mask.facts.is_causal, **options)
    assert isinstance(out, Tensor)
    whole = out if first is None else _turned(out, -first)
    return whole[:, earlier:] if earlier else whole


def _decode(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, mask: Mask, anchored: bool, options: dict[str, Any]
) -> Tensor:
    """New tokens against a cache: what their rows would be if the whole sequence was computed again."""
    hidden, lengths, first = mask.key_padding_mask, mask.lengths, mask.first_tokens
    if anchored:
        k, v, hidden = (*(_put_back(x, mask.facts.dropped) for x in (k, v)), _put_back(hidden, mask.facts.dropped))
        if first is not None and mask.real_lengths is not None:
            k, v, hidden = (*(_turned(x, first) for x in (k, v)), _turned(hidden, first))
            lengths = mask.real_lengths
        lengths = lengths + mask.facts.dropped
    out = decode_attention(q, k, v, pattern, lengths=lengths, key_padding_mask=hidden, **options)
    assert isinstance(out, Tensor)
    return out


def _put_back(x: SomeTensor, count: int) -> SomeTensor:
    """(batch, seq, …) with `count` tokens before it, whose place counts and which nobody looks at.

    What a cache has dropped is outside of the model's window.
    """
    return x if x is None or count == 0 else pad(x, (*[0] * 2 * (x.ndim - 2), count, 0))


def _turned(x: SomeTensor, by: Tensor) -> SomeTensor:
    """(batch, seq, …) where token `by` of each row becomes its first, and those before it its last."""
    if x is None:
        return x
    place = (torch.arange(x.shape[1], device=x.device) + by[:, None]) % x.shape[1]
    return torch.take_along_dim(x, place.reshape(*place.shape, *[1] * (x.ndim - 2)), dim=1)


def _narrowed(pattern: Pattern, left: int | None, right: int | None) -> Pattern:
    """A pattern inside the model's own window, the same object every time."""
    return pattern if left is None and right is None else _inside(pattern, left, right)


@value_cache
def _inside(pattern: Pattern, left: int | None, right: int | None) -> Pattern:
    return pattern & SlidingWindow(left, right)
