"""`BlockGate`: a scorer that learns which blocks matter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..backends.base import aligned_queries, compute_dtype
from ..layout.checks import block_pair
from ..ops import MeanPooled, block_masses
from ..ops.checks import check_device_and_dtype, check_qkv
from ..ops.scores import Blocked
from ..patterns.base import check_int, shown
from ..patterns.blocks import ceil_div


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
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
        check_device_and_dtype(device, dtype)
        self.scorer = MeanPooled(queries, keys)
        self.row_weight = nn.Parameter(torch.zeros(num_heads, head_dim, head_dim, device=device, dtype=dtype))
        self.column_weight = nn.Parameter(torch.zeros(num_kv_heads, 3 * head_dim, head_dim, device=device, dtype=dtype))

    def features(self, queries: Blocked, keys: Blocked, scale: float) -> tuple[Tensor, Tensor]:
        """Rows and columns of `MeanPooled`, corrected."""
        return self.rows(queries, scale), self.columns(keys)

    def of_patches(self, rows: Tensor, columns: Tensor, most: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
        """The same from mean queries, times the scale, and mean, largest and smallest coordinates of keys."""
        return self._corrected_rows(rows), self._corrected_columns(columns, most, least)

    def rows(self, queries: Blocked, scale: float) -> Tensor:
        return self._corrected_rows(self.scorer.rows(queries, scale))

    def columns(self, keys: Blocked) -> Tensor:
        parts = keys.parts(self.scorer.keys or keys.block)
        return self._corrected_columns(parts.mean(), parts.extreme(1), parts.extreme(-1))

    def token_features(
        self,
        q: Tensor,
        k: Tensor,
        scale: float,
        blocks: tuple[int, int],
        *,
        key_padding_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """A row for every query and a column for every key: those of its patch so far, up to the token itself, of its
        document and without hidden keys. So a model that uses them learns nothing of later or hidden tokens.
        """
        sizes = self.scorer.queries or blocks[0], self.scorer.keys or blocks[1]
        query_ids = None if document_ids is None else aligned_queries(document_ids, q.shape[1])
        queries, keys = _SoFar.of(q, sizes[0], None, query_ids), _SoFar.of(k, sizes[1], key_padding_mask, document_ids)
        rows, columns, most, least = (
            x.flatten(1, 2)[:, : like.shape[1]]
            for x, like in ((queries.mean() * scale, q), (keys.mean(), k), (keys.extreme(1), k), (keys.extreme(-1), k))
        )
        return self._corrected_rows(rows), self._corrected_columns(columns, most, least)

    def _corrected_rows(self, rows: Tensor) -> Tensor:
        _check_heads("q", rows, self.row_weight)
        return rows + torch.einsum("brhf,hfg->brhg", rows, self.row_weight.to(rows.dtype))

    def _corrected_columns(self, columns: Tensor, most: Tensor, least: Tensor) -> Tensor:
        _check_heads("k", columns, self.column_weight)
        seen = torch.cat((columns, most.to(columns.dtype), least.to(columns.dtype)), dim=-1)
        return columns + torch.einsum("bchf,hfg->bchg", seen, self.column_weight.to(seen.dtype))


def _check_heads(name: str, x: Tensor, weight: Tensor) -> None:
    if x.shape[2:] != (weight.shape[0], weight.shape[2]):
        raise ValueError(
            f"{name} must have {weight.shape[0]} heads of {weight.shape[2]}, as the gate was made for, "
            f"got {list(x.shape[2:])}"
        )


@dataclass(frozen=True)
class _SoFar:
    """Tokens in patches (batch, patches, size, heads, head_dim), and which of its patch each one counts: those up to
    itself, [size, size], and with masks of them those of its document not hidden, [batch, patches, size, size].
    """

    tokens: Tensor
    counts: Tensor

    @classmethod
    def of(cls, x: Tensor, size: int, hidden: Tensor | None, ids: Tensor | None) -> _SoFar:
        patches = Blocked.of(x.to(compute_dtype(x.dtype)), size, hidden)
        counts = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
        if ids is not None:
            of_patch = pad(ids, (0, -ids.shape[1] % size)).unflatten(1, (-1, size))
            counts = counts & (of_patch[..., None] == of_patch[..., None, :])
        if hidden is not None:
            counts = counts & patches.real[..., None, :]
        return cls(patches.tokens, counts)

    def mean(self) -> Tensor:
        """A product and not cumsum, which is not deterministic on a GPU."""
        weights = self.counts.to(self.tokens.dtype)
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1)
        return torch.einsum("...ts,...shd->...thd", weights, self.tokens)

    def extreme(self, sign: int) -> Tensor:
        """The largest (sign 1) or smallest (−1) coordinates so far; 0 where no token counts."""
        if self.counts.ndim == 2:
            return (self.tokens.cummax(2) if sign > 0 else self.tokens.cummin(2)).values
        most = torch.full_like(self.tokens, -torch.inf)
        for earlier in range(self.tokens.shape[2]):
            token = sign * self.tokens[:, :, earlier : earlier + 1]
            most = torch.maximum(most, token.masked_fill(~self.counts[..., earlier, None, None], -torch.inf))
        return sign * most.masked_fill(~self.counts.any(-1)[..., None, None], 0.0)


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
    if not isinstance(gate, BlockGate):
        raise TypeError(f"gate must be a BlockGate, got {shown(gate)}")
    check_qkv(q, k, k)
    blocks = block_pair(block_size)
    if masses is not None:
        _check_masses(masses, q, [ceil_div(x.shape[1], block) for x, block in zip((q, k), blocks, strict=True)])
    q, k = q.detach(), k.detach()
    call = {"block_size": block_size, "is_causal": is_causal, "scale": scale, "key_padding_mask": key_padding_mask}
    if masses is None:
        with torch.no_grad():
            masses = block_masses(q, k, **call)  # type: ignore[arg-type]
    guess = block_masses(q, k, scorer=gate, **call)  # type: ignore[arg-type]
    floor = torch.finfo(guess.dtype).tiny
    return (masses * (masses.clamp(min=floor).log() - guess.clamp(min=floor).log())).sum(-1).mean()


def _check_masses(masses: Tensor, q: Tensor, num_blocks: list[int]) -> None:
    """Exactly those of this call: of one sample, or one head, they would be spread over all."""
    if not isinstance(masses, Tensor):
        raise TypeError(f"masses must be a tensor, got {shown(masses)}")
    wanted = [q.shape[0], q.shape[2], *num_blocks]
    if list(masses.shape) != wanted:
        raise ValueError(
            f"masses must have shape [batch, heads, query blocks, key blocks] = {wanted}, got {list(masses.shape)}"
        )
    if not masses.is_floating_point():
        raise TypeError(f"masses must be floating point, got {masses.dtype}")
    if masses.device != q.device:
        raise ValueError(f"masses must be on the device of q, {q.device}, got {masses.device}")
