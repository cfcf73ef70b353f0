"""`SparsePatternConfig`: how the design documents name a pattern."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from .base import Pattern, check_int
from .blocks import (
    DilatedBlocks,
    GlobalBlocks,
    LocalBlocks,
    check_block_size,
    check_levels,
    check_ratio,
    hierarchical,
)
from .tokens import Causal

DEFAULT_SEGMENT_LENGTHS = (2048, 4096, 8192)
DEFAULT_DILATION_RATES = (1, 2, 4)

# Levels are (stride in blocks, window in tokens).
HIERARCHICAL_PRESETS = MappingProxyType(
    {
        "standard": ((1, 512), (4, 4096), (16, 32768)),
        "fine_grained": ((1, 1024), (2, 4096), (8, 16384)),
        "long_range": ((1, 256), (8, 16384), (64, 262144)),
    }
)

# What each pattern type reads, and what it takes when nothing is said.
_FIELDS: dict[str, dict[str, Any]] = {
    "dilated_sparse": {"sparsity_ratio": 0.1},
    "local_window": {"local_window_size": 512},
    "global_local": {"local_window_size": 512, "global_tokens": 64},
    "hierarchical": {"levels": HIERARCHICAL_PRESETS["standard"]},
    "adaptive": {"sparsity_ratio": 0.1},
}


@dataclass(frozen=True, kw_only=True)
class SparsePatternConfig:
    """Which blocks to keep: a record of choices, of which a pattern type reads some.

    The other fields may be given all the same, so that the type can be changed and the rest left standing; the `repr`
    names them as unused. (An argument that nothing reads is an error everywhere else in this package.) A field that
    does not exist, or a value that it cannot have, is an error whatever the type.

    Args:
        pattern_type: "dilated_sparse", "local_window", "global_local", "hierarchical" or "adaptive" (blocks chosen from
            the content, for `BlockSparseAdaptive`).
        sparsity_ratio: share of blocks KEPT by dilated_sparse and adaptive, in (0, 1]; 0.1 keeps a tenth.
        block_size: tokens a block: 16, 32, 64, 128 or 256.
        local_window_size: tokens of the local window of local_window and global_local.
        global_tokens: how many first tokens every query of global_local sees (rounded up to whole blocks).
        levels: (stride in blocks, window in tokens) pairs of hierarchical, or the name of a preset.
    """

    pattern_type: str = "dilated_sparse"
    sparsity_ratio: float | None = None
    block_size: int = 128
    local_window_size: int | None = None
    global_tokens: int | None = None
    levels: Sequence[tuple[int, int]] | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.pattern_type, str) or self.pattern_type not in _FIELDS:
            raise ValueError(f"pattern_type must be one of {sorted(_FIELDS)}, got {self.pattern_type!r}")
        check_block_size("block_size", self.block_size)
        for name, default in _FIELDS[self.pattern_type].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        if self.sparsity_ratio is not None:
            check_ratio("sparsity_ratio", self.sparsity_ratio)
        if self.local_window_size is not None:
            check_int("local_window_size", self.local_window_size, least=0)
        if self.global_tokens is not None:
            check_int("global_tokens", self.global_tokens, least=1)
        if self.levels is not None:
            object.__setattr__(self, "levels", _checked_levels(self.levels, self.block_size))

    @property
    def unused(self) -> dict[str, Any]:
        """The fields that were given and that the pattern type does not read."""
        names = {name for fields in _FIELDS.values() for name in fields} - _FIELDS[self.pattern_type].keys()
        return {name: getattr(self, name) for name in sorted(names) if getattr(self, name) is not None}

    def __repr__(self) -> str:
        names = "pattern_type", *_FIELDS[self.pattern_type], "block_size"
        notes = [", ".join(f"{name}={getattr(self, name)!r}" for name in names)]
        notes += [self.kept] if self.kept else []
        if self.unused:
            notes.append(as_unused(self.unused))
        return f"SparsePatternConfig({'; '.join(notes)})"

    @property
    def kept(self) -> str:
        """What `sparsity_ratio` means, in words; nothing of a type that does not read it."""
        if "sparsity_ratio" not in _FIELDS[self.pattern_type]:
            return ""
        return f"keeps {100 * (self.sparsity_ratio or 0):g}% of the blocks"

    @property
    def uses_segments(self) -> bool:
        return self.pattern_type == "dilated_sparse"

    @property
    def is_adaptive(self) -> bool:
        return self.pattern_type == "adaptive"

    def pattern(
        self,
        segment_lengths: Sequence[int] = DEFAULT_SEGMENT_LENGTHS,
        dilation_rates: Sequence[int] = DEFAULT_DILATION_RATES,
        is_causal: bool = False,
    ) -> Pattern:
        """The pattern that this configuration names; segments matter to dilated_sparse alone."""
        if self.is_adaptive:
            raise ValueError(
                "pattern_type 'adaptive' has no pattern, because blocks are chosen from the content: "
                "use BlockSparseAdaptive(sparse_config=...) or select_blocks"
            )
        blocks: Pattern
        field: Any = self  # those that the type reads are never None
        if self.pattern_type == "dilated_sparse":
            segments = tuple(segment_lengths), tuple(dilation_rates)
            blocks = DilatedBlocks(*segments, field.sparsity_ratio, self.block_size, is_causal)
        elif self.pattern_type == "hierarchical":
            blocks = hierarchical(field.levels, block_size=self.block_size, causal=is_causal)
        else:
            blocks = LocalBlocks(field.local_window_size, block_size=self.block_size, causal=is_causal)
            if self.pattern_type == "global_local":
                blocks = blocks | GlobalBlocks(field.global_tokens, self.block_size)
        return blocks & Causal() if is_causal else blocks


def as_unused(fields: dict[str, Any]) -> str:
    """Fields that nothing reads, for a `repr`."""
    return "unused: " + ", ".join(f"{name}={value!r}" for name, value in fields.items())


def _checked_levels(levels: Sequence[tuple[int, int]] | str, block_size: int) -> tuple[tuple[int, int], ...]:
    if isinstance(levels, str):
        if levels not in HIERARCHICAL_PRESETS:
            raise ValueError(f"levels must be pairs or one of {sorted(HIERARCHICAL_PRESETS)}, got {levels!r}")
        return HIERARCHICAL_PRESETS[levels]
    checked = check_levels(levels)
    hierarchical(checked, block_size=block_size)  # the patterns check strides and windows
    return checked
