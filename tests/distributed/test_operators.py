"""The ring as an operator: one graph of torch.compile, selective checkpointing that keeps what it gives, modes."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dilated_attention_pytorch import (
    BlockLayout,
    BlockSparseAttention,
    GlobalTokens,
    LongNetConfig,
    LongNetLM,
    MultiheadDilatedAttention,
    PerHead,
    Placement,
    SlidingWindow,
    ring_block_sparse_attention,
    ring_dilated_attention,
    shard_sequence,
)
from dilated_attention_pytorch.distributed import RingError, count_traffic

SEQ, HEADS = 200, 4
PATTERN = SlidingWindow(60, 5) | GlobalTokens(3)
BRANCHES = {"segment_lengths": (64, 256), "dilation_rates": (1, 2)}
NUM = 8  # features of a head

pytestmark = pytest.mark.slow


def placed(group):
    return Placement.contiguous(SEQ, dist.get_world_size(group), block_size=16)


def random(group, *shape, seed=0):
    """This rank's part."""
    whole = torch.randn(2, SEQ, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return shard_sequence(whole, placed(group), group=group)


def calls(group):
    """Functions of q, k and v, by name."""
    placement = placed(group)
    where = {"group": group, "placement": placement}
    padding = shard_sequence(torch.arange(2 * SEQ).view(2, SEQ) % 7 == 0, placement, group=group)
    ids = shard_sequence(torch.arange(SEQ).expand(2, -1) // 90, placement, group=group)
    slopes, sinks = torch.linspace(0.01, 0.1, HEADS, dtype=torch.float64), torch.ones(HEADS, dtype=torch.float64)
    options = {"key_padding_mask": padding, "document_ids": ids, "alibi_slopes": slopes, "sinks": sinks, "softcap": 2.0}
    module = BlockSparseAttention(PATTERN, ring_group=group)
    return {
        "plain": partial(ring_block_sparse_attention, layout_or_pattern=PATTERN, **where),
        "options": partial(ring_block_sparse_attention, layout_or_pattern=PATTERN, is_causal=True, **options, **where),
        "heads": partial(
            ring_block_sparse_attention, layout_or_pattern=PerHead((PATTERN, SlidingWindow(9, 0)) * 2), **where
        ),
        "no placement": partial(ring_block_sparse_attention, layout_or_pattern=SlidingWindow(20, 0), group=group),
        "dropout": partial(ring_block_sparse_attention, layout_or_pattern=PATTERN, dropout_p=0.4, **where),
        "branches": partial(ring_dilated_attention, is_causal=True, **BRANCHES, **where),
        "detached": partial(ring_dilated_attention, detach_branch_weights=True, dropout_p=0.3, **BRANCHES, **where),
        "module": partial(module, placement=placement, is_causal=True),
    }


def results(run, group):
    """Outputs and gradients."""
    leaves = [random(group, HEADS, NUM, seed=i).requires_grad_() for i in range(3)]
    torch.manual_seed(7 * dist.get_rank(group))  # of dropout; over a ring it is the first rank's
    out, lse = run(*leaves, return_lse=True)
    (out.sin().sum() + lse.sum()).backward()
    return [out.detach(), lse.detach(), *(x.grad for x in leaves)]


def difference(got, want):
    return max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True))


def of_module(run):
    def with_lse(*tensors, return_lse):
        out = run(*tensors)
        return out, out.sum(-1)

    return with_lse


def compiled(group, name):
    call = calls(group)[name]
    run = of_module(call) if name == "module" else call
    torch._dynamo.reset()
    return difference(results(torch.compile(run, fullgraph=True, backend="aot_eager"), group), results(run, group))


@pytest.mark.parametrize(
    "name", ["plain", "options", "heads", "no placement", "dropout", "branches", "detached", "module"]
)
def test_one_graph_is_what_eager_is(ranks, name):
    assert max(ranks.run(3, compiled, name)) <= 1e-12


