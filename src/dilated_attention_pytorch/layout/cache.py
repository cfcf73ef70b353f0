"""The cache of layouts: bounded, with least recently used eviction, and optionally on disk.

    cache = PersistentPatternCache(max_size=100, directory="~/.cache/layouts")
    layout = cache.layout(pattern, 131072, block_size=128, device="cuda")
    set_pattern_cache(cache)                     # from now on the cache of every call in this process

An entry is a pattern with its lengths and block size; its copies on several devices are one entry. Files are in the
safetensors format, written atomically and checked against a digest, so processes may share a directory. A file that is
truncated, foreign, modified or of another version is ignored with one warning, and the layout is built again.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import RLock
from typing import Any

import torch

from ..caches import register_cache
from ..patterns import Branches, Pattern
from ..patterns.base import check_int
from .branches import layout_of_branches
from .checks import check_layout
from .eager import plainly
from .layout import BlockLayout

CAPACITY = 100

FORMAT = "dilated-attention-layout"
VERSION = 3  # of the files, and of what a pattern means: another layout for the same pattern needs another number
LARGEST_HEADER = 1 << 20


Key = tuple[Hashable, ...]


def digest_of(key: Key) -> str:
    """The same in every process: patterns are values, and their text says all of them."""
    return hashlib.sha256(f"{FORMAT} {VERSION} {key!r}".encode()).hexdigest()


class PersistentPatternCache:
    """See the module docstring.

    Args:
        max_size: maximum number of entries in memory.
        max_bytes: maximum bytes in memory, including lists derived later (by key, for backward); None is no bound.
        directory: where to store layouts on disk, created if missing; needs safetensors. None stores none.
        cache_after: number of requests from which a pattern is kept; 2 keeps only patterns that are used again.
    """

    def __init__(
        self,
        max_size: int = CAPACITY,
        *,
        max_bytes: int | None = None,
        directory: str | os.PathLike[str] | None = None,
        cache_after: int = 1,
    ) -> None:
        check_int("max_size", max_size, least=1)
        check_int("cache_after", cache_after, least=1)
        if max_bytes is not None:
            check_int("max_bytes", max_bytes, least=1)
        self.max_size, self.max_bytes, self.cache_after = max_size, max_bytes, cache_after
        self.directory = None if directory is None else Path(directory).expanduser()
        if self.directory is not None:
            if find_spec("safetensors") is None:
                raise ImportError("directory needs safetensors: pip install safetensors")
            self.directory.mkdir(parents=True, exist_ok=True)
        self._reset()

    def _reset(self) -> None:
        self._lock = RLock()
        self._entries: OrderedDict[Key, dict[torch.device, BlockLayout]] = OrderedDict()
        self._asked: OrderedDict[Key, int] = OrderedDict()  # how often, of those not kept yet
        self._counts = {"hits": 0, "misses": 0, "built": 0, "loaded": 0, "evicted": 0}
        self._warned = False

    def layout(
        self,
        pattern: Pattern,
        seq_q: int,
        seq_k: int | None = None,
        *,
        block_size: int | tuple[int, int],
        device: torch.device | str = "cpu",
    ) -> BlockLayout:
        """`BlockLayout.from_pattern`, cached; usable in training whatever mode the first call ran in."""
        seq_k = seq_q if seq_k is None else seq_k
        make = partial(BlockLayout.from_pattern, pattern, seq_q, seq_k, block_size=block_size)
        return self.remembered((pattern, seq_q, seq_k, block_size), make, torch.device(device))

    def remembered(self, key: Key, make: Callable[..., BlockLayout], device: torch.device) -> BlockLayout:
        """The result of `make(device=device)`; `key` holds, as values, everything that it depends on."""
        with self._lock:
            copies = self._entries.get(key)
            if copies is not None:
                self._entries.move_to_end(key)
                if device in copies:
                    self._counts["hits"] += 1
                    return copies[device]
            self._counts["misses"] += 1
        # Not from the meta device, where lists have no numbers.
        held = next((layout for of, layout in (copies or {}).items() if of.type != "meta"), None)
        made = plainly(lambda: self._make(key, make, device) if held is None else held.to(device))
        with self._lock:
            if self._worth_keeping(key):
                copies = self._entries.setdefault(key, {})
                made = copies.setdefault(device, made)  # another thread may have been quicker
                self._evict()
        return made

    def _make(self, key: Key, make: Callable[..., BlockLayout], device: torch.device) -> BlockLayout:
        """From disk, or built; outside the lock, because either may take long."""
        loaded = None if self.directory is None else self._load(key)
        if loaded is not None:
            self._counts["loaded"] += 1
            return loaded.to(device)
        made = make(device=device)
        self._counts["built"] += 1
        if self.directory is not None and not made.dilated:  # such lists cannot be verified when they are loaded
            self._store(key, made)
        return made

    def _worth_keeping(self, key: Key) -> bool:
        if key in self._entries or self.cache_after == 1:
            return True
        asked = self._asked.pop(key, 0) + 1
        if asked >= self.cache_after:
            return True
        self._asked[key] = asked
        while len(self._asked) > 10 * self.max_size:
            self._asked.popitem(last=False)
        return False

    def _evict(self) -> None:
        def too_much() -> bool:
            return len(self._entries) > self.max_size or (self.max_bytes is not None and self.nbytes > self.max_bytes)

        while self._entries and too_much():
            self._entries.popitem(last=False)
            self._counts["evicted"] += 1

    @property
    def nbytes(self) -> int:
        """Bytes of all copies on all devices, counting each tensor once."""
        with self._lock:
            seen: dict[tuple[torch.device, int], int] = {}
            for copies in self._entries.values():
                for layout in copies.values():
                    seen |= {(t.device, t.untyped_storage().data_ptr()): t.nbytes for t in layout.tensors()}
        return sum(seen.values())

    def __len__(self) -> int:
        return len(self._entries)

    def stats(self) -> dict[str, Any]:
        """Hits, misses, how many were built, loaded and evicted, entries and bytes."""
        with self._lock:
            hits, misses = self._counts["hits"], self._counts["misses"]
            rate = hits / (hits + misses) if hits + misses else 0.0
            return {"cache_hit_rate": rate, **self._counts, "entries": len(self._entries), "bytes": self.nbytes}

    def clear(self) -> None:
        """Drop every layout from memory. Files stay."""
        with self._lock:
            self._entries.clear()
            self._asked.clear()

    def _load(self, key: Key) -> BlockLayout | None:
        assert self.directory is not None
        path = self.directory / f"{digest_of(key)}.safetensors"
        try:
            return _parsed(path.read_bytes(), key)
        except FileNotFoundError:
            return None
        except (OSError, _UnreadableError) as error:
            self._warn(f"ignored {path}: {error}; it is made again")
            return None

    def _store(self, key: Key, layout: BlockLayout) -> None:
        """To a temporary file and then renamed, so that no process reads a partial file."""
        assert self.directory is not None
        path = self.directory / f"{digest_of(key)}.safetensors"
        try:
            with tempfile.NamedTemporaryFile(dir=self.directory, prefix=".layout-", delete=False) as file:
                try:
                    file.write(_written(layout, key))
                    file.close()
                    os.replace(file.name, path)
                except BaseException:
                    os.unlink(file.name)
                    raise
        except OSError as error:
            self._warn(f"could not write {path}: {error}")

    def _warn(self, text: str) -> None:
        """Once: a directory of old files would else say it a hundred times."""
        if not self._warned:
            self._warned = True
            warnings.warn(f"PersistentPatternCache {text}", stacklevel=5)

    def __getstate__(self) -> dict[str, Any]:
        """The settings only: layouts can be built again."""
        return {name: getattr(self, name) for name in ("max_size", "max_bytes", "directory", "cache_after")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def __repr__(self) -> str:
        return f"PersistentPatternCache(max_size={self.max_size}, directory={self.directory}, entries={len(self)})"


_cache = PersistentPatternCache()


def layout_for(
    pattern: Pattern, seq_q: int, seq_k: int, block_size: int | tuple[int, int], device: torch.device
) -> BlockLayout:
    """The layout of a call, from the cache of this process."""
    return _cache.layout(pattern, seq_q, seq_k, block_size=block_size, device=device)


def layout_for_branches(
    branches: Branches, seq_q: int, seq_k: int, num_heads: int, is_causal: bool, device: torch.device
) -> BlockLayout:
    """The same of `layout_of_branches`."""
    make = partial(layout_of_branches, branches, seq_q, seq_k, num_heads=num_heads, is_causal=is_causal)
    return _cache.remembered((branches, seq_q, seq_k, num_heads, is_causal), make, device)


def pattern_cache() -> PersistentPatternCache:
    """The cache of this process."""
    return _cache


def set_pattern_cache(cache: PersistentPatternCache) -> PersistentPatternCache:
    """Make this the cache of the process; returns the previous one."""
    global _cache
    if not isinstance(cache, PersistentPatternCache):
        raise TypeError(f"cache must be a PersistentPatternCache, got {type(cache).__name__}")
    before, _cache = _cache, cache
    return before


def clear_layout_cache() -> None:
    """Drop every cached layout and free its memory. `clear_caches` empties all other caches too."""
    _cache.clear()


register_cache(
    "layout.cache._cache",
    "layouts of patterns, of the `PersistentPatternCache` of the process",
    bound=lambda: _cache.max_size,
    entries=lambda: len(_cache),
    clear=clear_layout_cache,
    nbytes=lambda: _cache.nbytes,
)


def load_layout(path: str | os.PathLike[str]) -> BlockLayout:
    """A layout that a cache with a directory has written there. It needs safetensors."""
    try:
        return _parsed(Path(path).read_bytes())
    except _UnreadableError as error:
        raise ValueError(f"{path} is no file of a PersistentPatternCache: {error}") from error


class _UnreadableError(Exception):
    """Why a file is not the layout that its name says."""


def _written(layout: BlockLayout, key: Key) -> bytes:
    """The layout as a safetensors file, without spare places, which nobody has written to."""
    from safetensors.torch import save

    if len(layout.by_query.indices) > layout.num_active_blocks:
        layout = replace(layout, by_query=layout.by_query.trimmed(), checked=True)
    tensors, sizes = layout.flatten()
    named = {f"{i:03}": tensor.cpu() for i, tensor in enumerate(tensors)}
    about = {
        "format": FORMAT,
        "version": str(VERSION),
        "key": digest_of(key),
        "sizes": json.dumps(sizes),
        "kind": layout.kind or "",
        "digest": hashlib.sha256(_split(save(named))[1]).hexdigest(),
    }
    return save(named, {"about": json.dumps(about)})  # one entry: it keeps no order among several


def _split(content: bytes) -> tuple[bytes, bytes]:
    """Header and data of a safetensors file: the length of a JSON header, the header, the tensors."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(LARGEST_HEADER, len(content) - 8):
        raise _UnreadableError("it is cut off, or no safetensors file")
    return content[8 : 8 + length], content[8 + length :]


def _parsed(content: bytes, key: Key | None = None) -> BlockLayout:
    """The inverse of `_written`; whatever is not as it should be is named. Without a key any pattern's will do."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    header, data = _split(content)
    try:
        about = json.loads(json.loads(header)["__metadata__"]["about"])
        name, version = about["format"], int(about["version"])
        if name != FORMAT:
            raise _UnreadableError(f"it holds {name!r} and no layout")
        if version != VERSION:
            raise _UnreadableError(f"it is of version {version}, this is version {VERSION}")
        if about["digest"] != hashlib.sha256(data).hexdigest():
            raise _UnreadableError("its content is cut off or was changed")
        if key is not None and about["key"] != digest_of(key):
            raise _UnreadableError("it is the layout of another pattern")
        tensors = [tensor for _, tensor in sorted(load(content).items())]
        sizes, kind = json.loads(about["sizes"]), about["kind"] or None
        layout = BlockLayout.unflatten(tensors, sizes)
        check_layout(layout)
    except (SafetensorError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise _UnreadableError(f"it is no layout ({error})") from error
    return BlockLayout.unflatten(tensors, sizes, kind)
