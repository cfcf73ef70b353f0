"""Models of transformers, small and random: over a pattern they give what eager attention with its dense mask gives."""

import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from unittest import mock

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    BertConfig,
    BertModel,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    ModernBertConfig,
    ModernBertModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    ViTConfig,
    ViTModel,
)

from dilated_attention_pytorch import (  # noqa: E402
    Causal,
    DilatedBlocks,
    Documents,
    Full,
    GlobalTokens,
    LocalBlocks,
    PerHead,
    RandomBlocks,
    SlidingWindow,
)
from dilated_attention_pytorch.integrations.huggingface import register  # noqa: E402

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
GROUPED = SMALL | {"num_key_value_heads": 2}
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 9}
DECODERS = {
    "llama": (LlamaForCausalLM, LlamaConfig, GROUPED),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, GROUPED | MIXED | {"use_sliding_window": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, GROUPED | {"head_dim": 16}),
    "mistral": (MistralForCausalLM, MistralConfig, GROUPED | {"sliding_window": 9, "head_dim": 8}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, GROUPED | MIXED | {"head_dim": 16, "attn_logit_softcapping": 0.5}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, GROUPED | MIXED | {"head_dim": 16}),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig,
        GROUPED
        | MIXED
        | {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "experts_implementation": "eager"},
    ),
}
ENCODERS = {
    "bert": (BertModel, BertConfig, SMALL),
    "modernbert": (
        ModernBertModel,
        ModernBertConfig,
        SMALL | {"local_attention": 8, "layer_types": MIXED["layer_types"], "reference_compile": False},
    ),
}
SPARSE = SlidingWindow(5, 3) | GlobalTokens(2)
SEQ = 40
OURS = object()


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()


def build(kind, dtype=torch.float64, **changes):
    model_class, config_class, arguments = (DECODERS | ENCODERS)[kind]
    torch.manual_seed(0)
    config = config_class(**(arguments | changes), attn_implementation="eager")
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():  # the usual start is so near 0 that attention hardly matters
            parameter.normal_(std=0.3)
    return model.to(dtype).eval()


def tokens(batch=2, seq=SEQ):
    return torch.randint(1, 64, (batch, seq), generator=torch.Generator().manual_seed(1))


def hidden_by_model(model, layer, seq):
    """What the model itself lets see, from its configuration: bool [seq, seq]."""
    config = model.config
    back = torch.arange(seq)[:, None] - torch.arange(seq)
    causal = model.__class__.__name__.endswith("ForCausalLM")
    allowed = back >= 0 if causal else torch.ones(seq, seq, dtype=torch.bool)
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if window is not None and (kinds is None or kinds[layer] == "sliding_attention"):
        allowed = allowed & (back < window) if causal else allowed & (back.abs() <= window)
    return allowed


@lru_cache
def dense(pattern, seq):
    return torch.tensor([[pattern.allows(i, j, seq, seq) for j in range(seq)] for i in range(seq)])


class EagerWith:
    """The eager model, where each layer sees a dense mask of a pattern and of what the model hides."""

    def __init__(self, model, pattern_of, padding=None, documents=None):
        self.model = copy.deepcopy(model)
        self.model.set_attn_implementation("eager")
        self.pattern_of, self.padding, self.documents = pattern_of, padding, documents
        attentions = [m for m in self.model.modules() if hasattr(m, "is_causal") and hasattr(m, "config")]
        assert len(attentions) == model.config.num_hidden_layers
        for layer, module in enumerate(attentions):
            module.register_forward_pre_hook(self.replace(layer), with_kwargs=True)

    def replace(self, layer):
        def hook(module, args, kwargs):
            hidden_states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            seq = hidden_states.shape[1]
            allowed = hidden_by_model(self.model, layer, seq) & dense(self.pattern_of(layer), seq)
            allowed = allowed.expand(len(hidden_states), 1, seq, seq)
            if self.padding is not None:
                allowed = allowed & self.padding[:, None, None, :seq]
            if self.documents is not None:
                allowed = allowed & (self.documents[:, None, :, None] == self.documents[:, None, None, :])
            dtype = hidden_states.dtype
            mask = torch.where(allowed, torch.zeros((), dtype=dtype), torch.finfo(dtype).min)
            if len(args) > 1:
                return (args[0], mask, *args[2:]), kwargs
            return args, kwargs | {"attention_mask": mask}

        return hook

    def __call__(self, *args, **kwargs):
        with mock.patch.object(torch.nn.functional, "softmax", in_its_own_dtype):
            return self.model(*args, use_cache=False, **kwargs)[0]

    def generate(self, ids, count):
        """Greedy, without a cache."""
        for _ in range(count):
            ids = torch.cat((ids, self(ids)[:, -1:].argmax(-1)), 1)
        return ids


