"""A self-check of the ring on your machines, in a minute:

    torchrun --nproc-per-node 8 -m dilated_attention_pytorch.distributed.check
    torchrun --nproc-per-node 2 -m dilated_attention_pytorch.distributed.check --share-gpu    # one GPU for all

exactness  outputs and gradients beside one process that has the whole, in float64; in float32 on GPUs, where the ring
           may err as much as the plain operator does.
bytes      what the ranks send, beside what `ring_cost` says.
bandwidth  of messages to both neighbours at once, in each rank.
overlap    of a call, how much of the shorter of computing and exchanging is hidden behind the longer.
faults     a rank that makes another call, that refuses its arguments, and that stays away: the others hear of it.

It uses NCCL where every process has a GPU of its own, else gloo. The last line is JSON; the exit status is 1 if a check
failed. Bandwidth and overlap are figures, not checks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops import block_sparse_attention, dilated_attention
from ..patterns import Branches, Causal, Documents, GlobalTokens, Pattern, RandomBlocks, SlidingWindow
from .attention import ring_block_sparse_attention, ring_dilated_attention
from .cost import ring_cost
from .exchange import RingError, count_traffic, exchange
from .passes import arriving, forward_of_part
from .ring import Call, check_options_of_ring
from .shard import Placement, shard_sequence

HEADS, HEAD_DIM, BLOCK = 4, 64, 64
SHARD = 512  # tokens of a rank, where results are compared
MESSAGE = 32 << 20  # bytes, where bandwidth is measured
STAYS_AWAY = 3.0  # seconds of the timeout of a group whose last rank does not come

Result = dict[str, Any]


def cases(seq: int) -> dict[str, Pattern | Branches]:
    return {
        "window": SlidingWindow(200, 100),
        "causal": Causal(),
        "documents": Documents((seq // 3, seq // 2, seq - seq // 3 - seq // 2)) & Causal(),
        "global tokens": GlobalTokens(50) | SlidingWindow(100, 0),
        "random blocks": RandomBlocks(3, block_size=BLOCK),
        "dilated": Branches((256, seq), (1, 4)),
    }


def attend(what: Pattern | Branches, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Over a ring if a group is among the options, else in this process."""
    if isinstance(what, Branches):
        dilated: Callable[..., Any] = ring_dilated_attention if "group" in options else dilated_attention
        branches = {"segment_lengths": what.segment_lengths, "dilation_rates": what.dilation_rates}
        return dilated(q, k, v, **branches, **options)
    sparse: Callable[..., Any] = ring_block_sparse_attention if "group" in options else block_sparse_attention
    return sparse(q, k, v, what, **options)


def with_gradients(what: Pattern | Branches, tensors: Sequence[Tensor], do: Tensor, **options: Any) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = attend(what, *leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, do)]


def exactness(group: dist.ProcessGroup, device: torch.device) -> Result:
    """The largest error of each case and what it may be; of this rank's own part of outputs and gradients."""
    size, dtype = dist.get_world_size(group), torch.float64 if device.type == "cpu" else torch.float32
    seq = size * SHARD - 8  # shards of different lengths
    placement = Placement.contiguous(seq, size, block_size=BLOCK)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, seq, HEADS, HEAD_DIM, generator=generator, dtype=dtype).to(device) for _ in range(4)]
    own = [shard_sequence(x, placement, group=group) for x in whole]
    errors, allowed = {}, {}
    for name, what in cases(seq).items():
        exact = [x.double() for x in whole]
        right = with_gradients(what, exact[:3], exact[3], backend="reference")
        plain = with_gradients(what, whole[:3], whole[3])
        got = with_gradients(what, own[:3], own[3], group=group, placement=placement)
        errors[name] = max(
            float((mine.double() - shard_sequence(x, placement, group=group)).abs().max())
            for mine, x in zip(got, right, strict=True)
        )
        of_plain = max(float((mine.double() - x).abs().max()) for mine, x in zip(plain, right, strict=True))
        largest = max(float(x.abs().max()) for x in right)
        allowed[name] = 4 * of_plain + 100 * torch.finfo(dtype).eps * largest
    ok = all(errors[name] <= allowed[name] for name in errors)
    return {"ok": ok, "largest_error": errors, "allowed": allowed}


