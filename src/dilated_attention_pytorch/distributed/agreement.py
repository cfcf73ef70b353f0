"""Ranks agree on what they are about to do together: a difference is an error on every rank, and names itself.

One small message when they agree; the words are exchanged only when they do not. The message may travel while the call
goes on (`Check`), as far as what is sent meanwhile cannot be taken for something else.
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import wraps
from hashlib import blake2b
from typing import NoReturn, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import _StopRecomputationError

from ..caches import cached, register_cache
from ..layout import BlockLayout
from ..patterns import RangePattern
from ..patterns.base import shown
from .control import Gathering, begin_gather, gather_texts
from .exchange import RingError, check_group

NUMBERS = 4  # that a rank tells the others besides, at most
WHAT = "the agreement on a call"
AGREEMENTS = ("always", "first", "never")

P = ParamSpec("P")
T = TypeVar("T")


def check_agreement(agreement: object) -> None:
    if agreement not in AGREEMENTS:
        raise ValueError(f"agreement must be one of {list(AGREEMENTS)}, got {shown(agreement)}")


def agree(group: dist.ProcessGroup, description: dict[str, str], *numbers: int, more: bool = False) -> Tensor:
    """[ranks, numbers]: those of every rank, if all describe the same; else an error that names the difference.

    `more`: the call has more to agree on before anything else is sent, and may still be refused.
    """
    if dist.get_world_size(group) == 1:
        return torch.tensor([numbers], dtype=torch.int64)
    told = Check(group, description, *numbers).settle()
    (_call.get() or _Call()).told = not more
    return told


class Check:
    """What this rank is about to do, on its way to the others: one small message, which nobody waits for before
    `settle`. All ranks of a group begin their checks in the same order.

    As a context: what stops this rank before it has settled is raised after it, so that no other rank waits.

    Attributes:
        tag: tells this call from all others of the group, the same on every rank that makes it.
    """

    def __init__(self, group: dist.ProcessGroup, description: dict[str, str], *numbers: int) -> None:
        self._group, self._description, self._count = group, description, len(numbers)
        own = digest(description)
        self.tag = call_tag(group, own)
        (_call.get() or _Call()).told = True
        told = [own, *numbers, *[0] * (NUMBERS - len(numbers))]
        self._gathering: Gathering | None = begin_gather(group, told, WHAT)
        self._numbers = torch.empty(0, dtype=torch.int64)

    def settle(self) -> Tensor:
        """[ranks, numbers], once all ranks have told theirs and describe the same; else an error that names the
        difference."""
        if self._gathering is None:
            return self._numbers
        gathering, self._gathering = self._gathering, None
        told = gathering.wait()
        if (told[:, 0] != told[0, 0]).any():
            _raise_difference(self._group, self._description)
        self._numbers = told[:, 1 : 1 + self._count]
        return self._numbers

    def __enter__(self) -> Check:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, Exception):
            self.settle()


def _raise_difference(group: dist.ProcessGroup, description: dict[str, str]) -> NoReturn:
    descriptions = [json.loads(text) for text in gather_texts(group, json.dumps(description), WHAT)]
    refusals = {rank: each["refused"] for rank, each in enumerate(descriptions) if "refused" in each}
    if refusals:
        told_by = "; ".join(f"rank {rank}: {reason}" for rank, reason in refusals.items())
        raise RingError(f"a rank refused the call that this one makes too ({told_by})")
    raise ValueError(f"the ranks of a ring must make the same call, but differ in {differences(descriptions)}")


_counts: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def call_tag(group: dist.ProcessGroup, what: int) -> int:
    """An even number below 2³¹ for the next call of a group: of this one, and of what it does."""
    _counts[group] = _counts.get(group, 0) + 1
    return digest(what, _counts[group]) % (1 << 30) * 2


class _Call:
    """A call that is being checked; `told`: the other ranks have heard of it."""

    told = False


_call: ContextVar[_Call | None] = ContextVar("a call over a ring", default=None)


@contextmanager
def broadcast_refusal(group: dist.ProcessGroup) -> Iterator[None]:
    """A call from its beginning: whatever stops it before `agree` is told to the others, so that they do not wait.

    A module's call holds that of its operator; the outermost tells.
    """
    if _call.get() is not None:
        yield
        return
    call = _Call()
    token = _call.set(call)
    try:
        yield
    except _StopRecomputationError:  # how activation checkpointing ends what it computes again: no refusal
        raise
    except Exception as error:
        if not call.told:
            reason = (str(error).splitlines() or [""])[0]
            with suppress(RingError):
                agree(group, {"refused": f"{type(error).__name__}: {reason}"})
        raise
    finally:
        _call.reset(token)


def told_to_all(group: dist.ProcessGroup | None) -> AbstractContextManager[None]:
    """`broadcast_refusal` where there is a ring, but not in a graph: what a trace refuses, it refuses on all ranks."""
    if group is None or torch.compiler.is_dynamo_compiling():
        return nullcontext()
    return broadcast_refusal(check_group(group))


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """`torch.compiler.disable`, but without loading the whole compiler with this package."""

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        compiler = sys.modules.get("torch._dynamo")
        return (compiler.disable(function) if compiler is not None else function)(*args, **options)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


KINDS = 1000
_kinds: WeakKeyDictionary[dist.ProcessGroup, OrderedDict[int, None]] = WeakKeyDictionary()
register_cache(
    "distributed.agreement._kinds",
    "kinds of calls that the ranks of a ring have agreed on, so many of each process group",
    bound=KINDS,
    entries=lambda: sum(len(kinds) for kinds in [*_kinds.values()]),
    clear=_kinds.clear,
)


def is_known(group: dist.ProcessGroup, kind: int) -> bool:
    """Whether the ranks have agreed on such a call before."""
    return kind in _kinds.get(group, ())


def remember_kind(group: dist.ProcessGroup, kind: int) -> None:
    kinds = _kinds.setdefault(group, OrderedDict())
    kinds[kind] = None
    if len(kinds) > KINDS:
        kinds.popitem(last=False)


def what_kind(what: object) -> str:
    """A layout or pattern without the numbers of its documents and other ranges: these differ from step to step."""
    if isinstance(what, RangePattern):
        return type(what).__name__
    parts = getattr(what, "parts", ()) or getattr(what, "patterns", ())
    inner = ", ".join(map(what_kind, parts))
    return f"{type(what).__name__}({inner})" if parts else fingerprint(what)


@cached(100, "layouts, patterns and placements as ranks compare them")
def fingerprint(what: object) -> str:
    """A layout, pattern or placement as the ranks compare it: short, and different for different values."""
    if isinstance(what, BlockLayout):
        tensors, sizes = what.flatten()
        return f"BlockLayout {sizes} {digest(*(x.tolist() for x in tensors)):x}"
    text = str(what)
    return text if len(text) <= 200 else f"{text[:180]}… {digest(text):x}"


def digest(*parts: object) -> int:
    """A number below 2⁶³ that tells these values, by how they print, apart."""
    text = "\0".join(map(str, parts))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def differences(descriptions: list[dict[str, str]]) -> str:
    """What the ranks disagree on, in words."""
    lines = []
    for name in dict.fromkeys(name for each in descriptions for name in each):
        values: dict[str, list[str]] = {}
        for rank, each in enumerate(descriptions):
            if name in each:
                values.setdefault(each[name], []).append(str(rank))
        if len(values) > 1:
            told_by = (f"{what} on rank {' and '.join(who)}" for what, who in values.items())
            lines.append(f"{name}: {', '.join(told_by)}")
    return "; ".join(lines)
