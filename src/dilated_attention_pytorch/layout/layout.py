"""`BlockLayout`: the active blocks of a pattern, by query block and by key block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ..patterns import Pattern
from ..patterns.blocks import ceil_div
from . import builders, cost, derived, flattening, key_ranges, packed, slicing, tiles, tree
from .bitmaps import NO_BITMAPS
from .checks import check_layout
from .eager import is_plain, plainly
from .lists import BlockList
from .rules import NO_BRANCHES, NO_DOCUMENTS

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MOST_CALLS = 256

T = TypeVar("T")


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockLayout:
    """Which (query block, key block) pairs are active, and which single pairs of tokens inside the partial ones.

    Build one with `from_pattern`, `from_key_ranges`, `from_block_mask`, `from_mask` or `from_mask_mod`. The constructor
    takes finished lists and refuses any that are not a layout: an index out of range, out of order or twice, tensors on
    different devices, a rule or a bitmap that is not there.

    Args:
        seq_q, seq_k: tokens of queries and keys.
        block_q, block_k: tokens of a query block and a key block: 16, 32, 64, 128 or 256.
        by_query: the lists, a row for every query block; of `[batch_size, num_heads, query blocks]` rows, where
            None stands for lists that all samples, or all heads, share.
        num_heads, batch_size: how many lists there are.
        rules: int32 [num_rules, intervals, 5], see `layout.rules`.
        documents: int32 [2 · ranges, seq_q], see `layout.rules`; empty without ranges of keys, such as documents.
        ranges_ascend: whether neither starts nor stops of these ever move back from one query to the next.
        kind: "full" or "causal" where the layout is that whole pattern for its lengths, else None.
        num_residues: blocks take every `num_residues`-th token: first those of the tokens ≡ 0 modulo it, then ≡ 1, and
            so on.
        branches: int32 [lists, branches, 5], see `layout.branches`; empty but for dilated attention. There `rule_ids`
            is the multiplicity of a block, how often each of its pairs counts; 0, if mixed, where pairs differ.
        has_mixed_blocks: whether there is such a block.
        bitmaps: int16 [bitmaps, block_q, block_k / 16], see `layout.bitmaps`: the partial blocks that no intervals say.
        evaluated: blocks that were looked at pair by pair when it was built.
    """

    seq_q: int
    seq_k: int
    block_q: int
    block_k: int
    by_query: BlockList
    num_heads: int | None = None
    batch_size: int | None = None
    rules: Tensor
    documents: Tensor = NO_DOCUMENTS
    ranges_ascend: bool = False
    kind: str | None = None
    num_residues: int = 1
    branches: Tensor = NO_BRANCHES
    has_mixed_blocks: bool = False
    bitmaps: Tensor = NO_BITMAPS
    evaluated: int = 0
    checked: InitVar[bool] = False
    _derived: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    # What operators and kernels remember of calls over this layout, as long as it is there: never the layout itself,
    # which would not go before the garbage collector comes.
    call_cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self, checked: bool) -> None:
        if not checked:
            check_layout(self)
        # How many blocks are active differs from layout to layout: torch.compile must not build that into a graph.
        # (This is what torch._dynamo.maybe_mark_dynamic does, without the import.)
        if not torch.compiler.is_dynamo_compiling():
            for lists in (self.by_query.indices, self.by_query.rule_ids, self.rules, self.bitmaps):
                lists._dynamo_weak_dynamic_indices = {0}  # type: ignore[attr-defined]

    @classmethod
    def from_pattern(
        cls,
        pattern: Pattern,
        seq_q: int,
        seq_k: int | None = None,
        *,
        block_size: int | tuple[int, int],
        num_heads: int | None = None,
        device: torch.device | str | None = None,
        query_blocks: Tensor | None = None,
    ) -> BlockLayout:
        """The blocks that `pattern` touches.

        Args:
            block_size: tokens a block, or (block_q, block_k); must divide those that the pattern is written in.
            num_heads: for a per-head pattern, checked against it; a plain pattern gives one list for all heads.
            query_blocks: int64 [any], ascending: build these rows of blocks alone, what `take` would give of the whole.
        """
        return builders.from_pattern(cls, pattern, seq_q, seq_k, block_size, num_heads, device, query_blocks)

    @classmethod
    def from_block_mask(
        cls,
        mask: Tensor,
        block_size: int | tuple[int, int],
        *,
        seq_q: int | None = None,
        seq_k: int | None = None,
    ) -> BlockLayout:
        """From a bool mask of blocks: [query blocks, key blocks], with heads, or with samples and heads before them."""
        return builders.from_block_mask(cls, mask, block_size, seq_q, seq_k)

    @classmethod
    def from_key_ranges(
        cls,
        starts: Tensor,
        stops: Tensor,
        seq_k: int | None = None,
        *,
        block_size: int | tuple[int, int],
        capacity: int | None = None,
    ) -> BlockLayout:
        """Every query sees the keys from its start to before its stop, of several ranges those of any.

        The ranges are data of the layout, on whatever device: a graph that gets another layout of the same shape is
        the same graph.

        Args:
            starts, stops: int32 or int64 [seq_q], [batch, seq_q] or [batch, ranges, seq_q] with up to 8 ranges; what is
                below 0 or beyond seq_k is cut, and a range whose stop is not above its start is empty.
            seq_k: as many as seq_q by default.
            capacity: places for active blocks of all samples together. By default they are counted, which on a GPU
                waits for them; with a capacity nothing waits, blocks between those that a row sees may be listed as
                well, and too small a capacity is an error (on a GPU an assertion of the device).
        """
        return key_ranges.from_key_ranges(cls, starts, stops, seq_k, block_size, capacity)

    @classmethod
    def from_documents(
        cls,
        pattern: Pattern | None = None,
        seq: int | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        document_ids: Tensor | None = None,
        block_size: int | tuple[int, int],
    ) -> BlockLayout:
        """Packed documents that are data: `pattern & Documents(lengths)`, with the lengths in a tensor on a GPU.

        There, for token rules, nothing waits: lists have room for what the pattern alone would need (from 2²⁴ blocks on
        they are counted, which waits), and wrong data are an assertion of the device. Else lengths are read first.

        Args:
            pattern: what holds inside of documents, by default nothing; seq: tokens, by default as many as ids.
            cu_seqlens: int32 or int64 [documents + 1]: 0, the end of the first document, of the second, …, seq.
            document_ids: or int32 or int64 [seq]: the document of each token, every number in one run of tokens.
        """
        return packed.from_documents(cls, pattern, seq, cu_seqlens, document_ids, block_size)

    @classmethod
    def from_mask(cls, mask: Tensor, block_size: int | tuple[int, int]) -> BlockLayout:
        """From a bool mask of tokens, True where a query sees a key: [seq_q, seq_k], with heads, or with samples and
        heads before them. Blocks are told apart as full, empty and partial; partial ones keep bitmaps."""
        return tiles.from_mask(cls, mask, block_size)

    @classmethod
    def from_mask_mod(
        cls,
        mask_mod: tiles.MaskMod,
        batch: int | None,
        heads: int | None,
        seq_q: int,
        seq_k: int | None = None,
        *,
        block_size: int | tuple[int, int],
        device: torch.device | str | None = None,
    ) -> BlockLayout:
        """From a `mask_mod(b, h, q_idx, kv_idx)` as FlexAttention takes it, which is asked for every pair: block by
        block, in memory for a few blocks. `repr` says how many were evaluated and what the bitmaps take.

        Args:
            mask_mod: of four numbers, as 0-dimensional tensors; queries and keys are both counted from 0.
            batch, heads: for how many it is asked; None where it does not depend on them.
            device: where it is evaluated and the layout will be.
        """
        return tiles.from_mask_mod(cls, mask_mod, batch, heads, seq_q, seq_k, block_size, device)

    @classmethod
    def from_tree(cls, parents: Tensor, seq_k: int, *, block_size: int | tuple[int, int]) -> BlockLayout:
        """For drafts that branch, the last of seq_k keys: each sees what is before all drafts, its ancestors, itself.

        Args:
            parents: int32 or int64 [nodes] or [batch, nodes]: each draft's parent, which stands before it, or −1.
        """
        return tree.from_tree(cls, parents, seq_k, block_size)

    @classmethod
    def from_flex_block_mask(cls, mask: BlockMask) -> BlockLayout:
        """The layout of a FlexAttention block mask, of any: the same pairs.

        Full blocks are taken as they are. In partial ones `mask_mod` is asked: one causal rule or sliding window
        becomes a rule, anything else bitmaps; one made by `to_flex_block_mask` is the layout that it was made of.
        """
        from .flex import from_flex

        return from_flex(mask)

    def to_flex_block_mask(self, num_heads: int | None = None) -> BlockMask:
        """The same for FlexAttention, whose masks take memory for all pairs of blocks.

        Args:
            num_heads: query heads, where the layout has lists for fewer (those of the keys).
        """
        from .flex import to_flex

        return to_flex(self, num_heads)

    @property
    def num_q_blocks(self) -> int:
        return self.num_residues * ceil_div(ceil_div(self.seq_q, self.num_residues), self.block_q)

    @property
    def num_k_blocks(self) -> int:
        return self.num_residues * ceil_div(ceil_div(self.seq_k, self.num_residues), self.block_k)

    @property
    def num_lists(self) -> int:
        """How many times the query blocks are listed: once, once a head, or once a sample and head."""
        return (self.num_heads or 1) * (self.batch_size or 1)

    @property
    def device(self) -> torch.device:
        return self.by_query.indices.device

    @property
    def by_key(self) -> BlockList:
        """The same blocks by key block: row `list · num_k_blocks + key block` has query blocks. Built on first use."""
        return self._derive("by_key", lambda: derived.by_key(self))

    @property
    def query_work(self) -> Tensor:
        """`BlockList.work` of the lists by query. Built on first use."""
        return self._derive("query_work", lambda: self.by_query.work(self.num_lists, self.num_residues))

    @property
    def key_work(self) -> Tensor:
        """The same of the lists by key, which may come with it."""
        lists = self.by_key
        return self._derive("key_work", lambda: lists.work(self.num_lists, self.num_residues))

    @property
    def seen_by(self) -> Tensor:
        """int32 [2, seq_k], of one range that ascends, else empty: how many starts, and stops, are up to each key."""
        return self._derive("seen_by", lambda: derived.seen_by(self))

    def order(self, *, by_key: bool) -> None:
        """Build `query_work`, and with `by_key` also `by_key`, `key_work` and `seen_by`, unless they exist."""
        if "query_work" not in self._derived:
            _ = self.query_work
        if by_key and "seen_by" not in self._derived:
            _ = self.key_work, self.seen_by

    def remember_call(self, key: object, value: object) -> None:
        if len(self.call_cache) >= MOST_CALLS and key not in self.call_cache:
            self.call_cache.clear()
        self.call_cache[key] = value

    def tensors(self) -> list[Tensor]:
        """All tensors that it holds, including derived ones."""
        found = self.flatten()[0]
        for made in list(self._derived.values()):  # another thread may add to it
            found += [made] if isinstance(made, Tensor) else made.tensors()
        return found

    def _derive(self, name: str, make: Callable[[], T]) -> T:
        """What `make` builds from the lists, once; in a graph, as part of it."""
        if name not in self._derived:
            if torch.compiler.is_dynamo_compiling() or not is_plain(self.by_query.indices):
                return make()
            made = plainly(make)
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return made  # a capture computes nothing yet
            # Like the lists themselves: their length must not become part of a graph.
            for tensor in made.tensors() if isinstance(made, BlockList) else ():
                tensor._dynamo_weak_dynamic_indices = {0}  # type: ignore[attr-defined]
            return self._derived.setdefault(name, made)  # another thread may have been first
        return self._derived[name]

    @property
    def causal(self) -> BlockLayout:
        """This layout without the pairs whose key comes after the query. Built once; in a graph, as part of it."""
        if self.kind == "causal":
            return self
        if self.dilated:
            raise ValueError("a layout of branches is made causal when it is built: layout_of_branches(is_causal=True)")
        return self._derive("causal", lambda: derived.causal(self))

    def take(self, query_blocks: Tensor, key_blocks: Tensor | None = None) -> BlockLayout:
        """These rows and columns of blocks (int64, ascending; all columns by default) as a layout of their own.

        Blocks are renumbered from 0, and the token rules are adapted, so that the same pairs are allowed.
        """
        return slicing.take(self, query_blocks, key_blocks)

    @property
    def lengths(self) -> tuple[int, int]:
        return self.seq_q, self.seq_k

    @property
    def blocks(self) -> tuple[int, int]:
        return self.block_q, self.block_k

    @property
    def dilated(self) -> bool:
        """Whether this is a layout of dilated attention, in which a key may count several times."""
        return self.branches.numel() > 0

    def queries_of(self, block: Tensor) -> Tensor:
        """Query numbers [..., block_q] of query blocks; those of `seq_q` and beyond stand for padding."""
        return self._tokens_of(block, self.num_q_blocks, self.block_q)

    def keys_of(self, block: Tensor) -> Tensor:
        """The same of key blocks."""
        return self._tokens_of(block, self.num_k_blocks, self.block_k)

    def _tokens_of(self, block: Tensor, num_blocks: int, size: int) -> Tensor:
        lane = torch.arange(size, dtype=block.dtype, device=block.device)
        if self.num_residues == 1:
            return block[..., None] * size + lane
        per_residue = num_blocks // self.num_residues
        return (block % per_residue * size)[..., None].add(lane) * self.num_residues + (block // per_residue)[..., None]

    def token_mask(self, query_block: Tensor, key_block: Tensor, rule_id: Tensor) -> Tensor:
        """bool [entries, block_q, block_k]: the pairs of tokens that a rule allows in each of the given blocks."""
        return derived.token_mask(self, query_block, key_block, rule_id)

    def pair_multiplicity(self, which: Tensor, query_block: Tensor, key_block: Tensor) -> Tensor:
        """int32 [entries, block_q, block_k]: how many branches of list `which` hold a pair, whatever the rules say."""
        return derived.pair_multiplicity(self, which, query_block, key_block)

    def entries(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """List number, query block, key block and rule of every active block; rule −1 is a full block."""
        used = int(self.by_query.offsets[-1])
        row = self.by_query.row_of_entry()[:used]
        rule = self.by_query.rule_ids[:used] if self.by_query.rule_ids.numel() else torch.zeros_like(row)
        rule = torch.where(self.by_query.is_partial(self.by_query.row_of_entry())[:used], rule, -1)
        return row // self.num_q_blocks, row % self.num_q_blocks, self.by_query.indices[:used], rule

    def to_block_mask(self) -> Tensor:
        """bool mask of active blocks, of the shape that `from_block_mask` takes."""
        which, query_block, key_block, _ = self.entries()
        mask = torch.zeros(self.num_lists, self.num_q_blocks, self.num_k_blocks, dtype=torch.bool, device=self.device)
        mask[which, query_block, key_block] = True
        return mask.reshape(*self._list_shape, self.num_q_blocks, self.num_k_blocks)

    def cells(self, chosen: Tensor | slice = slice(None)) -> Tensor:
        """[entries, block_q, block_k] of the chosen blocks of `entries`: bool, whether a pair is allowed.

        For dilated attention how often it counts, int32.
        """
        return derived.cells(self, chosen)

    def to_dense(self) -> Tensor:
        """bool mask of allowed pairs of tokens, [seq_q, seq_k] behind the dimensions of `to_block_mask`.

        For dilated attention how often each pair counts, int32.
        """
        return derived.dense(self).reshape(*self._list_shape, *self.lengths)

    @property
    def _list_shape(self) -> tuple[int, ...]:
        heads = () if self.num_heads is None else (self.num_heads,)
        return heads if self.batch_size is None else (self.batch_size, *heads)

    @cached_property
    def num_active_blocks(self) -> int:
        """Active blocks of all lists together."""
        return int(self.by_query.offsets[-1])

    @cached_property
    def density(self) -> float:
        """Allowed pairs of tokens ÷ all pairs, averaged over the lists."""
        return cost.num_pairs(self) / (self.num_lists * self.seq_q * self.seq_k)

    @property
    def block_density(self) -> float:
        """Active blocks ÷ all blocks."""
        return self.num_active_blocks / (self.num_lists * self.num_q_blocks * self.num_k_blocks)

    def cost(self, *, heads: int, heads_kv: int | None = None, **sizes: int):  # type: ignore[no-untyped-def]
        """FLOPs and bytes of attention over this layout: an `AttentionCost`, and `AttentionCost.of` says of what sizes:
        batch, heads, head_dim and itemsize; heads_kv and head_dim_v where they are others."""
        return cost.AttentionCost.of(self, heads=heads, heads_kv=heads_kv or heads, **sizes)

    def flatten(self, *, work_order: bool = False, by_key: bool = False) -> tuple[list[Tensor], list[int]]:
        """Tensors and sizes, the arguments that operators accept; `unflatten` is the inverse.

        The first size is the number of tensors, so that several layouts can be concatenated.

        Args:
            work_order: with the order of work, `query_work`;
            by_key: and with `by_key`, `key_work` and `seen_by` too.
        """
        return flattening.flatten(self, work_order, by_key)

    @classmethod
    def unflatten(cls, tensors: Sequence[Tensor], sizes: Sequence[int], kind: str | None = None) -> BlockLayout:
        return flattening.unflatten(cls, tensors, sizes, kind)

    @classmethod
    def unflatten_all(cls, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[BlockLayout]:
        """Layouts whose tensors and sizes were concatenated."""
        return flattening.unflatten_all(cls, tensors, sizes)

    def to(self, device: torch.device | str) -> BlockLayout:
        if (device := torch.device(device)) == self.device:
            return self
        by_query = BlockList(*(t.to(device) for t in self.by_query.tensors()))
        moved = {name: getattr(self, name).to(device) for name in ("rules", "documents", "branches", "bitmaps")}
        made = replace(self, by_query=by_query, **moved, checked=True)
        made._derived.update((name, each) for name, each in self._derived.items() if name == "whole")
        return made

    def __getstate__(self) -> dict[str, object]:
        """Without what can be built again."""
        return {**self.__dict__, "_derived": {}, "call_cache": {}}

    def __setstate__(self, state: dict[str, object]) -> None:
        older = {"classes": "num_residues", "uneven": "has_mixed_blocks"}  # names in files of older versions
        given = {older.get(name, name): value for name, value in state.items() if name not in ("_made", "notes")}
        new = {"bitmaps": NO_BITMAPS.to(given["branches"].device), "evaluated": 0, "ranges_ascend": False}  # type: ignore[attr-defined]
        self.__dict__.update({"call_cache": {}, **new, **given, "_derived": {}})

    def __repr__(self) -> str:
        known = is_plain(self.by_query.offsets) and not self.by_query.offsets.is_meta
        kept = f"{self.block_density:.1%} of the blocks, " if known else ""
        lists = f", lists={list(self._list_shape)}" if self._list_shape else ""
        kind = f", kind={self.kind!r}" if self.kind else ""
        dilated = f", branches={self.branches.shape[1]}, num_residues={self.num_residues}" if self.dilated else ""
        return (
            f"BlockLayout(seq_q={self.seq_q}, seq_k={self.seq_k}, block={self.block_q}x{self.block_k}{lists}{kind}"
            f"{dilated}{tiles.cost_text(self)}, {kept}device={str(self.device)!r})"
        )
