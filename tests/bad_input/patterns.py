# ruff: noqa: E501 - a case is a line
"""Bad arguments of patterns and their configuration."""

from dilated_attention_pytorch import (
    Blocks,
    DilatedBlocks,
    Documents,
    Full,
    GlobalTokens,
    LocalBlocks,
    PerHead,
    RandomBlocks,
    SlidingWindow,
    SparsePatternConfig,
    hierarchical,
)

BAD = {
    "negative window": (lambda: SlidingWindow(-1, 0), ValueError, "left must be at least 0, got -1"),
    "fractional window": (lambda: SlidingWindow(1.5, 0), TypeError, "left must be an int, got 1.5"),
    "no global token": (lambda: GlobalTokens(0), ValueError, "count must be at least 1, got 0"),
    "no documents": (lambda: Documents(()), ValueError, "lengths must name at least one document"),
    "empty document": (lambda: Documents((3, 0)), ValueError, "every document length must be at least 1, got 0"),
    "block size not supported": (lambda: LocalBlocks(64, block_size=100), ValueError, r"block_size must be one of \(16, 32, 64, 128, 256\), got 100"),
    "negative local window": (lambda: LocalBlocks(-64), ValueError, "window must be at least 0, got -64"),
    "no random blocks": (lambda: RandomBlocks(0), ValueError, "blocks_per_row must be at least 1, got 0"),
    "negative block": (lambda: Blocks(((0, -1),)), ValueError, "every block number of pairs must be at least 0, got -1"),
    "branches of unequal length": (lambda: DilatedBlocks((64,), (1, 2)), ValueError, r"must have the same length, at least 1, got \[64\] and \[1, 2\]"),
    "dilation of zero": (lambda: DilatedBlocks((64,), (0,)), ValueError, "every dilation rate must be at least 1, got 0"),
    "segment not a list": (lambda: DilatedBlocks(64, 1), TypeError, "segment_lengths and dilation_rates must be sequences of ints, got 64, 1"),
    "ratio of zero": (lambda: DilatedBlocks((64,), (1,), 0.0), ValueError, r"sparsity_ratio must be the share of blocks kept, in \(0, 1\], got 0.0"),
    "no levels": (lambda: hierarchical([]), ValueError, "levels must hold at least one"),
    "no heads": (lambda: PerHead(()), ValueError, "patterns must hold at least one pattern"),
    "per head of per head": (lambda: PerHead((PerHead((Full(),)),)), TypeError, "none of them per head itself"),
    "queries a word": (lambda: GlobalTokens(2, queries="no"), TypeError, "queries must be True or False, got 'no'"),
    "causal a word": (lambda: LocalBlocks(64, causal="false"), TypeError, "causal must be True or False, got 'false'"),
    "fractional blocks": (lambda: Blocks(((0.9, 1.7),)), TypeError, "every block number of pairs must be an int, got 0.9"),
    "half a pair": (lambda: Blocks(((0,),)), ValueError, r"pairs must hold \(query block, key block\), got \(0,\)"),
    "documents a number": (lambda: Documents(5), TypeError, "lengths must be a sequence of ints, got 5"),
    "heads a pattern": (lambda: PerHead(Full()), TypeError, "patterns must be a sequence of patterns"),
    "window too large": (lambda: LocalBlocks(10**30), ValueError, "window must be at most 1099511627776"),
    # configuration
    "unknown pattern type": (lambda: SparsePatternConfig(pattern_type="banded"), ValueError, "pattern_type must be one of .* got 'banded'"),
    "ratio above one": (lambda: SparsePatternConfig(sparsity_ratio=1.5), ValueError, r"sparsity_ratio must be the share of blocks kept, in \(0, 1\], got 1.5"),
    "ratio a string": (lambda: SparsePatternConfig(sparsity_ratio="5%"), TypeError, "sparsity_ratio must be a number, got '5%'"),
    "ratio of a window": (lambda: SparsePatternConfig(pattern_type="local_window", sparsity_ratio=0.1), ValueError, "sparsity_ratio has no meaning for pattern_type 'local_window'"),
    "window of dilated": (lambda: SparsePatternConfig(local_window_size=512), ValueError, "local_window_size has no meaning for pattern_type 'dilated_sparse'"),
    "negative config window": (lambda: SparsePatternConfig(pattern_type="local_window", local_window_size=-1), ValueError, "window must be at least 0, got -1"),
}  # fmt: skip
