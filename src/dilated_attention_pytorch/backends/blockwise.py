"""Block-sparse attention in plain PyTorch, in memory linear in the sequence; the CPU backend, and right on any device.

Work is cut into units and these into tiles, as `tiling` says. A tile is one gather of whole key blocks and two batched
BLAS products around one softmax; its result is merged into the rows' running (out, lse).

Key blocks that are used often are first copied together, one key head at a time, so that gathers read whole blocks;
those used once or twice are gathered from the tensor as it lies, with the heads innermost to share its cache lines.
Calls are shared out over the threads, each share by itself with operators that are not split (`workers`): forward by
key heads, or where their copies would be large by rows, so that all read one; backward by key heads, whose gradients
then have one writer. Whoever is done takes what is next, so that a thread that another program holds up has less to do.

Shapes: a tile has `num` pieces of `width` key blocks; query rows are [num, M, D] with M = stacked heads · block_q.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, product

import torch
from torch import Tensor

from ..layout import BlockLayout
from ..layout.size import ListSize
from ..options import CallOptions
from ..patterns.blocks import ceil_div
from . import workers
from .base import Request, aligned_queries, compute_dtype, in_fixed_order, results_of
from .bias import BiasGradient, bias_of_pairs, of_one_sample
from .dropout import in_whole, keep_mask
from .scratch import Scratch
from .sizes import SizeRequest, Workspace
from .tiling import MASKS_KEPT, Cut, KeptMasks, Tile, Tiling, Unit

name = "blockwise"
needs_work_order = False


def can_run(request: Request) -> tuple[bool, str]:
    return True, "runs every layout, option, dtype and device"


def forward(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, options: CallOptions) -> tuple[Tensor, Tensor]:
    out, lse = results_of(q, v)
    call, threads = _Call(q, k, v, layout, options), torch.get_num_threads()
    shares = call.shares(call.num_shares(threads), call.num_at_once(threads))
    stages: Iterator[list[Iterator[Unit]]]
    if call.by_heads(threads):
        stages = iter([[chain.from_iterable(share.stages()) for share in shares]])
    else:
        # The last first: where work grows along the sequence, these are the largest.
        made = call.stages(shared_by=call.num_at_once(threads), together=len(shares))
        stages = ([iter(units[::-1])] * len(shares) for units in made)
    for parts in stages:
        workers.run([partial(_forward, *both, q, out, lse) for both in zip(shares, parts, strict=True)])
    call.end(shares)
    return out, lse


def _forward(call: _Call, units: Iterator[Unit], q: Tensor, out: Tensor, lse: Tensor) -> None:
    options = call.options
    for unit in units:
        queries = call.load("queries", q, unit)
        mixed = call.scratch("mixed", *queries.shape[:2], out.shape[3])
        total = call.scratch("total", *queries.shape[:2])
        for tile in call.tiles(unit):
            scores = call.scores(queries, unit, tile)
            top = scores.amax(-1)
            weights = torch.softmax(scores, -1, out=scores)
            # The largest weight is exp(top − lse): this is how lse comes out of a fused softmax.
            part_lse = weights.amax(-1).log_().neg_().add_(top)
            if tile.masked:
                dead = top == -torch.inf
                if dead.any():  # softmax made NaN of a row without keys
                    part_lse.masked_fill_(dead, -torch.inf)
                    weights.masked_fill_(dead[..., None], 0.0)
            if options.seed is not None:
                weights.mul_(call.kept(unit, tile))
            values = call.gather(unit.values, tile)
            if tile.first and isinstance(tile.rows, slice):
                torch.bmm(weights, values, out=mixed[tile.rows])
                total[tile.rows] = part_lse
                continue
            part = torch.bmm(weights, values, out=call.scratch("part", *weights.shape[:2], values.shape[-1]))
            if tile.first:
                mixed[tile.rows], total[tile.rows] = part, part_lse
            else:
                _merge(mixed, total, tile.rows, part, part_lse)
        empty = call.empty_rows(unit)
        mixed[empty], total[empty] = 0.0, -torch.inf
        call.store(out, unit, mixed)
        call.store_lse(lse, unit, total)


@in_fixed_order
def backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: BlockLayout,
    options: CallOptions,
    wanted: Sequence[str] = (),
) -> tuple[Tensor, ...]:
    call = _Call(q, k, v, layout, options)
    new = torch.empty_like if call.copied else torch.zeros_like
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk, dv = (new(x, memory_format=torch.contiguous_format) for x in (k, v))
    of_bias = BiasGradient(options.bias, wanted, compute_dtype(q.dtype)) if options.bias and wanted else None
    threads = torch.get_num_threads()
    num, at_once, split = call.num_backward_shares(threads), call.num_backward_at_once(threads), call.split(threads)
    if of_bias or q.device.type != "cpu":  # a gradient of the bias has one writer
        num, at_once, split = 1, 1, threads
    shares = call.shares(num, at_once)
    workers.run([partial(_backward, each, (do, q, out, lse), dlse, (dq, dk, dv), of_bias) for each in shares], split)
    call.end(shares)
    return dq, dk, dv, *(of_bias.results() if of_bias else ())


def _backward(
    call: _Call,
    given: tuple[Tensor, ...],
    dlse: Tensor | None,
    grads: tuple[Tensor, Tensor, Tensor],
    of_bias: BiasGradient | None,
) -> None:
    (do, q, out, lse), (dq, dk, dv), options = given, grads, call.options
    for unit in (unit for units in call.stages() for unit in units):
        dkeys, dvalues = (
            call.accumulator(name, grad, of, unit)
            for name, grad, of in (("dkeys", dk, unit.keys), ("dvalues", dv, unit.values))
        )
        queries = call.load("queries", q, unit)
        grad = call.load("grad", do, unit)
        delta = call.load("dqueries", out, unit).mul_(grad).sum(-1)
        if dlse is not None:
            delta -= call.load_lse("dlse", dlse, unit)
        dqueries = call.scratch("dqueries", *queries.shape)  # out has served
        dqueries[call.empty_rows(unit)] = 0.0
        total = call.load_lse("total", lse, unit, behind=torch.inf)
        empty = total == -torch.inf
        total.masked_fill_(empty, torch.inf)  # no weight anywhere,
        delta.masked_fill_(empty, 0.0)  # and no gradient, even if an infinite one comes in
        if empty.any():
            grad.masked_fill_(empty[..., None], 0.0)
        for tile in call.tiles(unit):
            scores = call.scores(queries, unit, tile, steepness=True)
            weights = scores.sub_(total[tile.rows, :, None]).exp_()
            tile_queries, tile_grad = queries[tile.rows], grad[tile.rows]
            gathered = call.gather(unit.values, tile)
            dweights = torch.bmm(tile_grad, gathered.mT, out=call.scratch("dweights", *weights.shape))
            dropped = weights
            if options.seed is not None:
                kept = call.kept(unit, tile)
                dropped, dweights = weights * kept, dweights.mul_(kept)
            # The gathered values have served; the gradients of the same blocks take their place, and then the keys'.
            _scatter_add(dvalues, tile, torch.bmm(dropped.mT, tile_grad, out=gathered))
            gathered = call.gathered(unit.keys, tile)
            dscores = dweights.sub_(delta[tile.rows, :, None]).mul_(weights)
            if of_bias:
                call.add_to(of_bias, dscores, unit, tile)
            if options.softcap:
                dscores.mul_(call.scratch("steepness", *dscores.shape))
            scaled = {"beta": 0, "alpha": options.scale}  # beta 0: what the buffer held does not matter
            torch.baddbmm(gathered, dscores.mT, tile_queries, **scaled, out=gathered)
            _scatter_add(dkeys, tile, gathered)
            gathered = call.gather(unit.keys, tile)
            direct = tile.first and isinstance(tile.rows, slice)
            part = dqueries[tile.rows] if direct else call.scratch("part", *tile_queries.shape)
            torch.baddbmm(part, dscores, gathered, **scaled, out=part)
            if not direct and tile.first:
                dqueries[tile.rows] = part
            elif not direct:
                dqueries[tile.rows] += part
        call.store(dq, unit, dqueries)
        if call.copied and unit.closes_key_head:
            call.store_keys(dk, unit, dkeys)
            call.store_keys(dv, unit, dvalues)


def _merge(mixed: Tensor, total: Tensor, rows: Tensor | slice, part: Tensor, part_lse: Tensor) -> None:
    """Exact merge of one more piece into the rows' (out, lse); −inf stands for nothing so far."""
    old = total[rows]
    share = torch.sigmoid(part_lse - old)  # exp(part) / (exp(part) + exp(old))
    share.masked_fill_(part_lse == -torch.inf, 0.0)
    share = share[..., None]
    mixed[rows] = (mixed[rows] * (1 - share)).addcmul_(part, share)  # lerp would overflow where the values do not
    total[rows] = torch.logaddexp(old, part_lse)


