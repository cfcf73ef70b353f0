"""The memory that a call of `blockwise` works in."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import ClassVar

import torch
from torch import Tensor

from ..caches import register_cache
from ..memory import active_source
from .base import compute_dtype

LEFT = 1 << 26  # most bytes that calls on a CPU leave to the next


class Scratch:
    """Named buffers that a call reuses for all its tiles: page faults of fresh memory cost more than the arithmetic.

    They come from `memory.active_source()` if there is one, and are free again when the call has ended. Without one, a
    call on a CPU leaves its buffers, up to `LEFT` bytes of them, to the next call.
    """

    idle: ClassVar[list[tuple[int, dict[str, Tensor]]]] = []  # of calls that have ended: bytes and buffers

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._dtype = compute_dtype(like.dtype)
        self._source = active_source()
        self._buffers: dict[str, Tensor] = {}
        if self._lasts:
            with suppress(IndexError):  # there is none
                _, self._buffers = self.idle.pop()

    def __call__(self, name: str, *shape: int) -> Tensor:
        """An uninitialised buffer in the compute dtype; what had this name before is overwritten."""
        size = math.prod(shape)
        held = self._buffers.get(name)
        if held is None or held.numel() < size or held.dtype != self._dtype:
            held = self._buffers[name] = self._new(name, size)
        return held[:size].view(shape)

    def end(self) -> None:
        """The call has ended."""
        size = sum(held.nbytes for held in self._buffers.values())
        if self._lasts and size + sum(idle for idle, _ in [*self.idle]) <= LEFT:
            self.idle.append((size, self._buffers))
        self._buffers = {}

    @property
    def _lasts(self) -> bool:
        return self._source is None and self._like.device.type == "cpu"

    def _new(self, name: str, size: int) -> Tensor:
        if self._source is None:
            with torch.inference_mode(False):  # another call may be in another mode
                return self._like.new_empty(size, dtype=self._dtype)
        return self._source.buffer(name, size, self._dtype, self._like.device)


register_cache(
    "backends.scratch.Scratch.idle",
    f"buffers of `blockwise` that no call uses, up to {LEFT >> 20} MiB",
    bound=None,
    entries=Scratch.idle.__len__,
    clear=Scratch.idle.clear,
    nbytes=lambda: sum(size for size, _ in [*Scratch.idle]),
)