def traffic(group: dist.ProcessGroup, device: torch.device) -> Result:
    """Bytes that this rank sends forward, and the most that the model says of any."""
    size = dist.get_world_size(group)
    seq = size * SHARD
    placement = Placement.contiguous(seq, size, block_size=BLOCK)
    sent, most = {}, {}
    for name, what in cases(seq).items():
        q = torch.zeros(1, placement.num_tokens(dist.get_rank(group)), HEADS, HEAD_DIM, device=device)
        with count_traffic() as counted:
            attend(what, q, q, q, group=group, placement=placement)
        cost = ring_cost(
            what, seq, size, heads=HEADS, head_dim=HEAD_DIM, itemsize=4, placement=placement, block_size=BLOCK,
            num_ranks=size, flops=1.0, bandwidth=1.0,
        )  # fmt: skip
        sent[name], most[name] = counted.bytes, cost.sent_bytes
    return {"ok": all(sent[name] <= most[name] for name in sent), "sent": sent, "model": most}


def timed(work: Callable[[], object], group: dist.ProcessGroup, device: torch.device, repeats: int = 3) -> float:
    """Seconds of the fastest of a few, begun by all ranks together."""
    fastest = float("inf")
    for _ in range(repeats + 1):  # the first warms up
        torch.accelerator.synchronize() if device.type != "cpu" else None
        dist.barrier(group)
        began = time.perf_counter()
        work()
        torch.accelerator.synchronize() if device.type != "cpu" else None
        fastest = min(fastest, time.perf_counter() - began)
    return fastest


