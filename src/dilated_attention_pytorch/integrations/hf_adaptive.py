"""Attention of a registered `Adaptive`: whole sequences, single tokens over a cache, and what is kept beside the cache.

Summaries of the keys belong to the cache object, which may be copied, cut, reordered by a beam search and given to the
next call: `with_summaries` finds them there before the first layer of a call, makes them where there are none, and
gives them to the layers in the mask. Each layer brings its own up to date, inside of any graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

from ..caches import cached
from ..nn import Adaptive, BlockGate, BlockSparseAdaptive
from ..ops import BlockSummaries, TopK, block_sparse_attention, decode_attention
from ..ops.cache_blocks import chosen_blocks, update_columns
from ..ops.scores import Scorer
from ..patterns import Full
from .hf_mask import Mask, call_of_model, turned
from .hf_models import is_attention

MODULE = "block_sparse_adaptive"  # of an attention module, where blocks are chosen by a module of the model's own
TOKENS_AT_ONCE = 64  # that choose their blocks together, which bounds the memory of a long continuation


class Chooser(NamedTuple):
    """A rule, and the module that chooses by it."""

    rule: Adaptive
    module: BlockSparseAdaptive

    def inside(self, attention: nn.Module) -> Chooser:
        """With the module that the attention has for it, if there is one."""
        own = getattr(attention, MODULE, None)
        return self if own is None else Chooser(self.rule, own)

    @property
    def blocks(self) -> tuple[int, int]:
        size = self.module.block_size
        return size if isinstance(size, tuple) else (size, size)

    @property
    def is_open(self) -> bool:
        """Whether a schedule keeps it dense; in a graph, which serves all of the schedule, nobody asks."""
        return not torch.compiler.is_compiling() and self.module.opening == 1.0

    @property
    def step_scorer(self) -> Scorer:
        return self.rule.scorer_of_steps(self.module.scorer)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, lengths: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """Of whole sequences, each from its first token on; samples have so many tokens."""
        dense_below = self.rule.dense_on(q.device)
        plain = not self.module.gate_strength  # a gate's score counts where nothing is left out, too
        if plain and (k.shape[1] <= dense_below or self.is_open):
            out = block_sparse_attention(q, k, v, Full(), is_causal=is_causal, **options)
        else:
            masks = {name: options[name] for name in ("key_padding_mask", "document_ids")}
            own = {"lengths": lengths, "dense_below": dense_below, "scale": options["scale"]}
            layout = self.module.layout(q, k, is_causal, **masks, **own)
            if self.module.gate_strength:
                q, k, scale = self.module.gated(q, k, options["scale"], **masks)
                options = options | {"scale": scale}
            out = block_sparse_attention(q, k, v, layout, **options)
        assert isinstance(out, Tensor)
        return out

    @torch.no_grad()
    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: Tensor,
        hidden: Tensor | None,
        columns: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        """Of the last tokens of sequences whose keys lie in a cache. Without columns they are made of all keys."""
        if self.module.gate_strength:
            raise ValueError(
                f"gate_strength={self.module.gate_strength} cannot be honoured with a cache: a score needs what each "
                "key knew of its patch. Set it to 0, or generate with use_cache=False"
            )
        new, dense_below, selector = q.shape[1], self.rule.dense_on(q.device), self.module.selector
        if k.shape[1] <= dense_below or self.is_open:
            out = decode_attention(q, k, v, Full(), lengths=lengths, key_padding_mask=hidden, **options)
            assert isinstance(out, Tensor)
            return out
        if self.module.opening:
            selector = selector.opened(self.module.opening)
        assert isinstance(selector, TopK)
        scorer = self.step_scorer
        if columns is None:
            summaries = BlockSummaries(scorer, self.blocks)
            summaries.build(k, lengths, hidden)
            columns = summaries.columns
            assert columns is not None
        else:
            update_columns(columns, k, lengths, new, scorer, self.blocks[1], hidden)
        outs = []
        for start in range(0, new, TOKENS_AT_ONCE):
            some = q[:, start : start + TOKENS_AT_ONCE]
            until = lengths - (new - start - some.shape[1])
            blocks = chosen_blocks(
                some, columns, until, scorer, selector, self.blocks, capacity=k.shape[1], heads_kv=k.shape[2],
                sink=self.module.sink, local=self.module.local, per_kv_head=self.module.per_kv_head,
                scale=options["scale"], key_padding_mask=hidden, dense_below=dense_below,
            )  # fmt: skip
            out = decode_attention(some, k, v, blocks, lengths=until, key_padding_mask=hidden, **options)
            assert isinstance(out, Tensor)
            outs.append(out)
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)


def own_lengths(hidden: Tensor | None) -> Tensor | None:
    """Of each sample the tokens up to the last one that is not padding, int64 [batch]; None where all are real."""
    if hidden is None:
        return None
    place = torch.arange(1, hidden.shape[1] + 1, device=hidden.device)
    return place.masked_fill(hidden, 0).amax(1)


@dataclass(eq=False)
class Summaries:
    """Of a cache.

    Attributes:
        of_layers: by number.
        seen: tokens of the cache that they know.
        first_tokens: see `Mask`.
        modules: that choose blocks inside of the model, by the number of their layer.
    """

    of_layers: dict[int, BlockSummaries] = field(default_factory=dict)
    seen: int = 0
    first_tokens: Tensor | None = None
    modules: dict[int, BlockSparseAdaptive] = field(default_factory=dict)

    def forget(self) -> None:
        self.of_layers.clear()
        self.seen = 0

    def reorder(self, samples: Tensor) -> None:
        for summary in self.of_layers.values():
            if summary.columns is not None:
                summary.columns = summary.columns[samples.to(summary.columns.device)]


class _Summarised(Cache):
    """A cache whose summaries follow it where samples change their places."""

    block_summaries: Summaries

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self.block_summaries.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.block_summaries.forget()

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.block_summaries.forget()

    def crop(self, *args: Any, **kwargs: Any) -> None:
        super().crop(*args, **kwargs)
        self.block_summaries.seen = min(self.block_summaries.seen, int(self.get_seq_length()))

    def reset(self) -> None:
        super().reset()
        self.block_summaries.forget()


@cached(64, "classes of caches that keep summaries of their keys")
def _summarised(kind: type[Cache]) -> type[Cache]:
    return type(kind.__name__, (_Summarised, kind), {})


def _summaries_of(cache: Cache) -> Summaries:
    if not isinstance(cache, _Summarised):
        cache.__class__ = _summarised(type(cache))
        cache.block_summaries = Summaries()  # type: ignore[attr-defined]
    return cache.block_summaries  # type: ignore[attr-defined]


def with_summaries(mask: Mask, before: int, chooser_of: Callable[[int], Chooser | None]) -> Mask:
    """The mask of a call, with the columns of every layer that chooses blocks of keys in the call's cache, which holds
    so many tokens before the call."""
    call, facts = call_of_model(), mask.facts
    cache = call.past_key_values
    if not isinstance(cache, Cache) or not facts.is_causal or facts.window != (None, None):
        return mask
    summaries = _summaries_of(cache)
    if not facts.cached or facts.recomputed is not None:
        summaries.forget()
        summaries.modules = {
            part.layer_idx: getattr(part, MODULE)  # type: ignore[misc]
            for part in (() if call.module is None else call.module.modules())
            if hasattr(part, MODULE)
        }
        return mask
    new, capacity = mask.shape[-2:]
    lengths = mask.lengths if mask.places is None else mask.places
    if summaries.seen < before or not _same(summaries.first_tokens, mask.first_tokens):
        summaries.forget()
    summaries.seen, summaries.first_tokens = before + new, mask.first_tokens
    columns = {}
    layer: Any
    for number, layer in enumerate(cache.layers):
        chooser = chooser_of(number)
        if chooser is None or type(layer) not in (DynamicLayer, StaticLayer) or not layer.is_initialized:
            continue
        if capacity <= chooser.rule.dense_on(mask.device):
            summaries.of_layers.pop(number, None)
            continue
        chooser = chooser._replace(module=summaries.modules.get(number, chooser.module))
        columns[number] = _columns(summaries.of_layers, number, chooser, layer.keys, lengths - new, mask).detach()
    return mask.with_columns(columns)


def _columns(
    of_layers: dict[int, BlockSummaries], number: int, chooser: Chooser, keys: Tensor, lengths: Tensor, mask: Mask
) -> Tensor:
    """Of a layer, which know the tokens before those of this call and have room for them."""
    summary = of_layers.get(number)
    scorer, blocks = chooser.step_scorer, chooser.blocks
    same = summary is not None and (summary.scorer is scorer or summary.scorer == scorer) and summary.blocks == blocks
    if summary is None or not same or summary.columns is None or len(summary.columns) != len(keys):
        summary = of_layers[number] = BlockSummaries(scorer, blocks)
        k, hidden = keys.transpose(1, 2), mask.key_padding_mask
        hidden = None if hidden is None else hidden[:, : k.shape[1]]
        if mask.first_tokens is not None:
            k, hidden = turned(k, mask.first_tokens), turned(hidden, mask.first_tokens)
        with torch.no_grad():
            summary.build(k, lengths, hidden)
    return summary.with_room(mask.shape[-1])


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and one.equal(other))


def trainable(model: PreTrainedModel, *, gate_strength: float | None = None) -> dict[str, BlockSparseAdaptive]:
    """Give every attention that chooses blocks by a registered `Adaptive` a module of its own that does so.

    Modules that were given before are replaced. A `SparsitySchedule` of the model then opens and closes its attention.

    Args:
        model: that has a registered name.
        gate_strength: with a number the modules choose by a `BlockGate` each, whose parameters are the model's, and add
            so many times its score to the scores of what was chosen: the gate learns as the rest does. Set the
            attribute to 0 to generate with a cache. See `BlockSparseAdaptive`.

    Returns:
        The modules, by the names of their attentions.
    """
    name = model.config._attn_implementation
    attention = getattr(AttentionInterface().get(name), "__self__", None)
    if attention is None:
        raise ValueError(f"model must have a registered name, got {name!r}")
    made: dict[str, BlockSparseAdaptive] = {}
    for path, part in model.named_modules():
        rule = attention.rule_of(part) if is_attention(part) and hasattr(part, "layer_idx") else None
        if rule is None:
            continue
        options: dict[str, Any] = {}
        if gate_strength is not None:
            options = {"scorer": _gate_of(part), "gate_strength": gate_strength}
        made[path] = rule.module(**options).train(part.training)
        setattr(part, MODULE, made[path])
    if not made:
        raise ValueError(f"model must choose blocks by a registered Adaptive, and {name!r} names patterns alone")
    return made


def _gate_of(attention: nn.Module) -> BlockGate:
    """For the heads of an attention module, where its parameters are."""
    config: Any = attention.config
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(attention, "head_dim", None) or config.hidden_size // heads
    like = next(attention.parameters())
    return BlockGate(heads, head_dim, kv_heads, device=like.device, dtype=like.dtype)
