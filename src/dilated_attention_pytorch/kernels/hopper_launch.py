"""Launches of the warp-specialised kernels for Hopper, of what a `launch.Call` holds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..patterns.blocks import ceil_div
from . import hopper_backward, hopper_common, hopper_dkv, hopper_forward, hopper_large
from .common import BY_KEY
from .configs import (
    HOPPER_BACKWARD,
    HOPPER_BACKWARD_HALF,
    HOPPER_DKV_NARROW,
    HOPPER_FUSED,
    forward_tiles,
    sums_width,
)

if TYPE_CHECKING:
    from .launch import Call, Rows


def forward(call: Call, out: Tensor, lse: Tensor, block_q: int, by_query: list[Tensor], lists_per_sample: int) -> None:
    """Of the layout's rows of blocks, or of those that unite several."""
    layout = call.layout
    num_blocks, fine = layout.num_q_blocks, 0
    if block_q > layout.block_q:
        num_blocks, fine = ceil_div(layout.seq_q, block_q), layout.block_q
    tile_k, q_stages, kv_stages = forward_tiles(block_q)[max(call.boxes)]
    if layout.dilated or len(layout.bitmaps):  # each block has its own multiplicity, or words
        tile_k = min(tile_k, layout.block_k)
    rows = min(tile_k, layout.block_k)  # a tile is part of a block or gathers several
    (box, box_v), tensors = call.boxes, (call.q, call.k, call.v, out)
    described = _described(call, tensors, (64, rows, rows, 64), (box, box, box_v, box_v))
    for programs, schedule in call.schedules(num_blocks, block_q / 128, call.heads):
        call.launch(
            hopper_forward.forward_kernel, (programs,),
            (*described, lse, *by_query, call.slopes, layout.bitmaps),
            (*call.sizes, num_blocks, lists_per_sample, *call.list_sizes, *schedule,
             layout.num_k_blocks // layout.num_residues, call.exp_scale, call.cap, *call.dropout),
            **{**_flags(call, box), "BLOCK_Q": block_q}, FINE=fine, TILE_K=tile_k, Q_STAGES=q_stages,
            BITMAPS=bool(len(layout.bitmaps)), KV_STAGES=kv_stages, num_warps=4, maxnreg=168,
        )  # fmt: skip


def backward(
    call: Call, do: Tensor, of_rows: Rows, dq: Tensor, dk: Tensor, dv: Tensor, *, of_keys: bool, fused: bool = False
) -> None:
    layout = call.layout
    box, box_v = call.boxes
    if fused:
        box = sums_width(call.head_dim)
    large = max(box, box_v) > max(HOPPER_FUSED)
    stream, num_stages = (HOPPER_FUSED if fused else HOPPER_BACKWARD)[max(box, box_v)]
    if large and min(box, box_v) <= max(HOPPER_FUSED):
        stream, num_stages = HOPPER_BACKWARD_HALF
    if of_keys and not large and (call.flags["SOFTCAP"] or call.flags["ALIBI"] or call.flags["DROPOUT"]):
        stream, num_stages = HOPPER_DKV_NARROW
    stream = min(stream, layout.block_q if of_keys else layout.block_k)
    flags, kind = _flags(call, box), 0
    if fused:
        # A warpgroup gets 64 × 64 numbers of dq: half of them, or all.
        kind = hopper_dkv.HALVES.value if stream * box == 2 * 64 * 64 else hopper_dkv.OWN.value
    if of_keys:
        documents, flags["DOCUMENTS"] = documents_by_key(call)
        lists, lists_per_sample = call.by_key(documents), call.lists_per_sample
        num_blocks, walked = layout.num_k_blocks, layout.num_q_blocks
        tiles, heads = layout.block_k // 128, call.heads_kv
    else:
        lists = [*layout.by_query.tensors()[:2], *call.by_query(call.key_bits)]
        lists_per_sample = call.lists.lists_per_sample
        num_blocks, walked = layout.num_q_blocks, layout.num_k_blocks
        tiles, heads = layout.block_q // 128, call.heads
    of_q, of_k = (stream, 64) if of_keys else (64, stream)
    described = _described(call, (call.q, call.k, call.v, do), (of_q, of_k, of_k, of_q), (box, box, box_v, box_v))
    described.append(hopper_common.describe_rows(of_rows[0], stream))
    described += _described(call, (dk, dv), (64, 64), (box, box_v))
    dqs = hopper_common.describe_sums(dq) if fused else dq
    # Of large heads dk and dv come one after the other.
    parts = (hopper_large.OF_KEYS.value, hopper_large.OF_VALUES.value) if of_keys and large else (0,)
    schedules = call.schedules(num_blocks, tiles, heads)
    for part, (programs, schedule) in itertools.product(parts, schedules):
        call.launch(
            hopper_backward.backward_kernel, (programs,),
            (*described, dqs, *of_rows[1:3], *lists, call.slopes),
            (call.batch, *call.sizes, num_blocks, lists_per_sample, *call.list_sizes, *schedule,
             walked // layout.num_residues, call.exp_scale, call.scale, call.cap, *call.dropout),
            **flags, WIDTH=call.head_dim, STREAM=stream, NUM_STAGES=num_stages,
            OWN_LISTS=call.own_lists, OF_KEYS=of_keys, ALONE=part,
            SUMS=kind, num_warps=4, maxnreg=168,
        )  # fmt: skip


def _described(call: Call, tensors: Sequence[Tensor], rows: Sequence[int], boxes: Sequence[int]) -> list[Any]:
    """For the Hopper kernels' copies of so many rows, in boxes of these widths."""
    of_class = call.layout.num_residues
    return [hopper_common.describe(x, num, of_class, box) for x, num, box in zip(tensors, rows, boxes, strict=True)]


def _flags(call: Call, box: int) -> dict[str, Any]:
    """Their D and D_V are the widths of boxes."""
    unknown = ("PADDED_D", "PADDED_D_V", "PRECISION", "BASE_E")
    known = {name: value for name, value in call.flags.items() if name not in unknown}
    return known | {"D": box, "D_V": call.boxes[1]}


def documents_by_key(call: Call) -> tuple[Tensor, int]:
    """What a kernel that owns keys reads of documents, and DOCUMENTS of it: where each key is seen by neighbouring
    queries, these, so that no pair is looked at."""
    flags, layout = call.flags, call.layout
    one_rule = flags["ONE_INTERVAL"] and not (flags["HAS_RULE_IDS"] or flags["DOCUMENT_IDS"])
    if not (one_rule and flags["DOCUMENTS"] and layout.seen_by.numel()):
        return layout.documents, flags["DOCUMENTS"]
    return layout.seen_by, BY_KEY.value
