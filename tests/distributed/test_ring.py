"""The ring equals the single process: outputs, lse and all gradients, in float64 to 1e-10; no byte too many is sent."""

import itertools
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dilated_attention_pytorch import (
    BlockLayout,
    Causal,
    DilatedBlocks,
    Documents,
    Full,
    GlobalTokens,
    LocalBlocks,
    PerHead,
    RandomBlocks,
    SlidingWindow,
    block_sparse_attention,
)
from dilated_attention_pytorch.distributed import Placement
from dilated_attention_pytorch.testing import Case, oracle, tolerances
from tests import strategies
from tests.distributed import work
from tests.distributed.processes import ByRank, RankError

NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass
class Call:
    """A call over a ring: the whole tensors, and who holds which tokens of queries and keys."""

    case: Case
    placements: tuple[Placement, Placement]
    pattern: object  # what the ring is given; the case has its layout
    options: dict = field(default_factory=dict)

    @property
    def size(self):
        return self.placements[0].world_size

    def tokens(self, rank):
        return [
            torch.cat([torch.arange(run.start, run.stop) for run in placement.tokens(rank)])
            for placement in self.placements
        ]

    def shards(self):
        case, shards = self.case, ByRank()
        for rank in range(self.size):
            own_q, own_k = self.tokens(rank)
            masks = {"key_padding_mask": case.key_padding_mask, "document_ids": case.document_ids}
            masks = {name: None if mask is None else mask[:, own_k] for name, mask in masks.items()}
            of_q = case.q[:, own_q], case.k[:, own_k], case.v[:, own_k], case.do[:, own_q], case.dlse[:, :, own_q]
            shards.append((*of_q, masks))
        return shards

    def run(self, ranks):
        """out, lse, dq, dk, dv of the whole, which lse are −inf, and what each rank sent."""
        case = self.case
        names = ("is_causal", "scale", "dropout_p", "softcap", "alibi_slopes", "sinks")
        options = {**{name: getattr(case, name) for name in names}, **self.options}
        got = ranks.run(self.size, work.attend, self.shards(), self.pattern, options)
        whole = [torch.full_like(x, torch.nan) for x in (case.do, case.dlse, case.q, case.k, case.v)]
        whole[1] = whole[1].to(got[0][0][1].dtype)
        empty = torch.zeros(case.dlse.shape, dtype=torch.bool)
        for rank, (results, own_empty, _) in enumerate(got):
            own_q, own_k = self.tokens(rank)
            for name, target, x in zip(NAMES, whole, results, strict=True):
                if name == "lse":
                    target[:, :, own_q] = x
                else:
                    target[:, own_k if name in ("dk", "dv") else own_q] = x
            empty[:, :, own_q] = own_empty
        return whole, empty, [sent for *_, sent in got]

    def needed_keys(self, once=False):
        """[ranks, ranks]: keys (of one head each) that the queries of a rank need of another, from the block mask.

        With `once`, those that all others need of a rank count for one of them.
        """
        layout = self.case.layout.causal if self.case.is_causal else self.case.layout
        block, heads_kv = layout.blocks, self.case.k.shape[2]
        active = layout.to_block_mask().reshape(-1, layout.num_q_blocks, layout.num_k_blocks)
        owner_q, owner_k = (
            [next(r for r in range(self.size) if b in placement.blocks(r, size)) for b in range(num)]
            for placement, size, num in zip(self.placements, block, active.shape[1:], strict=True)
        )
        needed = set()
        for head, i, j in active.nonzero().tolist():
            heads = range(heads_kv) if len(active) == 1 else [head * heads_kv // len(active)]
            needed |= {(owner_q[i], j, each) for each in heads}
        if once:
            by_all = {
                (j, h)
                for _, j, h in needed
                if sum((r, j, h) in needed and r != owner_k[j] for r in range(self.size)) == self.size - 1
            }
            needed -= {(r, j, h) for r, j, h in needed if (j, h) in by_all and r != (0 if owner_k[j] else 1)}
        keys = torch.zeros(self.size, self.size, dtype=torch.int64)
        for rank, j, _ in needed:
            keys[rank, owner_k[j]] += min(block[1], layout.seq_k - j * block[1])
        return keys.fill_diagonal_(0)


def assert_exact(call, ranks, tolerance=1e-10):
    expected = oracle(call.case)
    got, empty, sent = call.run(ranks)
    assert torch.equal(empty, expected[1] == -torch.inf)
    for name, mine, want in zip(NAMES, got, expected, strict=True):
        want = torch.where(want == -torch.inf, 0.0, want)
        error = float((mine.double() - want).abs().max())
        assert error <= tolerance, f"{name} is off by {error:.3g}"
    return sent


def tensors(seed, batch, seq_q, seq_k, heads, heads_kv, dim, dtype=torch.float64, dim_v=None):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    dim_v = dim if dim_v is None else dim_v
    q, do = (normal(batch, seq_q, heads, width) for width in (dim, dim_v))
    k, v = (normal(batch, seq_k, heads_kv, width) for width in (dim, dim_v))
    return {"q": q, "k": k, "v": v, "do": do, "dlse": normal(batch, heads, seq_q).double()}


@st.composite
def calls(draw):
    """Any pattern, placement, lengths, heads, masks and dropout, on 2 to 4 ranks."""
    size, block = draw(st.integers(2, 4)), draw(st.sampled_from([16, 16, 32]))
    heads_kv = draw(st.integers(1, 2))
    heads, batch = heads_kv * draw(st.integers(1, 2)), draw(st.integers(1, 2))
    kind = draw(st.sampled_from(["lengths", "lengths", "zigzag", "balanced", "cross"]))
    seq_k = draw(st.integers((size - 1) * block + 1, 200))
    pattern = draw(strategies.patterns(seq_k))
    if draw(st.integers(0, 4)) == 0:
        pattern = PerHead(tuple(draw(strategies.patterns(seq_k)) for _ in range(heads)) if heads > 1 else (pattern,))
    is_causal = draw(st.booleans())
    seq_q = draw(st.integers((size - 1) * block + 1, 200)) if kind == "cross" else seq_k

    def of_lengths(seq):
        cuts = draw(st.sets(st.integers(1, (seq - 1) // block), min_size=size - 1, max_size=size - 1))
        edges = [0, *(cut * block for cut in sorted(cuts)), seq]
        return Placement.of_lengths([b - a for a, b in itertools.pairwise(edges)], block_size=block)

    options = {}
    if kind in ("lengths", "cross"):
        place_k = of_lengths(seq_k)
        placements = (of_lengths(seq_q) if kind == "cross" else place_k, place_k)
    else:
        make = Placement.zigzag if kind == "zigzag" else Placement.contiguous
        placement = make(seq_k, size, block_size=block)
        if kind == "balanced":
            placement = Placement.balanced(pattern, seq_k, size, is_causal=is_causal, block_size=block)
        placements, options = (placement, placement), {"placement": placement}
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    padding = ids = None
    if draw(st.booleans()):
        padding = torch.rand(batch, seq_k, generator=generator) < draw(st.sampled_from([0.1, 0.5]))
    if kind != "cross" and draw(st.booleans()):
        ids = torch.randint(0, 3, (batch, seq_k), generator=generator)
    widths = {"dim": draw(st.sampled_from([1, 8])), "dim_v": draw(st.sampled_from([None, None, 5]))}
    case = Case(
        **tensors(draw(st.integers(0, 2**31)), batch, seq_q, seq_k, heads, heads_kv, **widths),
        layout=BlockLayout.from_pattern(pattern, seq_q, seq_k, block_size=16),
        is_causal=is_causal,
        scale=draw(st.sampled_from([None, 0.3])),
        key_padding_mask=padding,
        document_ids=ids,
        dropout_p=draw(st.sampled_from([0.0, 0.3])),
        softcap=draw(st.sampled_from([None, None, 1.5])),
        alibi_slopes=(
            torch.rand(heads, generator=generator, dtype=torch.float64) * 0.1
            if kind != "cross" and draw(st.booleans())
            else None
        ),
        sinks=torch.randn(heads, generator=generator, dtype=torch.float64) if draw(st.booleans()) else None,
    )
    given_layout = draw(st.integers(0, 3)) == 0
    if given_layout and kind != "balanced" and draw(st.booleans()):
        lists = draw(st.sampled_from([(), (heads,), (heads_kv,)]))
        case = replace(case, layout=BlockLayout.from_mask(draw(strategies.token_masks((*lists, seq_q, seq_k))), 16))
    return Call(case, placements, case.layout if given_layout else pattern, options)


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(call=calls())
def test_any_call(ranks, call):
    assert_exact(call, ranks)


def test_sinks_get_the_gradient_of_all_ranks(ranks):
    """Each rank gives that of its own queries: the sum over the ranks is the gradient."""
    case = Case(
        **tensors(3, 2, 96, 96, 4, 2, 8), layout=BlockLayout.from_pattern(SlidingWindow(40, 9), 96, block_size=16)
    )
    placement = Placement.contiguous(96, 3, block_size=16)
    call = Call(case, (placement, placement), SlidingWindow(40, 9))
    sinks = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got = ranks.run(3, work.gradient_of_sinks, call.shards(), call.pattern, sinks)
    sinks.requires_grad_()
    out = block_sparse_attention(case.q, case.k, case.v, case.layout, sinks=sinks, backend="reference")
    torch.testing.assert_close(sum(got), torch.autograd.grad(out, sinks, case.do)[0], rtol=0, atol=1e-10)


def test_slopes_need_queries_and_keys_of_the_same_tokens(ranks):
    case = Case(**tensors(3, 1, 64, 96, 2, 2, 8), layout=BlockLayout.from_pattern(Causal(), 64, 96, block_size=16))
    placements = Placement.contiguous(64, 2, block_size=16), Placement.contiguous(96, 2, block_size=16)
    call = Call(case, placements, Causal(), {"alibi_slopes": torch.ones(2, dtype=torch.float64)})
    with pytest.raises(RankError, match="alibi_slopes over a ring needs queries and keys of the same tokens, got 32"):
        call.run(ranks)


PATTERNS = {
    "full": Full(),
    "window": SlidingWindow(70, 20),
    "global | window": GlobalTokens(20, queries=True) | SlidingWindow(30, 30),
    "global keys | window": GlobalTokens(20) | SlidingWindow(30, 0),
    "documents": Documents((100, 37, 200, 180)),
    "local blocks": LocalBlocks(100, block_size=32),
    "dilated": DilatedBlocks((64, 128, 512), (1, 2, 4), sparsity_ratio=0.3, block_size=32),
    "random": RandomBlocks(3, block_size=32),
    "per head": PerHead((SlidingWindow(40, 0), RandomBlocks(2, block_size=32), Causal(), GlobalTokens(10))),
}


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", PATTERNS)
def test_exact_and_minimal(ranks, name, is_causal, size):
    """Uneven shards, grouped heads; each needed remote block comes once, keys and values, and its gradients go back."""
    lengths = {1: [517], 2: [192, 325], 3: [64, 320, 133], 4: [128, 32, 160, 197]}[size]
    placement = Placement.of_lengths(lengths, block_size=32)
    case = Case(
        **tensors(0, 2, 517, 517, 4, 2, 6, dim_v=10),
        layout=BlockLayout.from_pattern(PATTERNS[name], 517, block_size=32),
        is_causal=is_causal,
    )
    call = Call(case, (placement, placement), PATTERNS[name], {"placement": placement})
    sent = assert_exact(call, ranks)
    one = 2 * (6 + 10) * 8  # a key of a head: with its value, of 2 samples, 6 and 10 numbers of 8 bytes
    needed = call.needed_keys()
    # Global tokens go to all at once; and so do their gradients come back, of each rank once.
    to_all = name == "global keys | window" or (name == "global | window" and is_causal)
    given = call.needed_keys(once=to_all and size == 4)
    assert [forward for forward, _ in sent] == (one * given.sum(0)).tolist()
    assert [backward for _, backward in sent] == (one * (given.sum(0) + needed.sum(1))).tolist()


@pytest.mark.parametrize("lists", [(), (4,)], ids=str)
def test_bitmaps(ranks, lists):
    """A rank keeps the bitmaps of its own rows, and its blocks and those of others allow the same pairs."""
    mask = torch.rand(*lists, 200, 200, generator=torch.Generator().manual_seed(0)) < 0.3
    mask[..., :90, 120:] = False  # empty blocks, too
    case = Case(**tensors(0, 2, 200, 200, 4, 2, 8), layout=BlockLayout.from_mask(mask, 32), is_causal=bool(lists))
    placement = Placement.of_lengths([96, 64, 40], block_size=32)
    assert_exact(Call(case, (placement, placement), case.layout, {"placement": placement}), ranks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_errs_as_eager_does(ranks, dtype):
    pattern = SlidingWindow(100, 40) | GlobalTokens(8)
    case = Case(
        **tensors(3, 1, 400, 400, 4, 2, 16, dtype), layout=BlockLayout.from_pattern(pattern, 400, block_size=32)
    )
    placement = Placement.zigzag(400, 4, block_size=32)
    call = Call(case, (placement, placement), pattern, {"placement": placement})
    expected = oracle(case)
    got, _, _ = call.run(ranks)
    for name, mine, want, bound in zip(NAMES, got, expected, tolerances(case, expected), strict=True):
        error = float((mine.double() - want).abs().max())
        assert error <= bound, f"{name} in {dtype} is off by {error:.3g}, allowed {bound:.3g}"


def test_values_of_one_give_one(ranks):
    pattern = SlidingWindow(60, 60)
    case = Case(**tensors(1, 1, 300, 300, 2, 2, 8), layout=BlockLayout.from_pattern(pattern, 300, block_size=16))
    case.v.fill_(1.0)
    placement = Placement.contiguous(300, 4, block_size=16)
    out = Call(case, (placement, placement), pattern).run(ranks)[0][0]
    torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=1e-14)


def test_the_future_changes_no_bit_of_the_past(ranks):
    pattern = SlidingWindow(90, 90)
    outs = []
    for change in (0.0, 5.0):
        case = Case(
            **tensors(1, 1, 300, 300, 2, 2, 8),
            layout=BlockLayout.from_pattern(pattern, 300, block_size=16),
            is_causal=True,
        )
        case.k[:, 150:] += change
        case.v[:, 150:] += change
        placement = Placement.zigzag(300, 4, block_size=16)
        outs.append(Call(case, (placement, placement), pattern, {"placement": placement}).run(ranks)[0][0])
    assert torch.equal(outs[0][:, :150], outs[1][:, :150])
    assert not torch.equal(outs[0][:, 150:], outs[1][:, 150:])


@pytest.mark.parametrize("pattern", [Full(), PerHead((Full(), Full(), Full(), SlidingWindow(20, 20)))])
def test_at_most_two_receive_buffers(ranks, pattern):
    """Three steps forward and three backward; the keys of two of them exist at a time."""
    q = torch.randn(1, 64, 4, 8, requires_grad=True)
    for most, steps in ranks.run(4, work.most_buffers, q, pattern):
        assert most == 2
        assert steps == 6


def test_no_operator_is_registered_on_the_way(ranks):
    ranks.run(2, work.without_operators, SlidingWindow(20, 20) | GlobalTokens(4))


def test_a_plan_serves_every_batch_dtype_and_way(ranks):
    """Training and evaluation take turns: the plan is made once."""
    assert ranks.run(2, work.plans_made, SlidingWindow(23, 29)) == [1, 1]


LEARNING = {"q": [("q",)] * 3, "k, v": [("k", "v")] * 3, "one each": [("q",), ("k",), ("v",)]}


@pytest.mark.parametrize("learning", LEARNING)
@pytest.mark.parametrize("order", [(0, 2, 1, 3), (3, 1, 2, 0)], ids=str)
@pytest.mark.parametrize("name", ["window", "per head"])
def test_any_strides_and_any_of_q_k_v_that_learn(ranks, name, order, learning):
    placement = Placement.of_lengths([96, 64, 73], block_size=32)
    case = Case(**tensors(0, 2, 233, 233, 4, 4, 8), layout=BlockLayout.from_pattern(PATTERNS[name], 233, block_size=32))
    case.dlse.zero_()
    expected = oracle(case)
    whole = case.q, case.k, case.v, case.do, case.dlse
    shards = ByRank(work.shard_of(whole, placement, rank)[:4] for rank in range(3))
    results = ranks.run(3, work.attend_strided, shards, PATTERNS[name], order, ByRank(LEARNING[learning]))
    for rank, got in enumerate(results):
        assert tuple(each for each, x in zip("qkv", got[1:], strict=True) if x is not None) == LEARNING[learning][rank]
        for mine, want in zip(got, [expected[0], *expected[2:]], strict=True):
            if mine is not None:
                torch.testing.assert_close(mine, want[:, placement.tokens(rank)[0]], rtol=0, atol=1e-10)
