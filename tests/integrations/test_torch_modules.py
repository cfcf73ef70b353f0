"""`sdpa_with` and `replace_attention`, against PyTorch's own modules with the pattern as a dense mask."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from dilated_attention_pytorch import Full, GlobalTokens, LocalBlocks, SlidingWindow
from dilated_attention_pytorch.integrations.pytorch import replace_attention, sdpa_with

SEQ = 37
SPARSE = SlidingWindow(5, 3) | GlobalTokens(2)
BLOCKS = LocalBlocks(16, block_size=16)


def dense(pattern, seq=SEQ):
    return torch.tensor([[pattern.allows(i, j, seq, seq) for j in range(seq)] for i in range(seq)])


def qkv(heads_kv=4):
    make = torch.Generator().manual_seed(0)
    return [torch.randn(2, h, SEQ, 8, dtype=torch.float64, generator=make) for h in (4, heads_kv, heads_kv)]


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("pattern", [SPARSE, BLOCKS], ids=["sparse", "blocks"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_sdpa_with_a_pattern(pattern, is_causal, masked):
    q, k, v = qkv(heads_kv=2)
    allowed = dense(pattern).tril() if is_causal else dense(pattern)
    attn_mask = None
    if masked:
        attn_mask = torch.ones(2, 1, 1, SEQ, dtype=torch.bool)
        attn_mask[1, ..., -4:] = False
        allowed = allowed & attn_mask
    got = sdpa_with(pattern)(q, k, v, attn_mask, 0.0, is_causal, scale=0.3, enable_gqa=True)
    want = scaled_dot_product_attention(q, k, v, allowed, scale=0.3, enable_gqa=True)
    visible = allowed.any(-1).expand(2, 1, SEQ)[..., None].expand_as(got)
    close(got[visible], want[visible])
    assert (got[~visible] == 0).all()


def test_sdpa_inside_a_model_that_calls_it():
    """`F.scaled_dot_product_attention` exchanged by the bound function, gradients included."""
    q, k, v = (x.requires_grad_() for x in qkv())
    flow = torch.randn_like(q)
    got = torch.autograd.grad(sdpa_with(SPARSE)(q, k, v), (q, k, v), flow)
    want = torch.autograd.grad(scaled_dot_product_attention(q, k, v, dense(SPARSE)), (q, k, v), flow)
    close(got, want)


def test_sdpa_refuses():
    attend, (q, k, v) = sdpa_with(SPARSE), qkv()
    for mask in (torch.zeros(2, 1, 1, SEQ), torch.ones(SEQ, SEQ, dtype=torch.bool)):
        with pytest.raises(ValueError, match="attn_mask must be bool"):
            attend(q, k, v, mask)
    with pytest.raises(ValueError, match="as many heads without enable_gqa, got 4 and 2"):
        attend(q, k[:, :2], v[:, :2])
    with pytest.raises(ValueError, match="is_causal is about one sequence; got 1 queries and 37 keys"):
        attend(q[:, :, -1:], k, v, is_causal=True)
    with pytest.raises(ValueError, match="query must be"):
        attend(q[0], k, v)
    with pytest.raises(TypeError, match="pattern must be a Pattern"):
        sdpa_with(SEQ)


def encoder(**options):
    torch.manual_seed(0)
    settings = {"d_model": 32, "nhead": 4, "dim_feedforward": 48, "dropout": 0.0, "batch_first": True} | options
    layer = nn.TransformerEncoderLayer(**settings, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=settings["batch_first"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def inputs(batch_first=True):
    x = torch.randn(2, SEQ, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x if batch_first else x.transpose(0, 1)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_encoder(training, batch_first, padded):
    """Also where PyTorch would take its fused path: evaluation without gradients."""
    model, x = encoder(batch_first=batch_first).train(training), inputs(batch_first)
    padding = torch.zeros(2, SEQ, dtype=torch.bool)
    padding[1, -5:] = padded
    dense_model = copy.deepcopy(model)
    replaced = replace_attention(model, SPARSE)
    assert sorted(replaced) == ["layers.0.self_attn", "layers.1.self_attn"]
    real = ~padding if batch_first else ~padding.T
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            got = model(x, src_key_padding_mask=padding)
        want = dense_model(x, mask=~dense(SPARSE), src_key_padding_mask=padding)
        close(got[real], want[real])
    assert not torch.allclose(got[real], dense_model(x, src_key_padding_mask=padding)[real])


def test_parameters_are_the_same_and_keep_their_names():
    model = encoder()
    before = dict(model.named_parameters())
    replace_attention(model, Full())
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in before.items()}
    model.load_state_dict(encoder().state_dict())


def test_causal_masks_are_understood_and_others_refused():
    model, x = encoder(), inputs()
    dense_model = copy.deepcopy(model)
    replace_attention(model, SPARSE)
    causal = nn.Transformer.generate_square_subsequent_mask(SEQ, dtype=torch.float64)
    want = dense_model(x, mask=~dense(SPARSE).tril())
    close(model(x, mask=causal), want)
    close(model(x, mask=causal, is_causal=True), want)
    close(model(x, mask=causal == -torch.inf), want)
    for mask in (causal.T, causal * 0 + 0.5, torch.zeros(8, SEQ, SEQ)):
        with pytest.raises(ValueError, match="mask must be"):
            model(x, mask=mask)
    with pytest.raises(ValueError, match="adds nothing else to the scores"):
        model(x, src_key_padding_mask=torch.full((2, SEQ), -1e9, dtype=torch.float64))


def test_decoder_keeps_its_attention_to_the_encoder():
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(32, 4, 48, dropout=0.0, batch_first=True, dtype=torch.float64)
    model, x = nn.TransformerDecoder(layer, 1), inputs()
    memory = torch.randn(2, 9, 32, dtype=torch.float64)
    want = model(x, memory, tgt_mask=~dense(SPARSE))
    assert list(replace_attention(model, SPARSE)) == ["layers.0.self_attn"]
    close(model(x, memory), want)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("sizes", [{}, {"kdim": 12, "vdim": 20}, {"bias": False}], ids=["same", "others", "no bias"])
def test_multihead_attention_itself(sizes, average):
    """Output, weights and gradients of the parameters."""
    torch.manual_seed(0)
    holder = nn.ModuleDict({"a": nn.MultiheadAttention(32, 4, batch_first=True, dtype=torch.float64, **sizes)})
    old = copy.deepcopy(holder["a"])
    replace_attention(holder, SPARSE)
    make = [torch.randn(2, SEQ, n, dtype=torch.float64) for n in (32, sizes.get("kdim", 32), sizes.get("vdim", 32))]
    got = holder["a"](*make, average_attn_weights=average)
    want = old(*make, attn_mask=~dense(SPARSE), average_attn_weights=average)
    close(got, want)
    want[0].square().sum().backward()
    got[0].square().sum().backward()
    for (name, p), (other, q) in zip(holder["a"].named_parameters(), old.named_parameters(), strict=True):
        assert name == other
        close(p.grad, q.grad)


def test_compiled():
    model, x = encoder(), inputs()
    replace_attention(model, SPARSE)
    padding = torch.zeros(2, SEQ, dtype=torch.bool)
    padding[1, -5:] = True
    want = model(x, src_key_padding_mask=padding)
    close(torch.compile(model, backend="aot_eager", fullgraph=True)(x, src_key_padding_mask=padding), want)


def test_only_those_that_are_named():
    model = encoder()
    assert list(replace_attention(model, SPARSE, names=["layers.1.self_attn"])) == ["layers.1.self_attn"]
    assert type(model.layers[0].self_attn) is nn.MultiheadAttention


class TestRefused:
    @pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
    def test_more_keys(self, option):
        holder = nn.ModuleDict({"a": nn.MultiheadAttention(32, 4, **{option: True})})
        with pytest.raises(ValueError, match="a has add_bias_kv or add_zero_attn"):
            replace_attention(holder, SPARSE)

    def test_hooks(self):
        model = encoder()
        model.layers[1].self_attn.register_forward_hook(lambda *args: None)
        with pytest.raises(ValueError, match=r"layers\.1\.self_attn has hooks"):
            replace_attention(model, SPARSE)
        assert type(model.layers[0].self_attn) is nn.MultiheadAttention  # nothing was done

    def test_classes_made_from_it(self):
        class Mine(nn.MultiheadAttention):
            pass

        with pytest.raises(TypeError, match=r"a must be an nn.MultiheadAttention and not a class made from it"):
            replace_attention(nn.ModuleDict({"a": Mine(32, 4)}), SPARSE)

    def test_nothing_to_replace(self):
        with pytest.raises(ValueError, match=r"no nn.MultiheadAttention to replace"):
            replace_attention(nn.Linear(3, 3), SPARSE)
        with pytest.raises(ValueError, match=r"no nn.MultiheadAttention named \['layers.7'\]"):
            replace_attention(encoder(), SPARSE, names=["layers.7"])
        with pytest.raises(ValueError, match="itself cannot be replaced in place"):
            replace_attention(nn.MultiheadAttention(32, 4), SPARSE)

    def test_another_sequence(self):
        model, x = encoder(), inputs()
        replace_attention(model, SPARSE)
        with pytest.raises(ValueError, match=r"one sequence that attends to itself.*got 5 and 37"):
            model.layers[0].self_attn(x[:, :5], x, x)

    def test_weights_in_training_with_dropout(self):
        model, x = encoder(dropout=0.1).train(), inputs()
        replace_attention(model, SPARSE)
        assert model(x).isfinite().all()
        with pytest.raises(ValueError, match="need_weights must be False in training with dropout"):
            model.layers[0].self_attn(x, x, x)
