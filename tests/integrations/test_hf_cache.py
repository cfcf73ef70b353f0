"""`PatternCache`: what a pattern no longer sees is dropped, and nothing else changes."""

import copy
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    DynamicCache,
    Llama4ForCausalLM,
    Llama4TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from dilated_attention_pytorch import (  # noqa: E402
    Causal,
    DilatedBlocks,
    Full,
    GlobalBlocks,
    GlobalTokens,
    LocalBlocks,
    PerHead,
    SlidingWindow,
    presets,
)
from dilated_attention_pytorch.integrations.huggingface import PatternCache, register  # noqa: E402
from dilated_attention_pytorch.layout.look_back import look_back  # noqa: E402
from tests.integrations.test_huggingface import GROUPED, STEADY, EagerWith, build, generated, outputs  # noqa: E402

SINKS = STEADY["window and sinks"]
BYTES = 2 * 8 * 8  # of a token and row, in a layer of 2 key heads × 8 in float64, keys or values


def tokens(batch=2, seq=90):
    return torch.randint(1, 64, (batch, seq), generator=torch.Generator().manual_seed(1))


def given_a_pattern(kind="llama", pattern=SINKS, layers=None, **changes):
    model = build(kind, max_position_embeddings=512, **changes)
    register("kept", pattern, layers=layers)
    model.set_attn_implementation("kept")
    return model


def storage(cache):
    """Bytes of the memory behind the keys and values of each layer, whatever of it they show."""
    return [
        sum(x.untyped_storage().nbytes() for x in {id(x): x for x in (layer.keys, layer.values)}.values())
        for layer in cache.layers
    ]


def most(look_back):
    """Tokens that a layer may hold between calls: what must be kept, an eighth of it, and what is not a whole step."""
    needed = look_back.first + look_back.back
    return needed + needed // 8 + look_back.step


def steady():
    """Patterns whose rows are those of a place, with a bound."""
    windows = st.builds(SlidingWindow, st.integers(0, 20), st.just(0))
    sinks = st.builds(GlobalTokens, st.integers(1, 9), st.booleans())
    blocks = st.builds(LocalBlocks, st.integers(0, 40), st.integers(1, 2), st.just(16), st.booleans())
    first = st.builds(GlobalBlocks, st.integers(1, 20), st.just(16))
    segments = st.just(DilatedBlocks((32, 48), (1, 2), block_size=16))
    alone = windows | sinks | blocks | segments | first
    return alone | st.builds(lambda a, b: a | b, windows, alone) | st.builds(lambda a, b: a & b, alone, alone)


@st.composite
def runs(draw):
    """Patterns of three layers, the tokens of each call, and the padding of two rows."""
    patterns = [draw(steady()) for _ in range(3)]
    if draw(st.booleans()):
        patterns[draw(st.integers(0, 2))] = Full()
    if draw(st.booleans()):
        patterns[0] = PerHead(tuple(draw(steady()) for _ in range(4)))
    parts = [draw(st.integers(1, 60)), *draw(st.lists(st.sampled_from([1, 1, 1, 2, 7, 25]), max_size=25))]
    padding = draw(st.sampled_from([(0, 0), (0, 0), (5, 0), (0, 40), (33, 12)]))
    return patterns, parts, padding


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(runs(), st.sampled_from(["llama", "mistral"]))
@torch.no_grad()
def test_logits_are_those_of_the_whole_sequence_and_memory_is_bounded(run, kind):
    patterns, parts, padding = run
    model = MODELS[kind]
    register("kept", patterns[0], layers=dict(enumerate(patterns)))
    model.set_attn_implementation("kept")
    seq = sum(parts)
    ids, mask = tokens(seq=seq), torch.ones(2, seq, dtype=torch.int64)
    for row, count in enumerate(padding):
        mask[row, : min(count, seq - 1)] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    want = outputs(model, ids, attention_mask=mask, position_ids=positions, use_cache=False)
    if kind == "llama" and all(look_back(pattern) is None for pattern in patterns):
        return
    cache, got, done = PatternCache(model.config), [], 0
    for part in parts:
        here, done = slice(done, done + part), done + part
        got.append(
            outputs(
                model,
                ids[:, here],
                attention_mask=mask[:, :done],
                position_ids=positions[:, here],
                past_key_values=cache,
            )
        )
        assert cache.get_seq_length() == done
        for held, kept in zip(storage(cache), cache.kept, strict=True):
            at_most = done if kept.look_back is None else min(done, most(kept.look_back))
            assert held <= 2 * 2 * at_most * BYTES
        assert cache.nbytes == sum(storage(cache))
    seen = mask.bool()
    torch.testing.assert_close(torch.cat(got, 1)[seen], want[seen], rtol=1e-9, atol=1e-9)


