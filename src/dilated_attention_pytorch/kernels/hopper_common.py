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
from .common import list_of, load_work, pairs_allowed
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
COMPUTE_REGS, FETCH_REGS = gl.constexpr(240), gl.constexpr(24)  # of a thread

VARYING_STEPS = (
    "total_tiles", "tiles_per_head", "first_tile", "tile_order", "batch", "walked",
    "q_step", "k_step", "v_step", "g_step",
)  # fmt: skip


def describe(x: Tensor, rows: int, num_residues: int) -> TensorDescriptor:
    """For the copy engine: `rows` tokens of one head of x [batch, seq, heads, D], every `num_residues`-th.

    Those ≡ r modulo `num_residues` lie in the columns from `r · x.stride(1)` on.
    """
    batch, seq, heads, head_dim = x.shape
    of_sample, step = x.stride()[:2]
    shape = batch, seq // num_residues, (num_residues - 1) * step + heads * head_dim
    return _described(x, shape, (of_sample, step * num_residues, 1), (1, rows, head_dim))


def describe_sums(sums: Tensor) -> TensorDescriptor:
    """64 × 64 numbers of dq, which lie together: 16 rows of 256."""
    return _described(sums, (sums.numel() // 256, 256), (256, 1), (16, 256))


def describe_rows(of_rows: Tensor, num: int) -> TensorDescriptor:
    """`num` numbers of a row of of_rows [2, batch, heads, padded_q], as a matrix of all its rows."""
    padded_q = of_rows.shape[-1]
    return _described(of_rows, (of_rows.numel() // padded_q, padded_q), (padded_q, 1), (1, num))


_known: dict[tuple[object, ...], dict[str, Any]] = {}
register_container(_known, "kernels.hopper_common._known", "checked tensor descriptors, by shape", bound=MOST)


def _described(x: Tensor, shape: Sequence[int], strides: Sequence[int], block: Sequence[int]) -> TensorDescriptor:
    """The first one like it is checked by Triton; another tensor in its place needs no more than that."""
    key = x.dtype, shape, strides, block
    fields = _known.get(key)
    if fields is None:
        layout = PLAIN_LAYOUT
        if x.dtype in DTYPES:
            layout = gl.NVMMASharedLayout.get_default_for(list(block), DTYPES[x.dtype])
        made = TensorDescriptor(x, list(shape), list(strides), list(block), layout)
        if len(_known) >= MOST:
            _known.clear()
        fields = _known[key] = {**vars(made), "base": None}
    return described_again(TensorDescriptor, fields, x)


@gluon.jit
def as_block(buffer, descriptor):
    """A buffer [rows, D] in the shape of a descriptor's block, [1, rows, D]."""
    if RENAMED:
        block = buffer.reinterpret(descriptor.dtype, descriptor.block_type.shape, descriptor.layout)
    else:
        block = buffer._reinterpret(descriptor.dtype, descriptor.block_type.shape, descriptor.layout)
    return block


@gluon.jit
def retyped(buffer, descriptor):
    """A buffer of as many bytes, or more, as [rows, D] of a descriptor's block."""
    shape: gl.constexpr = descriptor.block_type.shape[1:]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, descriptor.dtype)
    if RENAMED:
        block = buffer.reinterpret(descriptor.dtype, shape, layout)
    else:
        block = buffer._reinterpret(descriptor.dtype, shape, layout)
    return block


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
    def init(self, place, PRODUCERS: gl.constexpr = 1):
        mbarrier.init(self.ready.index(place), count=PRODUCERS)
        mbarrier.init(self.empty.index(place), count=2)

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
        block, start, split, stop = load_work(self.work, rows_before + place // TILES_PER_BLOCK)
        residue, row = split_residue(block, self.num_blocks // self.num_residues, self.DILATED)
        row = row * self.OWN_BLOCK + place % TILES_PER_BLOCK * TILE
        return Tile(sample, head, residue, row, block, start, split, stop)

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
        residue, first = self.part(block, i)
        return gl.expand_dims(self.token(first + lane, residue), 0)


@aggregate
class Masks:
    """What hides pairs of tokens, by the layout and by the call, and how often pairs of mixed blocks count."""

    rule_ids: gl.tensor
    rules: gl.tensor
    documents: gl.tensor
    branches: gl.tensor
    padding: gl.tensor
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
        """The pairs that are allowed: where BOUNDED, those with `x`, the walked side, within the other's bounds."""
        if BOUNDED:
            seen = within(x, first, reach)
        else:
            seen = pairs_allowed(
                query, key, entry, split, stop, sample, self.rule_ids, self.rules, self.documents, self.padding,
                self.document_ids, self.num_intervals, self.seq_q, self.seq_k,
                MASKED, ANY, self.HAS_RULE_IDS, self.ONE_INTERVAL, self.DOCUMENTS, self.PADDING, self.DOCUMENT_IDS,
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
