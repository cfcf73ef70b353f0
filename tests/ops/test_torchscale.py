"""Where `dilated_attention` gives what torchscale's LongNet gives, and where it does not."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from dilated_attention_pytorch import dilated_attention
from tests.torchscale import as_torchscale

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "golden_longnet.npz")
HEADS = 4


def ours(q, k, v, segments, rates, is_causal):
    options = {"segment_lengths": segments, "dilation_rates": rates, "is_causal": is_causal}
    return dilated_attention(q, k, v, **options, head_offsets="grouped", backend="reference")


def agrees(seq, segments, rates, is_causal):
    """As the documentation says."""
    cut = [min(w, seq) for w in segments]
    if is_causal:  # zeros come after every token; nothing stands behind a single segment
        return all(w % r == 0 or w == seq for w, r in zip(cut, rates, strict=True))
    return all(seq % w == 0 and w % r == 0 for w, r in zip(cut, rates, strict=True))


@pytest.mark.parametrize("name", GOLDEN["cases"])
def test_written_out_as_it_is(name):
    """What is compared with here gives what torchscale's own code gave."""
    q, k, v, out = (torch.tensor(GOLDEN[f"{name}/{part}"]) for part in ("q", "k", "v", "out"))
    segments, rates = (GOLDEN[f"{name}/{part}"].tolist() for part in ("segment_lengths", "dilation_rates"))
    is_causal = bool(GOLDEN[f"{name}/is_causal"])
    assert agrees(q.shape[1], segments, rates, is_causal)
    torch.testing.assert_close(as_torchscale(q, k, v, segments, rates, is_causal), out, rtol=0, atol=1e-10)


def same(seq, *call):
    q, k, v = torch.randn(
        3, 2, seq, HEADS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seq)
    ).unbind()
    return torch.allclose(ours(q, k, v, *call), as_torchscale(q, k, v, *call), rtol=0, atol=1e-10)


@pytest.mark.parametrize("is_causal", [False, True])
def test_agrees_where_it_is_said(is_causal):
    count = 0
    for seq, segment, rate in itertools.product((6, 8, 12, 13, 24), (4, 5, 6, 8, 9, 12, 24, 30), (1, 2, 3, 4)):
        for segments, rates in (([segment], [rate]), ([segment, 2 * segment], [rate, 2 * rate])):
            if agrees(seq, segments, rates, is_causal):
                count += 1
                assert same(seq, segments, rates, is_causal), (seq, segments, rates)
    assert count > 100


@pytest.mark.parametrize(
    ("seq", "segments", "rates", "is_causal"),
    [
        # The documentation said: wherever segments divide the length. Here they do, and dilations do not divide them.
        (24, [12], [5], True),
        (24, [8], [3], True),
        (24, [8], [3], False),
        (24, [24], [7], False),
        (24, [6, 24], [4, 1], True),
        (24, [4, 12], [1, 5], False),
        # Segments do not divide the length: zeros at its end, which only later tokens would hide.
        (25, [8], [2], False),
        (25, [8, 16], [1, 2], False),
        (13, [24], [2], False),
    ],
)
def test_does_not_agree_elsewhere(seq, segments, rates, is_causal):
    assert not agrees(seq, segments, rates, is_causal)
    assert not same(seq, segments, rates, is_causal)


ZEROS = [
    ([8], [2]), ([8, 16], [1, 2]), ([24], [5]), ([4, 12, 100], [1, 3, 7]), ([100], [3]), ([6, 30], [2, 6]), ([1], [1]),
]  # fmt: skip


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_zero_keys_give_what_torchscale_gives_at_any_length(is_causal, detached):
    """Outputs and all gradients, also where zeros are attended to; torchscale's are the detached ones."""
    count = hidden = 0
    for seq, (segments, rates) in itertools.product((1, 2, 5, 13, 24, 25, 37), ZEROS):
        if any(w < seq and w % r for w, r in zip(segments, rates, strict=True)):
            continue
        generator = torch.Generator().manual_seed(seq)
        q, k, v, do = torch.randn(4, 2, seq, HEADS, 4, dtype=torch.float64, generator=generator).unbind()
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        want = as_torchscale(q, k, v, segments, rates, is_causal, detached)
        options = {"segment_lengths": segments, "dilation_rates": rates, "head_offsets": "grouped"}
        options |= {"is_causal": is_causal, "detach_branch_weights": detached, "padding": "zero_keys"}
        for backend in ("reference", "blockwise"):
            got = dilated_attention(q, k, v, **options, backend=backend)
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
            grads = [torch.autograd.grad(x, (q, k, v), do, retain_graph=True) for x in (got, want)]
            for a, b in zip(*grads, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        count += 1
        hidden += not agrees(seq, segments, rates, is_causal)
    assert count > 30
    assert hidden > 10 or is_causal  # causal queries see no zero


def test_zero_keys_join_sinks_masks_and_the_lse():
    """Against the softmax written out with zero keys as columns of score 0."""
    q, k, v = torch.randn(3, 2, 13, 2, 4, dtype=torch.float64).unbind()
    sinks, hidden = torch.randn(2, dtype=torch.float64), torch.rand(2, 13) < 0.3
    options = {"segment_lengths": [8], "dilation_rates": [2], "padding": "zero_keys", "return_lse": True}
    out, lse = dilated_attention(q, k, v, **options, sinks=sinks, key_padding_mask=hidden, softcap=2.0)
    for sample, head, row in itertools.product(range(2), range(2), range(13)):
        segment = range(8) if row < 8 else range(8, 13)
        columns = [j for j in segment if j % 8 % 2 == head and not hidden[sample, j]]
        real = sum(j % 8 % 2 == head for j in segment)
        kept = row % 8 % 2 == head
        scores = (
            [2.0 * torch.tanh(q[sample, row, head] @ k[sample, j, head] / 2.0 / 2.0) for j in columns] if kept else []
        )
        extra = [torch.zeros((), dtype=torch.float64)] * ((4 - real) if kept else 0) + [sinks[head]]
        weights = torch.stack([*scores, *extra]).softmax(0)
        want = sum((w * v[sample, j, head] for w, j in zip(weights, columns, strict=False)), torch.zeros(4).double())
        want = want if kept else torch.zeros(4, dtype=torch.float64)
        torch.testing.assert_close(out[sample, row, head], want, rtol=0, atol=1e-12)
        torch.testing.assert_close(
            lse[sample, head, row], torch.stack([*scores, *extra]).logsumexp(0), rtol=0, atol=1e-12
        )


def test_zero_keys_refuse_what_torchscale_misplaces():
    q, k, v = torch.randn(3, 1, 24, 2, 4).unbind()
    options = {"segment_lengths": [8], "dilation_rates": [3], "padding": "zero_keys"}
    with pytest.raises(
        ValueError, match=r"to be a multiple of its dilation rate .* got segment length 8 with dilation"
    ):
        dilated_attention(q, k, v, **options)
    dilated_attention(q[:, :8], k[:, :8], v[:, :8], **options)  # one segment: nothing stands behind it
    with pytest.raises(ValueError, match="as many queries as keys, got 4 queries and 8 keys"):
        dilated_attention(q[:, :4], k[:, :8], v[:, :8], **options)
    with pytest.raises(ValueError, match="no meaning with alibi_slopes"):
        dilated_attention(q[:, :8], k[:, :8], v[:, :8], **options, alibi_slopes=torch.ones(2))
