"""The multihead form: `nn.MultiheadAttention` when nothing is left out, and a pattern inside when something is."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import dilated_attention_pytorch as package
from dilated_attention_pytorch import (
    BlockSparseRingMultiheadDilatedAttention,
    BlockSparseRingMultiheadDilatedAttentionV2,
    BlockSparseWeights,
    SparsePatternConfig,
    block_sparse_attention,
    block_sparse_ring_multihead_dilated_attention_v2,
)
from tests import dense

EMBED, HEADS, SEQ = 24, 4, 37
EVERYTHING = SparsePatternConfig(pattern_type="local_window", local_window_size=4096, block_size=16)
LOCAL = SparsePatternConfig(pattern_type="local_window", local_window_size=20, block_size=16)


def multihead(config=EVERYTHING, **options):
    options = {"dtype": torch.float64, **options}
    return BlockSparseRingMultiheadDilatedAttention(EMBED, HEADS, sparse_config=config, **options)


def pair(**options):
    """A `nn.MultiheadAttention` with no zero among its parameters, and ours with the same."""
    options = {"batch_first": True, "dtype": torch.float64, **options}
    theirs = nn.MultiheadAttention(EMBED, HEADS, **options)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours = multihead(**options)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def inputs(seq_k=SEQ, kdim=EMBED, vdim=EMBED, batch=2):
    shapes = (batch, SEQ, EMBED), (batch, seq_k, kdim), (batch, seq_k, vdim)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def close(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def assert_same(ours, theirs, tensors, mine, wanted, **options):
    """Outputs, and the gradients of all inputs and all parameters."""
    close(mine, wanted)
    grad = torch.randn_like(wanted)
    names = dict(theirs.named_parameters())
    got = torch.autograd.grad(mine, [*tensors, *(dict(ours.named_parameters())[name] for name in names)], grad)
    want = torch.autograd.grad(wanted, [*tensors, *names.values()], grad)
    assert len(got) == len(tensors) + len(list(ours.parameters()))
    for a, b in zip(got, want, strict=True):
        close(a, b)


class TestEqualsMultiheadAttention:
    @pytest.mark.parametrize(
        "options",
        [{}, {"bias": False}, {"kdim": 10, "vdim": 14}, {"kdim": 10}, {"vdim": 14, "bias": False}],
        ids=str,
    )
    @pytest.mark.parametrize("seq_k", [SEQ, 5, 70])
    def test_cross_attention(self, seq_k, options):
        ours, theirs = pair(**options)
        tensors = inputs(seq_k, options.get("kdim", EMBED), options.get("vdim", EMBED))
        assert_same(ours, theirs, tensors, ours(*tensors), theirs(*tensors, need_weights=False)[0])

    @pytest.mark.parametrize("causal", [False, True])
    def test_self_attention(self, causal):
        """One tensor three times takes the path of a single projection."""
        ours, theirs = pair()
        x = inputs()[0]
        mask = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1) if causal else None
        wanted = theirs(x, x, x, attn_mask=mask, need_weights=False)[0]
        assert_same(ours, theirs, [x], ours(x, x, x, is_causal=causal), wanted)

    def test_batch_second(self):
        ours, theirs = pair(batch_first=False)
        tensors = [torch.randn(n, 3, EMBED, dtype=torch.float64, requires_grad=True) for n in (SEQ, 50, 50)]
        padding = torch.rand(3, 50) < 0.3
        mine = ours(*tensors, key_padding_mask=padding)
        assert mine.shape == (SEQ, 3, EMBED)
        assert_same(ours, theirs, tensors, mine, theirs(*tensors, key_padding_mask=padding, need_weights=False)[0])

    def test_key_padding(self):
        ours, theirs = pair()
        tensors = inputs(seq_k=50)
        padding = torch.zeros(2, 50, dtype=torch.bool)
        padding[0, 31:], padding[1, :7] = True, True
        mine = ours(*tensors, key_padding_mask=padding)
        assert_same(ours, theirs, tensors, mine, theirs(*tensors, key_padding_mask=padding, need_weights=False)[0])

    def test_weights(self):
        ours, theirs = pair()
        tensors = inputs(seq_k=50)
        wanted, matrix = theirs(*tensors, need_weights=True, average_attn_weights=False)
        for name in ("need_weights", "return_attention_weights"):
            out, weights = ours(*tensors, **{name: True})
            close(out, wanted)
            assert isinstance(weights, BlockSparseWeights)
            assert weights["shape"] == (2, HEADS, SEQ, 50)
            close(weights.to_dense(), matrix)

    def test_a_plain_tensor_comes_back_by_default(self):
        ours, _ = pair()
        assert isinstance(ours(*inputs()), torch.Tensor)
        assert isinstance(ours(*inputs(), need_weights=False, return_attention_weights=False), torch.Tensor)

    @pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 10, "vdim": 14}], ids=str)
    def test_state_dict_goes_both_ways(self, options):
        ours, theirs = pair(**options)
        other = nn.MultiheadAttention(EMBED, HEADS, batch_first=True, dtype=torch.float64, **options)
        other.load_state_dict(ours.state_dict())
        assert ours.state_dict().keys() == theirs.state_dict().keys()
        for name, value in theirs.state_dict().items():
            assert torch.equal(other.state_dict()[name], value)

    @pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 10, "vdim": 14}], ids=str)
    def test_starts_from_the_same_parameters(self, options):
        """The same draws in the same order: the same seed gives the same initial parameters."""
        torch.manual_seed(11)
        theirs = nn.MultiheadAttention(EMBED, HEADS, dtype=torch.float64, **options)
        torch.manual_seed(11)
        ours = multihead(**options)
        for name, value in theirs.state_dict().items():
            assert torch.equal(ours.state_dict()[name], value)

    def test_a_sample_of_padding_only_gives_the_bias(self):
        """`nn.MultiheadAttention` gives NaN there, and NaN gradients to every parameter."""
        ours, _ = pair()
        tensors = inputs()
        padding = torch.tensor([[False], [True]]).expand(2, SEQ)
        out = ours(*tensors, key_padding_mask=padding)
        close(out[1], ours.out_proj.bias.expand(SEQ, -1))
        close(out[0], ours(*(x[:1] for x in tensors))[0])
        out.sum().backward()
        assert all(p.grad.isfinite().all() for p in ours.parameters())


def by_hand(module, query, key, value, attend):
    """The projections written out around any attention function."""
    weights = module.in_proj_weight.split([EMBED, module.num_kv_heads * 6, module.num_kv_heads * 6])
    biases = module.in_proj_bias.split([len(w) for w in weights])
    q, k, v = (
        (x @ w.T + b).unflatten(-1, (-1, EMBED // HEADS))
        for x, w, b in zip((query, key, value), weights, biases, strict=True)
    )
    return attend(q, k, v).flatten(2) @ module.out_proj.weight.T + module.out_proj.bias


class TestPattern:
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("num_kv_heads", [None, 4, 2, 1])
    def test_is_attention_over_the_pattern_between_the_projections(self, num_kv_heads, causal):
        module = multihead(LOCAL, num_kv_heads=num_kv_heads)
        query, *_ = tensors = inputs()
        got = module(*tensors, causal)
        pattern = module.attention.pattern(causal)
        reference = by_hand(
            module, *tensors, lambda q, k, v: block_sparse_attention(q, k, v, pattern, backend="reference")
        )
        close(got, reference)
        allowed = dense.tokens(dense.local_blocks(3, 20, 16, causal=causal), 16, SEQ, causal=causal)
        close(got, by_hand(module, *tensors, lambda q, k, v: dense.attend(q, k, v, allowed)[0]))
        close(module(query, query, query, causal), module(query, query.clone(), query.clone(), causal))
        assert (allowed.sum(-1) < SEQ).any()

    def test_grouped_heads_equal_repeated_ones(self):
        """Two key heads for four query heads are `nn.MultiheadAttention` with each key head written twice."""
        module, tensors = multihead(num_kv_heads=2), inputs()
        nn.init.normal_(module.in_proj_bias)
        theirs = nn.MultiheadAttention(EMBED, HEADS, batch_first=True, dtype=torch.float64)

        def repeat(x):
            q, *kv = x.split([EMBED, 12, 12])
            return torch.cat([q, *(y.unflatten(0, (2, 6)).repeat_interleave(2, 0).flatten(0, 1) for y in kv)])

        state = module.state_dict()
        theirs.load_state_dict({n: repeat(x) if n.startswith("in_proj") else x for n, x in state.items()})
        assert module.in_proj_weight.shape == (EMBED + 2 * 12, EMBED)
        close(module(*tensors), theirs(*tensors, need_weights=False)[0])

    def test_documents(self):
        """Packed sequences: a document comes out as it would alone."""
        module, x = multihead(), inputs()[0]
        ids = (torch.arange(SEQ) >= 20).long().expand(2, SEQ)
        out = module(x, x, x, document_ids=ids)
        close(out[:, :20], module(x[:, :20], x[:, :20], x[:, :20]))
        close(out[:, 20:], module(x[:, 20:], x[:, 20:], x[:, 20:]))

    def test_options_reach_the_attention(self):
        module = BlockSparseRingMultiheadDilatedAttention(
            EMBED,
            HEADS,
            [64],
            [2],
            sparsity_ratio=0.3,
            block_size=32,
            scale=0.7,
            attention_dropout=0.2,
            backend="blockwise",
        )
        assert module.attention.segment_lengths == (64,)
        assert module.attention.dilation_rates == (2,)
        assert module.attention.sparse_config == SparsePatternConfig(sparsity_ratio=0.3, block_size=32)
        assert module.attention.scale == 0.7
        assert module.attention.dropout == 0.2
        assert module.attention.backend == "blockwise"
        assert module.in_proj_weight.dtype == torch.float32

    def test_scale_changes_the_softmax(self):
        """A scale of zero attends everywhere alike: the mean of the values."""
        module, tensors = multihead(scale=0.0), inputs()
        mean = by_hand(module, *tensors, lambda q, k, v: v.mean(1, keepdim=True).expand_as(q))
        close(module(*tensors), mean)

    def test_v2_is_the_same_class_at_every_path(self):
        assert BlockSparseRingMultiheadDilatedAttentionV2 is BlockSparseRingMultiheadDilatedAttention
        path = block_sparse_ring_multihead_dilated_attention_v2
        assert path.BlockSparseRingMultiheadDilatedAttentionV2 is BlockSparseRingMultiheadDilatedAttention
        assert package.BlockSparseRingMultiheadDilatedAttention is BlockSparseRingMultiheadDilatedAttention


def save_and_load(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def replica(module):
    """What `nn.DataParallel` makes for each of several GPUs: parameters become plain attributes."""
    copied = {old: old._replicate_for_data_parallel() for old in module.modules()}
    for old, new in copied.items():
        for name, child in old._modules.items():
            setattr(new, name, copied[child])
        for name, parameter in old._parameters.items():
            setattr(new, name, None if parameter is None else parameter.clone())
    return copied[module]


class TestAsModule:
    @pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 10, "vdim": 14}], ids=str)
    @pytest.mark.parametrize(
        "through", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), save_and_load, replica]
    )
    def test_copied_saved_and_replicated(self, through, options):
        module = multihead(LOCAL, **options)
        tensors = inputs(kdim=options.get("kdim", EMBED), vdim=options.get("vdim", EMBED))
        want = module(*tensors)
        again = through(module)
        assert again is not module
        assert torch.equal(again(*tensors), want)

    def test_a_copy_has_its_own_parameters(self):
        module, tensors = multihead(LOCAL), inputs()
        again, want = copy.deepcopy(module), module(*tensors)
        with torch.no_grad():
            for parameter in again.parameters():
                parameter.add_(1.0)
        assert torch.equal(module(*tensors), want)
        assert not torch.equal(again(*tensors), want)

    def test_parametrized_weights(self):
        """Weight norm takes the parameter away and puts a computed tensor in its place."""
        module, tensors = multihead(LOCAL), inputs()
        want = module(*tensors)
        nn.utils.parametrizations.weight_norm(module, "in_proj_weight")
        close(module(*tensors), want)

    def test_under_data_parallel(self):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        module, tensors = multihead(LOCAL).to(device), [x.to(device) for x in inputs()]
        parallel = nn.DataParallel(module)
        assert torch.equal(parallel(*tensors, is_causal=True), module(*tensors, is_causal=True))
        assert parallel.state_dict().keys() == {f"module.{name}" for name in module.state_dict()}

    def test_functional_call(self):
        module, tensors = multihead(LOCAL), inputs()
        doubled = {name: 2 * p.detach() for name, p in module.named_parameters()}
        got = torch.func.functional_call(module, doubled, tuple(tensors))
        module.load_state_dict(doubled)
        assert torch.equal(got, module(*tensors))

    @pytest.mark.parametrize("causal", [False, True])
    def test_compiled_whole_equals_eager(self, causal):
        torch._dynamo.reset()
        module, x = multihead(LOCAL, num_kv_heads=2), inputs()[0]
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        got, want = compiled(x, x, x, is_causal=causal), module(x, x, x, is_causal=causal)
        close(got, want)
        leaves = [x, *module.parameters()]
        for mine, wanted in zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (got, want)), strict=True):
            close(mine, wanted)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_to_dtype(self, dtype):
        module, tensors = multihead(LOCAL), inputs()
        want = module(*tensors)
        got = module.to(dtype)(*(x.to(dtype) for x in tensors))
        assert got.dtype == dtype
        assert {p.dtype for p in module.parameters()} == {dtype}
        assert (got.double() - want).abs().max() <= 32 * torch.finfo(dtype).eps * want.abs().max()

    def test_autocast(self):
        module, tensors = multihead(LOCAL, dtype=torch.float32), [x.float() for x in inputs()]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = module(*tensors)
        assert out.dtype == torch.bfloat16
        error = (out.float() - module(*tensors)).abs().max()
        assert 0 < error <= 32 * torch.finfo(torch.bfloat16).eps

    def test_dropout_only_in_training(self):
        module, plain, tensors = multihead(LOCAL, dropout=0.5), multihead(LOCAL), inputs()
        plain.load_state_dict(module.state_dict())
        assert not torch.equal(module(*tensors), module(*tensors))
        assert torch.equal(module.eval()(*tensors), plain(*tensors))

    def test_on_the_meta_device_and_then_filled(self):
        module = multihead(LOCAL, device="meta")
        assert {p.device.type for p in module.parameters()} == {"meta"}
        module = module.to_empty(device="cpu")
        assert module.in_proj_weight.isnan().all()
        module.reset_parameters()
        assert module.in_proj_weight.isfinite().all()
        assert (module.in_proj_bias == 0).all()

    def test_learns(self):
        """One step of gradient descent lowers the loss: forward and backward belong together."""
        module, tensors = multihead(LOCAL), [x.detach() for x in inputs()]
        target = torch.randn(2, SEQ, EMBED, dtype=torch.float64)
        before = (module(*tensors) - target).square().mean()
        before.backward()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= 0.1 * parameter.grad
        assert (module(*tensors) - target).square().mean() < before


OPTIONS = {
    "heads": ({"num_heads": 5}, ValueError, "embed_dim must be a multiple of num_heads, got 24 and 5"),
    "no heads": ({"num_heads": 0}, ValueError, "num_heads must be at least 1, got 0"),
    "key heads": ({"num_kv_heads": 3}, ValueError, "num_heads must be a multiple of num_kv_heads, got 4 and 3"),
    "too many key heads": ({"num_kv_heads": 8}, ValueError, "must be a multiple of num_kv_heads, got 4 and 8"),
    "no key heads": ({"num_kv_heads": 0}, ValueError, "num_kv_heads must be at least 1, got 0"),
    "float width": ({"embed_dim": 24.0}, TypeError, "embed_dim must be an int, got 24.0"),
    "kdim": ({"kdim": 0}, ValueError, "kdim must be at least 1, got 0"),
    "vdim": ({"vdim": "24"}, TypeError, "vdim must be an int, got '24'"),
    "unknown": ({"add_bias_kv": True}, TypeError, "unknown keyword 'add_bias_kv'; beside"),
    "config": ({"sparse_config": "local_window"}, TypeError, "must be a SparsePatternConfig, got str"),
    "dropout": ({"dropout": 0.1, "attention_dropout": 0.3}, ValueError, "must agree, got 0.1 and 0.3"),
    "backend": ({"backend": "fast"}, ValueError, "backend must be one of .*, got 'fast'"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_bad_options(name):
    options, error, message = OPTIONS[name]
    with pytest.raises(error, match=message):
        BlockSparseRingMultiheadDilatedAttention(**{"embed_dim": EMBED, "num_heads": HEADS, **options})


X = torch.zeros(2, SEQ, EMBED, dtype=torch.float64)
CALLS = {
    "rank 2": (
        (X[0], X, X),
        {},
        ValueError,
        r"query must be \(batch, seq, features\) with 24 features, got \[37, 24\]",
    ),
    "rank 4": ((X, X[None], X), {}, ValueError, r"key must be .*, got \[1, 2, 37, 24\]"),
    "width": ((X, X, X[..., :8]), {}, ValueError, r"value must be .* with 24 features, got \[2, 37, 8\]"),
    "not a tensor": ((X, None, X), {}, ValueError, "key must be .*, got NoneType"),
    "batch": ((X, X[:1], X[:1]), {}, ValueError, "key must have the batch size of query, 2, got 1"),
    "keys and values": ((X, X, X[:, :5]), {}, ValueError, "key and value must have the same length"),
    "no tokens": ((X, X[:, :0], X[:, :0]), {}, ValueError, "k must not be empty"),
    "float32 for float64": ((X.float(), X, X), {}, TypeError, "query must .*float64, got torch.float32"),
    "float32 keys": ((X, X.float(), X), {}, TypeError, "key must .*float64, got torch.float32"),
    "integers": ((X.long(),) * 3, {}, TypeError, "query must .*float64, got torch.int64"),
    "mask turned": (
        (X, X, X),
        {"key_padding_mask": torch.zeros(SEQ, 2, dtype=torch.bool)},
        ValueError,
        r"key_padding_mask must have shape \(batch, seq_k\) = \[2, 37\], got \[37, 2\]",
    ),
    "float mask": (
        (X, X, X),
        {"key_padding_mask": torch.zeros(2, SEQ)},
        TypeError,
        "key_padding_mask must be bool, True where a key is padding, got torch.float32",
    ),
    # nn.MultiheadAttention takes key_padding_mask as its fourth argument; here that place is is_causal.
    "mask as fourth": (
        (X, X, X, torch.zeros(2, SEQ, dtype=torch.bool)),
        {},
        TypeError,
        "is_causal must be True or False",
    ),
    "attn_mask": ((X, X, X), {"attn_mask": torch.zeros(SEQ, SEQ)}, TypeError, "attn_mask"),
    "need_weights": ((X, X, X), {"need_weights": "all"}, TypeError, "need_weights must be True or False, got 'all'"),
}


@pytest.mark.parametrize("name", CALLS)
def test_bad_calls(name):
    tensors, options, error, message = CALLS[name]
    with pytest.raises(error, match=message):
        multihead(LOCAL)(*tensors, **options)


def test_the_order_of_axes_is_in_the_message():
    with pytest.raises(ValueError, match=r"query must be \(seq, batch, features\) with 24 features, got \[37, 24\]"):
        multihead(LOCAL, batch_first=False)(X[0], X, X)
