"""Every kernel compiles for every architecture that we name, without the hardware, and fits its shared memory."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

pytest.importorskip("triton", reason="needs triton, which there is for Linux alone")

from dilated_attention_pytorch.kernels.configs import padded_dim
from tests.kernels.compiling import CALLS, HOPPER_CALLS, LAYOUTS, SELECTIONS
from tests.kernels.sass import instructions, unwritten

KIB = {"8.0": 163, "8.6": 99, "8.9": 99, "9.0": 227, "10.0": 227, "12.0": 99}  # of shared memory that a block may have
# What differs between architectures is covered, and each call compiled once at least: `test_what_is_compiled_covers`
# says how. `make stress` compiles for 8.0, 8.9 and 12.0 too, and all calls for 8.6 (by address, the least shared
# memory) and 9.0 (by the copy engine).
COVERING = {
    "8.6": ("large heads", "single precision", "everything", "plain", "few rows", "few rows, large heads",
            "odd heads, small blocks", "narrow values", "biased, single precision", "biased, small blocks",
            "bitmaps, small blocks", "dilated, uneven", "patches, odd and large heads", "patches, single precision",
            "moments", "antidiagonals", "antidiagonals, single precision", "sampled", "rules of documents", "mean"),
    "9.0": ("plain", "large heads", "few rows", "single precision", "everything", "dilated, uneven", "bitmaps", "mean",
            "patches", "rules of documents", "odd heads, narrow values", "gathered keys", "rows of their own",
            "united rows", "documents", "fused", "fused, large tiles", "runs"),
    "8.0": ("biased", "dilated", "bitmaps", "large heads", "single precision", "everything", "mean", "patches",
            "window"),
    "8.9": ("everything", "mean"),  # the tiles and the memory of 8.6
    "10.0": ("plain", "large heads", "few rows", "single precision", "everything", "dilated, uneven", "bitmaps",
             "mean"),
    "12.0": ("few rows", "large heads", "single precision", "everything", "dilated, uneven", "mean"),
}  # fmt: skip
# How many kernels each call launches: forward and rows, dq, dk and dv (or these in one, and the rounding of dq);
# decoding; pooling and masses; lists. With padding, forward and backward first find out what is left of the lists.
LAUNCHES = {
    "everything": 6 + 4, "fused, everything": 6 + 3, "single precision": 6, "mean": 2 + 14,
    "biased, small blocks": 3 + 4 + 4, "masks": 4 + 4,
    "gathered keys, masks": 4 + 4, "united rows": 7, "united rows, shaped": 7,
    "patches, single precision": 2 + 16, "antidiagonals": 1, "antidiagonals, single precision": 1, "sampled": 1,
    "window": 4, "rules of documents": 5,
}  # fmt: skip
LARGE = ("large heads", "narrow values")  # on Hopper dk and dv apart


def all_calls(capability):
    return (*CALLS, *(HOPPER_CALLS if capability == "9.0" else ()), *SELECTIONS, *LAYOUTS)


def test_what_is_compiled_covers():
    """Every entry of the tables of tiles, for each capability that takes it, against its memory; features on each
    generation of matrix units; every call by address."""
    for capability, memory in KIB.items():
        calls = [CALLS[name] for name in COVERING[capability] if name in CALLS]
        tiles = {(padded_dim(call["head_dim"]), call["dtype"].itemsize) for call in calls}
        same_as_8_6 = capability == "8.9" and memory == KIB["8.6"]
        assert same_as_8_6 or tiles == {(64, 2), (128, 2), (256, 2), (128, 4)}, capability
    for units in (("8.0", "8.6", "8.9"), ("9.0",), ("10.0",), ("12.0",)):
        names = {name for capability in units for name in COVERING[capability]}
        assert names >= {"everything", "dilated, uneven", "few rows", "single precision", "mean"}, units
    for name in (*CALLS, *SELECTIONS):
        found = {capability for capability in KIB if name in COVERING[capability]}
        assert found & {"8.0", "8.6", "8.9"}, name


# Hopper's own, among them by what is looked at in their machine code.
OF_HOPPER = {"forward_kernel", "backward_kernel", "runs_forward_kernel", "runs_backward_kernel", "masses_kernel"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "which"),
    [
        *((capability, "covering") for capability in ("8.6", "9.0", "10.0")),
        *(pytest.param(capability, "covering", marks=pytest.mark.stress) for capability in ("8.0", "8.9", "12.0")),
        *(pytest.param(capability, "all", marks=pytest.mark.stress) for capability in ("8.6", "9.0")),
    ],
)
def test_compiles(capability, which):
    # A process of its own: in this one the kernels are made for the interpreter.
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    calls = COVERING[capability] if which == "covering" else all_calls(capability)
    command = [sys.executable, "-m", "tests.kernels.compiling", capability, *calls]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert Counter(kernel["call"] for kernel in kernels) == {
        name: LAUNCHES.get(name, 2 if name in SELECTIONS else 4) + (capability == "9.0" and name in LARGE)
        for name in calls
    }
    names = {kernel["kernel"] for kernel in kernels}
    assert names >= {"key_bits_kernel", "padded_lists_kernel"}
    assert names >= {"forward_kernel", "rows_kernel", "dkv_kernel", "dq_kernel", "decode_kernel", "merge_kernel"}
    assert names >= {"pool_kernel", "masses_kernel", "teams_kernel", "digits_kernel", "counts_kernel", "lists_kernel"}
    assert "order_kernel" in names
    assert ("backward_kernel" in names) == (capability == "9.0")  # Hopper's own
    for kernel in kernels:
        assert kernel["shared"] <= KIB[capability] * 1024, kernel
        assert kernel.get("unwritten", []) == [], kernel
    looked_at = {kernel["kernel"] for kernel in kernels if "unwritten" in kernel}
    assert looked_at == (OF_HOPPER if capability == "9.0" else set())


LOOPS = """
        /*0000*/  ULDC.64 UR4, c[0x0][0x210] ;
        /*0010*/  @!P0 BRA 0x50 ;
        /*0020*/  UIADD3.64 UR8, UR4, 0x2, URZ ;
        /*0030*/  HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR6].tnspB, R24, gsb0 ;
        /*0040*/  @P1 BRA 0x30 ;
        /*0050*/  HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR{}].tnspB, R24, gsb0 ;
        /*0060*/  EXIT ;
