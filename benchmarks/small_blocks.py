"""Small blocks on a GPU: what it costs to follow the data more closely, forward, beside the plain kernels.

    python benchmarks/small_blocks.py       # a GPU, a minute or two; options: harness.py

random  5 % of 32,768 tokens in random blocks, from 128 × 128 down to 16 keys. `share` is the speed ÷ that of 128 × 128.
chosen  Blocks of 16 × 16 whose neighbouring rows have some keys in common, as rows chosen from content have, and none:
        `union` is how many times as many key blocks 4 rows see together as one does. `uniting` is the time of uniting
        rows, which a layout takes once, and which the forward of a new layout takes too.

bfloat16, 2048 columns of heads. Contenders of a row take turns; outputs of some rows are compared with float64
attention before.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from cases import Inputs, check_rows
from dilated_attention_pytorch import BlockLayout, block_sparse_attention
from dilated_attention_pytorch.kernels import united
from dilated_attention_pytorch.testing.timing import interleave
from gpu_kernels import WIDTH, _plain
from harness import Benchmark, Job, Record, run

SIZES = ((128, 128), (128, 64), (128, 32), (128, 16), (64, 64), (64, 16))
# Share of pairs, and how much a row's choice is that of its 8 neighbours.
CHOSEN = ((0.25, 0.5), (0.125, 0.62), (0.05, 0.62), (0.05, 0.0))


def drawn(scores: Tensor, share: float) -> Tensor:
    """bool mask of the largest of each row."""
    chosen = scores.topk(max(1, round(share * scores.shape[1])), dim=1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, True)


def timed(job: Job, name: str, mask: Tensor, block: tuple[int, int], head_dim: int) -> dict[str, Any]:
    """Milliseconds and TFLOP/s of the pairs in the mask's blocks."""
    tokens, heads = mask.shape[0] * block[0], WIDTH // head_dim
    made = Inputs.make(tokens, heads, head_dim)
    inputs = Inputs(tuple(x.to(torch.bfloat16) for x in made.ours), made.grad.to(torch.bfloat16))  # type: ignore[arg-type]
    q, k, v = (x.to(job.device) for x in inputs.ours)
    ours, theirs = (BlockLayout.from_block_mask(mask.to(job.device), block) for _ in range(2))

    def plain() -> Tensor:
        with _plain():
            return block_sparse_attention(q, k, v, theirs, backend="triton")  # type: ignore[return-value]

    runs = {"ours": partial(block_sparse_attention, q, k, v, ours, backend="triton"), "plain": plain}
    for who, attend in runs.items():
        check_rows(job.gate, f"{name}, {who}", ours.to("cpu"), inputs, attend().cpu())
    times = {who: timing.median for who, timing in interleave(runs, 2 if job.quick else 7, device=job.device).items()}
    flops = 4 * WIDTH * int(mask.sum()) * block[0] * block[1]
    found: dict[str, Any] = {"tokens": tokens, "head_dim": head_dim, "block_q": block[0], "block_k": block[1]}
    for who, seconds in times.items():
        found |= {f"{who}_ms": seconds * 1e3, f"{who}_tflops": flops / seconds * 1e-12}
    return found | {"speed_up": times["plain"] / times["ours"]}


def random(job: Job) -> Record:
    rows: list[dict[str, Any]] = []
    tokens = 4096 if job.quick else 32768
    generator = torch.Generator().manual_seed(0)
    for head_dim in (128, 64):
        for block in SIZES:
            scores = torch.rand(tokens // block[0], tokens // block[1], generator=generator)
            row = timed(job, f"{block}, D={head_dim}", drawn(scores, 0.05), block, head_dim)
            rows.append(row)
            whole = next(each for each in rows if each["head_dim"] == head_dim)
            row["share"] = row["ours_tflops"] / whole["ours_tflops"]
            job.say("{block_q} × {block_k}, D={head_dim}: {ours_tflops:.0f} TFLOP/s, {speed_up:.2f} × plain, "
                    "{share:.2f} of 128 × 128".format(**row))  # fmt: skip
    return {"rows": rows}


def chosen(job: Job) -> Record:
    rows = []
    blocks = (4096 if job.quick else 32768) // 16
    generator = torch.Generator().manual_seed(0)
    for share, common in CHOSEN:
        of_group, of_row = (torch.rand(num, blocks, generator=generator) for num in (blocks // 8, blocks))
        mask = drawn(common * of_group.repeat_interleave(8, 0) + (1 - common) * of_row, share)
        union = float(mask.unflatten(0, (-1, 4)).any(1).sum() * 4 / mask.sum())
        row = timed(job, f"{share:.0%}, {common} in common", mask, (16, 16), 128)
        layout = BlockLayout.from_block_mask(mask.to(job.device), 16)
        uniting = {"uniting": partial(united.united_rows, layout, 16)}
        took = interleave(uniting, 2 if job.quick else 7, device=job.device)["uniting"].median
        rows.append({"pairs": share, "union": union, **row, "uniting_ms": took * 1e3})
        job.say("{pairs:.1%} of the pairs, union {union:.1f}: {ours_ms:.2f} ms, {speed_up:.2f} × plain; uniting "
                "{uniting_ms:.2f} ms".format(**rows[-1]))  # fmt: skip
    return {"rows": rows}


BENCHMARK = Benchmark(
    name="small_blocks", about=__doc__, sections={"random": random, "chosen": chosen}, devices=("cuda",)
)


if __name__ == "__main__":
    raise SystemExit(run(BENCHMARK))
