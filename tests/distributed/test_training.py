"""Models over a ring are those of one process: their losses, gradients and tokens; and what they refuse.

`examples/train_mesh.py` trains a Llama of transformers and a LongNet over a mesh of 2 × 2, beside one process.
"""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dilated_attention_pytorch import LongNet, LongNetConfig, LongNetLM, Placement
from dilated_attention_pytorch.distributed import (
    RingError,
    count_labels,
    load_shard,
    ring_loss,
    ring_mean,
    ring_sampler,
    shard_batch,
    shard_sequence,
    unshard_sequence,
)
from tests.distributed.processes import Processes, join
from tests.distributed.test_example import torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_mesh.py"
SIZES = {"batch": 2, "seq": 200}


def example():
    spec = importlib.util.spec_from_file_location("train_mesh", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mesh_of(data, ring):
    return init_device_mesh("cpu", (data, ring), mesh_dim_names=("data", "ring"))


def checked(group, kind, steps):
    return example().check(kind, mesh_of(2, 2), steps=steps, **SIZES)


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        ("longnet", 2),
        pytest.param("llama", 2, marks=pytest.mark.slow),
        pytest.param("longnet", 20, marks=pytest.mark.stress),
        pytest.param("llama", 20, marks=pytest.mark.stress),
    ],
)
def test_losses_and_gradients_are_those_of_one_process(ranks, kind, steps):
    worst = ranks.run(4, checked, kind, steps)[0]
    assert worst.keys() == {"loss", "gradients"}
    assert max(worst.values()) <= 1e-9, worst


def trained(rank, size, port, pipe, shape, steps, folder):
    join(rank, size, port)
    folder = None if folder is None else Path(folder)
    options = {**SIZES, "dtype": torch.float64, "checkpoints": folder}
    pipe.send(example().train("longnet", mesh_of(*shape), steps=steps, **options))


def losses_of(shape, steps, folder=None):
    """Of a mesh of its own processes; all ranks have the same."""
    processes = Processes(shape[0] * shape[1], trained, shape, steps, folder)
    try:
        told = []
        for pipe in processes.pipes:
            assert pipe.poll(90), f"a rank of {shape} is silent"
            told.append(pipe.recv())
    finally:
        processes.close()
    assert all(each == told[0] for each in told)
    return told[0]


@pytest.mark.slow
def test_a_checkpoint_is_resumed_by_another_mesh(tmp_path):
    """2 × 2 ranks to step 2, a ring of 3 to step 3, two of data alone to step 4: the losses of one process."""
    losses = []
    for shape, steps in (((2, 2), 2), ((1, 3), 3), ((2, 1), 4)):
        losses += losses_of(shape, steps, str(tmp_path))
    undisturbed = losses_of((1, 1), 4)
    assert len(losses) == 4
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(undisturbed), rtol=0, atol=1e-9)


