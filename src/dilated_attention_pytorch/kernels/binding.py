"""Launching a kernel again: what Triton finds out about a launch is remembered for the next one like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MOST = 4096  # launches remembered; then all are forgotten

_bound: dict[tuple[Any, ...], tuple[Callable[..., None], tuple[Any, ...]]] = {}


def launch(
    kernel: Any, grid: tuple[int, ...], data: tuple[Any, ...], numbers: tuple[Any, ...], **constants: Any
) -> None:
    """`kernel[grid](*data, *numbers, **constants)`, with a fraction of the work on the host from the second time on.

    A kernel's parameters come in this order. Triton compiles by the type of a pointer and its alignment, by the kind of
    copy that a descriptor describes, and by the numbers: launches that share these share what it compiled. (A number of
    one place has one type: 1 and 1.0 are the same here, and not to Triton.)

    Args:
        data: tensors and tensor descriptors, last a tensor, which says on which device.
    """
    device = data[-1].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():  # Triton launches on the current one
        with torch.cuda.device(device):
            launch(kernel, grid, data, numbers, **constants)
        return
    key = kernel, device, grid, numbers, tuple(constants.values()), tuple(map(_kind, data))
    found = _bound.get(key)
    if found is not None:
        run, rest = found
        run(*data, *numbers, *rest)
        return
    compiled = kernel[grid](*data, *numbers, **constants)
    if compiled is None:  # Triton's interpreter
        return
    if len(_bound) >= MOST:
        _bound.clear()
    rest = tuple(constants[name] for name in kernel.arg_names[len(data) + len(numbers) :])
    _bound[key] = compiled[(*grid, 1, 1)[:3]], rest


def _kind(x: Any) -> tuple[Any, ...]:
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    return x.base.dtype, *x.block_shape
