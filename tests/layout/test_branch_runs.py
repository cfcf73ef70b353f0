"""The plan of runs pairs queries and keys as often as the branches do, forward and by key."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention_pytorch import BlockLayout, Branches
from dilated_attention_pytorch.layout import layout_of_branches
from dilated_attention_pytorch.layout.branch_runs import (
    flattened,
    plan_of,
    plan_runs,
    runs_of,
    unflatten_into,
    why_no_runs,
)
from dilated_attention_pytorch.layout.run_tiles import TILE, WALKED

HOST = torch.device("cpu")


def defined(head, seq, is_causal):
    token = torch.arange(seq)
    found = torch.zeros(seq, seq, dtype=torch.int32)
    for w, r, offset in head:
        kept = token % w % r == offset
        found += (token[:, None] // w == token // w) & kept[:, None] & kept
    return found.tril() if is_causal else found


def counted(plan, num_heads, seq, *, of_keys, is_causal, size):
    """How often the plan pairs a query with a key, as kernels walk it that take so many rows of a run at a time."""
    found = torch.zeros(num_heads, seq, seq, dtype=torch.int32)
    work, runs = (plan.key_work, plan.key_runs) if of_keys else (plan.work, plan.runs)
    for head, at, start, *parts_of, _ in work.tolist():
        rows, parts = plan.rows[at].long(), parts_of[WALKED.index(size)]
        real = rows >= 0
        for run in runs[start:].tolist():
            if parts <= 0:
                break
            _, dilation, column, first, length, all_from, all_to, begin, end, table, phase, period = run
            parts -= max(1, -(-length // size))
            lane = torch.arange(length)
            own = rows // dilation - first
            inside = (rows >= begin) & (rows < end) & (rows % dilation == column)
            seen = inside[:, None].expand(-1, length)
            if is_causal:
                seen = seen & (lane >= own[:, None] if of_keys else lane <= own[:, None])
            part = lane // size * size
            seen = seen | ((part >= all_from) & (part + size <= all_to))
            token = (first + lane) * dilation + column
            times = plan.tables[table + (phase + lane) % period].int() if period else torch.ones_like(lane).int()
            pair = seen[real].int() * times
            one, other = rows[real][:, None].expand_as(pair), token[None].expand_as(pair)
            found[head].index_put_((other, one) if of_keys else (one, other), pair, accumulate=True)
    return found


def check(heads, num_heads, seq, is_causal):
    plan = plan_runs(heads, seq, is_causal, HOST)
    for of_keys, size in itertools.product((False, True), WALKED):
        got = counted(plan, num_heads, seq, of_keys=of_keys, is_causal=is_causal, size=size)
        for head in range(num_heads):
            assert torch.equal(got[head], defined(heads[head % len(heads)], seq, is_causal)), (head, of_keys)
    rows = plan.rows[plan.work[:, 1].long()]
    for head in range(num_heads):
        here = rows[plan.work[:, 0] == head]
        assert torch.equal(here[here >= 0].sort().values, torch.arange(seq, dtype=torch.int32))
    if why_no_runs(heads, seq, seq) is None:
        check_reach(plan, seq)
    return plan


def check_reach(plan, seq):
    """As `kernels.hopper_runs_common` describes a view: rows that all columns have, and columns for those that only
    some have. Every row of a run is its token, and no copy starts beside the view."""
    for _, dilation, column, first, length, *_ in torch.cat((plan.runs, plan.key_runs)).tolist():
        for tile in WALKED:
            for x in range(0, length, tile):
                lower = int(column < seq % dilation and first + x > 0)
                row, view_column = first + x - lower, column + lower * dilation
                lanes = torch.arange(min(tile, length - x))
                assert 0 <= row < seq // dilation
                assert view_column < dilation + seq % dilation
                assert row + int(lanes[-1]) < seq // dilation
                assert torch.equal((row + lanes) * dilation + view_column, (first + x + lanes) * dilation + column)


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


LONGNET = (2048, 4096, 8192, 16384, 32768)


@pytest.mark.parametrize(
    ("segments", "dilations", "seq", "most"),
    [(LONGNET, (1, 2, 4, 8, 16), 32768, 0.93), (LONGNET, (1, 2, 4, 6, 12), 32768, 1.19),
     (LONGNET, (1, 2, 4, 8, 16), 32772, 0.93), ((1024, 5792, 32768, 185363, 1048576), (1, 2, 4, 8, 16), 10000, 0.88)],
)  # fmt: skip
def test_what_is_walked(segments, dilations, seq, most):
    """The pairs in tiles, of those that count, each as often as it does: less than all where branches share keys."""
    heads, is_causal = 12, segments == LONGNET
    plan = plan_runs([of_head(segments, dilations, head) for head in range(heads)], seq, is_causal, HOST)
    counted_pairs = sum(seq * min(w, seq) / r**2 for w, r in zip(segments, dilations, strict=True)) * heads
    assert int(plan.work[:, 3].sum()) * TILE * TILE <= most * counted_pairs / (2 if is_causal else 1)


def of_head(segments, dilations, head):
    return tuple((w, r, head % r) for w, r in zip(segments, dilations, strict=True))


@pytest.mark.parametrize(
    ("dilations", "seq_q", "seq", "reason"),
    [((1, 2), 500, 500, None), ((1, 2), 500, 501, "as many queries"), ((1, 3), 500, 500, None),
     ((1, 3), 383, 383, "128 tokens"), ((1, 3), 384, 384, None), (range(1, 8), 5040, 5040, "at most 6")],
)  # fmt: skip
def test_what_has_no_runs(dilations, seq_q, seq, reason):
    found = why_no_runs([of_head([seq] * len(dilations), dilations, 0)], seq_q, seq)
    assert (found is None) if reason is None else (reason in found)


def test_a_plan_survives_a_graph():
    """`flatten` and its inverse, as torch.compile uses them, and a copy to another device keeps what runs need."""
    layout = layout_of_branches(Branches((100, 300), (1, 2)), 700, num_heads=2, is_causal=True)
    tensors, sizes = flattened(layout)
    other = BlockLayout.unflatten(*layout.flatten())
    assert runs_of(other).reason
    other._derived.clear()
    unflatten_into(other, tensors, sizes)
    assert runs_of(other) == runs_of(layout)
    assert all(torch.equal(a, b) for a, b in zip(plan_of(other).tensors(), plan_of(layout).tensors(), strict=True))
    part = layout_of_branches(Branches((100, 300), (1, 2)), 700, num_heads=2, queries=range(100))
    assert "whole sequences" in runs_of(part).reason
