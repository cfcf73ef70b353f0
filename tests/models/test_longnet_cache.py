"""LongNet's cache: whatever the parts that a sequence comes in, the result is that of the whole."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention_pytorch import Branches
from dilated_attention_pytorch.models import KVCache, LongNetDecoderLayer
from dilated_attention_pytorch.models.longnet import Rotary
from tests.longnet import SMALL, close, counts_of, small, tokens_of


def cut(tokens, sizes):
    """The tokens in parts of these sizes, and the rest."""
    return [part for part in tokens.split([*sizes, tokens.shape[1] - sum(sizes)], dim=1) if part.shape[1]]


# What a cache of four samples, of SMALL in float64, cannot go on with: the model, its tokens, the message.
OTHERS = {
    "fewer samples": ({}, (1, 1), "a cache goes on with the same samples, 4, got 1"),
    "more samples": ({}, (8, 1), "a cache goes on with the same samples, 4, got 8"),
    "several tokens of fewer": ({}, (1, 3), "a cache goes on with the same samples, 4, got 1"),
    "key heads": ({"num_kv_heads": 1}, (4, 1), "a cache goes on with the same key heads, 2, got 1"),
    "head_dim": ({"dim": 48}, (4, 1), "a cache goes on with the same features of a head, 6, got 12"),
    "fewer layers": ({"num_layers": 1}, (4, 1), "cache must be of a model with 1 layers, got one of 2"),
    "more layers": ({"num_layers": 3}, (4, 1), "cache must be of a model with 3 layers, got one of 2"),
    "branches": ({"segment_lengths": (4, 8, 20)}, (4, 1), r"cache must be of a model with .*\(4, 8, 20\).*, got"),
    "offsets": ({"head_offsets": "grouped"}, (4, 2), "cache must be of a model with .*'grouped'.*, got one with"),
    "beyond": ({}, (4, 7), "max_length must be at least the 12 tokens so far, got 11"),
}  # fmt: skip


class TestCache:
    @given(st.data())
    @settings(max_examples=30)
    def test_whatever_the_parts_the_logits_are_those_of_the_whole(self, data):
        """After a cache, two tokens got the attention of the first of them, both."""
        num = data.draw(st.integers(1, 3))
        segments = data.draw(st.lists(st.integers(1, 20), min_size=num, max_size=num))
        changes = {
            "segment_lengths": segments,
            "dilation_rates": [data.draw(st.integers(1, min(w, 8))) for w in segments],
            "head_offsets": data.draw(st.sampled_from(["interleaved", "grouped"])),
            "num_kv_heads": data.draw(st.sampled_from([1, 2, 4])),
        }
        seq = data.draw(st.integers(2, 45))
        sizes = []
        while sum(sizes) < seq:
            most = seq - sum(sizes)
            sizes.append(data.draw(st.integers(1, most) | st.just(1) | st.integers(1, min(most, 4))))
        model, tokens = small(**changes), tokens_of(seq)
        cache = KVCache(model.config.branches, seq)
        got = [model(part, cache=cache) for part in cut(tokens, sizes)]
        close(torch.cat(got, dim=1), model(tokens))
        assert cache.length == seq

    @pytest.mark.parametrize("sizes", [(1, 1), (5, 1, 3), (30, 30), (45, 2)], ids=str)
    def test_gradients_through_a_cache_are_those_of_the_whole(self, sizes):
        model, tokens = small(), tokens_of(61)
        cache = KVCache(model.config.branches, 61)
        parameters = list(model.parameters())
        got = torch.cat([model(part, cache=cache) for part in cut(tokens, sizes)], dim=1)
        grads = [torch.autograd.grad(y.square().mean(), parameters) for y in (got, model(tokens))]
        for a, b in zip(*grads, strict=True):
            close(a, b)

    @pytest.mark.parametrize("cross", [False, True])
    @pytest.mark.parametrize("first", [1, 7, 25])
    @pytest.mark.parametrize("new", [1, 2, 5, 23])
    def test_a_layer_after_a_cache(self, new, first, cross):
        layer = LongNetDecoderLayer(SMALL, cross_attention=cross).double().eval()
        x, memory = (torch.randn(2, n, 24, dtype=torch.float64) for n in (first + new, 6))
        options = {"memory": memory} if cross else {}
        want = layer(x, Rotary.of(0, first + new, SMALL, x.device), **options)
        cache, got = KVCache(SMALL.branches, 50), []
        for begin, part in ((0, x[:, :first]), (first, x[:, first:])):
            rotary = Rotary.of(begin, part.shape[1], SMALL, x.device)
            got.append(layer(part, rotary, cache=cache, layer=3, **options))
            cache.advance(part.shape[1])
        close(torch.cat(got, dim=1), want)

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

    @pytest.mark.parametrize("name", OTHERS)
    def test_a_cache_of_something_else_is_refused_and_stays_as_it_was(self, name):
        """One sample after a cache of four came back as four; a model with other branches was told other keys."""
        changes, (batch, new), message = OTHERS[name]
        model, tokens = small(), tokens_of(6, batch=4)
        cache = KVCache(model.config.branches, 11)
        model(tokens[:, :5], cache=cache)
        with pytest.raises(ValueError, match=message):
            small(**changes)(tokens_of(new, batch), cache=cache)
        close(model(tokens[:, 5:], cache=cache), model(tokens)[:, 5:])

    @pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16, torch.device("meta")], ids=str)
    @pytest.mark.parametrize("new", [1, 3])
    def test_a_cache_of_another_dtype_or_device_is_refused(self, kind, new):
        model, tokens = small(), tokens_of(8)
        cache = KVCache(model.config.branches, 8)
        model(tokens[:, :5], cache=cache)
        name = "device" if isinstance(kind, torch.device) else "dtype"
        had = "cpu" if name == "device" else "torch.float64"
        other = small().to(kind)
        with pytest.raises(ValueError, match=f"a cache goes on with the same {name}, {had}, got {kind}"):
            other(tokens[:, :new].to(next(other.parameters()).device), cache=cache)
        close(model(tokens[:, 5:], cache=cache), model(tokens)[:, 5:])

    @pytest.mark.parametrize("new", [1, 3])
    def test_a_call_that_failed_on_its_way_ends_the_cache(self, new, monkeypatch):
        """Its first layer has the new tokens, its second not: to go on would mix two lengths."""
        model, tokens = small(), tokens_of(25)
        cache = KVCache(model.config.branches, 40)
        model(tokens, cache=cache)

        def fail(*args, **kwargs):
            raise MemoryError("no memory left")

        with monkeypatch.context() as patch:
            patch.setattr(model.layers[1], "forward", fail)
            with pytest.raises(MemoryError):
                model(tokens_of(new), cache=cache)
        with pytest.raises(RuntimeError, match=f"25 tokens in every layer, but layer 0 has {25 + new}: a call before"):
            model(tokens_of(new), cache=cache)

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
    def test_copies_go_on_by_themselves(self, copied):
        """One beginning, several continuations."""
        model, (first, *others) = small(), [tokens_of(9) for _ in range(3)]
        cache = KVCache(model.config.branches, 40)
        with torch.no_grad():
            model(first, cache=cache)
        for other in others:
            again = copied(cache)
            for part in cut(other, (1, 5)):
                got = model(part, cache=again)
            close(got, model(torch.cat([first, other], dim=1))[:, -got.shape[1] :])
        assert cache.length == 9

    def test_two_layers_of_one_number_are_refused(self):
        layers = [LongNetDecoderLayer(SMALL).double().eval() for _ in range(2)]
        x, rotary = torch.randn(2, 9, 24, dtype=torch.float64), Rotary.of(0, 9, SMALL, torch.device("cpu"))
        cache = KVCache(SMALL.branches, 20)
        layers[0](x, rotary, cache=cache)
        with pytest.raises(RuntimeError, match=r"0 tokens in every layer, but layer 0 has 9: .* two layers have one"):
            layers[1](x, rotary, cache=cache)
        layers[1](x, rotary, cache=cache, layer=1)
        cache.advance(9)
        with pytest.raises(ValueError, match=r"layer must be one that the cache has keys of, \[0, 1\], got 2"):
            layers[0](x, rotary, cache=cache, layer=2)

    def test_not_while_training(self):
        """Dropout of attention weights would have been in the beginning and not in what follows."""
        model = small(attention_dropout=0.5).train()
        with pytest.raises(RuntimeError, match=r"a cache needs eval\(\): dropout belongs to training"):
            model(tokens_of(3), cache=KVCache(model.config.branches, 6))

    def test_positions_are_those_of_the_tokens(self):
        """A rotary of one token would turn all of them alike."""
        layer, x = LongNetDecoderLayer(SMALL).double(), torch.randn(2, 9, 24, dtype=torch.float64)
        for seq in (1, 8, 10):
            with pytest.raises(ValueError, match=f"rotary must be of the 9 tokens of x, got {seq}"):
                layer(x, Rotary.of(0, seq, SMALL, x.device))
