"""Decoding: one new token against a long cache, ours over the active blocks against dense attention over everything.

    PYTHONPATH=src python benchmarks/decode.py                       # the device at hand; a minute
    PYTHONPATH=src python benchmarks/decode.py --tokens 1048576 --share 0.01

A row has a cache of some length, random active blocks of 128 tokens (and the newest), batch 1 and, on a GPU, 8. Dense
is PyTorch's `scaled_dot_product_attention` over the whole cache (on a GPU flash decoding: it splits the keys).
Bandwidth is the bytes of the active keys and values ÷ time; the copy limit is that of a copy of all keys, both ways
counted, and beside it that of a kernel that moves as many bytes as the active keys and values are. On a GPU times are
those of CUDA graphs, and of calls from Python beside them. Contenders take turns, on a GPU several calls at a time.
Before a row is timed its output is compared with float64 attention over the keys that it sees; a wrong one ends the
run with exit status 1. Writes --out (benchmarks/results/decode_cpu.json or decode_gpu.json).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cases import HERE, environment, write_json
from dilated_attention_pytorch import Causal, LocalBlocks, RandomBlocks, decode_attention
from dilated_attention_pytorch.testing.timing import gpu_seconds, seconds

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


def error_of(out: Tensor, q: Tensor, k: Tensor, v: Tensor, pattern: Any) -> float:
    """Largest error ÷ largest value, of the first sample and head, by asking the pattern for every block of keys."""
    tokens = k.shape[1]
    seen = [j for j in range(0, tokens, BLOCK) if pattern.allows(tokens - 1, j, tokens, tokens)]
    at = torch.cat([torch.arange(j, min(j + BLOCK, tokens), device=k.device) for j in seen])
    keys, values = (x[0, at, 0].double() for x in (k, v))
    weights = torch.softmax(keys @ q[0, 0, 0].double() * HEAD_DIM**-0.5, 0)
    want = weights @ values
    return float((out[0, 0, 0].double() - want).abs().max() / want.abs().max())


def graphed(call: Callable[[], Any]) -> Callable[[], Any]:
    """The same as a CUDA graph: what the device takes, without Python."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def row(tokens: int, share: float, batch: int, device: str, repeats: int) -> dict[str, Any]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q = torch.randn(batch, 1, HEADS, HEAD_DIM, device=device, dtype=dtype)
    k, v = (torch.randn(batch, tokens, HEADS_KV, HEAD_DIM, device=device, dtype=dtype) for _ in range(2))
    pattern = pattern_of(tokens, share)

    def ours() -> Tensor:
        return decode_attention(q, k, v, pattern)  # type: ignore[return-value]

    error = error_of(ours(), q, k, v, pattern & Causal())
    if not error < (2e-2 if dtype == torch.bfloat16 else 2e-5):
        sys.exit(f"wrong: {tokens} tokens, share {share}: error {error:.2e}")
    contenders: dict[str, Callable[[], Any]] = {"ours": ours, "dense": lambda: dense(q, k, v)}
    if device == "cuda":
        contenders |= {f"{name}, graph": graphed(call) for name, call in list(contenders.items())}
        target = torch.empty_like(k)
        contenders["copy"] = lambda: target.copy_(k)
        some, copied = (x.flatten()[: _active(tokens, share) * batch * HEADS_KV * HEAD_DIM] for x in (k, target))
        contenders["copy of as many, graph"] = graphed(lambda: torch.add(some, 0, out=copied))
    if device == "cuda":
        calls = {name: max(1, min(20, int(5e-3 / gpu_seconds(run)))) for name, run in contenders.items()}
        turns = [{name: gpu_seconds(run, calls[name]) for name, run in contenders.items()} for _ in range(repeats)]
    else:
        turns = [{name: seconds(run) for name, run in contenders.items()} for _ in range(repeats)]
    times = {name: statistics.median(turn[name] for turn in turns) for name in contenders}
    read = 2 * batch * _active(tokens, share) * HEADS_KV * HEAD_DIM * k.element_size()
    fastest = "ours, graph" if device == "cuda" else "ours"
    found = {
        "tokens": tokens,
        "share": share,
        "batch": batch,
        "error": error,
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    long = 1048576 if device == "cuda" else 131072
    parser.add_argument("--tokens", type=int, nargs="+", default=[long // 16, long])
    parser.add_argument("--share", type=float, nargs="+", default=[0.01, 0.1])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--commit", help="the commit, where the tree has no .git")
    parser.add_argument(
        "--out", type=Path, default=HERE / "results" / f"decode_{'gpu' if device == 'cuda' else 'cpu'}.json"
    )
    args = parser.parse_args()
    record: dict[str, Any] = {"environment": environment(), "command": "python benchmarks/decode.py", "rows": []}
    if args.commit:
        record["environment"]["commit"] = args.commit
    if device == "cuda":
        record["environment"]["device"] = torch.cuda.get_device_name()
    with torch.no_grad():
        for tokens in args.tokens:
            for share in args.share:
                for batch in (1, 8) if device == "cuda" else (1,):
                    record["rows"].append(found := row(tokens, share, batch, device, args.repeats))
                    limit = ""
                    if device == "cuda":
                        limit = ", {share_of_copy_limit:.0%} of copy, {share_of_copy_of_as_many:.0%} of as many".format(
                            **found
                        )
                    print(
                        f"{tokens:>9,} tokens, {share:.0%}, batch {batch}: {found['times_faster']:6.1f} x dense, "
                        f"{found['bandwidth'] / 1e9:7.1f} GB/s{limit}, error {found['error']:.1e}",
                        flush=True,
                    )
    write_json(args.out, record)


if __name__ == "__main__":
    main()
