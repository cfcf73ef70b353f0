"""The processes of one training run, each with some of a step's samples: `torchrun` starts them. Else it is one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Ranks:
    """Which of the processes this is, of how many; all of them call every function."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether it is the one that talks and writes."""
        return self.rank == 0

    def own(self, rows: Tensor) -> Tensor:
        """This process's part of the samples that all of them draw alike."""
        return rows[self.rank :: self.size]

    def wrapped(self, module: nn.Module, device: str) -> nn.Module:
        """The module, whose gradients are then the means over all processes."""
        if self.size == 1:
            return module
        devices = [torch.cuda.current_device()] if device.startswith("cuda") else None
        return DistributedDataParallel(module, device_ids=devices)

    def total(self, x: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.size > 1:
            dist.all_reduce(x)
        return x


ALONE = Ranks()


def apart(module: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
    """Around a backward pass: gradients are sent to the other processes in the last of a step alone."""
    return nullcontext() if last or not isinstance(module, DistributedDataParallel) else module.no_sync()


@contextmanager
def ranks_of_torchrun(device: str) -> Iterator[Ranks]:
    """Those that torchrun started, if it did; `device` is then a kind of device, of which each process gets its own."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or "TORCHELASTIC_RUN_ID" not in os.environ:
        yield ALONE
        return
    on_gpu = device.startswith("cuda")
    if on_gpu:
        local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        if device != "cuda" or here > torch.cuda.device_count():
            raise ValueError(
                f"--device must be cuda, with a GPU for each of the {here} processes of torchrun here, or cpu; got "
                f"{device!r} and {torch.cuda.device_count()}"
            )
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield Ranks(dist.get_rank(), size)
    finally:
        dist.destroy_process_group()
