"""From a layout of dilated attention to the launches of the kernels that walk runs; and which calls they take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..layout import BlockLayout
from ..layout.branch_runs import MOST_DILATIONS, RunPlan, Runs, plan_of, runs_of
from ..options import CallOptions
from . import hopper_runs, hopper_runs_backward, hopper_runs_common
from .tile_scheduler import SNAKE, TileSchedule

if TYPE_CHECKING:
    from .launch import Call

# By padded head dimension: rows of a part, and how many parts are in flight.
FORWARD = {32: (128, 4), 64: (128, 3), 128: (128, 2)}
DKV = {32: (64, 4), 64: (64, 4), 128: (64, 3)}
DQ = {32: (128, 2), 64: (128, 2), 128: (64, 3)}
# What pairs cost, where those of even blocks on the kernels for Hopper cost 1. Tiles of runs are not all full, not all
# walked by all of their rows, and begin more slowly (docs/dev/LOG.md: causal and geometric, runs take 0.83 of the time
# of blocks, for 0.59 of their pairs as they are estimated here); plain kernels have half the rate; of mixed blocks
# every pair is counted. By padded head dimension; 128 is not measured.
OF_RUNS, PLAIN, MIXED = {32: 1.4, 64: 1.4, 128: 1.75}, 2.0, 6.0
WIDEST = 64  # head: those up to 128 compile, and have not run on a GPU yet


def padded_width(head_dim: int) -> int:
    return max(32, 1 << (head_dim - 1).bit_length())


def why_not(tensors: Sequence[Tensor], layout: BlockLayout, options: CallOptions, blocks_on_hopper: bool) -> str:
    """Why a call over branches, on Hopper, does not walk runs; empty if it does.

    Args:
        tensors: q, k and v.
        blocks_on_hopper: whether the kernels that walk blocks would be those for Hopper.
    """
    head_dim = tensors[0].shape[3]
    if options.dropout_p > 0 or options.is_masked or options.has_score_mods or options.scale == 0:
        return "runs know no dropout, masks, softcap or bias, and no scale of 0"
    if head_dim % 8 or head_dim > WIDEST or any(x.shape[3] != head_dim for x in tensors):
        return f"runs are for heads of a multiple of 8 up to {WIDEST}, v as wide as q and k"
    if not all(map(reachable, tensors)):
        return "the copy engine cannot read these strides or addresses"
    if "run_plan" not in layout._derived and layout.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "runs are not planned while a CUDA graph is captured: make the call once before"
    runs = runs_of(layout)
    return runs.reason or _too_much(runs, padded_width(head_dim), blocks_on_hopper)


def _too_much(runs: Runs, padded: int, blocks_on_hopper: bool) -> str:
    """Both read a key once that several branches hold, where segments allow it."""
    of_blocks = (runs.even_pairs + MIXED * runs.mixed_pairs) * (1.0 if blocks_on_hopper else PLAIN)
    of_runs = OF_RUNS[padded] * runs.pairs
    if of_runs < of_blocks:
        return ""
    return f"blocks have less work, {of_blocks:.3g} to {of_runs:.3g} pairs a sample"


def reachable(x: Tensor) -> bool:
    """By the copy engine."""
    return x.stride(3) == 1 and all(s > 0 and s % 8 == 0 for s in x.stride()[:3]) and x.data_ptr() % 16 == 0


def forward(call: Call, out: Tensor, lse: Tensor) -> None:
    q, k, v = call.q, call.k, call.v
    plan = plan_of(call.layout)
    padded = padded_width(call.head_dim)
    tile_k, stages = FORWARD[padded]
    programs, schedule = _schedule(call, len(plan.work))
    call.launch(
        hopper_runs.runs_forward_kernel, (programs,),
        (*_views(k, plan, tile_k, padded), *_views(v, plan, tile_k, padded), q, out, lse, plan.work, plan.rows,
         plan.runs, plan.tables),
        (*_steps(q), call.heads, call.group, call.seq_q, _repeats(call), *schedule, call.exp_scale),
        **_flags(call, padded, plan), TILE_K=tile_k, STAGES=stages, num_warps=4, maxnreg=168,
    )  # fmt: skip


def backward(call: Call, do: Tensor, of_rows: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """dq, dk and dv into `grads`, dk and dv of every query head; `of_rows` is lse and delta, [batch, heads, any] in the
    order of tokens, as kernels take them."""
    q, k, v, (dq, dk, dv) = call.q, call.k, call.v, grads
    plan = plan_of(call.layout)
    padded = padded_width(call.head_dim)
    programs, schedule = _schedule(call, len(plan.work))
    sizes = (call.heads, call.group, call.seq_q, of_rows[0].shape[2], _repeats(call), *schedule)
    for of_keys in (True, False):
        stream, stages = (DKV if of_keys else DQ)[padded]
        (a, b), (c, d) = ((k, v), (q, do)) if of_keys else ((q, do), (k, v))
        results = (dk, dv) if of_keys else (dq, dq)
        work, runs = (plan.key_work, plan.key_runs) if of_keys else (plan.work, plan.runs)
        call.launch(
            hopper_runs_backward.runs_backward_kernel, (programs,),
            (*_views(c, plan, stream, padded), *_views(d, plan, stream, padded), a, b, *results, *of_rows,
             work, plan.rows, runs, plan.tables),
            (*_steps(a), *_steps(b), *sizes, call.exp_scale, call.scale),
            **_flags(call, padded, plan), STREAM=stream, STAGES=stages, OF_KEYS=of_keys, num_warps=4, maxnreg=168,
        )  # fmt: skip


def _views(x: Tensor, plan: RunPlan, rows: int, padded: int) -> list[Any]:
    found = [hopper_runs_common.describe_view(x, r, rows, padded) for r in plan.dilations]
    return found + found[-1:] * (MOST_DILATIONS - len(found))


def _steps(x: Tensor) -> tuple[int, ...]:
    return tuple(step // 8 for step in x.stride()[:3])


def _flags(call: Call, padded: int, plan: RunPlan) -> dict[str, Any]:
    return {
        "D": call.head_dim,
        "PADDED": padded,
        "DILATIONS": len(plan.dilations),
        "CAUSAL": runs_of(call.layout).is_causal,
        "NEGATIVE_SCALE": call.scale < 0,
    }


def _schedule(call: Call, tiles: int) -> tuple[int, TileSchedule]:
    """The samples of a tile, and the heads that share it, follow each other."""
    from .launch import num_processors

    of_tile = call.batch * _repeats(call)
    total = tiles * of_tile
    return min(total, num_processors(call.q.device)), TileSchedule(total, of_tile, 0, SNAKE)


def _repeats(call: Call) -> int:
    """Heads that share a list."""
    return 1 if call.layout.num_heads else call.heads
