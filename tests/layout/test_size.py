"""Bytes of lists by arithmetic: those that a layout really holds."""

import pytest

from dilated_attention_pytorch import BlockLayout, Documents, Full, PerHead, RandomBlocks, SlidingWindow
from dilated_attention_pytorch.layout.size import ListSize


@pytest.mark.parametrize("pattern", [SlidingWindow(9, 9), PerHead((RandomBlocks(2), Full())), Documents((100, 200))])
def test_bytes_of_lists_are_those_of_the_tensors(pattern):
    layout = BlockLayout.from_pattern(pattern, 300, block_size=16)
    size = ListSize.of(layout)
    tensors, _ = layout.flatten(by_key=True)
    by_query, (rules, spans, *_, work), (*by_key, seen_by) = tensors[:4], tensors[4:9], tensors[9:]
    assert size.by(size.rows, work_order=True) == sum(x.nbytes for x in (*by_query, work))
    assert size.by(size.columns, work_order=True) == sum(x.nbytes for x in by_key)
    assert size.documents * 8 == spans.nbytes
    assert seen_by.nbytes <= size.seen_by < seen_by.nbytes + 8 * 16 * bool(seen_by.nbytes) + 1
    assert rules.nbytes <= size.rules < 4096 + spans.nbytes