def one_step(group, kind, how):
    """The largest difference of gradients, of one step of parameters that are distributed in some way."""
    module, mesh = example(), mesh_of(2, 2)
    alone = module.Run(kind, None, steps=1, **SIZES, dtype=torch.float64)
    next(alone.train())
    model = module.make_model(kind, mesh["ring"]).double()
    placement = Placement.contiguous(SIZES["seq"], 2, block_size=16)
    dataset = module.Packed(SIZES["batch"], SIZES["seq"])
    mine = next(iter(ring_sampler(dataset, mesh, shuffle=False)))
    batch = {name: x[None] for name, x in dataset[mine].items()}
    inputs, labels = shard_batch(batch, mesh["ring"], placement)
    run = model
    if how == "ddp":
        run = DistributedDataParallel(model, process_group=group)
    elif how == "fsdp2":
        for layer in model.layers if kind == "longnet" else model.model.layers:
            fully_shard(layer, mesh=mesh._flatten("all"))
        fully_shard(model, mesh=mesh["all"])
    elif how == "checkpoint" and kind == "llama":
        model.gradient_checkpointing_enable()
        model.train()
    elif how in ("checkpoint", "checkpoint but attention"):
        again = True if how == "checkpoint" else "attention"
        model = LongNetLM(LongNetConfig(**{**vars(model.config), "checkpointing": again}), group=mesh["ring"]).double()
        model.load_state_dict(alone.model.state_dict())
        run = model
    elif how == "compile":
        run = torch.compile(model, backend="eager")
    if how == "checkpoint but attention":  # and but logits
        total = run.loss(inputs["input_ids"], labels, placement=placement, reduction="sum")
        ring_mean(total, labels, mesh).backward()
    else:
        logits = run(inputs["input_ids"], placement=placement) if kind == "longnet" else run(**inputs).logits
        ring_loss(logits, labels, mesh).backward()
    worst = 0.0
    for ours, theirs in zip(model.parameters(), alone.model.parameters(), strict=True):
        grad = ours.grad.full_tensor() if how == "fsdp2" else ours.grad
        if how not in ("ddp", "fsdp2"):
            dist.all_reduce(grad, group=group)
            grad /= 4
        worst = max(worst, float((grad - theirs.grad).abs().max()))
    return worst


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *((kind, how) for how in ("ddp", "fsdp2", "checkpoint", "compile") for kind in ("longnet", "llama")),
        ("longnet", "checkpoint but attention"),
    ],
)
def test_ways_to_train(ranks, kind, how):
    assert max(ranks.run(4, one_step, kind, how)) <= 1e-9


def shards_agree(group):
    """`load_shard` gives what `shard_batch` gives, and reads the own tokens and their labels alone."""
    rank, seq = dist.get_rank(group), 200
    placement = Placement.zigzag(seq, dist.get_world_size(group), block_size=16)
    tokens = torch.arange(1000, 1000 + 50 + seq)
    documents = torch.tensor([0, 70, 71, 130, seq])

    class Watched:
        read = 0

        def __getitem__(self, where):
            Watched.read += where.stop - where.start
            return tokens[where].numpy()

    loaded = load_shard(Watched(), group, placement, first=50, documents=documents)
    runs = placement.tokens(rank)
    assert Watched.read == placement.num_tokens(rank) + len(runs)
    ids = torch.bucketize(torch.arange(seq), documents[1:], right=True)[None]
    batch = {"input_ids": tokens[None, 50:], "labels": tokens[None, 50:], "document_ids": ids}
    sharded = shard_batch(batch, group, placement)
    positions = batch.pop("document_ids") * 0 + torch.arange(seq) - documents[ids]
    by_positions = shard_batch({**batch, "position_ids": positions}, group, placement)
    for other in (loaded, by_positions):
        assert torch.equal(other.labels, sharded.labels)
        for name in ("input_ids", "position_ids"):
            assert torch.equal(other.inputs[name], sharded.inputs[name]), name
    mask, of_loaded = sharded.inputs["attention_mask"], loaded.inputs["attention_mask"]
    assert mask.facts == of_loaded.facts
    whole = [unshard_sequence(x.double(), placement, group=group) for x in (mask.document_ids, of_loaded.document_ids)]
    assert torch.equal(whole[0].diff() != 0, whole[1].diff() != 0)
    labels = torch.where(torch.isin(torch.arange(seq) + 1, documents), -100, torch.arange(1051, 1051 + seq))
    assert torch.equal(sharded.labels[0], labels[placement.positions(rank)])
    plain = load_shard(tokens, group, placement, first=50)
    last = int(placement.positions(rank)[-1]) == seq - 1
    assert int(plain.labels[0, -1]) == (-100 if last else int(plain.inputs["input_ids"][0, -1]) + 1)


def test_shards_that_are_read_are_those_that_are_cut(ranks):
    ranks.run(3, shards_agree)


