"""`dilated-attention bench`: one call beside what else is installed; nothing is timed that is wrong.

Rivals: dense SDPA always; compiled FlexAttention over the same pairs; flash-attn and xformers, dense, where they are
importable. Output and gradients of some rows of every contender are first compared with the reference in float64 (a
dense one with dense attention), within the tolerances of `testing`; one that is wrong, or that cannot run, is reported
with the reason and not timed. If it is ours, that is an error. Then contenders take turns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..layout import BlockLayout
from ..ops import block_sparse_attention, dilated_attention, explain
from ..patterns import Branches
from ..patterns.base import did_you_mean
from ..testing import Case, oracle, tolerances
from ..testing.timing import environment, hint_of_load, interleave
from .call import Call
from .output import NO_PICTURE, Document, can_draw, steps, table

OURS, RIVALS = "ours", ("dense", "flex", "flash", "xformers")
ROWS = 128  # of branches that are checked

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Contender:
    """Someone who computes attention over q, k, v as they are, (batch, seq, heads, head_dim).

    Attributes:
        dense: whether it attends to everything and is compared with that.
        trains: whether it has gradients here.
    """

    attend: Attend
    about: str
    dense: bool = False
    trains: bool = True


class CannotError(Exception):
    """Why a rival does not take part."""


def run(
    console: Console,
    call: Call,
    *,
    device: str,
    training: bool,
    repeats: int,
    rivals: Sequence[str] = RIVALS,
    out: Path | None = None,
) -> Document:
    """Check, time, print a table; with `out` also write bench.json and bench.png there."""
    unknown = [name for name in rivals if name not in RIVALS]
    if unknown:
        meant = did_you_mean(unknown[0], [*RIVALS, "none"])
        raise ValueError(f"--against must be of {', '.join(RIVALS)}, or none, got {unknown[0]!r}{meant}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {device} must be there, and PyTorch sees no GPU")
    layout = call.layout(device)
    what, is_causal = (call.what, call.is_causal) if isinstance(call.what, Branches) else (layout, False)
    draw = torch.Generator().manual_seed(0)
    q, k, v, do = (
        torch.randn(1, call.tokens, call.heads, call.head_dim, generator=draw).to(device, call.dtype) for _ in range(4)
    )
    gates = {dense: _gate(each, each.layout(device), q, k, v, do) for dense, each in
             ((False, call), (True, call.dense()))}  # fmt: skip
    backend = explain(q, k, v, what, is_causal=is_causal).chosen
    absent: dict[str, str] = {}
    rows: dict[str, Document] = {}
    runs: dict[str, Callable[[], object]] = {}
    with steps(console, 1 + len(rivals) + repeats) as announce:
        for name in (OURS, *rivals):
            announce(f"checking {name}")
            try:
                contender = _contender(name, call, layout, q, backend)
                if training and not contender.trains:
                    raise CannotError("it has no backward on this device")
                started = perf_counter()
                errors = gates[contender.dense].errors(contender.attend, training)
                rows[name] = {"about": contender.about, "dense": contender.dense, "errors": errors,
                              "first_call": perf_counter() - started}  # fmt: skip
                runs[name] = _timed(contender.attend, q, k, v, do if training else None)
            except CannotError as reason:
                absent[name] = str(reason)
            except (RuntimeError, ImportError) as error:  # compilers and kernels of others
                if name == OURS:
                    raise
                absent[name] = (str(error).strip().splitlines() or [type(error).__name__])[0]
        for each in runs.values():
            each()
        timings = interleave(
            runs, repeats, device=device, on_turn=lambda turn: announce(f"timing, turn {turn + 1} of {repeats}")
        )
    figures = call.figures(layout)
    flops = figures["cost"]["forward_flops"] + (figures["cost"]["backward_flops"] if training else 0)
    for name, row in rows.items():
        timing = timings[name]
        row |= {"seconds": timing.median, "fastest": timing.min, "times": list(timing.times)}
        row["ratio"] = row["seconds"] / rows[OURS]["seconds"]
        if not row["dense"]:
            row["flops_a_second"] = flops / row["seconds"]
    document = {
        "environment": environment(device),
        "device": device,
        "training": training,
        "repeats": repeats,
        "backend": backend,
        "call": figures,
        "contenders": rows,
        "absent": absent,
    }
    _print(console, document)
    if out is not None:
        _write(console, document, out)
    return document


def _contender(name: str, call: Call, layout: BlockLayout, q: Tensor, backend: str) -> Contender:
    if name == OURS:
        return _ours(call, layout, backend)
    if name == "dense":

        def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return scaled_dot_product_attention(q, k, v, is_causal=call.is_causal).transpose(1, 2)

        return Contender(dense, "dense SDPA", dense=True)
    if name == "flex":
        return _flex(call, layout, q)
    return _installed(name, call, q)


def _ours(call: Call, layout: BlockLayout, backend: str) -> Contender:
    what = call.what
    if not isinstance(what, Branches):

        def sparse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return block_sparse_attention(q, k, v, layout)  # type: ignore[return-value]

        return Contender(sparse, f"ours, {backend}")

    def dilated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dilated_attention(
            q, k, v, segment_lengths=what.segment_lengths, dilation_rates=what.dilation_rates,
            head_offsets=what.head_offsets, is_causal=call.is_causal,
        )  # type: ignore[return-value]  # fmt: skip

    return Contender(dilated, f"ours, {backend}")


def _flex(call: Call, layout: BlockLayout, q: Tensor) -> Contender:
    if isinstance(call.what, Branches):
        raise CannotError("a key counts once for each branch, which no mask says")
    if call.dtype == torch.float64:
        raise CannotError("it computes in float32")
    from torch.nn.attention.flex_attention import flex_attention

    blocks = layout.to_flex_block_mask()
    compiled = _compiled(flex_attention)

    def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(q, k, v, block_mask=blocks).transpose(1, 2)

    return Contender(flex, "FlexAttention, compiled", trains=q.is_cuda)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def _installed(name: str, call: Call, q: Tensor) -> Contender:
    module = {"flash": "flash_attn", "xformers": "xformers"}[name]
    if find_spec(module) is None:
        raise CannotError(f"{module} is not installed")
    if not q.is_cuda or call.dtype not in (torch.float16, torch.bfloat16):
        raise CannotError("it runs on a GPU, in half precision")
    if name == "flash":
        from flash_attn import flash_attn_func

        def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flash_attn_func(q, k, v, causal=call.is_causal)

        return Contender(flash, "flash-attn, dense", dense=True)
    from xformers.ops import LowerTriangularMask, memory_efficient_attention

    def efficient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return memory_efficient_attention(q, k, v, attn_bias=LowerTriangularMask() if call.is_causal else None)

    return Contender(efficient, "xformers, dense", dense=True)


@dataclass(frozen=True)
class _Gate:
    """What some rows should be, and how far off they may be."""

    at: Tensor
    inputs: tuple[Tensor, Tensor, Tensor]
    do: Tensor
    expected: tuple[Tensor, ...]
    allowed: list[float]

    def errors(self, attend: Attend, training: bool) -> dict[str, float]:
        """The largest of each result, and RuntimeError if one is too large."""
        q, k, v = (x.detach().requires_grad_(training) for x in self.inputs)
        with torch.set_grad_enabled(training):
            out = attend(q, k, v)
        got = {"out": out.detach()[:, self.at]}
        if training:
            dq, dk, dv = torch.autograd.grad(out, (q, k, v), self.do)
            got |= {"dq": dq[:, self.at], "dk": dk, "dv": dv}
        wanted = dict(zip(("out", "lse", "dq", "dk", "dv"), zip(self.expected, self.allowed, strict=True), strict=True))
        errors = {name: float((x.double() - wanted[name][0]).abs().max()) for name, x in got.items()}
        for name, error in errors.items():
            if not error <= wanted[name][1]:  # written so that NaN fails
                raise RuntimeError(f"{name} is wrong by {error:.1e}, allowed {wanted[name][1]:.1e}: not timed")
        return errors


def _gate(call: Call, layout: BlockLayout, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> _Gate:
    """Rows from the beginning, the middle and the end, of branches the end; gradients flow into these alone."""
    part: BlockLayout | Branches
    if isinstance(call.what, Branches):
        part, is_causal = call.what, call.is_causal
        at = torch.arange(max(0, call.tokens - ROWS), call.tokens, device=q.device)  # the last are aligned at the end
    else:
        is_causal = False  # the layout is
        count = layout.num_q_blocks
        chosen = torch.tensor(sorted({0, count * 5 // 8, count - 1}), device=q.device)
        part = layout.take(chosen)
        at = layout.queries_of(chosen).flatten()
        at = at[at < call.tokens]
    dlse = torch.zeros(1, call.heads, len(at), device=q.device)
    case = Case(q[:, at], k, v, part, do[:, at], dlse, is_causal)
    expected = oracle(case)
    only = torch.zeros_like(do)
    only[:, at] = do[:, at]
    return _Gate(at, (q, k, v), only, expected, tolerances(case, expected))


def _timed(attend: Attend, q: Tensor, k: Tensor, v: Tensor, do: Tensor | None) -> Callable[[], object]:
    """One call, with the gradients if `do` is given."""
    leaves = [x.detach().requires_grad_(do is not None) for x in (q, k, v)]

    def once() -> None:
        with torch.set_grad_enabled(do is not None):
            out = attend(leaves[0], leaves[1], leaves[2])
        if do is not None:
            torch.autograd.grad(out, leaves, do)

    return once


def _print(console: Console, document: Document) -> None:
    call, way = document["call"], "forward and backward" if document["training"] else "forward"
    sizes = f"{call['tokens']:,} tokens, {call['heads']} heads x {call['head_dim']}, {call['dtype']}"
    made = table("", right=("median", "fastest", "times ours", "GFLOP/s", "error"),
                 title=f"{escape(call['pattern'])}{', causal' if call['is_causal'] else ''}: {way}, {sizes}, "
                 f"{document['device']}")  # fmt: skip
    for row in sorted(document["contenders"].values(), key=lambda row: row["seconds"]):
        rate = f"{row['flops_a_second'] / 1e9:,.1f}" if "flops_a_second" in row else ""
        made.add_row(row["about"], _ms(row["seconds"]), _ms(row["fastest"]), f"{row['ratio']:.2f}", rate,
                     f"{max(row['errors'].values()):.0e}")  # fmt: skip
    console.print(made)
    console.print(
        f"Density {call['density']:.2%}: a dense contender computes every pair. "
        f"{'Outputs and gradients' if document['training'] else 'Outputs'} were compared with float64 first."
    )
    hint = hint_of_load(document["environment"])
    if hint is not None:
        console.print(hint, soft_wrap=True)
    for name, reason in document["absent"].items():
        console.print(f"Without {name}: {reason}.", markup=False, soft_wrap=True)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f} ms"


def _write(console: Console, document: Document, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "bench.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    written = [out / "bench.json"]
    if can_draw():
        _plot(document, out / "bench.png")
        written.append(out / "bench.png")
    else:
        console.print(NO_PICTURE, markup=False)
    console.print(f"Written: {', '.join(map(str, written))}", soft_wrap=True)


def _plot(document: Document, path: Path) -> None:
    """A bar for each contender, the fastest on top, with the time of every turn as a mark."""
    from matplotlib.figure import Figure

    rows: list[tuple[str, Any]] = sorted(document["contenders"].items(), key=lambda item: -item[1]["seconds"])
    figure = Figure(figsize=(8, 1.4 + 0.55 * len(rows)), dpi=160, layout="constrained")
    axis = figure.subplots()
    for place, (name, row) in enumerate(rows):
        axis.barh(place, 1e3 * row["seconds"], 0.6, color="#1f4e8c" if name == OURS else "#aab4c2")
        axis.plot(
            [1e3 * each for each in row["times"]], [place] * len(row["times"]), "|", color="#f5a742", markersize=10
        )
        axis.annotate(f"  {1e3 * row['seconds']:,.1f}", (1e3 * max(row["times"]), place), va="center", fontsize=9)
    axis.set_yticks(range(len(rows)), [row["about"] for _, row in rows])
    axis.set_xlabel("ms, median and every turn")
    axis.margins(x=0.12)
    axis.set_xlim(left=0)
    axis.spines[["top", "right"]].set_visible(False)
    call = document["call"]
    axis.set_title(f"{call['pattern']}, {call['tokens']:,} tokens, density {call['density']:.1%}", fontsize=10)
    figure.savefig(path)
