"""What becomes of a pattern in every model class of transformers: honoured exactly, or refused by a sentence.

`make models-table` tries all classes, writes docs/huggingface_models.md, and fails if one is neither; that takes about
20 minutes. `python -m tests.models_table llama bert` tries those of two model types again. The oracle is a registered
attention of its own: dense, in float64, with the mask that transformers makes.
"""

import inspect
import re
import sys
import traceback
import warnings
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from dilated_attention_pytorch import GlobalTokens, SlidingWindow
from dilated_attention_pytorch.integrations import hf_models
from dilated_attention_pytorch.integrations.huggingface import register, verify
from tests import tiny_models

PAGE = Path(__file__).parent.parent / "docs" / "huggingface_models.md"
SPARSE = SlidingWindow(3, 2) | GlobalTokens(1)


class Outcome(NamedTuple):
    status: str  # a key of SECTIONS, or one of BAD
    note: str


SECTIONS = {
    "honoured": "Honoured exactly",
    "honoured in part": "Honoured exactly, but for modules that a warning names",
    "refused": "Refused",
    "no attention": "Without attention",
    "not tried": "Not tried",
}
BAD = ("wrong", "silent")
# By model type.
NOT_TRIED = {
    "rf_detr_dinov2": "its windows are so small here that the pattern leaves nothing out",
}


