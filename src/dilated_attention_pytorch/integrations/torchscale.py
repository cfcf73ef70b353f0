"""torchscale's LongNet, and models made of it such as Prov-GigaPath's slide encoder, without flash-attn.

    from dilated_attention_pytorch.integrations.torchscale import replace_dilated_attention

    replace_dilated_attention(model)  # in place; parameters and the names of the state dict stay

The model then runs on a CPU, in any dtype, in linear memory, and gives what torchscale gives. Two things differ, on
purpose: a `key_padding_mask` hides its keys (torchscale's flash path drops it), and dropout of attention weights ends
with training (there it goes on).
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..caches import register_container
from ..layout.eager import is_plain_eager
from ..ops import dilated_attention
from ..ops.choose import check_backend
from ..ops.dilated import check_padding
from ..patterns import Branches
from ..patterns.base import check_flag, check_int, check_sequence, shown
from ..patterns.branches import check_heads

# What a `DilatedAttention` of torchscale has and this one takes over, in the order of the state dict.
PARTS = ("k_proj", "v_proj", "q_proj", "out_proj", "inner_attn_ln", "xpos")


class TorchscaleAttention(nn.Module):
    """In the place of a `DilatedAttention` of torchscale: the same submodules, arguments and results."""

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    out_proj: nn.Module
    inner_attn_ln: nn.Module | None
    xpos: nn.Module | None

    def __init__(self, theirs: nn.Module, *, padding: str | None, detach_branch_weights: bool, backend: str) -> None:
        super().__init__()
        for name in PARTS:
            setattr(self, name, getattr(theirs, name))
        given: Any = theirs
        self.args, self.embed_dim, self.num_heads = given.args, given.embed_dim, given.num_heads
        self.head_dim = self.embed_dim // self.num_heads
        self.dropout = float(given.dropout)
        segments, dilations = (
            [operator.index(x) for x in of] for of in (self.args.segment_length, self.args.dilated_ratio)
        )
        self.branches = Branches(segments, dilations, head_offsets="grouped")
        check_heads(dilations, self.num_heads)
        self.padding, self.detach_branch_weights, self.backend = padding, detach_branch_weights, backend
        self.noted: _Noted | None = None
        self.train(theirs.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        incremental_state: dict[str, Tensor] | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        rel_pos: Tensor | None = None,
        is_first_step: bool = False,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """As torchscale's: tensors (batch, seq, features). `is_first_step` is taken and not needed: what
        `incremental_state` holds says the same."""
        for name, x in (("attn_mask", attn_mask), ("rel_pos", rel_pos)):
            if x is not None:
                raise ValueError(f"{name} must be None for dilated attention, got {shown(x)}")
        if query.shape[1] != key.shape[1]:
            raise ValueError(
                f"query and key must be the same tokens for dilated attention, got {query.shape[1]} and {key.shape[1]}"
            )
        q, k, v = (
            project(x).unflatten(-1, (self.num_heads, self.head_dim))
            for project, x in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        )
        new = k.shape[1]
        if incremental_state is not None:
            if not is_causal:
                raise ValueError("incremental_state needs is_causal=True: earlier tokens would see later ones")
            k, v = self._joined(incremental_state, k, v)
        if self.xpos is not None:
            k = _positioned(self.xpos, k, 0, downscale=True)
            q = _positioned(self.xpos, q, k.shape[1] - new, downscale=False)
        if key_padding_mask is not None and not _hides_keys(key_padding_mask):
            key_padding_mask = None
        options: dict[str, Any] = {
            "segment_lengths": self.branches.segment_lengths,
            "dilation_rates": self.branches.dilation_rates,
            "head_offsets": self.branches.head_offsets,
            "is_causal": is_causal,
            "key_padding_mask": key_padding_mask,
            # A causal query sees no zero key.
            "padding": None if is_causal else self.padding,
            "backend": self.backend,
        }
        if self.noted is not None:
            self.noted.note(q, k, v, options)
        dropout_p = self.dropout if self.training else 0.0
        out = dilated_attention(
            q, k, v, **options, dropout_p=dropout_p, detach_branch_weights=self.detach_branch_weights
        )
        assert isinstance(out, Tensor)
        out = out.flatten(2)
        return self.out_proj(out if self.inner_attn_ln is None else self.inner_attn_ln(out)), None

    def _joined(self, state: dict[str, Tensor], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values with those of earlier calls before them; the state keeps (batch, heads, seq, head_dim)."""
        if "prev_key" in state:
            k = torch.cat((state["prev_key"].transpose(1, 2), k), dim=1)
            v = torch.cat((state["prev_value"].transpose(1, 2), v), dim=1)
        state["prev_key"], state["prev_value"] = k.transpose(1, 2), v.transpose(1, 2)
        return k, v

    def extra_repr(self) -> str:
        return f"{self.branches}, padding={self.padding!r}, detach_branch_weights={self.detach_branch_weights}"


def _positioned(xpos: nn.Module, x: Tensor, offset: int, *, downscale: bool) -> Tensor:
    """xPos of (batch, seq, heads, head_dim); the module takes samples and heads in one dimension."""
    heads_first = x.transpose(1, 2)
    turned = xpos(heads_first.flatten(0, 1), offset=offset, downscale=downscale)
    return turned.unflatten(0, heads_first.shape[:2]).transpose(1, 2).to(x.dtype)


