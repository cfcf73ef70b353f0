"""Launching a kernel again: what Triton finds out about a launch is remembered for the next one like it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST = 4096  # launches remembered; then all are forgotten


class Launched(NamedTuple):
    """A launch that was done: `run(*data, *rest)`."""

    run: Callable[..., None]
    data: tuple[Any, ...]
    rest: tuple[Any, ...]


_bound: dict[tuple[Any, ...], tuple[Callable[..., None], tuple[Any, ...]]] = {}


def launch(
    kernel: Any, grid: tuple[int, ...], data: tuple[Any, ...], numbers: tuple[Any, ...], **constants: Any
) -> Launched | None:
    """`kernel[grid](*data, *numbers, **constants)`, with a fraction of the work on the host from the second time on.

    A kernel's parameters come in this order. Triton compiles by the type of a pointer and its alignment, by the kind of
    copy that a descriptor describes, and by the numbers: launches that share these share what it compiled. (A number of
    one place has one type: 1 and 1.0 are the same here, and not to Triton.)

    Args:
        data: tensors and tensor descriptors, last a tensor, which says on which device.

    Returns:
        how to do it again; None in Triton's interpreter.
    """
    device = data[-1].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():  # Triton launches on the current one
        with torch.cuda.device(device):
            return launch(kernel, grid, data, numbers, **constants)
    key = kernel, device, grid, numbers, tuple(constants.values()), tuple(map(_kind, data))
    found = _bound.get(key)
    if found is not None:
        run, rest = found
        run(*data, *rest)
        return Launched(run, data, rest)
    compiled = kernel[grid](*data, *numbers, **constants)
    if compiled is None:  # Triton's interpreter
        return None
    if len(_bound) >= MOST:
        _bound.clear()
    rest = *numbers, *(constants[name] for name in kernel.arg_names[len(data) + len(numbers) :])
    run = compiled[(*grid, 1, 1)[:3]]
    _bound[key] = run, rest
    return Launched(run, data, rest)


def described_again(kind: Any, fields: dict[str, Any], x: Tensor) -> Any:
    """A descriptor of x with the fields of one that Triton has checked, which was of a tensor like it."""
    described = kind.__new__(kind)
    vars(described).update(fields, base=x)
    return described


def _kind(x: Any) -> tuple[Any, ...]:
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    return x.base.dtype, *x.block_shape


class Replay:
    """Launches of a call that was done, for calls that differ from it in their tensors alone.

    It is called with as many tensors as it was made from, in the same order; each must be like the one whose place it
    takes, in dtype, shape, strides and alignment.
    """

    def __init__(self, launches: list[tuple[Callable[..., None], list[tuple[int, Any]], tuple[Any, ...]]]) -> None:
        """For each launch what to run; of its data the place of a tensor, with the rest of a descriptor of it, or −1
        and what stays; and what comes behind the data."""
        self._launches = launches

    @classmethod
    def of(cls, launches: Iterable[Launched], tensors: Sequence[Tensor], kept: Iterable[Tensor]) -> Replay | None:
        """None where it cannot be told what is whose: a tensor in two places, or one that is neither among `tensors`
        nor among those that stay, `kept`."""
        places, stays = {id(x): place for place, x in enumerate(tensors)}, {id(x) for x in kept}
        if len(places) < len(tensors):
            return None
        found = []
        for run, data, rest in launches:
            slots: list[tuple[int, Any]] = []
            for x in data:
                base = x if isinstance(x, Tensor) else x.base
                if id(base) in places:
                    fields = None if base is x else (type(x), {**vars(x), "base": None})
                    slots.append((places[id(base)], fields))
                elif id(x) in stays:
                    slots.append((-1, x))
                else:
                    return None
            found.append((run, slots, rest))
        return cls(found)

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        device = tensors[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(tensors)
            return
        for run, slots, rest in self._launches:
            data = []
            for place, x in slots:
                if place < 0:
                    data.append(x)
                elif x is None:
                    data.append(tensors[place])
                else:
                    kind, fields = x
                    data.append(described_again(kind, fields, tensors[place]))
            run(*data, *rest)
