"""Fetching for the forward for Hopper: a tile of keys is part of a block, or gathers several smaller ones.

What a tile gathers are boxes of the copy engine, each of which goes to its rows of one buffer; the barrier of the
buffer counts the bytes of all of them. Behind the end of a list the last block is fetched again, so that a buffer holds
nothing but keys of the list, and masks hide it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .common import dropout_offset, fold32
from .hopper_common import BYTES, ONE_WARP, as_block, as_blocks, load_block, spread


@gluon.jit
def first_to_fetch(lists, tile):
    """The block of a list's first part. Where a part gathers several, the one of each lane of the fetching warp."""
    if lists.BLOCK < lists.STREAM:
        block = lists.boxes(tile.start, tile.stop, 0, gl.arange(0, 32, ONE_WARP))
    else:
        block = gl.load(lists.indices + tile.start, mask=tile.start < tile.stop, other=0)
    return block


@gluon.jit
def next_to_fetch(lists, tile, next_tile, i, num):
    """The same of part `i`, which may be the first of the next tile."""
    ends = i == num
    start, stop = gl.where(ends, next_tile.start, tile.start), gl.where(ends, next_tile.stop, tile.stop)
    if lists.BLOCK < lists.STREAM:
        block = lists.boxes(start, stop, gl.where(ends, 0, i), gl.arange(0, 32, ONE_WARP))
    else:
        entry = gl.where(ends, start, lists.entry(start, i, 0))
        block = gl.load(lists.indices + entry, mask=entry < stop, other=0)
    return block


@gluon.jit
def fetch_part(x, ring, step, lists, block, i, sample, head, D: gl.constexpr):
    """Part `i` of a list into the ring: one copy, or one for each of the blocks that it gathers."""
    bar = ring.acquire(step, lists.STREAM * D * BYTES)
    buffer = ring.buffers.index(ring.place(step))
    if lists.BLOCK < lists.STREAM:
        whole = as_blocks(buffer, x)
        for place in gl.static_range(lists.STREAM // lists.BLOCK):
            row = gl.sum(gl.where(gl.arange(0, 32, ONE_WARP) == place, block, 0), 0) * lists.BLOCK
            load_block(x, [sample, row, 0, head, 0], bar, whole.slice(place * lists.BLOCK, lists.BLOCK, 1))
    else:
        residue, row = lists.part(block, i)
        load_block(x, [sample, row, residue, head, 0], bar, as_block(buffer, x))


@gluon.jit
def gathered_key_hash(seed, blocks, key, lane, lists):
    """`dropout_key_hash` of keys of several blocks: a block is renumbered as a whole, so it is looked up once."""
    offsets = (dropout_offset(seed, blocks[0] * lists.BLOCK, 1),)
    for place in gl.static_range(1, lists.STREAM // lists.BLOCK):
        offsets = offsets + (dropout_offset(seed, blocks[place] * lists.BLOCK, 1),)  # noqa: RUF005
    return fold32((key + gl.expand_dims(spread(offsets, lane // lists.BLOCK), 0)).to(gl.uint32))
