"""Every model class of transformers with a tiny random configuration, and inputs for it.

A configuration is the default one of its class with smaller numbers (`RULES`), a few of its layers, one of each kind,
and what single models need beside (`OWN`). Inputs are made up from the names of the parameters of `forward`.
"""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.models.auto import configuration_auto, modeling_auto

VOCABULARY = 128  # ids from 100 on are special tokens
LAYERS = r"(num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|depth|\w*_layers|layers|num_blocks?)"

# Integers of a configuration, by name: at most so large. The first rule that fits counts.
RULES = {
    r"\w*vocab_size\w*": VOCABULARY,
    r"n_group|topk_group|num_expert_group": 1,
    r"num_experts_per_tok(en)?|moe_k|top_k|moe_topk|num_key_value_heads|(num_)?kv_heads": 2,
    r"n_routed_experts|(num|num_local|moe_num)_experts": 4,
    r"\w*attention_heads|n_heads?|num_heads|index_n_heads|linear_num_\w*heads|mamba_(n|num)_heads": 4,
    r"(\w*_)?head_dim|d_kv|dim_head|d_head|mamba_d_head|rotary_dim": 8,
    r"sliding_window|local_attention|attention_chunk_size|window_size|patch_size": 8,
    r"\w*lora_rank": 16,
    r"(\w*_)?hidden_(size|dim|dimension)|d_model|n_embd|embed_dim|dim|d_embed|codebook_dim": 32,
    r"\w*embedding_(size|dim)|(\w*_)?proj\w*_(dim|size)": 32,
    r"image_size|crop_size|emb_dim|width": 32,
    r"\w*intermediate_(size|dim)|\w*ffn_dim|d_ff|ffn_\w*size|mlp_dim|[dn]_inner|feed_forward_\w*|dim_feedforward": 48,
    r"max_position_embeddings|n_positions|max_\w*_positions|max_seq\w*|model_max_length|seq_length|n_ctx": 128,
    LAYERS: 2,
}


def classes() -> dict[str, list[str]]:
    """Names of the model classes of each model type, from the base class to the heads."""
    found: dict[str, dict[str, None]] = {kind: {} for kind in modeling_auto.MODEL_MAPPING_NAMES}
    for name in sorted(vars(modeling_auto), key=lambda name: name != "MODEL_MAPPING_NAMES"):
        if re.fullmatch(r"MODEL_\w*NAMES", name):
            for kind, models in getattr(modeling_auto, name).items():
                for model in [models] if isinstance(models, str) else models:
                    found.setdefault(kind, {})[model] = None
    return {kind: list(models) for kind, models in found.items()}


def configuration(kind: str, model_class: Any = None) -> PreTrainedConfig:
    """Of a model type, or of a class that is listed for the type and takes a part of its configuration."""
    config_class = configuration_auto.CONFIG_MAPPING[kind]
    own = getattr(model_class, "config_class", None) or config_class
    return smaller((config_class if issubclass(config_class, own) else own)())


def smaller(config: PreTrainedConfig) -> PreTrainedConfig:
    arguments: dict[str, Any] = {}
    fields = {field.name for field in dataclasses.fields(type(config))}
    values = {name: value for name, value in vars(config).items() if name in fields and value is not None}
    for name, value in values.items():
        if type(value) is int:
            arguments[name] = small(name, value)
        elif isinstance(value, PreTrainedConfig):
            arguments[name] = smaller(value)
    if arguments.get("num_key_value_heads") and values["num_key_value_heads"] == values.get("num_attention_heads"):
        arguments["num_key_value_heads"] = arguments["num_attention_heads"]
    if "pad_token_id" in fields and values.get("pad_token_id") is None:
        arguments["pad_token_id"] = 0
    arguments |= few_layers(values) | rope(values)
    own = OWN.get(config.model_type, {})
    return type(config)(**(arguments | (own(values) if callable(own) else own)))


def small(name: str, value: int) -> int:
    if re.fullmatch(r"\w*_token_(id|index)|\w*token_id", name):
        return value if value < 100 else 100 + sum(map(ord, name)) % 28
    most = next((most for rule, most in RULES.items() if re.fullmatch(rule, name)), value)
    return min(value, most)


