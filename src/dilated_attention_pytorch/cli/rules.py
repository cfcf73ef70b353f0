"""Who attends to whom in a model that is studied: a fixed pattern, or a choice of blocks from the content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..layout import BlockLayout
from ..layout.branches import layout_of_branches
from ..layout.checks import block_pair
from ..layout.lists import HOST
from ..models import LongNetLM
from ..nn import Adaptive
from ..nn.adaptive_rule import load_adaptive
from ..ops import TopK, block_sparse_attention, dilated_attention, select_blocks
from ..ops.grids import grid_of
from ..ops.select import scorer_of
from ..patterns import Branches, Pattern
from ..patterns.naming import pattern_of
from .call import BLOCK_SIZE, blocks_of
from .models import Found, attention_of, registered_in

BLOCKS_OF_CHOICE = "64x16"


@dataclass(frozen=True)
class Fixed:
    """A pattern, inside of what is causal."""

    name: str
    pattern: Pattern | Branches
    shares: list[float] = field(default_factory=list, compare=False)

    @classmethod
    def named(cls, name: str, block: str | None = None) -> Fixed:
        size = BLOCK_SIZE if block is None else blocks_of(block)
        block_pair(size)
        return cls(name, pattern_of(name, block_size=size if isinstance(size, int) else max(size), is_causal=True))

    @classmethod
    def of(cls, branches: Branches) -> Fixed:
        """Those of a LongNet, by the name that they have in a command."""
        segments, dilations = (",".join(map(str, x)) for x in (branches.segment_lengths, branches.dilation_rates))
        offsets = "" if branches.head_offsets == "interleaved" else f"/{branches.head_offsets}"
        return cls(f"longnet:{segments}/{dilations}{offsets}", branches)

    def layout(self, tokens: int, heads: int, device: torch.device) -> BlockLayout:
        if isinstance(self.pattern, Branches):
            return layout_of_branches(self.pattern, tokens, num_heads=heads, is_causal=True, device=device)
        size = min(self.pattern.block_sizes, default=BLOCK_SIZE)
        return BlockLayout.from_pattern(self.pattern, tokens, block_size=size, device=device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        layout = self.layout(q.shape[1], q.shape[2], q.device)
        self.shares.append(share_of_causal(layout))
        if isinstance(self.pattern, Branches):
            what = self.pattern
            out = dilated_attention(
                q, k, v, segment_lengths=what.segment_lengths, dilation_rates=what.dilation_rates,
                head_offsets=what.head_offsets, is_causal=True, scale=scale,
            )  # fmt: skip
        else:
            out = block_sparse_attention(q, k, v, layout, scale=scale)
        assert isinstance(out, Tensor)
        return out


@dataclass(frozen=True)
class Chosen:
    """Blocks that a scorer finds heavy, as many in all heads of a row together."""

    name: str
    scorer: Any
    selector: Any
    block_size: tuple[int, int]
    shares: list[float] = field(default_factory=list, compare=False)

    @classmethod
    def named(cls, scorer: str, keep: float, block: str | None = None) -> Chosen:
        size = block_pair(blocks_of(block or BLOCKS_OF_CHOICE))
        scorer_of(scorer)
        if not 0.0 < keep <= 1.0:
            raise ValueError(f"--keep must be the share of the causal blocks that is kept, in (0, 1], got {keep}")
        name = f"{scorer}, keeps {100 * keep:g} % of blocks {size[0]} x {size[1]}"
        return cls(name, scorer, TopK(keep, even=True, across_heads=True), size)

    def layout(self, layer: int, q: Tensor, k: Tensor, scale: float) -> BlockLayout:
        return select_blocks(
            q, k, scorer=self.scorer, selector=self.selector, block_size=self.block_size, is_causal=True, scale=scale
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        layout = self.layout(layer, q, k, scale)
        self.shares.append(share_of_causal(layout))
        out = block_sparse_attention(q, k, v, layout, scale=scale)
        assert isinstance(out, Tensor)
        return out


@dataclass(frozen=True)
class Registered:
    """What `integrations.huggingface.register` takes: the way of a user's model, prompts and generation alike."""

    name: str
    rule: Adaptive
    layers: Mapping[int, Adaptive | None] = field(default_factory=dict)
    shares: list[float] = field(default_factory=list, compare=False)

    @classmethod
    def of(cls, chosen: Chosen) -> Registered:
        rule = Adaptive(selector=chosen.selector, scorer=chosen.scorer, block_size=chosen.block_size, dense_below=0)
        return cls(chosen.name, rule)

    @classmethod
    def from_file(cls, path: Path) -> Registered:
        """What `calibrate` wrote; chosen at every length."""
        rule, layers = load_adaptive(path)
        of_layers = {number: replace(each, dense_below=0) for number, each in layers.items()}
        return cls(path.name, replace(rule, dense_below=0), of_layers)

    def share(self, tokens: int, heads: int, layers: int) -> float:
        """Of the causal blocks, the mean of all layers."""
        rules = [self.layers.get(layer, self.rule) for layer in range(layers)]
        return sum(1.0 if rule is None else _share_of_blocks(rule, tokens, heads) for rule in rules) / layers


