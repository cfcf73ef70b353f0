"""`show`: what it draws and prints is what the layout says, and the Python that it gives runs."""

import json
import re
import sys

import pytest
import torch
from matplotlib.image import imread

from dilated_attention_pytorch import (
    BlockLayout,
    Branches,
    PersistentPatternCache,
    SlidingWindow,
    block_sparse_attention,
    dilated_attention,
)
from dilated_attention_pytorch.cli.call import Call
from dilated_attention_pytorch.patterns.naming import NAMES
from dilated_attention_pytorch.viz import draw_text
from tests.cli.commands import run


def test_drawing_figures_and_code():
    code, out, err = run("show", "window:40/0", "--tokens", "256", "--block-size", "16")
    assert (code, err) == (0, "")
    layout = BlockLayout.from_pattern(SlidingWindow(40, 0), 256, block_size=16)
    assert out.startswith(draw_text(layout).splitlines()[0])
    assert f"{layout.num_active_blocks:,}: " in out
    assert f"{layout.density:.2%} of the pairs, {layout.block_density:.2%} of the blocks" in out
    assert "pattern = SlidingWindow(left=40, right=0)\n" in out
    assert "\x1b" not in out


def test_json_is_all_that_is_on_stdout():
    code, out, err = run("show", "window:40 | global:4", "--causal", "--tokens", "200", "--heads", "4", "--json")
    assert code == 0
    found = json.loads(out)
    call = Call.named("window:40 | global:4", tokens=200, is_causal=True, heads=4)
    layout = call.layout()
    cost = layout.cost(batch=1, heads=4, head_dim=64, itemsize=4)
    allowed = int(layout.to_dense().sum())
    assert found["cost"]["pairs"] == cost.pairs == 4 * allowed
    assert found["density"] == pytest.approx(allowed / 200**2)
    assert found["active_blocks"] == found["full_blocks"] + found["partial_blocks"] == layout.num_active_blocks
    assert "█" in err


def test_heads_with_patterns_of_their_own(tmp_path):
    path = tmp_path / "made" / "heads.png"
    names = "window:16 ; full ; window:64/0"
    code, out, _ = run("show", names, "--tokens", "256", "--block-size", "16", "--out", str(path))
    assert code == 0
    layout = Call.named(names, tokens=256, block_size=16).layout()
    for head in range(3):
        assert f"head {head}" in out
        assert draw_text(layout, head, 24).splitlines()[3] in out
    by_head = layout.to_block_mask().sum((1, 2)).tolist()
    assert re.search(r"by head +│ " + ", ".join(map(str, by_head)), out)
    assert imread(path).shape[1] > 1800  # three panels
    code, one, _ = run("show", names, "--tokens", "256", "--head", "1", "--out", str(tmp_path / "one.svg"))
    assert code == 0
    assert "head 0" not in one
    assert (tmp_path / "one.svg").read_text().count("<svg") == 1


def test_a_layout_that_was_saved(tmp_path):
    cache = PersistentPatternCache(directory=tmp_path)
    layout = cache.layout(SlidingWindow(100, 0), 512, block_size=32)
    (path,) = tmp_path.glob("*.safetensors")
    code, out, _ = run("show", str(path), "--json")
    assert code == 0
    assert json.loads(out)["active_blocks"] == layout.num_active_blocks
    assert "code" not in json.loads(out)
    code, _, err = run("show", str(path), "--tokens", "64")
    assert code == 1
    assert "leave them out" in err
    path.write_bytes(path.read_bytes()[:-1])
    code, _, err = run("show", str(path))
    assert code == 1
    assert re.fullmatch(r"error: .* is no file of a PersistentPatternCache: .*\n", err)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["windo:3"], 1, "did you mean 'window'?"),
        (["window:3", "--block-size", "17"], 1, "error: block_size must be one of"),
        (["window:3", "--block-size", "axb"], 1, "error: block size must be a number or two, as 64x16, got 'axb'"),
        (["window:3", "--head", "8"], 1, "error: --head must be from 0 to 7, got 8"),
        (["window:3", "--out", "x.jpg"], 1, "error: --out must end in .png or .svg, got 'x.jpg'"),
        (["window:3", "--dtype", "int8"], 2, "--dtype"),
        (["nothing.safetensors"], 1, "No such file"),
        ([], 2, "PATTERN"),
    ],
)
def test_errors_are_one_line(arguments, code, message):
    got, out, err = run("show", *arguments)
    assert (got, out) == (code, "")
    assert message in err
    if code == 1:
        assert err.count("\n") == 1


def test_a_picture_without_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, err = run("show", "window:3", "--out", str(tmp_path / "x.png"))
    assert code == 1
    assert "█" in out
    assert err == "error: drawing needs matplotlib: pip install matplotlib\n"


@pytest.mark.parametrize("columns", [24, 40, 200])
def test_no_terminal_is_too_narrow(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = run("show", "dilated_sparse", "--tokens", "4096")
    assert code == 0
    table = out[: out.index("In Python")].splitlines()
    assert max(map(len, table)) <= columns
    assert "…" not in out


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_python_runs_and_is_that_call(name, is_causal):
    """What it computes is what the reference computes over the layout that was drawn."""
    lengths = "100,60,40"
    example = {
        "window": ("40", "3"),
        "prefix": ("20", lengths),
        "documents": (lengths,),
        "document_sinks": ("4", lengths),
        "ranges": ("0,100,100", "100,160,200", lengths),
        "block_diffusion": ("100", "24"),
        "dilated_sparse": ("0.5", "64,128", "1,2"),
        "neighborhood": ("5x10x4", "3x5x2", "1x1x2", "0", "1", "0", "2x5x4", "shift"),
        "sliding_tiles": ("5x10x4", "2x5x2", "4x5x4", "0", "2x5x2"),
    }
    arguments = example.get(name, NAMES[name].example)
    text = name + (":" + "/".join(arguments) if arguments else "")
    size = None if name == "longnet" else 32
    call = Call.named(text, tokens=200, block_size=size, is_causal=is_causal, heads=2, head_dim=16, dtype=torch.float64)
    made = {}
    exec(call.code(), made)
    q, k, v, out = (made[each] for each in ("q", "k", "v", "out"))
    if isinstance(call.what, Branches):
        want = dilated_attention(
            q, k, v, segment_lengths=call.what.segment_lengths, dilation_rates=call.what.dilation_rates,
            is_causal=is_causal, backend="reference",
        )  # fmt: skip
    else:
        want = block_sparse_attention(q, k, v, call.layout(), backend="reference")
        if "layout" in made:
            assert made["layout"].blocks == (32, 32)
    assert q.shape == (1, 200, 2, 16)
    assert (out - want).abs().max() < 1e-12
