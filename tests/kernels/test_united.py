"""Rows of small blocks, united: the same blocks, and who sees them, as the layout itself lists."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which there is for Linux alone")
if torch.cuda.is_available():
    pytest.skip("needs Triton's interpreter: the kernels are made for a GPU here", allow_module_level=True)

from dilated_attention_pytorch import BlockLayout, Documents, GlobalTokens, SlidingWindow
from dilated_attention_pytorch.kernels import ahead, launch, launcher, united
from dilated_attention_pytorch.patterns.blocks import ceil_div


def random_layout(seed, block, lists, lengths, share):
    mask = torch.rand(*lists, *map(ceil_div, lengths, block), generator=torch.Generator().manual_seed(seed)) < share
    mask[..., 1, :] = False  # an empty row
    return BlockLayout.from_block_mask(mask, block, seq_q=lengths[0], seq_k=lengths[1])


def pattern_layout(pattern, block):
    return BlockLayout.from_pattern(pattern, 230, block_size=block)


LAYOUTS = {
    "random": lambda: random_layout(0, (16, 32), (), (200, 300), 0.2),
    "lists of samples and heads": lambda: random_layout(1, (16, 16), (2, 2), (150, 90), 0.3),
    "large keys": lambda: random_layout(2, (32, 128), (3,), (100, 500), 0.4),
    "nothing": lambda: random_layout(3, (16, 16), (), (70, 70), 0.0),
    "everything": lambda: random_layout(4, (16, 16), (), (128, 128), 2.0),
    "causal": lambda: pattern_layout(SlidingWindow(50, 0), (16, 16)),
    "documents": lambda: pattern_layout(Documents((100, 1, 29, 100)) & SlidingWindow(None, 0), (32, 16)),
}


def expected(layout, group):
    """By list and large row, the word of each key block: from the entries of the layout, one by one."""
    found = {
        (which, row): {} for which in range(layout.num_lists) for row in range(ceil_div(layout.num_q_blocks, group))
    }
    for which, query, key, rule in zip(*(x.tolist() for x in layout.entries()), strict=True):
        words, bit = found[which, query // group], query % group
        words[key] = words.get(key, 0) | 1 << bit | (rule < 0) << 8 + bit
    return found


@pytest.mark.parametrize("large", [64, 128])
@pytest.mark.parametrize("name", LAYOUTS)
def test_united_lists_are_those_of_the_layout(name, large):
    layout = LAYOUTS[name]()
    group = large // layout.block_q
    with patch.dict(united.WORTH, {16: 1e9}), patch.object(united, "SLAB", 2 * layout.num_k_blocks * group):
        rows = united.united_rows(layout, 16, large)
    wanted = expected(layout, group)
    num_large, words = ceil_div(layout.num_q_blocks, group), rows.words.tolist()
    blocks, got = rows.indices.tolist(), {}
    for i, (row, start, split, stop) in enumerate(rows.work.tolist()):
        parts = blocks[start:split], blocks[split:stop]
        assert all(part == sorted(set(part)) for part in parts), "blocks must ascend"
        got[i // num_large, row] = dict(zip(parts[0] + parts[1], words[start:stop], strict=True))
        assert all((word & 255 == word >> 8) == (start + j < split) for j, word in enumerate(words[start:stop]))
    assert got == wanted
    lengths = rows.work[:, 3] - rows.work[:, 1]
    assert (lengths.view(layout.num_lists, -1).diff(dim=1) <= 0).all(), "the longest row comes first"
    assert (rows.own_work[:, 0] == layout.num_q_blocks).all(), "only one of the two may have rows"


def test_rows_are_united_where_it_pays():
    """Equal rows are; rows with nothing in common are not, and the layout's own order of work is taken."""
    for mask, pays in ((torch.ones(8, 8), True), (torch.eye(8), False)):
        layout = BlockLayout.from_block_mask(mask.bool(), 16)
        rows = united.united_rows(layout, 16, 128)
        assert ((rows.work[:, 0] == 0) & pays | (rows.work[:, 0] == 1) & (not pays)).all()
        assert torch.equal(rows.own_work, layout.query_work) != pays


def test_reasons_not_to_unite_rows():
    layout = LAYOUTS["everything"]()
    work = 4 * 64 * 112 * 128  # a row is empty
    with patch.object(united, "LEAST_WORK", work):
        assert united.reason_not_to(layout, 1, 64) is None
        assert "so few blocks" in united.reason_not_to(layout, 1, 32)
    of_128 = BlockLayout.from_pattern(SlidingWindow(50, 0), 256, block_size=128)
    assert "blocks of 16 and 32" in united.reason_not_to(of_128, 1 << 20, 64)
    union = pattern_layout(SlidingWindow(50, 0) | GlobalTokens(20), 16)
    assert "share one interval" in united.reason_not_to(union, 1 << 20, 64)


def test_lists_that_a_layout_keeps_are_made_even_where_launches_are_left_out():
    """To compile ahead, launches are kept back; the interpreter's own kernels do not say where they are from."""
    of_lists, other = (SimpleNamespace(__module__=module.__name__) for module in (united, launch))
    with ahead.collected():
        assert not launcher.keep_back(of_lists, (), (), {})
        with pytest.raises(AttributeError):  # it is taken for one that is to be compiled
            launcher.keep_back(other, (), (), {})
