"""How far a module is opened by a `SparsitySchedule`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout.eager import plainly
from ..layout.lists import HOST


class Openable:
    """Mixin of attention modules.

    Attributes:
        opening: 0 for the module's own sparsity, 1 for dense.
    """

    _opening: float = 0.0
    # The same for torch.compile, float64 []: None for 0. See `ops.named.Opened`.
    _opening_in_graphs: Tensor | None = None

    @property
    def opening(self) -> float:
        return self._opening

    @opening.setter
    def opening(self, opening: float) -> None:
        self._opening = opening
        tensor = plainly(lambda: torch.tensor(opening, dtype=torch.float64, device=HOST))
        self._opening_in_graphs = tensor if opening else None
