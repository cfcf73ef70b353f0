"""A registered `Adaptive`: models of transformers choose their blocks, in prompts and in generation."""

import copy
import json
from dataclasses import replace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hypothesis import Phase, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from dilated_attention_pytorch import (  # noqa: E402
    Adaptive,
    BlockSparseAdaptive,
    BlockSummaries,
    Full,
    MeanPooled,
    SharedBudget,
    SparsitySchedule,
    TopK,
    select_blocks,
)
from dilated_attention_pytorch.integrations.huggingface import register, trainable, verify  # noqa: E402
from dilated_attention_pytorch.patterns.base import value_of  # noqa: E402
from tests.integrations.test_huggingface import DECODERS, ENCODERS, build, generated, outputs, tokens  # noqa: E402
from tests.ops.test_cache_blocks import kept  # noqa: E402

SPARSE = Adaptive(0.4, scorer="exact", step_scorer="exact", block_size=16, dense_below=0)
EVERYTHING = Adaptive(1.0, block_size=(32, 16), dense_below=0)
SEQ = 70


def adaptive(kind, rule, *, layers=None, **changes):
    model = build(kind, max_position_embeddings=512, **changes)
    register("adaptive", rule, layers=layers)
    model.set_attn_implementation("adaptive")
    return model


def with_full(kind, **changes):
    model = build(kind, max_position_embeddings=512, **changes)
    register("full", Full())
    model.set_attn_implementation("full")
    return model


@pytest.mark.parametrize("kind", [*DECODERS, *ENCODERS])
def test_a_full_budget_is_dense(kind):
    ids = tokens(seq=SEQ)
    model = adaptive(kind, EVERYTHING)
    verify(model)
    torch.testing.assert_close(outputs(model, ids), outputs(with_full(kind), ids), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("kind", DECODERS)
def test_a_full_budget_generates_what_dense_attention_does(kind, cache):
    ids = tokens(seq=SEQ)
    want = generated(with_full(kind), ids, 8, cache_implementation=cache)
    assert generated(adaptive(kind, EVERYTHING), ids, 8, cache_implementation=cache).equal(want)


class Definition:
    """Attention of a layer, chosen from all keys anew in every call, over a dense mask of what was chosen."""

    def __init__(self, rule_of):
        self.rule_of = rule_of

    def __call__(self, module, query, key, value, attention_mask, scaling, **_):
        rule = self.rule_of(module.layer_idx)
        if query.shape[2] > 1:
            self.length = query.shape[2]
        elif module.layer_idx == 0:
            self.length += 1
        length = self.length
        group, new = query.shape[1] // key.shape[1], query.shape[2]
        q, k = query.transpose(1, 2), key[:, :, :length].transpose(1, 2)
        seen = torch.ones(length, length, dtype=torch.bool).tril()[length - new :]
        if rule is not None and new > 1:
            own = {"scorer": rule.scorer, "block_size": rule.block_size, "per_kv_head": rule.per_kv_head}
            layout = select_blocks(q, k, selector=rule.module().selector, is_causal=True, scale=scaling, **own)
            seen = layout.to_dense()
        elif rule is not None:
            call = {"selector": rule.module().selector, "per_kv_head": rule.per_kv_head, "scale": scaling}
            summaries = BlockSummaries(rule.step_scorer, rule.block_size)
            blocks = summaries.choose(q, k, lengths=torch.full((len(q),), length), **call)
            num_blocks = -(-length // blocks.block_size)
            keep = kept(blocks, (len(q), 1, blocks.num_lists, num_blocks)).transpose(1, 2)
            seen = keep.repeat_interleave(blocks.block_size, 3)[..., :length]
        while seen.ndim < 4:
            seen = seen[None]
        if seen.shape[1] > 1:
            seen = seen.repeat_interleave(query.shape[1] // seen.shape[1], 1)
        scores = query @ k.transpose(1, 2).repeat_interleave(group, 1).mT * scaling
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return (weights @ value[:, :, :length].repeat_interleave(group, 1)).transpose(1, 2), None


rules = st.builds(
    Adaptive,
    st.sampled_from([0.1, 0.3, 0.6]),
    scorer=st.sampled_from(["exact", "mean", "patches", "minmax", "antidiagonal"]),
    step_scorer=st.sampled_from(["minmax", "patches", "moments", "exact"]),
    block_size=st.sampled_from([16, (64, 16), (16, 32)]),
    per_kv_head=st.booleans(),
    dense_below=st.just(0),
)


@pytest.mark.slow
@given(
    rule=rules,
    first_dense=st.booleans(),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 2), (3, 1)]),
    seq=st.integers(2, 150),
    batch=st.integers(1, 2),
    cache=st.sampled_from([None, "static"]),
)
@settings(max_examples=4, phases=[Phase.generate])
def test_prompts_and_tokens_see_what_was_chosen(rule, first_dense, heads, seq, batch, cache):
    """Against a dense mask of the definition's choice: logits of the prompt, then of every generated token."""
    changes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "hidden_size": 8 * heads[0]}
    layers = {0: None} if first_dense else {}
    model = adaptive("llama", rule, layers=layers, **changes)
    options = {"output_logits": True, "return_dict_in_generate": True, "cache_implementation": cache}
    got = generated(model, tokens(batch, seq), 6, **options)
    own = dict.fromkeys(layers)
    transformers.AttentionInterface.register("definition", Definition(lambda layer: own.get(layer, rule)))
    model.config._attn_implementation = "definition"
    want = generated(model, tokens(batch, seq), 6, **options)
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-8, atol=1e-8)
    assert got.sequences.equal(want.sequences)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("dense_below", [0, 40])
