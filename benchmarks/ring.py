"""The ring benchmark: what rings of 1 to 8 processes send and hold, and what the cost model says beyond them.

    python benchmarks/ring.py             # all of it, minutes; more processes than cores are fine, nothing is timed.
                                          # options: harness.py

rings    For each pattern and number of ranks, forward and backward over gloo on one machine, float32, 8 heads × 64:
         bytes that the ranks sent, beside the least that the pattern allows (a count from the block mask of the whole)
         and what passing everything around the ring, or gathering everything, would send; peak memory of a rank above
         its own shards of q, k and v. A ring's result is compared with one process.
balance  Work of the slowest rank ÷ mean, in active blocks, of causal layouts by placement.
model    Seconds of one layer for 2 to 1,024 devices, 1M to 1B tokens, by `ring_cost`; the rates are assumptions, and
         stand in the record.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import plots
from dilated_attention_pytorch import (
    BlockLayout,
    Causal,
    Documents,
    GlobalTokens,
    Placement,
    SlidingWindow,
    SparsePatternConfig,
    block_sparse_attention,
    count_traffic,
    dilated_attention,
    ring_block_sparse_attention,
    ring_dilated_attention,
    shard_sequence,
    unshard_sequence,
)
from dilated_attention_pytorch.distributed import ring_cost
from dilated_attention_pytorch.distributed.shard import row_work
from dilated_attention_pytorch.memory import can_measure, measure_peak
from dilated_attention_pytorch.patterns import Branches, Pattern
from harness import Benchmark, GateError, Job, Record, run

HEADS, HEAD_DIM, BLOCK = 8, 64, 128
SIZES = (1, 2, 4, 8)
LONGNET = Branches((1024, 4096, 16384), (1, 4, 16))
PATTERNS: dict[str, Pattern | Branches] = {
    "local_window": SparsePatternConfig(pattern_type="local_window", local_window_size=512, block_size=BLOCK).pattern(),
    "dilated_sparse 95 %": SparsePatternConfig(sparsity_ratio=0.05, block_size=BLOCK).pattern(),
    "causal": Causal(),
    "LongNet": LONGNET,
}
# 30,000: multiples of segments times ranks would send next to nothing.
TOKENS = {"local_window": 30000, "dilated_sparse 95 %": 30000, "causal": 8192, "LongNet": 32768}

BALANCED: dict[str, Pattern] = {
    "causal": Causal(),
    "causal window, global tokens": SlidingWindow(4096, 0) | GlobalTokens(256),
    "causal documents of 1K to 20K": Documents((20000, 1000, 9000, 3000, 17000, 5000, 2000, 8536)),
}

# Assumptions of the model, for an H200 behind a link of 400 Gb/s: half of the advertised matrix rate, in a second.
RATES = {"flops": 500e12, "bandwidth": 50e9}
MODELLED = ((2**20, (2, 8, 32)), (2**24, (32, 128, 512)), (119 * 2**23, (1024,)))  # shards of whole segments; below 2³⁰
WINDOW = SlidingWindow(4096, 0)


def rings(job: Job) -> Record:
    rows = []
    for name, what in PATTERNS.items():
        tokens = TOKENS[name] // 16 if job.quick else TOKENS[name]
        for size in SIZES[:2] if job.quick else SIZES:
            job.say(f"{name}, {tokens} tokens, {size} ranks")
            rows.append(one_ring(job, name, what, tokens, size))
    return {"rows": rows}


def one_ring(job: Job, name: str, what: Pattern | Branches, tokens: int, size: int) -> dict[str, Any]:
    context = mp.get_context("forkserver")
    queue: Any = context.SimpleQueue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = size, store.port, what, tokens, queue
    processes = [context.Process(target=rank_main, args=(rank, *given)) for rank in range(size)]
    for process in processes:
        process.start()
    results = [queue.get() for _ in range(size)]
    for process in processes:
        process.join()
    failed = [result["error"] for result in results if "error" in result]
    if failed:
        raise GateError(f"{name} on {size} ranks: {failed[0]}")
    difference = max(result["difference"] for result in results)
    job.gate.accept(f"{name}, {tokens} tokens", f"{size} ranks", "one process", difference, 1e-4)
    a_key = 2 * HEAD_DIM * 4
    everything = (size - 1) * tokens * HEADS * a_key
    sent = sum(result["forward_bytes"] for result in results)
    return {
        "pattern": name,
        "tokens": tokens,
        "ranks": size,
        "sent_bytes": sent,
        "least_bytes": least_keys(what, tokens, size) * a_key,
        "full_ring_bytes": everything,
        "all_gather_bytes": everything,
        "times_less": everything / sent if sent else None,
        "backward_sent_bytes": sum(result["backward_bytes"] for result in results),
        "peak_bytes_of_a_rank": max(result["peak_bytes"] or 0 for result in results) or None,
        "largest_difference": difference,
    }


def least_keys(what: Pattern | Branches, tokens: int, size: int) -> int:
    """Keys, each of one head, that some query of another rank attends to, in whole blocks; from the whole pattern."""
    if size == 1:
        return 0
    placement = Placement.contiguous(tokens, size, block_size=BLOCK)
    if isinstance(what, Branches):
        return least_keys_of_branches(what, tokens, placement)
    layout = BlockLayout.from_pattern(what, tokens, block_size=BLOCK)
    _, row, column, _ = layout.entries()
    pairs = torch.unique(placement.owner(row) * layout.num_k_blocks + column)
    asker, block = pairs // layout.num_k_blocks, pairs % layout.num_k_blocks
    remote = block[placement.owner(block) != asker]
    return int((tokens - remote * BLOCK).clamp(max=BLOCK).sum()) * HEADS


def least_keys_of_branches(branches: Branches, tokens: int, placement: Placement) -> int:
    """Token by token, then rounded up to the blocks of a class in which keys travel."""
    from dilated_attention_pytorch.layout.branches import cheapest_blocks

    block, num_residues = cheapest_blocks(branches, tokens, cut=placement.cut or None)
    position = torch.arange(tokens)
    owner = placement.owner(position // BLOCK)
    needed = 0
    for head in range(HEADS):
        wanted = set()
        for w, r, offset in branches.of_head(head, HEADS):
            kept = position[position % w % r == offset]
            for start in torch.unique(kept // w).tolist():
                keys = kept[kept // w == start]
                for asker in torch.unique(owner[keys]).tolist():
                    remote = keys[owner[keys] != asker]
                    unit = remote // (block * num_residues) * num_residues + remote % num_residues
                    wanted |= {(asker, code) for code in torch.unique(unit).tolist()}
        code = torch.tensor(sorted(code for _, code in wanted))
        start = code // num_residues * num_residues * block + code % num_residues
        needed += int(((tokens - start + num_residues - 1) // num_residues).clamp(max=block).sum())
    return needed


def rank_main(rank: int, size: int, port: int, what: Pattern | Branches, tokens: int, queue: Any) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // size))
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=size)
    try:
        queue.put(measure(rank, size, what, tokens))
    except (RuntimeError, ValueError) as error:
        queue.put({"error": str(error)})
    dist.destroy_process_group()


def measure(rank: int, size: int, what: Pattern | Branches, tokens: int) -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    placement = Placement.contiguous(tokens, size, block_size=BLOCK)

    def whole(number: int) -> torch.Tensor:
        return torch.randn(1, tokens, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(number))

    shards = [shard_sequence(whole(i), placement, group=group).clone().requires_grad_() for i in range(3)]

    def attend() -> torch.Tensor:
        if isinstance(what, Branches):
            return ring_dilated_attention(
                *shards, segment_lengths=what.segment_lengths, dilation_rates=what.dilation_rates,
                group=group, placement=placement,
            )  # fmt: skip
        return ring_block_sparse_attention(*shards, what, group=group, placement=placement)

    with count_traffic() as forward:
        result = attend()
    with count_traffic() as backward:
        result.backward(result.detach())
    out = unshard_sequence(result.detach(), placement, group=group)
    difference = 0.0
    if rank == 0:
        q, k, v = (whole(i) for i in range(3))
        if isinstance(what, Branches):
            alone = dilated_attention(
                q, k, v, segment_lengths=what.segment_lengths, dilation_rates=what.dilation_rates
            )  # fmt: skip
        else:
            alone = block_sparse_attention(q, k, v, what)
        difference = float((out - alone).abs().max())
        del q, k, v, alone
    del out, result
    peak_bytes = None
    if can_measure()[0]:
        for x in shards:
            x.grad = None
        dist.barrier()
        with measure_peak() as peak:
            result = attend()
            result.backward(result.detach())
        peak_bytes = peak.peak_bytes
    return {
        "forward_bytes": forward.bytes,
        "backward_bytes": backward.bytes,
        "peak_bytes": peak_bytes,
        "difference": difference,
    }


def balance(job: Job) -> Record:
    tokens = 2**16
    rows = []
    for name, pattern in BALANCED.items():
        work = row_work(pattern, tokens, BLOCK, is_causal=True)
        for size in SIZES[1:]:
            placements = {
                "contiguous": Placement.contiguous(tokens, size, block_size=BLOCK),
                "zigzag": Placement.zigzag(tokens, size, block_size=BLOCK),
                "balanced": Placement.balanced(pattern, tokens, size, is_causal=True, block_size=BLOCK),
            }
            for kind, placement in placements.items():
                load = placement.load(work)
                slowest = float(load.max() / load.mean())
                rows.append({"pattern": name, "ranks": size, "placement": kind, "slowest_to_mean": slowest})
    return {"rows": rows}


def model(job: Job) -> Record:
    """Causal, one layer, 8 heads × 128, half precision; of the last rank, which has the most to do."""
    shape: dict[str, Any] = {"heads": 8, "head_dim": 128, "is_causal": True, "num_ranks": 1}
    branches = Branches((2048, 16384, 131072), (1, 8, 64))
    rows = []
    for seq, sizes in MODELLED[:1] if job.quick else MODELLED:
        for size in sizes:
            job.say(f"model: {seq} tokens, {size} devices")
            for name, what in (("window of 4,096", WINDOW), ("LongNet", branches)):
                cost = ring_cost(what, seq, size, **RATES, **shape)
                rows.append({"pattern": name, **vars(cost)})
    return {"rates": RATES, "rows": rows}


def summary(record: Record) -> Record:
    rows = record.get("rings", {}).get("rows", [])
    balanced = [row for row in record.get("balance", {}).get("rows", []) if row["placement"] == "balanced"]
    return {
        "exact_bytes": all(row["sent_bytes"] == row["least_bytes"] for row in rows),
        # In ascending order of ranks: the largest ring stays.
        "times_less": {row["pattern"]: row["times_less"] for row in rows},
        "balanced_slowest_to_mean": max((row["slowest_to_mean"] for row in balanced), default=None),
    }


SECTIONS = {"rings": rings, "balance": balance, "model": model}
BENCHMARK = Benchmark(
    name="ring", about=__doc__, sections=SECTIONS, untimed=list(SECTIONS), summary=summary, draw=plots.ring
)


if __name__ == "__main__":
    raise SystemExit(run(BENCHMARK))
