"""What a training run says: on the console, in a picture, in files. Bits a byte, everywhere."""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..patterns.base import did_you_mean


class Row(NamedTuple):
    """One step."""

    step: int
    bits_a_byte: float
    held_out_bits_a_byte: float | None
    learning_rate: float
    tokens_per_second: float


def check_logs(names: Sequence[str]) -> None:
    for name in names:
        if name not in WRITERS:
            raise ValueError(f"--log must be one of {', '.join(WRITERS)}, got {name!r}{did_you_mean(name, WRITERS)}")
    if "tensorboard" in names and find_spec("tensorboard") is None:
        raise ImportError("--log tensorboard needs tensorboard: pip install tensorboard")


class Log:
    """The files of a run; what they have of steps after `start`, which are taken again, is replaced."""

    def __init__(self, out: Path, names: Sequence[str], start: int) -> None:
        self.writers = [WRITERS[name](out, start) for name in dict.fromkeys(names)]

    def write(self, row: Row) -> None:
        for writer in self.writers:
            writer.write(row)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for writer in self.writers:
            writer.close()


class _Csv:
    name = "log.csv"

    def __init__(self, out: Path, start: int) -> None:
        path = out / self.name
        kept = []
        if start and path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                # The last line may have been cut off.
                rows = [row for row in csv.reader(file) if len(row) == len(Row._fields) and row[0].isdecimal()]
            kept = [row for row in rows if int(row[0]) <= start]
        self.file = path.open("w", newline="", encoding="utf-8")
        self.rows = csv.writer(self.file)
        self.rows.writerows([Row._fields, *kept])

    def write(self, row: Row) -> None:
        held_out = "" if row.held_out_bits_a_byte is None else f"{row.held_out_bits_a_byte:.6f}"
        values = f"{row.bits_a_byte:.6f}", held_out, f"{row.learning_rate:.6e}", f"{row.tokens_per_second:.1f}"
        self.rows.writerow((row.step, *values))
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class _TensorBoard:
    name = "tensorboard"

    def __init__(self, out: Path, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(out / self.name), purge_step=start + 1)

    def write(self, row: Row) -> None:
        for name, value in row._asdict().items():
            if name != "step" and value is not None:
                self.writer.add_scalar(name, value, row.step)

    def close(self) -> None:
        self.writer.close()


WRITERS: dict[str, Any] = {"csv": _Csv, "tensorboard": _TensorBoard}


@contextmanager
def progress(console: Console, start: int, steps: int, most: float) -> Iterator[Callable[[Row], None]]:
    """A function to report a step: a progress bar in a terminal; in a pipe ten lines or so, and one an evaluation.

    Args:
        most: tokens a second, if the device did nothing but multiply matrices at its full rate.
    """
    rates: deque[float] = deque(maxlen=10)
    held_out = ""

    def said(row: Row) -> str:
        nonlocal held_out
        rates.append(row.tokens_per_second)
        if row.held_out_bits_a_byte is not None:
            held_out = f" (held out {row.held_out_bits_a_byte:.3f})"
        rate = len(rates) / sum(1 / rate for rate in rates)
        return (
            f"{row.bits_a_byte:.3f} bits a byte{held_out}, {rate:,.0f} tokens/s, {rate / most:.0%} of the matmul rate"
        )

    if not console.is_terminal:

        def line(row: Row) -> None:
            text = said(row)
            if row.step % max(1, steps // 10) == 0 or row.held_out_bits_a_byte is not None:
                console.print(f"  step {row.step}: {text}", soft_wrap=True)

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=steps, completed=start)
        yield lambda row: bar.update(task, advance=1, description=said(row))


def plot(bits: Sequence[float], curve: Sequence[tuple[int, float]], path: Path) -> None:
    """Each step, the mean of some steps, and the held-out bytes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    window = max(1, len(bits) // 50)
    means = torch.tensor(bits).unfold(0, window, 1).mean(-1)
    axes.plot(range(1, len(bits) + 1), bits, color="tab:blue", alpha=0.3, linewidth=0.8)
    axes.plot(range(window, len(bits) + 1), means, color="tab:blue", label=f"training, mean of {window} steps")
    axes.plot(*zip(*curve, strict=True), color="tab:orange", marker="o", markersize=4, label="held-out bytes")
    axes.set_title("A LongNet over bytes")
    axes.set_xlabel("step")
    axes.set_ylabel("bits a byte")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
