"""`generate`, `perplexity` and `fidelity`, on models that are made here."""

import json
import math
import shutil

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from dilated_attention_pytorch import Causal, LongNetConfig, LongNetLM, SlidingWindow, kept_mass
from dilated_attention_pytorch.cli import models, rules, train
from dilated_attention_pytorch.cli.models import Found
from dilated_attention_pytorch.integrations.huggingface import register
from dilated_attention_pytorch.nn import Adaptive
from tests.cli.commands import run
from tests.cli.tiny import WORDS, huggingface_folder, longnet_run

TOKENS = 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return huggingface_folder(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def longnet(tmp_path_factory):
    return longnet_run(tmp_path_factory.mktemp("models") / "run")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "words.txt"
    path.write_text(WORDS)
    return path


def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


class TestGenerate:
    @pytest.mark.parametrize("source", [train.CHECKPOINT, train.MODEL, ""])
    def test_a_longnet_writes_what_its_model_draws(self, longnet, source):
        options = "--max-tokens 40 --temperature 0.7 --top-k 50 --top-p 0.9 --seed 3 --device cpu"
        code, out, err = run("generate", str(longnet / source), "--prompt", "The é", *options.split())
        assert code == 0, err
        model = LongNetLM.load(longnet / train.MODEL).eval()
        draw = torch.Generator().manual_seed(3)
        prompt = torch.tensor([list("The é".encode())])
        want = model.generate(prompt, 40, temperature=0.7, top_k=50, top_p=0.9, generator=draw)
        assert out == bytes(want[0].tolist()).decode("utf-8", errors="replace") + "\n"
        assert err.startswith("40 tokens, ")
        assert err.endswith(" a second; seed 3\n")

    @pytest.mark.parametrize("pattern", [None, "window:4", "window:2 | global:1", "full ; window:3 ; full ; window:1"])
    def test_a_model_of_transformers_writes_what_it_generates(self, folder, pattern):
        options = ["--max-tokens", "24", "--temperature", "0", "--no-echo", "--json"]
        options += [] if pattern is None else ["--pattern", pattern]
        code, out, err = run("generate", str(folder), "--prompt", "The quick brown fox jumps", *options)
        assert code == 0, err
        model, tokenizer = loaded(folder)
        if pattern is not None:
            register("test_generate", rules.Fixed.named(pattern).pattern)
            model.set_attn_implementation("test_generate")
        ids = tokenizer("The quick brown fox jumps", return_tensors="pt").input_ids
        want = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :].tolist()
        want = want[: want.index(0)] if 0 in want else want
        assert json.loads(out)["text"] == tokenizer.decode(want)
        assert json.loads(out)["tokens"] == len(want)
        assert json.loads(out)["seed"] is None
        said = {
            "window:4": "PatternCache(2 layers: 2 keep 0 first and 4 last tokens)",
            "window:2 | global:1": "PatternCache(2 layers: 2 keep 1 first and 2 last tokens)",
            "full ; window:3 ; full ; window:1": "the cache keeps all keys: the pattern ",
        }
        assert err.startswith(said.get(pattern, ""))
        assert ("cache" in err.lower()) == (pattern is not None)

    @pytest.mark.parametrize("how", ["scorer", "rule"])
    def test_blocks_that_are_chosen(self, folder, tmp_path, how):
        """As `register` has them, at any length; they matter."""
        prompt, rule = WORDS[:400], Adaptive(0.3, block_size=16, dense_below=0)
        options = ["--prompt", prompt, "--max-tokens", "12", "--temperature", "0", "--no-echo"]
        given = ["--scorer", "patches", "--keep", "0.3", "--block", "16x16"]
        if how == "rule":
            document = {"rule": {"share": 0.3, "block_size": 16}, "layers": {}}
            (tmp_path / "rule.json").write_text(json.dumps(document))
            given = ["--rule", str(tmp_path / "rule.json")]
        code, out, err = run("generate", str(folder), *options, *given)
        assert code == 0, err
        model, tokenizer = loaded(folder)
        register("test_generate_chosen", rule)
        model.set_attn_implementation("test_generate_chosen")
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        want = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
        want = want[: want.index(0)] if 0 in want else want
        assert out == tokenizer.decode(want) + "\n"
        assert run("generate", str(folder), *options)[1] != out

    def test_patterns_matter(self, folder):
        options = ["--prompt", "The quick brown fox jumps", "--temperature", "0", "--max-tokens", "24"]
        texts = {run("generate", str(folder), *options, *more)[1] for more in ([], ["--pattern", "window:1"])}
        assert len(texts) == 2

    def test_it_ends_where_the_model_ends(self, tmp_path, folder):
        ending = shutil.copytree(folder, tmp_path / "ending")
        model, tokenizer = loaded(folder)
        ids = tokenizer("The quick", return_tensors="pt").input_ids
        first, second, third = model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None)[
            0, -3:
        ].tolist()
        assert third not in (first, second)
        config = json.loads((ending / "generation_config.json").read_text())
        (ending / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": [299, third]}))
        code, out, err = run("generate", str(ending), "--prompt", "The quick", "--temperature", "0", "--json")
        assert code == 0, err
        assert json.loads(out)["tokens"] == 2
        assert json.loads(out)["text"] == tokenizer.decode([*ids[0].tolist(), first, second])

    def test_without_a_seed_it_is_another_every_time_and_says_which(self, longnet):
        outs, seeds = set(), set()
        for _ in range(2):
            _, out, err = run("generate", str(longnet), "--max-tokens", "30")
            outs.add(out)
            seeds.add(err.split()[-1])
        assert (len(outs), len(seeds)) == (2, 2)
        _, out, _ = run("generate", str(longnet), "--max-tokens", "30", "--seed", err.split()[-1])
        assert out in outs

    def test_a_prompt_of_a_file_may_be_no_text(self, longnet, tmp_path):
        (tmp_path / "prompt").write_bytes(b"a\xffb\xe6\x97")
        options = ["--prompt-file", str(tmp_path / "prompt"), "--temperature", "0", "--max-tokens", "5"]
        code, out, err = run("generate", str(longnet), *options)
        assert code == 0, err
        model = LongNetLM.load(longnet / train.MODEL).eval()
        want = model.generate(torch.tensor([list(b"a\xffb\xe6\x97")]), 5, temperature=0.0)[0].tolist()
        assert out == bytes(want).decode("utf-8", errors="replace") + "\n"

    @pytest.mark.parametrize("is_terminal", [True, False])
    def test_a_terminal_gets_no_control_characters(self, longnet, monkeypatch, is_terminal):
        monkeypatch.setattr("rich.console.Console.is_terminal", is_terminal)
        drawn = iter([0x1B, 0x5B, 0x32, 0x4A, 0xC2, 0x9B, 0x0A])
        monkeypatch.setattr(LongNetLM, "stream", lambda *_, **__: (torch.tensor([[x]]) for x in drawn))
        _, out, _ = run("generate", str(longnet), "--prompt", "é")
        assert out == ("é\\x1b[2J\\x9b\n\n" if is_terminal else "é\x1b[2J\x9b\n\n")

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            (["--temperature", "-1"], "temperature must be at least 0 and finite, got -1.0"),
            (["--temperature", "0", "--seed", "3"], "--seed has no meaning with --temperature 0, got 3"),
            (["--temperature", "0", "--top-p", "0.5"], "top_p has no meaning with temperature 0"),
            (["--top-p", "0"], "top_p must be in (0, 1], got 0.0"),
            (["--top-k", "0"], "top_k must be at least 1, got 0"),
            (["--prompt", "a", "--prompt-file", "b"], "the prompt must be --prompt or --prompt-file, got both"),
            (["--prompt-file", "no file"], "--prompt-file must be a file, got no file"),
            (["--pattern", "windw:3"], "did you mean 'window'?"),
            (["--pattern", "window:3 ; full"], "the pattern is for 2 heads, and "),
            (["--pattern", "longnet"], "which is no pattern of a model of transformers"),
            (["--device", "gpu"], "device must be one that PyTorch knows"),
            (
                ["--pattern", "causal", "--scorer", "mean"],
                "must be one of --pattern, --scorer, --rule, got",
            ),
            (["--keep", "0.5"], "--keep is for --scorer, got 0.5 without one"),
            (["--scorer", "patchs"], "did you mean 'patches'?"),
            (["--rule", "no.json"], "no.json"),
        ],
        ids=str,
    )
    def test_bad_arguments_are_refused_before_anything_is_loaded(self, folder, monkeypatch, more, message):
        monkeypatch.setattr(Found, "load", None)
        code, out, err = run("generate", str(folder), *more)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert message in err

    def test_a_longnet_keeps_its_branches(self, longnet):
        code, _, err = run("generate", str(longnet), "--pattern", "window:3")
        assert code == 1
        assert "--pattern is for models of transformers" in err
        code, _, err = run("generate", str(longnet), "--scorer", "patches")
        assert code == 1
        assert "keeps 25 % of blocks 64 x 16 is for models of transformers, and" in err

    def test_more_tokens_than_positions_are_an_error(self, folder, monkeypatch):
        def too_far(*_, **__):
            raise IndexError

        monkeypatch.setattr("transformers.LlamaForCausalLM.forward", too_far)
        code, _, err = run("generate", str(folder), "--prompt", "a")
        assert (code, err.count("\n")) == (1, 1)
        assert "must fit the positions that the model has, 512" in err


