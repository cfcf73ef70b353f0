"""`dilated-attention plan`: will it fit, how long can it be, and the tables of the design documents, recomputed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..distributed import ring_cost
from ..memory.devices import GIB, Device, as_text
from ..patterns import Full, SparsePatternConfig
from ..planning import AttentionConfig, MemoryPlan, max_sequence_length, plan_memory, recommend
from .output import Document, FailedError, table

# The variants of the design documents; their figures, in GB, were measured on a GTX 1080.
VARIANTS: dict[str, SparsePatternConfig | None] = {
    "Dense": None,
    "90% Sparse": SparsePatternConfig(sparsity_ratio=0.1),
    "95% Sparse": SparsePatternConfig(sparsity_ratio=0.05),
    "99% Sparse": SparsePatternConfig(sparsity_ratio=0.01),
    "Hierarchical": SparsePatternConfig(pattern_type="hierarchical"),
}
DOCUMENTED_16K = {"Dense": 0.539, "90% Sparse": 0.531, "95% Sparse": 0.531, "99% Sparse": 0.531, "Hierarchical": 2.208}
DOCUMENTED_BY_LENGTH = {4096: 0.133, 8192: 0.266, 16384: 0.531, 32768: 1.063}
DOCUMENTED_LONGEST = {
    "GTX 1080": ("65K", "65K"),
    "V100": ("130K", "400K"),
    "A100": ("200K", "1M+"),
    "H100": ("200K", "1M+"),
}
DOCUMENTED_RING = {("GTX 1080", 2): "130K", ("V100", 4): "1.6M", ("A100", 8): "8M+"}


def run(
    console: Console,
    config: AttentionConfig,
    *,
    tokens: int,
    device: str | None,
    budget_gib: float | None,
    world_size: int,
    tables: bool,
    **options: Any,
) -> Document:
    """Print the plan, the longest sequence and a recommendation. FailedError if the plan does not fit."""
    where = Device.of(device)
    budget = where.budget if budget_gib is None else int(budget_gib * GIB)
    where = replace(where, budget=budget)
    plan = plan_memory(config, tokens, world_size=world_size, device=where, **options)
    longest = max_sequence_length(config, where, world_size=world_size, **options)
    room = f"{as_text(budget)} on {where.name}"
    document = {**as_document(plan), "longest": longest}
    fits = "fit" if plan.fits else "do not fit"
    console.print(f"{tokens:,} tokens take {as_text(plan.peak_bytes)} and {fits} {room}.", style="bold")
    console.print(f"Longest sequence in {room}, {plan.world_size} device(s): {longest:,} tokens.\n")
    console.print(_table(plan, tokens, training=options["training"]))
    if plan.world_size > 1:
        document["ring"] = _ring(config, tokens, plan)
        console.print(document["ring"], soft_wrap=True)
    if plan.backend == "sdpa":
        console.print(
            "Nothing is left out, so PyTorch's fused kernel runs, which holds no scores: a sparse pattern saves "
            "time here, and no memory.",
            soft_wrap=True,
        )
    advice = {name: value for name, value in options.items() if name != "block_size"}
    sizes = {"heads": config.heads, "heads_kv": config.heads_kv, "head_dim": config.head_dim}
    console.print("\nOther patterns for this length (`recommend`, which does not know yours):", style="bold")
    document["advice"] = _advice(tokens, where, **advice, **sizes)
    for line in document["advice"]:
        console.print(f"  {line}", soft_wrap=True)
    if tables:
        for made in documented_tables():
            console.print()
            console.print(made)
    if not plan.fits:
        raise FailedError(
            f"{tokens:,} tokens take {as_text(plan.peak_bytes)} and do not fit {room}; {longest:,} tokens do", document
        )
    return document


def as_document(plan: MemoryPlan) -> Document:
    """A plan in plain values."""
    return {
        "backend": plan.backend,
        "device": plan.device.name,
        "budget_bytes": plan.device.budget,
        "world_size": plan.world_size,
        "items": [{**item._asdict(), "phases": list(item.phases)} for item in plan.items],
        "phases": plan.phases,
        "peak_bytes": plan.peak_bytes,
        "peak_phase": plan.peak_phase,
        "fits": plan.fits,
    }


def _ring(config: AttentionConfig, tokens: int, plan: MemoryPlan) -> str:
    """What a layer sends over the ring; time is left to `ring_cost`, which needs rates."""
    shape = plan.shape
    cost = ring_cost(
        config.pattern,
        tokens,
        plan.world_size,
        heads=shape.heads,
        heads_kv=shape.heads_kv,
        head_dim=shape.head_dim,
        batch=shape.batch,
        itemsize=shape.dtype.itemsize,
        flops=1.0,
        bandwidth=1.0,
        num_ranks=3,
    )
    return (
        f"Ring of {plan.world_size}: a rank receives {as_text(cost.received_bytes)} of keys and values a layer, in "
        f"{cost.steps} steps; passing all of them around would be {as_text(cost.full_ring_bytes)}."
    )


def _advice(tokens: int, where: Device, **options: Any) -> list[str]:
    try:
        found = recommend(tokens, where, **options)
    except ValueError as error:
        return [str(error)]
    return [*found.reasons, f"Options: {found.options or 'dense attention'}"]


def _table(plan: MemoryPlan, tokens: int, *, training: bool) -> Table:
    what = "forward and backward" if training else "forward"
    shape = plan.shape
    size = f"{shape.batch} x {shape.heads} heads x {shape.head_dim}"
    title = f"{tokens:,} tokens, {size}, {what}, {plan.backend} backend"
    made = table("item", "kind", right=tuple(plan.phases), title=title)
    for item in plan.items:
        made.add_row(
            item.name, item.kind, *(as_text(item.bytes) if phase in item.phases else "" for phase in plan.phases)
        )
    made.add_section()
    made.add_row("all of them", "", *(as_text(total) for total in plan.phases.values()))
    return made


def documented_tables() -> list[Table]:
    """The tables of the design documents, planned anew: 8 heads x 64, float16, one sample, forward."""
    options: dict[str, Any] = {"dtype": torch.float16, "device": "GTX 1080"}
    configs = {name: AttentionConfig.of(config or Full()) for name, config in VARIANTS.items()}

    def gigabytes(name: str, tokens: int, **more: Any) -> str:
        return f"{plan_memory(configs[name], tokens, **{**options, **more}).peak_bytes / 1e9:.3f} GB"

    peaks = table("variant", "documented, measured", "planned", title="Peak memory, 16,384 tokens, GTX 1080")
    for name, theirs in DOCUMENTED_16K.items():
        peaks.add_row(name, f"{theirs:.3f} GB", gigabytes(name, 16384))
    named = ("Dense", "95% Sparse", "99% Sparse")
    lengths = table("tokens", "documented, all three", *named, title="Peak memory by length, GTX 1080, planned")
    for tokens, theirs in DOCUMENTED_BY_LENGTH.items():
        lengths.add_row(f"{tokens:,}", f"{theirs:.3f} GB", *(gigabytes(name, tokens) for name in named))

    def longest(name: str, gpu: str, world_size: int = 1) -> str:
        tokens = max_sequence_length(configs[name], gpu, dtype=torch.float16, world_size=world_size)
        return f"{tokens:,}"

    single = table("GPU", "memory", "documented: dense, 99%", "Dense", "99% Sparse", title="Longest sequence, one GPU")
    for gpu, said in DOCUMENTED_LONGEST.items():
        memory = as_text(Device.of(gpu).budget)
        single.add_row(gpu, memory, ", ".join(said), longest("Dense", gpu), longest("99% Sparse", gpu))
    ring = table("devices", "documented: 99%", "99% Sparse", title="Longest sequence, a ring")
    for (gpu, count), reach in DOCUMENTED_RING.items():
        ring.add_row(f"{count} x {gpu}", reach, longest("99% Sparse", gpu, count))
    return [peaks, lengths, single, ring]
