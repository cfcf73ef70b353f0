"""Every kernel compiles for every architecture that we name, without the hardware, and fits its shared memory."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs triton, which there is for Linux alone")

from tests.kernels.sass import unwritten

KIB = {"8.0": 163, "8.6": 99, "8.9": 99, "9.0": 227, "10.0": 227, "12.0": 99}  # of shared memory that a block may have
ALIKE = ("8.9", "12.0")  # these take the tiles of 8.6, so that calls with every feature and every kernel will do
SOME = ("few rows", "everything", "dilated, uneven", "mean")


@pytest.mark.parametrize("capability", KIB)
def test_compiles(capability):
    # A process of its own: in this one the kernels are made for the interpreter.
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.kernels.compiling", capability, *(SOME if capability in ALIKE else ())]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    of_selection = 2 + 3 + 3 + 7
    assert len(kernels) == (3 * 4 + 2 + of_selection if capability in ALIKE else 9 * 4 + 2 * 2 + 3 * 2 + of_selection)
    names = {kernel["kernel"] for kernel in kernels}
    assert names >= {"forward_kernel", "rows_kernel", "dkv_kernel", "dq_kernel", "decode_kernel", "merge_kernel"}
    assert names >= {"pool_kernel", "masses_kernel", "teams_kernel", "digits_kernel", "counts_kernel", "lists_kernel"}
    assert ("backward_kernel" in names) == (capability == "9.0")  # Hopper's own
    for kernel in kernels:
        assert kernel["shared"] <= KIB[capability] * 1024, kernel
        assert kernel.get("unwritten", []) == [], kernel
    assert sum("unwritten" in kernel for kernel in kernels) == (9 if capability == "9.0" else 0)


LOOPS = """
        /*0000*/  ULDC.64 UR4, c[0x0][0x210] ;
        /*0010*/  @!P0 BRA 0x50 ;
        /*0020*/  UIADD3.64 UR8, UR4, 0x2, URZ ;
        /*0030*/  HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR8].tnspB, R24, gsb0 ;
        /*0040*/  @P1 BRA 0x30 ;
        /*0050*/  HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR{}].tnspB, R24, gsb0 ;
        /*0060*/  EXIT ;
"""


def test_an_address_of_a_loop_that_may_not_be_entered_is_seen():
    """The second product reads what is computed before the first loop, which the branch goes round."""
    assert unwritten(LOOPS.format(8)) == ["HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR8].tnspB, R24, gsb0"]
    assert unwritten(LOOPS.format(4)) == []
