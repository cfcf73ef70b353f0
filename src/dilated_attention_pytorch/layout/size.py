"""`ListSize`: the lengths of the lists of a layout, and the bytes that they and their construction take."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..patterns.blocks import ceil_div
from .layout import BlockLayout


@dataclass(frozen=True, kw_only=True)
class ListSize:
    """The lengths of the lists of a layout: `of` measures them, `planning.counting` predicts them from a pattern."""

    block_q: int
    block_k: int
    num_q_blocks: int
    num_k_blocks: int
    num_lists: int
    list_heads: int  # lists of a sample
    blocks: int  # of all lists
    widest: int  # blocks of the longest row
    partial: int  # most partial blocks of a row
    candidates: int  # most candidates examined at a time while building
    intervals: int
    named: bool  # whether every block has a rule id
    documents: int  # tokens in the table of ranges, of each of them
    bitmaps: int  # bytes of them, and of the rules that name them
    kind: str | None
    num_residues: int = 1  # as in `BlockLayout`
    run_branches: int = 0  # branches of dilated attention that Hopper walks as runs: see `layout.branch_runs`

    @classmethod
    def of(cls, layout: BlockLayout) -> ListSize:
        lists = layout.by_query
        uneven = layout.has_mixed_blocks or layout.seq_q % layout.num_residues > 0
        return cls(
            block_q=layout.block_q,
            block_k=layout.block_k,
            num_q_blocks=layout.num_q_blocks,
            num_k_blocks=layout.num_k_blocks,
            num_lists=layout.num_lists,
            list_heads=layout.num_heads or 1,
            blocks=len(lists.indices),
            widest=int(lists.offsets.diff().max()),
            partial=int((lists.offsets[1:] - lists.splits).max()),
            candidates=0,
            intervals=layout.rules.shape[1],
            named=lists.rule_ids.numel() > 0,
            documents=layout.documents.numel() // 2,
            bitmaps=layout.bitmaps.nbytes + (layout.rules.nbytes if len(layout.bitmaps) else 0),
            kind=layout.kind,
            num_residues=layout.num_residues,
            run_branches=layout.branches.shape[1] if uneven else 0,
        )

    def shared_by(self, ranks: int) -> ListSize:
        """The share of one rank: its rows."""
        if ranks == 1:
            return self
        return replace(
            self,
            num_q_blocks=ceil_div(self.num_q_blocks, ranks),
            num_k_blocks=ceil_div(self.num_k_blocks, ranks),
            blocks=ceil_div(self.blocks, ranks),
            documents=ceil_div(self.documents, ranks),
        )

    @property
    def rows(self) -> int:
        return self.num_lists * self.num_q_blocks

    @property
    def columns(self) -> int:
        return self.num_lists * self.num_k_blocks

    def by(self, rows: int, *, work_order: bool) -> int:
        """Bytes of the lists in one orientation, optionally with the order of work."""
        return 4 * (2 * rows + 1 + self.blocks * (2 if self.named else 1) + (4 * rows if work_order else 0))

    @property
    def seen_by(self) -> int:
        """Bytes of ranges by key, at most."""
        return 8 * self.num_k_blocks * self.block_k if self.documents else 0

    @property
    def rules(self) -> int:
        """Bytes of the tables of rules, documents and bitmaps."""
        # A rule for every set of intervals, 5 int32 an interval; 2 int32 a token.
        if self.bitmaps:
            return self.bitmaps + 8 * self.documents
        return 20 * self.num_lists * self.intervals * ((1 << self.intervals) - 1) + 8 * self.documents

    @property
    def run_plan(self) -> int:
        """Bytes of `layout.branch_runs.RunPlan`, about: tokens of tiles, and for each 128 of them two orders of work
        and about two runs a branch in each."""
        tiles = self.num_lists * ceil_div(self.num_q_blocks * self.block_q, 128) if self.run_branches else 0
        return tiles * (128 * 4 + 2 * 24 + 2 * 2 * 40 * self.run_branches)

    def building(self, *, by_key: bool) -> int:
        """Temporary bytes while the lists are built.

        A chunk of candidates as 64-bit numbers and the pieces beside their concatenation, or the sort for `by_key`.
        """
        first = 96 * self.candidates + self.by(self.rows, work_order=False) + 3 * self.bitmaps
        return max(first, 40 * self.blocks) if by_key else first
