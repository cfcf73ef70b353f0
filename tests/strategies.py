"""Hypothesis strategies: patterns, layouts and whole calls."""

import itertools
from dataclasses import replace

import torch
from hypothesis import strategies as st

from dilated_attention_pytorch import (
    BlockLayout,
    Blocks,
    Branches,
    Causal,
    DilatedBlocks,
    Documents,
    Full,
    GlobalBlocks,
    GlobalTokens,
    LocalBlocks,
    PerHead,
    RandomBlocks,
    SlidingWindow,
)
from dilated_attention_pytorch.testing import Case

BLOCKS = [(16, 16), (16, 16), (32, 32), (16, 32), (32, 16)]


@st.composite
def documents(draw, seq_k):
    cuts = sorted(draw(st.sets(st.integers(1, seq_k - 1), max_size=5))) if seq_k > 1 else []
    edges = [0, *cuts, seq_k]
    return Documents(tuple(b - a for a, b in itertools.pairwise(edges)))


def atoms(packing):
    bound = st.none() | st.integers(0, 60)
    size = st.just(32)
    window, flag = st.integers(0, 120), st.booleans()
    return st.one_of(
        st.just(Full()),
        st.just(Causal()),
        st.builds(SlidingWindow, bound, bound),
        st.builds(GlobalTokens, st.integers(1, 50), flag),
        st.just(packing),
        st.builds(LocalBlocks, window, st.integers(1, 4), size, flag),
        st.builds(GlobalBlocks, st.integers(1, 70), size),
        st.builds(RandomBlocks, st.integers(1, 4), st.integers(0, 2**40), size),
        st.builds(Blocks, st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8).map(tuple), size),
        st.builds(
            DilatedBlocks,
            st.tuples(st.integers(16, 96), st.integers(16, 160)),
            st.tuples(st.integers(1, 3), st.integers(1, 5)),
            st.sampled_from([0.01, 0.3, 0.6, 1.0]),
            size,
            flag,
        ),
    )


@st.composite
def patterns(draw, seq_k):
    """A union or intersection of up to three of everything there is (one packing of documents a pattern)."""
    packing = draw(documents(seq_k))
    pattern = draw(atoms(packing))
    for _ in range(draw(st.integers(0, 2))):
        other = draw(atoms(packing))
        pattern = pattern & other if draw(st.booleans()) else pattern | other
    return pattern


@st.composite
def lengths(draw, most=150):
    seq_k = draw(st.integers(1, most))
    return draw(st.just(seq_k) | st.integers(1, most)), seq_k


@st.composite
def layouts(draw, seq_q, seq_k, batch, heads, heads_kv):
    block_q, block_k = draw(st.sampled_from(BLOCKS))
    shapes = {
        "shared": (), "heads": (heads,), "heads_kv": (heads_kv,), "samples": (batch, heads), "sample": (1, heads),
        "samples_kv": (batch, heads_kv), "samples alone": (batch, 1),
    }  # fmt: skip
    kind = draw(st.sampled_from([*shapes, "pattern", "per_head"]))
    if kind == "pattern":
        return BlockLayout.from_pattern(draw(patterns(seq_k)), seq_q, seq_k, block_size=(block_q, block_k))
    if kind == "per_head":
        packing = draw(documents(seq_k))
        pattern = PerHead(tuple(draw(atoms(packing)) for _ in range(heads)))
        return BlockLayout.from_pattern(pattern, seq_q, seq_k, block_size=(block_q, block_k))
    shape = shapes[kind]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mask = torch.rand(*shape, -(-seq_q // block_q), -(-seq_k // block_k), generator=generator)
    mask = mask < draw(st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]))
    layout = BlockLayout.from_block_mask(mask, (block_q, block_k), seq_q=seq_q, seq_k=seq_k)
    return replace(layout, num_heads=None, kind=None) if kind == "samples alone" else layout


