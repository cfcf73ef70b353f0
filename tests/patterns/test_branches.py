"""LongNet's branches, in literal matrices."""

import pytest
import torch

import dilated_attention_pytorch as dap
from dilated_attention_pytorch import Branches, LongNetConfig, SparsePatternConfig
from dilated_attention_pytorch.memory import AttentionConfig
from dilated_attention_pytorch.patterns.branches import check_heads
from dilated_attention_pytorch.patterns.naming import pattern_of


def matrix(branches, seq, head, heads):
    return [[branches.times(i, j, head, heads) for j in range(seq)] for i in range(seq)]


def test_one_segment_after_the_other():
    assert matrix(Branches([3], [1]), 5, 0, 1) == [
        [1, 1, 1, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 0, 0, 1, 1],
        [0, 0, 0, 1, 1],
    ]


def test_a_dilated_branch_starts_where_its_head_says():
    """And anew in every segment: 2 does not divide 3."""
    assert matrix(Branches([3], [2]), 5, 1, 2) == [
        [0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0],
        [0, 0, 0, 0, 1],
    ]


def test_keys_of_two_branches_count_twice():
    assert matrix(Branches([2, 4], [1, 2]), 4, 0, 1) == [
        [2, 1, 1, 0],
        [1, 1, 0, 0],
        [1, 0, 2, 1],
        [0, 0, 1, 1],
    ]


@pytest.mark.parametrize(
    ("rule", "heads", "rate", "offsets"),
    [
        ("interleaved", 5, 2, [0, 1, 0, 1, 0]),
        ("grouped", 5, 2, [0, 0, 0, 1, 1]),
        ("grouped", 6, 4, [0, 0, 1, 1, 2, 2]),
        ("grouped", 2, 4, [0, 1]),
        ("interleaved", 3, 8, [0, 1, 2]),
    ],
)
def test_offsets(rule, heads, rate, offsets):
    branches = Branches([8], [rate], rule)
    assert [branches.of_head(head, heads)[0][2] for head in range(heads)] == offsets


def test_values():
    assert Branches([4, 8], [1, 2]) == Branches((4, 8), (1, 2)) != Branches((4, 8), (1, 2), "grouped")
    assert len({Branches([4], [1]), Branches((4,), (1,))}) == 1
    assert Branches([4, 8], [1, 2], "grouped").alone() == [Branches([4], [1], "grouped"), Branches([8], [2], "grouped")]


SEGMENTS, DILATIONS = [1, 2, 4], [256, 512, 1024]  # another package's order of arguments
FIRST = "Did you pass dilations first\\? Segment lengths come first"


def qkv(heads=8):
    return torch.randn(3, 1, 16, heads, 8).unbind()


WAYS = {
    "Branches": lambda w, r: Branches(w, r),
    "dilated_attention": lambda w, r: dap.dilated_attention(*qkv(), segment_lengths=w, dilation_rates=r),
    "explain": lambda w, r: dap.explain(*qkv(), Branches(w, r)),
    "DilatedAttention": lambda w, r: dap.DilatedAttention(w, r),
    "MultiheadDilatedAttention": lambda w, r: dap.MultiheadDilatedAttention(64, 8, w, r),
    "LongNetConfig": lambda w, r: LongNetConfig(segment_lengths=w, dilation_rates=r),
    "LongNet": lambda w, r: dap.LongNet(LongNetConfig(dim=64, num_heads=8, segment_lengths=w, dilation_rates=r)),
    "longnet in words": lambda w, r: pattern_of(f"longnet:{','.join(map(str, w))}/{','.join(map(str, r))}"),
    "dilated_sparse in words": lambda w, r: pattern_of(
        f"dilated_sparse:0.1/{','.join(map(str, w))}/{','.join(map(str, r))}"
    ),
    "DilatedBlocks": lambda w, r: dap.DilatedBlocks(tuple(w), tuple(r)),
    "SparsePatternConfig": lambda w, r: SparsePatternConfig().pattern(w, r),
    "BlockSparseRingDilatedAttention": lambda w, r: dap.BlockSparseRingDilatedAttention(w, r),
    "BlockSparseRingMultiheadDilatedAttention": lambda w, r: dap.BlockSparseRingMultiheadDilatedAttention(64, 8, w, r),
    "create_block_sparse_attention": lambda w, r: dap.create_block_sparse_attention(
        segment_lengths=w, dilation_rates=r
    ),
    "AttentionConfig": lambda w, r: AttentionConfig.sparse(SparsePatternConfig(), w, r),
}


