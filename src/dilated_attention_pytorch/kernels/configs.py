"""Tile sizes by architecture, head dimension and dtype; docs/dev/LOG.md has what some of them gave.

A tile never spans more than a query block (times the heads packed with it) on the side that a program owns; on the side
that it walks, a tile is part of a block or gathers several.
"""

from __future__ import annotations

from typing import NamedTuple


class Config(NamedTuple):
    """Rows of queries and keys in a tile, warps, and stages of the software pipeline."""

    tile_q: int
    tile_k: int
    num_warps: int
    num_stages: int


class Configs(NamedTuple):
    forward: Config
    dq: Config
    dkv: Config


# The warp-specialised kernels, by the width of their boxes: keys a tile, query tiles and key tiles in flight;
HOPPER_FORWARD = {32: (128, 2, 3), 64: (128, 2, 3), 128: (128, 2, 2), 256: (64, 1, 2)}
# the same where each warpgroup has blocks of 64 queries, and buffers, of its own;
HOPPER_FORWARD_ALONE = {32: (128, 2, 3), 64: (128, 2, 3), 128: (64, 2, 2)}
# rows of a streamed tile, and how many are in flight.
HOPPER_BACKWARD = {32: (128, 2), 64: (128, 2), 128: (64, 3), 256: (32, 2)}
# The same of boxes of 256 of q and k, or of v, alone.
HOPPER_BACKWARD_HALF = (64, 2)
# The same where dk, dv and dq come of one kernel.
HOPPER_FUSED = {64: (128, 2), 128: (64, 2)}
# For dk and dv with a softcap, slopes or dropout: larger tiles leave too few registers (1.1 to 1.7 times slower).
HOPPER_DKV_NARROW = (64, 3)

# The plain ones, by padded head dimension (the next of these is taken), for 16-bit numbers. 64 and 128 are measured on
# an H200, 32 and 256 are not.
HOPPER = {
    32: Configs(Config(128, 64, 4, 2), Config(64, 64, 4, 2), Config(64, 64, 4, 2)),
    64: Configs(Config(128, 64, 4, 2), Config(64, 64, 4, 2), Config(64, 64, 4, 2)),
    128: Configs(Config(128, 64, 4, 2), Config(64, 64, 4, 2), Config(64, 64, 4, 2)),
    256: Configs(Config(128, 64, 8, 2), Config(64, 64, 4, 2), Config(64, 64, 4, 2)),
}
# Blackwell's matrix units take more of their operands from shared memory; not measured, compile-checked.
BLACKWELL = {**HOPPER, 256: Configs(Config(64, 64, 4, 2), Config(64, 64, 4, 1), Config(64, 64, 4, 1))}
# An A100's shared memory holds as many stages of smaller tiles; not measured, compile-checked.
AMPERE = {
    32: Configs(Config(128, 64, 4, 3), Config(64, 64, 4, 3), Config(64, 64, 4, 3)),
    64: Configs(Config(128, 64, 4, 3), Config(64, 64, 4, 3), Config(64, 64, 4, 3)),
    128: Configs(Config(128, 64, 8, 2), Config(64, 64, 4, 2), Config(64, 64, 8, 2)),
    256: Configs(Config(64, 32, 8, 2), Config(32, 32, 4, 2), Config(32, 32, 4, 2)),
}
# Consumer Ampere and Ada have 99 KiB of it.
ADA = {
    32: Configs(Config(128, 64, 4, 3), Config(64, 64, 4, 2), Config(64, 64, 4, 2)),
    64: Configs(Config(128, 64, 4, 2), Config(64, 64, 4, 2), Config(64, 64, 4, 2)),
    128: Configs(Config(64, 64, 4, 2), Config(64, 32, 4, 2), Config(32, 64, 4, 2)),
    256: Configs(Config(32, 32, 4, 1), Config(32, 32, 4, 1), Config(32, 32, 4, 1)),
}
# Single precision takes twice the room, and three products of the matrix units for one.
SINGLE_PRECISION = {
    32: Configs(Config(64, 64, 4, 2), Config(64, 32, 4, 2), Config(32, 64, 4, 2)),
    64: Configs(Config(64, 32, 4, 2), Config(32, 32, 4, 2), Config(32, 32, 4, 2)),
    128: Configs(Config(32, 32, 4, 2), Config(32, 32, 4, 1), Config(32, 32, 4, 1)),
    256: Configs(Config(32, 16, 4, 1), Config(16, 16, 4, 1), Config(16, 16, 4, 1)),
}


# Tiles of fewer than 64 own rows: one warp keeps them all, so that nothing goes from warp to warp. The backward has its
# registers for that with heads of up to 64; there dq walks keys in tiles as large as its own. Measured on an H200,
# taken on every architecture.
FEW_ROWS = Configs(Config(32, 32, 1, 4), Config(32, 32, 1, 2), Config(32, 32, 1, 2))


def padded_dim(head_dim: int) -> int:
    """What a head is filled up to in a kernel: a power of two, as large as the matrix units ask for."""
    return max(16, 1 << (head_dim - 1).bit_length())


def forward_tiles(block_q: int) -> dict[int, tuple[int, int, int]]:
    """Those of the warp-specialised forward for blocks of so many queries."""
    return HOPPER_FORWARD_ALONE if block_q < 128 else HOPPER_FORWARD


def box_width(head_dim: int) -> int:
    """The width of the boxes in which heads come to the warp-specialised kernels."""
    return max(32, padded_dim(head_dim))


def sums_width(head_dim: int) -> int:
    """The width of a row of the sums of dq, and of boxes of q and k where these are made."""
    return max(64, box_width(head_dim))


def for_rows(config: Config, rows: int) -> Config:
    """The same for a tile that owns so many rows: a warp for every 16 of them at most."""
    return config._replace(num_warps=min(config.num_warps, rows // 16))


def configs(capability: tuple[int, int], padded_head_dim: int, itemsize: int) -> Configs:
    if itemsize > 2:
        table = SINGLE_PRECISION
    elif capability[0] in (9, 10):
        table = HOPPER if capability[0] == 9 else BLACKWELL
    else:  # consumer Blackwell has as little shared memory as Ada
        table = AMPERE if capability == (8, 0) else ADA
    return table[max(32, padded_head_dim)]
