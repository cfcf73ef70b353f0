"""Where the time of a step goes. Nothing to run here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from torch.profiler import ProfilerActivity, profile

from harness import Job

KINDS = {
    "attention": ("forward_kernel", "backward_kernel", "dq_kernel", "dkv_kernel", "rows_kernel", "flash", "attention"),
    "matrices": ("gemm", "cutlass", "nvjet", "addmm", "aten::mm", "aten::linear"),
}


def profiled(job: Job, step: Callable[[], object], path: Path) -> dict[str, float]:
    """Where the time of a step goes, as a Chrome trace, as a line, and as shares by kind of kernel."""
    on_gpu = job.device == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    began = perf_counter()
    with profile(activities=activities) as seen:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    whole = 1e6 * (perf_counter() - began)
    seen.export_chrome_trace(str(path))
    spent = dict.fromkeys((*KINDS, "other"), 0.0)
    for event in seen.key_averages():
        took = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        kind = next((k for k, words in KINDS.items() if any(w in event.key.lower() for w in words)), "other")
        spent[kind] += took
    shares = {name: took / whole for name, took in spent.items()}
    shares["nothing on the device" if on_gpu else "unaccounted"] = max(0.0, 1 - sum(shares.values()))
    job.say("a step: " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items()))
    job.say(json.dumps(shares))
    return shares
