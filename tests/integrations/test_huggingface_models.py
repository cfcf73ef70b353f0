"""Whole models of transformers: a pattern is honoured exactly or refused by name, in cross-attention most of all."""

import copy
import pickle
import sys
import types
import warnings
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import AttentionInterface, AttentionMaskInterface  # noqa: E402

from dilated_attention_pytorch import Full, GlobalTokens, SlidingWindow  # noqa: E402
from dilated_attention_pytorch.integrations.huggingface import register, verify  # noqa: E402
from tests import models_table, tiny_models  # noqa: E402
from tests.models_table import SPARSE, Oracle  # noqa: E402


@pytest.fixture(autouse=True)
def registered():
    transformers.logging.set_verbosity_error()
    register("sparse", SPARSE)
    AttentionInterface.register("oracle", Oracle.attend)
    AttentionMaskInterface.register("oracle", Oracle.mask)
    Oracle.sparse = True


def build(kind, name, attention="sparse") -> Any:
    return models_table.build(kind, name, attention)


def tokens(batch=2, seq=24):
    return torch.randint(10, 90, (batch, seq), generator=torch.Generator().manual_seed(1))


CROSSING = {
    "bart": "BartForConditionalGeneration",
    "mbart": "MBartForConditionalGeneration",
    "marian": "MarianMTModel",
    "pegasus": "PegasusForConditionalGeneration",
    "plbart": "PLBartForConditionalGeneration",
    "blenderbot": "BlenderbotForConditionalGeneration",
    "blenderbot-small": "BlenderbotSmallForConditionalGeneration",
    "m2m_100": "M2M100ForConditionalGeneration",
    "nllb-moe": "NllbMoeForConditionalGeneration",
    "t5gemma": "T5GemmaForConditionalGeneration",
}


class TestCrossAttention:
    """BART and its kin call their cross-attention what they call their self-attention. Where encoder and decoder were
    equally long, as both padded to a maximum, it got the pattern: the first logit no longer depended on the last token
    of the encoder. Whose keys a mask is for is known where it is made, so lengths say nothing now."""

    @pytest.mark.parametrize("kind", CROSSING)
    def test_is_refused_whatever_the_lengths(self, kind):
        model, ids = build(kind, CROSSING[kind]), tokens()
        mask = torch.ones_like(ids)
        mask[1, 17:] = 0
        calls = [
            {"input_ids": ids, "decoder_input_ids": ids},
            {"input_ids": ids, "decoder_input_ids": ids, "attention_mask": mask, "decoder_attention_mask": mask},
            {"input_ids": ids, "decoder_input_ids": ids[:, :5]},
            {"input_ids": ids[:, :1], "decoder_input_ids": ids[:, :1]},
        ]
        for call in calls:
            with pytest.raises(ValueError, match=r"\w+Attention attends to another"):
                model(**call)
        with pytest.raises(ValueError, match=r"\w+Attention attends to another"):
            model.generate(ids[:, :1], max_new_tokens=2)

    def test_of_a_bert_with_a_mask(self):
        """The mask of the encoder is as long as the decoder's own."""
        config = tiny_models.configuration("bert")
        config.is_decoder = config.add_cross_attention = True
        config._attn_implementation = "sparse"
        model, ids = transformers.BertModel(config), tokens()
        states = torch.randn(2, 24, 32)
        with pytest.raises(ValueError, match="BertCrossAttention attends to another"):
            model(ids, encoder_hidden_states=states, encoder_attention_mask=torch.ones(2, 24))

    def test_of_queries_that_are_learned(self):
        """A Q-Former with as many queries as there are patches."""
        model = build("blip_2_qformer", "Blip2QFormerModel")
        states = torch.randn(2, 8, 32, dtype=torch.float64)
        with pytest.raises(ValueError, match="Blip2QFormerMultiHeadAttention attends to another"):
            model(torch.randn_like(states), encoder_hidden_states=states, encoder_attention_mask=torch.ones(2, 8))

    def test_in_a_graph(self):
        model, ids = build("bart", "BartModel"), tokens()
        with pytest.raises(ValueError, match="BartAttention attends to another"):
            torch.compile(model, backend="eager")(ids, decoder_input_ids=ids)

    @pytest.mark.parametrize(("kind", "name"), [("bart", "BartModel"), ("moonshine", "MoonshineModel")])
    def test_an_encoder_alone_attends_to_itself(self, kind, name):
        """Moonshine's encoder asks for its mask with itself as the other sequence."""
        main = "input_ids" if kind == "bart" else "input_values"
        inputs = {main: tokens() if kind == "bart" else torch.randn(2, 9000, dtype=torch.float64)}
        ours, want = (build(kind, name, attention).get_encoder()(**inputs)[0] for attention in ("sparse", "oracle"))
        torch.testing.assert_close(ours, want, rtol=1e-9, atol=1e-9)
        Oracle.sparse = False
        assert not torch.allclose(ours, build(kind, name, "oracle").get_encoder()(**inputs)[0])

    def test_a_module_that_may_attend_to_another_says_so(self):
        """Whisper's encoder asks for no mask, with modules that its decoder has for both."""
        model = build("whisper", "WhisperModel")
        with pytest.raises(ValueError, match="WhisperAttention may attend to another, and got no mask"):
            model.get_encoder()(torch.randn(2, 80, 256, dtype=torch.float64))


