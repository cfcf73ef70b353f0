"""Dilated attention over a ring equals the definition in one process, gradients included; no key too many is sent."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dilated_attention_pytorch import Placement, dilated_attention
from dilated_attention_pytorch.distributed.needs import asked_of, most_between, needs_of
from dilated_attention_pytorch.distributed.work import Work
from dilated_attention_pytorch.layout.branches import cheapest_blocks
from dilated_attention_pytorch.patterns import Branches
from tests.distributed import work
from tests.distributed.processes import ByRank
from tests.strategies import branches

NAMES = ("out", "lse", "dq", "dk", "dv")


def expected(q, k, v, do, dlse, options):
    torch.manual_seed(0)
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out, lse = dilated_attention(q, k, v, return_lse=True, backend="reference", **options)
    finite = torch.where(lse == -torch.inf, 0.0, lse)
    return [out.detach(), finite.detach(), *torch.autograd.grad((out, finite), (q, k, v), (do, dlse))]


def run(ranks, placements, tensors, options, over):
    """out, lse, dq, dk, dv of the whole, and the bytes that each rank sent forward."""
    q, k, v, do, dlse = tensors
    padding = options.get("key_padding_mask")
    size = placements[0].world_size
    own = [
        [torch.cat([torch.arange(run.start, run.stop) for run in place.tokens(rank)]) for place in placements]
        for rank in range(size)
    ]
    shards = ByRank(
        (q[:, a], k[:, b], v[:, b], do[:, a], dlse[:, :, a], None if padding is None else padding[:, b]) for a, b in own
    )
    rest = {name: value for name, value in options.items() if name != "key_padding_mask"}
    got = ranks.run(size, work.attend_dilated, shards, {**rest, **over})
    whole = [torch.full_like(x, torch.nan) for x in (q, dlse, q, k, v)]
    for (a, b), (results, _) in zip(own, got, strict=True):
        for name, target, x in zip(NAMES, whole, results, strict=True):
            if name == "lse":
                target[:, :, a] = x
            else:
                target[:, b if name in ("dk", "dv") else a] = x
    return whole, [sent for _, sent in got]


def tensors(seed, batch, seq_q, seq_k, heads, heads_kv, dim):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, do = (normal(batch, seq_q, heads, dim) for _ in range(2))
    k, v = (normal(batch, seq_k, heads_kv, dim) for _ in range(2))
    return q, k, v, do, normal(batch, heads, seq_q)


def assert_exact(ranks, placements, given, options, over=None):
    want = expected(*given, options)
    got, sent = run(ranks, placements, given, options, over or {})
    for name, mine, right in zip(NAMES, got, want, strict=True):
        error = float((mine - right).abs().max())
        assert error <= 1e-10, f"{name} is off by {error:.3g}"
    return sent


@st.composite
def calls(draw):
    size, block = draw(st.integers(2, 4)), draw(st.sampled_from([16, 32]))
    kind = draw(st.sampled_from(["lengths", "contiguous", "zigzag", "cross"]))
    seq_k = draw(st.integers((size - 1) * block + 1, 260))
    seq_q = draw(st.integers((size - 1) * block + 1, 260)) if kind == "cross" else seq_k

    def of_lengths(seq):
        cuts = draw(st.sets(st.integers(1, (seq - 1) // block), min_size=size - 1, max_size=size - 1))
        edges = [0, *(cut * block for cut in sorted(cuts)), seq]
        return Placement.of_lengths([b - a for a, b in itertools.pairwise(edges)], block_size=block)

    over = {}
    if kind in ("lengths", "cross"):
        place_k = of_lengths(seq_k)
        placements = (of_lengths(seq_q) if kind == "cross" else place_k, place_k)
    else:
        placement = getattr(Placement, kind)(seq_k, size, block_size=block)
        placements, over = (placement, placement), {"placement": placement}
    heads_kv = draw(st.integers(1, 2))
    heads, batch = heads_kv * draw(st.integers(1, 2)), draw(st.integers(1, 2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    which = draw(branches(256, heads))
    options = {
        "segment_lengths": which.segment_lengths,
        "dilation_rates": which.dilation_rates,
        "is_causal": draw(st.booleans()),
        "head_offsets": which.head_offsets,
        "detach_branch_weights": draw(st.booleans()),
        "dropout_p": draw(st.sampled_from([0.0, 0.3])),
    }
    if draw(st.booleans()):
        options["key_padding_mask"] = torch.rand(batch, seq_k, generator=generator) < 0.2
    if kind != "cross" and draw(st.booleans()):
        options["alibi_slopes"] = torch.rand(heads, generator=generator, dtype=torch.float64) * 0.1
    return placements, tensors(draw(st.integers(0, 2**31)), batch, seq_q, seq_k, heads, heads_kv, 4), options, over


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(call=calls())
def test_any_call(ranks, call):
    placements, given, options, over = call
    assert_exact(ranks, placements, given, options, over)


def needed_keys(branches, placement, heads, heads_kv, is_causal):
    """[ranks, ranks]: keys, each of one head, that the queries of a rank count and another holds, token by token."""
    seq, size = placement.seq, placement.world_size
    owner = {t: rank for rank in range(size) for run in placement.tokens(rank) for t in range(run.start, run.stop)}
    needed = set()
    for head in range(heads):
        for w, r, offset in branches.of_head(head, heads):
            for start in range(0, seq, w):
                kept = [t for t in range(start, min(start + w, seq)) if (t - start) % r == offset]
                for key in kept:
                    askers = {owner[query] for query in kept if query >= key or not is_causal} - {owner[key]}
                    needed |= {(asker, key, head * heads_kv // heads) for asker in askers}
    keys = torch.zeros(size, size, dtype=torch.int64)
    for asker, key, _ in needed:
        keys[asker, owner[key]] += 1
    return keys


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("seq", [768, 517])
def test_longnet(ranks, seq, size, is_causal):
    """Each key that a head's queries count is sent once, and no other; wherever shards begin."""
    heads, heads_kv, dim = 4, 2, 4
    branches = Branches((64, 128, 512), (1, 2, 4))
    options = {"segment_lengths": (64, 128, 512), "dilation_rates": (1, 2, 4), "is_causal": is_causal}
    placement = Placement.contiguous(seq, size, block_size=64 if seq == 768 else 16)
    given = tensors(0, 1, seq, seq, heads, heads_kv, dim)
    sent = assert_exact(ranks, (placement, placement), given, options, {"placement": placement})
    one = 2 * dim * 8  # key and value
    assert sent == (one * needed_keys(branches, placement, heads, heads_kv, is_causal).sum(0)).tolist()


