"""Neighbourhoods and sliding tiles of a video: their layouts, and attention over them beside FlexAttention.

    python benchmarks/neighborhoods.py                  # options: harness.py
    python benchmarks/neighborhoods.py --device cpu     # layouts alone, about a minute
    python benchmarks/neighborhoods.py --only video --cases 1 --rounds 2

Latents of 30 × 48 × 80 tokens, and others that no tile divides.

layouts  Building a layout: seconds (on a CPU those of a core, whatever else runs there), blocks, how many of them are
         full, how many different bitmaps the others share, how many blocks were asked pair by pair, and the bytes that
         the layout holds. Rows are checked against the pattern's own `seen`, coordinate by coordinate.
video    A GPU, or --quick: forward and backward, 24 heads × 128, bfloat16, beside FlexAttention on the same mask in
         the same order, and dense attention. `computed` is the share of all blocks that are computed; `share` is our
         time ÷ dense. Our output is compared with float64 attention of some rows, FlexAttention's with ours.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from cases import Inputs, check_rows
from dilated_attention_pytorch import BlockLayout, GridPattern, Neighborhood, SlidingTiles, block_sparse_attention
from dilated_attention_pytorch.layout.grid import PREFIX, axis_of, coordinates_of
from dilated_attention_pytorch.testing.timing import interleave
from harness import Benchmark, Job, Record, SkipSectionError, run

LATENTS, WINDOW = (30, 48, 80), (18, 24, 24)
UNEVEN, NARROW = (21, 45, 81), (11, 15, 15)
HEADS, HEAD_DIM = 24, 128
ROUNDS = 5
UNTIMED = ("21 × 45 × 81, in tiles of 4 × 4 × 8",)  # of other sizes
CHECKED = 5  # queries whose keys are compared one by one


class Case(NamedTuple):
    name: str
    pattern: GridPattern
    block: int = 128


def cases(quick: bool) -> list[Case]:
    if quick:
        return [
            Case("neighbourhood, in tiles", Neighborhood((4, 8, 16), (2, 4, 8), order=(2, 4, 8)), 64),
            Case("sliding tiles", SlidingTiles((4, 8, 16), (2, 4, 8), (2, 4, 16), prefix=64).in_tiles(), 64),
        ]
    video = Neighborhood(LATENTS, WINDOW)
    return [
        Case("neighbourhood, in tiles of 4 × 4 × 8", video.in_tiles((4, 4, 8))),
        Case("neighbourhood, in tiles of 6 × 8 × 8", video.in_tiles((6, 8, 8))),
        Case("the same behind 256 tokens of text", Neighborhood(LATENTS, WINDOW, prefix=256, order=(6, 8, 8))),
        Case("neighbourhood, row by row", video),
        Case("every second token", Neighborhood(LATENTS, (9, 12, 12), dilation=2, order=(4, 4, 8))),
        Case("sliding tiles of 6 × 8 × 8", SlidingTiles(LATENTS, (6, 8, 8), WINDOW).in_tiles()),
        Case("sliding tiles, row by row", SlidingTiles(LATENTS, (6, 8, 8), WINDOW)),
        Case("21 × 45 × 81, in tiles of 4 × 4 × 8", Neighborhood(UNEVEN, NARROW, order=(4, 4, 8))),
        Case("21 × 45 × 81, row by row", Neighborhood(UNEVEN, NARROW)),
    ]


def wrong_pairs(pattern: GridPattern, layout: BlockLayout) -> int:
    """Pairs of some queries that the layout and the pattern's own `seen` disagree about."""
    order, wrong = pattern.token_order, 0
    for query in range(0, pattern.total, max(1, pattern.total // (CHECKED - 1) - 1)):
        row = layout.take(torch.tensor([query // layout.block_q], device=layout.device))
        whole = torch.zeros(layout.num_k_blocks, layout.block_k, dtype=torch.bool)
        whole[row.entries()[2].cpu().long()] = row.cells()[:, query % layout.block_q].cpu()
        got, want = whole.flatten()[: pattern.total], torch.ones(pattern.total, dtype=torch.bool)
        place = query - order.grid_at
        if 0 <= place < order.num_cells:
            at = order.coordinates(place)
            seen = itertools.product(*(pattern.seen(d, x) for d, x in enumerate(at)))
            want[order.grid_at : order.grid_at + order.num_cells] = False
            want[torch.tensor([order.place(each) for each in seen]) + order.grid_at] = True
        wrong += int((got != want).sum())
    return wrong


def built(job: Job, case: Case) -> BlockLayout:
    layout = BlockLayout.from_pattern(case.pattern, case.pattern.total, block_size=case.block, device=job.device)
    job.gate.accept(case.name, "the layout", "the pattern, wrong pairs", wrong_pairs(case.pattern, layout), 0)
    return layout


def layouts(job: Job) -> Record:
    rows = []
    for case in cases(job.quick):
        layout = built(job, case)
        clock, seconds = perf_counter if job.device == "cuda" else process_time, []
        for _ in range(2 if job.quick else 3):
            begin = clock()
            BlockLayout.from_pattern(case.pattern, case.pattern.total, block_size=case.block, device=job.device)
            if job.device == "cuda":
                torch.cuda.synchronize()
            seconds.append(clock() - begin)
        lists = layout.by_query
        rows.append({
            "name": case.name, "pattern": case.pattern.text, "tokens": case.pattern.total, "block": case.block,
            "blocks": layout.num_active_blocks, "full": int((lists.splits - lists.offsets[:-1]).sum()),
            "bitmaps": len(layout.bitmaps), "asked": layout.evaluated, "computed": layout.block_density,
            "bytes": sum(x.nbytes for x in layout.flatten()[0]), "seconds": min(seconds), "times": seconds,
        })  # fmt: skip
        job.say("{name}: {blocks:,} blocks, {bitmaps} bitmaps, {bytes:,} bytes, {seconds:.2f} s".format(**rows[-1]))
    return {"rows": rows}


def flex_mask(case: Case, device: str) -> BlockMask:
    """The same pairs, asked of coordinates and bounds in tables."""
    pattern, total = case.pattern, case.pattern.total
    at = coordinates_of(pattern, torch.arange(total, device=device))
    axes = [axis_of(pattern, d, torch.device(device)) for d in range(len(pattern.shape))]

    def near(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = query >= 0
        for of, axis in zip(at, axes, strict=True):
            q, k = of[query].clamp(min=0), of[key]
            inside = (k >= axis.first[q]) & (k < axis.stop[q])
            allowed = allowed & inside & ((k - axis.first[q]) % axis.step == 0)
        return allowed | (at[0][query] == PREFIX) | (at[0][key] == PREFIX)

    compiled = device == "cuda"
    return create_block_mask(near, None, None, total, total, BLOCK_SIZE=case.block, device=device, _compile=compiled)


def video(job: Job) -> Record:
    if job.device == "cpu" and not job.quick:
        raise SkipSectionError("a video takes minutes on a CPU; --quick tries it on a small one")
    heads, head_dim, dtype = (2, 16, torch.float32) if job.quick else (HEADS, HEAD_DIM, torch.bfloat16)
    flex = torch.compile(flex_attention, dynamic=False) if job.device == "cuda" else flex_attention
    rows: list[dict[str, Any]] = []
    timed = [case for case in cases(job.quick) if case.pattern.order is not None and case.name not in UNTIMED]
    for case in timed[: job.args.cases]:
        layout = built(job, case)
        shape = (1, case.pattern.total, heads, head_dim)
        tensors = [torch.randn(shape, device=job.device, dtype=dtype) for _ in range(4)]
        with torch.no_grad():
            check_rows(job.gate, case.name, layout, Inputs(tuple(tensors[:3]), tensors[3]),  # type: ignore[arg-type]
                       block_sparse_attention(*tensors[:3], layout))  # fmt: skip
        first = [x.transpose(1, 2).contiguous() for x in tensors]
        mask = flex_mask(case, job.device)
        runs: dict[str, tuple[Callable[..., Tensor], list[Tensor], bool]] = {
            "ours": (lambda q, k, v, layout=layout: block_sparse_attention(q, k, v, layout), tensors, False),
            "flex": (partial(flex, block_mask=mask), first, True),
            "dense": (scaled_dot_product_attention, first, True),
        }
        rows.append(_row(job, case, layout, runs))
    return {"rows": rows}


def _row(
    job: Job, case: Case, layout: BlockLayout, runs: dict[str, tuple[Callable[..., Tensor], list[Tensor], bool]]
) -> dict[str, Any]:
    forward, backward, found = {}, {}, {}
    for name, (attend, tensors, heads_first) in runs.items():
        forward[name] = _without_gradients(attend, tensors[:3])
        results = [forward[name]()]
        if name != "flex" or job.device == "cuda":  # FlexAttention has no backward on a CPU
            leaves = [x.detach().requires_grad_() for x in tensors[:3]]
            backward[name] = partial(torch.autograd.grad, attend(*leaves), leaves, tensors[3], retain_graph=True)
            results += backward[name]()
        found[name] = [x.transpose(1, 2) if heads_first else x for x in results]
    for what, got, want in zip(("out", "dq", "dk", "dv"), found["flex"], found["ours"], strict=False):
        job.gate.check(f"{case.name}, {what}", "flex", "ours", got, want)
    row: dict[str, Any] = {"name": case.name, "tokens": case.pattern.total, "computed": layout.block_density}
    for way, contenders in (("forward", forward), ("backward", backward)):
        times = interleave(contenders, 1 if job.quick else job.args.rounds, device=job.device)
        median = {name: timing.median for name, timing in times.items()}
        row[way] = {
            "ms": {name: value * 1e3 for name, value in median.items()},
            "flex_ratio": median["flex"] / median["ours"] if "flex" in median else None,
            "share": median["ours"] / median["dense"],
        }
    job.say(f"{case.name}: forward {row['forward']['ms']['ours']:.2f} ms, × Flex {row['forward']['flex_ratio']:.2f}")
    return row


def _without_gradients(attend: Callable[..., Tensor], tensors: list[Tensor]) -> Callable[[], Tensor]:
    def call() -> Tensor:
        with torch.no_grad():
            return attend(*tensors)

    return call


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", type=int, help="so many of the videos, from the first on")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="timings of each contender")


BENCHMARK = Benchmark(
    name="neighborhoods",
    about=__doc__,
    sections={"layouts": layouts, "video": video},
    devices=("cpu", "cuda"),
    options=options,
)

if __name__ == "__main__":
    raise SystemExit(run(BENCHMARK))
