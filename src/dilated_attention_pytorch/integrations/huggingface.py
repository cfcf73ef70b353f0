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
generates what it generates alone. Generating with a cache gives what computing the whole sequence again would give;
with a `PatternCache` (`hf_cache.py`) in memory that does not grow with the text, for patterns that do not look back
without bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

try:
    from transformers import AttentionInterface, AttentionMaskInterface
except ModuleNotFoundError as error:
    raise ImportError("transformers is not installed: pip install transformers") from error

from ..caches import cached
from ..distributed import ShardMask, ring_block_sparse_attention
from ..distributed.agreement import told_to_all
from ..distributed.exchange import Group, check_group
from ..layout.eager import value_cache
from ..nn import Adaptive
from ..nn.adaptive_rule import load_adaptive
from ..ops import block_sparse_attention, decode_attention
from ..ops.choose import check_backend
from ..patterns import And, Blocks, Documents, Full, KeyRanges, Or, Pattern, PerHead, SlidingWindow
from ..patterns.base import check_int, constant_in_graphs
from ..patterns.blocks import BlockPattern, ceil_div
from .hf_adaptive import Chooser, own_lengths, trainable, with_summaries
from .hf_bias import check_position_bias, of_same_tokens
from .hf_cache import PatternCache
from .hf_mask import Facts, Mask, Unmasked, mask_of_call, of_what_is_kept, put_back, turned
from .hf_models import Calls, keep, verify
from .hf_ring import prefill

__all__ = ["PatternCache", "prefill", "register", "trainable", "verify"]

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
    pattern: Pattern | Adaptive | str | Path,
    *,
    layers: Mapping[int, Pattern | Adaptive | None] | None = None,
    length: int | None = None,
    backend: str = "auto",
    group: Group | None = None,
) -> None:
    """Make `model.set_attn_implementation(name)`, or `attn_implementation=name`, compute attention over `pattern`.

    Args:
        name: any that transformers does not give a meaning to. A name that is registered again changes at once in
            every model that uses it.
        pattern: who may attend, of what the model allows; or an `Adaptive`, by which every layer chooses its blocks
            from its queries and keys, or a file of `dilated-attention calibrate` with one for each layer. Layers with
            a window or chunks of their own keep those, and choose nothing.
        layers: another pattern, or another choice, for some layers, by number; None is dense.
        length: take patterns whose rows depend on the length of the sequence (`RandomBlocks`, a `DilatedBlocks` with a
            budget) as those of a sequence of this many tokens. Generating with a cache needs it for them: without it a
            longer sequence would change what its first tokens see. Longer sequences are then refused.
        backend: see `block_sparse_attention`.
        group: a ring, a process group or a DeviceMesh of one dimension: models with this name are given a rank's part
            of a sequence, `model(**inputs)` of `shard_batch`, and attend over the ring. Their own `labels=` are
            refused, see `ring_loss`; to generate see `prefill`.
    """
    _check_name(name)
    if length is not None:
        check_int("length", length, least=1)
    if not isinstance(layers, Mapping | None):
        raise TypeError(f"layers must map numbers of layers to patterns, as in {{0: None}}, got {layers!r}")
    own: dict[int, Pattern | Adaptive | None] = {} if layers is None else dict(layers)
    if isinstance(pattern, str | Path):
        pattern, of_layers = load_adaptive(pattern)
        own = {**of_layers, **own}
    for number in own:
        check_int("every layer of layers", number, least=0)
    if group is not None and any(isinstance(each, Adaptive) for each in (pattern, *own.values())):
        raise ValueError("an Adaptive cannot be honoured over a ring (group=): no rank has all queries and keys")
    attention = _Attention(
        default=_layer(pattern, length),
        layers={number: _layer(Full() if p is None else p, length) for number, p in own.items()},
        length=length,
        backend=check_backend(backend),
        group=None if group is None else check_group(group),
    )
    AttentionInterface.register(name, attention.attend)
    AttentionMaskInterface.register(name, attention.mask)
    keep(name, attention.pattern_of)


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
    chooser: Chooser | None = None  # chooses blocks where the model has no window


