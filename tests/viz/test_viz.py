"""Drawings: the text to the letter, the figures to the pixel."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from dilated_attention_pytorch.layout import BlockLayout
from dilated_attention_pytorch.layout.branches import layout_of_branches, take_keys
from dilated_attention_pytorch.ops import attention_with_weights
from dilated_attention_pytorch.patterns import (
    Blocks,
    Branches,
    Causal,
    Full,
    GlobalTokens,
    LocalBlocks,
    PerHead,
    RandomBlocks,
    SlidingWindow,
)
from dilated_attention_pytorch.viz import (
    COLOURS,
    DARK_COLOURS,
    State,
    block_states,
    draw_text,
    figures,
    plot_layout,
    plot_weights,
)
from dilated_attention_pytorch.viz.states import Region, picture
from dilated_attention_pytorch.viz.style import light_and_dark

LEGEND = "█ full  ▒ partial  · empty"

PNG_HEAD = b"\x89PNG\r\n\x1a\n"


def causal(tokens=64):
    return BlockLayout.from_pattern(Causal(), tokens, block_size=16)


def two_heads():
    return BlockLayout.from_pattern(
        PerHead((Blocks(((0, 1),), block_size=16), Blocks(((1, 0), (1, 1)), block_size=16))), 32, block_size=16
    )


def test_text_of_a_causal_layout():
    assert draw_text(causal()) == "\n".join(("▒▒······", "██▒▒····", "████▒▒··", "██████▒▒", LEGEND))


def test_text_of_more_keys_than_queries():
    layout = BlockLayout.from_pattern(Causal(), 32, 64, block_size=16)
    assert draw_text(layout) == "\n".join(("████▒▒··", "██████▒▒", LEGEND))


def test_text_of_each_head():
    assert draw_text(two_heads(), head=0) == "\n".join(("··██", "····", LEGEND))
    assert draw_text(two_heads(), head=1) == "\n".join(("····", "████", LEGEND))


def test_text_of_each_sample():
    mask = torch.zeros(2, 2, 2, 2, dtype=torch.bool)
    mask[1, 0, 0, 1] = True
    layout = BlockLayout.from_block_mask(mask, 16)
    assert draw_text(layout, head=0, sample=1) == "\n".join(("··██", "····", LEGEND))
    assert draw_text(layout, head=1, sample=1) == "\n".join(("····", "····", LEGEND))
    assert draw_text(layout, head=0, sample=0) == "\n".join(("····", "····", LEGEND))


def test_text_groups_blocks_when_there_are_more_than_fit():
    # 7 blocks a side in cells of 2 x 2: the last cells have one block a side only.
    layout = BlockLayout.from_pattern(LocalBlocks(32, block_size=16), 112, block_size=16)
    expected = ("██▒▒····", "▒▒██▒▒··", "··▒▒██▒▒", "····▒▒██", LEGEND, "a cell is 2 x 2 blocks")
    assert draw_text(layout, width=8) == "\n".join(expected)


@pytest.mark.parametrize("width", [2, 3, 17, 64, 1000])
def test_text_fills_its_width_and_no_more(width):
    layout = BlockLayout.from_pattern(SlidingWindow(64, 0), 4096, block_size=16)
    rows = [line for line in draw_text(layout, width=width).splitlines() if not set(line) - set("█▒·")]
    assert len({len(row) for row in rows}) == 1
    assert len(rows[0]) == 2 * len(rows)
    assert width / 2 < len(rows[0]) <= width or len(rows) == 256


def test_heads_that_share_a_list_have_the_same_drawing():
    assert draw_text(causal(), head=5) == draw_text(causal())


@pytest.mark.parametrize("head", [-1, 2])
def test_a_head_that_is_not_there_is_an_error(head):
    with pytest.raises(IndexError, match=f"head must be from 0 to 1, as the layout has 2, got {head}"):
        draw_text(two_heads(), head=head)


def test_a_width_without_room_is_an_error():
    with pytest.raises(ValueError, match="width must be at least 2 columns, got 1"):
        draw_text(causal(), width=1)


def test_states_agree_with_the_token_mask():
    layout = BlockLayout.from_pattern(SlidingWindow(left=40, right=7), 96, block_size=16)
    allowed = layout.to_dense().view(6, 16, 6, 16).transpose(1, 2).sum((2, 3))
    expected = torch.where(allowed == 256, State.FULL, torch.where(allowed == 0, State.EMPTY, State.PARTIAL))
    assert {int(state) for state in expected.unique()} == {0, 1, 2}
    assert torch.equal(block_states(layout), expected.to(torch.int8))


def states_of(allowed, height, width):
    """The state of every cell of a mask of tokens, by looking at each."""
    cells = [list(rows.split(width, 1)) for rows in allowed.split(height)]
    return [[2 if cell.all() else 1 if cell.any() else 0 for cell in row] for row in cells]


@pytest.mark.parametrize("most", [3, 7, 100])
@pytest.mark.parametrize("pattern", [SlidingWindow(40, 21), LocalBlocks(64, block_size=16), Causal()])
def test_a_cell_is_full_or_empty_only_where_all_of_it_is(pattern, most):
    layout = BlockLayout.from_pattern(pattern, 224, block_size=16)
    cells, (height, width), note, *_ = picture(layout, most)
    assert cells.tolist() == states_of(layout.to_dense(), height, width)
    assert note == ("" if height == 16 else f"a cell is {height // 16} x {height // 16} blocks")


@pytest.mark.parametrize("most", [9, 25, 97])
@pytest.mark.parametrize("is_causal", [False, True])
def test_dilated_attention_is_drawn_in_the_order_of_the_tokens(is_causal, most):
    layout = layout_of_branches(Branches((8, 20, 50), (1, 2, 4)), 97, num_heads=4, is_causal=is_causal, num_residues=4)
    for head, counts in enumerate(layout.to_dense()):
        cells, (height, width), *_ = picture(layout, most, head=head)
        assert cells.tolist() == states_of(counts > 0, height, width)


REGIONS = [Region(0, 0, 120), Region(37, 90, 64), Region(200, 3, 1000), Region(223, 223, 1)]


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("block_size", [16, (32, 16)])
def test_a_region_is_part_of_the_whole(region, block_size):
    layout = BlockLayout.from_pattern(SlidingWindow(40, 21) | GlobalTokens(3), 224, block_size=block_size)
    found = picture(layout, 4, region=region)
    height, width = found.tokens
    rows, columns = (
        slice(first, first + count * step)
        for first, count, step in zip(found.first, found.cells.shape, found.tokens, strict=True)
    )
    assert found.cells.tolist() == states_of(layout.to_dense()[rows, columns], height, width)
    for first, wanted, step, stop in zip(found.first, region, found.tokens, (rows.stop, columns.stop), strict=False):
        assert first <= wanted < first + step
        assert stop >= min(wanted + region.tokens, 224)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("region", [Region(0, 0, 33), Region(40, 11, 50), Region(90, 90, 20)])
@pytest.mark.parametrize("most", [1, 9, 60])
def test_a_region_of_dilated_attention(region, is_causal, most):
    layout = layout_of_branches(Branches((8, 20, 50), (1, 2, 4)), 97, num_heads=4, is_causal=is_causal, num_residues=4)
    for head, counts in enumerate(layout.to_dense()):
        found = picture(layout, most, head=head, region=region)
        (top, left), (size, _) = found.first, found.tokens
        rows, columns = (first + size * count for first, count in zip(found.first, found.cells.shape, strict=True))
        held = (counts > 0)[top:rows, left:columns]
        assert found.cells.tolist() == states_of(held, size, size)
        shares = [[float(cell.double().mean()) for cell in row.split(size, 1)] for row in held.split(size)]
        torch.testing.assert_close(found.shares[1], torch.tensor(shares, dtype=torch.float64))
        assert not found.shares[0].any()


@pytest.mark.parametrize("block_size", [16, (32, 16)])
def test_pairs_of_tokens_are_drawn_where_there_is_room(block_size):
    layout = BlockLayout.from_pattern(SlidingWindow(40, 21), 224, block_size=block_size)
    cells, tokens, note, first, shares = picture(layout, 64, region=Region(150, 170, 60))
    assert (tokens, note, first) == ((1, 1), "a cell is one pair of tokens", (150, 170))
    block_q, block_k = layout.blocks
    computed = layout.to_block_mask().repeat_interleave(block_q, 0).repeat_interleave(block_k, 1)
    want = torch.where(layout.to_dense(), State.FULL, torch.where(computed[:224, :224], State.PARTIAL, State.EMPTY))
    assert cells.tolist() == want[150:210, 170:].tolist()
    assert shares.argmax(0).equal((cells == State.FULL).long())


def test_shares_tell_full_blocks_from_partial_ones_where_a_cell_has_both():
    """A cell of many blocks keeps what kind they are: at random, all are full and a few of many."""
    layout = BlockLayout.from_pattern(RandomBlocks(2, block_size=16), 640, block_size=16)
    found = picture(layout, 10)
    want = layout.to_block_mask().view(10, 4, 10, 4).double().mean((1, 3))
    assert not found.shares[0].any()
    assert found.shares[1].equal(want)
    causal = picture(BlockLayout.from_pattern(Causal(), 640, block_size=16), 10).shares
    assert causal[:, 3, 3].tolist() == [4 / 16, 6 / 16]
    assert causal[:, 3, 2].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("region", "message"),
    [
        (Region(224, 0, 1), "query of region must be below 224, got 224"),
        (Region(0, -1, 1), "key of region must be at least 0, got -1"),
        (Region(0, 0, 0), "tokens of region must be at least 1, got 0"),
    ],
)
def test_a_region_outside_is_an_error(region, message):
    with pytest.raises(ValueError, match=message):
        picture(BlockLayout.from_pattern(Causal(), 224, block_size=16), 4, region=region)


def test_parts_of_dilated_attention_are_not_drawn():
    branches = Branches((8,), (2,))
    with pytest.raises(ValueError, match="as many queries as keys"):
        draw_text(layout_of_branches(branches, 8, 16, num_heads=2))
    with pytest.raises(ValueError, match="not a part of one"):
        draw_text(take_keys(layout_of_branches(branches, 2048, num_heads=2, queries=range(1024)), range(1024, 2048)))


def pixel(path: Path, axis, key: float, query: float) -> tuple[float, ...]:
    """The colour of the saved picture at these tokens of a panel."""
    image = imread(path)
    x, y = axis.transData.transform((key, query))
    return tuple(image[int(image.shape[0] - y), int(x), :3].tolist())


def assert_colour(found: tuple[float, ...], state: State) -> None:
    assert found == pytest.approx(to_rgb(COLOURS[state]), abs=1 / 255)


def test_png_has_the_colour_of_each_state_where_the_block_is(tmp_path):
    path = tmp_path / "causal.png"
    (axis,) = plot_layout(causal(), path).axes
    for query_block, row in enumerate(block_states(causal()).tolist()):
        for key_block, state in enumerate(row):
            assert_colour(pixel(path, axis, 16 * key_block + 8, 16 * query_block + 8), State(state))


def test_a_figure_follows_the_style_it_is_drawn_in(tmp_path):
    """Dark: other colours, on the page's own ground; light again after it."""
    for path, colours in zip(light_and_dark(tmp_path / "causal.png"), (COLOURS, DARK_COLOURS), strict=True):
        (axis,) = plot_layout(causal(), path).axes
        states = block_states(causal())
        row, column = (states == State.FULL).nonzero()[0].tolist()
        for key, query, state in ((16 * column + 8, 16 * row + 8, State.FULL), (40, 8, State.EMPTY)):
            assert pixel(path, axis, key, query) == pytest.approx(to_rgb(colours[state]), abs=1 / 255)
        assert imread(path)[2, 2, 3] == (1.0 if colours is COLOURS else 0.0)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["causal-dark.png", "causal.png"]
    assert plot_layout(causal()).get_facecolor()[:3] == (1.0, 1.0, 1.0)


