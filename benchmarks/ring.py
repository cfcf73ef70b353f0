"""The ring benchmark: what rings of 1 to 8 processes send and hold, and what the cost model says beyond them.

    python benchmarks/ring.py             # all of it, minutes; more processes than cores are fine, nothing is timed.
                                          # options: harness.py

rings    For each pattern and number of ranks, forward and backward over gloo on one machine, float32, 8 heads × 64:
         bytes that the ranks sent, beside the least that the pattern allows (a count from the block mask of the whole)
         and what passing everything around the ring, or gathering everything, would send; peak memory of a rank above
         its own shards of q, k and v. A ring's result is compared with one process.
balance  Work of the slowest rank ÷ mean, in active blocks, of causal layouts by placement.
plans    Seconds of one thread of a CPU in which a rank makes its plan of 1M tokens on 8 ranks, after that of 16K tokens
         was compared with the block mask of the whole; and the bytes that it keeps.
dilated  Bytes of LongNet's branches over shards that no block divides, beside the keys that heads count.
measured What `ring_cost` says beside the seconds of rings of processes over gloo, from rates of these processes: of the
         plain operator in all of them at once, and of messages between all of them at once.
model    Seconds of one layer for 2 to 1,024 devices, 1M to 1B tokens, by `ring_cost`; the rates are assumptions, and
         stand in the record.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import plots
from dilated_attention_pytorch import (
    BlockLayout,
    Causal,
    Chunks,
    Documents,
    DocumentSinks,
    GlobalTokens,
    Placement,
    PrefixLM,
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
from dilated_attention_pytorch.distributed.check import bandwidth, timed
from dilated_attention_pytorch.distributed.exchange import exchange
from dilated_attention_pytorch.distributed.needs import asked_of
from dilated_attention_pytorch.distributed.plan import plan_of
from dilated_attention_pytorch.distributed.shard import row_work
from dilated_attention_pytorch.distributed.work import Work
from dilated_attention_pytorch.layout.branches import cheapest_blocks
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
    results = in_processes(size, measure, what, tokens)
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
    """Token by token."""
    position = torch.arange(tokens)
    owner = placement.owner(position // placement.block_size)
    needed = 0
    for head in range(HEADS):
        wanted = torch.zeros(placement.world_size, tokens, dtype=torch.bool)
        for w, r, offset in branches.of_head(head, HEADS):
            kept = position[position % w % r == offset]
            for start in torch.unique(kept // w).tolist():
                keys = kept[kept // w == start]
                for asker in torch.unique(owner[keys]).tolist():
                    wanted[asker, keys[owner[keys] != asker]] = True
        needed += int(wanted.sum())
    return needed


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


LONG, ON = 2**20, 8


def packed(tokens: int) -> Documents:
    """Documents of 500 to 30,000 tokens."""
    generator, lengths = torch.Generator().manual_seed(0), []
    while sum(lengths) < tokens:
        lengths.append(min(int(torch.randint(500, 30000, (), generator=generator)), tokens - sum(lengths)))
    return Documents(tuple(lengths))


def planned(tokens: int) -> dict[str, Pattern]:
    documents = packed(tokens)
    return {
        "causal": Causal(),
        "causal documents": documents & Causal(),
        "documents with a causal prefix each": PrefixLM(64, documents.lengths),
        "documents, window and sinks": documents & SlidingWindow(4096, 0) | DocumentSinks(4, documents.lengths),
        "chunks of 8,192": Chunks(8192) & Causal(),
        "window of 4,096": SlidingWindow(4096, 0),
        "window and global tokens": SlidingWindow(4096, 0) | GlobalTokens(256),
    }


def plans(job: Job) -> Record:
    rows = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for kind in ("contiguous", "zigzag"):
        for name, pattern in planned(LONG >> 6).items():
            compare_needs(job, name, pattern, getattr(Placement, kind)(LONG >> 6, ON, block_size=BLOCK))
        for name, pattern in planned(LONG).items():
            job.say(f"plan: {name}, {kind}")
            seconds, nbytes = [], 0
            for rank in range(ON):
                work = work_of(pattern, getattr(Placement, kind)(LONG, ON, block_size=BLOCK))
                assert work.is_closed
                fastest = float("inf")
                for _ in range(5):
                    work = replace(work)  # what a plan remembers of its pattern is made again
                    began = time.thread_time()
                    plan = plan_of(0, work, rank)
                    fastest = min(fastest, time.thread_time() - began)
                seconds.append(fastest)
                nbytes = max(nbytes, plan.nbytes)
            rows.append({"pattern": name, "placement": kind, "slowest_seconds": max(seconds), "most_bytes": nbytes})
    torch.set_num_threads(threads)
    return {"tokens": LONG, "ranks": ON, "clock": "of the thread", "rows": rows}


def work_of(pattern: Pattern, placement: Placement) -> Work:
    return Work(
        what=pattern, is_causal=False, placements=(placement, placement), blocks=(BLOCK, BLOCK), num_residues=1,
        heads=HEADS, heads_kv=HEADS, device=torch.device("cpu"),
    )  # fmt: skip


def compare_needs(job: Job, name: str, pattern: Pattern, placement: Placement) -> None:
    """Key blocks that each rank needs of each other, beside those that its rows touch in the whole."""
    layout = BlockLayout.from_pattern(pattern, placement.seq, block_size=BLOCK)
    _, row, column, _ = layout.entries()
    of_rank = torch.zeros(placement.world_size, layout.num_k_blocks, dtype=torch.bool)
    of_rank[placement.owner(row.long()), column.long()] = True
    got = torch.zeros_like(of_rank)
    for asker, _, start, stop, _ in work_of(pattern, placement).pieces.tolist():
        got[asker, start:stop] = True
    job.gate.accept(f"{name}, {placement.seq} tokens", "plan", "block mask", float((got != of_rank).sum()), 0.0)


def dilated(job: Job) -> Record:
    """Shards of at least 8 blocks of 16 tokens, which no block of 64 tokens of 16 classes divides."""
    rows = []
    for branches in (LONGNET, Branches((256, 1024, 4096), (1, 2, 4)), Branches((512, 2048), (3, 5))):
        for size in (4, 8):
            for shard in (8 * 16, 25 * 16, 81 * 16, 177 * 16):
                placement = Placement.contiguous(size * shard - 7, size, block_size=16)
                block, num_residues = cheapest_blocks(branches, placement.seq, cut=placement.cut)
                work = Work(
                    what=branches, is_causal=False, placements=(placement, placement), blocks=(block, block),
                    num_residues=num_residues, heads=HEADS, heads_kv=HEADS, device=torch.device("cpu"),
                )  # fmt: skip
                one = HEADS if work.is_shared else 1
                pairs = [(rank, target) for rank in range(size) for target in range(size) if rank != target]
                sent = sum(len(asked_of(work, rank, target)) * one for rank, target in pairs)
                least = least_keys_of_branches(branches, placement.seq, placement)
                job.gate.accept(f"{branches}, {placement.seq} tokens", "sent", "counted", float(sent < least), 0.0)
                share = sent / least if least else None
                rows.append({"branches": str(branches), "ranks": size, "tokens": placement.seq, "sent_to_least": share})
    return {"rows": rows, "most": max(row["sent_to_least"] or 1.0 for row in rows)}


MEASURED = {
    "causal": (Causal(), 2048),
    "window of 1,024": (SlidingWindow(1024, 0), 4096),
    "window and global tokens": (SlidingWindow(512, 0) | GlobalTokens(128), 4096),
}


def measured(job: Job) -> Record:
    rows = []
    for size in SIZES[1:2] if job.quick else SIZES[1:]:
        for name, (pattern, shard) in MEASURED.items():
            job.say(f"measured: {name}, {size} ranks")
            placement = Placement.zigzag(size * shard, size, block_size=BLOCK)
            results = in_processes(size, rates_main, pattern, placement)
            slowest = max(result["seconds"] for result in results)
            rates = {rate: sum(result[rate] for result in results) / size for rate in ("flops", "bandwidth", "latency")}
            cost = ring_cost(
                pattern, placement.seq, size, heads=HEADS, head_dim=HEAD_DIM, itemsize=4, placement=placement,
                block_size=BLOCK, num_ranks=size, **rates,
            )  # fmt: skip
            difference = max(result["difference"] for result in results)
            job.gate.accept(f"{name}, {placement.seq} tokens", f"{size} ranks", "one process", difference, 1e-4)
            rows.append(
                {
                    "pattern": name, "ranks": size, "tokens": placement.seq, **rates,
                    "measured_seconds": slowest, "model_seconds": cost.forward_seconds,
                    "model_to_measured": cost.forward_seconds / slowest,
                }
            )  # fmt: skip
    return {"rows": rows}


def rates_main(rank: int, size: int, pattern: Pattern, placement: Placement) -> dict[str, Any]:
    """Seconds of a call, and the rates of this process while all others do the same."""
    group = dist.group.WORLD
    assert group is not None
    whole = [
        torch.randn(1, placement.seq, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(i)) for i in range(3)
    ]
    q, k, v = (shard_sequence(x, placement, group=group) for x in whole)
    own, cpu = q.shape[1], torch.device("cpu")
    layout = BlockLayout.from_pattern(pattern, own, block_size=BLOCK)
    pairs = layout.num_active_blocks * BLOCK**2 * HEADS

    def over_ring() -> torch.Tensor:
        return ring_block_sparse_attention(q, k, v, pattern, group=group, placement=placement)

    def small() -> None:
        following, before = (rank + 1) % size, (rank - 1) % size
        under_way = exchange(group, "a small message", send=(following, [q[0, 0]]), receive=(before, [one]))
        under_way.wait()
        under_way.finish()

    one = torch.empty_like(q[0, 0])
    plain = timed(lambda: block_sparse_attention(q, k, v, layout), group, cpu)
    result = {
        "seconds": timed(over_ring, group, cpu),
        "flops": 4.0 * HEAD_DIM * pairs / plain,
        "bandwidth": bandwidth(group, cpu)["bytes_a_second"],
        "latency": timed(small, group, cpu),
        "difference": 0.0,
    }
    out = unshard_sequence(over_ring(), placement, group=group)
    if rank == 0:
        result["difference"] = float((out - block_sparse_attention(*whole, pattern)).abs().max())
    return result


def in_processes(size: int, work: Any, *args: Any) -> list[dict[str, Any]]:
    """What `work(rank, size, *args)` gives in each of so many processes that form a ring."""
    context = mp.get_context("forkserver")
    queue: Any = context.SimpleQueue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        context.Process(target=process_main, args=(rank, size, store.port, queue, work, *args)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    results = [queue.get() for _ in range(size)]
    for process in processes:
        process.join()
    failed = [result["error"] for result in results if "error" in result]
    if failed:
        raise GateError(f"{work.__name__} on {size} ranks: {failed[0]}")
    return results


def process_main(rank: int, size: int, port: int, queue: Any, work: Any, *args: Any) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // size))
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port), rank=rank, world_size=size)
    try:
        queue.put(work(rank, size, *args))
    except (RuntimeError, ValueError) as error:
        queue.put({"error": str(error)})
    dist.destroy_process_group()


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


SECTIONS = {
    "rings": rings, "balance": balance, "plans": plans, "dilated": dilated, "measured": measured, "model": model,
}  # fmt: skip
BENCHMARK = Benchmark(
    name="ring",
    about=__doc__,
    sections=SECTIONS,
    untimed=["rings", "balance", "model"],
    summary=summary,
    draw=plots.ring,
)


if __name__ == "__main__":
    raise SystemExit(run(BENCHMARK))
