"""What the warp-specialised kernels for Hopper share: rings of buffers, lists, masks, descriptors for the copy engine.

Kernels hand on bundles (`aggregate`): a `Ring` is buffers with the barriers that guard them, `Lists` the tiles of a
launch and the blocks they walk, `Masks` what hides pairs of tokens, `ScoreMods` what is done to scores and weights.
A bundle costs nothing: it is taken apart when a kernel is compiled.

A ring of buffers, with one producer (the fetching warp) and two consumers (the warpgroups):

    barrier   arrives                            count   waits                        phase of the wait
    ready     the copy engine, when all bytes    1       a warpgroup, before it       step // NUM_STAGES & 1
              that `expect` named are there              reads a buffer
    empty     each warpgroup, when it has done   2       the fetching warp, before    the opposite: the first round
              with a buffer (`release`)                  it fills a buffer again      finds all buffers empty

`step` counts what went through the ring since the kernel began; buffer `step % NUM_STAGES` holds it.

Registers: the 65,536 of a multiprocessor serve three groups of four warps: two warpgroups, and the fetching warp, which
takes the room of four. A launch gives each thread 168 (`maxnreg`): 3 · 128 · 168 = 64,512. Then the fetching group
goes down to 24, the least there is, and each warpgroup up to 240 of at most 255: 128 · (2 · 240 + 24) = 64,512 again.

Names of Triton's experimental Gluon that changed from one release to the next are met here, and nowhere else.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate

from ..caches import register_container
from .common import UNIT, list_of, load_masked_from, load_work, pairs_allowed, words_of
from .launcher import MOST, described_again
from .tile_scheduler import num_turns, scheduled_tile

PLAIN_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
# Names that Triton 3.9 changed.
RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
load_block = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_block = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # of the threads of a warpgroup


if hasattr(tma, "async_atomic_add"):
    add_block = tma.async_atomic_add
else:

    @builtin
    def add_block(tensor_desc, coord, src, _semantic=None):
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


BYTES = gl.constexpr(2)  # of a number
ROWS = gl.constexpr(64)  # of a warpgroup
TILE = gl.constexpr(2 * ROWS.value)
ONE_WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))  # of the fetching warp: a number for each lane
COMPUTE_REGS, FETCH_REGS = gl.constexpr(240), gl.constexpr(24)  # of a thread

VARYING_STEPS = (
    "total_tiles", "tiles_per_head", "first_tile", "tile_order", "batch", "walked",
)  # fmt: skip


def describe(x: Tensor, rows: int, num_residues: int, width: int) -> TensorDescriptor:
    """For the copy engine: boxes of `rows` tokens of one head of x [batch, seq, heads, D], every `num_residues`-th.

    Coordinates are (sample, row of the residue class, residue, head, 0). A box may be wider than the head: what lies
    beyond it is filled with zeros and never written. Whole boxes count among the bytes that a barrier expects.
    """
    batch, seq, heads, head_dim = x.shape
    of_sample, of_token, of_head = tma_strides(x)
    shape = batch, seq // num_residues, num_residues, heads, head_dim
    return _described(x, shape, (of_sample, of_token * num_residues, of_token, of_head, 1), (1, rows, 1, 1, width))


def tma_strides(x: Tensor) -> list[int]:
    """Steps to the next sample, token and head; where there is no next one, some step that the copy engine takes."""
    return [
        step if size > 1 else 16 // x.dtype.itemsize for size, step in zip(x.shape[:3], x.stride()[:3], strict=True)
    ]


def tma_compatible(x: Tensor) -> bool:
    """The copy engine takes steps and addresses of 16 bytes."""
    whole = 16 // x.dtype.itemsize
    return all(step > 0 and step % whole == 0 for step in tma_strides(x)) and x.data_ptr() % 16 == 0


def describe_sums(sums: Tensor) -> TensorDescriptor:
    """64 × 64 numbers of dq, which lie together: 16 rows of 256."""
    return _described(sums, (sums.numel() // 256, 256), (256, 1), (16, 256))


def describe_rows(of_rows: Tensor, num: int) -> TensorDescriptor:
    """`num` numbers of a row of of_rows [2, batch, heads, padded_q], as a matrix of all its rows."""
    padded_q = of_rows.shape[-1]
    return _described(of_rows, (of_rows.numel() // padded_q, padded_q), (padded_q, 1), (1, num))


_known: dict[tuple[object, ...], dict[str, Any]] = {}
register_container(_known, "kernels.hopper_common._known", "checked tensor descriptors, by block", bound=MOST)


def _described(x: Tensor, shape: Sequence[int], strides: Sequence[int], block: Sequence[int]) -> TensorDescriptor:
    """The first one of such blocks is checked by Triton. Of another tensor, and of other lengths, only strides and the
    address could be wrong, which `launch` has looked at."""
    key = x.dtype, block, len(shape)
    fields = _known.get(key)
    if fields is None:
        layout = PLAIN_LAYOUT
        if x.dtype in DTYPES:
            layout = gl.NVMMASharedLayout.get_default_for(list(block), DTYPES[x.dtype])
        made = TensorDescriptor(x, list(shape), list(strides), list(block), layout)
        if len(_known) >= MOST:
            _known.clear()
        fields = _known[key] = {**vars(made), "base": None}
    described = described_again(TensorDescriptor, fields, x)
    described.shape, described.strides = list(shape), list(strides)
    return described


@gluon.jit
def as_block(buffer, descriptor):
    """A buffer [rows, D] in the shape of a descriptor's box, [1, rows, 1, 1, D]."""
    if RENAMED:
        block = buffer.reinterpret(descriptor.dtype, descriptor.block_type.shape, descriptor.layout)
    else:
        block = buffer._reinterpret(descriptor.dtype, descriptor.block_type.shape, descriptor.layout)
    return block


