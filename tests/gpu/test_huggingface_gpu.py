"""Models of transformers on a GPU: near eager attention with the dense mask, and generating with every cache."""

import copy

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SEQ = 300


def build():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # the usual start is so near 0 that attention hardly matters
            parameter.normal_(std=0.06)
    return model.cuda()


def sparse():
    from dilated_attention_pytorch import GlobalTokens, SlidingWindow

    return SlidingWindow(63, 0) | GlobalTokens(4)


def tokens():
    return torch.randint(1, 64, (2, SEQ), generator=torch.Generator().manual_seed(1)).cuda()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_logits(dtype):
    """We may err as much as eager in the same dtype, times 4, plus one rounding."""
    from dilated_attention_pytorch import BlockLayout, Causal
    from dilated_attention_pytorch.integrations.huggingface import register

    model, ids = build().to(dtype), tokens()
    allowed = BlockLayout.from_pattern(sparse() & Causal(), SEQ, block_size=16).to_dense().cuda().expand(2, 1, SEQ, SEQ)

    def dense(each):
        kind = each.dtype
        mask = torch.where(allowed, torch.zeros((), dtype=kind, device="cuda"), torch.finfo(kind).min)
        return each(ids, attention_mask=mask).logits.double()

    eager, exact = dense(model), dense(copy.deepcopy(model).double())
    register("sparse", sparse())
    model.set_attn_implementation("sparse")
    ours = model(ids).logits.double()
    bound = 4 * (eager - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
    assert (ours - exact).abs().max() <= bound


@pytest.mark.parametrize("cache", [None, "static"])
def test_generating(cache):
    """transformers compiles decoding with a static cache by itself on a GPU."""
    from dilated_attention_pytorch.integrations.huggingface import register

    model, ids = build(), tokens()
    register("sparse", sparse())
    model.set_attn_implementation("sparse")
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    mask[0, :37] = 0
    got = model.generate(ids, attention_mask=mask, cache_implementation=cache, **options)
    assert got[:1, 37:].equal(model.generate(ids[:1, 37:], use_cache=False, **options))
    assert got[1:].equal(model.generate(ids[1:], use_cache=False, **options))
