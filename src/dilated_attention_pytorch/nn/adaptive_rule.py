"""`Adaptive`: how a model of others chooses its blocks, as a value."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..layout.checks import block_pair
from ..ops import Antidiagonal, SampledRows, TopK
from ..ops.scores import Scorer
from ..ops.select import scorer_of
from ..patterns.base import Value, check_flag, check_int, shown, value_of
from ..patterns.blocks import check_ratio
from .adaptive import BlockSparseAdaptive

# Tokens up to which dense attention is taken, by device. On a CPU the default choice did not pay at 1024, 4096 and 8192
# tokens (SmolLM2's heads, one thread of a busy machine), and hardly at 2048. That of a GPU was not measured.
DENSE_BELOW = {"cpu": 8192, "cuda": 8192}


@dataclass(frozen=True)
class Adaptive(Value):
    """Attention over blocks that are chosen from the content, for `integrations.huggingface.register`.

    Args:
        share: of the visible blocks that is KEPT. As many in every row, for which the heads compete
            (`TopK(share, even=True, across_heads=True)`).
        scorer, block_size, sink, local, per_kv_head: as in `select_blocks`.
        step_scorer: the scorer of single tokens over a cache. By default `scorer`, or "minmax" where that would keep a
            copy of the keys ("antidiagonal", "sampled", "exact").
        selector: `TopK` of another kind, instead of `share`.
        dense_below: samples of at most so many tokens are dense: a number, or one for each type of device, as in
            {"cpu": 1024}. By default that of `DENSE_BELOW`.
    """

    share: float | None = None
    scorer: str | Scorer = "patches"
    block_size: int | tuple[int, int] = (64, 16)
    sink: int = 1
    local: int = 1
    per_kv_head: bool = False
    step_scorer: str | Scorer | None = None
    selector: TopK | None = None
    dense_below: int | Mapping[str, int] | tuple[tuple[str, int], ...] | None = None

    def __post_init__(self) -> None:
        if (self.share is None) == (self.selector is None):
            raise ValueError(f"give share or a selector, got {shown(self.share)} and {shown(self.selector)}")
        if self.share is not None:
            check_ratio("share", self.share)
        if self.selector is not None and type(self.selector) is not TopK:
            raise TypeError(
                f"selector must be TopK(share), whose rows have budgets of their own, got {shown(self.selector)}"
            )
        if isinstance(self.block_size, Sequence):
            object.__setattr__(self, "block_size", block_pair(self.block_size))
        else:
            block_pair(self.block_size)
        scorer_of(self.scorer)
        if self.step_scorer is not None:
            scorer_of(self.step_scorer, "step_scorer")
        for name in ("sink", "local"):
            check_int(name, getattr(self, name), least=0)
        check_flag("per_kv_head", self.per_kv_head)
        if isinstance(self.dense_below, Mapping):
            object.__setattr__(self, "dense_below", tuple(sorted(self.dense_below.items())))
        by_device = self.dense_below if isinstance(self.dense_below, tuple) else (("", self.dense_below),)
        for _, most in by_device:
            if most is not None:
                check_int("dense_below", most, least=0)
        super().__post_init__()

    def module(self, **options: Any) -> BlockSparseAdaptive:
        """That chooses so; with further options, such as a gate as its scorer."""
        return BlockSparseAdaptive(
            **{
                "selector": self.selector or TopK(self.share or 1.0, even=True, across_heads=True),
                "scorer": self.scorer,
                "block_size": self.block_size,
                "sink": self.sink,
                "local": self.local,
                "per_kv_head": self.per_kv_head,
                **options,
            }
        )

    def scorer_of_steps(self, scorer: Scorer) -> Scorer:
        """That of single tokens, in a module with this scorer."""
        if self.step_scorer is not None:
            return scorer_of(self.step_scorer)
        return scorer_of("minmax") if isinstance(scorer, Antidiagonal | SampledRows) else scorer

    def dense_on(self, device: torch.device) -> int:
        """`dense_below` there."""
        if isinstance(self.dense_below, int):
            return self.dense_below
        given: Any = () if self.dense_below is None else self.dense_below
        return (DENSE_BELOW | dict(given)).get(device.type, 0)


def load_adaptive(path: str | Path) -> tuple[Adaptive, dict[int, Adaptive]]:
    """The rule of a file that `dilated-attention calibrate` wrote, and those of its layers."""
    if not Path(path).is_file():
        raise ValueError(f"pattern must be a Pattern, an Adaptive, or a file of one that exists, got {str(path)!r}")
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        rule, layers = document["rule"], document["layers"]
        of_layers = {int(number): _rule_of(rule | own) for number, own in layers.items()}
        return _rule_of(rule), of_layers
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} must be a file of `dilated-attention calibrate`: {error!r}") from error


def _rule_of(fields: dict[str, Any]) -> Adaptive:
    scorer = fields.get("scorer", "patches")
    return Adaptive(**fields | {"scorer": value_of(scorer) if "(" in scorer else scorer})
