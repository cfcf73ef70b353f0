"""Rows and columns of a layout as a layout of their own: the same pairs of tokens are allowed, nothing else."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention_pytorch import BlockLayout, Causal, PerHead
from tests import strategies


def tokens(blocks, block, seq):
    return torch.tensor([t for b in blocks.tolist() for t in range(b * block, min((b + 1) * block, seq))], dtype=int)


def some(draw, num):
    chosen = draw(st.sets(st.integers(0, num - 1), min_size=1))
    return torch.tensor(sorted(chosen))


def check(part, whole, query_blocks, key_blocks):
    rows = tokens(query_blocks, whole.block_q, whole.seq_q)
    columns = tokens(key_blocks, whole.block_k, whole.seq_k)
    assert part.lengths == (len(rows), len(columns))
    assert torch.equal(part.to_dense(), whole.to_dense()[..., rows, :][..., columns])
    part.__post_init__(checked=False)  # it is a layout like any other


@settings(max_examples=150)
@given(st.data())
def test_a_part_allows_what_the_whole_does(data):
    draw = data.draw
    seq_q, seq_k = draw(strategies.lengths(most=300))
    whole = draw(strategies.layouts(seq_q, seq_k, 2, 4, 2))
    whole = whole.causal if draw(st.booleans()) else whole
    query_blocks, key_blocks = some(draw, whole.num_q_blocks), some(draw, whole.num_k_blocks)
    if whole.kind is not None:  # a part is not the whole pattern
        whole = BlockLayout.unflatten(*whole.flatten())
    check(whole.take(query_blocks), whole, query_blocks, torch.arange(whole.num_k_blocks))
    part = whole.take(query_blocks, key_blocks)
    check(part, whole, query_blocks, key_blocks)
    again = some(draw, part.num_q_blocks), some(draw, part.num_k_blocks)
    check(part.take(*again), part, *again)


@settings(max_examples=150)
@given(st.data())
def test_rows_of_a_pattern_are_those_of_the_whole(data):
    draw = data.draw
    seq_q, seq_k = draw(strategies.lengths(most=300))
    blocks = draw(st.sampled_from(strategies.BLOCKS))
    pattern = draw(strategies.patterns(seq_k))
    if draw(st.booleans()):
        pattern = PerHead((pattern, pattern & Causal(), draw(st.sampled_from([Causal(), pattern]))))
    whole = BlockLayout.from_pattern(pattern, seq_q, seq_k, block_size=blocks)
    query_blocks = some(draw, whole.num_q_blocks)
    part = BlockLayout.from_pattern(pattern, seq_q, seq_k, block_size=blocks, query_blocks=query_blocks)
    check(part, whole, query_blocks, torch.arange(whole.num_k_blocks))
    assert torch.equal(part.to_block_mask(), whole.to_block_mask()[..., query_blocks, :])