def _scatter_add(blocks: Tensor, tile: Tile, grad: Tensor) -> None:
    blocks.index_add_(0, tile.blocks.flatten(), grad.view(-1, *blocks.shape[1:]))


class _Call(Tiling):
    """What all units of a call share; a share of it has some of the key heads and its own scratch memory."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, options: CallOptions) -> None:
        super().__init__(q, k, v, layout, masked=options.may_hide)
        self.k, self.v, self.options = k, v, options
        self.own_key_heads = range(self.key_heads)
        self.turns = iter(product(range(self.batch), self.own_key_heads))
        self.scratch = Scratch(q)

    def shares(self, num: int, at_once: int) -> list[_Call]:
        """The call `num` times, for threads of which `at_once` share the cache: each with some of the key heads, their
        turns of copied ones in common."""
        shares = []
        for i in range(num):
            share = self.share(at_once)
            share.own_key_heads = range(self.key_heads * i // num, self.key_heads * (i + 1) // num)
            share.scratch = Scratch(self.k)
            share.plans, share.masks = {}, KeptMasks(MASKS_KEPT // num)
            shares.append(share)
        self.enlarge /= at_once
        return shares

    def end(self, shares: list[_Call]) -> None:
        for call in (self, *shares):
            call.scratch.end()

    def stages(self, shared_by: int = 1, together: int = 1) -> Iterator[list[Unit]]:
        """Units that can run side by side, stage after stage; those of a stage are enough for `shared_by` threads.

        Args:
            together: threads that fill the copies; this one alone if 1.
        """
        if not self.copied:
            units: list[Unit] = []
            for sample, rows, key_head in product(range(self.batch), self.ranges(), self.own_key_heads):
                keys, values = (self._view(x, sample, key_head) for x in (self.k, self.v))
                units += self.units(sample, key_head, [rows], keys, values)
            yield units
            return
        ranges = self.ranges(shared_by)
        for sample, key_head in self.turns:
            (keys, copy_keys), (values, copy_values) = (
                self._copy(n, x[sample, :, key_head]) for n, x in (("keys", self.k), ("values", self.v))
            )
            if together > 1:
                workers.run([copy_keys, copy_values])
            else:
                copy_keys()
                copy_values()
            yield list(self.units(sample, key_head, ranges, keys, values))

    def _view(self, x: Tensor, sample: int, key_head: int) -> Tensor:
        """Keys or values of a head as blocks [num_k_blocks, block_k, D], as they lie."""
        return x[sample, :, key_head].unflatten(0, (-1, self.layout.block_k))

    def _copy(self, name: str, x: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """The same as contiguous blocks in the compute dtype, zeros behind the end, and the job that fills them.

        If x is that already, it is a view, and there is nothing to do.
        """
        block, num_residues = self.layout.block_k, self.layout.num_residues
        if num_residues == 1 and x.dtype == compute_dtype(x.dtype) and len(x) % block == 0 and x.is_contiguous():
            return x.view(-1, block, x.shape[-1]), lambda: None
        blocks = self.scratch(name, self.layout.num_k_blocks, 1, block, x.shape[-1])

        def fill() -> None:
            for residue, of_class in enumerate(blocks.chunk(num_residues)):
                _into_blocks(of_class, x[residue::num_residues, None])

        return blocks[:, 0], fill

    def accumulator(self, name: str, grad: Tensor, of: Tensor, unit: Unit) -> Tensor:
        """Where the gradient of this unit's key blocks, or value blocks, is summed."""
        if not self.copied:
            return self._view(grad, unit.sample, unit.key_head)
        blocks = self.scratch(name, *of.shape)
        return blocks.zero_() if unit.opens_key_head else blocks

    def store_keys(self, x: Tensor, unit: Unit, blocks: Tensor) -> None:
        for residue, of_class in enumerate(blocks[:, None].chunk(self.layout.num_residues)):
            _from_blocks(x[unit.sample, residue :: self.layout.num_residues, unit.key_head, None], of_class)

    def load(self, name: str, x: Tensor, unit: Unit) -> Tensor:
        """Rows of q, out or do as [rows, M, D], in the compute dtype."""
        tiles = self.scratch(name, len(unit.rows), self.stacked, self.layout.block_q, x.shape[-1])
        _into_blocks(tiles, x[unit.sample, unit.tokens, unit.heads])
        return tiles.flatten(1, 2)

    def store(self, x: Tensor, unit: Unit, tiles: Tensor) -> None:
        _from_blocks(x[unit.sample, unit.tokens, unit.heads], tiles.unflatten(1, (self.stacked, -1)))

    def load_lse(self, name: str, x: Tensor, unit: Unit, behind: float = 0.0) -> Tensor:
        """Rows of a (batch, heads, seq_q) tensor as [rows, M]."""
        tiles = self.scratch(name, len(unit.rows), self.stacked, self.layout.block_q, 1)
        _into_blocks(tiles, x[unit.sample, unit.heads, unit.tokens].mT[..., None], behind)
        return tiles.flatten(1)

    def store_lse(self, x: Tensor, unit: Unit, tiles: Tensor) -> None:
        rows = tiles.view(len(unit.rows), self.stacked, -1, 1)
        _from_blocks(x[unit.sample, unit.heads, unit.tokens].mT[..., None], rows)

    def gather(self, blocks: Tensor, tile: Tile) -> Tensor:
        """Key or value blocks of a tile, [num, width · block_k, D]; the one before is overwritten."""
        picked = self.gathered(blocks, tile)
        torch.index_select(blocks, 0, tile.blocks.flatten(), out=picked.view(-1, *blocks.shape[1:]))
        return picked

    def gathered(self, blocks: Tensor, tile: Tile) -> Tensor:
        """The memory of `gather`, as it is."""
        num, width = tile.blocks.shape
        return self.scratch("gathered", num, width * blocks.shape[1], blocks.shape[2])

    def scores(self, queries: Tensor, unit: Unit, tile: Tile, *, steepness: bool = False) -> Tensor:
        """Scaled scores [num, M, width · block_k], −inf where a pair is not allowed.

        Args:
            steepness: with a cap, leave its derivative at each of them in the buffer of that name.
        """
        layout, options = self.layout, self.options
        num, width = tile.blocks.shape
        keys = self.gather(unit.keys, tile)
        scores = self.scratch("scores", num, queries.shape[1], keys.shape[1])
        torch.baddbmm(scores, queries[tile.rows], keys.mT, beta=0, alpha=options.scale, out=scores)
        cells = scores.view(num, self.stacked, layout.block_q, width, layout.block_k)
        if options.softcap:
            scores.div_(options.softcap).tanh_()
            if steepness:
                torch.mul(scores, scores, out=self.scratch("steepness", *scores.shape)).neg_().add_(1.0)
            scores.mul_(options.softcap)
        if options.bias is not None:
            of_unit = of_one_sample(options.bias, unit.sample, unit.heads)
            query, key = self._queries(tile)[:, :, None, None], self._keys(tile)[:, None]
            whole = None if options.places is None else in_whole(options.places, query, key)
            cells.add_(bias_of_pairs(of_unit, query, key, *layout.lengths, whole)[0].transpose(0, 1))
        if tile.rule_ids is not None:
            cells[..., tile.num_full :, :].masked_fill_(self.hidden(tile, tile.rule_ids), -torch.inf)
        if tile.times is not None:
            cells.add_(tile.times.clamp(min=1).to(scores.dtype).log()[:, None, None, :, None])
            piece, at = (tile.times == 0).nonzero(as_tuple=True)
            if len(piece):
                which = torch.full_like(piece, self._first_row(unit) // layout.num_q_blocks)
                times = layout.pair_multiplicity(which, tile.query_blocks[piece], tile.blocks[piece, at])
                cells[piece, :, :, at] += times.to(scores.dtype).log()[:, None]
        if options.key_padding_mask is not None:
            padded = self._of_keys(options.key_padding_mask[unit.sample], tile)
            if padded.any():
                cells.masked_fill_(padded[:, None, None], -torch.inf)
        if options.document_ids is not None:
            key_ids = self._of_keys(options.document_ids[unit.sample], tile)
            query_ids = aligned_queries(options.document_ids, layout.seq_q)[unit.sample]
            query_ids = query_ids[self._queries(tile).clamp(max=layout.seq_q - 1)]
            cells.masked_fill_(query_ids[:, None, :, None, None] != key_ids[:, None, None], -torch.inf)
        return scores

    def add_to(self, of_bias: BiasGradient, dscores: Tensor, unit: Unit, tile: Tile) -> None:
        """The gradient of a tile's scores, as it is before that of a cap."""
        seen = dscores.unflatten(1, (self.stacked, -1))
        query, key = self._queries(tile), self._keys(tile).flatten(1)
        whole = None if self.options.places is None else in_whole(self.options.places, query, key)
        of_bias.add(seen, unit.sample, unit.heads, query, key, self.layout.lengths, whole)

    def _queries(self, tile: Tile) -> Tensor:
        """Query numbers [num, block_q]."""
        return self.layout.queries_of(tile.query_blocks)

    def _keys(self, tile: Tile) -> Tensor:
        """Key numbers [num, width, block_k]."""
        return self.layout.keys_of(tile.blocks.long())

    def _of_keys(self, x: Tensor, tile: Tile) -> Tensor:
        """A value for each key of a tile; keys behind the end, which a token rule hides, get the last one's."""
        return x[self._keys(tile).clamp(max=self.layout.seq_k - 1)]

    def kept(self, unit: Unit, tile: Tile) -> Tensor:
        """Dropout's factor of every weight of a tile: 0 or 1 / (1 − p)."""
        assert self.options.seed is not None
        heads = torch.arange(unit.heads.start, unit.heads.stop, device=self.device)
        kept = keep_mask(
            self.options.seed,
            self.options.dropout_p,
            (unit.sample * self.num_heads + heads)[None, :, None, None],
            self._queries(tile)[:, None, :, None],
            self._keys(tile).flatten(1)[:, None, None],
        )
        return kept.flatten(1, 2).to(compute_dtype(self.k.dtype)).div_(1.0 - self.options.dropout_p)


def _into_blocks(blocks: Tensor, tokens: Tensor, behind: float = 0.0) -> None:
    """Copy tokens [seq, heads, D] into blocks [n, heads, block, D]; zeros, or what is said, behind the end."""
    whole, rest = divmod(len(tokens), blocks.shape[2])
    blocks[:whole].copy_(tokens[: len(tokens) - rest].unflatten(0, (whole, blocks.shape[2])).transpose(1, 2))
    if rest:
        blocks[whole, :, :rest] = tokens[len(tokens) - rest :].transpose(0, 1)
        blocks[whole, :, rest:] = behind
    blocks[whole + (rest > 0) :] = behind


def _from_blocks(tokens: Tensor, blocks: Tensor) -> None:
    """The inverse of `_into_blocks`."""
    whole, rest = divmod(len(tokens), blocks.shape[2])
    tokens[: len(tokens) - rest].unflatten(0, (whole, blocks.shape[2])).copy_(blocks[:whole].transpose(1, 2))
    if rest:
        tokens[len(tokens) - rest :] = blocks[whole, :, :rest].transpose(0, 1)


def workspace(request: SizeRequest) -> Workspace:
    """The named buffers of the scratch memory, and the plans of tiles."""
    shape, lists = request.shape, request.lists
    on_cpu = request.device == "cpu"
    cut = Cut(shape, lists, list_heads=lists.list_heads, blocks=lists.blocks, on_cpu=on_cpu)
    width_v = shape.width_v
    a_key_head = lists.num_k_blocks * lists.block_k * (shape.head_dim + width_v) if cut.copied else 0
    keys_and_values = 0 if cut.plain and shape.heads_kv == 1 else a_key_head
    threads, rows = request.threads, shape.head_dim + width_v
    num, at_once, by_heads = cut.num_shares(threads), cut.num_at_once(threads), cut.by_heads(threads)
    shared_by = 1 if by_heads else at_once
    forward = num * _scratch_of(cut.share(at_once), lists, shared_by=shared_by, rows=rows, scores=1)
    forward += keys_and_values * (num if by_heads else 1)
    num, at_once = cut.num_backward_shares(threads), cut.num_backward_at_once(threads)
    rows += max(shape.head_dim, width_v)
    backward = num * (_scratch_of(cut.share(at_once), lists, rows=rows, scores=2) + keys_and_values + a_key_head)
    plans = 4 * lists.blocks + 24 * lists.rows
    masks = min(MASKS_KEPT, lists.rows * lists.partial * lists.block_q * lists.block_k)
    return Workspace(forward * shape.compute + plans + masks, backward * shape.compute + num * plans + masks)


def _scratch_of(cut: Cut, lists: ListSize, *, shared_by: int = 1, rows: int, scores: int) -> int:
    """Numbers in the buffers of a share: a unit's rows, of `rows` numbers each, `scores` of a tile's scores, and the
    others."""
    row = cut.stacked * lists.block_q * cut.widest
    rows_of_unit = ceil_div(ceil_div(lists.num_q_blocks, lists.num_residues), cut.num_ranges(shared_by))
    width = min(cut.piece, max(1, lists.widest))
    pieces, keys = min(rows_of_unit, cut.rows_at_once(width)), width * lists.block_k
    gathered = pieces * keys * cut.widest
    part = pieces * row * (3 if lists.widest > cut.piece else 0)  # merged into what came before
    masks = pieces * cut.stacked * lists.block_q * min(keys, lists.partial * lists.block_k)
    if lists.bitmaps:  # unpacked for all stacked heads together
        masks += masks // cut.stacked
    own = rows_of_unit * cut.stacked * lists.block_q * rows
    return own + scores * pieces * cut.stacked * lists.block_q * keys + gathered + part + masks
