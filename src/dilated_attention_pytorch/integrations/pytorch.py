"""Patterns in models of plain PyTorch.

`sdpa_with(pattern)` gives a function to call instead of `scaled_dot_product_attention`. `replace_attention(model,
pattern)` exchanges the `nn.MultiheadAttention` of a model, those of `nn.TransformerEncoder` included, and keeps the
parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from ..nn.attention import BlockSparseAttention
from ..nn.multihead import Multihead
from ..ops import block_sparse_attention
from ..ops.choose import check_backend
from ..patterns import Pattern
from ..patterns.base import check_flag

ONE_SEQUENCE = "a pattern speaks of one sequence that attends to itself, and queries and keys must be as many"


def sdpa_with(pattern: Pattern, *, backend: str = "auto") -> Callable[..., Tensor]:
    """A function with the signature of `torch.nn.functional.scaled_dot_product_attention` that attends over `pattern`.

    Tensors are (batch, heads, seq, head_dim), as there. An `attn_mask` may hide keys: bool, True where a key takes
    part, (batch or 1, 1, 1, keys). A row that may see no key gives 0.
    """
    if not isinstance(pattern, Pattern):
        raise TypeError(f"pattern must be a Pattern, got {type(pattern).__name__}")
    check_backend(backend)

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.ndim != 4:
                raise ValueError(f"{name} must be (batch, heads, seq, head_dim), got {list(x.shape)}")
        if not enable_gqa and query.shape[1] != key.shape[1]:
            raise ValueError(
                f"query and key must have as many heads without enable_gqa, got {query.shape[1]} and {key.shape[1]}"
            )
        if is_causal and query.shape[2] != key.shape[2]:
            raise ValueError(f"is_causal is about one sequence; got {query.shape[2]} queries and {key.shape[2]} keys")
        out = block_sparse_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            pattern,
            is_causal=is_causal,
            scale=scale,
            dropout_p=dropout_p,
            key_padding_mask=None if attn_mask is None else _hidden_by(attn_mask, query.shape[0], key.shape[2]),
            backend=backend,
        )
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)

    return scaled_dot_product_attention


def _hidden_by(attn_mask: Tensor, batch: int, keys: int) -> Tensor:
    if attn_mask.dtype != torch.bool or attn_mask.shape not in ((batch, 1, 1, keys), (1, 1, 1, keys)):
        raise ValueError(
            "attn_mask must be bool (batch, 1, 1, keys), True where a key takes part; the rest is for the pattern to "
            f"say; got {attn_mask.dtype} {list(attn_mask.shape)}"
        )
    return ~attn_mask[:, 0, 0].expand(batch, keys)


def replace_attention(
    model: nn.Module, pattern: Pattern, *, names: Collection[str] | None = None, backend: str = "auto"
) -> dict[str, nn.MultiheadAttention]:
    """Let every `nn.MultiheadAttention` inside `model` attend over `pattern`, in place and with the same parameters.

    Layers of `nn.TransformerEncoder` no longer take PyTorch's fused path for inference, which knows dense attention
    alone. The attention of an `nn.TransformerDecoder` to an encoder's output stays as it is, unless it is named.

    Args:
        names: those to replace, as `model.named_modules()` names them; all by default.
        backend: see `block_sparse_attention`.

    Returns:
        What was replaced, by name.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {model!r}")
    if not isinstance(pattern, Pattern):
        raise TypeError(f"pattern must be a Pattern, got {type(pattern).__name__}")
    if names is not None and (isinstance(names, str) or not isinstance(names, Collection)):
        raise TypeError(f"names must be a collection of names of modules, got {names!r}")
    found: dict[str, nn.MultiheadAttention] = {}
    crossing = {id(layer.multihead_attn) for layer in model.modules() if isinstance(layer, nn.TransformerDecoderLayer)}
    for name, module in model.named_modules(remove_duplicate=False):
        wanted = id(module) not in crossing if names is None else name in names
        if wanted and isinstance(module, nn.MultiheadAttention):
            found[name] = module
    missing = sorted(set(names or ()) - set(found))
    if missing or not found:
        raise ValueError(f"the model has no nn.MultiheadAttention {f'named {missing}' if missing else 'to replace'}")
    if "" in found:
        raise ValueError("a model that is an nn.MultiheadAttention itself cannot be replaced in place")
    new = {id(old): PatternMultihead(old, name, pattern, backend) for name, old in found.items()}
    for name, old in found.items():
        model.set_submodule(name, new[id(old)])
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and any(
            isinstance(m, PatternMultihead) for m in encoder.modules()
        ):
            encoder.use_nested_tensor = False
    return found


