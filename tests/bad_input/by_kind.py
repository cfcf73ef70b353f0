# ruff: noqa: E501 - a case is a line
"""Every argument of the operators and modules with every value that is bad for its kind.

`CALLS` names the public callables of `ops` and `nn`, good arguments for each, and the kind of each argument that has
one; `BAD` has the cases of each. `tests/test_bad_input.py` looks that no argument was forgotten.
"""

import inspect
from functools import partial

import torch

from dilated_attention_pytorch import nn, ops
from dilated_attention_pytorch.options import OptionKeywords
from dilated_attention_pytorch.patterns import Full

NAN, INF = float("nan"), float("inf")
PAIRS = torch.ones(2, 2)
QUERY, KEY, CACHE = torch.ones(2, 32, 4, 8), torch.ones(2, 32, 4, 8), torch.ones(2, 1, 4, 8)
ORDER_OF_TOKENS = torch.arange(32)
MASSES = torch.full((2, 4, 2, 2), 0.5)

# Kind → bad values, the error, and what the message says behind the name of the argument.
FLAG = [
    (1, TypeError, "must be True or False, got 1"),
    ("no", TypeError, "must be True or False, got 'no'"),
    (PAIRS, TypeError, r"must be True or False, got a tensor of shape \[2, 2\]"),
]
DETERMINISTIC = [(bad, TypeError, f"must be True, False or None, got {bad!r}") for bad in (1, "yes")]
NO_INT = [
    (1.5, TypeError, "must be an int, got 1.5"),
    (True, TypeError, "must be an int, got True"),
    (PAIRS, TypeError, r"must be an int, got a tensor of shape \[2, 2\]"),
    (2**50, ValueError, "must be at most 1099511627776, got 1125899906842624"),
]
COUNT = [*NO_INT, (-1, ValueError, "must be at least 0, got -1")]
POSITIVE = [*NO_INT, (0, ValueError, "must be at least 1, got 0"), (-1, ValueError, "must be at least 1, got -1")]
NO_NUMBER = [
    ("half", TypeError, "must be a number.*, got ('half'|str)"),
    (True, TypeError, "must be a number.*, got (True|bool)"),
    (PAIRS, TypeError, r"must be a number.*, got (a tensor of shape \[2, 2\]|Tensor)"),
]
SHARE = [
    *NO_NUMBER,
    (0.0, ValueError, r"must be the share of .*, in \(0, 1\], got 0.0"),
    (1.5, ValueError, r"must be the share of .*, in \(0, 1\], got 1.5"),
    (NAN, ValueError, r"must be the share of .*, in \(0, 1\], got nan"),
]
SCALE = [
    *NO_NUMBER,
    (NAN, ValueError, "must be finite, got nan"),
    (-INF, ValueError, "must be finite, got -inf"),
]
DROPOUT = [
    *NO_NUMBER,
    (1.0, ValueError, r"must be in \[0, 1\), got 1.0"),
    (-0.1, ValueError, r"must be in \[0, 1\), got -0.1"),
    (NAN, ValueError, r"must be in \[0, 1\), got nan"),
]
SOFTCAP = [
    *NO_NUMBER,
    (0.0, ValueError, "must be positive and finite .*, got 0.0"),
    (-1.0, ValueError, "must be positive and finite .*, got -1.0"),
    (NAN, ValueError, "must be positive and finite .*, got nan"),
]
STRENGTH = [
    *NO_NUMBER,
    (NAN, ValueError, "must be at least 0 and finite, got nan"),
    (INF, ValueError, "must be at least 0 and finite, got inf"),
    (-0.5, ValueError, "must be at least 0 and finite, got -0.5"),
]
POSITIVE_NUMBER = [
    (value, ValueError, f"must be a positive number or None, got {got}")
    for value, got in ((0.0, "0.0"), (-1.0, "-1.0"), (NAN, "nan"), (INF, "inf"), ("1", "'1'"), (True, "True"))
]
TENSOR = [
    (None, TypeError, "must be a tensor, got NoneType"),
    ([1.0], TypeError, "must be a tensor, got list"),
    (PAIRS, ValueError, r"must have shape \(batch, seq, heads, head_dim\), got \[2, 2\]"),
    (QUERY.int(), TypeError, "must be float64, float32, bfloat16 or float16, got torch.int32"),
    (QUERY.to_sparse(), TypeError, r"must be dense, got a tensor of layout torch.sparse_coo"),
]
FEATURES = [
    (None, ValueError, "must be .* with 16 features, got NoneType"),
    (PAIRS, ValueError, r"must be .* with 16 features, got \[2, 2\]"),
    (torch.ones(2, 32, 16).double(), TypeError, "must have the dtype of the parameters, torch.float32, got torch.float64"),
]  # fmt: skip
PADDING = [
    ([True], TypeError, "must be a tensor, got list"),
    (torch.ones(2, 32), TypeError, "must be bool, True where a key is padding, got torch.float32"),
    (torch.ones(2, 31, dtype=torch.bool), ValueError, r"must have shape .* = \[2, 32\], got \[2, 31\]"),
    (torch.ones(2, 32, dtype=torch.bool, device="meta"), ValueError, "must be on the device of q, cpu, got meta"),
]
IDS = [
    ([0, 1], TypeError, "must be a tensor, got list"),
    (torch.ones(2, 32), TypeError, "must be int32 or int64, got torch.float32"),
    (torch.ones(1, 32).long(), ValueError, r"must have shape .* = \[2, 32\], got \[1, 32\]"),
    (
        torch.ones(2, 32).long().to_sparse(),
        TypeError,
        r"must be dense, got a tensor of layout torch.sparse_coo",
    ),
]
BY_HEAD = [
    (0.5, TypeError, "must be a tensor or None, got float"),
    (torch.ones(3), ValueError, r"must have a number for each of 4 heads, got shape \[3\]"),
    (torch.ones(4).int(), TypeError, "must be floating point, got torch.int32"),
    (torch.ones(4, device="meta"), ValueError, "must be on the device of q, cpu, got meta"),
]
BIAS = [
    (PAIRS, TypeError, r"must be a ScoreBias or None, got a tensor of shape \[2, 2\]"),
    (ops.ScoreBias, TypeError, "must be a ScoreBias or None, got <class .*ScoreBias"),
    (ops.ScoreBias.slopes(torch.ones(3)), ValueError, r"must have slopes of shape \(2 or 1, 4 or 1\), got \[1, 3\]"),
    (
        ops.ScoreBias.slopes(torch.ones(4, device="meta")),
        ValueError,
        "must be on the device of q, cpu, got slopes on meta",
    ),
    (
        ops.ScoreBias.table(torch.ones(3, 9)),
        ValueError,
        r"must have table of shape \(2 or 1, 4 or 1, 9\), got \[1, 3, 9\]",
    ),
    (
        ops.ScoreBias.table(torch.ones(4, 9), positions=torch.arange(31)),
        ValueError,
        r"must have a position for each of 32 keys, for 2 samples or for all, got shape \[31\]",
    ),
    (
        ops.ScoreBias.table(torch.ones(4, 9), positions=torch.arange(32, device="meta")),
        ValueError,
        "must be on the device of q, cpu, got positions on meta",
    ),
    (
        ops.ScoreBias.table(torch.ones(4, 9)) + ops.ScoreBias.t5(torch.ones(4, 9)),
        ValueError,
        "must have one table at most",
    ),
    (
        ops.ScoreBias.grid(torch.ones(4, 3, 3), (4, 4)),
        ValueError,
        r"must have a position for each of 32 keys, .*, got shape \[16\]",
    ),
    (
        ops.ScoreBias.keys(torch.ones(2, 4, 31)),
        ValueError,
        r"must have keys of shape \(2 or 1, 4 or 1, 32\), got \[2, 4, 31\]",
    ),
    (
        ops.ScoreBias.forget(torch.ones(3, 4, 32)),
        ValueError,
        r"must have forget of shape \(2 or 1, 4 or 1, 32\), got \[3, 4, 32\]",
    ),
    (
        ops.ScoreBias.dense(torch.ones(1, 1, 32, 31)),
        ValueError,
        r"must have dense of shape \(2 or 1, 4 or 1, .*, got \[1, 1, 32, 31\]",
    ),
]
TERMS = [
    (None, TypeError, r"must be made by ScoreBias.slopes, .*, got None"),
    (torch.ones(4), TypeError, r"must be made by ScoreBias.slopes, .*, got a tensor of shape \[4\]"),
    ((torch.ones(4),), TypeError, r"must be made by ScoreBias.slopes, .*, got"),
]
BACKEND = [(bad, ValueError, f"must be one of .*, got {got}") for bad, got in (("fast", "'fast'"), (None, "None"))]
RULE = [
    (Full, TypeError, "must be a (BlockLayout or a )?Pattern( or CacheBlocks)?, got (type|ABCMeta)"),
    ("full", TypeError, "must be a (BlockLayout or a )?Pattern( or CacheBlocks)?, got str"),
    (None, TypeError, "must be a (BlockLayout or a )?Pattern( or CacheBlocks)?, got NoneType"),
]
BLOCKS = [
    (17, ValueError, r"must be one of \(16, 32, 64, 128, 256\), got 17"),
    (16.0, TypeError, "must be an int, got 16.0"),
    ("16", TypeError, "must be an int, got '1'"),
    ((16, 16, 16), ValueError, r"must be an int or a pair \(block_q, block_k\), got \(16, 16, 16\)"),
    ((64, 17), ValueError, r"must be one of \(16, 32, 64, 128, 256\), got 17"),
]
LENGTHS = [
    ([32, 32], TypeError, "must be a tensor or None, got list"),
    (torch.ones(2), TypeError, "must be int32 or int64, got torch.float32"),
    (torch.ones(3).int(), ValueError, r"must be one for each of 2 samples, got shape \[3\]"),
    (torch.ones(2, device="meta").int(), ValueError, "must be on the device of q, cpu, got meta"),
]
LISTED = torch.zeros(2, dtype=torch.int32)
NUMBERS = [
    (None, TypeError, "must be a tensor, got None"),
    (LISTED.long(), ValueError, r"must be int32 with one dimension, got torch.int64 \[2\]"),
    (LISTED[None], ValueError, r"must be int32 with one dimension, got torch.int32 \[1, 2\]"),
]
SCORER = [
    ("median", ValueError, "must be one of .* or a Scorer, got 'median'"),
    (3, TypeError, "must be one of .* or an object with features.*, got 3"),
    (ops.MeanPooled, TypeError, "must be one of .* or an object with features.*, got <class .*MeanPooled"),
]
SELECTOR = [
    (ops.TopK, TypeError, r"must be .*TopK\(share\).*, got <class .*TopK"),
    (0.5, TypeError, r"must be .*TopK\(share\).*, got 0.5"),
    ("topk", TypeError, r"must be .*TopK\(share\).*, got 'topk'"),
]
GATE = [
    (None, TypeError, "must be a BlockGate, got None"),
    ("patches", TypeError, "must be a BlockGate, got 'patches'"),
    (nn.BlockGate, TypeError, "must be a BlockGate, got <class .*BlockGate"),
]
MASSES_OF_A_CALL = [
    (0.5, TypeError, "must be a tensor, got 0.5"),
    (MASSES[:1], ValueError, r"must have shape .* = \[2, 4, 2, 2\], got \[1, 4, 2, 2\]"),
    (MASSES[:, :1], ValueError, r"must have shape .* = \[2, 4, 2, 2\], got \[2, 1, 2, 2\]"),
    (MASSES[0, 0, 0], ValueError, r"must have shape .* = \[2, 4, 2, 2\], got \[2\]"),
    (MASSES[..., :1, :], ValueError, r"must have shape .* = \[2, 4, 2, 2\], got \[2, 4, 1, 2\]"),
    (MASSES.long(), TypeError, "must be floating point, got torch.int64"),
    (MASSES.to("meta"), ValueError, "must be on the device of q, cpu, got meta"),
]
MASSES_BY_LAYER = [
    (MASSES, TypeError, "must be a sequence with a tensor for each layer, got Tensor"),
    ([], ValueError, "must have a tensor for each layer, got none"),
    ([MASSES, MASSES * NAN], ValueError, "must be 0 or more, and not all of them 0, got a sum of nan for layer 1"),
]
MODEL = [
    (None, TypeError, "must be a torch.nn.Module, got None"),
    (nn.BlockSparseAdaptive, TypeError, "must be a torch.nn.Module, got <class .*BlockSparseAdaptive"),
    (torch.nn.Linear(2, 2), ValueError, r"must hold a block-sparse attention module .*, got Linear"),
]
USELESS = [(0.5, TypeError, "has no meaning for kept_mass")]
DEVICE = [
    ("gpu", ValueError, "must be one that PyTorch knows, such as 'cpu' or 'cuda:0', got 'gpu'"),
    (1.5, ValueError, "must be one that PyTorch knows, such as 'cpu' or 'cuda:0', got 1.5"),
]
DTYPE = [
    ("float32", TypeError, "must be float64, float32, bfloat16, float16 or None, got 'float32'"),
    (torch.int64, TypeError, "must be float64, float32, bfloat16, float16 or None, got torch.int64"),
]
ORDER = [(bad, ValueError, f"must be 'bshd' .* or 'bhsd' .*, got {bad!r}") for bad in ("sbhd", None, 1)]
CALLBACK = [(3, TypeError, "must be a function or None, got int")]
ZEROS = [(bad, ValueError, f"must be 'zero_keys' or None, got {bad!r}") for bad in ("zeros", True, 0)]
SIZES_OF_GRID = [
    ("4x6", TypeError, "must be a sequence of .* ints.*, got '4x6'"),
    ((1.5,), TypeError, r"must be an int, got 1.5"),
    ((4, 0), ValueError, "must be at least 1, got 0"),
]
SHAPE = [
    *SIZES_OF_GRID,
    ((), ValueError, r"must have one to three dimensions, got \(\)"),
    ((2, 2, 2, 2), ValueError, r"must have one to three dimensions, got \(2, 2, 2, 2\)"),
    ((2**30, 2**30), ValueError, "must be at most 1099511627776, got 1152921504606846976"),
]
TILE = [
    ("2x2", TypeError, "must be a sequence of ints, or an int, got '2x2'"),
    ((2, 0), ValueError, "must be at least 1, got 0"),
    ((2, 2, 2), ValueError, r"must have 2 values, one for each dimension, or one for all, got \(2, 2, 2\)"),
    ((5, 2), ValueError, r"must be at most as large as the shape \(4, 6\), got \(5, 2\)"),
]
PLAIN_TENSOR = [([1.0], TypeError, r"must be a tensor, got \[1.0\]"), (None, TypeError, "must be a tensor, got None")]
TOKEN_ORDER = [
    (None, TypeError, "must be an int64 tensor, as tile_order makes it, got None"),
    (
        torch.arange(32).int(),
        TypeError,
        r"must be an int64 tensor, as tile_order makes it, got a tensor of shape \[32\]",
    ),
    (torch.arange(31), ValueError, r"must have a place for each of the 32 tokens, got \[31\]"),
    (torch.zeros(1, 32).long(), ValueError, r"must have a place for each of the 32 tokens, got \[1, 32\]"),
    (torch.arange(32, device="meta"), ValueError, "must be on the device of x, cpu, got meta"),
]
DIMENSION = [
    ("tokens", TypeError, "must be an int, got 'tokens'"),
    (True, TypeError, "must be an int, got True"),
    (4, ValueError, "must be a dimension of x, which has 4, got 4"),
]
REORDERING = [(bad, ValueError, "is for a pattern of a grid, .* got Full") for bad in (2, (2, 2), "rows")]
OFFSETS = [(bad, ValueError, f"must be one of .*, got {bad!r}") for bad in ("random", None, 1)]

