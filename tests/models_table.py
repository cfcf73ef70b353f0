"""What becomes of a pattern in every model class of transformers: honoured exactly, or refused by a sentence.

`make models-table` writes docs/huggingface_models.md, and fails if a class is neither. The oracle is a registered
attention of its own: dense, with the model's own mask as transformers makes it for SDPA.
"""

import sys
import traceback
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from dilated_attention_pytorch import GlobalTokens, SlidingWindow
from dilated_attention_pytorch.integrations.huggingface import register, verify
from tests import tiny_models

SPARSE = SlidingWindow(3, 2) | GlobalTokens(1)
ORACLE, OURS = "dense_oracle", "sparse"


class Oracle:
    """Dense attention over what the model allows, and, with `sparse`, what SPARSE allows of it."""

    sparse = False

    @staticmethod
    def mask(*args: Any, **kwargs: Any) -> Tensor:
        return masking_utils.sdpa_mask(
            *args, **kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        )

    @classmethod
    def attend(
        cls, module, query, key, value, attention_mask, dropout=0.0, scaling=None, softcap=None, s_aux=None, **_
    ):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attention_mask, -torch.inf)
        elif attention_mask is not None:
            scores = scores + attention_mask
        if cls.sparse:
            places = torch.arange(key.shape[2], device=key.device)
            back = places[-query.shape[2] :, None] - places
            scores = scores.masked_fill(~((back <= 3) & (back >= -2) | (places == 0)), -torch.inf)
        if s_aux is not None:
            scores = torch.cat((scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
        weights = scores.softmax(-1)[..., : key.shape[2]].nan_to_num(0.0)
        return (weights.to(value.dtype) @ value).transpose(1, 2).contiguous(), None


class Outcome(NamedTuple):
    status: str  # "honoured", "refused", "no attention", "not built", "no inputs"
    note: str


def outcome(kind: str, name: str) -> Outcome:
    AttentionInterface.register(ORACLE, Oracle.attend)
    AttentionMaskInterface.register(ORACLE, Oracle.mask)
    register(OURS, SPARSE)
    try:
        model = build(kind, name, OURS)
    except Exception as error:
        if is_ours(error):
            return Outcome("refused", str(error))
        return Outcome("not built", f"{type(error).__name__}: {error}")
    oracle = build(kind, name, ORACLE)
    Oracle.sparse = False
    errors = []
    for inputs in tiny_models.inputs(oracle):
        try:
            dense = run(oracle, inputs)
            break
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    else:
        return Outcome("no inputs", errors[0] if errors else "")
    try:
        ours = run(model, inputs)
    except Exception as error:
        if is_ours(error):
            return Outcome("refused", str(error))
        raise
    Oracle.sparse = True
    sparse = run(oracle, inputs)
    if far(ours, sparse) > 1e-5:
        return Outcome("WRONG", f"{far(ours, sparse)}")
    if not far(dense, sparse) > 1e-4:
        return Outcome("SILENT" if any("Attention" in type(m).__name__ for m in model.modules()) else "no attention", f"{far(dense, sparse)}")
    try:
        verify(model, inputs)
    except ValueError as error:
        return Outcome("partly", str(error))
    return Outcome("honoured", ", ".join(inputs))


def build(kind: str, name: str, attention: str) -> Any:
    config = tiny_models.configuration(kind)
    config._attn_implementation, config._experts_implementation = attention, "eager"
    with torch.device("meta"):
        size = sum(x.numel() for x in tiny_models.model_class(name)(config).parameters())
    if size > 3e7:
        raise NotImplementedError(f"its smallest known configuration has {size} parameters")
    torch.manual_seed(0)
    model = tiny_models.model_class(name)(config).double().eval()
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():  # the usual start is so near 0 that attention hardly matters
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=random, dtype=torch.float64) * 0.3)
    return model


@torch.no_grad()
def run(model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(0)
    found: list[Tensor] = []

    def collect(x: Any) -> None:
        if isinstance(x, Tensor) and x.is_floating_point():
            found.append(x)
        elif isinstance(x, dict):
            for value in x.values():
                collect(value)
        elif isinstance(x, list | tuple):
            for value in x:
                collect(value)

    collect(model(**inputs))
    return found


def far(one: list[Tensor], other: list[Tensor]) -> float:
    """The largest difference, relative to the largest value of its tensor."""
    return max(
        ((a - b).abs().max() / b.abs().max().clamp(min=1e-9)).nan_to_num(torch.inf).item()
        for a, b in zip(one, other, strict=True)
    )


def is_ours(error: Exception) -> bool:
    return isinstance(error, ValueError) and "dilated_attention_pytorch" in traceback.extract_tb(error.__traceback__)[-1].filename


def main() -> None:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    import pickle, time, collections, warnings
    warnings.simplefilter("ignore")
    res = {}
    for kind, names in tiny_models.classes().items():
        if len(sys.argv) > 1 and kind not in sys.argv[1:]:
            continue
        for name in names[:1]:
            t = time.time()
            try:
                res[kind, name] = outcome(kind, name)
            except Exception as error:
                tb = traceback.extract_tb(error.__traceback__)[-1]
                res[kind, name] = Outcome("ERROR", f"{type(error).__name__}: {error} {tb.filename}:{tb.lineno}")
            print(kind, name, round(time.time() - t, 1), res[kind, name].status, res[kind, name].note[:300].replace("\n", " "), flush=True)
    print(collections.Counter(v.status for v in res.values()))
    if len(sys.argv) == 1:
        pickle.dump(res, open("/tmp/zoo/table.pkl", "wb"))


if __name__ == "__main__":
    main()
