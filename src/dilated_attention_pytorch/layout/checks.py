"""Validation of layouts: bad sizes and lists are refused before a kernel could follow them out of bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..patterns.base import check_int, shown
from ..patterns.blocks import check_block_size
from ..patterns.tokens import EVERYTHING, UNBOUNDED
from .bitmaps import UNIT
from .lists import BlockList

if TYPE_CHECKING:
    from .layout import BlockLayout

# Positions and their sums with `patterns.tokens.UNBOUNDED` stay inside int32.
MAX_SEQUENCE = 2**30


def block_pair(block_size: int | Sequence[int]) -> tuple[int, int]:
    pair = tuple(block_size) if isinstance(block_size, Sequence) else (block_size, block_size)
    if len(pair) != 2:
        raise ValueError(f"block_size must be an int or a pair (block_q, block_k), got {block_size!r}")
    for size in pair:
        check_block_size("block_size", size)
    return pair


def check_rows(name: str, blocks: Tensor, num_blocks: int, device: torch.device) -> None:
    """Numbers of blocks, each once and ascending: others would name tokens that are not there, or some twice."""
    if not isinstance(blocks, Tensor):
        raise TypeError(f"{name} must be a tensor, got {shown(blocks)}")
    if blocks.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int64, got {blocks.dtype}")
    if blocks.ndim != 1 or not len(blocks):
        raise ValueError(f"{name} must have one dimension and not be empty, got shape {list(blocks.shape)}")
    if blocks.device.type != device.type:
        raise ValueError(f"{name} must be on the layout's device, {device}, got {blocks.device}")
    blocks = blocks.cpu()
    first, last = int(blocks[0]), int(blocks[-1])
    if first < 0 or last >= num_blocks or (len(blocks) > 1 and not bool((blocks.diff() > 0).all())):
        got = ", ".join(map(str, blocks[:20].tolist())) + (", …" if len(blocks) > 20 else "")
        raise ValueError(f"{name} must be block numbers from 0 to {num_blocks - 1} that ascend, got [{got}]")


def check_mask(mask: object, sides: str) -> None:
    """A bool mask with these sides, and optionally heads, or samples and heads, before them."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise TypeError(f"mask must be a bool tensor, got {getattr(mask, 'dtype', type(mask).__name__)}")
    if mask.ndim not in (2, 3, 4):
        raise ValueError(
            f"mask must have shape [{sides}], [heads, {sides}] or [batch, heads, {sides}], got {list(mask.shape)}"
        )
    if 0 in mask.shape:
        raise ValueError(f"mask must not be empty, got shape {list(mask.shape)}")


