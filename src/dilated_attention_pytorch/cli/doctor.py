"""`dilated-attention doctor`: what is installed, which backend runs and why no other, and whether results are right.

The self-check computes small calls, forward and backward, on every device and by every backend that can run them, and
compares outputs, lse and gradients with the reference in float64, within the tolerances of `testing`. It begins no new
check after `LIMIT` seconds; those that are left are named. One that fails makes the exit status 1.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from importlib import metadata
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from torch import Tensor

from ..caches import cache_report
from ..layout import BlockLayout
from ..memory.devices import Device, as_text
from ..ops import block_sparse_attention, explain
from ..patterns import Branches, Causal, DilatedBlocks, GlobalTokens, Pattern, RandomBlocks, SlidingWindow
from ..testing import Case, assert_exact
from ..testing.timing import cpu_model, environment, hint_of_load
from .call import dtype_name
from .output import Document, FailedError, one_thread, steps, table

LIMIT = 10.0
TOKENS, BLOCK = 150, 16  # no multiple of a block

# What the library uses if it is there, and what for.
PACKAGES = {
    "torch": "needed",
    "triton": "kernels on a GPU",
    "safetensors": "saved models and layouts",
    "matplotlib": "pictures",
    "typer": "this command",
    "rich": "this command",
    "transformers": "`fidelity`, Hugging Face models",
    "flash-attn": "a rival in `bench`",
    "xformers": "a rival in `bench`",
}

# What people call; the first is the usual one.
CALLS: dict[str, tuple[Pattern | Branches, bool]] = {
    "block-sparse": (SlidingWindow(left=40, right=20) | GlobalTokens(8), False),
    "dense, causal": (Causal(), False),
    "dilated": (Branches((32, 64, 150), (1, 2, 4)), True),
}
CHECKED: dict[str, tuple[Pattern | Branches, bool]] = {
    "window | global tokens, causal": (SlidingWindow(left=40, right=20) | GlobalTokens(8, queries=True), True),
    "dilated blocks | random blocks": (
        DilatedBlocks((48, 96), (1, 2), 0.6, BLOCK) | RandomBlocks(2, block_size=BLOCK),
        False,
    ),
    "branches of dilated attention, causal": (Branches((20, 64, 150), (1, 2, 3)), True),
    "everything before a token": (Causal(), False),
}
DTYPES = {
    "cpu": (torch.float64, torch.float32, torch.bfloat16),
    "cuda": (torch.bfloat16, torch.float32, torch.float16),
}


def run(console: Console) -> Document:
    """Print all of it. FailedError if a check fails."""
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    here = environment()
    document: Document = {
        **{name: here[name] for name in ("library", "python", "system")},
        "threads": {**{name: here[name] for name in ("thread_settings", "load_before")}, "hint": hint_of_load(here)},
        "packages": {name: _version(name) for name in PACKAGES},
        "compiler": _compiler(),
        "devices": [_device(name) for name in devices],
    }
    _print_installed(console, document)
    document["backends"] = [_explained(device, name) for device in devices for name in CALLS]
    _print_backends(console, document["backends"])
    document["checks"], document["checks_left"], seconds = _check(console, devices)
    failed = [check for check in document["checks"] if not check["passed"]]
    document["passed"] = not failed
    _print_checks(console, document["checks"], document["checks_left"], seconds)
    document["caches"] = [each._asdict() for each in cache_report()]
    _print_caches(console, document["caches"])
    if failed:
        raise FailedError(f"{len(failed)} of {len(document['checks'])} checks failed: {failed[0]['error']}", document)
    return document


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _compiler() -> str | None:
    """The one that torch.compile takes on a CPU, FlexAttention too."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "c++", "clang++"))), None)


def _device(name: str) -> Document:
    device = Device.of(name)
    found: Document = {"device": name, "name": device.name, "bytes": device.budget}
    if device.type == "cuda":
        return {**found, "capability": list(device.capability)}
    return {**found, "name": cpu_model(), "threads": torch.get_num_threads()}


def _print_installed(console: Console, document: Document) -> None:
    console.print(f"dilated-attention-pytorch {document['library']}, Python {document['python']}, {document['system']}")
    made = table("package", "version", "for", title="Installed")
    for name, version in document["packages"].items():
        made.add_row(name, version or "not installed", escape(PACKAGES[name]))
    made.add_row("C++ compiler", document["compiler"] or "not found", "torch.compile on a CPU, FlexAttention")
    console.print(made)
    made = table("device", "name", "", right=("memory",), title="Devices")
    for each in document["devices"]:
        about = f"{each['threads']} threads" if "threads" in each else "capability {}.{}".format(*each["capability"])
        made.add_row(each["device"], each["name"], about, as_text(each["bytes"]))
    console.print(made)
    if document["threads"]["hint"] is not None:
        console.print(document["threads"]["hint"], soft_wrap=True)
    if not torch.cuda.is_available():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        console.print(f"No GPU: this PyTorch is built {built}" + (", but sees none." if torch.version.cuda else "."))


