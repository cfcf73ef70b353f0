"""`dilated-attention train`: a byte-level LongNet language model of any file.

Everything is in the folder of the run:

    checkpoint.safetensors   parameters, optimizer and losses so far; the options and the step as JSON beside them
    model.safetensors        the model, when the run is done: `LongNetLM.load` takes it
    loss.png                 the losses, if matplotlib is installed

A step depends on the parameters, the optimizer and its own number alone: its bytes and its dropout are drawn from
(seed, step). So a run that was killed, at any moment, goes on from its checkpoint when the command is given again, and
ends where it would have ended.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn.functional import cross_entropy

from ..models import LongNetConfig, LongNetLM
from ..models.storage import load_tensors, save_tensors
from ..patterns.base import check_int
from .output import NO_PICTURE, Document, can_draw

HELD_OUT = 0.05  # the share at the end of the file that is not trained on
SAMPLE_BYTES = 200
CHECKPOINT, MODEL, PLOT = "checkpoint.safetensors", "model.safetensors", "loss.png"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a run is made of, apart from its file; two runs with equal options and files are the same run."""

    model: LongNetConfig
    steps: int
    seq_len: int
    batch: int
    learning_rate: float
    warmup: int
    seed: int
    device: str
    file: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("steps", "seq_len", "batch"):
            check_int(name, getattr(self, name), least=1)
        check_int("warmup", self.warmup, least=0)
        if not 0.0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive and finite, got {self.learning_rate}")


def run(console: Console, text: Path, out: Path, options: Options, *, save_every: int = 100) -> Document:
    """Train until `options.steps`, from the checkpoint in `out` if there is one."""
    check_int("save_every", save_every, least=1)
    data = text.read_bytes()
    trained, held_out = _split(data, options.seq_len, text)
    options = Options(**{**vars(options), "file": {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}})
    out.mkdir(parents=True, exist_ok=True)
    state = State.resumed(out / CHECKPOINT, options) if (out / CHECKPOINT).exists() else State.new(options)
    start = len(state.losses)
    parameters = sum(p.numel() for p in state.model.parameters())
    console.print(f"{parameters:,} parameters on {options.device}, {len(trained):,} bytes of {text.name}")
    if start:
        console.print(f"Going on after step {start} of {options.steps}.")
    saved = start
    try:
        with _progress(console, start, options.steps) as report:
            for step in range(start, options.steps):
                began = perf_counter()
                loss = state.train(step, trained, options)
                report(loss, options.batch * options.seq_len / (perf_counter() - began))
                if (step + 1) % save_every == 0 or step + 1 == options.steps:
                    state.save(out / CHECKPOINT, options)
                    saved = step + 1
    except KeyboardInterrupt:
        if len(state.losses) > saved:
            state.save(out / CHECKPOINT, options)
        console.print(f"Stopped after step {len(state.losses)}; the same command goes on.")
        raise
    state.model.eval().save(out / MODEL)
    about = {"parameters": parameters, "steps": options.steps, "began_at": start, "loss": state.losses[-1]}
    return {**about, **_finish(console, state, held_out, options, out)}


