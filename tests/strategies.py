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
    Chunks,
    DilatedBlocks,
    Documents,
    DocumentSinks,
    Full,
    GlobalBlocks,
    GlobalTokens,
    KeyRanges,
    LocalBlocks,
    Neighborhood,
    PerHead,
    PrefixLM,
    RandomBlocks,
    ScoreBias,
    SlidingTiles,
    SlidingWindow,
    StrictlyCausal,
    VerticalSlash,
)
from dilated_attention_pytorch.layout.terms import MAX_INTERVALS, terms_of
from dilated_attention_pytorch.testing import Case

BLOCKS = [(16, 16), (16, 16), (32, 32), (16, 32), (32, 16)]


@st.composite
def documents(draw, seq_k):
    cuts = sorted(draw(st.sets(st.integers(1, seq_k - 1), max_size=5))) if seq_k > 1 else []
    edges = [0, *cuts, seq_k]
    return Documents(tuple(b - a for a, b in itertools.pairwise(edges)))


@st.composite
def key_ranges(draw, seq_k):
    """Stretches with gaps between their keys, empty ones, and ones that overlap."""
    lengths = draw(documents(seq_k)).lengths
    number, key = len(lengths), st.integers(0, seq_k + 20)
    bounds = [sorted(draw(st.lists(key, min_size=number, max_size=number))) for _ in range(2)]
    return KeyRanges(*map(tuple, bounds), lengths)


def windows():
    bound, far = st.none() | st.integers(0, 60), st.integers(1, 70)
    apart = st.tuples(far, st.integers(0, 40)).map(lambda x: SlidingWindow(x[0] + x[1], -x[0]))
    ahead = st.tuples(far, st.integers(0, 40)).map(lambda x: SlidingWindow(-x[0], x[0] + x[1]))
    return st.builds(SlidingWindow, bound, bound) | apart | ahead | st.just(StrictlyCausal())


def ranges(packing):
    number, flag = st.integers(0, 40), st.booleans()
    at = st.lists(st.integers(0, 160), min_size=1, max_size=2).map(tuple)
    some = st.integers(1, 2).flatmap(lambda n: st.lists(st.integers(0, 30), min_size=n, max_size=n))
    for_any = (
        st.builds(Chunks, st.integers(1, 70), st.none() | st.integers(0, 3)),
        st.builds(PrefixLM, number),
        st.builds(GlobalTokens, st.integers(0, 20), flag, at),
        st.builds(VerticalSlash, some, some),
    )
    if packing is None:
        return st.one_of(for_any)
    packed = (st.builds(kind, number, st.just(packing.lengths)) for kind in (PrefixLM, DocumentSinks))
    return st.one_of(*for_any, key_ranges(packing.total), *packed)


