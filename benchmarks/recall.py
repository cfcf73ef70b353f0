"""It learns: associative recall by LongNet, a sliding window of equal cost, and dense attention, on a CPU.

    python benchmarks/recall.py --steps 450     # options: harness.py

What is learned and why only the dilated branches can is in `dilated_attention_pytorch/cli/recall.py`. Minutes on one
thread. The picture has the curves.
"""

from __future__ import annotations

import argparse
from time import perf_counter

import plots
from dilated_attention_pytorch.cli.recall import KINDS, Study
from harness import Benchmark, Job, Record, run


def recall(job: Job) -> Record:
    seq, segment, steps = (64, 4, 2) if job.quick else (job.args.seq, job.args.segment, job.args.steps)
    study = Study(seq=seq, segment=segment)
    found: Record = {
        "study": {name: getattr(study, name) for name in study.__dataclass_fields__},
        "segment_lengths": list(study.branches.segment_lengths),
        "dilation_rates": list(study.branches.dilation_rates),
        "pairs": study.cost,
        "window": study.window,
        "distance": study.distance,
        "models": {},
    }
    for kind in KINDS:
        model, began = study.model(kind), perf_counter()
        curve = study.learn(model, steps)
        found["models"][kind] = {
            "steps": len(curve),
            "seconds": round(perf_counter() - began, 1),
            "right": study.test(model),
            "curve": [round(share, 4) for share in curve],
        }
        job.say(f"{kind}: {len(curve)} steps, {found['models'][kind]['right']:.3f} right")
    return found


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=600, help="most steps of a model")
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--segment", type=int, default=16)


BENCHMARK = Benchmark(
    name="recall", about=__doc__, sections={"recall": recall}, untimed=("recall",), options=options, draw=plots.recall
)


if __name__ == "__main__":
    raise SystemExit(run(BENCHMARK))
