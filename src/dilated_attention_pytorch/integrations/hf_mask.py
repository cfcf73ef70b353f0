"""What a model of transformers hides from its attention: `mask_of_call` makes a `Mask` of it, in the place of a tensor.

Everything here happens once a call of the model, outside of any graph, before the first layer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import masking_utils

from ..distributed import Placement, ShardMask
from ..distributed.carrier import Carrier
from ..patterns import Pattern
from .hf_cache import Kept, PatternCache


class Facts(NamedTuple):
    """What a `Mask` holds beside tensors.

    Attributes:
        model: the class that asked for it.
        is_causal: whether queries see no later key.
        crosses: whether keys are of another sequence than queries; None if unknown.
        window: how far back and forth queries see, in tokens; None is no bound.
        cached: whether keys lie in a cache and queries are the last of them.
        dropped: how many keys a cache has dropped before the first one.
        packed: whether rows hold several documents.
        recomputed: the number of keys, where a cache must be read as a whole sequence, of which queries are the end.
        placement: over a ring, who holds which tokens; queries and keys are this rank's.
        kept: of each layer, what a `PatternCache` keeps for it; None of other caches. The mask is that of the whole
            sequence then, and `of_what_is_kept` makes that of a layer of it.
    """

    model: str
    is_causal: bool
    crosses: bool | None = False
    window: tuple[int | None, int | None] = (None, None)
    cached: bool = False
    dropped: int = 0
    packed: bool = False
    recomputed: int | None = None
    placement: Placement | None = None
    kept: tuple[Kept | None, ...] | None = None


class Mask(Carrier):
    """What a model of transformers hides, in the place of its mask of queries × keys, which is never made.

    Attributes:
        facts: see `Facts`.
        lengths: int64 [batch], how many keys there are, new ones included; a cache may have room for more.
        places: the same for patterns that count from the first token: without what is padding before it, and with what
            a cache has dropped. None where it is the same.
        key_padding_mask: bool [batch, keys], True where no query sees the key.
        first_tokens: int64 [batch], the first token of each row that is not padding; None if all are 0.
        document_ids: int64 [batch, keys], tokens see each other only where it is the same.
        settled: int64 [batch], how many tokens there were when a `PatternCache` last dropped keys.

    Beside these it has the columns of layers that choose blocks, `columns_0` and so on, in the order of their numbers:
    what their scorer knows of the keys in the cache (`ops.cache_blocks`).
    """

    # All on the device: a CUDA graph takes no others, and every layer would copy them.
    TENSORS = ("lengths", "places", "key_padding_mask", "first_tokens", "document_ids", "settled")
    facts: Facts
    lengths: Tensor
    places: Tensor | None
    key_padding_mask: Tensor | None
    first_tokens: Tensor | None
    document_ids: Tensor | None
    settled: Tensor | None

    def with_columns(self, columns: dict[int, Tensor]) -> Mask:
        names, (shape, device, facts) = self.__tensor_flatten__()
        given = {name: getattr(self, name) for name in names}
        return Mask(shape, device, facts, **given | {f"columns_{layer}": x for layer, x in columns.items()})

    def columns(self, layer: int | None) -> Tensor | None:
        return getattr(self, f"columns_{layer}", None)

    def refusal(self, use: object) -> str:
        return (
            f"{self.facts.model} cannot be given a pattern: it looks into the mask that it asks for ({use}), which is "
            "for attention by transformers' AttentionInterface alone; it attends, or chooses keys, by itself as well"
        )


SomeTensor = TypeVar("SomeTensor", Tensor, Tensor | None)


def put_back(x: SomeTensor, count: int) -> SomeTensor:
    """(batch, seq, …) with `count` tokens before it, whose position counts and which no query sees.

    What a cache has dropped is outside of the model's window.
    """
    return x if x is None or count == 0 else pad(x, (*[0] * 2 * (x.ndim - 2), count, 0))


def turned(x: SomeTensor, by: Tensor) -> SomeTensor:
    """(batch, seq, …) where token `by` of each row becomes its first, and those before it its last."""
    if x is None:
        return x
    place = (torch.arange(x.shape[1], device=x.device) + by[:, None]) % x.shape[1]
    return torch.take_along_dim(x, place.reshape(*place.shape, *[1] * (x.ndim - 2)), dim=1)


class Unmasked:
    """In the place of a `Mask` where a model asks for none and its attention sees everything."""

    facts = Facts(model="", is_causal=False)
    key_padding_mask = first_tokens = document_ids = None


def mask_of_call(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    *,
    anchored: bool,
    longest: int | None,
    over_ring: bool = False,
    **of_other_masks: Any,
) -> Mask:
    """See `AttentionMaskInterface`.

    Args:
        anchored: whether a pattern depends on where the sequence begins.
        longest: sequence that patterns are registered for, if they are for one.
        over_ring: whether patterns are registered over a ring.
    """
    call = call_of_model()
    rule = _understood(mask_function, call.model)
    if isinstance(attention_mask, ShardMask):
        if not over_ring:
            raise ValueError(f"{call.model} was given a shard of a batch, but its pattern is registered without group=")
        shard = (batch_size, 1, q_length, kv_length)
        return _of_shard(attention_mask, rule, call, shard, anchored=anchored, longest=longest)
    if over_ring and int(q_offset) == 0:
        raise ValueError(
            f"{call.model} attends over a ring, so its inputs must be a rank's shard, from shard_batch or load_shard, "
            "attention_mask included; to generate, give it the cache of prefill"
        )
    first, length = int(q_offset), int(q_offset) + q_length
    if longest is not None and length > longest:
        raise ValueError(f"registered for length={longest}, got a sequence of {length} tokens")
    cached = first > 0 or kv_offset > 0
    if not rule.is_causal and not call.crosses and (cached or q_length != kv_length):
        raise ValueError(
            f"a pattern speaks of one sequence that attends to itself; {call.model} asks for {q_length} queries from "
            f"token {first} on, {kv_length} keys, and no causal mask"
        )
    keys = length - kv_offset
    tensors = {"lengths": torch.full((batch_size,), keys, device=device)}
    if attention_mask is not None:
        tensors |= _padding(attention_mask, kv_offset, kv_length, call.model)
    if rule.document_ids is not None:
        tensors["document_ids"] = rule.document_ids
    elif rule.is_causal and not cached and "key_padding_mask" not in tensors:
        _refuse_packed(call, attention_mask)
    cache = call.past_key_values if isinstance(call.past_key_values, PatternCache) else None
    if cache is not None:
        tensors |= _announced(cache, length, tensors)
    # A row of a cache is no sequence where some new tokens are padding, or lie in another chunk than the others.
    recomputed = cached and anchored and "first_tokens" in tensors and int(tensors["first_tokens"].max()) > first
    if rule.chunk is not None:
        chunks = _chunks(*rule.chunk, kv_length, kv_offset)
        new = chunks[:, keys - q_length : keys]
        recomputed = recomputed or (cached and bool((new != new[:, :1]).any()))
        if cached and not recomputed:
            tensors["key_padding_mask"] = tensors.get("key_padding_mask", False) | (chunks != new[:, :1])
        else:
            tensors["document_ids"] = _both(tensors.get("document_ids"), chunks)
    if rule.is_causal and not cached:  # a cache may have room for more
        wide = [name for name in ("key_padding_mask", "document_ids") if name in tensors]
        tensors |= {name: tensors[name][:, :q_length] for name in wide}
    dropped = kv_offset if anchored else 0
    if cached and anchored and (dropped or "first_tokens" in tensors):
        tensors["places"] = tensors["lengths"] + (dropped - tensors.get("first_tokens", 0))
    facts = Facts(
        model=call.model,
        is_causal=rule.is_causal,
        crosses=call.crosses,
        window=rule.window,
        cached=cached,
        dropped=dropped,
        packed=rule.document_ids is not None,
        recomputed=keys if recomputed else None,
        kept=None if cache is None else cache.kept,
    )
    return Mask((batch_size, 1, q_length, kv_length), torch.device(device), facts, **tensors)


def _of_shard(
    own: ShardMask, rule: _Rule, call: Call, shape: tuple[int, ...], *, anchored: bool, longest: int | None
) -> Mask:
    """The mask of a call over a ring, of a rank's tokens."""
    facts = own.facts
    if shape[2:] != (own.shape[1],) * 2:
        raise ValueError(
            f"over a ring nothing is cached, and all tokens of a rank attend at once: {call.model} got "
            f"{own.shape[1]} tokens of the shard, {shape[2]} queries and {shape[3]} keys"
        )
    taker = _taker_of_labels()
    if taker is not None:
        raise ValueError(
            f"{taker} must get no labels over a ring: its own loss would be wrong, for the label of a shard's last "
            "token is on another rank; take ring_loss(logits, labels, mesh), of the labels of shard_batch"
        )
    if longest is not None and facts.placement.seq > longest:
        raise ValueError(f"registered for length={longest}, got a sequence of {facts.placement.seq} tokens")
    if anchored and facts.begins_late:
        raise ValueError(
            "over a ring a sequence must begin with its first token: a pattern that depends on positions cannot leave "
            f"out padding on the left, which {call.model} got"
        )
    tensors: dict[str, Tensor | None] = {"lengths": torch.full(shape[:1], own.shape[1], device=own.device)}
    tensors["key_padding_mask"] = ~own.tokens if facts.padded else None
    tensors["document_ids"] = own.document_ids
    of_call = Facts(
        model=call.model,
        is_causal=rule.is_causal,
        crosses=call.crosses,
        window=rule.window,
        packed=own.document_ids is not None,
        placement=facts.placement,
    )
    return Mask(shape, own.device, of_call, **tensors)


