"""How much of a device a training step uses: what a model must multiply, and how fast the device multiplies."""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

import torch

from ..layout import layout_of_branches
from ..layout.cost import AttentionCost
from ..models import LongNetLM

SIDE = {"cpu": 1024, "cuda": 8192}  # of the matrices that are timed


class Products(NamedTuple):
    """FLOPs of the products that a training step needs, a token, without what checkpointing computes again.

    Attributes:
        matrices: 6 for each parameter of a matrix. Embeddings are looked up, not multiplied.
        attention: two products forward and five backward over the pairs that the branches allow, of all layers.
    """

    matrices: float
    attention: float

    @property
    def of_token(self) -> float:
        return self.matrices + self.attention

    @classmethod
    def of(cls, model: LongNetLM, seq_len: int) -> Products:
        config = model.config
        matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim > 1 and name != "embedding.weight")
        layout = layout_of_branches(
            config.branches, seq_len, num_heads=config.num_heads, is_causal=True, device=torch.device("cpu")
        )
        heads_kv = config.num_kv_heads or config.num_heads
        cost = AttentionCost.of(
            layout, batch=1, heads=config.num_heads, heads_kv=heads_kv, head_dim=config.head_dim, itemsize=2
        )
        return cls(6.0 * matrices, config.num_layers * (cost.forward_flops + cost.backward_flops) / seq_len)


def matmul_rate(device: str) -> float:
    """FLOP/s of a square product in the dtype that training multiplies in, the best of some."""
    kind = torch.device(device).type
    side, dtype = SIDE[kind], torch.bfloat16 if kind == "cuda" else torch.float32
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(6):
        began = perf_counter()
        (a @ b).flatten()[0].item()  # waits for a GPU
        best = min(best, perf_counter() - began)
    return 2 * side**3 / best