@gluon.jit
def retyped(buffer, descriptor):
    """A buffer of as many bytes, or more, as [rows, D] of a descriptor's box."""
    shape: gl.constexpr = [descriptor.block_type.shape[1], descriptor.block_type.shape[4]]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, descriptor.dtype)
    if RENAMED:
        block = buffer.reinterpret(descriptor.dtype, shape, layout)
    else:
        block = buffer._reinterpret(descriptor.dtype, shape, layout)
    return block


@gluon.jit
def as_blocks(buffer, descriptor):
    """A buffer [rows, D] as [1, rows, 1, 1, D], of which a slice of rows has the shape of a descriptor's box."""
    if RENAMED:
        blocks = buffer.reinterpret(
            descriptor.dtype, [1, buffer.shape[0], 1, 1, buffer.shape[1]], descriptor.layout
        )  # fmt: skip
    else:
        blocks = buffer._reinterpret(
            descriptor.dtype, [1, buffer.shape[0], 1, 1, buffer.shape[1]], descriptor.layout
        )  # fmt: skip
    return blocks


@gluon.jit
def as_row(buffer):
    """A buffer [1, n] as [n]."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if RENAMED:
        row = buffer.reinterpret(buffer.dtype, [buffer.shape[1]], layout)
    else:
        row = buffer._reinterpret(buffer.dtype, [buffer.shape[1]], layout)
    return row


@gluon.jit
def split_residue(block, blocks_per_residue, DILATED: gl.constexpr):
    """The residue class whose tokens a block takes, and the number of the block in that class."""
    if DILATED:
        residue = block // blocks_per_residue
        block = block - residue * blocks_per_residue
    else:
        residue = 0
    return residue, block


@gluon.jit
def token_of(row, residue, num_residues, DILATED: gl.constexpr):
    if DILATED:
        token = row * num_residues + residue
    else:
        token = row
    return token


@gluon.jit
def reaching(first, last):
    """The numbers from `first` to `last` as `within` wants them: the first, and how far the last is from it."""
    first = gl.where(last < first, 2147483647, first)  # nothing gets there
    return first, gl.maximum(last - first, 0)


@gluon.jit
def within(x, first, reach):
    """One compare for two."""
    return (x - first).to(gl.uint32) <= reach.to(gl.uint32)


@gluon.jit
def spread(numbers, place):
    """The number of a tuple at the place of each lane. Where a lane's place is known when this is compiled, it costs
    nothing."""
    found = place * 0 + numbers[0]
    for i in gl.static_range(1, len(numbers)):
        found = gl.where(place == i, numbers[i], found)
    return found


def aggregate(cls):
    """Gluon's aggregate, constructed from its fields in order (Triton 3.6 makes no constructor)."""

    def __init__(self, *values):  # noqa: N807
        for name, value in zip(cls.__annotations__, values, strict=True):
            setattr(self, name, value)

    __init__.__triton_builtin__ = True  # nothing that a kernel's source depends on
    cls.__init__ = __init__
    return _aggregate(cls)


