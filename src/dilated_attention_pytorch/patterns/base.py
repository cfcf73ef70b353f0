"""The pattern value, its two combinations, and one pattern per head."""

from __future__ import annotations

import abc
import ast
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar, NoReturn, TypeVar

from ..caches import cached

F = TypeVar("F", bound=Callable[..., Any])

_PACKAGE = __name__.partition(".")[0]
_classes: dict[str, type[Value]] = {}


class Value:
    """Base of frozen dataclasses whose text says all of them, in every process: equal values have equal texts.

    Graphs, and operators, take a text where they take no object. Subclasses with a `__post_init__` call this one last.
    """

    text: str  # not a field
    _name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        own = cls.__module__.startswith(f"{_PACKAGE}.")
        cls._name = cls.__name__ if own else f"{cls.__module__}.{cls.__name__}"
        if own:
            _classes[cls._name] = cls

    def __post_init__(self) -> None:
        fields = [f"{name}={_text_of(getattr(self, name))}" for name in self.__match_args__]  # type: ignore[attr-defined]
        object.__setattr__(self, "text", f"{self._name}({', '.join(fields)})")


def _text_of(field: object) -> str:
    """As `repr`, in steps that torch.compile can follow."""
    if isinstance(field, tuple) and field and isinstance(field[0], Value):
        return f"({', '.join([part.text for part in field])}{',' if len(field) == 1 else ''})"
    if isinstance(field, int) and not isinstance(field, bool):
        field = operator.index(field)  # a symbolic size
    return repr(field)


@cached(64, "patterns, scorers and selectors, by their text")
def value_of(text: str) -> Any:
    """The value with this text, of a class of this library."""
    return _read(ast.parse(text, mode="eval").body)


def _read(node: ast.expr) -> Any:
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        if name not in _classes:
            raise TypeError(f"a graph knows the patterns, scorers and selectors of this library alone, got {name}")
        return _classes[name](**{str(field.arg): _read(field.value) for field in node.keywords})
    if isinstance(node, ast.Tuple):
        return tuple(map(_read, node.elts))
    return ast.literal_eval(node)


def constant_in_graphs(function: F) -> F:
    """torch.compile then calls it while it traces, and takes what comes back for a constant.

    This is what torch.compiler.assume_constant_result does, without importing torch's whole compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class Pattern(Value, abc.ABC):
    """A rule on positions: may query *i* see key *j*? Subclasses are frozen dataclasses of integers."""

    @abc.abstractmethod
    def allows(self, query: int, key: int, seq_q: int, seq_k: int) -> bool:
        """True if query number `query` of `seq_q` may attend to key number `key` of `seq_k`."""

    @property
    def block_sizes(self) -> frozenset[int]:
        """The block sizes that the rule itself is written in; empty for rules on tokens."""
        return frozenset()

    def __and__(self, other: Pattern) -> Pattern:
        return _combine(And, self, other)

    def __or__(self, other: Pattern) -> Pattern:
        return _combine(Or, self, other)

    def __bool__(self) -> NoReturn:
        raise TypeError(f"{self} has no truth value; combine patterns with & and |, not with 'and' and 'or'")


def _combine(kind: type[And] | type[Or], left: Pattern, right: object) -> Pattern:
    if not isinstance(right, Pattern):
        return NotImplemented
    if isinstance(left, PerHead) or isinstance(right, PerHead):
        lefts, rights = _per_head(left, right)
        return PerHead(tuple(kind((a, b)) for a, b in zip(lefts, rights, strict=True)))
    return kind((left, right))


def _per_head(left: Pattern, right: Pattern) -> tuple[tuple[Pattern, ...], tuple[Pattern, ...]]:
    heads = [len(p.patterns) for p in (left, right) if isinstance(p, PerHead)]
    if len(set(heads)) > 1:
        raise ValueError(f"per-head patterns must have the same number of heads to be combined, got {heads}")
    lefts = left.patterns if isinstance(left, PerHead) else (left,) * heads[0]
    rights = right.patterns if isinstance(right, PerHead) else (right,) * heads[0]
    return lefts, rights


@dataclass(frozen=True)
class _Combination(Pattern):
    parts: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        # (a & b) & c and a & (b & c) are one value.
        if not self.parts:
            raise ValueError(f"{type(self).__name__} must have at least one part, got ()")
        flat = [q for p in self.parts for q in (p.parts if type(p) is type(self) else (p,))]
        object.__setattr__(self, "parts", tuple(dict.fromkeys(flat)))
        super().__post_init__()

    @property
    def block_sizes(self) -> frozenset[int]:
        return frozenset().union(*(p.block_sizes for p in self.parts))


@dataclass(frozen=True)
class And(_Combination):
    """Allowed where every part allows: `a & b`."""

    def allows(self, query: int, key: int, seq_q: int, seq_k: int) -> bool:
        return all(p.allows(query, key, seq_q, seq_k) for p in self.parts)


@dataclass(frozen=True)
class Or(_Combination):
    """Allowed where at least one part allows: `a | b`. A key still counts once."""

    def allows(self, query: int, key: int, seq_q: int, seq_k: int) -> bool:
        return any(p.allows(query, key, seq_q, seq_k) for p in self.parts)


@dataclass(frozen=True)
class PerHead(Pattern):
    """One pattern per head. `&` and `|` act head by head; `allows` is a question for one of `patterns`."""

    patterns: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        check_sequence("patterns", self.patterns, "patterns")
        object.__setattr__(self, "patterns", tuple(self.patterns))
        if not self.patterns:
            raise ValueError("patterns must hold at least one pattern, got ()")
        for p in self.patterns:
            if not isinstance(p, Pattern) or isinstance(p, PerHead):
                raise TypeError(f"patterns must hold one pattern per head, none of them per head itself, got {p!r}")
        super().__post_init__()

    def allows(self, query: int, key: int, seq_q: int, seq_k: int) -> bool:
        raise TypeError("a per-head pattern answers by head: ask per_head.patterns[h].allows(...)")

    @property
    def block_sizes(self) -> frozenset[int]:
        return frozenset().union(*(p.block_sizes for p in self.patterns))


# Larger integers than any count of tokens; sums and products of positions stay inside 64 bits.
LARGEST = 2**40


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error about a name that is not known, if it resembles one that is."""
    similar = get_close_matches(name, list(known), n=1)
    return f"; did you mean {similar[0]!r}?" if similar else ""


def shown(value: object) -> str:
    """A value as error messages show it: in one line, and of tensors and arrays the shape alone."""
    if hasattr(value, "shape") and not isinstance(value, type):
        return f"a {type(value).__name__.lower()} of shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 200 and "\n" not in text else type(value).__name__


def check_int(name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {shown(value)}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if value > LARGEST:
        raise ValueError(f"{name} must be at most {LARGEST}, got {value}")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {shown(value)}")


def check_sequence(name: str, value: object, of: str) -> None:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(f"{name} must be a sequence of {of}, got {shown(value)}")