def _taker_of_labels() -> str | None:
    """The model above that was given labels, if one was: it would shift those of a shard by itself."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        model = frame.f_locals.get("self")
        if isinstance(model, nn.Module) and frame.f_locals.get("labels") is not None:
            return type(model).__name__
        frame = frame.f_back
    return None


def _padding(attention_mask: Tensor, kv_offset: int, kv_length: int, model: str) -> dict[str, Tensor]:
    """What a `Mask` holds of a mask of real tokens, (batch, seq)."""
    if attention_mask.ndim != 2:
        raise ValueError(f"attention_mask must be (batch, seq), got {list(attention_mask.shape)} ({model})")
    seen = attention_mask[:, : kv_offset + kv_length].bool()
    if seen.all():
        return {}
    tensors = {"key_padding_mask": ~pad(seen, (0, kv_offset + kv_length - seen.shape[1]))[:, kv_offset:]}
    first_tokens = seen.int().argmax(1)
    if first_tokens.any():
        tensors["first_tokens"] = first_tokens
    return tensors


def _announced(cache: PatternCache, length: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tell the cache of a call, and the mask of what the cache has dropped before it."""
    told = {"settled": torch.full_like(tensors["lengths"], cache.settled)}
    firsts = None
    if "key_padding_mask" in tensors:
        seen = ~tensors["key_padding_mask"][:, :length]
        # A row of which nothing has come but padding begins later.
        first = torch.where(seen.any(1), seen.int().argmax(1), length)
        if first.any():
            told["first_tokens"], firsts = first, tuple(first.tolist())
    cache.announce(length, firsts)
    return told


