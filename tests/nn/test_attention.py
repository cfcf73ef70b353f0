"""The attention modules compute what their configuration says, and behave as modules do."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dilated_attention_pytorch as package
from dilated_attention_pytorch import (
    BlockLayout,
    Blocks,
    BlockSparseAttention,
    BlockSparseHierarchical,
    BlockSparseRingDilatedAttention,
    BlockSparseRingDilatedAttentionV2,
    BlockSparseWeights,
    Causal,
    Full,
    GlobalTokens,
    PerHead,
    SlidingWindow,
    SparsePatternConfig,
    block_sparse_attention,
    block_sparse_ring_dilated_attention,
    block_sparse_ring_dilated_attention_v2,
)
from tests import dense

SEQ, BLOCK, NUM = 137, 16, 9  # the last block is cut
SEGMENTS = {"segment_lengths": [48, 96], "dilation_rates": [1, 2]}
CONFIGS = {
    "dilated_sparse": {"sparsity_ratio": 0.4, **SEGMENTS},
    "local_window": {"local_window_size": 40},
    "global_local": {"local_window_size": 16, "global_tokens": 20},
    "hierarchical": {"levels": [(1, 32), (3, 160)]},
}


def make(pattern_type, **options):
    return BlockSparseRingDilatedAttention(
        pattern_type=pattern_type, block_size=BLOCK, **CONFIGS[pattern_type], **options
    )


def blocks_of(pattern_type, causal):
    """The blocks of CONFIGS by the formulas of DESIGN.md."""
    if pattern_type == "dilated_sparse":
        return dense.dilated_blocks(NUM, [(48, 1), (96, 2)], 0.4, BLOCK, causal=causal)
    if pattern_type == "local_window":
        return dense.local_blocks(NUM, 40, BLOCK, causal=causal)
    if pattern_type == "global_local":
        return dense.local_blocks(NUM, 16, BLOCK, causal=causal) | dense.global_blocks(NUM, 20, BLOCK)
    near = dense.local_blocks(NUM, 32, BLOCK, causal=causal)
    return near | dense.local_blocks(NUM, 160, BLOCK, causal=causal, stride=3)


def allowed_by(pattern_type, causal):
    return dense.tokens(blocks_of(pattern_type, causal), BLOCK, SEQ, causal=causal)


def qkv(batch=2, seq=SEQ, heads=4, heads_kv=2, head_dim=8, seq_k=None, dtype=torch.float64):
    q = torch.randn(batch, seq, heads, head_dim, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(batch, seq_k or seq, heads_kv, head_dim, dtype=dtype, requires_grad=True) for _ in range(2))
    return q, k, v


def close(got, want, atol=1e-10):
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


class TestPatterns:
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("pattern_type", CONFIGS)
    def test_out_and_gradients_are_those_of_the_configured_pattern(self, pattern_type, causal):
        """Against the reference backend over the module's pattern, and against attention written out by hand."""
        module, tensors = make(pattern_type), qkv()
        grad = torch.randn(2, SEQ, 4, 8, dtype=torch.float64)
        got = module(*tensors, is_causal=causal)
        reference = block_sparse_attention(*tensors, module.pattern(causal), backend="reference")
        by_hand, _ = dense.attend(*tensors, allowed_by(pattern_type, causal))
        grads = [torch.autograd.grad(out, tensors, grad) for out in (got, reference, by_hand)]
        for want in (reference, by_hand):
            close(got, want)
        for mine, of_reference, of_hand in zip(*grads, strict=True):
            close(mine, of_reference)
            close(mine, of_hand)

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("pattern_type", CONFIGS)
    def test_the_layout_has_these_blocks_and_no_others(self, pattern_type, causal):
        layout = BlockLayout.from_pattern(make(pattern_type).pattern(causal), SEQ, block_size=BLOCK)
        assert torch.equal(layout.to_block_mask(), blocks_of(pattern_type, causal).tril(0 if causal else NUM))

    @pytest.mark.parametrize("causal", [False, True])
    def test_any_pattern(self, causal):
        """`BlockSparseAttention` takes a pattern itself, here one per head, token-exact, with fewer queries."""
        pattern = PerHead((Full(), SlidingWindow(9, 3), GlobalTokens(2) | SlidingWindow(4, 0), Blocks(((0, 1),), 16)))
        q, k, v = qkv(seq=30, seq_k=70)
        got = BlockSparseAttention(pattern)(q, k, v, causal)
        close(got, block_sparse_attention(q, k, v, pattern, is_causal=causal, backend="reference"))
        rule = [p & Causal() if causal else p for p in pattern.patterns]
        allowed = torch.tensor([[[p.allows(i, j, 30, 70) for j in range(70)] for i in range(30)] for p in rule])
        close(got, dense.attend(q, k, v, allowed)[0])

    def test_masks_reach_the_operator(self):
        module, (q, k, v) = make("local_window"), qkv()
        padding = torch.zeros(2, SEQ, dtype=torch.bool)
        padding[1, 90:] = True
        documents = (torch.arange(SEQ) // 50).expand(2, SEQ)
        allowed = allowed_by("local_window", False)
        got = module(q, k, v, key_padding_mask=padding)
        close(got, dense.attend(q, k, v, allowed & ~padding[:, None, None])[0])
        got = module(q, k, v, document_ids=documents)
        same = documents[0][:, None] == documents[0]
        close(got, dense.attend(q, k, v, allowed & same)[0])

    @pytest.mark.parametrize("seq_q", [1, 7, 16, 137])
    def test_fewer_queries_than_keys(self, seq_q):
        """Queries are the last tokens. One alone sees what it saw among all of them."""
        module, (q, k, v) = make("global_local"), qkv()
        got = module(q[:, -seq_q:], k, v, is_causal=True)
        pattern = module.pattern(is_causal=True)
        close(got, block_sparse_attention(q[:, -seq_q:], k, v, pattern, backend="reference"))
        if seq_q in (1, 137):
            close(got, module(q, k, v, is_causal=True)[:, -seq_q:])

    def test_v2_is_the_same_class_at_every_path(self):
        assert BlockSparseRingDilatedAttentionV2 is BlockSparseRingDilatedAttention
        v1, v2 = block_sparse_ring_dilated_attention, block_sparse_ring_dilated_attention_v2
        assert v1.BlockSparseRingDilatedAttention is v2.BlockSparseRingDilatedAttentionV2
        assert v1.BlockSparseRingDilatedAttention is package.BlockSparseRingDilatedAttention
        assert v1.SparsePatternConfig is v2.SparsePatternConfig is SparsePatternConfig

    def test_fields_can_be_given_in_a_config_or_as_keywords(self):
        config = SparsePatternConfig(pattern_type="global_local", global_tokens=20, local_window_size=16, block_size=16)
        whole, (q, k, v) = BlockSparseRingDilatedAttention(sparse_config=config), qkv()
        assert whole.sparse_config == make("global_local").sparse_config
        assert torch.equal(whole(q, k, v), make("global_local")(q, k, v))

    def test_defaults(self):
        module = BlockSparseRingDilatedAttention()
        assert module.segment_lengths == (2048, 4096, 8192)
        assert module.dilation_rates == (1, 2, 4)
        assert module.sparse_config == SparsePatternConfig(pattern_type="dilated_sparse", block_size=128)
        assert not list(module.parameters())

    def test_global_local_has_global_blocks_by_default(self):
        """64 global tokens are half a block of 128: the block that holds them is global."""
        module = BlockSparseRingDilatedAttention(pattern_type="global_local")
        mask = BlockLayout.from_pattern(module.pattern(), 2048, block_size=128).to_block_mask()
        assert mask[:, 0].all()
        assert torch.equal(mask, dense.local_blocks(16, 512, 128) | dense.global_blocks(16, 64, 128))
        q, k, v = qkv(batch=1, seq=1024, heads=1, heads_kv=1)
        (grad,) = torch.autograd.grad(module(q, k, v)[0, -1].sum(), v)
        assert (grad[0, :128] > 0).all()
        assert (grad[0, 128:512] == 0).all()

    @pytest.mark.parametrize("ratio", [0.01, 0.05, 0.1, 0.25, 1.0])
    def test_sparsity_ratio_is_the_share_of_blocks_kept(self, ratio):
        options = {"segment_lengths": [4096], "dilation_rates": [1], "block_size": 64}
        module = BlockSparseRingDilatedAttention(sparsity_ratio=ratio, **options)
        layout = BlockLayout.from_pattern(module.pattern(), 4096, block_size=64)
        assert (layout.to_block_mask().sum(1) == max(1, round(ratio * 64))).all()

    def test_segments_matter_to_dilated_sparse(self):
        tensors = qkv()
        outs = [
            BlockSparseRingDilatedAttention(lengths, rates, sparsity_ratio=0.4, block_size=BLOCK)(*tensors)
            for lengths, rates in (([48, 96], [1, 2]), ([32, 96], [1, 2]), ([48, 96], [1, 3]), ([48], [1]))
        ]
        for i, out in enumerate(outs):
            for other in outs[:i]:
                assert not torch.allclose(out, other)

    def test_scale(self):
        q, k, v = qkv()
        want, _ = dense.attend(q, k, v, allowed_by("local_window", False), scale=0.9)
        close(make("local_window", scale=0.9)(q, k, v), want)

    @pytest.mark.parametrize("backend", ["auto", "blockwise", "reference"])
    def test_backend_by_name(self, backend):
        q, k, v = qkv()
        want, _ = dense.attend(q, k, v, allowed_by("global_local", False))
        close(make("global_local", backend=backend)(q, k, v), want)

    def test_a_backend_that_cannot_run_is_an_error(self):
        with pytest.raises(ValueError, match="'sdpa' cannot run this call: the layout is neither full nor causal"):
            make("local_window", backend="sdpa")(*qkv())


class TestHierarchical:
    def test_is_the_hierarchical_pattern(self):
        tensors, levels = qkv(), CONFIGS["hierarchical"]["levels"]
        module = BlockSparseHierarchical(levels, block_size=BLOCK)
        for causal in (False, True):
            assert module.pattern(causal) == make("hierarchical").pattern(causal)
            close(module(*tensors, causal), dense.attend(*tensors, allowed_by("hierarchical", causal))[0])

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize(("levels", "most"), [("standard", 0.15), ("fine_grained", 0.25), ("long_range", 0.12)])
    def test_presets_keep_far_fewer_blocks_than_dense_at_16k(self, levels, most, causal):
        layout = BlockLayout.from_pattern(BlockSparseHierarchical(levels).pattern(causal), 16384, block_size=128)
        mask = layout.to_block_mask()
        assert layout.num_active_blocks <= most * 128 * 128
        assert mask.diagonal().all()
        distance = (mask * (torch.arange(128)[:, None] - torch.arange(128))).max()
        assert distance >= 32, "no level reaches 4K tokens back"

    def test_standard_is_the_default(self):
        assert BlockSparseHierarchical().sparse_config == BlockSparseHierarchical("standard").sparse_config
        assert BlockSparseHierarchical("long_range").sparse_config != BlockSparseHierarchical().sparse_config


class TestWeights:
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("pattern_type", CONFIGS)
    def test_are_the_softmax_by_active_block(self, pattern_type, causal):
        q, k, v = qkv()
        out, weights = make(pattern_type)(q, k, v, is_causal=causal, return_attention_weights=True)
        by_hand, want = dense.attend(q, k, v, allowed_by(pattern_type, causal))
        close(out, by_hand)
        assert isinstance(weights, BlockSparseWeights)
        assert list(weights) == ["block_indices", "block_values", "shape", "block_size"]
        assert weights["shape"] == (2, 4, SEQ, SEQ)
        assert weights["block_size"] == BLOCK
        active = blocks_of(pattern_type, causal).tril(0 if causal else NUM).nonzero().tolist()
        assert weights["block_indices"] == [tuple(pair) for pair in active]
        assert all(isinstance(i, int) for pair in weights["block_indices"] for i in pair)
        assert {value.shape for value in weights["block_values"]} == {(2, 4, BLOCK, BLOCK)}
        close(weights.to_dense(), want)
        close(weights.to_dense().sum(-1), torch.ones(2, 4, SEQ, dtype=torch.float64))

    def test_each_value_lies_where_its_index_says(self):
        """Read as the seeds write them: block (i, j) holds queries i·B … and keys j·B …, zeros beyond the end."""
        q, k, v = qkv()
        _, weights = make("global_local")(q, k, v, return_attention_weights=True)
        _, want = dense.attend(q, k, v, allowed_by("global_local", False))
        padded = nn.functional.pad(want, (0, NUM * BLOCK - SEQ, 0, NUM * BLOCK - SEQ))
        assert len(weights["block_indices"]) == len(weights["block_values"])
        for (i, j), value in zip(weights["block_indices"], weights["block_values"], strict=True):
            close(value, padded[:, :, BLOCK * i : BLOCK * (i + 1), BLOCK * j : BLOCK * (j + 1)])

    def test_storage_is_proportional_to_the_active_blocks(self):
        """4096 tokens, 32 blocks of 128, one in eight kept."""
        module = BlockSparseRingDilatedAttention([4096], [1], sparsity_ratio=0.125)
        q, k, v = (torch.randn(1, 4096, 2, 4) for _ in range(3))
        _, weights = module(q, k, v, return_attention_weights=True)
        stored = sum(value.numel() for value in weights["block_values"])
        assert len(weights["block_indices"]) == 32 * 4
        assert stored == 32 * 4 * 1 * 2 * 128 * 128
        storages = {
            value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in weights["block_values"]
        }
        assert sum(storages.values()) == 4 * stored

    def test_gradients_flow_through_the_weights(self):
        q, k, v = qkv()
        _, weights = make("dilated_sparse")(q, k, v, return_attention_weights=True)
        _, want = dense.attend(q, k, v, allowed_by("dilated_sparse", False))
        grad = torch.randn_like(want)
        got = torch.autograd.grad((weights.to_dense() * grad).sum(), (q, k), retain_graph=True)
        expected = torch.autograd.grad((want * grad).sum(), (q, k))
        for mine, wanted in zip(got, expected, strict=True):
            close(mine, wanted)
        first = torch.autograd.grad(weights["block_values"][0].square().sum(), q)[0]
        assert (first[:, :BLOCK] != 0).any()
        assert (first[:, BLOCK:] == 0).all()

    def test_per_head_patterns_and_grouped_queries(self):
        """A block that only one head has is listed, and zero for the others."""
        pattern = PerHead((SlidingWindow(3, 3), Blocks(((0, 2), (1, 0), (2, 1)), 16)))
        q, k, v = qkv(seq=48)
        out, weights = BlockSparseAttention(pattern)(q, k, v, return_attention_weights=True)
        allowed = torch.tensor(
            [[[p.allows(i, j, 48, 48) for j in range(48)] for i in range(48)] for p in pattern.patterns]
        )
        by_hand, want = dense.attend(q, k, v, allowed.repeat_interleave(2, 0))
        close(out, by_hand)
        close(weights.to_dense(), want)
        values = dict(zip(weights["block_indices"], weights["block_values"], strict=True))
        assert (values[0, 2][:, :2] == 0).all()
        assert (values[0, 2][:, 2:] > 0).all()

    def test_rectangular_and_masked(self):
        """Fewer queries than keys, padding, documents: the rows still sum to 1, or to 0 where nothing is left."""
        pattern = SlidingWindow(20, 5)
        q, k, v = qkv(seq=40, seq_k=100)
        padding = torch.zeros(2, 100, dtype=torch.bool)
        padding[0, 60:] = True
        documents = (torch.arange(100) // 70).expand(2, 100)
        _, weights = BlockSparseAttention(pattern)(
            q, k, v, False, True, key_padding_mask=padding, document_ids=documents
        )
        allowed = torch.tensor([[pattern.allows(i, j, 40, 100) for j in range(100)] for i in range(40)])
        allowed = allowed & (documents[0][60:, None] == documents[0]) & ~padding[:, None, None]
        assert weights["shape"] == (2, 4, 40, 100)
        close(weights.to_dense(), dense.attend(q, k, v, allowed)[1])
        seen = allowed.any(-1).expand(2, 4, 40)
        assert not seen.all()
        close(weights.to_dense().sum(-1), seen.double())

    def test_are_float32_for_inputs_of_lower_precision(self):
        q, k, v = qkv(dtype=torch.bfloat16)
        out, weights = make("local_window")(q, k, v, return_attention_weights=True)
        assert out.dtype == torch.bfloat16
        assert {value.dtype for value in weights["block_values"]} == {torch.float32}
        assert (weights.to_dense().sum(-1) - 1).abs().max() < 1e-5

    def test_are_those_before_dropout(self):
        q, k, v = qkv()
        module = make("local_window", dropout=0.5).train()
        _, weights = module(q, k, v, return_attention_weights=True)
        close(weights.to_dense(), dense.attend(q, k, v, allowed_by("local_window", False))[1])

    def test_output_is_the_same_with_and_without(self):
        q, k, v = qkv()
        for pattern_type in CONFIGS:
            module = make(pattern_type, dropout=0.2)
            torch.manual_seed(3)
            alone = module(q, k, v, is_causal=True)
            torch.manual_seed(3)
            assert torch.equal(alone, module(q, k, v, is_causal=True, return_attention_weights=True)[0])

    def test_pickle_and_repr(self):
        q, k, v = (x.detach() for x in qkv())
        _, weights = make("local_window")(q, k, v, return_attention_weights=True)
        again = pickle.loads(pickle.dumps(weights))
        assert torch.equal(again.to_dense(), weights.to_dense())
        assert repr(weights) == f"BlockSparseWeights({len(weights['block_indices'])} blocks of (2, 4, 137, 137))"


class TestDropout:
    @pytest.mark.parametrize("name", ["dropout", "attention_dropout"])
    def test_only_in_training(self, name):
        q, k, v = qkv()
        module, plain = make("local_window", **{name: 0.5}), make("local_window")
        assert module.training
        torch.manual_seed(1)
        first = module(q, k, v)
        torch.manual_seed(1)
        assert torch.equal(first, module(q, k, v))
        assert not torch.equal(first, module(q, k, v))
        assert torch.equal(module.eval()(q, k, v), plain(q, k, v))

    def test_drops_weights_as_the_operator_does(self):
        q, k, v = qkv()
        module = make("global_local", dropout=0.3)
        torch.manual_seed(7)
        got = module(q, k, v)
        torch.manual_seed(7)
        close(got, block_sparse_attention(q, k, v, module.pattern(), dropout_p=0.3, backend="reference"))

    def test_two_names_of_one_thing(self):
        q, k, v = qkv()
        outs = []
        for names in ({"dropout": 0.4}, {"attention_dropout": 0.4}, {"dropout": 0.4, "attention_dropout": 0.4}):
            for module in (
                make("hierarchical", **names),
                BlockSparseHierarchical([(1, 32), (3, 160)], block_size=16, **names),
            ):
                torch.manual_seed(2)
                assert module.dropout == 0.4
                outs.append(module(q, k, v))
        assert all(torch.equal(out, outs[0]) for out in outs)

    @pytest.mark.parametrize(
        "construct",
        [
            lambda **names: BlockSparseAttention(Full(), **names),
            BlockSparseRingDilatedAttention,
            BlockSparseHierarchical,
        ],
    )
    def test_a_conflict_and_a_bad_value_are_errors(self, construct):
        with pytest.raises(ValueError, match=r"name the same thing and must agree, got 0.1 and 0.2"):
            construct(dropout=0.1, attention_dropout=0.2)
        for name in ("dropout", "attention_dropout"):
            with pytest.raises(ValueError, match=r"dropout must be in \[0, 1\), got 1.0"):
                construct(**{name: 1.0})
        with pytest.raises(TypeError, match="dropout must be a number, got str"):
            construct(dropout="0.1")


def save_and_load(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


MODULES = {
    "pattern": lambda: BlockSparseAttention(GlobalTokens(3) | SlidingWindow(20, 7), scale=0.4),
    "dilated_sparse": lambda: make("dilated_sparse", dropout=0.2),
    "global_local": lambda: make("global_local"),
    "hierarchical": lambda: BlockSparseHierarchical([(1, 32), (3, 160)], block_size=BLOCK),
}


class TestAsModules:
    @pytest.mark.parametrize("through", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), save_and_load])
    @pytest.mark.parametrize("name", MODULES)
    def test_copied_and_saved(self, name, through):
        """Also after a call, when the layout has been built and remembered."""
        module, (q, k, v) = MODULES[name](), qkv()
        torch.manual_seed(4)
        want = module(q, k, v)
        again = through(module)
        assert again is not module
        assert type(again) is type(module)
        torch.manual_seed(4)
        assert torch.equal(again(q, k, v), want)
        assert torch.equal(again.eval()(q, k, v, is_causal=True), module.eval()(q, k, v, is_causal=True))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_to_dtype(self, dtype):
        """No parameters: the dtype is that of the tensors, and stays it."""
        tensors = qkv(dtype=torch.float64)
        want = make("global_local")(*tensors)
        got = make("global_local").to(dtype)(*(x.to(dtype) for x in tensors))
        assert got.dtype == dtype
        error, eps = (got.double() - want).abs().max(), torch.finfo(dtype).eps
        assert error <= 8 * eps * max(float(x.detach().abs().max()) for x in tensors)

    @pytest.mark.slow
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("name", MODULES)
    def test_compiled_whole_equals_eager(self, name, causal):
        """`fullgraph=True`: one graph, the layout a constant in it; outputs and gradients to the bit."""
        torch._dynamo.reset()
        module, tensors = MODULES[name](), qkv(batch=1, heads=2, heads_kv=1)
        module.eval()
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        grad = torch.randn(1, SEQ, 2, 8, dtype=torch.float64)
        got, want = compiled(*tensors, is_causal=causal), module(*tensors, is_causal=causal)
        assert torch.equal(got, want)
        for mine, wanted in zip(*(torch.autograd.grad(x, tensors, grad) for x in (got, want)), strict=True):
            assert torch.equal(mine, wanted)

    @pytest.mark.parametrize("name", MODULES)
    def test_under_data_parallel(self, name):
        """DataParallel works where the GPUs are, if there are any: so do the tensors it is compared on."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        module, (q, k, v) = MODULES[name]().eval(), (x.to(device) for x in qkv())
        parallel = nn.DataParallel(module)
        assert torch.equal(parallel(q, k, v, is_causal=True), module(q, k, v, is_causal=True))
        assert torch.equal(module._replicate_for_data_parallel()(q, k, v), module(q, k, v))

    @pytest.mark.parametrize("name", MODULES)
    def test_autocast_runs_in_bfloat16(self, name):
        module, tensors = MODULES[name]().eval(), qkv(dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, weights = module(*tensors, return_attention_weights=True)
            alone = module(*tensors)
        assert out.dtype == alone.dtype == torch.bfloat16
        assert torch.equal(out, alone)
        assert torch.equal(out, module(*(x.bfloat16() for x in tensors)))
        assert (weights.to_dense().sum(-1) - 1).abs().max() < 1e-5
        alone.float().sum().backward()
        assert {x.grad.dtype for x in tensors} == {torch.float32}
        assert all(x.grad.isfinite().all() for x in tensors)

    @pytest.mark.parametrize("use_reentrant", [False, True])
    @pytest.mark.parametrize("dropout", [0.0, 0.4])
    def test_activation_checkpointing(self, dropout, use_reentrant):
        """The second forward draws the same dropout as the first: gradients agree to the bit."""
        module = make("dilated_sparse", dropout=dropout)

        def step(run):
            torch.manual_seed(9)
            tensors = [x.detach().requires_grad_() for x in inputs]
            out = run(tensors)
            out.square().sum().backward()
            return out.detach(), *(x.grad for x in tensors)

        inputs = qkv()
        plain = step(lambda tensors: module(*tensors, is_causal=True))
        saved = step(lambda tensors: checkpoint(module, *tensors, True, use_reentrant=use_reentrant))
        for mine, want in zip(saved, plain, strict=True):
            assert torch.equal(mine, want)

    def test_flags_are_checked(self):
        """A mask in the place of `is_causal` (or anything but a flag) is an error that says so, not a puzzle."""
        q, k, v = qkv()
        for module in (make("local_window"), BlockSparseAttention(Full())):
            with pytest.raises(TypeError, match="is_causal must be True or False"):
                module(q, k, v, torch.ones(SEQ, SEQ, dtype=torch.bool))
            with pytest.raises(TypeError, match="return_attention_weights must be True or False"):
                module(q, k, v, False, "yes")

    def test_what_it_is_made_of_shows(self):
        assert "; keeps 40% of the blocks" in repr(make("dilated_sparse"))
        assert "keeps" not in repr(make("local_window"))
        assert "LocalBlocks(window=40" in repr(make("local_window", dropout=0.25))
        assert "dropout=0.25" in repr(make("local_window", dropout=0.25))


BAD = {
    "unknown keyword": ({"window": 3}, TypeError, "unknown keyword 'window'; beside .*'local_window_size'"),
    "config and field": (
        {"sparse_config": SparsePatternConfig(), "block_size": 64},
        ValueError,
        r"\['block_size'\] must be given in sparse_config or as keywords, not both",
    ),
    "dict as config": ({"sparse_config": {"block_size": 64}}, TypeError, "must be a SparsePatternConfig, got dict"),
    "lengths alone": ({"segment_lengths": [64]}, ValueError, r"given together or not at all, got \[64\] and None"),
    "rates alone": ({"dilation_rates": [1]}, ValueError, r"given together or not at all, got None and \[1\]"),
    "unequal lengths": (
        {"segment_lengths": [64, 128], "dilation_rates": [1]},
        ValueError,
        r"same length, at least 1, got \[64, 128\] and \[1\]",
    ),
    "no segments": ({"segment_lengths": [], "dilation_rates": []}, ValueError, r"at least 1, got \[\] and \[\]"),
    "no sequence": ({"segment_lengths": 64, "dilation_rates": 1}, TypeError, "must be sequences of ints, got 64, 1"),
    "zero segment": ({"segment_lengths": [0], "dilation_rates": [1]}, ValueError, "segment length must be at least 1"),
    "zero rate": ({"segment_lengths": [64], "dilation_rates": [0]}, ValueError, "dilation rate must be at least 1"),
    "half a token": ({"segment_lengths": [6.5], "dilation_rates": [1]}, TypeError, "must be an int, got 6.5"),
    "unknown type": (
        {"pattern_type": "banded"},
        ValueError,
        r"\['adaptive', 'dilated_sparse', 'global_local', 'hierarchical', 'local_window'\], got 'banded'",
    ),
    "ratio of 0": ({"sparsity_ratio": 0.0}, ValueError, r"sparsity_ratio must be .* in \(0, 1\], got 0.0"),
    "ratio above 1": ({"sparsity_ratio": 1.5}, ValueError, r"sparsity_ratio must be .* in \(0, 1\], got 1.5"),
    "ratio as text": ({"sparsity_ratio": "10%"}, TypeError, "sparsity_ratio must be a number, got '10%'"),
    "block of 100": ({"block_size": 100}, ValueError, r"block_size must be one of \(16, 32, 64, 128, 256\), got 100"),
    "negative window": (
        {"pattern_type": "local_window", "local_window_size": -1},
        ValueError,
        "local_window_size must be at least 0, got -1",
    ),
    "no global token": (
        {"pattern_type": "global_local", "global_tokens": 0},
        ValueError,
        "global_tokens must be at least 1, got 0",
    ),
    "unknown backend": ({"backend": "cuda"}, ValueError, r"backend must be one of \['auto', .*\], got 'cuda'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options(name):
    options, error, message = BAD[name]
    with pytest.raises(error, match=message):
        BlockSparseRingDilatedAttention(**options)


def test_bad_patterns_and_levels():
    with pytest.raises(TypeError, match="pattern must be a Pattern, got SparsePatternConfig"):
        BlockSparseAttention(SparsePatternConfig())
    with pytest.raises(ValueError, match=r"one of \['fine_grained', 'long_range', 'standard'\], got 'coarse'"):
        BlockSparseHierarchical("coarse")
    with pytest.raises(ValueError, match="levels must hold at least one"):
        BlockSparseHierarchical([])
    with pytest.raises(ValueError, match="stride must be at least 1, got 0"):
        BlockSparseHierarchical([(0, 512)])
    for levels in ([(1,)], [(1, 2, 3)], 512, [512]):
        with pytest.raises((TypeError, ValueError), match="levels must"):
            BlockSparseHierarchical(levels)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), "0.1", True])
def test_a_bad_scale_is_refused_before_the_first_call(scale):
    with pytest.raises((TypeError, ValueError), match="scale must be"):
        BlockSparseRingDilatedAttention(scale=scale)
