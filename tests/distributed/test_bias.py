"""Biases over a ring: outputs and all gradients are those of one process, wherever the tokens are."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from dilated_attention_pytorch import (
    Causal,
    GlobalTokens,
    PerHead,
    RandomBlocks,
    ScoreBias,
    SlidingWindow,
    block_sparse_attention,
    dilated_attention,
    ring_block_sparse_attention,
    ring_dilated_attention,
)
from dilated_attention_pytorch.distributed import Placement, shard_sequence
from tests.distributed.processes import RankError

BATCH, SEQ, HEADS, KV, DIM = 2, 176, 4, 2, 8
SIDES = (11, 16)  # a grid of so many tokens
SHAPES = {
    "slopes": (HEADS,),
    "signed": (BATCH, HEADS),
    "table": (HEADS, 31),
    "t5": (1, 8),
    "grid": (HEADS, 5, 3),
    "keys": (BATCH, 1, SEQ),
    "forget": (1, HEADS, SEQ),
    "dense": (BATCH, HEADS, SEQ, SEQ),
    "rows": (1, 1, SEQ, SEQ),
}
# Of the whole, what a rank has of the tensor.
OWN = {"keys": 2, "forget": 2, "dense": 2, "rows": 2}
TERMS = {
    "slopes": ScoreBias.slopes,
    "signed": partial(ScoreBias.slopes, signed=True),
    "table": ScoreBias.table,
    "t5": partial(ScoreBias.t5, max_distance=40),
    "grid": partial(ScoreBias.grid, shape=SIDES),
    "keys": ScoreBias.keys,
    "forget": partial(ScoreBias.forget, summed=True),
    "dense": ScoreBias.dense,
    "rows": ScoreBias.dense,
}
PATTERNS = {
    "window": SlidingWindow(60, 10),
    "causal": Causal(),
    "global": GlobalTokens(9, queries=True) | SlidingWindow(20, 0),
    "heads": PerHead((SlidingWindow(30, 0), RandomBlocks(2, block_size=16), Causal(), GlobalTokens(10))),
    "branches": {"segment_lengths": (32, 88, 176), "dilation_rates": (1, 2, 4)},
}


def drawn(names):
    draw = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    q, do = (normal(BATCH, SEQ, HEADS, DIM) for _ in range(2))
    k, v = (normal(BATCH, SEQ, KV, DIM) for _ in range(2))
    return [q, k, v], do, normal(BATCH, HEADS, SEQ), [0.3 * normal(*SHAPES[name]) for name in names]


def results(attend, tensors, do, dlse, names, of_bias):
    """out, lse and the gradients of q, k, v and of every tensor of the bias."""
    leaves = [x.clone().requires_grad_() for x in (*tensors, *of_bias)]
    terms = [TERMS[name](x) for name, x in zip(names, leaves[3:], strict=True)]
    out, lse = attend(*leaves[:3], bias=sum(terms[1:], terms[0]), return_lse=True)
    finite = torch.where(lse == -torch.inf, 0.0, lse)
    return [out.detach(), finite.detach(), *torch.autograd.grad((out, finite), leaves, (do, dlse))]


def over_ring(group, placement, names, kind, options, device="cpu"):
    """What this rank has of the results; on a GPU in float32."""
    tensors, do, dlse, of_bias = drawn(names)
    if device != "cpu":
        tensors, of_bias = ([x.float().to(device) for x in each] for each in (tensors, of_bias))
        do, dlse = do.float().to(device), dlse.float().to(device)
    own = partial(shard_sequence, placement=placement, group=group)
    of_bias = [own(x, dim=OWN[name]) if name in OWN else x for name, x in zip(names, of_bias, strict=True)]
    what, more = PATTERNS[kind], {"group": group, "placement": placement, **options}

    def attend(q, k, v, **call):
        if isinstance(what, dict):
            return ring_dilated_attention(q, k, v, **what, **more, **call)
        return ring_block_sparse_attention(q, k, v, what, **more, **call)

    torch.manual_seed(3)
    found = results(attend, [own(x) for x in tensors], own(do), own(dlse, dim=2), names, of_bias)
    return [x.double().cpu() for x in found]


def in_one_process(names, kind, options):
    tensors, do, dlse, of_bias = drawn(names)
    what = PATTERNS[kind]

    def attend(q, k, v, **call):
        if isinstance(what, dict):
            return dilated_attention(q, k, v, **what, **options, **call)
        return block_sparse_attention(q, k, v, what, **options, **call)

    torch.manual_seed(3)
    return results(attend, tensors, do, dlse, names, of_bias)


def assert_same(ranks, size, placement, names, kind, **options):
    got = ranks.run(size, over_ring, placement, names, kind, options)
    compare(got, in_one_process(names, kind, options), placement, names, 1e-10)


def compare(got, want, placement, names, tolerance):
    labels = ("out", "lse", "dq", "dk", "dv", *names)
    for i, (label, right) in enumerate(zip(labels, want, strict=True)):
        dim = OWN.get(label, 2 if label == "lse" else 1)
        if label in names and label not in OWN:  # each rank has the part of its own queries
            mine = sum(of_rank[i] for of_rank in got)
        else:
            mine = torch.full_like(right, torch.nan)
            for rank, of_rank in enumerate(got):
                mine.index_copy_(dim, placement.positions(rank), of_rank[i])
        torch.testing.assert_close(mine, right, rtol=0, atol=tolerance, msg=lambda m: f"{label}: {m}")  # noqa: B023
        assert float(right.abs().max()) > 1e-3, label


PLACED = {
    "contiguous": Placement.contiguous(SEQ, 2, block_size=16),
    "zigzag": Placement.zigzag(SEQ, 3, block_size=16),
    "four": Placement.zigzag(SEQ, 4, block_size=16),
}


CASES = [
    ("slopes", "causal", "zigzag"),
    ("slopes", "branches", "contiguous"),
    ("signed+table", "window", "four"),
    ("signed+table", "heads", "zigzag"),
    ("t5+keys", "global", "four"),
    ("t5+keys", "branches", "zigzag"),
    ("grid+forget", "heads", "four"),
    ("grid+forget", "causal", "contiguous"),
    ("dense", "window", "zigzag"),
    ("dense", "branches", "four"),
    ("rows+keys+slopes", "global", "contiguous"),
    ("rows+keys+slopes", "branches", "four"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("names", "kind", "placed"), CASES)
def test_as_in_one_process(ranks, names, kind, placed):
    placement = PLACED[placed]
    options = {"softcap": 3.0, "dropout_p": 0.2} if "keys" in names else {}
    if kind == "branches" and "slopes" in names:
        options = {"detach_branch_weights": True}
    assert_same(ranks, placement.world_size, placement, names.split("+"), kind, **options)


def test_of_every_kind_at_once(ranks):
    assert_same(ranks, 3, PLACED["zigzag"], ["slopes", "t5", "keys", "forget", "rows"], "global", is_causal=True)


def compiled(group, placement, names):
    """The same in one graph, whose operator gives the gradients too."""
    tensors, do, _, of_bias = drawn(names)
    own = partial(shard_sequence, placement=placement, group=group)
    of_bias = [own(x, dim=OWN[name]) if name in OWN else x for name, x in zip(names, of_bias, strict=True)]

    def attend(q, k, v, *terms):
        bias = [TERMS[name](x) for name, x in zip(names, terms, strict=True)]
        return ring_block_sparse_attention(
            q, k, v, SlidingWindow(60, 10), group=group, placement=placement, bias=sum(bias[1:], bias[0])
        )

    found = []
    for function in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        leaves = [own(x).clone().requires_grad_() for x in tensors] + [x.clone().requires_grad_() for x in of_bias]
        out = function(*leaves)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, own(do))])
    torch._dynamo.reset()
    for eager, graph in zip(*found, strict=True):
        torch.testing.assert_close(graph, eager, rtol=0, atol=1e-12)
    return len(found[0])


@pytest.mark.slow
def test_one_graph_is_what_eager_is(ranks):
    assert ranks.run(2, compiled, PLACED["contiguous"], ("slopes", "keys", "rows")) == [7, 7]


def refused(group, bias, options):
    q = torch.zeros(1, 32, 2, 8, dtype=torch.float64)
    ring_block_sparse_attention(q, q, q, Causal(), group=group, bias=bias, **options)


ONES = torch.ones(1, 1, 32, dtype=torch.float64)
PLACE = {"placement": Placement.contiguous(64, 2, block_size=16)}


@pytest.mark.parametrize(
    ("bias", "options", "message"),
    [
        (ScoreBias.table(ONES[0]), {}, r"bias over a ring needs a placement for a table, which goes by where tokens"),
        (ScoreBias.dense(ONES[None]), {}, "bias over a ring needs a placement for a dense, which"),
        (
            ScoreBias.forget(ONES),
            PLACE,
            r"must have the gates of forget summed over the whole .*summed=True",
        ),
        (ScoreBias.dense(ONES[None].expand(1, 1, 32, 32)), PLACE, r"dense of shape \(1 or 1, 2 or 1, 32, 64\), got"),
        (ScoreBias.keys(torch.ones(1, 1, 40)), PLACE, r"keys of shape \(1 or 1, 2 or 1, 32\), got"),
        (
            ScoreBias.grid(ONES[None, 0, :, :3], (4, 4)),
            PLACE,
            r"a grid of all 64 tokens of the ring, got shape",
        ),
    ],
    ids=["table", "dense", "forget", "narrow", "keys", "grid"],
)
def test_refused(ranks, bias, options, message):
    with pytest.raises(RankError, match=message):
        ranks.run(2, refused, bias, options)


def other_bias(group):
    """What a rank hears where one has another kind of bias."""
    q, table = torch.zeros(1, 32, 2, 8), torch.zeros(1, 5 + 2 * (dist.get_rank(group) == 1))
    with pytest.raises(ValueError, match=r"bias: .*table \[1, 1, 5\].*table \[1, 1, 7\]"):
        ring_block_sparse_attention(q, q, q, Causal(), group=group, bias=ScoreBias.table(table), **PLACE)
    return True


def test_another_bias_is_named(ranks):
    assert ranks.run(2, other_bias) == [True, True]
