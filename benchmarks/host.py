"""What a call costs the host before the GPU is asked for anything: our Python, with kernels that do nothing.

    python benchmarks/host.py         # no GPU needed; seconds. Without TRITON_INTERPRET in the environment

The device is taken for an H200 and every launch for done, so that what is left is checks, the choice of a backend, the
way through PyTorch, and the arguments of the launch; Triton's own launcher comes on top (`benchmarks/gpu.py`, section
calls, has the whole on a GPU). Each number is the 5th percentile of many calls, in microseconds. "operator" is the same
call while a dispatch mode looks on, which takes the way of `torch.library`; plain calls go past it.
"""

from __future__ import annotations

from contextlib import ExitStack
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dilated_attention_pytorch import BlockLayout, SlidingWindow, block_sparse_attention
from dilated_attention_pytorch.backends import triton as backend
from dilated_attention_pytorch.kernels import hopper_backward, hopper_forward, launch
from harness import Benchmark, Job, Record, run


class Nothing:
    """Stands for a kernel, and for what is compiled of it."""

    launches = 0

    def __init__(self, kernel: Any) -> None:
        self.arg_names = kernel.arg_names

    def __getitem__(self, grid: object) -> Any:
        def run(*args: object, **kwargs: object) -> Nothing:
            Nothing.launches += 1
            return self

        return run


class LookingOn(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def microseconds(run: Any, calls: int) -> float:
    run()
    times = []
    for _ in range(calls):
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    return sorted(times)[calls // 20] * 1e6


def measure(job: Job, count: int) -> dict[str, float]:
    q, k, v = (torch.randn(1, 2048, 16, 128, dtype=torch.bfloat16) for _ in range(3))
    pattern = SlidingWindow(256, 0)
    layout = BlockLayout.from_pattern(pattern, 2048, block_size=128)
    learns = q.clone().requires_grad_()

    def forward(who: Any = layout, q: Any = q) -> Any:
        return block_sparse_attention(q, k, v, who, backend="triton")

    def training() -> Any:
        return forward(q=learns)

    out = training()
    do = torch.ones_like(out)

    def backward() -> Any:
        return torch.autograd.grad(out, learns, do, retain_graph=True)

    Nothing.launches = 0
    forward()
    backward()
    # forward; rows, dk and dv, dq
    job.gate.accept("forward and backward", "launches", "4 kernels", abs(Nothing.launches - 4), 0)
    found = {}
    for way, mode in (("", None), (", operator", LookingOn())):
        with ExitStack() as stack:
            if mode is not None:
                stack.enter_context(mode)
            with torch.no_grad():
                found[f"forward, pattern{way}"] = microseconds(lambda: forward(pattern), count)
                found[f"forward, layout{way}"] = microseconds(forward, count)
            found[f"forward in training{way}"] = microseconds(training, count)
            found[f"backward{way}"] = microseconds(backward, count)
    return found


def calls(job: Job) -> Record:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    kernels = ("forward_kernel", "rows_kernel", "round_kernel", "dq_kernel", "dkv_kernel")
    stubs = [(launch, name) for name in kernels] + [
        (hopper_forward, "forward_kernel"),
        (hopper_backward, "backward_kernel"),
    ]
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        for module, name in stubs:
            stack.enter_context(patch.object(module, name, Nothing(getattr(module, name))))
        stack.enter_context(patch.object(launch, "_capability", lambda device: (9, 0)))
        stack.enter_context(patch.object(launch, "num_processors", lambda device: 132))
        stack.enter_context(patch.object(backend, "can_run", lambda request: (True, "")))
        launch._device.cache_clear()
        return {"microseconds": measure(job, 20 if job.quick else 1000)}


BENCHMARK = Benchmark(name="host", about=__doc__, sections={"calls": calls})


if __name__ == "__main__":
    raise SystemExit(run(BENCHMARK))
