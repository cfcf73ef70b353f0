"""What the kernels for Hopper ask of the copy engine, on a CPU."""

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which there is for Linux alone")

from dilated_attention_pytorch.kernels.configs import box_width

hopper_common = pytest.importorskip(
    "dilated_attention_pytorch.kernels.hopper_common", reason="needs a Triton that has Gluon"
)


def packed(batch, seq, heads, width):
    return torch.randn(batch, seq, heads, 3 * width)[..., width : 2 * width]


def heads_first(batch, seq, heads, width):
    return torch.randn(batch, heads, seq, width).transpose(1, 2)


def contiguous(batch, seq, heads, width):
    return torch.randn(batch, seq, heads, width)


@pytest.mark.parametrize("made", [contiguous, heads_first, packed])
@pytest.mark.parametrize("num_residues", [1, 2, 6])
@pytest.mark.parametrize("width", [8, 40, 64])
def test_a_box_holds_rows_of_one_head_and_nothing_of_its_neighbours(made, num_residues, width):
    """Read as the copy engine does it: by shape and strides, zeros beyond the shape."""
    x = made(2, 24, 3, width).half()
    assert hopper_common.tma_compatible(x)
    rows, wide = 8, box_width(width)
    described = hopper_common.describe(x, rows, num_residues, wide)
    assert described.block_shape == [1, rows, 1, 1, wide]
    whole = x.as_strided(described.shape, described.strides, x.storage_offset())
    for sample, residue, head, first in ((0, 0, 0, 0), (1, num_residues - 1, 2, 2)):
        box = torch.zeros(rows, wide, dtype=x.dtype)
        found = whole[sample, first : first + rows, residue, head]
        box[: len(found), : found.shape[1]] = found
        want = torch.zeros(rows, wide, dtype=x.dtype)
        tokens = torch.arange(first, first + rows) * num_residues + residue
        there = tokens < 24
        want[there, :width] = x[sample, tokens[there], head]
        assert torch.equal(box, want)


def test_a_dimension_of_one_may_have_any_stride():
    x = torch.randn(1, 20, 1, 64).half().as_strided((1, 20, 1, 64), (3, 64, 5, 1))
    assert hopper_common.tma_compatible(x)
    assert hopper_common.describe(x, 4, 1, 64).strides == [8, 64, 64, 8, 1]


@pytest.mark.parametrize(
    ("strides", "offset", "compatible"),
    [
        ((2560, 128, 64, 1), 0, True),
        ((2560, 128, 64, 1), 1, False),  # an address that is no multiple of 16 bytes
        ((0, 128, 64, 1), 0, False),  # samples that share their tokens
        ((2400, 120, 60, 1), 0, False),
    ],
)
def test_what_the_copy_engine_can_read(strides, offset, compatible):
    x = torch.zeros(1 << 14).half()[offset:].as_strided((2, 20, 2, 60), strides)
    assert hopper_common.tma_compatible(x) == compatible
