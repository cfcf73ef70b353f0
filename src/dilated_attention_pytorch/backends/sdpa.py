"""Layouts that leave nothing out: PyTorch's own `scaled_dot_product_attention` is the right kernel for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..layout import BlockLayout
from ..options import CallOptions
from ..patterns.blocks import ceil_div
from .base import Request
from .sizes import SizeRequest, Workspace

name = "sdpa"


def can_run(request: Request) -> tuple[bool, str]:
    """Only where PyTorch's kernel is exact for the layout and never falls back to the quadratic one."""
    refusals = {
        "the layout is neither full nor causal": request.kind is None,
        "a causal layout of unequal lengths is aligned at the end": request.kind == "causal" and not request.square,
        "lse was asked for": request.return_lse,
        "dropout is not reproducible there": request.dropout,
        "key_padding_mask and document_ids need a dense mask there": request.is_masked,
        "its gradients repeat bit for bit only under torch.use_deterministic_algorithms(True)": (
            request.deterministic and request.device.type == "cuda" and not torch.are_deterministic_algorithms_enabled()
        ),
        "softcap, alibi_slopes and bias are unknown there": request.has_score_mods,
        "it has a linear-memory kernel for grouped key heads in half precision on CUDA alone": (
            request.grouped and (request.device.type != "cuda" or request.dtype not in (torch.float16, torch.bfloat16))
        ),
        "it has no linear-memory kernel for float64 on this device": (
            request.dtype == torch.float64 and request.device.type != "cpu"
        ),
        "it may take a kernel quadratic in memory where v is of another width than q and k": (
            request.head_dim_v not in (None, request.head_dim)
        ),
        "it has no linear-memory kernel for this head_dim on this device": (
            request.head_dim > 256 and request.device.type != "cpu"
        ),
    }
    for reason, refused in refusals.items():
        if refused:
            return False, reason
    return True, f"the layout is {request.kind}: nothing is sparse"


def attention(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, options: CallOptions) -> tuple[Tensor, None]:
    # Its kernels read rows; for anything else it would take the quadratic one.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    grouped: Any = {"enable_gqa": True} if q.shape[2] != k.shape[2] else {}  # a symbolic bool is no argument
    out = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=layout.kind == "causal",
        scale=options.scale,
        **grouped,
    )
    return out.transpose(1, 2), None


def workspace(request: SizeRequest) -> Workspace:
    """What PyTorch's kernels allocate.

    On a GPU the backward sums dq in float32, in rows and columns rounded up, and keeps a number for each row. On a CPU
    each thread has a tile of scores, in the backward several, and copies of what is not float32.
    """
    shape = request.shape
    if request.device == "cpu":
        narrow = 2 if shape.dtype.itemsize == 2 else 1
        return Workspace((request.threads * 3 * narrow) << 19, (request.threads * 3 * narrow) << 20)
    rows, width = ceil_div(shape.seq_q, 128) * 128, ceil_div(shape.head_dim, 32) * 32
    return Workspace(0, 4 * shape.batch * shape.heads * rows * (width + 1))
