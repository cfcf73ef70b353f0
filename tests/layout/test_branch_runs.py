"""The plan of runs pairs queries and keys as often as the branches do, forward and by key."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention_pytorch.layout.branch_runs import (
    counted,
    plan_runs,
)

HOST = torch.device("cpu")


def defined(head, seq, is_causal):
    token = torch.arange(seq)
    found = torch.zeros(seq, seq, dtype=torch.int32)
    for w, r, offset in head:
        kept = token % w % r == offset
        found += (token[:, None] // w == token // w) & kept[:, None] & kept
    return found.tril() if is_causal else found


def check(heads, num_heads, seq, is_causal):
    plan = plan_runs(heads, seq, is_causal, HOST)
    for of_keys in (False, True):
        got = counted(plan, num_heads, seq, of_keys=of_keys, is_causal=is_causal)
        for head in range(num_heads):
            assert torch.equal(got[head], defined(heads[head % len(heads)], seq, is_causal)), (head, of_keys)
    rows = plan.rows[plan.work[:, 1].long()]
    for head in range(num_heads):
        here = rows[plan.work[:, 0] == head]
        assert torch.equal(here[here >= 0].sort().values, torch.arange(seq, dtype=torch.int32))
    return plan


@st.composite
def configurations(draw, most):
    seq = draw(st.integers(1, most))
    branches = []
    for _ in range(draw(st.integers(1, 4))):
        r = draw(st.sampled_from([1, 1, 2, 3, 4, 5, 7, 12, 16]))
        w = draw(st.integers(r, max(r, 2 * seq)) | st.sampled_from([max(r, 64), max(r, 100), max(r, 1024)]))
        branches.append((w, r))
    heads = draw(st.integers(1, 3))
    of_heads = [tuple((w, r, head % r) for w, r in branches) for head in range(heads)]
    return of_heads, heads, seq, draw(st.booleans())


@given(configurations(700))
@settings(max_examples=60)
def test_every_pair(configuration):
    check(*configuration)


@pytest.mark.slow
@given(configurations(5000))
@settings(max_examples=12)
def test_every_pair_of_long_sequences(configuration):
    heads, _, seq, is_causal = configuration
    check(heads[:1], 1, seq, is_causal)
