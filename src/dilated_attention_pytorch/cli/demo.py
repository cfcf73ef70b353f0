"""`dilated-attention demo`: what the library claims, shown on this machine's CPU.

1. Exactness: for a handful of patterns, output and gradients of the blockwise backend against the dense reference, in
   float64. An error above 1e-10 ends the demo with exit status 1.
2. Pictures: six patterns in one PNG, two of them in the terminal.
3. A long sequence, forward and backward: time and peak memory beside PyTorch's dense attention. The dense run is
   shorter and its time is scaled by the square of the length; the table says so.
4. It learns: a small LongNet finds answers that a sliding window of equal cost cannot reach.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..layout import BlockLayout
from ..memory import can_measure, measure_peak
from ..memory.devices import as_text
from ..ops import block_sparse_attention
from ..patterns import (
    Causal,
    DilatedBlocks,
    Documents,
    GlobalTokens,
    Pattern,
    PerHead,
    RandomBlocks,
    SlidingWindow,
    SparsePatternConfig,
    hierarchical,
)
from ..viz import draw_text, plot_layout
from . import recall
from .output import NO_PICTURE, Document, can_draw, one_thread, steps, table

TOLERANCE = 1e-10
CHECK_TOKENS = 333  # odd, and no multiple of a block
CHECK_PAIRS = 2000
PICTURE_TOKENS, TEXT_TOKENS = 2048, 1024
HEADS, HEAD_DIM = 8, 64

# (tokens, tokens of the dense run, most steps of a model that learns)
LONG, QUICK = (65536, 8192, 300), (4096, 1024, 3)
RECALL = recall.Study(seq=128, segment=8, batch=32)

CHECKED: dict[str, Pattern] = {
    "sliding window": SlidingWindow(left=64, right=16),
    "global tokens | window": GlobalTokens(8, queries=True) | SlidingWindow(left=32, right=32),
    "documents": Documents((100, 33, 200)),
    "dilated blocks": DilatedBlocks((64, 128, 256), (1, 2, 4), sparsity_ratio=0.4, block_size=16),
    "random blocks, per head": PerHead(tuple(RandomBlocks(3, seed=head, block_size=16) for head in range(4))),
}

DRAWN: dict[str, Pattern] = {
    "Sliding window, causal": SlidingWindow(left=400, right=0),
    "Global tokens | window": GlobalTokens(64, queries=True) | SlidingWindow(left=160, right=160),
    "Documents, causal": Documents((500, 250, 800, 498)) & Causal(),
    "Dilated segments": DilatedBlocks((512, 1024, 2048), (1, 2, 4), sparsity_ratio=0.3, block_size=64),
    "Hierarchical": hierarchical(((1, 256), (4, 1024), (8, 4096)), block_size=64),
    "Window | random blocks": SlidingWindow(left=96, right=96) | RandomBlocks(3, block_size=64),
}
IN_THE_TERMINAL = ("Global tokens | window", "Dilated segments")


def run(
    console: Console, *, tokens: int | None = None, out: Path = Path("demo_output"), quick: bool = False
) -> Document:
    """The whole demo. RuntimeError if a result is not exact."""
    started = perf_counter()
    default_tokens, most_dense, most_steps = QUICK if quick else LONG
    tokens = tokens or default_tokens
    console.print(f"torch {torch.__version__} on {torch.get_num_threads()} CPU threads, {platform.machine()}")
    _heading(console, "1. Exactness")
    document: Document = {"exactness": _check_exactness(console)}
    _heading(console, "2. Patterns")
    written = _draw_patterns(console, out)
    _heading(console, f"3. {tokens:,} tokens, forward and backward")
    document["race"] = _race(console, tokens, min(tokens, most_dense))
    _heading(
        console, f"4. Recall: the answer is {RECALL.distance} tokens back, the shortest segment {RECALL.segment} long"
    )
    document["recall"] = _recall(console, most_steps)
    if can_draw():
        out.mkdir(parents=True, exist_ok=True)
        recall.plot(RECALL, {name: row["right"] for name, row in document["recall"].items()}, out / "recall.png")
        written.append(out / "recall.png")
    else:
        console.print(NO_PICTURE, markup=False)
    console.print()
    if written:
        console.print(f"Written: {', '.join(map(str, written))}", soft_wrap=True)
    document |= {"written": [str(path) for path in written], "seconds": perf_counter() - started}
    console.print(f"Done in {document['seconds']:.0f} s.")
    return document


def _heading(console: Console, text: str) -> None:
    console.print(f"\n{text}", style="bold")


def _check_exactness(console: Console) -> list[Document]:
    title = f"largest |blockwise - reference|, float64, {CHECK_TOKENS} tokens"
    made = table("pattern", "causal", right=("out", "dq", "dk", "dv"), title=title)
    rows: list[Document] = []
    worst: tuple[float, str] = (0.0, "")
    with steps(console, 2 * len(CHECKED)) as announce, one_thread():
        for name, pattern in CHECKED.items():
            layout = BlockLayout.from_pattern(pattern, CHECK_TOKENS, block_size=16)
            for is_causal in (False, True):
                announce(f"checking {name}{', causal' if is_causal else ''}")
                _check_mask(name, pattern & Causal() if is_causal else pattern, layout.causal if is_causal else layout)
                errors = _errors(layout, is_causal)
                made.add_row(name, "yes" if is_causal else "no", *(f"{error:.1e}" for error in errors))
                rows.append({"pattern": name, "is_causal": is_causal, "errors": errors})
                # NaN compares as nothing; here it is the worst.
                found = max((error if error == error else float("inf")) for error in errors)
                worst = max(worst, (found, name))
    console.print(made)
    if worst[0] > TOLERANCE:
        raise RuntimeError(f"not exact: {worst[1]} is off by {worst[0]:.1e}, more than {TOLERANCE:.0e}")
    console.print(
        f"Worst error {worst[0]:.1e}, allowed {TOLERANCE:.0e}: exact. In every row {CHECK_PAIRS:,} pairs of tokens "
        "were also put to the pattern's own definition; the masks agree."
    )
    return rows


def _check_mask(name: str, pattern: Pattern, layout: BlockLayout) -> None:
    """Both backends read the same layout; that it says what the pattern says is seen from the pattern alone."""
    heads = pattern.patterns if isinstance(pattern, PerHead) else (pattern,)
    dense = layout.to_dense().view(len(heads), CHECK_TOKENS, CHECK_TOKENS)
    picks = torch.Generator().manual_seed(0)
    head, query, key = (
        torch.randint(stop, (CHECK_PAIRS,), generator=picks).tolist()
        for stop in (len(heads), CHECK_TOKENS, CHECK_TOKENS)
    )
    for h, i, j in zip(head, query, key, strict=True):
        if heads[h].allows(i, j, CHECK_TOKENS, CHECK_TOKENS) != bool(dense[h, i, j]):
            raise RuntimeError(f"not exact: the layout of {name} is wrong about query {i} and key {j} of head {h}")


def _errors(layout: BlockLayout, is_causal: bool) -> list[float]:
    """The largest difference of out, dq, dk and dv between the two backends; two query heads share a key head."""
    draw = torch.Generator().manual_seed(0)
    q, k, v, do = (
        torch.randn(2, CHECK_TOKENS, heads, 16, dtype=torch.float64, generator=draw) for heads in (4, 2, 2, 4)
    )
    results = []
    for backend in ("blockwise", "reference"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        q_leaf, k_leaf, v_leaf = leaves
        out = block_sparse_attention(q_leaf, k_leaf, v_leaf, layout, is_causal=is_causal, backend=backend)
        assert isinstance(out, Tensor)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, do)])
    return [float((a - b).abs().max()) for a, b in zip(*results, strict=True)]


def _draw_patterns(console: Console, out: Path) -> list[Path]:
    """What was written, nothing without matplotlib."""
    side_by_side = Table.grid(padding=(0, 6))
    side_by_side.add_row(*IN_THE_TERMINAL)
    side_by_side.add_row(
        *(draw_text(BlockLayout.from_pattern(DRAWN[name], TEXT_TOKENS, block_size=64)) for name in IN_THE_TERMINAL)
    )
    console.print(side_by_side)
    if not can_draw():
        return []
    layouts = [
        (name, BlockLayout.from_pattern(pattern, PICTURE_TOKENS, block_size=64)) for name, pattern in DRAWN.items()
    ]
    out.mkdir(parents=True, exist_ok=True)
    path = out / "patterns.png"
    plot_layout(layouts, path)
    console.print(f"These and {len(layouts) - len(IN_THE_TERMINAL)} more: {path}", soft_wrap=True)
    return [path]


@dataclass(frozen=True)
class Measured:
    """Seconds and bytes of one forward and backward; no bytes where the system cannot tell."""

    forward: float
    backward: float
    peak_bytes: int | None

    def scaled(self, factor: float) -> Measured:
        """The same for a sequence `factor` times as long, by how dense attention grows."""
        peak = None if self.peak_bytes is None else round(self.peak_bytes * factor)
        return Measured(self.forward * factor**2, self.backward * factor**2, peak)

    def cells(self) -> list[str]:
        total = self.forward + self.backward
        return [*(f"{seconds:,.2f} s" for seconds in (self.forward, self.backward, total)), _bytes(self.peak_bytes)]


def _race(console: Console, tokens: int, dense_tokens: int) -> Document:
    config = SparsePatternConfig(pattern_type="dilated_sparse", sparsity_ratio=0.02, block_size=128)
    with steps(console, 7) as announce:
        announce("building the layout")
        started = perf_counter()
        layout = BlockLayout.from_pattern(config.pattern(), tokens, block_size=config.block_size)
        built = perf_counter() - started
        sparse = _measure(
            tokens, lambda q, k, v: _sparse(q, k, v, layout), announce, f"block-sparse, {tokens:,} tokens"
        )
        # The faster of two: what disturbs this run is scaled up with it, and must not flatter ours.
        dense_runs = [_measure(dense_tokens, _dense, announce, f"dense, {dense_tokens:,} tokens") for _ in range(2)]
    dense = min(dense_runs, key=lambda one: one.forward + one.backward)
    factor = tokens / dense_tokens
    scaled = dense.scaled(factor)
    columns = ("block-sparse\nmeasured", "dense\nmeasured", "dense\nscaled, not measured")
    made = table("", right=columns, title=f"1 sample, {HEADS} heads x {HEAD_DIM}, float32")
    made.add_row("tokens", f"{tokens:,}", f"{dense_tokens:,}", f"{tokens:,}")
    names = ("forward", "backward", "both", "peak memory")
    for name, *cells in zip(names, sparse.cells(), dense.cells(), scaled.cells(), strict=True):
        made.add_row(name, *cells)
    console.print(made)
    speedup = (scaled.forward + scaled.backward) / (sparse.forward + sparse.backward)
    scores = HEADS * tokens**2 * 4
    for line in (
        f"Block-sparse: {layout.density:.1%} of the pairs; layout made in {1e3 * built:.0f} ms, not in the times.",
        "Dense: torch's scaled_dot_product_attention, the faster of two runs.",
        f"Scaled: time x {factor**2:g}, as it is quadratic; memory x {factor:g}, as its fused kernel is linear there.",
        f"By that scaling, dense attention takes {speedup:.1f} x as long as block-sparse.",
        "Memory: the peak above the inputs.",
        f"A kernel that is not fused would hold all scores: {_bytes(scores)} ({scores:,} bytes).",
        "Fused dense attention holds none, so sparsity gains time over it, and no memory: on a CPU block-sparse "
        "attention keeps copies of key heads beside what must exist.",
    ):
        console.print(line)
    can, missing = can_measure()
    if not can:
        console.print(f"Peak memory was not measured: that {missing}.")
    return {
        "tokens": tokens,
        "dense_tokens": dense_tokens,
        "density": layout.density,
        "sparse": asdict(sparse),
        "dense": asdict(dense),
        "dense_scaled": asdict(scaled),
        "speedup_scaled": speedup,
    }


def _recall(console: Console, most_steps: int) -> Document:
    """For each model the share of right answers by step, and that of its test."""
    views = {
        "LongNet": f"branches {[*zip(RECALL.branches.segment_lengths, RECALL.branches.dilation_rates, strict=True)]}",
        "window": f"the last {RECALL.window} tokens, which costs as much",
        "dense": "all tokens so far",
    }
    title = f"{RECALL.seq} tokens; guessing answers {1 / recall.VALUES:.1%} right"
    made = table("model", "a token sees", right=("steps", "time", "right"), title=title)
    found: Document = {}
    with steps(console, len(views)) as announce, one_thread():
        for kind, view in views.items():
            announce(f"learning, {kind}")
            model, started = RECALL.model(kind), perf_counter()
            shares = RECALL.learn(model, most_steps)
            seconds, test = perf_counter() - started, RECALL.test(model)
            found[kind] = {"right": shares, "seconds": seconds, "test": test}
            made.add_row(kind, view, str(len(shares)), f"{seconds:.0f} s", f"{test:.1%}")
    console.print(made)
    console.print(f"A model stops when {recall.LEARNED:.0%} of its answers are right, or after {most_steps} steps.")
    return found


def _sparse(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout) -> Tensor:
    out = block_sparse_attention(q, k, v, layout)
    assert isinstance(out, Tensor)
    return out


def _dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _measure(
    tokens: int, attention: Callable[[Tensor, Tensor, Tensor], Tensor], announce: Callable[[str], None], name: str
) -> Measured:
    draw = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, tokens, HEADS, HEAD_DIM, generator=draw) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    with measure_peak() if can_measure()[0] else nullcontext() as peak:
        announce(f"{name}, forward")
        started = perf_counter()
        out = attention(q, k, v)
        forward = perf_counter() - started
        announce(f"{name}, backward")
        started = perf_counter()
        out.backward(do)
        backward = perf_counter() - started
    return Measured(forward, backward, None if peak is None else peak.peak_bytes)


def _bytes(count: int | None) -> str:
    return "not measured" if count is None else as_text(count)
