"""Tensors in a safetensors file, with a JSON value beside them: no pickle, and never half a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


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
    with safetensors.safe_open(path, framework="pt", device=str(device or "cpu")) as file:
        metadata = file.metadata() or {}
        if "about" not in metadata:
            raise ValueError(f"path must be a file that this package saved, got {path}")
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(metadata["about"])  # noqa: SIM118


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise ImportError("saving and loading need safetensors: pip install safetensors") from error
    return safetensors
