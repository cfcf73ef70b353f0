"""A call in parts: blocks of queries and keys taken out of it, each part computed alone, merged, equal the whole call.

Forward parts merge by their lse; a part's gradients, given the whole out and lse, add up. This is what a ring does,
without the ring.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention_pytorch import GlobalTokens, SlidingWindow
from dilated_attention_pytorch.backends.dropout import (
    as_table,
    keep_mask,
    places_of_blocks,
    places_of_runs,
    seed_of_part,
)
from dilated_attention_pytorch.layout import BlockLayout
from dilated_attention_pytorch.ops.choose import BY_NAME
from dilated_attention_pytorch.ops.merge import merge_attention
from dilated_attention_pytorch.options import CallOptions
from dilated_attention_pytorch.testing import Case, oracle
from tests import strategies


def in_parts(case, backend, owners_q, owners_k):
    """out, lse, dq, dk, dv where query block i belongs to part owners_q[i] and key block j to owners_k[j]."""
    layout = case.layout.causal if case.is_causal else case.layout
    torch.manual_seed(0)
    seed = torch.randint(2**31, ()) if case.dropout_p else None
    scale = case.q.shape[3] ** -0.5 if case.scale is None else case.scale
    out, lse = torch.zeros_like(case.do), torch.full_like(case.dlse, -torch.inf)
    parts = []
    for a in range(max(owners_q) + 1):
        rows = torch.tensor([i for i, owner in enumerate(owners_q) if owner == a], dtype=torch.int64)
        for b in range(max(owners_k) + 1):
            columns = torch.tensor([j for j, owner in enumerate(owners_k) if owner == b], dtype=torch.int64)
            if len(rows) and len(columns):
                parts.append(part_of(case, layout, rows, columns, scale, seed))
    for part, queries, keys, extras in parts:
        q, k, v = case.q[:, queries], case.k[:, keys], case.v[:, keys]
        got = BY_NAME[backend].forward(q, k, v, part, extras)
        before = out[:, queries], lse[:, :, queries]
        out[:, queries], lse[:, :, queries] = merge_attention(*([x, y] for x, y in zip(before, got, strict=True)))
    dq, dk, dv = (torch.zeros_like(x) for x in (case.q, case.k, case.v))
    dlse = case.dlse.masked_fill(lse == -torch.inf, 0.0)
    for part, queries, keys, extras in parts:
        of_queries = (x[:, queries] for x in (case.q, out))
        q, o = of_queries
        grads = BY_NAME[backend].backward(
            case.do[:, queries], dlse[:, :, queries], q, case.k[:, keys], case.v[:, keys], o, lse[:, :, queries],
            part, extras,
        )  # fmt: skip
        dq[:, queries] += grads[0]
        dk[:, keys] += grads[1]
        dv[:, keys] += grads[2]
    return out, lse, dq, dk, dv


def part_of(case, layout, rows, columns, scale, seed):
    part = layout.take(rows, columns)
    queries, keys = (
        (blocks[:, None] * size + torch.arange(size)).flatten()[:seq]
        for blocks, size, seq in ((rows, layout.block_q, part.seq_q), (columns, layout.block_k, part.seq_k))
    )
    padding, ids = case.key_padding_mask, case.document_ids
    if ids is not None:
        ids = torch.cat((ids[:, keys], ids[:, queries + layout.seq_k - layout.seq_q]), dim=1)
    return part, queries, keys, CallOptions(
        scale,
        case.dropout_p,
        key_padding_mask=None if padding is None else padding[:, keys],
        document_ids=ids,
        seed=None if seed is None else seed_of_part(seed, places_of_blocks(rows, columns, layout.blocks)),
    )  # fmt: skip


def assert_parts_are_exact(case, backend, owners_q, owners_k, tolerance):
    expected = oracle(case)
    got = in_parts(case, backend, owners_q, owners_k)
    assert torch.equal(got[1] == -torch.inf, expected[1] == -torch.inf)
    for name, mine, want in zip(("out", "lse", "dq", "dk", "dv"), got, expected, strict=True):
        error = (mine.double() - want).nan_to_num(nan=0.0 if name == "lse" else torch.inf).abs().max()
        assert error <= tolerance, f"{name} is off by {error:.3g}"


@pytest.mark.slow
@settings(max_examples=100)
@given(st.data())
def test_parts_make_the_whole(data):
    case = data.draw(strategies.cases(dropout=True, shaped=False))
    owners_q, owners_k = (
        data.draw(st.lists(st.integers(0, 2), min_size=num, max_size=num))
        for num in (case.layout.num_q_blocks, case.layout.num_k_blocks)
    )
    assert_parts_are_exact(case, "blockwise", owners_q, owners_k, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
def test_parts_through_the_kernels(is_causal):
    """The same kernels, float32, every mask and dropout at once; 2e-5 is some hundred roundings of values around 3."""
    torch.manual_seed(1)
    batch, seq, heads, heads_kv, dim = 2, 85, 4, 2, 16
    pattern = SlidingWindow(20, 10) | GlobalTokens(5, queries=True)
    layout = BlockLayout.from_pattern(pattern, seq, block_size=16)
    q, do = (torch.randn(batch, seq, heads, dim) for _ in range(2))
    k, v = (torch.randn(batch, seq, heads_kv, dim) for _ in range(2))
    case = Case(
        q=q, k=k, v=v, layout=layout, do=do, dlse=torch.randn(batch, heads, seq), is_causal=is_causal,
        key_padding_mask=torch.rand(batch, seq) < 0.1, document_ids=torch.randint(0, 2, (batch, seq)), dropout_p=0.3,
    )  # fmt: skip
    assert_parts_are_exact(case, "triton", [0, 1, 1, 0, 1, 0], [1, 0, 0, 1, 0, 1], 2e-5)


def test_the_draw_of_a_part_is_that_of_the_whole():
    seed, layout = torch.tensor(77), BlockLayout.from_block_mask(torch.ones(5, 6, dtype=torch.bool), (16, 32))
    query, key = torch.arange(80)[:, None], torch.arange(192)
    whole = keep_mask(seed, 0.4, 3, query, key)
    rows, columns = torch.tensor([1, 4]), torch.tensor([0, 2, 5])
    part = keep_mask(seed_of_part(seed, places_of_blocks(rows, columns, layout.blocks)), 0.4, 3, query[:32], key[:96])
    assert torch.equal(part, whole.view(5, 16, 6, 32)[rows][:, :, columns].reshape(32, 96))
    run = keep_mask(seed_of_part(seed, places_of_runs(7, 100, query.device)), 0.4, 3, query[:32], key[:50])
    assert torch.equal(run, whole[7:39, 100:150])
    assert torch.equal(keep_mask(as_table(seed), 0.4, 3, query, key), whole)