def test_png_shows_every_layout_in_its_own_panel(tmp_path):
    path = tmp_path / "four.png"
    pairs = [
        ("a", causal()),
        ("b", two_heads()),
        ("c", BlockLayout.from_pattern(Full(), 64, block_size=16)),
        ("d", causal()),
    ]
    a, b, c, d = plot_layout(pairs, path, head=1).axes
    assert_colour(pixel(path, a, 56, 8), State.EMPTY)
    assert_colour(pixel(path, b, 8, 8), State.EMPTY)
    assert_colour(pixel(path, b, 8, 24), State.FULL)
    assert_colour(pixel(path, c, 56, 8), State.FULL)
    assert_colour(pixel(path, d, 8, 8), State.PARTIAL)


def test_every_block_of_the_largest_ungrouped_layout_has_a_pixel(tmp_path):
    path = tmp_path / "diagonal.png"
    layout = BlockLayout.from_pattern(LocalBlocks(0, block_size=16), 512 * 16, block_size=16)
    (axis,) = plot_layout(layout, path).axes
    for block in (*range(0, 512, 37), 511):
        assert_colour(pixel(path, axis, 16 * block + 8, 16 * block + 8), State.FULL)


def test_titles_say_density_block_size_lists_and_cells():
    figure = plot_layout([("a", causal(48)), ("b", two_heads())])
    assert [" ".join(axis.get_title().split("\n")) for axis in figure.axes] == [
        "a density 51.0%; blocks of 16 tokens",
        "b density 37.5%, mean of 2 lists; blocks of 16 tokens",
    ]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["full", "partial", "empty"]
    large = BlockLayout.from_pattern(LocalBlocks(0, block_size=16), 600 * 16, block_size=16)
    (axis,) = plot_layout(large).axes
    assert axis.get_title().replace("\n", " ").endswith("blocks of 16 tokens, a cell is 2 x 2 blocks")
    assert max(map(len, axis.get_title().splitlines())) <= figures.TITLE_LETTERS
    assert axis.images[0].get_array().shape == (300, 300)