def bandwidth(group: dist.ProcessGroup, device: torch.device) -> Result:
    """Bytes a second, each way, from and to the neighbours."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    given, taken = (torch.zeros(MESSAGE // 4, device=device) for _ in range(2))

    def pass_on() -> None:
        following, before = (rank + 1) % size, (rank - 1) % size
        under_way = exchange(group, "a check of bandwidth", send=(following, [given]), receive=(before, [taken]))
        under_way.wait()
        under_way.finish()

    return {"ok": True, "bytes_a_second": MESSAGE / timed(pass_on, group, device)}


def overlap(group: dist.ProcessGroup, device: torch.device, tokens: int, trace: str | None = None) -> Result:
    """Seconds of a causal call, of computing and of exchanging alone, and the share of the shorter that is hidden."""
    size = dist.get_world_size(group)
    placement = Placement.zigzag(size * tokens, size)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    own = placement.num_tokens(dist.get_rank(group))
    q, k, v = (torch.randn(1, own, HEADS, HEAD_DIM, device=device, dtype=dtype) for _ in range(3))
    options = check_options_of_ring(q, k, v, placement, dist.get_rank(group))
    call = Call(q, k, v, Causal(), group, placement, False, "auto", options)
    agreed = call.agreed("always")

    def exchanged() -> None:
        for _ in arriving(agreed, k, v):
            pass

    def computed() -> None:
        for parts in (agreed.plan.own, *(step.parts for step in agreed.plan.steps)):
            for part in parts:
                forward_of_part(q[:, part.queries], part, [k, v], agreed)

    def both() -> Tensor:
        return attend(Causal(), q, k, v, group=group, placement=placement)

    seconds = {name: timed(work, group, device) for name, work in
               (("call", both), ("computing", computed), ("exchanging", exchanged))}  # fmt: skip
    if trace is not None:
        with torch.profiler.profile() as profile:
            both()
            torch.accelerator.synchronize() if device.type != "cpu" else None
        profile.export_chrome_trace(f"{trace}.{dist.get_rank(group)}.json")
    apart = seconds["computing"] + seconds["exchanging"]
    shorter = min(seconds["computing"], seconds["exchanging"])
    return {"ok": True, "seconds": seconds, "hidden": min(1.0, max(0.0, (apart - seconds["call"]) / shorter))}


def faults(group: dist.ProcessGroup, device: torch.device) -> Result:
    """What this rank heard of a last rank that makes another call, refuses one, and stays away."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    last = rank == size - 1
    placement = Placement.contiguous(size * 64, size, block_size=64)
    q = torch.zeros(1, 64, HEADS, HEAD_DIM, device=device)

    def heard(where: dist.ProcessGroup, *, window: int = 9, **options: Any) -> str:
        try:
            attend(SlidingWindow(window, 0), q, q, q, group=where, placement=placement, **options)
        except (ValueError, RingError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    told: dict[str, tuple[str, str]] = {}
    for agreement in ("always", "first"):
        odd = heard(group, window=10 if last else 9, agreement=agreement), "pattern: "
        refused = heard(group, dropout_p=2.0 if last else 0.0, agreement=agreement), "dropout_p must be"
        told |= {f"another call, {agreement}": odd, f"refused, {agreement}": refused}
    alone = dist.new_group(dist.get_process_group_ranks(group), timeout=timedelta(seconds=STAYS_AWAY))
    told["before it stays away"] = heard(alone), ""
    if not last:
        told["stays away"] = heard(alone), "the ring is broken"
    dist.barrier(group)
    wrong = {name: text for name, (text, cause) in told.items() if (cause not in text) or (not cause and text)}
    return {"ok": not wrong, "wrong": wrong}


CHECKS = ("exactness", "bytes", "bandwidth", "overlap", "faults")


def run(
    group: dist.ProcessGroup,
    device: torch.device,
    tokens: int,
    trace: str | None = None,
    only: Sequence[str] = CHECKS,
) -> Result:
    """The checks, one after the other: of each what every rank found."""
    checks: dict[str, Callable[[], Result]] = {
        "exactness": lambda: exactness(group, device),
        "bytes": lambda: traffic(group, device),
        "bandwidth": lambda: bandwidth(group, device),
        "overlap": lambda: overlap(group, device, tokens, trace),
        "faults": lambda: faults(group, device),
    }
    results: Result = {"ranks": dist.get_world_size(group), "backend": dist.get_backend(group), "device": device.type}
    for name in only:
        check = checks[name]
        of_ranks: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(of_ranks, check(), group=group)
        results[name] = {"ok": all(each["ok"] for each in of_ranks), "of_ranks": of_ranks}
        if dist.get_rank(group) == 0:
            print(f"{name:10} {'ok  ' if results[name]['ok'] else 'FAIL'} {_in_words(name, of_ranks)}", flush=True)
    results["ok"] = all(results[name]["ok"] for name in only)
    return results


def _in_words(name: str, of_ranks: list[Result]) -> str:
    if name == "exactness":
        return "largest error " + ", ".join(
            f"{case} {max(each['largest_error'][case] for each in of_ranks):.1e}" for case in of_ranks[0]["allowed"]
        )
    if name == "bytes":
        return "all ranks together " + ", ".join(
            f"{case} {sum(each['sent'][case] for each in of_ranks) / 1e6:.2f} MB" for case in of_ranks[0]["sent"]
        )
    if name == "bandwidth":
        rates = [each["bytes_a_second"] / 1e9 for each in of_ranks]
        return f"{min(rates):.2f} to {max(rates):.2f} GB/s each way in a rank"
    if name == "overlap":
        slowest = max(of_ranks, key=lambda each: each["seconds"]["call"])
        seconds = ", ".join(f"{part} {value * 1e3:.1f} ms" for part, value in slowest["seconds"].items())
        return f"{slowest['hidden']:.0%} of the shorter hidden ({seconds}; causal, the slowest rank)"
    wrong = {case: text for each in of_ranks for case, text in each["wrong"].items()}
    return "; ".join(f"{case}: heard {text!r}" for case, text in wrong.items()) or "named on every rank"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="dilated_attention_pytorch.distributed.check", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--backend", choices=("auto", "nccl", "gloo"), default="auto")
    parser.add_argument("--share-gpu", action="store_true", help="all processes on one GPU, gloo through the host")
    parser.add_argument("--tokens", type=int, help="of a rank, for overlap: 2,048, on GPUs 32,768")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=CHECKS, metavar="CHECK",
                        help=f"some of {', '.join(CHECKS)}")  # fmt: skip
    parser.add_argument("--trace", metavar="FILE", help="write a profiler trace of a call, FILE.RANK.json")
    options = parser.parse_args(arguments)
    if "LOCAL_RANK" not in os.environ:
        parser.error(
            "start it with torchrun: torchrun --nproc-per-node N -m dilated_attention_pytorch.distributed.check"
        )
    local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    own_gpu = gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")) and not options.share_gpu
    if (options.share_gpu and not gpus) or (options.backend == "nccl" and not own_gpu):
        parser.error(f"--share-gpu needs a GPU, and nccl one for each process; this machine has {gpus}")
    backend = ("nccl" if own_gpu else "gloo") if options.backend == "auto" else options.backend
    device = torch.device("cpu")
    if options.share_gpu or backend == "nccl":
        device = torch.device("cuda", 0 if options.share_gpu else local)
        torch.cuda.set_device(device)
    tokens = options.tokens or (2048 if device.type == "cpu" else 32768)
    dist.init_process_group(backend, timeout=timedelta(seconds=120))
    try:
        group = dist.group.WORLD
        assert group is not None
        results = run(group, device, tokens, options.trace, options.only)
        if dist.get_rank() == 0:
            print(json.dumps(results), flush=True)
    finally:
        dist.destroy_process_group()
    return 0 if results["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
