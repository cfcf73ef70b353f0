# ruff: noqa: E501 - a case is a line
"""Bad input: a ValueError or TypeError that names the argument, the rule and the value, before anything is computed."""

import pytest
import torch

import dilated_attention_pytorch as dap
from dilated_attention_pytorch import (
    BlockLayout,
    Blocks,
    BlockSparseAttention,
    BlockSparseHierarchical,
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    Causal,
    DilatedBlocks,
    Documents,
    Full,
    GlobalTokens,
    LocalBlocks,
    PerHead,
    RandomBlocks,
    SlidingWindow,
    SparsePatternConfig,
    block_sparse_attention,
    create_block_sparse_attention,
    hierarchical,
)


def qkv(**changes):
    """Good tensors, but for the changes."""
    tensors = {name: torch.randn(2, 32, 4, 8) for name in "qkv"}
    return {**tensors, **changes}


def call(layout=None, options=None, **changes):
    layout = Full() if layout is None else layout
    return lambda: block_sparse_attention(*qkv(**changes).values(), layout, **(options or {}))


LAYOUT = BlockLayout.from_block_mask(torch.ones(2, 2, dtype=torch.bool), 16)
HEADS = BlockLayout.from_block_mask(torch.ones(3, 2, 2, dtype=torch.bool), 16)
SAMPLES = BlockLayout.from_block_mask(torch.ones(3, 4, 2, 2, dtype=torch.bool), 16)
MASK = torch.ones(2, 2, dtype=torch.bool)