MODELS = {
    "llama": build("llama", max_position_embeddings=1024),
    "mistral": build("mistral", max_position_embeddings=1024),
}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "gemma2", "gemma3", "gpt_oss"])
def test_generating(kind):
    """The tokens that the eager model chooses under a dense mask, computing everything again for each."""
    model, ids = given_a_pattern(kind), tokens(seq=30)
    cache = PatternCache(model.config)
    want = EagerWith(model, lambda layer: SINKS).generate(ids, 16)
    assert generated(model, ids, 16, past_key_values=cache).equal(want)
    bytes_of_token = BYTES * cache.layers[0].keys.shape[3] // 8
    for held in storage(cache):
        assert held <= 2 * 2 * (3 + 8 + 2) * bytes_of_token < 2 * 2 * 45 * bytes_of_token


@pytest.mark.parametrize("chunk", [None, 3, 8])
@pytest.mark.parametrize("pattern", STEADY.values(), ids=STEADY)
def test_generating_with_padding_on_the_left(pattern, chunk):
    """A chunk of the prompt may be padding for one row, whole or in part."""
    model, ids = given_a_pattern(pattern=pattern), tokens(seq=70)
    mask = torch.ones_like(ids)
    mask[0, :31] = 0
    got = generated(
        model, ids, 30, attention_mask=mask, past_key_values=PatternCache(model.config), prefill_chunk_size=chunk
    )
    assert got[:1, 31:].equal(generated(model, ids[:1, 31:], 30))
    assert got[1:].equal(generated(model, ids[1:], 30))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "how", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"num_beams": 4, "num_return_sequences": 2}], ids=str
)
def test_beams_and_tokens_that_are_taken_back(how, padded):
    """Beam search reorders the rows; speculative decoding takes back the tokens that it guessed wrong."""
    batch = 1 if "prompt_lookup_num_tokens" in how else 2
    model, ids = given_a_pattern(), tokens(batch).repeat(1, 2)[:, :120]
    mask = torch.ones_like(ids)
    mask[0, :50] = 1 - padded
    want = generated(model, ids, 30, attention_mask=mask, **how)
    cache = PatternCache(model.config)
    assert generated(model, ids, 30, attention_mask=mask, past_key_values=cache, **how).equal(want)
    assert cache.get_seq_length() == want.shape[1] - 1


