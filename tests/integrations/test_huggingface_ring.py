"""Models of transformers whose attention is over a ring: they give what they give in one process."""

import copy

import pytest
import torch
import torch.distributed as dist

transformers = pytest.importorskip("transformers")

from dilated_attention_pytorch import Full, GlobalTokens, Placement, SlidingWindow  # noqa: E402
from dilated_attention_pytorch.distributed import RingError, ring_loss, shard_batch, shard_sequence  # noqa: E402
from dilated_attention_pytorch.integrations.huggingface import prefill, register, verify  # noqa: E402
from tests.distributed.conftest import ranks  # noqa: E402, F401 - the processes
from tests.integrations.test_huggingface import DECODERS, build, tokens  # noqa: E402

SEQ = 100
PATTERN = SlidingWindow(30, 5) | GlobalTokens(2)
LENGTHS = (17, 50, 33)

pytestmark = pytest.mark.slow


def both(group, kind, pattern=PATTERN, **changes):
    """A model that attends by itself, and its copy that attends over the ring."""
    alone = build(kind, **changes)
    over = copy.deepcopy(alone)
    register("alone", pattern, layers={1: None})
    register("over the ring", pattern, layers={1: None}, group=group)
    alone.set_attn_implementation("alone")
    over.set_attn_implementation("over the ring")
    return alone, over


def differences(group, kind, packed):
    """Of the hidden states or logits of this rank's tokens, and of the gradients of all parameters."""
    alone, over = both(group, kind)
    placement = Placement.zigzag(SEQ, dist.get_world_size(group), block_size=16)
    batch, whole = {"input_ids": tokens(2, SEQ)}, {}
    if packed:
        positions = torch.cat([torch.arange(n) for n in LENGTHS]).expand(2, -1)
        batch["position_ids"] = whole["position_ids"] = positions
    else:  # padding on the right
        real = torch.ones(2, SEQ, dtype=torch.int64)
        real[0, 80:] = 0
        batch["attention_mask"] = whole["attention_mask"] = real
    cache = {"use_cache": False} if kind in DECODERS else {}
    want = alone(input_ids=batch["input_ids"], **whole, **cache)[0]
    inputs, labels = shard_batch(batch, group, placement)
    assert labels is None
    got = over(**inputs, **cache)[0]
    weight = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(2))
    if not packed:
        weight[0, 80:] = 0.0
    mine, own = (shard_sequence(x, placement, group=group) for x in (want, weight))
    (want * weight).sum().backward()
    (got * own).sum().backward()
    worst = float(((got - mine) * own).detach().abs().max())
    for ours, theirs in zip(over.parameters(), alone.parameters(), strict=True):
        if theirs.grad is not None:
            grad = torch.zeros_like(ours) if ours.grad is None else ours.grad
            dist.all_reduce(grad, group=group)
            worst = max(worst, float((grad - theirs.grad).abs().max() / theirs.grad.abs().max().clamp(min=1)))
    return worst


@pytest.mark.parametrize("kind", [*DECODERS, "bert", "modernbert"])
def test_every_model_is_what_it_is_in_one_process(ranks, kind):  # noqa: F811
    """Their own windows, softcap and sinks among them."""
    packed = [False] if kind in ("bert", "modernbert", "gpt_oss") else [False, True]  # whom transformers packs
    close = 1e-5 if kind in ("gemma2", "gemma3") else 1e-9  # their norms are in float32
    for each in packed:
        assert max(ranks.run(2, differences, kind, each)) <= close, each


def continued(group):
    alone, over = both(group, "llama", max_position_embeddings=256)
    prompt = tokens(2, SEQ)
    cache = prefill(over, prompt, group=group)
    options = {"max_new_tokens": 12, "do_sample": False}
    got = over.generate(prompt, past_key_values=cache, **options)
    assert torch.equal(got, alone.generate(prompt, **options))
    for bad, shape in ((prompt[0], r"\[100\]"), (prompt[:, :1], r"\[2, 1\]"), (prompt.tolist(), "list")):
        with pytest.raises(ValueError, match=rf"input_ids must be \(batch, seq\) of at least 2 tokens, got {shape}"):
            prefill(over, bad, group=group)


def test_a_prompt_that_is_read_by_a_ring_goes_on(ranks):  # noqa: F811
    ranks.run(3, continued)


def refusals(group, compiled):
    alone, over = both(group, "llama")
    ids = tokens(1, SEQ)
    placement = Placement.contiguous(SEQ, dist.get_world_size(group), block_size=16)
    inputs, labels = shard_batch({"input_ids": ids, "labels": ids}, group, placement)
    run = torch.compile(over, backend="eager") if compiled else over
    with pytest.raises(
        ValueError, match="LlamaForCausalLM must get no labels over a ring: its own loss would be wrong"
    ):
        run(**inputs, labels=labels)
    assert ring_loss(run(**inputs).logits, labels, group).isfinite()
    if compiled:
        return
    with pytest.raises(ValueError, match="LlamaModel was given a shard of a batch, but its pattern is registered with"):
        alone(**inputs)
    alone.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=r"the model looks into the attention_mask of shard_batch \(aten"):
        alone(**inputs)
    for whole in ({}, {"attention_mask": torch.ones_like(ids)}):
        with pytest.raises(ValueError, match="LlamaModel attends over a ring, so its inputs must be a rank's shard"):
            over(ids, **whole)
    with pytest.raises(ValueError, match="attends over a ring, so its inputs must be a rank's shard"):
        over.generate(ids, max_new_tokens=2)
    with pytest.raises(ValueError, match="attends over a ring"):
        verify(over)
    assert len(verify(over, inputs)) == 3
    padded = torch.ones_like(ids)
    padded[:, :3] = 0
    late, _ = shard_batch({"input_ids": ids, "attention_mask": padded}, group, placement)
    with pytest.raises(ValueError, match="over a ring a sequence must begin with its first token"):
        over(**late)
    register("over the ring", Full(), group=group)
    over(**late)
    register("over the ring", Full(), length=SEQ - 1, group=group)
    with pytest.raises(ValueError, match="registered for length=99, got a sequence of 100 tokens"):
        over(**inputs)
    with pytest.raises(TypeError, match="group must be a process group or a DeviceMesh, got 'ring'"):
        register("over the ring", Full(), group="ring")


@pytest.mark.parametrize("compiled", [False, True])
def test_refusals(ranks, compiled):  # noqa: F811
    ranks.run(2, refusals, compiled)


def one_rank_refuses(group, what):
    """What stops a model before the attention of its first layer, on the last rank alone."""
    _, over = both(group, "llama")
    ids = tokens(1, SEQ)
    placement = Placement.contiguous(SEQ, dist.get_world_size(group), block_size=16)
    inputs, labels = shard_batch({"input_ids": ids, "labels": ids}, group, placement)
    more = {"labels": {"labels": labels}, "keyword": {"head_mask": torch.ones(4)}}[what]
    over(**inputs, **(more if dist.get_rank(group) == dist.get_world_size(group) - 1 else {}))


@pytest.mark.parametrize(("what", "message"), [("labels", "must get no labels"), ("keyword", "head_mask=.* cannot be")])
def test_a_refusal_of_one_rank_is_told_to_the_others(ranks, what, message):  # noqa: F811
    with pytest.raises(Exception, match=message) as error:
        ranks.run(3, one_rank_refuses, what)
    assert [kind for kind, _ in error.value.errors.values()] == [RingError.__name__] * 2 + ["ValueError"]
