"""Modules over a ring equal the same modules in one process, alone and beside the other ways to train in parallel."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dilated_attention_pytorch import (
    BlockSparseAttention,
    BlockSparseHierarchical,
    BlockSparseRingDilatedAttention,
    BlockSparseRingDilatedAttentionV2,
    BlockSparseRingMultiheadDilatedAttention,
    Placement,
    RingDilatedAttentionProduction,
    RingDilatedAttentionV2,
    SlidingWindow,
    create_block_sparse_attention,
    shard_sequence,
    unshard_sequence,
)

SEQ, EMBED, HEADS = 200, 16, 4
CONFIG = {"segment_lengths": [64, 128], "dilation_rates": [1, 2], "sparsity_ratio": 0.4, "block_size": 16}

MAKERS = {
    "window": lambda ring: BlockSparseAttention(SlidingWindow(50, 20), ring_group=ring),
    "dilated sparse": lambda ring: BlockSparseRingDilatedAttention(**CONFIG, ring_group=ring),
    "second version": lambda ring: BlockSparseRingDilatedAttentionV2(**CONFIG, ring_group=ring, scale=0.2),
    "hierarchical": lambda ring: BlockSparseHierarchical([(1, 32), (3, 160)], block_size=16, ring_group=ring),
    "dilated": lambda ring: RingDilatedAttentionV2([64, 256], [1, 2], ring_group=ring),
    "production": lambda ring: RingDilatedAttentionProduction(ring_group=ring, detach_branch_weights=True),
    "factory": lambda ring: create_block_sparse_attention("ring", **CONFIG, ring_group=ring),
}


def attention_over_ring(group, name, is_causal, kind):
    torch.manual_seed(0)
    make = MAKERS[name]
    q, k, v, do = (torch.randn(2, SEQ, HEADS, 8, dtype=torch.float64) for _ in range(4))
    placement = getattr(Placement, kind)(SEQ, dist.get_world_size(group), block_size=16)
    results = []
    for ring in (None, group):
        module = copy.deepcopy(make(ring))  # copies share the group
        whole = [x.clone().requires_grad_() for x in (q, k, v)]
        if ring is None:
            out = module(*whole, is_causal)
        else:
            shards = [shard_sequence(x, placement, group=group) for x in whole]
            out = unshard_sequence(module(*shards, is_causal, placement=placement), placement, group=group)
        # Every rank has the whole result: a share of the loss each, and they add up to the same.
        out.backward(do if ring is None else do / dist.get_world_size(group))
        grads = [x.grad for x in whole]
        if ring is not None:
            for grad in grads:
                dist.all_reduce(grad, group=group)
        results.append([out.detach(), *grads])
    return [float((a - b).abs().max()) for a, b in zip(*results, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(("is_causal", "kind"), [(False, "contiguous"), (True, "zigzag")])
def test_attention(ranks, name, is_causal, kind):
    for errors in ranks.run(3, attention_over_ring, name, is_causal, kind):
        assert max(errors) <= 1e-10, errors


def multihead(ring=None, **options):
    torch.manual_seed(1)
    config = {**CONFIG, **options}
    return BlockSparseRingMultiheadDilatedAttention(
        EMBED, HEADS, num_kv_heads=2, ring_group=ring, dtype=torch.float64, **config
    )


def inputs(sample):
    """A sample and the gradient of its result, the same in every process."""
    generator = torch.Generator().manual_seed(100 + sample)
    return (torch.randn(1, SEQ, EMBED, dtype=torch.float64, generator=generator) for _ in range(2))


def expected_gradients(samples, **options):
    """Of the mean over samples of the loss."""
    module = multihead(**options)
    torch.manual_seed(5)  # of dropout; over a ring it is the first rank's
    for sample in samples:
        x, do = inputs(sample)
        module(x, x, x, is_causal=True).backward(do / len(samples))
    return {name: p.grad for name, p in module.named_parameters()}


def largest_difference(module, expected):
    grads = {name.removeprefix("module."): p.grad for name, p in module.named_parameters()}
    grads = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in grads.items()}
    assert grads.keys() == expected.keys()
    return max(float((grads[name] - expected[name]).abs().max()) for name in expected)


def train_step(run, group, placement, sample):
    """Backward of this rank's part of the loss of a sample: the loss is a sum over tokens."""
    x, do = (shard_sequence(each, placement, group=group) for each in inputs(sample))
    out = run(x)
    out.backward(do)


def over_ring(group, how):
    """Gradients of the parameters, summed over the ring by hand, against one process."""
    size = dist.get_world_size(group)
    placement = Placement.zigzag(SEQ, size, block_size=16)
    module = multihead(group, dropout=0.2 if how == "dropout" else 0.0)

    def run(x):
        return module(x, x, x, is_causal=True, placement=placement)

    torch.manual_seed(5)
    if how == "checkpoint":
        train_step(lambda x: checkpoint(run, x, use_reentrant=False), group, placement, 0)
    elif how == "compile":
        train_step(torch.compile(run, backend="eager"), group, placement, 0)
    else:
        train_step(run, group, placement, 0)
    for p in module.parameters():
        dist.all_reduce(p.grad, group=group)
    return largest_difference(module, expected_gradients([0], dropout=0.2 if how == "dropout" else 0.0))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "checkpoint", "compile", "dropout"])
