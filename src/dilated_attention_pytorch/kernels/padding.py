"""Keys that are padding: what they leave of the lists of a call.

Found on the device, without a wait: of every sample and key block its state and a bit for each key, and from these the
lists by query of each sample. Blocks whose keys are all hidden are dropped, wherever they lie; of the full ones those
with some hidden keys come between the others and the partial ones. So padding is paid for in blocks at its border, and
anywhere else in all blocks that it touches.

    offset of an entry   start      masked_from             split             stop
    its block            full, no key hidden   full, some hidden     partial, some or none hidden
    its pairs            all                   where the keys' bits say so   by the rules and by bits
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..layout import BlockLayout
from .common import HIDDEN, MIXED, OPEN, UNIT, load_work, token_at


class PaddedLists(NamedTuple):
    """The lists by query of every sample of a call.

    Attributes:
        indices, rule_ids: as in `BlockList`.
        work: int32 [rows, 5]: as `BlockList.work`, then `masked_from`.
        branches: as in `BlockLayout`, for every sample.
        lists_per_sample: how many there are.
    """

    indices: Tensor
    rule_ids: Tensor
    work: Tensor
    branches: Tensor
    lists_per_sample: int

    def work_of(self, own_work: Tensor, num_rows: int) -> Tensor:
        """`work`, of which no row exists where none of `United.own_work` does."""
        if self.work.shape[1] == own_work.shape[1]:
            return own_work
        work = self.work.clone()
        work[:, 0].masked_fill_(own_work[0, 0] >= num_rows, num_rows)
        return work


def key_bits(launch: Callable[..., None], padding: Tensor, layout: BlockLayout) -> Tensor:
    """int16 [batch, key blocks, 1 + block / 16]: a block's state, and a bit for each key, 1 where it is real.

    Args:
        padding: uint8 [batch, seq_k], contiguous.
    """
    batch, seq_k = padding.shape
    bits = torch.empty(
        batch, layout.num_k_blocks, 1 + layout.block_k // UNIT.value, dtype=torch.int16, device=padding.device
    )
    launch(
        key_bits_kernel, (layout.num_k_blocks * batch,), (padding, bits),
        (seq_k, layout.num_k_blocks, layout.num_residues),
        BLOCK=layout.block_k, DILATED=int(layout.dilated), num_warps=1,
    )  # fmt: skip
    return bits


def padded_lists(launch: Callable[..., None], bits: Tensor, layout: BlockLayout) -> PaddedLists:
    """The lists by query without hidden blocks, from `key_bits`."""
    batch, lists, work = len(bits), layout.by_query, layout.query_work
    shared = (layout.batch_size or 1) == 1
    copies, num_entries = batch if shared else 1, len(lists.indices)
    if copies * num_entries >= 2**31:
        raise ValueError(
            f"with key_padding_mask, batch × active blocks must be less than {2**31}, got {copies * num_entries}"
        )
    indices = lists.indices.new_empty(copies * num_entries)
    # A kernel may look at the entry before an empty row, and at the rule that this names.
    rule_ids = lists.rule_ids.new_zeros(copies * len(lists.rule_ids))
    rows = len(work) * copies // batch  # of a sample
    of_samples = work.new_empty(batch * rows, 5)
    launch(
        padded_lists_kernel, (batch * rows,),
        (lists.indices, lists.rule_ids, work, bits, indices, rule_ids, of_samples),
        (rows, num_entries if shared else 0, layout.num_k_blocks),
        SHARED=shared, RULE_IDS=lists.rule_ids.numel() > 0, WORDS=bits.shape[2], CHUNK=256, num_warps=1,
    )  # fmt: skip
    branches = layout.branches.repeat(copies, 1, 1) if layout.has_mixed_blocks else layout.branches
    return PaddedLists(indices, rule_ids, of_samples, branches, rows // layout.num_q_blocks)


@triton.jit(do_not_specialize=["seq_k", "num_blocks", "num_residues"])
def key_bits_kernel(
    padding, bits, seq_k, num_blocks, num_residues, BLOCK: tl.constexpr, DILATED: tl.constexpr
):  # fmt: skip
    """Of one block of one sample. Places without a token have no say in the state."""
    WORDS: tl.constexpr = BLOCK // UNIT
    sample, block = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    word, bit = tl.arange(0, WORDS)[:, None], tl.arange(0, UNIT)[None, :]
    key = token_at(block * BLOCK + word * UNIT + bit, seq_k, num_residues, BLOCK, DILATED)
    here = key < seq_k
    hidden = tl.load(padding + sample.to(tl.int64) * seq_k + key, mask=here, other=1) != 0
    real = here & (hidden == 0)
    num_here, num_real = tl.sum(tl.sum(here.to(tl.int32), 1), 0), tl.sum(tl.sum(real.to(tl.int32), 1), 0)
    state = tl.where(num_real == num_here, OPEN, tl.where(num_real == 0, HIDDEN, MIXED))
    at = bits + tl.program_id(0).to(tl.int64) * (1 + WORDS)
    tl.store(at, state.to(tl.int16))
    tl.store(at + 1 + tl.arange(0, WORDS), tl.sum(real.to(tl.int32) << bit, 1).to(tl.int16))


@triton.jit
def place_of(wanted, first):
    """Where each of the wanted goes if they come in order from `first` on, and where the next one would go."""
    wanted = wanted.to(tl.int32)
    return first + tl.cumsum(wanted, 0) - wanted, first + tl.sum(wanted, 0)


@triton.jit(do_not_specialize=["rows", "num_entries", "num_blocks"])
def padded_lists_kernel(
    indices, rule_ids, work, bits, new_indices, new_rule_ids, new_work, rows, num_entries, num_blocks,
    SHARED: tl.constexpr, RULE_IDS: tl.constexpr, WORDS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Of one row of one sample; where samples share lists, entries of the next sample lie `num_entries` further."""
    row = tl.program_id(0)
    sample = row // rows
    block, start, split, stop = load_work(work, row % rows if SHARED else row)
    bits += sample.to(tl.int64) * num_blocks * WORDS
    lane = tl.arange(0, CHUNK)
    num_open, num_mixed = 0, 0
    for first in range(start, split, CHUNK):
        there = first + lane < split
        index = tl.load(indices + first + lane, mask=there, other=0)
        state = tl.load(bits + index * WORDS, mask=there, other=HIDDEN)
        num_open += tl.sum((state == OPEN).to(tl.int32), 0)
        num_mixed += tl.sum((state == MIXED).to(tl.int32), 0)
    new_start = start + sample * num_entries
    to_open, to_mixed, to_partial = new_start, new_start + num_open, new_start + num_open + num_mixed
    new_split = to_partial
    for first in range(start, stop, CHUNK):
        entry = first + lane
        there = entry < stop
        index = tl.load(indices + entry, mask=there, other=0)
        state = tl.load(bits + index * WORDS, mask=there, other=HIDDEN)
        full, seen = entry < split, state != HIDDEN
        open_at, to_open = place_of(full & (state == OPEN), to_open)
        mixed_at, to_mixed = place_of(full & (state == MIXED), to_mixed)
        partial_at, to_partial = place_of((full == 0) & seen, to_partial)
        at = tl.where(full, tl.where(state == OPEN, open_at, mixed_at), partial_at)
        tl.store(new_indices + at, index, mask=seen)
        if RULE_IDS:
            tl.store(new_rule_ids + at, tl.load(rule_ids + entry, mask=there, other=0), mask=seen)
    at = new_work + row * 5
    tl.store(at, block)
    tl.store(at + 1, new_start)
    tl.store(at + 2, new_split)
    tl.store(at + 3, to_partial)
    tl.store(at + 4, new_start + num_open)


def unpadded(layout: BlockLayout, lists_per_sample: int) -> PaddedLists:
    """The same of a call without padding."""
    lists = layout.by_query
    return PaddedLists(lists.indices, lists.rule_ids, layout.query_work, layout.branches, lists_per_sample)
