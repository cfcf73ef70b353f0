"""What every benchmark shares: the command line, the check before the clock, and the record. Nothing to run here.

A script describes itself as a `Benchmark`, a table of sections, and calls `run`:

    python benchmarks/NAME.py                       # all sections
    python benchmarks/NAME.py --only SECTION …      # some of them
    python benchmarks/NAME.py --quick               # tiny sizes, to see that it works
    python benchmarks/NAME.py --out FILE            # default: benchmarks/results/NAME.json (NAME-quick.json)
    python benchmarks/NAME.py --commit SHA          # where the tree has no .git

A record is one JSON object, {section: {"provenance": …, "gate": …, what was measured}}. A run replaces the sections
that it measured and leaves the others, so each says by itself which commit, command, versions and machine it is of.
`Job.gate` compares before anything is timed; one wrong result ends the run with exit status 1, and the section is not
written. Progress goes to stderr; stdout gets the section's tables (benchmarks/tables.py) and, as its last line, a
summary in JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from dilated_attention_pytorch.testing.timing import environment
from plots import both
from tables import as_text

HERE = Path(__file__).resolve().parent
RESULTS, IMAGES = HERE / "results", HERE.parent / "docs" / "images"
BUSY = 0.5  # load before a run, above which times mean little

Record = dict[str, Any]


class GateError(RuntimeError):
    """A contender computes something else."""


class SkipSectionError(Exception):
    """Why a section cannot be measured here."""


def largest(got: Tensor, want: Tensor) -> float:
    """Largest error ÷ largest value."""
    return float((got - want).abs().max() / want.abs().max())


def norm(got: Tensor, want: Tensor) -> float:
    """‖got − want‖ ÷ ‖want‖."""
    return float((got.double() - want.double()).norm() / want.double().norm())


# float32 stays near 1e-6 at every length here, and one missing block makes 1e-2 and more. Rounding to 16 bits makes
# 4e-3 of the norm, and one missing block of 13 makes 0.2.
MEASURES = {2: (norm, 2e-2), 4: (largest, 2e-5), 8: (largest, 2e-5)}


@dataclass
class Gate:
    """What was compared before it was timed, and how far apart it was."""

    checks: list[dict[str, Any]] = field(default_factory=list)

    def check(
        self, case: str, contender: str, against: str, got: Tensor, want: Tensor, tolerance: float | None = None
    ) -> None:
        """Compare by the measure and within the tolerance of the dtype of `got`, unless one is given."""
        measure, usual = MEASURES[got.dtype.itemsize]
        self.accept(case, contender, against, measure(got, want), usual if tolerance is None else tolerance)

    def accept(self, case: str, contender: str, against: str, error: float, tolerance: float) -> None:
        """Note an error that was found elsewhere, and refuse one that is too large."""
        self.checks.append(
            {"case": case, "contender": contender, "against": against, "error": error, "tolerance": tolerance}
        )
        if not error <= tolerance:  # written so that NaN fails
            shown = "NaN" if math.isnan(error) else f"{error:.1e}"
            raise GateError(f"{case}: {contender} differs from {against} by {shown}, more than {tolerance:.0e}")


@dataclass
class Job:
    """What a section is given: the options, and where to report."""

    args: argparse.Namespace
    device: str
    gate: Gate = field(default_factory=Gate)
    started: float = field(default_factory=perf_counter)

    @property
    def quick(self) -> bool:
        return self.args.quick

    def say(self, text: str) -> None:
        print(f"[{perf_counter() - self.started:6.1f} s] {text}", file=sys.stderr, flush=True)


Section = Callable[[Job], Record]


@dataclass(frozen=True)
class Benchmark:
    """What a script measures.

    Attributes:
        name: of its record; with several devices the device is added, NAME_cpu and NAME_cuda.
        about: the script's docstring, which is its --help.
        sections: in the order in which they run. A section raises `SkipSectionError` where it has no meaning.
        untimed: sections that time nothing; every other one must have checked a result.
        devices: where it runs, the first being the default; "cuda" is taken first where there is one.
        options: adds options of its own.
        summary: of the sections that were measured, for the last line.
        draw: makes a picture of the record, or returns None where there is nothing to draw.
    """

    name: str
    about: str | None
    sections: Mapping[str, Section]
    untimed: Sequence[str] = ()
    devices: Sequence[str] = ("cpu",)
    options: Callable[[argparse.ArgumentParser], object] = lambda parser: None
    summary: Callable[[Record], Record] = lambda record: {}
    draw: Callable[[Record, Path], Path | None] = lambda record, path: None

    def record_name(self, device: str) -> str:
        return f"{self.name}_{device}" if len(self.devices) > 1 else self.name


def arguments(benchmark: Benchmark, argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=benchmark.about, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    sections = list(benchmark.sections)
    parser.add_argument("--only", nargs="+", choices=sections, default=sections, metavar="SECTION",
                        help=f"of {', '.join(sections)}")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it works")
    parser.add_argument("--out", type=Path, help="the record; sections that are there already and not measured stay")
    parser.add_argument("--commit", metavar="SHA", help="of the code, where the tree has no .git")
    if len(benchmark.devices) > 1:
        usual = "cuda" if torch.cuda.is_available() else benchmark.devices[0]
        parser.add_argument("--device", choices=benchmark.devices, default=usual)
    benchmark.options(parser)
    args = parser.parse_args(argv)
    args.device = getattr(args, "device", benchmark.devices[0])
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device, and PyTorch sees none")
    args.usual_out = args.out is None
    if args.usual_out:
        args.out = RESULTS / f"{benchmark.record_name(args.device)}{'-quick' if args.quick else ''}.json"
    args.command = command_of(sys.argv[1:] if argv is None else argv, sys.argv[0] if argv is None else benchmark.name)
    return args


def command_of(argv: Sequence[str], script: str) -> str:
    """The command without where it wrote to, which may name a home."""
    kept, words = [], iter(map(str, argv))
    for word in words:
        if word == "--out":
            next(words, None)
        elif not word.startswith("--out="):
            kept.append(word)
    return shlex.join(["python", f"benchmarks/{Path(script).stem}.py", *kept])


def provenance(args: argparse.Namespace) -> Record:
    """What a section's figures depend on, and how they were made."""
    return {
        "commit": args.commit or commit(),
        "command": args.command,
        "quick": args.quick,
        "device": args.device,
        **environment(args.device),
    }


