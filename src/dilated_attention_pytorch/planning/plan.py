"""Whether a call fits, and the longest sequence that does.

    plan = plan_memory(module, 131072, dtype=torch.bfloat16, training=True)   # heads=8, head_dim=64
    print(plan)                                                               # every tensor, and the peak
    max_sequence_length(module, "H200", dtype=torch.bfloat16)

Plans are arithmetic on shapes: they take milliseconds and allocate nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from ..backends.base import Request
from ..backends.sizes import Shape, SizeRequest
from ..distributed import passes
from ..layout import BlockLayout
from ..layout.checks import MAX_SEQUENCE
from ..layout.size import ListSize
from ..layout.terms import grids_of
from ..memory.devices import Device, as_text
from ..ops.checks import DEFAULT_BLOCK_SIZE, DTYPES, check_deterministic
from ..ops.choose import BY_NAME, choose
from ..patterns import Branches, Causal, Pattern, PerHead, SparsePatternConfig
from ..patterns.base import check_flag, check_int
from ..patterns.blocks import ceil_div
from ..patterns.config import DEFAULT_DILATION_RATES, DEFAULT_SEGMENT_LENGTHS
from .counting import lists_of_branches, lists_of_pattern
from .estimate import PHASES, Item, attention_items, peak_of

BACKENDS = ("auto", *BY_NAME)
LONGEST = MAX_SEQUENCE - 1


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """What the planner needs to know about an attention module; `of` takes it from one.

    Attributes:
        pattern, causal_pattern: which pairs may attend, in calls that are not causal and in those that are. `pattern`
            may also be a finished layout, or the branches of dilated attention.
        heads, heads_kv, head_dim: of the tensors; head_dim_v: of v and out, where it is another than of q and k.
        embed_dim: of a module with projections, else None.
        backend: "auto", or the name of one, which is not verified to run on the device.
    """

    pattern: Pattern | BlockLayout | Branches
    causal_pattern: Pattern | None = None
    heads: int = 8
    heads_kv: int | None = None
    head_dim: int = 64
    head_dim_v: int | None = None
    embed_dim: int | None = None
    backend: str = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, Pattern | BlockLayout | Branches):
            raise TypeError(f"pattern must be a Pattern, a BlockLayout or Branches, got {type(self.pattern).__name__}")
        for name in ("heads", "heads_kv", "head_dim", "head_dim_v", "embed_dim"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), least=1)
        if self.head_dim_v is not None and self.embed_dim is not None:
            raise ValueError(f"head_dim_v must be left out for a module with projections, got {self.head_dim_v}")
        if self.heads % (self.heads_kv or self.heads):
            raise ValueError(f"heads must be a multiple of heads_kv, got {self.heads} and {self.heads_kv}")
        if self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {list(BACKENDS)}, got {self.backend!r}")

    @classmethod
    def sparse(
        cls,
        config: SparsePatternConfig,
        segment_lengths: Sequence[int] = DEFAULT_SEGMENT_LENGTHS,
        dilation_rates: Sequence[int] = DEFAULT_DILATION_RATES,
        **sizes: Any,
    ) -> AttentionConfig:
        patterns = [config.pattern(segment_lengths, dilation_rates, is_causal) for is_causal in (False, True)]
        return cls(pattern=patterns[0], causal_pattern=patterns[1], **sizes)

    @classmethod
    def of(cls, what: Any, **sizes: int | None) -> AttentionConfig:
        """From a config, a pattern, a layout, branches, a `SparsePatternConfig` or a module.

        A module has `pattern(is_causal)` (or `branches`, for dilated attention) and `backend`. One with projections
        has an `attention` with these, and `num_heads`, `num_kv_heads`, `head_dim` and `embed_dim`. `sizes` are heads,
        heads_kv, head_dim and head_dim_v where the module does not fix them.
        """
        given = {name: value for name, value in sizes.items() if value is not None}
        if isinstance(what, cls):
            return replace(what, **given)  # type: ignore[arg-type]
        if isinstance(what, SparsePatternConfig):
            return cls.sparse(what, **given)  # type: ignore[arg-type]
        if isinstance(what, Pattern | BlockLayout | Branches):
            return cls(pattern=what, **given)  # type: ignore[arg-type]
        known: dict[str, Any] = {}
        if hasattr(what, "embed_dim"):
            known = {"heads": what.num_heads, "heads_kv": what.num_kv_heads, "head_dim": what.head_dim}
            for name in given.keys() & known.keys():
                if given[name] != known[name]:
                    raise ValueError(f"{name} must be that of the module, {known[name]}, got {given[name]}")
            known["embed_dim"] = what.embed_dim
            what = what.attention
        if isinstance(getattr(what, "branches", None), Branches):
            return cls(pattern=what.branches, backend=what.backend, **{**given, **known})
        if not callable(getattr(what, "pattern", None)):
            raise TypeError(
                "module_or_config must be an AttentionConfig, Pattern, BlockLayout, Branches, SparsePatternConfig or "
                f"an attention module of this package, got {type(what).__name__}"
            )
        patterns = {"pattern": what.pattern(False), "causal_pattern": what.pattern(True)}
        return cls(**patterns, backend=what.backend, **{**given, **known})


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a call, item by item. Prints as a table.

    Attributes:
        items: every tensor, list and workspace, with its kind and the phases it is alive in.
        backend: the one that runs the call.
        shape: the tensors of one device.
        world_size: devices that share the sequence.
    """

    items: tuple[Item, ...]
    backend: str
    shape: Shape
    world_size: int
    device: Device

    @property
    def phases(self) -> dict[str, int]:
        """Bytes alive in each phase."""
        return peak_of(self.items)

    @property
    def peak_bytes(self) -> int:
        """The largest number of bytes alive at once on one device, q, k and v included."""
        return max(self.phases.values())

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: self.phases[phase])

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.device.budget

    def by_kind(self, phase: str | None = None) -> dict[str, int]:
        """Bytes by kind in a phase, by default that of the peak."""
        phase = self.peak_phase if phase is None else phase
        if phase not in PHASES:
            raise ValueError(f"phase must be one of {list(PHASES)}, got {phase!r}")
        total: dict[str, int] = {}
        for item in self.items:
            if phase in item.phases:
                total[item.kind] = total.get(item.kind, 0) + item.bytes
        return total

    def __str__(self) -> str:
        width = max(len(item.name) for item in self.items)
        lines = [
            f"{item.name:{width}}  {as_text(item.bytes):>12}  {item.kind:10}  {', '.join(item.phases)}"
            for item in self.items
        ]
        fits = "fits" if self.fits else "does not fit"
        lines.append(
            f"{'peak':{width}}  {as_text(self.peak_bytes):>12}  in {self.peak_phase}, {self.backend} backend; "
            f"{fits} {self.device.name} ({as_text(self.device.budget)})"
        )
        return "\n".join(lines)


