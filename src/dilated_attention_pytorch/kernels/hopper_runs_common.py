"""What the kernels for Hopper share that walk the runs of dilated attention (`layout.branch_runs` says what these are).

A program takes tiles of 128 rows of one head, which may be any tokens: two warpgroups load 64 each by their addresses.
The other side goes by in parts of runs: the copy engine reads `WALKED` neighbouring rows of a view with stride r.

The view has the dimensions [batch, rows, columns, heads, D], where r columns follow each other by one token and rows by
r. Of a length n that r does not divide, n mod r columns have one row more than the others. There is a descriptor for
the rows that all have, with n mod r columns more: column c + r, one row before, is column c again. So every token is
reached, and nothing beyond the last. A head narrower than a box is filled up with zeros by the copy engine.
"""

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hopper_common import ROWS, aggregate, as_block, load_block
from .hopper_common import _described as described
from .tile_scheduler import num_turns, scheduled_tile

# The fetching warp keeps more numbers than that of `hopper_common`: 128 · (2 · 232 + 40) = 64,512 registers.
COMPUTE_REGS, FETCH_REGS = gl.constexpr(240), gl.constexpr(24)
RUN_FIELDS, WORK_FIELDS = gl.constexpr(12), gl.constexpr(6)


def describe_view(x: Tensor, dilation: int, rows: int, padded: int) -> Any:
    """For copies of `rows` rows of one column and head of x [batch, seq, heads, D], filled up to `padded` numbers."""
    batch, seq, heads, head_dim = x.shape
    of_sample, step, of_head, _ = x.stride()
    shape = batch, seq // dilation, dilation + seq % dilation, heads, head_dim
    return described(x, shape, (of_sample, step * dilation, step, of_head, 1), (1, rows, 1, 1, padded))


@aggregate
class Plan:
    """The tiles of a launch, as `RunPlan` has them; to `schedule` samples and heads are tiles, and tiles are heads."""

    work: gl.tensor
    rows: gl.tensor
    runs: gl.tensor
    tables: gl.tensor
    schedule: gl.tuple
    group: gl.tensor
    seq: gl.tensor
    repeats: gl.tensor  # heads that share a list
    PARTS: gl.constexpr  # the field of the number of parts

    @gluon.jit
    def turns(self):
        return num_turns(self.schedule)

    @gluon.jit
    def tile(self, turn):
        place, tile = scheduled_tile(turn, self.schedule)
        work = self.work + tile * WORK_FIELDS
        rows = self.rows + gl.load(work + 1) * (2 * ROWS)
        return Tile(
            place // self.repeats,
            gl.load(work) + place % self.repeats,
            rows,
            gl.load(work + 2),
            gl.load(work + self.PARTS),
        )


@aggregate
class Tile:
    sample: gl.tensor
    head: gl.tensor
    rows: gl.tensor  # where its tokens stand
    run: gl.tensor
    parts: gl.tensor


@gluon.jit
def load_run(runs, index):
    """From dilation to period, as `layout.run_tiles.RUN` names them."""
    at = runs + index * RUN_FIELDS
    return (
        gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4), gl.load(at + 5), gl.load(at + 6),
        gl.load(at + 7), gl.load(at + 8), gl.load(at + 9), gl.load(at + 10), gl.load(at + 11),
    )  # fmt: skip


@gluon.jit
def bounds_of(run, token, CAUSAL: gl.constexpr, OF_KEYS: gl.constexpr):
    """Which rows of a run the rows of a tile see, counted from its first: from `low` to before `high`."""
    dilation, column, first, length, _, _, begin, end, _, _, _ = run
    inside = (token >= begin) & (token < end) & (token % dilation == column)
    low = gl.zeros_like(token)
    high = gl.where(inside, length, 0)
    if CAUSAL:
        own = token // dilation - first
        if OF_KEYS:
            low = gl.where(inside, own, 0)
        else:
            high = gl.where(inside, gl.minimum(own + 1, length), 0)
    return low, high


@gluon.jit
def times_counted(weights, x, lane, table, phase, period, plan):
    """Weights of the part from row `x` of a run on, as often as its rows count."""
    if period > 0:
        times = gl.load(plan.tables + table + (phase + x) % period + lane)
        weights = weights * gl.expand_dims(times, 0)
    return weights


@gluon.jit
def fetch_part(descriptors, place, at, bar, buffer, NUM: gl.constexpr):
    """One copy, by the descriptor of a dilation: the others are told not to."""
    for which in gl.static_range(NUM):
        load_block(descriptors[which], at, bar, as_block(buffer, descriptors[which]), pred=place == which)


@gluon.jit
def place_in_view(row, column, dilation, seq):
    """Row and column in the descriptor's view."""
    lower = ((column < seq % dilation) & (row > 0)).to(gl.int32)
    return row - lower, column + lower * dilation


@gluon.jit
def load_rows(x, token, sample, head, of_sample, step, of_head, D: gl.constexpr, PADDED: gl.constexpr):
    """The rows of a head of x, in the layout of `token`'s parent; 0 where the token is −1. Strides are units of 8."""
    LAYOUT: gl.constexpr = token.type.layout.parent
    column = gl.arange(0, PADDED, gl.SliceLayout(0, LAYOUT))
    at = (sample.to(gl.int64) * of_sample + head.to(gl.int64) * of_head + token.to(gl.int64) * step) * 8
    there = gl.expand_dims(token >= 0, 1) & gl.expand_dims(column < D, 0)
    return gl.load(x + (gl.expand_dims(at, 1) + gl.expand_dims(column, 0)), mask=there, other=0.0)


@gluon.jit
def store_rows(x, value, token, sample, head, seq, heads, D: gl.constexpr, PADDED: gl.constexpr):
    """The same of a contiguous x [batch, seq, heads, D]."""
    LAYOUT: gl.constexpr = token.type.layout.parent
    column = gl.arange(0, PADDED, gl.SliceLayout(0, LAYOUT))
    at = ((sample.to(gl.int64) * seq + token) * heads + head) * (D // 8) * 8
    there = gl.expand_dims(token >= 0, 1) & gl.expand_dims(column < D, 0)
    gl.store(x + (gl.expand_dims(at, 1) + gl.expand_dims(column, 0)), value, mask=there)


@gluon.constexpr_function
def row_layout(PADDED):
    """Of 64 rows as a warpgroup reads and writes them: 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // PADDED, PADDED // 8], [4, 1], [1, 0])