@aggregate
class Ring:
    """Buffers and their barriers, as the table above has them. A stage has `buffers.shape[0] // NUM_STAGES` buffers."""

    buffers: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    NUM_STAGES: gl.constexpr

    @gluon.jit
    def place(self, step):
        return step % self.NUM_STAGES

    @gluon.jit
    def init(self, place, PRODUCERS: gl.constexpr = 1, CONSUMERS: gl.constexpr = 2):
        mbarrier.init(self.ready.index(place), count=PRODUCERS)
        mbarrier.init(self.empty.index(place), count=CONSUMERS)

    @gluon.jit
    def acquire(self, step, NUM_BYTES: gl.constexpr):
        """For the producer: wait for the buffer, and say how much will come. Returns the barrier for the copies."""
        place = step % self.NUM_STAGES
        bar = self.ready.index(place)
        self.wait_empty(step)
        mbarrier.expect(bar, NUM_BYTES)
        return bar

    @gluon.jit
    def wait_empty(self, step):
        """For a producer that writes itself."""
        mbarrier.wait(self.empty.index(step % self.NUM_STAGES), (step // self.NUM_STAGES & 1) ^ 1)

    @gluon.jit
    def wait(self, step):
        """For a consumer: until the buffer is filled."""
        mbarrier.wait(self.ready.index(step % self.NUM_STAGES), step // self.NUM_STAGES & 1)

    @gluon.jit
    def release(self, step):
        """For a consumer: it has done with the buffer."""
        mbarrier.arrive(self.empty.index(step % self.NUM_STAGES), count=1)


@gluon.jit
def new_barriers(NUM: gl.constexpr):
    return gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())


@aggregate
class Tile:
    """128 rows of a head: where they lie, and the list of blocks that they walk."""

    sample: gl.tensor
    head: gl.tensor
    residue: gl.tensor
    row: gl.tensor  # the first one, within its residue class
    block: gl.tensor
    start: gl.tensor
    split: gl.tensor
    stop: gl.tensor
    masked_from: gl.tensor  # what `Lists.masked_from` says; read it there


@aggregate
class Lists:
    """The tiles of a launch, of blocks of OWN_BLOCK, and the lists of blocks that they walk, in parts of STREAM."""

    indices: gl.tensor
    work: gl.tensor
    heads: gl.tensor
    group: gl.tensor
    num_blocks: gl.tensor
    lists_per_sample: gl.tensor
    heads_per_list: gl.tensor
    num_residues: gl.tensor
    walked: gl.tensor  # blocks of a residue class of the side that is walked
    schedule: gl.tuple  # a `TileSchedule`
    OWN_BLOCK: gl.constexpr
    BLOCK: gl.constexpr
    STREAM: gl.constexpr
    DILATED: gl.constexpr
    PADDED: gl.constexpr  # lists are `PaddedLists`

    @gluon.jit
    def turns(self):
        return num_turns(self.schedule)

    @gluon.jit
    def tile(self, turn, heads, list_heads):
        """The tile of a turn, of so many heads; its list is that of query head `head · list_heads`."""
        TILES_PER_BLOCK: gl.constexpr = self.OWN_BLOCK // TILE
        place, head_id = scheduled_tile(turn, self.schedule)
        sample, head = head_id // heads, head_id % heads
        rows_before = self.list_of(sample, head * list_heads) * self.num_blocks
        at = rows_before + place // TILES_PER_BLOCK
        block, start, split, stop = load_work(self.work, at, self.PADDED)
        masked_from = load_masked_from(self.work, at, split, self.PADDED)
        residue, row = split_residue(block, self.num_blocks // self.num_residues, self.DILATED)
        row = row * self.OWN_BLOCK + place % TILES_PER_BLOCK * TILE
        return Tile(sample, head, residue, row, block, start, split, stop, masked_from)

    @gluon.jit
    def tile_alone(self, turn, who):
        """The tile of one warpgroup, where blocks have half the rows of a tile: each of the two walks its own list.

        The two of a turn are neighbours in the order of work, so about equally long. Where the last one has no
        neighbour, both do the same.
        """
        place, head_id = scheduled_tile(turn, self.schedule)
        sample, head = head_id // self.heads, head_id % self.heads
        rows_before = self.list_of(sample, head) * self.num_blocks
        at = rows_before + gl.minimum(2 * place + who, self.num_blocks - 1)
        block, start, split, stop = load_work(self.work, at, self.PADDED)
        masked_from = load_masked_from(self.work, at, split, self.PADDED)
        residue, row = split_residue(block, self.num_blocks // self.num_residues, self.DILATED)
        return Tile(sample, head, residue, row * self.OWN_BLOCK, block, start, split, stop, masked_from)

    @gluon.jit
    def masked_from(self, tile):
        """The first entry that is masked: the first partial one, or one before it where keys are padding."""
        if self.PADDED:
            first = tile.masked_from
        else:  # Triton 3.6 keeps the first tile's of a value that nothing but the bound of a loop asks for
            first = tile.split
        return first

    @gluon.jit
    def list_of(self, sample, head):
        return list_of(sample, head, self.lists_per_sample, self.heads_per_list)

    @gluon.jit
    def token(self, row, residue):
        return token_of(row, residue, self.num_residues, self.DILATED)

    @gluon.jit
    def part(self, block, i):
        """The residue class of part `i` of a list, which lies in `block`, and its first row in the class."""
        residue, row = split_residue(block, self.walked, self.DILATED)
        return residue, row * self.BLOCK + i % (self.BLOCK // self.STREAM) * self.STREAM

    @gluon.jit
    def tokens(self, block, i, lane):
        """The tokens of that part, as a row."""
        if self.BLOCK < self.STREAM:
            token = spread(block, lane // self.BLOCK) * self.BLOCK + lane % self.BLOCK
        else:
            residue, first = self.part(block, i)
            token = self.token(first + lane, residue)
        return gl.expand_dims(token, 0)

    @gluon.jit
    def num_parts(self, entries):
        """How many whole tiles so many entries of a list are."""
        if self.BLOCK < self.STREAM:
            num = entries // (self.STREAM // self.BLOCK)
        else:
            num = entries * (self.BLOCK // self.STREAM)
        return num

    @gluon.jit
    def num_parts_up(self, entries):
        """The same with the one that entries do not fill."""
        if self.BLOCK < self.STREAM:
            entries += self.STREAM // self.BLOCK - 1
        return self.num_parts(entries)

    @gluon.jit
    def entry(self, start, i, lane):
        """The entry of part `i` of a list from `start` on. Where a part gathers several blocks, those of its lanes, as
        a row; some may lie behind the end of the list."""
        if self.BLOCK < self.STREAM:
            entry = gl.expand_dims(start + i * (self.STREAM // self.BLOCK) + lane // self.BLOCK, 0)
        else:
            entry = start + i // (self.BLOCK // self.STREAM)
        return entry

    @gluon.jit
    def ends_behind(self, start, i, entry):
        """Whether part `i` of a list from `start` on has that entry, or one behind it."""
        if self.BLOCK < self.STREAM:
            behind = start + (i + 1) * (self.STREAM // self.BLOCK) > entry
        else:
            behind = start + i // (self.BLOCK // self.STREAM) >= entry
        return behind

    @gluon.jit
    def boxes(self, start, stop, i, place):
        """The blocks at places of part `i`, which gathers several.

        Behind the end of a list stands its last block again: nothing is multiplied by the zero weights of keys that are
        not there but what the tile multiplies anyway.
        """
        entry = gl.minimum(start + i * (self.STREAM // self.BLOCK) + place, stop - 1)
        return gl.load(self.indices + entry, mask=entry >= start, other=0)

    @gluon.jit
    def blocks_of(self, start, stop, i, MAY_BE_EMPTY: gl.constexpr):
        """The block of part `i` of a list, or the tuple of those that it gathers."""
        if self.BLOCK < self.STREAM:
            blocks = (self.boxes(start, stop, i, 0),)
            for place in gl.static_range(1, self.STREAM // self.BLOCK):
                blocks = blocks + (self.boxes(start, stop, i, place),)  # noqa: RUF005
        elif MAY_BE_EMPTY:
            blocks = gl.load(self.indices + self.entry(start, i, 0), mask=start < stop, other=0)
        else:
            blocks = gl.load(self.indices + self.entry(start, i, 0))
        return blocks

    @gluon.jit
    def words_of(self, words, start, stop, i):
        """The same of `United.words`, 0 behind the end of a list: no row sees that."""
        entry = self.entry(start, i, 0) if self.BLOCK >= self.STREAM else start + i * (self.STREAM // self.BLOCK)
        found = (gl.load(words + entry, mask=entry < stop, other=0),)
        for place in gl.static_range(1, self.STREAM // self.BLOCK):
            more = gl.load(words + entry + place, mask=entry + place < stop, other=0)
            found = found + (more,)  # noqa: RUF005
        return found


@gluon.jit
def real_keys(bits, tile, block, i, lane, lists):
    """Which keys of part `i` of a list, which lies in `block` or gathers these, are no padding, as a row; `lane`
    numbers the keys."""
    UNITS: gl.constexpr = lists.STREAM // UNIT
    LAYOUT: gl.constexpr = gl.reshape(lane, [UNITS, UNIT]).type.layout
    unit = gl.arange(0, UNITS, gl.SliceLayout(1, LAYOUT))
    num_blocks = lists.walked * lists.num_residues
    if lists.BLOCK < lists.STREAM:
        first = words_of(bits, tile.sample, 0, num_blocks, lists.BLOCK)
        own = spread(block, unit // (lists.BLOCK // UNIT)) * (1 + lists.BLOCK // UNIT)
        word = gl.load(first + (own + unit % (lists.BLOCK // UNIT))).to(gl.int32)
    else:
        first = words_of(bits, tile.sample, block, num_blocks, lists.BLOCK)
        word = gl.load(first + (i % (lists.BLOCK // lists.STREAM) * UNITS + unit)).to(gl.int32)
    bit = gl.expand_dims(gl.arange(0, UNIT, gl.SliceLayout(0, LAYOUT)), 0)
    # A thread's keys differ in bits 0 and 3 of their numbers: it shifts a word once, and knows where to look.
    real = (gl.expand_dims(word, 1) >> (bit & 6)) & (1 << (bit & 9))
    real = gl.convert_layout(gl.reshape(real, [lists.STREAM]), lane.type.layout, assert_trivial=True)
    return gl.expand_dims(real, 0) != 0


@aggregate
class Masks:
    """What hides pairs of tokens, by the layout and by the call, and how often pairs of mixed blocks count."""

    rule_ids: gl.tensor
    rules: gl.tensor
    documents: gl.tensor
    branches: gl.tensor
    padding: gl.tensor  # `padding.key_bits`
    document_ids: gl.tensor
    seq_q: gl.tensor
    seq_k: gl.tensor
    num_intervals: gl.tensor
    num_branches: gl.tensor
    HAS_RULE_IDS: gl.constexpr
    ONE_INTERVAL: gl.constexpr
    DOCUMENTS: gl.constexpr
    PADDING: gl.constexpr
    DOCUMENT_IDS: gl.constexpr

    @gluon.jit
    def allowed(
        self, x, query, key, first, reach, entry, split, stop, sample,
        BOUNDED: gl.constexpr, MASKED: gl.constexpr, ANY: gl.constexpr,
    ):  # fmt: skip
        """The pairs that are allowed but for padding: where BOUNDED, those with `x`, the walked side, within the
        other's bounds."""
        if BOUNDED:
            seen = within(x, first, reach)
        else:
            seen = pairs_allowed(
                query, key, entry, split, stop, sample, self.rule_ids, self.rules, self.documents, self.padding,
                self.document_ids, self.num_intervals, self.seq_q, self.seq_k,
                MASKED, ANY, self.HAS_RULE_IDS, self.ONE_INTERVAL, self.DOCUMENTS, False, self.DOCUMENT_IDS,
            )  # fmt: skip
        return seen


@aggregate
class ScoreMods:
    """What is done to scores and weights. Where there is a softcap or ALiBi, scores are scaled first."""

    scale: gl.tensor
    cap: gl.tensor
    slopes: gl.tensor
    seed: gl.tensor
    threshold: gl.tensor
    keep_scale: gl.tensor
    NEGATIVE_SCALE: gl.constexpr
    SOFTCAP: gl.constexpr
    ALIBI: gl.constexpr
    DROPOUT: gl.constexpr
