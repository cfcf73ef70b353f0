"""`opened` patterns: between the pattern and what its rules can never exceed, whatever the pattern is made of."""

from functools import reduce
from operator import and_, or_

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention_pytorch import (
    BlockLayout,
    Blocks,
    Causal,
    DilatedBlocks,
    Documents,
    Full,
    GlobalBlocks,
    GlobalTokens,
    LocalBlocks,
    Neighborhood,
    PerHead,
    RandomBlocks,
    SlidingWindow,
)
from dilated_attention_pytorch.layout.terms import MAX_INTERVALS, MAX_TERMS, terms_of
from dilated_attention_pytorch.patterns import And, GridPattern, Or, RangePattern
from dilated_attention_pytorch.patterns.opening import opened
from tests import strategies

LENGTHS = strategies.lengths(most=110)


def reaches(pattern, query, key, seq_q, seq_k, causal=False):
    """Whether the pattern could allow a pair if its windows and block rules were as wide as can be."""
    position, ask = query + seq_k - seq_q, (query, key, seq_q, seq_k)
    if isinstance(pattern, And):
        causal = causal or any(
            isinstance(part, SlidingWindow) and part.right is not None and part.right <= 0 for part in pattern.parts
        )
        return all(reaches(part, *ask, causal) for part in pattern.parts)
    if isinstance(pattern, Or):
        return any(reaches(part, *ask, causal) for part in pattern.parts)
    if isinstance(pattern, SlidingWindow):
        left, right = (1 if bound is None else bound for bound in (pattern.left, pattern.right))
        return (right > 0 or key <= position + right) and (left > 0 or key >= position - left)
    if isinstance(pattern, Full | RangePattern | GlobalTokens | GlobalBlocks):
        return pattern.allows(*ask)
    if isinstance(pattern, GridPattern):
        return reaches_in_grid(pattern, position, key)
    back_only = getattr(pattern, "causal", False)
    if isinstance(pattern, Blocks):
        below = all(row > column for row, column in pattern.pairs)
        if below and not causal:
            return pattern.allows(*ask)
        back_only = all(row >= column for row, column in pattern.pairs)
    row, column = query // 32 + (seq_k - seq_q) // 32, key // 32
    return pattern.allows(*ask) or not back_only or column <= row


def reaches_in_grid(pattern, position, key):
    """Everything but what lies behind the query along a causal dimension."""
    if position < 0:
        return False
    causal = getattr(pattern, "causal", (False,) * len(pattern.shape))
    whole = Neighborhood(pattern.shape, pattern.shape, prefix=pattern.prefix, order=pattern.order)
    at = [whole.token_order.coordinates(x - whole.token_order.grid_at) for x in (position, key)]
    of_grid = [0 <= x - whole.token_order.grid_at < whole.token_order.num_cells for x in (position, key)]
    return not all(of_grid) or all(k <= q for q, k, back_only in zip(*at, causal, strict=True) if back_only)


@st.composite
def openings(draw, seq_q, seq_k):
    """A pattern, and windows that grow up to one as long as the sequence."""
    most = max(seq_q, seq_k)
    packing = draw(strategies.documents(seq_k))
    atoms = strategies.atoms(packing)
    pattern = draw(st.recursive(atoms, lambda p: st.builds(and_, p, p) | st.builds(or_, p, p), max_leaves=5))
    return pattern, [*sorted(draw(st.sets(st.integers(1, most), max_size=2))), most]


@settings(max_examples=80)
@given(st.data())
def test_between_the_pattern_and_its_reach(data):
    """By asking the rules, pair by pair: an opened pattern contains the pattern and the one opened less, stays within
    reach, and fills it in the end. Before, any pattern was opened to all keys, or to all earlier ones of the call."""
    seq_q, seq_k = data.draw(LENGTHS)
    pattern, windows = data.draw(openings(seq_q, seq_k))
    wider = [pattern, *(opened(pattern, window) for window in windows)]
    for query in data.draw(st.sets(st.integers(0, seq_q - 1), max_size=6)):
        for key in range(seq_k):
            allowed = [each.allows(query, key, seq_q, seq_k) for each in wider]
            assert allowed == sorted(allowed), (query, key, wider)
            assert allowed[-1] == reaches(pattern, query, key, seq_q, seq_k), (query, key, wider)


TOKEN_RULES = st.one_of(
    st.just(Full()),
    st.just(Causal()),
    st.builds(SlidingWindow, st.none() | st.integers(0, 9), st.none() | st.integers(0, 9)),
    st.builds(GlobalTokens, st.integers(1, 9), st.booleans()),
)


