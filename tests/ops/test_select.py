"""Choosing blocks from the content: scorers by hand, selectors by brute force, and what no selection may do."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention_pytorch import (
    Antidiagonal,
    BlockGate,
    CumulativeMass,
    Full,
    MeanPooled,
    MinMaxBound,
    Moments,
    RelativeThreshold,
    SampledRows,
    SharedBudget,
    TopK,
    block_masses,
    block_sparse_attention,
    select_blocks,
)
from dilated_attention_pytorch.ops.select import SCORERS
from tests import dense

SELECTORS = [
    SharedBudget(0.3),
    TopK(0.3),
    TopK(0.3, even=True),
    TopK(0.3, across_heads=True),
    TopK(0.3, even=True, across_heads=True),
    CumulativeMass(0.6),
    CumulativeMass(0.9, at_most=0.4),
    RelativeThreshold(0.5),
    RelativeThreshold(0.05, at_most=0.4),
]
BLOCKS = [16, 32, (32, 16), (16, 32), (64, 16)]


def normal(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def allowed_pairs(seq_q, seq_k, is_causal, hidden=None):
    allowed = torch.ones(seq_q, seq_k, dtype=torch.bool)
    if is_causal:
        allowed = allowed.tril(seq_k - seq_q)
    return allowed if hidden is None else allowed & ~hidden[:, None, None]


def pair(block_size):
    return block_size if isinstance(block_size, tuple) else (block_size, block_size)


def visible_blocks(allowed, blocks):
    """Blocks with an allowed pair, by looking at the pairs."""
    num_q, num_k = (math.ceil(n / b) for n, b in zip(allowed.shape[-2:], blocks, strict=True))
    spare = num_k * blocks[1] - allowed.shape[-1], num_q * blocks[0] - allowed.shape[-2]
    padded = torch.nn.functional.pad(allowed, (0, spare[0], 0, spare[1]))
    return padded.unflatten(-1, (num_k, -1)).unflatten(-3, (num_q, -1)).any(-1).any(-2)


def forced_blocks(seq_q, seq_k, blocks, is_causal, sink, local):
    """One block at a time, from the words of the docstring."""
    visible = visible_blocks(allowed_pairs(seq_q, seq_k, is_causal), blocks)
    forced = torch.zeros_like(visible)
    for i, j in visible.nonzero().tolist():
        queries = range(i * blocks[0] + seq_k - seq_q, min((i + 1) * blocks[0], seq_q) + seq_k - seq_q)
        keys = range(j * blocks[1], (j + 1) * blocks[1])
        near = any(queries[0] - local <= key <= queries[-1] + local for key in keys)
        forced[i, j] = near or keys[0] < sink
    return visible, forced


lengths = st.tuples(st.integers(1, 200), st.integers(1, 200)) | st.integers(1, 200).map(lambda n: (n, n))


@settings(max_examples=60)
@given(lengths, st.sampled_from(BLOCKS), st.booleans(), st.booleans(), st.integers(0, 2**31))
def test_true_masses(sizes, block_size, is_causal, masked, seed):
    """The dense weights, summed by block: the exact scorer never holds them."""
    torch.manual_seed(seed)
    (seq_q, seq_k), blocks = sizes, pair(block_size)
    q, k = normal(2, seq_q, 4, 8), normal(2, seq_k, 2, 8)
    hidden = torch.rand(2, seq_k) < 0.3 if masked else None
    allowed = allowed_pairs(seq_q, seq_k, is_causal, hidden)
    _, weights = dense.attend(q, k, k, allowed)
    got = block_masses(q, k, block_size=block_size, is_causal=is_causal, key_padding_mask=hidden)
    num_q, num_k = got.shape[2:]
    assert (num_q, num_k) == (math.ceil(seq_q / blocks[0]), math.ceil(seq_k / blocks[1]))
    for i in range(num_q):
        rows = weights[:, :, i * blocks[0] : (i + 1) * blocks[0]]
        for j in range(num_k):
            want = rows[..., j * blocks[1] : (j + 1) * blocks[1]].sum(-1).mean(-1)
            torch.testing.assert_close(got[:, :, i, j], want, rtol=0, atol=1e-12)


def test_masses_in_chunks_are_the_same(monkeypatch):
    q, k = normal(2, 150, 4, 8), normal(2, 190, 2, 8)
    calls = [
        {"scorer": scorer, "is_causal": causal, "block_size": (32, 16)}
        for scorer in SCORERS
        for causal in (0 > 1, 1 > 0)
    ]
    whole = [block_masses(q, k, **call) for call in calls]
    monkeypatch.setattr("dilated_attention_pytorch.ops.scores._CHUNK", 1)
    for call, want in zip(calls, whole, strict=True):
        torch.testing.assert_close(block_masses(q, k, **call), want, rtol=0, atol=1e-13)


def test_mean_pooled_by_hand():
    q, k = normal(1, 64, 2, 8), normal(1, 64, 1, 8)
    scores = torch.einsum("bqhd,bkd->bhqk", q.unflatten(1, (2, 32)).mean(2), k[:, :, 0].unflatten(1, (4, 16)).mean(2))
    got = block_masses(q, k, scorer=MeanPooled(), block_size=(32, 16))
    torch.testing.assert_close(got, (scores * 8**-0.5).softmax(-1), rtol=0, atol=1e-13)
    each = torch.einsum("bqhd,bkd->bhqk", q, k[:, :, 0].unflatten(1, (4, 16)).mean(2))
    want = (each * 8**-0.5).softmax(-1).unflatten(2, (2, 32)).mean(3)
    got = block_masses(q, k, scorer=MeanPooled(queries=1), block_size=(32, 16))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


def test_min_max_is_a_bound():
    """Rows and columns multiply to no less than any score of a key in the block."""
    from dilated_attention_pytorch.ops.scores import Blocked

    q, k = normal(1, 64, 2, 8), normal(1, 50, 2, 8)
    rows, columns = MinMaxBound(queries=1).features(Blocked.of(q, 32), Blocked.of(k, 16), 0.25)
    bounds = torch.einsum("bqhd,bkhd->bhqk", rows, columns)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.25
    padded = torch.nn.functional.pad(scores, (0, 14), value=-torch.inf).unflatten(3, (4, 16))
    assert (bounds >= padded.amax(-1) - 1e-12).all()
    one = block_masses(q, k[:, :1].expand(-1, 64, -1, -1), scorer=MinMaxBound(queries=1), block_size=16)
    torch.testing.assert_close(one, torch.full_like(one, 0.25))  # equal keys: equal bounds


def test_moments_are_exact_where_keys_of_a_block_are_equal():
    q, k = normal(1, 64, 2, 8), normal(1, 4, 2, 8).repeat_interleave(16, dim=1)
    for causal in (False, True):
        got = block_masses(q, k, scorer=Moments(queries=1), block_size=16, is_causal=causal)
        want = block_masses(q, k, block_size=16, is_causal=causal)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


def test_moments_see_variance():
    """Two blocks with the same mean key: the one that spreads along the query holds more mass."""
    q = torch.ones(1, 16, 1, 4, dtype=torch.float64)
    k = torch.zeros(1, 32, 1, 4, dtype=torch.float64)
    k[:, 16:] = torch.tensor([1.0, -1.0]).repeat(8)[None, :, None, None]
    got = block_masses(q, k, scorer=Moments(), block_size=16)[0, 0, 0]
    # ½ (q·scale)²·variance = ½ · 4 · ¼
    torch.testing.assert_close(got, torch.tensor([0.0, 0.5], dtype=torch.float64).softmax(0), rtol=0, atol=1e-13)


def test_antidiagonal_by_hand():
    """The mean score of the pairs with (query + key) mod stride = stride − 1, as the rule draws them."""
    stride, q, k = 4, normal(1, 32, 1, 8), normal(1, 32, 1, 8)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k)[0, 0] * 8**-0.5
    want = torch.zeros(8, 8, dtype=torch.float64)
    for i in range(8):
        for j in range(8):
            want[i, j] = sum(scores[i * 4 + 3 - t, j * 4 + t] for t in range(4)) / 4
    for causal in (False, True):
        hidden = torch.ones(8, 8, dtype=torch.bool).triu(1) if causal else torch.zeros(8, 8, dtype=torch.bool)
        masses = want.masked_fill(hidden, -torch.inf).softmax(-1).view(2, 4, 2, 4).sum(3).mean(1)
        got = block_masses(q, k, scorer=Antidiagonal(stride), block_size=16, is_causal=causal)[0, 0]
        torch.testing.assert_close(got, masses, rtol=0, atol=1e-13)


@pytest.mark.parametrize("seq", [64, 50])
def test_sampled_rows_are_true_for_those_rows(seq):
    q, k = normal(1, seq, 2, 8), normal(1, seq, 2, 8)
    got = block_masses(q, k, scorer=SampledRows(16), block_size=16, is_causal=True)
    _, weights = dense.attend(q, k, k, allowed_pairs(seq, seq, True))
    rows = [min(i, seq - 1) for i in (15, 31, 47, 63)]
    want = torch.nn.functional.pad(weights[:, :, rows], (0, 64 - seq)).unflatten(3, (4, 16)).sum(-1)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


@pytest.mark.parametrize("scorer", SCORERS)
def test_missing_tokens_change_nothing(scorer):
    """Hidden keys at the end, whatever they hold, are like no keys at all."""
    q, k = normal(1, 64, 2, 8), normal(1, 96, 2, 8)
    hidden = (torch.arange(96) >= 70)[None]
    kwargs = {"scorer": scorer, "block_size": 16}
    got = block_masses(q, k, key_padding_mask=hidden, **kwargs)
    assert (got[..., 5:] == 0).all()
    torch.testing.assert_close(got[..., :5], block_masses(q, k[:, :70], **kwargs), rtol=0, atol=1e-13)


def brute_force(selector, masses, visible, forced):
    """What each selector says of itself, one block at a time, for one sample [lists, nq, nk]."""
    lists, num_q, num_k = masses.shape
    everything = [(h, i, j) for h in range(lists) for i, j in visible.nonzero().tolist()]

    def best(blocks, count):
        ordered = sorted(blocks, key=lambda b: (not forced[b[1], b[2]], -masses[b].item()))
        return ordered[: max(count, sum(bool(forced[i, j]) for _, i, j in blocks))]

    if isinstance(selector, SharedBudget):
        return set(best(everything, round(selector.share * len(everything))))
    kept = set()
    for i in range(num_q):
        row = [b for b in everything if b[1] == i]
        if isinstance(selector, TopK):
            assert not selector.even, "counted by another test"
            teams = [row] if selector.across_heads else [[b for b in row if b[0] == h] for h in range(lists)]
            for team in teams:
                kept |= set(best(team, max(round(selector.share * len(team)), min(1, len(team)))))
            continue
        for h in range(lists):
            team = best([b for b in row if b[0] == h], num_k)
            total = 0.0
            top = max((masses[b].item() for b in team), default=0.0)
            for b in team:
                if isinstance(selector, CumulativeMass):
                    wanted = total < selector.mass
                    total += masses[b].item()
                else:
                    wanted = masses[b].item() >= selector.ratio * top
                if wanted or forced[b[1], b[2]]:
                    kept.add(b)
    if getattr(selector, "at_most", 1.0) == 1.0:
        return kept
    return set(best(list(kept), max(round(selector.at_most * len(everything)), 0)))


@pytest.mark.parametrize("selector", [s for s in SELECTORS if not getattr(s, "even", False)], ids=repr)
@pytest.mark.parametrize("is_causal", [False, True])
def test_selectors_by_brute_force(selector, is_causal):
    for seq_q, seq_k, block_size in [(150, 150, 16), (70, 150, (32, 16)), (128, 128, (64, 16))]:
        blocks = pair(block_size)
        q, k = 2 * normal(2, seq_q, 4, 8), 2 * normal(2, seq_k, 2, 8)
        visible, forced = forced_blocks(seq_q, seq_k, blocks, is_causal, 1, 1)
        masses = block_masses(q, k, scorer="mean", block_size=block_size, is_causal=is_causal)
        layout = select_blocks(q, k, scorer="mean", selector=selector, block_size=block_size, is_causal=is_causal)
        got = layout.to_block_mask()
        for sample in range(2):
            want = torch.zeros_like(got[sample])
            for block in brute_force(selector, masses[sample], visible, forced):
                want[block] = True
            assert torch.equal(got[sample], want)


@pytest.mark.parametrize("across_heads", [False, True])
def test_even_rows_meet_the_share(across_heads):
    q, k = normal(1, 512, 3, 8), normal(1, 512, 3, 8)
    selector = TopK(0.25, even=True, across_heads=across_heads)
    mask = select_blocks(q, k, scorer="mean", selector=selector, block_size=16, is_causal=True).to_block_mask()[0]
    counts = mask.sum((0, 2)) if across_heads else mask.sum(2)[0]
    visible = torch.arange(1, 33) * (3 if across_heads else 1)
    level = counts.max()
    assert torch.equal(counts, visible.clamp(max=level))
    assert abs(mask.sum() / (3 * visible.sum() / (3 if across_heads else 1)) - 0.25) < 0.02


@settings(max_examples=80)
@given(
    lengths, st.sampled_from(BLOCKS), st.booleans(), st.sampled_from(SELECTORS), st.sampled_from(sorted(SCORERS)),
    st.integers(0, 70), st.integers(0, 70), st.booleans(), st.booleans(), st.integers(0, 2**31),
)  # fmt: skip
def test_every_selection(sizes, block_size, is_causal, selector, scorer, sink, local, per_kv_head, masked, seed):
    """A valid layout, forced blocks kept, nothing invisible, the budget respected, each sample as if it were alone."""
    torch.manual_seed(seed)
    (seq_q, seq_k), blocks = sizes, pair(block_size)
    q, k = normal(2, seq_q, 4, 8), normal(2, seq_k, 2, 8)
    hidden = torch.rand(2, seq_k) < 0.5 if masked else None
    call = {"scorer": scorer, "selector": selector, "block_size": block_size, "is_causal": is_causal}
    call |= {"sink": sink, "local": local, "per_kv_head": per_kv_head}
    layout = select_blocks(q, k, key_padding_mask=hidden, **call)
    replace(layout)  # the constructor refuses lists that are not a layout
    assert (layout.batch_size, layout.num_heads) == (2, 2 if per_kv_head else 4)
    mask = layout.to_block_mask()
    visible, forced = forced_blocks(seq_q, seq_k, blocks, is_causal, sink, local)
    if masked:
        keys = torch.nn.functional.pad(~hidden, (0, -seq_k % blocks[1])).unflatten(1, (-1, blocks[1])).any(2)
        visible, forced = (x & keys[:, None, None] for x in (visible, forced))
    assert not (mask & ~visible).any()
    assert not (forced & ~mask).any()
    if not isinstance(selector, TopK):  # the others count it row by row
        share = getattr(selector, "at_most", getattr(selector, "share", None))
        most = [x.sum().item() * mask.shape[1] for x in forced_blocks(seq_q, seq_k, blocks, is_causal, sink, local)]
        assert mask.sum((1, 2, 3)).max() <= max(round(share * most[0]), most[1])
    allowed = layout.to_dense()
    assert torch.equal(allowed, allowed & allowed_pairs(seq_q, seq_k, is_causal))
    for sample in range(2):
        one = slice(sample, sample + 1)
        alone = select_blocks(q[one], k[one], key_padding_mask=None if hidden is None else hidden[one], **call)
        assert torch.equal(alone.to_block_mask(), mask[one])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 7.0])
@pytest.mark.parametrize("scorer", [*SCORERS, "gate"])
def test_hidden_keys_take_no_part(scorer, bad):
    """Whatever they hold, and in the gradient neither. Means weighed a hidden NaN by 0, which is NaN: all masses of the
    head were NaN, and the blocks that were kept, of real keys, arbitrary."""
    q, k = normal(2, 160, 2, 8), normal(2, 160, 1, 8)
    hidden = torch.zeros(2, 160, dtype=torch.bool)
    hidden[0, 100:] = hidden[1, [3, 40, 41]] = True
    if scorer == "gate":
        scorer = BlockGate(2, 8, 1, dtype=torch.float64)
        for parameter in scorer.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    call = {"scorer": scorer, "block_size": 32, "key_padding_mask": hidden}
    results = []
    for value in (0.0, bad):
        keys = k.masked_fill(hidden[..., None, None], value).requires_grad_()
        queries = q.clone().requires_grad_()
        masses = block_masses(queries, keys, **call)
        layout = select_blocks(q, keys.detach(), selector=SharedBudget(0.4), **call)
        results.append([masses, layout.to_dense(), *torch.autograd.grad(masses.square().sum(), (queries, keys))])
    for clean, got in zip(*results, strict=True):
        assert torch.equal(clean, got)


def shares_rows(selector):
    """One budget over all rows, later ones included; the docstrings say so."""
    return isinstance(selector, SharedBudget) or getattr(selector, "at_most", 1.0) < 1.0


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("selector", [s for s in SELECTORS if not shares_rows(s)], ids=repr)
def test_a_causal_selection_never_looks_ahead(scorer, selector):
    """Tokens from `cut` on change: the query blocks before it choose as before."""
    q, k = normal(1, 256, 4, 8), normal(1, 256, 2, 8)
    other_q, other_k = q.clone(), k.clone()
    cut = 160
    other_q[:, cut:], other_k[:, cut:] = 3 * normal(1, 96, 4, 8), 3 * normal(1, 96, 2, 8)
    call = {"scorer": scorer, "selector": selector, "block_size": 16, "is_causal": True, "sink": 0}
    before, after = (select_blocks(a, b, **call).to_block_mask() for a, b in ((q, k), (other_q, other_k)))
    assert torch.equal(before[:, :, : cut // 16], after[:, :, : cut // 16])
    assert not torch.equal(before, after)


def test_shared_budget_estimates_do_not_look_ahead_either():
    """Only the number of blocks of a row may: the order of its blocks stays."""
    q, k = normal(1, 256, 2, 8), normal(1, 256, 2, 8)
    other_q, other_k = q.clone(), k.clone()
    other_q[:, 160:], other_k[:, 160:] = 9 * normal(1, 96, 2, 8), 9 * normal(1, 96, 2, 8)
    call = {"scorer": "moments", "selector": SharedBudget(0.4), "block_size": 32, "is_causal": True, "sink": 0}
    before, after = (select_blocks(a, b, **call).to_block_mask()[..., :5, :] for a, b in ((q, k), (other_q, other_k)))
    assert ((before & after) == before).all() or ((before & after) == after).all()


def test_documents_hide_blocks():
    q = normal(1, 128, 2, 8)
    ids = torch.tensor([0] * 40 + [1] * 60 + [2] * 28)[None]
    layout = select_blocks(q, q, selector=SharedBudget(1.0), block_size=16, is_causal=True, document_ids=ids)
    together = (ids[0][:, None] == ids[0]) & allowed_pairs(128, 128, True)
    assert torch.equal(layout.to_block_mask()[0, 0], visible_blocks(together, (16, 16)))


@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_over_a_selection(is_causal):
    """With lists that have spare places, forward and backward are exact."""
    q, k, v = (normal(2, 150, heads, 8).requires_grad_() for heads in (4, 2, 2))
    layout = select_blocks(q, k, selector=CumulativeMass(0.5), block_size=(32, 16), is_causal=is_causal)
    assert layout.num_active_blocks < len(layout.by_query.indices)
    do = normal(2, 150, 4, 8)
    grads = {}
    for backend in ("blockwise", "reference"):
        out = block_sparse_attention(q, k, v, layout, backend=backend)
        grads[backend] = (out, *torch.autograd.grad(out, (q, k, v), do))
    for got, want in zip(grads["blockwise"], grads["reference"], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scorer", SCORERS)
def test_low_precision_selects_nearly_the_same(dtype, scorer):
    q, k = normal(1, 256, 2, 16), normal(1, 256, 2, 16)
    call = {"scorer": scorer, "selector": TopK(0.4), "block_size": 16, "is_causal": True}
    want = select_blocks(q.to(dtype).double(), k.to(dtype).double(), **call).to_block_mask()
    got = select_blocks(q.to(dtype), k.to(dtype), **call).to_block_mask()
    assert (got != want).sum() <= 0.03 * want.sum()


def test_everything_is_full():
    q, k = normal(1, 100, 2, 8), normal(1, 100, 2, 8)
    layout = select_blocks(q, k, selector=SharedBudget(1.0), block_size=32)
    want = block_sparse_attention(q, k, k, Full(), backend="reference")
    torch.testing.assert_close(block_sparse_attention(q, k, k, layout), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"scorer": "best"}, ValueError, "scorer must be one of .* got 'best'"),
        ({"scorer": 3}, TypeError, "scorer must be one of .* got 3"),
        ({"selector": 0.1}, TypeError, "selector must be .* got 0.1"),
        ({"block_size": 24}, ValueError, "block_size must be one of .* got 24"),
        ({"sink": -1}, ValueError, "sink must be at least 0, got -1"),
        ({"local": 0.5}, TypeError, "local must be an int, got 0.5"),
        ({"is_causal": 1}, TypeError, "is_causal must be True or False, got 1"),
        ({"per_kv_head": None}, TypeError, "per_kv_head must be True or False, got None"),
        ({"scale": "x"}, TypeError, "scale must be a number"),
        ({"scorer": Antidiagonal(24)}, ValueError, "must divide the block, 16 tokens, got 24"),
        ({"key_padding_mask": torch.zeros(1, 9)}, ValueError, "key_padding_mask must have shape"),
    ],
)
def test_bad_arguments(change, error, message):
    q = normal(1, 64, 2, 8)
    with pytest.raises(error, match=message):
        select_blocks(q, q, **({"selector": SharedBudget(0.5), "block_size": 16} | change))


@pytest.mark.parametrize("make", [SharedBudget, TopK, CumulativeMass, RelativeThreshold])
def test_bad_shares(make):
    for share in (0.0, 1.5, -1, float("nan")):
        with pytest.raises(ValueError, match=r"in \(0, 1\], got"):
            make(share)
    with pytest.raises(TypeError, match="must be a number"):
        make("half")


@given(
    st.sampled_from(sorted(set(SCORERS) - {"sampled"})),
    st.sampled_from([TopK(0.3), TopK(0.3, True), TopK(0.3, False, True), TopK(0.25, True, True)]),
    st.sampled_from([(16, 16), (64, 16), (16, 32)]),
    st.lists(st.integers(1, 150), min_size=1, max_size=3),
    st.sampled_from([0, 40]),
)
@settings(max_examples=30)
def test_a_padded_sample_chooses_what_it_chooses_alone(scorer, selector, blocks, lengths, dense_below):
    torch.manual_seed(0)
    seq = max(lengths) + 9
    q, k = torch.randn(len(lengths), seq, 4, 8).double(), torch.randn(len(lengths), seq, 2, 8).double()
    options = {
        "scorer": scorer,
        "selector": selector,
        "block_size": blocks,
        "is_causal": True,
        "dense_below": dense_below,
    }
    got = select_blocks(q, k, lengths=torch.tensor(lengths), **options).to_dense()
    for sample, length in enumerate(lengths):
        own = slice(sample, sample + 1), slice(length)
        alone = select_blocks(q[own], k[own], **options).to_dense()
        assert got[sample : sample + 1, :, :length, :length].equal(alone)
