# ruff: noqa: E501 - a case is a line
"""Bad arguments of the operators."""

from functools import partial

import torch

from dilated_attention_pytorch import (
    BlockLayout,
    Causal,
    CumulativeMass,
    Documents,
    Full,
    PerHead,
    RelativeThreshold,
    ScoreBias,
    SparsePatternConfig,
    TopK,
    block_sparse_attention,
    decode_attention,
    dilated_attention,
    explain,
    kept_mass,
    merge_attention,
    select_blocks,
)
from dilated_attention_pytorch.nn import BlockGate
from dilated_attention_pytorch.ops import Antidiagonal, block_masses


class Crooked:
    """A scorer that gives so many rows and columns."""

    def __init__(self, rows, columns):
        self.rows, self.columns = rows, columns

    def features(self, queries, keys, scale):
        return torch.ones(1, self.rows, 2, 8), torch.ones(1, self.columns, 2, 8)


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

BRANCHES = {"segment_lengths": [16], "dilation_rates": [1]}

TABLE, BY_PAIR = torch.ones(4, 9), torch.ones(1, 1, 32, 32)


def jagged(x):
    return torch.nested.nested_tensor(list(x), layout=torch.jagged)


# What takes q, k and v, and which of them it looks at.
OPERATORS = {
    "block_sparse_attention": (lambda q, k, v: block_sparse_attention(q, k, v, Causal()), "qkv"),
    "block_sparse_attention of a layout": (lambda q, k, v: block_sparse_attention(q, k, v, LAYOUT), "qkv"),
    "block_sparse_attention, heads first": (lambda q, k, v: block_sparse_attention(q, k, v, Causal(), layout="bhsd"), "qkv"),
    "dilated_attention": (lambda q, k, v: dilated_attention(q, k, v, **BRANCHES), "qkv"),
    "decode_attention": (lambda q, k, v: decode_attention(q, k, v, Causal()), "qkv"),
    "explain": (lambda q, k, v: explain(q, k, v, Causal()), "qkv"),
    "select_blocks": (lambda q, k, v: select_blocks(q, k, selector=TopK(0.5), block_size=16), "qk"),
    "block_masses": (lambda q, k, v: block_masses(q, k, block_size=16), "qk"),
    "kept_mass": (lambda q, k, v: kept_mass(q, k, LAYOUT), "qk"),
}  # fmt: skip

