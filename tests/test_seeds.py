"""Every Python block of the seed documents runs verbatim, and what it made is right.

The blocks of a document run in one namespace, in order: the public names of the package, and the tensors and sizes
that the text leaves to the reader. A bare expression at the end of a block is kept as `_`.
"""

import ast
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dilated_attention_pytorch as package
from dilated_attention_pytorch import (
    BlockLayout,
    Blocks,
    BlockSparseAttention,
    BlockSparseRingDilatedAttention,
    BlockSparseRingDilatedAttentionV2,
    BlockSparseRingMultiheadDilatedAttention,
    SparsePatternConfig,
    block_sparse_attention,
    create_block_sparse_attention,
    dilated_attention,
)
from tests import dense

SEEDS = sorted((Path(__file__).parent / "data" / "seeds").glob("*.txt"))
NUM_BLOCKS = {"000": 9, "001": 6, "002": 9, "003": 0, "004": 4}
FENCE = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)

BATCH, SEQ, HEADS, DIM = 1, 600, 12, 64  # the last of five blocks of 128 is cut


def blocks_of(path):
    return [textwrap.dedent(body) for _, body in FENCE.findall(path.read_text(encoding="utf-8"))]


SNIPPETS = {(path.name[:3], i): block for path in SEEDS for i, block in enumerate(blocks_of(path))}


def supplied(document):
    """What a reader of the document is expected to have."""
    names = {name: getattr(package, name) for name in dir(package) if not name.startswith("_")}
    q, k, v = (torch.randn(BATCH, SEQ, HEADS, DIM) for _ in range(3))
    query, key, value = (torch.randn(BATCH, SEQ, HEADS * DIM) for _ in range(3))
    names |= {"torch": torch, "q": q, "k": k, "v": v, "query": query, "key": key, "value": value}
    if document == "000":
        buffers = SimpleNamespace(_get_or_allocate_buffer=lambda shape, dtype, device: torch.zeros(shape, dtype=dtype))
        names |= {"self": buffers, "b": 2, "n": 12, "h": 3, "d": 4, "num_segments": 3, "segment_len": 4}
        names |= {"device": torch.device("cpu"), "dtype": torch.float16}
    if document == "001":
        names |= {"batch": 2, "num_segments": 3, "heads": 5, "dim": 7}
    if document == "002":
        # Blocks as (batch, blocks, heads, block, dim), of which one pair is active.
        q_blocks, k_blocks, v_blocks = (x[:, :512].unflatten(1, (4, 128)).transpose(2, 3) for x in (q, k, v))
        names |= {"q_blocks": q_blocks, "k_blocks": k_blocks, "v_blocks": v_blocks}
        names |= {"q_idx": 2, "k_idx": 1, "num_active_blocks": 1, "block_tensor": torch.ones(1, 2, 128, 128)}
        names |= {"batch": 1, "num_heads": 2, "seq_len": 256}
        names["attention_v2"] = BlockSparseRingDilatedAttentionV2(sparsity_ratio=0.4)
    if document == "004":
        names |= {"batch_size": 1, "seq_len": 256, "num_heads": 4, "head_dim": 8}
    return names