BAD = {
    # tensors
    "q not a tensor": (call(q=[1.0]), TypeError, "q must be a tensor, got list"),
    "q of rank 3": (call(q=torch.randn(2, 32, 8)), ValueError, r"q must have shape \(batch, seq, heads, head_dim\), got \[2, 32, 8\]"),
    "k of rank 5": (call(k=torch.randn(1, 2, 32, 4, 8)), ValueError, r"k must have shape .* got \[1, 2, 32, 4, 8\]"),
    "integers": (call(q=torch.ones(2, 32, 4, 8, dtype=torch.int32)), TypeError, "q must be float64, float32, bfloat16 or float16, got torch.int32"),
    "complex": (call(q=torch.ones(2, 32, 4, 8, dtype=torch.complex64)), TypeError, "q must be float64.* got torch.complex64"),
    "mixed dtypes": (call(v=torch.randn(2, 32, 4, 8).half()), TypeError, "v must have the dtype of q, torch.float32, got torch.float16"),
    "mixed devices": (call(k=torch.randn(2, 32, 4, 8, device="meta")), ValueError, "k must be on the device of q, cpu, got meta"),
    "batch sizes": (call(k=torch.randn(3, 32, 4, 8)), ValueError, "k must have the batch size of q, 2, got 3"),
    "head dims": (call(k=torch.randn(2, 32, 4, 16)), ValueError, "k must have the head_dim of q, 8, got 16"),
    "k and v lengths": (call(v=torch.randn(2, 31, 4, 8)), ValueError, r"k and v must have the same shape, got \[2, 32, 4, 8\] and \[2, 31, 4, 8\]"),
    "heads not divisible": (call(k=torch.randn(2, 32, 3, 8), v=torch.randn(2, 32, 3, 8)), ValueError, "heads of q must be a multiple of heads of k, got 4 and 3"),
    "empty sequence": (call(q=torch.randn(2, 0, 4, 8)), ValueError, r"q must not be empty, got shape \[2, 0, 4, 8\]"),
    # layout or pattern
    "no layout": (call(layout="full"), TypeError, "layout_or_pattern must be a BlockLayout or a Pattern, got str"),
    "a config": (call(layout=SparsePatternConfig()), TypeError, "got a SparsePatternConfig: pass config.pattern"),
    "a dense mask": (call(layout=torch.ones(32, 32)), TypeError, "layout_or_pattern must be a BlockLayout or a Pattern, got Tensor"),
    "layout for another length": (call(layout=LAYOUT, q=torch.randn(2, 33, 4, 8)), ValueError, r"layout for lengths \(32, 32\), but q and k have \(33, 32\) tokens"),
    "layout for other heads": (call(layout=HEADS), ValueError, "lists for all heads together, 4 heads of q or 4 of k, got 3"),
    "layout for other samples": (call(layout=SAMPLES), ValueError, "lists for 2 samples, got 3"),
    "layout elsewhere": (call(layout=LAYOUT.to("meta")), ValueError, "layout_or_pattern must be on the device of q, cpu, got meta"),
    "pattern for other heads": (call(layout=PerHead((Full(), Causal()))), ValueError, "a pattern for each of 4 heads of q or 4 of k, got 2"),
    "documents of another length": (call(layout=Documents((10, 10))), ValueError, "lengths of Documents must add up to seq_k = 32, got 20"),
    # options
    "NaN scale": (call(options={"scale": float("nan")}), ValueError, "scale must be finite, got nan"),
    "infinite scale": (call(options={"scale": float("inf")}), ValueError, "scale must be finite, got inf"),
    "scale a string": (call(options={"scale": "1"}), TypeError, "scale must be a number or None, got str"),
    "dropout of one": (call(options={"dropout_p": 1.0}), ValueError, r"dropout_p must be in \[0, 1\), got 1.0"),
    "dropout negative": (call(options={"dropout_p": -0.1}), ValueError, r"dropout_p must be in \[0, 1\), got -0.1"),
    "dropout NaN": (call(options={"dropout_p": float("nan")}), ValueError, r"dropout_p must be in \[0, 1\), got nan"),
    "dropout a tensor": (call(options={"dropout_p": torch.tensor(0.1)}), TypeError, "dropout_p must be a number, got Tensor"),
    "is_causal a mask": (call(options={"is_causal": "yes"}), TypeError, "is_causal must be True or False, got 'yes'"),
    "return_lse an int": (call(options={"return_lse": 1}), TypeError, "return_lse must be True or False, got 1"),
    "unknown backend": (call(options={"backend": "cuda"}), ValueError, r"backend must be one of \['auto', 'sdpa', 'triton', 'blockwise', 'reference'\], got 'cuda'"),
    "unknown keyword": (call(options={"attn_mask": None}), TypeError, "attn_mask"),
    "padding of another shape": (call(options={"key_padding_mask": torch.zeros(2, 31, dtype=torch.bool)}), ValueError, r"key_padding_mask must have shape \(batch, seq_k\) = \[2, 32\], got \[2, 31\]"),
    "padding of floats": (call(options={"key_padding_mask": torch.zeros(2, 32)}), TypeError, "key_padding_mask must be bool, True where a key is padding, got torch.float32"),
    "padding a list": (call(options={"key_padding_mask": [[False] * 32] * 2}), TypeError, "key_padding_mask must be a tensor, got list"),
    "padding elsewhere": (call(options={"key_padding_mask": torch.zeros(2, 32, dtype=torch.bool, device="meta")}), ValueError, "key_padding_mask must be on the device of q, cpu, got meta"),
    "ids of floats": (call(options={"document_ids": torch.zeros(2, 32)}), TypeError, "document_ids must be int32 or int64, got torch.float32"),
    "ids of another shape": (call(options={"document_ids": torch.zeros(32, dtype=torch.int64)}), ValueError, r"document_ids must have shape .* \[2, 32\], got \[32\]"),
    "ids with fewer keys": (call(options={"document_ids": torch.zeros(2, 32, dtype=torch.int64)}, q=torch.randn(2, 40, 4, 8)), ValueError, "document_ids needs seq_q <= seq_k .* got 40 > 32"),
    # patterns
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
    # layouts
    "from no pattern": (lambda: BlockLayout.from_pattern("causal", 32, block_size=16), TypeError, "pattern must be a Pattern, got str"),
    "length of zero": (lambda: BlockLayout.from_pattern(Full(), 0, block_size=16), ValueError, "seq_q must be at least 1, got 0"),
    "length too large": (lambda: BlockLayout.from_pattern(Full(), 2**30, block_size=256), ValueError, "seq_q must be below 1073741824"),
    "three block sizes": (lambda: BlockLayout.from_pattern(Full(), 32, block_size=(16, 16, 16)), ValueError, "block_size must be an int or a pair"),
    "coarser than the pattern": (lambda: BlockLayout.from_pattern(LocalBlocks(64, block_size=32), 99, block_size=64), ValueError, "block_size must divide the block size 32 that the pattern is written in, got 64"),
    "two packings": (lambda: BlockLayout.from_pattern(Documents((3, 4)) | Documents((4, 3)), 7, block_size=16), ValueError, "one packing of documents, got 2"),
    "too many token rules": (lambda: BlockLayout.from_pattern(__import__("functools").reduce(lambda a, b: a | b, [SlidingWindow(i, 9 - i) for i in range(8)]), 7, block_size=16), ValueError, "at most 6 different token rules, got 8"),
    "heads of a pattern": (lambda: BlockLayout.from_pattern(PerHead((Full(), Full())), 7, block_size=16, num_heads=3), ValueError, "num_heads must be the pattern's 2 heads, got 3"),
    "mask of floats": (lambda: BlockLayout.from_block_mask(torch.ones(2, 2), 16), TypeError, "mask must be a bool tensor, got torch.float32"),
    "mask of rank 1": (lambda: BlockLayout.from_block_mask(MASK[0], 16), ValueError, r"mask must have shape \[nq, nk\].* got \[2\]"),
    "empty mask": (lambda: BlockLayout.from_block_mask(MASK[:0], 16), ValueError, r"mask must not be empty, got shape \[0, 2\]"),
    "mask for another length": (lambda: BlockLayout.from_block_mask(MASK, 16, seq_q=33), ValueError, "seq_q must need 2 blocks of 16 tokens, as the mask has, got 33"),
    "a kind by hand": (lambda: __import__("dataclasses").replace(BlockLayout.from_pattern(SlidingWindow(3, 0), 64, block_size=16), kind="full"), ValueError, "kind is found by from_pattern and from_block_mask and cannot be given, got 'full'"),
    "block size None": (lambda: BlockLayout.from_pattern(Full(), 16, block_size=None), TypeError, "block_size must be an int, got None"),
    "heads of no pattern": (lambda: BlockLayout.from_pattern(Full(), 16, block_size=16, num_heads=-3), ValueError, "num_heads must be at least 1, got -3"),
    "cost of nothing": (lambda: LAYOUT.cost(batch=0, heads=1, head_dim=8, itemsize=4), ValueError, "batch must be at least 1, got 0"),
    "queries a word": (lambda: GlobalTokens(2, queries="no"), TypeError, "queries must be True or False, got 'no'"),
    "causal a word": (lambda: LocalBlocks(64, causal="false"), TypeError, "causal must be True or False, got 'false'"),
    "fractional blocks": (lambda: Blocks(((0.9, 1.7),)), TypeError, "every block number of pairs must be an int, got 0.9"),
    "half a pair": (lambda: Blocks(((0,),)), ValueError, r"pairs must hold \(query block, key block\), got \(0,\)"),
    "documents a number": (lambda: Documents(5), TypeError, "lengths must be a sequence of ints, got 5"),
    "heads a pattern": (lambda: PerHead(Full()), TypeError, "patterns must be a sequence of patterns"),
    "window too large": (lambda: LocalBlocks(10**30), ValueError, "window must be at most 1099511627776"),
    "an endless product": (lambda: BlockLayout.from_pattern(__import__("functools").reduce(lambda a, b: a & b, [LocalBlocks(16 * i, block_size=16) | RandomBlocks(i + 1, block_size=16) for i in range(12)]), 64, block_size=16), ValueError, "a union of at most 64 parts once written out"),
    "batch_first a word": (lambda: BlockSparseRingMultiheadDilatedAttention(8, 2, batch_first="no"), TypeError, "batch_first must be True or False, got 'no'"),
    "scale beyond float32": (call(options={"scale": 1e300}), ValueError, "scale must be finite, got 1e\\+300"),
    # configuration, modules, factory
    "unknown pattern type": (lambda: SparsePatternConfig(pattern_type="banded"), ValueError, "pattern_type must be one of .* got 'banded'"),
    "ratio above one": (lambda: SparsePatternConfig(sparsity_ratio=1.5), ValueError, r"sparsity_ratio must be the share of blocks kept, in \(0, 1\], got 1.5"),
    "ratio a string": (lambda: SparsePatternConfig(sparsity_ratio="5%"), TypeError, "sparsity_ratio must be a number, got '5%'"),
    "ratio of a window": (lambda: SparsePatternConfig(pattern_type="local_window", sparsity_ratio=0.1), ValueError, "sparsity_ratio has no meaning for pattern_type 'local_window'"),
    "window of dilated": (lambda: SparsePatternConfig(local_window_size=512), ValueError, "local_window_size has no meaning for pattern_type 'dilated_sparse'"),
    "unknown preset": (lambda: BlockSparseHierarchical("deep"), ValueError, "levels must be pairs or one of .* got 'deep'"),
    "negative config window": (lambda: SparsePatternConfig(pattern_type="local_window", local_window_size=-1), ValueError, "window must be at least 0, got -1"),
    "segments without dilations": (lambda: BlockSparseRingDilatedAttention([2048]), ValueError, "must be given together or not at all"),
    "segments for a window": (lambda: BlockSparseRingDilatedAttention([2048], [1], pattern_type="local_window"), ValueError, "segment_lengths and dilation_rates have no meaning for pattern_type 'local_window'"),
    "config twice": (lambda: BlockSparseRingDilatedAttention(sparse_config=SparsePatternConfig(), block_size=64), ValueError, r"\['block_size'\] must be given in sparse_config or as keywords, not both"),
    "config a dict": (lambda: BlockSparseRingDilatedAttention(sparse_config={"block_size": 64}), TypeError, "sparse_config must be a SparsePatternConfig, got dict"),
    "module keyword": (lambda: BlockSparseRingDilatedAttention(sparcity=0.1), TypeError, "unknown keyword 'sparcity'; beside the arguments of its signature"),
    "two dropouts": (lambda: BlockSparseRingDilatedAttention(dropout=0.1, attention_dropout=0.2), ValueError, "name the same thing and must agree, got 0.1 and 0.2"),
    "module dropout": (lambda: BlockSparseRingDilatedAttention(dropout=2.0), ValueError, r"dropout must be in \[0, 1\), got 2.0"),
    "module backend": (lambda: BlockSparseAttention(Full(), backend="fast"), ValueError, "backend must be one of .* got 'fast'"),
    "module pattern": (lambda: BlockSparseAttention("full"), TypeError, "pattern must be a Pattern, got str"),
    "embed_dim": (lambda: BlockSparseRingMultiheadDilatedAttention(10, 3), ValueError, "embed_dim must be a multiple of num_heads, got 10 and 3"),
    "kv heads": (lambda: BlockSparseRingMultiheadDilatedAttention(12, 4, num_kv_heads=3), ValueError, "num_heads must be a multiple of num_kv_heads, got 4 and 3"),
    "features": (lambda: BlockSparseRingMultiheadDilatedAttention(8, 2)(*[torch.randn(1, 5, 9)] * 3), ValueError, r"query must be \(batch, seq, features\) with 8 features, got \[1, 5, 9\]"),
    "unknown variant": (lambda: create_block_sparse_attention("dense"), ValueError, "variant must be one of .* got 'dense'"),
    "factory keyword": (lambda: create_block_sparse_attention("hierarchical", sparsity_ratio=0.1), TypeError, "unknown keyword 'sparsity_ratio' for variant 'hierarchical'; it takes"),
}  # fmt: skip


@pytest.fixture
def nothing_is_computed(monkeypatch):
    """A backend that starts is a failure of the check before it."""

    def started(*args, **kwargs):
        raise AssertionError("a kernel started on bad input")

    for backend in (dap.backends.blockwise, dap.backends.reference, dap.backends.sdpa):
        for name in ("forward", "attention"):
            if hasattr(backend, name):
                monkeypatch.setattr(backend, name, started)


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name, nothing_is_computed):
    run, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        run()


def test_the_fixture_would_notice(nothing_is_computed):
    for layout in (Full(), SlidingWindow(3, 3)):
        with pytest.raises(AssertionError, match="a kernel started"):
            call(layout=layout)()
