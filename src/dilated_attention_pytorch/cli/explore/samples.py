"""Queries and keys to choose blocks from where no model is at hand. The page shows this function with its Python."""

from __future__ import annotations

import torch
from torch import Tensor


def sample_activations(batch: int, tokens: int, heads: int, heads_kv: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Stretches of 96 tokens are about one of 8 topics. A query looks for its topic, less sharply from head to head."""
    draw = torch.Generator().manual_seed(0)
    topic = torch.randint(8, (batch, -(-tokens // 96)), generator=draw).repeat_interleave(96, dim=1)[:, :tokens]
    topics = torch.nn.functional.normalize(torch.randn(8, heads_kv, head_dim, generator=draw), dim=-1)[topic]
    q = topics.repeat_interleave(heads // heads_kv, dim=2) * torch.linspace(8, 4, heads)[:, None]
    k = 6 * topics
    return q + torch.randn(q.shape, generator=draw), k + torch.randn(k.shape, generator=draw)
