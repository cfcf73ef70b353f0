# ruff: noqa: E501 - a case is a line
"""Layouts: both orientations, what they refuse, what they cost, and that building one stays small."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dilated_attention_pytorch import (
    BlockLayout,
    Causal,
    DilatedBlocks,
    Documents,
    Full,
    GlobalBlocks,
    GlobalTokens,
    LocalBlocks,
    PerHead,
    RandomBlocks,
    SlidingWindow,
)
from dilated_attention_pytorch.layout import BlockList, clear_layout_cache, layout_for, pattern_cache
from dilated_attention_pytorch.layout.terms import MAX_INTERVALS, terms_of
from tests.strategies import layouts, lengths, patterns, windows


@st.composite
def any_layout(draw):
    seq_q, seq_k = draw(lengths())
    layout = draw(layouts(seq_q, seq_k, batch=2, heads=4, heads_kv=2))
    return layout.causal if draw(st.booleans()) else layout


def rows_of(lists):
    """Every row as (full blocks, partial blocks), plain Python."""
    edges = zip(lists.offsets.tolist(), lists.splits.tolist(), lists.offsets.tolist()[1:], strict=False)
    return [(lists.indices[a:b].tolist(), lists.indices[b:c].tolist()) for a, b, c in edges]


@given(any_layout())
@settings(max_examples=150)
def test_rows_are_sorted_and_full_means_full(layout):
    dense = layout.to_dense().reshape(layout.num_lists, layout.seq_q, layout.seq_k)
    # What ranges and bitmaps allow in a block may all be later keys: `causal` does not look.
    may_be_empty = layout.documents.numel() > 0 or len(layout.bitmaps) > 0
    for row, (full, partial) in enumerate(rows_of(layout.by_query)):
        which, i = divmod(row, layout.num_q_blocks)
        assert full == sorted(set(full))
        assert partial == sorted(set(partial))
        assert not set(full) & set(partial)
        queries = slice(i * layout.block_q, (i + 1) * layout.block_q)
        for j in full + partial:
            cell = dense[which, queries, j * layout.block_k : (j + 1) * layout.block_k]
            assert cell.any() or may_be_empty
            whole = bool(cell.all()) and cell.shape[1] == layout.block_k
            assert whole if j in full else True
    assert layout.num_active_blocks == sum(len(f) + len(p) for f, p in rows_of(layout.by_query))


@pytest.mark.parametrize("at_once", [1 << 20, 7])
def test_by_key_holds_the_same_blocks(at_once, monkeypatch):
    """Sorted whole, and a few rows at a time as large layouts are."""
    monkeypatch.setattr("dilated_attention_pytorch.layout.derived.SORTED_AT_ONCE", at_once)

    @given(any_layout())
    @settings(max_examples=75)
    def check(layout):
        check_by_key(layout)

    check()


def check_by_key(layout):
    by_query = {
        (row // layout.num_q_blocks, row % layout.num_q_blocks, j, j in full)
        for row, (full, partial) in enumerate(rows_of(layout.by_query))
        for j in full + partial
    }
    by_key = {
        (row // layout.num_k_blocks, i, row % layout.num_k_blocks, i in full)
        for row, (full, partial) in enumerate(rows_of(layout.by_key))
        for i in full + partial
    }
    assert by_query == by_key
    for full, partial in rows_of(layout.by_key):
        assert full == sorted(full)
        assert partial == sorted(partial)
    if layout.by_query.rule_ids.numel():
        _, query_block, key_block, rule = layout.entries()
        rules = {(int(i), int(j)): int(r) for i, j, r in zip(query_block, key_block, rule, strict=True) if r >= 0}
        lists = layout.by_key
        for row in range(lists.num_rows):
            for place in range(int(lists.splits[row]), int(lists.offsets[row + 1])):
                if layout.num_lists == 1:
                    key = (int(lists.indices[place]), row)
                    assert rules[key] == int(lists.rule_ids[place])


@given(any_layout())
@settings(max_examples=100)
def test_causal_is_the_pattern_and_causal(layout):
    positions = torch.arange(layout.seq_q)[:, None] + (layout.seq_k - layout.seq_q)
    allowed = torch.arange(layout.seq_k) <= positions
    assert torch.equal(layout.causal.to_dense(), layout.to_dense() & allowed)
    assert layout.causal is layout.causal


@given(any_layout())
@settings(max_examples=100)
def test_the_constructor_accepts_what_the_builders_make(layout):
    again = replace(layout, kind=None, checked=False)
    assert torch.equal(again.to_dense(), layout.to_dense())


@given(st.data())
def test_block_masks_go_there_and_back(data):
    shape = data.draw(st.sampled_from([(5, 7), (3, 5, 7), (2, 3, 5, 7)]))
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))) < 0.4
    layout = BlockLayout.from_block_mask(mask, (32, 16), seq_q=129, seq_k=98)
    assert torch.equal(layout.to_block_mask(), mask)
    whole = mask.repeat_interleave(32, -2).repeat_interleave(16, -1)[..., :129, :98]
    assert torch.equal(layout.to_dense(), whole)
    assert layout.density == pytest.approx(whole.float().mean().item(), abs=1e-6)
    assert layout.block_density == pytest.approx(mask.float().mean().item(), abs=1e-6)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_kind_is_what_a_pattern_is_for_these_lengths(data):
    """Where it is said it is so; a window or global tokens that reach over everything are found."""
    seq_q, seq_k = data.draw(lengths(60))
    pattern = data.draw(patterns(seq_k) | windows() | st.builds(GlobalTokens, st.integers(1, 70), st.booleans()))
    layout = BlockLayout.from_pattern(pattern, seq_q, seq_k, block_size=(32, 32))
    seen = layout.to_dense()
    causal = BlockLayout.from_pattern(Causal(), seq_q, seq_k, block_size=(32, 32)).to_dense()
    assert layout.kind != "full" or seen.all()
    assert layout.kind != "causal" or (seen == causal).all()
    if isinstance(pattern, SlidingWindow | GlobalTokens) and not getattr(pattern, "at", ()) and seq_q > 1:
        assert (layout.kind == "full") == bool(seen.all())
    wide = pattern & Causal() | SlidingWindow(data.draw(st.integers(seq_k - 1, 200)), 0)
    if len(terms_of(wide)) <= MAX_INTERVALS:
        assert BlockLayout.from_pattern(wide, seq_q, seq_k, block_size=32).kind in ("causal", "full")


def test_kind_of_known_patterns():
    def kind(pattern):
        return BlockLayout.from_pattern(pattern, 50, block_size=16).kind

    assert kind(Full()) == "full"
    assert kind(Causal()) == kind(Full() & Causal()) == kind(PerHead((Causal(), Causal()))) == "causal"
    for other in (SlidingWindow(48, 0), GlobalTokens(49), PerHead((Full(), Causal())), Documents((50,))):
        assert kind(other) is None
    assert kind(GlobalTokens(50)) == "full"
    assert kind(SlidingWindow(49, 0)) == kind(SlidingWindow(49, 0) | GlobalTokens(4) & Causal()) == "causal"
    assert BlockLayout.from_block_mask(torch.ones(3, 3, dtype=torch.bool), 16).causal.kind == "causal"


def test_the_repr_says_how_many_blocks_are_kept():
    layout = BlockLayout.from_pattern(LocalBlocks(16, block_size=16, causal=True), 64, block_size=16)
    assert "43.8% of the blocks" in repr(layout)  # 7 of 16
    tensors, sizes = layout.flatten()
    assert "of the blocks" not in repr(BlockLayout.unflatten([x.to("meta") for x in tensors], sizes))


def test_lists_use_int32_and_full_blocks_need_no_rules():
    layout = BlockLayout.from_pattern(RandomBlocks(3, block_size=64), 4096, block_size=64)
    assert {t.dtype for t in (*layout.by_query.tensors(), *layout.by_key.tensors(), layout.rules)} == {torch.int32}
    assert torch.equal(layout.by_query.splits, layout.by_query.offsets[1:])
    assert layout.by_query.rule_ids.numel() == 0


def test_a_window_has_partial_blocks_at_its_edges_only():
    layout = BlockLayout.from_pattern(SlidingWindow(64, 0), 16 * 32, block_size=16)
    assert rows_of(layout.by_query)[10] == ([7, 8, 9], [6, 10])


def test_finer_layouts_of_a_block_pattern_are_the_same_mask():
    pattern = LocalBlocks(200, 2, 64) | RandomBlocks(1, 5, 64)
    want = BlockLayout.from_pattern(pattern, 300, block_size=64).to_dense()
    for block in (16, 32, (64, 16), (16, 64)):
        assert torch.equal(BlockLayout.from_pattern(pattern, 300, block_size=block).to_dense(), want)


def parts():
    return {
        "seq_q": 48, "seq_k": 40, "block_q": 16, "block_k": 16, "rules": torch.zeros(1, 1, 5, dtype=torch.int32),
        "by_query": lists([0, 2, 2, 4], [1, 2, 4], [0, 2, 0, 1]),
    }  # fmt: skip


def lists(offsets, splits, indices, rule_ids=()):
    return BlockList(*(torch.tensor(x, dtype=torch.int32) for x in (offsets, splits, indices, rule_ids)))


INVALID = {
    "index too large": ({"by_query": lists([0, 2, 2, 4], [1, 2, 4], [0, 3, 0, 1])}, "indices must be key blocks from 0 to 2, got 0 to 3"),
    "index negative": ({"by_query": lists([0, 2, 2, 4], [1, 2, 4], [-1, 2, 0, 1])}, "indices must be key blocks from 0 to 2, got -1 to 2"),
    "unsorted": ({"by_query": lists([0, 2, 2, 4], [1, 2, 4], [0, 2, 1, 0])}, "indices must ascend in every row"),
    "twice": ({"by_query": lists([0, 2, 2, 4], [1, 2, 4], [0, 2, 1, 1])}, "none twice"),
    "full and partial": ({"by_query": lists([0, 2, 2, 4], [1, 2, 4], [1, 1, 0, 1])}, "once, as full or as partial"),
    "full beyond the end": ({"by_query": lists([0, 2, 2, 4], [2, 2, 4], [0, 2, 0, 1])}, "reaches beyond seq_k = 40 must be partial"),
    "offsets descend": ({"by_query": lists([0, 2, 1, 4], [1, 2, 4], [0, 2, 0, 1])}, "offsets and splits must ascend"),
    "split outside its row": ({"by_query": lists([0, 2, 2, 4], [3, 2, 4], [0, 2, 0, 1])}, "offsets and splits must ascend"),
    "offsets beyond": ({"by_query": lists([0, 2, 2, 9], [1, 2, 4], [0, 2, 0, 1])}, "to at most 4, the number of indices"),
    "offsets too short": ({"by_query": lists([0, 2, 4], [1, 2, 4], [0, 2, 0, 1])}, r"offsets must have shape \[4\], got \[3\]"),
    "splits too long": ({"by_query": lists([0, 2, 2, 4], [1, 2, 4, 4], [0, 2, 0, 1])}, r"splits must have shape \[3\], got \[4\]"),
    "no such rule": ({"by_query": lists([0, 2, 2, 4], [1, 2, 4], [0, 2, 0, 1], [0, 1, 0, 0])}, "rule_ids must be rules from 0 to 0, got 1"),
    "too few rules named": ({"by_query": lists([0, 2, 2, 4], [1, 2, 4], [0, 2, 0, 1], [0])}, "rule_ids must name a rule for each of 4 blocks, got 1"),
    "rules of another shape": ({"rules": torch.zeros(1, 5, dtype=torch.int32)}, r"rules must have shape \[rules, intervals, 5\], got \[1, 5\]"),
    "documents of another length": ({"documents": torch.zeros(2, 7, dtype=torch.int32)}, "documents must have shape"),
    "strided": ({"documents": torch.zeros(48, 2, dtype=torch.int32).T}, r"documents must be contiguous, as kernels read it, got strides \[1, 2\]"),
    "wrong dtype": ({"rules": torch.zeros(1, 1, 5)}, "rules must be int32, got torch.float32"),
    "wrong device": ({"rules": torch.zeros(1, 1, 5, dtype=torch.int32, device="meta")}, "rules must be on the device of indices, cpu, got meta"),
    "block size": ({"block_q": 20}, r"block_size must be one of \(16, 32, 64, 128, 256\), got 20"),
    "another length": ({"seq_q": 64}, r"offsets must have shape \[5\], got \[4\]"),
    "another number of heads": ({"num_heads": 2}, r"offsets must have shape \[7\], got \[4\]"),
}  # fmt: skip


def test_a_valid_layout_can_be_constructed_by_hand():
    layout = BlockLayout(**parts())
    assert layout.to_block_mask().tolist() == [[True, False, True], [False] * 3, [True, True, False]]


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_layout_cannot_be_constructed(name):
    changes, message = INVALID[name]
    with pytest.raises((ValueError, TypeError), match=message):
        BlockLayout(**{**parts(), **changes})


def test_cost_of_a_literal_layout():
    layout = BlockLayout.from_pattern(Causal(), 32, block_size=16)
    cost = layout.cost(batch=2, heads=3, head_dim=8, itemsize=4)
    assert cost.pairs == 6 * (32 * 33 // 2)
    assert cost.block_pairs == 6 * 3 * 16 * 16
    assert cost.forward_flops == 4 * 8 * cost.pairs
    assert cost.backward_flops == 10 * 8 * cost.pairs
    lists_bytes = 4 * (3 + 2 + 3)
    tensor = 2 * 32 * 3 * 8 * 4
    assert cost.forward_bytes == 4 * tensor + 2 * 3 * 32 * 4 + lists_bytes
    assert cost.backward_bytes == 8 * tensor + 2 * 3 * 32 * 4 + 2 * lists_bytes
    wide = layout.cost(batch=2, heads=3, head_dim=8, head_dim_v=24, itemsize=4)  # v and out three times as wide
    assert wide.forward_flops == 2 * (8 + 24) * cost.pairs
    assert wide.backward_flops == 2 * (3 * 8 + 2 * 24) * cost.pairs  # q, k, dq, dk, and v and dv
    assert wide.forward_bytes == (2 + 2 * 3) * tensor + 2 * 3 * 32 * 4 + lists_bytes
    assert wide.backward_bytes == (4 + 4 * 3) * tensor + 2 * 3 * 32 * 4 + 2 * lists_bytes


def test_the_cache_remembers_and_is_bounded():
    clear_layout_cache()
    device = torch.device("cpu")
    first = layout_for(Causal(), 64, 64, 16, device)
    assert layout_for(SlidingWindow(None, 0), 64, 64, 16, device) is first
    for length in range(1, 200):
        layout_for(Causal(), length, length, 16, device)
    assert len(pattern_cache()) == 100
    assert layout_for(Causal(), 64, 64, 16, device) is not first
    clear_layout_cache()
    assert len(pattern_cache()) == 0


HUGE = """
import time, torch
from dilated_attention_pytorch import BlockLayout, RandomBlocks
from dilated_attention_pytorch.memory import measure_peak
BlockLayout.from_pattern(RandomBlocks(20), 2**20, block_size=128).by_key
with measure_peak() as peak:
    start = time.perf_counter()
    layout = BlockLayout.from_pattern(RandomBlocks(20), 2**25, block_size=128)
    layout.by_key
    seconds = time.perf_counter() - start
