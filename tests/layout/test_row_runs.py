"""Layouts of parts in closed form are those that are cut out of the whole, and find the blocks that it touches."""

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from dilated_attention_pytorch import BlockLayout
from dilated_attention_pytorch.layout.row_runs import RowRuns
from tests import strategies

SEQ = 200


@st.composite
def parts(draw):
    """A pattern of tokens, lengths, and some rows and runs of columns of its blocks."""
    seq_q, seq_k = draw(st.integers(1, SEQ)), draw(st.integers(1, SEQ))
    block = draw(st.sampled_from([16, 32]))
    pattern = draw(strategies.patterns(seq_k))
    num_q, num_k = -(-seq_q // block), -(-seq_k // block)
    rows = sorted(draw(st.sets(st.integers(0, num_q - 1), min_size=1)))
    columns = sorted(draw(st.sets(st.integers(0, num_k - 1), min_size=1)))
    return pattern, (seq_q, seq_k), block, torch.tensor(rows), torch.tensor(columns)


def runs_of(numbers):
    cut = torch.cat((torch.tensor([True]), numbers.diff() > 1))
    start = numbers[cut]
    return torch.stack((start, numbers[torch.cat((cut[1:], torch.tensor([True])))] + 1), dim=1)


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(part=parts())
def test_any_part(part):
    pattern, lengths, block, rows, columns = part
    runs = RowRuns.of(pattern, lengths, (block, block))
    assume(runs is not None)
    some = runs.take(rows)
    layout = some.layout(runs_of(columns), some.key_bounds(torch.device("cpu")), {})
    whole = BlockLayout.from_pattern(pattern, *lengths, block_size=block)
    old = whole.take(rows, columns)
    assert layout.lengths == old.lengths
    assert torch.equal(layout.to_dense(), old.to_dense())
    assert torch.equal(layout.to_block_mask(), old.to_block_mask())
    checked = BlockLayout(  # the constructor refuses lists that are not in order, or rules that are not there
        **{name: getattr(layout, name) for name in ("seq_q", "seq_k", "block_q", "block_k", "rules", "documents")},
        by_query=layout.by_query,
    )
    assert (checked.entries()[3] >= 0).sum() == (old.entries()[3] >= 0).sum()
    of_row = (torch.arange(len(runs.query_blocks)) // 3).clamp(max=2)
    mask = whole.to_block_mask()
    expected = [runs_of(found) for n in of_row.unique() if len(found := mask[of_row == n].any(0).nonzero().flatten())]
    assert torch.equal(runs.unions(of_row)[:, 1:], torch.cat(expected) if expected else torch.zeros(0, 2).long())