def replace_dilated_attention(
    model: nn.Module,
    *,
    padding: str | None = "zero_keys",
    detach_branch_weights: bool = True,
    backend: str = "auto",
) -> dict[str, nn.Module]:
    """Exchange every torchscale `DilatedAttention` inside `model`, in place and with the same parameters.

    Args:
        padding: as in `dilated_attention`. "zero_keys", the default, is what models of torchscale were trained with.
        detach_branch_weights: as in `dilated_attention`. True, the default, gives torchscale's gradients; False the
            true ones, in less memory.
        backend: see `block_sparse_attention`.

    Returns:
        What was replaced, by name.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {shown(model)}")
    check_padding(padding)
    check_flag("detach_branch_weights", detach_branch_weights)
    check_backend(backend)
    found = {name: module for name, module in model.named_modules(remove_duplicate=False) if _is_theirs(module)}
    if not found:
        raise ValueError(f"the model has no DilatedAttention of torchscale to replace, got {type(model).__name__}")
    if "" in found:
        raise ValueError("a DilatedAttention itself cannot be replaced in place; pass the model that holds it")
    if any(getattr(module.args, "seq_parallel", False) and _has_other_ranks() for module in found.values()):
        raise ValueError(
            "seq_parallel must be False: keys of other ranks are not gathered here. A sequence over several ranks is "
            "what ring_dilated_attention computes"
        )
    made: dict[int, nn.Module] = {}  # one that stands in two places stays one
    for name, module in found.items():
        if id(module) not in made:
            made[id(module)] = TorchscaleAttention(
                module, padding=padding, detach_branch_weights=detach_branch_weights, backend=backend
            )
        model.set_submodule(name, made[id(module)])
    return found


def _is_theirs(module: Any) -> bool:
    named = any(kind.__name__ == "DilatedAttention" for kind in type(module).__mro__)
    held = ("args", "embed_dim", "num_heads", "dropout", *PARTS)
    return named and all(hasattr(module, name) for name in held) and hasattr(module.args, "segment_length")


def _has_other_ranks() -> bool:
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1


_asked: list[tuple[weakref.ref[Tensor], int, bool]] = []
register_container(_asked, "integrations.torchscale._asked", "whether the last mask hides a key", bound=1)


def _hides_keys(mask: Tensor) -> bool:
    """Whether a mask hides anything. A model gives all its layers one mask: it is read, and a GPU waited for, once."""
    if not is_plain_eager(mask):
        return True
    for known, version, hides in _asked[:1]:
        if known() is mask and version == mask._version:
            return hides
    hides = bool(mask.any())
    if not mask.is_inference():
        _asked[:] = [(weakref.ref(mask), mask._version, hides)]
    return hides


class _Noted:
    """What `attention_maps` collects of one module."""

    def __init__(self, name: str, queries: Tensor | None, maps: dict[str, Tensor]) -> None:
        self.name, self.queries, self.maps = name, queries, maps

    def note(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> None:
        """The gradient of v is Wᵀ · dout: with dout the share of each query in the mean, it is the mean row of W."""
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(q.device.type, enabled=False):
            q, k, v = (x.detach().to(dtype).clone() for x in (q, k, v))
            out = dilated_attention(q, k, v.requires_grad_(), **options)
            assert isinstance(out, Tensor)
            share = torch.zeros(q.shape[1], dtype=dtype, device=q.device)
            chosen = slice(None) if self.queries is None else self.queries.to(q.device)
            share[chosen] = 1.0
            share /= share.sum()
            (mean,) = torch.autograd.grad(out, v, share[:, None, None].expand_as(out))
        self.maps[self.name] = mean[..., 0].transpose(1, 2)


@contextmanager
def attention_maps(model: nn.Module, queries: Sequence[int] | None = None) -> Iterator[dict[str, Tensor]]:
    """Collect how much attention each token gets, from every replaced module, in forwards inside the `with` block.

        with attention_maps(model, queries=[0]) as maps:  # what the class token looks at
            model(tiles, coordinates)
        maps["encoder.layers.11.self_attn"]  # (batch, heads, tokens)

    A map is the mean row of the attention weights, over the chosen queries: exact, in linear memory, by one more
    forward and backward of each attention. It sums to 1 where every chosen query sees a key and no zero key; a head
    that keeps none of the chosen queries in any branch gives 0.

    Args:
        queries: token numbers, different ones; all tokens by default.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {shown(model)}")
    chosen = None
    if queries is not None:
        check_sequence("queries", queries, "token numbers")
        for query in queries:
            check_int("every one of queries", query, least=0)
        if not queries or len(set(queries)) != len(queries):
            raise ValueError(f"queries must be one or more different token numbers, got {shown(queries)}")
        chosen = torch.tensor(list(queries))
    inside = {name: each for name, each in model.named_modules() if isinstance(each, TorchscaleAttention)}
    if not inside:
        raise ValueError("the model has no attention to watch; call replace_dilated_attention first")
    maps: dict[str, Tensor] = {}
    for name, module in inside.items():
        module.noted = _Noted(name, chosen, maps)
    try:
        yield maps
    finally:
        for module in inside.values():
            module.noted = None
