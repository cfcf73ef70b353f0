"""`look_back`: what is dropped is seen by no later query, and the pattern does not notice that it is gone."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dilated_attention_pytorch import (
    Causal,
    Chunks,
    DilatedBlocks,
    Full,
    GlobalBlocks,
    GlobalTokens,
    LocalBlocks,
    PerHead,
    RandomBlocks,
    SlidingWindow,
    StrictlyCausal,
    presets,
)
from dilated_attention_pytorch.layout.look_back import LookBack, look_back
from tests.strategies import patterns


def bounded():
    return patterns(None).filter(lambda pattern: look_back(pattern) is not None)


@settings(max_examples=300, deadline=None)
@given(bounded(), st.integers(0, 700), st.integers(1, 20))
def test_a_query_sees_the_same_keys_where_others_are_dropped(pattern, length, new):
    """At the place that it has among what is kept: the definition, pair by pair."""
    found = look_back(pattern)
    assume(found.first + found.back < 600)
    dropped = found.dropped(length)
    assert dropped % found.step == 0
    assert length - dropped < found.first + found.back + found.step or not dropped
    whole, left = length + new, length + new - dropped
    for query in range(length, whole):
        seen = {key for key in range(query + 1) if pattern.allows(query, key, whole, whole)}
        among = {key for key in range(query - dropped + 1) if pattern.allows(query - dropped, key, left, left)}
        assert seen == {key if key < found.first else key + dropped for key in among}


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [
        (SlidingWindow(7, 0), LookBack(0, 7)),
        (SlidingWindow(7, None), LookBack(0, 7)),
        (SlidingWindow(9, -3), LookBack(0, 9)),
        (SlidingWindow(7, 0) | GlobalTokens(3), LookBack(3, 7)),
        (SlidingWindow(7, 0) | GlobalTokens(3, queries=True), LookBack(3, 7)),
        (SlidingWindow(7, 0) | SlidingWindow(30, 0) & GlobalTokens(5), LookBack(5, 30)),
        (Full() & SlidingWindow(4, 0), LookBack(0, 4)),
        (presets.mistral(4096), LookBack(0, 4095)),
        (presets.streaming_llm(window=1020, sinks=4), LookBack(4, 1019)),
        (LocalBlocks(40, block_size=16, causal=True), LookBack(0, 63, 16)),
        (LocalBlocks(40, block_size=16), LookBack(0, 47, 16)),
        (GlobalBlocks(20, block_size=16) | SlidingWindow(7, 0), LookBack(32, 7, 16)),
        (DilatedBlocks((64, 96), (1, 2), block_size=16), LookBack(0, 95, 192)),
        (PerHead((SlidingWindow(7, 0), GlobalTokens(3))), LookBack(3, 7)),
    ],
)
def test_known_patterns(pattern, kept):
    assert look_back(pattern) == kept


@pytest.mark.parametrize(
    "pattern",
    [
        Full(),
        Causal(),
        StrictlyCausal(),
        SlidingWindow(7, 0) | Causal(),
        PerHead((SlidingWindow(7, 0), Full())),
        RandomBlocks(2),
        SlidingWindow(7, 0) & RandomBlocks(2),  # bounded, but its rows are those of a place and a length
        DilatedBlocks((64,), (1,), sparsity_ratio=0.5),
        Chunks(16),
        SlidingWindow(7, 0) | GlobalTokens(at=(50,)),
    ],
)
def test_patterns_without_a_bound(pattern):
    assert look_back(pattern) is None