def losses(group):
    """Of labels that lie unevenly, in one call and in two micro-batches."""
    torch.manual_seed(0)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    logits = torch.randn(2, 96, 7, dtype=torch.float64)
    labels = torch.randint(7, (2, 96)).masked_fill(torch.rand(2, 96) < 0.2, -100)
    labels[:, :40] = -100
    placement = Placement.contiguous(96, size, block_size=16)
    whole = logits.clone().requires_grad_()
    want = cross_entropy(whole.flatten(0, 1), labels.flatten())
    want.backward()
    own, mine = (shard_sequence(x, placement, group=group) for x in (logits, labels))
    leaf = own.clone().requires_grad_()
    parts = [(leaf[i : i + 1], mine[i : i + 1]) for i in range(2)]
    num_items = sum(count_labels(y, group) for _, y in parts)
    results = []
    for loss in (ring_loss(leaf, mine, group), sum(ring_loss(x, y, group, num_items=num_items) for x, y in parts)):
        (grad,) = torch.autograd.grad(loss, leaf)
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        results.append(float(abs(total / size - want)))
        results.append(float((grad / size - shard_sequence(whole.grad, placement, group=group)).abs().max()))
    assert not torch.equal(mine == -100, torch.zeros_like(mine, dtype=torch.bool)), rank
    assert float(ring_loss(own, torch.full_like(mine, -100), group)) == 0.0
    return results


def test_the_loss_is_a_mean_over_all_labels(ranks):
    for results in ranks.run(3, losses):
        assert max(results) <= 1e-12, results


def sampled(group):
    mesh = mesh_of(2, 2)
    with pytest.raises(ValueError, match=r"ring must be a dimension of the mesh, \['data', 'ring'\], got 'sequence'"):
        ring_sampler(range(10), mesh, ring="sequence")
    return list(ring_sampler(range(10), mesh, shuffle=True, seed=3))


def test_a_ring_samples_together(ranks):
    first, second, third, fourth = ranks.run(4, sampled)
    assert first == second
    assert third == fourth
    assert sorted(first + third) == list(range(10))


def bad_batches(group):
    placement = Placement.contiguous(96, dist.get_world_size(group), block_size=16)
    ids = torch.zeros(1, 96, dtype=torch.int64)
    for batch, kind, message in (
        ([ids], TypeError, "batch must be a mapping of names to tensors, got list"),
        ({"labels": ids}, ValueError, "batch must hold input_ids or inputs_embeds, and not both"),
        ({"input_ids": ids, "seq_idx": ids}, ValueError, "batch may hold .*, got 'seq_idx', of which nobody knows"),
        ({"input_ids": ids[:, 1:]}, ValueError, r"input_ids must be \(batch, seq\), \[1, 96\] here, got \[1, 95\]"),
        ({"input_ids": ids, "labels": ids[0]}, ValueError, r"labels must be .*, got \[96\]"),
        ({"input_ids": ids, "labels": ids.tolist()}, ValueError, r"labels must be .*, got list"),
    ):
        with pytest.raises(kind, match=message):
            shard_batch(batch, group, placement)
    for documents in ([0, 50], [1, 96], [0, 60, 50, 96], [0.0, 96.0], 96):
        with pytest.raises(ValueError, match="documents must"):
            load_shard(ids[0], group, placement, documents=documents)
    with pytest.raises(ValueError, match="tokens must hold 96 from the 1th on, got 96 together"):
        load_shard(ids[0], group, placement, first=1)
    with pytest.raises(ValueError, match=r"logits and labels must be .*, got \[1, 5, 3\] and \[1, 4\]"):
        ring_loss(torch.zeros(1, 5, 3), ids[:, :4], group)


def other_sample(group, name):
    rank = dist.get_rank(group)
    placement = Placement.contiguous(96, dist.get_world_size(group), block_size=16)
    ids = torch.arange(96)[None]
    batch = {"input_ids": ids, "labels": ids}
    batch[name] = ids.roll(rank, 1) if name == "input_ids" else ids
    shard_batch(batch, group, placement)


