"""Neighbourhoods and sliding tiles against their definitions, as loops over coordinates; and the order of tokens."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dilated_attention_pytorch import (
    Causal,
    Full,
    GlobalTokens,
    Neighborhood,
    PerHead,
    SlidingTiles,
    SlidingWindow,
    presets,
    tile_order,
)
from dilated_attention_pytorch.patterns.space import GridOrder
from tests.patterns.test_patterns import by_rule, matrix
from tests.strategies import grids

# Figures for a line of tokens: NATTEN's border rule is that every row has as many keys.
LINES = {
    "window of 3": (Neighborhood((6,), 3), "###... ###... .###.. ..###. ...### ...###"),
    "window of 4, one more before": (Neighborhood((6,), 4), "####.. ####.. ####.. .####. ..#### ..####"),
    "window of all": (Neighborhood((3,), 3), "### ### ###"),
    "window of one": (Neighborhood((3,), 1), "#.. .#. ..#"),
    "every second": (Neighborhood((7,), 2, dilation=2), "#.#.... .#.#... #.#.... .#.#... ..#.#.. ...#.#. ....#.#"),
    "every third of eight": (Neighborhood((8,), 2, dilation=3), (
        "#..#.... .#..#... ..#..#.. #..#.... .#..#... ..#..#.. ...#..#. ....#..#"
    )),
    "causal": (Neighborhood((5,), 3, causal=True), "#.... ##... ###.. .###. ..###"),
    "causal, every second": (Neighborhood((5,), 2, 2, True), "#.... .#... #.#.. .#.#. ..#.#"),
    "stride 2": (Neighborhood((6,), 3, stride=2), "###... ###... ..###. ..###. ...### ...###"),
    "stride 2, causal": (Neighborhood((5,), 3, causal=True, stride=2), "#.... ##... .##.. .###. ..###"),
    "stride of all": (Neighborhood((5,), 4, stride=4), "####. ####. ####. ####. .####"),
    "cut": (Neighborhood((5,), 3, border="cut"), "##... ###.. .###. ..### ...##"),
    "cut, wider than the line": (Neighborhood((3,), 9, border="cut"), "### ### ###"),
    "prefix": (Neighborhood((4,), 2, prefix=2), "###### ###### ####.. ####.. ##.##. ##..##"),
    "prefix, in tiles": (Neighborhood((4,), 2, prefix=2, order=2), "##..## ##..## .##.## ..#### ###### ######"),
    "a grid in tiles": (
        # 2 x 4 tokens a b c d / e f g h stand as a b e f, c d g h.
        Neighborhood((2, 4), (1, 2), order=(2, 2)),
        "##...... ##...... ..##.... ..##.... .#..#... ....##.. ...#..#. ......##",
    ),
    "tiles": (SlidingTiles((6,), 2, 2), "##.... ##.... ..##.. ..##.. ....## ....##"),
    "three tiles": (SlidingTiles((7,), 2, 6), "######. ######. ######. ######. ..##### ..##### ..#####"),
    "two tiles, one before": (SlidingTiles((5,), 2, 4), "####. ####. ####. ####. ..###"),
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_literally(name):
    pattern, drawing = LINES[name]
    assert torch.equal(by_rule(pattern, pattern.total, pattern.total), matrix(drawing))


def natten_1d(size, window, dilation, causal, stride, at):
    """The coordinates that NATTEN lets a query see along one dimension, by its description: tokens of a residue are a
    line of their own; queries share the window of their group's leader; the window slides until it is inside."""
    line = [x for x in range(size) if x % dilation == at % dilation]
    place = line.index(at)
    group = [i for i in range(len(line)) if i // stride == place // stride]
    if causal:
        return {line[i] for i in range(len(line)) if group[-1] - window < i <= place}
    leader = group[stride // 2] if stride // 2 < len(group) else group[-1]
    first = leader - window // 2
    while first < 0:
        first += 1
    while first + window > len(line):
        first -= 1
    return {line[i] for i in range(first, first + window)}


def sta_1d(size, tile, window, at):
    """As the paper has it: whole tiles, of a window that slides until it is inside."""
    tiles = [range(start, min(start + tile, size)) for start in range(0, size, tile)]
    wide = window // tile
    first = at // tile - wide // 2
    while first < 0:
        first += 1
    while first + wide > len(tiles):
        first -= 1
    return {x for number in range(first, first + wide) for x in tiles[number]}


def seen_1d(pattern, dimension, at):
    if isinstance(pattern, SlidingTiles):
        return sta_1d(pattern.shape[dimension], pattern.tile[dimension], pattern.window[dimension], at)
    size, window, dilation, causal, stride = (
        x[dimension] for x in (pattern.shape, pattern.window, pattern.dilation, pattern.causal, pattern.stride)
    )
    if pattern.border == "cut" and not causal:  # the neighbourhood of a line so long that no border is near
        far = dilation * (window + stride) * stride  # a multiple of the dilation and the stride
        end = min(at // dilation // stride * stride + stride // 2, (size - 1 - at % dilation) // dilation)
        leader = end * dilation + at % dilation
        wide = natten_1d(size + 2 * far, window, dilation, False, 1, leader + far)
        return {x - far for x in wide if 0 <= x - far < size}
    return natten_1d(size, window, dilation, causal, stride, at)


def in_tiles(coordinates, shape, tile):
    """By what tokens are sorted: tiles that no border cuts come first, those that one does next, and so on."""
    of_tile = tuple(x // t for x, t in zip(coordinates, tile, strict=True))
    cut = tuple((number + 1) * t > n for number, t, n in zip(of_tile, tile, shape, strict=True))
    return cut, of_tile, coordinates


def oracle(pattern):
    """bool [total, total], by loops over the tokens."""
    coordinates = list(itertools.product(*map(range, pattern.shape)))
    if pattern.order is None:
        tokens = [None] * pattern.prefix + coordinates
    else:
        in_order = sorted(coordinates, key=lambda c: in_tiles(c, pattern.shape, pattern.order))
        tokens = in_order + [None] * pattern.prefix
    seen = {
        c: set(itertools.product(*(seen_1d(pattern, d, x) for d, x in enumerate(c)))) for c in coordinates
    }  # fmt: skip
    return torch.tensor([[q is None or k is None or k in seen[q] for k in tokens] for q in tokens])


@pytest.mark.slow
@given(st.data())
@settings(max_examples=150)
def test_as_it_is_defined(data):
    pattern = data.draw(st.integers(1, 90).flatmap(grids))
    assert torch.equal(by_rule(pattern, pattern.total, pattern.total), oracle(pattern))


def test_every_query_sees_as_many_keys():
    for pattern in (Neighborhood((5, 7), (3, 4), prefix=2), Neighborhood((4, 5, 6), (2, 3, 2), (2, 1, 3))):
        seen = by_rule(pattern, pattern.total, pattern.total)[pattern.prefix :].sum(1)
        assert set(seen.tolist()) == {pattern.prefix + torch.tensor(pattern.window).prod().item()}


@given(st.data())
def test_in_tiles_is_the_same_pattern_with_its_positions_renamed(data):
    pattern = data.draw(st.integers(1, 60).flatmap(grids))
    tile = tuple(data.draw(st.integers(1, n)) for n in pattern.shape)
    plain, tiled = pattern.in_tiles(pattern.shape), pattern.in_tiles(tile)
    order = tile_order(pattern.shape, tile, pattern.prefix)
    rows = tile_order(pattern.shape, pattern.shape, pattern.prefix)  # rows, and the prefix behind them
    renamed = rows.argsort()[order]
    masks = [by_rule(each, pattern.total, pattern.total) for each in (plain, tiled)]
    assert torch.equal(masks[1], masks[0][renamed][:, renamed])


class TestValues:
    def test_one_number_is_for_all_dimensions(self):
        assert Neighborhood([4, 6], 3, 1, False) == Neighborhood((4, 6), (3, 3), (1, 1), (False, False), (1, 1))
        assert hash(SlidingTiles((4, 6), 2, [2, 4])) == hash(SlidingTiles([4, 6], (2, 2), (2, 4)))
        assert Neighborhood((4, 6), 3) != Neighborhood((4, 6), 3).in_tiles(2)
        assert SlidingTiles((4, 6), (2, 3), (2, 3)).in_tiles().order == (2, 3)

    def test_positions_outside_see_and_are_seen_by_nobody(self):
        pattern = Neighborhood((3,), 3)
        assert not pattern.allows(0, 0, 4, 3)
        assert pattern.allows(1, 0, 4, 3)

    def test_they_combine_as_all_patterns_do(self):
        pattern = Neighborhood((4, 4), 2) & Causal() | GlobalTokens(1)
        assert pattern.allows(9, 0, 16, 16)
        assert not pattern.allows(0, 1, 16, 16)
        heads = PerHead((Neighborhood((4, 4), 2), Full())) & SlidingWindow(4, 4)
        assert heads.patterns[1] == Full() & SlidingWindow(4, 4)


class TestOrder:
    @given(st.data())
    def test_places_and_coordinates_are_inverse(self, data):
        shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
        order = GridOrder(shape, tuple(data.draw(st.integers(1, n)) for n in shape))
        places = list(range(order.num_cells))
        coordinates = [tuple(order.coordinates(place)) for place in places]
        assert sorted(coordinates) == list(itertools.product(*map(range, shape)))
        assert [order.place(each) for each in coordinates] == places
        of_tensor = torch.stack(order.coordinates(torch.tensor(places)), dim=1)
        assert [tuple(row) for row in of_tensor.tolist()] == coordinates

    def test_rows_without_a_tile_behind_the_prefix(self):
        assert [GridOrder((2, 3)).coordinates(place) for place in (0, 2, 3)] == [[0, 0], [0, 2], [1, 0]]
        assert GridOrder((2, 3), None, prefix=5).grid_at == 5
        assert GridOrder((2, 3), (1, 3), prefix=5).grid_at == 0


class TestPresets:
    def test_sta_video_is_the_paper_s(self):
        assert presets.sta_video() == SlidingTiles((30, 48, 80), (6, 8, 8), (18, 24, 24), order=(6, 8, 8))
        heads = presets.sta_video((6, 4), (2, 2), [(2, 4), (6, 2)], prefix=3)
        assert heads == PerHead(tuple(SlidingTiles((6, 4), 2, w, 3, (2, 2)) for w in ((2, 4), (6, 2))))

    @pytest.mark.parametrize("sink", [False, True])
    def test_spatial_heads(self, sink):
        """Frames of 6 tokens behind 3 of text: within 2 frames, the text, and the first frame as a sink."""
        pattern = presets.svg_spatial((4, 2, 3), 2, prefix=3, sink=sink)

        def rule(i, j):
            return abs(i - j) < 12 or i < 3 or j < (9 if sink else 3)

        wanted = torch.tensor([[rule(i, j) for j in range(27)] for i in range(27)])
        assert torch.equal(by_rule(pattern, 27, 27), wanted)

    def test_temporal_heads(self):
        """The same place in all frames, and what is near it: 2 frames of 6 tokens are 3 places of 4 frames."""
        pattern = presets.svg_temporal((4, 2, 3), 2, prefix=3)

        def rule(i, j):
            return i < 3 or j < 3 or abs((i - 3) % 6 - (j - 3) % 6) < 3

        wanted = torch.tensor([[rule(i, j) for j in range(27)] for i in range(27)])
        assert torch.equal(by_rule(pattern, 27, 27), wanted)