def plan_memory(
    module_or_config: Any,
    seq_len: int,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    training: bool = False,
    world_size: int = 1,
    *,
    is_causal: bool = False,
    heads: int | None = None,
    heads_kv: int | None = None,
    head_dim: int | None = None,
    head_dim_v: int | None = None,
    block_size: int | None = None,
    device: Device | torch.device | str | None = None,
    deterministic: bool | None = None,
) -> MemoryPlan:
    """The memory of one call, forward or forward and backward, above the level before q, k and v exist.

    Args:
        module_or_config: see `AttentionConfig.of`.
        seq_len: tokens of queries and keys, of all devices together.
        training: include the backward pass and its gradients.
        world_size: devices of a ring that share the sequence; the plan is for one of them.
        heads, heads_kv, head_dim: of the tensors; by default 8, the same and 64, or those of a module with projections.
        head_dim_v: of v and out, where it is another than that of q and k.
        block_size: of the layout; by default that of the pattern, or 128.
        device: see `Device.of`; the current one by default. It decides which backend runs, and what fits.
        deterministic: as in `block_sparse_attention`. Where it is False, training on Hopper takes a dq in float32 too.
    """
    for name, value in (("seq_len", seq_len), ("batch", batch), ("world_size", world_size)):
        check_int(name, value, least=1)
    if seq_len > LONGEST:
        raise ValueError(f"seq_len must be at most {LONGEST}, got {seq_len}")
    for name, flag in (("training", training), ("is_causal", is_causal)):
        check_flag(name, flag)
    if dtype not in DTYPES:
        raise TypeError(f"dtype must be float64, float32, bfloat16 or float16, got {dtype}")
    sizes = {"heads": heads, "heads_kv": heads_kv, "head_dim": head_dim, "head_dim_v": head_dim_v}
    config = AttentionConfig.of(module_or_config, **sizes)
    where = Device.of(device)
    lists = _lists(config, seq_len, is_causal, block_size).shared_by(world_size)
    tokens = ceil_div(seq_len, world_size)
    shape = Shape(
        batch=batch,
        seq_q=tokens,
        seq_k=tokens,
        heads=config.heads,
        heads_kv=config.heads_kv or config.heads,
        head_dim=config.head_dim,
        dtype=dtype,
        head_dim_v=config.head_dim_v,
    )
    backend = _backend(config.backend, shape, lists, where, ring=world_size > 1)
    threads = torch.get_num_threads() if where.type == "cpu" else 1
    request = SizeRequest(
        shape=shape, lists=lists, device=where.type, threads=threads, capability=where.capability,
        deterministic=check_deterministic(deterministic),
    )  # fmt: skip
    items = attention_items(request, backend, training=training)
    if where.type == "cpu" and config.embed_dim is not None:  # malloc caches the freed workspace
        later = {"forward": "projection", "backward": "projection backward"}
        items = [
            item._replace(phases=(*item.phases, later[item.phases[0]]))
            if item.kind == "workspace" and item.phases[0] in later
            else item
            for item in items
        ]
    items = _inputs(config, shape, training) + items
    if world_size > 1:
        items += _ring(shape, training)
    if where.type == "cuda":  # its allocator rounds up to multiples of 512 bytes
        items = [item._replace(bytes=ceil_div(item.bytes, 512) * 512) for item in items]
    return MemoryPlan(tuple(items), backend.name, shape, world_size, where)


