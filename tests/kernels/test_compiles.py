"""Every kernel compiles for every architecture that we name, without the hardware, and fits its shared memory."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs triton, which there is for Linux alone")

from tests.kernels.sass import unwritten

KIB = {"8.0": 163, "8.6": 99, "8.9": 99, "9.0": 227, "10.0": 227, "12.0": 99}  # of shared memory that a block may have
# These take the tiles of 8.6 (12.0 by the copy engine): calls with every feature and every kernel will do.
SOME = ("few rows", "everything", "dilated, uneven", "mean")
ALIKE = {"8.9": SOME, "12.0": (*SOME, "large heads", "single precision")}


@pytest.mark.parametrize("capability", KIB)
def test_compiles(capability):
    # A process of its own: in this one the kernels are made for the interpreter.
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.kernels.compiling", capability, *ALIKE.get(capability, ())]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    most = 9 * 4 + 2 * 2 + 4 * 2 + 3 + 3 + 7
    assert len(kernels) == {"8.9": 29, "9.0": most + 6 * 4, "12.0": 29 + 4 + 6}.get(capability, most)
    names = {kernel["kernel"] for kernel in kernels}
    assert names >= {"forward_kernel", "rows_kernel", "dkv_kernel", "dq_kernel", "decode_kernel", "merge_kernel"}
    assert names >= {"pool_kernel", "masses_kernel", "teams_kernel", "digits_kernel", "counts_kernel", "lists_kernel"}
    assert ("backward_kernel" in names) == (capability == "9.0")  # Hopper's own
    for kernel in kernels:
        assert kernel["shared"] <= KIB[capability] * 1024, kernel
        assert kernel.get("unwritten", []) == [], kernel
    assert sum("unwritten" in kernel for kernel in kernels) == (28 if capability == "9.0" else 0)


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


TABLE = """
        /*0000*/  BRX R2 -0x10 ;
        /*0010*/  @!P0 BRA 0x10 ;
        /*0020*/  FFMA R24, R24, UR8, R14 ;
        /*0030*/  EXIT ;
        /*0040*/  BRA 0x40 ;
        /*0050*/  NOP ;
"""


def test_what_a_table_leads_to_is_looked_at_and_what_nothing_leads_to_is_named():
    assert unwritten(TABLE) == ["FFMA R24, R24, UR8, R14"]
    assert unwritten(TABLE.replace("UR8", "R8")) == []
    assert unwritten(TABLE.replace("UR8", "R8").replace("BRX R2 -0x10", "EXIT")) == ["FFMA R24, R24, R8, R14", "EXIT"]
    assert unwritten(TABLE.replace("FFMA R24, R24, UR8, R14", "UISETP.GE.AND UP0, UPT, UR8, URZ, UPT")) != []
