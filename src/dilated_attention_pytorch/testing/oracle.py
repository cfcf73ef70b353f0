"""The oracle: the reference backend in float64, outputs and all gradients, those of a bias too.

Tolerance: in float64, 1e-10. In a lower precision an implementation may err as much as eager PyTorch in that precision
does against the oracle, times `FACTOR` (the largest of few errors is a matter of luck), plus one rounding in that
precision of the largest term that is summed on the way (where terms cancel exactly, eager PyTorch may have no error).
A backward that keeps no weights computes them again, as exp(score − lse). Both numbers are rounded at their size, in
float32 at least, which eager PyTorch does not do: as much error for each unit of the largest score is allowed too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..backends import reference
from ..backends.bias import bias_of_pairs
from ..layout import BlockLayout
from ..ops import ScoreBias, block_sparse_attention, dilated_attention
from ..ops.attend import with_sinks
from ..ops.checks import check_options
from ..ops.named import resolve_layout
from ..patterns import Branches

FLOAT64_TOLERANCE = 1e-10
FACTOR = 4.0
NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """A call of `block_sparse_attention`, or with branches of `dilated_attention`, and the gradients that flow into
    its results."""

    q: Tensor
    k: Tensor
    v: Tensor
    layout: BlockLayout | Branches
    do: Tensor
    dlse: Tensor
    is_causal: bool = False
    scale: float | None = None
    key_padding_mask: Tensor | None = None
    document_ids: Tensor | None = None
    dropout_p: float = 0.0
    detach_branch_weights: bool = False
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    bias: ScoreBias | None = None
    sinks: Tensor | None = None
    deterministic: bool | None = None

    def to(self, dtype: torch.dtype) -> Case:
        tensors = {name: getattr(self, name).to(dtype) for name in ("q", "k", "v", "do")}
        return replace(self, **tensors)

    def leaves(self) -> Case:
        """The same values, all of which ask for a gradient."""
        tensors = {name: getattr(self, name).detach().requires_grad_() for name in "qkv"}
        if self.bias is None:
            return replace(self, **tensors)
        terms = (term._replace(tensor=term.tensor.detach().requires_grad_()) for term in self.bias.terms)
        return replace(self, **tensors, bias=ScoreBias(tuple(terms)))

    @property
    def differentiated(self) -> list[Tensor]:
        terms = () if self.bias is None else self.bias.terms
        return [self.q, self.k, self.v, *(term.tensor for term in terms)]

    @property
    def names(self) -> list[str]:
        """Of what `results` gives."""
        terms = () if self.bias is None else self.bias.terms
        return [*NAMES, *(f"d{term.kind}" for term in terms)]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, backend: str) -> Any:
        """out and lse."""
        names = ["is_causal", "scale", "key_padding_mask", "dropout_p", "softcap", "alibi_slopes", "bias", "sinks"]
        names.append("deterministic")
        if isinstance(self.layout, BlockLayout):
            options = {name: getattr(self, name) for name in [*names, "document_ids"]}
            return block_sparse_attention(q, k, v, self.layout, return_lse=True, backend=backend, **options)
        options = {name: getattr(self, name) for name in [*names, "detach_branch_weights"]}
        options |= {n: getattr(self.layout, n) for n in ("segment_lengths", "dilation_rates", "head_offsets")}
        return dilated_attention(q, k, v, return_lse=True, backend=backend, **options)


def results(case: Case, backend: str, seed: int = 0) -> tuple[Tensor, ...]:
    """out, lse (0 for −inf, whose place is compared apart), dq, dk, dv and the gradients of the bias, of a backend."""
    case = case.leaves()
    torch.manual_seed(seed)  # dropout draws its seed from PyTorch's generator
    out, lse = case.attend(case.q, case.k, case.v, backend)
    finite = torch.where(lse == -torch.inf, 0.0, lse)
    grads = torch.autograd.grad((out, finite), case.differentiated, (case.do, case.dlse.to(lse.dtype)))
    return out.detach(), lse.detach(), *grads


def oracle(case: Case, seed: int = 0) -> tuple[Tensor, ...]:
    """The definition: the reference backend in float64, on the values that the case holds."""
    return results(case.to(torch.float64), "reference", seed)


def errors_of_eager(case: Case, expected: tuple[Tensor, ...]) -> list[float]:
    """How far plain eager attention, every step in the case's own dtype, is from the oracle."""
    case = case.leaves()
    q, k, v = case.q, case.k, case.v
    layout = resolve_layout(q, k, case.layout, case.is_causal)
    assert isinstance(layout, BlockLayout)
    heads, scale = q.shape[2], case.scale if case.scale is not None else q.shape[3] ** -0.5
    options = check_options(
        q, k, key_padding_mask=case.key_padding_mask, document_ids=case.document_ids, bias=case.bias,
        alibi_slopes=case.alibi_slopes,
    )  # fmt: skip
    keys, values = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * scale
    counts = reference.counted_pairs(layout, heads, options)
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    if options.bias is not None:
        query, key = (torch.arange(n, device=q.device) for n in scores.shape[-2:])
        scores = scores + bias_of_pairs(options.bias, query[:, None], key[None], *layout.lengths).to(scores.dtype)
    hidden = (counts == 0) | (scores == -torch.inf)
    empty = hidden.all(-1, keepdim=True).expand(*scores.shape[:-1], 1)
    if layout.dilated:
        scores = scores + counts.clamp(min=1).log().to(scores.dtype)
    scores = scores.masked_fill(hidden & ~empty, -torch.inf)
    weights = torch.softmax(scores, -1).masked_fill(empty, 0.0)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, values)
    lse = torch.logsumexp(scores, -1)
    if case.sinks is not None:
        out, lse = with_sinks(out, lse.masked_fill(empty[..., 0], -torch.inf), case.sinks[:, None])
    else:
        lse = lse.masked_fill(empty[..., 0], 0.0)
    grads = torch.autograd.grad((out, lse), case.differentiated, (case.do, case.dlse.to(lse.dtype)))
    return [_error(got, want) for got, want in zip((out, lse, *grads), expected, strict=True)]


