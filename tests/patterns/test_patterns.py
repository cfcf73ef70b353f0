"""Each pattern as a literal matrix, by its own rule and through the layout that is built from it.

Token rules are drawn token by token. Block rules are drawn block by block: `#` is an allowed block of 16 tokens.
"""

import copy
import dataclasses
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention_pytorch import (
    BlockDiffusion,
    BlockLayout,
    Blocks,
    Branches,
    Causal,
    Chunks,
    DilatedBlocks,
    Documents,
    DocumentSinks,
    Full,
    GlobalBlocks,
    GlobalTokens,
    KeyRanges,
    LocalBlocks,
    PerHead,
    PrefixLM,
    RandomBlocks,
    SlidingWindow,
    SparsePatternConfig,
    StrictlyCausal,
    VerticalSlash,
    hierarchical,
)
from dilated_attention_pytorch.patterns.base import Pattern, value_of
from tests.strategies import BLOCKS, lengths, patterns

TOKENS = {
    "full": (Full(), 3, 3, "### ### ###"),
    "causal": (Causal(), 4, 4, "#... ##.. ###. ####"),
    "causal, fewer queries": (Causal(), 2, 4, "###. ####"),
    "causal, fewer keys": (Causal(), 4, 2, ".. .. #. ##"),
    "window": (SlidingWindow(1, 2), 5, 5, "###.. ####. .#### ..### ...##"),
    "window, left only": (SlidingWindow(2, 0), 5, 5, "#.... ##... ###.. .###. ..###"),
    "window, unbounded right": (SlidingWindow(0, None), 3, 3, "### .## ..#"),
    "global": (GlobalTokens(2), 4, 4, "##.. ##.. ##.. ##.."),
    "global queries too": (GlobalTokens(1, queries=True), 4, 4, "#### #... #... #..."),
    "documents": (Documents((2, 1, 3)), 6, 6, "##.... ##.... ..#... ...### ...### ...###"),
    "documents, last queries": (Documents((2, 3)), 2, 5, "..### ..###"),
    "and": (Documents((2, 2)) & Causal(), 4, 4, "#... ##.. ..#. ..##"),
    "or": (GlobalTokens(1) | SlidingWindow(1, 0), 4, 4, "#... ##.. ###. #.##"),
    "window, bounds below 0": (SlidingWindow(2, -1), 5, 5, "..... #.... ##... .##.. ..##."),
    "window ahead": (SlidingWindow(-1, 2), 5, 5, ".##.. ..##. ...## ....# ....."),
    "one diagonal": (SlidingWindow(2, -2), 4, 4, ".... .... #... .#.."),
    "strictly causal": (StrictlyCausal(), 4, 4, ".... #... ##.. ###."),
    "strictly causal, fewer queries": (StrictlyCausal(), 2, 4, "##.. ###."),
    "global anywhere": (GlobalTokens(at=(3, 1)), 2, 5, ".#.#. .#.#."),
    "global anywhere, queries too": (GlobalTokens(1, True, at=(2,)), 4, 4, "#### #.#. #### #.#."),
    "global behind the end": (GlobalTokens(1, True, at=(9,)), 3, 3, "### #.. #.."),
    "chunks": (Chunks(2), 5, 5, "##... ##... ..##. ..##. ....#"),
    "chunks and one before": (Chunks(2, left=1), 6, 6, "##.... ##.... ####.. ####.. ..#### ..####"),
    "block-causal": (Chunks(2, left=None), 5, 5, "##... ##... ####. ####. #####"),
    "chunks, last queries": (Chunks(3) & Causal(), 2, 5, "...#. ...##"),
    "chunks, fewer keys": (Chunks(2), 4, 2, ".. .. ## ##"),
    "key ranges": (KeyRanges((0, 2, 2), (1, 4, 9), (1, 2, 3)), 6, 6, "#..... ..##.. ..##.. ..#### ..#### ..####"),
    "key ranges of every token": (KeyRanges((0, 0, 3, 3), (0, 2, 4, 4)), 4, 4, ".... ##.. ...# ...#"),
    "prefix": (PrefixLM(2), 4, 4, "##.. ##.. ###. ####"),
    "no prefix": (PrefixLM(0), 3, 3, "#.. ##. ###"),
    "prefix of each document": (PrefixLM((2, 0), (3, 2)), 5, 5, "##... ##... ###.. ...#. ...##"),
    "prefix longer than its document": (PrefixLM(9, (2, 2)), 4, 4, "##.. ##.. ..## ..##"),
    "sinks of documents": (DocumentSinks(1, (3, 2)), 5, 5, "#.... #.... #.... ...#. ...#."),
    "block diffusion": (BlockDiffusion(3, 2), 6, 6, "##.... ##.... ..###. ...##. ...##. ...###"),
    "vertical and slash": (VerticalSlash((1,), (0, 2)), 5, 5, "#.... .#... ###.. .#.#. .##.#"),
    "two packings": (Documents((1, 3)) & Documents((3, 1)), 4, 4, "#... .##. .##. ...#"),
    "and of or": ((GlobalTokens(1) | SlidingWindow(1, 1)) & Causal(), 4, 4, "#... ##.. ###. #.##"),
}

