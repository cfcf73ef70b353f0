"""What a model of transformers hides from its attention: `mask_of_call` makes a `Mask` of it, in the place of a tensor.

Everything here happens once a call of the model, outside of any graph, before the first layer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._pytree import tree_leaves
from transformers import masking_utils


class Facts(NamedTuple):
    """What a `Mask` holds beside tensors.

    Attributes:
        model: the class that asked for it.
        is_causal: whether queries see no later key.
        crosses: whether keys are of another sequence than queries; None if nobody said.
        window: how far back and forth queries see, in tokens; None is no bound.
        cached: whether keys lie in a cache and queries are the last of them.
        dropped: how many keys a cache has dropped before the first one.
        packed: whether rows hold several documents.
        recomputed: the number of keys, where a cache must be read as a whole sequence, of which queries are the end.
    """

    model: str
    is_causal: bool
    crosses: bool | None = False
    window: tuple[int | None, int | None] = (None, None)
    cached: bool = False
    dropped: int = 0
    packed: bool = False
    recomputed: int | None = None


class Mask(Tensor):
    """What a model of transformers hides, in the place of its mask of queries × keys, which is never made.

    It has the shape and dtype of that mask, so that models pass it on, can be moved to a device, and no more.

    Attributes:
        facts: see `Facts`.
        lengths: int64 [batch], how many keys there are, new ones included; a cache may have room for more. On the CPU.
        key_padding_mask: bool [batch, keys], True where nobody sees the key.
        first_tokens: int64 [batch], the first token of each row that is not padding; None if all are 0.
        real_lengths: lengths without what lies before the first token, where that is padding. On the CPU.
        document_ids: int64 [batch, keys], tokens see each other only where it is the same.
    """

    COUNTS = ("lengths", "real_lengths")  # read to find blocks: on a GPU every layer would wait for them
    TENSORS = (*COUNTS, "key_padding_mask", "first_tokens", "document_ids")
    facts: Facts
    lengths: Tensor
    key_padding_mask: Tensor | None
    first_tokens: Tensor | None
    real_lengths: Tensor | None
    document_ids: Tensor | None

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], device: torch.device, facts: Facts, **tensors: Tensor | None) -> Mask:
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        self.facts = facts
        for name in cls.TENSORS:
            setattr(self, name, tensors.get(name))
        return self

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        names = [name for name in self.TENSORS if getattr(self, name) is not None]
        return names, (tuple(self.shape), self.device, self.facts)

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, Any], context: tuple[Any, ...], *_: Any) -> Mask:
        return Mask(*context, **tensors)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        aten, options = torch.ops.aten, kwargs or {}
        if func not in (aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default):
            _refuse_use(func, args, options)
        mask = args[0]
        if options.get("dtype", torch.bool) != torch.bool:
            _refuse_use(options["dtype"], args, options)
        names, (shape, device, facts) = mask.__tensor_flatten__()
        device = options.get("device", device)
        moved = {name: getattr(mask, name).to("cpu" if name in cls.COUNTS else device) for name in names}
        return cls(shape, device, facts, **moved)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Mask(shape={list(self.shape)}, {self.facts})"


def _refuse_use(use: object, *arguments: object) -> NoReturn:
    # No TypeError: Python would make "unsupported operand type(s) for +: 'Tensor' and 'Mask'" of it.
    model = next(x.facts.model for x in tree_leaves(arguments) if isinstance(x, Mask))
    raise ValueError(
        f"{model} cannot be given a pattern: it looks into the mask that it asks for ({use}), which is for attention "
        "by transformers' AttentionInterface alone; it attends, or chooses keys, by itself as well"
    )


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
    **of_other_masks: Any,
) -> Mask:
    """See `AttentionMaskInterface`.

    Args:
        anchored: whether a pattern depends on where the sequence begins.
        longest: sequence that patterns are registered for, if they are for one.
    """
    call = _call_of_model()
    rule = _understood(mask_function, call.model)
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
    tensors = {"lengths": torch.full((batch_size,), keys)}
    if attention_mask is not None:
        tensors |= _padding(attention_mask, kv_offset, kv_length, tensors["lengths"], call.model)
    if rule.document_ids is not None:
        tensors["document_ids"] = rule.document_ids
    elif rule.is_causal and not cached and "key_padding_mask" not in tensors:
        _refuse_packed(call, attention_mask)
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
    facts = Facts(
        model=call.model,
        is_causal=rule.is_causal,
        crosses=call.crosses,
        window=rule.window,
        cached=cached,
        dropped=kv_offset if anchored else 0,
        packed=rule.document_ids is not None,
        recomputed=keys if recomputed else None,
    )
    return Mask((batch_size, 1, q_length, kv_length), torch.device(device), facts, **tensors)


def _padding(attention_mask: Tensor, kv_offset: int, kv_length: int, lengths: Tensor, model: str) -> dict[str, Tensor]:
    """What a `Mask` holds of a mask of real tokens, (batch, seq)."""
    if attention_mask.ndim != 2:
        raise ValueError(f"attention_mask must be (batch, seq), got {list(attention_mask.shape)} ({model})")
    seen = attention_mask[:, : kv_offset + kv_length].bool()
    if seen.all():
        return {}
    tensors = {"key_padding_mask": ~pad(seen, (0, kv_offset + kv_length - seen.shape[1]))[:, kv_offset:]}
    first_tokens = seen.int().argmax(1)
    if first_tokens.any():
        tensors |= {"first_tokens": first_tokens, "real_lengths": lengths - first_tokens.cpu()}
    return tensors


def _chunks(chunk_size: int, left_padding: Tensor, kv_length: int, kv_offset: int) -> Tensor:
    """int64 [batch, keys], the chunk of each key, counted as `masking_utils.chunked_overlay` counts."""
    places = torch.arange(kv_offset, kv_offset + kv_length, device=left_padding.device)
    return (places - left_padding[:, None]) // chunk_size


def _both(document_ids: Tensor | None, chunks: Tensor) -> Tensor:
    """Ids that are the same where both are."""
    return chunks if document_ids is None else document_ids * chunks.shape[1] + chunks


def _refuse_packed(call: _Call, attention_mask: Tensor | None) -> None:
    """transformers tells documents apart only without a cache and without a mask; nobody else would say a word."""
    if call.past_key_values is None and attention_mask is None:
        return
    positions = call.position_ids
    if isinstance(positions, Tensor) and positions.ndim == 2 and (positions[:, 1:] == 0).any():
        raise ValueError(
            f"position_ids begin again at 0: packed documents are kept apart with use_cache=False and no "
            f"attention_mask alone, {call.model} got {'a cache' if attention_mask is None else 'an attention_mask'}"
        )


class _Call(NamedTuple):
    """What is known of the call of a model that asks for a mask."""

    model: str
    crosses: bool | None
    position_ids: Tensor | None
    past_key_values: object


def _call_of_model() -> _Call:
    """Found in the frames above: transformers does not pass on whose queries and keys a mask is for."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != masking_utils.__file__:
        frame = frame.f_back
    given = {} if frame is None else frame.f_locals
    while frame is not None and not isinstance(frame.f_locals.get("self"), nn.Module):
        frame = frame.f_back
    others = given.get("encoder_hidden_states")
    return _Call(
        model="the model" if frame is None else type(frame.f_locals["self"]).__name__,
        crosses=others is not None and others is not given["inputs_embeds"] if "inputs_embeds" in given else None,
        position_ids=given.get("position_ids"),
        past_key_values=given.get("past_key_values"),
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
