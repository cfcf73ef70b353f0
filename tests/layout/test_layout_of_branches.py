"""The blocks of dilated attention count every pair as often as the branches do."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention_pytorch import BlockLayout, Branches
from dilated_attention_pytorch.layout import branches as module
from dilated_attention_pytorch.layout import layout_of_branches
from tests.strategies import branches, lengths


def counted(which, heads, seq_q, seq_k, is_causal):
    """One pair at a time."""
    found = torch.zeros(heads, seq_q, seq_k, dtype=torch.int32)
    for head in range(heads):
        for i in range(seq_q):
            position = i + seq_k - seq_q
            for j in range(seq_k):
                if position >= 0 and not (is_causal and j > position):
                    found[head, i, j] = which.times(position, j, head, heads)
    return found


@given(st.data())
@settings(max_examples=60)
def test_every_pair(data):
    seq_q, seq_k = data.draw(lengths(60))
    which, heads, is_causal = data.draw(branches(60)), data.draw(st.integers(1, 4)), data.draw(st.booleans())
    options = data.draw(
        st.sampled_from([{}, {"block_size": 16}, {"block_size": 16, "num_residues": 3}, {"num_residues": 4}])
    )
    layout = layout_of_branches(which, seq_q, seq_k, num_heads=heads, is_causal=is_causal, **options)
    dense = layout.to_dense().expand(heads, -1, -1)
    assert torch.equal(dense, counted(which, heads, seq_q, seq_k, is_causal))
    # What a backend may skip: blocks that are even and full are so in every pair.
    _, _, _, rule = layout.entries()
    times = layout.by_query.rule_ids[: len(rule)]
    assert (times[rule < 0] > 0).all()
    assert layout.has_mixed_blocks == bool((times == 0).any())


def test_longnet_reads_a_key_once():
    """[2048, 4096, 8192] × [1, 2, 4] has 3,584 keys a query, 2,816 of them different; every block is even."""
    layout = layout_of_branches(Branches((2048, 4096, 8192), (1, 2, 4)), 16384, num_heads=8)
    assert (layout.num_residues, layout.block_q, layout.has_mixed_blocks) == (4, 128, False)
    assert layout.num_active_blocks * 128 * 128 == 8 * 16384 * 2816
    assert int(layout.by_query.rule_ids.long().sum()) * 128 * 128 == 8 * 16384 * 3584


def test_heads_alike_share_a_list():
    layout = layout_of_branches(Branches((64, 128), (1, 1)), 256, num_heads=8)
    assert layout.num_heads is None
    assert len(layout.branches) == 1


def test_a_file_of_an_older_version():
    """`classes` and `uneven` are what older files call them: unnoticed, all tokens would be one residue class."""
    options = {"num_heads": 3, "block_size": 16, "num_residues": 3}
    layout = layout_of_branches(Branches((33, 70), (1, 3)), 100, **options)
    assert layout.has_mixed_blocks
    older = {"num_residues": "classes", "has_mixed_blocks": "uneven"}
    state = {older.get(name, name): value for name, value in layout.__getstate__().items()}
    again = BlockLayout.__new__(BlockLayout)
    again.__setstate__(state)
    assert (again.num_residues, again.has_mixed_blocks) == (3, True)
    assert torch.equal(again.to_dense(), layout.to_dense())


def test_moves_and_flattens():
    layout = layout_of_branches(Branches((33, 70), (1, 3)), 100, num_heads=3, block_size=16)
    tensors, sizes = layout.flatten(work_order=True, by_key=True)
    (again,) = type(layout).unflatten_all(tensors, sizes)
    assert torch.equal(again.to_dense(), layout.to_dense())
    assert again.has_mixed_blocks == layout.has_mixed_blocks
    first, second = type(layout).unflatten_all([*tensors, *layout.flatten()[0]], [*sizes, *layout.flatten()[1]])
    assert torch.equal(second.to_dense(), first.to_dense())


@given(st.data())
@settings(max_examples=30)
def test_density_and_chunks(data):
    """Pairs that count at all ÷ all pairs; the same layout however few candidates are looked at together."""
    seq_q, seq_k = data.draw(lengths(60))
    options = {"num_heads": 3, "is_causal": data.draw(st.booleans()), "block_size": 16}
    options["num_residues"] = data.draw(st.sampled_from([1, 2, 6]))
    which = data.draw(branches(60))
    layout = layout_of_branches(which, seq_q, seq_k, **options)
    assert abs(layout.density - float((layout.to_dense() > 0).double().mean())) < 1e-12
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", 8)
        for got, want in zip(
            layout_of_branches(which, seq_q, seq_k, **options).flatten()[0], layout.flatten()[0], strict=True
        ):
            assert torch.equal(got, want)


def test_causal_is_asked_for_when_it_is_built():
    with pytest.raises(ValueError, match="layout_of_branches\\(is_causal=True\\)"):
        _ = layout_of_branches(Branches((8, 32), (1, 2)), 64, num_heads=2).causal


@pytest.mark.parametrize("options", [{"block_size": 0}, {"num_residues": 0}])
def test_bad_sizes(options):
    with pytest.raises(ValueError, match=r"block_size|num_residues"):
        layout_of_branches(Branches((8,), (1,)), 64, num_heads=1, **options)