def test_bad_batches(ranks):
    ranks.run(2, bad_batches)
    for name, message in (("input_ids", "input_ids: .* on rank 0, .* on rank 1"), ("seq_idx", "batch may hold")):
        with pytest.raises(Exception, match=message) as error:
            ranks.run(2, other_sample, name)
        assert [kind for kind, _ in error.value.errors.values()] == ["ValueError"] * 2
    ranks.run(2, bad_batches)


def longnets(group):
    """Differences of the encoder, of a prompt's continuation, and what a LongNet over a ring refuses."""
    torch.manual_seed(0)
    config = LongNetConfig(
        vocab_size=32, dim=32, num_layers=2, num_heads=4, segment_lengths=(32, 96), dilation_rates=(1, 2)
    )
    x, hidden = torch.randn(2, 100, 32, dtype=torch.float64), torch.rand(2, 100) < 0.1
    alone = LongNet(config).double()
    over = LongNet(config, group=group).double()
    over.load_state_dict(alone.state_dict())
    placement = Placement.zigzag(100, dist.get_world_size(group), block_size=16)
    own, own_hidden = (shard_sequence(each, placement, group=group) for each in (x, hidden))
    out = over(own, key_padding_mask=own_hidden, placement=placement)
    want = shard_sequence(alone(x, key_padding_mask=hidden), placement, group=group)
    worst = float((out - want).detach().abs().max())
    with pytest.raises(ValueError, match="placement must be given over a ring"):
        over(own)
    with pytest.raises(ValueError, match=r"this rank must be given its .* tokens of the placement, got"):
        over(own[:, 1:], placement=placement)
    with pytest.raises(ValueError, match="placement has no meaning without ring_group"):
        alone(x, placement=placement)
    torch.manual_seed(1)
    alone = LongNetLM(config).double().eval()
    over = LongNetLM(config, group=group).double().eval()
    over.load_state_dict(alone.state_dict())
    for prompt in (100, 5):  # a part for each rank, and less than that
        tokens = torch.randint(32, (2, prompt))
        want = alone.generate(tokens, 40, generator=torch.Generator().manual_seed(3))
        mine = torch.Generator().manual_seed(3 + dist.get_rank(group))  # the first rank draws
        assert torch.equal(over.generate(tokens, 40, generator=mine), want)
    return worst


def test_longnet_over_a_ring(ranks):
    assert max(ranks.run(3, longnets)) <= 1e-10


def one_rank_refuses(group):
    """LongNet with a placement that is missing on one rank."""
    config = LongNetConfig(vocab_size=8, dim=16, num_layers=1, num_heads=2, segment_lengths=(16,), dilation_rates=(1,))
    model = LongNetLM(config, group=group)
    placement = Placement.contiguous(64, 2, block_size=16)
    rank = dist.get_rank(group)
    model(torch.zeros(1, 32, dtype=torch.int64), placement=None if rank else placement)


def test_a_refusal_of_one_rank_is_told_to_the_others(ranks):
    with pytest.raises(Exception, match="placement must be given over a ring") as error:
        ranks.run(2, one_rank_refuses)
    kinds = {rank: kind for rank, (kind, _) in error.value.errors.items()}
    assert kinds == {0: RingError.__name__, 1: "ValueError"}


@pytest.mark.stress
@pytest.mark.parametrize("kind", ["llama", "longnet"])
def test_under_torchrun(kind, tmp_path):
    options = "--model", kind, "--ring", "2", "--steps", "3", "--seq", "200"
    result, _ = torchrun("--nproc-per-node", "4", "--", *options, "--check", script=EXAMPLE)
    assert max(result["loss"], result["gradients"]) <= 1e-9
    for steps, made in (("3", 3), ("5", 2)):  # and on from the checkpoint
        options = "--model", kind, "--ring", "2", "--steps", steps, "--seq", "200", "--checkpoints", str(tmp_path)
        launched, _ = torchrun("--nproc-per-node", "4", "--", *options, script=EXAMPLE)
        assert launched["mesh"] == [2, 2]
        assert len(launched["losses"]) == made
