"""LongNet against the same model written out: every layer, its gradients, the cache, and what is saved."""

import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dilated_attention_pytorch import LongNet, LongNetConfig, LongNetLM
from dilated_attention_pytorch.backends import blockwise
from dilated_attention_pytorch.models import LongNetDecoderLayer, losses
from dilated_attention_pytorch.models.longnet import Rotary
from tests.longnet import SMALL, close, small, tokens_of, written_out


def bytes_held(model, call):
    """Bytes that autograd holds between forward and backward, apart from parameters."""
    sizes = {}

    def pack(x):
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = call()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    del out
    return sum(x.nbytes() for pointer, x in sizes.items() if pointer not in parameters)


class TestForward:
    @pytest.mark.parametrize("changes", [{}, {"head_offsets": "grouped", "rotary_base": 50.0}], ids=str)
    def test_language_model_with_all_gradients(self, changes):
        model, tokens = small(**changes), tokens_of(29)
        got = model(tokens)
        embedded = model.embedding.weight[tokens] * math.sqrt(24)
        want = written_out(model, embedded, causal=True) @ model.head.weight.T
        close(got, want)
        parameters = list(model.parameters())
        grads = [torch.autograd.grad(y.square().mean(), parameters) for y in (got, want)]
        for a, b in zip(*grads, strict=True):
            close(a, b)

    def test_encoder_sees_both_sides_and_no_padding(self):
        model, x = small(LongNet), torch.randn(2, 29, 24, dtype=torch.float64)
        hidden = torch.arange(29) >= torch.tensor([[29], [17]])
        close(model(x, key_padding_mask=hidden), written_out(model, x, causal=False, hidden=hidden))
        changed = x.clone()
        changed[1, 17:] += 1.0
        assert torch.equal(model(x, key_padding_mask=hidden)[1, :17], model(changed, key_padding_mask=hidden)[1, :17])
        changed = x.clone()
        changed[0, 3] += 1.0
        assert not torch.equal(model(x)[0, 0], model(changed)[0, 0])

    @pytest.mark.parametrize("backend", ["auto", "reference", "blockwise"])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    def test_a_future_byte_never_changes_the_past(self, dtype, backend):
        model, tokens = small(backend=backend).to(dtype), tokens_of(41)
        want = model(tokens)
        for position in (1, 13, 20, 40):
            changed = tokens.clone()
            changed[:, position] = (changed[:, position] + 1) % SMALL.vocab_size
            got = model(changed)
            assert torch.equal(got[:, :position], want[:, :position])
            assert not torch.equal(got[:, position], want[:, position])

    def test_decoder_layer_with_an_encoder(self):
        """The middle block is `nn.MultiheadAttention` with a norm before its output, over keys of any number."""
        config = dataclasses.replace(SMALL, num_kv_heads=4)
        layer = LongNetDecoderLayer(config, cross_attention=True).double().eval()
        plain = LongNetDecoderLayer(config).double().eval()
        x, rotary = torch.randn(2, 9, 24, dtype=torch.float64), Rotary.of(0, 9, config, torch.device("cpu"))
        memory = torch.randn(2, 5, 24, dtype=torch.float64)
        hidden = torch.tensor([[False] * 5, [False, False, True, True, True]])
        theirs = nn.MultiheadAttention(24, 4, batch_first=True, dtype=torch.float64)
        state = layer.state_dict()
        theirs.load_state_dict(
            {n.removeprefix("cross_attention."): y for n, y in state.items() if "cross_attention.in_proj" in n}
            | {"out_proj.weight": torch.eye(24), "out_proj.bias": torch.zeros(24)}
        )
        plain.load_state_dict({name: y for name, y in state.items() if "cross" not in name})
        nn.init.zeros_(plain.feed_forward.down.weight)
        first = plain(x, rotary)
        attended = theirs(layer.cross_norm(first), memory, memory, key_padding_mask=hidden, need_weights=False)[0]
        second = first + layer.cross_attention.out_proj(layer.cross_attention.layer_norm(attended))
        want = second + layer.feed_forward(layer.feed_forward_norm(second))
        close(layer(x, rotary, memory=memory, memory_padding_mask=hidden), want)
        with pytest.raises(ValueError, match="memory must be given to a layer with cross_attention"):
            layer(x, rotary)
        with pytest.raises(ValueError, match="and to no other"):
            plain(x, rotary, memory=memory)

    def test_dropout_only_in_training(self):
        model, tokens = small(dropout=0.5), tokens_of(29)
        assert torch.equal(model(tokens), model(tokens))
        model.train()
        assert not torch.equal(model(tokens), model(tokens))

    @pytest.mark.parametrize("kept", [True, "attention"])
    @pytest.mark.parametrize("kind", [LongNet, LongNetLM])
    def test_checkpointing_gives_the_same_gradients(self, kind, kept):
        options = {"dropout": 0.3, "attention_dropout": 0.2}
        plain, again = small(kind, **options), small(kind, checkpointing=kept, **options)
        again.load_state_dict(plain.state_dict())
        x = tokens_of(29) if kind is LongNetLM else torch.randn(2, 29, 24, dtype=torch.float64)
        results = []
        for model in (plain, again):
            torch.manual_seed(5)
            out = model.train()(x)
            results.append([out, *torch.autograd.grad(out.square().mean(), list(model.parameters()))])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    def test_checkpointing_keeps_less(self):
        held = {}
        for flag in (False, True):
            model = small(checkpointing=flag, num_layers=4).train()
            held[flag] = bytes_held(model, lambda model=model: model(tokens_of(64)))
        assert held[True] < held[False] / 4

    @pytest.mark.parametrize(("kept", "calls"), [(False, 2), (True, 4), ("attention", 2)])
    def test_how_often_attention_is_computed(self, kept, calls, monkeypatch):
        count, forward = [], blockwise.forward
        monkeypatch.setattr(blockwise, "forward", lambda *args: count.append(1) or forward(*args))
        model = small(checkpointing=kept, backend="blockwise").train()
        model(tokens_of(64)).square().mean().backward()
        assert len(count) == calls

    def test_autocast_keeps_no_activations_in_float32(self):
        """The feed-forward block's norm kept one of its input, half of what a layer kept."""
        model, tokens = small(hidden_dim=160, dropout=0.0).float().train(), tokens_of(64)
        sizes = []

        def pack(x):
            sizes.append(x.numel() if x.dtype == torch.float32 else 0)
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), torch.autocast("cpu", dtype=torch.bfloat16):
            model(tokens)
        assert 0 < max(sizes) < tokens.numel() * 160

    def test_compiled_whole_equals_eager(self):
        torch._dynamo.reset()
        model, tokens = small(), tokens_of(29)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        close(compiled(tokens), model(tokens))

    def test_autocast(self):
        model, tokens = small().float(), tokens_of(29)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = model(tokens)
        assert got.dtype == torch.bfloat16
        want = model(tokens)
        assert 0 < (got.float() - want).abs().max() < 0.1 * want.abs().max()


