"""Masses of blocks on Hopper, warp-specialised in Gluon: the twin of `select_masses.masses_kernel`, to be read first.

One warp fetches rows and columns, two warpgroups take 64 rows each. In a warpgroup the products of a tile of columns
are on the matrix units while those of the tile before are taken in: exponentials, and sums by block. `hopper_common`
says how rings count. Columns come in the order of `select_features.pool`, by which a thread has whole blocks, and
neighbours at that.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from .hopper_common import (
    BYTES,
    COMPUTE_REGS,
    FETCH_REGS,
    ROWS,
    TILE,
    Ring,
    aggregate,
    as_block,
    barrier,
    load_block,
    new_barriers,
)
from .hopper_forward import max_of_rows
from .select_lists import as_weights


@aggregate
class Work:
    """The tiles of a launch, and what a tile sees."""

    all_heads: gl.tensor
    heads: gl.tensor
    group: gl.tensor
    tiles: gl.tensor
    seq_q: gl.tensor
    seq_k: gl.tensor
    PATCH_Q: gl.constexpr
    PATCH_K: gl.constexpr
    CAUSAL: gl.constexpr

    @gluon.jit
    def turns(self):
        programs = gl.num_programs(0)
        return (self.all_heads * self.tiles - gl.program_id(0) + programs - 1) // programs

    @gluon.jit
    def tile(self, turn):
        """Head and tile; the longest first, forwards and backwards in turn."""
        programs = gl.num_programs(0)
        place = turn * programs + gl.program_id(0)
        back = (turn % 2 == 1) & ((turn + 1) * programs <= self.all_heads * self.tiles)
        unit = gl.where(back, (2 * turn + 1) * programs - 1 - place, place)
        return unit % self.all_heads, self.tiles - 1 - unit // self.all_heads

    @gluon.jit
    def sees(self, row):
        """So many keys."""
        if self.CAUSAL:
            in_row = gl.maximum(gl.minimum(self.seq_q - row * self.PATCH_Q, self.PATCH_Q), 0)
            seen = gl.minimum(row * self.PATCH_Q + in_row, self.seq_q) + (self.seq_k - self.seq_q)
        else:
            seen = row * 0 + self.seq_k
        return gl.minimum(gl.maximum(seen, 0), self.seq_k)

    @gluon.jit
    def num_tiles(self, tile):
        """Of columns; one where nothing is seen."""
        keys: gl.constexpr = TILE * self.PATCH_K
        return gl.maximum((self.sees(tile * TILE + TILE - 1) + keys - 1) // keys, 1)


@gluon.jit
def _fetch(rows, columns, queries, keys, work, D: gl.constexpr):
    step = 0
    for turn in range(work.turns()):
        head, tile = work.tile(turn)
        bar = queries.acquire(turn, TILE * D * BYTES)
        for half in gl.static_range(2):
            buffer = queries.buffers.index(2 * queries.place(turn) + half)
            load_block(rows, [head, tile * TILE + half * ROWS, 0, 0, 0], bar, as_block(buffer, rows))
        of_columns = head // work.heads * (work.heads // work.group) + head % work.heads // work.group
        num = work.num_tiles(tile)
        for i in range(num):
            bar = keys.acquire(step, TILE * D * BYTES)
            at = [of_columns, (num - 1 - i) * TILE, 0, 0, 0]
            load_block(columns, at, bar, as_block(keys.buffers.index(keys.place(step)), columns))
            step += 1


@aggregate
class Kept:
    """What a warpgroup keeps of its rows while it walks: where sums and peaks go, and the scale of the products."""

    sums: gl.tensor
    peaks: gl.tensor
    width: gl.tensor
    scale: gl.tensor
    COLUMNS: gl.constexpr
    HEADROOM: gl.constexpr


@gluon.constexpr_function
def neighbours_first(blocks):
    """The layout of a warpgroup's sums of so many blocks a row: those of a thread lie together."""
    together = [[0, 1 << bit] for bit in range((blocks // 4).bit_length() - 1)]
    lanes = [[0, blocks // 4], [0, blocks // 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([*together, [8, 0]], lanes, [[16, 0], [32, 0]], [], [64, blocks])


@gluon.jit
def _take_in(scores, shares, i, row_max, row_sum, kept, MASKED: gl.constexpr):
    """One tile of columns: `shares` of each column count where MASKED."""
    C: gl.constexpr = kept.COLUMNS
    BLOCKS: gl.constexpr = TILE // C
    layout: gl.constexpr = scores.type.layout
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    if MASKED:
        scores = gl.where(shares > 0.0, scores, float("-inf"))
    new_max = gl.maximum(row_max, max_of_rows(scores) * kept.scale)
    peak = new_max
    if MASKED:
        peak = gl.where(new_max == float("-inf"), 0.0, new_max)
    shrink = gl.exp2(row_max - peak)
    peak = peak - kept.HEADROOM
    terms = gl.exp2(scores * kept.scale - gl.expand_dims(peak, 1))
    if MASKED:
        terms = terms * shares
    parts = gl.reshape(terms, [ROWS, BLOCKS // 4, C // 2, 4, 2])
    found = gl.sum(gl.sum(parts, 4), 2)  # [rows, BLOCKS / 4, 4]
    found = gl.reshape(gl.permute(found, (0, 2, 1)), [ROWS, BLOCKS]).to(gl.float16)
    # The same numbers in the same threads, but neighbours first: else they are stored one by one.
    found = gl.convert_layout(found, neighbours_first(BLOCKS))
    added = gl.sum(found.to(gl.float32), 1)
    row_sum = row_sum * shrink + gl.convert_layout(added, of_rows)
    lane = gl.arange(0, ROWS, gl.SliceLayout(1, found.type.layout))
    block = gl.arange(0, BLOCKS, gl.SliceLayout(0, found.type.layout))
    at = gl.expand_dims(lane * kept.width, 1) + i * BLOCKS + gl.expand_dims(block, 0)
    gl.store(kept.sums + at, found)
    gl.store(kept.peaks + i * ROWS + gl.arange(0, ROWS, of_rows), peak)
    return new_max, row_sum


@gluon.jit
def _compute(
    WHO: gl.constexpr, masses, results, queries, keys, work, sizes,
    PER_BLOCK: gl.constexpr, COLUMNS: gl.constexpr, UNIT: gl.constexpr, WHOLE: gl.constexpr,
    HEADROOM: gl.constexpr,
):  # fmt: skip
    num_q, num_k, tiles_k, units, scale = sizes
    sums, peaks, forced = results
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    BLOCKS: gl.constexpr = TILE // COLUMNS
    no_scores = gl.zeros([ROWS, TILE], gl.float32, SCORES)
    lane = gl.arange(0, ROWS, OF_ROWS)
    # The column in each place of a tile: `select_features.pool`.
    place = gl.arange(0, TILE, gl.SliceLayout(0, SCORES))
    block = place % 8 // 2 * (BLOCKS // 4) + place // (4 * COLUMNS)
    column = block * COLUMNS + place % (4 * COLUMNS) // 8 * 2 + place % 2
    own = (gl.program_id(0) * 2 + WHO).to(gl.int64) * tiles_k * ROWS
    kept = Kept(sums + own * BLOCKS, peaks + own, tiles_k * BLOCKS, scale, COLUMNS, HEADROOM)
    keys_of_tile: gl.constexpr = TILE * work.PATCH_K
    step = 0
    for turn in range(work.turns()):
        head, tile = work.tile(turn)
        num, first_row = work.num_tiles(tile), tile * TILE + WHO * ROWS
        row = first_row + lane
        # An even number of tiles needs no mask.
        num_clear = gl.minimum(work.sees(first_row) // keys_of_tile, num) // 2 * 2
        q = queries.buffers.index(queries.place(turn) * 2 + WHO)
        queries.wait(turn)
        row_max = gl.full([ROWS], float("-inf"), gl.float32, OF_ROWS)
        row_sum = gl.zeros([ROWS], gl.float32, OF_ROWS)
        for n in range(num - num_clear):
            i = num - 1 - n
            keys.wait(step)
            pending = warpgroup_mma(
                q, keys.buffers.index(keys.place(step)).permute((1, 0)), no_scores, use_acc=False, is_async=True
            )
            first_key = (i * TILE + column) * work.PATCH_K
            in_column = gl.minimum(work.seq_k - first_key, work.PATCH_K)
            seen = gl.minimum(
                gl.expand_dims(work.sees(row), 1) - gl.expand_dims(first_key, 0), gl.expand_dims(in_column, 0)
            )
            shares = gl.maximum(seen, 0).to(gl.float32) * (1.0 / work.PATCH_K)
            scores = warpgroup_mma_wait(0, deps=[pending])
            keys.release(step)
            row_max, row_sum = _take_in(scores, shares, i, row_max, row_sum, kept, True)
            step += 1
        if num_clear > 0:
            # By an address that does not look the same: else ptxas reads what it computed in the loop above, even if
            # that was left out.
            q = queries.buffers.index(queries.place(turn) * 2 + WHO + (work.seq_k < 0).to(gl.int32))
            keys.wait(step)
            one = warpgroup_mma(
                q, keys.buffers.index(keys.place(step)).permute((1, 0)), no_scores, use_acc=False, is_async=True
            )
            for n in range(num_clear // 2):
                i = num_clear - 1 - 2 * n
                scores = warpgroup_mma_wait(0, deps=[one])
                keys.release(step)
                keys.wait(step + 1)
                two = warpgroup_mma(
                    q, keys.buffers.index(keys.place(step + 1)).permute((1, 0)), no_scores, use_acc=False, is_async=True
                )
                row_max, row_sum = _take_in(scores, scores, i, row_max, row_sum, kept, False)
                scores = warpgroup_mma_wait(0, deps=[two])
                keys.release(step + 1)
                if i > 1:
                    keys.wait(step + 2)
                # After the last one this multiplies what is in a buffer, and nobody reads the result.
                one = warpgroup_mma(
                    q, keys.buffers.index(keys.place(step + 2)).permute((1, 0)), no_scores, use_acc=False, is_async=True
                )
                row_max, row_sum = _take_in(scores, scores, i - 1, row_max, row_sum, kept, False)
                step += 2
            warpgroup_mma_wait(0, deps=[one])
        queries.release(turn)
        row_lse = gl.where(row_sum == 0.0, 0.0, row_max - HEADROOM + gl.log2(row_sum))
        in_row = gl.maximum(gl.minimum(work.seq_q - row * work.PATCH_Q, work.PATCH_Q), 0)
        in_block = gl.minimum(work.seq_q - row // PER_BLOCK * (PER_BLOCK * work.PATCH_Q), PER_BLOCK * work.PATCH_Q)
        share = in_row.to(gl.float32) / gl.maximum(in_block, 1).to(gl.float32)
        at = masses + (head.to(gl.int64) * num_q + first_row // PER_BLOCK) * units * UNIT
        of_forced = forced + (first_row // PER_BLOCK).to(gl.int64) * num_k
        blocks_left = num_q - first_row // PER_BLOCK
        _finish(at, of_forced, kept, row_lse, share, num, blocks_left, num_k, units, PER_BLOCK, UNIT, WHOLE)


@gluon.jit
def _finish(
    masses, forced, kept, row_lse, share, num, blocks_left, num_k, units,
    PER_BLOCK: gl.constexpr, UNIT: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """Sums divided by those of their rows, and added up over the rows of a block."""
    BLOCKS: gl.constexpr = TILE // kept.COLUMNS
    QUERY_BLOCKS: gl.constexpr = ROWS // PER_BLOCK
    # A thread takes the blocks of EACH that lie together; warps share the rows first.
    EACH: gl.constexpr = 8 if BLOCKS >= 8 else BLOCKS
    OVER_ROWS: gl.constexpr = 4 if QUERY_BLOCKS >= 4 else QUERY_BLOCKS
    AGAIN: gl.constexpr = 1 if QUERY_BLOCKS >= 16 else 4
    AT_ONCE: gl.constexpr = 32 * (4 // OVER_ROWS) * AGAIN
    UNROLLED: gl.constexpr = 4 if PER_BLOCK > 4 else PER_BLOCK
    FLAT: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 1, EACH], [1, 32, 1], [OVER_ROWS, 4 // OVER_ROWS, 1], [2, 1, 0])
    PAIRS: gl.constexpr = gl.SliceLayout(2, WIDE)
    barrier()
    lane = gl.arange(0, ROWS, gl.SliceLayout(0, FLAT))
    row_lse = gl.expand_dims(gl.convert_layout(row_lse, gl.SliceLayout(0, FLAT)), 0)
    share = gl.expand_dims(gl.convert_layout(share, gl.SliceLayout(0, FLAT)), 0)
    for start in range(0, num, 16):  # peaks become factors
        which = gl.expand_dims(start + gl.arange(0, 16, gl.SliceLayout(1, FLAT)), 1)
        at = kept.peaks + which * ROWS + gl.expand_dims(lane, 0)
        factor = gl.exp2(gl.load(at, mask=which < num, other=0.0) - row_lse) * share
        gl.store(at, factor, mask=which < num)
    barrier()
    line = gl.expand_dims(gl.arange(0, QUERY_BLOCKS, gl.SliceLayout(1, PAIRS)), 1)
    first = gl.expand_dims(gl.arange(0, AT_ONCE, gl.SliceLayout(0, PAIRS)), 0) * EACH
    within = gl.expand_dims(gl.expand_dims(gl.arange(0, EACH, gl.SliceLayout(0, gl.SliceLayout(1, WIDE))), 0), 1)
    for start in range(0, num_k if WHOLE else num * BLOCKS, AT_ONCE * EACH):
        known = start + first < num * BLOCKS
        block = gl.expand_dims(start + first, 2) + within
        weights = gl.zeros([QUERY_BLOCKS, AT_ONCE, EACH], gl.float32, WIDE)
        for some in range(0, PER_BLOCK, UNROLLED):
            for r in gl.static_range(UNROLLED):
                row = line * PER_BLOCK + some + r
                of_row = kept.peaks + (start + first) // BLOCKS * ROWS + row
                factor = gl.expand_dims(gl.load(of_row, mask=known & (line >= 0), other=0.0), 2)
                at = kept.sums + gl.expand_dims(row, 2) * kept.width + block
                value = gl.load(at, mask=gl.expand_dims(known & (line >= 0), 2) & (within >= 0), other=0.0)
                weights += value.to(gl.float32) * factor
        there = gl.expand_dims(line < blocks_left, 2) & (block < units * UNIT)
        at = masses + gl.expand_dims(line, 2).to(gl.int64) * units * UNIT + block
        if masses.dtype.element_ty == gl.int16:
            of_block = forced + gl.expand_dims(line, 2).to(gl.int64) * num_k + block
            is_forced = gl.load(of_block, mask=there & (block < num_k), other=0) != 0
            gl.store(at, as_weights(weights, is_forced), mask=there)
        else:
            gl.store(at, weights, mask=there)
    barrier()  # before the next tile writes over the sums


@gluon.jit(
    do_not_specialize=["heads", "group", "all_heads", "seq_q", "seq_k", "num_q", "num_k", "tiles", "tiles_k", "units"]
)
def masses_kernel(
    rows, columns, masses, sums, peaks, forced,
    heads, group, all_heads, seq_q, seq_k, num_q, num_k, tiles, tiles_k, units, scale,
    D: gl.constexpr, PATCH_Q: gl.constexpr, PATCH_K: gl.constexpr, PER_BLOCK: gl.constexpr, COLUMNS: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, WHOLE: gl.constexpr, UNIT: gl.constexpr,
    HEADROOM: gl.constexpr,
):  # fmt: skip
    """`rows` and `columns` are descriptors of features, [all heads, rows, D]; PER_BLOCK rows to a query block."""
    ROW_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], rows.dtype)
    KEY_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, D], rows.dtype)
    q_buffers = gl.allocate_shared_memory(rows.dtype, [4, ROWS, D], ROW_LAYOUT)
    k_buffers = gl.allocate_shared_memory(rows.dtype, [STAGES, TILE, D], KEY_LAYOUT)
    queries = Ring(q_buffers, new_barriers(2), new_barriers(2), 2)
    keys = Ring(k_buffers, new_barriers(STAGES), new_barriers(STAGES), STAGES)
    for place in gl.static_range(2):
        queries.init(place)
    for place in gl.static_range(STAGES):
        keys.init(place)
    work = Work(all_heads, heads, group, tiles, seq_q, seq_k, PATCH_Q, PATCH_K, CAUSAL)
    sizes, results = (num_q, num_k, tiles_k, units, scale), (sums, peaks, forced)
    gl.warp_specialize([
        (_compute, (0, masses, results, queries, keys, work, sizes, PER_BLOCK, COLUMNS, UNIT, WHOLE, HEADROOM)),
        (_compute, (1, masses, results, queries, keys, work, sizes, PER_BLOCK, COLUMNS, UNIT, WHOLE, HEADROOM)),
        (_fetch, (rows, columns, queries, keys, work, D)),
    ], [4, 1], [COMPUTE_REGS, FETCH_REGS])  # fmt: skip
