"""Layouts of rules that answer pair by pair: their blocks are evaluated a few at a time, and told apart.

A block is full if every pair of its tokens is allowed, empty if none is, and otherwise keeps a bitmap
(`layout.bitmaps`). Pairs are never asked for beyond `PAIRS` at a time, so the memory is that of the bitmaps. How many
blocks are asked for and how many are partial is known only from the answers: on a GPU the host waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..patterns.base import check_int
from ..patterns.blocks import ceil_div
from ..patterns.tokens import EVERYTHING
from .bitmaps import UniqueBitmaps, packed
from .checks import check_device, check_mask, check_sizes
from .lists import BlockList
from .rules import NO_BRANCHES, NO_DOCUMENTS

if TYPE_CHECKING:
    from .layout import BlockLayout

PAIRS = 1 << 21  # that are evaluated at a time; larger pieces leave the cache of a CPU

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# Of blocks with these lists, query blocks and key blocks, int64 [blocks]: bool [blocks, block_q, block_k].
Allowed = Callable[[Tensor, Tensor, Tensor], Tensor]

# Names of blocks until they are packed; numbers from 0 on are bitmaps.
FULL, WHOLE = -2, -1  # WHOLE: all of its pairs, but it reaches beyond the keys


class TileGrid(NamedTuple):
    """The blocks of some lengths, int64 tensors of token numbers on `device`."""

    seq_q: int
    seq_k: int
    block_q: int
    block_k: int
    device: torch.device

    @property
    def num_q(self) -> int:
        return ceil_div(self.seq_q, self.block_q)

    @property
    def num_k(self) -> int:
        return ceil_div(self.seq_k, self.block_k)

    @property
    def at_once(self) -> int:
        """Blocks that are evaluated at a time."""
        return max(1, PAIRS // (self.block_q * self.block_k))

    def queries(self, block: Tensor) -> Tensor:
        return block[:, None] * self.block_q + torch.arange(self.block_q, device=self.device)

    def keys(self, block: Tensor) -> Tensor:
        return block[:, None] * self.block_k + torch.arange(self.block_k, device=self.device)

    def all_blocks(self, num_lists: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Row (of all lists) and column of every block, a few at a time."""
        total = num_lists * self.num_q * self.num_k
        for start in range(0, total, self.at_once):
            number = torch.arange(start, min(start + self.at_once, total), device=self.device)
            yield number // self.num_k, number % self.num_k


