"""A call of attention as the command line names it: its pattern, its sizes, what it costs and how it is written."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

import torch

from ..layout import BlockLayout
from ..layout.branches import layout_of_branches
from ..layout.cache import load_layout
from ..patterns import Branches, Pattern, PerHead
from ..patterns.naming import code_of, pattern_of
from .output import Document

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BLOCK_SIZE = 128  # of a pattern that has none of its own, as in `block_sparse_attention`
FILE = ".safetensors"


@dataclass(frozen=True, kw_only=True)
class Call:
    """What is attended to, by tensors of which shape.

    Attributes:
        name: as it was given.
        what: the pattern, already causal if the call is; branches, which are not; or a finished layout.
        block_size: of the layout; None where branches or a finished layout have their own.
    """

    name: str
    what: Pattern | Branches | BlockLayout
    tokens: int
    block_size: int | tuple[int, int] | None
    is_causal: bool
    heads: int
    head_dim: int
    dtype: torch.dtype
    heads_kv: int | None = None
    batch: int = 1

    @classmethod
    def named(
        cls,
        name: str,
        *,
        tokens: int,
        block_size: int | tuple[int, int] | None = None,
        is_causal: bool = False,
        heads: int | None = None,
        heads_kv: int | None = None,
        batch: int = 1,
        head_dim: int = 64,
        dtype: torch.dtype = torch.float32,
    ) -> Call:
        """Read the name, see `patterns.naming`. Heads are 8 by default, or as many as have a pattern of their own."""
        size = BLOCK_SIZE if block_size is None else block_size
        what = pattern_of(name, block_size=size if isinstance(size, int) else max(size), is_causal=is_causal)
        if isinstance(what, Branches) and block_size is not None:
            raise ValueError(f"block_size is chosen by dilated attention itself, got {block_size}")
        own = len(what.patterns) if isinstance(what, PerHead) else 8
        if isinstance(what, PerHead) and heads is not None and heads != own:
            raise ValueError(f"heads must be the pattern's {own}, got {heads}")
        if (heads or own) % (heads_kv or 1):
            raise ValueError(f"heads must be a multiple of heads_kv, got {heads or own} and {heads_kv}")
        return cls(
            name=name,
            what=what,
            tokens=tokens,
            block_size=None if isinstance(what, Branches) else size,
            is_causal=is_causal,
            heads=own if heads is None else heads,
            heads_kv=heads_kv,
            batch=batch,
            head_dim=head_dim,
            dtype=dtype,
        )

    @classmethod
    def saved(cls, path: str, *, is_causal: bool = False, head_dim: int = 64, dtype: torch.dtype) -> Call:
        """A layout that a `PersistentPatternCache` has written."""
        layout = load_layout(path)
        return cls(
            name=path,
            what=layout.causal if is_causal else layout,
            tokens=layout.seq_k,
            block_size=None,
            is_causal=is_causal,
            heads=layout.num_heads or 8,
            head_dim=head_dim,
            dtype=dtype,
        )

    def layout(self, device: torch.device | str = "cpu") -> BlockLayout:
        if isinstance(self.what, BlockLayout):
            return self.what.to(device)
        if isinstance(self.what, Branches):
            return layout_of_branches(
                self.what, self.tokens, num_heads=self.heads, is_causal=self.is_causal, device=device
            )
        assert self.block_size is not None
        return BlockLayout.from_pattern(self.what, self.tokens, block_size=self.block_size, device=device)

    def dense(self) -> Call:
        """The same over every key, or every earlier one."""
        return Call.named(
            "causal" if self.is_causal else "full",
            tokens=self.tokens,
            heads=self.heads,
            heads_kv=self.heads_kv,
            batch=self.batch,
            head_dim=self.head_dim,
            dtype=self.dtype,
        )

    def figures(self, layout: BlockLayout) -> Document:
        """Blocks, density and cost of this call, whose layout it is."""
        which, _, _, rule = layout.entries()
        blocks = torch.bincount(which, minlength=layout.num_lists).tolist()
        batch = layout.batch_size or self.batch
        cost = layout.cost(
            batch=batch,
            heads=self.heads,
            heads_kv=self.heads_kv,
            head_dim=self.head_dim,
            itemsize=self.dtype.itemsize,
        )
        full = int((rule < 0).sum())
        return {
            "pattern": self.name,
            "is_causal": self.is_causal,
            "tokens": self.tokens,
            "heads": self.heads,
            "head_dim": self.head_dim,
            "dtype": dtype_name(self.dtype),
            "block_size": [layout.block_q, layout.block_k],
            "blocks_a_side": [layout.num_q_blocks, layout.num_k_blocks],
            "lists": layout.num_lists,
            "active_blocks": layout.num_active_blocks,
            "active_blocks_by_list": blocks,
            "full_blocks": full,
            "partial_blocks": layout.num_active_blocks - full,
            "density": cost.pairs / (layout.lengths[0] * layout.lengths[1] * batch * self.heads),
            "block_density": layout.block_density,
            "cost": asdict(cost),
        }

    def code(self, device: str = "cpu") -> str:
        """Python that makes the tensors and the call."""
        if isinstance(self.what, BlockLayout):
            raise ValueError(f"a finished layout has no pattern to write down, got {self.name!r}")
        dtype = "" if self.dtype == torch.float32 else f", dtype=torch.{dtype_name(self.dtype)}"
        where = "" if device == "cpu" else f', device="{device}"'
        tensors = self._tensors(f"{dtype}{where}")
        if isinstance(self.what, Branches):
            options = [f"{field}={list(getattr(self.what, field))}" for field in ("segment_lengths", "dilation_rates")]
            if self.what.head_offsets != "interleaved":
                options.append(f'head_offsets="{self.what.head_offsets}"')
            if self.is_causal:
                options.append("is_causal=True")
            names = {"dilated_attention"}
            lines = [tensors, f"out = dilated_attention(q, k, v, {', '.join(options)})"]
        else:
            pattern, given = code_of(self.what), "pattern"
            names = {"block_sparse_attention", *names_in(pattern)}
            lines = [f"pattern = {pattern}", tensors]
            if self.block_size != min(self.what.block_sizes, default=BLOCK_SIZE):
                names.add("BlockLayout")
                given = "layout"
                sizes = f"{self.tokens}, block_size={self.block_size}{where}"
                lines.append(f"layout = BlockLayout.from_pattern(pattern, {sizes})")
            lines.append(f"out = block_sparse_attention(q, k, v, {given})")
        return "\n".join(["import torch", f"from {PACKAGE} import {', '.join(sorted(names))}", "", *lines]) + "\n"

    def _tensors(self, options: str) -> str:
        """The line, or the two where key heads are fewer, that make q, k and v."""
        shapes = {
            heads: f"{self.batch}, {self.tokens}, {heads}, {self.head_dim}"
            for heads in (self.heads, self.heads_kv or self.heads)
        }
        comment = "  # (batch, seq, heads, head_dim)"
        made = [f"torch.randn({shape}{options})" for shape in shapes.values()]
        if len(made) == 1:
            return f"q, k, v = ({made[0]} for _ in range(3)){comment}"
        return f"q = {made[0]}{comment}\nk, v = ({made[1]} for _ in range(2))"


PACKAGE = __name__.partition(".")[0]


def names_in(code: str) -> list[str]:
    """The classes that an expression calls."""
    return re.findall(r"\b[A-Z]\w+(?=\()", code)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def blocks_of(text: str) -> int | tuple[int, int]:
    """Tokens of a block, as 64, or of query x key blocks, as 64x16."""
    sizes = text.split("x")
    if len(sizes) > 2 or not all(size.isdecimal() for size in sizes):
        raise ValueError(f"block size must be a number or two, as 64x16, got {text!r}")
    return int(sizes[0]) if len(sizes) == 1 else (int(sizes[0]), int(sizes[1]))
