"""Dilated attention as a module, alone and between projections."""

import copy
import math

import pytest
import torch
from torch import nn

import dilated_attention_pytorch as package
from dilated_attention_pytorch import Branches, DilatedAttention, MultiheadDilatedAttention
from dilated_attention_pytorch.nn import magneto_gammas

EMBED, HEADS, SEQ = 24, 4, 37
ALL = ([64], [1])  # one branch that holds every pair
SOME = ([8, 24], [1, 3])


def by_hand(q, k, v, branches, is_causal=False, scale=None, hidden=None):
    """One softmax a row over the keys, each as often as `Branches.times` says; float64, pair by pair."""
    heads, seq = q.shape[2], q.shape[1]
    times = torch.tensor(
        [
            [[branches.times(i, j, h, heads) * (j <= i or not is_causal) for j in range(seq)] for i in range(seq)]
            for h in range(heads)
        ]
    )[None]
    if hidden is not None:
        times = times * ~hidden[:, None, None]
    k, v = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    weights = scores.exp() * times
    total = weights.sum(-1, keepdim=True)
    return torch.einsum("bhqk,bkhd->bqhd", weights / torch.where(total == 0, 1.0, total), v)


def qkv(heads=HEADS, heads_kv=HEADS):
    return [torch.randn(2, SEQ, n, 6, dtype=torch.float64, requires_grad=True) for n in (heads, heads_kv, heads_kv)]


def multihead(branches=SOME, **options):
    return MultiheadDilatedAttention(EMBED, HEADS, *branches, **{"dtype": torch.float64, **options})


def inputs(seq=SEQ):
    return [torch.randn(2, seq, EMBED, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def close(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


class TestDilatedAttention:
    @pytest.mark.parametrize("offsets", ["interleaved", "grouped"])
    @pytest.mark.parametrize("causal", [False, True])
    def test_equals_the_definition_with_gradients(self, causal, offsets):
        module, tensors = DilatedAttention(*SOME, head_offsets=offsets, scale=0.3), qkv(heads_kv=2)
        hidden = torch.rand(2, SEQ) < 0.2
        got = module(*tensors, causal, key_padding_mask=hidden)
        want = by_hand(*tensors, Branches(*SOME, offsets), causal, 0.3, hidden)
        close(got, want)
        grad = torch.randn_like(got)
        for a, b in zip(*(torch.autograd.grad(x, tensors, grad) for x in (got, want)), strict=True):
            close(a, b)

    @pytest.mark.parametrize("causal", [False, True])
    def test_weights(self, causal):
        """With the unit matrix for values the result is the weights themselves, a key counted as often as it counts."""
        module, (q, k, v) = DilatedAttention(*SOME), qkv(heads_kv=2)
        hidden = torch.rand(2, SEQ) < 0.2
        out, weights = module(q, k, v, causal, True, key_padding_mask=hidden)
        close(out, module(q, k, v, causal, key_padding_mask=hidden))
        assert weights["shape"] == (2, HEADS, SEQ, SEQ)
        unit = torch.eye(SEQ, dtype=torch.float64)[None, :, None].expand(2, SEQ, HEADS, SEQ)
        want = by_hand(q, k, unit, Branches(*SOME), causal, hidden=hidden).transpose(1, 2)
        close(weights.to_dense(), want)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, lower = module(q.float(), k.float(), v.float(), causal, True, key_padding_mask=hidden)
        assert (lower.to_dense() - want).abs().max() < 0.05

    def test_detached_mixing_changes_the_gradient_and_not_the_result(self):
        tensors = qkv()
        true, detached = (DilatedAttention(*SOME, detach_branch_weights=flag) for flag in (False, True))
        close(detached(*tensors), true(*tensors))
        dq, dq_detached = (torch.autograd.grad(m(*tensors).square().sum(), tensors[0])[0] for m in (true, detached))
        assert (dq - dq_detached).abs().max() > 1e-3

    def test_defaults_and_names(self):
        module = DilatedAttention()
        assert (module.segment_lengths, module.dilation_rates) == ((2048, 4096, 8192), (1, 2, 4))
        assert package.ImprovedDilatedAttention is package.ImprovedDilatedAttentionV2 is DilatedAttention
        assert package.ImprovedMultiheadDilatedAttention is MultiheadDilatedAttention

    def test_dropout_only_in_training(self):
        module, tensors = DilatedAttention(*SOME, attention_dropout=0.5), qkv()
        assert not torch.equal(module(*tensors), module(*tensors))
        assert torch.equal(module.eval()(*tensors), DilatedAttention(*SOME)(*tensors))

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"segment_lengths": [8]}, ValueError, r"must be given together or not at all, got \[8\] and None"),
            ({"dilation_rates": [8]}, ValueError, r"must be given together or not at all, got None and \[8\]"),
            ({"segment_lengths": [8, 9], "dilation_rates": [1]}, ValueError, "segment_lengths"),
            ({"head_offsets": "mine"}, ValueError, "head_offsets must be one of .*, got 'mine'"),
            ({"detach_branch_weights": 1}, TypeError, "detach_branch_weights must be True or False, got 1"),
            ({"dropout": 1.0}, ValueError, r"dropout must be in \[0, 1\), got 1.0"),
            ({"scale": math.inf}, ValueError, "scale must be finite"),
            ({"backend": "fast"}, ValueError, "backend must be one of .*, got 'fast'"),
            ({"enable_memory_pool": "yes"}, TypeError, "enable_memory_pool must be True or False, got 'yes'"),
        ],
        ids=str,
    )
    def test_bad_options(self, options, error, message):
        for make in (DilatedAttention, lambda **more: MultiheadDilatedAttention(EMBED, HEADS, **more)):
            with pytest.raises(error, match=message):
                make(**options)


