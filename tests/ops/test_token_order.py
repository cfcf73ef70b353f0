"""The order of the tokens of a grid by tiles, and moving tokens into it and back."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dilated_attention_pytorch import permute, tile_order, unpermute


@given(st.data())
def test_tile_after_tile_and_row_by_row(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    tile, prefix = tuple(data.draw(st.integers(1, n)) for n in shape), data.draw(st.integers(0, 5))
    numbered = {each: prefix + i for i, each in enumerate(itertools.product(*map(range, shape)))}
    corners = itertools.product(*(range(0, n, t) for n, t in zip(shape, tile, strict=True)))

    def cut(corner):
        return tuple(c + t > n for c, t, n in zip(corner, tile, shape, strict=True))

    tiles = sorted(corners, key=lambda corner: (cut(corner), corner))  # whole tiles first
    wanted = [
        numbered[each]
        for corner in tiles
        for each in itertools.product(
            *(range(c, min(c + t, n)) for c, t, n in zip(corner, tile, shape, strict=True))
        )
    ]  # fmt: skip
    assert tile_order(shape, tile, prefix).tolist() == wanted + list(range(prefix))


def test_what_it_gives_is_the_caller_s():
    tile_order((4, 6), (2, 3)).zero_()
    assert tile_order((4, 6), (2, 3))[1] == 1
    assert tile_order(6, 2).tolist() == list(range(6))


@pytest.mark.parametrize("dim", [1, -2, 2])
def test_there_and_back(dim):
    order = tile_order((2, 4), 2, 3)
    x = torch.randn(2, 11, 11, 3, dtype=torch.float64, requires_grad=True)
    moved = permute(x, order, dim)
    assert torch.equal(moved, x.index_select(dim, order))
    assert torch.equal(unpermute(moved, order, dim), x)
    mask = torch.arange(11) > 7
    assert torch.equal(unpermute(permute(mask, order, 0), order, 0), mask)


def test_gradients_and_transforms():
    order = tile_order((2, 3), (1, 2), 1)
    x = torch.randn(2, 7, dtype=torch.float64, requires_grad=True)
    for move in (permute, unpermute):
        assert torch.autograd.gradcheck(lambda x, move=move: move(x, order), x)
        assert torch.autograd.gradgradcheck(lambda x, move=move: move(x, order) ** 3, x)
        assert torch.equal(torch.vmap(lambda row, move=move: move(row, order, 0))(x), move(x, order))
    with torch.no_grad():
        compiled = torch.compile(lambda x: unpermute(permute(x, order) * 2, order), fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), 2 * x)
