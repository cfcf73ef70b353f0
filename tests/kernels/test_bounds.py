"""What queries see of keys, and keys of queries, is the same."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="needs triton, which there is for Linux alone")
if torch.cuda.is_available():
    pytest.skip("needs a machine without a CUDA device, where kernels are interpreted", allow_module_level=True)

import triton
import triton.language as tl

from dilated_attention_pytorch import BlockLayout, Documents, SlidingWindow
from dilated_attention_pytorch.kernels.common import BY_KEY, key_bounds, query_bounds
from dilated_attention_pytorch.kernels.hopper_launch import documents_by_key
from dilated_attention_pytorch.kernels.launch import Call
from dilated_attention_pytorch.layout.lists import BlockList
from dilated_attention_pytorch.options import CallOptions
from dilated_attention_pytorch.patterns.tokens import UNBOUNDED


@triton.jit
def _bounds_kernel(
    of_queries, of_keys, rules, documents, seen_by, seq_q, seq_k, size: tl.constexpr, ranges: tl.constexpr
):
    at = tl.arange(0, size)
    first, last = key_bounds(at, 0, 0, rules, documents, 1, seq_q, seq_k, ranges)
    tl.store(of_queries + at, first)
    tl.store(of_queries + size + at, last)
    first, last = query_bounds(at, rules, seen_by, seq_q, seq_k, ranges)
    tl.store(of_keys + at, first)
    tl.store(of_keys + size + at, last)


bounds = st.sampled_from([UNBOUNDED, -UNBOUNDED]) | st.integers(-40, 40)


@given(bounds, bounds, bounds, bounds, st.integers(1, 32), st.integers(1, 32))
def test_the_other_way_round(left, right, key_stop, query_stop, seq_q, seq_k):
    """Bounds below zero are those of a part of a sequence that stands apart from its keys."""
    rules = torch.tensor([left, right, key_stop, query_stop, 0], dtype=torch.int32)
    sees, seen = both_ways(rules, rules, rules, seq_q, seq_k, ranges=0)
    assert torch.equal(sees, seen.T)


def both_ways(rules, documents, seen_by, seq_q, seq_k, ranges):
    """What queries see by the bounds of keys, and by what keys are seen by those of queries."""
    of_queries, of_keys = torch.empty(2, 32, dtype=torch.int32), torch.empty(2, 32, dtype=torch.int32)
    _bounds_kernel[(1,)](of_queries, of_keys, rules, documents, seen_by, seq_q, seq_k, size=32, ranges=ranges)
    number = torch.arange(32)
    sees = (number >= of_queries[0, :, None]) & (number <= of_queries[1, :, None])  # [queries, keys]
    seen = (number >= of_keys[0, :, None]) & (number <= of_keys[1, :, None])  # [keys, queries]
    return sees, seen


ranges = st.lists(st.integers(0, 30), min_size=32, max_size=32).map(sorted)


@given(bounds, bounds, bounds, bounds, st.integers(1, 32), st.integers(1, 32), ranges, ranges, st.booleans())
def test_ranges_by_key(left, right, key_stop, query_stop, seq_q, seq_k, starts, stops, cut):
    """Ranges that ascend, empty ones among them, with an interval and without."""
    rules = torch.tensor([[[left, right, key_stop, query_stop, 1]]], dtype=torch.int32)
    if not cut:
        rules[..., :4] = UNBOUNDED
    documents = torch.tensor([starts[:seq_q], stops[:seq_q]], dtype=torch.int32).clamp(max=seq_k)
    lists = BlockList(*(torch.zeros(n, dtype=torch.int32) for n in (-(-seq_q // 16) + 1, -(-seq_q // 16), 0, 0)))
    layout = BlockLayout(
        seq_q=seq_q, seq_k=seq_k, block_q=16, block_k=16, by_query=lists, rules=rules, documents=documents,
        ranges_ascend=True,
    )  # fmt: skip
    assert layout.seen_by.shape == (2, seq_k)
    sees, seen = both_ways(rules, documents, layout.seen_by, seq_q, seq_k, ranges=1)
    assert torch.equal(sees[:seq_q], seen[:, :seq_q].T)


def test_ranges_that_move_back_are_read_by_query():
    """Some key is then seen by queries that are no run."""
    starts, stops = torch.tensor([0, 0, 4, 0]), torch.tensor([2, 4, 4, 2])
    layout = BlockLayout.from_key_ranges(starts, stops, block_size=16)
    assert not layout.ranges_ascend
    assert not layout.seen_by.numel()
    layout = BlockLayout.from_key_ranges(starts[:3], stops[:3], 4, block_size=16)
    assert layout.seen_by.tolist() == [[2, 2, 2, 2], [0, 0, 1, 1]]


OF_DOCUMENTS = {
    "one rule": (Documents((20, 30)) & SlidingWindow(None, 0), {}, BY_KEY.value),
    "several rules": (Documents((20, 30)) | SlidingWindow(3, 0), {}, 1),
    "documents of the call": (Documents((20, 30)), {"document_ids": torch.zeros(1, 50, dtype=torch.int64)}, 1),
    "padding": (Documents((20, 30)), {"key_padding_mask": torch.zeros(1, 50, dtype=torch.bool)}, BY_KEY.value),
    "no documents": (SlidingWindow(3, 0), {}, 0),
}


@pytest.mark.parametrize("name", OF_DOCUMENTS)
def test_which_documents_a_kernel_over_keys_reads(name):
    """By key where one rule and nothing of the call hides pairs."""
    pattern, options, expected = OF_DOCUMENTS[name]
    layout, x = BlockLayout.from_pattern(pattern, 50, block_size=16), torch.zeros(1, 50, 1, 64)
    call = Call(x, x, x, layout, CallOptions(1.0, **options))
    documents, kind = documents_by_key(call)
    assert kind == expected
    assert documents is (layout.seen_by if expected == BY_KEY.value else layout.documents)
