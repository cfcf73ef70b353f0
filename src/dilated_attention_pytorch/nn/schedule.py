"""`SparsitySchedule`: train dense first, and close the attention of a model step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..patterns.base import check_int, shown
from ..patterns.blocks import check_ratio
from .adaptive import BlockSparseAdaptive
from .attention import BlockSparseAttention

SETTINGS = ("steps", "dense_steps", "kept_floor")


class SparsitySchedule:
    """Takes every block-sparse attention of a model from dense (opening 1) to its own sparsity (opening 0).

    Dilated attention has no such scale: it stays as it is.

    An adaptive module keeps that much more of what it would leave out. The windows and block rules of a pattern widen
    to that share of the sequence (`patterns.opening.opened`). They never show what the pattern keeps apart: no later
    key where its rules look back only, no other document. Global tokens stay global tokens.

        schedule = SparsitySchedule(model, steps=1000, dense_steps=200)
        for batch in data:
            ...
            optimizer.step()
            schedule.step()                       # or schedule.step(kept=...), with kept_floor

    Args:
        model: any module; its attention modules of this library are found inside.
        steps: how many steps the closing takes.
        dense_steps: steps before it begins.
        kept_floor: close by feedback: `step` is told the share of attention mass that the model keeps (`kept_mass`),
            closes a bit where it is at least this, and opens a bit where it is less.
    """

    def __init__(self, model: nn.Module, *, steps: int, dense_steps: int = 0, kept_floor: float | None = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {shown(model)}")
        check_int("steps", steps, least=1)
        check_int("dense_steps", dense_steps, least=0)
        if kept_floor is not None:
            check_ratio("kept_floor", kept_floor, "attention mass kept")
        self.modules = [m for m in model.modules() if isinstance(m, BlockSparseAttention | BlockSparseAdaptive)]
        if not self.modules:
            raise ValueError(
                "model must hold a block-sparse attention module (dilated attention cannot be opened), "
                f"got {type(model).__name__}"
            )
        self.steps, self.dense_steps, self.kept_floor = steps, dense_steps, kept_floor
        self.taken, self.closed = 0, 0
        self._apply()

    @property
    def opening(self) -> float:
        """1 for dense, 0 for the sparsity that the modules were made with."""
        return 1.0 - self.closed / self.steps

    def step(self, kept: float | Tensor | None = None) -> None:
        """After each step of the optimizer.

        Args:
            kept: with `kept_floor` the share that was kept, in [0, 1]: a number, or a tensor that holds one, such as
                `kept_mass(…).mean()`, which is waited for.
        """
        if (kept is None) != (self.kept_floor is None):
            raise ValueError(
                "kept must be given if and only if there is a kept_floor, "
                f"got {'no kept' if kept is None else 'kept'} and kept_floor={self.kept_floor}"
            )
        back = kept is not None and _share(kept) < self.kept_floor  # type: ignore[operator]
        self.taken += 1
        if self.taken > self.dense_steps:
            self.closed = min(max(self.closed + (-1 if back else 1), 0), self.steps)
        self._apply()

    def _apply(self) -> None:
        for module in self.modules:
            module.opening = self.opening

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, beside those of model and optimizer."""
        return {"taken": self.taken, "closed": self.closed, **{name: getattr(self, name) for name in SETTINGS}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the checkpoint was written; the modules are opened as they were.

        The schedule must have been made with the settings of the one that was saved: with others the same steps would
        mean another opening.
        """
        if not isinstance(state, Mapping) or set(state) != set(self.state_dict()):
            got = sorted(state) if isinstance(state, Mapping) else state
            raise ValueError(f"state must be what state_dict gives, with {sorted(self.state_dict())}, got {shown(got)}")
        for name in SETTINGS:
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"state is of a schedule with {name}={state[name]!r}, and this one has "
                    f"{name}={getattr(self, name)!r}: make it with the settings of the one that was saved"
                )
        for name, most in (("taken", None), ("closed", self.steps)):
            check_int(name, state[name], least=0)
            if most is not None and state[name] > most:
                raise ValueError(f"{name} must be at most steps = {most}, got {state[name]}")
        self.taken, self.closed = state["taken"], state["closed"]
        self._apply()


def _share(kept: object) -> float:
    if isinstance(kept, Tensor) and kept.ndim == 0 and not kept.is_complex():
        kept = kept.item()
    if not isinstance(kept, int | float) or isinstance(kept, bool):
        raise TypeError(f"kept must be a number, such as kept_mass(...).mean(), got {shown(kept)}")
    if not 0.0 <= kept <= 1.0:
        raise ValueError(f"kept must be the share of attention mass that is kept, in [0, 1], got {kept}")
    return kept