LOCAL = SparsePatternConfig(pattern_type="local_window", local_window_size=32, block_size=16)
GLOBAL = SparsePatternConfig(pattern_type="global_local", local_window_size=16, global_tokens=17, block_size=16)
DILATED = SparsePatternConfig(pattern_type="dilated_sparse", sparsity_ratio=0.5, block_size=16)
LEVELS = SparsePatternConfig(pattern_type="hierarchical", levels=[(1, 32), (2, 128)], block_size=16)

BLOCKWISE = {
    "local": (LocalBlocks(32, block_size=16), 5, "##... ###.. .###. ..### ...##"),
    "local rounds up": (LocalBlocks(33, block_size=16), 5, "###.. ####. ##### .#### ..###"),
    "local, causal": (LocalBlocks(32, block_size=16, causal=True), 5, "#.... ##... ###.. .###. ..###"),
    "local, stride": (LocalBlocks(128, 2, 16), 5, "#.#.# .#.#. #.#.# .#.#. #.#.#"),
    "local, zero": (LocalBlocks(0, block_size=16), 3, "#.. .#. ..#"),
    "global": (GlobalBlocks(17, 16), 4, "##.. ##.. ##.. ##.."),
    "list": (Blocks(((0, 2), (2, 0), (2, 1)), 16), 3, "..# ... ##."),
    "hierarchical": (hierarchical([(1, 32), (2, 128)], block_size=16), 5, "###.# ####. ##### .#### #.###"),
    "dilated, one branch": (DilatedBlocks((64,), (1,), 1.0, 16), 6, "####.. ####.. ####.. ####.. ....## ....##"),
    "dilated, step 2": (DilatedBlocks((96,), (2,), 1.0, 16), 6, "#.#.#. .#.#.# #.#.#. .#.#.# #.#.#. .#.#.#"),
    "dilated, two branches": (
        DilatedBlocks((32, 128), (1, 4), 1.0, 16), 8,
        "##..#... ##...#.. ..##..#. ..##...# #...##.. .#..##.. ..#...## ...#..##",
    ),
    # Budget 3 of 8: the diagonal, then one block of each branch in turn, nearest first, the earlier of two.
    "dilated, budget": (
        DilatedBlocks((64, 128), (1, 3), 0.375, 16), 8,
        "##.#.... ##..#... .##..#.. #.##.... .#..##.. ..#.##.. ...#.##. ....#.##",
    ),
    "dilated, budget of one": (DilatedBlocks((64, 128), (1, 2), 0.01, 16), 4, "#... .#.. ..#. ...#"),
    "dilated, causal": (
        DilatedBlocks((64, 128), (1, 3), 0.375, 16, causal=True), 8,
        "#....... ##...... ###..... #.##.... .#..#... ..#.##.. ...#.##. ....#.##",
    ),
    "config local": (LOCAL.pattern(), 5, "##... ###.. .###. ..### ...##"),
    "config global": (GLOBAL.pattern(), 5, "##... ###.. ####. ##### ##.##"),
    "config dilated": (DILATED.pattern((32, 64), (1, 2)), 4, "##.. ##.. ..## ..##"),
    "config levels": (LEVELS.pattern(), 5, "###.# ####. ##### .#### #.###"),
}  # fmt: skip