class TestMultihead:
    @pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 10, "vdim": 14}], ids=str)
    @pytest.mark.parametrize("seq_k", [SEQ, 50])
    def test_one_branch_over_everything_is_multihead_attention(self, seq_k, options):
        theirs = nn.MultiheadAttention(EMBED, HEADS, batch_first=True, dtype=torch.float64, **options)
        for parameter in theirs.parameters():
            nn.init.normal_(parameter, std=0.5)
        ours = multihead(ALL, **options)
        ours.load_state_dict(theirs.state_dict())
        widths = EMBED, options.get("kdim", EMBED), options.get("vdim", EMBED)
        tensors = [
            torch.randn(2, n, width, dtype=torch.float64, requires_grad=True)
            for n, width in zip((SEQ, seq_k, seq_k), widths, strict=True)
        ]
        hidden = torch.rand(2, seq_k) < 0.3
        got = ours(*tensors, key_padding_mask=hidden)
        want = theirs(*tensors, key_padding_mask=hidden, need_weights=False)[0]
        close(got, want)
        grads = [
            torch.autograd.grad(y.square().sum(), [*tensors, *module.parameters()])
            for y, module in ((got, ours), (want, theirs))
        ]
        for a, b in zip(*grads, strict=True):
            close(a, b)

    @pytest.mark.parametrize("options", [{}, {"kdim": EMBED, "vdim": 14}], ids=str)
    @pytest.mark.parametrize("norm", [False, True])
    def test_branches_between_projections(self, norm, options):
        module = multihead(num_kv_heads=2, layer_norm=norm, layer_norm_eps=0.1 if norm else None, **options)
        if norm:
            nn.init.normal_(module.layer_norm.weight)
        tensors = inputs()
        tensors[2] = tensors[2][..., : options.get("vdim", EMBED)]
        heads = [
            (x @ w.T + b).unflatten(-1, (-1, 6))
            for x, w, b in zip(tensors, module._weights(), module.in_proj_bias.split([24, 12, 12]), strict=True)
        ]
        out = by_hand(*heads, Branches(*SOME), is_causal=True).flatten(2)
        if norm:
            out = (out - out.mean(-1, keepdim=True)) / (out.var(-1, keepdim=True, correction=0) + 0.1).sqrt()
            out = out * module.layer_norm.weight + module.layer_norm.bias
        close(module(*tensors, is_causal=True), out @ module.out_proj.weight.T + module.out_proj.bias)

    def test_future_tokens_change_nothing_bit_for_bit(self):
        module, x = multihead(), inputs()[0].detach()
        changed = x.clone()
        changed[:, 20:] += 1.0
        before, after = (module(y, y, y, is_causal=True) for y in (x, changed))
        assert torch.equal(before[:, :20], after[:, :20])
        assert not torch.equal(before[:, 20:], after[:, 20:])

    def test_weights(self):
        module, tensors = multihead(), inputs()
        out, weights = module(*tensors, need_weights=True)
        close(out, module(*tensors))
        _, _, v = module.project_in(*tensors)
        attended = torch.einsum("bhqk,bkhd->bqhd", weights.to_dense(), v)
        close(out, module.project_out(attended))

    def test_batch_second(self):
        first, second = multihead(), multihead(batch_first=False)
        second.load_state_dict(first.state_dict())
        tensors = inputs()
        close(second(*(x.transpose(0, 1) for x in tensors)), first(*tensors).transpose(0, 1))

    def test_compiled_whole_equals_eager(self):
        torch._dynamo.reset()
        module, x = multihead(layer_norm=True), inputs()[0]
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        close(compiled(x, x, x, is_causal=True), module(x, x, x, is_causal=True))

    def test_a_copy_is_independent(self):
        module, tensors = multihead(layer_norm=True), inputs()
        again, want = copy.deepcopy(module), module(*tensors)
        with torch.no_grad():
            again.layer_norm.bias += 1.0
        assert torch.equal(module(*tensors), want)
        assert not torch.equal(again(*tensors), want)

    @pytest.mark.parametrize("options", [{}, {"kdim": 300}], ids=str)
    def test_magneto_start(self, options):
        """Variance of a Xavier normal matrix: 2 gain² / (fan_in + fan_out), each projection by itself."""
        module = MultiheadDilatedAttention(400, 4, gamma_init=2.5, layer_norm=True, **options)
        for weight, gain in zip((*module._weights(), module.out_proj.weight), (1.0, 1.0, 2.5, 2.5), strict=True):
            std = gain * math.sqrt(2.0 / sum(weight.shape))
            assert float(weight.detach().std()) == pytest.approx(std, rel=0.01)
        assert not module.in_proj_bias.any()
        assert not module.out_proj.bias.any()

    def test_starts_as_multihead_attention_without_gamma(self):
        torch.manual_seed(11)
        theirs = nn.MultiheadAttention(EMBED, HEADS, dtype=torch.float64)
        torch.manual_seed(11)
        ours = multihead().state_dict()
        assert all(torch.equal(ours[name], value) for name, value in theirs.state_dict().items())

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"num_heads": 5}, ValueError, "embed_dim must be a multiple of num_heads, got 24 and 5"),
            ({"num_kv_heads": 3}, ValueError, "num_heads must be a multiple of num_kv_heads, got 4 and 3"),
            ({"gamma_init": 0.0}, ValueError, "gamma_init must be a positive number or None, got 0.0"),
            ({"gamma_init": True}, ValueError, "gamma_init must be a positive number or None, got True"),
            ({"gamma_init": math.inf}, ValueError, "gamma_init must be a positive number or None, got inf"),
            ({"layer_norm_eps": 0.1}, ValueError, "layer_norm_eps has no meaning without layer_norm=True, got 0.1"),
            ({"layer_norm": 1}, TypeError, "layer_norm must be True or False, got 1"),
            ({"sparsity_ratio": 0.1}, TypeError, "sparsity_ratio"),
        ],
        ids=str,
    )
    def test_bad_options(self, options, error, message):
        with pytest.raises(error, match=message):
            MultiheadDilatedAttention(**{"embed_dim": EMBED, "num_heads": HEADS, **options})

    def test_bad_calls(self):
        x = torch.zeros(2, SEQ, EMBED, dtype=torch.float64)
        with pytest.raises(ValueError, match=r"key must be \(batch, seq, features\) with 24 features"):
            multihead()(x, x[0], x)
        with pytest.raises(TypeError, match="document_ids"):
            multihead()(x, x, x, document_ids=torch.zeros(2, SEQ))
        with pytest.raises(TypeError, match="is_causal must be True or False"):
            multihead()(x, x, x, x)


def test_magneto_gammas():
    """Table 2 of the MAGNETO paper: 12 layers alone, and 6 + 6."""
    assert magneto_gammas(encoder_layers=12) == (pytest.approx(1.7827, abs=1e-4), 1.0)
    assert magneto_gammas(decoder_layers=12) == (1.0, pytest.approx(1.7827, abs=1e-4))
    encoder, decoder = magneto_gammas(6, 6)
    assert encoder == pytest.approx(math.sqrt(math.log(18) * math.log(12) / 3))
    assert decoder == pytest.approx(1.7001, abs=1e-4)
    with pytest.raises(ValueError, match="encoder_layers must be at least 0, got -1"):
        magneto_gammas(-1)