def run(source, namespace):
    """Execute a block; the value of a bare expression at its end goes to `_`."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<seed>", "exec"), namespace)
    if last is not None:
        namespace["_"] = eval(compile(ast.Expression(last.value), "<seed>", "eval"), namespace)


def after(document, index):
    """The namespace after this block and all before it."""
    namespace = supplied(document)
    for i in range(index + 1):
        run(SNIPPETS[document, i], namespace)
    return namespace


def assert_attends(module, namespace, allowed=None):
    """The module computes its pattern: equal to the reference backend and to attention written out by hand."""
    q, k, v = (namespace[name].double() for name in "qkv")
    for causal in (False, True):
        got = module(q, k, v, causal)
        assert got.shape == q.shape
        want = block_sparse_attention(q, k, v, module.pattern(causal), backend="reference")
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    if allowed is not None:
        torch.testing.assert_close(module(q, k, v), dense.attend(q, k, v, allowed)[0], rtol=0, atol=1e-10)


def dilated(branches, ratio, block):
    num = -(-SEQ // block)
    return dense.tokens(dense.dilated_blocks(num, branches, ratio, block), block, SEQ)


def assert_keeps(module, tokens, budget):
    """At a length where it counts, the module keeps this many blocks a row."""
    block = module.sparse_config.block_size
    layout = BlockLayout.from_pattern(module.pattern(), tokens, block_size=block)
    assert layout.num_active_blocks == budget * tokens // block


def check_base(names):
    """Seed 000: 2K segments, 99 % sparse, at the 131,072 tokens of its title."""
    assert names["_"] == {"segment_lengths": [2048], "dilation_rates": [1], "sparsity_ratio": 0.01}
    module = create_block_sparse_attention(**names["_"])
    assert_attends(module, names, dilated([(2048, 1)], 0.01, 128))
    assert_keeps(module, 131072, 10)


def check_ring(names):
    module = BlockSparseRingDilatedAttention(**names["_"])
    assert module.segment_lengths == (65536, 131072)
    assert_attends(module, names, dilated([(65536, 1), (131072, 2)], 0.02, 256))
    assert_keeps(module, 131072, 10)


def check_factory(names):
    assert type(names["model"]) is BlockSparseRingDilatedAttention
    assert names["model"].sparse_config == SparsePatternConfig(sparsity_ratio=0.01)
    assert_attends(names["model"], names, dilated([(2048, 1)], 0.01, 128))


def check_allocation(names):
    """Pseudo-code of the original: our forward needs no such buffer; its shapes are what we can check."""
    assert names["output"].shape == (2, 12, 3, 4)
    assert names["output"].dtype == torch.float16
    assert (names["output"] == 0).all()
    assert names["temp_output"].shape == (2, 3, 4, 3, 4)
    assert names["temp_output"].dtype == torch.float32


def check_base_constructor(names):
    module = names["_"]
    assert module.sparse_config == SparsePatternConfig(sparsity_ratio=0.01, block_size=64)
    assert_attends(module, names, dilated([(2048, 1)], 0.01, 64))
    assert_keeps(module, 131072, 20)


def check_ring_constructor(names):
    module = names["_"]
    assert module.dilation_rates == (1, 2)
    assert_attends(module, names, dilated([(65536, 1), (131072, 2)], 0.02, 256))
    assert_keeps(module, 131072, 10)


def check_buffer_size(names):
    assert names["max_segment_len"] == 131072
    assert names["buffer_size"] == 2 * 3 * 131072 * 5 * 7


def check_only_comments(names):
    """Nothing but comments on the original's buffers: nothing happens."""
    assert "# - Buffers for 131K segments" in SNIPPETS["001", 3]
    assert names.keys() == after("001", 2).keys()


def check_longest(names):
    assert names["config"]["segment_lengths"] == [1024]
    module = create_block_sparse_attention(**names["config"])
    assert_attends(module, names, dilated([(1024, 1)], 0.01, 64))
    assert_keeps(module, 131072, 16)  # the budget is 20, but a segment of 1024 tokens has 16 blocks


def check_best(names):
    module = create_block_sparse_attention(**names["config"])
    assert_attends(module, names, dilated([(2048, 1), (4096, 2), (8192, 4)], 0.05, 128))
    assert_keeps(module, 8192, 3)


def check_weights_format(names):
    """The mapping that the text draws and the one that a call returns have the same keys and kinds of values."""
    drawn = names["attention_weights"]
    q, k, v = (torch.randn(1, 256, 2, 8) for _ in range(3))
    _, weights = BlockSparseRingDilatedAttentionV2()(q, k, v, return_attention_weights=True)
    assert list(weights) == list(drawn)
    assert weights["shape"] == drawn["shape"] == (1, 2, 256, 256)
    assert weights["block_size"] == drawn["block_size"]
    for name, kind in (("block_indices", tuple), ("block_values", torch.Tensor)):
        assert isinstance(weights[name], list)
        assert isinstance(weights[name][0], kind)
        assert isinstance(drawn[name][0], kind)
    assert weights["block_values"][0].shape == drawn["block_values"][0].shape


def check_block_scores(names):
    """The scores of the drawn loop, through a softmax, are our weights of that one block."""
    one = BlockSparseAttention(Blocks(((names["q_idx"], names["k_idx"]),), 128))
    _, weights = one(names["q"], names["k"], names["v"], return_attention_weights=True)
    assert weights["block_indices"] == [(2, 1)]
    want = torch.softmax(names["scores"] * DIM**-0.5, dim=-1)
    torch.testing.assert_close(weights["block_values"][0], want)


