"""Small messages between the hosts of a ring: what the ranks agree on, and what they ask each other for.

They go over gloo, so that nothing waits for a GPU: over the ring's own group where that speaks gloo between hosts, else
over a second one.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange import backend_for, or_broken

CPU = torch.device("cpu")

_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def control_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks that speaks gloo between hosts. All ranks ask for it together.

    A second one is none of `torch.distributed`'s own: `new_group` takes all ranks of the world, or else gives a name
    that depends on how many groups a rank is in, which may be one more on one rank than on another.
    """
    if backend_for(group, CPU) == "gloo":
        return group
    if group not in _groups:
        with or_broken("the making of its group for small messages"):
            _groups[group] = _made(group)
    return _groups[group]


def _made(group: dist.ProcessGroup) -> dist.ProcessGroup:
    rank, size = group.rank(), group.size()
    timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    # What all of them have in common is the store of the world and who they are. Two groups of the same ranks, or
    # those of a world that was, are told apart by a name that is drawn anew.
    ranks = dist.get_process_group_ranks(group)
    with _drawn_name(f"dilated_attention_pytorch/{ranks}", rank, timeout) as store:
        control = dist.ProcessGroup(store, rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        control._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, gloo)
        control.barrier().wait()
    return control


@contextmanager
def _drawn_name(key: str, rank: int, timeout: timedelta) -> Iterator[dist.Store]:
    """A part of the world's store that only these ranks know: the first draws its name, and takes it back when all
    have used it."""
    world = dist.distributed_c10d._get_default_store()
    if rank == 0:
        world.set(key, secrets.token_hex(16))
    else:
        world.wait([key], timeout)
    try:
        yield dist.PrefixStore(f"{key}/{world.get(key).decode()}", world)
    finally:
        if rank == 0:
            world.delete_key(key)


class Gathering:
    """Numbers of every rank, under way. All ranks begin it together."""

    def __init__(self, group: dist.ProcessGroup, own: Tensor, what: str) -> None:
        control, self.what = control_group(group), what
        self._of_all, self._own = [torch.empty_like(own) for _ in range(control.size())], own
        with or_broken(what):
            self._work = control.allgather([self._of_all], [own])

    def wait(self) -> Tensor:
        """[ranks, numbers]."""
        with or_broken(self.what):
            self._work.wait()
        return torch.stack(self._of_all)


def begin_gather(group: dist.ProcessGroup, numbers: Sequence[int], what: str) -> Gathering:
    """int64 [ranks, numbers], when it is waited for: the numbers, below 2⁶³, of every rank. All ranks call it."""
    return Gathering(group, torch.tensor(numbers, dtype=torch.int64), what)


def gather_numbers(group: dist.ProcessGroup, numbers: Sequence[int], what: str) -> Tensor:
    """int64 [ranks, numbers]: the numbers, below 2⁶³, of every rank. All ranks call it."""
    return begin_gather(group, numbers, what).wait()


def gather_texts(group: dist.ProcessGroup, text: str, what: str) -> list[str]:
    """The texts of every rank. All ranks call it."""
    own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    lengths = gather_numbers(group, [len(own)], what)[:, 0]
    padded = torch.cat((own, own.new_zeros(int(lengths.max()) - len(own))))
    of_all = Gathering(group, padded, what).wait()
    return [bytes(one[:length].tolist()).decode() for one, length in zip(of_all, lengths.tolist(), strict=True)]


def swap(group: dist.ProcessGroup, told: Sequence[Tensor], lengths: Sequence[int], what: str) -> Sequence[Tensor]:
    """Tell each rank some numbers (int64), and hear what each tells this one, so many. All ranks call it."""
    heard = torch.empty(sum(lengths), dtype=torch.int64)
    control = control_group(group)
    with or_broken(what):
        control.alltoall_base(heard, torch.cat(list(told)), list(lengths), [len(each) for each in told]).wait()
    return heard.split(list(lengths))
