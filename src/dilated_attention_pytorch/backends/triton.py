"""The Triton kernels: block-sparse attention on CUDA devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from ..caches import cached
from ..layout import BlockLayout
from ..layout.rows import CacheRows
from ..options import CallOptions
from ..patterns.base import constant_in_graphs
from .base import Request
from .decoding import Cache
from .dropout import as_table
from .sizes import SizeRequest, Workspace

name = "triton"

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
MAX_FUSED_HEAD_DIM = 128  # `kernels.configs.HOPPER_FUSED`
needs_work_order = True
INSTALLED = find_spec("triton") is not None


def can_run(request: Request) -> tuple[bool, str]:
    here = request.capability is None  # what is installed here says nothing of another machine
    refusals = {
        "triton is not installed": here and not INSTALLED,
        "it was written and tested for CUDA, not ROCm": here and torch.version.hip is not None,
        "it runs on CUDA devices (elsewhere only when it is named, with TRITON_INTERPRET=1)": (
            request.device.type != "cuda" and not (request.named and os.environ.get("TRITON_INTERPRET") == "1")
        ),
        f"it has no kernel for {request.dtype}": request.dtype not in DTYPES,
        "alibi_slopes over a ring are unknown to its kernels, which count distances inside of a part": request.placed,
        f"head_dim must be at most {MAX_HEAD_DIM}": max(request.head_dim, request.head_dim_v or 0) > MAX_HEAD_DIM,
    }
    for reason, refused in refusals.items():
        if refused:
            return False, reason
    major = 8
    if request.capability is not None:
        major = request.capability[0]
    elif request.device.type == "cuda":
        major = _major(request.device.index)
    if major < 8:
        return False, "it needs a GPU of compute capability 8.0 or more"
    return True, "one kernel over the active blocks, forward and backward"


@constant_in_graphs
def _major(index: int | None) -> int:
    return torch.cuda.get_device_capability(index)[0]


def forward(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, options: CallOptions) -> tuple[Tensor, Tensor]:
    return _launch().forward(q, k, v, layout, _with_table(options))


def replay_for(
    q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, options: CallOptions
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """`forward` for tensors that differ from these in their numbers alone, in fewer steps; None until it is known."""
    return _launch().replay_for(q, k, v, layout, options)


def backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: BlockLayout,
    options: CallOptions,
    wanted: Sequence[str] = (),
) -> tuple[Tensor, ...]:
    return _launch().backward(do, dlse, q, k, v, out, lse, layout, _with_table(options), wanted)


def workspace(request: SizeRequest) -> Workspace:
    """Backward: lse and delta of every row, up to whole blocks, in float32; dq where it is added up in any order.
    Where runs are walked, dq has no sums, but under grouped heads dk and dv are of every query head."""
    shape, lists = request.shape, request.lists
    sums = 64 if shape.head_dim <= 64 else 128  # `kernels.configs.sums_width`
    walks_runs = lists.run_branches and request.device == "cuda" and shape.dtype.itemsize == 2
    numbers = 2 + (sums if _sums_dq(request) and not walks_runs else 0)
    of_heads = 2 * shape.q if walks_runs and shape.heads > shape.heads_kv else 0
    of_rows = numbers * 4 * shape.batch * shape.heads * lists.num_q_blocks * lists.block_q
    return Workspace(0, of_rows + of_heads)


def _sums_dq(request: SizeRequest) -> bool:
    """Whether one kernel computes all gradients: `kernels.launch.kernels_of`, before there are tensors."""
    shape, lists = request.shape, request.lists
    return (
        not request.deterministic
        and request.capability == (9, 0)
        and shape.dtype.itemsize == 2
        and max(shape.head_dim, shape.width_v) <= MAX_FUSED_HEAD_DIM
        and shape.head_dim % 8 == shape.width_v % 8 == 0
        and lists.block_k % 128 == lists.block_q % 64 == 0
        and lists.documents <= shape.seq_q  # one range of keys a query
        and not lists.bitmaps
        and shape.seq_q % lists.num_residues == shape.seq_k % lists.num_residues == 0
    )


def kernels_of(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, options: CallOptions) -> dict[str, str]:
    """Which kernels run forward and backward, and why."""
    return _launch().kernels_of(q, k, v, layout, options)


def decode(q: Tensor, cache: Cache, rows: CacheRows, options: CallOptions) -> tuple[Tensor, Tensor]:
    """As `backends.decoding.decode`."""
    from ..kernels import decode  # loads triton

    return decode.launch(q, *cache, rows, options)


@cached(1, "the module with the kernels, once loaded")
def _launch() -> ModuleType:
    from ..kernels import launch  # loads triton

    return launch


def _with_table(options: CallOptions) -> CallOptions:
    return options if options.seed is None else options._replace(seed=as_table(options.seed))
