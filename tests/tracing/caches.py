"""Everything that the library keeps from one call to the next, found by walking what its modules refer to."""

import functools
import gc
import sys
import types
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from dilated_attention_pytorch.layout.eager import is_plain

PACKAGE = "dilated_attention_pytorch"
LRU = type(functools.lru_cache(print))


def kept(*roots: object) -> Iterator[object]:
    """All objects that the library's modules, and these roots, refer to, as far as they are its own or containers."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == PACKAGE]
    todo, seen = [*(vars(module) for module in modules), *roots], set()
    while todo:
        found = todo.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if not isinstance(found, Tensor):  # whoever compares a fake one with another gets an error
            yield found
        else:
            yield found
            continue
        todo += [x for x in _referents(found) if _is_ours(x)]


def _referents(found: object) -> list[object]:
    if isinstance(found, weakref.WeakKeyDictionary | weakref.WeakValueDictionary | weakref.WeakSet):
        return [*found.items()] if hasattr(found, "items") else [*found]
    return gc.get_referents(found)


def _is_ours(x: object) -> bool:
    if isinstance(x, Tensor | torch.UntypedStorage | LRU | torch.nn.Module):
        return True
    if isinstance(x, type | types.ModuleType | str | int | float | torch.device | torch.dtype):
        return isinstance(x, type) and x.__module__.partition(".")[0] == PACKAGE
    if isinstance(x, types.FunctionType):
        return (x.__module__ or "").partition(".")[0] == PACKAGE
    own = type(x).__module__.partition(".")[0] in (PACKAGE, "builtins", "collections", "weakref", "functools")
    return own and not isinstance(x, types.FrameType | types.TracebackType)


def tensors_kept(*roots: object) -> list[Tensor]:
    return [x for x in kept(*roots) if isinstance(x, Tensor)]


def faults(*roots: object) -> list[str]:
    """What is kept and is no plain tensor with data, that a later call could use in any mode."""
    found = []
    for x in tensors_kept(*roots):
        if type(x) not in (Tensor, torch.nn.Parameter) or (type(x) is Tensor and not is_plain(x)):
            found.append(f"a {type(x).__name__}, functional or wrapped")
        elif x.is_meta:
            found.append(f"a tensor without data {list(x.shape)}")
        elif x.is_inference():
            found.append(f"an inference tensor {list(x.shape)}")
    found += ["a storage without data" for x in kept(*roots)
              if isinstance(x, torch.UntypedStorage) and x.device.type == "meta"]  # fmt: skip
    return found