# Without a kind here: lists of branches, configurations, groups and what else has cases of its own.
OPTIONS = {
    "scale": SCALE,
    "key_padding_mask": PADDING,
    "document_ids": IDS,
    "dropout_p": DROPOUT,
    "softcap": SOFTCAP,
    "alibi_slopes": BY_HEAD,
    "bias": BIAS,
    "sinks": BY_HEAD,
    "deterministic": DETERMINISTIC,
}
QKV = {"q": TENSOR, "k": TENSOR, "v": TENSOR}
CALL = {**QKV, "is_causal": FLAG, "return_lse": FLAG, "backend": BACKEND, "layout": ORDER}
CHOICE = {"q": TENSOR, "k": TENSOR, "scorer": SCORER, "block_size": BLOCKS, "is_causal": FLAG, "scale": SCALE}
POOL = dict.fromkeys(("enable_memory_pool", "lightweight_pool", "enable_buffer_manager", "enable_buffer_reuse"), FLAG)
PLACE = {"device": DEVICE, "dtype": DTYPE}
MODULE = {
    "scale": SCALE,
    "dropout": DROPOUT,
    "attention_dropout": DROPOUT,
    "backend": BACKEND,
    "ring_group": None,
    **PLACE,
}
BRANCHES = {"segment_lengths": None, "dilation_rates": None}
PROJECTIONS = {
    **dict.fromkeys(("embed_dim", "num_heads", "num_kv_heads", "kdim", "vdim"), POSITIVE),
    "bias": FLAG,
    "batch_first": FLAG,
    **PLACE,
}
MAGNETO = {"layer_norm": FLAG, "layer_norm_eps": POSITIVE_NUMBER, "gamma_init": POSITIVE_NUMBER}
FORWARD = {**QKV, "is_causal": FLAG, "return_attention_weights": FLAG}
SCORER_OF_PARTS = {"queries": POSITIVE, "keys": POSITIVE}

