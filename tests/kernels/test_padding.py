"""Keys that are padding, in Triton's interpreter: what is left of the lists, and whole calls against the oracle."""

import pytest
import torch

from dilated_attention_pytorch import (
    BlockLayout,
    Branches,
    Full,
    GlobalTokens,
    PerHead,
    RandomBlocks,
    SlidingWindow,
)
from dilated_attention_pytorch.layout import layout_of_branches
from dilated_attention_pytorch.testing import Case, assert_exact

pytest.importorskip("triton", reason="needs triton, which there is for Linux alone")
if torch.cuda.is_available():
    reason = "needs a machine without a CUDA device: with one, tests/gpu runs the kernels there"
    pytest.skip(reason, allow_module_level=True)

from dilated_attention_pytorch.kernels import launcher, padding

SEQ, BLOCK, HEADS = 100, 16, 2
LAYOUTS = {
    "shared": SlidingWindow(40, 3) | GlobalTokens(2),
    "per head": PerHead((RandomBlocks(2, 5, BLOCK), SlidingWindow(20, 0))),
    "dilated": Branches((48, 96), (1, 2)),
    "dilated, uneven": Branches((30, 96), (1, 2)),
}


def layout_named(name):
    pattern = LAYOUTS[name]
    if isinstance(pattern, Branches):
        return layout_of_branches(pattern, SEQ, num_heads=HEADS, is_causal=True, block_size=BLOCK)
    return BlockLayout.from_pattern(pattern, SEQ, block_size=BLOCK)


def masks(batch=2):
    """For every sample another one."""
    key, sample = torch.arange(SEQ)[None], torch.arange(batch)[:, None]
    return {
        "left": key < 3 + 37 * sample,
        "right": key >= SEQ - 21 - 40 * sample,
        "hole": (key > 10) & (key < 40 + 30 * sample),
        "scattered": torch.rand(batch, SEQ, generator=torch.Generator().manual_seed(0)) < 0.3,
        "all of one": (key >= 0) & (sample == 0),
        "none": key < 0 * sample,
    }


def tokens_of(layout, block):
    """The tokens of a key block: every `num_residues`-th of a residue class."""
    of_class = layout.num_k_blocks // layout.num_residues
    places = torch.arange(block % of_class * BLOCK, (block % of_class + 1) * BLOCK)
    return places * layout.num_residues + block // of_class


def launch(*args, **constants):
    launcher.launch(*args, **constants)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", masks())
def test_lists_and_bits(name, kind):
    layout, hidden = layout_named(name), masks()[kind]
    bits = padding.key_bits(launch, hidden.contiguous().view(torch.uint8), layout)
    states = {}
    for sample in range(2):
        for block in range(layout.num_k_blocks):
            tokens = tokens_of(layout, block)
            here = tokens < SEQ
            real = torch.zeros(BLOCK, dtype=torch.bool)
            real[here] = ~hidden[sample, tokens[here]]
            words = bits[sample, block, 1:].int() & 0xFFFF
            assert torch.equal((words[:, None] >> torch.arange(16) & 1).flatten().bool(), real)
            state = "open" if real.sum() == here.sum() else "mixed" if real.any() else "hidden"
            states[sample, block] = state
            assert bits[sample, block, 0] == ["open", "mixed", "hidden"].index(state)

    got, lists, work = padding.padded_lists(launch, bits, layout), layout.by_query, layout.query_work
    assert got.lists_per_sample == layout.num_heads or (got.lists_per_sample == 1 and layout.num_heads is None)
    assert len(got.work) == 2 * len(work)
    named = lists.rule_ids.numel() > 0
    assert (got.rule_ids.numel() > 0) == named
    for row, (block, start, split, stop, masked_from) in enumerate(got.work.tolist()):
        sample, (old_block, old_start, old_split, old_stop) = row // len(work), work[row % len(work)].tolist()
        assert block == old_block
        full, partial = range(old_start, old_split), range(old_split, old_stop)

        def entries(among, *wanted, sample=sample):
            """Block and rule of those whose block is in one of these states."""
            found = [i for i in among if states[sample, int(lists.indices[i])] in wanted]
            return [(int(lists.indices[i]), int(lists.rule_ids[i]) if named else 0) for i in found]

        def new(first, last):
            return [(int(got.indices[i]), int(got.rule_ids[i]) if named else 0) for i in range(first, last)]

        assert new(start, masked_from) == entries(full, "open")
        assert new(masked_from, split) == entries(full, "mixed")
        assert new(split, stop) == entries(partial, "open", "mixed")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["right", "scattered", "all of one"])
@pytest.mark.parametrize("block", [16, 64])
def test_calls(kind, block):
    """Blocks that a tile gathers several of, and those that it is a part of."""
    torch.manual_seed(0)
    causal, of_heads = (Full(), {"is_causal": True}), LAYOUTS["per head"]
    calls = [causal, (SlidingWindow(30, 3), {}), (of_heads, {}), (LAYOUTS["dilated, uneven"], {"is_causal": True})]
    for pattern, options in calls[1:] if block == BLOCK else calls[:1]:
        q, do, k, v = torch.randn(4, 2, SEQ, HEADS, 16)
        layout = pattern
        if not isinstance(pattern, Branches):
            layout = BlockLayout.from_pattern(pattern, SEQ, block_size=block)
        dlse = torch.randn(2, HEADS, SEQ)
        assert_exact(Case(q, k, v, layout, do, dlse, key_padding_mask=masks()[kind], **options), "triton")
