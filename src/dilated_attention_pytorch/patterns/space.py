"""Tokens of a grid: neighbourhoods in one to three dimensions, and the order in which the tokens stand in memory.

The sequence is a prefix, such as text, and the tokens of a grid: a line, an image or a video. A query of the grid sees
the prefix and, along every dimension, the coordinates that `seen` names for its own; prefix tokens see everything and
are seen by all. The tokens of the grid stand row by row, the last dimension innermost, with the prefix before them; or
in tiles (`GridOrder`), so that neighbours in space are neighbours in memory.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, NamedTuple, TypeVar

from .base import Pattern, check_flag, check_int, check_sequence, shown
from .blocks import ceil_div

G = TypeVar("G", bound="GridPattern")

MOST_DIMENSIONS = 3
BORDERS = ("shift", "cut")


class Region(NamedTuple):
    """A part of a grid that is cut into tiles of one size: its first coordinates, sizes and tile, and where its tokens
    begin among those of the grid."""

    first: tuple[int, ...]
    shape: tuple[int, ...]
    tile: tuple[int, ...]
    begin: int


@dataclass(frozen=True)
class GridOrder:
    """The order of the tokens of a grid: tile after tile, row by row in a tile and among the tiles, then the prefix.

    Where `tile` does not divide `shape`, the tiles that a border cuts stand behind the whole ones, for the same reason
    as the prefix: they would move tiles away from the borders of blocks. Without a tile: the prefix, then the grid row
    by row.

    Both methods read the same for ints and for tensors of them.
    """

    shape: tuple[int, ...]
    tile: tuple[int, ...] | None = None
    prefix: int = 0

    @property
    def grid_at(self) -> int:
        """Where the tokens of the grid begin."""
        return self.prefix if self.tile is None else 0

    @property
    def num_cells(self) -> int:
        return prod(self.shape)

    @property
    def regions(self) -> list[Region]:
        """The whole tiles, and those that are cut along each set of dimensions, in the order of their tokens."""
        parts = []
        for size, tile in zip(self.shape, self.tile or self.shape, strict=True):
            whole = size - size % tile
            parts.append([(0, whole, tile)] + [(whole, size - whole, size - whole)] * (whole < size))
        found, begin = [], 0
        for part in product(*parts):
            first, sizes, tiles = (tuple(each[i] for each in part) for i in range(3))
            found.append(Region(first, sizes, tiles, begin))
            begin += prod(sizes)
        return found

    def coordinates(self, place: Any) -> list[Any]:
        """Of the token that stands at a place of the grid, counted from `grid_at`."""
        found = [place * 0 for _ in self.shape]
        for region in self.regions:
            here = (place >= region.begin) * (place < region.begin + prod(region.shape))
            number, inside = divmod_of(place - region.begin, prod(region.tile))
            for d in reversed(range(len(self.shape))):
                number, of_tile = divmod_of(number, region.shape[d] // region.tile[d])
                inside, of_token = divmod_of(inside, region.tile[d])
                found[d] = found[d] + here * (region.first[d] + of_tile * region.tile[d] + of_token)
        return found

    def place(self, coordinates: Sequence[Any]) -> Any:
        """The inverse of `coordinates`."""
        found = coordinates[0] * 0
        for region in self.regions:
            here, number, inside = True, 0, 0
            for at, first, size, tile in zip(coordinates, region.first, region.shape, region.tile, strict=True):
                here = here * (at >= first) * (at < first + size)
                of_tile, of_token = divmod_of(at - first, tile)
                number, inside = number * (size // tile) + of_tile, inside * tile + of_token
            found = found + here * (region.begin + number * prod(region.tile) + inside)
        return found


def divmod_of(a: Any, b: int) -> tuple[Any, Any]:
    """`divmod` of a tensor, too."""
    return a // b, a % b


class GridPattern(Pattern, abc.ABC):
    """Base of the patterns of a grid; see the module's text."""

    shape: tuple[int, ...]
    prefix: int
    order: tuple[int, ...] | None

    @abc.abstractmethod
    def seen(self, dimension: int, coordinate: int) -> range:
        """The coordinates along one dimension that a query at `coordinate` sees."""

    @property
    def total(self) -> int:
        """Tokens of the sequence."""
        return self.prefix + prod(self.shape)

    @property
    def token_order(self) -> GridOrder:
        return GridOrder(self.shape, self.order, self.prefix)

    def in_tiles(self: G, tile: int | Sequence[int]) -> G:
        """The same pattern for tokens that stand in the order `tile_order(shape, tile, prefix)`."""
        return replace(self, order=tile)  # type: ignore[type-var]

    def allows(self, query: int, key: int, seq_q: int, seq_k: int) -> bool:
        position = query + seq_k - seq_q
        if not (0 <= position < self.total and key < self.total):
            return False
        of_query, of_key = self._coordinates(position), self._coordinates(key)
        if of_query is None or of_key is None:
            return True
        return all(b in self.seen(d, a) for d, (a, b) in enumerate(zip(of_query, of_key, strict=True)))

    def _coordinates(self, position: int) -> list[int] | None:
        """None for a token of the prefix."""
        order = self.token_order
        place = position - order.grid_at
        return order.coordinates(place) if 0 <= place < order.num_cells else None

    def _check_grid(self) -> None:
        """`shape`, `prefix` and `order`, which all have."""
        object.__setattr__(self, "shape", check_shape(self.shape))
        check_int("prefix", self.prefix, least=0)
        if self.order is not None:
            object.__setattr__(self, "order", check_tile("order", self.order, self.shape))


