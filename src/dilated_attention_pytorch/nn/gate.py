"""`BlockGate`: a scorer that learns which blocks matter."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..backends.base import compute_dtype
from ..ops import MeanPooled, block_masses
from ..ops.scores import Blocked
from ..patterns.base import check_int


class BlockGate(nn.Module):
    """A scorer for `select_blocks` with a linear map for every head.

    It starts as `MeanPooled(queries, keys)` and learns what to add to that: to a row from its mean query, to a column
    from the mean, the largest and the smallest coordinates of its keys. Train it by distillation
    (`gate_loss`, the rest of the model frozen) or end to end (`BlockSparseAdaptive(gate_strength=…)`).

    Args:
        num_heads, head_dim: of the queries.
        num_kv_heads: of the keys, `num_heads` by default.
        queries, keys: patches of the scorer that it starts as.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        *,
        queries: int | None = 4,
        keys: int | None = 4,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, value in (("num_heads", num_heads), ("head_dim", head_dim), ("num_kv_heads", num_kv_heads)):
            check_int(name, value, least=1)
        self.scorer = MeanPooled(queries, keys)
        self.row_weight = nn.Parameter(torch.zeros(num_heads, head_dim, head_dim, device=device, dtype=dtype))
        self.column_weight = nn.Parameter(torch.zeros(num_kv_heads, 3 * head_dim, head_dim, device=device, dtype=dtype))

    def features(self, queries: Blocked, keys: Blocked, scale: float) -> tuple[Tensor, Tensor]:
        """Rows and columns of `MeanPooled`, corrected."""
        rows, columns = self.scorer.features(queries, keys, scale)
        parts = keys.parts(self.scorer.keys or keys.block)
        return self._corrected(rows, columns, parts.extreme(1), parts.extreme(-1))

    def token_features(self, q: Tensor, k: Tensor, scale: float, blocks: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """A row for every query and a column for every key: those of its patch so far, up to the token itself. So a
        causal model that uses them learns nothing of later tokens.
        """
        queries, keys = _patches(q, self.scorer.queries or blocks[0]), _patches(k, self.scorer.keys or blocks[1])
        rows, columns, most, least = (
            x.flatten(1, 2)[:, : like.shape[1]]
            for x, like in (
                (_running_mean(queries) * scale, q),
                (_running_mean(keys), k),
                (keys.cummax(2).values, k),
                (keys.cummin(2).values, k),
            )
        )
        return self._corrected(rows, columns, most, least)

    def _corrected(self, rows: Tensor, columns: Tensor, most: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
        for name, x, weight in (("q", rows, self.row_weight), ("k", columns, self.column_weight)):
            if x.shape[2:] != (weight.shape[0], weight.shape[2]):
                raise ValueError(
                    f"{name} must have {weight.shape[0]} heads of {weight.shape[2]}, as the gate was made for, "
                    f"got {list(x.shape[2:])}"
                )
        seen = torch.cat((columns, most.to(columns.dtype), least.to(columns.dtype)), dim=-1)
        rows = rows + torch.einsum("brhf,hfg->brhg", rows, self.row_weight.to(rows.dtype))
        columns = columns + torch.einsum("bchf,hfg->bchg", seen, self.column_weight.to(seen.dtype))
        return rows, columns


def _patches(x: Tensor, size: int) -> Tensor:
    return Blocked.of(x.to(compute_dtype(x.dtype)), size).tokens


def _running_mean(patches: Tensor) -> Tensor:
    """A product and not cumsum, which is not deterministic on a GPU."""
    size = patches.shape[2]
    so_far = torch.ones(size, size, dtype=patches.dtype, device=patches.device).tril()
    return torch.einsum("ts,bnshd->bnthd", so_far / so_far.sum(1, keepdim=True), patches)


def gate_loss(
    gate: BlockGate,
    q: Tensor,
    k: Tensor,
    *,
    block_size: int | tuple[int, int],
    is_causal: bool = False,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    masses: Tensor | None = None,
) -> Tensor:
    """How far the gate is from the true block masses: their Kullback–Leibler divergence, the mean over samples, heads
    and rows. `masses` are those of `block_masses`, if they are known already. q and k get no gradient.
    """
    q, k = q.detach(), k.detach()
    call = {"block_size": block_size, "is_causal": is_causal, "scale": scale, "key_padding_mask": key_padding_mask}
    if masses is None:
        with torch.no_grad():
            masses = block_masses(q, k, **call)  # type: ignore[arg-type]
    guess = block_masses(q, k, scorer=gate, **call)  # type: ignore[arg-type]
    floor = torch.finfo(guess.dtype).tiny
    return (masses * (masses.clamp(min=floor).log() - guess.clamp(min=floor).log())).sum(-1).mean()
