"""Patterns in words: what they mean, what is refused, and the way back to Python."""

import pytest
from hypothesis import given

import dilated_attention_pytorch as dap
from dilated_attention_pytorch import (
    BlockDiffusion,
    Branches,
    Causal,
    Chunks,
    DilatedBlocks,
    Documents,
    DocumentSinks,
    Full,
    GlobalTokens,
    KeyRanges,
    PerHead,
    PrefixLM,
    RandomBlocks,
    SlidingWindow,
    SparsePatternConfig,
    StrictlyCausal,
    VerticalSlash,
)
from dilated_attention_pytorch.patterns.naming import LONGEST_TEXT, NAMES, code_of, form_of, pattern_of
from tests.strategies import patterns

WINDOW, FIRST = SlidingWindow(8, 8), GlobalTokens(4)


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("full", Full()),
        ("causal", Causal()),
        ("window:8", WINDOW),
        ("window:8/0", SlidingWindow(8, 0)),
        ("global:4/queries", GlobalTokens(4, queries=True)),
        ("documents:5,6", Documents((5, 6))),
        ("strictly_causal", StrictlyCausal()),
        ("window:9/-2", SlidingWindow(9, -2)),
        ("global:0/keys/9,5", GlobalTokens(at=(5, 9))),
        ("prefix:3", PrefixLM(3)),
        ("prefix:3/5,6", PrefixLM(3, (5, 6))),
        ("document_sinks:3/5,6", DocumentSinks(3, (5, 6))),
        ("chunks:16", Chunks(16)),
        ("chunks:16/2", Chunks(16, 2)),
        ("ranges:0,5/5,11/5,6", KeyRanges((0, 5), (5, 11), (5, 6))),
        ("vertical_slash:0,9/0,1", VerticalSlash((0, 9), (0, 1))),
        ("block_diffusion:9/4", BlockDiffusion(9, 4)),
        ("random:3/7", RandomBlocks(3, seed=7, block_size=64)),
        ("dilated_sparse:0.5", DilatedBlocks((2048, 4096, 8192), (1, 2, 4), 0.5, 64)),
        ("dilated_sparse:0.5/64,128/1,3", DilatedBlocks((64, 128), (1, 3), 0.5, 64)),
        ("local_window", SparsePatternConfig(pattern_type="local_window", block_size=64).pattern()),
        (
            "global_local:256/8",
            SparsePatternConfig(
                pattern_type="global_local", local_window_size=256, global_tokens=8, block_size=64
            ).pattern(),
        ),
        (
            "hierarchical:long_range",
            SparsePatternConfig(pattern_type="hierarchical", levels="long_range", block_size=64).pattern(),
        ),
        (
            "hierarchical:1x64,2x256",
            SparsePatternConfig(pattern_type="hierarchical", levels=((1, 64), (2, 256)), block_size=64).pattern(),
        ),
        ("longnet:64,128/1,2/grouped", Branches((64, 128), (1, 2), "grouped")),
        ("longnet", Branches((2048, 4096, 8192), (1, 2, 4))),
        ("window:8 | global:4", WINDOW | FIRST),
        ("window:8+global:4", WINDOW | FIRST),
        ("causal & window:8 | global:4", Causal() & WINDOW | FIRST),
        ("causal&(window:8|global:4)", Causal() & (WINDOW | FIRST)),
        ("window:8 ; full | causal", PerHead((WINDOW, Full() | Causal()))),
    ],
)
def test_meaning(text, pattern):
    assert pattern_of(text, block_size=64) == pattern


def test_causal_block_rules_look_back_only_as_the_modules_do():
    config = SparsePatternConfig(pattern_type="local_window", local_window_size=256, block_size=32)
    assert pattern_of("local_window:256", block_size=32, is_causal=True) == config.pattern(is_causal=True)
    assert pattern_of("window:8", is_causal=True) == WINDOW & Causal()
    assert pattern_of("causal", is_causal=True) == Causal()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "pattern '': a name is missing"),
        ("windw:3", "'windw' is none of full, causal, strictly_causal, window:LEFT"),
        ("window", r"written window:LEFT\[/RIGHT\], got 0"),
        ("full:3", "full is written full, got 1 argument"),
        ("window:3/4/5", "got 3 argument"),
        ("window:a", "left of window must be an integer, got 'a'"),
        ("window:-1", r"left \+ right must be at least 0, or nothing is seen, got -1 and -1"),
        ("documents:5,,6", "lengths of documents must be integers with commas"),
        ("hierarchical:1x2x3", "STRIDExWINDOW"),
        ("global:4/all", "'keys' or 'queries', got 'all'"),
        ("dilated_sparse:2", "sparsity_ratio must be the share"),
        ("longnet:64/1,2", "segment_lengths and dilation_rates must have the same length"),
        ("longnet:64/1/x", "head_offsets must be one of"),
        ("longnet | full", "longnet stands alone"),
        ("longnet ; longnet", "longnet stands alone"),
        ("(full", r"a '\)' is missing"),
        ("full)", r"'\)' is not expected there"),
        ("full full", "'full' is not expected there"),
        ("full &", "a name is missing"),
        ("| full", "a name is missing before '|'"),
        ("(" * 65 + "full" + ")" * 65, "at most 64 parentheses, got 65"),
        (" " * LONGEST_TEXT + "full", "at most 4096 characters"),
    ],
)
def test_what_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        pattern_of(text)


@given(patterns(48))
def test_code_makes_the_same_pattern(pattern):
    again = eval(code_of(pattern), {}, vars(dap.patterns))
    heads = [p.patterns if isinstance(p, PerHead) else (p,) for p in (pattern, again)]
    for a, b in zip(*heads, strict=True):
        assert all(a.allows(i, j, 48, 48) == b.allows(i, j, 48, 48) for i in range(0, 48, 3) for j in range(48))


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_what_their_form_says(name):
    known = NAMES[name]
    text = name + (":" + "/".join(known.example) if known.example else "")
    pattern = pattern_of(text)
    assert eval(code_of(pattern), {}, vars(dap.patterns)) == pattern
    assert len(known.example) == len(known.arguments)
    assert form_of(name).count("[") == sum(a.default is not None for a in known.arguments)
