"""How a token is drawn: the distribution is the one that temperature, top_k and top_p define."""

import math
from itertools import product

import pytest
import torch

from dilated_attention_pytorch.models.sampling import Sampling

# Their softmax is (0.5, 0.25, 0.125, 0.0625, 0.0625), in another order.
HALVES = torch.tensor([0.125, 0.5, 0.0625, 0.25, 0.0625]).log()
DRAWS = 20000


def distribution(logits, temperature, top_k, top_p):
    """By the definition, one token at a time, from the most likely on."""
    weights = [math.exp(x / temperature) for x in logits.tolist()]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])[:top_k]
    total, kept, mass = sum(weights[token] for token in order), [], 0.0
    for token in order:
        if top_p is not None and top_p < 1 and mass >= top_p:
            break
        kept.append(token)
        mass += weights[token] / total
    share = sum(weights[token] for token in kept)
    return torch.tensor([weights[token] / share if token in kept else 0.0 for token in range(len(weights))])


def drawn(logits, **options):
    sampling = Sampling(**options, generator=torch.Generator().manual_seed(0))
    return torch.bincount(sampling.draw(logits.expand(DRAWS, -1))[:, 0], minlength=len(logits)) / DRAWS


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), list(product([1.0, 2.0, 0.5], [None, 3, 99], [None, 1.0, 0.3, 0.6, 0.9]))
)
def test_draws_follow_the_distribution(temperature, top_k, top_p):
    logits = torch.tensor([0.3, 2.0, -1.0, 1.5, 0.9])
    want = distribution(logits, temperature, top_k, top_p)
    got = drawn(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    # Five standard deviations of a share.
    assert ((got - want).abs() <= 5 * (want * (1 - want) / DRAWS).sqrt()).all()
    assert torch.equal(got > 0, want > 0)


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (None, 0.1, [1]),  # the most likely is always there
        (None, 0.5, [1]),  # reached exactly
        (None, 0.51, [1, 3]),
        (None, 0.75, [1, 3]),
        (None, 0.76, [0, 1, 3]),
        (None, 1.0, [0, 1, 2, 3, 4]),
        (2, 0.7, [1, 3]),  # of two tokens, 2/3 and 1/3
        (2, 0.6, [1]),
        (1, 1.0, [1]),
    ],
)
def test_the_tokens_that_are_kept(top_k, top_p, kept):
    assert drawn(HALVES, top_k=top_k, top_p=top_p).nonzero().flatten().tolist() == kept


def test_rows_are_drawn_each_by_its_own():
    rows = torch.stack([HALVES, HALVES.roll(1), HALVES.roll(2)])
    assert Sampling(top_p=0.5).draw(rows).tolist() == [[1], [2], [3]]
    assert Sampling(temperature=0.0).draw(rows).tolist() == [[1], [2], [3]]


def test_all_of_the_mass_keeps_tokens_that_rounding_would_lose(monkeypatch):
    """The first token alone has a float32 probability of 1."""
    logits = torch.tensor([20.0, 0.0])
    assert logits.softmax(-1)[0] == 1.0
    seen = []

    def multinomial(weights, *_, **__):
        seen.append(weights)
        return torch.tensor([[0]])

    monkeypatch.setattr(torch, "multinomial", multinomial)
    Sampling(top_p=1.0).draw(logits[None])
    assert (seen[0] > 0).all()