BYPASSING = {
    "deberta": "DebertaModel",
    "deberta-v2": "DebertaV2Model",
    "xlnet": "XLNetModel",
    "xlm": "XLMModel",
    "flaubert": "FlaubertModel",
    "openai-gpt": "OpenAIGPTModel",
    "fsmt": "FSMTModel",
    "gptj": "GPTJForCausalLM",
    "falcon": "FalconForCausalLM",
    "gpt_neo": "GPTNeoForCausalLM",
    "bloom": "BloomModel",
    "mpnet": "MPNetModel",
    "roformer": "RoFormerModel",
    "codegen": "CodeGenForCausalLM",
    "xglm": "XGLMForCausalLM",
    "rembert": "RemBertModel",
    "luke": "LukeModel",
    "big_bird": "BigBirdModel",
}


class TestModelsThatAttendThemselves:
    """They took the name (`config._attn_implementation` said so) and computed dense attention without a word, or failed
    with "KeyError: 'sparse'" or "unsupported operand type(s) for +: 'Tensor' and 'Mask'"."""

    @pytest.mark.parametrize("kind", BYPASSING)
    def test_are_refused_by_name(self, kind):
        name = BYPASSING[kind]
        with pytest.raises(ValueError, match=rf"^{name} cannot be given a pattern: it \w+ .*attention"):
            build(kind, name)
        config = tiny_models.configuration(kind)
        config._attn_implementation = "eager"
        model = getattr(transformers, name)(config)
        with pytest.raises(ValueError, match=rf"^{name} cannot be given a pattern: it \w+ .*attention"):
            model.set_attn_implementation("sparse")
        assert model.config._attn_implementation == "eager"

    def test_from_pretrained(self, tmp_path):
        config = tiny_models.configuration("deberta")
        transformers.DebertaModel(config).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=r"^DebertaModel cannot be given a pattern"):
            transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="sparse")

    def test_a_part_can_be_given_the_name(self):
        """The speech encoder attends itself; the language model need not."""
        config = tiny_models.configuration("granite_speech")
        with pytest.raises(ValueError, match=r"GraniteSpeechModel cannot be given a pattern.*text_config"):
            transformers.GraniteSpeechModel._from_config(config, attn_implementation="sparse")
        config = tiny_models.configuration("granite_speech")
        model = transformers.GraniteSpeechModel._from_config(config, attn_implementation={"text_config": "sparse"})
        assert all(name.startswith("language_model.") for name in verify(model, {"input_ids": tokens()}))

    def test_parts_that_do_are_named_once(self):
        """Linear attention has no keys that a pattern could choose from."""
        with pytest.warns(
            UserWarning, match="KimiLinearModel holds modules that attend without the pattern: KimiLinearD"
        ):
            model = build("kimi_linear", "KimiLinearModel")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            build("kimi_linear", "KimiLinearModel")
        with pytest.raises(ValueError, match=r"KimiLinearModel .*layers.0.self_attn \(KimiLinearDeltaAttention\) ran"):
            verify(model, {"input_ids": tokens()})


UNREADABLE = """
from torch import nn
from transformers import BertConfig, PreTrainedModel

class OwnAttention(nn.Module):
    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ x

class Own(PreTrainedModel):
    config_class = BertConfig

    def __init__(self, config):
        super().__init__(config)
        self.attention = OwnAttention()
        self.post_init()

    def forward(self, x):
        return self.attention(x)
"""


def own_model():
    """A model whose source nobody can read, as one that is written in a shell."""
    module = types.ModuleType("written_in_a_shell")
    sys.modules[module.__name__] = module
    exec(UNREADABLE, vars(module))
    config = tiny_models.configuration("bert")
    config._attn_implementation = "sparse"
    return module.Own(config)


