"""`dilated-attention train`: a byte-level LongNet language model of any file.

Everything is in the folder of the run:

    checkpoint.safetensors   parameters, optimizer and the figures so far; the options and the step as JSON beside them
    model.safetensors        the model, when the run is done: `LongNetLM.load` takes it
    loss.png                 bits a byte, of training and of the held-out bytes, if matplotlib is installed
    log.csv, tensorboard/    the same as it goes along, with --log

A step depends on the parameters, the optimizer, the options and its own number alone: its bytes and its dropout are
drawn from (seed, step). So a run that was killed, at any moment, goes on from its checkpoint when the command is given
again, and ends where it would have ended.

Under `torchrun` each process takes `batch` samples of every backward pass, and gradients are those of all: the run is
that of one process with so many times the batch, to rounding. The first process talks and writes.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from ..models import LongNetConfig, LongNetLM
from ..models.storage import load_about, load_tensors, save_tensors
from ..patterns.base import check_int
from .output import NO_PICTURE, Document, can_draw
from .printing import escaped
from .ranks import ALONE, Ranks, apart
from .training_log import Log, Row, check_logs, plot, progress
from .utilization import Products, matmul_rate

SAMPLE_BYTES = 200
EVALUATED = 8  # batches of held-out bytes at the most, so that evaluating costs little beside training
CHECKPOINT, MODEL, PLOT = "checkpoint.safetensors", "model.safetensors", "loss.png"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a run is made of, apart from its file; two runs with equal options and files are the same run.

    Attributes:
        batch, accumulate: samples of a backward pass in each process, and backward passes of a step.
        held_out: the share at the end of the file that is not trained on.
        eval_every: steps between two evaluations of the held-out bytes.
        ranks: how many processes.
        compiled: whether each layer is compiled as a whole.
    """

    model: LongNetConfig
    steps: int
    seq_len: int
    batch: int
    accumulate: int = 1
    learning_rate: float
    warmup: int
    held_out: float = 0.05
    eval_every: int = 100
    seed: int
    device: str
    ranks: int = 1
    compiled: bool = False
    file: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("steps", "seq_len", "batch", "accumulate", "eval_every"):
            check_int(name, getattr(self, name), least=1)
        check_int("warmup", self.warmup, least=0)
        if not 0.0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive and finite, got {self.learning_rate}")
        if not 0.0 < self.held_out <= 0.5:
            raise ValueError(f"held_out must be a share of the file in (0, 0.5], got {self.held_out}")


def run(
    console: Console,
    text: Path,
    out: Path,
    options: Options,
    *,
    save_every: int = 100,
    logs: tuple[str, ...] = (),
    extends: bool = False,
    ranks: Ranks = ALONE,
) -> Document:
    """Train until `options.steps`, from the checkpoint in `out` if there is one.

    Args:
        logs: "csv", "tensorboard" or both.
        extends: whether the checkpoint may be of a run of another number of steps.
        ranks: the processes of the run; of all but the first the result is empty.
    """
    check_int("save_every", save_every, least=1)
    check_logs(logs)
    data = text.read_bytes()
    trained, held_out = _split(data, options, text)
    file = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    options = replace(options, file=file, ranks=ranks.size)
    before = State.saved_options(out / CHECKPOINT) if (out / CHECKPOINT).exists() else None
    if before is not None:
        _check_same(before, options, out, extends)
    out.mkdir(parents=True, exist_ok=True)
    state = State.new(options, text, ranks) if before is None else State.resumed(out / CHECKPOINT, options, ranks)
    parameters = sum(p.numel() for p in state.model.parameters())
    where = options.device if ranks.size == 1 else f"{ranks.size} processes, {options.device}"
    console.print(
        f"{parameters:,} parameters on {where}, {len(trained):,} bytes of {text.name}",
        markup=False,
        soft_wrap=True,
    )
    start = len(state.bits)
    if before is not None:
        _announce(console, before, options, start)
    with Log(out, logs if ranks.is_first else (), start) as log:
        _train(console, state, (trained, held_out), options, out, save_every, log)
    if not ranks.is_first:
        return {}
    state.model.eval().save(out / MODEL)
    return {
        "parameters": parameters,
        "steps": options.steps,
        "began_at": start,
        "training_bits_a_byte": state.bits[-1],
        "held_out_bits_a_byte": state.curve[-1][1],
        "curve": [{"step": step, "held_out_bits_a_byte": bits} for step, bits in state.curve],
        **_finish(console, state, held_out, options, out, [log.name for log in log.writers]),
    }


def options_of_run(out: Path, steps: int | None) -> tuple[Path, Options]:
    """The file and the options of the run in a folder, with another number of steps if one is given."""
    path = out / CHECKPOINT
    if not path.exists():
        raise ValueError(f"--resume must be the folder of a run, which has a {CHECKPOINT}, got {out}")
    options, about = State.saved_options(path), load_about(path)
    if steps is not None and steps < about["step"]:
        raise ValueError(f"--steps must be at least the {about['step']} that the run in {out} has done, got {steps}")
    return Path(about["text"]), options if steps is None else replace(options, steps=steps)


