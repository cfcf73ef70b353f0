"""Which configuration to use for a sequence length and a budget.

recommend(1_000_000, "A100").options   # for create_block_sparse_attention
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..memory.devices import Device, as_text
from ..patterns import Full, SparsePatternConfig
from ..patterns.base import check_int
from ..patterns.blocks import ceil_div
from .plan import AttentionConfig, MemoryPlan, device_with_budget, max_sequence_length, plan_memory


@dataclass(frozen=True)
class Recommendation:
    """A configuration that fits, and the reasons for it.

    Attributes:
        options: keywords of `create_block_sparse_attention`; empty if dense attention is recommended.
        reasons: one sentence for each decision.
        plan: its memory on one device.
    """

    options: dict[str, Any]
    reasons: tuple[str, ...]
    plan: MemoryPlan

    @property
    def world_size(self) -> int:
        return self.plan.world_size

    def __str__(self) -> str:
        return "\n".join((*self.reasons, str(self.plan)))


# (from this many tokens, share of blocks kept, tokens per block): dense below 8K, 90-95 % sparse to 64K, 99 % beyond.
ADVICE: Sequence[tuple[int, float, int]] = ((8192, 0.1, 128), (16384, 0.05, 128), (65536, 0.01, 128))
SPARSEST = 0.001


def recommend(
    seq_len: int,
    budget: int | Device | torch.device | str | None = None,
    *,
    max_world_size: int = 1024,
    **options: Any,
) -> Recommendation:
    """A configuration for this length that fits the budget, with the reasons.

    Dense attention below 8,192 tokens, 10 % of the blocks from there, 5 % from 16,384 and 1 % beyond 65,536. If the
    lists of blocks do not fit, it is sparser; if the tensors do not fit, it is a ring of as few devices as possible.
    Segment lengths double from the shortest that can fill a row's share of blocks, with dilations 1, 2 and 4.

    Args:
        budget: bytes of one device, or a device; the current one by default.
        max_world_size: the largest ring to consider.
        options: those of `plan_memory`: batch, dtype, training, heads, …
    """
    check_int("seq_len", seq_len, least=1)
    check_int("max_world_size", max_world_size, least=1)
    device, options = device_with_budget(budget, options)
    refused: MemoryPlan | None = None
    for found, reasons in _candidates(seq_len):
        config = _as_config(found)
        plan = plan_memory(config, seq_len, device=device, **options)
        if plan.fits:
            why = f"{as_text(plan.peak_bytes)} of {as_text(device.budget)} on {device.name}."
            return Recommendation(found, (*reasons, f"One device holds it: {why}"), plan)
        refused = refused or plan
        if plan.peak_phase != "layout" and 2 * plan.by_kind().get("lists", 0) < plan.peak_bytes:
            break
    assert refused is not None
    world_size = 2
    while world_size <= max_world_size:
        plan = plan_memory(config, seq_len, device=device, world_size=world_size, **options)
        if plan.fits:
            why = (
                f"One device cannot hold it ({as_text(refused.peak_bytes)} of {as_text(device.budget)} on "
                f"{device.name}): a ring of {world_size} takes {as_text(plan.peak_bytes)} on each."
            )
            return Recommendation(found, (*reasons, why), plan)
        world_size *= 2
    longest = max_sequence_length(config, device, **options)
    raise ValueError(
        f"seq_len = {seq_len:,} does not fit {device.name}: it takes {as_text(refused.peak_bytes)} of "
        f"{as_text(device.budget)}, and a ring of {max_world_size} is not enough; one device holds {longest:,} tokens"
    )


def _candidates(seq_len: int) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
    """Options to try, the densest first; empty options mean dense attention."""
    if seq_len < ADVICE[0][0]:
        return [({}, (f"Below {ADVICE[0][0]:,} tokens dense attention is as fast and drops nothing.",))]
    ratio, block = next((share, block) for start, share, block in reversed(ADVICE) if seq_len >= start)
    found: list[tuple[dict[str, Any], tuple[str, ...]]] = []
    reason = f"At {seq_len:,} tokens keep {ratio:.1%} of the blocks."
    while ratio >= SPARSEST:
        options = _options(seq_len, ratio, block)
        first, *_, last = options["segment_lengths"]
        segments = f"Segments of {first:,} to {last:,} tokens: the shortest holds as many blocks as a row may keep."
        found.append((options, (reason, segments)))
        ratio, block = ratio / 2, 256
        reason = f"The lists of blocks do not fit: use larger blocks, and keep {ratio:.2%} of them."
    return found


def _options(seq_len: int, ratio: float, block: int) -> dict[str, Any]:
    share = max(1, round(ratio * ceil_div(seq_len, block))) * block  # keys per query
    first = max(2048, 1 << (share - 1).bit_length())
    segments = [first << i for i in range(3)]
    return {
        "segment_lengths": segments,
        "dilation_rates": [1, 2, 4],
        "sparsity_ratio": ratio,
        "block_size": block,
    }


def _as_config(options: Mapping[str, Any]) -> AttentionConfig:
    if not options:
        return AttentionConfig(pattern=Full())
    fields = SparsePatternConfig(sparsity_ratio=options["sparsity_ratio"], block_size=options["block_size"])
    return AttentionConfig.sparse(fields, options["segment_lengths"], options["dilation_rates"])