@settings(max_examples=60)
@given(call=calls())
def test_what_is_asked_for(call):
    """In closed form what the definition says, of any placement, and whoever asks sees it as whoever is asked."""
    (place_q, place_k), (q, k, *_), options, _ = call
    if place_q != place_k:
        return
    which = Branches(*(options[name] for name in ("segment_lengths", "dilation_rates", "head_offsets")))
    heads, heads_kv, is_causal = q.shape[2], k.shape[2], options["is_causal"]
    block, num_residues = cheapest_blocks(which, place_k.seq, cut=place_k.cut)
    work = Work(
        what=which, is_causal=is_causal, placements=(place_q, place_k), blocks=(block, block),
        num_residues=num_residues, heads=heads, heads_kv=heads_kv, device=torch.device("cpu"),
    )  # fmt: skip
    needed, most = needed_keys(which, place_k, heads, heads_kv, is_causal), most_between(work)
    for asker in range(place_k.world_size):
        needs = needs_of(work, asker)
        for owner in range(place_k.world_size):
            if owner == asker:
                continue
            times = heads_kv if work.is_shared else 1
            received = needs[owner, False].received if (owner, False) in needs else ()
            asked = asked_of(work, owner, asker)
            assert len(asked) == len(received)
            assert len(asked) * times == needed[asker, owner]
            assert not len(asked) or most[(asker - owner) % place_k.world_size]


def test_refused(ranks):
    ranks.run(2, work.refused_branches)