def check_index_lists(names):
    rows, columns = names["row_indices"], names["col_indices"]
    assert rows[-1] is columns[-1] is ...
    pairs = tuple(zip(rows[:-1], columns[:-1], strict=True))
    _, weights = BlockSparseAttention(Blocks(pairs))(names["q"], names["k"], names["v"], return_attention_weights=True)
    assert weights["block_indices"] == list(pairs) == [(0, 0), (0, 1), (1, 0), (1, 2), (2, 1)]


def check_basic_usage(names):
    assert type(names["attention"]) is names["BlockSparseRingDilatedAttentionV2"]
    branches = [(2048, 1), (4096, 2), (8192, 4)]
    allowed = dilated(branches, 0.1, 128)
    assert_attends(names["attention"], names, allowed)
    out, want = dense.attend(names["q"], names["k"], names["v"], allowed)
    torch.testing.assert_close(names["output"], out)
    weights = names["weights"]
    assert weights["shape"] == (BATCH, HEADS, SEQ, SEQ)
    assert weights["block_size"] == 128
    assert weights["block_indices"] == [
        tuple(p) for p in dense.dilated_blocks(5, branches, 0.1, 128).nonzero().tolist()
    ]
    torch.testing.assert_close(weights.to_dense(), want)


def check_multihead(names):
    module, output = names["multihead_attention"], names["output"]
    assert type(module) is BlockSparseRingMultiheadDilatedAttention
    assert isinstance(output, torch.Tensor)
    assert output.shape == (BATCH, SEQ, HEADS * DIM)
    projected = zip(
        (names[name] for name in ("query", "key", "value")),
        module.in_proj_weight.chunk(3),
        module.in_proj_bias.chunk(3),
        strict=True,
    )
    q, k, v = ((x @ weight.T + bias).unflatten(-1, (HEADS, DIM)) for x, weight, bias in projected)
    out, _ = dense.attend(q, k, v, dilated([(2048, 1), (4096, 2)], 0.1, 128))
    torch.testing.assert_close(output, module.out_proj(out.flatten(2)), rtol=1e-4, atol=1e-5)


def check_local_window(names):
    config = names["sparse_config"]
    assert (config.pattern_type, config.local_window_size, config.block_size) == ("local_window", 512, 128)
    allowed = dense.tokens(dense.local_blocks(5, 512, 128), 128, SEQ)
    assert_attends(BlockSparseRingDilatedAttentionV2(sparse_config=config), names, allowed)


def check_dilated_sparse(names):
    config = names["sparse_config"]
    assert (config.pattern_type, config.sparsity_ratio, config.block_size) == ("dilated_sparse", 0.1, 128)
    module = BlockSparseRingDilatedAttentionV2(sparse_config=config)
    assert_attends(module, names, dilated([(2048, 1), (4096, 2), (8192, 4)], 0.1, 128))
    assert_keeps(module, 2048, 2)


def check_global_local(names):
    config = names["sparse_config"]
    assert (config.pattern_type, config.global_tokens, config.local_window_size) == ("global_local", 128, 512)
    blocks = dense.local_blocks(5, 512, 128) | dense.global_blocks(5, 128, 128)
    module = BlockSparseRingDilatedAttentionV2(sparse_config=config)
    assert_attends(module, names, dense.tokens(blocks, 128, SEQ))


def check_migration(names):
    """The dense tensor of the original is what `to_dense` gives; the block form is what comes back."""
    weights = names["weights"]
    assert list(weights) == ["block_indices", "block_values", "shape", "block_size"]
    assert weights["shape"] == (BATCH, HEADS, SEQ, SEQ)
    assert {value.shape for value in weights["block_values"]} == {(BATCH, HEADS, 128, 128)}
    allowed = dilated([(2048, 1), (4096, 2), (8192, 4)], 0.4, 128)
    out, want = dense.attend(names["q"], names["k"], names["v"], allowed)
    torch.testing.assert_close(names["output"], out)
    torch.testing.assert_close(weights.to_dense(), want)


def empty_on_self(name):
    def check(names):
        assert vars(names["self"])[name] == {}

    return check


def check_pool(names):
    """Ten buffers, no more, whatever is asked of it; and none that someone holds."""
    pool = names["self"].memory_pool
    assert pool.pool_size == 10
    held = [pool.take((1 << 18,), torch.float32).fill_(i) for i in range(15)]
    assert pool.get_buffer_stats()["buffers"] == 10
    assert [float(x[-1]) for x in held] == list(range(15))