def few_layers(values: dict[str, Any]) -> dict[str, Any]:
    """One layer of each kind, two at least; lists with an entry for each layer become as short."""
    number = next((n for n in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if n in values), None)
    if number is None or not isinstance(values[number], int) or values[number] < 3:
        return {}
    per_layer = {
        name: value
        for name, value in values.items()
        if isinstance(value, list | tuple) and len(value) == values[number]
    }
    kinds = next((per_layer[name] for name in ("layer_types", "layers_block_type") if name in per_layer), None)
    kept = [0, values[number] - 1] if kinds is None else [list(kinds).index(kind) for kind in dict.fromkeys(kinds)]
    kept = sorted(kept) if len(kept) > 1 else [0, values[number] - 1]
    return {number: len(kept)} | {name: [value[layer] for layer in kept] for name, value in per_layer.items()}


def rope(values: dict[str, Any]) -> dict[str, Any]:
    """A rotation by several positions takes apart what is rotated of a head of 8."""
    parameters = values.get("rope_parameters")
    if not isinstance(parameters, dict) or "rope_theta" not in parameters:
        return {}
    half = int(4 * parameters.get("partial_rotary_factor", 1))
    sections = [half - 2 * (half // 3), half // 3, half // 3]
    return {"rope_parameters": parameters | {"mrope_section": sections}}


OWN: dict[str, Any] = {
    "autoformer": {"prediction_length": 8, "context_length": 16},
    "informer": {"prediction_length": 8, "context_length": 16},
    "time_series_transformer": {"prediction_length": 8, "context_length": 16},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_ssm": 64},
    "mamba2": {"num_heads": 8},
    "bridgetower": {"hidden_size": 128},
    "chameleon": {"vocabulary_map": {"<image>": 100}},
    "emu3": {"vocabulary_map": {"<image>": 100}},
    "esm": {"vocab_size": 33},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "hunyuan_vl_text": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 16},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (4, 6), "attn_layers": ["local", "lsh"]},
    "swin": {"image_size": 32, "window_size": 4, "depths": [1, 1], "num_heads": [2, 4], "patch_size": 4},
    "swinv2": {"embed_dim": 32, "window_size": 4, "depths": [1, 1], "num_heads": [2, 4], "patch_size": 4},
    "donut-swin": {"embed_dim": 32, "window_size": 4, "depths": [1, 1], "num_heads": [2, 4], "patch_size": 4},
    "maskformer-swin": {"embed_dim": 32, "window_size": 4, "depths": [1, 1], "num_heads": [2, 4], "patch_size": 4},
    "swin2sr": {"embed_dim": 32, "window_size": 4, "depths": [1, 1], "num_heads": [2, 4], "patch_size": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 0},
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1]},
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": ["linear_attention", "full_attention"]},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "nemotron_h": {
        "layers_block_type": ["full_attention", "moe", "mlp"],
        "mamba_num_heads": 8,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 16,
    },
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"],
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_ngroups": 1,
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [48] * 4,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "hidden_size_per_layer_input": 8,
    },
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
        },
        "layer_types": ["full_attention"] * 2,
    },
    "longcat_flash": {
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "qk_head_dim": 16,
        "head_dim": 8,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "expert_ffn_hidden_size": 16,
        "num_key_value_heads": 4,
    },
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "inkling_text": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "d_rel": 4,
        "rel_extent": 32,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ple_embed_dim": 16,
        "hc_lowrank": 8,
        "ngram_vocab_size_base": 64,
        "split_ngram_parts": 1,
    },
    "mistral_large4_text": {
        "kv_source_layers": [0, 1],
        "num_key_value_heads": 4,
        "qk_head_dim": 16,
        "first_k_dense_replace": 1,
        "no_rope_layers": [1, 1],
        "index_topk": 16,
    },
    "neomme": {"head_dim": 16, "num_attention_heads": 2},
    "mimi": {"upsample_groups": 32, "num_key_value_heads": 4, "layer_scale_initial_scale": 1.0, "num_filters": 8},
    "pocket_tts_audio_tokenizer": {
        "upsample_groups": 32,
        "num_key_value_heads": 4,
        "layer_scale_initial_scale": 1.0,
        "num_filters": 8,
    },
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "owlvit_text_model": {"max_position_embeddings": 32},
    "owlv2_text_model": {"max_position_embeddings": 32},
    "blip-2": {"num_query_tokens": 8, "image_token_index": 100},
    "instructblip": {"num_query_tokens": 8, "image_token_index": 100},
    "patchtsmixer": {"self_attn": True},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "sam3_lite_text_text_model": {"num_hidden_layers": 4},
    "xmod": {"default_language": "en_XX"},
    "qwen2_5_vl_vision": {"window_size": 32, "fullatt_block_indexes": (1,), "out_hidden_size": 32},
    "exaone4_5_vision": {"window_size": 32, "fullatt_block_indexes": (1,), "out_hidden_size": 32},
    "audio-spectrogram-transformer": {"max_length": 64, "num_mel_bins": 32},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4},
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "num_dense_layers": 1},
    "lw_detr_vit": {"image_size": 64, "num_windows": 4, "pretrain_image_size": 64},
    "vitpose_backbone": {"image_size": (32, 32)},
    "siglip2_vision_model": {"num_patches": 16},
    "vision-text-dual-encoder": {"projection_dim": 32},
}