def _layer(pattern: Pattern | Adaptive, length: int | None) -> _Layer:
    if isinstance(pattern, Adaptive):
        return _Layer(Full(), True, None, Chooser(pattern, pattern.module()))
    if not isinstance(pattern, Pattern):
        raise TypeError(f"pattern must be a Pattern or an Adaptive, got {type(pattern).__name__}")
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
    return isinstance(part, Documents | KeyRanges) or (isinstance(part, BlockPattern) and part.depends_on_length)


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
    group: ProcessGroup | None = None

    @torch.compiler.disable
    def mask(
        self, batch_size: int, q_length: int, kv_length: int, q_offset: int | Tensor = 0, *call: Any, **keywords: Any
    ) -> Mask:
        """See `AttentionMaskInterface`: what a call of the model hides. Runs once a call, outside of any graph."""
        layers, before = (self.default, *self.layers.values()), int(q_offset)
        anchored = any(layer.anchored for layer in layers)
        of_shard = isinstance(keywords.get("attention_mask"), ShardMask)
        with told_to_all(self.group if of_shard else None):
            mask = mask_of_call(
                batch_size, q_length, kv_length, before, *call, **keywords,
                anchored=anchored, longest=self.length, over_ring=self.group is not None,
            )  # fmt: skip
        if all(layer.chooser is None for layer in layers):
            return mask
        return with_summaries(mask, before, lambda number: self.layers.get(number, self.default).chooser)

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
        position_bias: Tensor | None = None,
        **keywords: Any,
    ) -> tuple[Tensor, None]:
        """See `AttentionInterface`: (batch, heads, seq, head_dim) in, (batch, seq, heads, head_dim) out."""
        Calls.add()
        over_ring = isinstance(attention_mask, Mask) and attention_mask.facts.placement is not None
        with told_to_all(self.group if over_ring else None):
            layer = self._layer_of(module)
            if isinstance(attention_mask, Mask) and attention_mask.facts.kept is not None:
                attention_mask = of_what_is_kept(attention_mask, module, layer.pattern, key.shape[2])
            mask = _mask_of(module, query, key, attention_mask, is_causal)
            _refuse(module, mask.facts, is_causal, sliding_window, keywords)
            if mask.facts.cached:
                _refuse_in_cache(layer, dropout)
            check_position_bias(module, query, key, mask.facts, position_bias, chooses=layer.chooser is not None)
        pattern = _narrowed(layer.pattern, *mask.facts.window)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": s_aux, "backend": self.backend}
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        chooser = layer.chooser if mask.facts.window == (None, None) else None
        if chooser is not None:
            chooser = chooser.inside(module)
        if isinstance(mask, Mask) and mask.facts.cached and mask.facts.recomputed is None:
            if chooser is None:
                return _decode(q, k, v, pattern, mask, layer.anchored, options), None
            k, v, hidden, lengths = _cache_of(k, v, mask, True)
            columns = mask.columns(getattr(module, "layer_idx", None))
            return chooser.step(q, k, v, lengths, hidden, columns, options), None
        options["dropout_p"] = dropout
        if position_bias is not None:
            options["bias"] = position_bias
        if isinstance(mask, Mask) and mask.facts.placement is not None:
            assert self.group is not None
            return _attend_over_ring(q, k, v, pattern, mask, self.group, options), None
        return _attend(q, k, v, pattern if chooser is None else chooser, mask, layer.anchored, options), None

    def pattern_of(self, number: int) -> Pattern:
        """Of a layer."""
        return self.layers.get(number, self.default).pattern

    def rule_of(self, module: nn.Module) -> Adaptive | None:
        """By which an attention module chooses its blocks."""
        chooser = self._layer_of(module).chooser
        return None if chooser is None else chooser.rule

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
    return not OF_ONE_SEQUENCE.issuperset(_parameters(kind))


@cached(128, "parameters of attention classes")
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
    pattern: Pattern | Chooser,
    mask: Mask | type[Unmasked],
    anchored: bool,
    options: dict[str, Any],
) -> Tensor:
    """A whole sequence, or what the last tokens of one get of it."""
    hidden, ids, first = mask.key_padding_mask, mask.document_ids, mask.first_tokens if anchored else None
    earlier = 0
    if mask.facts.recomputed is not None:
        k, v = (put_back(x[:, : mask.facts.recomputed], mask.facts.dropped) for x in (k, v))
        cut = (None if x is None else x[:, : mask.facts.recomputed] for x in (hidden, ids))
        hidden, ids = (put_back(x, mask.facts.dropped) for x in cut)
        earlier = k.shape[1] - q.shape[1]
        q = put_back(q, earlier)
    elif mask.facts.is_causal:  # a cache may have room for more
        k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
    if first is not None:
        q, k, v = (turned(x, first) for x in (q, k, v))
        hidden, ids = (turned(x, first) for x in (hidden, ids))
    options = options | {"key_padding_mask": hidden, "document_ids": ids}
    if "bias" in options:
        options["bias"] = of_same_tokens(options["bias"], mask.facts, first, len(q), earlier)
    out: Any
    if isinstance(pattern, Chooser):
        out = pattern.attend(q, k, v, mask.facts.is_causal, own_lengths(hidden), options)
    else:
        out = block_sparse_attention(q, k, v, pattern, is_causal=mask.facts.is_causal, **options)
    assert isinstance(out, Tensor)
    whole = out if first is None else turned(out, -first)
    return whole[:, earlier:] if earlier else whole


def _attend_over_ring(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, mask: Mask, group: ProcessGroup, options: dict[str, Any]
) -> Tensor:
    out = ring_block_sparse_attention(
        q, k, v, pattern, group=group, placement=mask.facts.placement, is_causal=mask.facts.is_causal,
        key_padding_mask=mask.key_padding_mask, document_ids=mask.document_ids, **options,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


def _decode(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, mask: Mask, anchored: bool, options: dict[str, Any]
) -> Tensor:
    """New tokens against a cache: what their rows would be if the whole sequence was computed again."""
    k, v, hidden, lengths = _cache_of(k, v, mask, anchored)
    out = decode_attention(q, k, v, pattern, lengths=lengths, key_padding_mask=hidden, **options)
    assert isinstance(out, Tensor)
    return out


def _cache_of(k: Tensor, v: Tensor, mask: Mask, anchored: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Keys, values, which of them are hidden, and how many there are; where it counts, from the first real token on."""
    hidden, lengths, first = mask.key_padding_mask, mask.lengths, mask.first_tokens
    if anchored and mask.places is not None:
        k, v, hidden = (*(put_back(x, mask.facts.dropped) for x in (k, v)), put_back(hidden, mask.facts.dropped))
        if first is not None:
            k, v, hidden = (*(turned(x, first) for x in (k, v)), turned(hidden, first))
        lengths = mask.places
    return k, v, hidden, lengths


def _narrowed(pattern: Pattern, left: int | None, right: int | None) -> Pattern:
    """A pattern inside the model's own window, the same object every time."""
    return pattern if left is None and right is None else _inside(pattern, left, right)


@value_cache(128, "patterns inside the windows of models")
def _inside(pattern: Pattern, left: int | None, right: int | None) -> Pattern:
    return pattern & SlidingWindow(left, right)
