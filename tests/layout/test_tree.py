"""Trees of drafts: each draft is attended to as the end of its own path."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention_pytorch import BlockLayout, Full, block_sparse_attention
from dilated_attention_pytorch.layout.checks import check_layout
from tests.strategies import BLOCKS


def path_of(parents, node):
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


@st.composite
def trees(draw, nodes):
    return [draw(st.integers(-1, node - 1)) for node in range(nodes)]


@given(st.data())
@settings(max_examples=40)
def test_each_sees_its_path(data):
    nodes, context, samples = (data.draw(st.integers(*x)) for x in ((1, 50), (0, 90), (1, 3)))
    parents = [data.draw(trees(nodes)) for _ in range(samples)]
    given_as = torch.tensor(parents if samples > 1 else parents[0])
    layout = BlockLayout.from_tree(given_as, context + nodes, block_size=data.draw(st.sampled_from(BLOCKS)))
    check_layout(replace(layout, kind=None))
    seen = layout.to_dense().view(samples, nodes, -1)
    for sample, tree in enumerate(parents):
        for node in range(nodes):
            want = [*range(context), *(context + each for each in path_of(tree, node))]
            assert seen[sample, node].nonzero()[:, 0].tolist() == want


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_verification_is_attention_along_each_path(dtype):
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2, 4, -1, 7], [-1, 0, 1, 2, 3, 4, 5, 6, 7]])
    q = torch.randn(2, 9, 4, 8, dtype=dtype)
    k, v = (torch.randn(2, 59, 2, 8, dtype=dtype) for _ in range(2))
    out = block_sparse_attention(q, k, v, BlockLayout.from_tree(parents, 59, block_size=16))
    for sample, tree in enumerate(parents.tolist()):
        for node in range(9):
            keys = [*range(50), *(50 + each for each in path_of(tree, node))]
            alone = (x[sample : sample + 1, keys] for x in (k, v))
            want = block_sparse_attention(q[sample : sample + 1, node : node + 1], *alone, Full())
            torch.testing.assert_close(out[sample, node], want[0, 0])


def test_the_context_is_not_asked_for():
    layout = BlockLayout.from_tree(torch.tensor([-1, 0, 0]), 100_003, block_size=128)
    assert layout.evaluated == 1
    assert layout.num_active_blocks == 782