def models(group):
    """Losses and gradients of a LongNet, and of multihead attention, in one graph."""
    placement = placed(group)
    config = LongNetConfig(vocab_size=16, dim=32, num_layers=2, num_heads=HEADS, **BRANCHES)
    tokens = shard_sequence(torch.arange(2 * SEQ).view(2, SEQ) % 16, placement, group=group)
    worst = []
    torch.manual_seed(0)
    lm = LongNetLM(config, group=group).double()
    attention = MultiheadDilatedAttention(32, HEADS, **BRANCHES, ring_group=group, dtype=torch.float64)
    x = random(group, 32)
    for module, run in (
        (lm, lambda: lm(tokens, placement=placement)),
        (attention, lambda: attention(x, x, x, is_causal=True, placement=placement)),
    ):
        found = []
        for each in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
            module.zero_grad()
            out = each()
            out.sin().sum().backward()
            found.append([out.detach(), *(p.grad.clone() for p in module.parameters())])
        worst.append(difference(*found))
    return max(worst)


def test_models_are_one_graph(ranks):
    assert max(ranks.run(2, models)) <= 1e-12


def selective(group, name):
    """The difference, how often attention ran, and what the backward sent, with checkpointing and without."""
    call = calls(group)[name]
    ran = []

    def policy(context, operator, *args, **options):
        if operator is torch.ops.dilated_attention_pytorch.ring_forward.default:
            ran.append(context.is_recompute)
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def kept(*leaves, **options):
        contexts = partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(partial(call, **options), *leaves, use_reentrant=False, context_fn=contexts)

    sent, found = [], []
    for run in (kept, call):
        leaves = [random(group, HEADS, NUM, seed=i).requires_grad_() for i in range(3)]
        torch.manual_seed(7 * dist.get_rank(group))
        out = run(*leaves)
        with count_traffic() as traffic:
            out.sin().sum().backward()
        sent.append(traffic.bytes)
        found.append([out.detach(), *(x.grad for x in leaves)])
    return difference(*found), ran, sent


@pytest.mark.parametrize(
    ("name", "num"), [("plain", 1), ("options", 1), ("dropout", 1), ("branches", 1), ("detached", 2)]
)
def test_selective_checkpointing_keeps_attention(ranks, name, num):
    """It is computed once, and no key travels a second time for it."""
    for error, ran, (with_it, without) in ranks.run(3, selective, name):
        assert error <= 1e-12
        assert ran == [False] * num
        assert with_it == without > 0


def others(group):
    q, k, v = (random(group, HEADS, NUM, seed=i) for i in range(3))
    placement, size = placed(group), dist.get_world_size(group)
    where = {"group": group, "placement": placement}
    # A layout has no text that a graph could hold: the graph breaks there, and goes on.
    layout = BlockLayout.from_pattern(PATTERN, SEQ, block_size=16)
    run = torch.compile(lambda *x: ring_block_sparse_attention(*x, layout, **where) * 2, backend="eager")
    want = ring_block_sparse_attention(q, k, v, PATTERN, **where) * 2
    torch.testing.assert_close(run(q, k, v), want, rtol=0, atol=1e-12)
    q.requires_grad_()
    run = torch.compile(partial(ring_block_sparse_attention, layout_or_pattern=PATTERN, **where), backend="aot_eager")
    (grad,) = torch.autograd.grad(run(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"second derivative|double backward"):
        grad.sum().backward()
    with pytest.raises(ValueError, match="q must be on a device that the group has a backend for"):
        ring_block_sparse_attention(*(x.to("meta") for x in (q, k, v)), PATTERN, **where)
    return size


def test_what_is_no_operator(ranks):
    assert ranks.run(2, others) == [2, 2]


class Everything(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def refuses(group, where):
    """One rank is stopped: before the operator, or in it."""
    q, k, v = (random(group, HEADS, NUM, seed=i) for i in range(3))
    last = dist.get_rank(group) == dist.get_world_size(group) - 1
    options = {"softcap": -1.0} if last and where == "before" else {}
    pattern = SlidingWindow(9, 0) if last and where == "inside" else PATTERN
    with Everything():
        ring_block_sparse_attention(q, k, v, pattern, group=group, placement=placed(group), **options)


def test_a_refusal_is_told_to_the_others(ranks):
    with pytest.raises(Exception, match="softcap must be") as error:
        ranks.run(3, refuses, "before")
    assert [kind for kind, _ in error.value.errors.values()] == [RingError.__name__] * 2 + ["ValueError"]
    with pytest.raises(Exception, match="must make the same call, but differ in pattern") as error:
        ranks.run(3, refuses, "inside")
    assert [kind for kind, _ in error.value.errors.values()] == ["ValueError"] * 3