def matrix(drawing):
    return torch.tensor([[cell == "#" for cell in row] for row in drawing.split()])


def by_rule(pattern, seq_q, seq_k, step=1):
    return torch.tensor(
        [[pattern.allows(i, j, seq_q, seq_k) for j in range(0, seq_k, step)] for i in range(0, seq_q, step)]
    )


@pytest.mark.parametrize("name", TOKENS)
def test_token_rules(name):
    pattern, seq_q, seq_k, drawing = TOKENS[name]
    assert torch.equal(by_rule(pattern, seq_q, seq_k), matrix(drawing))
    assert torch.equal(BlockLayout.from_pattern(pattern, seq_q, seq_k, block_size=16).to_dense(), matrix(drawing))


@pytest.mark.parametrize("name", BLOCKWISE)
def test_block_rules(name):
    pattern, blocks, drawing = BLOCKWISE[name]
    assert torch.equal(by_rule(pattern, 16 * blocks, 16 * blocks, step=16), matrix(drawing))
    layout = BlockLayout.from_pattern(pattern, 16 * blocks, block_size=16)
    assert torch.equal(layout.to_block_mask(), matrix(drawing))
    whole = matrix(drawing).repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert torch.equal(layout.to_dense(), whole)


def test_causal_config_looks_back_only():
    drawing = "#.... ##... ###.. .###. ..###"
    layout = BlockLayout.from_pattern(LOCAL.pattern(is_causal=True), 80, block_size=16)
    assert torch.equal(layout.to_block_mask(), matrix(drawing))
    assert torch.equal(layout.to_dense(), matrix(drawing).repeat_interleave(16, 0).repeat_interleave(16, 1).tril())


@pytest.mark.slow
@given(st.data())
@settings(max_examples=250)
def test_layout_equals_the_rule(data):
    """The vectorised build against the pattern's own `allows`, pair by pair, and no empty block is listed."""
    seq_q, seq_k = data.draw(lengths(100))
    pattern = data.draw(patterns(seq_k))
    layout = BlockLayout.from_pattern(pattern, seq_q, seq_k, block_size=data.draw(st.sampled_from(BLOCKS)))
    want = by_rule(pattern, seq_q, seq_k)
    assert torch.equal(layout.to_dense(), want)
    padded = torch.zeros(layout.num_q_blocks * layout.block_q, layout.num_k_blocks * layout.block_k, dtype=torch.bool)
    padded[:seq_q, :seq_k] = want
    cells = padded.view(layout.num_q_blocks, layout.block_q, layout.num_k_blocks, layout.block_k)
    assert torch.equal(layout.to_block_mask(), cells.any(3).any(1))
    assert layout.density == pytest.approx(want.float().mean().item(), abs=1e-6)


def test_random_blocks_are_spread_and_follow_the_seed():
    def mask(seed):
        return BlockLayout.from_pattern(RandomBlocks(4, seed, 16), 16 * 64, block_size=16).to_block_mask()

    assert torch.equal(mask(3), mask(3))
    assert not torch.equal(mask(3), mask(4))
    assert (mask(3).sum(1) == 4).all()
    assert (mask(3).view(64, 4, 16).sum(-1) == 1).all()
    assert len({tuple(row.nonzero().flatten().tolist()) for row in mask(3)}) > 60


def test_dilated_budget_is_the_share_kept():
    for ratio in (0.01, 0.05, 0.25):
        pattern = DilatedBlocks((128 * 64, 128 * 128), (1, 2), ratio)
        layout = BlockLayout.from_pattern(pattern, 128 * 128, block_size=128)
        counts = layout.to_block_mask().sum(1)
        assert counts.max() == max(1, round(ratio * 128))
        assert counts.float().mean() > 0.9 * counts.max()