class TestLoss:
    """`cross_entropy` of all logits, of which only some are there at a time."""

    @pytest.mark.parametrize("most", [1, 11, 50, 1 << 24])
    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_loss_and_gradients(self, most, reduction, monkeypatch):
        monkeypatch.setattr(losses, "MOST_LOGITS", most)
        model, tokens, targets = small(), tokens_of(29), tokens_of(29)
        targets[torch.rand(2, 29) < 0.3] = -100
        targets[0, 0] = 3
        got = model.loss(tokens, targets, reduction=reduction)
        want = cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction=reduction)
        close(got, want)
        for a, b in zip(*(torch.autograd.grad(y, list(model.parameters())) for y in (got, want)), strict=True):
            close(a, b)

    def test_logits_are_not_kept(self, monkeypatch):
        monkeypatch.setattr(losses, "MOST_LOGITS", 1000)
        model, tokens = small(vocab_size=1000, num_layers=1).train(), tokens_of(64)
        less = bytes_held(model, lambda: model.loss(tokens, tokens))
        whole = bytes_held(model, lambda: cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))
        assert less <= whole - tokens.numel() * 1000 * 8

    def test_float32_sums_under_autocast(self):
        model, tokens = small().float(), tokens_of(29)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got, logits = model.loss(tokens, tokens), model(tokens)
        assert got.dtype == torch.float32
        assert torch.equal(got, cross_entropy(logits.float().flatten(0, 1), tokens.flatten(), reduction="sum") / 58)


class TestGenerate:
    def test_greedy_equals_the_uncached_forward(self):
        model, tokens = LongNetLM(SMALL).double().eval(), tokens_of(7)
        want = tokens
        for _ in range(40):
            want = torch.cat([want, model(want)[:, -1].argmax(-1, keepdim=True)], dim=1)
        assert torch.equal(model.generate(tokens, 40, temperature=0.0), want)
        assert len(want[:, 7:].unique()) > 2

    def test_the_stream_is_what_generate_adds(self):
        model, tokens = small(), tokens_of(7)
        whole = model.generate(tokens, 20, top_p=0.9, generator=torch.Generator().manual_seed(3))
        drawn = list(model.stream(tokens, 20, top_p=0.9, generator=torch.Generator().manual_seed(3)))
        assert {x.shape for x in drawn} == {(2, 1)}
        assert torch.equal(torch.cat([tokens, *drawn], dim=1), whole)
        assert not any(x.requires_grad for x in drawn)

    def test_a_stream_leaves_gradients_as_they_are_between_its_tokens(self):
        model = small()
        stream = model.stream(tokens_of(3), 2)
        next(stream)
        assert torch.is_grad_enabled()

    def test_the_same_generator_draws_the_same(self):
        model, tokens = small(), tokens_of(7)
        first, second = (model.generate(tokens, 20, generator=torch.Generator().manual_seed(seed)) for seed in (3, 3))
        assert torch.equal(first, second)
        assert not torch.equal(first, model.generate(tokens, 20, generator=torch.Generator().manual_seed(4)))

    def test_not_while_training(self):
        with pytest.raises(RuntimeError, match=r"generate needs model.eval\(\)"):
            small().train().generate(tokens_of(3), 1)


def test_the_default_is_the_base_model_of_the_paper():
    config = LongNetConfig()
    assert (config.dim, config.num_layers, config.num_heads, config.hidden_dim) == (768, 12, 12, 3072)
    assert config.segment_lengths == (2048, 4096, 8192, 16384, 32768)
    assert config.dilation_rates == (1, 2, 4, 6, 12)
    with torch.device("meta"):
        model = LongNetLM()
    layer = 4 * (768 * 768 + 768) + 2 * 768 * 3072 + 3072 + 768 + 2 * (768 + 768 + 768 + 3072)
    assert sum(p.numel() for p in model.parameters()) == 12 * layer + 2 * 256 * 768 + 2 * 768


def test_positions_are_relative_and_exact_far_out():
    """The product of a turned query and a turned key depends on their distance, also after ten million tokens."""
    q, k = torch.randn(2, 1, 1, 1, 6)
    products = []
    for first in (0, 10_000_000):
        near, far = (Rotary.of(first + d, 1, SMALL, torch.device("cpu")) for d in (0, 77))
        products.append((near(q) * far(k)).sum())
    torch.testing.assert_close(products[0], products[1], rtol=0, atol=1e-5)