TENSORS = {"q": QUERY, "k": KEY, "v": KEY}
TWO = {"q": QUERY, "k": KEY}
SIZES = {"embed_dim": 16, "num_heads": 2}
BRANCH = {"segment_lengths": [16], "dilation_rates": [1]}

# Public name → good arguments, and the kinds of all arguments.
CALLS = {
    "ops.block_sparse_attention": (TENSORS | {"layout_or_pattern": Full()}, CALL | OPTIONS | {"layout_or_pattern": RULE}),
    "ops.attention_with_weights": (
        TENSORS | {"layout_or_pattern": Full()},
        FORWARD | OPTIONS | {"layout_or_pattern": RULE, "backend": BACKEND},
    ),
    "ops.explain": (TENSORS | {"layout_or_pattern": Full()}, CALL | OPTIONS | {"layout_or_pattern": RULE}),
    "ops.dilated_attention": (
        TENSORS | BRANCH,
        CALL | OPTIONS | BRANCHES | {"head_offsets": OFFSETS, "detach_branch_weights": FLAG, "padding": ZEROS},
    ),
    "ops.decode_attention": (
        TENSORS | {"q": CACHE, "pattern": Full()},
        CALL | OPTIONS | {"pattern": RULE, "lengths": None, "page_table": None},
    ),
    "ops.explain_decode": (
        TENSORS | {"q": CACHE, "pattern": Full()},
        CALL | OPTIONS | {"pattern": RULE, "lengths": None, "page_table": None},
    ),
    "ops.kept_mass": (
        TWO | {"layout_or_pattern": Full()},
        CALL | OPTIONS | {"layout_or_pattern": RULE, "dropout_p": USELESS, "sinks": USELESS, "deterministic": USELESS},
    ),
    "ops.select_blocks": (
        TWO | {"selector": ops.TopK(0.5), "block_size": 16},
        CHOICE
        | {"selector": SELECTOR, "sink": COUNT, "local": COUNT, "per_kv_head": FLAG}
        | {"key_padding_mask": PADDING, "document_ids": IDS, "lengths": LENGTHS, "dense_below": COUNT},
    ),
    "ops.BlockSummaries": ({}, {"scorer": SCORER, "block_size": BLOCKS}),
    "ops.CacheBlocks": (
        {"offsets": LISTED, "indices": LISTED, "block_size": 16, "num_lists": 1},
        {"offsets": NUMBERS, "indices": NUMBERS, "block_size": BLOCKS[:2], "num_lists": POSITIVE},
    ),
    "ops.block_masses": (TWO | {"block_size": 16}, CHOICE | {"key_padding_mask": PADDING}),
    "ops.split_budget": (
        {"masses": [MASSES, MASSES], "selector": ops.TopK(0.5), "tokens": 32, "block_size": 16},
        {"masses": MASSES_BY_LAYER, "selector": SELECTOR, "tokens": POSITIVE, "block_size": BLOCKS}
        | {"is_causal": FLAG, "sink": COUNT, "local": COUNT},
    ),
    "ops.merge_attention": ({"outs": [QUERY], "lses": [torch.ones(2, 4, 32)]}, {"outs": None, "lses": None}),
    "ops.tile_order": (
        {"shape": (4, 6), "tile": 2},
        {"shape": SHAPE, "tile": TILE, "prefix": COUNT, "device": DEVICE},
    ),
    "ops.permute": ({"x": QUERY, "order": ORDER_OF_TOKENS}, {"x": PLAIN_TENSOR, "order": TOKEN_ORDER, "dim": DIMENSION}),
    "ops.unpermute": ({"x": QUERY, "order": ORDER_OF_TOKENS}, {"x": PLAIN_TENSOR, "order": TOKEN_ORDER, "dim": DIMENSION}),
    "ops.warm_up": ({}, {"calls": None, "processes": POSITIVE, "progress": CALLBACK}),
    "ops.set_fast_path": ({"enabled": True}, {"enabled": FLAG}),
    "ops.TopK": ({"share": 0.5}, {"share": SHARE, "even": FLAG, "across_heads": FLAG}),
    "ops.SharedBudget": ({"share": 0.5}, {"share": SHARE}),
    "ops.CumulativeMass": ({"mass": 0.5}, {"mass": SHARE, "at_most": SHARE}),
    "ops.RelativeThreshold": ({"ratio": 0.5}, {"ratio": SHARE, "at_most": SHARE}),
    "ops.ScoreBias": ({"terms": ()}, {"terms": TERMS}),
    "ops.MeanPooled": ({}, SCORER_OF_PARTS),
    "ops.MinMaxBound": ({}, SCORER_OF_PARTS),
    "ops.Moments": ({}, SCORER_OF_PARTS),
    "ops.Antidiagonal": ({}, {"stride": POSITIVE}),
    "ops.SampledRows": ({}, {"stride": POSITIVE}),
    "nn.BlockGate": (
        {"num_heads": 4, "head_dim": 8},
        {"num_heads": POSITIVE, "head_dim": POSITIVE, "num_kv_heads": POSITIVE}
        | PLACE
        | SCORER_OF_PARTS,
    ),
    "nn.gate_loss": (
        TWO | {"gate": nn.BlockGate(4, 8), "block_size": 16},
        {name: kind for name, kind in CHOICE.items() if name != "scorer"}
        | {"gate": GATE, "masses": MASSES_OF_A_CALL, "key_padding_mask": PADDING},
    ),
    "nn.BlockSparseAttention": (
        {"pattern": Full()},
        MODULE | POOL | {"pattern": RULE, "order": REORDERING},
    ),
    "nn.BlockSparseRingDilatedAttention": ({}, MODULE | BRANCHES | POOL | {"sparse_config": None}),
    "nn.BlockSparseHierarchical": ({}, MODULE | POOL | {"levels": None, "block_size": BLOCKS[:2]}),
    "nn.BlockSparseAdaptive": (
        {},
        {name: kind for name, kind in MODULE.items() if name != "ring_group"}
        | {"sparsity_ratio": SHARE, "sparse_config": None, "scorer": SCORER, "selector": SELECTOR}
        | {"block_size": BLOCKS, "sink": COUNT, "local": COUNT, "per_kv_head": FLAG, "gate_strength": STRENGTH},
    ),
    "nn.Adaptive": (
        {"share": 0.5},
        {"share": SHARE, "scorer": SCORER, "step_scorer": SCORER, "selector": None, "block_size": BLOCKS}
        | {"sink": COUNT, "local": COUNT, "per_kv_head": FLAG, "dense_below": COUNT},
    ),
    "nn.DilatedAttention": ({}, MODULE | BRANCHES | POOL | {"head_offsets": OFFSETS, "detach_branch_weights": FLAG, "padding": ZEROS}),
    "nn.Multihead": (SIZES | {"attention": torch.nn.Identity()}, PROJECTIONS | MAGNETO | {"attention": None}),
    "nn.BlockSparseRingMultiheadDilatedAttention": (
        SIZES,
        MODULE | PROJECTIONS | BRANCHES | POOL | {"sparse_config": None},
    ),
    "nn.MultiheadDilatedAttention": (
        SIZES | {"layer_norm": True},
        MODULE | PROJECTIONS | BRANCHES | POOL | MAGNETO | {"head_offsets": OFFSETS, "detach_branch_weights": FLAG, "padding": ZEROS},
    ),
    "nn.SparsitySchedule": (
        {"model": nn.BlockSparseAttention(Full()), "steps": 3},
        {"model": MODEL, "steps": POSITIVE, "dense_steps": COUNT, "kept_floor": SHARE},
    ),
    "nn.create_block_sparse_attention": ({}, {"variant": OFFSETS}),
    "nn.magneto_gammas": ({}, {"encoder_layers": COUNT, "decoder_layers": COUNT}),
}  # fmt: skip

