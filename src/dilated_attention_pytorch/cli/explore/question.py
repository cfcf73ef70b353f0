"""What the page asks about, read from the words of a request and refused where it is too much for a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...memory.devices import GPUS
from ...ops.select import SCORERS
from ...ops.selectors import Selector, SharedBudget, TopK
from ...patterns.blocks import BLOCK_SIZES
from ...patterns.naming import NAMES, form_of
from ...viz.memory import KIND_COLOURS
from ...viz.states import Region
from ..call import BLOCK_SIZE, DTYPES
from ..output import Document

CELLS = 256  # a side of the picture
LIMITS = {"tokens": 1 << 20, "heads": 64, "batch": 1024, "head_dim": 256, "layers": 64, "blocks": 1 << 20}
# The scores of all pairs of the samples are looked at: some seconds.
MOST_SAMPLED = {"tokens": 4096, "heads": 16, "batch": 4}
BUDGETS = {
    "even": "rows of blocks get the same number, for which heads compete",
    "same": "every row of every head keeps the same share",
    "shared": "all rows and heads share one budget",
}


def options() -> Document:
    """What the page offers."""
    return {
        "names": [
            {
                "name": name,
                "form": form_of(name),
                "meaning": known.meaning,
                "arguments": [argument.label for argument in known.arguments],
                "example": list(known.example),
            }
            for name, known in NAMES.items()
        ],
        "block_sizes": list(BLOCK_SIZES),
        "dtypes": list(DTYPES),
        "devices": devices(),
        "scorers": list(SCORERS),
        "budgets": BUDGETS,
        "kinds": KIND_COLOURS,
        "limits": LIMITS,
    }


def devices() -> list[str]:
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else []), *GPUS]


@dataclass(frozen=True, kw_only=True)
class Question:
    """A call of attention, and the part of it that is looked at.

    Attributes:
        scorer: blocks are chosen by it from sample activations, beside the pattern; empty: the pattern alone.
        kept, budget: per cent of the blocks that are chosen, and how they are shared out, see `BUDGETS`.
        first_query, first_key, span: what is drawn; the whole sequence without a span.
        query, layers: a query whose keys are shown, and what it reaches in so many layers.
    """

    pattern: str = "window:512"
    tokens: int = 4096
    heads: int | None = None
    heads_kv: int | None = None
    batch: int = 1
    head_dim: int = 64
    block_size: int | None = None
    causal: bool = False
    dtype: str = "bfloat16"
    device: str = "cpu"
    training: bool = False
    scorer: str = ""
    kept: float = 25.0
    budget: str = "even"
    head: int = 0
    first_query: int = 0
    first_key: int = 0
    span: int | None = None
    query: int | None = None
    layers: int = 4

    @classmethod
    def read(cls, words: Mapping[str, str]) -> Question:
        given: dict[str, Any] = {}
        for name, word in words.items():
            if name not in cls.__dataclass_fields__:
                raise ValueError(f"a request may name {', '.join(cls.__dataclass_fields__)}, got {name!r}")
            given[name] = _READERS[str(cls.__dataclass_fields__[name].type).removesuffix(" | None")](name, word)
        return cls(**given)

    def __post_init__(self) -> None:
        for name in ("tokens", "heads", "heads_kv", "batch", "head_dim", "layers"):
            value, most = getattr(self, name), LIMITS["heads" if name == "heads_kv" else name]
            if value is not None and not 1 <= value <= most:
                raise ValueError(f"{name} must be from 1 to {most:,} on this page, got {value:,}")
        for name, known in (
            ("dtype", list(DTYPES)),
            ("device", devices()),
            ("scorer", ["", *SCORERS]),
            ("budget", list(BUDGETS)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if not 0 < self.kept <= 100:
            raise ValueError(f"kept must be above 0 and at most 100 per cent, got {self.kept:g}")
        for name in ("first_query", "first_key", "query"):
            value = getattr(self, name)
            if value is not None and value >= self.tokens:
                raise ValueError(f"{name} must be from 0 to {self.tokens - 1:,}, got {value:,}")
        if self.span is not None and self.span < 1:
            raise ValueError(f"span must be at least 1, got {self.span}")
        if self.scorer:
            for name, most in MOST_SAMPLED.items():
                if (getattr(self, name) or 1) > most:
                    raise ValueError(
                        f"{name} must be at most {most:,} where blocks are chosen from samples, "
                        f"got {getattr(self, name):,}"
                    )

    def of_layout(self) -> Question:
        """The same for every question whose layouts are the same."""
        return replace(
            self, dtype="float32", device="cpu", training=False, head=0, query=None, layers=1,
            first_query=0, first_key=0, span=None,
        )  # fmt: skip

    @property
    def region(self) -> Region | None:
        return None if self.span is None else Region(self.first_query, self.first_key, self.span)

    @property
    def selector(self) -> Selector:
        share = self.kept / 100
        if self.budget == "shared":
            return SharedBudget(share)
        return TopK(share, even=True, across_heads=True) if self.budget == "even" else TopK(share)

    @property
    def chosen_block(self) -> int:
        """Tokens of a block where blocks are chosen."""
        return self.block_size or BLOCK_SIZE


def _flag(name: str, word: str) -> bool:
    if word not in ("0", "1"):
        raise ValueError(f"{name} must be 0 or 1, got {word!r}")
    return word == "1"


def _integer(name: str, word: str) -> int:
    if not word.isascii() or not word.isdecimal() or len(word) > 12:
        raise ValueError(f"{name} must be a positive integer, got {word!r}")
    return int(word)


def _number(name: str, word: str) -> float:
    if not word.isascii() or not word.replace(".", "", 1).isdecimal() or len(word) > 12:
        raise ValueError(f"{name} must be a positive number, got {word!r}")
    return float(word)


_READERS = {"str": lambda name, word: word, "bool": _flag, "int": _integer, "float": _number}
