"""`BlockLayout`: the active blocks of a pattern, by query block and by key block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ..patterns import Pattern, PerHead
from ..patterns.base import check_int
from ..patterns.blocks import ceil_div
from ..patterns.tokens import EVERYTHING, UNBOUNDED, Interval
from . import build, cost
from .checks import block_pair, check_layout, check_sizes
from .eager import is_plain, plainly
from .lists import HOST, BlockList, send
from .rules import NOTHING, document_bounds, key_bounds, moved, num_tokens

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Entries that one sort of `by_key` takes on a CPU.
_SORTED_AT_ONCE = 1 << 20

NUM_SIZES = 9  # of `flatten`
MOST_NOTES = 256

T = TypeVar("T")

NO_DOCUMENTS = torch.empty(2, 0, dtype=torch.int32)
NO_BRANCHES = torch.empty(0, 0, 5, dtype=torch.int32)


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockLayout:
    """Which (query block, key block) pairs are active, and which single pairs of tokens inside the partial ones.

    Build one with `from_pattern` or `from_block_mask`. The constructor takes finished lists and refuses any that are
    not a layout: an index out of range, out of order or twice, tensors on different devices, a rule that is not there.

    Args:
        seq_q, seq_k: tokens of queries and keys.
        block_q, block_k: tokens of a query block and a key block: 16, 32, 64, 128 or 256.
        by_query: the lists, a row for every query block; of `[batch_size, num_heads, query blocks]` rows, where
            None stands for lists that all samples, or all heads, share.
        num_heads, batch_size: how many lists there are.
        rules: int32 [num_rules, intervals, 5], see `layout.rules`.
        documents: int32 [2, seq_q], see `layout.rules`; empty without packed documents.
        kind: "full" or "causal" where the layout is that whole pattern, else None.
        classes: blocks take every `classes`-th token: first those of the tokens ≡ 0 modulo it, then ≡ 1, and so on.
        branches: int32 [lists, branches, 5], see `layout.branches`; empty but for dilated attention. There `rule_ids`
            says how often every pair of a block counts, 0 where that differs from pair to pair.
        uneven: whether there is such a block.
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
    kind: str | None = None
    classes: int = 1
    branches: Tensor = NO_BRANCHES
    uneven: bool = False
    checked: InitVar[bool] = False
    _made: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    # What operators and kernels remember of calls over this layout, as long as it is there: never the layout itself,
    # which would not go before the garbage collector comes.
    notes: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self, checked: bool) -> None:
        if not checked:
            check_layout(self)
        # How many blocks are active differs from layout to layout: torch.compile must not build that into a graph.
        # (This is what torch._dynamo.maybe_mark_dynamic does, without the import.)
        if not torch.compiler.is_dynamo_compiling():
            for lists in (self.by_query.indices, self.by_query.rule_ids, self.rules):
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
        if not isinstance(pattern, Pattern):
            raise TypeError(f"pattern must be a Pattern, got {type(pattern).__name__}")
        seq_k = seq_q if seq_k is None else seq_k
        lengths, blocks = check_sizes(seq_q, seq_k, block_size)
        for size in pattern.block_sizes:
            if size % blocks[0] or size % blocks[1]:
                raise ValueError(
                    f"block_size must divide the block size {size} that the pattern is written in, got {block_size}"
                )
        packings = build.documents_of(pattern)
        if len(packings) > 1:
            raise ValueError(f"a pattern may speak of one packing of documents, got {len(packings)}: {packings}")
        heads = pattern.patterns if isinstance(pattern, PerHead) else (pattern,)
        if num_heads is not None:
            check_int("num_heads", num_heads, least=1)
        if num_heads is not None and len(heads) not in (1, num_heads):
            raise ValueError(f"num_heads must be the pattern's {len(heads)} heads, got {num_heads}")
        device = torch.device("cpu" if device is None else device)
        documents = torch.empty_like(NO_DOCUMENTS, device=device)
        starts: tuple[int, ...] = ()
        if packings:
            starts = next(iter(packings)).starts
            if starts[-1] != seq_k:
                raise ValueError(f"the lengths of Documents must add up to seq_k = {seq_k}, got {starts[-1]}")
            position = torch.arange(seq_k - seq_q, seq_k, dtype=torch.int32, device=device)
            if query_blocks is not None:
                position = _tokens(query_blocks, blocks[0], seq_q).int() + (seq_k - seq_q)
            documents = document_bounds(starts, position)

        table: list[list[Interval]] = []
        lists: dict[Pattern, BlockList] = {}
        single = len(set(heads)) == 1
        for head in dict.fromkeys(heads):
            terms = build.terms_of(head)
            intervals = list(dict.fromkeys(term.interval for term in terms))
            if len(intervals) > build.MAX_INTERVALS:
                raise ValueError(
                    f"a pattern may be a union of at most {build.MAX_INTERVALS} different token rules, got "
                    f"{len(intervals)}: {head}"
                )
            # One rule for all needs no naming.
            named = None if single and len(intervals) == 1 else len(table)
            lists[head] = BlockList.concat(
                build.find_blocks(
                    terms, intervals, lengths, blocks, device, named=named, starts=starts, query_blocks=query_blocks
                )
            )
            table += build.rule_table(intervals)
        by_query = lists[heads[0]] if len(heads) == 1 else BlockList.concat(lists[head] for head in heads)
        width = max(len(rule) for rule in table)
        table = [rule + [NOTHING] * (width - len(rule)) for rule in table]
        layout = cls(
            seq_q=seq_q if query_blocks is None else num_tokens(query_blocks, blocks[0], seq_q),
            seq_k=seq_k,
            block_q=blocks[0],
            block_k=blocks[1],
            by_query=by_query,
            num_heads=len(heads) if len(heads) > 1 else None,
            rules=send((torch.tensor(table, dtype=torch.int32, device=HOST),), device)[0],
            documents=documents,
            branches=torch.empty_like(NO_BRANCHES, device=device),
            kind=build.kind_of(pattern) if query_blocks is None else None,
            checked=True,
        )
        return layout if query_blocks is None else layout._moved(query_blocks, seq_q, None, seq_k)

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
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            raise TypeError(f"mask must be a bool tensor, got {getattr(mask, 'dtype', type(mask).__name__)}")
        if mask.ndim not in (2, 3, 4):
            raise ValueError(
                f"mask must have shape [nq, nk], [heads, nq, nk] or [batch, heads, nq, nk], got {list(mask.shape)}"
            )
        if 0 in mask.shape:
            raise ValueError(f"mask must not be empty, got shape {list(mask.shape)}")
        num_q, num_k = mask.shape[-2:]
        block_q, block_k = block_pair(block_size)
        seq_q = num_q * block_q if seq_q is None else seq_q
        seq_k = num_k * block_k if seq_k is None else seq_k
        check_sizes(seq_q, seq_k, block_size)
        for name, seq, block, num in (("seq_q", seq_q, block_q, num_q), ("seq_k", seq_k, block_k, num_k)):
            if ceil_div(seq, block) != num:
                raise ValueError(f"{name} must need {num} blocks of {block} tokens, as the mask has, got {seq}")
        row, column = mask.reshape(-1, num_k).nonzero().unbind(1)
        partial = (column + 1) * block_k > seq_k
        num_rows = mask.numel() // num_k
        return cls(
            seq_q=seq_q,
            seq_k=seq_k,
            block_q=block_q,
            block_k=block_k,
            by_query=BlockList.pack(row, column, partial, None, num_rows),
            num_heads=mask.shape[-3] if mask.ndim > 2 else None,
            batch_size=mask.shape[0] if mask.ndim > 3 else None,
            rules=torch.tensor([[EVERYTHING]], dtype=torch.int32, device=mask.device),
            documents=NO_DOCUMENTS.to(mask.device),
            branches=NO_BRANCHES.to(mask.device),
            kind="full" if len(row) == mask.numel() else None,
            checked=True,
        )

    @classmethod
    def from_flex_block_mask(cls, mask: BlockMask) -> BlockLayout:
        """The layout of a FlexAttention block mask: exactly, or an error.

        Full blocks are taken as they are. Partial ones must be those of one causal rule or sliding window, which is
        found by asking `mask_mod`; or the mask was made by `to_flex_block_mask`.
        """
        from .flex import from_flex

        return from_flex(mask)

    def to_flex_block_mask(self, num_heads: int | None = None) -> BlockMask:
        """The same for FlexAttention, whose masks take room for all pairs of blocks.

        Args:
            num_heads: query heads, where the layout has lists for fewer (those of the keys).
        """
        from .flex import to_flex

        return to_flex(self, num_heads)

    @property
    def num_q_blocks(self) -> int:
        return self.classes * ceil_div(ceil_div(self.seq_q, self.classes), self.block_q)

    @property
    def num_k_blocks(self) -> int:
        return self.classes * ceil_div(ceil_div(self.seq_k, self.classes), self.block_k)

    @property
    def num_lists(self) -> int:
        """How many times the query blocks are listed: once, once a head, or once a sample and head."""
        return (self.num_heads or 1) * (self.batch_size or 1)

    @property
    def device(self) -> torch.device:
        return self.by_query.indices.device

    @property
    def by_key(self) -> BlockList:
        """The same blocks by key block: row `list · num_k_blocks + key block` names query blocks. Made when asked."""
        return self._remembered("by_key", self._make_by_key)

    @property
    def query_work(self) -> Tensor:
        """`BlockList.work` of the lists by query. Made when asked."""
        return self._remembered("query_work", lambda: self.by_query.work(self.num_lists, self.classes))

    @property
    def key_work(self) -> Tensor:
        """The same of the lists by key."""
        return self._remembered("key_work", lambda: self.by_key.work(self.num_lists, self.classes))

    def order(self, *, by_key: bool) -> None:
        """Make `query_work`, and `by_key` and `key_work`, unless they are there."""
        if "query_work" not in self._made:
            _ = self.query_work
        if by_key and "key_work" not in self._made:
            _ = self.key_work

    def note(self, key: object, value: object) -> None:
        if len(self.notes) >= MOST_NOTES and key not in self.notes:
            self.notes.clear()
        self.notes[key] = value

    def tensors(self) -> list[Tensor]:
        """All that it holds, also what was made of it later."""
        found = self.flatten()[0]
        for made in list(self._made.values()):  # another thread may add to it
            found += made.tensors() if isinstance(made, BlockList | BlockLayout) else [made]
        return found

    def _remembered(self, name: str, make: Callable[[], T]) -> T:
        """What is made of the lists once; in a graph, part of it."""
        if name not in self._made:
            if torch.compiler.is_dynamo_compiling() or not is_plain(self.by_query.indices):
                return make()
            made = plainly(make)
            if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return made  # a capture computes nothing yet
            # Like the lists themselves: their length must not become part of a graph.
            for tensor in made.tensors() if isinstance(made, BlockList) else ():
                tensor._dynamo_weak_dynamic_indices = {0}  # type: ignore[attr-defined]
            return self._made.setdefault(name, made)  # another thread may have been first
        return self._made[name]

    def _make_by_key(self) -> BlockList:
        query_block = self.by_query.row_of_entry()
        partial = self.by_query.is_partial(query_block)
        num_rows = self.num_lists * self.num_k_blocks
        row = torch.div(query_block, self.num_q_blocks, rounding_mode="floor")
        row.mul_(self.num_k_blocks).add_(self.by_query.indices)
        row.masked_fill_(query_block == self.by_query.num_rows, num_rows)
        query_block.remainder_(self.num_q_blocks)
        rule = self.by_query.rule_ids if self.by_query.rule_ids.numel() else None
        # Sorting needs several times the memory of what is sorted: on a CPU sort a range of rows at a time. (Elsewhere
        # that would wait for the device.)
        parts = min(-(-len(row) // _SORTED_AT_ONCE), num_rows) if self.device.type == "cpu" else 1
        if parts <= 1:
            return BlockList.pack(row, query_block, partial, rule, num_rows)
        edges = [num_rows * part // parts for part in range(parts + 1)]
        pieces = []
        for start, stop in pairwise(edges):
            here = ((row >= start) & (row < stop)).nonzero()[:, 0]
            chosen = None if rule is None else rule[here]
            pieces.append(BlockList.pack(row[here] - start, query_block[here], partial[here], chosen, stop - start))
        return BlockList.concat(pieces)

    @property
    def causal(self) -> BlockLayout:
        """This layout without the pairs in which the key comes after the query. Made once; in a graph, part of it."""
        if self.kind == "causal":
            return self
        if self.dilated:
            raise ValueError("a layout of branches is made causal when it is built: layout_of_branches(is_causal=True)")
        return self._remembered("causal", self._make_causal)

    def _make_causal(self) -> BlockLayout:
        """What is dropped leaves spare capacity, in a graph, where shapes are known beforehand, and on a device, which
        would have to be waited for."""
        row = self.by_query.row_of_entry()
        partial = self.by_query.is_partial(row)
        column, num_rows, num_rules = self.by_query.indices, self.by_query.num_rows, len(self.rules)
        head = torch.arange(self.seq_k - self.seq_q, self.seq_k, self.block_q, device=self.device)
        span = build.Span.of(Interval(right=0), head, self.seq_k, self.blocks)
        query_block = row % self.num_q_blocks
        kept = (row < num_rows) & (column >= span.first[query_block]) & (column < span.stop[query_block])
        crossing = (column < span.first_full[query_block]) | (column >= span.stop_full[query_block])
        # A full block that the diagonal crosses takes a new rule, the last of the table: everything, so far.
        rule = self.by_query.rule_ids if self.by_query.rule_ids.numel() else torch.zeros_like(column)
        rule = torch.where(partial, rule, num_rules)
        row = torch.where(kept, row, num_rows)
        order = (row.long() * self.num_k_blocks + column).argsort(stable=True)
        everything = torch.full_like(self.rules[:1], UNBOUNDED)
        everything[:, 1:, 3].fill_(NOTHING.query_stop)
        everything[..., 4].fill_(0)
        rules = torch.cat((self.rules, everything))
        causal_right = rules[..., 1:2].clamp(max=0)
        by_query = BlockList.pack(row[order], column[order], (partial | crossing)[order], rule[order], num_rows)
        trim = self.device.type == "cpu" and not torch.compiler.is_dynamo_compiling()
        return BlockLayout(
            seq_q=self.seq_q,
            seq_k=self.seq_k,
            block_q=self.block_q,
            block_k=self.block_k,
            by_query=by_query.trimmed() if trim else by_query,
            num_heads=self.num_heads,
            batch_size=self.batch_size,
            rules=torch.cat((rules[..., :1], causal_right, rules[..., 2:]), dim=-1),
            documents=self.documents,
            branches=self.branches,
            kind="causal" if self.kind == "full" else None,
            checked=True,
        )

    def take(self, query_blocks: Tensor, key_blocks: Tensor | None = None) -> BlockLayout:
        """These rows and columns of blocks (int64, ascending; all columns by default) as a layout of their own.

        Blocks are counted as they come, and the token rules are moved with them, so that the same pairs are allowed.
        """
        which, row, column, rule = self.entries()
        kept, row = _places(query_blocks, row)
        documents, seq_k = self.documents, self.seq_k
        if documents.numel():
            documents = documents[:, _tokens(query_blocks, self.block_q, self.seq_q)].contiguous()
        if key_blocks is not None:
            found, column = _places(key_blocks, column)
            kept &= found
            seq_k = num_tokens(key_blocks, self.block_k, self.seq_k)
            inside, place = _places(key_blocks, documents // self.block_k)
            within = torch.where(inside, documents % self.block_k, 0)
            documents = (place * self.block_k + within).clamp(max=seq_k).int()
        row, column, rule = (which * len(query_blocks) + row)[kept], column[kept], rule[kept]
        taken = replace(
            self,
            seq_q=num_tokens(query_blocks, self.block_q, self.seq_q),
            seq_k=seq_k,
            by_query=BlockList.pack(row, column, rule >= 0, rule, self.num_lists * len(query_blocks)),
            documents=documents,
            kind=None,
            checked=True,
        )
        return taken._moved(query_blocks, self.seq_q, key_blocks, self.seq_k)

    def _moved(self, query_blocks: Tensor, seq_q: int, key_blocks: Tensor | None, seq_k: int) -> BlockLayout:
        """With rules that speak of the blocks as they are counted now, not of the whole of these lengths."""
        ahead = (self.seq_q - seq_q) - (self.seq_k - seq_k)
        query_by = (query_blocks - torch.arange(self.num_q_blocks, device=self.device)) * self.block_q + ahead
        counted = torch.arange(self.num_k_blocks, device=self.device)
        key_by = ((counted if key_blocks is None else key_blocks) - counted) * self.block_k
        which, row, column, rule = self.entries()
        partial = rule >= 0
        if not partial.any():
            return replace(self, rules=self.rules[:1], by_query=self.by_query.unnamed(), checked=True)
        # A rule for every different (old rule, step of the query block, step of the key block).
        query_steps, query_step = torch.unique(query_by, return_inverse=True)
        key_steps, key_step = torch.unique(key_by, return_inverse=True)
        used = (rule.long() * len(query_steps) + query_step[row]) * len(key_steps) + key_step[column]
        used, named = torch.unique(used.masked_fill(~partial, int(used[partial][0])), return_inverse=True)
        of_key, used = used % len(key_steps), used // len(key_steps)
        of_query, old = used % len(query_steps), used // len(query_steps)
        rules = moved(self.rules[old], query_steps[of_query][:, None], key_steps[of_key][:, None]).int()
        row = which * self.num_q_blocks + row
        names = named if len(rules) > 1 else None
        by_query = BlockList.pack(row, column, partial, names, self.by_query.num_rows)
        return replace(self, rules=rules, by_query=by_query, checked=True)

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
        if self.classes == 1:
            return block[..., None] * size + lane
        per_class = num_blocks // self.classes
        return (block % per_class * size)[..., None].add(lane) * self.classes + (block // per_class)[..., None]

    def token_mask(self, query_block: Tensor, key_block: Tensor, rule_id: Tensor) -> Tensor:
        """bool [entries, block_q, block_k]: the pairs of tokens that a rule allows in each of the given blocks."""
        query, key = self.queries_of(query_block), self.keys_of(key_block)
        allowed = torch.zeros((), dtype=torch.bool, device=self.device)
        for interval in self.rules[rule_id].unbind(1):
            first, last = key_bounds(interval[:, None], query, self.seq_q, self.seq_k, self.documents)
            allowed = allowed | ((key[:, None] >= first[:, :, None]) & (key[:, None] <= last[:, :, None]))
        return allowed

    def times_held(self, which: Tensor, query_block: Tensor, key_block: Tensor) -> Tensor:
        """int32 [entries, block_q, block_k]: how many branches of list `which` hold a pair, whatever the rules say."""
        position, key = self.queries_of(query_block) + (self.seq_k - self.seq_q), self.keys_of(key_block)
        held = torch.zeros((), dtype=torch.int32, device=self.device)
        for segment, dilation, offset, query_by, key_by in (b.T[..., None] for b in self.branches[which].unbind(1)):
            query_at, key_at = position + query_by, key + key_by
            kept_query = (query_at >= 0) & (query_at % segment % dilation == offset)
            of_query = torch.where(kept_query, query_at // segment, -1)
            of_key = torch.where(key_at % segment % dilation == offset, key_at // segment, -2)
            held = held + (of_query[:, :, None] == of_key[:, None])
        return held

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
        which, query_block, key_block, rule = (x[chosen] for x in self.entries())
        full = (rule < 0)[:, None, None]
        if not self.dilated:
            return self.token_mask(query_block, key_block, rule.clamp(min=0)) | full
        times = self.by_query.rule_ids[: self.num_active_blocks][chosen][:, None, None]
        times = torch.where(times > 0, times, self.times_held(which, query_block, key_block))
        return torch.where(full | self.token_mask(query_block, key_block, torch.zeros_like(rule)), times, 0)

    def to_dense(self) -> Tensor:
        """bool mask of allowed pairs of tokens, [seq_q, seq_k] behind the dimensions of `to_block_mask`.

        For dilated attention how often each pair counts, int32.
        """
        which, query_block, key_block, _ = self.entries()
        cells = self.cells()
        query, key = self.queries_of(query_block), self.keys_of(key_block)
        size = self.classes * max(self.num_q_blocks * self.block_q, self.num_k_blocks * self.block_k)
        dense = torch.zeros(self.num_lists, size, size, dtype=cells.dtype, device=self.device)
        dense[which[:, None, None], query[:, :, None], key[:, None]] = cells
        return dense[:, : self.seq_q, : self.seq_k].reshape(*self._list_shape, self.seq_q, self.seq_k)

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

    def cost(self, *, batch: int, heads: int, head_dim: int, itemsize: int, heads_kv: int | None = None):  # type: ignore[no-untyped-def]
        """FLOPs and bytes of attention over this layout: an `AttentionCost`."""
        return cost.AttentionCost.of(
            self, batch=batch, heads=heads, heads_kv=heads_kv or heads, head_dim=head_dim, itemsize=itemsize
        )

    def flatten(self, *, ordered: bool = False, by_key: bool = False) -> tuple[list[Tensor], list[int]]:
        """Tensors and sizes, for operators that take nothing else; `unflatten` is the inverse.

        The first size is the number of tensors, so that several layouts can stand one behind the other.

        Args:
            ordered: with the order of work, `query_work`;
            by_key: and with `by_key` and `key_work` too.
        """
        sizes = [*self.lengths, *self.blocks, self.num_heads or 0, self.batch_size or 0]
        sizes += [self.classes, int(self.uneven)]
        tensors = [*self.by_query.tensors(), self.rules, self.documents, self.branches]
        if ordered or by_key:
            tensors.append(self.query_work)
        if by_key:
            lists = self.by_key  # once: in a graph it is made each time
            work = self._remembered("key_work", lambda: lists.work(self.num_lists, self.classes))
            tensors += [*lists.tensors(), work]
        return tensors, [len(tensors), *sizes]

    @classmethod
    def unflatten(cls, tensors: Sequence[Tensor], sizes: Sequence[int], kind: str | None = None) -> BlockLayout:
        _, seq_q, seq_k, block_q, block_k, num_heads, batch_size, classes, uneven = sizes
        lists, (rules, documents, branches), more = tensors[:4], tensors[4:7], tensors[7:]
        layout = cls(
            seq_q=seq_q,
            seq_k=seq_k,
            block_q=block_q,
            block_k=block_k,
            by_query=BlockList(*lists),
            num_heads=num_heads or None,
            batch_size=batch_size or None,
            rules=rules,
            documents=documents,
            kind=kind,
            classes=classes,
            branches=branches,
            uneven=bool(uneven),
            checked=True,
        )
        if more:
            layout._made["query_work"] = more[0]
        if more[1:]:
            layout._made.update(by_key=BlockList(*more[1:5]), key_work=more[5])
        return layout

    @classmethod
    def unflatten_all(cls, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[BlockLayout]:
        """Layouts whose tensors and sizes stand one behind the other."""
        layouts = []
        while sizes:
            layouts.append(cls.unflatten(tensors[: sizes[0]], sizes[:NUM_SIZES]))
            tensors, sizes = tensors[sizes[0] :], sizes[NUM_SIZES:]
        return layouts

    def to(self, device: torch.device | str) -> BlockLayout:
        device = torch.device(device)
        if device == self.device:
            return self
        by_query = BlockList(*(t.to(device) for t in self.by_query.tensors()))
        moved = {name: getattr(self, name).to(device) for name in ("rules", "documents", "branches")}
        return replace(self, by_query=by_query, **moved, checked=True)

    def __getstate__(self) -> dict[str, object]:
        """What can be made again is not stored."""
        return {**self.__dict__, "_made": {}, "notes": {}}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update({"notes": {}, **state})  # a file of an older version knows nothing of notes

    def __repr__(self) -> str:
        lists = f", lists={list(self._list_shape)}" if self._list_shape else ""
        kind = f", kind={self.kind!r}" if self.kind else ""
        dilated = f", branches={self.branches.shape[1]}, classes={self.classes}" if self.dilated else ""
        return (
            f"BlockLayout(seq_q={self.seq_q}, seq_k={self.seq_k}, block={self.block_q}x{self.block_k}{lists}{kind}"
            f"{dilated}, "
            f"device={str(self.device)!r})"
        )


def _places(chosen: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """Which of these numbers stand in the ascending list, and where (or where they would)."""
    place = torch.searchsorted(chosen, number.long())
    return torch.isin(number, chosen), place


def _tokens(blocks: Tensor, block: int, seq: int) -> Tensor:
    """The tokens of these blocks, in order."""
    tokens = (blocks[:, None] * block + torch.arange(block, device=blocks.device)).flatten()
    return tokens[: num_tokens(blocks, block, seq)]