def test_samples_do_not_depend_on_their_batch(cache, side, dense_below):
    """Rows of 30, 47 and 70 tokens: what each gives alone, chosen or dense as alone."""
    rule = Adaptive(0.3, block_size=(32, 16), dense_below=dense_below)
    model, ids = adaptive("llama", rule), tokens(3, SEQ)
    mask, alone = torch.ones_like(ids), []
    for row, length in enumerate((30, 47, 70)):
        real = slice(SEQ - length, SEQ) if side == "left" else slice(length)
        mask[row] = 0
        mask[row, real] = 1
        alone.append(ids[row : row + 1, real])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    got = outputs(model, ids, attention_mask=mask, position_ids=positions, use_cache=False)
    for row, own in enumerate(alone):
        torch.testing.assert_close(got[row][mask[row].bool()], outputs(model, own)[0], rtol=1e-9, atol=1e-9)
    if side == "left":
        got = generated(model, ids, 8, attention_mask=mask, cache_implementation=cache)
        for row, own in enumerate(alone):
            assert got[row : row + 1, SEQ - own.shape[1] :].equal(generated(model, own, 8))


def test_a_causal_choice_looks_at_no_later_block():
    """Tokens of a later query block change nothing before it, bit for bit."""
    model, ids = adaptive("llama", SPARSE), tokens(1, SEQ)
    changed = ids.clone()
    changed[0, 48:] = 1 + (changed[0, 48:] + 5) % 63
    before, after = (outputs(model, x)[0] for x in (ids, changed))
    assert before[:48].equal(after[:48])
    assert not before[48:].equal(after[48:])


@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "gemma3", "gpt_oss", "mistral"])
def test_layers_with_a_window_keep_it_and_choose_nothing(kind):
    """With the others dense, all is what the model gives itself; and those others do choose."""
    model, ids = adaptive(kind, SPARSE), tokens(seq=SEQ)
    sparse = outputs(model, ids)
    kinds = getattr(model.config, "layer_types", ["sliding_attention"] * 3)
    register("adaptive", SPARSE, layers={i: None for i, each in enumerate(kinds) if each == "full_attention"})
    want = outputs(with_full(kind), ids)
    torch.testing.assert_close(outputs(model, ids), want, rtol=1e-9, atol=1e-9)
    assert torch.allclose(sparse, want) == ("full_attention" not in kinds)


def test_packed_documents_do_not_see_each_other():
    model, ids = adaptive("llama", SPARSE), tokens(1, SEQ)
    positions = torch.cat((torch.arange(30), torch.arange(40)))[None]
    got = outputs(model, ids, position_ids=positions, use_cache=False)
    changed = ids.clone()
    changed[0, :30] = 1 + (changed[0, :30] + 5) % 63
    again = outputs(model, changed, position_ids=positions, use_cache=False)
    register("adaptive", EVERYTHING)
    whole = outputs(model, ids, position_ids=positions, use_cache=False)
    torch.testing.assert_close(again[:, 32:].isfinite().all(), torch.tensor(True))
    torch.testing.assert_close(whole[:, 30:], outputs(model, ids[:, 30:], use_cache=False), rtol=1e-9, atol=1e-9)
    assert not got.equal(whole)


def test_short_samples_are_dense():
    ids = tokens(seq=SEQ)
    want = outputs(with_full("llama"), ids)
    dense = Adaptive(0.1, dense_below=SEQ, block_size=16)
    assert outputs(adaptive("llama", dense), ids).equal(want)
    assert not torch.allclose(outputs(adaptive("llama", Adaptive(0.1, dense_below=SEQ - 1, block_size=16)), ids), want)
    assert outputs(adaptive("llama", Adaptive(0.1)), ids).equal(want)  # by the table of devices


