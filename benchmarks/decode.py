"""Decoding: one new token against a long cache, ours over the active blocks against dense attention over everything.

    python benchmarks/decode.py                       # the device at hand, a minute; options: harness.py
    python benchmarks/decode.py --tokens 1048576 --share 0.01

A row has a cache of some length, random active blocks of 128 tokens (and the newest), batch 1 and, on a GPU, 8. Dense
is PyTorch's `scaled_dot_product_attention` over the whole cache (on a GPU flash decoding: it splits the keys).
Bandwidth is the bytes of the active keys and values ÷ time; the copy limit is that of a copy of all keys, both ways
counted, and beside it that of a kernel that moves as many bytes as the active keys and values are. On a GPU times are
those of CUDA graphs, and of calls from Python beside them. Contenders take turns, on a GPU several calls at a time.
Before a row is timed its output is compared with float64 attention over the keys that it sees.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dilated_attention_pytorch import Causal, LocalBlocks, RandomBlocks, decode_attention
from dilated_attention_pytorch.testing.timing import interleave
from harness import Benchmark, Job, Record, run

HEADS, HEADS_KV, HEAD_DIM, BLOCK = 32, 8, 128, 128


def pattern_of(tokens: int, share: float) -> Any:
    """So many random blocks a row, and its own."""
    return RandomBlocks(max(1, round(share * tokens / BLOCK) - 1), block_size=BLOCK) | LocalBlocks(1, block_size=BLOCK)


def _active(tokens: int, share: float) -> int:
    """Keys that a row sees."""
    return (round(share * tokens / BLOCK) or 1) * BLOCK


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(*heads_first, enable_gqa=True).transpose(1, 2)


def expected(q: Tensor, k: Tensor, v: Tensor, pattern: Any) -> Tensor:
    """The output of the first sample and head in float64, by asking the pattern for every block of keys."""
    tokens = k.shape[1]
    seen = [j for j in range(0, tokens, BLOCK) if pattern.allows(tokens - 1, j, tokens, tokens)]
    at = torch.cat([torch.arange(j, min(j + BLOCK, tokens), device=k.device) for j in seen])
    keys, values = (x[0, at, 0].double() for x in (k, v))
    weights = torch.softmax(keys @ q[0, 0, 0].double() * HEAD_DIM**-0.5, 0)
    return weights @ values


def graphed(call: Callable[[], Any]) -> Callable[[], Any]:
    """The same as a CUDA graph: what the device takes, without Python."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def row(job: Job, tokens: int, share: float, batch: int) -> dict[str, Any]:
    device = job.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q = torch.randn(batch, 1, HEADS, HEAD_DIM, device=device, dtype=dtype)
    k, v = (torch.randn(batch, tokens, HEADS_KV, HEAD_DIM, device=device, dtype=dtype) for _ in range(2))
    pattern = pattern_of(tokens, share)

    def ours() -> Tensor:
        return decode_attention(q, k, v, pattern)  # type: ignore[return-value]

    case = f"{tokens} tokens, share {share}, batch {batch}"
    job.gate.check(case, "ours", "float64 of a head", ours()[0, 0, 0], expected(q, k, v, pattern & Causal()))
    contenders: dict[str, Callable[[], Any]] = {"ours": ours, "dense": lambda: dense(q, k, v)}
    if device == "cuda":
        contenders |= {f"{name}, graph": graphed(call) for name, call in list(contenders.items())}
        target = torch.empty_like(k)
        contenders["copy"] = lambda: target.copy_(k)
        some, copied = (x.flatten()[: _active(tokens, share) * batch * HEADS_KV * HEAD_DIM] for x in (k, target))
        contenders["copy of as many, graph"] = graphed(lambda: torch.add(some, 0, out=copied))
    repeats = 2 if job.quick else job.args.repeats
    times = {name: timing.median for name, timing in interleave(contenders, repeats, device=device).items()}
    read = 2 * batch * _active(tokens, share) * HEADS_KV * HEAD_DIM * k.element_size()
    fastest = "ours, graph" if device == "cuda" else "ours"
    found = {
        "tokens": tokens,
        "share": share,
        "batch": batch,
        "error": job.gate.checks[-1]["error"],
        "seconds": times,
        "times_faster": times[fastest.replace("ours", "dense")] / times[fastest],
        "bytes_of_active_blocks": read,
        "bandwidth": read / times[fastest],
    }
    if device == "cuda":
        found["copy_bandwidth"] = 2 * k.nbytes / times["copy"]
        found["share_of_copy_limit"] = found["bandwidth"] / found["copy_bandwidth"]
        found["share_of_copy_of_as_many"] = times["copy of as many, graph"] / times[fastest]
    return found


def decode(job: Job) -> Record:
    long = 8192 if job.quick else 1048576 if job.device == "cuda" else 131072
    lengths = job.args.tokens or [long // 16, long]
    batches = (1, 8) if job.device == "cuda" else (1,)
    rows = []
    with torch.no_grad():
        for tokens, share, batch in itertools.product(lengths, job.args.share, batches):
            rows.append(row(job, tokens, share, batch))
            text = "{tokens:>9,} tokens, {share:.0%}, batch {batch}: {times_faster:6.1f} x dense, error {error:.1e}"
            job.say(text.format(**rows[-1]))
    return {"rows": rows}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, nargs="+", help="lengths of the cache")
    parser.add_argument("--share", type=float, nargs="+", default=[0.01, 0.1], help="of the cache that is active")
    parser.add_argument("--repeats", type=int, default=20)


BENCHMARK = Benchmark(
    name="decode", about=__doc__, sections={"decode": decode}, devices=("cpu", "cuda"), options=options
)


if __name__ == "__main__":
    raise SystemExit(run(BENCHMARK))
