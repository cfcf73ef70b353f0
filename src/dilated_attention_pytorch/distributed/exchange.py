"""Messages between the ranks of a ring: sent and received in the background, waited for, counted.

Knows nothing of attention. A rank that is gone makes `wait` raise a `RingError`, at the latest after the timeout of the
group (`init_process_group(timeout=…)`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..caches import cached

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Group: TypeAlias = "dist.ProcessGroup | DeviceMesh"


class RingError(RuntimeError):
    """Another rank did not do its part: it died, it hangs, or it refused the call."""


def check_group(group: Group) -> dist.ProcessGroup:
    """The process group that was given, by itself or as a DeviceMesh of one dimension."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("a ring needs a process group: call torch.distributed.init_process_group first")
    if isinstance(group, dist.ProcessGroup):
        try:
            dist.get_backend(group)
        except ValueError:
            raise ValueError("group must be one that exists, got one that was destroyed") from None
        return group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group must be one that this rank is in, got what new_group gives to the ranks outside")
    if hasattr(group, "get_group") and hasattr(group, "ndim"):
        if group.ndim != 1:
            raise ValueError(
                f"group must be a process group or a DeviceMesh of one dimension, got a mesh of {group.ndim}; "
                "take the dimension of the sequence, mesh['sequence']"
            )
        return check_group(group.get_group())
    raise TypeError(f"group must be a process group or a DeviceMesh, got {group!r}")


def backend_for(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """The backend that moves tensors of a device in this group, "nccl" say; None if none does.

    What has none of its own goes through the memory of the host, if gloo moves that.
    """
    backends = _backends(str(dist.get_backend_config(group)))
    through_host = "gloo" if backends.get("cpu") == "gloo" else None
    return backends.get(device.type, through_host)


@cached(128, "backends of process groups, by device")
def _backends(config: str) -> dict[str, str]:
    return {device: backend for device, _, backend in (pair.partition(":") for pair in config.split(","))}


def check_device(group: dist.ProcessGroup, device: torch.device, name: str) -> None:
    if device.type == "meta" or backend_for(group, device) is None:
        config = dist.get_backend_config(group)
        raise ValueError(f"{name} must be on a device that the group has a backend for, {config}, got {device}")


class Shared:
    """A value that copies of a module have in common, as a process group is."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a module over a ring cannot be pickled or saved whole, because its process group is one of this process: "
            "save module.state_dict()"
        )


@contextmanager
def or_broken(what: str, peer: str = "of all ranks") -> Iterator[None]:
    """Communication whose failure is a `RingError` that says what failed, and with whom."""
    try:
        yield
    except RuntimeError as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RingError(
            f"the ring is broken: {what} {peer} failed; that rank, or one it waits for, is gone or hangs ({reason})"
        ) from error


@dataclass
class Traffic:
    """Bytes and messages that this rank sent."""

    bytes: int = 0
    messages: int = 0


_counting: list[Traffic] = []


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count the keys, values, masks and gradients that this rank sends while the context is open."""
    traffic = Traffic()
    _counting.append(traffic)
    try:
        yield traffic
    finally:
        _counting.remove(traffic)


@dataclass
class Pending:
    """Messages under way: `wait` for what comes, then `finish` what goes. One that is dropped before takes its messages
    with it: gloo never sends them, and the other rank waits.

    Attributes:
        arriving, leaving: what is waited for, and with whom.
        held: what is being sent.
        received: where it arrives.
        device: where the received tensors belong, if not where they arrive.
    """

    what: str
    arriving: list[tuple[str, Any]] = field(default_factory=list)
    leaving: list[tuple[str, Any]] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)
    received: list[Tensor] = field(default_factory=list)
    device: torch.device | None = None

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (*self.held, *self.received))

    def wait(self) -> list[Tensor]:
        """What was received, once it is here. Once. What is sent may still be on its way."""
        self._wait(self.arriving)
        received, self.received = self.received, []
        return [x.to(self.device) for x in received] if self.device is not None else received

    def finish(self) -> None:
        """Wait until what is sent has left."""
        self._wait(self.leaving)
        self.held = []

    def _wait(self, works: list[tuple[str, Any]]) -> None:
        while works:
            peer, work = works.pop(0)
            with or_broken(self.what, peer):
                work.wait()


