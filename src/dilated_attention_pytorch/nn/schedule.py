"""`SparsitySchedule`: train dense first, and close the attention of a model step by step."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..patterns.base import check_int
from ..patterns.blocks import check_ratio


class SparsitySchedule:
    """Takes every block-sparse attention of a model from dense (opening 1) to its own sparsity (opening 0).

    Dilated attention has no such scale: it stays as it is.

    An adaptive module keeps that much more of what it would leave out; a module with a pattern also sees a window of
    that share of the sequence.

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
        check_int("steps", steps, least=1)
        check_int("dense_steps", dense_steps, least=0)
        if kept_floor is not None:
            check_ratio("kept_floor", kept_floor)
        self.modules = [module for module in model.modules() if hasattr(module, "opening")]
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

    def step(self, kept: float | None = None) -> None:
        """After each step of the optimizer."""
        if (kept is None) != (self.kept_floor is None):
            raise ValueError(
                f"kept must be given if and only if there is a kept_floor, got {kept} and {self.kept_floor}"
            )
        self.taken += 1
        if self.taken > self.dense_steps:
            back = kept is not None and self.kept_floor is not None and kept < self.kept_floor
            self.closed = min(max(self.closed + (-1 if back else 1), 0), self.steps)
        self._apply()

    def _apply(self) -> None:
        for module in self.modules:
            module.opening = self.opening  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, beside those of model and optimizer."""
        return {"taken": self.taken, "closed": self.closed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the checkpoint was written; the modules are opened as they were."""
        for name, most in (("taken", None), ("closed", self.steps)):
            check_int(name, state[name], least=0)
            if most is not None and state[name] > most:
                raise ValueError(f"{name} must be at most steps = {most}, got {state[name]}")
        self.taken, self.closed = state["taken"], state["closed"]
        self._apply()