def _lists(config: AttentionConfig, seq_len: int, is_causal: bool, block_size: int | None) -> ListSize:
    pattern = config.pattern
    if isinstance(pattern, BlockLayout):
        if pattern.lengths != (seq_len, seq_len):
            raise ValueError(f"seq_len must be that of the layout, {pattern.lengths}, got {seq_len}")
        return ListSize.of(pattern.causal if is_causal else pattern)
    if isinstance(pattern, Branches):
        if block_size is not None:
            raise ValueError(f"block_size is chosen by dilated attention itself, got {block_size}")
        return lists_of_branches(pattern, seq_len, config.heads, is_causal)
    if is_causal:
        pattern = pattern & Causal() if config.causal_pattern is None else config.causal_pattern
    if isinstance(pattern, PerHead) and len(pattern.patterns) not in (config.heads, config.heads_kv):
        raise ValueError(f"heads must be the pattern's {len(pattern.patterns)}, got {config.heads}")
    size = min(pattern.block_sizes, default=DEFAULT_BLOCK_SIZE) if block_size is None else block_size
    return lists_of_pattern(pattern, seq_len, seq_len, size)


def _backend(named: str, shape: Shape, lists: ListSize, device: Device, *, ring: bool) -> ModuleType:
    """The backend that would run the call on the device; a named one is not verified to run there."""
    if named != "auto":
        return BY_NAME[named]
    request = Request(
        device=torch.device(device.type) if device.here is None else device.here,
        capability=device.capability if device.here is None else None,
        dtype=shape.dtype,
        kind=lists.kind,
        square=shape.seq_q == shape.seq_k,
        grouped=shape.heads != shape.heads_kv,
        head_dim=shape.head_dim,
        head_dim_v=shape.head_dim_v,
        return_lse=ring,  # ranks merge their partial results by it
    )
    return choose("auto", request)