def in_its_own_dtype(x, dim, dtype=None):
    """Eager attention of transformers takes the softmax in float32, whatever the dtype."""
    return x.softmax(dim)


def outputs(model, *args, **kwargs):
    """Logits of a decoder, states of an encoder."""
    return model(*args, **kwargs)[0]


def generated(model, ids, count=14, **options):
    return model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None, **options)


@pytest.mark.parametrize("kind", [*DECODERS, *ENCODERS])
def test_full_is_eager_within_rounding(kind):
    """In float32 we may err as much as eager does against float64, times 4, plus one rounding."""
    model, ids = build(kind, torch.float32), tokens()
    register("full", Full())
    eager = outputs(model, ids)
    exact = outputs(copy.deepcopy(model).double(), ids)
    model.set_attn_implementation("full")
    ours = outputs(model, ids)
    bound = 4 * (eager - exact).abs().max() + torch.finfo(torch.float32).eps * exact.abs().max()
    assert (ours - exact).abs().max() <= bound


@pytest.mark.parametrize("kind", [*DECODERS, *ENCODERS])
def test_sparse_is_eager_with_the_dense_mask(kind):
    """Outputs and the gradients of all parameters."""
    model, ids = build(kind), tokens()
    oracle = EagerWith(model, lambda layer: SPARSE)
    register("sparse", SPARSE)
    model.set_attn_implementation("sparse")
    want, got = oracle(ids), outputs(model, ids)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(got, EagerWith(model, lambda layer: Full())(ids))
    flow = torch.randn(want.shape, dtype=want.dtype)
    want.backward(flow)
    got.backward(flow)
    for (name, p), q in zip(model.named_parameters(), oracle.model.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-8, atol=1e-8, msg=name)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "bert"])
def test_padding_changes_nothing(kind, side):
    """A padded row gives what it gives alone, whichever side is padded: patterns start at its first token."""
    model, ids = build(kind), tokens()
    register("sparse", SPARSE)
    model.set_attn_implementation("sparse")
    short = slice(0, 33) if side == "right" else slice(7, SEQ)
    mask = torch.zeros_like(ids)
    mask[0], mask[1, short] = 1, 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    got = outputs(model, ids, attention_mask=mask, position_ids=positions)
    torch.testing.assert_close(got[:1], outputs(model, ids[:1]), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got[1:, short], outputs(model, ids[1:, short]), rtol=1e-9, atol=1e-9)


def test_packed_documents_do_not_see_each_other():
    model, ids = build("llama"), tokens(batch=1)
    lengths = (11, 5, 24)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    register("sparse", SPARSE)
    model.set_attn_implementation("sparse")
    got = outputs(model, ids, position_ids=positions, use_cache=False)
    want = EagerWith(model, lambda layer: SPARSE, documents=documents)(ids, position_ids=positions)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("given", [{"use_cache": True}, {"use_cache": False, "attention_mask": torch.ones(1, SEQ)}])
