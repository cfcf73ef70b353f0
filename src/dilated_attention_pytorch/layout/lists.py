"""`BlockList`: rows of block numbers, the data structure of a layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

HOST = torch.device("cpu")  # whatever the default device is
NEAR = 256  # rows of a neighbourhood, about


def neighbourhood(num_residues: int) -> int:
    """How many rows `BlockList.work` keeps together: equally many of each residue."""
    return max(1, NEAR // num_residues) * num_residues


@dataclass(frozen=True, eq=False)
class BlockList:
    """Rows of block numbers (compressed sparse rows), in each row the full blocks first, then the partial ones.

    Row `r` has full blocks `indices[offsets[r] : splits[r]]` and partial blocks `indices[splits[r] : offsets[r + 1]]`,
    each part in ascending order. `indices` may be longer than what the offsets reach (spare capacity).

    Attributes:
        offsets: int32 [rows + 1].
        splits: int32 [rows].
        indices: int32 [capacity].
        rule_ids: int32 [capacity], the token rule of each partial block; empty when all share rule 0.
    """

    offsets: Tensor
    splits: Tensor
    indices: Tensor
    rule_ids: Tensor

    @classmethod
    def pack(cls, row: Tensor, column: Tensor, partial: Tensor, rule: Tensor | None, num_rows: int) -> BlockList:
        """From entries in any row order whose columns ascend within (row, state). Rows of `num_rows` are dropped."""
        # In a graph as one operator, so that the same code runs: a compiler may lower sorting differently.
        pack = _pack_op if torch.compiler.is_compiling() else _pack
        return cls(*pack(row, column, partial, rule, num_rows))

    @classmethod
    def placed(cls, column: Tensor, edges: Tensor, runs: int) -> BlockList:
        """From entries in their final order: each row has `runs` runs, first one of full blocks, then partial ones.

        `edges` holds the start of each run and the end of the last one; with one run per row it becomes `offsets`.
        """
        offsets = edges.int() if runs == 1 else edges[::runs].to(torch.int32, copy=True)
        splits = edges[1::runs].to(torch.int32, copy=True)
        return cls(offsets, splits, column.int(), offsets.new_empty(0))

    @classmethod
    def concat(cls, lists: Iterable[BlockList]) -> BlockList:
        """The rows of all lists, one list after the other. The lists must have no spare capacity."""
        lists = list(lists)
        if len(lists) == 1:
            return lists[0]
        offsets, splits, indices, rule_ids, base = [], [], [], [], 0
        for each in lists:
            offsets.append(each.offsets[:-1] + base)
            splits.append(each.splits + base)
            indices.append(each.indices)
            rule_ids.append(each.rule_ids)
            base += len(each.indices)
        if base >= 2**31:
            raise ValueError(f"a layout must have fewer than {2**31} active blocks, got {base}: use larger blocks")
        offsets.append(offsets[-1].new_full((1,), base))
        return cls(torch.cat(offsets), torch.cat(splits), torch.cat(indices), torch.cat(rule_ids))

    @property
    def num_rows(self) -> int:
        return len(self.splits)

    def trimmed(self) -> BlockList:
        """The same without spare capacity."""
        used = int(self.offsets[-1])
        return BlockList(self.offsets, self.splits, self.indices[:used].clone(), self.rule_ids[:used].clone())

    def unnamed(self) -> BlockList:
        """The same where all partial blocks share rule 0."""
        return BlockList(self.offsets, self.splits, self.indices, self.rule_ids[:0].clone())

    def work(self, num_lists: int, num_residues: int = 1) -> Tensor:
        """int32 [rows, 4]: (row of its list, first entry, first partial entry, end) of each row, the longest first.

        Programs that take rows in this order do not end on a long one. In a long list, neighbouring rows stay together,
        because they read mostly the same keys: rows are grouped into neighbourhoods, ordered by their longest row.

        Args:
            num_residues: rows of a list are those of each class in turn, as `BlockLayout` has them.
        """
        if self.num_rows >= 2**29:
            raise ValueError(f"a layout for a GPU must have fewer than {2**29} rows, got {self.num_rows}")
        work = _work_op if torch.compiler.is_compiling() else _work
        return work(self.offsets, self.splits, num_lists, num_residues)

    def tensors(self) -> list[Tensor]:
        return [self.offsets, self.splits, self.indices, self.rule_ids]

    def row_of_entry(self) -> Tensor:
        """int32 [capacity]: the row of each entry, `num_rows` for spare places."""
        row_of_entry = _row_op if torch.compiler.is_compiling() else _row_of_entry
        return row_of_entry(self.offsets, len(self.indices))

    def is_partial(self, row: Tensor) -> Tensor:
        """bool [capacity], for `row = row_of_entry()`."""
        place = torch.arange(len(self.indices), dtype=torch.int32, device=self.indices.device)
        return place >= torch.cat((self.splits, self.splits.new_zeros(1)))[row]


def send(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of one dtype on a device: from the host in one copy, asynchronous if the device is a GPU."""
    if tensors[0].device.type == device.type:
        return list(tensors)
    pinned = device.type == "cuda"
    if pinned and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a layout cannot be built while a CUDA graph is captured: make the call once before")
    if len(tensors) == 1:
        return [(tensors[0].pin_memory() if pinned else tensors[0]).to(device, non_blocking=pinned)]
    sizes = [tensor.numel() for tensor in tensors]
    whole = torch.empty(sum(sizes), dtype=tensors[0].dtype, device=HOST, pin_memory=pinned)
    torch.cat([tensor.flatten() for tensor in tensors], out=whole)
    parts = whole.to(device, non_blocking=pinned).split(sizes)
    return [part if tensor.ndim == 1 else part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _pack(row: Tensor, column: Tensor, partial: Tensor, rule: Tensor | None, num_rows: int) -> list[Tensor]:
    key, order = (row * 2).add_(partial).sort(stable=True)
    edges = torch.arange(2 * num_rows + 1, dtype=key.dtype, device=key.device)
    place = torch.searchsorted(key, edges, out_int32=True)
    del key  # as large as the result: the memory of a build is a promise
    rule_ids = row.new_empty(0, dtype=torch.int32) if rule is None else rule[order].clamp_(min=0).int()
    # Copies, not views of `place`: a layout holds what it says it holds and nothing else.
    return [place[::2].clone(), place[1::2].clone(), column[order].int(), rule_ids]


def _row_of_entry(offsets: Tensor, capacity: int) -> Tensor:
    place = torch.arange(capacity, dtype=torch.int32, device=offsets.device)
    return torch.searchsorted(offsets[1:], place, right=True, out_int32=True)


def _work(offsets: Tensor, splits: Tensor, num_lists: int, num_residues: int) -> Tensor:
    number = torch.arange(len(splits) // num_lists, dtype=torch.int32, device=offsets.device).repeat(num_lists)
    rows = torch.stack((number, offsets[:-1], splits, offsets[1:]), dim=1).view(num_lists, -1, 4)
    return in_order_of_work(rows, num_residues)


def in_order_of_work(rows: Tensor, num_residues: int) -> Tensor:
    """`BlockList.work` of rows [lists, rows, 4], which are such already but for their order."""
    num_lists = rows.shape[0]
    length = rows[..., 3] - rows[..., 1]
    order = length.argsort(dim=1, descending=True, stable=True)
    num_rows = rows.shape[1]
    if num_rows > neighbourhood(num_residues):
        of_class, at_once = num_rows // num_residues, neighbourhood(num_residues) // num_residues
        near = (torch.arange(num_rows, device=length.device) % of_class // at_once).expand_as(length)
        num = -(-of_class // at_once)
        longest = length.new_zeros(num_lists, num).scatter_reduce_(1, near, length, "amax")
        rank = longest.gather(1, near).long() * num - near
        order = order.gather(1, rank.gather(1, order).argsort(dim=1, descending=True, stable=True))
    return rows.gather(1, order[..., None].expand_as(rows)).view(-1, 4)


_pack_op = torch.library.custom_op("dilated_attention_pytorch::pack_lists", _pack, mutates_args=())
_row_op = torch.library.custom_op("dilated_attention_pytorch::row_of_entry", _row_of_entry, mutates_args=())
_work_op = torch.library.custom_op("dilated_attention_pytorch::order_work", _work, mutates_args=())


@_pack_op.register_fake
def _(row, column, partial, rule, num_rows):  # type: ignore[no-untyped-def]
    def ints(*shape: int) -> Tensor:
        return row.new_empty(*shape, dtype=torch.int32)

    rule_ids = ints(0) if rule is None else ints(rule.shape[0])
    return [ints(num_rows + 1), ints(num_rows), ints(column.shape[0]), rule_ids]


@_row_op.register_fake
def _(offsets, capacity):  # type: ignore[no-untyped-def]
    return offsets.new_empty(capacity)


@_work_op.register_fake
def _(offsets, splits, num_lists, num_residues):  # type: ignore[no-untyped-def]
    return offsets.new_empty(splits.shape[0], 4)
