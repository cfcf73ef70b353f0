"""What models add to scores by `position_bias` (T5 and its kin): an encoder over a pattern equals eager attention with
the pattern's mask, outputs and gradients, that of the table of distances among them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers")

from transformers import MT5Config, MT5EncoderModel, T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel  # noqa: E402

from dilated_attention_pytorch import Full, GlobalTokens, SlidingWindow  # noqa: E402
from dilated_attention_pytorch.integrations.huggingface import register, verify  # noqa: E402
from dilated_attention_pytorch.testing.oracle import FACTOR  # noqa: E402

SMALL = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "pad_token_id": 0}
MODELS = {"t5": (T5EncoderModel, T5Config), "mt5": (MT5EncoderModel, MT5Config), "umt5": (UMT5EncoderModel, UMT5Config)}
SEQ = 40
SPARSE = SlidingWindow(9, 5) | GlobalTokens(2)


def encoder(kind="t5", dtype=torch.float64):
    """Random, and far enough from 0 that attention matters."""
    torch.manual_seed(0)
    model_class, config_class = MODELS[kind]
    model = model_class(
        config_class(**SMALL, dropout_rate=0.0),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.set_attn_implementation("eager")
    return model.to(dtype).eval()


def with_pattern(model, pattern, name="t5 pattern"):
    register(name, pattern)
    model.set_attn_implementation(name)
    return model


def tokens(seq=SEQ):
    return torch.randint(1, 64, (2, seq), generator=torch.Generator().manual_seed(1))


def step(model, ids, mask=None, **given):
    """Outputs of the tokens that are there, and all gradients."""
    out = model(ids, attention_mask=mask, **given).last_hidden_state
    out = out if mask is None else out * mask[..., None]
    flowing = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    grads = torch.autograd.grad((out.double() * flowing).sum(), [*model.parameters()])
    return out.detach(), *grads


def eager_with_mask(model, allowed, monkeypatch):
    """The model's own attention, with the pattern as one more term of its scores."""
    from transformers.models.mt5 import modeling_mt5
    from transformers.models.t5 import modeling_t5
    from transformers.models.umt5 import modeling_umt5

    hidden = torch.where(allowed, 0.0, -torch.inf).double()
    for module in (modeling_t5, modeling_mt5, modeling_umt5):
        original = module.eager_attention_forward

        def attend(*args, original=original, position_bias=None, **kwargs):
            return original(*args, position_bias=position_bias + hidden, **kwargs)

        monkeypatch.setattr(module, "eager_attention_forward", attend)
    return model


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("padding", ["none", "right"])
def test_an_encoder_equals_eager(kind, padding, monkeypatch):
    ids, mask = tokens(), None
    if padding == "right":
        mask = torch.ones_like(ids)
        mask[1, 31:] = 0
    model = encoder(kind)
    got = step(with_pattern(model, Full()), ids, mask)
    model.set_attn_implementation("eager")
    want = step(model, ids, mask)
    names = ["out", *(name for name, _ in model.named_parameters())]
    assert any("relative_attention_bias" in name for name in names)
    for name, mine, theirs in zip(names, got, want, strict=True):
        error, size = (mine - theirs).abs().max(), theirs.abs().max()
        assert size > 0, name
        assert error <= 1e-10 * size.clamp(min=1), name
    assert len(verify(with_pattern(model, Full()))) == 2

    got = step(with_pattern(model, SPARSE), ids, mask)
    place = torch.arange(SEQ)
    ahead = place - place[:, None]
    model.set_attn_implementation("eager")
    want = step(eager_with_mask(model, (ahead >= -9) & (ahead <= 5) | (place < 2), monkeypatch), ids, mask)
    for name, mine, theirs in zip(names, got, want, strict=True):
        assert (mine - theirs).abs().max() <= 1e-10 * theirs.abs().max().clamp(min=1), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precision(dtype):
    """As near to the truth as eager attention in that precision is."""
    true, ids = encoder(), tokens()
    want = step(true, ids)
    model = encoder(dtype=dtype)
    eager, ours = step(model, ids), step(with_pattern(model, Full()), ids)
    for name, got, theirs, expected in zip(["out", *dict(model.named_parameters())], ours, eager, want, strict=True):
        error, allowed = ((x.double() - expected).norm() for x in (got, theirs))
        assert error <= FACTOR * allowed + torch.finfo(dtype).eps * expected.norm(), name


def test_padding_on_the_left(monkeypatch):
    """Patterns that count from the first token: a row gives what it gives alone."""
    model, ids = with_pattern(encoder(), SPARSE), tokens()
    mask = torch.ones_like(ids)
    mask[1, :11] = 0
    both, alone = model(ids, attention_mask=mask).last_hidden_state, model(ids[1:, 11:]).last_hidden_state
    torch.testing.assert_close(both[1, 11:], alone[0], atol=1e-10, rtol=0)
    torch.testing.assert_close(both[0], model(ids[:1]).last_hidden_state[0], atol=1e-10, rtol=0)


@given(st.integers(1, 70), st.integers(0, 30), st.integers(0, 30))
@settings(max_examples=10)
def test_any_length_and_window(seq, left, right):
    model, ids = encoder(), tokens(seq)
    place = torch.arange(seq)
    ahead = place - place[:, None]
    got = step(with_pattern(model, SlidingWindow(left, right)), ids)
    with pytest.MonkeyPatch.context() as patch:
        model.set_attn_implementation("eager")
        want = step(eager_with_mask(model, (ahead >= -left) & (ahead <= right), patch), ids)
    for mine, theirs in zip(got, want, strict=True):
        assert (mine - theirs).abs().max() <= 1e-10 * theirs.abs().max().clamp(min=1)


class TestRefused:
    def test_a_cache(self):
        config = transformers.UMT5Config(**SMALL, is_decoder=True, is_encoder_decoder=False)
        from transformers.models.umt5.modeling_umt5 import UMT5Stack

        stack = UMT5Stack(config).double().eval()
        with_pattern(stack, SPARSE)
        first = stack(tokens(8), use_cache=True)
        with pytest.raises(ValueError, match=r"position_bias cannot be honoured with a cache: .* \(UMT5Attention\)"):
            stack(tokens(1), past_key_values=first.past_key_values, use_cache=True)

    def test_cross_attention(self):
        torch.manual_seed(0)
        model = transformers.T5Model(T5Config(**SMALL))
        with_pattern(model, SPARSE)
        with pytest.raises(ValueError, match="T5Attention attends to another"):
            model(tokens(), decoder_input_ids=tokens())
