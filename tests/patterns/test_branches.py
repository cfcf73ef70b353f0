"""LongNet's branches, in literal matrices."""

import pytest

from dilated_attention_pytorch import Branches


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
