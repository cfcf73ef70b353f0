"""Tensors in a safetensors file, with a JSON value beside them: no pickle, and never half a file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
    unfinished.unlink(missing_ok=True)
    unfinished.touch()
    mode = unfinished.stat().st_mode  # that of every new file; safetensors may write one that its owner alone can read
    safetensors.torch.save_file(contiguous, unfinished, metadata={"about": json.dumps(about)})
    unfinished.chmod(mode)
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    unfinished.replace(path)


def load_tensors(path: str | Path, device: torch.device | str | None = None) -> tuple[dict[str, Tensor], Any]:
    """The tensors by name, and the value that was saved beside them."""
    device = check_device("cpu" if device is None else device)
    with _opened(path) as (file, about):
        # Copies: whoever wrote into the file, which is mapped, would write into the tensors.
        tensors = {name: file.get_tensor(name).to(device, copy=True) for name in file.keys()}  # noqa: SIM118
    return tensors, about


def load_about(path: str | Path) -> Any:
    """The value that was saved beside the tensors, which are not read."""
    with _opened(path) as (_, about):
        return about


@contextmanager
def _opened(path: str | Path) -> Iterator[tuple[Any, Any]]:
    safetensors = _safetensors()
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if "about" not in metadata:
                raise ValueError(f"path must be a file that this package saved, got {path}")
            yield file, json.loads(metadata["about"])
    except safetensors.SafetensorError as error:
        raise ValueError(f"path must be a whole safetensors file, got {path}: {error}") from error


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise ImportError("saving and loading need safetensors: pip install safetensors") from error
    return safetensors