@pytest.mark.parametrize("cache", [None, "static"])
def test_a_prompt_in_chunks_and_a_cache_that_goes_on(cache):
    """New tokens choose for themselves, however many come at a time; summaries follow."""
    model, ids = adaptive("llama", Adaptive(0.3, block_size=16, dense_below=0)), tokens(1, SEQ)
    parts = {}
    for sizes in ((20, 50), (20, 1, 16, 33), (20, *[1] * 50)):
        past = transformers.StaticCache(config=model.config, max_cache_len=96) if cache else DynamicCache()
        with torch.no_grad():
            done = [outputs(model, part, past_key_values=past) for part in ids.split(sizes, 1)]
        parts[sizes] = torch.cat(done, 1)
    first, *others = parts.values()
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-9, atol=1e-9)


def summary_of(cache, layer=0):
    return cache.block_summaries.of_layers[layer].columns


@pytest.mark.parametrize("change", ["crop", "reorder", "repeat", "select", "copy", "reset"])
def test_summaries_follow_the_cache(change):
    """Whatever becomes of a cache, the next token is that of a cache which was filled so."""
    model, ids = adaptive("llama", Adaptive(0.3, block_size=16, dense_below=0)), tokens(2, SEQ)
    past = DynamicCache()
    with torch.no_grad():
        outputs(model, ids[:, :50], past_key_values=past)
        outputs(model, ids[:, 50:60], past_key_values=past)
        assert summary_of(past).abs().sum() > 0
        rows = torch.tensor([0, 1])
        if change == "crop":
            past.crop(-13)
            ids = torch.cat((ids[:, :47], ids[:, 60:]), 1)
        elif change == "reorder":
            rows = torch.tensor([1, 0])
            past.reorder_cache(rows)
        elif change == "repeat":
            past.batch_repeat_interleave(2)
            rows = torch.tensor([0, 0, 1, 1])
        elif change == "select":
            rows = torch.tensor([1])
            past.batch_select_indices(rows)
        elif change == "copy":
            past = copy.deepcopy(past)
        elif change == "reset":
            past.reset()
            outputs(model, ids[:, :60], past_key_values=past)
        ids = ids[rows]
        got = outputs(model, ids[:, -10:], past_key_values=past)
        fresh = DynamicCache()
        register("adaptive", Adaptive(0.3, block_size=16, dense_below=0))
        outputs(model, ids[:, :50] if change != "reset" else ids[:, :60], past_key_values=fresh)
        steps = ids[:, 50:-10] if change not in ("reset", "crop") else ids[:, :0]
        if change == "crop":
            fresh = DynamicCache()
            outputs(model, ids[:, :47], past_key_values=fresh)
        if steps.shape[1]:
            outputs(model, steps, past_key_values=fresh)
        torch.testing.assert_close(got, outputs(model, ids[:, -10:], past_key_values=fresh), rtol=1e-9, atol=1e-9)