class TestFound:
    @pytest.mark.parametrize("name", ["no/such-model", "no such folder", "/nowhere/at/all"])
    def test_what_is_not_here_is_not_downloaded(self, name):
        code, _, err = run("generate", name)
        assert (code, err.count("\n")) == (1, 1)
        assert f"or a name in the Hugging Face cache of this machine, got {name}" in err

    def test_a_name_in_the_hub_cache(self, folder, tmp_path, monkeypatch):
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        home = tmp_path / "models--someone--llama"
        (home / "refs").mkdir(parents=True)
        (home / "refs" / "main").write_text("a" * 40)
        shutil.copytree(folder, home / "snapshots" / ("a" * 40))
        found = Found.named("someone/llama")
        assert found.path == home / "snapshots" / ("a" * 40)
        assert found.load().config.hidden_size == 32

    def test_a_folder_of_something_else_is_named(self, tmp_path):
        code, _, err = run("generate", str(tmp_path))
        assert (code, err.count("\n")) == (1, 1)
        assert "must be a run of `train` or a folder with a config.json" in err

    def test_a_longnet_must_be_over_bytes(self, tmp_path):
        config = LongNetConfig(
            vocab_size=11, dim=8, num_layers=1, num_heads=2, segment_lengths=(8,), dilation_rates=(1,)
        )
        LongNetLM(config).save(tmp_path / "model.safetensors")
        code, _, err = run("generate", str(tmp_path))
        assert code == 1
        assert "a LongNet must be over bytes here, got one over 11 tokens" in err