def exchange(
    group: dist.ProcessGroup,
    what: str,
    *,
    tag: int = 0,
    send: tuple[int, Sequence[Tensor]] | None = None,
    receive: tuple[int, Sequence[Tensor]] | None = None,
) -> Pending:
    """Begin to send tensors to one rank and to receive into others from one rank; ranks are counted in the group.

    The tensors are contiguous. Those that are received into may be read after `wait`.

    Args:
        tag: messages of another tag are never taken for these, over gloo.
    """
    pending = Pending(what)
    works: list[tuple[str, dist.P2POp]] = []
    for is_send, message in ((True, send), (False, receive)):
        if message is None:
            continue
        peer, tensors = message
        placed = _placed(group, pending, tensors, copy=is_send)
        operation, place = (dist.isend, "to") if is_send else (dist.irecv, "from")
        works += [
            (f"{place} rank {peer}", dist.P2POp(operation, x, group=group, tag=tag, group_peer=peer)) for x in placed
        ]
        (pending.held if is_send else pending.received).extend(placed)
        if is_send:
            _count(tensors)
    if works:
        with or_broken(what, works[0][0]):
            begun = dist.batch_isend_irecv([operation for _, operation in works])
        if len(begun) == len(works):
            num_sent = len(pending.held)
            named = [(name, work) for (name, _), work in zip(works, begun, strict=True)]
            pending.leaving, pending.arriving = named[:num_sent], named[num_sent:]
        else:  # one handle for all
            pending.arriving = [("with its neighbours", work) for work in begun]
    return pending


def broadcast(group: dist.ProcessGroup, what: str, source: int, tensors: Sequence[Tensor]) -> Pending:
    """Begin to send tensors of one rank to all, who receive into theirs. All ranks call it."""
    pending, is_source = Pending(what), dist.get_rank(group) == source
    placed = _placed(group, pending, tensors, copy=is_source)
    with or_broken(what, f"from rank {source}"):
        works = [dist.broadcast(x, group=group, group_src=source, async_op=True) for x in placed]
    pending.arriving = [(f"from rank {source}", work) for work in works]
    if is_source:
        _count(tensors)
        pending.held, pending.leaving, pending.arriving = placed, pending.arriving, []
    else:
        pending.received = placed
    return pending


def add_up(group: dist.ProcessGroup, what: str, target: int, tensors: Sequence[Tensor]) -> Pending:
    """Begin to add the tensors of all ranks up at one, which receives the sums. All ranks call it."""
    pending, is_target = Pending(what), dist.get_rank(group) == target
    placed = _placed(group, pending, tensors, copy=True)
    with or_broken(what, f"to rank {target}"):
        works = [dist.reduce(x, group=group, group_dst=target, async_op=True) for x in placed]
    named = [(f"to rank {target}", work) for work in works]
    if is_target:
        pending.received, pending.arriving = placed, named
    else:
        _count(tensors)
        pending.held, pending.leaving = placed, named
    return pending


def of_first_rank(group: dist.ProcessGroup, x: Tensor, what: str) -> Tensor:
    """The first rank's value of a tensor, where the tensor is. All ranks call it."""
    (placed,) = _placed(group, Pending(what), [x], copy=True)
    with or_broken(what, "from rank 0"):
        dist.broadcast(placed, group=group, group_src=0)
    return placed.to(x.device)


def _placed(group: dist.ProcessGroup, pending: Pending, tensors: Sequence[Tensor], *, copy: bool) -> list[Tensor]:
    """The tensors where the group moves them: gloo has no way from GPU to GPU, they go through the host's memory."""
    device = tensors[0].device
    if device.type == "cpu" or backend_for(group, device) != "gloo":
        return list(tensors)
    pending.device = device
    return [_on_host(x, copy=copy) for x in tensors]


def _count(tensors: Sequence[Tensor]) -> None:
    for traffic in _counting:
        traffic.bytes += sum(x.numel() * x.element_size() for x in tensors)
        traffic.messages += len(tensors)


def _on_host(x: Tensor, *, copy: bool) -> Tensor:
    return x.cpu() if copy else torch.empty_like(x, device="cpu")


_started: WeakKeyDictionary[dist.ProcessGroup, set[torch.device]] = WeakKeyDictionary()


def start(group: dist.ProcessGroup, device: torch.device) -> None:
    """Before the first exchange of a device's tensors: the first message of NCCL must come from all ranks of a group,
    and in an exchange some have nothing to send. All ranks call it."""
    backend, started = backend_for(group, device), _started.setdefault(group, set())
    if backend == "gloo" or device in started:
        return
    try:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    except RuntimeError as error:
        raise RingError(
            f"the ring cannot start: a first message of all ranks over {backend}, on {device} here, failed; every rank "
            f"needs a device of its own that reaches those of the others ({' '.join(str(error).split())})"
        ) from error
    started.add(device)
