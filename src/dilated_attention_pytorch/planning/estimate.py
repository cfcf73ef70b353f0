"""Bytes by arithmetic: every tensor of an attention call, and when it is alive. Nothing is allocated.

A call goes through `PHASES`. An `Item` is alive in some of them, and the peak is the phase with the largest sum, above
the level before q, k and v exist.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import NamedTuple

from ..backends.sizes import SizeRequest

PHASES = ("layout", "forward", "projection", "backward", "projection backward")
KINDS = ("tensors", "gradients", "parameters", "lists", "workspace", "ring")


class Item(NamedTuple):
    """Something that takes memory, and the phases in which it is alive."""

    name: str
    kind: str
    bytes: int
    phases: tuple[str, ...]


def attention_items(request: SizeRequest, backend: ModuleType, *, training: bool) -> list[Item]:
    """The memory of one call on this backend, without its inputs."""
    shape, lists = request.shape, request.lists
    work_order = hasattr(backend, "backward") and backend.needs_work_order
    both = work_order and training
    kept: tuple[str, ...] = ("forward", "backward") if training else ("forward",)
    always = ("layout", *kept)
    items = [
        Item("lists by query", "lists", lists.by(lists.rows, work_order=work_order) + lists.rules, always),
        Item("building the lists", "workspace", lists.building(by_key=both), ("layout",)),
        Item("out", "tensors", shape.out, kept),
        Item("lse", "tensors", shape.lse, kept),
    ]
    if work_order and request.device == "cuda" and lists.run_plan:
        items.append(Item("plan of runs", "lists", lists.run_plan, always))
    if both:
        items.append(Item("lists by key", "lists", lists.by(lists.columns, work_order=True) + lists.seen_by, always))
    if training:
        items += [
            Item("dout", "gradients", shape.out, ("backward",)),
            Item("dq", "gradients", shape.q, ("backward",)),
            Item("dk, dv", "gradients", shape.k + shape.v, ("backward",)),
        ]
    workspace = backend.workspace(request)
    items.append(Item(f"{backend.name} workspace", "workspace", workspace.forward, ("forward",)))
    if training:
        items.append(Item(f"{backend.name} workspace", "workspace", workspace.backward, ("backward",)))
    return [item for item in items if item.bytes]


def peak_of(items: Iterable[Item]) -> dict[str, int]:
    """Bytes alive in each phase."""
    items = list(items)
    alive = {phase: sum(item.bytes for item in items if phase in item.phases) for phase in PHASES}
    return {phase: total for phase, total in alive.items() if total}
