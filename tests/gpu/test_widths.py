"""Heads of every width, v of another width than q, and keys that are padding, against the oracle."""

import itertools
from dataclasses import replace

import pytest
import torch

from dilated_attention_pytorch import (
    BlockLayout,
    Branches,
    Documents,
    Full,
    GlobalTokens,
    PerHead,
    RandomBlocks,
    SlidingWindow,
)
from dilated_attention_pytorch.testing import Case, assert_exact

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SEQ = 800
PATTERNS = {
    "window": SlidingWindow(200, 30),
    "window and global": SlidingWindow(300, 0) | GlobalTokens(5, queries=True),
    "documents": Documents((100, 1, 400, 299)) & SlidingWindow(None, 0),
    "random": RandomBlocks(3, block_size=128),
    "per head": PerHead((SlidingWindow(90, 9), RandomBlocks(2, 5, 128), Full(), GlobalTokens(30))),
    "dilated": Branches((256, 512), (1, 2)),
    "dilated, uneven": Branches((300, 512), (1, 2)),
}
# Of q and k, and of v.
WIDTHS = [(32, 32), (80, 80), (64, 128), (40, 40), (96, 96), (192, 128), (16, 16), (128, 64), (48, 112), (256, 256),
          (112, 24), (8, 200), (192, 192), (60, 60)]  # fmt: skip


def padding_of(kind, batch, seq):
    """Every sample another one; of one that is hidden whole, and one that is not hidden at all."""
    key, sample = torch.arange(seq)[None], torch.arange(batch)[:, None]
    return {
        "left": key < 150 + 200 * sample,
        "right": key >= seq - 150 - 200 * sample,
        "both": (key < 130 * (1 + sample)) | (key >= seq - 128 * (1 + sample)),
        "hole": (key > 100) & (key < 400 + 130 * sample),
        "scattered": torch.rand(batch, seq) < 0.3,
        "all of one": (key >= 0) & (sample == 0),
        "none": key < 0 * sample,
    }[kind].cuda()


def make_case(pattern, widths, *, heads_kv=2, batch=6, block=128, dtype=torch.bfloat16, padding=None, **options):
    """With more tiles than an H200 has processors: a program takes a second one."""
    torch.manual_seed(0)
    seq, heads = (1024 if isinstance(pattern, Branches) else SEQ), 4
    if isinstance(pattern, Branches):  # a call makes its own layout
        layout, options = pattern, {"is_causal": True, **options}
    else:
        layout = BlockLayout.from_pattern(pattern, seq, block_size=block, device="cuda")

    def normal(heads, width):
        return torch.randn(batch, seq, heads, width, device="cuda", dtype=torch.float64)

    mask = None if padding is None else padding_of(padding, batch, seq)
    q, k = normal(heads, widths[0]), normal(heads_kv, widths[0])
    v, do = normal(heads_kv, widths[1]), normal(heads, widths[1])
    dlse = torch.randn(batch, heads, seq, device="cuda", dtype=torch.float64)
    return replace(Case(q, k, v, layout, do, dlse, key_padding_mask=mask).to(dtype), **options)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_widths(widths, deterministic):
    for pattern, heads_kv in (("window", 2), ("dilated", 4)):
        case = make_case(PATTERNS[pattern], widths, heads_kv=heads_kv, deterministic=deterministic)
        assert_exact(case, "triton")


@pytest.mark.parametrize("widths", [(80, 80), (64, 128), (192, 128)], ids=str)
@pytest.mark.parametrize("name", PATTERNS)
def test_widths_and_patterns(name, widths):
    heads_kv = 4 if name == "per head" else 1
    assert_exact(make_case(PATTERNS[name], widths, heads_kv=heads_kv, dtype=torch.float16), "triton")


SHAPED = {"softcap": 1.5, "scale": -0.1}


@pytest.mark.parametrize("widths", [(80, 80), (32, 32), (128, 40)], ids=str)
def test_widths_and_score_modifications(widths):
    slopes = torch.tensor((0.1, 0.03, 0.01, 0.0), device="cuda")
    assert_exact(make_case(PATTERNS["window"], widths, alibi_slopes=slopes, is_causal=True, **SHAPED), "triton")


PADDINGS = ["left", "right", "both", "hole", "scattered", "all of one", "none"]


@pytest.mark.parametrize(
    ("name", "block"),
    # A call of dilated attention takes blocks of its own.
    [(name, block) for name in PATTERNS for block in ((128,) if "dilated" in name else (128, 32, (128, 64)))],
    ids=str,
)
def test_padding(name, block):
    for padding, deterministic in itertools.product(PADDINGS, (True, False)):
        case = make_case(PATTERNS[name], (64, 64), padding=padding, block=block, deterministic=deterministic)
        assert_exact(case, "triton")


@pytest.mark.parametrize("name", ["window", "documents", "random"])
def test_padding_beside_other_masks(name):
    ids = (torch.arange(SEQ, device="cuda") // 170).expand(6, -1)
    for padding in ("right", "scattered"):
        case = make_case(PATTERNS[name], (128, 128), padding=padding)
        for deterministic in (True, False):
            assert_exact(replace(case, document_ids=ids, deterministic=deterministic), "triton")
            assert_exact(replace(case, is_causal=True, deterministic=deterministic), "triton")


def test_padding_without_a_wait():
    case = make_case(PATTERNS["window"], (64, 64), padding="left")
    q, k, v = (x.requires_grad_() for x in (case.q, case.k, case.v))

    def run():
        case.attend(q, k, v, "triton")[0].sum().backward()

    run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
