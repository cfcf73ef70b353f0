"""Which models of transformers compute attention by its `AttentionInterface`, and which only take the name.

transformers sets any registered name as `config._attn_implementation`, whatever a model does with it. So models whose
source shows that they compute attention themselves are refused when they are given a name of ours, others are watched
during their first forward, and `verify` counts the calls of every attention module.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..caches import cached
from ..patterns import Pattern
from ..patterns.base import constant_in_graphs

# Names that are registered, and the pattern of each layer by its number.
NAMES: dict[str, Callable[[int], Pattern]] = {}


def keep(name: str, pattern_of: Callable[[int], Pattern]) -> None:
    """From now on models that are given this name are looked at."""
    if not NAMES:
        _look_at_models()
    NAMES[name] = pattern_of


def _look_at_models() -> None:
    """transformers has no place for this: two methods do what they did, and act where a name is one of ours."""
    check, give = PreTrainedModel.get_correct_attn_implementation, PreTrainedModel.set_attn_implementation

    @wraps(check)
    def get_correct_attn_implementation(
        self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any
    ) -> str:
        if requested_attention in NAMES:
            _look_at(type(self))
            _Watch(self)
        return check(self, requested_attention, *args, **kwargs)

    @wraps(give)
    def set_attn_implementation(
        self: PreTrainedModel, attn_implementation: str | dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        if isinstance(attn_implementation, str) and attn_implementation in NAMES:
            for module in self.modules():  # otherwise transformers logs a line, and leaves such a model as it was
                if isinstance(module, PreTrainedModel):
                    _look_at(type(module))
        give(self, attn_implementation, *args, **kwargs)

    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation  # type: ignore[method-assign]
    PreTrainedModel.set_attn_implementation = set_attn_implementation  # type: ignore[method-assign]


def _look_at(model: type) -> None:
    """Refuse what attends by itself alone, and warn once where a part does."""
    own, reason = _bypass(model)
    if reason is not None:
        raise ValueError(
            f"{model.__name__} cannot be given a pattern: {reason}; parts of a model can be given a name by a dict, "
            'such as attn_implementation={"text_config": name}'
        )
    if own and model not in warned:
        warned.add(model)
        warnings.warn(f"{model.__name__} holds modules that attend without the pattern: {', '.join(own)}", stacklevel=3)


warned: set[type] = set()


class _Watch:
    """Watches the first forward of a model, and warns if nothing called a registered attention meanwhile."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.before = 0
        self.handles = model.register_forward_pre_hook(self.begin), model.register_forward_hook(self.end)

    def begin(self, model: nn.Module, args: object) -> None:
        if not torch.compiler.is_compiling():
            self.before = Calls.count

    def end(self, model: PreTrainedModel, args: object, output: object) -> None:
        if torch.compiler.is_compiling():
            return
        for handle in self.handles:
            handle.remove()
        kind, name = type(model), model.config._attn_implementation
        silent = Calls.count == self.before and name in NAMES and any(map(is_attention, model.modules()))
        if silent and kind not in warned:
            warned.add(kind)
            warnings.warn(
                f"{kind.__name__} ended a forward without a call of the attention that is registered as {name!r}: "
                "it computes attention itself, without the pattern",
                stacklevel=2,
            )


class Calls:
    """How often registered attention was called. In a graph, how often it was traced."""

    count = 0

    @staticmethod
    @constant_in_graphs
    def add() -> None:
        Calls.count += 1


def is_attention(module: nn.Module) -> bool:
    return "Attention" in type(module).__name__


def verify(model: PreTrainedModel, inputs: Mapping[str, Any] | None = None) -> dict[str, int]:
    """Run one forward, and count how often each module called registered attention.

    Args:
        model: given the name of a pattern.
        inputs: keyword arguments of its forward. By default some tokens, or an image, are made up.

    Returns:
        The calls of each module that called, by its name in the model.

    Raises:
        ValueError: if none did, or an attention module (by the name of its class) ran and did not.
    """
    calls = _calls_of_modules(model, _made_up(model) if inputs is None else inputs)
    called = _innermost([name for name, count in calls.items() if count])
    silent = _innermost([name for name in calls if not calls[name] and is_attention(model.get_submodule(name))])
    silent = [name for name in silent if not any(_is_inside(name, other) for other in called)]
    if silent or not called:
        who = [f"{name} ({type(model.get_submodule(name)).__name__})" for name in silent] or ["no module"]
        raise ValueError(
            f"{type(model).__name__} does not attend by a registered pattern alone: {', '.join(who)} "
            f"{'ran without calling' if silent else 'called'} its attention"
        )
    return {name: calls[name] for name in called}


