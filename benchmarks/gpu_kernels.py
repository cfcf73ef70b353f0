"""The kernels on a GPU beside their rivals: the sections "kernels" and "options" of `benchmarks/gpu.py`.

A `Case` is a layout and a head dimension, an `Attention` a contender over it. All contenders of a case are compiled
beforehand, by as many processes as there are cores, and compared before they take turns.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from cases import Inputs, expected, flex_mask, rows_to_check, tokens_of
from dilated_attention_pytorch import (
    BlockLayout,
    Causal,
    DilatedBlocks,
    Full,
    Pattern,
    RandomBlocks,
    SlidingWindow,
    block_sparse_attention,
)
from dilated_attention_pytorch.kernels import launch
from dilated_attention_pytorch.testing.timing import interleave
from harness import Job

DEVICE = "cuda"
DENSE = 16384
ROUNDS = 7
WIDTH = 2048
RECOMPILE_LIMIT = 64  # a mask or score function is one recompilation


@dataclass(frozen=True)
class Case:
    name: str
    pattern: Pattern
    head_dim: int
    tokens: int = 32768
    block: int = 128
    flex: bool = True  # whether FlexAttention is a contender
    autotune: bool = False
    shared: int = 1  # query heads of a key head; where they are several, ours is timed alone


def cases(quick: bool = False) -> list[Case]:
    """5 % of 32,768 tokens unless it says something else."""
    if quick:
        return [
            Case("random", RandomBlocks(3), 128, tokens=4096),
            Case("causal", Causal(), 64, tokens=2048, flex=False),
        ]
    dilated = DilatedBlocks((4096, 16384, 32768), (1, 4, 16), 0.05, 128)
    window = SlidingWindow(13 * 64, 13 * 64 - 1)
    return [
        Case("random", RandomBlocks(13), 128, autotune=True),
        Case("window", window, 128),
        Case("dilated", dilated, 128),
        Case("random", RandomBlocks(13), 64, autotune=True),
        Case("window", window, 64),
        Case("dilated", dilated, 64),
        Case("full", Full(), 128, tokens=DENSE, flex=False),
        Case("causal", Causal(), 128, tokens=DENSE, flex=False),
        Case("full", Full(), 64, tokens=DENSE, flex=False),
        Case("causal window 1024", SlidingWindow(1023, 0), 128),
        Case("causal window 1024", SlidingWindow(1023, 0), 64),
        Case("random", RandomBlocks(26, block_size=64), 64, block=64),
        Case("random", RandomBlocks(51, block_size=32), 64, block=32, flex=False),
        Case("random", RandomBlocks(102, block_size=16), 64, block=16, flex=False),
        *(
            Case("random, 4 heads a key head", RandomBlocks(n, block_size=block), 64, block=block, shared=4)
            for n, block in ((26, 64), (51, 32), (102, 16))
        ),
        Case("random 1 %", RandomBlocks(3), 128),
        Case("random 20 %", RandomBlocks(51), 128),
        Case("random 50 %", RandomBlocks(128), 128),
    ]


def medians(contenders: dict[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, float]:
    """Seconds of a call of each, in turns."""
    return {name: timing.median for name, timing in interleave(contenders, rounds, device=DEVICE).items()}


def random_inputs(
    tokens: int, heads: int, head_dim: int, dtype: torch.dtype = torch.bfloat16, num: int = 4, shared: int = 1
) -> list[Tensor]:
    """q, k, v and dout, or the first `num` of these."""
    of_each = (heads, heads // shared, heads // shared, heads)[:num]
    return [torch.randn(1, tokens, each, head_dim, device=DEVICE, dtype=dtype) for each in of_each]


@dataclass
class Attention:
    """A contender: how it computes out, and in which order its tensors are."""

    run: Callable[[Tensor, Tensor, Tensor], Tensor]
    tensors: list[Tensor]
    heads_first: bool
    work: float = 1.0  # of its FLOPs, the part that ours does

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.run(*self.tensors[:3])

    def backward(self) -> Callable[[], tuple[Tensor, ...]]:
        leaves = [x.detach().requires_grad_() for x in self.tensors[:3]]
        out = self.run(*leaves)
        return partial(torch.autograd.grad, out, leaves, self.tensors[3], retain_graph=True)

    def natural(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2) if self.heads_first else x


def dense(kernel: SDPBackend, is_causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(kernel):
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def _flex_mask(case: Case, layout: BlockLayout) -> BlockMask:
    if isinstance(case.pattern, SlidingWindow):
        left, right = case.pattern.left, case.pattern.right

        def near(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query - key <= left) & (key - query <= right)

        return create_block_mask(near, None, None, case.tokens, case.tokens, BLOCK_SIZE=case.block, _compile=True)
    mask = layout.to_block_mask().cpu()
    return flex_mask(mask, case.block).to(DEVICE)


def contenders_of(case: Case, layout: BlockLayout, tensors: list[Tensor], autotune: bool) -> dict[str, Attention]:
    found = {
        "ours": Attention(lambda q, k, v: block_sparse_attention(q, k, v, layout, backend="triton"), tensors, False)
    }
    if case.shared > 1:
        return found
    turned = [x.transpose(1, 2) for x in tensors]
    if case.flex:
        mask = _flex_mask(case, layout)
        modes = {"flex": None, "flex, max-autotune": "max-autotune-no-cudagraphs"}
        for name, mode in modes.items():
            # The default configuration fails for blocks of 64; the tuned one does not.
            wanted = case.block >= 128 if mode is None else case.block < 128 or (autotune and case.autotune)
            if not wanted:
                continue
            compiled = torch.compile(flex_attention, dynamic=False, mode=mode)
            found[name] = Attention(partial(compiled, block_mask=mask), turned, True)
    is_causal = case.pattern == Causal()
    length = min(DENSE, case.tokens)
    short = [x[:, :length].transpose(1, 2).contiguous() for x in tensors]
    for name, kernel in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        dense_pairs = length * (length + is_causal) / (1 + is_causal)
        pairs = layout.density * case.tokens**2
        found[name] = Attention(partial(dense, kernel, is_causal), short, True, work=pairs / dense_pairs)
    return found


def _compile(case: Case, autotune: bool) -> None:
    """Compile what a case needs, for the caches on disk."""
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    for each in _prepared(case, autotune)[2].values():
        each.forward()
        each.backward()()


def _prepared(case: Case, autotune: bool) -> tuple[BlockLayout, list[Tensor], dict[str, Attention]]:
    tensors = random_inputs(case.tokens, WIDTH // case.head_dim, case.head_dim, shared=case.shared)
    layout = BlockLayout.from_pattern(case.pattern, case.tokens, block_size=case.block, device=DEVICE)
    return layout, tensors, contenders_of(case, layout, tensors, autotune)


def in_processes(compile_one: Callable[..., None], jobs: Iterable[tuple[Any, ...]]) -> None:
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        for compiled in [pool.submit(compile_one, *job) for job in jobs]:
            compiled.result()


def kernels(job: Job) -> list[dict[str, Any]]:
    rows = []
    in_processes(_compile, [(case, job.args.autotune) for case in cases(job.quick)])
    job.say("everything is compiled")
    for case in cases(job.quick):
        layout, tensors, found = _prepared(case, job.args.autotune)
        _check(job, case, layout, tensors, found)
        row: dict[str, Any] = {
            "name": case.name, "head_dim": case.head_dim, "tokens": case.tokens, "block": case.block,
            "density": layout.density, "block_density": layout.block_density,
        }  # fmt: skip
        # What the active blocks cost; a rival's own blocks may be others only where they are the same pairs.
        flops = 4 * WIDTH * layout.num_active_blocks * case.block**2
        if case.name == "causal":
            flops = 4 * WIDTH * case.tokens * (case.tokens + 1) / 2
        for way, factor in (("forward", 1.0), ("backward", 2.5)):
            times = times_of(found, way)
            row[way] = {
                name: {
                    "ms": times[name] * 1e3 * each.work,
                    "tflops": factor * flops / (times[name] * each.work) * 1e-12,
                    "ratio": times[name] * each.work / times["ours"],
                }
                for name, each in found.items()
            }
        rows.append(row)
        job.say(f"{case.name}, D={case.head_dim}, block {case.block}: " + ", ".join(
            f"{way} {row[way]['ours']['tflops']:.0f} TFLOP/s (" + ", ".join(
                f"{name} {each['ratio']:.2f}" for name, each in row[way].items() if name != "ours") + ")"
            for way in ("forward", "backward")))  # fmt: skip
        del found, tensors
        free_memory()
    return rows


def times_of(found: dict[str, Attention], way: str) -> dict[str, float]:
    return medians({name: each.forward if way == "forward" else each.backward() for name, each in found.items()})


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _check(job: Job, case: Case, layout: BlockLayout, tensors: list[Tensor], found: dict[str, Attention]) -> None:
    """Rows of the output against float64, then everyone's gradients against ours, whose own are checked in rows."""
    rows = rows_to_check(layout)
    at, where = tokens_of(rows, case.block).to(DEVICE), f"float64 in {len(rows)} query blocks"
    only = torch.zeros_like(tensors[3])
    only[:, at] = tensors[3][:, at]
    want = expected(Inputs(tuple(tensors[:3]), tensors[3]), layout, rows, gradients=True)
    ours = found["ours"]
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out = ours.run(*leaves)
    dq, dk, dv = torch.autograd.grad(out, leaves, only)
    for name, got in {"out": out[:, at], "dq": dq[:, at], "dk": dk, "dv": dv}.items():
        job.gate.check(f"{case.name}, D={case.head_dim}, {name}", "ours", where, got.detach(), want[name])
    results = [out.detach(), *ours.backward()()]
    for name in [name for name in found if name.startswith("flex")]:
        _check_all(job, f"{case.name}, D={case.head_dim}", name, found[name], "ours", results)


