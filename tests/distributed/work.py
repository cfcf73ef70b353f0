"""What the processes of the tests run: importable by them, quick to load."""

import weakref
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dilated_attention_pytorch import SlidingWindow, ops
from dilated_attention_pytorch.distributed import (
    Placement,
    count_traffic,
    operators,
    passes,
    plan,
    ring,
    ring_block_sparse_attention,
    ring_dilated_attention,
    shard_sequence,
    unshard_sequence,
)
from dilated_attention_pytorch.distributed import agreement as agreement_of_ring
from dilated_attention_pytorch.memory import measure_peak
from dilated_attention_pytorch.patterns import Branches


def attend(group, shards, pattern, options, seed=0):
    """out, lse (0 for −inf), dq, dk, dv of this rank, which lse are −inf, and the bytes sent forward and backward."""
    q, k, v, do, dlse, masks = shards
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    torch.manual_seed(seed + 7 * dist.get_rank(group))
    with count_traffic() as forward:
        out, lse = ring_block_sparse_attention(q, k, v, pattern, group=group, return_lse=True, **masks, **options)
    empty = lse == -torch.inf
    with count_traffic() as backward:
        finite = torch.where(empty, 0.0, lse)
        grads = torch.autograd.grad((out, finite), (q, k, v), (do, dlse.to(lse.dtype)))
    return [out.detach(), finite.detach(), *grads], empty, (forward.bytes, backward.bytes)


def gradient_of_sinks(group, shards, pattern, sinks):
    q, k, v, do, *_ = shards
    sinks = sinks.clone().requires_grad_()
    out = ring_block_sparse_attention(q, k, v, pattern, group=group, sinks=sinks)
    return torch.autograd.grad(out, sinks, do)[0]


def unshard(group, whole, placement, weight, dim):
    """The shard, the whole again, and the gradient of the sum over ranks of (whole · weight of the rank)."""
    shard = shard_sequence(whole, placement, group=group, dim=dim).clone().requires_grad_()
    again = unshard_sequence(shard, placement, group=group, dim=dim)
    return shard.detach(), again.detach(), torch.autograd.grad((again * weight).sum(), shard)[0]


def bad_shards(group):
    x, placement = torch.zeros(1, 64, 2), Placement.contiguous(64, 2, block_size=16)
    with pytest.raises(ValueError, match="x must have the placement's 64 tokens in dim 0, got"):
        shard_sequence(x, placement, group=group, dim=0)
    with pytest.raises(ValueError, match="x must have this rank's 32 tokens in dim 1, got"):
        unshard_sequence(x, placement, group=group)
    with pytest.raises(ValueError, match="placement is for 4 ranks, but the group has 2"):
        shard_sequence(x, Placement.contiguous(64, 4, block_size=16), group=group)
    with pytest.raises(TypeError, match="placement must be a Placement, got str"):
        shard_sequence(x, "contiguous", group=group)


def call(group, what):
    """The shape of the result of a call whose tensors are made here: after it each rank did all that it had to."""
    q = torch.randn(what["shape"], dtype=what["dtype"], requires_grad=what["learn"])
    k = torch.randn(*what["shape"][:2], what["heads_kv"], what["shape"][-1], dtype=what["dtype"])
    out = ring_block_sparse_attention(q, k, k, what["pattern"], group=group, **what["options"])
    if what["learn"]:
        out.sum().backward()
        assert q.grad.isfinite().all()
    return tuple(out.shape)


def sum_of_ones(group, what):
    """The sum of the output and of the gradients of a call whose values are all ones, to twelve digits."""
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    q, k = (torch.randn(*what["shape"], generator=generator, requires_grad=True) for _ in range(2))
    out = ring_block_sparse_attention(q, k, torch.ones_like(k), what["pattern"], group=group, **what["options"])
    out.square().sum().backward()
    return round(float(out.sum()), 3), round(float(q.grad.abs().sum()), 3), round(float(k.grad.abs().sum()), 3)


