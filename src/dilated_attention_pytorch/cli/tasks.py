"""`dilated-attention tasks`: what a model still finds in a long text when its attention is sparse.

A text is made of plain sentences among which facts are hidden, at places that are drawn, and the model is asked for
them: tasks in the style of RULER, made here, for models that were trained to continue text and no more.

| task | hidden in the text | asked |
|---|---|---|
| needle | facts of different kinds, each alone | the number of one |
| keys | many facts of one kind, for different keys | the number of one key |
| recall | a list of words with codes | the code of one word |
| copy | a passage of random words | how it goes on, after its first words |
| trace | variables that are set to each other | the number behind the last of a chain |

An answer counts if every token of it is the one that the model finds most likely: what it would write itself. The text
is read once, and every question goes on from there, over the model's cache.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from rich.console import Console

from .models import Found
from .output import Document, steps, table
from .rules import Rule, check_rules, in_model

TASKS = ("needle", "keys", "recall", "copy", "trace")
ANIMALS = "lion otter raven badger salmon tiger falcon hedgehog dolphin beaver camel sparrow lizard walrus rabbit goose"
THINGS = (
    "river garden bottle window ladder candle basket mirror hammer pillow blanket bridge lantern anchor barrel drum"
)
PEOPLE = "teacher farmer sailor painter doctor baker singer judge miner tailor pilot guard poet nurse clerk weaver"
DEEDS = (
    "paints moves finds watches carries cleans sells hides repairs borrows weighs counts buries lifts sketches keeps"
)
KINDS = "old small green heavy quiet broken golden narrow warm empty famous plain round wooden distant simple"
FACTS = (
    "The secret code of the museum is",
    "The phone number of the harbour office is",
    "The price of the blue piano in coins is",
    "The number of steps to the lighthouse is",
    "The weight of the iron bell in grams is",
)


@dataclass(frozen=True)
class Question:
    """What is written behind a text, and how it must go on. `depth` is where in the text the answer lies, 0 to 1."""

    task: str
    prompt: str
    answer: str
    depth: float


@dataclass(frozen=True)
class Text:
    text: str
    questions: tuple[Question, ...]


def drawn_text(tokenizer: Any, tokens: int, seed: int, *, each: int = 5, names: Iterable[str] = TASKS) -> Text:
    """A text of about so many tokens (never more) with material for all tasks, and `each` questions of every task."""
    draw = random.Random(seed)
    hidden: list[tuple[str, list[tuple[str, str, str]]]] = []  # sentences, and (task, prompt, answer) of each
    for name in names:
        hidden += MAKERS[name](draw, each)
    fixed = sum(len(tokenizer.encode(f"{piece}\n")) for piece, _ in hidden)
    if fixed > tokens:
        raise ValueError(f"--tokens must be at least {fixed} for these tasks, got {tokens}")
    filler: list[str] = []
    while True:
        sentence = _sentence(draw)
        fixed += len(tokenizer.encode(f"{sentence}\n"))
        if fixed > tokens:
            break
        filler.append(sentence)
    places = sorted(draw.sample(range(len(filler) + len(hidden)), len(hidden)))
    draw.shuffle(hidden)
    lines, questions = [], []
    sentences, pieces = iter(filler), iter(hidden)
    for line in range(len(filler) + len(hidden)):
        if line not in places:
            lines.append(next(sentences))
            continue
        piece, asked = next(pieces)
        depth = line / (len(filler) + len(hidden))
        lines.append(piece)
        questions += [Question(*question, depth) for question in asked]
    chosen = [q for name in names for q in _some(draw, [q for q in questions if q.task == name], each)]
    return Text("\n".join(lines) + "\n", tuple(chosen))


def _some(draw: random.Random, questions: list[Question], each: int) -> list[Question]:
    return draw.sample(questions, min(each, len(questions)))


def _sentence(draw: random.Random) -> str:
    who, deed, kind, thing = (draw.choice(words.split()) for words in (PEOPLE, DEEDS, KINDS, THINGS))
    return f"The {who} {deed} the {kind} {thing}."


def _number(draw: random.Random) -> str:
    return str(draw.randrange(1000, 10000))


Hidden = list[tuple[str, list[tuple[str, str, str]]]]


def _needle(draw: random.Random, each: int) -> Hidden:
    facts = [(fact, _number(draw)) for fact in FACTS[:each]]
    return [(f"{fact} {number}.", [("needle", fact, f" {number}")]) for fact, number in facts]


def _keys(draw: random.Random, each: int) -> Hidden:
    """Each question has a solved example of another key before it."""
    facts = [(f"The lucky number of the {key} is", _number(draw)) for key in draw.sample(ANIMALS.split(), each + 1)]
    solved = f"{facts[0][0]} {facts[0][1]}."
    hidden: Hidden = [(solved, [])]
    for fact, number in facts[1:]:
        hidden.append((f"{fact} {number}.", [("keys", f"{solved} {fact}", f" {number}")]))
    return hidden


def _recall(draw: random.Random, each: int) -> Hidden:
    pairs = [(thing, _number(draw)) for thing in draw.sample(THINGS.split(), each + 3)]
    listed = "; ".join(f"{thing} = {number}" for thing, number in pairs)
    start = f"Stock list: {pairs[0][0]} = {pairs[0][1]};"
    asked = [("recall", f"{start} {thing} =", f" {number}") for thing, number in pairs[1:]]
    return [(f"Stock list: {listed}.", asked)]


def _copy(draw: random.Random, each: int) -> Hidden:
    passages: Hidden = []
    for number in range(1, each + 1):
        words = [draw.choice(f"{ANIMALS} {THINGS} {KINDS}".split()) for _ in range(12)]
        start, rest = f"Song {number}: {' '.join(words[:6])}", f" {' '.join(words[6:9])}"
        passages.append((f"Song {number}: {' '.join(words)}.", [("copy", start, rest)]))
    return passages


def _trace(draw: random.Random, each: int) -> Hidden:
    """Each question has two solved examples of other chains before it."""
    chains = []
    letters = draw.sample([a + b for a in "ABCDEFGHKLMNPRSTUVWXYZ" for b in "ABCDEFGHKLMNPRSTUVWXYZ"], 2 * (each + 2))
    for first, second in zip(letters[::2], letters[1::2], strict=True):
        chains.append((first, second, _number(draw)))
    solved = " ".join(f"The value of {second} is {number}." for _, second, number in chains[:2])
    hidden: Hidden = []
    for i, (first, second, number) in enumerate(chains):
        asked = [("trace", f"{solved} The value of {second} is", f" {number}")] if i >= 2 else []
        hidden += [(f"Set {first} to {number}.", []), (f"Set {second} to the value of {first}.", asked)]
    return hidden


MAKERS = {"needle": _needle, "keys": _keys, "recall": _recall, "copy": _copy, "trace": _trace}


@torch.no_grad()
def answered(model: Any, tokenizer: Any, text: Text, rule: Rule | None) -> list[bool]:
    """Of each question, whether the model under a rule gives the answer itself."""
    device = next(model.parameters()).device
    start = tokenizer(text.text, return_tensors="pt").input_ids.to(device)
    right = []
    with nullcontext() if rule is None else in_model(model, rule):
        cache = model(start, use_cache=True, logits_to_keep=1).past_key_values
        for question in text.questions:
            # The tokens of the whole: those of the parts may be others.
            prompt = tokenizer(question.prompt, add_special_tokens=False).input_ids
            whole = tokenizer(question.prompt + question.answer, add_special_tokens=False).input_ids
            given = torch.tensor([whole], device=device)
            logits = model(given, past_key_values=cache, use_cache=True).logits[0]
            own = logits[len(prompt) - 1 : -1].argmax(-1)
            right.append(own.tolist() == whole[len(prompt) :])
            cache.crop(-len(whole))
    return right


def run(
    console: Console,
    *,
    tokens: Sequence[int],
    texts: int,
    names: Sequence[str],
    model: str | None,
    rules: Sequence[Rule],
    device: str,
    seed: int = 0,
) -> Document:
    """Accuracy of every rule on every task, by length."""
    for name in names:
        if name not in TASKS:
            raise ValueError(f"--task must be one of {', '.join(TASKS)}, got {name!r}")
    found = Found.named(model)
    check_rules(rules, found)
    if found.is_longnet:
        raise ValueError(f"tasks are asked over a cache of transformers, which {found.name}, a LongNet, does not have")
    tokenizer, network = found.tokenizer(), found.load(device)
    rows: list[Document] = []
    every = (None, *rules)
    with steps(console, len(tokens) * texts * len(every)) as announce:
        for length in tokens:
            drawn = [drawn_text(tokenizer, length, seed + i, names=names) for i in range(texts)]
            for rule in every:
                name = "dense" if rule is None else rule.name
                answers: list[tuple[Question, bool]] = []
                for number, text in enumerate(drawn):
                    announce(f"{length} tokens, text {number + 1}: {name}")
                    answers += zip(text.questions, answered(network, tokenizer, text, rule), strict=True)
                rows.append({"tokens": length, "attention": name, "tasks": by_task(answers, names)})
    print_rows(console, rows, names, f"Answers of {found.name}: right, of all")
    return {"model": found.name, "texts": texts, "seed": seed, "rows": rows}


def by_task(answers: Sequence[tuple[Question, bool]], names: Sequence[str]) -> Document:
    """Right answers, all, and the depths of those that were wrong."""
    made = {}
    for name in names:
        own = [(question, right) for question, right in answers if question.task == name]
        wrong = sorted(round(question.depth, 2) for question, right in own if not right)
        made[name] = {"right": sum(right for _, right in own), "asked": len(own), "wrong_at": wrong}
    return made


def noise(share: float, asked: int) -> float:
    """The standard error of a share of so many answers."""
    return sqrt(max(share * (1 - share), 0.25 / asked) / asked)


def print_rows(console: Console, rows: Sequence[Document], names: Sequence[str], title: str) -> None:
    made = table("tokens", "attention", right=tuple(names), title=title)
    for row in rows:
        cells = (f"{row['tasks'][name]['right']} / {row['tasks'][name]['asked']}" for name in names)
        made.add_row(str(row["tokens"]), row["attention"], *cells)
    console.print(made)
    asked = max((each["asked"] for row in rows for each in row["tasks"].values()), default=1)
    console.print(f"Noise: one standard error is up to {noise(0.5, asked):.0%} of {asked} answers.", markup=False)
