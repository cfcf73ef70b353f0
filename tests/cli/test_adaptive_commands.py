"""`tasks` and `calibrate`, on a model that is made here."""

import json
import random
import re
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from dilated_attention_pytorch import Adaptive, Full
from dilated_attention_pytorch.cli import models, tasks
from dilated_attention_pytorch.cli.models import Found
from dilated_attention_pytorch.cli.rules import Fixed, Registered, in_model
from dilated_attention_pytorch.integrations.hf_models import Calls
from dilated_attention_pytorch.nn.adaptive_rule import load_adaptive
from tests.cli.commands import run
from tests.cli.tiny import WORDS, huggingface_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return huggingface_folder(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "words.txt"
    path.write_text(WORDS * 2)
    return path


class Words:
    """A tokenizer of words, for the texts alone."""

    def encode(self, text):
        return text.split()


@pytest.mark.parametrize("seed", range(5))
def test_what_is_asked_is_in_the_text(seed):
    """Each answer stands once behind its words, or two set-tos before; the text is as long as it was asked for."""
    text = tasks.drawn_text(Words(), 700, seed)
    assert 690 < len(text.text.split()) <= 700
    for name in tasks.TASKS:
        own = [question for question in text.questions if question.task == name]
        assert len(own) == 5
        for question in own:
            assert 0 <= question.depth < 1
            if name == "trace":
                last = question.prompt.split()[-2]
                (first,) = re.findall(rf"Set {last} to the value of (\w+)\.", text.text)
                (number,) = re.findall(rf"Set {first} to (\d+)\.", text.text)
                assert question.answer == f" {number}"
            elif name == "recall":
                key = question.prompt.rsplit("; ", 1)[1]
                assert text.text.count(f"{key}{question.answer}") == 1
            else:
                key = question.prompt.rsplit(". ", 1)[-1]
                assert text.text.count(f"{key}{question.answer}") == 1
    assert tasks.drawn_text(Words(), 700, seed) == text
    assert tasks.drawn_text(Words(), 700, seed + 1) != text


def test_a_text_that_is_too_short_is_an_error():
    with pytest.raises(ValueError, match=r"--tokens must be at least \d+ for these tasks, got 50"):
        tasks.drawn_text(Words(), 50, 0)


@pytest.mark.parametrize(
    "rule",
    [None, Fixed("full", Full()), Registered("sparse", Adaptive(0.4, block_size=16, dense_below=0))],
    ids=["dense", "full", "sparse"],
)
def test_answers_are_what_the_model_writes_itself(folder, rule):
    """Right for what greedy generation gives, token by token over the cache, and wrong for anything else."""
    found = Found.named(str(folder))
    model, tokenizer = found.load(), found.tokenizer()
    draw = random.Random(0)
    start = "".join(draw.choice(WORDS) for _ in range(300))
    compared = 0
    for prompt in "abcdefghijklmnopqrstuvwxyz":
        own = continued(model, tokenizer, start, prompt, rule)
        if own is None:  # its text has other tokens
            continue
        compared += 1
        for answer, right in ((own, True), (f"{own[0]}~", False)):
            text = tasks.Text(start, (tasks.Question("needle", prompt, answer, 0.0),))
            assert tasks.answered(model, tokenizer, text, rule) == [right]
    assert compared > 2


def continued(model, tokenizer, start, prompt, rule):
    """Two tokens that the model writes behind a text that it has read and a question."""
    with nullcontext() if rule is None else in_model(model, rule), torch.no_grad():
        cache = model(tokenizer(start, return_tensors="pt").input_ids, use_cache=True).past_key_values
        ids, new = tokenizer(prompt, return_tensors="pt").input_ids, []
        for _ in range(2):
            ids = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
            new.append(int(ids))
    text = tokenizer.decode(new)
    return text if tokenizer(prompt + text).input_ids == tokenizer(prompt).input_ids + new else None


def test_a_table_of_answers(folder, tmp_path, text):
    path = tmp_path / "adaptive.json"
    calibrated = [
        "calibrate",
        str(text),
        "--model",
        str(folder),
        "--tokens",
        "128",
        "--longest",
        "512",
        "--out",
        str(path),
    ]
    code, out, err = run(*calibrated, "--keep", "0.5", "--json")
    assert code == 0, err
    found = json.loads(out)
    rule, layers = load_adaptive(path)
    assert rule.share == 0.5
    assert set(layers) == {0, 1}
    assert len(found["about"]["candidates"]) == 5
    assert all(0 < each["kept_mass"] <= 1.00001 for each in found["about"]["candidates"])
    mean = sum(each.share for each in layers.values()) / 2
    assert mean <= 0.55
    asked = ["tasks", "--model", str(folder), "--rule", str(path), "--task", "needle", "--task", "copy"]
    code, out, err = run(*asked, "--tokens", "900", "--texts", "1", "--json")
    assert code == 0, err
    rows = json.loads(out)["rows"]
    assert [row["attention"] for row in rows] == ["dense", "adaptive.json"]
    assert all(row["tasks"][name]["asked"] == 5 for row in rows for name in ("needle", "copy"))
    assert "one standard error is up to 22% of 5 answers" in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("tasks", "--task", "poem"), "--task must be one of needle, keys, recall, copy, trace, got 'poem'"),
        (("tasks", "--tokens", "20", "--texts", "1"), "--tokens must be at least"),
        (("tasks", "--rule", "no.json"), "a file of one that exists, got 'no.json'"),
        (("calibrate", "no.txt"), "TEXT must be a file, got no.txt"),
        (("calibrate", "TEXT", "--keep", "1.5"), r"--keep must be the share of the causal blocks .*, got 1.5"),
        (("calibrate", "TEXT", "--tokens", "100000"), "tokens must be at most"),
    ],
)
def test_bad_arguments(argv, message, folder, text):
    argv = [str(text) if word == "TEXT" else word for word in argv]
    code, _, err = run(*argv, "--model", str(folder))
    assert code == 1
    assert err.startswith("error: ")
    assert re.search(message, err)


def test_the_example_runs_on_a_model_with_as_many_layers(tmp_path, monkeypatch, capsys):
    """`make test-model` runs it on SmolLM2 itself."""
    found = Found.named(str(huggingface_folder(tmp_path / "llama", num_hidden_layers=30)))
    monkeypatch.setattr(models, "load_model", lambda: (found.load(), found.tokenizer()))
    text = tmp_path / "text.txt"
    text.write_text(WORDS[:300])
    monkeypatch.setattr(sys, "argv", ["adaptive_generate.py", str(text)])
    before = Calls.count
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "adaptive_generate.py"))
    assert capsys.readouterr().out.strip()
    assert Calls.count == before + 30 * 32  # every layer of the prompt and of 31 more tokens
