"""Four processes that stay: they form groups of 1 to 4 ranks (gloo) and run what they are given, call after call.

`Ranks.run(size, work, *args)` runs `work(group, *args)` on the first `size` ranks and returns what each returned. An
error of a rank is raised here, as `RankError`, with the text of all ranks that failed.
"""

import socket
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

MOST = 4
TIMEOUT = timedelta(seconds=60)


class RankError(RuntimeError):
    def __init__(self, errors):
        super().__init__("\n".join(f"rank {rank}: {trace}" for rank, (_, _, trace) in sorted(errors.items())))
        self.errors = {rank: (kind, text) for rank, (kind, text, _) in errors.items()}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def join(rank, size, port):
    torch.set_num_threads(1)
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=TIMEOUT)


def _serve(rank, size, port, pipe):
    join(rank, size, port)
    groups = {n: dist.new_group(list(range(n))) for n in range(1, size + 1)}
    torch.use_deterministic_algorithms(True)  # and so torch.empty holds NaN, as in every test
    while True:
        number, work, args = pipe.recv()
        try:
            pipe.send((True, work(groups[number], *args)))
        except Exception as error:  # noqa: BLE001 - told to the test
            text = "".join(traceback.format_exception(error))
            pipe.send((False, (type(error).__name__, str(error), text)))


def context():
    """Processes that fork from one that has loaded the library and nothing else: quick to start."""
    server = mp.get_context("forkserver")
    server.set_forkserver_preload(["dilated_attention_pytorch.distributed", "tests.distributed.work"])
    return server


class Ranks:
    def __init__(self, size=MOST):
        port = free_port()
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = context().Pipe()
            process = context().Process(target=_serve, args=(rank, size, port, there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, size, work, *args):
        """`args` are for all ranks; an argument that is a `ByRank` has one for each."""
        for rank, pipe in enumerate(self.pipes[:size]):
            pipe.send((size, work, [x[rank] if isinstance(x, ByRank) else x for x in args]))
        answers = [pipe.recv() for pipe in self.pipes[:size]]
        errors = {rank: answer for rank, (ok, answer) in enumerate(answers) if not ok}
        if errors:
            raise RankError(errors)
        return [answer for _, answer in answers]

    def close(self):
        for process in self.processes:
            process.kill()


class ByRank(list):
    """A value for each rank."""