def test_multihead(ranks, how):
    assert max(ranks.run(4, over_ring, how)) <= 1e-10


def beside_data_parallel(group, how):
    """A mesh of 2 (samples) × 2 (sequence): parameters are averaged over all four."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    ring = mesh["sequence"]
    placement = Placement.contiguous(SEQ, 2, block_size=16)
    module = multihead(ring)
    if how == "ddp":
        module = DistributedDataParallel(module, process_group=group)
    else:
        fully_shard(module, mesh=mesh["data", "sequence"]._flatten("all"))

    def run(x):
        return module(x, x, x, is_causal=True, placement=placement)

    train_step(run, ring.get_group(), placement, mesh["data"].get_local_rank())
    # Both average over 4 ranks; the loss is the mean over 2 samples of a sum over 2 shards.
    expected = {name: grad / 2 for name, grad in expected_gradients([0, 1]).items()}
    return largest_difference(module, expected)


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_beside_data_parallel(ranks, how):
    assert max(ranks.run(4, beside_data_parallel, how)) <= 1e-10


def scheduled(group, opening, placed):
    """How far a module that a schedule opens is from the same one without a ring."""
    torch.manual_seed(0)
    whole = [torch.randn(1, SEQ, HEADS, 8, dtype=torch.float64) for _ in range(3)]
    placement = Placement.contiguous(SEQ, dist.get_world_size(group), block_size=16)
    alone, ring = (BlockSparseAttention(SlidingWindow(9, 4), ring_group=each) for each in (None, group))
    alone.opening = ring.opening = opening
    shards = [shard_sequence(x, placement, group=group) for x in whole]
    out = ring(*shards, placement=placement if placed else None)
    want = shard_sequence(alone(*whole), placement, group=group)
    return float((out - want).abs().max()), shards[0].shape[1]


@pytest.mark.parametrize("placed", [True, False])
@pytest.mark.parametrize("opening", [1.0, 0.4])
def test_a_schedule_opens_a_share_of_the_whole_sequence(ranks, opening, placed):
    """The window was a share of the shard: over three ranks of 80, 64 and 56 tokens they disagreed, and over equal
    shards a module that should have been dense saw a third of the sequence."""
    errors, shards = zip(*ranks.run(3, scheduled, opening, placed), strict=True)
    assert len(set(shards)) > 1
    assert max(errors) <= 1e-10


def refusals(group):
    x = torch.randn(1, 64, HEADS, 8)
    module = MAKERS["dilated sparse"](group)
    with pytest.raises(ValueError, match="return_attention_weights is not possible over a ring"):
        module(x, x, x, return_attention_weights=True)
    with pytest.raises(ValueError, match="placement has no meaning without ring_group"):
        MAKERS["dilated sparse"](None)(x, x, x, placement=Placement.contiguous(64, 1))
    with pytest.raises(TypeError, match="group must be a process group or a DeviceMesh"):
        MAKERS["dilated sparse"]("ring")


def test_refusals(ranks):
    ranks.run(2, refusals)


def saved(group, name):
    """A module over a ring is copied with its group, its parameters are saved, and it cannot be saved whole."""
    make = {**MAKERS, "multihead": multihead}[name]
    module, alone = make(group), make(None)
    assert copy.deepcopy(module).ring_group is module.ring_group is group
    reason = "a module over a ring cannot be pickled or saved whole, because its process group is one of this process"
    for save in (pickle.dumps, lambda each: torch.save(each, io.BytesIO())):
        with pytest.raises(TypeError, match=reason):
            save(module)
    alone.load_state_dict(module.state_dict())
    again = pickle.loads(pickle.dumps(alone))
    x = torch.randn(1, 64, *((EMBED,) if name == "multihead" else (HEADS, 8)), dtype=torch.float64)
    assert torch.equal(again(x, x, x), alone(x, x, x))


@pytest.mark.parametrize("name", [*MAKERS, "multihead"])
def test_saved(ranks, name):
    """It was "cannot pickle 'torch._C._distributed_c10d.ProcessGroup' object", and no word of what to do."""
    ranks.run(2, saved, name)


def test_data_parallel_as_in_the_documents():
    """Without GPUs DataParallel hands the call on; with them it splits the batch, and attention never crosses that."""
    module = torch.nn.DataParallel(MAKERS["dilated sparse"](None))
    x = torch.randn(2, SEQ, HEADS, 8)
    assert torch.equal(module(x, x, x), module.module(x, x, x))