class Oracle:
    """Dense attention over what the model allows, and, if `sparse`, what SPARSE allows of it."""

    sparse = False
    crossed = False  # did a call have another sequence for its keys?

    @staticmethod
    def mask(*args: Any, **kwargs: Any) -> Tensor:
        """Never None, which transformers' own give where a flag of SDPA says the same."""
        skips = dict.fromkeys(("allow_is_causal_skip", "allow_is_bidirectional_skip"), False)
        return masking_utils.sdpa_mask(*args, **kwargs | skips)

    @classmethod
    def attend(
        cls, module, query, key, value, attention_mask, dropout=0.0, scaling=None, softcap=None, s_aux=None,
        position_bias=None, **_,
    ):  # fmt: skip
        cls.crossed |= is_crossing(sys._getframe(1))
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if position_bias is not None:
            scores = scores + position_bias
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attention_mask, -torch.inf)
        elif attention_mask is not None:
            scores = scores + attention_mask
        if cls.sparse:
            places = torch.arange(key.shape[2])
            back = places[-query.shape[2] :, None] - places
            scores = scores.masked_fill(~((back <= 3) & (back >= -2) | (places == 0)), -torch.inf)
        if s_aux is not None:
            scores = torch.cat((scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
        weights = scores.softmax(-1)[..., : key.shape[2]].nan_to_num(0.0)
        return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous(), None


def is_crossing(forward) -> bool:
    """Whether an attention module was called with a tensor of another sequence, as far as names say."""
    names = re.compile(r"(?!past_).*(key_value|encoder|cross|context|latent|memory)")
    parameters = forward.f_code.co_varnames[: forward.f_code.co_argcount + forward.f_code.co_kwonlyargcount]
    return any(names.match(name) and isinstance(forward.f_locals.get(name), Tensor) for name in parameters)


def outcome(kind: str, name: str) -> Outcome:
    if kind in NOT_TRIED:
        return Outcome("not tried", NOT_TRIED[kind])
    AttentionInterface.register("oracle", Oracle.attend)
    AttentionMaskInterface.register("oracle", Oracle.mask)
    register("sparse", SPARSE)
    hf_models.warned.clear()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = build(kind, name, "sparse")
    except Exception as error:  # noqa: BLE001 - transformers raises anything
        return refused(error) or Outcome("not tried", reason(error))
    oracle = build(kind, name, "oracle")
    inputs, error = inputs_of(oracle)
    if inputs is None:
        return Outcome("not tried", error)
    try:
        ours = run(model, inputs, sparse=True)
    except ValueError as error:
        sentence = refused(error)
        if sentence is None:
            raise
        return sentence
    Oracle.crossed = False
    want, dense = run(oracle, inputs, sparse=True), run(oracle, inputs, sparse=False)
    error, effect = far(ours, want), far(dense, want)
    shown = effect > 1e-12
    if Oracle.crossed or not error <= 1e-6 or (shown and error > 1e-3 * effect):
        return Outcome("wrong", f"{error=}, {effect=}, {Oracle.crossed=}")
    warned = [re.search(r"attend without the pattern: (.*)", str(warning.message)) for warning in caught]
    try:
        verify(model, inputs)
    except ValueError as error:
        if not shown and not any("Attention" in type(module).__name__ for module in model.modules()):
            return Outcome("no attention", "")
        return Outcome("honoured in part", warned[0][1]) if any(warned) else Outcome("silent", str(error))
    if not shown:
        return Outcome("not tried", "what it returns does not show its attention")
    bad, also = more(model, oracle, inputs)
    return Outcome("wrong", bad) if bad else Outcome("honoured", also)


def more(model: Any, oracle: Any, inputs: dict[str, Any]) -> tuple[str, str]:
    """What went wrong with padding and generating, and what went well."""
    if inputs.keys() != {"input_ids"} or "attention_mask" not in inspect.signature(model.forward).parameters:
        return "", ""
    tokens, kept, also = inputs["input_ids"], slice(0, 17), []
    mask = torch.ones_like(tokens)
    mask[1, kept.stop :] = 0
    try:
        want = run(oracle, inputs | {"attention_mask": mask}, sparse=True)[0]
    except Exception:  # noqa: BLE001 - transformers raises anything
        return "", ""
    ours = run(model, inputs | {"attention_mask": mask}, sparse=True)[0]
    if ours.shape[:2] == tokens.shape:
        if not far([ours[:1], ours[1:, kept]], [want[:1], want[1:, kept]]) <= 1e-6:
            return "padding", ""
        also.append("padding")
    if model.can_generate() and not model.config.is_encoder_decoder:
        said = generating(model)
        # Some models generate something else without a cache, or not at all: so does the oracle then.
        if said == "wrong" and generating(oracle) == "generating":
            return "generating", ""
        also += [said] * (said != "wrong")
    return "", ", ".join(also)


def generating(model: Any) -> str:
    """Whether a cache gives the tokens that computing again gives."""
    tokens = torch.randint(10, 90, (2, 24), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    Oracle.sparse = False
    try:
        cached, again = (model.generate(tokens, use_cache=use_cache, **options) for use_cache in (True, False))
    except Exception as error:  # noqa: BLE001 - transformers raises anything
        return "wrong" if refused(error) is None else "generating is refused"
    return "generating" if cached.equal(again) else "wrong"


def build(kind: str, name: str, attention: str) -> Any:
    model_class = getattr(transformers, name)
    config = tiny_models.configuration(kind, model_class)
    config._attn_implementation, config._experts_implementation = attention, "eager"
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(config).parameters())
    if size > 1.2e8:
        raise MemoryError("no small configuration of it is known")
    torch.manual_seed(0)
    model = model_class(config).double().eval()
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():  # the usual start is so near 0 that attention hardly matters
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=random, dtype=torch.float64) * 0.3)
    return model


def inputs_of(model: Any) -> tuple[dict[str, Any] | None, str]:
    """The first that it takes."""
    for inputs in tiny_models.inputs(model):
        try:
            run(model, inputs, sparse=False)
        except Exception:  # noqa: BLE001 - the next might be right
            continue
        return inputs, ""
    return None, "no inputs for it are known"


@torch.no_grad()
def run(model: Any, inputs: dict[str, Any], *, sparse: bool) -> list[Tensor]:
    """The numbers that it returns."""
    torch.manual_seed(0)
    Oracle.sparse = sparse
    return list(numbers(model(**inputs)))


def numbers(x: Any):
    if isinstance(x, Tensor) and x.is_floating_point():
        yield x
    elif isinstance(x, dict | list | tuple):
        for part in x.values() if isinstance(x, dict) else x:
            yield from numbers(part)