def of_what_is_kept(mask: Mask, module: nn.Module, pattern: Pattern, keys: int) -> Mask:
    """The mask of a layer that was given this many keys, from that of the whole sequence.

    A row has its first tokens and its last ones, without those between them that its cache has dropped. It is read as
    the sequence that they make (`layout.look_back` says why a pattern sees the same in it), at the right end.
    """
    assert mask.facts.kept is not None
    assert mask.settled is not None
    kind, number, length = type(module).__name__, getattr(module, "layer_idx", None), mask.shape[3]
    kept = mask.facts.kept[number] if number is not None and number < len(mask.facts.kept) else None
    if kept is None:
        raise ValueError(f"PatternCache keeps nothing for {kind}, layer {number}")
    left = mask.facts.window[0]
    if pattern.text != kept.pattern or (kept.window is not None and (left is None or left > kept.window)):
        raise ValueError(
            f"PatternCache was made for {kept.pattern} inside a window of {kept.window}, but layer {number} attends "
            f"over {pattern.text} inside one of {left}: make another PatternCache"
        )
    if keys == length or kept.look_back is None:
        return mask
    look_back = kept.look_back
    first = torch.zeros_like(mask.lengths) if mask.first_tokens is None else mask.first_tokens
    behind = (mask.settled - first - (look_back.first + look_back.back)).clamp(min=0)
    dropped = behind // look_back.step * look_back.step
    places = mask.lengths - first - dropped
    own = torch.arange(keys, device=places.device) - (keys - places)[:, None]
    token = (first[:, None] + own + torch.where(own < look_back.first, 0, dropped[:, None])).clamp(min=0)
    tensors: dict[str, Tensor | None] = {"lengths": torch.full_like(mask.lengths, keys)}
    if mask.key_padding_mask is not None:
        tensors["key_padding_mask"] = mask.key_padding_mask.gather(1, token) | (own < 0)
    if mask.document_ids is not None:
        tensors["document_ids"] = mask.document_ids.gather(1, token)
    if mask.first_tokens is not None:
        tensors |= {"first_tokens": keys - places, "places": places}
    facts = mask.facts._replace(kept=None, recomputed=None if mask.facts.recomputed is None else keys)
    return Mask((*mask.shape[:3], keys), mask.device, facts, **tensors)


def _chunks(chunk_size: int, left_padding: Tensor, kv_length: int, kv_offset: int) -> Tensor:
    """int64 [batch, keys], the chunk of each key, counted as `masking_utils.chunked_overlay` counts."""
    places = torch.arange(kv_offset, kv_offset + kv_length, device=left_padding.device)
    return (places - left_padding[:, None]) // chunk_size


