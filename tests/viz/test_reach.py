"""What a query sees, and what it depends on after several layers, beside products of dense masks."""

import pytest
import torch

from dilated_attention_pytorch.layout import BlockLayout
from dilated_attention_pytorch.layout.branches import layout_of_branches
from dilated_attention_pytorch.patterns import (
    Branches,
    Causal,
    Documents,
    GlobalTokens,
    PerHead,
    RandomBlocks,
    SlidingWindow,
)
from dilated_attention_pytorch.viz.reach import keys_of_query, layers_needed

WINDOW = SlidingWindow(20, 0)
LAYOUTS = {
    "window": BlockLayout.from_pattern(WINDOW, 100, block_size=16),
    "both ways, rectangular": BlockLayout.from_pattern(SlidingWindow(9, 5), 100, block_size=(32, 16)),
    "full blocks": BlockLayout.from_pattern(RandomBlocks(2, block_size=16), 128, block_size=16),
    "causal": BlockLayout.from_pattern(Causal(), 70, block_size=16),
    "heads": BlockLayout.from_pattern(PerHead((WINDOW, GlobalTokens(3, queries=True) & Causal())), 100, block_size=16),
    "documents": BlockLayout.from_pattern(WINDOW & Documents((30, 70)), 100, block_size=16),
    "longnet": layout_of_branches(Branches((8, 20, 50), (1, 2, 4)), 97, num_heads=4, is_causal=True, num_residues=4),
    "longnet both ways": layout_of_branches(Branches((8, 32), (1, 3)), 50, num_heads=3, num_residues=3),
}


def dense(layout):
    """bool [heads, queries, keys]"""
    return (layout.to_dense() > 0).view(-1, layout.seq_q, layout.seq_k)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_query_sees_its_row(name):
    layout = LAYOUTS[name]
    for head, mask in enumerate(dense(layout)):
        for query in (0, 7, 33, layout.seq_q - 1):
            assert keys_of_query(layout, query, head=head).equal(mask[query])


@pytest.mark.parametrize("name", LAYOUTS)
def test_layers_reach_what_products_of_the_mask_reach(name):
    layout = LAYOUTS[name]
    step = dense(layout).any(0).double()
    keeps = (step + torch.eye(layout.seq_q, dtype=torch.float64)).clamp(max=1)
    for query in (0, 40, layout.seq_q - 1):
        want = torch.zeros(layout.seq_k, dtype=torch.int16)
        held = torch.eye(layout.seq_q, dtype=torch.float64)[query]
        for layer in range(1, 6):
            want[(want == 0) & (held @ step > 0)] = layer
            held = (held @ keeps).clamp(max=1)
        assert layers_needed(layout, query, 5).equal(want)
        assert layers_needed(layout, query, 2).equal(want.where(want <= 2, 0))


def test_samples_are_apart():
    masks = torch.zeros(2, 1, 4, 4, dtype=torch.bool)
    masks[0, 0].fill_diagonal_(True)
    masks[1, 0, :, 0] = True
    layout = BlockLayout.from_block_mask(masks, 16)
    assert layers_needed(layout, 40, 3, sample=0).nonzero()[:, 0].tolist() == list(range(32, 48))
    assert layers_needed(layout, 40, 3, sample=1).nonzero()[:, 0].tolist() == list(range(16))
    assert keys_of_query(layout, 40, sample=1).nonzero()[:, 0].tolist() == list(range(16))


def test_bad_input():
    layout = LAYOUTS["window"]
    with pytest.raises(ValueError, match="query must be below 100, got 100"):
        keys_of_query(layout, 100)
    with pytest.raises(ValueError, match="query must be at least 0, got -1"):
        layers_needed(layout, -1, 2)
    with pytest.raises(ValueError, match="layers must be at least 1, got 0"):
        layers_needed(layout, 3, 0)
    with pytest.raises(ValueError, match="as many queries as keys"):
        layers_needed(BlockLayout.from_pattern(Causal(), 32, 64, block_size=16), 3, 2)
