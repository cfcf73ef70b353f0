"""Patterns in words: `pattern_of("window:512 | global:64")`, and back to Python: `code_of(pattern)`.

A name may have arguments behind a colon, separated by `/`; commas are for lists: `longnet:2048,4096/1,2`. Names combine
as patterns do, with `&` (both allow) and `|` (at least one allows; `+` is the same and needs no quotes in a shell), and
parentheses. A `;` stands between the patterns of different heads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from .base import And, Or, Pattern, PerHead, did_you_mean
from .blocks import RandomBlocks
from .branches import Branches
from .config import DEFAULT_DILATION_RATES, DEFAULT_SEGMENT_LENGTHS, HIERARCHICAL_PRESETS, SparsePatternConfig
from .ranges import BlockDiffusion, Chunks, Documents, DocumentSinks, KeyRanges, PrefixLM, VerticalSlash
from .space import Neighborhood, SlidingTiles
from .tokens import Causal, Full, GlobalTokens, SlidingWindow, StrictlyCausal

LONGEST_TEXT, MOST_PARENTHESES = 4096, 64


def _int(text: str) -> int:
    return int(text)


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _levels(text: str) -> str | list[tuple[int, int]]:
    if text in HIERARCHICAL_PRESETS:
        return text
    return [(int(stride), int(window)) for stride, window in (level.split("x") for level in text.split(","))]


def _queries(text: str) -> bool:
    return {"keys": False, "queries": True}[text]


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("x"))


def _order(text: str) -> tuple[int, ...] | None:
    return None if text == "rows" else _sizes(text)


def _dimensions(text: str) -> tuple[int, ...]:
    return () if text == "none" else tuple(int(part) for part in text.split(","))


def _neighborhood(values: Sequence[Any], block_size: int, is_causal: bool) -> Pattern:
    shape, window, dilation, dimensions, *rest = values
    if any(not 0 <= number < len(shape) for number in dimensions):
        raise ValueError(f"causal must name dimensions from 0 to {len(shape) - 1}, got {_text(dimensions)}")
    causal = tuple(number in dimensions for number in range(len(shape)))
    return Neighborhood(shape, window, dilation, causal, *rest)


# What an argument is, for errors.
_KINDS: dict[Callable[[str], Any], str] = {
    _int: "an integer",
    float: "a number",
    _ints: "integers with commas between them",
    _levels: f"one of {', '.join(HIERARCHICAL_PRESETS)}, or STRIDExWINDOW pairs with commas between them",
    _queries: "'keys' or 'queries'",
    _sizes: "sizes with x between them, as 30x48x80",
    _order: "'rows', or the sizes of a tile with x between them",
    _dimensions: "'none', or numbers of dimensions with commas between them, from 0",
    str: "a word",
}


@dataclass(frozen=True)
class Argument:
    """One argument of a name; `default` is the text that is taken where there is none, None if there must be one."""

    label: str
    read: Callable[[str], Any]
    default: str | None = None


@dataclass(frozen=True)
class Name:
    """A name that `pattern_of` knows.

    Attributes:
        meaning: for people, one line.
        make: (values of the arguments, block size, is_causal) → the pattern.
        example: arguments to begin with.
    """

    meaning: str
    make: Callable[[Sequence[Any], int, bool], Pattern | Branches]
    arguments: tuple[Argument, ...] = ()
    example: tuple[str, ...] = ()


def _config(pattern_type: str, *names: str) -> Callable[[Sequence[Any], int, bool], Pattern]:
    def make(values: Sequence[Any], block_size: int, is_causal: bool) -> Pattern:
        given = dict(zip(names, values, strict=False))
        config = SparsePatternConfig(pattern_type=pattern_type, block_size=block_size, **given)
        segments = dict(zip(("segment_lengths", "dilation_rates"), values[len(names) :], strict=False))
        return config.pattern(is_causal=is_causal, **segments)

    return make


def _text(values: Sequence[int]) -> str:
    return ",".join(map(str, values))


_SEGMENTS = Argument("segments", _ints, _text(DEFAULT_SEGMENT_LENGTHS))
_DILATIONS = Argument("dilations", _ints, _text(DEFAULT_DILATION_RATES))

NAMES: dict[str, Name] = {
    "full": Name("every query sees every key", lambda v, b, c: Full()),
    "causal": Name("no query sees a later key", lambda v, b, c: Causal()),
    "strictly_causal": Name("a query sees what is before it, and not itself", lambda v, b, c: StrictlyCausal()),
    "window": Name(
        "tokens before and after, to the token; one number is for both",
        lambda v, b, c: SlidingWindow(v[0], v[-1]),
        (Argument("left", _int), Argument("right", _int, "")),
        ("512", "0"),
    ),
    "global": Name(
        "the first tokens, and those at some positions, are seen by all; with /queries they also see all",
        lambda v, b, c: GlobalTokens(*v),
        (Argument("tokens", _int), Argument("sees", _queries, "keys"), Argument("at", _ints, "")),
        ("64", "queries", "300,301"),
    ),
    "prefix": Name(
        "causal, but the first tokens see each other and are seen by all; of each document, if there are lengths",
        lambda v, b, c: PrefixLM(*v),
        (Argument("tokens", _int), Argument("lengths", _ints, "")),
        ("64", "1024,512,2560"),
    ),
    "chunks": Name(
        "chunks of so many tokens see themselves and so many chunks before them",
        lambda v, b, c: Chunks(*v),
        (Argument("size", _int), Argument("left", _int, "0")),
        ("512", "1"),
    ),
    "vertical_slash": Name(
        "causal: keys at some positions, and at some distances before each query",
        lambda v, b, c: VerticalSlash(*v),
        (Argument("columns", _ints), Argument("diagonals", _ints)),
        ("0,1,900", "0,1,2,3,1024"),
    ),
    "block_diffusion": Name(
        "noised tokens, then as many clean ones, in blocks: training of block diffusion",
        lambda v, b, c: BlockDiffusion(*v),
        (Argument("length", _int), Argument("block", _int)),
        ("2048", "4"),
    ),
    "documents": Name(
        "packed documents of these lengths",
        lambda v, b, c: Documents(v[0]),
        (Argument("lengths", _ints),),
        ("1024,512,2560",),
    ),
    "document_sinks": Name(
        "the first tokens of each document are seen by all of it",
        lambda v, b, c: DocumentSinks(*v),
        (Argument("tokens", _int), Argument("lengths", _ints)),
        ("4", "1024,512,2560"),
    ),
    "ranges": Name(
        "stretches of queries that each see the keys from a start to before a stop",
        lambda v, b, c: KeyRanges(*v),
        (Argument("starts", _ints), Argument("stops", _ints), Argument("lengths", _ints)),
        ("0,1024,1024", "1024,1536,4096", "1024,512,2560"),
    ),
    "neighborhood": Name(
        "tokens of a grid (line, image, video) and a window around each; causal are the dimensions that are named",
        _neighborhood,
        (
            Argument("shape", _sizes),
            Argument("window", _sizes),
            Argument("dilation", _sizes, "1"),
            Argument("causal", _dimensions, "none"),
            Argument("stride", _sizes, "1"),
            Argument("prefix", _int, "0"),
            Argument("order", _order, "rows"),
            Argument("border", str, "shift"),
        ),
        ("16x16x16", "6x6x6", "1", "0", "1", "0", "4x4x8", "shift"),
    ),
    "sliding_tiles": Name(
        "tokens of a grid (line, image, video) in tiles, and a window of tiles around each",
        lambda v, b, c: SlidingTiles(*v),
        (
            Argument("shape", _sizes),
            Argument("tile", _sizes),
            Argument("window", _sizes),
            Argument("prefix", _int, "0"),
            Argument("order", _order, "rows"),
        ),
        ("16x16x16", "4x4x8", "12x12x8", "0", "4x4x8"),
    ),
    "random": Name(
        "so many random blocks a row",
        lambda v, b, c: RandomBlocks(v[0], v[1], b),
        (Argument("blocks", _int), Argument("seed", _int, "0")),
        ("3", "0"),
    ),
    "dilated_sparse": Name(
        "dilated segments in blocks, within a share of the blocks",
        _config("dilated_sparse", "sparsity_ratio"),
        (Argument("share kept", float, "0.1"), _SEGMENTS, _DILATIONS),
        ("0.2", "1024,2048,4096", "1,2,4"),
    ),
    "local_window": Name(
        "blocks within a window of tokens",
        _config("local_window", "local_window_size"),
        (Argument("tokens", _int, "512"),),
        ("512",),
    ),
    "global_local": Name(
        "local_window, and the blocks that hold the first tokens",
        _config("global_local", "local_window_size", "global_tokens"),
        (Argument("tokens", _int, "512"), Argument("first tokens", _int, "64")),
        ("512", "64"),
    ),
    "hierarchical": Name(
        "levels: within a window of tokens every stride-th block",
        _config("hierarchical", "levels"),
        (Argument("levels", _levels, "standard"),),
        ("1x512,4x4096",),
    ),
    "longnet": Name(
        "dilated attention: a key counts once for each branch that holds it",
        lambda v, b, c: Branches(*v),
        (_SEGMENTS, _DILATIONS, Argument("offsets", str, "interleaved")),
        ("1024,2048,4096", "1,2,4", "interleaved"),
    ),
}


def form_of(name: str) -> str:
    """How a name is written, as `window:LEFT[/RIGHT]`."""
    arguments = NAMES[name].arguments
    optional = [argument.default is not None for argument in arguments]
    parts = [
        f"{'[' * may}{'/' if i else ':'}{argument.label.upper().replace(' ', '_')}"
        for i, (argument, may) in enumerate(zip(arguments, optional, strict=True))
    ]
    return name + "".join(parts) + "]" * sum(optional)


def pattern_of(text: str, *, block_size: int = 128, is_causal: bool = False) -> Pattern | Branches:
    """The pattern that a text names; see the module's text.

    Args:
        block_size: of the names that are written in blocks.
        is_causal: without what comes after a query; the block rules then look back only, as the modules' do. Branches
            (`longnet`) come back as they are: `dilated_attention` has an argument for it.
    """
    if not isinstance(text, str):
        raise TypeError(f"pattern must be a str, got {text!r}")
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"pattern must have at most {LONGEST_TEXT} characters, got {len(text)}")
    if text.count("(") > MOST_PARENTHESES:
        raise ValueError(f"pattern must have at most {MOST_PARENTHESES} parentheses, got {text.count('(')}")
    return _Reader(text, block_size, is_causal).all_of_it()


class _Reader:
    """From left to right; a method for each level of binding."""

    def __init__(self, text: str, block_size: int, is_causal: bool) -> None:
        self.text, self.block_size, self.is_causal = text, block_size, is_causal
        self.rest = re.findall(r"[()&|+;]|[^()&|+;\s]+", text)[::-1]

    def all_of_it(self) -> Pattern | Branches:
        heads = [self._union()]
        while self._take(";"):
            heads.append(self._union())
        if self.rest:
            raise self._error(f"{self.rest[-1]!r} is not expected there")
        if len(heads) == 1 and isinstance(heads[0], Branches):
            return heads[0]
        patterns = [self._pattern(head) for head in heads]
        pattern = PerHead(tuple(patterns)) if len(patterns) > 1 else patterns[0]
        return pattern & Causal() if self.is_causal and pattern != Causal() else pattern

    def _union(self) -> Pattern | Branches:
        left = self._both()
        while self._take("|") or self._take("+"):
            left = self._pattern(left) | self._pattern(self._both())
        return left

    def _both(self) -> Pattern | Branches:
        left = self._one()
        while self._take("&"):
            left = self._pattern(left) & self._pattern(self._one())
        return left

    def _one(self) -> Pattern | Branches:
        if self._take("("):
            inner = self._union()
            if not self._take(")"):
                raise self._error("a ')' is missing")
            return inner
        if not self.rest or self.rest[-1] in "()&|+;":
            raise self._error("a name is missing" + (f" before {self.rest[-1]!r}" if self.rest else ""))
        return self._named(*self.rest.pop().partition(":"))

    def _named(self, name: str, colon: str, text: str) -> Pattern | Branches:
        if name not in NAMES:
            forms = ", ".join(map(form_of, NAMES))
            raise self._error(f"{name!r} is none of {forms}{did_you_mean(name, NAMES)}")
        known = NAMES[name]
        given = text.split("/") if colon else []
        needed = sum(argument.default is None for argument in known.arguments)
        if not needed <= len(given) <= len(known.arguments):
            raise self._error(f"{name} is written {form_of(name)}, got {len(given)} argument(s)")
        given += [argument.default or "" for argument in known.arguments[len(given) :]]
        values = [
            self._value(name, argument, each)
            for argument, each in zip(known.arguments, given, strict=True)
            if each or argument.default != ""
        ]
        return known.make(values, self.block_size, self.is_causal)

    def _value(self, name: str, argument: Argument, text: str) -> Any:
        try:
            return argument.read(text)
        except (ValueError, KeyError):
            raise self._error(f"{argument.label} of {name} must be {_KINDS[argument.read]}, got {text!r}") from None

    def _pattern(self, what: Pattern | Branches) -> Pattern:
        if isinstance(what, Branches):
            raise self._error("longnet stands alone: a key counts once for each branch, and a pattern counts it once")
        return what

    def _take(self, symbol: str) -> bool:
        found = bool(self.rest) and self.rest[-1] == symbol
        if found:
            self.rest.pop()
        return found

    def _error(self, what: str) -> ValueError:
        return ValueError(f"pattern {self.text!r}: {what}")


def code_of(what: Pattern | Branches) -> str:
    """Python that makes the same value, with the names of the package."""
    if what == Causal():
        return "Causal()"
    if isinstance(what, And | Or):
        inside = [f"({code_of(part)})" if isinstance(part, Or) else code_of(part) for part in what.parts]
        return (" & " if isinstance(what, And) else " | ").join(inside)
    if isinstance(what, PerHead):
        return f"PerHead(({', '.join(map(code_of, what.patterns))},))"
    given = [
        f"{field.name}={getattr(what, field.name)!r}"
        for field in fields(what)  # type: ignore[arg-type]
        if field.default is MISSING or getattr(what, field.name) != field.default
    ]
    return f"{type(what).__name__}({', '.join(given)})"
