"""Independent jobs on the threads that PyTorch would use inside one operator.

Many small operators, each split over all threads, wait at the end of each for the slowest part. Where another program
takes a core that is almost all of their time: OpenMP's threads wait for one that has no core by keeping theirs. Jobs
that share nothing run one a thread, with operators that are not split, and wait for each other once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import torch

_pool: ThreadPoolExecutor | None = None
_lock = Lock()


def run(jobs: Sequence[Callable[[], None]], split: int = 1) -> None:
    """Run all jobs at once, each operator on `split` threads; a single job runs in the calling thread.

    A job must not need anything that belongs to the calling thread (autograd and autocast are off in it).
    """
    threads = torch.get_num_threads()

    def alone(job: Callable[[], None]) -> None:
        # This sets the threads of the worker it is called in, and what threads that start from now on begin with.
        torch.set_num_threads(split)
        with torch.no_grad():
            job()

    try:
        if len(jobs) == 1:
            alone(jobs[0])
        else:
            list(_workers().map(alone, jobs))
    finally:
        torch.set_num_threads(threads)


def _workers() -> ThreadPoolExecutor:
    """One pool a process, kept: BLAS keeps buffers for each thread that ever called it."""
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="blockwise")
        return _pool


def _forget() -> None:
    """A forked child has none of its parent's threads."""
    global _pool, _lock
    _pool, _lock = None, Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