own = sum(t.numel() * t.element_size() for t in layout.by_query.tensors() + layout.by_key.tensors())
assert layout.num_active_blocks == 20 * 2**18, layout.num_active_blocks
assert own < 48e6, own
assert peak.peak_bytes < 4 * own, (peak.peak_bytes, own)
print(seconds)
"""


def test_32m_tokens_in_a_few_times_its_own_size():
    """The matrix of blocks would have 68 billion entries; the layout has 5 million, in 46 MB."""
    # A fixed threshold makes malloc return freed tensors at once: what is measured is what is held.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576"}
    run = subprocess.run(
        [sys.executable, "-c", HUGE], capture_output=True, text=True, timeout=300, check=False, env=env
    )
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 60


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_lists_made_in_a_graph(backend):
    """The lists by key and the order of work, made while a graph runs, are those made outside."""
    torch._dynamo.reset()
    pattern = RandomBlocks(3, block_size=16) | SlidingWindow(5, 5)
    inside, outside = (BlockLayout.from_pattern(pattern, 150, block_size=16) for _ in range(2))

    def lists(x):
        tensors, _ = inside.causal.flatten(by_key=True)
        return x + 1, [tensor.clone() for tensor in tensors]

    _, got = torch.compile(lists, fullgraph=True, backend=backend)(torch.zeros(1))
    want, _ = outside.causal.flatten(by_key=True)
    used = int(want[0][-1])
    for i, (mine, other) in enumerate(zip(got, want, strict=True)):
        spare = i in (2, 3, 11, 12)  # lists of entries may have spare places in a graph
        assert torch.equal(mine[:used] if spare else mine, other)


def test_work_is_ordered_longest_first():
    mask = (
        torch.tensor([[[1, 0, 0], [1, 1, 1], [0, 0, 0], [1, 1, 0]], [[0, 0, 0], [1, 0, 0], [1, 0, 0], [1, 1, 0]]]) > 0
    )
    layout = BlockLayout.from_block_mask(mask, 16, seq_k=40)  # the last block is partial
    assert layout.query_work.tolist() == [
        [1, 1, 3, 4], [3, 4, 6, 6], [0, 0, 1, 1], [2, 4, 4, 4],
        [3, 8, 10, 10], [1, 6, 7, 7], [2, 7, 8, 8], [0, 6, 6, 6],
    ]  # fmt: skip
    tensors, sizes = layout.flatten(by_key=True)
    again = BlockLayout.unflatten(tensors, sizes)
    assert again.key_work is layout.key_work
    assert again.by_key.indices is layout.by_key.indices


def test_rows_near_each_other_stay_together_in_long_lists(monkeypatch):
    monkeypatch.setattr("dilated_attention_pytorch.layout.lists.NEAR", 4)
    lengths = [1, 3, 0, 1, 2, 4, 1, 0, 4, 0, 3]  # neighbourhoods of four rows; their longest have 3, 4 and 4 blocks
    mask = torch.arange(4) < torch.tensor(lengths)[:, None]
    work = BlockLayout.from_block_mask(mask, 16).query_work
    assert work[:, 0].tolist() == [5, 4, 6, 7, 8, 10, 9, 1, 0, 3, 2]
    assert (work[:, 3] - work[:, 1]).tolist() == [lengths[row] for row in work[:, 0].tolist()]
    # Two residue classes: rows 0 and 6 are neighbours, and so are 1 and 7.
    lengths = [1, 3, 0, 1, 2, 4, 1, 0, 4, 0, 3, 2]
    mask = torch.arange(4) < torch.tensor(lengths)[:, None]
    by_residue = BlockLayout.from_block_mask(mask, 16).by_query.work(1, num_residues=2)
    assert by_residue[:, 0].tolist() == [8, 3, 2, 9, 5, 10, 4, 11, 1, 0, 6, 7]


def test_a_row_of_very_many_blocks_comes_first():
    """Here rows of a list times neighbourhoods are beyond 32 bits."""
    lengths = torch.ones(2**20, dtype=torch.int32)
    lengths[-1] = 2**20
    stop = lengths.cumsum(0, dtype=torch.int32)
    lists = BlockList(torch.cat((stop[:1] * 0, stop)), stop - lengths, stop[:0], stop[:0])
    work = lists.work(1)
    assert work[0].tolist() == [2**20 - 1, 2**20 - 1, 2**20 - 1, 2**21 - 1]
    assert work[1:256, 0].tolist() == list(range(2**20 - 256, 2**20 - 1))
    assert work[256:, 0].tolist() == list(range(2**20 - 256))


class DeviceOperations(TorchDispatchMode):
    """Counts the operations that have to do with a device other than the CPU."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        devices = {x.device.type for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)}
        self.count += bool(devices - {"cpu"}) and not function.is_view
        return result