def _train(
    console: Console,
    state: State,
    data: tuple[Tensor, Tensor],
    options: Options,
    out: Path,
    save_every: int,
    log: Log,
) -> None:
    start = saved = len(state.bits)
    trained, held_out = data
    try:
        state.evaluate_if_due(held_out, options)  # a run may have been stopped just before
        most = options.ranks * matmul_rate(options.device) / Products.of(state.model, options.seq_len).of_token
        with progress(console, start, options.steps, most) as report:
            for step in range(start, options.steps):
                began = perf_counter()
                bits = state.train(step, trained, options)
                rate = _samples(options) * options.seq_len / (perf_counter() - began)
                held_out_bits = state.evaluate_if_due(held_out, options)
                row = Row(step + 1, bits, held_out_bits, options.learning_rate * _schedule(step, options), rate)
                report(row)
                log.write(row)
                if state.ranks.is_first and ((step + 1) % save_every == 0 or step + 1 == options.steps):
                    state.save(out / CHECKPOINT, options)
                    saved = step + 1
    except KeyboardInterrupt:
        if len(state.bits) > saved and state.ranks.is_first:
            state.save(out / CHECKPOINT, options)
        console.print(f"Stopped after step {len(state.bits)}; the same command goes on.")
        raise


class State:
    """What a checkpoint holds: model, optimizer, and what every step so far and every evaluation gave.

    Attributes:
        text: the file that is learned, for `--resume`.
        bits: bits a byte of each step's own samples, before the step.
        curve: (step, bits a byte) of the held-out bytes after that step.
        loss: the module that gives the loss of some samples.
    """

    def __init__(
        self,
        model: LongNetLM,
        options: Options,
        text: str,
        bits: list[float],
        curve: list[tuple[int, float]],
        ranks: Ranks,
    ) -> None:
        self.model, self.text, self.bits, self.curve = model, text, bits, curve
        if options.compiled:
            for layer in model.layers:
                layer.compile(fullgraph=True)
        self.ranks, self.loss = ranks, ranks.wrapped(_Loss(model), options.device)
        matrices = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=options.learning_rate, betas=(0.9, 0.95))

    @classmethod
    def new(cls, options: Options, text: Path, ranks: Ranks = ALONE) -> State:
        torch.manual_seed(options.seed)
        model = LongNetLM(options.model).to(options.device)
        return cls(model, options, str(text.resolve()), [], [], ranks)

    @staticmethod
    def saved_options(path: Path) -> Options:
        about = load_about(path)
        found = about.get("options", {}) if isinstance(about, dict) else {}
        if set(found) != {each.name for each in fields(Options)}:
            raise ValueError(f"{path} was not written by this version of `train`: give another --out")
        return Options(**{**found, "model": LongNetConfig(**found["model"])})

    @classmethod
    def resumed(cls, path: Path, options: Options, ranks: Ranks = ALONE) -> State:
        tensors, about = load_tensors(path, options.device)
        curve = [(int(step), bits) for step, bits in tensors["curve"].tolist()]
        model = LongNetLM(options.model).to(options.device)
        state = cls(model, options, about["text"], tensors["bits"].tolist(), curve, ranks)
        state.model.load_state_dict(below("model.", tensors))
        for name, parameter in state.model.named_parameters():
            state.optimizer.state[parameter] = below(f"optimizer.{name}.", tensors)
        return state

    def save(self, path: Path, options: Options) -> None:
        tensors = {f"model.{name}": x for name, x in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            tensors |= {f"optimizer.{name}.{key}": x for key, x in self.optimizer.state[parameter].items()}
        tensors["bits"] = torch.tensor(self.bits, dtype=torch.float64)
        tensors["curve"] = torch.tensor(self.curve, dtype=torch.float64).view(-1, 2)
        save_tensors(path, tensors, {"step": len(self.bits), "text": self.text, "options": asdict(options)})

    def train(self, step: int, data: Tensor, options: Options) -> float:
        """One step of AdamW; its loss in bits a byte."""
        torch.manual_seed(options.seed * 1_000_003 + step + 1)
        for group in self.optimizer.param_groups:
            group["lr"] = options.learning_rate * _schedule(step, options)
        first = torch.randint(len(data) - options.seq_len, (_samples(options),))
        if not self.ranks.is_first:  # what dropout draws is another process's own
            torch.manual_seed(torch.initial_seed() + (self.ranks.rank << 40))
        rows = self.ranks.own(data[first[:, None] + torch.arange(options.seq_len + 1)]).long().to(options.device)
        self.model.train()
        self.optimizer.zero_grad()
        losses, parts = [], rows.split(options.batch)
        for i, part in enumerate(parts):
            with apart(self.loss, last=i + 1 == len(parts)):
                loss = self.loss(part) / options.accumulate
                loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.bits.append(self.ranks.total(torch.stack(losses).sum()).item() / self.ranks.size / math.log(2))
        if not math.isfinite(self.bits[-1]):
            raise RuntimeError(f"the loss of step {step + 1} is {self.bits[-1]}: try a lower learning rate")
        return self.bits[-1]

    def evaluate_if_due(self, held_out: Tensor, options: Options) -> float | None:
        """Bits a byte of the held-out bytes if this is the step for it, and they are not known."""
        step = len(self.bits)
        due = step > 0 and (step % options.eval_every == 0 or step == options.steps)
        if not due or (self.curve and self.curve[-1][0] >= step):
            return None
        self.model.eval()
        self.curve.append((step, self._evaluate(held_out, options)))
        return self.curve[-1][1]

    @torch.no_grad()
    def _evaluate(self, held_out: Tensor, options: Options) -> float:
        """Bits a byte over rows of `seq_len` of the held-out bytes; if they are many, over some from everywhere."""
        rows = held_out[: len(held_out) // (options.seq_len + 1) * (options.seq_len + 1)].view(-1, options.seq_len + 1)
        most = EVALUATED * _samples(options)
        if len(rows) > most:
            rows = rows[torch.arange(most) * len(rows) // most]
        total = torch.zeros((), device=options.device, dtype=torch.float64)
        for part in self.ranks.own(rows).split(options.batch):
            if len(part):
                total += _Loss(self.model)(part.long().to(options.device)) * len(part)
        return self.ranks.total(total).item() / len(rows) / math.log(2)


class _Loss(nn.Module):
    """Nats a byte, each row's successors given what is before them; bfloat16 on a GPU."""

    def __init__(self, model: LongNetLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, rows: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=rows.is_cuda):
            return self.model.loss(rows[:, :-1], rows[:, 1:])


def _samples(options: Options) -> int:
    """Of a step, in all processes."""
    return options.accumulate * options.batch * options.ranks


def _schedule(step: int, options: Options) -> float:
    """Up in a line during the warm-up, then down by half a cosine to a tenth."""
    if step < options.warmup:
        return (step + 1) / (options.warmup + 1)
    done = (step - options.warmup) / max(1, options.steps - options.warmup)
    return 0.55 + 0.45 * math.cos(math.pi * done)


def _split(data: bytes, options: Options, text: Path) -> tuple[Tensor, Tensor]:
    """What is trained on and what is held out, as tensors of bytes."""
    held_out = max(options.seq_len + 1, int(options.held_out * len(data)))
    if len(data) < 2 * held_out:
        raise ValueError(
            f"text must have at least {2 * held_out} bytes for seq_len {options.seq_len}, got {len(data)} ({text})"
        )
    both = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return both[:-held_out], both[-held_out:]


def _check_same(before: Options, options: Options, out: Path, extends: bool) -> None:
    """Refuse to go on from the checkpoint of another run."""
    was, now = _plain(asdict(before)), _plain(asdict(options))
    for name in now:
        if was[name] != now[name] and not (extends and name == "steps"):
            old, new = _difference(was[name], now[name])
            instead = "Give another --out for another run"
            if name == "steps":
                instead = f"`dilated-attention train --resume {out} --steps {new}` goes on to another number of them"
            if name == "ranks":
                instead = (
                    f"`torchrun --nproc-per-node {old} -m dilated_attention_pytorch train …` has as many processes"
                )
            raise ValueError(
                f"{name} must be what it was when the run began, {old}, to go on from {out / CHECKPOINT}; got {new}. "
                f"{instead}"
            )


def _announce(console: Console, before: Options, options: Options, start: int) -> None:
    console.print(f"Going on after step {start} of {options.steps}.")
    if before.steps != options.steps and start < options.steps:
        rate = options.learning_rate * _schedule(start, options)
        console.print(
            f"The run was to have {before.steps}. From here on the learning rate is that of a run of {options.steps}, "
            f"{rate:.2e} in the next step.",
            soft_wrap=True,
        )


def _finish(console: Console, state: State, held_out: Tensor, options: Options, out: Path, logs: list[str]) -> Document:
    console.print(f"Held-out bytes: {state.curve[-1][1]:.3f} bits a byte.")
    draw = torch.Generator(options.device).manual_seed(options.seed)
    prompt = held_out[None, : min(64, options.seq_len)].long().to(options.device)
    model = state.model
    if options.compiled:  # for one length; those of a growing cache are others
        model = LongNetLM(options.model).to(options.device).eval()
        model.load_state_dict(state.model.state_dict())
    sample = model.generate(prompt, SAMPLE_BYTES, temperature=0.8, generator=draw)[0].tolist()
    written_by_it = bytes(sample).decode("utf-8", errors="replace")
    console.print(escaped(written_by_it), markup=False, soft_wrap=True)
    written = [MODEL, CHECKPOINT, *logs]
    if can_draw():
        plot(state.bits, state.curve, out / PLOT)
        written.append(PLOT)
    else:
        console.print(NO_PICTURE, markup=False)
    console.print(f"Written to {out}: {', '.join(written)}", soft_wrap=True)
    return {"sample": written_by_it, "written": [str(out / name) for name in written]}


def below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
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