def check_sizes(seq_q: int, seq_k: int, block_size: int | tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    for name, seq in (("seq_q", seq_q), ("seq_k", seq_k)):
        check_int(name, seq, least=1)
        if seq >= MAX_SEQUENCE:
            raise ValueError(f"{name} must be below {MAX_SEQUENCE}, got {seq}")
    return (seq_q, seq_k), block_pair(block_size)


def check_layout(layout: BlockLayout) -> None:
    """Refuse lists that are not a layout, before a kernel could follow them out of bounds."""
    lengths, _ = check_sizes(layout.seq_q, layout.seq_k, layout.blocks)
    if layout.kind is not None:
        raise ValueError(f"kind is found by from_pattern and from_block_mask and cannot be given, got {layout.kind!r}")
    if layout.num_residues != 1 or layout.dilated:
        raise ValueError("num_residues and branches are made by layout_of_branches and cannot be given")
    if not isinstance(layout.by_query, BlockList):
        raise TypeError(f"by_query must be a BlockList, got {type(layout.by_query).__name__}")
    for name in ("num_heads", "batch_size"):
        if getattr(layout, name) is not None:
            check_int(name, getattr(layout, name), least=1)
    lists, rules, documents = layout.by_query, layout.rules, layout.documents
    tensors = {"offsets": lists.offsets, "splits": lists.splits, "indices": lists.indices, "rule_ids": lists.rule_ids}
    num_rows = layout.num_lists * layout.num_q_blocks
    for name, tensor in {**tensors, "rules": rules, "documents": documents}.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dtype != torch.int32:
            raise TypeError(f"{name} must be int32, got {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, as kernels read it, got strides {list(tensor.stride())}")
        if tensor.device != layout.device:
            raise ValueError(f"{name} must be on the device of indices, {layout.device}, got {tensor.device}")
    shapes = {"offsets": (num_rows + 1,), "splits": (num_rows,), "indices": (len(lists.indices),)}
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensors[name].shape)}")
    if rules.ndim != 3 or not rules.numel() or rules.shape[2] != len(EVERYTHING):
        raise ValueError(f"rules must have shape [rules, intervals, {len(EVERYTHING)}], got {list(rules.shape)}")
    if (rules.long().abs() > UNBOUNDED).any():
        raise ValueError(f"rules must hold values between {-UNBOUNDED} and {UNBOUNDED}, got {int(rules.abs().max())}")
    if documents.ndim != 2 or len(documents) % 2 or documents.shape[1] not in (0, lengths[0]):
        raise ValueError(
            f"documents must have shape [2 a range, seq_q = {lengths[0]}] or [2, 0], got {list(documents.shape)}"
        )
    if documents.numel() and (rules[..., 4].long() * 2 > len(documents)).any():
        most = int(rules[..., 4].max())
        raise ValueError(f"rules must name ranges of documents, of which there are {len(documents) // 2}, got {most}")
    if layout.ranges_ascend and (documents.diff(dim=1) < 0).any():
        raise ValueError("ranges_ascend must be False where a start or stop in documents is below the one before it")
    _check_bitmaps(layout)
    if lists.rule_ids.ndim != 1:
        raise ValueError(f"rule_ids must have one dimension, got shape {list(lists.rule_ids.shape)}")
    if len(lists.rule_ids) != len(lists.indices) and not (lists.rule_ids.numel() == 0 and len(rules) == 1):
        raise ValueError(
            f"rule_ids must name a rule for each of {len(lists.indices)} blocks, got {len(lists.rule_ids)}"
        )
    edges = torch.stack((lists.offsets[:-1], lists.splits, lists.offsets[1:]))
    if lists.offsets[0] != 0 or (edges.long().diff(dim=0) < 0).any() or lists.offsets[-1] > len(lists.indices):
        raise ValueError(
            f"offsets and splits must ascend from 0 to at most {len(lists.indices)}, the number of indices"
        )
    _, _, key_block, _ = layout.entries()
    if ((key_block < 0) | (key_block >= layout.num_k_blocks)).any():
        raise ValueError(
            f"indices must be key blocks from 0 to {layout.num_k_blocks - 1}, got "
            f"{int(key_block.min())} to {int(key_block.max())}"
        )
    used = len(key_block)
    named = lists.rule_ids[:used]
    wrong = named[(named < 0) | (named >= len(rules))]
    if len(wrong):
        raise ValueError(f"rule_ids must be rules from 0 to {len(rules) - 1}, got {int(wrong[0])}")
    row = lists.row_of_entry()[:used]
    partial = lists.is_partial(lists.row_of_entry())[:used]
    same_run = (row[1:] == row[:-1]) & (partial[1:] == partial[:-1])
    if (same_run & (key_block[1:] <= key_block[:-1])).any():
        raise ValueError("indices must ascend in every row, full blocks first and then partial ones, none twice")
    key = (row.long() * layout.num_k_blocks + key_block).sort().values
    if (key[1:] == key[:-1]).any():
        raise ValueError("indices must name a block of a row once, as full or as partial")
    if (~partial & ((key_block + 1) * layout.block_k > layout.seq_k)).any():
        raise ValueError(f"a key block that reaches beyond seq_k = {layout.seq_k} must be partial")


def _check_bitmaps(layout: BlockLayout) -> None:
    bitmaps = layout.bitmaps
    if not isinstance(bitmaps, Tensor):
        raise TypeError(f"bitmaps must be a tensor, got {type(bitmaps).__name__}")
    if bitmaps.dtype != torch.int16:
        raise TypeError(f"bitmaps must be int16, got {bitmaps.dtype}")
    if bitmaps.ndim != 3:
        raise ValueError(f"bitmaps must have shape [bitmaps, block_q, block_k / {UNIT}], got {list(bitmaps.shape)}")
    if len(bitmaps) and bitmaps.shape[1:] != (layout.block_q, layout.block_k // UNIT):
        raise ValueError(
            f"bitmaps must have shape [bitmaps, {layout.block_q}, {layout.block_k // UNIT}], got {list(bitmaps.shape)}"
        )
    if not bitmaps.is_contiguous():
        raise ValueError(f"bitmaps must be contiguous, as kernels read it, got strides {list(bitmaps.stride())}")
    if bitmaps.device != layout.device:
        raise ValueError(f"bitmaps must be on the device of indices, {layout.device}, got {bitmaps.device}")
    least = int(layout.rules[..., 4].min())
    if least < -len(bitmaps):
        raise ValueError(f"rules must name bitmaps, of which there are {len(bitmaps)}, got {-least}")
    if len(bitmaps) and layout.dilated:
        raise ValueError("a layout of branches has no bitmaps")


def check_device(device: object) -> torch.device:
    try:
        return torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError):
        raise ValueError(
            f"device must be one that PyTorch knows, such as 'cpu' or 'cuda:0', got {shown(device)}"
        ) from None
