"""`CallOptions`: what a call of attention brings besides q, k, v and the rule of who may attend.

The one bundle that travels from the public call through the registered operator and the ring to the kernels. A new
option is a field here, a keyword in `OptionKeywords`, its check in `ops/checks.py`, and the code that computes it;
operators, saved tensors and requests follow from the fields.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypedDict

from torch import Tensor


class OptionKeywords(TypedDict, total=False):
    """The options as a user writes them; `block_sparse_attention` says what each one means."""

    scale: float | None
    key_padding_mask: Tensor | None
    document_ids: Tensor | None
    dropout_p: float
    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None


class CallOptions(NamedTuple):
    """The options of a call, checked: `ops.checks.check_options` makes them.

    Attributes:
        scale: multiplier of the scores.
        dropout_p: share of weights dropped.
        softcap: scores s become softcap · tanh(s / softcap); 0 leaves them as they are.
        key_padding_mask: bool [batch, seq_k], True where the key is padding and nobody sees it.
        document_ids: int [batch, any], equal where tokens may see each other; keys are the first seq_k of them and
            queries the last seq_q: either all seq_k, or [keys, queries] with seq_k + seq_q of them.
        seed: int64, for `backends.dropout`; None without dropout.
        alibi_slopes: [heads], in the compute dtype; then a score falls by the slope of its head for each token between
            query and key (ALiBi).
        sinks: [heads], a score of each head that joins every row's softmax. Added to what a backend gives, by plain
            autograd: a backend never sees it.
    """

    scale: float
    dropout_p: float = 0.0
    softcap: float = 0.0
    key_padding_mask: Tensor | None = None
    document_ids: Tensor | None = None
    seed: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None

    @property
    def has_tensors(self) -> bool:
        """Whether two calls with equal numbers may still differ. Asked in every call: one comparison a field."""
        masked, drops = self.is_masked, self.seed is not None
        return masked or drops or self.alibi_slopes is not None or self.sinks is not None

    @property
    def is_masked(self) -> bool:
        return self.key_padding_mask is not None or self.document_ids is not None

    @property
    def has_score_mods(self) -> bool:
        """Whether scores are more than scaled products."""
        return self.softcap > 0.0 or self.alibi_slopes is not None

    def flatten(self) -> tuple[list[Tensor], str, list[float]]:
        """The arguments of a registered operator: the tensors that are given, their names, and the numbers."""
        numbers: Any = self[: len(NUMBERS)]
        tensors: Any = self[len(NUMBERS) :]
        given = [(name, x) for name, x in zip(TENSORS, tensors, strict=True) if x is not None]
        return [x for _, x in given], " ".join(name for name, _ in given), list(numbers)

    @staticmethod
    def unflatten(tensors: list[Tensor], names: str, numbers: list[float]) -> CallOptions:
        given: dict[str, Any] = dict(zip(names.split(), tensors, strict=True))
        scale, dropout_p, softcap = numbers
        return CallOptions(scale, dropout_p, softcap, **given)


# The fields, numbers first.
NUMBERS = ("scale", "dropout_p", "softcap")
TENSORS = CallOptions._fields[len(NUMBERS) :]