"""


def test_an_address_of_a_loop_that_may_not_be_entered_is_seen():
    """The second product reads what is computed before the first loop, which the branch goes round."""
    assert unwritten(LOOPS.format(6)) == ["HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR6].tnspB, R24, gsb0"]
    assert unwritten(LOOPS.format(2)) == []


COPIES = """
        /*0000*/  ULDC UR4, c[0x0][0x210] ;
        /*0010*/  MOV R2, UR5 ;
        /*0020*/  MOV R3, UR4 ;
        /*0030*/  UMOV UR5, URZ ;
        /*0040*/  R2UR UR6, R2 ;
        /*0050*/  R2UR UR7, R3 ;
        /*0060*/  FFMA R24, R24, UR{}, R14 ;
        /*0070*/  EXIT ;
"""


def test_a_copy_is_as_unwritten_as_what_it_is_of():
    assert unwritten(COPIES.format(6)) == ["FFMA R24, R24, UR6, R14"]
    assert unwritten(COPIES.format(7)) == []


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
    assert unwritten(TABLE.replace("UR8", "R8").replace("BRX R2", "BRXU UR63")) == []
    assert unwritten(TABLE.replace("UR8", "R8").replace("BRX R2 -0x10", "EXIT")) == ["FFMA R24, R24, R8, R14", "EXIT"]
    assert unwritten(TABLE.replace("FFMA R24, R24, UR8, R14", "UISETP.GE.AND UP0, UPT, UR8, URZ, UPT")) != []


LISTING = """
code for sm_90a
                Function : forward_kernel
        .headerflags    @"EF_CUDA_TEXMODE_UNIFIED"
        /*0000*/                   LDC R1, c[0x0][0x28] ;     /* 0x00000a00ff017b82 */
                                                              /* 0x000e640000000800 */
"""


def test_instructions_are_compared_with_their_encoding_and_nothing_else():
    same = LISTING.replace("forward_kernel", "another").replace("        /*0000*/", "/*0000*/")
    assert instructions(same) == instructions(LISTING) != ""
    for before, after in (("R1", "R2"), ("0x000e64", "0x000e24")):  # a register, a stall
        assert instructions(LISTING.replace(before, after)) != instructions(LISTING)
