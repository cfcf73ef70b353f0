"""`Carrier`: a tensor subclass in the place of a mask that is never made, which takes other tensors through a model."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


class Carrier(Tensor):
    """It has the shape and dtype of a mask, so that models pass it on, can be moved to a device, and no more.

    Attributes:
        TENSORS: names of the tensors that it carries, all on one device; the first is never None: torch.compile takes
            no subclass without a tensor inside.
        further: names of tensors beside these that it was given.
        facts: what else it carries; compared by torch.compile, which makes a graph for each.
    """

    TENSORS: ClassVar[tuple[str, ...]]
    further: tuple[str, ...]
    facts: Any

    @staticmethod
    def __new__(
        cls: type[Self], shape: tuple[int, ...], device: torch.device, facts: Any, **tensors: Tensor | None
    ) -> Self:
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        self.facts = facts
        for name in cls.TENSORS:
            setattr(self, name, tensors.get(name))
        self.further = tuple(name for name in tensors if name not in cls.TENSORS)
        for name in self.further:
            setattr(self, name, tensors[name])
        return self

    def refusal(self, use: object) -> str:
        """Why it cannot be used like this."""
        raise NotImplementedError

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        names = [*(name for name in self.TENSORS if getattr(self, name) is not None), *self.further]
        return names, (tuple(self.shape), self.device, self.facts)

    @classmethod
    def __tensor_unflatten__(cls, tensors: dict[str, Any], context: tuple[Any, ...], *_: Any) -> Self:
        return cls(*context, **tensors)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        aten, options = torch.ops.aten, kwargs or {}
        if func is aten.copy_.default and all(isinstance(x, cls) for x in args[:2]):  # a graph has changed its tensors
            for name in args[0].__tensor_flatten__()[0]:
                getattr(args[0], name).copy_(getattr(args[1], name))
            return args[0]
        if func not in (aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default):
            cls._refuse(func, args, options)
        carrier = args[0]
        if options.get("dtype", torch.bool) != torch.bool:
            cls._refuse(options["dtype"], args, options)
        names, (shape, device, facts) = carrier.__tensor_flatten__()
        device = options.get("device", device)
        return cls(shape, device, facts, **{name: getattr(carrier, name).to(device) for name in names})

    @classmethod
    def _refuse(cls, use: object, *arguments: object) -> NoReturn:
        # No TypeError: Python would make "unsupported operand type(s) for +: 'Tensor' and 'Mask'" of it.
        raise ValueError(next(x for x in tree_leaves(arguments) if isinstance(x, cls)).refusal(use))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={list(self.shape)}, {self.facts})"