def test_a_step_reads_no_other_key_than_it_chose(monkeypatch):
    """Beside the summaries: keys and values of blocks that were not chosen may be anything."""
    from dilated_attention_pytorch.integrations import hf_adaptive

    model, ids = adaptive("llama", Adaptive(0.1, scorer="mean", block_size=16, dense_below=0)), tokens(1, SEQ)
    past, chosen = DynamicCache(), []
    real = hf_adaptive.decode_attention

    def poisoned(q, k, v, blocks, **options):
        keep = kept(blocks, (1, 1, blocks.num_lists, -(-k.shape[1] // 16))).any(2)[0, 0]
        chosen.append(int(keep.sum()))
        hide = ~keep.repeat_interleave(16)[: k.shape[1], None, None]
        return real(q, k.masked_fill(hide, torch.nan), v.masked_fill(hide, torch.nan), blocks, **options)

    monkeypatch.setattr(hf_adaptive, "decode_attention", poisoned)
    with torch.no_grad():
        outputs(model, ids[:, :-1], past_key_values=past)
        assert outputs(model, ids[:, -1:], past_key_values=past).isfinite().all()
    assert len(chosen) == 3
    assert max(chosen) < 5


def test_beams():
    model, ids = adaptive("llama", EVERYTHING), tokens(seq=SEQ)
    assert generated(model, ids, 8, num_beams=3).equal(generated(with_full("llama"), ids, 8, num_beams=3))


@pytest.mark.parametrize("cache", [None, "static"])
def test_beams_choose_as_without_summaries(cache, monkeypatch):
    """Summaries are reordered with the cache: what they say is what all keys would say."""
    from dilated_attention_pytorch.integrations import huggingface

    model, ids = adaptive("llama", Adaptive(0.3, block_size=16, dense_below=0)), tokens(seq=SEQ)
    options = {"num_beams": 3, "cache_implementation": cache}
    got = generated(model, ids, 8, **options)
    monkeypatch.setattr(huggingface, "with_summaries", lambda mask, *_: mask)
    assert got.equal(generated(model, ids, 8, **options))


@pytest.mark.slow
def test_compiled():
    model, ids = adaptive("llama", Adaptive(0.3, block_size=16, dense_below=0)), tokens(seq=SEQ)
    want = outputs(model, ids)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(outputs(compiled, ids), want)


@pytest.mark.slow
def test_compiled_decoding_with_a_static_cache():
    """As many graphs as for a pattern: one for the prompt, one for all new tokens."""
    from torch._dynamo.testing import CompileCounterWithBackend

    rule = Adaptive(0.3, block_size=16, dense_below=0)
    model, ids = adaptive("llama", rule, num_hidden_layers=1), tokens(seq=SEQ)
    want = generated(model, ids, cache_implementation="static")
    counter = CompileCounterWithBackend("aot_eager")
    model.forward = torch.compile(model.forward, backend=counter)
    assert generated(model, ids, cache_implementation="static").equal(want)
    assert counter.frame_count == 2


def test_trains():
    """Gradients are those of attention over the chosen blocks."""
    model, ids = adaptive("llama", EVERYTHING), tokens(seq=SEQ)
    grads = []
    for each in (model, with_full("llama")):
        each.train()
        each(ids, labels=ids, use_cache=False).loss.backward()
        grads.append([p.grad for p in each.parameters()])
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


class TestTrainable:
    RULE = Adaptive(0.3, block_size=16, dense_below=0)

    def test_gates_learn_with_the_model(self, tmp_path):
        """By transformers' Trainer: gates are parameters of the model, in its optimiser and its checkpoint."""
        pytest.importorskip("accelerate")
        model, ids = adaptive("llama", self.RULE, layers={0: None}).float(), tokens(4, SEQ)
        modules = trainable(model, gate_strength=1.0)
        assert list(modules) == ["model.layers.1.self_attn", "model.layers.2.self_attn"]
        model.config.use_cache = False
        before = copy.deepcopy(model.state_dict())
        arguments = transformers.TrainingArguments(
            tmp_path, max_steps=2, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[], save_strategy="no",
            disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        rows = [{"input_ids": row, "labels": row} for row in ids]
        transformers.Trainer(model, arguments, train_dataset=rows).train()
        after = model.state_dict()
        gates = [name for name in before if "row_weight" in name or "column_weight" in name]
        assert len(gates) == 4
        assert not any(after[name].equal(before[name]) for name in gates)

    def test_a_gate_that_learned_nothing_is_the_scorer_it_began_as(self):
        model, ids = adaptive("llama", self.RULE), tokens(seq=SEQ)
        want = outputs(model, ids), generated(model, ids, 6)
        trainable(model, gate_strength=0.0)
        torch.testing.assert_close(outputs(model, ids), want[0], rtol=1e-9, atol=1e-9)
        assert generated(model, ids, 6).equal(want[1])

    @pytest.mark.parametrize("opened", [False, True])
    def test_a_gate_learns_where_nothing_is_left_out(self, opened):
        model, ids = adaptive("llama", self.RULE if opened else Adaptive(0.3, dense_below=SEQ)), tokens(seq=SEQ)
        modules = trainable(model, gate_strength=1.0)
        if opened:
            SparsitySchedule(model, steps=1)
        model(ids, labels=ids, use_cache=False).loss.backward()
        assert all(weight.grad.abs().sum() > 0 for module in modules.values() for weight in module.parameters())

    def test_summaries_are_of_the_gates(self, monkeypatch):
        """Those beside a cache are what all keys would give."""
        from dilated_attention_pytorch.integrations import huggingface

        model, ids = adaptive("llama", self.RULE), tokens(seq=SEQ)
        for module in trainable(model, gate_strength=0.0).values():
            for weight in module.parameters():
                torch.nn.init.normal_(weight, std=0.5)
        got = generated(model, ids, 8)
        monkeypatch.setattr(huggingface, "with_summaries", lambda mask, *_: mask)
        assert got.equal(generated(model, ids, 8))

    def test_a_schedule_opens_registered_models(self):
        model, ids = adaptive("llama", self.RULE), tokens(seq=150)
        sparse = outputs(model, ids)
        trainable(model)
        schedule = SparsitySchedule(model, steps=2)
        torch.testing.assert_close(outputs(model, ids), outputs(with_full("llama"), ids), rtol=1e-9, atol=1e-9)
        schedule.step()
        half = outputs(model, ids)
        schedule.step()
        assert outputs(model, ids).equal(sparse)
        assert not torch.allclose(half, sparse)

    def test_refused(self):
        model = with_full("llama")
        with pytest.raises(ValueError, match="by a registered Adaptive, and 'full' names patterns"):
            trainable(model)
        with pytest.raises(ValueError, match="model must have a registered name, got 'eager'"):
            trainable(build("llama"))
        model, ids = adaptive("llama", self.RULE), tokens(seq=SEQ)
        trainable(model, gate_strength=0.5)
        with pytest.raises(ValueError, match=r"gate_strength=0.5 cannot be honoured with a cache"):
            generated(model, ids, 3)


def test_a_calibrated_file(tmp_path):
    rule = {"share": 0.3, "scorer": "MeanPooled(queries=2, keys=2)", "block_size": [16, 16], "dense_below": {"cpu": 0}}
    path = tmp_path / "adaptive.json"
    path.write_text(json.dumps({"rule": rule, "layers": {"0": {"share": 0.6}, "2": {"share": 0.2}}, "about": {}}))
    made = Adaptive(0.3, MeanPooled(2, 2), (16, 16), dense_below=0)
    ids = tokens(seq=SEQ)
    want = outputs(adaptive("llama", made, layers={0: replace(made, share=0.6), 2: replace(made, share=0.2)}), ids)
    assert outputs(adaptive("llama", path), ids).equal(want)
    want = outputs(adaptive("llama", made, layers={0: None, 2: replace(made, share=0.2)}), ids)
    assert outputs(adaptive("llama", str(path), layers={0: None}), ids).equal(want)
    path.write_text(json.dumps({"rule": rule | {"shares": 1}, "layers": {}}))
    with pytest.raises(ValueError, match=r"must be a file of `dilated-attention calibrate`: TypeError.*shares"):
        register("adaptive", path)


class TestRefused:
    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({}, ValueError, "give share or a selector, got None and None"),
            ({"share": 0.5, "selector": TopK(0.5)}, ValueError, "give share or a selector, got 0.5 and TopK"),
            ({"share": 1.5}, ValueError, r"share must be the share of .*, in \(0, 1\], got 1.5"),
            ({"share": "half"}, TypeError, "share must be a number"),
            ({"selector": SharedBudget(0.5)}, TypeError, r"selector must be TopK\(share\).*, got SharedBudget"),
            ({"share": 0.5, "scorer": "pages"}, ValueError, "scorer must be one of"),
            ({"share": 0.5, "step_scorer": "pages"}, ValueError, "step_scorer must be one of"),
            ({"share": 0.5, "block_size": 17}, ValueError, "block_size must be"),
            ({"share": 0.5, "sink": -1}, ValueError, "sink must be at least 0, got -1"),
            ({"share": 0.5, "local": 1.5}, TypeError, "local must be an int, got 1.5"),
            ({"share": 0.5, "per_kv_head": 1}, TypeError, "per_kv_head must be True or False, got 1"),
            ({"share": 0.5, "dense_below": -1}, ValueError, "dense_below must be at least 0, got -1"),
        ],
    )
    def test_rules(self, arguments, error, message):
        with pytest.raises(error, match=message):
            Adaptive(**arguments)

    def test_what_is_no_rule(self):
        with pytest.raises(TypeError, match="pattern must be a Pattern or an Adaptive, got float"):
            register("adaptive", 0.25)
        with pytest.raises(TypeError, match="pattern must be a Pattern or an Adaptive, got BlockSparseAdaptive"):
            register("adaptive", Adaptive(0.5), layers={0: BlockSparseAdaptive(0.5)})

    def test_dropout_with_a_cache(self):
        model, ids = adaptive("llama", SPARSE, attention_dropout=0.2), tokens(seq=SEQ)
        past = DynamicCache()
        model.train()
        with torch.no_grad():
            outputs(model, ids[:, :50], past_key_values=past)
            with pytest.raises(ValueError, match=r"dropout must be 0 with a cache, got 0\.2"):
                outputs(model, ids[:, 50:], past_key_values=past)


def test_equal_rules_are_one_value():
    rule = Adaptive(0.25, scorer="minmax", block_size=[64, 16])
    assert rule == Adaptive(0.25, scorer="minmax", block_size=(64, 16))
    assert value_of(rule.text) == rule
