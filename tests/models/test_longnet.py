"""LongNet against the same model written out: every layer, its gradients, the cache, and what is saved."""

import dataclasses
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import gelu, layer_norm

from dilated_attention_pytorch import Branches, LongNet, LongNetConfig, LongNetLM
from dilated_attention_pytorch.models import LongNetDecoderLayer
from dilated_attention_pytorch.models.longnet import KVCache, Rotary, _draw

SMALL = LongNetConfig(
    vocab_size=11,
    dim=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    hidden_dim=40,
    segment_lengths=(4, 12, 20),
    dilation_rates=(1, 2, 3),
)


def small(kind=LongNetLM, **changes):
    """A float64 model with no zero among its parameters."""
    model = kind(dataclasses.replace(SMALL, **changes)).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=0.1, std=0.4)
    return model.eval()


def tokens_of(seq, batch=2):
    return torch.randint(SMALL.vocab_size, (batch, seq))


def close(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def counts_of(branches, seq, heads, causal):
    return torch.tensor(
        [
            [[branches.times(i, j, h, heads) * (j <= i or not causal) for j in range(seq)] for i in range(seq)]
            for h in range(heads)
        ]
    )


def turned(x, base):
    """Each pair of features (i, i + half) of x (batch, seq, heads, head_dim) as a complex number, turned."""
    half = x.shape[-1] // 2
    numbers = torch.complex(x[..., :half], x[..., half:])
    position = torch.arange(x.shape[1], dtype=torch.float64)[:, None, None]
    speed = torch.tensor([base ** (-2 * i / x.shape[-1]) for i in range(half)], dtype=torch.float64)
    numbers = numbers * torch.polar(torch.ones(()).double(), position * speed)
    return torch.cat([numbers.real, numbers.imag], dim=-1)


def written_out(model, x, causal, hidden=None):
    """The layers of a model on features x, from its state_dict alone."""
    config, state = model.config, dict(model.named_parameters())
    heads, head_dim, heads_kv = config.num_heads, config.head_dim, config.num_kv_heads

    def norm(name, x):
        return layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"])

    def linear(name, x):
        return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    counts = counts_of(config.branches, x.shape[1], heads, causal)[None]
    if hidden is not None:
        counts = counts * ~hidden[:, None, None]
    for i in range(config.num_layers):
        at = f"layers.{i}."
        inner = norm(f"{at}attention_norm", x)
        packed = inner @ state[f"{at}attention.in_proj_weight"].T + state[f"{at}attention.in_proj_bias"]
        q, k, v = packed.unflatten(-1, (-1, head_dim)).split([heads, heads_kv, heads_kv], dim=2)
        q, k = turned(q, config.rotary_base), turned(k, config.rotary_base)
        k, v = (y.repeat_interleave(heads // heads_kv, dim=2) for y in (k, v))
        weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(head_dim)).exp() * counts
        total = weights.sum(-1, keepdim=True)
        out = torch.einsum("bhqk,bkhd->bqhd", weights / torch.where(total == 0, 1.0, total), v).flatten(2)
        x = x + linear(f"{at}attention.out_proj", norm(f"{at}attention.layer_norm", out))
        inner = gelu(linear(f"{at}feed_forward.up", norm(f"{at}feed_forward_norm", x)))
        x = x + linear(f"{at}feed_forward.down", norm(f"{at}feed_forward.norm", inner))
    return norm("norm", x)


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

    @pytest.mark.parametrize("kind", [LongNet, LongNetLM])
    def test_checkpointing_gives_the_same_gradients(self, kind):
        options = {"dropout": 0.3, "attention_dropout": 0.2}
        plain, again = small(kind, **options), small(kind, checkpointing=True, **options)
        again.load_state_dict(plain.state_dict())
        x = tokens_of(29) if kind is LongNetLM else torch.randn(2, 29, 24, dtype=torch.float64)
        results = []
        for model in (plain, again):
            torch.manual_seed(5)
            out = model.train()(x)
            results.append([out, *torch.autograd.grad(out.square().mean(), list(model.parameters()))])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    def test_checkpointing_keeps_less(self):
        """Bytes that autograd holds between forward and backward."""
        held = {}
        for flag in (False, True):
            sizes = {}

            def pack(x, sizes=sizes):
                sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
                return x

            model = small(checkpointing=flag, num_layers=4).train()
            parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                out = model(tokens_of(64))
            held[flag] = sum(n for pointer, n in sizes.items() if pointer not in parameters)
            del out
        assert held[True] < held[False] / 4

    def test_autocast(self):
        model, tokens = small().float(), tokens_of(29)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = model(tokens)
        assert got.dtype == torch.bfloat16
        want = model(tokens)
        assert 0 < (got.float() - want).abs().max() < 0.1 * want.abs().max()


class TestCache:
    @given(st.data())
    def test_token_by_token_equals_the_whole(self, data):
        num = data.draw(st.integers(1, 3))
        changes = {
            "segment_lengths": data.draw(st.lists(st.integers(1, 20), min_size=num, max_size=num)),
            "dilation_rates": data.draw(st.lists(st.integers(1, 9), min_size=num, max_size=num)),
            "head_offsets": data.draw(st.sampled_from(["interleaved", "grouped"])),
            "num_kv_heads": data.draw(st.sampled_from([1, 2, 4])),
        }
        seq = data.draw(st.integers(2, 45))
        prompt = data.draw(st.integers(1, seq - 1))
        model, tokens = small(**changes), tokens_of(seq)
        want = model(tokens)
        cache = KVCache(model.config.branches, seq)
        close(model(tokens[:, :prompt], cache=cache), want[:, :prompt])
        for t in range(prompt, seq):
            close(model(tokens[:, t : t + 1], cache=cache), want[:, t : t + 1])
        assert cache.length == seq

    def test_a_step_reads_what_the_branches_hold_and_nothing_else(self):
        branches, heads, seq = Branches((4, 12, 20), (1, 2, 3)), 4, 60
        counts = counts_of(branches, seq, heads, causal=True)
        cache = KVCache(branches, seq)
        assert cache.slots == 20
        for t in range(seq):
            slot, real = cache._find_held(heads, torch.device("cpu"))
            assert slot.shape[1] == counts[:, t].sum(-1).max()
            for h in range(heads):
                wanted = torch.arange(seq).repeat_interleave(counts[h, t])
                assert sorted(slot[h][real[h]].tolist()) == sorted((wanted % 20).tolist())
            cache.advance(1)

    def test_memory_stops_growing_at_the_longest_segment(self):
        model = small()
        cache = KVCache(model.config.branches, 10**6)
        model(tokens_of(50), cache=cache)
        for _ in range(3):
            model(tokens_of(1), cache=cache)
        stored = [x for pair in cache._stored.values() for x in pair]
        assert [tuple(x.shape) for x in stored] == [(2, 20, 2, 6)] * 4

    def test_refusals(self):
        model = small()
        cache = KVCache(model.config.branches, 6)
        model(tokens_of(5), cache=cache)
        with pytest.raises(ValueError, match="tokens must be one a sample where a cache goes on, got 2"):
            model(tokens_of(2), cache=cache)
        model(tokens_of(1), cache=cache)
        with pytest.raises(ValueError, match="max_length must be at least the 7 tokens so far, got 6"):
            model(tokens_of(1), cache=cache)


class TestGenerate:
    def test_greedy_equals_the_uncached_forward(self):
        model, tokens = LongNetLM(SMALL).double().eval(), tokens_of(7)
        want = tokens
        for _ in range(40):
            want = torch.cat([want, model(want)[:, -1].argmax(-1, keepdim=True)], dim=1)
        assert torch.equal(model.generate(tokens, 40, temperature=0.0), want)
        assert len(want[:, 7:].unique()) > 2

    @pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (2.0, None), (0.5, 3), (1.0, 99)])
    def test_draws_follow_the_logits(self, temperature, top_k):
        logits = torch.tensor([0.3, 2.0, -1.0, 1.5, 0.9])
        drawn = _draw(logits.expand(20000, -1), temperature, top_k, torch.Generator().manual_seed(0))
        kept = logits if top_k != 3 else torch.tensor([-math.inf, 2.0, -math.inf, 1.5, 0.9])
        share = torch.bincount(drawn[:, 0], minlength=5) / 20000
        torch.testing.assert_close(share, (kept / temperature).softmax(-1), rtol=0, atol=0.015)
        assert (share[kept == -math.inf] == 0).all()

    def test_the_same_generator_draws_the_same(self):
        model, tokens = small(), tokens_of(7)
        first, second = (model.generate(tokens, 20, generator=torch.Generator().manual_seed(seed)) for seed in (3, 3))
        assert torch.equal(first, second)
        assert not torch.equal(first, model.generate(tokens, 20, generator=torch.Generator().manual_seed(4)))

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1, got 0"),
            ({"temperature": -1.0}, ValueError, "temperature must be at least 0 and finite, got -1.0"),
            ({"temperature": math.nan}, ValueError, "temperature must be at least 0 and finite, got nan"),
            ({"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
            ({"tokens": torch.zeros(5).long()}, ValueError, r"tokens must be \(batch, seq\) and not empty, got \[5\]"),
            ({"tokens": torch.zeros(1, 0).long()}, ValueError, r"and not empty, got \[1, 0\]"),
            ({"tokens": torch.zeros(1, 5)}, TypeError, "tokens must be int32 or int64, got torch.float32"),
        ],
        ids=str,
    )
    def test_bad_calls(self, options, error, message):
        with pytest.raises(error, match=message):
            small().generate(**{"tokens": tokens_of(3), "max_new_tokens": 2, **options})

    def test_not_while_training(self):
        with pytest.raises(RuntimeError, match=r"generate needs model.eval\(\)"):
            small().train().generate(tokens_of(3), 1)