def check_pattern_cache(names):
    """A hundred patterns, no more; the one that was not used for longest goes first."""
    cache = names["self"].pattern_cache
    assert cache.max_size == 100
    layouts = [cache.layout(Blocks(((0, i),)), 300 * 128, block_size=128) for i in range(120)]
    assert len(cache) == 100
    assert cache.layout(Blocks(((0, 119),)), 300 * 128, block_size=128) is layouts[119]
    assert cache.layout(Blocks(((0, 0),)), 300 * 128, block_size=128) is not layouts[0]


def assert_dilates(names):
    """The module computes LongNet's branches, with its workspace from the pool."""
    tensors = [names[name].double() for name in "qkv"]
    branches = {"segment_lengths": [2048, 4096, 8192], "dilation_rates": [1, 2, 4]}
    want = dilated_attention(*tensors, **branches, backend="reference")
    torch.testing.assert_close(names["attention"](*tensors), want, rtol=0, atol=1e-10)


def check_lightweight(names):
    assert_dilates(names)
    assert names["attention"].memory_pool.lightweight


def check_buffer_manager(names):
    assert_dilates(names)
    assert sum(kind["requests"] for kind in names["attention"].get_buffer_stats()["by_type"].values()) > 0


def check_preallocated(names):
    assert names["attention"].get_buffer_stats()["bytes_held"] > 0
    assert_dilates(names)


def check_statistics(names):
    before = names["stats"]["hits"]
    for _ in range(5):
        assert_dilates(names)
    assert names["attention"].get_buffer_stats()["hits"] > before


CHECKS = {
    ("000", 0): check_pool,
    ("000", 1): check_pattern_cache,
    ("000", 2): empty_on_self("_dilated_indices_cache"),
    ("000", 3): empty_on_self("_causal_mask_cache"),
    ("000", 4): empty_on_self("_comm_buffers"),
    ("000", 5): check_allocation,
    ("000", 6): check_base,
    ("000", 7): check_ring,
    ("000", 8): check_factory,
    ("001", 0): check_base_constructor,
    ("001", 1): check_ring_constructor,
    ("001", 2): check_buffer_size,
    ("001", 3): check_only_comments,
    ("001", 4): check_longest,
    ("001", 5): check_best,
    ("002", 0): check_weights_format,
    ("002", 1): check_block_scores,
    ("002", 2): check_index_lists,
    ("002", 3): check_basic_usage,
    ("002", 4): check_multihead,
    ("002", 5): check_local_window,
    ("002", 6): check_dilated_sparse,
    ("002", 7): check_global_local,
    ("002", 8): check_migration,
    ("004", 0): check_lightweight,
    ("004", 1): check_buffer_manager,
    ("004", 2): check_preallocated,
    ("004", 3): check_statistics,
}


def test_every_block_of_every_document_is_found():
    assert {path.name[:3]: len(blocks_of(path)) for path in SEEDS} == NUM_BLOCKS
    for path in SEEDS:
        text = path.read_text(encoding="utf-8")
        assert text.count("```python") == NUM_BLOCKS[path.name[:3]]
        languages = re.findall(r"^ *```(\w+)", text, re.MULTILINE)
        assert set(languages) <= {"python"}, "code in another language would be skipped"


def test_every_block_is_checked():
    assert CHECKS.keys() == SNIPPETS.keys()


ALTERNATIVES = {
    "local_window": dense.local_blocks(5, 512, 128),
    "global_local": dense.local_blocks(5, 512, 128) | dense.global_blocks(5, 64, 128),
}


@pytest.mark.parametrize("pattern_type", ALTERNATIVES)
def test_the_alternatives_of_a_comment(pattern_type):
    """`pattern_type='dilated_sparse',  # or 'local_window', 'global_local'`: with one of these the block was an error,
    because it also names a ratio and segments."""
    block, usual = SNIPPETS["002", 3], "pattern_type='dilated_sparse',  # or 'local_window', 'global_local'"
    assert block.count(usual) == 1
    names = supplied("002")
    run(block.replace(usual, f"pattern_type={pattern_type!r},"), names)
    assert_attends(names["attention"], names, dense.tokens(ALTERNATIVES[pattern_type], 128, SEQ))
    assert names["attention"].segment_lengths == (2048, 4096, 8192)
    assert "unused: sparsity_ratio=0.1, segment_lengths=(2048, 4096, 8192)" in repr(names["attention"])


@pytest.mark.slow
@pytest.mark.parametrize(("document", "index"), CHECKS)
def test_block(document, index):
    CHECKS[document, index](after(document, index))
