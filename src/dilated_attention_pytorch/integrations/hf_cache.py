"""`PatternCache`: a cache of transformers that drops the keys which a registered pattern no longer sees.

    register("streaming", presets.streaming_llm(window=1020, sinks=4))
    model.set_attn_implementation("streaming")
    cache = PatternCache(model.config)
    model.generate(prompt, past_key_values=cache)
    print(cache)   # PatternCache(30 layers: 30 keep 4 first and 1019 last tokens)

A layer keeps the first tokens that its pattern always sees and the last ones that its window reaches back to, whatever
the length of the text: `LookBack` says how many. Tokens come out as with a cache that keeps all, since every token has
the position that it has in the text. Keys are dropped once an eighth more than needed has gathered, and not at every
token, which would copy the cache each time.

Where there is padding on the left, the first tokens are those of each row. A row lies at the right end of its places,
as it does in a cache that keeps all.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from ..layout.look_back import LookBack, look_back
from ..patterns import Full, Pattern, SlidingWindow
from ..patterns.base import did_you_mean, shown
from .hf_models import NAMES

SLACK = 8  # of what must be kept, one part in so many may be there beside


class Kept(NamedTuple):
    """What a layer of a cache was made for.

    Attributes:
        pattern: its text.
        window: tokens before a query that the model itself lets it see; None is no bound.
        look_back: what is kept; None is everything.
    """

    pattern: str
    window: int | None
    look_back: LookBack | None


@dataclass
class Progress:
    """Where the call of a model is, which its layers are told by the mask that is made before them.

    Attributes:
        length: tokens so far, those of this call included.
        firsts: the first token of each row that is not padding; None if all are 0.
        picked: places of what stays, for layers that keep the same.
    """

    length: int = 0
    firsts: tuple[int, ...] | None = None
    picked: dict[Any, Tensor | None] = field(default_factory=dict)

    def announce(self, length: int, firsts: tuple[int, ...] | None, settled: int) -> None:
        if settled and firsts != self.firsts:
            self._check_padding(firsts, settled)
        self.length, self.firsts = length, firsts
        self.picked.clear()

    def _check_padding(self, firsts: tuple[int, ...] | None, settled: int) -> None:
        """Rows that had nothing but padding so far may begin; the others have begun."""
        rows = max(len(each) for each in (firsts, self.firsts) if each is not None)
        before, now = ((0,) * rows if each is None else each for each in (self.firsts, firsts))
        if len(before) != len(now):
            raise ValueError(f"a cache of {len(before)} rows cannot go on with {len(now)}")
        for row, (was, new) in enumerate(zip(before, now, strict=True)):
            if was != new and min(was, new) < settled:
                raise ValueError(
                    "attention_mask must hide the same tokens on the left as when the cache was filled: row "
                    f"{row} began at token {was}, and now begins at {new}, where keys may have been dropped"
                )

    def rows(self, index: list[int]) -> None:
        """Of these rows, in this order."""
        if self.firsts is not None:
            self.firsts = tuple(self.firsts[row] for row in index)


class PatternLayer(DynamicLayer):
    """One layer of a `PatternCache`.

    Attributes:
        look_back: what no later token sees is dropped.
        settled: tokens of the sequence when keys were last dropped.
        record_past: whether nothing is dropped before a call of `crop`.
    """

    def __init__(self, look_back: LookBack, progress: Progress) -> None:
        super().__init__()
        self.look_back, self.progress = look_back, progress
        self.cumulative_length = self.settled = 0
        self.record_past = False

    def activate_past_recording(self) -> None:
        self.record_past = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The keys and values that the new tokens may see: those that were kept, and their own."""
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise RuntimeError("PatternCache is for generating: use torch.no_grad(), or use_cache=False to train")
        length = self.cumulative_length + key_states.shape[2]
        if length != self.progress.length:
            raise ValueError(
                f"PatternCache was told of {self.progress.length} tokens and given {length}: the model must attend by "
                "the registered pattern that the cache is for, in all layers of every call"
            )
        keys, values = super().update(key_states, value_states)
        self.cumulative_length = length
        if not self.record_past:
            self._settle()
        return keys, values

    def _settle(self) -> None:
        """Drop what no later token sees."""
        assert self.keys is not None
        assert self.values is not None
        before, self.settled = self.settled, self.cumulative_length
        if self.progress.firsts is None:
            first = self.look_back.first
            more = self.look_back.dropped(self.settled) - self.look_back.dropped(before)
            if more:
                self.keys, self.values = (
                    torch.cat((x[:, :, :first], x[:, :, first + more :]), dim=2) for x in (self.keys, self.values)
                )
            return
        key = self.look_back, before, self.settled, self.keys.shape[2], self.keys.device
        if key not in self.progress.picked:
            self.progress.picked[key] = self._picked(before)
        places = self.progress.picked[key]
        if places is not None:
            self.keys, self.values = (
                torch.take_along_dim(x, places[:, None, :, None], dim=2) for x in (self.keys, self.values)
            )

    def _picked(self, before: int) -> Tensor | None:
        """int64 [batch, kept], the places of what stays, where rows begin at tokens of their own; None if all do."""
        assert self.progress.firsts is not None
        assert self.keys is not None
        firsts, first, length, places = self.progress.firsts, self.look_back.first, self.settled, self.keys.shape[2]
        dropped = [(self.look_back.dropped(before - f), self.look_back.dropped(length - f)) for f in firsts]
        kept = [max(length - f - gone, 0) for f, (_, gone) in zip(firsts, dropped, strict=True)]
        most = max(kept)
        if most == places:
            return None
        numbers = [
            (most - count, places - (length - f - was), gone - was)
            for f, (was, gone), count in zip(firsts, dropped, kept, strict=True)
        ]
        # Where a row begins among what stays, where it began among what is there, and how many places are dropped.
        begins, began, more = torch.tensor(numbers, device=self.keys.device).T[:, :, None]
        own = torch.arange(most, device=self.keys.device) - begins
        return torch.where(own < 0, 0, began + own + torch.where(own < first, 0, more))

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens, `tokens_to_remove` is negative; then drop what no later token sees."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be negative or 0, got {tokens_to_remove}")
        if not self.is_initialized:
            return
        if tokens_to_remove:
            left = self.cumulative_length + tokens_to_remove
            if left < self.settled and self.look_back.dropped(self.settled):
                raise RuntimeError(
                    f"PatternCache cannot go back to {left} tokens: keys that they see were dropped at {self.settled}; "
                    "call activate_past_recording before the tokens that may be taken back"
                )
            assert self.keys is not None
            assert self.values is not None
            self.keys, self.values = (x[:, :, :tokens_to_remove] for x in (self.keys, self.values))
            self.cumulative_length = left
        self._settle()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Of the whole sequence: what each layer has dropped, its attention leaves out of the mask."""
        return self.cumulative_length + query_length, 0

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def reset(self) -> None:
        super().reset()
        self.settled = 0


class PatternCache(Cache):
    """The keys and values that the layers of a model still see by their registered patterns.

    For `generate(…, past_key_values=PatternCache(model.config))`, and for calls of the model. Layers of a pattern that
    looks back without bound keep everything, with a warning if it is not `Full`; a cache in which all would is refused.

    Args:
        config: of a model that was given the name of a pattern (`register`).

    Attributes:
        kept: what each layer keeps, None where it has no keys (linear attention).
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config must be the configuration of a model, as in model.config, got {shown(config)}")
        text = config.get_text_config(decoder=True)
        name = text._attn_implementation
        if name not in NAMES:
            raise ValueError(
                f"PatternCache is for a model that was given the name of a registered pattern, got {name!r}"
                f"{did_you_mean(str(name), NAMES)}"
            )
        if config.is_encoder_decoder or getattr(text, "num_kv_shared_layers", None):
            raise ValueError(
                f"PatternCache is for decoders whose layers each have keys of their own, got a {config.model_type}"
            )
        self.progress = Progress()
        layers = [
            self._layer(number, own, NAMES[name](number))
            for number, own in enumerate(DynamicCache(config=config).layers)
        ]
        self.kept = tuple(kept for kept, _ in layers)
        self._check(name)
        super().__init__(layers=[layer for _, layer in layers])

    def _layer(self, number: int, own: Any, pattern: Pattern) -> tuple[Kept | None, Any]:
        """What a layer keeps, and the layer; `own` is that of a cache that knows the model alone."""
        if not isinstance(own, CacheLayerMixin):
            return None, own  # a state instead of keys
        if type(own) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ValueError(f"PatternCache cannot hold what layer {number} keeps, a {type(own).__name__}")
        window = own.sliding_window - 1 if isinstance(own, DynamicSlidingWindowLayer) else None
        found = look_back(pattern if window is None else pattern & SlidingWindow(window, None))
        if found is None:
            return Kept(pattern.text, window, None), DynamicLayer()
        steps = -(-((found.first + found.back) // SLACK) // found.step)
        found = replace(found, step=found.step * max(1, steps))
        return Kept(pattern.text, window, found), PatternLayer(found, self.progress)

    def _check(self, name: str) -> None:
        unbounded = dict.fromkeys(kept.pattern for kept in self.kept if kept is not None and kept.look_back is None)
        if not any(kept is not None and kept.look_back is not None for kept in self.kept):
            raise ValueError(
                f"the pattern {name!r} looks back without bound in every layer, so that no key could be dropped "
                f"(DynamicCache keeps all): {', '.join(unbounded)}"
            )
        others = [text for text in unbounded if text != Full().text]
        if others:
            warnings.warn(
                f"layers of {', '.join(others)} look back without bound: PatternCache keeps all of their keys",
                stacklevel=3,
            )

    @property
    def settled(self) -> int:
        """Tokens of the sequence when keys were last dropped; the same in all layers between calls."""
        return next(layer.settled for layer in self.layers if isinstance(layer, PatternLayer))

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values that are held."""
        held = (x for layer in self.layers for x in (getattr(layer, "keys", None), getattr(layer, "values", None)))
        return sum(x.nbytes for x in held if x is not None)

    def announce(self, length: int, firsts: tuple[int, ...] | None) -> None:
        """Before the layers of a call: how many tokens there are with the new ones, and where rows begin."""
        self.progress.announce(length, firsts, self.settled)

    def reset(self) -> None:
        super().reset()
        self.progress.length, self.progress.firsts = 0, None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self.progress.rows(beam_idx.tolist() if self.progress.firsts else [])

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.progress.rows([row for row in range(len(self.progress.firsts or ())) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        rows = torch.arange(len(self.progress.firsts or ()), device=indices.device)
        self.progress.rows(rows[indices].tolist() if self.progress.firsts else [])

    def __repr__(self) -> str:
        words = Counter(
            "have no keys"
            if kept is None
            else "keep all"
            if kept.look_back is None
            else f"keep {kept.look_back.first} first and {kept.look_back.back} last tokens"
            for kept in self.kept
        )
        parts = ", ".join(f"{count} {what}" for what, count in words.items())
        return f"PatternCache({len(self.kept)} layers: {parts})"
