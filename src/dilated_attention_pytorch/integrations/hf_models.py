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
from functools import lru_cache, wraps
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..patterns.base import constant_in_graphs

NAMES: set[str] = set()  # that patterns are registered under


def keep(name: str) -> None:
    """From now on models that are given this name are looked at."""
    NAMES.add(name)
    if not hasattr(PreTrainedModel.get_correct_attn_implementation, "__wrapped__"):
        _look_at_models()


def _look_at_models() -> None:
    """transformers has no place for this: two methods do what they did, and act where a name is one of ours."""
    check, give = PreTrainedModel.get_correct_attn_implementation, PreTrainedModel.set_attn_implementation

    @wraps(check)
    def get_correct_attn_implementation(
        self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any
    ) -> str:
        if requested_attention in NAMES:
            _refuse(type(self))
            _Watch(self)
        return check(self, requested_attention, *args, **kwargs)

    @wraps(give)
    def set_attn_implementation(
        self: PreTrainedModel, attn_implementation: str | dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        if attn_implementation in NAMES:  # else transformers logs a warning and leaves the model as it was
            for module in self.modules():
                if isinstance(module, PreTrainedModel):
                    _refuse(type(module))
        give(self, attn_implementation, *args, **kwargs)

    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation
    PreTrainedModel.set_attn_implementation = set_attn_implementation


class _Watch:
    """Looks on at the first forward of a model, and warns if nobody called a registered attention meanwhile."""

    warned: ClassVar[set[type]] = set()

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
        silent = Calls.count == self.before and name in NAMES and any(map(_is_attention, model.modules()))
        if silent and kind not in self.warned:
            self.warned.add(kind)
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


def _is_attention(module: nn.Module) -> bool:
    return "Attention" in type(module).__name__


def verify(model: PreTrainedModel, inputs: Mapping[str, Any] | None = None) -> dict[str, int]:
    """Run one forward and count the calls of registered attention, module by module.

    Args:
        model: given the name of a pattern.
        inputs: keyword arguments of its forward. By default some tokens, or an image, are made up.

    Returns:
        For each module that called registered attention, by its name in the model, how often it did.

    Raises:
        ValueError: if an attention module ran and did not, or none did.
    """
    given = _made_up(model) if inputs is None else inputs
    before: dict[str, int] = {}
    calls: dict[str, int] = {}

    def begin(name: str) -> Callable[..., None]:
        return lambda *_: before.__setitem__(name, Calls.count)

    def end(name: str) -> Callable[..., None]:
        return lambda *_: calls.__setitem__(name, calls.get(name, 0) + Calls.count - before[name])

    handles = []
    training = [module for module in model.modules() if module.training]
    try:
        for name, module in model.named_modules():
            handles += [module.register_forward_pre_hook(begin(name)), module.register_forward_hook(end(name))]
            module.training = False
        with torch.no_grad():
            model(**given)
    finally:
        for handle in handles:
            handle.remove()
        for module in training:
            module.training = True
    ours = _innermost({name for name, count in calls.items() if count})
    silent = {name for name, count in calls.items() if not count and _is_attention(model.get_submodule(name))}
    missed = [name for name in _innermost(silent) if not any(_is_inside(name, other) for other in ours)]
    if missed or not ours:
        kinds = sorted({type(model.get_submodule(name)).__name__ for name in missed})
        who = f"{', '.join(missed)} ({', '.join(kinds)})" if missed else "no module"
        rest = "computed attention without it" if missed else "called it"
        raise ValueError(f"{type(model).__name__} does not attend by the registered attention: {who} {rest}")
    return {name: calls[name] for name in ours}


def _innermost(names: set[str]) -> list[str]:
    return [name for name in sorted(names) if not any(_is_inside(other, name) for other in names)]


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


def _refuse(model: type[nn.Module]) -> None:
    reason = _bypass(model)
    if reason is not None:
        raise ValueError(
            f"{model.__name__} cannot be given a pattern: {reason}; parts of a model can be given a name by a dict, "
            'such as attn_implementation={"text_config": name}'
        )


@lru_cache
def _bypass(model: type[nn.Module]) -> str | None:
    """Why a model does not compute attention by the interface, as far as its source says."""
    parts = _built_of(model)
    table = next((found for found in map(OWN_TABLE.search, parts.values()) if found), None)
    if table:
        return f"it looks its attention up in {table[1]}, where registered names are not"
    attentions = sorted(kind.__name__ for kind in parts if "Attention" in kind.__name__)
    if attentions and not any("get_interface(" in source for source in parts.values()):
        return f"it computes attention itself ({', '.join(attentions)}), not by transformers' AttentionInterface"
    return None


OWN_TABLE = re.compile(r"\b((?!ALL_)\w+)\[(?:self\.)?config\._attn_implementation\]")


def _built_of(model: type[nn.Module]) -> dict[type[nn.Module], str]:
    """The source of the class, of those it derives from, of the modules that its constructor names, and so on."""
    found: dict[type[nn.Module], str] = {}
    left: list[object] = [model]
    while left:
        kind = left.pop()
        if not isinstance(kind, type) or not issubclass(kind, nn.Module) or kind in found:
            continue
        module = kind.__module__
        if module.startswith("torch.") or kind is PreTrainedModel:
            continue
        source, words = _sources(module).get(kind.__qualname__, ("", frozenset()))
        found[kind] = source
        for word in words & vars(sys.modules[module]).keys():
            named = vars(sys.modules[module])[word]
            left += named.values() if isinstance(named, dict) else [named]
        left += kind.__bases__
    return found


@lru_cache
def _sources(module: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Of each class of a module, its source and the names in its constructor."""
    try:
        text = inspect.getsource(sys.modules[module])
    except (OSError, TypeError):  # written in a shell, say
        return {}
    classes = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            inside = [x for x in node.body if isinstance(x, ast.FunctionDef) and x.name == "__init__"]
            names = frozenset(x.id for method in inside for x in ast.walk(method) if isinstance(x, ast.Name))
            classes[node.name] = "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno]), names
    return classes