BAD = {
    # the terms of a bias
    "slopes of a list": (lambda: ScoreBias.slopes([0.5]), TypeError, r"slopes must be a tensor, got \[0.5\]"),
    "slopes of ints": (lambda: ScoreBias.slopes(torch.ones(4).int()), TypeError, "slopes must be floating point, got torch.int32"),
    "slopes of pairs": (lambda: ScoreBias.slopes(BY_PAIR), ValueError, r"slopes must have 1 or 2 dimensions, got shape \[1, 1, 32, 32\]"),
    "signed by a number": (lambda: ScoreBias.slopes(torch.ones(4), signed=1), TypeError, "signed must be True or False, got 1"),
    "a table without heads": (lambda: ScoreBias.table(torch.ones(9)), ValueError, r"table must have 2 or 3 dimensions, got shape \[9\]"),
    "a table without entries": (lambda: ScoreBias.table(torch.ones(4, 0)), ValueError, r"table must have entries, got shape \[4, 0\]"),
    "zero before the table": (lambda: ScoreBias.table(TABLE, zero=-1), ValueError, "zero must be at least 0, got -1"),
    "zero of a float": (lambda: ScoreBias.table(TABLE, zero=4.0), TypeError, "zero must be an int, got 4.0"),
    "positions of floats": (lambda: ScoreBias.table(TABLE, positions=torch.ones(32)), TypeError, "positions must be int32 or int64, got torch.float32"),
    "positions of a list": (lambda: ScoreBias.table(TABLE, positions=[0, 1]), TypeError, r"positions must be a tensor or None, got \[0, 1\]"),
    "positions of pairs": (lambda: ScoreBias.table(TABLE, positions=BY_PAIR.int()), ValueError, r"positions must have 1 or 2 dimensions, got shape"),
    "sparse table": (lambda: ScoreBias.t5(TABLE.to_sparse()), TypeError, "table must be dense, got a tensor of layout torch.sparse_coo"),
    "too few buckets": (lambda: ScoreBias.t5(torch.ones(4, 3)), ValueError, r"table must have 4 buckets or more, got shape \[4, 3\]"),
    "no room between buckets": (lambda: ScoreBias.t5(torch.ones(4, 32), max_distance=8), ValueError, "max_distance must be more than the 8 distances .*, got 8"),
    "max_distance of a float": (lambda: ScoreBias.t5(TABLE, max_distance=128.0), TypeError, "max_distance must be an int, got 128.0"),
    "bidirectional by a word": (lambda: ScoreBias.t5(TABLE, bidirectional="no"), TypeError, "bidirectional must be True or False, got 'no'"),
    "a grid of a number": (lambda: ScoreBias.grid(TABLE, 4), TypeError, "shape must be a tuple of ints, got 4"),
    "a grid without places": (lambda: ScoreBias.grid(TABLE, (0,)), ValueError, "shape must be at least 1, got 0"),
    "a table of another grid": (lambda: ScoreBias.grid(TABLE, (4, 4)), ValueError, r"table must have 3 dimensions, got shape \[4, 9\]"),
    "an even number of offsets": (lambda: ScoreBias.grid(torch.ones(4, 8), (4,)), ValueError, r"table must have an odd number of offsets a dimension, got shape \[4, 8\]"),
    "tokens of floats": (lambda: ScoreBias.grid(TABLE, (4,), tokens=torch.ones(4)), TypeError, "tokens must be int32 or int64, got torch.float32"),
    "keys without heads": (lambda: ScoreBias.keys(torch.ones(2, 32)), ValueError, r"values must have 3 dimensions, got shape \[2, 32\]"),
    "keys of bools": (lambda: ScoreBias.keys(torch.ones(1, 1, 32) > 0), TypeError, "values must be floating point, got torch.bool"),
    "gates of a number": (lambda: ScoreBias.forget(-0.1), TypeError, "log_gates must be a tensor, got -0.1"),
    "pairs without heads": (lambda: ScoreBias.dense(torch.ones(32, 32)), ValueError, r"values must have 4 dimensions, got shape \[32, 32\]"),
    "positions of fewer tokens than queries": (
        call(options={"bias": ScoreBias.table(TABLE, positions=torch.arange(8))}, k=torch.ones(2, 8, 4, 8), v=torch.ones(2, 8, 4, 8)),
        ValueError,
        "bias must have positions for all 32 queries, got 8",
    ),
    "gates of fewer tokens than queries": (
        call(options={"bias": ScoreBias.forget(torch.ones(1, 1, 8))}, k=torch.ones(2, 8, 4, 8), v=torch.ones(2, 8, 4, 8)),
        ValueError,
        "bias must have gates for all 32 queries, got 8",
    ),
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
    "k and v heads": (call(v=torch.randn(2, 32, 2, 3)), ValueError, r"k and v must have the same shape but for head_dim, got \[2, 32, 4, 8\] and \[2, 32, 2, 3\]"),
    "k and v lengths": (call(v=torch.randn(2, 31, 4, 8)), ValueError, r"k and v must have the same shape but for head_dim, got \[2, 32, 4, 8\] and \[2, 31, 4, 8\]"),
    "heads not divisible": (call(k=torch.randn(2, 32, 3, 8), v=torch.randn(2, 32, 3, 8)), ValueError, "heads of q must be a multiple of heads of k, got 4 and 3"),
    **{
        f"{kind} {name} of {operator}": (partial(run, **qkv(**{name: make(qkv()[name])})), TypeError, f"{name} must be dense, got a tensor of layout torch.{kind}")
        for operator, (run, names) in OPERATORS.items()
        for name in names
        for kind, make in (("sparse_coo", torch.Tensor.to_sparse), ("jagged", jagged))
    },
    "sparse parts": (lambda: merge_attention([qkv()["q"].to_sparse()], [torch.zeros(2, 4, 32)]), TypeError, "outs must be dense, got a tensor of layout torch.sparse_coo"),
    "sparse lse of parts": (lambda: merge_attention([qkv()["q"]], [torch.zeros(2, 4, 32).to_sparse()]), TypeError, "lses must be dense, got a tensor of layout torch.sparse_coo"),
    "an order of dimensions that is none": (call(options={"layout": "bnsd"}), ValueError, r"layout must be 'bshd' for tensors of \(batch, seq, heads, head_dim\) or 'bhsd' for .*, got 'bnsd'"),
    "a layout for the order of dimensions": (call(options={"layout": LAYOUT}), ValueError, r"layout must be 'bshd' .* got BlockLayout\("),
    "a layout of PyTorch for it": (lambda: dilated_attention(**qkv(), **BRANCHES, layout=torch.strided), ValueError, "layout must be 'bshd' .* got torch.strided"),
    "no order": (lambda: decode_attention(**qkv(), pattern=Causal(), layout=None), ValueError, "layout must be 'bshd' .* got None"),
    "an order in capitals": (lambda: explain(**qkv(), layout_or_pattern=Causal(), layout="BHSD"), ValueError, "layout must be 'bshd' .* got 'BHSD'"),
    "heads first of rank 3": (call(q=torch.randn(2, 32, 8), options={"layout": "bhsd"}), ValueError, r"q must have shape \(batch, heads, seq, head_dim\), got \[2, 32, 8\]"),
    "heads first a list": (call(k=[1.0], options={"layout": "bhsd"}), ValueError, r"k must have shape \(batch, heads, seq, head_dim\), got list"),
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
    "documents of another length": (call(layout=Documents((10, 10))), ValueError, "lengths of Documents and KeyRanges must add up to seq_k = 32, got 20"),
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
    # choosing blocks
    "mass above one": (lambda: CumulativeMass(1.5), ValueError, r"mass must be the share of a row's attention, in \(0, 1\], got 1.5"),
    "ratio above one": (lambda: RelativeThreshold(1.5), ValueError, r"ratio must be the share of a row's largest mass, in \(0, 1\], got 1.5"),
    "share above one": (lambda: TopK(1.5), ValueError, r"share must be the share of blocks kept, in \(0, 1\], got 1.5"),
    "stride of no divisor": (lambda: block_masses(*[torch.randn(1, 32, 2, 8)] * 2, scorer=Antidiagonal(5), block_size=16), ValueError, "the stride of a scorer must divide the block, 16 tokens, got 5"),
    **{
        f"a scorer of {rows} rows and {columns} columns": (lambda rows=rows, columns=columns: block_masses(*[torch.randn(1, 32, 2, 8)] * 2, scorer=Crooked(rows, columns), block_size=16), ValueError, rf"scorer must give {name} \(batch, a multiple of 2 blocks .*\), got a tensor of shape \[1, {number}, 2, 8\]")
        for rows, columns, name, number in ((3, 2, "rows", 3), (2, 5, "columns", 5), (0, 2, "rows", 0), (6, 2, "rows", 6))
    },
    "a gate for other heads": (lambda: block_masses(*[torch.randn(1, 32, 2, 8)] * 2, scorer=BlockGate(4, 8), block_size=16), ValueError, r"q must have 4 heads of 8, as the gate was made for, got \[2, 8\]"),
    "scale beyond float32": (call(options={"scale": 1e300}), ValueError, "scale must be finite, got 1e\\+300"),
}  # fmt: skip
