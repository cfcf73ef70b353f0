"""Does a compiled kernel read a uniform register that nothing has written on some way there?

ptxas did that to an address in the forward for Hopper: computed before the loop over full blocks, read in the loop over
partial ones, whether or not there are full blocks (`hopper_forward._compute` says how that is avoided). Addresses for
the matrix units stand in uniform registers, so these are looked at, and no others.
"""

import re
import subprocess
from pathlib import Path

import triton

LINE = re.compile(r"\s+/\*([0-9a-f]{4,5})\*/\s+(?:@!?(U?P\w+) )?([\w.]+)\s*(.*?)\s*;")
WRITES = ("U", "R2UR", "S2UR", "VOTEU", "REDUX")
ONLY_READS = ("UISETP", "UTMA", "UBLK", "UCG", "USETM")
ENDS = ("EXIT", "RET", "BRX")
PADS = ("NOP", "BRA")  # behind the end
JUMPS_BY_TABLE = ("BRX", "BRXU")
COPY = re.compile(r"(U?R\d+), (U?R\d+)")
PLAIN = 1000  # numbers of plain registers start here; they are followed as places of copies alone
ALWAYS = frozenset({63, *range(PLAIN, PLAIN + 256)})  # URZ


def disassembled(cubin: bytes, folder: Path) -> str:
    """The instructions of a kernel, by the tool that comes with Triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    (folder / "kernel.cubin").write_bytes(cubin)
    return subprocess.run([tool, "-sass", folder / "kernel.cubin"], capture_output=True, text=True, check=True).stdout


def instructions(text: str) -> str:
    """A listing without what says where it comes from: instructions with their places, registers and encoding, which
    holds the stalls and barriers that the text leaves out."""
    return "".join(f"{line.strip()}\n" for line in text.splitlines() if line.lstrip().startswith("/*"))


def unwritten(text: str) -> list[str]:
    """The instructions of a listing that read a register which some way from its start leaves unwritten, and those
    that no way was found to: nothing is known of them.

    A register that is written under a condition counts as written. To copy one is not to read it (of a pair of which
    half is needed ptxas may put both halves aside), but the copy is as unwritten.
    """
    lines = [(int(at, 16), condition, name, rest) for at, condition, name, rest in LINE.findall(text)]
    place = {at: i for i, (at, *_) in enumerate(lines)}
    writes, reads = zip(*(_registers(name, rest) for _, _, name, rest in lines), strict=True)
    copies = [_copy(condition, name, rest) for _, condition, name, rest in lines]
    after = _successors(lines, place)
    written: list[frozenset[int] | None] = [None] * len(lines)
    written[0], work = ALWAYS, [0]
    while work:
        i = work.pop()
        now, copy = (written[i] or ALWAYS) | writes[i], copies[i]
        if copy:
            now = now | {copy[0]} if copy[1] in (written[i] or ALWAYS) else now - {copy[0]}
        for j in after[i]:
            before = written[j]
            joined = now if before is None else before & now
            if joined != before:
                written[j] = joined
                work.append(j)
    return [
        f"{name} {rest}".strip()
        for (_, _, name, rest), read, copy, known in zip(lines, reads, copies, written, strict=True)
        if (known is None and name not in PADS) or (known is not None and not copy and read - known)
    ]


def _copy(condition: str, name: str, rest: str) -> tuple[int, int] | None:
    """The register that an instruction copies to, and the one that it copies."""
    found = COPY.fullmatch(rest) if name in ("MOV", "UMOV", "R2UR") and not condition else None
    if not found:
        return None
    to, of = (int(x.lstrip("UR")) + (0 if x.startswith("U") else PLAIN) for x in found.groups())
    return to, of


def _registers(name: str, rest: str) -> tuple[frozenset[int], frozenset[int]]:
    """The uniform registers that an instruction writes, and those that it reads."""
    operands, written = [part.strip() for part in rest.split(",")], set()
    if name.startswith(WRITES) and not name.startswith(ONLY_READS):
        while operands and re.match(r"U?P[T\d]", operands[0]):
            operands.pop(0)
        target = re.fullmatch(r"UR(\d+)", operands[0]) if operands else None
        if target:
            operands.pop(0)
            written = {int(target[1]), int(target[1]) + (".64" in name or ".WIDE" in name)}
    elif re.fullmatch(r"R\d+", operands[0]):
        first = PLAIN + int(operands[0][1:])
        written = set(range(first, first + (4 if ".128" in name else 2 if re.search(r"64|WIDE", name) else 1)))
    read = set()
    for operand in operands:
        for before, number in re.findall(r"(gdesc\[)?\bUR(\d+)\b", operand):
            first, width = int(number), 2 if name.startswith(("UIADD3.64", "UTMA")) else 1
            if before:  # a product takes descriptors of both sides, or of the second if the first is in registers
                alone = re.search(r", R\d+, gdesc", rest) is not None
                first, width = (first + 2, 2) if alone else (first, 4)
            read |= set(range(first, first + width))
    return frozenset(written), frozenset(read - ALWAYS)


def _successors(lines: list[tuple[int, str, str, str]], place: dict[int, int]) -> list[list[int]]:
    after, targets = [], set()
    for i, (_, condition, name, rest) in enumerate(lines):
        follows = [i + 1] if i + 1 < len(lines) else []
        if name.startswith("BRA"):
            target = re.search(r"0x([0-9a-f]+)\)?$", rest)
            taken = [place[int(target[1], 16)]] if target and int(target[1], 16) in place else []
            targets.update(j for j in taken if j > i)  # a loop leads nobody to its own start
            follows = taken + (follows if condition or re.match(r"!?U?P\d", rest) else [])
        elif name.startswith(ENDS) and not condition:
            follows = []
        after.append(follows)
    # Where a jump by table may go: to what nothing else leads to.
    entries = [i + 1 for i, follows in enumerate(after[:-1]) if i + 1 not in follows and i + 1 not in targets]
    return [
        entries if name in JUMPS_BY_TABLE else follows for (_, _, name, _), follows in zip(lines, after, strict=True)
    ]