class PatternMultihead(Multihead):
    """What stands in for an `nn.MultiheadAttention`: its parameters and its signature, attention over a pattern.

    The future may be hidden by `attn_mask` (a causal mask and no other) or `is_causal`, keys by `key_padding_mask`.
    Weights, if asked for, are the dense ones that `nn.MultiheadAttention` gives, quadratic in memory.
    """

    _qkv_same_embed_dim = False  # or nn.TransformerEncoderLayer would compute dense attention itself, fused

    def __init__(self, old: nn.MultiheadAttention, name: str, pattern: Pattern, backend: str) -> None:
        if type(old) is not nn.MultiheadAttention:
            raise TypeError(f"{name} must be an nn.MultiheadAttention and not a class made from it, got {type(old)}")
        if old.bias_k is not None or old.add_zero_attn:
            raise ValueError(f"{name} has add_bias_kv or add_zero_attn, keys that no pattern knows of")
        if old._forward_hooks or old._forward_pre_hooks or old._backward_hooks or old._backward_pre_hooks:
            raise ValueError(f"{name} has hooks, which would be lost")
        super().__init__(
            BlockSparseAttention(pattern, dropout=old.dropout, backend=backend),
            old.embed_dim,
            old.num_heads,
            bias=old.in_proj_bias is not None,
            kdim=old.kdim,
            vdim=old.vdim,
            batch_first=old.batch_first,
            device="meta",
        )
        for parameter in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"):
            if hasattr(self, parameter):
                setattr(self, parameter, getattr(old, parameter))
        self.out_proj = old.out_proj
        self.train(old.training)

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `nn.MultiheadAttention`, for batches."""
        check_flag("need_weights", need_weights)
        self._check(query, key, value)
        seq_dim = 1 if self.batch_first else 0
        seq, keys = query.shape[seq_dim], key.shape[seq_dim]
        if seq != keys:
            raise ValueError(f"{ONE_SEQUENCE}, got {seq} and {keys}")
        if need_weights and self.training and self.attention.dropout:
            raise ValueError(
                "need_weights must be False in training with dropout: the weights would be those before it"
            )
        if attn_mask is not None:
            is_causal = _check_causal(attn_mask, is_causal, seq)
        hidden = None if key_padding_mask is None else _as_bool(key_padding_mask)
        result = self._attend(query, key, value, is_causal, need_weights, key_padding_mask=hidden)
        if not need_weights:
            return result, None
        out, weights = result
        dense = weights.to_dense()
        return out, dense.mean(1) if average_attn_weights else dense


def _check_causal(attn_mask: Tensor, is_causal: bool, seq: int) -> bool:
    """True, if that is what the mask says. Inside a graph, where values cannot be read, `is_causal` is trusted."""
    if torch.compiler.is_compiling() and is_causal:
        return True
    future = torch.ones(seq, seq, dtype=torch.bool, device=attn_mask.device).triu(1)
    if attn_mask.shape == future.shape and bool((_as_bool(attn_mask) == future).all()):
        return True
    raise ValueError(
        f"attn_mask must be the causal mask of {seq} × {seq} tokens or None, because the pattern says who may attend; "
        f"got another one of shape {list(attn_mask.shape)}"
    )


def _as_bool(mask: Tensor) -> Tensor:
    """True where a mask hides; `nn.TransformerEncoder` makes −inf of it, and 0 elsewhere."""
    if mask.dtype == torch.bool:
        return mask
    hidden = mask == -torch.inf
    plain = (hidden | (mask == 0)).all()
    message = "a mask must be bool, or 0 and −inf: attention over a pattern adds nothing else to the scores"
    if torch.compiler.is_compiling():
        torch._assert_async(plain, message)
    elif not plain:
        raise ValueError(message)
    return hidden