def test_packed_documents_are_refused_where_transformers_would_join_them(given):
    """Only without a cache and a mask does transformers look at positions: documents saw each other, without a word."""
    model, positions = build("llama"), torch.cat([torch.arange(n) for n in (11, 5, 24)])[None]
    register("sparse", SPARSE)
    model.set_attn_implementation("sparse")
    with pytest.raises(ValueError, match=r"begin again at 0: .* no attention_mask .*LlamaModel got"):
        model(tokens(batch=1), position_ids=positions, **given)
    model(tokens(batch=1), position_ids=torch.arange(3, SEQ + 3)[None], **given)


def test_packed_documents_are_refused_where_a_model_keeps_positions_from_its_mask():
    """gpt-oss of transformers 5.22: its documents saw each other, whatever it was given."""
    model, positions = build("gpt_oss"), torch.cat([torch.arange(n) for n in (11, 5, 24)])[None]
    register("sparse", SPARSE)
    model.set_attn_implementation("sparse")
    with pytest.raises(ValueError, match=r"begin again at 0: .* GptOssModel got a mask that knows no positions"):
        model(tokens(batch=1), position_ids=positions, use_cache=False)
    model(tokens(batch=1), position_ids=torch.arange(3, SEQ + 3)[None], use_cache=False)


def test_a_decoder_that_looks_both_ways():
    """transformers lets a caller make a decoder an encoder; the mask says so, the module does not."""
    model, ids = build("llama"), tokens()
    model.set_attn_implementation("sdpa")
    want = outputs(model, ids, is_causal=False, use_cache=False)
    register("full", Full())
    model.set_attn_implementation("full")
    got = outputs(model, ids, is_causal=False, use_cache=False)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(got, outputs(model, ids))


def test_layers_have_patterns_of_their_own():
    model, ids = build("llama"), tokens()
    per_head = PerHead((SlidingWindow(3, 0), SlidingWindow(9, 0), Causal(), SPARSE))
    register("mixed", SPARSE, layers={0: None, 2: SlidingWindow(5, 0)})
    model.set_attn_implementation("mixed")
    patterns = [Full(), SPARSE, SlidingWindow(5, 0)]
    want = EagerWith(model, patterns.__getitem__)(ids)
    torch.testing.assert_close(outputs(model, ids), want, rtol=1e-9, atol=1e-9)
    register("mixed", per_head, layers={0: SPARSE, 1: SPARSE, 2: SPARSE})  # the default is used by no layer
    want = EagerWith(model, lambda layer: SPARSE)(ids)
    torch.testing.assert_close(outputs(model, ids), want, rtol=1e-9, atol=1e-9)


STEADY = {
    "window": SlidingWindow(7, 0),
    "window and sinks": SlidingWindow(7, 0) | GlobalTokens(3),
    "blocks": LocalBlocks(16, block_size=16, causal=True),
    "strided blocks": LocalBlocks(64, stride=2, block_size=16, causal=True) | SlidingWindow(4, 0),
}


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("pattern", STEADY.values(), ids=STEADY)
def test_generating_with_a_cache_is_computing_again(pattern, cache):
    model, ids = build("llama"), tokens()
    register("steady", pattern)
    model.set_attn_implementation("steady")
    want = EagerWith(model, lambda layer: pattern).generate(ids, 14)
    assert generated(model, ids, cache_implementation=cache).equal(want)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("kind", [k for k in DECODERS if k != "llama"])
def test_generating_inside_the_models_own_window(kind, cache):
    """Caches of sliding layers drop the keys before the window."""
    model, ids = build(kind), tokens(seq=13)
    pattern = STEADY["window and sinks"]
    register("steady", pattern)
    model.set_attn_implementation("steady")
    want = EagerWith(model, lambda layer: pattern).generate(ids, 8)
    assert generated(model, ids, 8, cache_implementation=cache).equal(want)


UNSTEADY = {
    "random": RandomBlocks(2, seed=3, block_size=16) | LocalBlocks(0, block_size=16),
    "budget": DilatedBlocks((64, 128), (1, 2), sparsity_ratio=0.3, block_size=16, causal=True),
}


