"""Models of torchscale with their attention exchanged, against torchscale's attention written out."""

import copy
import gc

import pytest
import torch
from torch import nn

from dilated_attention_pytorch import dilated_attention
from dilated_attention_pytorch.integrations import torchscale
from dilated_attention_pytorch.integrations.torchscale import attention_maps, replace_dilated_attention
from tests.torchscale import Encoder

SEGMENTS, RATES = [8, 18, 40, 4096], [1, 2, 4, 16]
CLOSE = {"rtol": 0, "atol": 1e-10}


def encoder(depth=2, heads=8, **options):
    torch.manual_seed(0)
    return Encoder(depth, 32, heads, SEGMENTS, RATES, **options).double()


def both(**options):
    theirs = encoder(**options)
    ours = copy.deepcopy(theirs)
    replace_dilated_attention(ours)
    return theirs, ours


@pytest.mark.parametrize(
    "options", [{}, {"subln": True}, {"xpos": True}, {"is_causal": True, "xpos": True}, {"heads": 2}], ids=str
)
@pytest.mark.parametrize("seq", [1, 45])
def test_outputs_and_gradients_are_torchscales(options, seq):
    theirs, ours = both(**options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x = torch.randn(2, seq, 32, dtype=torch.float64)
    want, got = theirs(x), ours(x)
    torch.testing.assert_close(got, want, **CLOSE)
    flow = torch.randn_like(want)
    wanted, given = (
        torch.autograd.grad(out, list(model.parameters()), flow) for out, model in ((want, theirs), (got, ours))
    )
    for name, a, b in zip(theirs.state_dict(), given, wanted, strict=True):
        torch.testing.assert_close(a, b, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
def test_a_slide_encoder_of_twelve_layers():
    """Prov-GigaPath's shape: 16 heads, a class token and tiles, in the precision that it had no kernel for."""
    torch.manual_seed(0)
    theirs = Encoder(12, 64, 16, [16, 36, 128, 362, 1024], [1, 2, 4, 8, 16])
    ours = copy.deepcopy(theirs)
    assert len(replace_dilated_attention(ours)) == 12
    x = torch.randn(1, 101, 64)
    with torch.no_grad():
        want, in_float32, got = copy.deepcopy(theirs).double()(x.double()), theirs(x), ours(x)
    error = (got - want).abs().max()
    assert error <= 4 * (in_float32 - want).abs().max(), error  # as much as eager PyTorch, times a small constant


def test_a_mask_hides_its_keys():
    """torchscale's flash path drops it. A sample with hidden tokens behind its end is not the sample alone (zeros are
    attended to by length), but what hidden tokens hold changes nothing."""
    _, ours = both()
    x = torch.randn(2, 45, 32, dtype=torch.float64)
    hidden = torch.zeros(2, 45, dtype=torch.bool)
    hidden[1, 30:] = True
    want = ours(x, hidden)
    changed = x.clone()
    changed[1, 30:] = torch.randn(15, 32, dtype=torch.float64)
    got = ours(changed, hidden)
    torch.testing.assert_close(got[~hidden], want[~hidden], **CLOSE)
    assert (ours(changed) - ours(x))[1, :30].abs().max() > 1e-3
    hidden[1, 30:] = False  # the same mask, changed in place
    torch.testing.assert_close(ours(x, hidden), ours(x), rtol=0, atol=0)


def test_a_mask_is_read_once_for_all_layers(monkeypatch):
    """Reading waits for a GPU."""
    _, ours = both(depth=3)
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    mask, other = torch.zeros(2, 1, 9, dtype=torch.bool)
    read, inner = [], torch.Tensor.any
    monkeypatch.setattr(torch.Tensor, "any", lambda self, *a, **o: read.append(self) or inner(self, *a, **o))
    for given in (mask, mask, other):
        ours(x, given)
    assert [sum(r is given for r in read) for given in (mask, other)] == [1, 1]
    mask[0, 3] = True
    ours(x, mask)
    assert sum(r is mask for r in read) > 1


def test_dropout_is_for_training():
    theirs = encoder()
    for layer in theirs.layers:
        layer.self_attn.dropout = 0.5
    replace_dilated_attention(theirs)
    x = torch.randn(1, 20, 32, dtype=torch.float64)
    assert not torch.equal(theirs(x), theirs(x))
    theirs.eval()
    assert torch.equal(theirs(x), theirs(x))


def test_a_decoder_token_by_token():
    _, ours = both(depth=1, is_causal=True, xpos=True)
    x = torch.randn(2, 21, 32, dtype=torch.float64)
    want = ours(x)
    states = [{} for _ in ours.layers]
    parts = [ours(x[:, a:b], states=states) for a, b in ((0, 6), (6, 7), (7, 8), (8, 15), (15, 21))]
    # Positions depend on how many tokens there are, as xPos does: the last part alone knows of all.
    torch.testing.assert_close(parts[-1], want[:, 15:], **CLOSE)
    _, plain = both(is_causal=True)
    states = [{} for _ in plain.layers]
    parts = [plain(x[:, i : i + 1], states=states) for i in range(21)]
    torch.testing.assert_close(torch.cat(parts, dim=1), plain(x), **CLOSE)


def test_attention_maps_are_mean_rows_of_the_weights():
    _, ours = both(heads=4)
    x = torch.randn(2, 19, 32, dtype=torch.float64)
    with torch.no_grad():
        plain = ours(x)
    seen = {}

    def note(module, args, kwargs):
        q, k = (p(kwargs["query"]).unflatten(-1, (4, -1)) for p in (module.q_proj, module.k_proj))
        seen[module] = q, k

    hooks = [layer.self_attn.register_forward_pre_hook(note, with_kwargs=True) for layer in ours.layers]
    for queries, rows in (([0], [0]), ([3, 5], [3, 5]), (None, list(range(19)))):
        with attention_maps(ours, queries) as maps, torch.inference_mode():
            assert torch.equal(ours(x), plain)
        assert list(maps) == ["layers.0.self_attn", "layers.1.self_attn"]
        for i, found in enumerate(maps.values()):
            q, k = seen[ours.layers[i].self_attn]
            # The weights themselves, key by key: attention to values that are 1 at one key and 0 elsewhere.
            eye = torch.eye(19, dtype=torch.float64)
            columns = [
                dilated_attention(
                    q.detach().clone(), k.detach().clone(), eye[j].view(1, 19, 1, 1).expand(q.shape).contiguous(),
                    segment_lengths=SEGMENTS, dilation_rates=RATES, head_offsets="grouped", padding="zero_keys",
                )[..., 0]
                for j in range(19)
            ]  # fmt: skip
            want = torch.stack(columns, dim=-1)[:, rows].mean(1)
            torch.testing.assert_close(found, want, **CLOSE)
    for hook in hooks:
        hook.remove()
    with torch.no_grad():
        ours(x)
    assert len(maps) == 2  # of the calls inside alone
    assert all(layer.self_attn.noted is None for layer in ours.layers)


def test_what_is_shared_stays_shared_and_nothing_is_kept():
    model = encoder()
    model.layers[1].self_attn = model.layers[0].self_attn
    replaced = replace_dilated_attention(model)
    assert model.layers[0].self_attn is model.layers[1].self_attn
    assert sorted(replaced) == ["layers.0.self_attn", "layers.1.self_attn"]
    mask = torch.zeros(1, 9, dtype=torch.bool)
    model(torch.randn(1, 9, 32, dtype=torch.float64), mask)
    del mask
    gc.collect()
    assert torchscale._asked[0][0]() is None


def test_compiles_and_saves():
    _, ours = both(depth=1)
    x = torch.randn(1, 40, 32, dtype=torch.float64)
    again = copy.deepcopy(ours)
    again.load_state_dict(ours.state_dict())
    with torch.no_grad():
        want = ours(x)
        assert torch.equal(again(x), want)
        got = torch.compile(ours, backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(got, want, **CLOSE)


class Elsewhere(nn.Module):
    """Attention of the same name that is another."""


Elsewhere.__name__ = "DilatedAttention"


def test_refuses():
    model = encoder()
    with pytest.raises(ValueError, match="no DilatedAttention of torchscale to replace, got Sequential"):
        replace_dilated_attention(nn.Sequential(Elsewhere()))
    with pytest.raises(ValueError, match="cannot be replaced in place"):
        replace_dilated_attention(model.layers[0].self_attn)
    with (
        pytest.raises(ValueError, match="no attention to watch; call replace_dilated_attention first"),
        attention_maps(model),
    ):
        pass
    replace_dilated_attention(model)
    with pytest.raises(ValueError, match="no DilatedAttention of torchscale"):
        replace_dilated_attention(model)  # twice
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    attend = model.layers[0].self_attn
    with pytest.raises(ValueError, match=r"attn_mask must be None .* got a tensor of shape \[9, 9\]"):
        attend(x, x, x, attn_mask=torch.zeros(9, 9))
    with pytest.raises(ValueError, match="rel_pos must be None"):
        attend(x, x, x, rel_pos=torch.zeros(9, 9))
    with pytest.raises(ValueError, match="the same tokens for dilated attention, got 9 and 8"):
        attend(x, x[:, :8], x[:, :8])
    with pytest.raises(ValueError, match="incremental_state needs is_causal=True"):
        attend(x, x, x, incremental_state={})
    for queries in ([], [1, 1], [-1], [0.5], 3):
        with pytest.raises((TypeError, ValueError), match="queries"), attention_maps(model, queries):
            pass
