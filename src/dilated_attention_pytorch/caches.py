"""Every cache of the process: its name, what it holds, and how many entries it may have.

    @cached(64, "patterns read from their text")
    def value_of(text): ...

A function of values is `cached`; one that makes tensors is a `plain_cache`, and one that torch.compile traces a
`value_cache` (`layout/eager.py`), which are made of it. Any other container that outlives a call is registered with
`register_cache`. `clear_caches` empties all of them, `cache_report` says how full they are.

What a layout remembers of its calls is kept in the layout and goes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
_PACKAGE = __name__.partition(".")[0]


class _Cache(NamedTuple):
    holds: str
    bound: Callable[[], int | None]
    entries: Callable[[], int]
    clear: Callable[[], object]
    nbytes: Callable[[], int] | None


class CacheInfo(NamedTuple):
    """One cache as it is now.

    Attributes:
        name: the module that has it, and its name there.
        holds: what it holds.
        entries, bound: how many entries it has, and may have; no bound where `holds` gives one in bytes.
        nbytes: bytes of the tensors in it; None where they are not counted.
    """

    name: str
    holds: str
    entries: int
    bound: int | None
    nbytes: int | None


_caches: dict[str, _Cache] = {}


def register_cache(
    name: str,
    holds: str,
    *,
    bound: int | Callable[[], int] | None,
    entries: Callable[[], int],
    clear: Callable[[], object],
    nbytes: Callable[[], int] | None = None,
) -> None:
    """Make a cache known. `entries` and `clear` may be called from any thread at any time.

    Args:
        name: its module, within the package, and its name there.
    """
    assert name not in _caches, name
    _caches[name] = _Cache(holds, bound if callable(bound) else lambda: bound, entries, clear, nbytes)


def register_container(container: Sized, name: str, holds: str, *, bound: int) -> None:
    """`register_cache` for a dict or list."""
    register_cache(name, holds, bound=bound, entries=container.__len__, clear=container.clear)  # type: ignore[attr-defined]


def cached(bound: int, holds: str) -> Callable[[F], F]:
    """`functools.lru_cache`, registered."""

    def decorate(function: F) -> F:
        found = lru_cache(bound)(function)
        name = f"{function.__module__.removeprefix(f'{_PACKAGE}.')}.{function.__qualname__}"
        register_cache(
            name, holds, bound=bound, entries=lambda: found.cache_info().currsize, clear=found.cache_clear
        )  # fmt: skip
        return found  # type: ignore[return-value]

    return decorate


def cache_report() -> list[CacheInfo]:
    """All caches of the modules that are loaded, by name."""
    return [
        CacheInfo(name, each.holds, each.entries(), each.bound(), None if each.nbytes is None else each.nbytes())
        for name, each in sorted(_caches.items())
    ]


def clear_caches() -> None:
    """Empty every cache of the library in this process, and free the memory of what nothing else holds.

    Results stay the same: what is needed again is made again. Calls that run in other threads meanwhile are not
    disturbed. Files of a `PersistentPatternCache` stay, and so do layouts, pools and modules that you hold.
    """
    for each in list(_caches.values()):
        each.clear()