class State:
    """What a checkpoint holds: model, optimizer, and the loss of every step so far."""

    def __init__(self, model: LongNetLM, learning_rate: float, losses: list[float]) -> None:
        self.model, self.losses = model, losses
        matrices = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))

    @classmethod
    def new(cls, options: Options) -> State:
        torch.manual_seed(options.seed)
        return cls(LongNetLM(options.model).to(options.device), options.learning_rate, [])

    @classmethod
    def resumed(cls, path: Path, options: Options) -> State:
        tensors, about = load_tensors(path, options.device)
        wanted = _plain(asdict(options))
        for name, value in wanted.items():
            if about["options"].get(name) != value:
                before, now = _difference(about["options"].get(name), value)
                raise ValueError(
                    f"{name} must be what it was when the run began, {before}, to go on from {path}; got {now}. "
                    "Give another --out for another run"
                )
        state = cls(LongNetLM(options.model).to(options.device), options.learning_rate, tensors["losses"].tolist())
        state.model.load_state_dict(_below("model.", tensors))
        for name, parameter in state.model.named_parameters():
            state.optimizer.state[parameter] = _below(f"optimizer.{name}.", tensors)
        return state

    def save(self, path: Path, options: Options) -> None:
        tensors = {f"model.{name}": x for name, x in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            tensors |= {f"optimizer.{name}.{key}": x for key, x in self.optimizer.state[parameter].items()}
        tensors["losses"] = torch.tensor(self.losses, dtype=torch.float64)
        save_tensors(path, tensors, {"step": len(self.losses), "options": _plain(asdict(options))})

    def train(self, step: int, data: Tensor, options: Options) -> float:
        """One step of AdamW; its loss in nats a byte."""
        torch.manual_seed(options.seed * 1_000_003 + step + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = options.learning_rate * _schedule(step, options)
        first = torch.randint(len(data) - options.seq_len, (options.batch,))
        rows = data[first[:, None] + torch.arange(options.seq_len + 1)].long().to(options.device)
        self.model.train()
        loss = _loss(self.model, rows)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.losses.append(loss.item())
        if not math.isfinite(self.losses[-1]):
            raise RuntimeError(f"the loss of step {step + 1} is {self.losses[-1]}: try a lower learning rate")
        return self.losses[-1]


def _loss(model: LongNetLM, rows: Tensor) -> Tensor:
    """Nats a byte, each row's successors given what is before them; bfloat16 on a GPU."""
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=rows.is_cuda):
        logits = model(rows[:, :-1])
    return cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


def _schedule(step: int, options: Options) -> float:
    """Up in a line during the warm-up, then down by half a cosine to a tenth."""
    if step < options.warmup:
        return (step + 1) / (options.warmup + 1)
    done = (step - options.warmup) / max(1, options.steps - options.warmup)
    return 0.55 + 0.45 * math.cos(math.pi * done)


def _split(data: bytes, seq_len: int, text: Path) -> tuple[Tensor, Tensor]:
    """What is trained on and what is held out, as tensors of bytes."""
    held_out = max(seq_len + 1, int(HELD_OUT * len(data)))
    if len(data) < 2 * held_out:
        raise ValueError(
            f"text must have at least {2 * held_out} bytes for seq_len {seq_len}, got {len(data)} ({text})"
        )
    both = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return both[:-held_out], both[-held_out:]


@torch.no_grad()
def _evaluate(model: LongNetLM, held_out: Tensor, options: Options) -> float:
    """Nats a byte over the held-out bytes, in rows of `seq_len`."""
    rows = held_out[: len(held_out) // (options.seq_len + 1) * (options.seq_len + 1)].view(-1, options.seq_len + 1)
    losses = [_loss(model, row[None].long().to(options.device)).item() for row in rows]
    return sum(losses) / len(losses)


def _finish(console: Console, state: State, held_out: Tensor, options: Options, out: Path) -> Document:
    bits = _evaluate(state.model, held_out, options) / math.log(2)
    console.print(f"Held-out bytes: {bits:.3f} bits a byte.")
    draw = torch.Generator(options.device).manual_seed(options.seed)
    prompt = held_out[None, : min(64, options.seq_len)].long().to(options.device)
    sample = state.model.generate(prompt, SAMPLE_BYTES, temperature=0.8, generator=draw)[0].tolist()
    written_by_it = bytes(sample).decode("utf-8", errors="replace")
    console.print(written_by_it, markup=False)
    written = [MODEL, CHECKPOINT]
    if can_draw():
        _plot(state.losses, out / PLOT)
        written.append(PLOT)
    else:
        console.print(NO_PICTURE, markup=False)
    console.print(f"Written to {out}: {', '.join(written)}", soft_wrap=True)
    return {"bits_a_byte": bits, "sample": written_by_it, "written": [str(out / name) for name in written]}


def _plot(losses: list[float], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    bits = torch.tensor(losses) / math.log(2)
    window = max(1, len(losses) // 50)
    axes.plot(range(1, len(losses) + 1), bits, color="tab:blue", alpha=0.3, linewidth=0.8)
    axes.plot(range(window, len(losses) + 1), bits.unfold(0, window, 1).mean(-1), color="tab:blue")
    axes.set_xlabel("step")
    axes.set_ylabel(f"bits a byte, each step and the mean of {window}")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


@contextmanager
def _progress(console: Console, start: int, steps: int) -> Iterator[Callable[[float, float], None]]:
    """A function to report a step: a progress bar in a terminal, ten lines or so in a pipe."""
    if not console.is_terminal:
        done = iter(range(start + 1, steps + 1))

        def line(loss: float, rate: float) -> None:
            step = next(done)
            if step == steps or step % max(1, steps // 10) == 0:
                console.print(f"  step {step}: loss {loss:.4f}, {rate:,.0f} tokens/s")

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=steps, completed=start)
        yield lambda loss, rate: bar.update(task, advance=1, description=f"loss {loss:.4f}, {rate:,.0f} tokens/s")


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


def _plain(value: Any) -> Any:
    """As it comes back from JSON."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _difference(before: Any, now: Any) -> tuple[Any, Any]:
    """Of two different mappings only what differs."""
    if isinstance(before, dict) and isinstance(now, dict):
        differ = [key for key in now if before.get(key) != now[key]]
        return {key: before.get(key) for key in differ}, {key: now[key] for key in differ}
    return before, now
