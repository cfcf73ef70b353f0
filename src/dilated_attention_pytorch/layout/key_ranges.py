"""`BlockLayout.from_key_ranges`: ranges of keys that are data, for every query and sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..patterns.base import check_int, shown
from ..patterns.blocks import ceil_div
from ..patterns.tokens import UNBOUNDED
from .bitmaps import NO_BITMAPS
from .build import CHUNK
from .checks import check_sizes
from .lists import BlockList
from .rules import NO_BRANCHES

if TYPE_CHECKING:
    from .layout import BlockLayout

MAX_RANGES = 8


class Rows(NamedTuple):
    """The ranges of each row of blocks, int32 [samples · query blocks, ranges, block_q]; queries behind the end see
    everything. `real` says which are not, bool [query blocks, block_q]."""

    starts: Tensor
    stops: Tensor
    real: Tensor


def from_key_ranges(
    cls: type[BlockLayout],
    starts: Tensor,
    stops: Tensor,
    seq_k: int | None,
    block_size: int | tuple[int, int],
    capacity: int | None,
) -> BlockLayout:
    """See `BlockLayout.from_key_ranges`."""
    starts, stops = _checked(starts, stops)
    samples, num_ranges, seq_q = starts.shape
    seq_k = seq_q if seq_k is None else seq_k
    _, (block_q, block_k) = check_sizes(seq_q, seq_k, block_size)
    if capacity is not None:
        check_int("capacity", capacity, least=1)
    starts, stops = (x.clamp(0, seq_k).int() for x in (starts, stops))
    rows = _by_rows(starts, stops, block_q, seq_k)
    row, column, full = _listed(rows, block_k, seq_k, capacity)
    if capacity is None:
        row, column, full = _looked_at(rows, row, column, full, block_k)
        # Asked where the device is waited for anyway.
        ascend = not torch.compiler.is_compiling() and bool((torch.stack((starts, stops)).diff(dim=-1) >= 0).all())
    else:
        ascend = False
    num_q = len(rows.real)
    rule = (row // num_q).clamp(max=samples - 1) if samples > 1 else None
    number = torch.arange(1, samples * num_ranges + 1, dtype=torch.int32, device=starts.device)
    rules = number.new_full((samples, num_ranges, 5), UNBOUNDED)
    rules[..., 4] = number.view(samples, num_ranges)
    return cls(
        seq_q=seq_q,
        seq_k=seq_k,
        block_q=block_q,
        block_k=block_k,
        by_query=BlockList.pack(row, column, ~full, rule, samples * num_q),
        batch_size=samples if samples > 1 else None,
        rules=rules,
        documents=torch.stack((starts, stops), dim=2).view(-1, seq_q),
        ranges_ascend=ascend,
        branches=NO_BRANCHES.to(starts.device),
        bitmaps=NO_BITMAPS.to(starts.device),
        checked=True,
    )


def _checked(starts: Tensor, stops: Tensor) -> tuple[Tensor, Tensor]:
    """As [samples, ranges, seq_q]."""
    for name, x in (("starts", starts), ("stops", stops)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {shown(x)}")
        if x.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be int32 or int64, got {x.dtype}")
        if x.ndim not in (1, 2, 3) or 0 in x.shape:
            raise ValueError(
                f"{name} must have shape [seq_q], [batch, seq_q] or [batch, ranges, seq_q], got {list(x.shape)}"
            )
        if x.shape != starts.shape:
            raise ValueError(f"{name} must have the shape of starts, {list(starts.shape)}, got {list(x.shape)}")
        if x.device != starts.device:
            raise ValueError(f"{name} must be on the device of starts, {starts.device}, got {x.device}")
    if starts.ndim == 3 and starts.shape[1] > MAX_RANGES:
        raise ValueError(f"starts must have at most {MAX_RANGES} ranges a query, got {starts.shape[1]}")
    if starts.ndim < 3:
        starts, stops = (x.reshape(-1, 1, x.shape[-1]) for x in (starts, stops))
    return starts, stops


def _by_rows(starts: Tensor, stops: Tensor, block_q: int, seq_k: int) -> Rows:
    samples, num_ranges, seq_q = starts.shape
    num_q = ceil_div(seq_q, block_q)
    behind = num_q * block_q - seq_q
    real = torch.arange(num_q * block_q, device=starts.device).view(num_q, block_q) < seq_q
    padded_starts, padded_stops = (
        pad(x, (0, behind), value=value).view(samples, num_ranges, num_q, block_q).transpose(1, 2).flatten(0, 1)
        for x, value in ((starts, 0), (stops, seq_k))
    )
    return Rows(padded_starts, padded_stops, real)


def _listed(rows: Rows, block_k: int, seq_k: int, capacity: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Row, column and whether it is full, of the blocks from the first that any query of a row sees by a range to the
    last; those of several ranges together, ascending. Spare places have a row behind the last one."""
    num_rows, num_ranges, _ = rows.starts.shape
    real = rows.real.repeat(num_rows // len(rows.real), 1)[:, None]
    some = (rows.starts < rows.stops) & real
    first = torch.where(some, rows.starts, seq_k).amin(2) // block_k
    behind = (torch.where(some, rows.stops, 0).amax(2) + (block_k - 1)) // block_k
    first, order = torch.where(behind > 0, first, seq_k).sort(dim=1)
    behind = behind.gather(1, order)
    reached = pad(behind.cummax(dim=1).values[:, :-1], (1, 0))
    first = torch.maximum(first, reached)
    count = (behind - first).clamp(min=0).flatten()
    ends = count.cumsum(0)
    if capacity is None:
        num = int(ends[-1])
    else:
        num = capacity
        _check_capacity(ends[-1], capacity)
    place = torch.arange(num, device=ends.device)
    run = torch.searchsorted(ends, place, right=True).clamp(max=max(len(ends) - 1, 0))
    there = place < ends[-1]
    row, column = run // num_ranges, (first.flatten() - (ends - count))[run] + place
    first_full, behind_full = rows.starts.amax(2)[row], rows.stops.amin(2)[row]
    key = (column * block_k)[:, None]
    full = ((key >= first_full) & (key + block_k <= behind_full)).any(1)
    return torch.where(there, row, num_rows), torch.where(there, column, 0), full


def _check_capacity(needed: Tensor, capacity: int) -> None:
    """On a GPU and in a graph an assertion of the device: looking would be waiting."""
    message = "from_key_ranges: capacity must hold all active blocks"
    if torch.compiler.is_compiling() or needed.device.type != "cpu":
        torch._assert_async(needed <= capacity, message)
    elif int(needed) > capacity:
        raise ValueError(f"capacity must hold all active blocks, up to {int(needed)} here, got {capacity}")


def _looked_at(rows: Rows, row: Tensor, column: Tensor, full: Tensor, block_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Without the blocks that no query sees, and full where several ranges together fill a block."""
    unsure = (~full).nonzero()[:, 0]
    kept = torch.ones_like(full)
    for some in unsure.split(max(1, CHUNK // rows.starts[0].numel())):
        begin = (column[some] * block_k)[:, None]
        starts, order = rows.starts[row[some]].sort(dim=1)
        stops = rows.stops[row[some]].gather(1, order)
        reached, seen = begin.expand(-1, starts.shape[2]), torch.zeros((), dtype=torch.bool, device=row.device)
        for start, stop in zip(starts.unbind(1), stops.unbind(1), strict=True):
            seen = seen | (torch.maximum(start, begin) < torch.minimum(stop, begin + block_k))
            reached = torch.where(start <= reached, torch.maximum(reached, stop), reached)
        kept[some] = (seen & rows.real[row[some] % len(rows.real)]).any(1)
        full[some] = (reached >= begin + block_k).all(1)
    return row[kept], column[kept], full[kept]
