"""Layouts with bitmaps: what it costs to keep any pairs at all, and what it saves to keep equal bitmaps once.

    python benchmarks/bitmaps.py            # on this machine's device, a minute or two; options: harness.py

stored  Layouts by `from_mask_mod`, blocks of 128: different bitmaps of the partial blocks, their bytes beside those of
        one for each partial block, and the time of asking for every pair. The pairs are counted and compared with what
        the mask has by arithmetic.
speed   The same blocks full, with bitmaps that are all different, and with one bitmap for all of them: forward, and
        forward with backward. `ratio` is the time ÷ that of full blocks. The target on a GPU is 1.3 forward. Outputs of
        some rows are compared with float64 attention.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cases import Inputs, check_rows, random_mask
from dilated_attention_pytorch import BlockLayout, block_sparse_attention
from dilated_attention_pytorch.layout.tiles import num_partial
from dilated_attention_pytorch.testing.timing import interleave, seconds
from harness import Benchmark, Job, Record, run

BLOCK = 128
HEADS, HEAD_DIM = {"cpu": 8, "cuda": 16}, {"cpu": 64, "cuda": 128}
DENSITY = 0.1


def natten(side: int, window: int) -> Callable[..., Tensor]:
    """A square neighbourhood in an image of side · side tokens, row by row."""
    half = window // 2

    def near(q: Tensor, k: Tensor) -> Tensor:
        return (q.clamp(half, side - 1 - half) - k).abs() <= half

    return lambda b, h, q, k: near(q // side, k // side) & near(q % side, k % side)


def masks(tokens: int) -> dict[str, tuple[Callable[..., Tensor], int, int]]:
    """A function of pairs, for how many tokens, and how many pairs it allows."""
    side, window = int(tokens**0.5), 13
    odd = side - 7  # its rows are no parts of blocks
    generator = torch.Generator().manual_seed(0)
    cuts = torch.randperm(tokens - 1, generator=generator)[: tokens // 512].add(1).sort().values
    edges = torch.cat((torch.tensor([0]), cuts, torch.tensor([tokens])))
    lengths = edges.diff()
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    at_most = 1000
    return {
        f"NATTEN, {side} × {side}, window {window}": (natten(side, window), tokens, tokens * window**2),
        f"NATTEN, {odd} × {odd}, window {window}": (natten(odd, window), odd**2, odd**2 * window**2),
        f"{len(lengths)} documents, causal": (
            lambda b, h, q, k: (document.to(q.device)[q] == document.to(q.device)[k]) & (q >= k),
            tokens,
            int((lengths * (lengths + 1) // 2).sum()),
        ),
        "causal window of 1000": (
            lambda b, h, q, k: (q >= k) & (q - k < at_most),
            tokens,
            at_most * tokens - at_most * (at_most - 1) // 2,
        ),
    }


def stored(job: Job) -> Record:
    rows = []
    for name, (mask_mod, tokens, pairs) in masks(4096 if job.quick else 16384).items():
        build = partial(BlockLayout.from_mask_mod, mask_mod, None, None, tokens, block_size=BLOCK, device=job.device)
        made: list[BlockLayout] = []
        took = seconds(lambda build=build, made=made: made.append(build()), job.device)
        layout = made[-1]
        found = round(layout.density * tokens**2)
        job.gate.accept(name, "pairs of the layout", "arithmetic", abs(found - pairs), 0.0)
        partial_blocks, one = num_partial(layout), BLOCK * BLOCK // 8
        row = {
            "mask": name, "tokens": tokens, "active": layout.num_active_blocks, "partial": partial_blocks,
            "bitmaps": len(layout.bitmaps), "bytes": layout.bitmaps.nbytes, "bytes_apart": partial_blocks * one,
            "seconds": took,
        }  # fmt: skip
        rows.append(row)
        job.say("{mask}: {bitmaps} bitmaps of {partial} partial blocks, {bytes:,} bytes, {seconds:.1f} s".format(**row))
    return {"rows": rows}


def layouts_of(tokens: int, device: str) -> dict[str, BlockLayout]:
    """The same blocks in three ways."""
    mask = random_mask(tokens // BLOCK, DENSITY).to(device)
    generator = torch.Generator(device).manual_seed(1)
    apart = torch.rand(tokens, tokens, generator=generator, device=device) < 0.5
    shared = apart[:BLOCK, :BLOCK].repeat(tokens // BLOCK, tokens // BLOCK)
    active = mask.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return {
        "full": BlockLayout.from_block_mask(mask, BLOCK),
        "different": BlockLayout.from_mask(apart & active, BLOCK),
        "shared": BlockLayout.from_mask(shared & active, BLOCK),
    }


def speed(job: Job) -> Record:
    rows = []
    tokens = 2048 if job.quick else {"cpu": 8192, "cuda": 16384}[job.device]
    dtype = torch.bfloat16 if job.device == "cuda" else torch.float32
    made = Inputs.make(tokens, HEADS[job.device], HEAD_DIM[job.device])
    inputs = Inputs(tuple(x.to(dtype) for x in made.ours), made.grad.to(dtype))  # type: ignore[arg-type]
    q, k, v = (x.detach().to(job.device).requires_grad_() for x in inputs.ours)
    do = inputs.grad.to(job.device)

    def forward(layout: BlockLayout) -> Tensor:
        with torch.no_grad():
            return block_sparse_attention(q, k, v, layout)  # type: ignore[return-value]

    def training(layout: BlockLayout) -> tuple[Tensor, ...]:
        return torch.autograd.grad(block_sparse_attention(q, k, v, layout), (q, k, v), do)

    layouts = layouts_of(tokens, job.device)
    for name, layout in layouts.items():
        check_rows(job.gate, name, layout.to("cpu"), inputs, forward(layout).cpu())
    for way, attend in (("forward", forward), ("training", training)):
        runs: dict[str, Callable[[], Any]] = {name: partial(attend, layout) for name, layout in layouts.items()}
        times = {
            name: timing.median for name, timing in interleave(runs, 2 if job.quick else 7, device=job.device).items()
        }
        row = {
            "way": way, "tokens": tokens, "density": layouts["full"].block_density,
            **{f"{name}_ms": time * 1e3 for name, time in times.items()},
            "ratio": times["different"] / times["full"], "ratio_shared": times["shared"] / times["full"],
        }  # fmt: skip
        rows.append(row)
        job.say("{way}: full {full_ms:.1f} ms, bitmaps {ratio:.2f} ×, one for all {ratio_shared:.2f} ×".format(**row))
    return {"rows": rows}


BENCHMARK = Benchmark(
    name="bitmaps", about=__doc__, sections={"stored": stored, "speed": speed}, devices=("cpu", "cuda")
)


if __name__ == "__main__":
    raise SystemExit(run(BENCHMARK))
