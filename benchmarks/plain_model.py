"""A model of the shape of Llama 3.2 1B in plain PyTorch, whose attention is a function: nothing to run here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

from dilated_attention_pytorch import BlockLayout, Pattern, block_sparse_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # of q, k and v [batch, tokens, heads, head_dim]


def ways(pattern: Pattern | None, is_causal: bool, mask: Tensor | None = None) -> dict[str, Attend]:
    """Ours with the pattern, and the others dense; "sdpa" with a mask where one is given."""

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert pattern is not None
        return block_sparse_attention(q, k, v, pattern)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        found = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal and mask is None, enable_gqa=True
        )
        return found.transpose(1, 2)

    compiled: dict[str, Any] = {}

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if not compiled:
            compiled["call"] = torch.compile(flex_attention)
        tokens = q.shape[1]
        if is_causal and tokens not in compiled:

            def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                return i >= j

            compiled[tokens] = create_block_mask(causal, None, None, tokens, tokens, device=q.device.type)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return compiled["call"](q, k, v, block_mask=compiled.get(tokens), enable_gqa=True).transpose(1, 2)

    return {"ours": ours, "sdpa": sdpa, "flex": flex}


def dense_mask(pattern: Pattern, tokens: int, device: str) -> Tensor:
    return BlockLayout.from_pattern(pattern, tokens, block_size=16, device=device).to_dense()


class Layer(nn.Module):
    def __init__(self, dim: int, hidden: int, heads: int, heads_kv: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.heads_kv, self.head_dim = heads, heads_kv, head_dim
        self.before, self.between = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, (heads + 2 * heads_kv) * head_dim, bias=False)
        self.out = nn.Linear(heads * head_dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 2 * hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, turn: Tensor, attend: Attend) -> Tensor:
        heads = self.qkv(self.before(x)).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split((self.heads, self.heads_kv, self.heads_kv), dim=2)
        x = x + self.out(attend(turned(q, turn), turned(k, turn), v).flatten(2))
        gate, up = self.up(self.between(x)).chunk(2, -1)
        return x + self.down(silu(gate) * up)


def turned(x: Tensor, turn: Tensor) -> Tensor:
    """Rotary embedding by cosine and sine, [2, tokens, 1, head_dim / 2]."""
    (cos, sin), (a, b) = turn, x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class PlainModel(nn.Module):
    """Layers alone: embeddings and logits are the same for all ways."""

    @classmethod
    def of(cls, tiny: bool, device: str) -> PlainModel:
        shape = (64, 128, 4, 2, 16) if tiny else (2048, 8192, 32, 8, 64)
        with torch.device(device):
            model = cls(2 if tiny else 16, *shape)
        return model.to(torch.bfloat16 if device == "cuda" else torch.float32)

    def __init__(self, num_layers: int, dim: int, *shape: int) -> None:
        super().__init__()
        self.dim, self.head_dim = dim, shape[-1]
        self.layers = nn.ModuleList(Layer(dim, *shape) for _ in range(num_layers))

    def embedded(self, tokens: int) -> Tensor:
        weight = self.layers[0].out.weight
        return torch.randn(1, tokens, self.dim, dtype=weight.dtype, device=weight.device)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        place = torch.arange(x.shape[1], device=x.device)[:, None]
        angle = place / 500000.0 ** torch.linspace(0, 1, self.head_dim // 2 + 1, device=x.device)[:-1]
        turn = torch.stack((angle.cos(), angle.sin()))[:, :, None].to(x.dtype)
        for layer in self.layers:
            if torch.is_grad_enabled():
                x = checkpoint(layer, x, turn, attend, use_reentrant=False)
            else:
                x = layer(x, turn, attend)
        return x

    def prefill(self, x: Tensor, attend: Attend) -> None:
        with torch.no_grad():
            self(x, attend)

    def step(self, x: Tensor, attend: Attend) -> None:
        self(x, attend).float().square().mean().backward()
        self.zero_grad()

    def checked(self, x: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Outputs, and the gradient of the first layer's projection."""
        self.zero_grad()
        out = self(x, attend)
        out.float().square().mean().backward()
        gradient = self.layers[0].qkv.weight.grad.clone()
        self.zero_grad()
        return out.detach(), gradient