def _inputs(config: AttentionConfig, shape: Shape, training: bool) -> list[Item]:
    """q, k and v; for a module with projections also its input, parameters, output and their gradients."""
    kept: tuple[str, ...] = ("layout", "forward", "backward") if training else ("layout", "forward")
    if config.embed_dim is None:
        return [Item("q", "tensors", shape.q, kept), Item("k, v", "tensors", shape.k + shape.v, kept)]
    size, embed = shape.dtype.itemsize, config.embed_dim
    x = shape.batch * shape.seq_q * embed * size
    weights = size * (embed + 1) * (2 * embed + 2 * shape.heads_kv * shape.head_dim)
    last = ("projection", "backward", "projection backward") if training else ("projection",)
    everywhere = (*kept[:2], *last)
    items = [
        Item("parameters", "parameters", weights, everywhere),
        Item("input", "tensors", x, everywhere),
        Item("q, k, v", "tensors", shape.q + 2 * shape.k, (*kept[:2], *last[:2]) if training else kept[:2]),
        Item("output", "tensors", x, last),
    ]
    if training:
        backward = last[1:]
        items += [
            Item("out, kept", "tensors", shape.q + shape.lse, ("projection",)),
            Item("doutput", "gradients", x, backward),
            Item("parameter gradients", "gradients", weights, backward),
            Item("dq, dk, dv", "gradients", 2 * (shape.q + 2 * shape.k), last[2:]),
        ]
    else:
        items.append(Item("out, kept", "tensors", shape.q, ("projection",)))
    return items


def _ring(shape: Shape, training: bool) -> list[Item]:
    phases = ("forward", "backward") if training else ("forward",)
    workspace = passes.workspace(shape)
    items = [
        Item("two receive buffers", "ring", workspace.received, phases),
        Item("running out and lse", "ring", workspace.running, ("forward",)),
    ]
    if training:
        items.append(Item("dk, dv on their way", "ring", workspace.returning, ("backward",)))
    return items


def max_sequence_length(
    module_or_config: Any, budget: int | Device | torch.device | str | None = None, **options: Any
) -> int:
    """The longest sequence whose plan fits, to within a block, and at most 2³⁰ − 1 tokens. A pattern of a grid has one
    length: that is the answer, if it fits.

    Args:
        budget: bytes, or a device (see `Device.of`) whose memory is the budget; by default the current device.
        options: those of `plan_memory`; if the budget is in bytes, `device` is where the call runs.
    """
    device, options = device_with_budget(budget, options)

    def fits(tokens: int) -> bool:
        return plan_memory(module_or_config, tokens, device=device, **options).fits

    pattern = AttentionConfig.of(module_or_config).pattern
    grids = grids_of(pattern) if isinstance(pattern, Pattern) else set()
    step = 256 if not grids else max(grid.total for grid in grids)
    if not fits(step):
        smallest = plan_memory(module_or_config, step, device=device, **options)
        raise ValueError(
            f"budget must hold at least {step} tokens, which take {as_text(smallest.peak_bytes)}, "
            f"got {as_text(device.budget)} ({device.name})"
        )
    if grids:
        return step
    low, high = 1, 2
    while high * step <= LONGEST and fits(high * step):
        low, high = high, 2 * high
    while high - low > max(1, low >> 12):
        middle = (low + high) // 2
        low, high = (middle, high) if middle * step <= LONGEST and fits(middle * step) else (low, middle)
    return low * step


def device_with_budget(budget: object, options: Mapping[str, Any]) -> tuple[Device, dict[str, Any]]:
    """The device with this budget, and the options without `device`."""
    options = dict(options)
    if isinstance(budget, bool) or not isinstance(budget, int | Device | torch.device | str | None):
        raise TypeError(f"budget must be bytes or a device, got {budget!r}")
    if not isinstance(budget, int):
        if budget is not None and options.pop("device", None) is not None:
            raise ValueError(f"give a device as budget or as device, not both, got {budget!r}")
        return Device.of(options.pop("device", None) if budget is None else budget), options
    check_int("budget", budget, least=1)
    device = Device.of(options.pop("device", None))
    return replace(device, name=f"the budget on {device.name}", budget=budget), options
