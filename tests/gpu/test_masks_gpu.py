"""Every mask that people have on a GPU, by its recipe and with bitmaps for all of it, within derived tolerances."""

import pytest
import torch

from dilated_attention_pytorch import BlockLayout
from dilated_attention_pytorch.testing import Case, assert_exact
from tests.masks_table import MASKS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def case_of(mask, layout, **options):
    torch.manual_seed(0)
    q, do = torch.randn(2, 2, mask.seq_q, 2, 64, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, mask.seq_k, 2, 64, device="cuda", dtype=torch.bfloat16)
    return Case(q, k, v, layout, do, torch.randn(2, 2, mask.seq_q, device="cuda"), **options)


@pytest.mark.parametrize("name", MASKS)
def test_the_recipe(name):
    mask = MASKS[name]
    _, options = mask.given()
    options = {key: x.expand(2, -1).cuda() for key, x in options.items()}
    assert_exact(case_of(mask, mask.layout().to("cuda"), **options), "triton")


@pytest.mark.parametrize("name", MASKS)
def test_bitmaps(name):
    """Blocks of 128, as they come from FlexAttention."""
    mask = MASKS[name]
    shape = mask.batch, mask.heads, mask.seq_q, mask.seq_k
    layout = BlockLayout.from_mask_mod(mask.mask_mod, *shape, block_size=128)
    assert_exact(case_of(mask, layout.to("cuda")), "triton")