@settings(max_examples=60)
@given(st.data())
def test_no_later_key_and_no_other_document_that_the_pattern_never_shows(data):
    """Asked of the pairs alone, without looking at how the pattern is made: if a pattern of token rules shows nobody a
    later key, opened it does not either; the same for earlier keys, and for keys of another document."""
    seq = data.draw(st.integers(12, 24))  # longer than any rule here is wide
    packing = Documents((5, seq - 5))
    rules = TOKEN_RULES | st.just(packing)
    pattern = data.draw(st.recursive(rules, lambda p: st.builds(and_, p, p) | st.builds(or_, p, p), max_leaves=4))

    def shown(pattern):
        """Whether some pair is allowed with a later key, with an earlier one, with one of another document."""
        pairs = [(i, j) for i in range(seq) for j in range(seq) if pattern.allows(i, j, seq, seq)]
        apart = [pair for pair in pairs if not packing.allows(*pair, seq, seq)]
        return any(j > i for i, j in pairs), any(j < i for i, j in pairs), bool(apart)

    before = shown(pattern)
    for window in (1, 6, seq):
        for now, then in zip(shown(opened(pattern, window)), before, strict=True):
            assert then or not now, (pattern, window)


@settings(max_examples=40)
@given(st.data())
def test_opened_patterns_have_layouts(data):
    """The layout is that of the rules, and needs no more token rules than the pattern's own."""
    seq_q, seq_k = data.draw(LENGTHS)
    pattern, windows = data.draw(openings(seq_q, seq_k))
    if len(intervals(pattern)) > MAX_INTERVALS:
        return
    for window in windows:
        wider = opened(pattern, window)
        assert len(intervals(wider)) <= len(intervals(pattern))
        layout = BlockLayout.from_pattern(wider, seq_q, seq_k, block_size=16).to_dense()
        for query in data.draw(st.sets(st.integers(0, seq_q - 1), max_size=2)):
            want = [wider.allows(query, key, seq_q, seq_k) for key in range(seq_k)]
            assert layout[query].tolist() == want


def intervals(pattern):
    return {term.interval for term in terms_of(pattern)}


WINDOWS = [SlidingWindow(i, 9 - i) for i in range(MAX_INTERVALS)]
CROWDED = {
    "token rules": reduce(or_, WINDOWS),
    "token rules and causal": reduce(or_, WINDOWS) & Causal(),
    "token rules and blocks": reduce(or_, WINDOWS[1:]) | RandomBlocks(1, block_size=16) | Blocks(((2, 0),), 16),
    "products": reduce(
        and_, (LocalBlocks(16 * i, block_size=16) | RandomBlocks(i, block_size=16) for i in range(1, 7))
    ),
    "rules of a product": reduce(and_, (RandomBlocks(3, seed, 16) for seed in range(12))),
}


@pytest.mark.parametrize("name", CROWDED)
def test_a_pattern_with_as_many_rules_as_there_may_be(name):
    """Opening used to add a window of its own: six token rules became seven, and the layout was refused."""
    pattern = CROWDED[name]
    assert len(intervals(pattern)) == MAX_INTERVALS or len(terms_of(pattern)) in (1, MAX_TERMS)
    for window in (1, 5, 40, 100):
        layout = BlockLayout.from_pattern(opened(pattern, window), 100, block_size=16).to_dense()
        for query in (0, 37, 99):
            want = [opened(pattern, window).allows(query, key, 100, 100) for key in range(100)]
            assert layout[query].tolist() == want


def test_heads_are_opened_one_by_one():
    heads = PerHead((SlidingWindow(3, 0), SlidingWindow(2, 2), GlobalTokens(4), DilatedBlocks((64,), (2,), 0.5, 16)))
    assert opened(heads, 8) == PerHead(tuple(opened(head, 8) for head in heads.patterns))
    assert opened(heads, 8).patterns[:3] == (SlidingWindow(8, 0), SlidingWindow(8, 8), GlobalTokens(4))


def test_block_rules_are_opened_block_by_block():
    """`#`: the blocks of a list within 16 and 32 tokens of the diagonal, on the sides that it has."""
    sides = {
        "both": (((0, 3), (3, 0)), "##.# ###. .### #.##", "#### #### #### ####"),
        "back": (((0, 0), (3, 0)), "#... ##.. .##. #.##", "#... ##.. ###. ####"),
        "behind the diagonal": (((2, 0), (3, 0)), ".... .... #... #...", ".... .... #... #..."),
    }
    for pairs, near, far in sides.values():
        for window, want in ((16, near), (32, far)):
            mask = BlockLayout.from_pattern(opened(Blocks(pairs, 16), window), 64, block_size=16).to_block_mask()
            assert [["#" if cell else "." for cell in row] for row in mask.tolist()] == [list(r) for r in want.split()]
    causal = BlockLayout.from_pattern(opened(Blocks(((2, 0),), 16) & Causal(), 64), 64, block_size=16)
    assert torch.equal(causal.to_dense(), torch.ones(64, 64, dtype=torch.bool).tril())