class Tiles:
    """Collects blocks, row by row and in each row by ascending columns, and makes a layout of them.

    Args:
        num_lists: how many times the query blocks are listed.
    """

    def __init__(self, grid: TileGrid, num_lists: int) -> None:
        self.grid, self.num_rows = grid, num_lists * grid.num_q
        self.bitmaps = UniqueBitmaps(grid.block_q, grid.block_k, grid.device)
        self.evaluated = 0
        self._found: list[tuple[Tensor, Tensor, Tensor]] = []  # rows, columns, names

    def evaluate(self, row: Tensor, column: Tensor, allowed: Allowed) -> None:
        """Look at these blocks, which ascend."""
        for rows, columns in zip(row.split(self.grid.at_once), column.split(self.grid.at_once), strict=True):
            self._look_at(rows, columns, allowed(rows // self.grid.num_q, rows % self.grid.num_q, columns))

    def _look_at(self, row: Tensor, column: Tensor, allowed: Tensor) -> None:
        grid, query_block = self.grid, row % self.grid.num_q
        num_q = (grid.seq_q - query_block * grid.block_q).clamp(max=grid.block_q)
        num_k = (grid.seq_k - column * grid.block_k).clamp(max=grid.block_k)
        real = (grid.queries(query_block) < grid.seq_q)[:, :, None] & (grid.keys(column) < grid.seq_k)[:, None]
        allowed = allowed & real
        count = allowed.flatten(1).sum(1)
        name = torch.where(num_k == grid.block_k, FULL, WHOLE)
        partial = ((count > 0) & (count < num_q * num_k)).nonzero()[:, 0]
        name[partial] = self.bitmaps.numbers_of(packed(allowed[partial]))
        active = count > 0
        self.evaluated += len(row)
        self._found.append((row[active], column[active], name[active]))

    def add_full(self, row: Tensor, column: Tensor) -> None:
        """Blocks that need no look."""
        behind = (column + 1) * self.grid.block_k > self.grid.seq_k
        self._found.append((row, column, torch.where(behind, WHOLE, FULL)))

    def layout(self, cls: type[BlockLayout], num_heads: int | None, batch_size: int | None) -> BlockLayout:
        grid = self.grid
        row, column, name = (torch.cat(parts) for parts in zip(*self._found, strict=True))
        order = (row * grid.num_k + column).argsort(stable=True)
        row, column, name = row[order], column[order], name[order]
        number = torch.arange(-1, len(self.bitmaps), device=grid.device)  # rule 0 is WHOLE, the next the first bitmap
        rules = torch.tensor([[EVERYTHING]], dtype=torch.int32, device=grid.device).repeat(len(number), 1, 1)
        rules[1:, 0, 4] = -1 - number[1:].int()
        whole = len(row) == self.num_rows * grid.num_k and not len(self.bitmaps)
        return cls(
            seq_q=grid.seq_q,
            seq_k=grid.seq_k,
            block_q=grid.block_q,
            block_k=grid.block_k,
            by_query=BlockList.pack(row, column, name > FULL, name - WHOLE if len(rules) > 1 else None, self.num_rows),
            num_heads=num_heads,
            batch_size=batch_size,
            rules=rules,
            documents=NO_DOCUMENTS.to(grid.device),
            branches=NO_BRANCHES.to(grid.device),
            bitmaps=self.bitmaps.table(),
            kind="full" if whole else None,
            evaluated=self.evaluated,
            checked=True,
        )


def from_mask(cls: type[BlockLayout], mask: Tensor, block_size: int | tuple[int, int]) -> BlockLayout:
    """See `BlockLayout.from_mask`."""
    check_mask(mask, "seq_q, seq_k")
    lengths, blocks = check_sizes(mask.shape[-2], mask.shape[-1], block_size)
    grid, of_lists = TileGrid(*lengths, *blocks, mask.device), mask.reshape(-1, *lengths)

    def allowed(which: Tensor, query_block: Tensor, key_block: Tensor) -> Tensor:
        query = grid.queries(query_block).clamp(max=grid.seq_q - 1)
        key = grid.keys(key_block).clamp(max=grid.seq_k - 1)
        return of_lists[which[:, None, None], query[:, :, None], key[:, None]]

    tiles = Tiles(grid, len(of_lists))
    for row, column in grid.all_blocks(len(of_lists)):
        tiles.evaluate(row, column, allowed)
    heads, batch = mask.shape[-3] if mask.ndim > 2 else None, mask.shape[0] if mask.ndim > 3 else None
    return tiles.layout(cls, heads, batch)


def from_mask_mod(
    cls: type[BlockLayout],
    mask_mod: MaskMod,
    batch: int | None,
    heads: int | None,
    seq_q: int,
    seq_k: int | None,
    block_size: int | tuple[int, int],
    device: torch.device | str | None,
) -> BlockLayout:
    """See `BlockLayout.from_mask_mod`."""
    for name, value in (("batch", batch), ("heads", heads)):
        if value is not None:
            check_int(name, value, least=1)
    lengths, blocks = check_sizes(seq_q, seq_q if seq_k is None else seq_k, block_size)
    grid = TileGrid(*lengths, *blocks, check_device("cpu" if device is None else device))
    check_mask_mod(mask_mod, grid.device)
    per_sample, num_lists = heads or 1, (batch or 1) * (heads or 1)
    answers = of_tiles(mask_mod, grid)

    def allowed(which: Tensor, query_block: Tensor, key_block: Tensor) -> Tensor:
        return answers(which // per_sample, which % per_sample, query_block, key_block)

    tiles = Tiles(grid, num_lists)
    for row, column in grid.all_blocks(num_lists):
        tiles.evaluate(row, column, allowed)
    of_heads = None if heads is None and (batch or 1) == 1 else per_sample
    return tiles.layout(cls, of_heads, batch)


def check_mask_mod(mask_mod: object, device: torch.device) -> None:
    """Asked once, for the first pair."""
    if not callable(mask_mod):
        raise TypeError(f"mask_mod must be a function of (batch, head, query, key), got {type(mask_mod).__name__}")
    answer = mask_mod(*torch.zeros(4, dtype=torch.int64, device=device).unbind())
    if not isinstance(answer, Tensor) or answer.dtype != torch.bool or answer.numel() != 1:
        got = f"{answer.dtype} {list(answer.shape)}" if isinstance(answer, Tensor) else type(answer).__name__
        raise TypeError(f"mask_mod must return one bool tensor for the numbers of a pair, got {got}")


def of_tiles(mask_mod: MaskMod, grid: TileGrid) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The function that asks `mask_mod`, which is written for one pair, for all pairs of some blocks: of samples,
    heads, query blocks and key blocks. For tokens behind the end the last one answers."""
    of_keys = torch.vmap(mask_mod, in_dims=(None, None, None, 0))
    of_pairs = torch.vmap(torch.vmap(of_keys, in_dims=(None, None, 0, None)))

    def answers(sample: Tensor, head: Tensor, query_block: Tensor, key_block: Tensor) -> Tensor:
        query = grid.queries(query_block).clamp(max=grid.seq_q - 1)
        key = grid.keys(key_block).clamp(max=grid.seq_k - 1)
        return of_pairs(sample, head, query, key)

    return answers


def cost_text(layout: BlockLayout) -> str:
    """For the `repr` of a layout: what bitmaps it has, and what was evaluated for them."""
    evaluated = f", evaluated={layout.evaluated}" if layout.evaluated else ""
    return evaluated + (f", bitmaps={bitmaps_text(layout)}" if len(layout.bitmaps) else "")


def bitmaps_text(layout: BlockLayout) -> str:
    """How many, for how many blocks, and their bytes; nothing where there are none."""
    if not len(layout.bitmaps):
        return ""
    return f"{len(layout.bitmaps)} of {num_partial(layout)} partial blocks ({layout.bitmaps.nbytes} bytes)"


def num_partial(layout: BlockLayout) -> int:
    """Partial blocks that name a bitmap."""
    rule = layout.entries()[3]
    return int((layout.rules[rule[rule >= 0], :, 4] < 0).any(1).sum())