def test_svg_is_written(tmp_path):
    plot_layout(causal(), tmp_path / "causal.svg")
    assert "<svg" in (tmp_path / "causal.svg").read_text()


def test_no_layout_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        plot_layout([])


def weights_of(tokens: int = 40, heads: int = 2, block_size: int | tuple[int, int] = 16):
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, tokens, heads, 8, generator=draw) for _ in range(3))
    layout = BlockLayout.from_pattern(Causal(), tokens, block_size=block_size)
    _, weights = attention_with_weights(q, k, v, layout)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 8**-0.5
    dense = scores.masked_fill(~torch.ones(tokens, tokens, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    return weights, dense


@pytest.mark.parametrize("block_size", [16, (16, 32)])
def test_weights_are_the_dense_ones_and_blank_where_there_are_none(block_size):
    weights, dense = weights_of(block_size=block_size)
    figure = plot_weights(weights, sample=1, head=1)
    shown = torch.from_numpy(figure.axes[0].images[0].get_array().filled(0.0))
    torch.testing.assert_close(shown, dense[1, 1], rtol=1e-5, atol=1e-6)
    assert torch.equal(shown == 0, ~torch.ones(40, 40, dtype=torch.bool).tril())


def test_large_weights_are_drawn_in_cells_that_show_the_largest(monkeypatch):
    monkeypatch.setattr(figures, "MOST_WEIGHTS", 14)
    weights, dense = weights_of()
    figure = plot_weights(weights, sample=0, head=1)
    shown = torch.from_numpy(figure.axes[0].images[0].get_array().filled(0.0))
    padded = torch.nn.functional.pad(dense[0, 1], (0, 2, 0, 2))
    torch.testing.assert_close(shown, padded.view(14, 3, 14, 3).amax((1, 3)), rtol=1e-5, atol=1e-6)
    assert figure.axes[1].get_ylabel() == "largest weight of 3 x 3 tokens"


def test_weights_are_saved_and_plot_is_the_same_figure(tmp_path):
    weights, _ = weights_of()
    weights.plot(str(tmp_path / "weights.png"), head=1)
    assert (tmp_path / "weights.png").read_bytes().startswith(PNG_HEAD)
    assert imread(tmp_path / "weights.png")[..., :3].std() > 0.05


def test_weights_that_are_all_zero_are_blank():
    blank = {"block_indices": [(0, 0)], "block_values": [torch.zeros(1, 1, 16, 16)], "shape": (1, 1, 16, 16)}
    figure = plot_weights({**blank, "block_size": 16})
    figure.draw_without_rendering()
    assert figure.axes[0].images[0].get_array().mask.all()


@pytest.mark.parametrize("where", [{"sample": 2}, {"head": 2}, {"head": -1}])
def test_weights_of_a_head_or_sample_that_is_not_there_are_an_error(where):
    (name,) = where
    with pytest.raises(IndexError, match=f"{name} must be from 0 to 1"):
        plot_weights(weights_of()[0], **where)


def test_without_matplotlib_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plot_layout(causal())


def test_importing_viz_does_not_import_matplotlib():
    code = "import sys, dilated_attention_pytorch.viz; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_kept_mass_is_drawn(tmp_path):
    from dilated_attention_pytorch.viz import plot_kept_mass

    kept = torch.linspace(0, 1, 24).view(6, 4)
    path = tmp_path / "kept.png"
    figure = plot_kept_mass(kept, path, title="here")
    shown = figure.axes[0].images[0].get_array()
    assert torch.equal(torch.as_tensor(shown.data), kept)
    assert (figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()) == ("head", "layer")
    assert imread(path)[..., :3].std() > 0.1
    for wrong in (kept[0], kept + 1, kept * float("nan")):
        with pytest.raises(ValueError, match="kept must be"):
            plot_kept_mass(wrong)