class TestValues:
    def test_equality_and_hash(self):
        assert SlidingWindow(3, 0) == SlidingWindow(3, 0) != SlidingWindow(3, 1)
        assert len({Causal(), Causal(), SlidingWindow(None, 0), Full()}) == 2
        assert hash(Causal() & Documents((3, 4))) == hash(Causal() & Documents([3, 4]))
        assert DilatedBlocks([32], [1]) == DilatedBlocks((32,), (1,))

    def test_combinations_flatten(self):
        a, b, c = Full(), Causal(), GlobalTokens(2)
        assert (a & b) & c == a & (b & c)
        assert (a | b) | c == a | (b | c)
        assert a | a == a | a | a

    def test_truth_value_is_refused(self):
        with pytest.raises(TypeError, match=r"combine patterns with & and \|, not"):
            bool(Causal())

    def test_only_patterns_combine(self):
        with pytest.raises(TypeError):
            Causal() & 3

    def test_per_head_combines_head_by_head(self):
        pattern = PerHead((Full(), SlidingWindow(1, 1))) & Causal()
        layout = BlockLayout.from_pattern(pattern, 3, block_size=16)
        assert torch.equal(layout.to_dense(), torch.stack((matrix("#.. ##. ###"), matrix("#.. ##. .##"))))
        with pytest.raises(ValueError, match="same number of heads"):
            PerHead((Full(),)) | PerHead((Full(), Full()))

    @given(patterns(40))
    def test_the_text_of_a_value_says_all_of_it(self, pattern):
        """Graphs hold the text: it must give the value back, in any process, and be the same for equal ones."""
        assert pattern.text == repr(pattern)
        assert value_of(pattern.text) == pattern
        for other in (copy.deepcopy(pattern), pickle.loads(pickle.dumps(pattern))):
            assert (other, other.text) == (pattern, pattern.text)

    def test_the_text_of_branches_and_of_numbers_that_are_no_plain_ints(self):
        for value in (
            Branches([8, 16], [1, 2], "grouped"),
            DilatedBlocks((32,), (1,), 0.25, 32, True),
            PerHead((Full(),)),
        ):
            assert value.text == repr(value)
            assert value_of(value.text) == value

    def test_a_pattern_of_somebody_else_is_not_taken_for_ours_of_the_same_name(self):
        """By its name alone it was read back as the library's, and attended to everything."""

        class Full(Pattern):
            def allows(self, query, key, seq_q, seq_k):
                return query == key

        mine = dataclasses.dataclass(frozen=True)(Full)()
        with pytest.raises(TypeError, match=r"of this library alone, got test_patterns\.Full"):
            value_of(mine.text)

    def test_a_text_runs_no_code(self):
        for text in ("__import__('os').getcwd()", "Full().__class__", "SlidingWindow(left=1+1, right=0)"):
            with pytest.raises((TypeError, ValueError)):
                value_of(text)

    def test_config_is_a_value(self):
        assert SparsePatternConfig() == SparsePatternConfig(pattern_type="dilated_sparse", sparsity_ratio=0.1)
        assert len({SparsePatternConfig(), SparsePatternConfig(block_size=64)}) == 2


@settings(max_examples=50)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12), data=st.data())
def test_documents_of_tensors(lengths, data):
    expected, dtype = Documents(tuple(lengths)), data.draw(st.sampled_from([torch.int32, torch.int64]))
    ends = torch.tensor([0, *lengths]).cumsum(0)
    padded = torch.cat((ends, ends[-1:].expand(data.draw(st.integers(0, 3)))))
    assert Documents.from_cu_seqlens(padded.to(dtype)) == expected
    names = data.draw(st.permutations(range(len(lengths))))
    ids = torch.tensor([name for name, length in zip(names, lengths, strict=True) for _ in range(length)])
    assert Documents.from_ids(ids.to(dtype)) == expected
