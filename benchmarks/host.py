"""What a call costs the host before the GPU is asked for anything: our Python, with kernels that do nothing.

    PYTHONPATH=src TRITON_INTERPRET=0 python benchmarks/host.py         # no GPU needed; seconds

The device is taken for an H200 and every launch for done, so that what is left is checks, the choice of a backend, the
way through PyTorch, and the arguments of the launch; Triton's own launcher comes on top (`benchmarks/gpu.py`, section
calls, has the whole on a GPU). Each number is the 5th percentile of many calls, in microseconds. "operator" is the same
call while a dispatch mode looks on, which takes the way of `torch.library`; plain calls go past it. Writes --out
(benchmarks/results/host.json).
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cases import HERE, environment, write_json
from dilated_attention_pytorch import BlockLayout, SlidingWindow, block_sparse_attention
from dilated_attention_pytorch.backends import triton as backend
from dilated_attention_pytorch.kernels import hopper_backward, hopper_forward, launch


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


def measure(calls: int) -> dict[str, float]:
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
    if Nothing.launches != 4:  # forward; rows, dk and dv, dq
        raise SystemExit(f"a forward and a backward should launch 4 kernels, got {Nothing.launches}")
    found = {}
    for way, mode in (("", None), (", operator", LookingOn())):
        with ExitStack() as stack:
            if mode is not None:
                stack.enter_context(mode)
            with torch.no_grad():
                found[f"forward, pattern{way}"] = microseconds(lambda: forward(pattern), calls)
                found[f"forward, layout{way}"] = microseconds(forward, calls)
            found[f"forward in training{way}"] = microseconds(training, calls)
            found[f"backward{way}"] = microseconds(backward, calls)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "host.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kernels = ("forward_kernel", "rows_kernel", "dq_kernel", "dkv_kernel")
    stubs = [(launch, name) for name in kernels] + [
        (hopper_forward, "forward_kernel"),
        (hopper_backward, "backward_kernel"),
    ]
    with ExitStack() as stack:
        for module, name in stubs:
            stack.enter_context(patch.object(module, name, Nothing(getattr(module, name))))
        stack.enter_context(patch.object(launch, "_capability", lambda device: (9, 0)))
        stack.enter_context(patch.object(launch, "num_processors", lambda device: 132))
        stack.enter_context(patch.object(backend, "can_run", lambda request: (True, "")))
        launch._device.cache_clear()
        found = measure(args.calls)
    for name, value in found.items():
        print(f"{name:32} {value:7.0f} µs")
    write_json(
        args.out,
        {
            "environment": environment(),
            "command": "TRITON_INTERPRET=0 python benchmarks/host.py",
            "microseconds": found,
        },
    )


if __name__ == "__main__":
    main()
