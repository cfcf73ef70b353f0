# ruff: noqa: E501 - a case is a line
"""Bad arguments of layouts."""

import dataclasses
from functools import partial, reduce
from operator import and_, or_

import torch

from dilated_attention_pytorch import (
    BlockLayout,
    Documents,
    Full,
    LocalBlocks,
    PerHead,
    RandomBlocks,
    SlidingWindow,
)

MASK = torch.ones(2, 2, dtype=torch.bool)
LAYOUT = BlockLayout.from_block_mask(MASK, 16)

ROWS_OF = BlockLayout.from_pattern(SlidingWindow(3, 0), 100, block_size=16)
ROWS = {
    "one twice": (torch.tensor([1, 1]), ValueError, r"be block numbers from 0 to 6 that ascend, got \[1, 1\]"),
    "backwards": (torch.tensor([2, 1]), ValueError, r"be block numbers from 0 to 6 that ascend, got \[2, 1\]"),
    "a negative one": (torch.tensor([-1, 3]), ValueError, r"be block numbers from 0 to 6 that ascend, got \[-1, 3\]"),
    "one too many": (torch.arange(8), ValueError, r"be block numbers from 0 to 6 that ascend, got \[0, 1, .* 7\]"),
    "none": (torch.tensor([], dtype=torch.int64), ValueError, r"have one dimension and not be empty, got shape \[0\]"),
    "two dimensions": (torch.tensor([[1]]), ValueError, r"have one dimension .* got shape \[1, 1\]"),
    "floats": (torch.tensor([1.0]), TypeError, "be int64, got torch.float32"),
    "a mask": (torch.ones(7, dtype=torch.bool), TypeError, "be int64, got torch.bool"),
    "elsewhere": (torch.arange(3, device="meta"), ValueError, "be on the layout's device, cpu, got meta"),
    "a list": ([1, 2], TypeError, r"be a tensor, got \[1, 2\]"),
}

BAD = {
    "no such device": (lambda: BlockLayout.from_pattern(Full(), 64, block_size=16, device="gpu"), ValueError, "device must be one that PyTorch knows, .* got 'gpu'"),
    "from no pattern": (lambda: BlockLayout.from_pattern("causal", 32, block_size=16), TypeError, "pattern must be a Pattern, got str"),
    "length of zero": (lambda: BlockLayout.from_pattern(Full(), 0, block_size=16), ValueError, "seq_q must be at least 1, got 0"),
    "length too large": (lambda: BlockLayout.from_pattern(Full(), 2**30, block_size=256), ValueError, "seq_q must be below 1073741824"),
    "three block sizes": (lambda: BlockLayout.from_pattern(Full(), 32, block_size=(16, 16, 16)), ValueError, "block_size must be an int or a pair"),
    "coarser than the pattern": (lambda: BlockLayout.from_pattern(LocalBlocks(64, block_size=32), 99, block_size=64), ValueError, "block_size must divide the block size 32 that the pattern is written in, got 64"),
    "two packings": (lambda: BlockLayout.from_pattern(Documents((3, 4)) | Documents((4, 3)), 7, block_size=16), ValueError, "one packing of documents, got 2"),
    "too many token rules": (lambda: BlockLayout.from_pattern(reduce(or_, [SlidingWindow(i, 9 - i) for i in range(8)]), 7, block_size=16), ValueError, "at most 6 different token rules, got 8"),
    "heads of a pattern": (lambda: BlockLayout.from_pattern(PerHead((Full(), Full())), 7, block_size=16, num_heads=3), ValueError, "num_heads must be the pattern's 2 heads, got 3"),
    "mask of floats": (lambda: BlockLayout.from_block_mask(torch.ones(2, 2), 16), TypeError, "mask must be a bool tensor, got torch.float32"),
    "mask of rank 1": (lambda: BlockLayout.from_block_mask(MASK[0], 16), ValueError, r"mask must have shape \[nq, nk\].* got \[2\]"),
    "empty mask": (lambda: BlockLayout.from_block_mask(MASK[:0], 16), ValueError, r"mask must not be empty, got shape \[0, 2\]"),
    "mask for another length": (lambda: BlockLayout.from_block_mask(MASK, 16, seq_q=33), ValueError, "seq_q must need 2 blocks of 16 tokens, as the mask has, got 33"),
    "a kind by hand": (lambda: dataclasses.replace(BlockLayout.from_pattern(SlidingWindow(3, 0), 64, block_size=16), kind="full"), ValueError, "kind is found by from_pattern and from_block_mask and cannot be given, got 'full'"),
    "block size None": (lambda: BlockLayout.from_pattern(Full(), 16, block_size=None), TypeError, "block_size must be an int, got None"),
    "heads of no pattern": (lambda: BlockLayout.from_pattern(Full(), 16, block_size=16, num_heads=-3), ValueError, "num_heads must be at least 1, got -3"),
    "cost of nothing": (lambda: LAYOUT.cost(batch=0, heads=1, head_dim=8, itemsize=4), ValueError, "batch must be at least 1, got 0"),
    "an endless product": (lambda: BlockLayout.from_pattern(reduce(and_, [LocalBlocks(16 * i, block_size=16) | RandomBlocks(i + 1, block_size=16) for i in range(12)]), 64, block_size=16), ValueError, "a union of at most 64 parts once written out"),
    # some rows of a layout
    **{
        f"rows: {what}": (partial(BlockLayout.from_pattern, SlidingWindow(3, 0), 100, block_size=16, query_blocks=rows), error, f"query_blocks must {message}")
        for what, (rows, error, message) in ROWS.items()
    },
    **{
        f"rows to take: {what}": (partial(ROWS_OF.take, rows), error, f"query_blocks must {message}")
        for what, (rows, error, message) in ROWS.items()
    },
    **{
        f"columns to take: {what}": (partial(ROWS_OF.take, torch.arange(7), rows), error, f"key_blocks must {message}")
        for what, (rows, error, message) in ROWS.items()
    },
}  # fmt: skip