@torch.no_grad()
def _calls_of_modules(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, int]:
    """Of each module that runs, how often registered attention is called meanwhile."""
    calls: dict[str, int] = {}

    def begin(name: str, *_: object) -> None:
        calls[name] = calls.get(name, 0) - Calls.count

    def end(name: str, *_: object) -> None:
        calls[name] += Calls.count

    handles = []
    training = [module for module in model.modules() if module.training]
    try:
        for name, module in model.named_modules():
            handles += [
                module.register_forward_pre_hook(partial(begin, name)),
                module.register_forward_hook(partial(end, name)),
            ]
        model.eval()
        model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
        for module in training:
            module.training = True
    return {name: calls[name] for name, _ in model.named_modules() if name in calls}


def _innermost(names: list[str]) -> list[str]:
    return [name for name in names if not any(_is_inside(other, name) for other in names)]


def _is_inside(name: str, other: str) -> bool:
    return name != other and (other == "" or name.startswith(other + "."))


def _made_up(model: PreTrainedModel) -> dict[str, Tensor]:
    main, config = model.main_input_name, model.config
    if main == "input_ids":
        tokens = torch.arange(16, device=model.device) % config.get_text_config().vocab_size
        return {main: tokens[None]}
    if main == "pixel_values" and hasattr(config, "image_size"):
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        shape = 1, getattr(config, "num_channels", 3), height, width
        return {main: torch.zeros(shape, dtype=model.dtype, device=model.device)}
    raise ValueError(f"inputs must be given: what {type(model).__name__} takes as {main} cannot be made up")


@cached(128, "attention classes of models that do not call registered patterns")
def _bypass(model: type) -> tuple[list[str], str | None]:
    """The attention classes of a model that do not call the interface, as far as its source says; why it is none."""
    parts = _built_of(model)
    table = next((found for found in map(OWN_TABLE.search, parts.values()) if found), None)
    if table:
        return [], f"it looks its attention up in {table[1]}, where registered names are not"
    attentions = [kind for kind in parts if "Attention" in kind.__name__ and not issubclass(kind, PreTrainedModel)]
    own = sorted(kind.__name__ for kind in attentions if not _may_call(_built_of(kind)))
    if attentions and not _may_call(parts):
        return own, f"it computes attention itself ({', '.join(own)}), not by transformers' AttentionInterface"
    return own, None


INTERFACE = re.compile(r"get_interface\(|\bALL_(?!MASK)\w*ATTENTION_FUNCTIONS\b")
OWN_TABLE = re.compile(r"\b((?!ALL_)\w+)\[(?:self\.)?config\._attn_implementation\]")


def _may_call(parts: dict[type, str]) -> bool:
    """A class without a source may do anything."""
    return any(not source or INTERFACE.search(source) for source in parts.values())


def _built_of(model: type) -> dict[type, str]:
    """The source of the class, of those it derives from, of the modules that its constructor names, and so on."""
    found: dict[type, str] = {}
    left: list[object] = [model]
    while left:
        kind = left.pop()
        if not isinstance(kind, type) or not issubclass(kind, nn.Module) or kind in found:
            continue
        if kind.__module__.startswith("torch.") or kind is PreTrainedModel:
            continue
        source, words = _sources(kind.__module__).get(kind.__qualname__, ("", frozenset()))
        found[kind] = source
        names = vars(sys.modules[kind.__module__]) if words else {}
        for word in words & names.keys():
            left += names[word].values() if isinstance(names[word], dict) else [names[word]]
        left += kind.__bases__
    return found


@cached(128, "source of the classes of a module of models")
def _sources(module: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Of each class of a module, its source and the names in its constructor."""
    try:
        text = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):  # written in a shell, say
        return {}
    classes = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            inside = [x for x in node.body if isinstance(x, ast.FunctionDef) and x.name == "__init__"]
            names = frozenset(x.id for method in inside for x in ast.walk(method) if isinstance(x, ast.Name))
            classes[node.name] = "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno]), names
    return classes
