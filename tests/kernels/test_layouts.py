"""Lists that are made in closed form are those of `layout.build`, in both orientations, and so is the order of work."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="needs triton, which there is for Linux alone")
if torch.cuda.is_available():
    pytest.skip("needs a machine without a CUDA device, where kernels are interpreted", allow_module_level=True)

from dilated_attention_pytorch import (
    BlockLayout,
    Causal,
    Chunks,
    Documents,
    Full,
    GlobalTokens,
    LocalBlocks,
    PerHead,
    SlidingWindow,
)
from dilated_attention_pytorch.layout import PersistentPatternCache, closed_form
from dilated_attention_pytorch.layout.cache import load_layout
from dilated_attention_pytorch.layout.closed_form import most_blocks
from dilated_attention_pytorch.layout.terms import MAX_INTERVALS, terms_of, written
from tests.strategies import BLOCKS, documents, ranges, windows


def assert_same(pattern, lengths, blocks):
    """The part of spare places apart, which `layout.build` has none of."""
    want = BlockLayout.from_pattern(pattern, *lengths, block_size=blocks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(closed_form, "DEVICES", ("cpu",))
        got = BlockLayout.from_pattern(pattern, *lengths, block_size=blocks)
        assert "closed_form" in got._derived
        got.order(by_key=True)
    num = len(want.by_query.indices)
    assert len(got.by_query.indices) >= num
    for mine, theirs in ((got.by_query, want.by_query), (got.by_key, want.by_key)):
        assert torch.equal(mine.offsets, theirs.offsets)
        assert torch.equal(mine.splits, theirs.splits)
        assert torch.equal(mine.indices[:num], theirs.indices)
        assert torch.equal(mine.rule_ids[:num], theirs.rule_ids)
    for name in ("rules", "documents", "query_work", "key_work", "seen_by"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert "closed_form" not in got._derived
    assert (got.kind, got.num_heads) == (want.kind, want.num_heads)


@st.composite
def token_rules(draw, packing):
    """Unions and intersections of rules of single tokens, all of which are intervals of keys."""
    atoms = st.one_of(
        st.just(Full()), st.just(Causal()), windows(), ranges(packing), st.just(packing),
        st.builds(GlobalTokens, st.integers(1, 50), st.booleans()),
    )  # fmt: skip
    pattern = draw(atoms)
    for _ in range(draw(st.integers(0, 3))):
        other = draw(atoms)
        joined = pattern & other if draw(st.booleans()) else pattern | other
        pattern = joined if len(terms_of(joined)) <= MAX_INTERVALS else pattern
    return pattern


@st.composite
def calls(draw, most):
    seq_k = draw(st.integers(1, most))
    packing = draw(documents(seq_k))
    heads = [draw(token_rules(packing)) for _ in range(draw(st.sampled_from([1, 1, 1, 3])))]
    pattern = heads[0] if len(heads) == 1 else PerHead((*heads, heads[0]))
    assume(written(pattern).closed)
    return pattern, (draw(st.just(seq_k) | st.integers(1, most)), seq_k), draw(st.sampled_from(BLOCKS))


@pytest.mark.slow
@given(calls(most=150))
@settings(max_examples=30)
def test_generated(call):
    assert_same(*call)


FEW = {
    "window": SlidingWindow(20, 3),
    "window and global tokens": SlidingWindow(20, 0) | GlobalTokens(5, queries=True),
    "documents": Documents((30, 1, 39, 30)) & Causal(),
    "by head": PerHead((Causal(), SlidingWindow(20, 3) | GlobalTokens(at=(7, 50)), Causal(), Chunks(30) & Causal())),
}


@pytest.mark.parametrize("name", FEW)
def test_some(name):
    assert_same(FEW[name], (100, 100), 16)


@pytest.mark.slow
def test_more_than_one_neighbourhood():
    """257 rows and 513 columns: the order of work goes by neighbourhoods."""
    assert_same(PerHead((SlidingWindow(90, 0) | GlobalTokens(20), SlidingWindow(33, -9))), (4100, 8200), 16)


@given(calls(most=3000))
@settings(max_examples=300)
def test_there_is_room_for_all_blocks(call):
    """Without the kernels, so that lengths may be longer."""
    pattern, lengths, blocks = call
    for head in getattr(pattern, "patterns", (pattern,)):
        layout = BlockLayout.from_pattern(head, *lengths, block_size=blocks)
        assert most_blocks([terms_of(head)], lengths, blocks)[0] >= len(layout.by_query.indices)


def test_room_is_no_larger_than_needed_for_single_windows():
    """The memory of a layout is a promise."""
    for left, right, blocks in ((100, 0, 16), (None, 0, 32), (700, 30, (16, 64)), (5, None, (64, 16)), (60, -40, 16)):
        layout = BlockLayout.from_pattern(SlidingWindow(left, right), 2000, block_size=blocks)
        (most,) = most_blocks([terms_of(SlidingWindow(left, right))], (2000, 2000), layout.blocks)
        assert len(layout.by_query.indices) <= most <= 1.02 * len(layout.by_query.indices)


OF_DOCUMENTS = {
    "all": (None, 100),
    "causal": (Causal(), 100),
    "several rules": (SlidingWindow(9, 0) | GlobalTokens(5) | Chunks(30) & Causal(), 100),
    "by head": (PerHead((Causal(), SlidingWindow(9, 9) | GlobalTokens(at=(50,)))), 100),
    "block rules, whose lists are found": (LocalBlocks(32, block_size=16), 96),
}


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("name", OF_DOCUMENTS)
def test_documents_that_are_data(name, kernels, monkeypatch):
    """The layout of the same documents as a pattern: from cumulative lengths with padding, and from ids."""
    pattern, seq = OF_DOCUMENTS[name]
    lengths = (1, 38, 20, seq - 59)
    want = BlockLayout.from_pattern((Full() if pattern is None else pattern) & Documents(lengths), seq, block_size=16)
    edges = torch.tensor([0, 1, 39, 59, seq, seq, seq])
    ids = torch.tensor([7, 3, -2, 9]).repeat_interleave(torch.tensor(lengths))
    monkeypatch.setattr(closed_form, "DEVICES", ("cpu",) if kernels else ())
    for data in ({"cu_seqlens": edges, "seq": seq}, {"cu_seqlens": edges.int(), "seq": seq}, {"document_ids": ids}):
        got = BlockLayout.from_documents(pattern, **data, block_size=16)
        assert ("closed_form" in got._derived) == (kernels and "found" not in name)
        got.order(by_key=True)
        num = int(want.by_query.offsets[-1])
        for mine, theirs in ((got.by_query, want.by_query), (got.by_key, want.by_key)):
            assert torch.equal(mine.offsets, theirs.offsets)
            assert torch.equal(mine.indices[:num], theirs.indices[:num])
        assert torch.equal(got.to_dense(), want.to_dense())
        assert torch.equal(got.seen_by, want.seen_by)


def test_blocks_are_counted_where_there_may_be_very_many(monkeypatch):
    monkeypatch.setattr(closed_form, "DEVICES", ("cpu",))
    monkeypatch.setattr(closed_form, "MOST_PLACES", 20)
    edges = torch.tensor([0, 30, 60, 100])
    got = BlockLayout.from_documents(Causal(), 100, cu_seqlens=edges, block_size=16)
    assert len(got.by_query.indices) == int(got.by_query.offsets[-1]) == len(got.by_key.indices)
    assert torch.equal(
        got.to_dense(), BlockLayout.from_pattern(Causal() & Documents((30, 30, 40)), 100, block_size=16).to_dense()
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"cu_seqlens": torch.tensor([1, 100]), "seq": 100}, "cu_seqlens must begin with 0"),
        ({"cu_seqlens": torch.tensor([0, 99]), "seq": 100}, "cu_seqlens must begin with 0"),
        ({"cu_seqlens": torch.tensor([0, 60, 50, 100]), "seq": 100}, "cu_seqlens must begin with 0"),
        ({"document_ids": torch.tensor([1, 2, 1])}, "document_ids must have every number in one run"),
    ],
)
def test_wrong_documents_are_an_assertion_of_the_device(data, message, monkeypatch):
    monkeypatch.setattr(closed_form, "DEVICES", ("cpu",))
    with pytest.raises(RuntimeError, match=message):
        BlockLayout.from_documents(Causal(), **data, block_size=16)


def test_a_file_has_no_spare_places(tmp_path, monkeypatch):
    """They hold what was in memory before."""
    pytest.importorskip("safetensors", reason="needs safetensors")
    pattern = SlidingWindow(20, 3) | GlobalTokens(7)
    want = BlockLayout.from_pattern(pattern, 100, block_size=16)
    monkeypatch.setattr(closed_form, "DEVICES", ("cpu",))
    made = PersistentPatternCache(directory=tmp_path).layout(pattern, 100, block_size=16)
    assert len(made.by_query.indices) > len(want.by_query.indices)
    (file,) = tmp_path.iterdir()
    loaded = load_layout(file)
    for mine, theirs in zip(loaded.flatten()[0], want.flatten()[0], strict=True):
        assert torch.equal(mine, theirs)
