"""Counting blocks and bytes by arithmetic: equal to what a layout and the backends really hold."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch import (
    BlockLayout,
    Branches,
    Causal,
    DilatedBlocks,
    Documents,
    Full,
    GlobalTokens,
    PerHead,
    RandomBlocks,
    SlidingWindow,
    hierarchical,
)
from dilated_attention_pytorch.backends import blockwise, tiling
from dilated_attention_pytorch.layout import layout_of_branches
from dilated_attention_pytorch.planning import estimate
from dilated_attention_pytorch.planning.estimate import (
    Item,
    ListSize,
    Shape,
    attention_items,
    lists_of_branches,
    peak_of,
)
from tests.strategies import BLOCKS, atoms, documents, lengths, patterns


def facts(size):
    """What must agree; of the rest the plan of a pattern has bounds only."""
    bounds = ("candidates", "intervals", "partial")
    return {name: getattr(size, name) for name in size.__dataclass_fields__ if name not in bounds}


@given(st.data())
def test_the_blocks_of_any_pattern_are_counted_as_they_are_built(data):
    seq_q, seq_k = data.draw(lengths())
    block_size = data.draw(st.sampled_from(BLOCKS))
    packing = data.draw(documents(seq_k))
    per_head = st.lists(atoms(packing), min_size=2, max_size=3).map(lambda heads: PerHead(tuple(heads)))
    pattern = data.draw(patterns(seq_k) | per_head)
    layout = BlockLayout.from_pattern(pattern, seq_q, seq_k, block_size=block_size)
    assert facts(ListSize.of(pattern, seq_q, seq_k, block_size)) == facts(ListSize.of(layout, seq_q, seq_k))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "branches",
    [Branches((2048, 4096, 8192), (1, 2, 4)), Branches((512,), (1,)), Branches((256, 1024), (1, 3), "grouped")],
    ids=str,
)
def test_the_lists_of_dilated_attention_are_bounded_closely(branches, is_causal):
    layout = layout_of_branches(branches, 16384, num_heads=4, is_causal=is_causal)
    planned, built = lists_of_branches(branches, 16384, 4, is_causal), ListSize.of(layout, 16384, 16384)
    exact = ("block_q", "num_q_blocks", "num_k_blocks", "num_lists", "list_heads", "named", "kind", "num_residues")
    assert {name: getattr(planned, name) for name in exact} == {name: getattr(built, name) for name in exact}
    assert built.blocks <= planned.blocks <= 1.7 * built.blocks
    assert built.widest <= planned.widest


LONG = {
    "window": SlidingWindow(1000, 0),
    "first queries see all": SlidingWindow(100, 100) | GlobalTokens(200, queries=True),
    "causal": Causal(),
    "dilated": DilatedBlocks((2048, 8192), (1, 4), 0.02, 32),
    "dilated, causal": DilatedBlocks((2048, 65536), (1, 4), 0.05, 32, True) & Causal(),
    "random | window": RandomBlocks(7, block_size=32) | SlidingWindow(300, 300),
    "hierarchical": hierarchical(((1, 512), (4, 4096), (16, 32768)), block_size=32),
    "documents": Documents((1000, 40000, 24536)),
}


@pytest.mark.parametrize("name", LONG)
def test_long_sequences_are_sampled_and_counted_within_two_percent(name):
    layout = BlockLayout.from_pattern(LONG[name], 65536, block_size=32)
    assert ListSize.of(LONG[name], 65536, 65536, 32).blocks == pytest.approx(layout.num_active_blocks, rel=0.02)


@pytest.mark.parametrize("pattern", [SlidingWindow(9, 9), PerHead((RandomBlocks(2), Full())), Documents((100, 200))])
def test_bytes_of_lists_are_those_of_the_tensors(pattern):
    layout = BlockLayout.from_pattern(pattern, 300, block_size=16)
    size = ListSize.of(pattern, 300, 300, 16)
    tensors, _ = layout.flatten(by_key=True)
    by_query, (rules, spans, _, work), by_key = tensors[:4], tensors[4:8], tensors[8:]
    assert size.by(size.rows, work_order=True) == sum(x.nbytes for x in (*by_query, work))
    assert size.by(size.columns, work_order=True) == sum(x.nbytes for x in by_key)
    assert size.documents * 8 == spans.nbytes
    assert rules.nbytes <= size.rules < 4096 + spans.nbytes


@pytest.mark.parametrize(
    "name",
    ["PIECE", "TILE_SCORES", "RANGE_COPIED", "RANGE_DIRECT", "SHARED_OUT", "HEADS_A_COPY", "REUSE", "ACCELERATOR"],
)
def test_the_planner_cuts_work_as_the_backend_does(name):
    assert getattr(estimate, name) == getattr(tiling, name)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("pattern", "heads_kv"),
    [(RandomBlocks(2, block_size=32), 4), (RandomBlocks(40, block_size=32), 2), (SlidingWindow(500, 0), 4)],
    ids=["direct", "copied", "window"],
)
def test_scratch_memory_is_what_the_backend_asks_for(monkeypatch, pattern, heads_kv, dtype, training):
    """The named buffers of a real call, added up, against the arithmetic (which also counts masks and plans)."""
    asked: dict[int, dict[str, int]] = {}
    call = blockwise.Scratch.__call__

    def watched(self, name, *shape):
        given = call(self, name, *shape)
        held = asked.setdefault(id(self), {})
        held[name] = max(held.get(name, 0), given.numel() * given.element_size())
        watching.append(self)
        return given

    watching: list[object] = []
    monkeypatch.setattr(blockwise.Scratch, "__call__", watched)
    from dilated_attention_pytorch import block_sparse_attention

    seq = 4000
    q, k, v = (torch.ones(1, seq, h, 16, dtype=dtype, requires_grad=training) for h in (4, heads_kv, heads_kv))
    out = block_sparse_attention(q, k, v, pattern)
    if training:
        asked.clear()
        out.sum().backward()
    named = sum(bytes for held in asked.values() for bytes in held.values())
    shape = Shape(batch=1, seq_q=seq, seq_k=seq, heads=4, heads_kv=heads_kv, head_dim=16, dtype=dtype)
    block = min(pattern.block_sizes, default=128)
    items = attention_items(
        shape, ListSize.of(pattern, seq, seq, block), backend="blockwise", device="cpu", training=training, threads=1
    )
    phase = "backward" if training else "forward"
    (workspace,) = (item.bytes for item in items if item.name == "blockwise workspace" and phase in item.phases)
    assert 0.65 * workspace <= named <= 1.05 * workspace


def test_the_peak_is_the_fullest_phase():
    items = [
        Item("a", "tensors", 5, ("layout", "forward")),
        Item("b", "workspace", 9, ("layout",)),
        Item("c", "gradients", 7, ("forward", "backward")),
    ]
    assert peak_of(items) == {"layout": 14, "forward": 12, "backward": 7}
