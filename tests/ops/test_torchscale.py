"""Where `dilated_attention` gives what torchscale's LongNet gives, and where it does not.

torchscale fills up with zeros: a sequence to whole segments, a segment to a multiple of its dilation. Zeros are
attended to like any token, and what comes back of a segment that was filled up is longer than it was, so that the
results of the segments behind it stand at later tokens.
"""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

from dilated_attention_pytorch import dilated_attention

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "golden_longnet.npz")
HEADS = 4


def filled_up(x, size):
    """(…, seq, features) with zeros behind the last token, up to a multiple of `size`."""
    return pad(x, (0, 0, 0, -x.shape[-2] % size))


def branch_of_head(q, k, v, segment, rate, offset, is_causal):
    """One branch of one head, tensors (batch, seq, head_dim): out and lse, as torchscale places them."""
    seq = q.shape[1]
    segment = min(segment, seq)
    q, k, v = (filled_up(filled_up(x, segment).unflatten(1, (-1, segment)), rate) for x in (q, k, v))
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -1e8, dtype=q.dtype)
    q, k, v = (x[:, :, offset::rate] for x in (q, k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    out[:, :, offset::rate], lse[:, :, offset::rate] = scores.softmax(-1) @ v, scores.logsumexp(-1)
    return out.flatten(1, 2)[:, :seq], lse.flatten(1, 2)[:, :seq]


def as_torchscale(q, k, v, segments, rates, is_causal):
    heads, results = q.shape[2], []
    for head in range(heads):
        parts = [
            branch_of_head(*(x[:, :, head] for x in (q, k, v)), w, r, head // -(-heads // r), is_causal)
            for w, r in zip(segments, rates, strict=True)
        ]
        shares = torch.stack([lse for _, lse in parts]).softmax(0)[..., None]
        results.append((shares * torch.stack([out for out, _ in parts])).sum(0))
    return torch.stack(results, dim=2)


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
