"""A rank is killed at some point of its communication: every other rank raises a RingError, soon, and never hangs.

Communication has points: before and after every gathering of numbers, every exchange begun and every exchange waited
for, forward and backward, first call (with its plan) and later ones. A rank kills itself at one of them.
"""

import faulthandler
import os
import signal
import time
from datetime import timedelta

import pytest
import torch

from dilated_attention_pytorch import GlobalTokens, RandomBlocks, SlidingWindow
from dilated_attention_pytorch.distributed import exchange, plan, ring, ring_block_sparse_attention
from tests.distributed.processes import context, free_port, join

TIMEOUT = timedelta(seconds=8)  # for a busy machine: less, and a rank may be slow and not dead
PATIENCE = 40
PATTERNS = [SlidingWindow(40, 40) | GlobalTokens(4), RandomBlocks(2, block_size=16), SlidingWindow(200, 0)]
CALLS = 3
NUM_POINTS = 60  # more than a rank passes in 3 calls of 4 ranks


def die_at(fate):
    """Kill this process at its fate-th point."""
    passed = 0

    def point():
        nonlocal passed
        passed += 1
        if passed == fate:
            os.kill(os.getpid(), signal.SIGKILL)

    def with_points(function):
        def guarded(*args, **options):
            point()
            result = function(*args, **options)
            point()
            return result

        return guarded

    for module in (plan, ring):
        module.gather_numbers = with_points(exchange.gather_numbers)
        module.exchange = with_points(exchange.exchange)
    exchange.Pending.wait = with_points(exchange.Pending.wait)


def work(rank, size, port, pipe, seed, fate):
    """A few training steps; says how it ended."""
    join(rank, size, port)
    group = torch.distributed.new_group(timeout=TIMEOUT)
    pipe.send("ready")
    faulthandler.dump_traceback_later(PATIENCE - 5)  # says where it hangs
    if fate:
        die_at(fate)
    started = time.monotonic()
    try:
        for _ in range(CALLS):
            q, k, v = (torch.randn(1, 96, 2, 8, requires_grad=True) for _ in range(3))
            ring_block_sparse_attention(q, k, v, PATTERNS[seed % len(PATTERNS)], group=group).sum().backward()
        if fate:
            os.kill(os.getpid(), signal.SIGKILL)
        ring_block_sparse_attention(q, k, v, PATTERNS[0], group=group)  # the dead rank is not there
        pipe.send(("finished", "", 0.0))
    except Exception as error:  # noqa: BLE001 - told to the test
        pipe.send((type(error).__name__, str(error), time.monotonic() - started))
    os._exit(0)


def kill_one(seed):
    """Which rank, at which point, in which ring and pattern follows from the seed."""
    draw = torch.Generator().manual_seed(seed)
    size = int(torch.randint(2, 5, (), generator=draw))
    doomed = int(torch.randint(size, (), generator=draw))
    fate = int(torch.randint(1, NUM_POINTS, (), generator=draw))
    port, pipes, processes = free_port(), [], []
    for rank in range(size):
        here, there = context().Pipe()
        args = (rank, size, port, there, seed, fate if rank == doomed else 0)
        process = context().Process(target=work, args=args, daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        for pipe in pipes:
            assert pipe.poll(60), "the ring did not start"
            assert pipe.recv() == "ready"
        for rank, pipe in enumerate(pipes):
            if rank == doomed:
                continue
            assert pipe.poll(PATIENCE), f"rank {rank} of {size} hangs, rank {doomed} died at point {fate}"
            kind, text, _ = pipe.recv()
            assert kind == "RingError", (rank, size, doomed, fate, kind, text)
            assert text.startswith("the ring is broken: "), text
        processes[doomed].join(30)
        assert processes[doomed].exitcode == -signal.SIGKILL
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize("seed", range(2))
def test_a_killed_rank_is_noticed(seed):
    kill_one(seed)


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(2, 162))
def test_a_rank_killed_anywhere_is_noticed(seed):
    kill_one(seed)
