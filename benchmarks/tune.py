"""Which tiles the kernels should take on the GPU at hand: the tables of `kernels/configs.py`, made again.

    PYTHONPATH=src python benchmarks/tune.py                                # plain kernels, all head dims and dtypes
    PYTHONPATH=src python benchmarks/tune.py --head-dim 64 --dtype bfloat16
    PYTHONPATH=src python benchmarks/tune.py --hopper                       # the warp-specialised ones' own tables

For each head dim and dtype, and for the forward, dq and dk/dv kernels, every candidate that compiles and fits is first
compared with plain PyTorch (a wrong one ends the run with exit status 1) and then timed, all in turns, on random blocks
of 128 at 10 % of 16,384 tokens. Prints the best three, and the lines to put into the table where the best differs from
what stands there; writes --out (benchmarks/results/tune.json). Nothing is tuned when the library runs.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from cases import HERE, GateError, environment, random_mask, write_json
from dilated_attention_pytorch import BlockLayout
from dilated_attention_pytorch.backends import blockwise
from dilated_attention_pytorch.kernels import configs, launch
from dilated_attention_pytorch.kernels.configs import Config
from dilated_attention_pytorch.options import CallOptions
from dilated_attention_pytorch.testing.timing import gpu_seconds

HEAD_DIMS = (32, 64, 128, 256)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
TILES = {"forward": ("out", "lse"), "dq": ("dq",), "dkv": ("dk", "dv")}
PLAIN = [Config(*c) for c in itertools.product((32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3))]
HOPPER_FORWARD = list(itertools.product((64, 128), (2, 3), (2, 3, 4)))  # with one query tile they would wait forever
HOPPER_BACKWARD = list(itertools.product((64, 128), (2, 3)))

Run = Callable[[], tuple[Tensor, ...]]


class Problem:
    """One layout and its tensors; runs of each kernel with given tiles, and what they should give."""

    def __init__(self, head_dim: int, dtype: torch.dtype, tokens: int, device: str) -> None:
        heads = max(1, 2048 // head_dim) if device == "cuda" else 1
        mask = random_mask(tokens // 128, 0.1).to(device)
        self.layout = BlockLayout.from_block_mask(mask, 128)
        shape = (1, tokens, heads, head_dim)
        self.q, self.k, self.v, self.do = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
        self.extras = CallOptions(head_dim**-0.5)
        self.out, self.lse = blockwise.forward(self.q, self.k, self.v, self.layout, self.extras)
        self.dlse = torch.zeros_like(self.lse)
        grads = self._all(blockwise.backward)
        self.want = {"forward": (self.out, self.lse), "dq": grads[:1], "dkv": grads[1:]}

    def _all(self, backward: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        q, k, v, layout, extras = self.q, self.k, self.v, self.layout, self.extras
        return backward(self.do, self.dlse, q, k, v, self.out, self.lse, layout, extras)

    def plain(self, kernel: str, config: Config) -> Run:
        """That kernel alone, with these tiles."""
        call = launch.Call(self.q, self.k, self.v, self.layout, self.extras)
        call.hopper = False
        call.configs = call.configs._replace(**{kernel: config})
        if kernel == "forward":
            return call.forward
        taken = slice(0, 1) if kernel == "dq" else slice(1, 3)
        other = "_plain_dkv" if kernel == "dq" else "_plain_dq"

        def run() -> tuple[Tensor, ...]:
            with patch.object(call, other, lambda *args: None):
                return call.backward(self.do, self.dlse, self.out, self.lse)[0][taken]

        return run

    def hopper(self, kernel: str, settings: tuple[Any, ...]) -> Run:
        """The warp-specialised forward, or both backward walks, with these settings."""
        call = launch.Call(self.q, self.k, self.v, self.layout, self.extras)
        if not call.hopper:  # the plain kernels would run in their place
            raise GateError("the warp-specialised kernels cannot run on this GPU")
        table = {call.head_dim: settings}
        if kernel == "forward":
            with_table = patch.object(launch, "HOPPER_FORWARD", table)
        else:
            with_table = patch.object(launch, "HOPPER_BACKWARD", table)

        def run() -> tuple[Tensor, ...]:
            with with_table:
                if kernel == "forward":
                    return call.forward()
                return call.backward(self.do, self.dlse, self.out, self.lse)[0]

        return run


def tried(
    runs: dict[Any, Run], want: tuple[Tensor, ...], seconds: Callable[[Run], float], rounds: int
) -> dict[Any, float]:
    """Seconds of every candidate that fits, the fastest first."""
    fit = {}
    for name, run in runs.items():
        try:
            got = run()
        except OutOfResources:
            continue
        for mine, theirs in zip(got, want, strict=True):
            error = float((mine.double() - theirs.double()).norm() / theirs.double().norm())
            if not error <= 2e-2:
                raise GateError(f"{name} is off by {error:.1e}")
        fit[name] = run
    turns = [{name: seconds(run) for name, run in fit.items()} for _ in range(rounds)]
    times = {name: statistics.median(turn[name] for turn in turns) for name in fit}
    return dict(sorted(times.items(), key=lambda item: item[1]))


def report(title: str, times: dict[Any, float], now: Any) -> dict[str, Any]:
    best = next(iter(times))
    gain = f", {times[now] / times[best]:.2f} x what stands there" if now in times and best != now else ""
    print(f"{title}: {', '.join(f'{tuple(c)} {1e3 * s:.3f} ms' for c, s in list(times.items())[:3])}{gain}", flush=True)
    return {"kernel": title, "now": now, "best": best, "seconds": [[list(c), s] for c, s in times.items()]}


def tune_plain(head_dim: int, dtype: torch.dtype, tokens: int, device: str, **timing: Any) -> list[dict[str, Any]]:
    problem = Problem(head_dim, dtype, tokens, device)
    capability = torch.cuda.get_device_capability() if device == "cuda" else (9, 0)
    now, rows = configs.configs(capability, head_dim, dtype.itemsize), []
    for kernel in TILES:
        runs: dict[Any, Run] = {config: problem.plain(kernel, config) for config in PLAIN}
        times = tried(runs, problem.want[kernel], **timing)
        rows.append(report(f"{kernel}, D={head_dim}, {dtype}", times, getattr(now, kernel)))
    best = configs.Configs(*(row["best"] for row in rows))
    if best != now:
        parts = ", ".join(f"Config{tuple(config)}" for config in best)
        print(f"    {head_dim}: Configs({parts}),")
    return rows


def tune_hopper(head_dim: int, tokens: int, **timing: Any) -> list[dict[str, Any]]:
    problem, rows = Problem(head_dim, torch.bfloat16, tokens, "cuda"), []
    whole = {"forward": problem.want["forward"], "backward": (*problem.want["dq"], *problem.want["dkv"])}
    tables = {
        "forward": (HOPPER_FORWARD, configs.HOPPER_FORWARD),
        "backward": (HOPPER_BACKWARD, configs.HOPPER_BACKWARD),
    }
    for kernel, (candidates, now) in tables.items():
        runs: dict[Any, Run] = {settings: problem.hopper(kernel, settings) for settings in candidates}
        rows.append(report(f"Hopper {kernel}, D={head_dim}", tried(runs, whole[kernel], **timing), now[head_dim]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--head-dim", type=int, nargs="+", choices=HEAD_DIMS, default=HEAD_DIMS)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--hopper", action="store_true", help="the warp-specialised kernels instead of the plain ones")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "tune.json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("tiles are tuned on a CUDA device, and there is none")
    timing = {"seconds": gpu_seconds, "rounds": args.rounds}
    record: dict[str, Any] = {"environment": environment() | {"device": torch.cuda.get_device_name()}, "rows": []}
    if args.hopper:
        for head_dim in configs.HOPPER_FORWARD:
            record["rows"] += tune_hopper(head_dim, args.tokens, **timing)
    else:
        for head_dim, dtype in itertools.product(args.head_dim, args.dtype):
            record["rows"] += tune_plain(head_dim, DTYPES[dtype], args.tokens, "cuda", **timing)
    write_json(args.out, record)


if __name__ == "__main__":
    main()