@dataclass(frozen=True)
class OfLength:
    """Rows of a pattern as in a sequence of this length."""

    pattern: Any
    length: int

    def allows(self, query, key, seq_q, seq_k):
        assert seq_q == seq_k
        return self.pattern.allows(query, key, self.length, self.length)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("pattern", UNSTEADY.values(), ids=UNSTEADY)
def test_patterns_that_depend_on_the_length(pattern, cache):
    model, ids = build("llama"), tokens()
    register("unsteady", pattern)
    model.set_attn_implementation("unsteady")
    torch.testing.assert_close(outputs(model, ids), EagerWith(model, lambda layer: pattern)(ids), rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match=r"depend on the length of the sequence.*length="):
        generated(model, ids, cache_implementation=cache)
    register("unsteady", pattern, length=100)
    want = EagerWith(model, lambda layer: OfLength(pattern, 100)).generate(ids, 14)
    assert generated(model, ids, cache_implementation=cache).equal(want)
    with pytest.raises(ValueError, match="registered for length=100, got a sequence of 101"):
        model(tokens(seq=101))


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_padded_prompt_generates_what_it_generates_alone(kind, cache):
    model, ids = build(kind), tokens()
    register("steady", STEADY["window and sinks"])
    model.set_attn_implementation("steady")
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    got = generated(model, ids, attention_mask=mask, cache_implementation=cache)
    assert got[:1, 6:].equal(generated(model, ids[:1, 6:]))
    assert got[1:].equal(generated(model, ids[1:]))


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("size", [3, 8])
def test_a_padded_prompt_in_chunks(kind, cache, size):
    """A chunk of the prompt may be padding for one row, whole or in part: the row is shorter than the chunk then, which
    was an error ("lengths must be from 8"), and no row of a cache says what such a chunk sees."""
    model, ids = build(kind), tokens()
    register("steady", STEADY["window and sinks"])
    model.set_attn_implementation("steady")
    mask = torch.ones_like(ids)
    mask[0, :13] = 0
    got = generated(model, ids, 6, attention_mask=mask, cache_implementation=cache, prefill_chunk_size=size)
    assert got[:1, 13:].equal(generated(model, ids[:1, 13:], 6))
    assert got[1:].equal(generated(model, ids[1:], 6))


def test_a_cache_continued_by_several_tokens():
    model, ids = build("llama"), tokens()
    pattern = STEADY["strided blocks"]
    register("steady", pattern)
    model.set_attn_implementation("steady")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        parts = [outputs(model, part, past_key_values=cache) for part in ids.split((21, 1, 18), 1)]
    want = EagerWith(model, lambda layer: pattern)(ids)
    torch.testing.assert_close(torch.cat(parts, 1), want, rtol=1e-9, atol=1e-9)


def test_beams():
    """Beam search reorders the cache."""
    model, ids = build("llama"), tokens()
    register("full", Full())
    want = generated(model, ids, num_beams=3)
    model.set_attn_implementation("full")
    assert generated(model, ids, num_beams=3).equal(want)


def test_an_encoder_of_images():
    config = ViTConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=24, patch_size=4
    )
    model = ViTModel(config).double().eval()
    images = torch.randn(2, 3, 24, 24, dtype=torch.float64)
    model.set_attn_implementation("eager")
    want = EagerWith(model, lambda layer: SPARSE)(images)
    register("sparse", SPARSE)
    model.set_attn_implementation("sparse")
    torch.testing.assert_close(model(images)[0], want, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_compiled(kind):
    """Outside of the graph is only the making of the mask. Outputs and gradients."""
    model, ids = build(kind, num_hidden_layers=1), tokens()
    register("sparse", SPARSE)
    model.set_attn_implementation("sparse")
    compiled = torch.compile(model, backend="aot_eager")
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    want, got = (outputs(each, ids, attention_mask=mask) for each in (model, compiled))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    grads = [
        torch.autograd.grad(out.square().sum(), list(model.parameters()), materialize_grads=True, allow_unused=True)
        for out in (got, want)
    ]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)


