"""Ranks agree on what they are about to do together: a difference is an error on every rank, and names itself.

One small message when they agree; the words are exchanged only when they do not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache, wraps
from hashlib import blake2b
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..layout import BlockLayout
from .control import gather_numbers, gather_texts
from .exchange import RingError

NUMBERS = 4  # that a rank tells the others besides, at most

P = ParamSpec("P")
T = TypeVar("T")


def agree(group: dist.ProcessGroup, description: dict[str, str], *numbers: int, more: bool = False) -> Tensor:
    """[ranks, numbers]: those of every rank, if all describe the same; else an error that names the difference.

    `more`: the call has more to agree on before anything else is sent, and may still be refused.
    """
    if dist.get_world_size(group) == 1:
        return torch.tensor([numbers], dtype=torch.int64)
    call = _call.get() or _Call()
    call.told = True
    what = "the agreement on a call"
    told = gather_numbers(group, [digest(description), *numbers, *[0] * (NUMBERS - len(numbers))], what)
    if (told[:, 0] != told[0, 0]).any():
        descriptions = [json.loads(text) for text in gather_texts(group, json.dumps(description), what)]
        refusals = {rank: each["refused"] for rank, each in enumerate(descriptions) if "refused" in each}
        if refusals:
            told_by = "; ".join(f"rank {rank}: {reason}" for rank, reason in refusals.items())
            raise RingError(f"a rank refused the call that this one makes too ({told_by})")
        raise ValueError(f"the ranks of a ring must make the same call, but differ in {differences(descriptions)}")
    call.told = not more
    return told[:, 1 : 1 + len(numbers)]


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
    except Exception as error:
        if not call.told:
            reason = (str(error).splitlines() or [""])[0]
            with suppress(RingError):
                agree(group, {"refused": f"{type(error).__name__}: {reason}"})
        raise
    finally:
        _call.reset(token)


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """`torch.compiler.disable`, but without loading the whole compiler with this package."""

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        compiler = sys.modules.get("torch._dynamo")
        return (compiler.disable(function) if compiler is not None else function)(*args, **options)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


@lru_cache(maxsize=100)
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
