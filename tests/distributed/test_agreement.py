"""Ranks that do not make the same call get an error that names the difference, all of them, and the ring goes on."""

import pytest
import torch

from dilated_attention_pytorch import BlockLayout, Causal, Documents, GlobalTokens, RandomBlocks, SlidingWindow
from dilated_attention_pytorch.distributed import Placement
from tests.distributed import work
from tests.distributed.processes import ByRank, RankError

SHARD = 64


def call(**changes):
    """What one rank gives: 64 tokens of a window."""
    options = {
        "shape": (1, SHARD, 2, 8), "heads_kv": 2, "dtype": torch.float32, "pattern": SlidingWindow(20, 20),
        "learn": True,
    }  # fmt: skip
    unknown = {name: value for name, value in changes.items() if name not in options}
    return {**options, **{name: changes[name] for name in options if name in changes}, "options": unknown}


PADDING, IDS = torch.zeros(1, SHARD, dtype=torch.bool), torch.zeros(1, SHARD, dtype=torch.int32)
CONTIGUOUS = Placement.contiguous(3 * SHARD, 3, block_size=16)
LAYOUT = BlockLayout.from_pattern(SlidingWindow(20, 20), 3 * SHARD, block_size=16)
DIFFERENCES = {
    "pattern": ({"pattern": SlidingWindow(20, 21)}, "pattern: SlidingWindow.left=20, right=20. on rank 0 and 2, Slid"),
    "blocks": ({"pattern": RandomBlocks(2, seed=3, block_size=16)}, "pattern: .* RandomBlocks"),
    "layout": ({"pattern": LAYOUT}, "pattern: .* BlockLayout"),
    "dtype": ({"dtype": torch.float16}, "dtype: torch.float32 on rank 0 and 2, torch.float16 on rank 1"),
    "batch": ({"shape": (2, SHARD, 2, 8)}, "batch: 1 on rank 0 and 2, 2 on rank 1"),
    "heads": ({"heads_kv": 1}, "heads: 2 of queries, 2 of keys on rank 0 and 2, 2 of queries, 1 of keys on rank 1"),
    "head_dim": (
        {"shape": (1, SHARD, 2, 16)},
        "head_dim: 8 of queries and keys, 8 of values on rank 0 and 2, 16 of queries .* on rank 1; scale",
    ),
    "causal": ({"is_causal": True}, "is_causal: False on rank 0 and 2, True on rank 1$"),
    "scale": ({"scale": 0.5}, "scale: 0.35.* on rank 0 and 2, 0.5 on rank 1$"),
    "dropout": ({"dropout_p": 0.5}, "dropout_p: 0.0 on rank 0 and 2, 0.5 on rank 1$"),
    "padding": ({"key_padding_mask": PADDING}, "key_padding_mask: none .* given, torch.bool on rank 1$"),
    "ids": ({"document_ids": IDS}, "document_ids: none .* given, torch.int32 on rank 1$"),
    "gradients": ({"learn": False}, "gradients: asked for on rank 0 and 2, not asked for on rank 1$"),
    "placement": ({"placement": CONTIGUOUS}, "placement: by the lengths of the shards"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_named_on_every_rank(ranks, name):
    changes, message = DIFFERENCES[name]
    with pytest.raises(RankError) as failed:
        ranks.run(3, work.call, ByRank([call(), call(**changes), call()]))
    assert sorted(failed.value.errors) == [0, 1, 2]
    for kind, text in failed.value.errors.values():
        assert kind == "ValueError"
        assert text.startswith("the ranks of a ring must make the same call, but differ in ")
        assert pytest.raises(ValueError, match=message).matches(ValueError(text)), text
    assert ranks.run(3, work.call, call()) == [(1, SHARD, 2, 8)] * 3  # nothing is left over


@pytest.mark.slow
@pytest.mark.parametrize("agreement", ["first", "always"])
@pytest.mark.parametrize("name", [*DIFFERENCES, "refused"])
def test_a_difference_after_the_first_call(ranks, name, agreement):
    """The others have begun to exchange when they hear of it; what they sent is taken for nothing else later."""
    good = call(placement=CONTIGUOUS, agreement=agreement)
    changes, message = DIFFERENCES.get(name, ({"shape": (1, 48, 2, 8)}, "must have the 64 tokens of rank 1"))
    if name == "placement":
        changes = {"placement": None}
        message = "placement: .* on rank 0 and 2, by the lengths of the shards on rank 1"
    odd = call(**{"placement": CONTIGUOUS, "agreement": agreement, **changes})
    expected = ranks.run(3, work.sum_of_ones, good)
    for _ in range(2):
        with pytest.raises(RankError) as failed:
            ranks.run(3, work.call, ByRank([good, odd, good]))
        assert sorted(failed.value.errors) == [0, 1, 2]
        for rank, (kind, text) in failed.value.errors.items():
            assert kind == ("RingError" if name == "refused" and rank != 1 else "ValueError"), text
            assert pytest.raises(ValueError, match=message).matches(ValueError(text)), text
        assert ranks.run(3, work.sum_of_ones, good) == expected


def test_when_the_others_are_heard(ranks):
    """The first call of a kind waits for them before it sends anything; later ones, other documents too, do not."""
    placement = Placement.contiguous(3 * SHARD, 3, block_size=16)
    documents = [Documents(lengths) & Causal() for lengths in ((70, 122), (100, 92), (30, 100, 62))]
    for agreement, later in (("always", "heard, sent"), ("first", "sent, heard"), ("never", "sent")):
        for order in ranks.run(3, work.order_of_calls, documents, placement, agreement):
            assert order == ["sent" if later == "sent" else "heard, sent", later, later]


def test_what_waits_for_the_others_in_every_call(ranks):
    """Without a placement the lengths are not known, dropout has a message for all, and so have global tokens."""
    window = SlidingWindow(20, 20)
    placement = Placement.contiguous(4 * SHARD, 4, block_size=16)
    for patterns, where, options in (
        ([window] * 2, None, {}),
        ([window] * 2, placement, {"dropout_p": 0.5}),
        ([GlobalTokens(40) | SlidingWindow(2, 0)] * 2, placement, {}),
    ):
        for order in ranks.run(4, work.order_of_calls, patterns, where, "first", options):
            assert order == ["heard, sent"] * 2


def test_never_needs_a_placement(ranks):
    with pytest.raises(RankError) as failed:
        ranks.run(3, work.call, call(agreement="never"))
    for kind, text in failed.value.errors.values():
        assert (kind, text[:40]) == ("ValueError", 'agreement="never" needs a placement: wit')


@pytest.mark.parametrize("agreement", ["first", "always"])
def test_a_plan_that_one_rank_forgot_is_made_again_while_others_go_on(ranks, agreement):
    """Of rules on blocks, which the ranks make together."""
    given = call(placement=CONTIGUOUS, agreement=agreement, pattern=RandomBlocks(2, seed=3, block_size=16))
    expected = ranks.run(3, work.sum_of_ones, given)
    ranks.run(3, work.num_plans, ByRank([False, True, False]))
    for _ in range(2):
        assert ranks.run(3, work.sum_of_ones, given) == expected


REFUSED = {
    "q must have shape": {"shape": (1, SHARD, 16)},
    "heads of q must be a multiple": {"shape": (1, SHARD, 3, 8)},
    "dropout_p must be in": {"dropout_p": 2.0},
    "layout_or_pattern must be a BlockLayout or a Pattern": {"pattern": "window"},
    "has no backward for a part of the keys": {"backend": "reference"},
    "cannot run this call": {"backend": "sdpa"},
    "agreement must be one of ['always', 'first', 'never'], got 'sometimes'": {"agreement": "sometimes"},
    "placement is for 2 ranks, but the group has 3": {"placement": Placement.contiguous(SHARD, 2, block_size=16)},
    "must have the 64 tokens of rank 1": {
        "placement": CONTIGUOUS, "shape": (1, 48, 2, 8),
    },
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_a_refusal_is_told_to_the_others(ranks, reason):
    with pytest.raises(RankError) as failed:
        ranks.run(3, work.call, ByRank([call(), call(**REFUSED[reason]), call()]))
    errors = failed.value.errors
    assert reason in errors[1][1]
    assert errors[1][0] in ("ValueError", "TypeError")
    for rank in (0, 2):
        kind, text = errors[rank]
        assert kind == "RingError"
        assert text.startswith("a rank refused the call that this one makes too (rank 1: ")
        assert reason in text
    assert ranks.run(3, work.call, call()) == [(1, SHARD, 2, 8)] * 3


def test_refused_branches_are_told_to_the_others(ranks):
    with pytest.raises(RankError) as failed:
        ranks.run(3, work.dilated_call, ByRank([[16], [0], [16]]))
    assert [failed.value.errors[rank][0] for rank in range(3)] == ["RingError", "ValueError", "RingError"]
    assert all(failed.value.errors[1][1] in text for _, text in failed.value.errors.values())
    assert ranks.run(3, work.dilated_call, [16]) == [32] * 3


UNSHARDED = torch.zeros(2, 16, 16)
DIFFERENT = {
    "dtype: torch.float32 on rank 0 and 2, torch.float64 on rank 1": (UNSHARDED.double(), 1, False),
    "shape but for the tokens: [2, 16] on rank 0 and 2, [3, 16] on rank 1": (torch.zeros(3, 16, 16), 1, False),
    "dim: 1 on rank 0 and 2, 2 on rank 1": (UNSHARDED, 2, False),
    "gradients: not asked for on rank 0 and 2, asked for on rank 1": (UNSHARDED, 1, True),
}


@pytest.mark.parametrize("difference", [*DIFFERENT, "refused"])
def test_shards_that_do_not_fit_together(ranks, difference):
    """All ranks hear of it before anything is gathered, and the group can be used again."""
    odd = DIFFERENT.get(difference, (torch.zeros(2, 17, 16), 1, False))
    calls = [(UNSHARDED, 1, False), odd, (UNSHARDED, 1, False)]
    with pytest.raises(RankError) as failed:
        ranks.run(3, work.unshard_call, *(ByRank(values) for values in zip(*calls, strict=True)))
    kinds = [failed.value.errors[rank][0] for rank in range(3)]
    assert kinds == (["RingError", "ValueError", "RingError"] if difference == "refused" else ["ValueError"] * 3)
    expected = "x must have this rank's 16 tokens in dim 1" if difference == "refused" else difference
    assert all(expected in text for _, text in failed.value.errors.values())
    assert ranks.run(3, work.unshard_call, UNSHARDED, 1, False) == [48] * 3


SAME_ON_ALL = {
    "shards must be multiples of 16 tokens, all but the last, got [40, 40, 40] queries": {"shape": (1, 40, 2, 8)},
    "is a layout for lengths (64, 64), but the shards of q and k have (192, 192) tokens": {
        "pattern": BlockLayout.from_pattern(SlidingWindow(1, 1), 64, block_size=16),
    },
    "shards must be whole blocks of the layout, (128, 128), but start at multiples of 64": {
        "pattern": BlockLayout.from_pattern(SlidingWindow(1, 1), 3 * SHARD, block_size=128),
    },
}  # fmt: skip


@pytest.mark.parametrize("reason", SAME_ON_ALL)
def test_what_no_rank_can_do_all_refuse(ranks, reason):
    with pytest.raises(RankError) as failed:
        ranks.run(3, work.call, call(**SAME_ON_ALL[reason]))
    assert sorted(failed.value.errors) == [0, 1, 2]
    assert all(kind == "ValueError" and reason in text for kind, text in failed.value.errors.values())


def test_a_plan_that_one_rank_forgot_is_made_again_by_all(ranks):
    for _ in range(2):
        assert ranks.run(3, work.call, call()) == [(1, SHARD, 2, 8)] * 3
    before = ranks.run(3, work.num_plans)
    assert before == ranks.run(3, work.num_plans, ByRank([False, True, False]))  # rank 1 forgets after it counted
    assert ranks.run(3, work.call, call()) == [(1, SHARD, 2, 8)] * 3
    assert ranks.run(3, work.num_plans) == [before[0], 1, before[2]]


def test_plans_are_kept_up_to_so_many_bytes(ranks):
    numbers = ranks.run(3, work.plans_kept, [SlidingWindow(n, 20) for n in range(20, 30)], 3)
    for number, nbytes, limit in numbers:
        assert 1 < number < 10
        assert nbytes <= limit


def test_other_lengths_make_another_plan(ranks):
    """The shard of rank 1 stays as long as it was, those around it do not."""
    for lengths in ([64, 64, 64], [32, 64, 64], [64, 64, 48], [32, 64, 48], [64, 64, 64]):
        shapes = [(1, n, 2, 8) for n in lengths]
        assert ranks.run(3, work.call, ByRank([call(shape=shape) for shape in shapes])) == shapes


def test_a_group_is_needed():
    from dilated_attention_pytorch.distributed import ring_block_sparse_attention

    q = torch.zeros(1, 16, 1, 8)
    with pytest.raises(RuntimeError, match="init_process_group first"):
        ring_block_sparse_attention(q, q, q, SlidingWindow(1, 1), group=None)


def test_a_group_must_be_one(ranks):
    with pytest.raises(RankError) as failed:
        ranks.run(4, work.wrong_groups)
    assert all("mesh" in text and kind == "ValueError" for kind, text in failed.value.errors.values())


def test_a_rank_outside_of_the_group_is_told_so(ranks):
    assert ranks.run(4, work.outside) == [0.0, 256.0, 0.0, 256.0]