def test_compiled_decoding_with_a_static_cache():
    """One graph for the prompt and one for all new tokens."""
    from torch._dynamo.testing import CompileCounterWithBackend

    model, ids = build("llama", num_hidden_layers=1), tokens()
    register("steady", STEADY["window and sinks"])
    model.set_attn_implementation("steady")
    want = generated(model, ids, cache_implementation="static")
    counter = CompileCounterWithBackend("aot_eager")
    model.forward = torch.compile(model.forward, backend=counter)
    assert generated(model, ids, cache_implementation="static").equal(want)
    assert counter.frame_count == 2


@pytest.mark.parametrize("kv_offset", [0, 3])
def test_a_mask_has_no_tensor_of_the_host(kv_offset):
    """A CUDA graph would refuse it. Said of another device than the default one, which has no numbers to look at."""
    from dilated_attention_pytorch.integrations.hf_mask import mask_of_call

    mask = mask_of_call(2, 1, 16, 9, kv_offset, device="meta", anchored=True, longest=None)
    names, _ = mask.__tensor_flatten__()
    assert set(names) == ({"lengths", "places"} if kv_offset else {"lengths"})
    assert {getattr(mask, name).device.type for name in names} == {"meta"}


def test_gradient_checkpointing_with_dropout():
    """What is computed again drops the same weights."""
    model, ids = build("llama", attention_dropout=0.4), tokens()
    register("sparse", SPARSE)
    model.set_attn_implementation("sparse")
    model.train()

    def grads():
        model.zero_grad()
        torch.manual_seed(5)
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in model.parameters()]

    loss, want = grads()
    model.gradient_checkpointing_enable()
    again, got = grads()
    assert loss.equal(again)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    model.eval()
    assert not torch.isclose(loss, model(ids, labels=ids).loss)