@torch.no_grad()
def test_taking_back():
    model, ids = given_a_pattern(), tokens()
    cache = PatternCache(model.config)
    cache.activate_past_recording()
    want = outputs(model, ids, use_cache=False)
    for first, stop in ((0, 50), (50, 63), (58, 62), (62, 63), (63, 90)):
        seen = cache.get_seq_length()
        cache.crop(first - seen)
        got = outputs(model, ids[:, first:stop], past_key_values=cache)
        torch.testing.assert_close(got, want[:, first:stop], rtol=1e-9, atol=1e-9)
    cache.crop(0)
    assert storage(cache) == [2 * 2 * (3 + 7) * BYTES] * 3
    with pytest.raises(RuntimeError, match="cannot go back to 88 tokens: keys that they see were dropped at 90"):
        cache.crop(-2)
    with pytest.raises(ValueError, match="tokens_to_remove must be negative or 0, got 2"):
        cache.crop(2)
    cache.reset()
    torch.testing.assert_close(outputs(model, ids, past_key_values=cache), want, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_rows_that_are_chosen_and_repeated():
    model, ids = given_a_pattern(), tokens()
    mask = torch.ones_like(ids)
    mask[0, :40] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = PatternCache(model.config)
    last = {"attention_mask": mask, "position_ids": positions[:, 89:]}
    first = {"attention_mask": mask[:, :89], "position_ids": positions[:, :89]}
    outputs(model, ids[:, :89], past_key_values=cache, **first)
    want = outputs(model, ids[:, 89:], past_key_values=copy.deepcopy(cache), **last)
    for change, rows in (
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
        (lambda cache: cache.batch_select_indices(torch.tensor([True, False])), [0]),
        (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
    ):
        changed = copy.deepcopy(cache)
        change(changed)
        options = {name: x[rows] for name, x in last.items()}
        got = outputs(model, ids[rows, 89:], past_key_values=changed, **options)
        torch.testing.assert_close(got, want[rows], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("pattern", "layers", "words"),
    [
        (presets.mistral(20), None, "3 layers: 3 keep 0 first and 19 last tokens"),
        (presets.streaming_llm(window=20, sinks=4), None, "3 layers: 3 keep 4 first and 19 last tokens"),
        (
            presets.mistral(20),
            presets.gemma3(3, window=20, every=2),
            "3 layers: 2 keep 0 first and 19 last tokens, 1 keep all",
        ),
    ],
)
def test_presets(pattern, layers, words):
    model, ids = given_a_pattern(pattern=pattern, layers=layers), tokens()
    cache = PatternCache(model.config)
    assert repr(cache) == f"PatternCache({words})"
    assert generated(model, ids, 30, past_key_values=cache).equal(generated(model, ids, 30))
    assert [kept.look_back is None for kept in cache.kept] == [held == 2 * 2 * 119 * BYTES for held in storage(cache)]


def test_chunks_of_the_model():
    """Llama 4 counts chunks from the first token of a row."""
    config = Llama4TextConfig(
        **GROUPED | {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 12},
        layer_types=["chunked_attention", "full_attention", "chunked_attention"],
        no_rope_layers=[1, 0, 1],
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = Llama4ForCausalLM(config).double().eval()
    register("kept", SINKS)
    model.set_attn_implementation("kept")
    ids = tokens(seq=40)
    for padding in (0, 5):
        mask = torch.ones_like(ids)
        mask[0, :padding] = 0
        cache = PatternCache(model.config)
        got = generated(model, ids, 20, attention_mask=mask, past_key_values=cache)
        assert got.equal(generated(model, ids, 20, attention_mask=mask, past_key_values=DynamicCache()))
        assert max(storage(cache)) <= 2 * 2 * (3 + 11 + 1) * BYTES


def test_layers_without_keys():
    """Linear attention keeps a state, as before."""
    config = Qwen3NextConfig(
        **GROUPED | {"num_hidden_layers": 2, "head_dim": 8},
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    )  # fmt: skip
    model = Qwen3NextForCausalLM(config).eval()
    register("kept", SINKS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it attends without the pattern, and is said to
        model.set_attn_implementation("kept")
    cache, ids = PatternCache(model.config), tokens(seq=30)
    assert repr(cache) == "PatternCache(2 layers: 1 have no keys, 1 keep 3 first and 7 last tokens)"
    assert generated(model, ids, 8, past_key_values=cache).equal(generated(model, ids, 8))


@pytest.mark.slow
@torch.no_grad()
def test_compiled():
    model, ids = given_a_pattern(num_hidden_layers=1), tokens(seq=40)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    compiled = torch.compile(model, backend="aot_eager")
    for each in (model, compiled):
        cache, parts, done = PatternCache(model.config), [], 0
        for part in (30, 1, 1):
            here, done = slice(done, done + part), done + part
            options = {"attention_mask": mask[:, :done], "position_ids": positions[:, here]}
            parts.append(outputs(each, ids[:, here], past_key_values=cache, **options))
        if each is model:
            want = torch.cat(parts, 1)
    torch.testing.assert_close(torch.cat(parts, 1), want, rtol=1e-10, atol=1e-10)


class TestRefused:
    """What the cache cannot do is an error that names it."""

    @torch.no_grad()
    def test_another_pattern_than_it_was_made_for(self):
        model, ids = given_a_pattern(), tokens()
        cache = PatternCache(model.config)
        register("kept", SlidingWindow(30, 0) | GlobalTokens(3))
        with pytest.raises(ValueError, match=r"made for Or.*left=7.*layer 0 attends over Or.*left=30.*make another"):
            model(ids, past_key_values=cache)

    @torch.no_grad()
    def test_another_attention(self):
        """One that knows nothing of what is dropped would attend to other tokens, without a word."""
        model, ids = given_a_pattern(), tokens()
        cache = PatternCache(model.config)
        model(ids, past_key_values=cache)
        model.set_attn_implementation("sdpa")
        with pytest.raises(ValueError, match="was told of 90 tokens and given 91: the model must attend by"):
            model(ids[:, :1], past_key_values=cache)

    @pytest.mark.parametrize("name", ["sdpa", "eager"])
    def test_a_model_without_a_pattern(self, name):
        model = given_a_pattern()
        model.set_attn_implementation(name)
        with pytest.raises(ValueError, match=f"given the name of a registered pattern, got '{name}'"):
            PatternCache(model.config)

    def test_what_is_no_configuration(self):
        with pytest.raises(TypeError, match=r"config must be the configuration of a model, as in model\.config, got"):
            PatternCache("kept")

    @pytest.mark.parametrize("pattern", [Full(), Causal(), SlidingWindow(7, 0) | Causal()])
    def test_patterns_that_look_back_without_bound(self, pattern):
        model = given_a_pattern(pattern=pattern)
        with pytest.raises(ValueError, match="'kept' looks back without bound in every layer"):
            PatternCache(model.config)
        register("kept", pattern, layers={1: SlidingWindow(7, 0)})
        if pattern == Full():
            PatternCache(model.config)
        else:
            with pytest.warns(UserWarning, match="look back without bound: PatternCache keeps all of their keys"):
                PatternCache(model.config)

    def test_a_window_of_the_model_is_a_bound(self):
        model = given_a_pattern("mistral", Full())
        assert repr(PatternCache(model.config)) == "PatternCache(3 layers: 3 keep 0 first and 8 last tokens)"

    @torch.no_grad()
    def test_padding_that_changes(self):
        model, ids = given_a_pattern(), tokens()
        cache = PatternCache(model.config)
        mask = torch.ones_like(ids)
        mask[1, :5] = 0
        model(ids[:, :80], attention_mask=mask[:, :80], past_key_values=cache)
        with pytest.raises(ValueError, match="row 1 began at token 5, and now begins at 0"):
            model(ids[:, 80:], past_key_values=cache)
        with pytest.raises(ValueError, match="a cache of 2 rows cannot go on with 1"):
            model(ids[1:, 80:], attention_mask=mask[1:], past_key_values=cache)

    def test_gradients(self):
        model = given_a_pattern()
        with pytest.raises(RuntimeError, match=r"for generating: use torch\.no_grad"):
            model(tokens(), past_key_values=PatternCache(model.config))

    def test_models_whose_layers_share_keys(self):
        model = given_a_pattern()
        config = copy.deepcopy(model.config)
        config.num_kv_shared_layers = 1
        with pytest.raises(ValueError, match="layers each have keys of their own, got a llama"):
            PatternCache(config)
