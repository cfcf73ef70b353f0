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
    KeyRanges,
    LocalBlocks,
    PerHead,
    RandomBlocks,
    SlidingWindow,
)

MASK = torch.ones(2, 2, dtype=torch.bool)
LAYOUT = BlockLayout.from_block_mask(MASK, 16)
RANGED = BlockLayout.from_key_ranges(torch.zeros(40).int(), torch.full((40,), 9), block_size=16)

BITS = BlockLayout.from_mask(torch.arange(40 * 40).view(40, 40) % 7 < 3, 16)

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
    "too many token rules": (lambda: BlockLayout.from_pattern(reduce(or_, [SlidingWindow(i, 9 - i) for i in range(8)]), 7, block_size=16), ValueError, "at most 6 different token rules, got 8"),
    "heads of a pattern": (lambda: BlockLayout.from_pattern(PerHead((Full(), Full())), 7, block_size=16, num_heads=3), ValueError, "num_heads must be the pattern's 2 heads, got 3"),
    "mask of floats": (lambda: BlockLayout.from_block_mask(torch.ones(2, 2), 16), TypeError, "mask must be a bool tensor, got torch.float32"),
    "mask of rank 1": (lambda: BlockLayout.from_block_mask(MASK[0], 16), ValueError, r"mask must have shape \[nq, nk\].* got \[2\]"),
    "empty mask": (lambda: BlockLayout.from_block_mask(MASK[:0], 16), ValueError, r"mask must not be empty, got shape \[0, 2\]"),
    "mask for another length": (lambda: BlockLayout.from_block_mask(MASK, 16, seq_q=33), ValueError, "seq_q must need 2 blocks of 16 tokens, as the mask has, got 33"),
    "a kind by hand": (lambda: dataclasses.replace(BlockLayout.from_pattern(SlidingWindow(3, 0), 64, block_size=16), kind="full"), ValueError, "kind is found by from_pattern and from_block_mask and cannot be given, got 'full'"),
    "block size None": (lambda: BlockLayout.from_pattern(Full(), 16, block_size=None), TypeError, "block_size must be an int, got None"),
    "heads of no pattern": (lambda: BlockLayout.from_pattern(Full(), 16, block_size=16, num_heads=-3), ValueError, "num_heads must be at least 1, got -3"),
    "starts a list": (lambda: BlockLayout.from_key_ranges([0], [1], block_size=16), TypeError, r"starts must be a tensor, got \[0\]"),
    "fractional starts": (lambda: BlockLayout.from_key_ranges(torch.ones(4), torch.ones(4), block_size=16), TypeError, "starts must be int32 or int64, got torch.float32"),
    "starts of no queries": (lambda: BlockLayout.from_key_ranges(torch.ones(0).int(), torch.ones(0).int(), block_size=16), ValueError, r"starts must have shape .*, got \[0\]"),
    "stops of other queries": (lambda: BlockLayout.from_key_ranges(torch.ones(4).int(), torch.ones(5).int(), block_size=16), ValueError, r"stops must have the shape of starts, \[4\], got \[5\]"),
    "stops elsewhere": (lambda: BlockLayout.from_key_ranges(torch.ones(4).int(), torch.ones(4).int().to("meta"), block_size=16), ValueError, "stops must be on the device of starts, cpu, got meta"),
    "nine ranges": (lambda: BlockLayout.from_key_ranges(torch.ones(1, 9, 4).int(), torch.ones(1, 9, 4).int(), block_size=16), ValueError, "starts must have at most 8 ranges a query, got 9"),
    "capacity too small": (lambda: BlockLayout.from_key_ranges(torch.zeros(64).int(), torch.full((64,), 64), block_size=16, capacity=15), ValueError, "capacity must hold all active blocks, up to 16 here, got 15"),
    "no capacity": (lambda: BlockLayout.from_key_ranges(torch.zeros(4).int(), torch.ones(4).int(), block_size=16, capacity=0), ValueError, "capacity must be at least 1, got 0"),
    "documents of nothing": (lambda: BlockLayout.from_documents(seq=4, block_size=16), ValueError, "must be given cu_seqlens or document_ids, got neither"),
    "documents twice": (lambda: BlockLayout.from_documents(cu_seqlens=torch.tensor([0, 4]), document_ids=torch.zeros(4).int(), block_size=16), ValueError, "must be given cu_seqlens or document_ids, got both"),
    "documents, a list": (lambda: BlockLayout.from_documents(seq=4, cu_seqlens=[0, 4], block_size=16), TypeError, r"cu_seqlens must be a tensor, got \[0, 4\]"),
    "documents of floats": (lambda: BlockLayout.from_documents(document_ids=torch.zeros(4), block_size=16), TypeError, "document_ids must be int32 or int64, got torch.float32"),
    "documents of two samples": (lambda: BlockLayout.from_documents(document_ids=torch.zeros(2, 4).int(), block_size=16), ValueError, r"document_ids must have one dimension and 1 numbers at least, got shape \[2, 4\]"),
    "documents of unknown length": (lambda: BlockLayout.from_documents(cu_seqlens=torch.tensor([0, 4]), block_size=16), TypeError, "seq must be the number of tokens where cu_seqlens is given, got None"),
    "documents of another length": (lambda: BlockLayout.from_documents(seq=5, document_ids=torch.zeros(4).int(), block_size=16), ValueError, "seq must be the number of document_ids, 4, got 5"),
    "documents that end elsewhere": (lambda: BlockLayout.from_documents(seq=5, cu_seqlens=torch.tensor([0, 4]), block_size=16), ValueError, "the lengths of Documents and KeyRanges must add up to seq_k = 5, got 4"),
    "documents within 5": (lambda: BlockLayout.from_documents(5, document_ids=torch.zeros(4).int(), block_size=16), TypeError, "pattern must be a Pattern, got int"),
    "ranges that are said to ascend": (lambda: dataclasses.replace(BlockLayout.from_key_ranges(torch.tensor([4, 0]), torch.tensor([9, 9]), 9, block_size=16), ranges_ascend=True), ValueError, "ranges_ascend must be False where a start or stop in documents is below the one before it"),
    "a range that is not there": (lambda: dataclasses.replace(RANGED, rules=RANGED.rules + torch.tensor([0, 0, 0, 0, 1], dtype=torch.int32)), ValueError, "rules must name ranges of documents, of which there are 1, got 2"),
    "ranges of two packings": (lambda: BlockLayout.from_pattern(Documents((5, 5)) | KeyRanges((0,), (3,), (9,)), 10, block_size=16), ValueError, "the lengths of Documents and KeyRanges must add up to seq_k = 10, got 9"),
    "a token mask of floats": (lambda: BlockLayout.from_mask(torch.ones(20, 20), 16), TypeError, "mask must be a bool tensor, got torch.float32"),
    "a token mask, nested lists": (lambda: BlockLayout.from_mask([[True]], 16), TypeError, "mask must be a bool tensor, got list"),
    "a token mask of rank 1": (lambda: BlockLayout.from_mask(torch.ones(20).bool(), 16), ValueError, r"mask must have shape \[seq_q, seq_k\], .*, got \[20\]"),
    "a token mask without heads": (lambda: BlockLayout.from_mask(torch.ones(0, 20, 20).bool(), 16), ValueError, r"mask must not be empty, got shape \[0, 20, 20\]"),
    "blocks of a token mask": (lambda: BlockLayout.from_mask(torch.ones(20, 20).bool(), 48), ValueError, r"block_size must be one of \(16, 32, 64, 128, 256\), got 48"),
    "no mask_mod": (lambda: BlockLayout.from_mask_mod(torch.ones(20, 20).bool(), None, None, 20, block_size=16), TypeError, r"mask_mod must be a function of \(batch, head, query, key\), got Tensor"),
    "a mask_mod of bools": (lambda: BlockLayout.from_mask_mod(lambda b, h, q, k: True, None, None, 20, block_size=16), TypeError, "mask_mod must return one bool tensor for the numbers of a pair, got bool"),
    "a mask_mod of scores": (lambda: BlockLayout.from_mask_mod(lambda b, h, q, k: q - k, None, None, 20, block_size=16), TypeError, r"mask_mod must return one bool tensor .*, got torch.int64 \[\]"),
    "a mask_mod of rows": (lambda: BlockLayout.from_mask_mod(lambda b, h, q, k: MASK[0], None, None, 20, block_size=16), TypeError, r"mask_mod must return one bool tensor .*, got torch.bool \[2\]"),
    "a mask_mod for no heads": (lambda: BlockLayout.from_mask_mod(lambda b, h, q, k: q >= k, None, 0, 20, block_size=16), ValueError, "heads must be at least 1, got 0"),
    "a mask_mod for half a sample": (lambda: BlockLayout.from_mask_mod(lambda b, h, q, k: q >= k, 0.5, 1, 20, block_size=16), TypeError, "batch must be an int, got 0.5"),
    "a mask_mod elsewhere": (lambda: BlockLayout.from_mask_mod(lambda b, h, q, k: q >= k, None, None, 20, block_size=16, device="gpu"), ValueError, "device must be one that PyTorch knows, .* got 'gpu'"),
    "parents, a list": (lambda: BlockLayout.from_tree([-1, 0], 20, block_size=16), TypeError, r"parents must be a tensor, got \[-1, 0\]"),
    "parents of bools": (lambda: BlockLayout.from_tree(MASK, 20, block_size=16), TypeError, "parents must be int32 or int64, got torch.bool"),
    "parents of nobody": (lambda: BlockLayout.from_tree(torch.ones(0).int(), 20, block_size=16), ValueError, r"parents must have shape \[nodes\] or \[batch, nodes\], got \[0\]"),
    "a parent behind its child": (lambda: BlockLayout.from_tree(torch.tensor([-1, 2, 0]), 20, block_size=16), ValueError, "parents must be nodes before their own, or -1, got 2 for node 1"),
    "its own parent": (lambda: BlockLayout.from_tree(torch.tensor([-1, 1]), 20, block_size=16), ValueError, "parents must be nodes before their own, or -1, got 1 for node 1"),
    "no such parent": (lambda: BlockLayout.from_tree(torch.tensor([-2]), 20, block_size=16), ValueError, "parents must be nodes before their own, or -1, got -2 for node 0"),
    "more drafts than keys": (lambda: BlockLayout.from_tree(torch.tensor([-1, 0]), 1, block_size=16), ValueError, "seq_k must be at least 2, got 1"),
    "bitmaps of bytes": (lambda: dataclasses.replace(BITS, bitmaps=BITS.bitmaps.to(torch.uint8)), TypeError, "bitmaps must be int16, got torch.uint8"),
    "bitmaps, a list": (lambda: dataclasses.replace(BITS, bitmaps=[1]), TypeError, "bitmaps must be a tensor, got list"),
    "bitmaps of other blocks": (lambda: dataclasses.replace(BITS, bitmaps=BITS.bitmaps[:, :8].contiguous()), ValueError, r"bitmaps must have shape \[bitmaps, 16, 1\], got \[\d+, 8, 1\]"),
    "bitmaps in one piece": (lambda: dataclasses.replace(BITS, bitmaps=BITS.bitmaps.flatten()), ValueError, r"bitmaps must have shape \[bitmaps, block_q, block_k / 16\], got"),
    "bitmaps elsewhere": (lambda: dataclasses.replace(BITS, bitmaps=BITS.bitmaps.to("meta")), ValueError, "bitmaps must be on the device of indices, cpu, got meta"),
    "strided bitmaps": (lambda: dataclasses.replace(BITS, bitmaps=BITS.bitmaps.repeat_interleave(2, 0)[::2]), ValueError, "bitmaps must be contiguous, as kernels read it, got strides"),
    "a bitmap that is not there": (lambda: dataclasses.replace(BITS, bitmaps=BITS.bitmaps[:-1]), ValueError, r"rules must name bitmaps, of which there are \d+, got \d+"),
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