@st.composite
def shapes_of_scores(draw, heads, generator):
    """softcap, slopes and sinks: mostly none."""
    if draw(st.integers(0, 3)):
        return {}
    softcap = draw(st.sampled_from([None, 0.7, 30.0]))
    slopes, sinks = (torch.randn(heads, generator=generator) if draw(st.booleans()) else None for _ in range(2))
    return {"softcap": softcap, "alibi_slopes": slopes, "sinks": sinks}


@st.composite
def cases(draw, dropout=False, most=150, shaped=True):
    """A whole call in float64; `shaped`: some with a cap, slopes or sinks."""
    seq_q, seq_k = draw(lengths(most))
    heads_kv = draw(st.integers(1, 3))
    heads = heads_kv * draw(st.integers(1, 3))
    batch, head_dim = draw(st.integers(1, 2)), draw(st.sampled_from([1, 4, 16]))
    layout = draw(layouts(seq_q, seq_k, batch, heads, heads_kv))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    padding = ids = None
    if draw(st.booleans()) and draw(st.booleans()):
        padding = torch.rand(batch, seq_k, generator=generator) < draw(st.sampled_from([0.1, 0.5, 1.0]))
    if seq_q <= seq_k and draw(st.booleans()) and draw(st.booleans()):
        ids = torch.randint(0, 4, (batch, seq_k), generator=generator)
        ids = ids.sort(dim=1).values if draw(st.booleans()) else ids
    return Case(
        q=normal(batch, seq_q, heads, head_dim),
        k=normal(batch, seq_k, heads_kv, head_dim),
        v=normal(batch, seq_k, heads_kv, head_dim),
        layout=layout,
        do=normal(batch, seq_q, heads, head_dim),
        dlse=normal(batch, heads, seq_q),
        is_causal=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.3, -1.0])),
        key_padding_mask=padding,
        document_ids=ids,
        dropout_p=draw(st.sampled_from([0.0, 0.2, 0.9])) if dropout else 0.0,
        **(draw(shapes_of_scores(heads, generator)) if shaped else {}),
    )


@st.composite
def branches(draw, most=150, heads=1):
    """Segments shorter and longer than the sequence, dilations up to their segments, any offsets; for so many heads."""
    length = st.one_of(st.integers(1, most), st.sampled_from([16, 32, 48, 64, 96, 128, 2 * most]))
    rate = st.one_of(st.integers(1, 7), st.sampled_from([1, 2, 4, 6, 12, most]))
    pairs = [(w, min(w, r)) for w, r in draw(st.lists(st.tuples(length, rate), min_size=1, max_size=4))]
    if min(r for _, r in pairs) > 2 * heads:
        pairs[0] = pairs[0][0], draw(st.integers(1, min(2 * heads, pairs[0][0])))
    return Branches(*zip(*pairs, strict=True), draw(st.sampled_from(["interleaved", "grouped"])))


@st.composite
def dilated_cases(draw, dropout=False, most=150, shaped=True):
    """Calls of `dilated_attention` in float64."""
    seq_q, seq_k = draw(lengths(most))
    heads_kv, batch = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    heads = heads_kv * draw(st.sampled_from([1, 1, 2, 3]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    padding = None
    if draw(st.booleans()) and draw(st.booleans()):
        padding = torch.rand(batch, seq_k, generator=generator) < draw(st.sampled_from([0.2, 1.0]))
    return Case(
        q=normal(batch, seq_q, heads, 4),
        k=normal(batch, seq_k, heads_kv, 4),
        v=normal(batch, seq_k, heads_kv, 4),
        layout=draw(branches(most, heads)),
        do=normal(batch, seq_q, heads, 4),
        dlse=normal(batch, heads, seq_q),
        is_causal=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.3, -1.0])),
        key_padding_mask=padding,
        dropout_p=draw(st.sampled_from([0.0, 0.0, 0.3])) if dropout else 0.0,
        detach_branch_weights=draw(st.booleans()) and draw(st.booleans()),
        **(draw(shapes_of_scores(heads, generator)) if shaped else {}),
    )
