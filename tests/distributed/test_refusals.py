# ruff: noqa: E501 - a fault is a line
"""A call that one rank refuses is refused by all: every module and operator, every fault, whichever rank has it.

Modules used to check, and to project, before the ranks agreed on the call: a mask of the wrong shape on one rank raised
there, and the others waited for it until the timeout of the group. Now each of them raises at once and says who refused
and why, and the ring goes on.
"""

import pytest
import torch

from dilated_attention_pytorch import (
    BlockSparseAttention,
    BlockSparseHierarchical,
    BlockSparseRingDilatedAttention,
    BlockSparseRingMultiheadDilatedAttention,
    DilatedAttention,
    MultiheadDilatedAttention,
    Placement,
    RingDilatedAttentionV2,
    SlidingWindow,
    create_block_sparse_attention,
    ring_block_sparse_attention,
    ring_dilated_attention,
    unshard_sequence,
)
from tests.distributed.processes import ByRank, RankError

SIZE, SHARD, HEADS, HEAD_DIM = 3, 32, 4, 8
EMBED = HEADS * HEAD_DIM
BRANCHES = {"segment_lengths": [16, 64], "dilation_rates": [1, 2]}
CONFIG = {**BRANCHES, "sparsity_ratio": 0.4, "block_size": 16}


def multihead(kind, ring, **options):
    torch.manual_seed(0)
    return kind(EMBED, HEADS, ring_group=ring, **options)


def opened(ring):
    """As a schedule has it in training: the ranks agree on the length of the whole, and then on the call."""
    module = BlockSparseAttention(SlidingWindow(20, 20), ring_group=ring)
    module.opening = 0.25
    return module


MODULES = {
    "BlockSparseAttention": lambda ring: BlockSparseAttention(SlidingWindow(20, 20), ring_group=ring),
    "opened": opened,
    "pooled": lambda ring: BlockSparseAttention(SlidingWindow(20, 20), ring_group=ring, enable_memory_pool=True),
    "BlockSparseRingDilatedAttention": lambda ring: BlockSparseRingDilatedAttention(**CONFIG, ring_group=ring),
    "BlockSparseHierarchical": lambda ring: BlockSparseHierarchical([(1, 32)], block_size=16, ring_group=ring),
    "factory": lambda ring: create_block_sparse_attention("ring", **CONFIG, ring_group=ring),
    "DilatedAttention": lambda ring: DilatedAttention(**BRANCHES, ring_group=ring),
    "detached": lambda ring: RingDilatedAttentionV2(**BRANCHES, detach_branch_weights=True, ring_group=ring),
    "MultiheadDilatedAttention": lambda ring: multihead(MultiheadDilatedAttention, ring, **BRANCHES),
    "layer norm": lambda ring: multihead(MultiheadDilatedAttention, ring, **BRANCHES, layer_norm=True),
    "BlockSparseRingMultihead": lambda ring: multihead(BlockSparseRingMultiheadDilatedAttention, ring, **CONFIG),
    "sequence first": lambda ring: multihead(
        BlockSparseRingMultiheadDilatedAttention, ring, **CONFIG, batch_first=False
    ),
    "block-sparse operator": lambda ring: (
        lambda q, k, v, is_causal=False, **options: ring_block_sparse_attention(
            q, k, v, SlidingWindow(20, 20), group=ring, is_causal=is_causal, **options
        )
    ),
    "dilated operator": lambda ring: (
        lambda q, k, v, is_causal=False, **options: ring_dilated_attention(
            q, k, v, **BRANCHES, group=ring, is_causal=is_causal, **options
        )
    ),
}
PLACEMENTS = {size: Placement.contiguous(size * SHARD, size, block_size=16) for size in (2, SIZE)}


