"""Attention written out in full, from DESIGN.md and without a line of the library: the modules must equal it."""

import math

import torch


def attend(q, k, v, allowed, scale=None):
    """Output and weights of one softmax over the allowed keys of a row; a row that may see no key gives 0."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    empty = ~allowed.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(~allowed & ~empty, -torch.inf), -1).masked_fill(empty, 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), weights


def local_blocks(num, window, block, *, causal=False, stride=1):
    """`|i − j| ≤ ceil(window / 2B)`; causal `0 ≤ i − j ≤ ceil(window / B)`; of these every `stride`-th."""
    distance = torch.arange(num)[:, None] - torch.arange(num)
    if causal:
        near = (distance >= 0) & (distance <= math.ceil(window / block))
    else:
        near = distance.abs() <= math.ceil(window / (2 * block))
    return near & (distance % stride == 0)


def global_blocks(num, tokens, block):
    """Every query block sees the key blocks that hold one of the first `tokens` tokens."""
    return (torch.arange(num) * block < tokens).expand(num, num)


def dilated_blocks(num, branches, ratio, block, *, causal=False):
    """The diagonal, then the branches in turn, nearest first, until `max(1, round(ratio · num))` blocks are taken."""
    mask = torch.zeros(num, num, dtype=torch.bool)
    for i in range(num):
        offers = []
        for length, rate in branches:
            start = i - i % math.ceil(length / block)
            stop = i + 1 if causal else min(start + math.ceil(length / block), num)
            offers.append(sorted((j for j in range(start, stop) if (i - j) % rate == 0), key=lambda j: (abs(i - j), j)))
        taken = [i]
        for turn in range(num):
            for offer in offers:
                if turn < len(offer) and offer[turn] not in taken and len(taken) < max(1, round(ratio * num)):
                    taken.append(offer[turn])
        mask[i, taken] = True
    return mask


def tokens(blocks, block, seq, *, causal=False):
    """A mask of blocks as a mask of tokens."""
    allowed = blocks.repeat_interleave(block, -2).repeat_interleave(block, -1)[..., :seq, :seq]
    return allowed.tril() if causal else allowed
