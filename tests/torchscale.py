"""torchscale's dilated attention written out, without a line of the library, and a stand-in for its module.

torchscale pads with zeros: a sequence to whole segments, a segment to a multiple of its dilation. Zeros are attended to
like any token, and what comes back of a segment that was padded is longer than it was, so that the results of the
segments behind it stand at later tokens.
"""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.functional import pad


def filled_up(x, size):
    """(…, seq, features) with zeros behind the last token, up to a multiple of `size`."""
    return pad(x, (0, 0, 0, -x.shape[-2] % size))


def branch_of_head(q, k, v, segment, rate, offset, is_causal):
    """One branch of one head, tensors (batch, seq, head_dim): out and lse, as torchscale places them."""
    seq = q.shape[1]
    segment = min(segment, seq)
    q, k, v = (filled_up(filled_up(x, segment).unflatten(1, (-1, segment)), rate) for x in (q, k, v))
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -1e8, dtype=q.dtype)
    q, k, v = (x[:, :, offset::rate] for x in (q, k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    out[:, :, offset::rate], lse[:, :, offset::rate] = scores.softmax(-1) @ v, scores.logsumexp(-1)
    return out.flatten(1, 2)[:, :seq], lse.flatten(1, 2)[:, :seq]


def as_torchscale(q, k, v, segments, rates, is_causal, detached=False):
    heads, results = q.shape[2], []
    for head in range(heads):
        parts = [
            branch_of_head(*(x[:, :, head] for x in (q, k, v)), w, r, head // -(-heads // r), is_causal)
            for w, r in zip(segments, rates, strict=True)
        ]
        shares = torch.stack([lse for _, lse in parts]).softmax(0)[..., None]
        shares = shares.detach() if detached else shares
        results.append((shares * torch.stack([out for out, _ in parts])).sum(0))
    return torch.stack(results, dim=2)


class XPos(nn.Module):
    """Stands for its positions: a factor for each token, with the arguments that the module there takes."""

    def forward(self, x, offset=0, downscale=False):
        power = torch.linspace(-1, 1, x.shape[1] + offset, dtype=x.dtype)[-x.shape[1] :, None]
        return x * (2.0 ** (-power if downscale else power))


class DilatedAttention(nn.Module):
    """The names of the attributes of torchscale's, and what its forward computes."""

    def __init__(self, dim, heads, segments, rates, subln=False, xpos=False, **others):
        super().__init__()
        self.args = SimpleNamespace(segment_length=segments, dilated_ratio=rates, **others)
        self.embed_dim, self.num_heads, self.head_dim = dim, heads, dim // heads
        self.dropout = 0.0
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            setattr(self, name, nn.Linear(dim, dim))
        self.inner_attn_ln = nn.LayerNorm(dim) if subln else None
        self.xpos = XPos() if xpos else None

    def forward(
        self, query, key, value, incremental_state=None, key_padding_mask=None, attn_mask=None, rel_pos=None,
        is_first_step=False, is_causal=False,
    ):  # fmt: skip
        q, k, v = (
            project(x).unflatten(-1, (self.num_heads, -1))
            for project, x in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        )
        if self.xpos is not None:
            q, k = (
                self.xpos(x.transpose(1, 2).flatten(0, 1), 0, down).unflatten(0, (len(x), -1)).transpose(1, 2)
                for x, down in ((q, False), (k, True))
            )
        args = self.args
        out = as_torchscale(q, k, v, args.segment_length, args.dilated_ratio, is_causal, detached=True).flatten(2)
        return self.out_proj(out if self.inner_attn_ln is None else self.inner_attn_ln(out)), None


class Layer(nn.Module):
    """A layer of an encoder, or of a decoder, around it."""

    def __init__(self, dim, heads, segments, rates, is_causal=False, **options):
        super().__init__()
        self.self_attn = DilatedAttention(dim, heads, segments, rates, **options)
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.is_causal = is_causal

    def forward(self, x, padding=None, state=None):
        normed = self.self_attn_layer_norm(x)
        options = {"key_padding_mask": padding, "incremental_state": state, "is_causal": self.is_causal}
        x = x + self.self_attn(query=normed, key=normed, value=normed, attn_mask=None, rel_pos=None, **options)[0]
        return x + self.ffn(self.final_layer_norm(x))


class Encoder(nn.Module):
    def __init__(self, depth, dim, heads, segments, rates, **options):
        super().__init__()
        self.layers = nn.ModuleList(Layer(dim, heads, segments, rates, **options) for _ in range(depth))

    def forward(self, x, padding=None, states=None):
        if padding is None:
            padding = torch.zeros(x.shape[:2], dtype=torch.bool)  # it always makes one
        for i, layer in enumerate(self.layers):
            x = layer(x, padding if states is None else None, None if states is None else states[i])
        return x