def _share_of_blocks(rule: Adaptive, tokens: int, heads: int) -> float:
    if tokens <= rule.dense_on(HOST):
        return 1.0
    module = rule.module()
    grid = grid_of((tokens, tokens), block_pair(module.block_size), True, module.sink, module.local, HOST)
    return module.selector.max_blocks(grid, heads) / (sum(grid.num_visible) * heads)


Rule = Fixed | Chosen | Registered


def rules_of(
    patterns: Sequence[str], scorers: Sequence[str], keep: Sequence[float], block: str | None
) -> list[Fixed | Chosen]:
    """Those that options name: each pattern, and each scorer with each share; one choice where none is named."""
    if keep and patterns and not scorers:
        raise ValueError(f"--keep is a share for --scorer: a pattern says itself what it keeps, got {keep[0]}")
    fixed = [Fixed.named(name, block) for name in patterns]
    scorers = scorers or ([] if patterns else ["patches"])
    return [*fixed, *(Chosen.named(scorer, share, block) for scorer in scorers for share in (keep or [0.25]))]


def rule_of(
    pattern: str | None, scorer: str | None, keep: float | None, block: str | None, file: Path | None
) -> Rule | None:
    """The one that options name, as a user's model has it; None where they name none."""
    named = {"--pattern": pattern, "--scorer": scorer, "--rule": file}
    given = [name for name, x in named.items() if x is not None]
    if len(given) > 1:
        raise ValueError(f"attention must be one of {', '.join(named)}, got {' and '.join(given)}")
    if scorer is None:
        for name, x in (("--keep", keep), ("--block", block)):
            if x is not None:
                raise ValueError(f"{name} is for --scorer, got {x} without one")
    if pattern is not None:
        return Fixed.named(pattern)
    if file is not None:
        return Registered.from_file(file)
    return None if scorer is None else Registered.of(Chosen.named(scorer, 0.25 if keep is None else keep, block))


def check_rules(rules: Sequence[Rule], found: Found) -> None:
    """Refuse what the model cannot take, before it is loaded."""
    for rule in rules:
        if isinstance(rule, Registered) and found.is_longnet:
            raise ValueError(f"{rule.name} is for models of transformers, and {found.name} is a LongNet")
        if isinstance(rule, Fixed):
            if isinstance(rule.pattern, Branches) and not found.is_longnet:
                raise ValueError(
                    f"{rule.name} counts a key once for each branch, which is no pattern of a model of transformers"
                )
            if isinstance(rule.pattern, Pattern):
                found.check(rule.pattern)


def in_model(model: Any, rule: Rule) -> AbstractContextManager[None]:
    """Inside, the model attends by the rule. A model of transformers keeps what it hides itself from a pattern."""
    if isinstance(rule, Fixed) and not isinstance(model, LongNetLM):
        assert isinstance(rule.pattern, Pattern)
        return registered_in(model, rule.pattern)
    if isinstance(rule, Registered):
        return registered_in(model, rule.rule, rule.layers)
    return attention_of(model, rule.attend)


def share_of_causal(layout: BlockLayout) -> float:
    """Active pairs, of those that a causal model has."""
    return layout.density * 2 * layout.seq_q / (layout.seq_q + 1)