@dataclass(frozen=True)
class Neighborhood(GridPattern):
    """Neighbourhood attention as NATTEN defines it: along every dimension a query sees the `window` coordinates around
    its own, and near a border the window shifts inwards, so that every query sees as many keys.

    Of an even window one more lies before the query than behind it. Where an argument is one value, it is that of all
    dimensions.

    Args:
        shape: of the grid: (length,), (height, width) or (frames, height, width).
        window: how many coordinates a query sees; NATTEN's `kernel_size`. `window · dilation` must fit into the shape.
        dilation: a query sees coordinates that many apart: those ≡ its own modulo the dilation, a grid of their own.
        causal: a query sees itself and the `window − 1` before it along that dimension; fewer at the border.
        stride: so many queries share the window of the one in their middle (the last one of them where it is causal);
            at most the window.
        prefix: how many tokens, such as text, see all and are seen by all.
        order: the tokens stand in `tile_order(shape, order, prefix)`; by default row by row behind the prefix.
        border: "shift" is NATTEN's; "cut" leaves the window where it is and cuts what lies outside, as a sliding window
            is cut, and it may then be as large as it likes.
    """

    shape: tuple[int, ...]
    window: tuple[int, ...]
    dilation: tuple[int, ...] = (1,)
    causal: tuple[bool, ...] = (False,)
    stride: tuple[int, ...] = (1,)
    prefix: int = 0
    order: tuple[int, ...] | None = None
    border: str = "shift"

    def __post_init__(self) -> None:
        self._check_grid()
        for name in ("window", "dilation", "stride"):
            object.__setattr__(self, name, _ints_of(name, getattr(self, name), len(self.shape)))
        object.__setattr__(self, "causal", _flags_of("causal", self.causal, len(self.shape)))
        if not isinstance(self.border, str) or self.border not in BORDERS:
            raise ValueError(f"border must be one of {list(BORDERS)}, got {shown(self.border)}")
        for size, window, dilation, stride in zip(self.shape, self.window, self.dilation, self.stride, strict=True):
            if dilation > size:
                raise ValueError(f"dilation must be at most the size of its dimension, {size}, got {dilation}")
            if self.border == "shift" and window * dilation > size:
                raise ValueError(
                    f"window · dilation must fit into shape, got {window} · {dilation} in a dimension of {size} "
                    "(border='cut' takes any window)"
                )
            if stride > window:
                raise ValueError(f"stride must be at most the window, {window}, got {stride}")
        super().__post_init__()

    def seen(self, dimension: int, coordinate: int) -> range:
        size, window, dilation, causal, stride = (
            x[dimension] for x in (self.shape, self.window, self.dilation, self.causal, self.stride)
        )
        at, residue = divmod(coordinate, dilation)
        length = ceil_div(size - residue, dilation)  # coordinates of this residue
        leader = min(at // stride * stride + (stride - 1 if causal else stride // 2), length - 1)
        if causal:
            first, stop = leader - window + 1, at + 1
        else:
            first = leader - window // 2
            if self.border == "shift":
                first = min(max(first, 0), length - window)
            stop = first + window
        return range(residue + max(first, 0) * dilation, residue + min(stop, length) * dilation, dilation)


@dataclass(frozen=True)
class SlidingTiles(GridPattern):
    """Sliding tile attention (arXiv:2502.04507): the grid is cut into tiles, and the queries of a tile see all keys of
    the tiles around it: along every dimension as many as fit into `window`, which near a border shifts inwards.

    Tokens that stand in the order of the tiles (`in_tiles()`) make blocks that are full or empty, wherever a tile is
    a whole number of blocks.

    Args:
        shape: of the grid, such as (frames, height, width). Tiles at the far border may be smaller.
        tile: tokens of a tile along every dimension.
        window: tokens along every dimension, multiples of the tile's and no more than the tiles of the shape have;
            of an even number of tiles one more lies before the query's own.
        prefix, order: as in `Neighborhood`.
    """

    shape: tuple[int, ...]
    tile: tuple[int, ...]
    window: tuple[int, ...]
    prefix: int = 0
    order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        self._check_grid()
        object.__setattr__(self, "tile", check_tile("tile", self.tile, self.shape))
        object.__setattr__(self, "window", _ints_of("window", self.window, len(self.shape)))
        for size, tile, window in zip(self.shape, self.tile, self.window, strict=True):
            if window % tile:
                raise ValueError(f"window must be a multiple of the tile, {tile}, got {window}")
            if window > ceil_div(size, tile) * tile:
                raise ValueError(
                    f"window must be at most the {ceil_div(size, tile)} tiles of {tile} that a dimension of {size} "
                    f"has, got {window}"
                )
        super().__post_init__()

    def in_tiles(self, tile: int | Sequence[int] | None = None) -> SlidingTiles:
        """As in `Neighborhood`; by default in the order of the pattern's own tiles."""
        return super().in_tiles(self.tile if tile is None else tile)

    def seen(self, dimension: int, coordinate: int) -> range:
        size, tile, window = self.shape[dimension], self.tile[dimension], self.window[dimension]
        tiles, wide = ceil_div(size, tile), window // tile
        first = min(max(coordinate // tile - wide // 2, 0), tiles - wide)
        return range(first * tile, min((first + wide) * tile, size))


def check_shape(shape: object) -> tuple[int, ...]:
    """The sizes of a grid."""
    if isinstance(shape, int):
        shape = (shape,)
    check_sequence("shape", shape, "one to three ints")
    sizes: tuple[int, ...] = tuple(shape)  # type: ignore[arg-type]
    if not 1 <= len(sizes) <= MOST_DIMENSIONS:
        raise ValueError(f"shape must have one to three dimensions, got {shown(sizes)}")
    for size in sizes:
        check_int("every size of shape", size, least=1)
    check_int("number of tokens of shape", prod(sizes), least=1)
    return sizes


def check_tile(name: str, tile: object, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A tile of a grid: a size for each dimension, or one for all, none larger than the grid."""
    sizes = _ints_of(name, tile, len(shape))
    for size, of_grid in zip(sizes, shape, strict=True):
        if size > of_grid:
            raise ValueError(f"{name} must be at most as large as the shape {shape}, got {sizes}")
    return sizes


def _ints_of(name: str, value: object, dimensions: int) -> tuple[int, ...]:
    """One for each dimension; a single one is for all."""
    if isinstance(value, int):
        value = (value,)
    check_sequence(name, value, "ints, or an int")
    for each in value:  # type: ignore[attr-defined]
        check_int(f"every number of {name}", each, least=1)
    return _for_all(name, tuple(value), dimensions)  # type: ignore[arg-type]


def _flags_of(name: str, value: object, dimensions: int) -> tuple[bool, ...]:
    if isinstance(value, bool):
        value = (value,)
    check_sequence(name, value, "bools, or a bool")
    for each in value:  # type: ignore[attr-defined]
        check_flag(f"every value of {name}", each)
    return _for_all(name, tuple(value), dimensions)  # type: ignore[arg-type]


def _for_all(name: str, values: tuple[Any, ...], dimensions: int) -> tuple[Any, ...]:
    if len(values) not in (1, dimensions):
        raise ValueError(f"{name} must have {dimensions} values, one for each dimension, or one for all, got {values}")
    return values * dimensions if len(values) == 1 else values
