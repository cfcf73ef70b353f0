"""Compiling kernels before they are needed, in several processes at a time.

Triton compiles a kernel when it is first launched: seconds each, one after the other. `collected` keeps launches back
and notes what they want; `compile_all` has processes compile that into Triton's cache on disk, where the first real
launch finds it. A process that compiles takes no GPU: it is told which architecture to compile for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from . import decode, launch, launcher  # noqa: F401 - the kernels, for processes that import this file alone

# Kernels that write lists, by which PyTorch reads memory or which a layout keeps: these are launched, never kept back.
OF_LISTS = ("layouts", "select_features", "select_masses", "hopper_select", "select_lists", "united")

SIZES = {"shape", "strides"}  # of a descriptor: nothing that it is compiled by


class Wanted(NamedTuple):
    """A kernel that a launch wants, with its arguments as far as Triton compiles by them."""

    module: str
    kernel: str
    data: tuple[Any, ...]
    numbers: tuple[Any, ...]
    constants: dict[str, Any]

    @classmethod
    def of(cls, kernel: Any, data: Sequence[Any], numbers: tuple[Any, ...], constants: dict[str, Any]) -> Wanted:
        described = tuple(x.dtype if isinstance(x, Tensor) else _described(x) for x in data)
        return cls(kernel.__module__, kernel.__name__, described, numbers, constants)

    def found(self) -> Any:
        return getattr(sys.modules[self.module], self.kernel)

    def key(self) -> str:
        """Equal for launches that Triton compiles alike: of a number it looks at its type and at what divides it."""
        parameters = self.found().params[len(self.data) :]
        kinds = [
            (type(x), -(2**31) <= x < 2**31, not p.do_not_specialize and (x == 1, x % 16 == 0))
            for x, p in zip(self.numbers, parameters, strict=False)
        ]
        data = [
            x if isinstance(x, torch.dtype) else (x[:2], {k: x[2][k] for k in sorted(x[2].keys() - SIZES)})
            for x in self.data
        ]
        return repr((self[:2], data, kinds, self.constants))

    def compile(self) -> None:
        data = [torch.empty(16, dtype=x) if isinstance(x, torch.dtype) else _made(*x) for x in self.data]
        self.found().warmup(*data, *self.numbers, grid=(1,), **self.constants)


def _described(descriptor: Any) -> tuple[type, torch.dtype, dict[str, Any]]:
    return type(descriptor), descriptor.base.dtype, {k: x for k, x in vars(descriptor).items() if k != "base"}


def _made(kind: Any, dtype: torch.dtype, fields: dict[str, Any]) -> Any:
    made: Any = kind.__new__(kind)
    vars(made).update(fields, base=torch.empty(16, dtype=dtype))
    return made


@contextmanager
def collected() -> Iterator[dict[str, Wanted]]:
    """Launches inside are kept back, and what they want goes into what is yielded, once each."""
    wanted: dict[str, Wanted] = {}

    def keep_back(kernel: Any, data: Sequence[Any], numbers: tuple[Any, ...], constants: dict[str, Any]) -> bool:
        if kernel.__module__.rpartition(".")[2] in OF_LISTS:
            return False
        each = Wanted.of(kernel, data, numbers, constants)
        wanted.setdefault(each.key(), each)
        return True

    before, launcher.keep_back = launcher.keep_back, keep_back
    try:
        yield wanted
    finally:
        launcher.keep_back = before


def compile_all(wanted: Sequence[Wanted], processes: int, progress: Callable[[int, int], object]) -> None:
    """Compile these for the present device; `progress` is told how many of how many are done."""
    target = driver.active.get_current_target()
    given = tuple(vars(target).values())
    with ProcessPoolExecutor(processes, get_context("spawn"), _take_for, given) as pool:
        for done, _ in enumerate(pool.map(Wanted.compile, wanted), 1):
            progress(done, len(wanted))


class _Compiler:
    """As much of a driver as compiling asks for."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _take_for(*target: Any) -> None:
    """Make this process compile for a device that it need not have."""
    driver.set_active(_Compiler(GPUTarget(*target)))
