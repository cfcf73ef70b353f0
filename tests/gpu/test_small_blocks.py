"""Small blocks on the warp-specialised forward: key blocks that a tile gathers, blocks of 64 queries that a warpgroup
walks alone, rows of 16 and 32 queries that are united. Every path against the oracle."""

import itertools
import random
from unittest.mock import patch

import pytest
import torch

from dilated_attention_pytorch import BlockLayout, Documents, SlidingWindow, explain
from dilated_attention_pytorch.testing import Case, assert_exact
from tests.gpu.norms import assert_near

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SIZES = (16, 32, 64, 128)
LENGTHS = [(800, 800), (777, 900), (77, 500), (640, 640)]
PATTERNS = [SlidingWindow(200, 0), Documents((100, 1, 400, 299)) & SlidingWindow(None, 0), SlidingWindow(90, 30)]


@pytest.fixture(params=[True, False], ids=["united", "own rows"])
def unites(request):
    """Rows of small blocks are united whatever they have in common, or never."""
    from dilated_attention_pytorch.kernels import united

    worth = dict.fromkeys(united.WORTH, 1e9 if request.param else 0.0)
    with patch.object(united, "LEAST_WORK", 0), patch.dict(united.WORTH, worth):
        yield request.param


def drawn(seed, block, head_dim, lists=None):
    """A case of the kinds that the kernels tell apart, by its number."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    seq_q, seq_k = chance.choice(LENGTHS)
    batch, heads = 2, 4
    lists = chance.choice(["shared", "own", "pattern"]) if lists is None else lists
    if lists == "pattern":
        pattern = chance.choice(PATTERNS if (seq_q, seq_k) == (800, 800) else PATTERNS[::2])
        layout = BlockLayout.from_pattern(pattern, seq_q, seq_k, block_size=block, device="cuda")
    else:
        blocks = -(-seq_q // block[0]), -(-seq_k // block[1])
        shape = (batch, heads, *blocks) if lists == "own" else blocks
        mask = torch.rand(shape, device="cuda") < chance.choice([0.05, 0.3, 0.9])
        mask[..., len(mask) // 2, :] = False  # empty rows
        layout = BlockLayout.from_block_mask(mask, block, seq_q=seq_q, seq_k=seq_k)

    def normal(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.float64)

    heads_kv = heads if lists == "own" else chance.choice([4, 2, 1])
    q, do = normal(batch, seq_q, heads, head_dim), normal(batch, seq_q, heads, head_dim)
    k, v = normal(batch, seq_k, heads_kv, head_dim), normal(batch, seq_k, heads_kv, head_dim)
    options = {}
    if chance.random() < 0.3:
        options["key_padding_mask"] = torch.rand(batch, seq_k, device="cuda") < 0.2
    if chance.random() < 0.3:
        options["softcap"] = 1.5
    if chance.random() < 0.3:
        options["alibi_slopes"] = torch.tensor((0.1, 0.03, 0.01, 0.0), device="cuda")
    dtype = chance.choice([torch.bfloat16, torch.float16])
    return Case(
        q, k, v, layout, do, normal(batch, heads, seq_q), is_causal=chance.random() < 0.2,
        scale=chance.choice([None, None, -0.1]), **options,
    ).to(dtype)  # fmt: skip


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block", list(itertools.product(SIZES, SIZES)), ids=str)
def test_every_pair_of_block_sizes(block, head_dim, unites):
    for seed in range(3):
        case = drawn(100 * block[0] + 10 * block[1] + head_dim + seed, block, head_dim)
        assert_exact(case, "triton")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block", [(128, 16), (64, 64), (16, 32)], ids=str)
def test_dropout(block, head_dim, unites):
    """The draw is the reference's."""
    case = drawn(7, block, head_dim, lists="own")
    assert_near(Case(case.q, case.k, case.v, case.layout, case.do, case.dlse, dropout_p=0.3))


@pytest.mark.parametrize("block", [(128, 16), (64, 64), (64, 32), (16, 16)], ids=str)
def test_the_warp_specialised_kernel_is_named(block, unites):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU: compute capability 9.0")
    case = drawn(3, block, 128, lists="own")
    kernels = explain(case.q, case.k, case.v, case.layout).kernels
    assert kernels["forward"].startswith("warp-specialised")
    assert ("united" in kernels["forward"]) == (block[0] < 64)


@pytest.mark.parametrize("block", [(128, 16), (64, 64), (64, 16), (16, 16)], ids=str)
def test_what_is_not_seen_is_not_multiplied(block, unites):
    """NaN and infinity in keys and values that no query sees leave no trace."""
    case = drawn(5, block, 128, lists="shared")
    mask = case.layout.to_block_mask().any(0).repeat_interleave(block[1])[: case.k.shape[1]]
    hidden = torch.where(mask, 0.0, torch.nan).to(case.k.dtype)[None, :, None, None]
    q, k, v, layout = case.q, case.k, case.v, case.layout
    expected, _ = Case(q, k, v, layout, case.do, case.dlse).attend(q, k, v, "triton")
    got, _ = Case(q, k + hidden, v + hidden, layout, case.do, case.dlse).attend(q, k + hidden, v + hidden, "triton")
    seen = layout.to_dense().any(1)
    assert torch.equal(got[:, seen], expected[:, seen])