class TestCoverage:
    """`MultiheadDilatedAttention(64, 8, [1, 2, 4], [256, 512, 1024])` ran, and three quarters of its rows were 0."""

    @pytest.mark.parametrize("name", WAYS)
    def test_dilations_before_segments_are_refused_by_every_way_in(self, name):
        with pytest.raises(ValueError, match=f"at most its segment length, got 256 in a segment of 1: .*{FIRST}"):
            WAYS[name](SEGMENTS, DILATIONS)

    @pytest.mark.parametrize("name", WAYS)
    def test_one_branch_of_several_is_enough(self, name):
        with pytest.raises(ValueError, match=r"got 16 in a segment of 8: segment_lengths=\[64, 8\], dilation_rates="):
            WAYS[name]([64, 8], [1, 16])

    @pytest.mark.parametrize("name", WAYS)
    def test_short_segments_and_large_dilations_are_no_mistake(self, name):
        for branches in (([4096], [1]), ([16], [16]), ([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])):
            WAYS[name](*branches)

    @pytest.mark.parametrize("rule", ["interleaved", "grouped"])
    @pytest.mark.parametrize("heads", range(1, 8))
    def test_most_tokens_are_kept_by_some_head_where_the_rule_allows(self, heads, rule):
        """And where it refuses, a long segment leaves most tokens out."""
        for rate in range(1, 20):
            for length in (rate, rate + 1, 3 * rate - 1, 40 * rate):
                branches = Branches([length], [rate], rule)
                offsets = {branches.of_head(head, heads)[0][2] for head in range(heads)}
                kept = sum(position % rate in offsets for position in range(length))
                if rate <= 2 * heads:
                    check_heads([rate, 99], heads)
                    assert 2 * kept >= length
                elif length == 40 * rate:
                    assert 2 * kept < length
                    with pytest.raises(ValueError, match=f"one of at most {2 * heads}, twice .* got .*{FIRST}"):
                        check_heads([rate, 99], heads)

    @pytest.mark.parametrize(
        "make",
        [
            lambda **options: dap.dilated_attention(*qkv(heads=2), **options),
            lambda **options: dap.explain(*qkv(heads=2), Branches(**options)),
            lambda **options: dap.DilatedAttention(**options)(*qkv(heads=2)),
            lambda **options: dap.MultiheadDilatedAttention(64, 2, **options),
            lambda **options: LongNetConfig(dim=64, num_heads=2, **options),
        ],
    )
    def test_tokens_that_no_head_keeps(self, make):
        """Where the number of heads is known; a branch of several may leave out what the others keep."""
        with pytest.raises(ValueError, match=rf"one of at most 4, twice the number of heads, .* got \[5, 8\]. {FIRST}"):
            make(segment_lengths=[64, 128], dilation_rates=[5, 8])
        make(segment_lengths=[64, 128], dilation_rates=[4, 8])

    def test_a_branch_alone_is_not_judged_when_gradients_are_detached(self):
        q, k, v = (x.double() for x in qkv(heads=1))
        options = {"segment_lengths": [8, 16], "dilation_rates": [1, 5]}
        got = dap.dilated_attention(q, k, v, **options, detach_branch_weights=True)
        want = dap.dilated_attention(q, k, v, **options, backend="reference")
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