def test_trainer(tmp_path):
    """Two steps of the Trainer are two steps of the same optimiser on the eager model with the dense mask."""
    from transformers import Trainer, TrainingArguments

    ids = tokens(batch=4)
    data = [{"input_ids": row, "labels": row} for row in ids]
    model = build("llama", torch.float32)
    oracle = EagerWith(model, lambda layer: SPARSE).model
    register("sparse", SPARSE)
    model.set_attn_implementation("sparse")
    before = [p.detach().clone() for p in model.parameters()]
    for each in (model, oracle):
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=2,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            optim="sgd",
            logging_strategy="no",
        )
        Trainer(each, arguments, train_dataset=data).train()
    for start, p, q in zip(before, model.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
        assert not p.equal(start)


class TestRefused:
    """What cannot be honoured is an error that names it."""

    @pytest.fixture
    def model(self):
        model = build("llama")
        register("sparse", SPARSE)
        model.set_attn_implementation("sparse")
        return model

    def test_a_mask_of_queries_and_keys(self, model):
        mask = torch.ones(2, 1, SEQ, SEQ, dtype=torch.bool).tril()
        with pytest.raises(ValueError, match=r"mask of its own, Tensor \[2, 1, 40, 40\]"):
            model(tokens(), attention_mask=mask)

    @pytest.mark.parametrize("keyword", ["head_mask", "position_bias", "cu_seq_lens_q", "something_new"])
    def test_keywords(self, model, keyword):
        with pytest.raises(ValueError, match=f"{keyword}=.*cannot be honoured"):
            model(tokens(), **{keyword: torch.ones(3)})

    def test_weights(self, model):
        with pytest.raises(ValueError, match="output_attentions=True cannot be honoured"):
            attend(model, output_attentions=True)

    def test_no_mask_and_that_of_another(self, model):
        with pytest.raises(ValueError, match="LlamaAttention got no mask"):
            attend(model, mask=None)
        with pytest.raises(ValueError, match=r"the mask is for \[5, 5\] queries and keys, but .* got \[4, 4\]"):
            attend(model, mask=model_mask(5))

    def test_is_causal_against_the_mask(self, model):
        with pytest.raises(ValueError, match="is_causal=False, but the model's mask says True"):
            attend(model, is_causal=False)
        with pytest.raises(ValueError, match=r"sliding_window=7, but the model's mask says \(None, None\)"):
            attend(model, sliding_window=7)

    def test_rules_that_are_not_understood(self, model):
        from transformers.masking_utils import create_causal_mask

        embeds = torch.empty(1, 5, 8)
        with pytest.raises(ValueError, match="rule that is not understood: or_masks"):
            create_causal_mask(model.config, embeds, None, None, or_mask_function=lambda b, h, q, k: q == k)

    def test_cross_attention(self):
        model = build("bert", is_decoder=True, add_cross_attention=True)
        register("sparse", SPARSE)
        model.set_attn_implementation("sparse")
        with pytest.raises(ValueError, match="BertCrossAttention may attend to another"):
            model(tokens(), encoder_hidden_states=torch.randn(2, SEQ, 32, dtype=torch.float64))

    def test_a_layer_that_is_not_there(self, model):
        register("sparse", SPARSE, layers={3: None})
        with pytest.raises(ValueError, match="layers names layer 3, but the model has 3"):
            model(tokens())

    def test_documents_of_another_length(self, model):
        register("sparse", Documents((30, 10)))
        outputs(model, tokens())
        with pytest.raises(ValueError, match=r"Documents.*depend on the length"):
            generated(model, tokens())

    @pytest.mark.parametrize("name", ["eager", "sdpa", "my_flash", "paged|x", "org/kernel", ""])
    def test_names(self, name):
        with pytest.raises(ValueError, match="name must not"):
            register(name, SPARSE)

    def test_bad_arguments(self):
        with pytest.raises(TypeError, match="pattern must be a Pattern or an Adaptive, got int"):
            register("sparse", 3)
        with pytest.raises(
            ValueError, match=r"pattern must be a Pattern, an Adaptive, or a file of one .*, got 'window'"
        ):
            register("sparse", "window")
        with pytest.raises(TypeError, match=r"layers must map numbers of layers to patterns, .*, got \[0, None\]"):
            register("sparse", SPARSE, layers=[0, None])
        with pytest.raises(TypeError, match="every layer of layers must be an int"):
            register("sparse", SPARSE, layers={"0": None})
        with pytest.raises(ValueError, match="length must be at least 1"):
            register("sparse", SPARSE, length=0)
        with pytest.raises(ValueError, match="backend must be one of"):
            register("sparse", SPARSE, backend="fastest")

    def test_the_mask_is_for_us_alone(self):
        with pytest.raises(ValueError, match=r"looks into the mask that it asks for \(aten.sum"):
            model_mask(4).sum()
        with pytest.raises(ValueError, match=r"looks into the mask that it asks for \(torch\.float32\)"):
            model_mask(4).float()
        with pytest.raises(
            ValueError, match=r"looks into the mask that it asks for \(aten.add"
        ):  # no TypeError of Python
            torch.zeros(4, 4) + model_mask(4)
        with pytest.raises(ValueError, match=r"looks into the mask that it asks for \(aten.cat"):
            torch.cat([torch.ones(2, 1, 4, 4, dtype=torch.bool), model_mask(4)])
        moved = model_mask(4).to("meta")
        assert (moved.device.type, moved.lengths.device.type) == ("meta", "meta")


def attend(model, mask=OURS, **keywords):
    """The first layer's attention alone."""
    x = torch.randn(2, 4, 32, dtype=torch.float64)
    turn = torch.ones(1, 4, 8).double(), torch.zeros(1, 4, 8).double()
    mask = model_mask(4) if mask is OURS else mask
    return model.model.layers[0].self_attn(x, position_embeddings=turn, attention_mask=mask, **keywords)


def model_mask(seq):
    from transformers.masking_utils import AttentionMaskInterface

    register("sparse", SPARSE)
    return AttentionMaskInterface()["sparse"](2, seq, seq)