def _check_all(
    job: Job, case: str, contender: str, attention: Attention, against: str, results: Sequence[Tensor]
) -> None:
    """out, dq, dk and dv."""
    got = [attention.forward(), *attention.backward()()]
    for name, mine, right in zip(("out", "dq", "dk", "dv"), got, results, strict=True):
        job.gate.check(f"{case}, {name}", contender, against, attention.natural(mine), right)


OPTIONS = ("softcap", "alibi", "dropout")
SOFTCAP = 20.0


def option_cases(quick: bool = False) -> list[tuple[Case, str]]:
    if quick:
        return [(Case("random", RandomBlocks(3), 64, tokens=4096), option) for option in OPTIONS]
    patterns = {"causal window 1024": SlidingWindow(1023, 0), "random": RandomBlocks(13)}
    return [
        (Case(name, pattern, head_dim), option)
        for head_dim in (128, 64)
        for name, pattern in patterns.items()
        for option in OPTIONS
    ]


class PlainKernels(Attention):
    """Ours, by the kernels of other GPUs."""

    def forward(self) -> Tensor:
        with _plain():
            return super().forward()

    def backward(self) -> Callable[[], tuple[Tensor, ...]]:
        with _plain():
            run = super().backward()

        def backward() -> tuple[Tensor, ...]:
            with _plain():
                return run()

        return backward