def _explained(device: str, name: str) -> Document:
    pattern, is_causal = CALLS[name]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q = torch.empty(1, TOKENS, 8, 64, dtype=dtype, device=device)
    found = explain(q, q, q, pattern, is_causal=is_causal)
    return {"device": device, "call": name, "dtype": dtype_name(dtype), "chosen": found.chosen, "why": found.reasons}


def _print_backends(console: Console, backends: list[Document]) -> None:
    made = table("call", "backend", "why, or why not", title="Which backend runs")
    for each in backends:
        made.add_section()
        name = f"{each['call']}, {each['device']}, {each['dtype']}"
        for backend, reason in each["why"].items():
            mark = "→ " if backend == each["chosen"] else "  "
            made.add_row(name, mark + backend, escape(reason))
            name = ""
    console.print(made)


@dataclass(frozen=True)
class _WithoutLse(Case):
    """For a backend that gives no lse: the reference's stands in for it."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, backend: str) -> Any:
        out, lse = super().attend(q, k, v, "reference")
        if backend != "reference":
            assert isinstance(self.layout, BlockLayout)
            out = block_sparse_attention(q, k, v, self.layout, is_causal=self.is_causal, backend=backend)
        return out, lse


def _case(pattern: Pattern | Branches, is_causal: bool, dtype: torch.dtype, device: str) -> Case:
    """Two query heads share a key head, but where PyTorch's own kernel is to run."""
    draw = torch.Generator().manual_seed(0)
    heads_kv = 4 if pattern == Causal() else 2
    q, k, v, do = (
        torch.randn(2, TOKENS, heads, 16, generator=draw).to(device, dtype) for heads in (4, heads_kv, heads_kv, 4)
    )
    dlse = torch.randn(2, 4, TOKENS, generator=draw).to(device)
    if isinstance(pattern, Branches):
        return Case(q, k, v, pattern, do, dlse, is_causal)
    layout = BlockLayout.from_pattern(pattern, TOKENS, block_size=BLOCK, device=device)
    return Case(q, k, v, layout, do, dlse, is_causal)


def _check(console: Console, devices: list[str]) -> tuple[list[Document], int, float]:
    """Results, how many were left for want of time, and seconds."""
    planned = [
        (device, dtype, name)
        for turn in range(len(DTYPES["cpu"]))
        for device in devices
        for dtype in (DTYPES[device.partition(":")[0]][turn],)
        for name in CHECKED
    ]
    done: list[Document] = []
    left = 0
    started = perf_counter()
    with steps(console, len(planned)) as announce, one_thread():
        for device, dtype, name in planned:
            announce(f"checking {name}, {dtype_name(dtype)}, {device}")
            if perf_counter() - started > LIMIT:
                left += 1
                continue
            done += _checked(device, dtype, name)
    return done, left, perf_counter() - started


def _checked(device: str, dtype: torch.dtype, name: str) -> list[Document]:
    """One result for every backend that can run it."""
    case = _case(*CHECKED[name], dtype, device)
    reasons = explain(case.q, case.k, case.v, case.layout, is_causal=case.is_causal).reasons
    found = []
    for backend, reason in reasons.items():
        if backend == "reference" or reason.startswith("cannot"):
            continue
        mine = case
        if backend == "sdpa":
            mine = _WithoutLse(**{**vars(case), "dlse": torch.zeros_like(case.dlse)})
        error = None
        try:
            assert_exact(mine, backend)
        except Exception as raised:  # noqa: BLE001 - whatever goes wrong is what a doctor reports
            error = f"{name}, {device}: {str(raised).strip() or type(raised).__name__}".splitlines()[0]
        found.append(
            {"device": device, "backend": backend, "dtype": dtype_name(dtype), "pattern": name,
             "passed": error is None, "error": error}
        )  # fmt: skip
    return found


def _print_checks(console: Console, checks: list[Document], left: int, seconds: float) -> None:
    made = table("backend", right=("passed", "failed"), title="Self-check against float64")
    groups: dict[tuple[str, str, str], list[Document]] = {}
    for check in checks:
        groups.setdefault((check["backend"], check["device"], check["dtype"]), []).append(check)
    for group, members in groups.items():
        passed = sum(member["passed"] for member in members)
        made.add_row(", ".join(group), str(passed), str(len(members) - passed))
    console.print(made)
    for check in checks:
        if not check["passed"]:
            console.print(f"FAILED {check['error']}", style="red", markup=False, soft_wrap=True)
    console.print(f"{len(checks)} checks of output, lse and gradients in {seconds:.1f} s.")
    if left:
        console.print(f"{left} were left: {LIMIT:.0f} s were over (on a GPU kernels are compiled; run it again).")


def _print_caches(console: Console, caches: list[Document]) -> None:
    title = "Caches after these checks (`clear_caches()` empties them)"
    made = table("cache", "what it holds", right=("entries", "at most", "bytes"), title=title)
    for each in caches:
        bound, nbytes = ("" if each[name] is None else f"{each[name]:,}" for name in ("bound", "nbytes"))
        made.add_row(each["name"], escape(each["holds"]), f"{each['entries']:,}", bound, nbytes)
    console.print(made)