def _both(document_ids: Tensor | None, chunks: Tensor) -> Tensor:
    """Ids that are the same where both are."""
    return chunks if document_ids is None else document_ids * chunks.shape[1] + chunks


def _refuse_packed(call: Call, attention_mask: Tensor | None) -> None:
    """transformers tells documents apart only without a cache and without a mask, and where a model gives its mask the
    positions; nothing else would report it."""
    told = call.mask_has_positions
    if told and call.past_key_values is None and attention_mask is None:
        return
    positions = call.position_ids
    if isinstance(positions, Tensor) and positions.ndim == 2 and (positions[:, 1:] == 0).any():
        got = "a mask that knows no positions"
        if told:
            got = "a cache" if attention_mask is None else "an attention_mask"
        raise ValueError(
            f"position_ids begin again at 0: packed documents are kept apart with use_cache=False and no "
            f"attention_mask alone, {call.model} got {got}"
        )


class Call(NamedTuple):
    """What is known of the call of a model that asks for a mask."""

    model: str
    crosses: bool | None
    position_ids: Tensor | None
    mask_has_positions: bool
    past_key_values: object
    module: nn.Module | None


def call_of_model() -> Call:
    """Found in the frames above: transformers does not pass on whose queries and keys a mask is for."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != masking_utils.__file__:
        frame = frame.f_back
    given = {} if frame is None else frame.f_locals
    while frame is not None and not isinstance(frame.f_locals.get("self"), nn.Module):
        frame = frame.f_back
    others, of_mask = given.get("encoder_hidden_states"), given.get("position_ids")
    of_model = None if frame is None else frame.f_locals.get("position_ids")
    return Call(
        model="the model" if frame is None else type(frame.f_locals["self"]).__name__,
        crosses=others is not None and others is not given["inputs_embeds"] if "inputs_embeds" in given else None,
        position_ids=of_model if of_mask is None else of_mask,
        mask_has_positions=of_mask is not None,
        past_key_values=given.get("past_key_values"),
        module=None if frame is None else frame.f_locals["self"],
    )


class _Rule(NamedTuple):
    """What a mask function of transformers hides."""

    is_causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    chunk: tuple[int, Tensor] | None = None  # its size, and the padding of each row before its first token
    document_ids: Tensor | None = None

    def within(self, left: int | None, right: int | None) -> _Rule:
        left, right = (
            min((bound for bound in pair if bound is not None), default=None)
            for pair in zip(self.window, (left, right), strict=True)
        )
        return self._replace(window=(left, right))


def _understood(mask_function: Callable[..., Any], model: str) -> _Rule:
    rule = _Rule()
    for kind, made_with in _leaves(mask_function, model):
        if kind == "causal":
            rule = rule._replace(is_causal=True)
        elif kind == "documents":
            rule = rule._replace(document_ids=made_with[0])
        elif kind == "window":
            rule = rule.within(made_with[0] - 1, None)
        elif kind == "window both ways":
            rule = rule.within(made_with[0], made_with[0])
        elif kind == "chunks":  # no chunk is longer than this window, and the blocks before it are not looked at
            rule = rule.within(made_with[0] - 1, None)._replace(chunk=made_with)
    return rule


def _leaves(function: Callable[..., Any], model: str) -> Iterator[tuple[str, Any]]:
    """The rules that a mask function is the intersection of, each with what it was made with."""
    code = getattr(function, "__code__", None)
    if code not in KINDS:
        raise ValueError(
            f"{model} hides tokens by a rule that is not understood: {getattr(function, '__qualname__', function)}; "
            "causal and bidirectional masks, sliding windows, chunks, padding and packed documents are"
        )
    made_with = tuple(cell.cell_contents for cell in function.__closure__ or ())
    if KINDS[code] == "and":
        for part in made_with[0]:
            yield from _leaves(part, model)
    else:
        yield KINDS[code], made_with


# A closure is known by its code, whatever it was made with.
KINDS = {
    masking_utils.causal_mask_function.__code__: "causal",
    masking_utils.bidirectional_mask_function.__code__: "everything",
    masking_utils.and_masks().__code__: "and",
    masking_utils.sliding_window_overlay(1).__code__: "window",
    masking_utils.sliding_window_bidirectional_overlay(1).__code__: "window both ways",
    masking_utils.chunked_overlay(1, torch.empty(0)).__code__: "chunks",
    masking_utils.packed_sequence_mask_function(torch.empty(0)).__code__: "documents",
}
