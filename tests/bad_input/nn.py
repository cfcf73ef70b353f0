# ruff: noqa: E501 - a case is a line
"""Bad arguments of modules and the factory."""

from functools import partial

import torch

from dilated_attention_pytorch import (
    BlockSparseAdaptive,
    BlockSparseAttention,
    BlockSparseHierarchical,
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    DilatedAttention,
    Full,
    MultiheadDilatedAttention,
    SparsePatternConfig,
    SparsitySchedule,
    TopK,
    create_block_sparse_attention,
)
from dilated_attention_pytorch.nn import BlockGate

ADAPTIVE = BlockSparseAdaptive(0.2, block_size=16)
X = torch.ones(1, 5, 8)
QKV = dict(zip("qkv", torch.ones(3, 1, 16, 2, 8), strict=True))

BAD = {
    "batch_first a word": (lambda: BlockSparseRingMultiheadDilatedAttention(8, 2, batch_first="no"), TypeError, "batch_first must be True or False, got 'no'"),
    "unknown preset": (lambda: BlockSparseHierarchical("deep"), ValueError, "levels must be pairs or one of .* got 'deep'"),
    "segments without dilations": (lambda: BlockSparseRingDilatedAttention([2048]), ValueError, "must be given together or not at all"),
    "segments for a window": (lambda: BlockSparseRingDilatedAttention([2048], [0], pattern_type="local_window"), ValueError, "every dilation rate must be at least 1, got 0"),
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
    **{
        f"a sparse {name}": (partial(DilatedAttention([16], [1]), **{**QKV, name: QKV[name].to_sparse()}), TypeError, f"{name} must be dense, got a tensor of layout torch.sparse_coo")
        for name in "qkv"
    },
    "a sparse query": (lambda: MultiheadDilatedAttention(8, 2, [16], [1])(torch.ones(1, 5, 8).to_sparse(), X, X), TypeError, "query must be dense, got a tensor of layout torch.sparse_coo"),
    "a sparse value": (lambda: BlockSparseRingMultiheadDilatedAttention(8, 2)(X, X, X.to_sparse()), TypeError, "value must be dense, got a tensor of layout torch.sparse_coo"),
    "heads that keep too few tokens": (lambda: MultiheadDilatedAttention(64, 2, [64], [5]), ValueError, "dilation_rates must have one of at most 4, twice the number of heads, .* got"),
    "dilations first": (lambda: MultiheadDilatedAttention(64, 8, [1, 2, 4], [256, 512, 1024]), ValueError, "every dilation rate must be at most its segment length, got 256 in a segment of 1: .* Did you pass dilations first"),
    "an automatic device": (lambda: create_block_sparse_attention("auto", seq_len=100, device="gpu"), ValueError, "device must be one that PyTorch knows, such as 'cpu' or 'cuda:0', got 'gpu'"),
    "an automatic dtype": (lambda: create_block_sparse_attention("auto", seq_len=100, dtype="bf16"), TypeError, "dtype must be float64, float32, bfloat16, float16 or None, got 'bf16'"),
    "unknown variant": (lambda: create_block_sparse_attention("dense"), ValueError, "variant must be one of .* got 'dense'"),
    "factory keyword": (lambda: create_block_sparse_attention("hierarchical", sparsity_ratio=0.1), TypeError, "unknown keyword 'sparsity_ratio' for variant 'hierarchical'; it takes"),
    "kv heads of a gate": (lambda: BlockGate(4, 8, 3), ValueError, "num_heads must be a multiple of num_kv_heads, got 4 and 3"),
    "other dropout": (lambda: BlockSparseAttention(Full(), attention_dropout=2.0), ValueError, r"attention_dropout must be in \[0, 1\), got 2.0"),
    "three block sizes": (lambda: BlockSparseAdaptive(block_size=(64, 16, 16)), ValueError, r"block_size must be an int or a pair \(block_q, block_k\), got \(64, 16, 16\)"),
    "selector a class": (lambda: BlockSparseAdaptive(selector=TopK), TypeError, r"selector must be SharedBudget\(share\), TopK\(share\) or another Selector, got <class .*TopK"),
    "strength without a gate": (lambda: BlockSparseAdaptive(gate_strength=1.0), ValueError, "gate_strength needs a BlockGate as scorer, which can learn, got MeanPooled"),
    # schedules
    "no model": (lambda: SparsitySchedule(None, steps=3), TypeError, "model must be a torch.nn.Module, got None"),
    "model a class": (lambda: SparsitySchedule(BlockSparseAdaptive, steps=3), TypeError, "model must be a torch.nn.Module, got <class"),
    "model without attention": (lambda: SparsitySchedule(torch.nn.Linear(2, 2), steps=3), ValueError, "model must hold a block-sparse attention module .*, got Linear"),
    "no steps": (lambda: SparsitySchedule(ADAPTIVE, steps=0), ValueError, "steps must be at least 1, got 0"),
    "steps a float": (lambda: SparsitySchedule(ADAPTIVE, steps=1e3), TypeError, "steps must be an int, got 1000.0"),
    "dense steps negative": (lambda: SparsitySchedule(ADAPTIVE, steps=1, dense_steps=-1), ValueError, "dense_steps must be at least 0, got -1"),
    "floor above one": (lambda: SparsitySchedule(ADAPTIVE, steps=1, kept_floor=1.5), ValueError, r"kept_floor must be the share of attention mass kept, in \(0, 1\], got 1.5"),
    "floor NaN": (lambda: SparsitySchedule(ADAPTIVE, steps=1, kept_floor=float("nan")), ValueError, "kept_floor must be the share .* got nan"),
    "kept without a floor": (lambda: SparsitySchedule(ADAPTIVE, steps=1).step(kept=0.3), ValueError, "kept must be given if and only if there is a kept_floor, got kept and kept_floor=None"),
    "floor without kept": (lambda: SparsitySchedule(ADAPTIVE, steps=1, kept_floor=0.5).step(), ValueError, "kept must be given if and only if there is a kept_floor, got no kept and kept_floor=0.5"),
    "kept NaN": (lambda: SparsitySchedule(ADAPTIVE, steps=1, kept_floor=0.5).step(kept=float("nan")), ValueError, r"kept must be the share of attention mass that is kept, in \[0, 1\], got nan"),
    "kept of each query": (lambda: SparsitySchedule(ADAPTIVE, steps=1, kept_floor=0.5).step(kept=torch.ones(1, 2, 9)), TypeError, r"kept must be a number, such as kept_mass\(...\).mean\(\), got a tensor of shape \[1, 2, 9\]"),
    "state of another schedule": (lambda: SparsitySchedule(ADAPTIVE, steps=2).load_state_dict(SparsitySchedule(ADAPTIVE, steps=3).state_dict()), ValueError, "state is of a schedule with steps=3, and this one has steps=2"),
}  # fmt: skip