MADE = {
    "BlockSparseAttention": nn.BlockSparseAttention(Full()),
    "BlockSparseAttention, half open": nn.BlockSparseAttention(Full()),
    "BlockSparseAttention with a pool": nn.BlockSparseAttention(Full(), enable_memory_pool=True),
    "DilatedAttention": nn.DilatedAttention([16], [1]),
    "BlockSparseAdaptive": nn.BlockSparseAdaptive(0.5, block_size=16),
}
MADE["BlockSparseAttention, half open"].opening = 0.5
MULTIHEAD = {
    "BlockSparseRingMultiheadDilatedAttention": nn.BlockSparseRingMultiheadDilatedAttention(16, 2, **BRANCH),
    "MultiheadDilatedAttention": nn.MultiheadDilatedAttention(16, 2, **BRANCH),
}


def parameters_of(name):
    """All that a public callable takes, its keywords by `**` too."""
    folder, name = name.split(".")
    call = getattr({"ops": ops, "nn": nn}[folder], name)
    named = inspect.signature(call).parameters.values()
    names = {p.name for p in named if p.kind is not inspect.Parameter.VAR_KEYWORD}
    if len(names) == len(named):
        return call, names
    return call, names | set(getattr(call, "more_keywords", OptionKeywords.__annotations__ if folder == "ops" else ()))