@st.composite
def grids(draw, total):
    """Neighbourhoods and sliding tiles over so many tokens, of which a prefix is any; row by row or in tiles."""
    prefix = draw(st.just(0) | st.integers(0, min(40, total - 1)))
    rest, shape = total - prefix, []
    for _ in range(draw(st.integers(0, 2))):
        shape.append(draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0])))
        rest //= shape[-1]
    shape = tuple(draw(st.permutations([*shape, rest])))

    def for_each(strategy_of):
        return tuple(draw(strategy_of(n)) for n in shape)

    order = for_each(lambda n: st.integers(1, n)) if draw(st.booleans()) else None
    if not draw(st.integers(0, 2)):
        tile = for_each(lambda n: st.integers(1, n))
        window = tuple(t * draw(st.integers(1, -(-n // t))) for n, t in zip(shape, tile, strict=True))
        return SlidingTiles(shape, tile, window, prefix, order)
    border = draw(st.sampled_from(["shift", "shift", "cut"]))
    dilation = for_each(lambda n: st.just(1) | st.integers(1, n))
    room = [n // d if border == "shift" else 2 * n for n, d in zip(shape, dilation, strict=True)]
    window = tuple(draw(st.integers(1, n)) for n in room)
    stride = tuple(draw(st.just(1) | st.integers(1, w)) for w in window)
    causal = for_each(lambda n: st.booleans())
    return Neighborhood(shape, window, dilation, causal, stride, prefix, order, border)


def atoms(packing):
    """Of everything there is, for the tokens of a packing; without one, of what is for any number of them."""
    size = st.just(32)
    of_grid = [] if packing is None else [grids(packing.total), grids(packing.total)]
    window, flag = st.integers(0, 120), st.booleans()
    return st.one_of(
        st.just(Full()),
        st.just(Causal()),
        windows(),
        ranges(packing),
        st.builds(GlobalTokens, st.integers(1, 50), flag),
        st.just(Full() if packing is None else packing),
        *of_grid,
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
    """A union or intersection of up to three of everything there is, as far as a layout has room for its rules; of what
    is for any number of tokens if seq_k is None."""
    packing = None if seq_k is None else draw(documents(seq_k))
    pattern = draw(atoms(packing))
    for _ in range(draw(st.integers(0, 2))):
        other = draw(atoms(packing))
        joined = pattern & other if draw(st.booleans()) else pattern | other
        pattern = joined if len(terms_of(joined)) <= MAX_INTERVALS else pattern
    return pattern


@st.composite
def lengths(draw, most=150):
    seq_k = draw(st.integers(1, most))
    return draw(st.just(seq_k) | st.integers(1, most)), seq_k


@st.composite
def bounds(draw, seq_q, seq_k, batch):
    """Starts and stops of any form, smooth or not, with empty ranges among them."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = draw(st.sampled_from([(seq_q,), (1, seq_q), (batch, seq_q), (1, 3, seq_q), (batch, 2, seq_q)]))
    starts = torch.randint(-9, seq_k + 9, shape, generator=generator)
    if draw(st.booleans()):  # many queries alike
        starts = starts[..., torch.arange(seq_q) // 20 * 20]
    return starts, starts + torch.randint(-5, draw(st.sampled_from([6, 60, 400])), shape, generator=generator)


@st.composite
def token_masks(draw, shape):
    """A bool mask of tokens with noise, edges of blocks, and whole stretches that are all True or all False."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mask = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.02, 0.5, 0.98, 1.0]))
    for seen in draw(st.lists(st.booleans(), max_size=4)):
        rows, columns = (slice(*sorted(draw(st.tuples(*[st.integers(0, n)] * 2)))) for n in shape[-2:])
        mask[..., rows, columns] = seen
    return mask


@st.composite
def layouts(draw, seq_q, seq_k, batch, heads, heads_kv):
    block_q, block_k = draw(st.sampled_from(BLOCKS))
    shapes = {
        "shared": (), "heads": (heads,), "heads_kv": (heads_kv,), "samples": (batch, heads), "sample": (1, heads),
        "samples_kv": (batch, heads_kv), "samples alone": (batch, 1),
    }  # fmt: skip
    kind = draw(st.sampled_from([*shapes, "pattern", "pattern", "per_head", "key_ranges", "mask", "mask"]))
    if kind == "mask":
        listed = shapes[draw(st.sampled_from([name for name in shapes if name != "samples alone"]))]
        return BlockLayout.from_mask(draw(token_masks((*listed, seq_q, seq_k))), (block_q, block_k))
    if kind == "key_ranges":
        return BlockLayout.from_key_ranges(*draw(bounds(seq_q, seq_k, batch)), seq_k, block_size=(block_q, block_k))
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
def biases(draw, batch, heads, seq_q, seq_k, generator):
    """Up to three kinds, for all samples or heads or for each; numbers that float32 has, in float64."""

    def some(*shape):
        return torch.randn(*shape, generator=generator).double()

    def one_of(*sizes):
        return tuple(draw(st.just(1) | st.just(size)) for size in sizes)

    far = draw(st.sampled_from([1, 5, 64, 400]))
    positions = torch.randint(-20, far, (*one_of(batch), seq_k), generator=generator)
    grid = draw(st.sampled_from([(seq_k,), (1, seq_k), (seq_k, 1, 1)]))
    grid = (2, seq_k // 2) if seq_k % 2 == 0 and draw(st.booleans()) else grid
    offsets = [draw(st.sampled_from([1, 3, 9, 2 * size - 1])) for size in grid]
    tables = {
        "table": lambda: ScoreBias.table(some(*one_of(batch, heads), far)),
        "off centre": lambda: ScoreBias.table(some(*one_of(heads), far), zero=draw(st.integers(0, far))),
        "t5": lambda: ScoreBias.t5(some(*one_of(heads), 8), bidirectional=draw(st.booleans()), max_distance=30),
    }
    others = {
        "slopes": lambda: ScoreBias.slopes(some(*one_of(batch), heads) / 4, signed=draw(st.booleans())),
        "keys": lambda: ScoreBias.keys(some(*one_of(batch, heads), seq_k)),
        "dense": lambda: ScoreBias.dense(some(*one_of(batch, heads), seq_q, seq_k)),
        "hiding": lambda: ScoreBias.dense(some(1, 1, seq_q, seq_k).masked_fill(some(seq_q, seq_k) > 1, -torch.inf)),
    }
    if seq_q <= seq_k:
        gates = torch.rand(*one_of(batch, heads), seq_k, generator=generator)
        others["forget"] = lambda: ScoreBias.forget(gates.log().round(decimals=2).float().double())
        tables["placed"] = lambda: ScoreBias.table(some(*one_of(heads), far), positions=positions)
        tables["grid"] = lambda: ScoreBias.grid(some(*one_of(heads), *offsets), grid)
    kinds = {"a table": tables[draw(st.sampled_from(sorted(tables)))], **others}
    first, *more = draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=3, unique=True))
    return sum((kinds[name]() for name in more), start=kinds[first]())


@st.composite
def shapes_of_scores(draw, heads, generator, sizes=None):
    """softcap, slopes, biases of calls of these sizes, and sinks: mostly none."""
    if draw(st.integers(0, 3)):
        return {}
    if sizes is not None and draw(st.booleans()):
        batch, seq_q, seq_k = sizes
        return {
            "softcap": draw(st.sampled_from([None, None, 2.0])),
            "bias": draw(biases(batch, heads, seq_q, seq_k, generator)),
            "sinks": draw(st.sampled_from([None, torch.randn(heads, generator=generator)])),
        }
    softcap = draw(st.sampled_from([None, 0.7, 30.0]))
    slopes, sinks = (torch.randn(heads, generator=generator) if draw(st.booleans()) else None for _ in range(2))
    return {"softcap": softcap, "alibi_slopes": slopes, "sinks": sinks}


@st.composite
def cases(draw, dropout=False, most=150, shaped=True, biased=True, head_dim=None):
    """A whole call in float64; `shaped`: some with a cap, slopes or sinks, and `biased`, a bias. Heads of any width and
    v of another, or all of width `head_dim`."""
    seq_q, seq_k = draw(lengths(most))
    heads_kv = draw(st.integers(1, 3))
    heads = heads_kv * draw(st.integers(1, 3))
    batch, head_dim_v = draw(st.integers(1, 2)), head_dim
    if head_dim is None:
        head_dim = draw(st.sampled_from([1, 4, 16]))
        head_dim_v = draw(st.just(head_dim) | st.sampled_from([1, 3, 8, 20]))
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
        v=normal(batch, seq_k, heads_kv, head_dim_v),
        layout=layout,
        do=normal(batch, seq_q, heads, head_dim_v),
        dlse=normal(batch, heads, seq_q),
        is_causal=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.3, -1.0])),
        key_padding_mask=padding,
        document_ids=ids,
        dropout_p=draw(st.sampled_from([0.0, 0.2, 0.9])) if dropout else 0.0,
        **(draw(shapes_of_scores(heads, generator, (batch, seq_q, seq_k) if biased else None)) if shaped else {}),
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
def dilated_cases(draw, dropout=False, most=150, shaped=True, biased=True):
    """Calls of `dilated_attention` in float64."""
    seq_q, seq_k = draw(lengths(most))
    heads_kv, batch = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    heads = heads_kv * draw(st.sampled_from([1, 1, 2, 3]))
    head_dim_v = draw(st.sampled_from([4, 4, 2, 7]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    padding = None
    if draw(st.booleans()) and draw(st.booleans()):
        padding = torch.rand(batch, seq_k, generator=generator) < draw(st.sampled_from([0.2, 1.0]))
    return Case(
        q=normal(batch, seq_q, heads, 4),
        k=normal(batch, seq_k, heads_kv, 4),
        v=normal(batch, seq_k, heads_kv, head_dim_v),
        layout=draw(branches(most, heads)),
        do=normal(batch, seq_q, heads, head_dim_v),
        dlse=normal(batch, heads, seq_q),
        is_causal=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.3, -1.0])),
        key_padding_mask=padding,
        dropout_p=draw(st.sampled_from([0.0, 0.0, 0.3])) if dropout else 0.0,
        detach_branch_weights=draw(st.booleans()) and draw(st.booleans()),
        **(draw(shapes_of_scores(heads, generator, (batch, seq_q, seq_k) if biased else None)) if shaped else {}),
    )