# A launch costs the host some 15 µs; 1M tokens are attended to in 13 ms, and a layout may take a twentieth of that.
ON_A_DEVICE = {
    "window": (SlidingWindow(1279, 1279), 11),
    "causal": (Causal(), 11),
    "documents": (Documents((60000, 6536)) & SlidingWindow(1279, 0), 22),
    "random": (RandomBlocks(20), 20),
    "dilated": (DilatedBlocks((4096, 16384, 65536), (1, 4, 16), 20 / 512), 30),
    "local": (LocalBlocks(2560, 2), 13),
    "global": (GlobalBlocks(300), 10),
    "cut off": (RandomBlocks(20), 51),
    "heads": (PerHead((SlidingWindow(9, 9), RandomBlocks(3))), 81),
}  # fmt: skip


@pytest.mark.parametrize("name", ON_A_DEVICE)
def test_the_default_device_is_not_asked(name):
    pattern, seq = ON_A_DEVICE[name][0], 66536 if name == "documents" else 65536
    want = BlockLayout.from_pattern(pattern, seq, block_size=128)
    with torch.device("meta"):
        got = BlockLayout.from_pattern(pattern, seq, block_size=128, device="cpu")
    for mine, its in zip(got.by_query.tensors(), want.by_query.tensors(), strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("name", ON_A_DEVICE)
def test_a_device_is_not_waited_for(name):
    """The meta device has no numbers to wait for: whoever asks for one gets an error."""
    pattern, most = ON_A_DEVICE[name]
    tokens = 2**16 + {"documents": 1000, "cut off": -5}.get(name, 0)
    with DeviceOperations() as operations:
        layout = BlockLayout.from_pattern(pattern, tokens, block_size=128, device="meta")
    assert operations.count <= most
    want = BlockLayout.from_pattern(pattern, tokens, block_size=128)
    for made, other in zip(layout.flatten(by_key=True)[0], want.flatten(by_key=True)[0], strict=True):
        assert (made.device.type, made.shape, made.dtype) == ("meta", other.shape, other.dtype)
    assert layout.causal.flatten(by_key=True)[0][0].shape == want.causal.by_query.offsets.shape


def test_a_pickle_of_an_older_version_is_read():
    """What is made of the lists was kept under another name then: `by_key` raised AttributeError after loading."""
    layout = BlockLayout.from_pattern(SlidingWindow(40, 3), 200, block_size=16)
    state = layout.__getstate__()
    state["_made"] = state.pop("_derived")
    del state["call_cache"]
    older = object.__new__(BlockLayout)
    older.__setstate__(state)
    for old, new in zip(older.flatten(by_key=True)[0], layout.flatten(by_key=True)[0], strict=True):
        assert torch.equal(old, new)
    assert vars(older).keys() == vars(layout).keys()