def losses(model, ids):
    logits = model(ids)
    logits = logits if isinstance(logits, torch.Tensor) else logits.logits
    return cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").item()


class TestPerplexity:
    def rows(self, *argv):
        code, out, err = run("perplexity", *argv, "--tokens", str(TOKENS), "--json")
        assert code == 0, err
        found = json.loads(out)
        return found["texts"][0], found["texts"][0]["rows"]

    def test_patterns_and_choices_of_a_model_of_transformers(self, folder, text):
        many = ["--pattern", "window:8", "--pattern", "causal", "--scorer", "mean", "--keep", "1", "--keep", "0.5"]
        about, rows = self.rows(str(text), "--model", str(folder), *many, "--block", "16")
        model, tokenizer = loaded(folder)
        ids = tokenizer(WORDS, return_tensors="pt").input_ids[:, :TOKENS]
        dense = losses(model, ids)
        register("test_perplexity", SlidingWindow(8, 8) & Causal())
        model.set_attn_implementation("test_perplexity")
        window = losses(model, ids)
        length = len(tokenizer.decode(ids[0]).encode()) - len(tokenizer.decode(ids[0, :1]).encode())
        assert (about["predicted_tokens"], about["predicted_bytes"]) == (TOKENS - 1, length)
        names = ["dense", "window:8", "causal", *(f"mean, keeps {x} % of blocks 16 x 16" for x in (100, 50))]
        assert [row["attention"] for row in rows] == names
        for row, nats in zip(rows, (dense, window, dense, dense), strict=False):
            assert row["perplexity"] == pytest.approx(math.exp(nats / (TOKENS - 1)), rel=1e-4)
            assert row["bits_a_byte"] == pytest.approx(nats / math.log(2) / length, rel=1e-4)
            assert row["ratio"] == pytest.approx(math.exp((nats - dense) / (TOKENS - 1)), rel=1e-4)
        assert abs(window - dense) > 1e-2 * dense  # or nothing was seen
        pairs = TOKENS * (TOKENS + 1) / 2
        shares = [1.0, sum(min(i, 8) + 1 for i in range(TOKENS)) / pairs, 1.0, 1.0]
        assert [row["share_of_pairs"] for row in rows[:4]] == pytest.approx(shares)
        assert 0.5 < rows[4]["share_of_pairs"] < 0.8  # half, or what is forced
        assert abs(rows[4]["ratio"] - 1) > 1e-3

    def test_patterns_and_choices_of_a_longnet(self, longnet, text):
        many = ["--pattern", "longnet:8,32/1,2", "--pattern", "longnet:16/1", "--pattern", "causal"]
        about, rows = self.rows(str(text), "--model", str(longnet), *many, "--scorer", "exact", "--keep", "1")
        model = LongNetLM.load(longnet / train.MODEL).eval()
        ids = torch.tensor([list(WORDS.encode()[:TOKENS])])
        own = losses(model, ids)
        short = losses(LongNetLM.load(longnet / train.MODEL, segment_lengths=[16], dilation_rates=[1]).eval(), ids)
        whole = losses(LongNetLM.load(longnet / train.MODEL, segment_lengths=[96], dilation_rates=[1]).eval(), ids)
        assert about["predicted_bytes"] == TOKENS - 1
        assert rows[0]["attention"] == "as trained, longnet:8,32/1,2"
        assert len({own, short, whole}) == 3
        for row, nats in zip(rows, (own, own, short, whole, whole), strict=True):
            assert row["bits_a_byte"] == pytest.approx(nats / math.log(2) / (TOKENS - 1), rel=1e-4)
        assert rows[0]["share_of_pairs"] == rows[1]["share_of_pairs"] < 0.5
        assert [row["share_of_pairs"] for row in rows[3:]] == pytest.approx([1.0, 1.0])

    def test_what_a_study_cannot_honour_is_an_error(self, tmp_path, text):
        """A model's own window is honoured by a pattern; a choice of blocks would not know of it."""
        from transformers import MistralConfig, MistralForCausalLM

        folder = huggingface_folder(tmp_path / "mistral")
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = MistralConfig(vocab_size=300, num_key_value_heads=2, head_dim=8, sliding_window=16, **sizes)
        MistralForCausalLM(config).save_pretrained(folder)
        _, rows = self.rows(str(text), "--model", str(folder), "--pattern", "causal", "--pattern", "window:15")
        assert rows[1]["ratio"] == pytest.approx(1.0, rel=1e-4)
        assert rows[2]["ratio"] == pytest.approx(1.0, rel=1e-4)
        code, _, err = run("perplexity", str(text), "--model", str(folder), "--scorer", "mean", "--tokens", "64")
        assert code == 1
        assert "attention must be plain and causal here; layer 0 has a sliding_window" in err


