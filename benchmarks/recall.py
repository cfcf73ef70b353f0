"""It learns: associative recall by LongNet, a sliding window of equal cost, and dense attention, on a CPU.

    python benchmarks/recall.py [--steps 600] [--seq 256] [--segment 16] [--out benchmarks/results/recall.json]

Writes the record and, with the default --out, the curves to docs/images/recall.png (else beside the record). What is
learned and why only the dilated branches can is in `dilated_attention_pytorch/cli/recall.py`. Minutes on one thread.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from time import perf_counter

from cases import HERE, environment
from dilated_attention_pytorch.cli import recall

OUT = HERE / "results" / "recall.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="most steps of a model")
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--segment", type=int, default=16)
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    study = recall.Study(seq=given.seq, segment=given.segment)
    record = {
        "command": " ".join(["python", "benchmarks/recall.py", *sys.argv[1:]]),
        "environment": environment(),
        "study": {name: getattr(study, name) for name in study.__dataclass_fields__},
        "segment_lengths": list(study.branches.segment_lengths),
        "dilation_rates": list(study.branches.dilation_rates),
        "pairs": study.cost,
        "window": study.window,
        "distance": study.distance,
        "models": {},
    }
    curves = {}
    for kind in recall.KINDS:
        model, began = study.model(kind), perf_counter()
        curves[kind] = study.learn(model, given.steps)
        record["models"][kind] = {
            "steps": len(curves[kind]),
            "seconds": round(perf_counter() - began, 1),
            "right": study.test(model),
            "curve": [round(share, 4) for share in curves[kind]],
        }
        print(f"{kind}: {len(curves[kind])} steps, {record['models'][kind]['right']:.3f} right", flush=True)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    images = HERE.parent / "docs" / "images"
    recall.plot(study, curves, images / "recall.png" if given.out == OUT else given.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
