"""Messages between the ranks of a ring: sent and received in the background, waited for, counted.

Knows nothing of attention. A rank that is gone makes `wait` raise a `RingError`, at the latest after the timeout of the
group (`init_process_group(timeout=…)`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

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
        return group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group must be one that this rank is in, got what new_group gives to the ranks outside")
    if hasattr(group, "get_group") and hasattr(group, "ndim"):
        if group.ndim != 1:
            raise ValueError(
                f"group must be a process group or a DeviceMesh of one dimension, got a mesh of {group.ndim}; "
                "take the dimension of the sequence, mesh['sequence']"
            )
        return group.get_group()
    raise TypeError(f"group must be a process group or a DeviceMesh, got {group!r}")


class Shared:
    """A value that copies of a module have in common, as a process group is."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
        return self


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
    """An exchange under way."""

    what: str
    works: list[tuple[str, Any]] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)  # what is being sent
    received: list[Tensor] = field(default_factory=list)
    device: torch.device | None = None  # where the received tensors belong, if not where they arrive

    def wait(self) -> list[Tensor]:
        """What was received. Once."""
        for peer, work in self.works:
            with or_broken(self.what, peer):
                work.wait()
        self.works, self.held = [], []
        received, self.received = self.received, []
        return [x.to(self.device) for x in received] if self.device is not None else received


def exchange(
    group: dist.ProcessGroup,
    what: str,
    *,
    send: tuple[int, Sequence[Tensor]] | None = None,
    receive: tuple[int, Sequence[Tensor]] | None = None,
    counted: bool = True,
) -> Pending:
    """Begin to send tensors to one rank and to receive into others from one rank; ranks are counted in the group.

    The tensors are contiguous. Those that are received into may be read after `wait`. `counted`: by `count_traffic`.
    """
    pending = Pending(what)
    works: list[tuple[str, dist.P2POp]] = []
    for is_send, message in ((True, send), (False, receive)):
        if message is None:
            continue
        peer, tensors = message
        # Gloo has no way from GPU to GPU: through the host's memory then.
        staged = tensors[0].device.type != "cpu" and dist.get_backend(group) == "gloo"
        if staged and not is_send:
            pending.device = tensors[0].device
        placed = [_on_host(x, copy=is_send) for x in tensors] if staged else list(tensors)
        operation, place = (dist.isend, "to") if is_send else (dist.irecv, "from")
        works += [(f"{place} rank {peer}", dist.P2POp(operation, x, group=group, group_peer=peer)) for x in placed]
        (pending.held if is_send else pending.received).extend(placed)
        if is_send and counted:
            for traffic in _counting:
                traffic.bytes += sum(x.numel() * x.element_size() for x in tensors)
                traffic.messages += len(tensors)
    if works:
        with or_broken(what, works[0][0]):
            begun = dist.batch_isend_irecv([operation for _, operation in works])
        # Some backends give one handle for all.
        names = [name for name, _ in works] if len(begun) == len(works) else ["with its neighbours"] * len(begun)
        pending.works = list(zip(names, begun, strict=True))
    return pending


def _on_host(x: Tensor, *, copy: bool) -> Tensor:
    return x.cpu() if copy else torch.empty_like(x, device="cpu")


_control: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def control_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks for small messages between hosts: the group itself where it speaks gloo."""
    if "gloo" in str(dist.get_backend_config(group)):
        return group
    if group not in _control:
        device = torch.device("cuda", torch.cuda.current_device())
        timeout: timedelta = group._get_backend(device).options._timeout
        _control[group] = dist.new_group(
            dist.get_process_group_ranks(group), timeout=timeout, backend="gloo", use_local_synchronization=True
        )
        # The first message on a group must come from all of its ranks.
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    return _control[group]


def gather_numbers(group: dist.ProcessGroup, numbers: Sequence[int], what: str) -> Tensor:
    """int64 [ranks, numbers], on the host: the numbers, below 2⁶³, of every rank. All ranks call it."""
    own = torch.tensor(numbers, dtype=torch.int64)
    told = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    with or_broken(what):
        dist.all_gather(told, own, group=control_group(group))
    return torch.stack(told)


def gather_objects(group: dist.ProcessGroup, value: Any, what: str) -> list[Any]:
    """The values of every rank. All ranks call it."""
    told: list[Any] = [None] * dist.get_world_size(group)
    with or_broken(what):
        dist.all_gather_object(told, value, group=control_group(group))
    return told