def far(ours: list[Tensor], want: list[Tensor]) -> float:
    """The largest difference, relative to the largest number of its tensor."""
    largest = 0.0
    for a, b in zip(ours, want, strict=True):
        if b.numel() and not torch.equal(a.isfinite(), b.isfinite()):
            return torch.inf
        a, b = (x[x.isfinite()] for x in (a, b))
        if b.numel():
            largest = max(largest, ((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item())
    return largest


def refused(error: Exception) -> Outcome | None:
    """If the error is the package's own. It must name a class, and a user sees no more of it."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    if not isinstance(error, ValueError) or "dilated_attention_pytorch" not in last:
        return None
    sentence = re.sub(r"\s+", " ", str(error).split("; parts of a model")[0]).replace(".<locals>", "")
    modules = [module for name, module in sys.modules.items() if name.startswith("transformers.models.")]
    words = re.findall(r"\b[A-Z]\w+", sentence)
    assert any(isinstance(vars(module).get(word), type) for module in modules for word in words), sentence
    return Outcome("refused", sentence)


def reason(error: Exception) -> str:
    needed = re.search(r"requires the (\w+) library", str(error))
    if needed:
        return f"needs {needed[1]}"
    return str(error) if isinstance(error, MemoryError) else "no small configuration of it is known"


def page(outcomes: dict[tuple[str, str], Outcome]) -> str:
    lines = [HEAD.format(transformers=transformers.__version__, count=len(outcomes)).strip()]
    for status, title in SECTIONS.items():
        chosen = sorted(
            (kind, result.note, name) for (kind, name), result in outcomes.items() if result.status == status
        )
        lines += ["", f"## {title}", "", f"{COLUMNS[status][0]} {len(chosen)} classes.", ""]
        lines += [f"| model type | classes | {COLUMNS[status][1]} |", "|---|---|---|"]
        for (kind, note), group in groupby(chosen, key=lambda row: row[:2]):
            lines.append(f"| {kind} | {', '.join(name for _, _, name in group)} | {note} |")
    return "\n".join(lines) + "\n"


HEAD = """
# Model classes of transformers

What becomes of a pattern in each of the {count} model classes that transformers {transformers} lists for its automatic
classes, small and with random weights. [How to use it](huggingface.md). `make models-table` makes this page.
"""
COLUMNS = {
    "honoured": (
        "Float64 outputs are those of dense attention with the pattern and the model's own mask; padding on the right, "
        "and generating with a cache, as said in the last column.",
        "tried as well",
    ),
    "honoured in part": ("As above, but these modules do not ask for registered attention.", "without the pattern"),
    "refused": ("The error comes when the model is given the name, or in its first forward.", "the error"),
    "no attention": ("There is nothing that a pattern could be in.", ""),
    "not tried": ("They need what is not installed with the tests, or inputs and configurations of their own.", "why"),
}


def read() -> dict[tuple[str, str], Outcome]:
    """What the page says."""
    found, status = {}, ""
    titles = {title: status for status, title in SECTIONS.items()}
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            status = titles[line[3:]]
        elif line.startswith("| ") and not line.startswith("| model type"):
            kind, names, note = (cell.strip() for cell in line.strip("|").split(" |", 2))
            found |= {(kind, name): Outcome(status, note) for name in names.split(", ")}
    return found


def main() -> None:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    classes = tiny_models.classes()
    outcomes = read() if sys.argv[1:] else {}
    for kind in sys.argv[1:] or classes:
        for name in classes[kind]:
            try:
                outcomes[kind, name] = outcome(kind, name)
            except Exception as error:  # noqa: BLE001 - transformers raises anything
                outcomes[kind, name] = Outcome("wrong", repr(error))
            print(kind, name, *outcomes[kind, name], flush=True)
    bad = {key: result for key, result in outcomes.items() if result.status in BAD}
    PAGE.write_text(page({key: result for key, result in outcomes.items() if key not in bad}))
    sys.exit("\n".join(f"{kind} {name}: {result}" for (kind, name), result in bad.items()))


if __name__ == "__main__":
    main()