def _plain() -> Any:
    return patch.object(launch.Call, "_on_hopper", lambda *args, **given: False)


def option_contenders(case: Case, option: str, tensors: list[Tensor]) -> dict[str, Attention]:
    """The last, the plain PyTorch backend in float32, is not timed."""
    layouts = [
        BlockLayout.from_pattern(case.pattern, case.tokens, block_size=case.block, device=DEVICE) for _ in range(2)
    ]
    slopes = 2.0 ** -torch.linspace(1, 8, tensors[0].shape[2], device=DEVICE)
    given = {"softcap": {"softcap": SOFTCAP}, "alibi": {"alibi_slopes": slopes}, "dropout": {"dropout_p": 0.1}}[option]

    def ours(layout: BlockLayout, backend: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if option == "dropout":
            torch.manual_seed(7)
        return block_sparse_attention(q, k, v, layout, backend=backend, **given)

    found = {
        "ours": Attention(partial(ours, layouts[0], "triton"), tensors, False),
        "plain kernels": PlainKernels(partial(ours, layouts[1], "triton"), tensors, False),
    }

    def capped(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return SOFTCAP * torch.tanh(score / SOFTCAP)

    def sloped(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score - slopes[h] * (query - key).abs()

    if option != "dropout":
        compiled = torch.compile(flex_attention, dynamic=False)
        change = capped if option == "softcap" else sloped
        run = partial(compiled, score_mod=change, block_mask=_flex_mask(case, layouts[0]))
        found["flex"] = Attention(run, [x.transpose(1, 2) for x in tensors], True)
    found["expected"] = Attention(partial(ours, layouts[1], "blockwise"), [x.float() for x in tensors], False)
    return found


def _compile_option(case: Case, option: str) -> None:
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    found = option_contenders(case, option, random_inputs(case.tokens, WIDTH // case.head_dim, case.head_dim))
    del found["expected"]
    for each in found.values():
        each.forward()
        each.backward()()


def options(job: Job) -> list[dict[str, Any]]:
    rows = []
    in_processes(_compile_option, option_cases(job.quick))
    for case, option in option_cases(job.quick):
        tensors = random_inputs(case.tokens, WIDTH // case.head_dim, case.head_dim)
        found = option_contenders(case, option, tensors)
        reference = found.pop("expected")
        results = [reference.forward(), *reference.backward()()]
        for name, each in found.items():
            _check_all(job, f"{case.name}, D={case.head_dim}, {option}", name, each, "blockwise, float32", results)
        row: dict[str, Any] = {"name": case.name, "option": option, "head_dim": case.head_dim}
        for way in ("forward", "backward"):
            times = times_of(found, way)
            row |= {f"{way}_ms": times["ours"] * 1e3}
            row |= {f"{way}, {name}": times[name] / times["ours"] for name in times if name != "ours"}
        rows.append(row)
        job.say(", ".join(f"{k} {v:.2f}" if isinstance(v, float) else str(v) for k, v in row.items()))
        del found, reference, results, tensors
        free_memory()
    return rows
