"""Blocks of a cache, chosen for every token: exact attention over them, and a choice that is the definition's."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention_pytorch import (
    Antidiagonal,
    BlockGate,
    BlockSummaries,
    CacheBlocks,
    Full,
    MeanPooled,
    MinMaxBound,
    Moments,
    SampledRows,
    SharedBudget,
    TopK,
    decode_attention,
)
from dilated_attention_pytorch.ops import explain_decode
from dilated_attention_pytorch.ops.selectors import _level, even_level
from tests.ops.test_decode import in_pages

CAPACITY, HEAD_DIM = 96, 8
SCORERS = [
    MeanPooled(),
    MeanPooled(4, 4),
    MinMaxBound(),
    MinMaxBound(None, 8),
    Moments(1),
    SampledRows(1),
    SampledRows(8),
    Antidiagonal(4),
]


@st.composite
def caches(draw):
    heads_kv = draw(st.integers(1, 2))
    group, batch, new = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 5]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "q": normal(batch, new, heads_kv * group, HEAD_DIM),
        "k": normal(batch, CAPACITY, heads_kv, HEAD_DIM),
        "v": normal(batch, CAPACITY, heads_kv, draw(st.sampled_from([HEAD_DIM, 5]))),
        "lengths": torch.tensor([draw(st.integers(new, CAPACITY)) for _ in range(batch)]),
        "padding": torch.rand(batch, CAPACITY, generator=generator) < 0.3 if draw(st.booleans()) else None,
        "generator": generator,
        "per_kv_head": draw(st.booleans()),
    }


def listed(keep, block):
    """`CacheBlocks` of a mask [batch, new, lists, blocks], written down one by one."""
    rows = [row.nonzero()[:, 0].tolist() for row in keep.flatten(0, 2)]
    offsets = [0]
    for row in rows:
        offsets.append(offsets[-1] + len(row))
    indices = [block for row in rows for block in row] + [0, 0, 0]
    return CacheBlocks(*(torch.tensor(x, dtype=torch.int32) for x in (offsets, indices)), block, keep.shape[2])


def definition(call, keep, block, *, is_causal, scale, softcap=0.0, slopes=None, sinks=None):
    """out and lse of dense attention over the kept blocks, in float64."""
    q, k, v = call["q"], call["k"], call["v"]
    (new, heads), group = q.shape[1:3], q.shape[2] // k.shape[2]
    scores = torch.einsum("bnhd,bkhd->bnhk", q, k.repeat_interleave(group, 2)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    key = torch.arange(CAPACITY)
    position = call["lengths"][:, None] - new + torch.arange(new)
    if slopes is not None:
        scores = scores - slopes[:, None] * (position[..., None] - key).abs()[:, :, None]
    seen = keep.repeat_interleave(heads // keep.shape[2], 2).repeat_interleave(block, 3)[..., :CAPACITY]
    seen = seen & (key < call["lengths"][:, None])[:, None, None]
    if is_causal:
        seen = seen & (key <= position[..., None])[:, :, None]
    if call["padding"] is not None:
        seen = seen & ~call["padding"][:, None, None]
    scores = scores.masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks)
    weights = torch.where(lse[..., None] == -math.inf, 0.0, (scores - lse[..., None]).exp())
    weights = weights.nan_to_num(0.0)
    return torch.einsum("bnhk,bkhd->bnhd", weights, v.repeat_interleave(group, 2)), lse.transpose(1, 2)


def compare(call, block, page, backend, dtype, tolerance, options):
    heads = call["q"].shape[2]
    lists = call["k"].shape[2] if call["per_kv_head"] else heads
    shape = *call["q"].shape[:2], lists, CAPACITY // block
    keep = torch.rand(shape, generator=call["generator"]) < 0.4
    call = call | {name: call[name].to(dtype).double() for name in "qkv"}
    want = definition(call, keep, block, **options)
    q, k, v = (call[name].to(dtype) for name in "qkv")
    table, padding = None, call["padding"]
    if page:
        state = call["generator"].get_state()
        k, table = in_pages(k, page, call["generator"])
        call["generator"].set_state(state)
        v, _ = in_pages(v, page, call["generator"])
        spare = table.shape[1] * page - CAPACITY
        padding = None if padding is None else torch.nn.functional.pad(padding, (0, spare))
    else:  # what is behind a sample may be anything
        behind = torch.arange(CAPACITY) >= call["lengths"][:, None]
        k, v = (x.masked_fill(behind[..., None, None], math.nan) for x in (k, v))
    given = {"alibi_slopes": options.get("slopes"), "sinks": options.get("sinks"), "softcap": options.get("softcap")}
    got = decode_attention(
        q, k, v, listed(keep, block), lengths=call["lengths"], page_table=table, key_padding_mask=padding,
        return_lse=True, is_causal=options["is_causal"], scale=options["scale"], backend=backend,
        **{name: value for name, value in given.items() if value is not None},
    )  # fmt: skip
    torch.testing.assert_close(tuple(x.double() for x in got), want, atol=tolerance, rtol=0)


@given(caches(), st.sampled_from([16, 32]), st.sampled_from([None, None, 16, 7]), st.booleans(), st.booleans())
@settings(max_examples=60)
def test_attention_over_chosen_blocks_is_exact(call, block, page, is_causal, modified):
    options = {"is_causal": is_causal, "scale": -0.5 if modified else 0.3}
    if modified:
        heads = call["q"].shape[2]
        options |= {"softcap": 1.5, "slopes": torch.rand(heads).double(), "sinks": torch.rand(heads).double()}
    compare(call, block, page, "blockwise", torch.float64, 1e-10, options)


@given(caches(), st.sampled_from([16, 32]), st.sampled_from([None, None, 16, 7]), st.booleans())
@settings(max_examples=6)
def test_the_kernels_do_so_too(call, block, page, is_causal):
    pytest.importorskip("triton", reason="needs triton, which there is for Linux alone")
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a CUDA device: tests/gpu runs the kernels there")
    compare(call, block, page, "triton", torch.float32, 2e-6, {"is_causal": is_causal, "scale": 0.3})


def kept(blocks, shape):
    """The mask [batch, new, lists, blocks] of what was chosen."""
    keep = torch.zeros(math.prod(shape[:3]), shape[3], dtype=torch.bool)
    for row, (start, stop) in enumerate(zip(blocks.offsets.tolist(), blocks.offsets.tolist()[1:], strict=False)):
        chosen = blocks.indices[start:stop].long()
        assert chosen.diff().gt(0).all()
        keep[row, chosen] = True
    return keep.view(shape)


def wanted(call, selector, blocks, sink, local, dense_below):
    """What a token keeps, from the true masses of its own attention, one row at a time."""
    (batch, new, heads, _), heads_kv = call["q"].shape, call["k"].shape[2]
    block_q, block_k = blocks
    num = -(-CAPACITY // block_k)
    lists = heads_kv if call["per_kv_head"] else heads
    keep = torch.zeros(batch, new, lists, num, dtype=torch.bool)
    for sample in range(batch):
        for t in range(new):
            length = int(call["lengths"][sample])
            position = length - new + t
            keys = call["k"][sample, : position + 1].repeat_interleave(heads // heads_kv, 1)
            scores = torch.einsum("hd,khd->hk", call["q"][sample, t], keys) * HEAD_DIM**-0.5
            if call["padding"] is not None:
                scores = scores.masked_fill(call["padding"][sample, : position + 1], torch.finfo(scores.dtype).min)
            weights = scores.softmax(-1)
            if call["padding"] is not None:
                weights = weights.masked_fill(call["padding"][sample, : position + 1], 0.0)
            mass = torch.stack([weights[:, i : i + block_k].sum(-1) for i in range(0, position + 1, block_k)], -1)
            if call["per_kv_head"]:
                mass = mass.unflatten(0, (heads_kv, -1)).mean(1)
            seen = mass.shape[1]
            near = range(max(position - local, 0) // block_k, min((position + local) // block_k, seen - 1) + 1)
            must = {*near, *(i for i in range(seen) if i * block_k < sink)}
            rows = [-(-min(i + block_q, position + 1) // block_k) for i in range(0, position + 1, block_q)]
            level = _level(tuple(rows), selector.share * sum(rows)) if selector.even else selector.share * seen
            competing = lists if selector.across_heads else 1
            count = max(round(min(level, seen) * competing), len(must) * competing, 1)
            if length <= dense_below:
                count = seen * competing
            mass[:, sorted(must)] = torch.inf
            for rows_of_budget in [range(lists)] if selector.across_heads else [[i] for i in range(lists)]:
                flat = mass[list(rows_of_budget)].flatten()
                for at in flat.sort(descending=True, stable=True).indices[:count].tolist():
                    keep[sample, t, list(rows_of_budget)[at // seen], at % seen] = True
    return keep


SELECTORS = [TopK(share, even, across) for share in (0.3, 1.0) for even in (False, True) for across in (False, True)]


@given(caches(), st.sampled_from(SELECTORS), st.sampled_from([(16, 16), (64, 16), (16, 32)]), st.booleans())
@settings(max_examples=60)
def test_tokens_keep_the_heaviest_of_their_own_blocks(call, selector, blocks, short_is_dense):
    sink, local, dense_below = 1, 3, 40 if short_is_dense else 0
    got = BlockSummaries("exact", blocks).choose(
        call["q"], call["k"], lengths=call["lengths"], selector=selector, sink=sink, local=local,
        per_kv_head=call["per_kv_head"], key_padding_mask=call["padding"], dense_below=dense_below,
    )  # fmt: skip
    want = wanted(call, selector, blocks, sink, local, dense_below)
    assert kept(got, want.shape).equal(want)


@pytest.mark.parametrize("scorer", [*SCORERS, "gate"], ids=repr)
@pytest.mark.parametrize("grows", [False, True])
def test_summaries_that_follow_a_cache_are_those_of_the_whole(scorer, grows):
    """Token by token, and several at a time: the columns are those that are built from all keys anew."""
    torch.manual_seed(0)
    if scorer == "gate":
        scorer = BlockGate(4, HEAD_DIM, 2, dtype=torch.float64)
        for weight in scorer.parameters():
            torch.nn.init.normal_(weight, std=0.3)
    k = torch.randn(3, CAPACITY, 2, HEAD_DIM, dtype=torch.float64)
    padding = torch.rand(3, CAPACITY) < 0.2
    summaries = BlockSummaries(scorer, (16, 16))
    lengths = torch.tensor([1, 20, 37])
    for new in (1, 1, 5, 16, 1, 17, 3):
        room = int(lengths.max()) + new if grows else CAPACITY
        q, lengths = torch.randn(3, new, 4, HEAD_DIM, dtype=torch.float64), lengths + new
        keys, hidden = k[:, :room], padding[:, :room]
        now = keys.masked_fill((torch.arange(room) >= lengths[:, None])[..., None, None], 0.0)  # as a static cache
        call = {"lengths": lengths, "selector": TopK(0.3, even=True, across_heads=True), "key_padding_mask": hidden}
        got = summaries.choose(q, now, **call)
        anew = BlockSummaries(scorer, (16, 16))
        want = anew.choose(q, now, **call)
        torch.testing.assert_close(summaries.columns[:, : anew.columns.shape[1]], anew.columns)
        assert got.offsets.equal(want.offsets)
        assert got.indices[: got.offsets[-1]].equal(want.indices[: want.offsets[-1]])


@pytest.mark.parametrize("scorer", SCORERS, ids=repr)
def test_a_full_budget_is_attention_over_everything(scorer):
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 4, HEAD_DIM), torch.randn(2, CAPACITY, 2, HEAD_DIM)
    lengths = torch.tensor([90, 7])
    for per_kv_head in (False, True):
        selector = TopK(1.0, even=True, across_heads=True)
        options = {"selector": selector, "per_kv_head": per_kv_head}
        blocks = BlockSummaries(scorer, (64, 16)).choose(q, k, lengths=lengths, **options)
        out = decode_attention(q, k, k, blocks, lengths=lengths)
        torch.testing.assert_close(out, decode_attention(q, k, k, Full(), lengths=lengths), atol=2e-6, rtol=0)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.floats(0.01, 1.0), st.integers(0, 5))
def test_the_level_on_the_device_is_that_of_the_host(sizes, share, behind):
    sizes = sorted(sizes)
    got = even_level(torch.tensor([sizes + [0] * behind]), share)
    assert got.tolist() == [_level(tuple(sizes), share * sum(sizes))]


def test_no_later_token_changes_a_choice():
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 4, HEAD_DIM), torch.randn(1, CAPACITY, 2, HEAD_DIM)
    others = torch.randn(1, CAPACITY, 2, HEAD_DIM)
    place = torch.arange(CAPACITY)[:, None, None]
    shape = (1, 4, 4, CAPACITY // 16)
    plain, later, earlier = (
        kept(BlockSummaries("exact", 16).choose(q, x, lengths=torch.tensor([64]), selector=TopK(0.7)), shape)
        for x in (k, k.where(place < 62, others), k.where(place >= 40, others))
    )
    assert later[:, :2].equal(plain[:, :2])
    assert not earlier[:, :2].equal(plain[:, :2])


def test_nothing_waits_for_lengths():
    q, k = torch.randn(1, 1, 4, HEAD_DIM), torch.randn(1, CAPACITY, 2, HEAD_DIM)
    lengths = torch.tensor([50])
    summaries = BlockSummaries("minmax", 16)
    summaries.build(k, lengths)

    def step(q, k, lengths):
        blocks = summaries.choose(q, k, lengths=lengths, selector=TopK(0.3, even=True, across_heads=True))
        return decode_attention(q, k, k, blocks, lengths=lengths)

    want = [step(q, k, torch.tensor([n])) for n in (50, 51, 90)]
    compiled = torch.compile(step, fullgraph=True, dynamic=False)
    for n, out in zip((50, 51, 90), want, strict=True):
        torch.testing.assert_close(compiled(q, k, torch.tensor([n])), out)
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled(q, k, torch.tensor([33]))


def test_explained():
    q, k = torch.randn(1, 1, 4, HEAD_DIM), torch.randn(1, CAPACITY, 2, HEAD_DIM)
    blocks = listed(torch.ones(1, 1, 4, 6, dtype=torch.bool), 16)
    assert "blockwise" in str(explain_decode(q, k, k, blocks))


def call(**changes):
    """A decoding step with blocks, one of them changed."""
    q, k = torch.randn(2, 1, 4, HEAD_DIM), torch.randn(2, CAPACITY, 2, HEAD_DIM)
    blocks = {"offsets": torch.arange(9, dtype=torch.int32), "indices": torch.arange(8, dtype=torch.int32) % 6}
    about = {"block_size": 16, "num_lists": 4}
    return decode_attention(q, k, k, CacheBlocks(**blocks | about | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_lists": 3}, r"blocks must have lists for the 2 key heads, .*divide the 4 query heads, got 3"),
        ({"num_lists": 1}, r"blocks must have lists for the 2 key heads, .*, got 1"),
        ({"num_lists": 2}, r"blocks must be for 2 samples, 1 new tokens and 2 lists: 5 offsets, got 9"),
        ({"offsets": torch.arange(9, dtype=torch.int32) + 1}, "offsets of blocks must ascend from 0 to at most the 8"),
        ({"offsets": -torch.arange(9, dtype=torch.int32)}, "offsets of blocks must ascend from 0"),
        ({"indices": torch.full((8,), -1, dtype=torch.int32)}, "indices of blocks must be at least 0, got -1"),
    ],
)
def test_blocks_that_are_not_for_the_call(changes, message):
    assert call().isfinite().all()
    with pytest.raises(ValueError, match=message):
        call(**changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"selector": SharedBudget(0.5)}, ValueError, "selector must be TopK.*got SharedBudget"),
        ({"lengths": [3, 4]}, TypeError, "lengths must be an int32 or int64 tensor, got"),
        ({"lengths": torch.ones(3).long()}, ValueError, r"lengths must be one for each of 2 samples on cpu, got \[3\]"),
        ({"key_padding_mask": torch.ones(2, 3)}, ValueError, r"key_padding_mask must be bool .* = \[2, 96\]"),
        ({"sink": -1}, ValueError, "sink must be at least 0, got -1"),
        ({"local": 0.5}, TypeError, "local must be an int, got 0.5"),
        ({"per_kv_head": 1}, TypeError, "per_kv_head must be True or False, got 1"),
        ({"dense_below": -1}, ValueError, "dense_below must be at least 0, got -1"),
        ({"scale": math.nan}, ValueError, "scale must be finite, got nan"),
    ],
)
def test_choices_that_cannot_be(changes, error, message):
    q, k = torch.randn(2, 1, 4, HEAD_DIM), torch.randn(2, CAPACITY, 2, HEAD_DIM)
    with pytest.raises(error, match=message):
        BlockSummaries().choose(q, k, **{"lengths": torch.tensor([5, 9]), "selector": TopK(0.5)} | changes)
