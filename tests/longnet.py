"""A small LongNet for tests, and the same model written out."""

import dataclasses
import math

import torch
from torch import nn
from torch.nn.functional import gelu, layer_norm

from dilated_attention_pytorch import LongNetConfig, LongNetLM

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
