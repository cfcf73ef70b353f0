"""Tensors in a safetensors file, with a JSON value beside them: no pickle, and never half a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..ops.checks import check_device


def save_tensors(path: str | Path, tensors: Mapping[str, Tensor], about: Any) -> None:
    """Write the file whole or not at all: whoever reads it, also after a crash, sees the old one or the new one."""
    safetensors = _safetensors()
    path = Path(path)
    unfinished = path.with_name(path.name + ".unfinished")
    contiguous = {name: x.detach().contiguous() for name, x in tensors.items()}
    safetensors.torch.save_file(contiguous, unfinished, metadata={"about": json.dumps(about)})
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    unfinished.replace(path)


def load_tensors(path: str | Path, device: torch.device | str | None = None) -> tuple[dict[str, Tensor], Any]:
    """The tensors by name, and the value that was saved beside them."""
    safetensors = _safetensors()
    device = check_device("cpu" if device is None else device)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if "about" not in metadata:
                raise ValueError(f"path must be a file that this package saved, got {path}")
            # Copies: whoever wrote into the file, which is mapped, would write into the tensors.
            tensors = {name: file.get_tensor(name).to(device, copy=True) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"path must be a whole safetensors file, got {path}: {error}") from error
    return tensors, json.loads(metadata["about"])


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise ImportError("saving and loading need safetensors: pip install safetensors") from error
    return safetensors