class TestWatch:
    def test_a_first_forward_without_us_is_warned_of(self):
        model, x = own_model(), torch.randn(2, 5, 8)
        with pytest.warns(UserWarning, match="Own ended a forward without a call of .* registered as 'sparse'"):
            model(x)
        assert not model._forward_hooks
        assert not model._forward_pre_hooks

    def test_a_first_forward_with_us_is_not(self):
        model = build("llama", "LlamaForCausalLM")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(tokens())
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())

    def test_copies_are_watched_as_well(self):
        model = build("llama", "LlamaForCausalLM")
        for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
            assert each._forward_hooks
            each(tokens())
            assert not each._forward_hooks

    def test_other_names_are_none_of_our_business(self):
        config = tiny_models.configuration("deberta")
        config._attn_implementation = "oracle"
        assert not transformers.DebertaModel(config)._forward_hooks


class TestVerify:
    def test_calls_of_every_layer(self):
        model = build("llama", "LlamaForCausalLM")
        assert verify(model) == {"model.layers.0.self_attn": 1, "model.layers.1.self_attn": 1}
        model.train()
        model.lm_head.eval()
        verify(model, {"input_ids": tokens()})
        assert model.model.layers[0].training
        assert not model.lm_head.training
        assert not any(module._forward_hooks for module in model.modules())

    def test_an_image(self):
        assert set(verify(build("vit", "ViTModel")).values()) == {1}

    def test_no_call(self):
        model = build("llama", "LlamaForCausalLM", "oracle")
        sentence = r"LlamaForCausalLM does not attend .*: model.layers.0.self_attn \(LlamaAttention\), .* ran without"
        with pytest.raises(ValueError, match=sentence):
            verify(model)
        with pytest.raises(ValueError, match=r"ConvNextModel does not attend .*: no module called"):
            verify(build("convnext", "ConvNextModel"), {"pixel_values": torch.randn(1, 3, 32, 32).double()})

    def test_inputs_that_cannot_be_made_up(self):
        with pytest.raises(ValueError, match=r"inputs must be given: .* Wav2Vec2Model takes as input_values"):
            verify(build("wav2vec2", "Wav2Vec2Model"))


GRADIENTS = {
    "llama4_text": ("Llama4TextModel", "input_ids"),  # chunks
    "deepseek_v2": ("DeepseekV2Model", "input_ids"),  # values are shorter than keys
    "deepseek_v3": ("DeepseekV3Model", "input_ids"),
    "clip_vision_model": ("CLIPVisionModel", "pixel_values"),  # no mask
    "siglip_vision_model": ("SiglipVisionModel", "pixel_values"),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_gradients_of_all_parameters(kind):
    name, main = GRADIENTS[kind]
    results = []
    for attention in ("sparse", "oracle"):
        model = build(kind, name, attention)
        inputs = next(each for each in tiny_models.inputs(model) if each.keys() == {main})
        out = model(**inputs)[0]
        flow = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        results.append((out, *torch.autograd.grad(out, parameters, flow, materialize_grads=True, allow_unused=True)))
    scale = max(x.abs().max().item() for x in results[1])
    for ours, want in zip(*results, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-6, atol=1e-6 * scale)


def test_no_mask_in_a_graph():
    model = build("clip_vision_model", "CLIPVisionModel")
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    want, got = (each(images)[0] for each in (model, torch.compile(model, backend="aot_eager")))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


PATTERNS = {"full": Full(), "window": SlidingWindow(5, 0), "sinks": SlidingWindow(5, 0) | GlobalTokens(2)}


class TestChunks:
    """Llama 4: a token sees its chunk of 8 alone, counted from the first token that is not padding."""

    @pytest.fixture
    def model(self):
        model = build("llama4_text", "Llama4ForCausalLM")
        assert set(model.config.layer_types) == {"chunked_attention", "full_attention"}
        assert model.config.attention_chunk_size == 8
        return model

    def test_full_is_what_the_model_computes(self, model):
        register("sparse", Full())
        Oracle.sparse = False
        oracle, ids = build("llama4_text", "Llama4ForCausalLM", "oracle"), tokens()
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        for given in ({}, {"attention_mask": mask}, {"position_ids": torch.arange(12).repeat(2)[None]}):
            ours, want = (each(ids, use_cache=False, **given).logits for each in (model, oracle))
            seen = given.get("attention_mask", torch.ones_like(ids)).bool()
            torch.testing.assert_close(ours[seen], want[seen], rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
    def test_generating_is_computing_again(self, model, pattern):
        register("sparse", pattern)
        ids = tokens()
        mask = torch.ones_like(ids)
        mask[0, :5] = 0
        options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        alone = [model.generate(row, use_cache=False, **options)[0] for row in (ids[:1, 5:], ids[1:])]
        for cache in (None, "static"):
            for size in (None, 3):
                chunks = {"cache_implementation": cache, "prefill_chunk_size": size}
                got = model.generate(ids, attention_mask=mask, **options, **chunks)
                assert got[0, 5:].equal(alone[0])
                assert got[1].equal(alone[1])
