"""What the benchmarks put in, and what should come out.

- `Inputs` and `random_mask` draw tensors and blocks; `BlockLayout.from_block_mask` and `flex_mask` give the same blocks
  to this library and to FlexAttention.
- `expected` is float64 attention, computed by PyTorch over just the keys that a query sees: what gates compare with.
- `Probes` are the machine's own rates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention

from dilated_attention_pytorch import BlockLayout
from dilated_attention_pytorch.testing.timing import Contenders, Timing
from harness import Gate


@dataclass
class Probes:
    """The machine's own rates: a plain square matmul, and a copy much larger than the caches."""

    side: int = 2048
    floats: int = 1 << 25
    _matrix: Tensor = field(init=False, repr=False)
    _from: Tensor = field(init=False, repr=False)
    _to: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._matrix = torch.randn(self.side, self.side)
        self._from, self._to = torch.randn(self.floats), torch.zeros(self.floats)

    def contenders(self) -> Contenders:
        return {"matmul": lambda: self._matrix @ self._matrix, "copy": lambda: self._to.copy_(self._from)}

    def rates(self, timings: Mapping[str, Timing]) -> dict[str, float]:
        """FLOP/s of the matmul, bytes/s (read and written) of the copy."""
        return {
            "matmul_flops": 2 * self.side**3 / timings["matmul"].median,
            "copy_bytes": 2 * 4 * self.floats / timings["copy"].median,
        }


@dataclass(frozen=True)
class Inputs:
    """q, k, v and the gradient of the output, (batch, seq, heads, head_dim), and the same with the heads first.

    FlexAttention and SDPA get contiguous tensors in the order they like best, so that no copy is held against them.
    """

    ours: tuple[Tensor, Tensor, Tensor]
    grad: Tensor

    @classmethod
    def make(cls, tokens: int, heads: int, head_dim: int, seed: int = 0) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        q, k, v, do = (torch.randn(1, tokens, heads, head_dim, generator=generator) for _ in range(4))
        return cls((q, k, v), do)

    @property
    def heads_first(self) -> tuple[Tensor, ...]:
        return tuple(heads_first(x) for x in self.ours)


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()


def random_mask(num_blocks: int, density: float, seed: int = 0) -> Tensor:
    """bool [num_blocks, num_blocks] with exactly max(1, round(density · num_blocks)) random blocks in every row."""
    count = max(1, round(density * num_blocks))
    draw = torch.rand(num_blocks, num_blocks, generator=torch.Generator().manual_seed(seed))
    chosen = draw.topk(count, dim=1).indices
    return torch.zeros(num_blocks, num_blocks, dtype=torch.bool).scatter_(1, chosen, True)


def flex_mask(mask: Tensor, block: int) -> BlockMask:
    """The same blocks for FlexAttention, all of them full: it computes no mask inside a block either."""
    count = mask.sum(1, dtype=torch.int32)[None, None]
    # Every row is padded to all columns: masks of one length then share one compiled kernel.
    order = mask.int().argsort(dim=1, descending=True, stable=True).int()[None, None]
    lengths = (mask.shape[0] * block, mask.shape[1] * block)
    return BlockMask.from_kv_blocks(
        torch.zeros_like(count), torch.zeros_like(order), count, order, BLOCK_SIZE=block, seq_lengths=lengths
    )


def rows_to_check(layout: BlockLayout, whole: int = 0) -> list[int]:
    """All query blocks of a layout of up to `whole` tokens; else the first, the last and one between."""
    last = layout.num_q_blocks - 1
    return list(range(last + 1)) if layout.seq_q <= whole else sorted({0, last * 5 // 8, last})


def tokens_of(rows: list[int], block: int) -> Tensor:
    return (torch.tensor(rows)[:, None] * block + torch.arange(block)).flatten()


def check_rows(gate: Gate, case: str, layout: BlockLayout, inputs: Inputs, out: Tensor) -> None:
    """Our output of some query blocks against float64."""
    rows = rows_to_check(layout)
    got, want = out[:, tokens_of(rows, layout.block_q).to(out.device)], expected(inputs, layout, rows)["out"]
    gate.check(case, "ours", f"float64 in {len(rows)} query blocks", got, want)


def expected(inputs: Inputs, layout: BlockLayout, rows: list[int], *, gradients: bool = False) -> dict[str, Tensor]:
    """Attention of some query blocks in float64, by PyTorch, over the keys that they see.

    Returns:
        "out" of these rows; with gradients also "dq" of these rows, and "dk" and "dv" of all keys, for an output
        gradient that is 0 outside the rows.
    """
    q, k, v = inputs.ours
    found: dict[str, list[Tensor]] = {"out": [], "dq": []}
    dk, dv = (torch.zeros_like(x, dtype=torch.float64) if gradients else None for x in (k, v))
    for row in rows:
        mine = slice(row * layout.block_q, (row + 1) * layout.block_q)
        keys, allowed = _seen(layout, row)
        parts = [x.double().transpose(1, 2).requires_grad_(gradients) for x in (q[:, mine], k[:, keys], v[:, keys])]
        with sdpa_kernel(SDPBackend.MATH):
            out = scaled_dot_product_attention(*parts, attn_mask=allowed, enable_gqa=q.shape[2] != k.shape[2])
        found["out"].append(out.detach().transpose(1, 2))
        if gradients:
            grads = torch.autograd.grad(out, parts, inputs.grad[:, mine].double().transpose(1, 2))
            dq_row, dk_row, dv_row = (x.transpose(1, 2) for x in grads)
            found["dq"].append(dq_row)
            dk.index_add_(1, keys, dk_row)
            dv.index_add_(1, keys, dv_row)
    result = {name: torch.cat(parts, dim=1) for name, parts in found.items() if parts}
    return {**result, "dk": dk, "dv": dv} if gradients else result


def _seen(layout: BlockLayout, row: int) -> tuple[Tensor, Tensor]:
    """The keys in the active blocks of a row, and which of them each query sees. Layouts with one list only."""
    lists = layout.by_query
    start, split, stop = int(lists.offsets[row]), int(lists.splits[row]), int(lists.offsets[row + 1])
    blocks = lists.indices[start:stop].long()
    rules = lists.rule_ids[start:stop] if lists.rule_ids.numel() else torch.zeros_like(blocks)
    allowed = layout.token_mask(torch.full_like(blocks, row), blocks, rules)
    allowed[: split - start] = True
    keys = (blocks[:, None] * layout.block_k + torch.arange(layout.block_k, device=blocks.device)).flatten()
    return keys, allowed.transpose(0, 1).flatten(1)
