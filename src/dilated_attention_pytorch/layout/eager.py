"""Plain eager PyTorch, and caches that stay in it.

Under a trace, a dispatch mode, a functorch transform or in inference mode, new tensors are fake, wrapped or marked. In
a cache that outlives the call they would break, or silently change, every later call. So whatever a cache keeps is made
by `plainly`; a function that remembers tensors is a `plain_cache`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..caches import cached
from ..patterns.base import constant_in_graphs

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def is_plain_eager(*tensors: Tensor) -> bool:
    """Whether this is plain eager PyTorch: no graph is traced, no mode or transform intercepts, no subclass, data
    in every tensor.

    Then a call can skip the dispatcher, which takes most of the time of a short one.
    """
    return not (
        torch.compiler.is_dynamo_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or any(type(x) not in (Tensor, torch.nn.Parameter) or x.is_meta for x in tensors)
    )


def is_plain(x: Tensor) -> bool:
    """Neither a subclass, as fake tensors are, nor wrapped by a transform."""
    wrapped = torch._is_functional_tensor(x) or torch._C._functorch.is_functorch_wrapped_tensor(x)
    return type(x) is Tensor and not wrapped


def plainly(make: Callable[[], T]) -> T:
    """`make()` as plain eager PyTorch runs it, whatever intercepts here: tensors that may stay in a cache."""
    if not is_plain_eager() or torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.Functionalize):
        # All of that belongs to a thread, and a new one has none of it.
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        with ThreadPoolExecutor(max_workers=1) as alone:
            return alone.submit(_on, stream, make).result()
    with torch.inference_mode(False):
        return make()


def _on(stream: torch.cuda.Stream | None, make: Callable[[], T]) -> T:
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        return make()


def plain_cache(bound: int, holds: str) -> Callable[[F], F]:
    """`cached` for functions that make tensors; torch.compile takes those for constants."""

    def decorate(function: F) -> F:
        @cached(bound, holds)
        @wraps(function)
        def made(*args: Any, **options: Any) -> Any:
            return plainly(lambda: function(*args, **options))

        @constant_in_graphs
        @wraps(function)
        def found(*args: Any, **options: Any) -> Any:
            return made(*args, **options)

        return found  # type: ignore[return-value]

    return decorate


def value_cache(bound: int, holds: str) -> Callable[[F], F]:
    """`cached` for functions of values, which torch.compile traces."""

    def decorate(function: F) -> F:
        made = cached(bound, holds)(function)

        @wraps(function)
        def found(*args: Any) -> Any:
            return function(*args) if torch.compiler.is_dynamo_compiling() else made(*args)

        return found  # type: ignore[return-value]

    return decorate
