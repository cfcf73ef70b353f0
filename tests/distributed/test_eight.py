"""Rings of up to eight: exact, no byte too many, and memory that shrinks with the number of ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dilated_attention_pytorch import BlockLayout, Placement, SlidingWindow
from dilated_attention_pytorch.memory import can_measure
from dilated_attention_pytorch.testing import Case
from tests.distributed import test_cost, test_ring, test_ring_dilated, work
from tests.distributed.processes import Ranks

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.stress


@pytest.fixture(scope="module")
def eight():
    ranks = Ranks(8)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", test_ring.PATTERNS)
def test_exact_and_minimal(eight, name, is_causal, kind):
    pattern = test_ring.PATTERNS[name]
    placement = getattr(Placement, kind)(517, 8, block_size=32)
    layout = BlockLayout.from_pattern(pattern, 517, block_size=32)
    case = Case(**test_ring.tensors(0, 2, 517, 517, 4, 2, 8), layout=layout, is_causal=is_causal)
    call = test_ring.Call(case, (placement, placement), pattern, {"placement": placement})
    sent = test_ring.assert_exact(call, eight)
    needed = 2 * 2 * 8 * 8 * call.needed_keys()
    assert [forward for forward, _ in sent] == needed.sum(0).tolist()
    assert [backward for _, backward in sent] == (needed.sum(0) + needed.sum(1)).tolist()


@pytest.mark.parametrize("is_causal", [False, True])
def test_longnet(eight, is_causal):
    options = {"segment_lengths": (64, 128, 1024), "dilation_rates": (1, 2, 8), "is_causal": is_causal}
    placement = Placement.contiguous(1100, 8, block_size=64)
    given = test_ring_dilated.tensors(0, 1, 1100, 1100, 8, 4, 4)
    test_ring_dilated.assert_exact(eight, (placement, placement), given, options)


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", test_cost.PATTERNS)
def test_the_cost_model_counts_the_same_bytes(eight, name, kind):
    test_cost.test_bytes_are_those_of_a_real_ring(eight, name, 8, kind)


@pytest.mark.skipif(not can_measure()[0], reason=can_measure()[1])
def test_memory_is_shared_out(eight):
    """A window, forward and backward: the peak above a rank's own shards, of 32,768 tokens together."""
    peaks = {}
    for size in (1, 2, 4, 8):
        eight.run(size, work.peak, 32768, SlidingWindow(1024, 0))  # what is loaded and remembered once
        peaks[size] = max(eight.run(size, work.peak, 32768, SlidingWindow(1024, 0)))
    constant = 24 << 20  # scratch of the backend, blocks from the neighbours
    for size in (2, 4, 8):
        assert peaks[size] <= 1.6 * peaks[1] / size + constant, peaks


def test_the_benchmark_runs(tmp_path):
    out = tmp_path / "ring.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "ring.py"), "--quick", "--out", str(out)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=True)
    summary = json.loads(run.stdout.splitlines()[-1])
    assert summary["exact_bytes"] is True
    rows = json.loads(out.read_text())["rings"]
    assert {row["ranks"] for row in rows} == {1, 2}
    assert all(row["largest_difference"] < 1e-4 for row in rows)
