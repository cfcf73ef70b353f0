"""The choice of a backend is an ordered list that explains itself; a named backend is never replaced."""

import pytest
import torch

from dilated_attention_pytorch import BlockLayout, Causal, Full, SlidingWindow, block_sparse_attention, explain
from dilated_attention_pytorch.ops.choose import check_backend


def qkv(heads=2, heads_kv=2, seq_q=40, seq_k=40, dtype=torch.float32):
    return [torch.randn(1, s, h, 8, dtype=dtype) for s, h in ((seq_q, heads), (seq_k, heads_kv), (seq_k, heads_kv))]


CALLS = {
    "full": (qkv(), Full(), {}, "sdpa", "the layout is full: nothing is sparse"),
    "causal": (qkv(), Causal(), {}, "sdpa", "the layout is causal"),
    "is_causal": (qkv(), Full(), {"is_causal": True}, "sdpa", "the layout is causal"),
    "window": (qkv(), SlidingWindow(3, 3), {}, "blockwise", "the layout is neither full nor causal"),
    "lse": (qkv(), Full(), {"return_lse": True}, "blockwise", "lse was asked for"),
    "dropout": (qkv(), Full(), {"dropout_p": 0.1}, "blockwise", "dropout is not reproducible there"),
    "padding": (qkv(), Full(), {"key_padding_mask": torch.ones(1, 40, dtype=torch.bool)}, "blockwise", "dense mask"),
    "unequal lengths": (qkv(seq_q=7), Causal(), {}, "blockwise", "aligned at the end"),
    "narrow values": (
        [x[..., :n] for x, n in zip(qkv(), (8, 8, 5), strict=True)],
        Full(),
        {},
        "blockwise",
        "of another width",
    ),
    "grouped heads": (qkv(heads=4), Full(), {}, "blockwise", "for grouped key heads in half precision on CUDA alone"),
}


@pytest.mark.parametrize("name", CALLS)
def test_choice_and_reason(name):
    tensors, pattern, options, chosen, reason = CALLS[name]
    explanation = explain(*tensors, pattern, **options)
    assert explanation.chosen == chosen
    assert reason in explanation.reasons["sdpa"]
    assert set(explanation.reasons) == {"sdpa", "triton", "blockwise", "reference"}
    assert f"→ {chosen}" in str(explanation)
    assert str(explanation).count("→") == 1


@pytest.mark.parametrize("name", CALLS)
def test_the_choice_does_not_change_the_result(name):
    tensors, pattern, options, *_ = CALLS[name]
    torch.manual_seed(0)
    got = block_sparse_attention(*tensors, pattern, **options)
    torch.manual_seed(0)
    torch.testing.assert_close(got, block_sparse_attention(*tensors, pattern, backend="reference", **options))


def test_full_attention_is_what_pytorch_computes():
    q, k, v = qkv()
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2)
    assert torch.equal(block_sparse_attention(q, k, v, Full()), want)


def test_a_named_backend_that_cannot_run_is_an_error():
    with pytest.raises(ValueError, match="backend 'sdpa' cannot run this call: the layout is neither full nor causal"):
        block_sparse_attention(*qkv(), SlidingWindow(2, 2), backend="sdpa")


def test_explain_names_a_backend_that_was_asked_for():
    explanation = explain(*qkv(), Full(), backend="blockwise")
    assert explanation.chosen == "blockwise"
    assert explanation.reasons["blockwise"].startswith("chosen: named by the caller")
    assert explanation.reasons["sdpa"].startswith("not chosen, another was named")


def test_a_named_backend_runs(monkeypatch):
    from dilated_attention_pytorch.backends import blockwise

    called = []
    forward = blockwise.forward
    monkeypatch.setattr(blockwise, "forward", lambda *args: called.append(args) or forward(*args))
    layout = BlockLayout.from_pattern(Full(), 40, block_size=16)
    block_sparse_attention(*qkv(), layout, backend="blockwise")
    assert len(called) == 1
    block_sparse_attention(*qkv(), layout)
    assert len(called) == 1


def test_a_misspelt_backend():
    with pytest.raises(ValueError, match=r"backend must be one of .* got 'blokwise'; did you mean 'blockwise'\?"):
        check_backend("blokwise")
