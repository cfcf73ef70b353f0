"""`warm_up`: the kernels that calls will need, compiled before they are called."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from ..patterns.base import check_int


def warm_up(
    *calls: Callable[[], object], processes: int | None = None, progress: Callable[[int, int], object] | None = None
) -> int:
    """Compile the GPU kernels of some calls, several at a time, into Triton's cache on disk.

        warm_up(lambda: model(ids).loss.backward(), lambda: model.generate(ids, max_new_tokens=2))

    The processes import the program that calls this: in a script, call it under `if __name__ == "__main__":`.

    A call is made once. Our kernels are left out of it, but for those that choose blocks, so what it computes means
    nothing: throw its results and gradients away, and give it no optimizer. Lengths do not matter to the kernels, nor
    does what is in a layout; head widths, dtypes, block sizes and options do.

    The cache is the folder that `TRITON_CACHE_DIR` names, `~/.triton/cache` by default. It can be copied to machines
    with the same GPU, Triton and version of this library; there the first call finds its kernels compiled.

    Args:
        processes: at a time; as many as the process has processors by default.
        progress: called with the number of kernels that are done, and of all.

    Returns:
        the number of kernels; 0 on a machine without a GPU, whose calls launch none.
    """
    for call in calls:
        if not callable(call):
            raise TypeError(f"calls must be functions without arguments, got {type(call).__name__}")
    if processes is None:
        processes = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    check_int("processes", processes, least=1)
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be a function or None, got {type(progress).__name__}")
    if not torch.cuda.is_available():
        return 0
    from ..kernels import ahead

    with ahead.collected() as wanted:
        for call in calls:
            call()
    ahead.compile_all(list(wanted.values()), processes, progress or (lambda done, total: None))
    return len(wanted)