class Broken(torch.Tensor):
    """Stands for what nobody foresees: any operator on it fails."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__repr__:
            return "Broken()"
        raise RuntimeError("out of memory, say")


def good(name):
    """Arguments of a call, the same tensor three times."""
    heads = "ultihead" not in name and name not in ("layer norm", "sequence first")
    shape = [1, SHARD, HEADS, HEAD_DIM] if heads else [1, SHARD, EMBED]
    x = torch.ones(shape)
    x = x.transpose(0, 1).contiguous() if name == "sequence first" else x
    return {"x": x} if name == "opened" else {"x": x, "placement": PLACEMENTS[SIZE]}


# What the rank with the fault gives instead, of what it should; and what all ranks hear.
FAULTS = {
    "mask of another length": (lambda x: {"key_padding_mask": torch.zeros(1, 5, dtype=torch.bool)}, "key_padding_mask must have shape"),
    "mask of integers": (lambda x: {"key_padding_mask": torch.zeros(1, SHARD, dtype=torch.int32)}, "key_padding_mask must be bool"),
    "mask that is a list": (lambda x: {"key_padding_mask": [True]}, "key_padding_mask must be a tensor"),
    "integers": (lambda x: {"x": x.int()}, "must "),
    "complex": (lambda x: {"x": x.to(torch.complex64)}, "must "),
    "no tensor": (lambda x: {"x": [1.0]}, "must "),
    "two dimensions": (lambda x: {"x": x[0, 0]}, "must "),
    "another device": (lambda x: {"x": x.to("meta")}, ""),
    "empty": (lambda x: {"x": x[:0]}, "must not be empty"),
    "is_causal of 1": (lambda x: {"is_causal": 1}, "is_causal must be True or False"),
    "placement of other ranks": (lambda x: {"placement": PLACEMENTS[2]}, "placement is for 2 ranks, but the group has 3"),
    "placement by name": (lambda x: {"placement": "zigzag"}, "placement must be a Placement"),
    "what nobody foresees": (lambda x: {"x": x.as_subclass(Broken)}, "out of memory, say"),
}  # fmt: skip
OF_MODULES = {
    "unknown keyword": (lambda x: {"temperature": 3.0}, "unknown keyword 'temperature'"),
    "weights asked for": (lambda x: {"return_attention_weights": True}, "return_attention_weights is not possible over a ring"),
    "weights asked for by a number": (lambda x: {"return_attention_weights": 1}, "return_attention_weights must be True or False"),
}  # fmt: skip


def faults_of(name):
    return FAULTS if name.endswith("operator") else {**FAULTS, **OF_MODULES}


def called(group, name, fault):
    options = good(name)
    if fault is not None:
        options |= faults_of(name)[fault][0](options["x"])
    x = options.pop("x")
    return list(MODULES[name](group)(x, x, x, **options).shape)


def assert_all_hear(ranks, refusing, work, *args, reason):
    with pytest.raises(RankError) as failed:
        ranks.run(SIZE, work, *args)
    errors = failed.value.errors
    assert sorted(errors) == list(range(SIZE)), errors
    kind, own = errors[refusing]
    assert kind != "RingError"
    assert reason in own
    for rank in set(range(SIZE)) - {refusing}:
        kind, text = errors[rank]
        assert kind == "RingError"
        assert text.startswith(f"a rank refused the call that this one makes too (rank {refusing}: "), text
        assert reason in text
        assert own.splitlines()[0] in text


@pytest.mark.parametrize("name", MODULES)
def test_modules_and_operators(ranks, name):
    expected = ranks.run(SIZE, called, name, None)
    for number, (fault, (_, reason)) in enumerate(faults_of(name).items()):
        refusing = number % SIZE
        given = ByRank(fault if rank == refusing else None for rank in range(SIZE))
        assert_all_hear(ranks, refusing, called, name, given, reason=reason)
        assert ranks.run(SIZE, called, name, None) == expected  # nothing is left over


SHARDS = {
    "no tensor": (lambda x: ([1.0], 1), "x must be a tensor, got list"),
    "other tokens": (lambda x: (x[:, 1:], 1), "x must have"),
    "a dimension too far": (lambda x: (x, 3), "dim must be less than the 3 dimensions of x, got 3"),
    "a dimension by name": (lambda x: (x, "seq"), "dim must be an int, got 'seq'"),
    "another device": (lambda x: (x.to("meta"), 1), "x must be on a device that the group has a backend for, cpu:gloo"),
    "what nobody foresees": (lambda x: (x.as_subclass(Broken), 1), "out of memory, say"),
}


def unsharded(group, fault):
    x, dim = torch.zeros(2, SHARD, 8), 1
    if fault is not None:
        x, dim = SHARDS[fault][0](x)
    return list(unshard_sequence(x, PLACEMENTS[SIZE], group=group, dim=dim).shape)


@pytest.mark.parametrize("fault", SHARDS)
def test_unshard_sequence(ranks, fault):
    for refusing in range(SIZE):
        given = ByRank(fault if rank == refusing else None for rank in range(SIZE))
        assert_all_hear(ranks, refusing, unsharded, given, reason=SHARDS[fault][1])
    assert ranks.run(SIZE, unsharded, None) == [[2, SIZE * SHARD, 8]] * SIZE
