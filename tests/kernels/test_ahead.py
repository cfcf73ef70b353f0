"""Kernels compiled ahead, for a GPU that need not be there: what a launch wants is then in the cache on disk."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs triton, which there is for Linux alone")

from dilated_attention_pytorch.ops import warm_up

# Calls on tensors of the CPU, as on an H200: launches are kept back, compiled by two processes, and wanted once more.
SCRIPT = """
import json, os, sys
from pathlib import Path
from unittest.mock import patch
import torch
from triton.backends.compiler import GPUTarget
from dilated_attention_pytorch import SlidingWindow
from dilated_attention_pytorch.kernels import ahead, launch
from dilated_attention_pytorch.layout import BlockLayout
from dilated_attention_pytorch.backends import triton as backend
from dilated_attention_pytorch.options import CallOptions

ahead.driver.set_active(ahead._Compiler(GPUTarget("cuda", 90, 32)))

def call(seq, dtype, heads_kv=2):
    layout = BlockLayout.from_pattern(SlidingWindow(100, 0), seq, block_size=128)
    q, do = (torch.empty(1, seq, 4, 64, dtype=dtype) for _ in range(2))
    k, v = (torch.empty(1, seq, heads_kv, 64, dtype=dtype) for _ in range(2))
    options = CallOptions(0.125)
    out, lse = backend.forward(q, k, v, layout, options)
    backend.backward(do, None, q, k, v, out, lse, layout, options)

def compiled():
    return {str(path) for path in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")}

with patch.object(launch, "_capability", lambda device: (9, 0)), patch.object(launch, "num_processors", lambda d: 132):
    with ahead.collected() as wanted:
        for seq in (512, 700, 1024):
            call(seq, torch.float16)
    first, said = list(wanted.values()), []
    ahead.compile_all(first, 2, lambda done, total: said.append((done, total)))
    made = compiled()
    for each in first:
        each.compile()
    with ahead.collected() as wanted:
        call(900, torch.float16)
    known = set(wanted) <= {each.key() for each in first}
    found = {"wanted": [each.kernel for each in first], "said": said, "made": len(made),
             "made again": len(compiled() - made), "known": known}
    with ahead.collected() as wanted:
        call(900, torch.bfloat16)
    [other, *_] = wanted.values()
    broken = other._replace(constants={**other.constants, "D": "wide"})
    try:
        ahead.compile_all([broken], 2, print)
    except Exception as error:
        found["error"] = type(error).__name__
print(json.dumps(found))
"""


@pytest.mark.slow
def test_what_was_compiled_ahead_is_found(tmp_path):
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    wanted = found["wanted"]
    assert wanted == ["forward_kernel", "rows_kernel", "backward_kernel", "backward_kernel"]  # of three lengths
    assert found["said"] == [[i + 1, 4] for i in range(4)]
    assert (found["made"], found["made again"], found["known"]) == (4, 0, True)
    assert found["error"] == "CompilationError"


def test_without_a_gpu_there_is_nothing_to_compile(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert warm_up(lambda: pytest.fail("was called")) == 0


def test_bad_input():
    with pytest.raises(TypeError, match="calls must be functions without arguments, got int"):
        warm_up(3)
    with pytest.raises(ValueError, match="processes must be at least 1, got 0"):
        warm_up(processes=0)