def commit() -> str:
    """The commit, marked "-dirty" when the tree differs from it; results of earlier runs do not count."""

    def git(*args: str) -> str:
        return subprocess.run(["git", "-C", HERE.parent, *args], capture_output=True, text=True, check=True).stdout

    try:
        changed = git("status", "--porcelain", "--", ":/", ":(top,exclude)benchmarks/results")
        return git("rev-parse", "HEAD").strip() + ("-dirty" if changed.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def run(benchmark: Benchmark, argv: Sequence[str] | None = None) -> int:
    """Measure the sections that are asked for, one after the other; each is in the file before the next begins."""
    args = arguments(benchmark, argv)
    record = read_record(args.out) if args.out.exists() else {}
    made: Record = {}
    load = environment()["load_before"] or 0.0
    if load > BUSY:
        print(f"this machine is busy, load {load}: times will not mean much", file=sys.stderr)
    for name in args.only:
        job, origin = Job(args, args.device), provenance(args)
        torch.manual_seed(0)
        try:
            found = benchmark.sections[name](job)
        except SkipSectionError as reason:
            job.say(f"{name}: skipped, {reason}")
            continue
        except GateError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        assert job.gate.checks or name in benchmark.untimed, f"section {name} checked nothing"
        origin["seconds"] = round(perf_counter() - job.started, 1)
        made[name] = record[name] = {"provenance": origin, **found, "gate": job.gate.checks}
        write_record(args.out, record)
    _report(benchmark, args, made, record)
    return 0


def _report(benchmark: Benchmark, args: argparse.Namespace, made: Record, record: Record) -> None:
    text = as_text(benchmark.record_name(args.device), made)
    if text:
        print(text, end="\n\n")
    picture = IMAGES / f"{benchmark.name}.png" if args.usual_out and not args.quick else args.out.with_suffix(".png")
    if made:
        drawn = both(partial(benchmark.draw, record), picture)
        print(f"Written: {args.out.name}{f' and {drawn.name}' if drawn else ''}")
    checks = [check for section in made.values() for check in section["gate"]]
    summary = {
        "benchmark": benchmark.name,
        "sections": list(made),
        "quick": args.quick,
        "gate": {"checks": len(checks), "worst": max((check["error"] for check in checks), default=None)},
        **benchmark.summary(made),
    }
    print(json.dumps(summary))


def read_record(path: Path) -> Record:
    return json.loads(path.read_text(encoding="utf-8"))


def write_record(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