class TestFiles:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
    def test_saved_and_loaded(self, tmp_path, dtype):
        model, tokens = small().to(dtype), tokens_of(29)
        model.save(tmp_path / "model.safetensors")
        again = LongNetLM.load(tmp_path / "model.safetensors").eval()
        assert again.config == SMALL
        assert {p.dtype for p in again.parameters()} == {dtype}
        assert torch.equal(again(tokens), model(tokens))
        assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]

    def test_a_changed_configuration(self, tmp_path):
        model = small(LongNet)
        model.save(tmp_path / "model.safetensors")
        longer = LongNet.load(tmp_path / "model.safetensors", segment_lengths=[100], dilation_rates=[1]).eval()
        x = torch.randn(1, 50, 24, dtype=torch.float64)
        close(longer(x), written_out(longer, x, causal=False))
        with pytest.raises(TypeError, match="width"):
            LongNet.load(tmp_path / "model.safetensors", width=3)
        with pytest.raises(RuntimeError, match="size mismatch"):
            LongNet.load(tmp_path / "model.safetensors", hidden_dim=8)
        with pytest.raises(RuntimeError, match="Missing key"):
            LongNetLM.load(tmp_path / "model.safetensors")

    def test_a_save_that_fails_leaves_the_old_file(self, tmp_path, monkeypatch):
        import safetensors.torch

        path = tmp_path / "model.safetensors"
        model = small()
        model.save(path)
        before = path.read_bytes()

        def cut(tensors, target, metadata):
            target.write_bytes(b"half")
            raise OSError("no space left")

        monkeypatch.setattr(safetensors.torch, "save_file", cut)
        with pytest.raises(OSError, match="no space left"):
            small().save(path)
        assert path.read_bytes() == before

    def test_a_file_of_someone_else(self, tmp_path):
        import safetensors.torch

        safetensors.torch.save_file({"x": torch.zeros(2)}, tmp_path / "other.safetensors")
        with pytest.raises(ValueError, match="path must be a file that this package saved"):
            LongNetLM.load(tmp_path / "other.safetensors")

    def test_without_safetensors_a_sentence_says_what_to_install(self):
        code = (
            "import sys; sys.modules['safetensors'] = None\n"
            "from dilated_attention_pytorch import LongNetLM\n"
            "LongNetLM.load('x')"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "ImportError: saving and loading need safetensors: pip install safetensors" in done.stderr


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


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dim": 20, "num_heads": 4}, ValueError, "dim must be a multiple of 2 · num_heads, got 20 and 4 heads"),
        ({"num_layers": 0}, ValueError, "num_layers must be at least 1, got 0"),
        ({"vocab_size": 2.0}, TypeError, "vocab_size must be an int, got 2.0"),
        ({"dilation_rates": (1, 2)}, ValueError, "dilation_rates"),
        ({"dropout": 1.5}, ValueError, r"dropout must be in \[0, 1\), got 1.5"),
        ({"rotary_base": 1.0}, ValueError, "rotary_base must be greater than 1, got 1.0"),
        ({"checkpointing": 1}, TypeError, "checkpointing must be True or False, got 1"),
        ({"backend": "fast"}, ValueError, "backend must be one of"),
    ],
    ids=str,
)
def test_bad_configurations(options, error, message):
    with pytest.raises(error, match=message):
        LongNetConfig(**options)
