"""From a layout and tensors to kernel launches."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..caches import cached
from ..layout import BlockLayout
from ..layout.lists import neighbourhood
from ..options import CallOptions
from . import launcher, padding, united
from .backward import dkv_kernel, dq_kernel, round_kernel, rows_kernel
from .bias_arguments import BiasArguments, BiasSums, NoSums
from .common import cap_kind
from .configs import (
    FEW_ROWS,
    HOPPER_BACKWARD,
    HOPPER_FUSED,
    Config,
    Configs,
    box_width,
    configs,
    for_rows,
    forward_tiles,
    padded_dim,
    sums_width,
)
from .forward import forward_kernel
from .padding import PaddedLists
from .tile_scheduler import TileSchedule, tile_schedules
from .united import LARGE_BLOCK

INTERPRETED = triton.knobs.runtime.interpret
try:
    from . import hopper_common, hopper_launch, runs
except ImportError:  # Gluon is Triton's experiment: where it lacks what we use, the plain kernels run
    HAVE_GLUON = False
else:
    HAVE_GLUON = not INTERPRETED


Grads = tuple[Tensor, Tensor, Tensor]
# To hash every pair takes longer than all products of small heads, and the plain kernel has more warps for it.
SMALL_HEAD = 64
WORK = 2  # where the order of work stands among lists by query
# lse and delta of every row, in units of the kernels and up to whole blocks: both together, then each. Behind them the
# sums of dq, where one kernel computes all gradients.
Rows = tuple[Tensor, ...]


def forward(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, options: CallOptions) -> tuple[Tensor, Tensor]:
    """out and lse, as every backend gives them."""
    key = _call_key(options, q, k, v)
    known = layout.call_cache.get(key)
    if known:
        return _replayed(known, q, k, v)
    call = Call(q, k, v, layout, options)
    out, lse = call.forward()
    _remember(key, call, (q, k, v, out, lse))
    return out, lse


def replay_for(
    q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, options: CallOptions
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """`forward` for tensors like these in every respect, once it is known. (How single precision is meant may change
    between two calls.)"""
    known = layout.call_cache.get(_call_key(options, q, k, v))
    return partial(_replayed, known) if known and q.dtype != torch.float32 else None


def _replayed(replay: launcher.Replay, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = results(q, v)
    replay((q, k, v, out, lse))
    return out, lse


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
    """dq, dk, dv and the gradients of the bias that are wanted, as every backend gives them."""
    given = (q, k, v, do, out, lse) if dlse is None else (q, k, v, do, out, lse, dlse)
    key = _call_key(options, *given)
    known = layout.call_cache.get(key)
    if known:
        grads, of_rows = _gradients(q, k, v, layout, fused=known.num_tensors > len(given) + 6)
        known((*given, *of_rows, *grads))
        return grads
    call = Call(q, k, v, layout, options)
    grads, of_rows, of_bias = call.backward(do, dlse, out, lse, wanted)
    _remember(key, call, (*given, *of_rows, *grads))
    return *grads, *of_bias


def _call_key(options: CallOptions, *tensors: Tensor) -> tuple[Any, ...] | None:
    """What calls over a layout share that launch the same but for their tensors; None where a mask is among these."""
    if options.has_tensors:
        return None
    numbers = options.scale, options.softcap, options.deterministic
    return *numbers, precision_of(tensors[0].dtype), *map(launcher.like, tensors)


def _remember(key: tuple[Any, ...] | None, call: Call, tensors: tuple[Tensor, ...]) -> None:
    """Remember a call when it comes the second time: most layouts of a graph are met only once."""
    layout = call.layout
    if key is None or not call.as_given:
        return
    if key not in layout.call_cache:
        layout.remember_call(key, None)
    elif not (call.q.is_cuda and torch.cuda.is_current_stream_capturing()):  # lists that a capture makes are its own
        layout.remember_call(key, launcher.Replay.of(call.launches, tensors, layout.tensors()))


class Call:
    """What the kernels of one call share. The arguments are those of a backend, checked before."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: BlockLayout,
        options: CallOptions,
    ) -> None:
        self.q, self.k, self.v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
        self.layout, self.options, self.scale = layout, options, options.scale
        self.deterministic = options.deterministic
        self.as_given = self.q is q and self.k is k and self.v is v  # no tensor had to be copied
        self.launches: list[launcher.Launched | None] = []
        self.batch, self.seq_q, self.heads, self.head_dim = q.shape
        self.heads_kv = k.shape[2]
        self.group = self.heads // self.heads_kv
        self.head_dim_v = v.shape[3]
        self.padded = padded_dim(max(self.head_dim, self.head_dim_v))
        self.boxes = box_width(self.head_dim), box_width(self.head_dim_v)
        self.tma, self.hopper, self.configs = _device(q.device, self.padded, q.dtype.itemsize)
        lists = layout.num_heads or 1
        self.own_lists = lists > self.heads_kv  # query heads of a key head follow different ones
        unused, hidden, ids = layout.by_query.offsets, options.key_padding_mask, options.document_ids
        self.unused, self.padding = unused, None if hidden is None else hidden.contiguous().view(torch.uint8)
        self.masks = unused if ids is None else ids.contiguous(), unused if options.seed is None else options.seed
        self.sizes = (self.heads, self.group, layout.seq_q, layout.seq_k)
        self.lists_per_sample = lists if (layout.batch_size or 1) > 1 else 0
        self.list_sizes = (
            self.heads // lists,
            layout.rules.shape[1],
            layout.branches.shape[1],
            layout.num_residues,
        )
        base_e = q.dtype == torch.float32  # else scores are in units of log2
        units_per_nat = 1.0 if base_e else math.log2(math.e)
        self.cap = options.softcap * units_per_nat
        self.bias = BiasArguments(options.bias, self.seq_q, unused, units_per_nat)
        self.slopes = self.bias.slopes
        # A scale of 0 would make NaN of −inf; this small one leaves the scores 0 all the same.
        self.exp_scale = max(abs(options.scale) * units_per_nat, 1e-30)
        self.dropout = round(options.dropout_p * 2**32), 1.0 / (1.0 - options.dropout_p)
        self.flags: dict[str, Any] = {
            "D": self.head_dim,
            "PADDED_D": padded_dim(self.head_dim),
            "D_V": self.head_dim_v,
            "PADDED_D_V": padded_dim(self.head_dim_v),
            "BLOCK_Q": layout.block_q,
            "BLOCK_K": layout.block_k,
            "NEGATIVE_SCALE": options.scale < 0,
            "HAS_RULE_IDS": layout.by_query.rule_ids.numel() > 0 and not layout.dilated,
            "ONE_INTERVAL": layout.rules.shape[1] == 1,
            "DOCUMENTS": min(num_ranges(layout), 2),
            "PADDING": hidden is not None,
            "DOCUMENT_IDS": 0 if ids is None else 1 + (ids.shape[1] > layout.seq_k),
            "DROPOUT": options.seed is not None,
            "DILATED": int(layout.dilated) + int(layout.has_mixed_blocks),
            "SOFTCAP": cap_kind(options.softcap),
            "ALIBI": self.bias.flags["ALIBI"],
            "BASE_E": base_e,
            "PRECISION": precision_of(q.dtype),
        }
        # Of the plain kernels alone.
        self.plain_flags = self.flags | {"BITMAPS": int(len(layout.bitmaps) > 0), "BIAS": self.bias.flags["BIAS"]}

    @cached_property
    def walks_runs(self) -> bool:
        """Of dilated attention: runs of keys, not blocks."""
        return not _no_runs(self.hopper, self.q, self.k, self.v, self.layout, self.options)

    def forward(self) -> tuple[Tensor, Tensor]:
        q, k, v, layout = self.q, self.k, self.v, self.layout
        out, lse = results(q, v)
        if self.walks_runs:
            runs.forward(self, out, lse)
            return out, lse
        hashes = self.flags["DROPOUT"] and self.head_dim <= SMALL_HEAD
        own, block = layout.blocks
        if not hashes and self._on_hopper(forward_tiles(own), own, block, q, k, v, out, gathers=True):
            by_query = self.by_query(self.key_bits)
            hopper_launch.forward(self, out, lse, own, by_query, self.lists.lists_per_sample)
            return out, lse
        by_query = self.by_query(self.padding)
        tiles, owned, config = self._query_tiles(self.configs.forward)
        own_rows = owned["TILE_Q"] * owned["PACK"]
        if not hashes and self._unites(out):
            rows = layout._derive(f"united, {own_rows}", partial(united.united_rows, layout, own_rows))
            of_lists = [rows.indices, rows.words, rows.work, layout.rules, layout.documents, layout.branches]
            of_keys = self.unused if self.key_bits is None else self.key_bits
            hopper_launch.forward(self, out, lse, LARGE_BLOCK, [*of_lists, of_keys, *self.masks], self.lists_per_sample)
            by_query[WORK] = self.lists.work_of(rows.own_work, layout.num_q_blocks)  # only one of the two has rows
        grid = (tiles * self.batch * (self.heads // owned["PACK"]),)
        if self._has_few_rows(own_rows, config.tile_q):
            config = FEW_ROWS.forward
        config = self._block_by_block(config, tile_k=self.layout.block_k)
        tma, (keys, values) = self._walked(config.tile_k, self.layout.block_k, k, v)
        self.launch(
            forward_kernel, grid,
            (q, keys, values, out, lse, *by_query, self.slopes, self.layout.bitmaps,
             *self.bias.tensors),
            (*_strides(q, k, v), *self.sizes, self.layout.num_q_blocks, self.lists.lists_per_sample, *self.list_sizes,
             self.exp_scale, self.cap, *self.dropout, *self.bias.numbers),
            **self.plain_flags, **owned, TILE_K=config.tile_k, TMA=tma, **self._launch_options(config),
        )  # fmt: skip
        return out, lse

    def backward(
        self, do: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, wanted: Sequence[str] = ()
    ) -> tuple[Grads, Rows, list[Tensor]]:
        """dq, dk and dv, the numbers of rows that the kernels took, and the gradients of the bias that are wanted."""
        q, k, v, layout, given = self.q, self.k, self.v, self.layout, (do, dlse, out, lse)
        do = contiguous_rows(do) if not self.walks_runs or runs.reachable(do) else do.contiguous()
        out, lse = out.contiguous(), lse.contiguous()  # a ring gives parts of its own
        dlse = None if dlse is None else dlse.contiguous()
        self.as_given &= all(map(operator.is_, given, (do, dlse, out, lse)))
        on_hopper = self._on_hopper(HOPPER_BACKWARD, layout.block_k, layout.block_q, q, k, v, do)
        fused = on_hopper and not (wanted or self.deterministic or self.walks_runs)
        fused = fused and max(self.boxes) <= max(HOPPER_FUSED)
        (dq, dk, dv), of_rows = _gradients(q, k, v, layout, fused=fused)
        padded_q, tile = of_rows[0].shape[-1], min(64, layout.block_q)
        self.launch(
            rows_kernel, (padded_q // tile * self.batch * self.heads,),
            (out, do, lse if dlse is None else dlse, lse, *of_rows[1:3], of_rows[-1]),
            (*do.stride()[:3], self.heads, self.seq_q, padded_q, 1 if self.walks_runs else layout.num_residues),
            D=self.head_dim_v, PADDED_D=self.flags["PADDED_D_V"], TILE=tile, BASE_E=self.flags["BASE_E"],
            DLSE=dlse is not None, SUMS=sums_width(self.head_dim) if fused else 0,
        )  # fmt: skip
        if self.walks_runs:
            self._backward_over_runs(do, of_rows, dq, dk, dv)
            return (dq, dk, dv), of_rows, []
        if fused:
            sums = of_rows[-1]
            hopper_launch.backward(self, do, of_rows, sums, dk, dv, of_keys=True, fused=True)
            self.launch(
                round_kernel,
                (sums.numel() // (64 * 64),),
                (sums, dq),
                (self.heads, self.seq_q, padded_q, layout.num_residues, self.scale * self.dropout[1]),
                D=sums_width(self.head_dim),
                WIDTH=self.head_dim,
                num_warps=4,
            )
            return (dq, dk, dv), of_rows, []
        if on_hopper:
            hopper_launch.backward(self, do, of_rows, dq, dk, dv, of_keys=True)
        else:
            self._plain_dkv(do, of_rows, dk, dv)
        of_bias = None
        if wanted:
            of_bias = BiasSums(self.bias, wanted, self.heads, padded_q, self.dropout[1], do, v, dlse, lse)
        if of_bias is None and self._on_hopper(HOPPER_BACKWARD, layout.block_q, layout.block_k, q, k, v, do):
            hopper_launch.backward(self, do, of_rows, dq, dk, dv, of_keys=False)
        else:
            self._plain_dq(do, of_rows, dq, of_bias)
        return (dq, dk, dv), of_rows, of_bias.results() if of_bias else []

    def _backward_over_runs(self, do: Tensor, of_rows: Rows, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        if self.group == 1:
            runs.backward(self, do, of_rows[1:], (dq, dk, dv))
            return
        of_heads = [x.new_empty(self.q.shape) for x in (dk, dv)]
        runs.backward(self, do, of_rows[1:], (dq, *of_heads))
        for x, each in zip((dk, dv), of_heads, strict=True):
            torch.sum(each.unflatten(2, (self.heads_kv, self.group)), 3, out=x)
        self.as_given = False  # sums are no launch of ours

    def launch(self, *args: Any, **constants: Any) -> None:
        self.launches.append(launcher.launch(*args, **constants))

    def _launch_options(self, config: Config) -> dict[str, int]:
        """A tile of a bias takes the room of a stage."""
        stages = max(1, config.num_stages - 1) if self.plain_flags["BIAS"] else config.num_stages
        return {"num_warps": config.num_warps, "num_stages": stages}

    def _has_few_rows(self, own_rows: int, usual: int) -> bool:
        """Whether a tile has few rows because blocks are small."""
        return own_rows < 64 <= usual and self.q.dtype.itemsize == 2

    def _block_by_block(self, config: Config, **walked: int) -> Config:
        """Each block of dilated attention has a multiplicity of its own, so a tile walks no several at once."""
        if not self.layout.dilated:
            return config
        return config._replace(**{name: min(getattr(config, name), block) for name, block in walked.items()})

    def _plain_dkv(self, do: Tensor, of_rows: Rows, dk: Tensor, dv: Tensor) -> None:
        q, k, v, layout = self.q, self.k, self.v, self.layout
        tile_k = min(self.configs.dkv.tile_k, layout.block_k)
        config = for_rows(self.configs.dkv, tile_k)
        if self.padded <= 64 and self._has_few_rows(tile_k, config.tile_k):
            config = FEW_ROWS.dkv
        config = self._block_by_block(config, tile_q=layout.block_q)
        tma, (queries, grads) = self._walked(config.tile_q, layout.block_q, q, do)
        self.launch(
            dkv_kernel, (layout.num_k_blocks * (layout.block_k // tile_k) * self.batch * self.heads_kv,),
            (queries, k, v, grads, *of_rows[1:], dk, dv, *self.by_key(layout.documents), self.slopes, layout.bitmaps,
             *self.bias.tensors),
            (*_strides(q, k, v, do), *self.sizes, layout.num_k_blocks, self.lists_per_sample, *self.list_sizes,
             self.exp_scale, self.scale, self.cap, *self.dropout, *self.bias.numbers),
            **self.plain_flags, TILE_Q=config.tile_q, TILE_K=tile_k, PACK=1, TMA=tma, **self._launch_options(config),
        )  # fmt: skip

    def _plain_dq(self, do: Tensor, of_rows: Rows, dq: Tensor, of_bias: BiasSums | None) -> None:
        """With the gradient of a bias, by launches of some samples and heads each."""
        q, k, v, layout = self.q, self.k, self.v, self.layout
        tiles, owned, config = self._query_tiles(self.configs.dq, alone=of_bias is not None)
        own_rows = owned["TILE_Q"] * owned["PACK"]
        if self.padded <= 64 and self._has_few_rows(own_rows, config.tile_q):
            config = FEW_ROWS.dq._replace(tile_k=own_rows)
        config = self._block_by_block(config, tile_k=layout.block_k)
        tma, (keys, values) = self._walked(config.tile_k, layout.block_k, k, v)
        sums = NoSums(layout.bitmaps, self.batch, self.heads) if of_bias is None else of_bias
        for first_sample, samples, first_head, heads in sums.launches():
            self.launch(
                dq_kernel, (tiles * samples * (heads // owned["PACK"]),),
                (q, keys, values, do, *of_rows[1:], dq, *sums.tensors, *self.by_query(self.padding), self.slopes,
                 layout.bitmaps, *self.bias.tensors),
                (*_strides(q, k, v, do), *self.sizes, layout.num_q_blocks, self.lists.lists_per_sample,
                 *self.list_sizes, self.exp_scale, self.scale, self.cap, *self.dropout, *self.bias.numbers,
                 *sums.numbers, first_sample, first_head, heads),
                **self.plain_flags, **sums.flags, **owned, TILE_K=config.tile_k, TMA=tma,
                **self._launch_options(config),
            )  # fmt: skip

    def _on_hopper(
        self, tiles: Iterable[int], own_block: int, block: int, *tensors: Tensor, gathers: bool = False
    ) -> bool:
        plain = self.bias.flags["BIAS"] or _plain_reason(
            self.hopper, tiles, self.layout, own_block, block, tensors, gathers
        )
        return not plain

    def _unites(self, out: Tensor) -> bool:
        """Whether the rows of small blocks are united for the kernel for Hopper, where that turns out to pay."""
        tiles, inputs = forward_tiles(LARGE_BLOCK), (self.q, self.k, self.v)
        gathers = self._on_hopper(tiles, LARGE_BLOCK, self.layout.block_k, *inputs, out, gathers=True)
        return gathers and not united.reason_not_to(self.layout, self.heads * self.batch, self.head_dim)

    def schedules(self, rows: int, tiles: float, heads: int) -> tuple[tuple[int, TileSchedule], ...]:
        """Of rows of so many tiles each, or of half a tile: two of them are one."""
        near = neighbourhood(self.layout.num_residues)
        per_head, near = math.ceil(rows * tiles), math.ceil(near * tiles)
        return tile_schedules(per_head, near, heads * self.batch, num_processors(self.q.device))

    @cached_property
    def key_bits(self) -> Tensor | None:
        """What of the keys is padding, as the kernels for Hopper and those of dk and dv read it."""
        return None if self.padding is None else padding.key_bits(self.launch, self.padding, self.layout)

    @cached_property
    def lists(self) -> PaddedLists:
        """The lists by query, without what is padding."""
        if self.key_bits is None:
            return padding.unpadded(self.layout, self.lists_per_sample)
        return padding.padded_lists(self.launch, self.key_bits, self.layout)

    def by_query(self, of_keys: Tensor | None) -> list[Tensor]:
        """Lists and masks of a kernel whose programs own queries; `of_keys` is padding as it reads it."""
        lists, layout = self.lists, self.layout
        of_keys = self.unused if of_keys is None else of_keys
        of_lists = [lists.indices, lists.rule_ids, lists.work, layout.rules, layout.documents, lists.branches]
        return [*of_lists, of_keys, *self.masks]

    def by_key(self, documents: Tensor) -> list[Tensor]:
        """The same, with offsets and splits, where they own keys."""
        layout = self.layout
        of_lists = [*layout.by_key.tensors(), layout.key_work, layout.rules, documents, layout.branches]
        return [*of_lists, self.unused if self.key_bits is None else self.key_bits, *self.masks]

    def _query_tiles(self, config: Config, *, alone: bool = False) -> tuple[int, dict[str, int], Config]:
        """Tiles of a head in a kernel whose programs own queries, and what each owns: small blocks take heads together,
        unless they are to be `alone`."""
        tile = min(config.tile_q, self.layout.block_q)
        even = self.group & -self.group
        pack = 1 if self.own_lists or alone else min(even, config.tile_q // tile)
        tiles = self.layout.num_q_blocks * (self.layout.block_q // tile)
        return tiles, {"TILE_Q": tile, "PACK": pack}, for_rows(config, tile * pack)

    def _walked(self, tile: int, block: int, *tensors: Tensor) -> tuple[bool, list[Any]]:
        """Tensors that a program walks in tiles: descriptors for the copy engine where all of them allow it."""
        tma = self.tma and tile <= block and self.layout.num_residues == 1
        tma = tma and all(x.shape[3] == padded_dim(x.shape[3]) and _tma_compatible(x) for x in tensors)
        if not tma:
            return False, list(tensors)
        return True, [_tma_descriptor(x, tile) for x in tensors]


def kernels_of(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, options: CallOptions) -> dict[str, str]:
    """Which kernels a call and its gradient run on, and why. Asks what a launch asks, and launches nothing."""
    _, hopper, _ = _device(q.device, padded_dim(max(q.shape[3], v.shape[3])), q.dtype.itemsize)

    def plain_reason(tiles: Iterable[int], own_block: int, block: int, gathers: bool = False) -> str | None:
        if options.bias is not None and not options.bias.is_alibi:
            return "the others add no bias but a slope for each head"
        return _plain_reason(hopper, tiles, layout, own_block, block, (q, k, v), gathers)

    own, block = layout.blocks
    reasons = {"forward": plain_reason(forward_tiles(own), own, block, gathers=True)}
    reasons["backward, dk and dv"] = plain_reason(HOPPER_BACKWARD, block, own)
    reasons["backward, dq"] = plain_reason(HOPPER_BACKWARD, own, block)
    if options.learned():
        reasons["backward, dq"] = reasons["backward, dq"] or "it sums the gradient of the bias"
    no_runs = ""
    if layout.dilated and hopper:
        no_runs = _no_runs(hopper, q, k, v, layout, options)
        if not no_runs:
            return dict.fromkeys(reasons, "warp-specialised, for Hopper, over runs of rows")
        no_runs = f"; {no_runs}"
    kinds = dict.fromkeys(reasons, "warp-specialised, for Hopper")
    if reasons["forward"] and not plain_reason(forward_tiles(LARGE_BLOCK), LARGE_BLOCK, block, gathers=True):
        reasons["forward"] = united.reason_not_to(layout, q.shape[0] * q.shape[2], q.shape[3])
        kinds["forward"] += ", over united rows of blocks, or plain Triton where these have little in common"
    if options.dropout_p > 0 and q.shape[3] <= SMALL_HEAD:
        reasons["forward"] = reasons["forward"] or "it is faster for dropout with small heads"
    named = {part: (f"plain Triton: {why}" if why else kinds[part]) + no_runs for part, why in reasons.items()}
    fuses = max(q.shape[3], v.shape[3]) <= max(HOPPER_FUSED)
    if fuses and reasons["backward, dk and dv"] is None and not options.learned():
        if options.deterministic:
            named["backward, dk and dv"] += ": dq apart, for the same bits each time (deterministic=True)"
        else:
            del named["backward, dk and dv"], named["backward, dq"]
            fused = "one kernel, which adds up dq in any order (deterministic=False)"
            named["backward"] = f"warp-specialised, for Hopper: {fused}{no_runs}"
    return named


def _no_runs(hopper: bool, q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, options: CallOptions) -> str:
    """Why not the kernels that walk runs of dilated attention."""
    if not layout.dilated or not hopper:
        return "runs are for dilated attention on a GPU of compute capability 9.0, in 16 bits"
    own, block = layout.blocks
    plain = _plain_reason(hopper, forward_tiles(own), layout, own, block, (q, k, v), True)
    return runs.why_not((q, k, v), layout, options, plain is None)


def _plain_reason(
    hopper: bool, tiles: Iterable[int], layout: BlockLayout, own_block: int, block: int, tensors: Sequence[Tensor],
    gathers: bool,
) -> str | None:  # fmt: skip
    """Why a plain kernel runs instead of a warp-specialised one that owns blocks of one size and walks the other, which
    it `gathers` where they are smaller than a tile.

    Args:
        tiles: the widths of boxes that it has tiles for.
    """
    if not hopper:
        return "the others are for 16-bit tensors on a GPU of compute capability 9.0"
    if max(x.shape[3] for x in tensors) > max(tiles):
        return f"the others are for heads of at most {max(tiles)}"
    if any(x.shape[3] % 8 for x in tensors):
        return "the copy engine takes heads whose width is a multiple of 8"
    if num_ranges(layout) > 1:
        return "the others know one range of keys a query, such as documents"
    if len(layout.bitmaps) and (not gathers or block % 64 or layout.rules.shape[1] > 1):
        return "the others read no bitmaps" + ", but those of key blocks of 64 that alone are a rule" * gathers
    if own_block % (64 if gathers else 128):
        return f"the others own blocks of {64 if gathers else 128}"
    if block % 64 and not gathers:
        return "the others walk blocks of 64"
    if block % 64 and layout.dilated:
        return "the others walk blocks of 64 where a key may count several times"
    # The copy engine reaches the tokens of a residue class where all classes are equally long.
    if layout.seq_q % layout.num_residues or layout.seq_k % layout.num_residues:
        return "the dilation rates do not divide the sequence"
    if not all(map(hopper_common.tma_compatible, tensors)):
        return "the copy engine cannot read these strides or addresses"
    return None


def num_ranges(layout: BlockLayout) -> int:
    """Ranges of keys that its rules name."""
    return len(layout.documents) // 2 if layout.documents.numel() else 0


def results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """New out, as wide as v, and lse."""
    batch, seq_q, heads, _ = q.shape
    out = torch.empty(batch, seq_q, heads, v.shape[3], dtype=q.dtype, device=q.device)
    return out, torch.empty(batch, heads, seq_q, dtype=torch.float32, device=q.device)


def _gradients(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, *, fused: bool) -> tuple[Grads, Rows]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    padded_q = layout.num_q_blocks * layout.block_q
    of_rows = torch.empty(2, q.shape[0], q.shape[2], padded_q, dtype=torch.float32, device=q.device)
    lse, delta = of_rows.unbind()
    if not fused:
        return (dq, dk, dv), (of_rows, lse, delta)
    sums = torch.empty(*of_rows.shape[1:], sums_width(q.shape[3]), dtype=torch.float32, device=q.device)
    return (dq, dk, dv), (of_rows, lse, delta, sums)


def precision_of(dtype: torch.dtype) -> str:
    """As PyTorch's own products: full precision unless the user allowed less."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def contiguous_rows(x: Tensor) -> Tensor:
    """The kernels read rows of a head: only the last dimension must lie together."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _tma_descriptor(x: Tensor, tile: int) -> TensorDescriptor:
    batch, seq, heads, head_dim = x.shape
    return TensorDescriptor(
        x, [batch, seq, heads * head_dim], [x.stride(0), x.stride(1), 1], [1, tile, head_dim], padding="zero"
    )


def _tma_compatible(x: Tensor) -> bool:
    """As the plain kernels describe tensors: heads side by side, and steps and addresses of 16 bytes."""
    whole, (of_sample, of_token, of_head, _) = 16 // x.dtype.itemsize, x.stride()
    steps = of_sample > 0 and of_token > 0 and of_sample % whole == 0 and of_token % whole == 0
    return steps and (x.shape[2] == 1 or of_head == x.shape[3]) and x.data_ptr() % 16 == 0


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(stride for x in tensors for stride in x.stride()[:3])


@cached(128, "which kernels a device runs, and its tiles")
def _device(device: torch.device, padded: int, itemsize: int) -> tuple[bool, bool, Configs]:
    """Whether the device has a copy engine, whether it runs the Hopper kernels, and its tiles."""
    capability = _capability(device)
    hopper = capability == (9, 0) and itemsize == 2 and HAVE_GLUON
    if capability == (9, 0) and not HAVE_GLUON and not INTERPRETED:
        warnings.warn("this Triton has no Gluon (3.6 has): Hopper runs the plain, slower kernels", stacklevel=2)
    return capability >= (9, 0), hopper, configs(capability, padded, itemsize)


def has_room(device: torch.device) -> bool:
    """Whether its multiprocessors have more than 99 KiB of shared memory."""
    return _capability(device) in ((8, 0), (9, 0), (10, 0))


def _capability(device: torch.device) -> tuple[int, int]:
    """The interpreter takes the newest kind: it knows all that a kernel may use."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


@cached(128, "numbers of processors of devices")
def num_processors(device: torch.device) -> int:
    """A few in the interpreter."""
    return 4 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count
