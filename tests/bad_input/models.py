# ruff: noqa: E501 - a case is a line
"""Bad arguments of LongNet: its configuration, its calls, its files."""

import math

import torch

from dilated_attention_pytorch import Branches, LongNet, LongNetConfig, LongNetLM
from dilated_attention_pytorch.models import KVCache, LongNetDecoderLayer

SMALL = LongNetConfig(vocab_size=11, dim=16, num_layers=1, num_heads=2, segment_lengths=(4, 8), dilation_rates=(1, 2))
TOKENS = torch.tensor([[3, 10, 0]])


def config(**changes):
    return lambda: LongNetConfig(**changes)


def forward(tokens):
    return lambda: LongNetLM(SMALL)(tokens)


def generate(**changes):
    return lambda: LongNetLM(SMALL).eval().generate(**{"tokens": TOKENS, "max_new_tokens": 2, **changes})


BAD = {
    # configuration
    "no dim": (config(dim=None), TypeError, "dim must be an int, got None"),
    "dim of odd heads": (config(dim=20, num_heads=4), ValueError, "dim must be a multiple of 2 · num_heads, got 20 and 4 heads"),
    "no layers": (config(num_layers=0), ValueError, "num_layers must be at least 1, got 0"),
    "heads a float": (config(num_heads=12.0), TypeError, "num_heads must be an int, got 12.0"),
    "vocabulary a float": (config(vocab_size=2.0), TypeError, "vocab_size must be an int, got 2.0"),
    "hidden_dim a word": (config(hidden_dim="4x"), TypeError, "hidden_dim must be an int, got '4x'"),
    "key heads that do not divide": (config(num_kv_heads=5), ValueError, "num_heads must be a multiple of num_kv_heads, got 12 and 5"),
    "more key heads than heads": (config(num_kv_heads=24), ValueError, "num_heads must be a multiple of num_kv_heads, got 12 and 24"),
    "no key heads": (config(num_kv_heads=0), ValueError, "num_kv_heads must be at least 1, got 0"),
    "two dilations of five segments": (config(dilation_rates=(1, 2)), ValueError, "segment_lengths and dilation_rates must have the same length"),
    "head offsets": (config(head_offsets="torchscale"), ValueError, "head_offsets must be one of .* got 'torchscale'"),
    "dropout": (config(dropout=1.5), ValueError, r"dropout must be in \[0, 1\), got 1.5"),
    "attention dropout": (config(attention_dropout="0.1"), TypeError, "attention_dropout must be a number, got str"),
    "rotary base of one": (config(rotary_base=1.0), ValueError, "rotary_base must be greater than 1 and finite, got 1.0"),
    "rotary base infinite": (config(rotary_base=math.inf), ValueError, "rotary_base must be greater than 1 and finite, got inf"),
    "rotary base a word": (config(rotary_base="10000"), TypeError, "rotary_base must be a number, got '10000'"),
    "checkpointing": (config(checkpointing=1), TypeError, 'checkpointing must be True, False or "attention", got 1'),
    "backend": (config(backend="fast"), ValueError, "backend must be one of .* got 'fast'"),
    "a model of a dict": (lambda: LongNet({"dim": 16}), TypeError, "config must be a LongNetConfig or None, got dict"),
    "a cross_attention word": (lambda: LongNetDecoderLayer(SMALL, cross_attention="yes"), TypeError, "cross_attention must be True or False, got 'yes'"),
    # calls
    "a token too large": (forward(torch.tensor([[3, 11]])), ValueError, "tokens must be from 0 to 10, got 3 to 11"),
    "a negative token": (forward(torch.tensor([[3, -1]])), ValueError, "tokens must be from 0 to 10, got -1 to 3"),
    "a token too large to generate from": (generate(tokens=torch.tensor([[300]])), ValueError, "tokens must be from 0 to 10, got 300 to 300"),
    "tokens of one dimension": (forward(torch.zeros(5).long()), ValueError, r"tokens must be \(batch, seq\) and not empty, got \[5\]"),
    "no tokens": (generate(tokens=torch.zeros(1, 0).long()), ValueError, r"tokens must be .* not empty, got \[1, 0\]"),
    "tokens a list": (forward([[1, 2]]), ValueError, r"tokens must be \(batch, seq\) and not empty, got list"),
    "tokens of floats": (generate(tokens=torch.zeros(1, 5)), TypeError, "tokens must be int32 or int64, got torch.float32"),
    "a reduction": (lambda: LongNetLM(SMALL).loss(torch.zeros(1, 5).long(), torch.zeros(1, 5).long(), reduction="none"), ValueError, 'reduction must be "mean" or "sum", got \'none\''),
    "targets of other tokens": (lambda: LongNetLM(SMALL).loss(torch.zeros(1, 5).long(), torch.zeros(1, 4).long()), ValueError, r"targets must be int64 \(1, 5\), as tokens are, got torch.int64 \(1, 4\)"),
    "targets of int32": (lambda: LongNetLM(SMALL).loss(torch.zeros(1, 5).long(), torch.zeros(1, 5).int()), ValueError, r"targets must be int64 \(1, 5\), as tokens are, got torch.int32 \(1, 5\)"),
    "features": (lambda: LongNet(SMALL)(torch.zeros(1, 5, 15)), ValueError, "x must have 16 features, got 15"),
    "features without a sample": (lambda: LongNet(SMALL)(torch.zeros(5, 16)), ValueError, r"x must be \(batch, seq, dim\) and not empty, got \[5, 16\]"),
    "padding": (lambda: LongNet(SMALL)(torch.zeros(1, 5, 16), key_padding_mask=torch.zeros(1, 4).bool()), ValueError, "key_padding_mask must have shape"),
    "no new tokens": (generate(max_new_tokens=0), ValueError, "max_new_tokens must be at least 1, got 0"),
    "temperature below zero": (generate(temperature=-1.0), ValueError, "temperature must be at least 0 and finite, got -1.0"),
    "temperature NaN": (generate(temperature=math.nan), ValueError, "temperature must be at least 0 and finite, got nan"),
    "temperature None": (generate(temperature=None), TypeError, "temperature must be a number, got None"),
    "top_k of zero": (generate(top_k=0), ValueError, "top_k must be at least 1, got 0"),
    "top_k of the most likely": (generate(top_k=5, temperature=0.0), ValueError, "top_k has no meaning with temperature 0, .* got 5"),
    "top_p of the most likely": (generate(top_p=0.5, temperature=0.0), ValueError, "top_p has no meaning with temperature 0, .* got 0.5"),
    "a generator for the most likely": (generate(generator=torch.Generator(), temperature=0), ValueError, "generator has no meaning with temperature 0"),
    "a generator that is a seed": (generate(generator=3), TypeError, "generator must be a torch.Generator or None, got int"),
    "top_p of zero": (generate(top_p=0), ValueError, r"top_p must be in \(0, 1\], got 0"),
    "top_p above one": (generate(top_p=1.1), ValueError, r"top_p must be in \(0, 1\], got 1.1"),
    "top_p NaN": (generate(top_p=math.nan), ValueError, r"top_p must be in \(0, 1\], got nan"),
    "top_p a flag": (generate(top_p=True), TypeError, "top_p must be a number, got True"),
    "top_p a word": (generate(top_p="0.9"), TypeError, "top_p must be a number, got '0.9'"),
    "a stream refuses before its first token": (lambda: LongNetLM(SMALL).eval().stream(TOKENS, 2, top_p=2.0), ValueError, "top_p must be"),
    "a cache for nothing": (lambda: KVCache(Branches((4,), (1,)), 0), ValueError, "max_length must be at least 1, got 0"),
    # files
    "a device of another name": (lambda: LongNetLM.load("model.safetensors", device="gpu"), ValueError, "device must be one that PyTorch knows, such as 'cpu' or 'cuda:0', got 'gpu'"),
}  # fmt: skip
