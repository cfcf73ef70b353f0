"""Processes that stay: they form groups of 1 to 4 ranks (gloo) and run what they are given, call after call.

`Ranks.run(size, work, *args)` runs `work(group, *args)` on the first `size` ranks and returns what each returned. An
error of a rank is raised here, as `RankError`, with the text of all ranks that failed. `Processes` are the plain kind,
that run one function and may die.
"""

import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

MOST = 4
TIMEOUT = timedelta(seconds=60)
SILENT = 150.0  # seconds after which ranks that were given work have failed the test


class RankError(RuntimeError):
    def __init__(self, errors):
        super().__init__("\n".join(f"rank {rank}: {trace}" for rank, (_, _, trace) in sorted(errors.items())))
        self.errors = {rank: (kind, text) for rank, (kind, text, _) in errors.items()}


class ByRank(list):
    """A value for each rank."""


def of_rank(args, rank):
    """`args` are for all ranks; an argument that is a `ByRank` has one for each."""
    return [x[rank] if isinstance(x, ByRank) else x for x in args]


def join(rank, size, port):
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)


def context():
    """Processes that fork from one that has loaded what ranks need and has done nothing: quick to start."""
    server = mp.get_context("forkserver")
    # The compiler too, which the optimisers load: seconds, in every rank.
    server.set_forkserver_preload(
        ["tests.distributed.work", "torch.distributed.checkpoint.state_dict", "torch._dynamo"]
    )
    return server


class Processes:
    """Each runs `target(rank, size, port, pipe, *args)`."""

    def __init__(self, size, target, *args):
        # As torchrun's agent has one: it does not die with a rank.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = context().Pipe()
            given = (rank, size, self.store.port, there, *of_rank(args, rank))
            process = context().Process(target=target, args=given, daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def close(self):
        for process in self.processes:
            process.kill()


class Ranks(Processes):
    def __init__(self, size=MOST):
        super().__init__(size, _serve)
        self.jobs = 0

    def run(self, size, work, *args):
        self.jobs += 1
        for rank, pipe in enumerate(self.pipes[:size]):
            pipe.send((self.jobs, size, work, of_rank(args, rank)))
        ends = time.monotonic() + SILENT
        for rank, pipe in enumerate(self.pipes[:size]):
            assert pipe.poll(max(0.0, ends - time.monotonic())), f"rank {rank} of {size} is silent in {work.__name__}"
        answers = [pipe.recv() for pipe in self.pipes[:size]]
        errors = {rank: answer for rank, (ok, answer) in enumerate(answers) if not ok}
        if errors:
            raise RankError(errors)
        return [answer for _, answer in answers]


def _serve(rank, size, port, pipe):
    join(rank, size, port)
    groups = {n: dist.new_group(list(range(n))) for n in range(1, size + 1)}
    torch.use_deterministic_algorithms(True)  # and so torch.empty holds NaN, as in every test
    while True:
        job, number, work, args = pipe.recv()
        # PyTorch names groups by counting those that a process has made; work for some of the ranks makes some alone.
        dist.distributed_c10d._world.group_count = 1000 * job
        try:
            pipe.send((True, work(groups[number], *args)))
        except Exception as error:  # noqa: BLE001 - told to the test
            text = "".join(traceback.format_exception(error))
            pipe.send((False, (type(error).__name__, str(error), text)))