def order_of_calls(group, patterns, placement, agreement, options=None):
    """Of each call whether this rank heard of the others before it sent anything."""
    agreement_of_ring._kinds.pop(group, None)
    seen, orders, messages = [], [], {"exchange": passes.exchange, "broadcast": passes.broadcast}
    settle = agreement_of_ring.Check.settle

    def heard(check):
        if check._gathering is not None:
            seen.append("heard")
        return settle(check)

    def noted(send):
        def begun(*args, **options):
            seen.append("sent")
            return send(*args, **options)

        return begun

    agreement_of_ring.Check.settle = heard
    for name, send in messages.items():
        setattr(passes, name, noted(send))
    try:
        for number, pattern in enumerate(patterns):
            q = torch.ones(1, 64, 2, 8) * number
            ring_block_sparse_attention(
                q, q, q, pattern, group=group, placement=placement, agreement=agreement, **(options or {})
            )
            orders.append(", ".join(dict.fromkeys(seen)))
            seen.clear()
    finally:
        agreement_of_ring.Check.settle = settle
        for name, send in messages.items():
            setattr(passes, name, send)
    return orders


def plans_kept(group, patterns, most):
    """How many plans are kept, their bytes, and how many may be: those of so many of the patterns."""
    plan._plans[group].clear()
    before, q = plan.MOST_BYTES, torch.ones(1, 64, 2, 8)
    try:
        for pattern in patterns:
            ring_block_sparse_attention(q, q, q, pattern, group=group)
            if before == plan.MOST_BYTES:
                plan.MOST_BYTES = most * sum(each.nbytes for each in plan._plans[group].values())
        return len(plan._plans[group]), sum(each.nbytes for each in plan._plans[group].values()), plan.MOST_BYTES
    finally:
        plan.MOST_BYTES = before


def num_plans(group, forget=False):
    plans = plan._plans[group]
    number = len(plans)
    if forget:
        plans.clear()
    return number


def without_operators(group, pattern):
    """In plain eager PyTorch no operator is called that this package registers: the first call of one imports the
    compiler, and all others wait."""
    q = torch.randn(1, 64, 2, 8, requires_grad=True)
    registered = [mock.patch.object(operators, name, None) for name in ("ring_forward", "ring_backward")]
    registered += [mock.patch.object(ops.operators, name, None) for name in ("OF_LISTS", "OF_NAMES")]
    with ExitStack() as stack:
        for each in registered:
            stack.enter_context(each)
        ring_block_sparse_attention(q, q, q, pattern, group=group).sum().backward()
        ring_dilated_attention(q, q, q, segment_lengths=[64, 128], dilation_rates=[1, 2], group=group).sum().backward()


def plans_made(group, pattern):
    """How many plans calls of other batches, dtypes and without gradients make, after a first call."""
    made, make_plan = [], ring.make_plan

    def counted(*args):
        made.append(args)
        return make_plan(*args)

    ring.make_plan = counted
    try:
        for batch, dtype, learn in ((1, torch.float32, True), (2, torch.float32, False), (1, torch.float64, True)):
            for dropout_p in (0.0, 0.5):
                q = torch.randn(batch, 48, 2, 8, dtype=dtype, requires_grad=learn)
                ring_block_sparse_attention(q, q, q, pattern, group=group, dropout_p=dropout_p)
    finally:
        ring.make_plan = make_plan
    return len(made)


def attend_strided(group, shards, pattern, order, learning):
    """out and gradients (None where not asked for) of tensors whose memory is in another order."""
    q, k, v, do = (x.permute(order).contiguous().permute([order.index(i) for i in range(4)]) for x in shards)
    leaves = {"q": q.detach(), "k": k.detach(), "v": v.detach()}
    for name in learning:
        leaves[name].requires_grad_()
    out = ring_block_sparse_attention(*leaves.values(), pattern, group=group)
    out.backward(do)
    with torch.no_grad():
        again = ring_block_sparse_attention(*leaves.values(), pattern, group=group)
    assert torch.equal(out, again)
    return [out.detach(), *(x.grad for x in leaves.values())]


def outside(group):
    """Ranks 1 and 3 form a ring; the others are told that they are not in it."""
    ring_of_two = dist.new_group([1, 3])
    q = torch.ones(1, 32, 1, 8)
    if dist.get_rank() in (1, 3):
        return float(ring_block_sparse_attention(q, q, q, SlidingWindow(40, 40), group=ring_of_two).sum())
    with pytest.raises(ValueError, match="group must be one that this rank is in"):
        ring_block_sparse_attention(q, q, q, SlidingWindow(40, 40), group=ring_of_two)
    return 0.0


def wrong_groups(group):
    q = torch.zeros(1, 16, 1, 8)
    for wrong in (None, "world"):
        with pytest.raises(TypeError, match="group must be a process group or a DeviceMesh"):
            ring_block_sparse_attention(q, q, q, SlidingWindow(1, 1), group=wrong)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    ring_block_sparse_attention(q, q, q, SlidingWindow(1, 1), group=mesh)


