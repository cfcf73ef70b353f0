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

from dilated_attention_pytorch.kernels.common import key_bounds, query_bounds
from dilated_attention_pytorch.patterns.tokens import UNBOUNDED


@triton.jit
def _bounds_kernel(of_queries, of_keys, rules, seq_q, seq_k, size: tl.constexpr):
    at = tl.arange(0, size)
    first, last = key_bounds(at, 0, 0, rules, rules, 1, seq_q, seq_k, False)
    tl.store(of_queries + at, first)
    tl.store(of_queries + size + at, last)
    first, last = query_bounds(at, rules, seq_q, seq_k)
    tl.store(of_keys + at, first)
    tl.store(of_keys + size + at, last)


bounds = st.sampled_from([UNBOUNDED, -UNBOUNDED]) | st.integers(-40, 40)


@given(bounds, bounds, bounds, bounds, st.integers(1, 32), st.integers(1, 32))
def test_the_other_way_round(left, right, key_stop, query_stop, seq_q, seq_k):
    """Bounds below zero are those of a part of a sequence that stands apart from its keys."""
    rules = torch.tensor([left, right, key_stop, query_stop, 0], dtype=torch.int32)
    of_queries, of_keys = torch.empty(2, 32, dtype=torch.int32), torch.empty(2, 32, dtype=torch.int32)
    _bounds_kernel[(1,)](of_queries, of_keys, rules, seq_q, seq_k, size=32)
    number = torch.arange(32)
    sees = (number >= of_queries[0, :, None]) & (number <= of_queries[1, :, None])  # [queries, keys]
    seen = (number >= of_keys[0, :, None]) & (number <= of_keys[1, :, None])  # [keys, queries]
    assert torch.equal(sees, seen.T)
