"""`CallOptions`: what a call of attention brings besides q, k, v and the rule of who may attend.

The one bundle that travels from the public call through the registered operator and the ring to the kernels. A new
option is a field here, a keyword in `OptionKeywords`, its check in `ops/checks.py`, and the code that computes it;
operators, saved tensors and requests follow from the fields.

`Bias` is what is added to scores, in the one form that backends know: `ops.bias.ScoreBias` is what users write.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor


class OptionKeywords(TypedDict, total=False):
    """The options as a user writes them; `block_sparse_attention` says what each one means."""

    scale: float | None
    key_padding_mask: Tensor | None
    document_ids: Tensor | None
    dropout_p: float
    softcap: float | None
    alibi_slopes: Tensor | None
    bias: Any  # an `ops.ScoreBias` or None
    sinks: Tensor | None
    deterministic: bool | None


class Bias(NamedTuple):
    """What is added to scores once they are scaled and capped: the sum of what is given here.

    `slopes`, `table` and the terms are in the compute dtype. Where samples or heads share numbers, their dimension is
    1; slopes have all heads. A query at place i of the call stands at position i + seq_k − seq_q.

    Attributes:
        slopes: [batch or 1, heads, 1 or 2]; a score falls by a slope for each token between query and key. Of two, the
            first is for keys before the query and the second for those behind it.
        table: [batch or 1, heads or 1, size]; entry key_codes[key] − query_codes[query], or the nearest that there is.
        query_codes, key_codes: int32 [batch or 1, seq_q] and [batch or 1, seq_k].
        query_terms, key_terms: [batch or 1, heads or 1, seq_q] and [batch or 1, heads or 1, seq_k].
        dense: [batch or 1, heads or 1, seq_q, seq_k], of any floating dtype.
    """

    slopes: Tensor | None = None
    table: Tensor | None = None
    query_codes: Tensor | None = None
    key_codes: Tensor | None = None
    query_terms: Tensor | None = None
    key_terms: Tensor | None = None
    dense: Tensor | None = None

    @property
    def is_alibi(self) -> bool:
        """Whether it is a slope for each head and nothing else, which every kernel knows."""
        return self.slopes is not None and self.slopes.shape[::2] == (1, 1) and not any(self.given(*OTHERS))

    def given(self, *names: str) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def learned(self) -> dict[str, Tensor]:
        """What may get a gradient and asks for one."""
        if not torch.is_grad_enabled():
            return {}
        return {name: x for name, x in self.given(*LEARNED).items() if x.requires_grad}


# Tensors that have a gradient, and all but the slopes.
LEARNED = tuple(name for name in Bias._fields if not name.endswith("codes"))
OTHERS = Bias._fields[1:]


class CallOptions(NamedTuple):
    """The options of a call, checked: `ops.checks.check_options` makes them.

    Attributes:
        scale: multiplier of the scores.
        dropout_p: share of weights dropped.
        softcap: scores s become softcap · tanh(s / softcap); 0 leaves them as they are.
        key_padding_mask: bool [batch, seq_k], True where the key is padding, which no query sees.
        document_ids: int [batch, any], equal where tokens may see each other; keys are the first seq_k of them and
            queries the last seq_q: either all seq_k, or [keys, queries] with seq_k + seq_q of them.
        deterministic: gradients have the same bits each time. Where False, a kernel may add them up in any order.
        seed: int64, for `backends.dropout`; None without dropout.
        sinks: [heads], a score of each head that joins every row's softmax. Added to what a backend gives, by plain
            autograd: a backend never sees it.
        places: int64, with slopes in a part of a call over a ring alone: where its queries and keys stand in
            the whole, as `backends.dropout.places_of_blocks` makes it.
        bias: see `Bias`.
    """

    scale: float
    dropout_p: float = 0.0
    softcap: float = 0.0
    deterministic: bool = True
    key_padding_mask: Tensor | None = None
    document_ids: Tensor | None = None
    seed: Tensor | None = None
    sinks: Tensor | None = None
    places: Tensor | None = None
    bias: Bias | None = None

    @property
    def has_tensors(self) -> bool:
        """Whether two calls with equal numbers may still differ. Asked in every call: one comparison a field."""
        masked, drops = self.is_masked, self.seed is not None
        return masked or drops or self.bias is not None or self.sinks is not None

    @property
    def is_masked(self) -> bool:
        return self.key_padding_mask is not None or self.document_ids is not None

    @property
    def may_hide(self) -> bool:
        """Whether pairs that the layout allows may have no weight: a term of a bias may be −inf."""
        return self.is_masked or (self.bias is not None and not self.bias.is_alibi)

    @property
    def has_score_mods(self) -> bool:
        """Whether scores are more than scaled products."""
        return self.softcap > 0.0 or self.bias is not None

    def learned(self) -> dict[str, Tensor]:
        """Tensors of the bias that ask for a gradient."""
        return {} if self.bias is None else self.bias.learned()

    def flatten(self) -> tuple[list[Tensor], str, list[float]]:
        """The arguments of a registered operator: the tensors that are given, their names, and the numbers."""
        numbers: Any = self[: len(NUMBERS)]
        given = {name: getattr(self, name) for name in TENSORS if getattr(self, name) is not None}
        if self.bias is not None:
            given |= {f"{OF_BIAS}{name}": x for name, x in self.bias.given(*Bias._fields).items()}
        return [*given.values()], " ".join(given), [float(x) for x in numbers]

    @staticmethod
    def unflatten(tensors: list[Tensor], names: str, numbers: list[float]) -> CallOptions:
        given: dict[str, Any] = dict(zip(names.split(), tensors, strict=True))
        of_bias = {name.removeprefix(OF_BIAS): given.pop(name) for name in [*given] if name.startswith(OF_BIAS)}
        scale, dropout_p, softcap, deterministic = numbers
        bias = Bias(**of_bias) if of_bias else None
        return CallOptions(scale, dropout_p, softcap, bool(deterministic), **given, bias=bias)


# The fields: numbers, tensors, and the bias, whose tensors have names that begin so.
NUMBERS = ("scale", "dropout_p", "softcap", "deterministic")
TENSORS = tuple(name for name in CallOptions._fields[len(NUMBERS) :] if name != "bias")
OF_BIAS = "bias."