def dilated_call(group, segment_lengths):
    q = torch.zeros(1, 32, 2, 8)
    return ring_dilated_attention(q, q, q, segment_lengths=segment_lengths, dilation_rates=[1], group=group).shape[1]


def unshard_call(group, x, dim, learn):
    placement = Placement.contiguous(3 * 16, 3, block_size=16)
    return unshard_sequence(x.requires_grad_(learn), placement, group=group, dim=dim).shape[dim]


def attend_dilated(group, shards, options, seed=0):
    """out, lse (0 for −inf), dq, dk, dv of this rank, and the bytes sent forward."""
    q, k, v, do, dlse, padding = shards
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    torch.manual_seed(seed + 7 * dist.get_rank(group))
    with count_traffic() as forward:
        out, lse = ring_dilated_attention(q, k, v, group=group, return_lse=True, key_padding_mask=padding, **options)
    finite = torch.where(lse == -torch.inf, 0.0, lse)
    return [out.detach(), finite.detach(), *torch.autograd.grad((out, finite), (q, k, v), (do, dlse))], forward.bytes


def refused_branches(group):
    q = torch.zeros(1, 32, 2, 8)
    with pytest.raises(TypeError, match="must not be one of dilated attention"):
        ring_block_sparse_attention(q, q, q, Branches((16,), (1,)), group=group)
    with pytest.raises(ValueError, match="segment_lengths and dilation_rates must have the same"):
        ring_dilated_attention(q, q, q, segment_lengths=[16], dilation_rates=[1, 2], group=group)
    with pytest.raises(ValueError, match="Did you pass dilations first"):
        ring_dilated_attention(q, q, q, segment_lengths=[1, 2], dilation_rates=[256, 512], group=group)
    with pytest.raises(ValueError, match=rf"one of at most {2 * q.shape[2]}, twice the number of heads"):
        ring_dilated_attention(q, q, q, segment_lengths=[64], dilation_rates=[2 * q.shape[2] + 1], group=group)


def attend_dilated_counted(group, shards, options):
    """The bytes that this rank sends forward and backward."""
    q, k, v, *_ = shards
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    with count_traffic() as forward:
        out = ring_dilated_attention(q, k, v, group=group, **options)
    with count_traffic() as backward:
        out.sum().backward()
    return None, None, (forward.bytes, backward.bytes)


def peak(group, tokens, pattern):
    """Bytes above the shards at the peak of a forward and backward."""
    size = dist.get_world_size(group)
    q, k, v = (torch.randn(1, tokens // size, 4, 32, requires_grad=True) for _ in range(3))
    do = torch.randn(1, tokens // size, 4, 32)
    with measure_peak() as measured:
        ring_block_sparse_attention(q, k, v, pattern, group=group).backward(do)
    return measured.peak_bytes


def most_buffers(group, q, pattern):
    """The most steps whose received keys exist at a time, forward and backward, and how many steps there were."""
    alive, most, begun = [], 0, passes.exchange

    def watched(where, what, *, send=None, receive=None, **options):
        nonlocal most
        if what == "the exchange of keys and values" and receive is not None:
            alive.append(weakref.ref(receive[1][0]))
            most = max(most, sum(each() is not None for each in alive))
        return begun(where, what, send=send, receive=receive, **options)

    passes.exchange = watched
    try:
        ring_block_sparse_attention(q, q, q, pattern, group=group).sum().backward()
    finally:
        passes.exchange = begun
    return most, len(alive)


def shard_of(tensors, placement, rank):
    q, k, v, do, dlse = tensors
    own = torch.cat([torch.arange(run.start, run.stop) for run in placement.tokens(rank)])
    return q[:, own], k[:, own], v[:, own], do[:, own], dlse[:, :, own]


def attend_on_gpu(group, shards, options, device="cuda"):
    """out, lse, dq, dk, dv of this rank, computed on the GPU that the ranks share."""
    q, k, v, do, dlse = (x.to(device) for x in shards)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.manual_seed(0)
    options = {**options, "group": group, "return_lse": True}
    pattern = options.pop("pattern", None)
    if pattern is None:
        out, lse = ring_dilated_attention(*leaves, **options)
    else:
        out, lse = ring_block_sparse_attention(*leaves, pattern, **options)
    grads = torch.autograd.grad((out, lse), leaves, (do, dlse.to(lse.dtype)))
    return [x.detach().cpu() for x in (out, lse, *grads)]