class TestFidelity:
    def test_mass_of_a_pattern(self, folder, text, tmp_path):
        arguments = ("--model", str(folder), "--tokens", str(TOKENS), "--pattern", "window:8", "--out", str(tmp_path))
        code, out, err = run("fidelity", str(text), *arguments, "--json")
        assert code == 0, err
        found = json.loads(out)
        model, tokenizer = loaded(folder)
        ids = tokenizer(WORDS, return_tensors="pt").input_ids[:, :TOKENS]
        want = []

        def attend(layer, q, k, v, scale):
            want.append(kept_mass(q, k, SlidingWindow(8, 8), is_causal=True, scale=scale).mean((0, 2)))
            q, k, v = (x.repeat_interleave(4 // x.shape[2], 2).transpose(1, 2) for x in (q, k, v))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

        with models.attention_of(model, attend), torch.no_grad():
            model(ids, use_cache=False)
        torch.testing.assert_close(torch.tensor(found["by_head"]), torch.stack(want), rtol=1e-4, atol=1e-5)
        assert found["rule"] == "window:8"
        assert found["written"] == [str(tmp_path / "kept_mass.png")]
        assert (tmp_path / "kept_mass.png").stat().st_size > 1000

    def test_all_blocks_keep_all(self, folder, text, tmp_path):
        more = ["--scorer", "mean", "--keep", "1", "--block", "16", "--out", str(tmp_path)]
        code, out, _ = run("fidelity", str(text), "--model", str(folder), "--tokens", str(TOKENS), *more, "--json")
        assert code == 0
        assert json.loads(out)["kept_mass"] == pytest.approx(1.0)
        assert json.loads(out)["share_of_pairs"] == pytest.approx(1.0)


@pytest.mark.parametrize("command", ["fidelity", "perplexity"])
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--scorer", "patchs"], "got 'patchs'; did you mean 'patches'?"),
        (["--keep", "0"], "--keep must be the share of the causal blocks that is kept, in (0, 1], got 0.0"),
        (["--keep", "25"], "--keep must be the share of the causal blocks that is kept, in (0, 1], got 25.0"),
        (["--block", "64x"], "block size must be a number or two, as 64x16, got '64x'"),
        (["--block", "17"], "block_size must be one of"),
        (["--pattern", "widow:3"], "did you mean 'window'?"),
        (["--pattern", "window:3", "--keep", "0.5"], "--keep is a share for --scorer"),
        (["--pattern", "window:3 ; full"], "the pattern is for 2 heads"),
        (["--pattern", "longnet"], "which is no pattern of a model of transformers"),
        (["--tokens", "100000"], "tokens must be at most the "),
        (["--device", "gpu"], "device must be one that PyTorch knows"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_before_anything_is_loaded(folder, text, monkeypatch, command, more, message):
    monkeypatch.setattr(Found, "load", None)
    code, out, err = run(command, str(text), "--model", str(folder), *more)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert message in err


def test_bad_arguments_of_one_command(folder, longnet, text, monkeypatch):
    monkeypatch.setattr(Found, "load", None)
    for argv, message in (
        (("fidelity", str(text), "--model", str(longnet)), "fidelity is of dense attention, which"),
        (("fidelity", "no file", "--model", str(folder)), "TEXT must be a file, got no file"),
        (("perplexity", str(text), "no file", "--model", str(folder)), "TEXT must be a file, got no file"),
        (
            ("fidelity", str(text), "--model", str(folder), "--keep", "0.1", "--keep", "0.2"),
            "fidelity looks at one --pattern, or one --scorer and --keep, at a time, got 2",
        ),
    ):
        code, out, err = run(*argv)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert message in err