def inputs(model: Any, batch: int = 2, seq: int = 24) -> Iterator[dict[str, Any]]:
    """Keyword arguments that `forward` might take, from few to many: the first that it takes are right."""
    made = made_up(model.config, model.dtype, batch, seq)
    parameters = inspect.signature(model.forward).parameters.values()
    names = {parameter.name for parameter in parameters}
    required = {p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    for base in BASES:
        for more in ((), ("bbox",), ("decoder_input_ids",), ("bbox", "decoder_input_ids")):
            wanted = dict.fromkeys((*base, *more, *sorted(required)))
            if names.issuperset(wanted) and made.keys() >= wanted.keys():
                for choice in product(*(made[name] for name in wanted)):
                    yield dict(zip(wanted, choice, strict=True))


BASES = (
    ("input_ids",),
    ("pixel_values",),
    ("input_ids", "pixel_values"),
    ("input_values",),
    ("input_features",),
    ("input_ids", "input_features"),
    ("input_features", "input_features_mask"),
    ("pixel_values_videos",),
    ("past_values",),
    ("pixel_values", "pixel_attention_mask", "spatial_shapes"),
    ("input_ids", "pixel_values", "pixel_attention_mask", "spatial_shapes"),
    ("input_ids", "pixel_values", "image_attention_mask"),
    ("query_embeds",),
    ("hidden_states",),
    ("inputs_embeds",),
    (),
)


def made_up(config: PreTrainedConfig, dtype: torch.dtype, batch: int, seq: int) -> dict[str, list[Any]]:
    """For each parameter some values that it might take."""
    random = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=dtype)

    def found(*names: str, default: int) -> int:
        parts = [config]
        for part in parts:
            parts += [x for x in (getattr(part, key, None) for key in part.sub_configs) if x is not None]
        values = (getattr(part, name, None) for part in parts for name in names)
        return next((value for value in values if type(value) is int), default)

    size, patch = found("image_size", default=32), found("patch_size", default=8)
    channels = found("in_channels", "num_channels", "in_chans", default=3)
    frames = found("num_frames", "frames_per_clip", default=4)
    mel = found("num_mel_bins", "input_dim", "feature_size", "feature_projection_input_dim", default=80)
    vocabulary = found("vocab_size", default=64)
    tokens = torch.randint(min(10, vocabulary // 2), min(100, vocabulary), (batch, seq), generator=random)
    ended = torch.cat((tokens[:, :-1], torch.full((batch, 1), found("eos_token_id", default=2))), 1)
    sound = normal(batch, 16000)
    spectrum = normal(batch, mel, 2 * found("max_source_positions", default=64))
    video = normal(batch, frames, channels, size, size)
    patches = normal(32, channels * found("temporal_patch_size", default=1) * patch * patch)
    values = normal(batch, found("context_length", default=32), found("num_input_channels", default=1))
    return {
        "input_ids": [tokens, tokens[:, None].repeat(1, 2, 1), ended],
        "decoder_input_ids": [tokens[:, : seq - 8].flip(1)],
        "inputs_embeds": [normal(batch, seq, found("hidden_size", "d_model", default=32))],
        "pixel_values": [video[:, 0], patches, video, patches.unflatten(0, (batch, -1))],
        "pixel_values_videos": [video],
        "pixel_attention_mask": [torch.ones(batch, 16, dtype=torch.long)],
        "spatial_shapes": [torch.tensor([[4, 4]] * batch)],
        "image_attention_mask": [torch.ones(batch, seq, frames, dtype=torch.long)],
        "query_embeds": [normal(batch, 8, 32)],
        "qformer_input_ids": [tokens[:, :6]],
        "grid_thw": [torch.tensor([[1, 4, 4], [1, 4, 4]])],
        "merge_sizes": [torch.tensor([1, 1])],
        "hidden_states": [patches],
        "input_values": [sound, sound[:, None], spectrum.transpose(1, 2)],
        "input_features": [spectrum, spectrum.transpose(1, 2)],
        "input_features_mask": [torch.ones(batch, spectrum.shape[2], dtype=torch.long)],
        "bbox": [torch.zeros(batch, seq, 4, dtype=torch.long)],
        "past_values": [values, values[..., 0]],
    }
