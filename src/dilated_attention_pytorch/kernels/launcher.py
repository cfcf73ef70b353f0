"""Launching a kernel again: what Triton finds out about a launch is remembered for the next one like it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..caches import cached, register_container

try:
    from triton.backends.nvidia import driver
except ImportError:  # a Triton for other devices, which runs the kernels in its interpreter at most
    driver = None

MOST = 1 << 14  # launches remembered; then all are forgotten
MOST_ADDRESSES = 64  # of one tensor of a call, whose descriptions are remembered
# How Triton 3.6 calls its launcher in C: the grid, the stream, the function, ...; the kernel's arguments behind that.
_KNOWN_LAUNCHER = "iiiKKppOOOOOO"
_STREAM, _ARGUMENTS = 3, len(_KNOWN_LAUNCHER)


class Direct(NamedTuple):
    """Triton's launcher in C, without the Python before it, which takes as long as everything else in a call.

    Attributes:
        run: the launcher.
        head: what it is given before a kernel's arguments; the stream is to be filled in.
        metas: how each descriptor among these is encoded.
    """

    run: Callable[..., None]
    head: tuple[Any, ...]
    metas: Sequence[Any]

    @classmethod
    def of(cls, compiled: Any, grid: tuple[int, ...]) -> Direct | None:
        """None where this Triton launches in another way, or needs memory for it."""
        if getattr(driver, "_BASE_ARGS_FORMAT", None) != _KNOWN_LAUNCHER:
            return None
        launcher = compiled.run
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            return None
        run, metas = launcher.launch, ()
        if isinstance(run, FunctionType):  # it encodes descriptors and goes on
            wrapped = inspect.getclosurevars(run).nonlocals
            run, metas = wrapped.get("launcher"), wrapped.get("tensordesc_meta", (None,))
            if run is None or None in metas:  # another Triton, or not for the copy engine
                return None
        options = launcher.launch_cooperative_grid, launcher.launch_pdl
        head = *grid, None, compiled.function, *options, None, None, compiled.packed_metadata, None, None, None
        return cls(run, head, metas)

    def arguments(self, data: Iterable[Any], rest: Iterable[Any]) -> list[Any]:
        """Of a launch, without the stream. Addresses are ints, which the launcher does not ask the device about."""
        found, metas = [*self.head], iter(self.metas)
        for x in data:
            if isinstance(x, Tensor):
                found.append(x.data_ptr())
            else:
                found += driver.make_tensordesc_arg(x, next(metas))
        return [*found, *rest]


class Bound(NamedTuple):
    """A kernel that was compiled, with all that a launch needs but its data."""

    run: Callable[..., None]  # with the data and the rest
    rest: tuple[Any, ...]
    direct: Direct | None

    def __call__(self, data: Sequence[Any]) -> None:
        if self.direct is None or launch_hooks_active():
            self.run(*data, *self.rest)
        else:
            arguments = self.direct.arguments(data, self.rest)
            arguments[_STREAM] = _stream(data[-1].device)
            self.direct.run(*arguments)


class Launched(NamedTuple):
    """A launch that was done."""

    bound: Bound
    data: tuple[Any, ...]


# Where kernels are compiled ahead: whether a launch is to be left out (`kernels.ahead`).
keep_back: Callable[[Any, Sequence[Any], tuple[Any, ...], dict[str, Any]], bool] | None = None


def _run(compiled: Any, grid: tuple[int, ...], *arguments: Any) -> None:
    compiled[grid](*arguments)


class Compiled(NamedTuple):
    """What Triton compiled for launches that share all it looks at, with the constants among their arguments."""

    compiled: Any
    constants: tuple[Any, ...]
    direct: Direct | None

    def bound(self, grid: tuple[int, ...], numbers: tuple[Any, ...]) -> Bound:
        direct = self.direct
        if direct is not None:
            direct = Direct(direct.run, (*grid, *direct.head[3:]), direct.metas)
        return Bound(partial(_run, self.compiled, grid), (*numbers, *self.constants), direct)


_compiled: dict[tuple[Any, ...], Compiled] = {}
register_container(_compiled, "kernels.launcher._compiled", "compiled kernels, ready to be launched", bound=MOST)


def launch(
    kernel: Any, grid: tuple[int, ...], data: tuple[Any, ...], numbers: tuple[Any, ...], **constants: Any
) -> Launched | None:
    """`kernel[grid](*data, *numbers, **constants)`, with a fraction of the work on the host from the second time on.

    A kernel's parameters come in this order. Triton compiles by the type of a pointer and its alignment, by the kind of
    copy that a descriptor describes, and by the kinds of the numbers: launches that share these share what it compiled.

    Args:
        data: tensors and tensor descriptors, last a tensor, which says on which device.

    Returns:
        how to do it again; None in Triton's interpreter, and for a launch that is kept back.
    """
    device = data[-1].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():  # Triton launches on the current one
        with torch.cuda.device(device):
            return launch(kernel, grid, data, numbers, **constants)
    whole_grid = (*grid, 1, 1)[:3]
    kinds = tuple(map(_kind, data)), _kinds_of_numbers(kernel, len(data), numbers)
    key = kernel, device, tuple(constants.values()), kinds
    known = _compiled.get(key)
    if known is not None:
        found = known.bound(whole_grid, numbers)
        found(data)
        return Launched(found, data)
    if keep_back is not None and keep_back(kernel, data, numbers, constants):
        return None
    compiled = kernel[grid](*data, *numbers, **constants)
    if compiled is None:  # Triton's interpreter
        return None
    if len(_compiled) >= MOST:
        _compiled.clear()
    rest = tuple(constants[name] for name in kernel.arg_names[len(data) + len(numbers) :])
    _compiled[key] = known = Compiled(compiled, rest, Direct.of(compiled, whole_grid))
    return Launched(known.bound(whole_grid, numbers), data)


def _kinds_of_numbers(kernel: Any, start: int, numbers: tuple[Any, ...]) -> tuple[Any, ...]:
    """What Triton compiles by: the type of each, and where a kernel does not say otherwise whether it is 1 or a
    multiple of 16. So another length compiles nothing, and is no new entry."""
    looked_at = _looked_at(kernel, start, len(numbers))
    if looked_at is None:  # interpreted: nothing is compiled
        return numbers
    wide = () if not numbers or (max(numbers) < 2**31 and min(numbers) >= -(2**31)) else tuple(map(_is_wide, numbers))
    closer = tuple([(x == 1, x % 16 == 0) for x in [numbers[i] for i in looked_at] if type(x) is int])
    return tuple(map(type, numbers)), wide, closer


def _is_wide(x: Any) -> bool:
    return type(x) is int and not -(2**31) <= x < 2**31


@cached(256, "numbers of kernels that Triton looks closer at")
def _looked_at(kernel: Any, start: int, num: int) -> tuple[int, ...] | None:
    """Their places among the numbers, which begin behind `start` parameters."""
    parameters = getattr(kernel, "params", None)
    if parameters is None:
        return None
    return tuple(i for i, parameter in enumerate(parameters[start : start + num]) if not parameter.do_not_specialize)


def _kind(x: Any) -> tuple[Any, ...]:
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    return x.base.dtype, *x.block_shape


def launch_hooks_active() -> bool:
    """A profiler, to whom Triton tells every launch."""
    runtime = triton.knobs.runtime
    hooks = runtime.launch_enter_hook, runtime.launch_exit_hook  # chains of calls, or None, or one to be called
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)


def _stream(device: torch.device) -> int:
    return torch._C._cuda_getCurrentRawStream(device.index)


class Address(NamedTuple):
    """Stands for a tensor where nothing else of it matters."""

    at: int

    def data_ptr(self) -> int:
        return self.at


def described_again(kind: Any, fields: dict[str, Any], x: Any) -> Any:
    """A descriptor of x with the fields of one that Triton has checked, which was of a tensor like it."""
    described = kind.__new__(kind)
    described.__dict__.update(fields, base=x)
    return described


class Descriptions(dict[int, Any]):
    """Of tensors that differ in their address alone: what Triton encodes of a descriptor, by address."""

    def __init__(self, described: Any, meta: Any) -> None:
        self._kind, self._fields, self._meta = type(described), {**vars(described), "base": None}, meta

    def again(self, x: Any) -> Any:
        return described_again(self._kind, self._fields, x)

    def __missing__(self, address: int) -> Any:
        if len(self) >= MOST_ADDRESSES:
            self.clear()
        encoded, *_ = driver.make_tensordesc_arg(self.again(Address(address)), self._meta)
        self[address] = encoded
        return encoded


class Slot(NamedTuple):
    """A tensor of a call among the arguments of a launch."""

    tensor: int  # its place in the call,
    data: int  # in the data of the launch,
    argument: int  # and in what its launcher in C is given
    descriptions: Descriptions | None  # where not itself but a descriptor of it is wanted


class Replay:
    """Launches of a call that was done, for calls that differ from it in their tensors alone.

    It is called with as many tensors as it was made from, in the same order; each must be like the one whose place it
    takes, in dtype, shape, strides and alignment.
    """

    def __init__(
        self,
        launches: list[tuple[Bound, list[Any], list[Slot]]],
        direct: list[tuple[Direct, list[Any], list[Slot]]] | None,
        num_tensors: int,
    ) -> None:
        """For each launch the kernel, its data without the tensors of the call, and where these belong; and the same
        with the arguments of a direct launch, if all of them can be that."""
        self._launches, self._direct, self.num_tensors = launches, direct, num_tensors

    @classmethod
    def of(
        cls, launches: Iterable[Launched | None], tensors: Sequence[Tensor], kept: Iterable[Tensor]
    ) -> Replay | None:
        """None where one was interpreted, or it cannot be told what is whose: a tensor in two places, or one that is
        neither among `tensors` nor among those that stay, `kept`."""
        places, stays = {id(x): place for place, x in enumerate(tensors)}, {id(x) for x in kept}
        if len(places) < len(tensors):
            return None
        plain, direct = [], []
        for each in launches:
            if each is None:
                return None
            bound, data = each
            slots, argument = list[Slot](), _ARGUMENTS
            metas = iter(bound.direct.metas if bound.direct else ())
            for i, x in enumerate(data):
                base = x if isinstance(x, Tensor) else x.base
                descriptions = None if base is x else Descriptions(x, next(metas, None))
                if id(base) in places:
                    slots.append(Slot(places[id(base)], i, argument, descriptions))
                elif id(x) not in stays:
                    return None
                argument += 1 if base is x else 1 + 2 * len(x.shape)  # with its shape and strides
            plain.append((bound, _without(data, [slot.data for slot in slots]), slots))
            if bound.direct is not None:
                arguments = bound.direct.arguments(data, bound.rest)
                direct.append((bound.direct, _without(arguments, [slot.argument for slot in slots]), slots))
        return cls(plain, direct if len(direct) == len(plain) else None, len(tensors))

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        device = tensors[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(tensors)
        elif self._direct is not None and not launch_hooks_active():
            stream, addresses = _stream(device), [x.data_ptr() for x in tensors]
            for direct, arguments, slots in self._direct:
                arguments = arguments.copy()
                arguments[_STREAM] = stream
                for tensor, _, argument, descriptions in slots:
                    address = addresses[tensor]
                    arguments[argument] = address if descriptions is None else descriptions[address]
                direct.run(*arguments)
        else:
            for bound, data, slots in self._launches:
                data = data.copy()
                for tensor, i, _, descriptions in slots:
                    x = tensors[tensor]
                    data[i] = x if descriptions is None else descriptions.again(x)
                bound.run(*data, *bound.rest)


def repeat(
    notes: dict[Any, Replay],
    key: object,
    tensors: Sequence[Tensor],
    kept: Iterable[Tensor],
    do: Callable[[], list[Launched | None]],
) -> None:
    """The launches of `do`, on these tensors and those that stay, `kept`; from the second time on without it.

    Args:
        key: all that the launches depend on besides, and of the tensors what `like` says.
    """
    known = notes.get(key)
    if known is not None:
        known(tensors)
        return
    replay = Replay.of(do(), tensors, kept)
    if replay is not None:
        if len(notes) >= MOST:
            notes.clear()
        notes[key] = replay


def like(x: Tensor) -> tuple[Any, ...]:
    """What a tensor must share with another one to take its place in a `Replay`."""
    return x.dtype, x.shape, x.stride(), x.data_ptr() % 16 == 0


def _without(values: Iterable[Any], places: Iterable[int]) -> list[Any]:
    found = [*values]
    for place in places:
        found[place] = None
    return found