def _distances(case: Case) -> Tensor:
    """Tokens between query and key, [seq_q, seq_k]; the last query stands at the last key."""
    seq_q, seq_k = case.q.shape[1], case.k.shape[1]
    position = torch.arange(seq_k - seq_q, seq_k, device=case.q.device)
    return (position[:, None] - torch.arange(seq_k, device=case.q.device)).abs()


def _error(got: Tensor, want: Tensor) -> float:
    difference = got.detach().double() - torch.where(want == -torch.inf, 0.0, want)
    return float(difference.abs().max())


def _largest_terms(case: Case) -> list[float]:
    """A bound on what is summed for out, lse, dq, dk, dv and the gradients of the bias."""
    q, k, v, do = (float(x.double().norm(dim=-1).max()) for x in (case.q, case.k, case.v, case.do))
    scale = abs(case.scale if case.scale is not None else case.q.shape[3] ** -0.5)
    dscore = do * v + float(case.dlse.abs().max())
    options = check_options(case.q, case.k, bias=case.bias, alibi_slopes=case.alibi_slopes)
    bias, far = 0.0, float(_distances(case).max())
    if options.bias is not None:
        seq_q, seq_k = case.q.shape[1], case.k.shape[1]
        query, key = (torch.arange(n, device=case.q.device) for n in (seq_q, seq_k))
        added = bias_of_pairs(options.bias, query[:, None], key[None], seq_q, seq_k).detach()
        bias = float(added.abs().nan_to_num(posinf=0.0).max())
    of_scores, dq, dk, dv = (x * (1.0 + bias) for x in (dscore, dscore * scale * k, dscore * scale * q, do))
    terms = () if case.bias is None else case.bias.terms
    of_bias = [of_scores * (far if term.kind == "slopes" else 1.0) for term in terms]
    return [v * (1.0 + bias), max(1.0, scale * q * k) + bias, dq, dk, dv, *of_bias]


def _largest_score(case: Case) -> float:
    """A bound on scores before a bias."""
    q, k = (float(x.double().norm(dim=-1).max()) for x in (case.q, case.k))
    score = abs(case.scale if case.scale is not None else case.q.shape[3] ** -0.5) * q * k
    return score if case.softcap is None else min(score, case.softcap)


def tolerances(case: Case, expected: tuple[Tensor, ...]) -> list[float]:
    """How far each of `results` may be from what the oracle says; see the module's text."""
    dtype = case.q.dtype
    if dtype == torch.float64:
        return [FLOAT64_TOLERANCE] * len(case.names)
    if case.dropout_p:
        raise ValueError("eager PyTorch draws other dropout masks: check dropout in float64")
    eager, terms = errors_of_eager(case, expected), _largest_terms(case)
    again = torch.finfo(torch.float32).eps * _largest_score(case)
    roundings = [torch.finfo(dtype).eps + (0.0 if name in ("out", "lse") else again) for name in case.names]
    return [FACTOR * e + rounding * term for e, rounding, term in zip(eager, roundings, terms, strict=True)]


def assert_exact(case: Case, backend: str, seed: int = 0) -> None:
    """The backend equals the oracle, outputs and all gradients, within the derived tolerance."""
    expected = oracle(case, seed)
    got = results(case, backend, seed)
    assert torch.equal(got[1] == -torch.inf, expected[1] == -torch.inf), "lse is −inf for other rows than it should be"
    got = (got[0], torch.where(got[1] == -torch.inf, 0.0, got[1]), *got[2:])
    for name, mine, want, bound in zip(case.names, got, expected, tolerances(case, expected), strict=True):
        error = _error(mine, want)
        assert error <= bound, f"{name} of {backend} in {case.q.dtype} is off by {error:.3g}, allowed {bound:.3g}"
