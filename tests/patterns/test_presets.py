"""Each preset as the matrix that its paper draws, and, pair by pair, as the paper's rule reads."""

import pytest
import torch

from dilated_attention_pytorch import BlockLayout, Branches, LongNetConfig, PerHead, presets
from tests.patterns.test_patterns import by_rule, matrix

# Token by token, 8 tokens.
LITERAL = {
    # Longformer, figure 2d: half of a window of 4 on each side, token 0 sees all and is seen by all.
    "longformer": (
        presets.longformer(4),
        "######## ####.... #####... ######.. #.#####. #..##### #...#### #....###",
    ),
    "longformer, a question in the middle": (
        presets.longformer(2, global_tokens=0, at=(3,)),
        "##.#.... ####.... .###.... ######## ...###.. ...####. ...#.### ...#..##",
    ),
    "longformer without global tokens": (
        presets.longformer(2, global_tokens=0),
        "##...... ###..... .###.... ..###... ...###.. ....###. .....### ......##",
    ),
    # Mistral 7B, figure 1: a window of 3.
    "mistral": (presets.mistral(3), "#....... ##...... ###..... .###.... ..###... ...###.. ....###. .....###"),
    "mistral, alone": (presets.mistral(1), "#....... .#...... ..#..... ...#.... ....#... .....#.. ......#. .......#"),
    # StreamingLLM, figure 4: attention sinks and the most recent tokens.
    "streaming_llm": (
        presets.streaming_llm(3, sinks=2),
        "#....... ##...... ###..... ####.... #####... ##.###.. ##..###. ##...###",
    ),
}

# Block by block, BigBird's figure 1 with blocks of 16: global blocks and a window; random ones are looked at below.
WITHOUT_RANDOM = {
    "global and window": (
        presets.bigbird(block_size=16, global_blocks=1, random_blocks=0),
        "###### ###... ####.. #.###. #..### #...##",
    ),
    "a wider window, no global block": (
        presets.bigbird(block_size=16, window_blocks=5, global_blocks=0, random_blocks=0),
        "###... ####.. #####. .##### ..#### ...###",
    ),
}


@pytest.mark.parametrize("name", LITERAL)
def test_literally(name):
    pattern, drawing = LITERAL[name]
    assert torch.equal(by_rule(pattern, 8, 8), matrix(drawing))
    assert torch.equal(BlockLayout.from_pattern(pattern, 8, block_size=16).to_dense(), matrix(drawing))


@pytest.mark.parametrize("name", WITHOUT_RANDOM)
def test_bigbird_literally(name):
    pattern, drawing = WITHOUT_RANDOM[name]
    assert torch.equal(by_rule(pattern, 96, 96, step=16), matrix(drawing))
    assert torch.equal(BlockLayout.from_pattern(pattern, 96, block_size=16).to_block_mask(), matrix(drawing))


def long(i, j, window, first, at):
    return abs(i - j) <= window // 2 or any(p < first or p in at for p in (i, j))


def mistral(i, j, window):
    return i - window < j <= i


def streaming_llm(i, j, window, sinks):
    return j <= i and (j < sinks or i - j < window)


RULES = {
    "Longformer": (presets.longformer(14, global_tokens=2, at=(40, 41)), lambda i, j: long(i, j, 14, 2, [40, 41])),
    "mistral": (presets.mistral(19), lambda i, j: mistral(i, j, 19)),
    "streaming_llm": (presets.streaming_llm(11, 3), lambda i, j: streaming_llm(i, j, 11, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("tokens", [1, 10, 77])
def test_as_the_paper_says(name, tokens):
    pattern, rule = RULES[name]
    wanted = torch.tensor([[rule(i, j) for j in range(tokens)] for i in range(tokens)])
    assert torch.equal(BlockLayout.from_pattern(pattern, tokens, block_size=16).to_dense(), wanted)


def test_bigbird_adds_random_blocks_and_nothing_else():
    options = {"block_size": 16, "global_blocks": 1}
    tokens = 16 * 24
    bare, whole, others = (
        BlockLayout.from_pattern(presets.bigbird(**options, **more), tokens, block_size=16).to_block_mask()
        for more in ({"random_blocks": 0}, {"random_blocks": 3}, {"random_blocks": 3, "seed": 1})
    )
    assert (whole & bare).equal(bare)
    added = (whole & ~bare).sum(1)
    assert added.max() == 3  # three, fewer where one falls on what was there already
    assert added[1:].float().mean() > 2
    assert not whole.equal(others)


def test_bigbird_by_head():
    pattern = presets.bigbird(block_size=16, num_heads=4)
    assert isinstance(pattern, PerHead)
    assert len(set(pattern.patterns)) == 4
    assert len(set(presets.bigbird(block_size=16, num_heads=4, seed=1).patterns) & set(pattern.patterns)) == 0


def test_gemma3_sees_all_in_every_sixth_layer():
    layers = presets.gemma3(14, window=4)
    assert list(layers) == list(range(14))
    assert [number for number, pattern in layers.items() if pattern is None] == [5, 11]
    assert {pattern for pattern in layers.values() if pattern is not None} == {presets.mistral(4)}
    assert list(presets.gemma3(4, every=2).values()) == [presets.mistral(1024), None] * 2


def test_gemma3_is_what_transformers_builds():
    config = pytest.importorskip("transformers").Gemma3TextConfig(num_hidden_layers=13, sliding_window=512)
    layers = presets.gemma3(config.num_hidden_layers, window=config.sliding_window)
    kinds = ["full_attention" if pattern is None else "sliding_attention" for pattern in layers.values()]
    assert kinds == config.layer_types


def test_longnet_is_the_model_of_the_paper():
    assert presets.longnet() == LongNetConfig().branches
    assert presets.longnet([16, 32], [1, 2]) == Branches((16, 32), (1, 2))
