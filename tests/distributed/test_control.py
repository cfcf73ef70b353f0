"""The second group of a ring that does not speak gloo: made whatever other groups its ranks are in, and however often.

`new_group(use_local_synchronization=True)` names a group by its ranks and by how many groups the process is in. One
extra group on one rank, and the members waited for each other under different names until the timeout, which blamed a
dead rank. Here a backend under another name stands for NCCL; it is gloo.
"""

import gc

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from dilated_attention_pytorch import (
    BlockSparseAttention,
    SlidingWindow,
    block_sparse_attention,
    ring_block_sparse_attention,
)
from dilated_attention_pytorch.distributed import RingError, control, exchange
from tests.distributed.processes import TIMEOUT, Processes

SIZE, SHARD = 4, 16
PATTERN = SlidingWindow(24, 8)


def wire(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


def assert_attends(group):
    """A ring over the group gives what one process gives, and its small messages have a group of their own."""
    size, rank = group.size(), group.rank()
    generator = torch.Generator().manual_seed(size)
    q, k, v = (torch.randn(1, size * SHARD, 2, 8, dtype=torch.float64, generator=generator) for _ in range(3))
    own = slice(rank * SHARD, (rank + 1) * SHARD)
    out = ring_block_sparse_attention(q[:, own], k[:, own], v[:, own], PATTERN, group=group)
    torch.testing.assert_close(out, block_sparse_attention(q, k, v, PATTERN)[:, own], rtol=0, atol=1e-12)
    assert control.control_group(group) is not group


def extra_groups(rank):
    """As many groups of its own as the rank's number."""
    for _ in range(rank):
        dist.new_group([rank], use_local_synchronization=True)
    assert_attends(dist.group.WORLD)


def several_rings(rank):
    """Overlapping rings, and two of the same ranks; each rank has its own number of them, and asks in its own order."""
    members = [(0, 1), (2, 3), (1, 2), (0, 3), (0, 1, 3), (0, 1, 3), (3, 1)]
    rings = [(ranks, dist.new_group(list(ranks))) for ranks in members]
    own = [ring for ranks, ring in rings if rank in ranks]
    for ring in own:
        assert_attends(ring)
    for ring in reversed(own):
        assert_attends(ring)
    assert len({id(control.control_group(ring)) for ring in own}) == len(own)


def meshes(rank):
    """Both dimensions of a mesh, on half of the ranks after a group that the others do not have."""
    if rank % 2:
        dist.new_group([rank], use_local_synchronization=True)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    for name in ("sequence", "data"):
        assert_attends(mesh[name].get_group())


def made_again(rank):
    """A group that is destroyed and made again, of the same ranks."""
    for _ in range(3):
        ring = dist.new_group([0, 1, 2])
        if rank < 3:
            assert_attends(ring)
            module = BlockSparseAttention(PATTERN, ring_group=ring)
            dist.destroy_process_group(ring)
            x = torch.zeros(1, SHARD, 2, 8)
            with pytest.raises(ValueError, match="group must be one that exists, got one that was destroyed"):
                module(x, x, x)


def forgotten(rank):
    """The second group goes when the ring does, and is none that `torch.distributed` knows."""
    known = dist.get_pg_count()
    ring = dist.new_group([0, 1, 2, 3])
    assert_attends(ring)
    assert dist.get_pg_count() == known + 1
    dist.destroy_process_group(ring)
    before = len(control._groups)
    del ring
    gc.collect()
    assert len(control._groups) == before - 1


def started(rank):
    """The first message on the ring's own group is of all ranks, and its failure says what it was."""
    ring, sent, send = dist.new_group(), [], dist.all_reduce
    for _ in range(2):
        dist.all_reduce = lambda x, group: sent.append((x.device, group)) or send(x, group=group)
        assert_attends(ring)
        assert sent == [(torch.device("cpu"), ring)]
    ring = dist.new_group()

    def refuse(x, group):
        raise RuntimeError("NCCL error in: NCCLUtils.cpp:77\nLast error:\nDuplicate GPU detected")

    dist.all_reduce = refuse
    reason = r"the ring cannot start: a first message of all ranks over wire, on cpu here, failed; .*Duplicate GPU"
    with pytest.raises(RingError, match=reason):
        assert_attends(ring)
    dist.all_reduce = send
    assert_attends(ring)


SCENES = {each.__name__: each for each in (extra_groups, several_rings, meshes, made_again, forgotten, started)}


def play(rank, size, port, pipe, names):
    torch.set_num_threads(1)
    dist.Backend.register_backend("wire", wire, devices=["cpu"])
    store = dist.TCPStore("127.0.0.1", port)
    try:
        for number, name in enumerate(names):
            # A world after the other, and in each the ranks are others.
            rank, of_world = (rank + number) % size, dist.PrefixStore(str(number), store)
            dist.init_process_group("wire", store=of_world, rank=rank, world_size=size, timeout=TIMEOUT)
            SCENES[name](rank)
            pipe.send(name)
            dist.barrier()
            dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001 - told to the test
        pipe.send(f"{name} on rank {rank}: {type(error).__name__}: {error}")


def test_whatever_other_groups_there_are():
    names = [*SCENES, "extra_groups"]
    processes = Processes(SIZE, play, names)
    try:
        for name in names:
            for rank, pipe in enumerate(processes.pipes):
                assert pipe.poll(40), f"process {rank} is silent in {name}"
                assert pipe.recv() == name
    finally:
        processes.close()


class Composite:
    """Stands for the group of a world that was initialised without a backend, on a machine of GPUs."""

    config = "cpu:gloo,cuda:nccl"


def test_a_composite_group_starts_on_the_device_of_the_tensors(monkeypatch):
    """It was taken for gloo as a whole, and NCCL's first message came from some ranks only; where there was a first
    message, it was on the current device, GPU 0 for every rank that calls no `set_device`."""
    group, sent = Composite(), []
    monkeypatch.setattr(dist, "get_backend_config", lambda group: group.config)
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: sent.append((x.device, group)))
    assert control.control_group(group) is group
    with FakeTensorMode():
        for device in ("cuda:1", "cpu", "cuda:1", "cuda:0", "mps"):
            exchange.start(group, torch.device(device))
    assert sent == [(torch.device("cuda:1"), group), (torch.device("cuda:0"), group)]


def test_what_moves_the_tensors_of_a_device(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda config: config)
    expected = {
        ("cpu:gloo,cuda:nccl", "cuda"): "nccl",
        ("cpu:gloo,cuda:nccl", "cpu"): "gloo",
        ("cpu:gloo,cuda:nccl", "mps"): "gloo",  # through the host
        ("cuda:nccl", "cuda"): "nccl",
        ("cuda:nccl", "cpu"): None,
        ("cpu:mpi,cuda:gloo", "xpu"): None,
    }
    for (config, device), backend in expected.items():
        assert exchange.backend_for(config, torch.device(device)) == backend, (config, device)
    with pytest.raises(ValueError, match="q must be on a device that the group has a backend for, cuda:nccl, got cpu"):
        exchange.check_device("cuda:nccl", torch.device("cpu"), "q")
