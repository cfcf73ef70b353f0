"""Independent jobs on the threads that PyTorch would use inside one operator.

Many small operators, each split over all threads, spend their time waiting for each other at every end; on a busy
machine almost all of it. Jobs that share nothing run better one a thread, with operators that are not split.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import torch

_pool: ThreadPoolExecutor | None = None
_lock = Lock()


def run(jobs: Sequence[Callable[[], None]]) -> None:
    """Run all jobs at once, with the threads shared out evenly; a single one runs in the calling thread.

    A job must not need anything that belongs to the calling thread (autograd and autocast are off in it).
    """
    if len(jobs) == 1:
        jobs[0]()
        return
    threads = torch.get_num_threads()

    def alone(job: Callable[[], None]) -> None:
        # This sets the threads of the worker it is called in, and what threads that start from now on begin with.
        torch.set_num_threads(max(1, threads // len(jobs)))
        with torch.no_grad():
            job()

    try:
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