def cases_of(call, good, kinds):
    return {
        f"{argument}={_short(bad)}": (partial(call, **{**good, argument: bad}), error, rf"\b{argument}\b {message}")
        for argument, kind in kinds.items()
        for bad, error, message in kind or ()
    }  # fmt: skip


def _short(bad):
    return (
        f"{bad.layout} {bad.dtype} {list(bad.shape)} {bad.device}" if isinstance(bad, torch.Tensor) else repr(bad)[:40]
    )


BAD = {}
for name, (good, kinds) in CALLS.items():
    call, names = parameters_of(name)
    BAD[name] = cases_of(call, good, {each: kind for each, kind in kinds.items() if each in names})
for name, module in MADE.items():
    held = {"scale", "dropout_p"} | ({"document_ids"} if isinstance(module, nn.DilatedAttention) else set())
    others = {n: OPTIONS[n] for n in OPTIONS if n not in held}
    BAD[f"{name}.forward"] = cases_of(module, TENSORS, FORWARD | others)
for name, module in MULTIHEAD.items():
    flags = dict.fromkeys(("is_causal", "return_attention_weights", "need_weights"), FLAG)
    tensors = dict.fromkeys(("query", "key", "value"), FEATURES)
    good = dict.fromkeys(tensors, torch.ones(2, 32, 16))
    BAD[f"{name}.forward"] = cases_of(module, good, tensors | flags | {"key_padding_mask": PADDING})
