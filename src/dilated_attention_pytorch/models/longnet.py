"""LongNet: a transformer with dilated attention, whose cost grows with the length and not with its square.

    model = LongNetLM(LongNetConfig(num_layers=4, dim=256, num_heads=8))
    logits = model(tokens)                          # (batch, seq) → (batch, seq, vocab_size)
    longer = model.eval().generate(tokens, 100)
    model.save("model.safetensors")
    model = LongNetLM.load("model.safetensors")

Layers are MAGNETO's: a layer norm before each block and another inside it, before its last matrix. Positions are
rotary. Read from here down: configuration, positions, layers, models; `cache.py` is what `generate` remembers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ..backends.base import compute_dtype
from ..distributed import Placement, shard_sequence
from ..distributed.exchange import Group
from ..nn import BlockSparseAttention, DilatedAttention, Multihead, magneto_gammas
from ..nn.ringed import Ringed
from ..ops.checks import check_dropout
from ..ops.choose import check_backend
from ..ops.operators import attention_operators
from ..patterns import Branches, Full
from ..patterns.base import check_flag, check_int
from ..patterns.blocks import BLOCK_SIZES
from ..patterns.branches import check_heads
from .cache import KVCache
from .losses import IGNORED, summed_cross_entropy
from .sampling import Sampling
from .storage import load_tensors, save_tensors


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongNetConfig:
    """What a model is made of; by default the base model of the LongNet paper, over bytes.

    Args:
        vocab_size: tokens that `LongNetLM` knows.
        dim, num_layers, num_heads: features, layers, and heads of dim / num_heads features, an even number.
        num_kv_heads: heads of keys and values, fewer for grouped queries; `num_heads` by default.
        hidden_dim: features inside the feed-forward block, 4 · dim by default.
        segment_lengths, dilation_rates, head_offsets: the branches, see `dilated_attention`.
        dropout, attention_dropout: shares that are dropped in training, of what a block adds and of attention weights.
        rotary_base: positions turn by rotary_base ** (−2i / head_dim) a token.
        checkpointing: in training keep only the layers' inputs and compute the rest again in the backward pass; with
            "attention" keep what attention gave as well, the part that takes longest to compute again.
        backend: see `dilated_attention`.
    """

    vocab_size: int = 256
    dim: int = 768
    num_layers: int = 12
    num_heads: int = 12
    num_kv_heads: int | None = None
    hidden_dim: int | None = None
    segment_lengths: Sequence[int] = (2048, 4096, 8192, 16384, 32768)
    dilation_rates: Sequence[int] = (1, 2, 4, 6, 12)
    head_offsets: str = "interleaved"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    rotary_base: float = 10000.0
    checkpointing: bool | str = False
    backend: str = "auto"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "num_layers", "num_heads"):
            check_int(name, getattr(self, name), least=1)
        for name, default in (("num_kv_heads", self.num_heads), ("hidden_dim", 4 * self.dim)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
            check_int(name, getattr(self, name), least=1)
        if self.dim % (2 * self.num_heads):
            raise ValueError(f"dim must be a multiple of 2 · num_heads, got {self.dim} and {self.num_heads} heads")
        heads, heads_kv = self.num_heads, self.num_kv_heads
        assert heads_kv is not None
        if heads % heads_kv:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {heads} and {heads_kv}")
        object.__setattr__(self, "segment_lengths", self.branches.segment_lengths)
        object.__setattr__(self, "dilation_rates", self.branches.dilation_rates)
        check_heads(self.dilation_rates, self.num_heads)
        check_dropout(self.dropout, "dropout")
        check_dropout(self.attention_dropout, "attention_dropout")
        if not isinstance(self.rotary_base, int | float) or isinstance(self.rotary_base, bool):
            raise TypeError(f"rotary_base must be a number, got {self.rotary_base!r}")
        if not 1.0 < self.rotary_base < math.inf:
            raise ValueError(f"rotary_base must be greater than 1 and finite, got {self.rotary_base}")
        if not isinstance(self.checkpointing, bool) and self.checkpointing != "attention":
            raise TypeError(f'checkpointing must be True, False or "attention", got {self.checkpointing!r}')
        check_backend(self.backend)

    @property
    def branches(self) -> Branches:
        return Branches(self.segment_lengths, self.dilation_rates, self.head_offsets)

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


class Rotary(NamedTuple):
    """Cosines and sines of positions, (seq, 1, head_dim / 2): a query and a key then see how far apart they are."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, first: int, seq: int, config: LongNetConfig, device: torch.device) -> Rotary:
        return cls.at(torch.arange(first, first + seq, device=device), config)

    @classmethod
    def at(cls, position: Tensor, config: LongNetConfig, dtype: torch.dtype = torch.float64) -> Rotary:
        """Of any positions, [seq]; rounded to `dtype` once, and not in every layer."""
        # In float64: at a million tokens a float32 angle is off by up to 0.03.
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device=position.device) / config.head_dim
        angle = position.double()[:, None, None] * config.rotary_base**-steps
        return cls(angle.cos().to(dtype), angle.sin().to(dtype))

    def __call__(self, x: Tensor) -> Tensor:
        dtype = compute_dtype(x.dtype)
        cos, sin = self.cos.to(dtype), self.sin.to(dtype)
        left, right = x.to(dtype).chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)


class Norm(nn.LayerNorm):
    """A layer norm that keeps its input as it comes. Autocast would keep a copy in float32, which in the feed-forward
    block is the largest tensor of a layer; sums are in float32 all the same."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype:
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            return layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class FeedForward(nn.Module):
    """Two matrices with a GELU between them, and MAGNETO's layer norm before the second."""

    def __init__(self, config: LongNetConfig, gamma: float) -> None:
        super().__init__()
        assert config.hidden_dim is not None
        self.up = nn.Linear(config.dim, config.hidden_dim)
        self.norm = Norm(config.hidden_dim)
        self.down = nn.Linear(config.hidden_dim, config.dim)
        for linear in (self.up, self.down):
            nn.init.xavier_normal_(linear.weight, gain=gamma)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(gelu(self.up(x))))


class LongNetEncoderLayer(nn.Module):
    """Dilated attention to both sides, then the feed-forward block; each adds to what it is given.

    Args:
        gamma: MAGNETO's scale of the initial parameters, see `magneto_gammas`; by default that of `config.num_layers`
            layers alone.
        group: a ring: `forward` then takes this rank's tokens, and the placement that says which those are.
    """

    def __init__(self, config: LongNetConfig, gamma: float | None = None, *, group: Group | None = None) -> None:
        super().__init__()
        gamma = magneto_gammas(config.num_layers)[0] if gamma is None else gamma
        self.attention_norm = nn.LayerNorm(config.dim)
        self.attention = _multihead(
            config,
            gamma,
            DilatedAttention(
                config.segment_lengths,
                config.dilation_rates,
                head_offsets=config.head_offsets,
                dropout=config.attention_dropout,
                backend=config.backend,
                ring_group=group,
            ),
        )
        self.feed_forward_norm = nn.LayerNorm(config.dim)
        self.feed_forward = FeedForward(config, gamma)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        rotary: Rotary,
        key_padding_mask: Tensor | None = None,
        *,
        placement: Placement | None = None,
    ) -> Tensor:
        q, k, v = self._heads(x, rotary)
        out = self.attention.attention(q, k, v, key_padding_mask=key_padding_mask, placement=placement)
        return self._add_feed_forward(self._add_attention(x, out))

    def _heads(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        _check_shape("x", x, 3, "(batch, seq, dim)")
        if x.shape[2] != self.attention.embed_dim:
            raise ValueError(f"x must have {self.attention.embed_dim} features, got {x.shape[2]}")
        if len(rotary.cos) != x.shape[1]:
            raise ValueError(f"rotary must be of the {x.shape[1]} tokens of x, got {len(rotary.cos)}")
        x = self.attention_norm(x)
        q, k, v = self.attention.project_in(x, x, x)
        return rotary(q), rotary(k), v

    def _add_attention(self, x: Tensor, out: Tensor) -> Tensor:
        return x + self.dropout(self.attention.project_out(out))

    def _add_feed_forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class LongNetDecoderLayer(LongNetEncoderLayer):
    """Causal dilated attention, attention to an encoder's output if there is one, then the feed-forward block.

    Args:
        gamma, group: as in `LongNetEncoderLayer`.
        cross_attention: whether the layer takes an encoder's output, to all of which every token attends; over a ring
            every rank has all of it.
    """

    def __init__(
        self,
        config: LongNetConfig,
        gamma: float | None = None,
        *,
        cross_attention: bool = False,
        group: Group | None = None,
    ) -> None:
        gamma = magneto_gammas(decoder_layers=config.num_layers)[1] if gamma is None else gamma
        super().__init__(config, gamma, group=group)
        check_flag("cross_attention", cross_attention)
        self.cross_norm = nn.LayerNorm(config.dim) if cross_attention else None
        everything = BlockSparseAttention(Full(), dropout=config.attention_dropout, backend=config.backend)
        self.cross_attention = _multihead(config, gamma, everything) if cross_attention else None

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        rotary: Rotary,
        *,
        memory: Tensor | None = None,
        memory_padding_mask: Tensor | None = None,
        cache: KVCache | None = None,
        layer: int = 0,
        placement: Placement | None = None,
    ) -> Tensor:
        """The next tokens of a sequence: all of it, or with a cache (and this layer's number in it) those that follow.

        `KVCache.advance` says when all layers have seen them.
        """
        if (memory is None) != (self.cross_attention is None):
            raise ValueError("memory must be given to a layer with cross_attention and to no other")
        if cache is not None and self.training:
            raise RuntimeError("a cache needs eval(): dropout belongs to training")
        q, k, v = self._heads(x, rotary)
        attention: Any = self.attention.attention
        if cache is None:
            out = attention(q, k, v, is_causal=True, placement=placement)
        else:
            out = cache.attend(layer, q, k, v, attention, placement)
        x = self._add_attention(x, out)
        if self.cross_attention is not None and self.cross_norm is not None and memory is not None:
            query = self.cross_norm(x)
            x = x + self.dropout(self.cross_attention(query, memory, memory, key_padding_mask=memory_padding_mask))
        return self._add_feed_forward(x)


def _multihead(config: LongNetConfig, gamma: float, attention: nn.Module) -> Multihead:
    return Multihead(
        attention,
        config.dim,
        config.num_heads,
        num_kv_heads=config.num_kv_heads,
        layer_norm=True,
        gamma_init=gamma,
    )


class _Stack(Ringed, nn.Module):
    """Layers one after another and a layer norm; saving and loading.

    Args:
        group: a ring, a process group or a DeviceMesh of one dimension: every call then takes this rank's tokens of a
            sequence, and `placement`, by which they were cut. Every rank has all parameters.
    """

    layer: ClassVar[type[LongNetEncoderLayer]]

    def __init__(self, config: LongNetConfig | None = None, *, group: Group | None = None) -> None:
        super().__init__()
        if config is not None and not isinstance(config, LongNetConfig):
            raise TypeError(f"config must be a LongNetConfig or None, got {type(config).__name__}")
        self.config = LongNetConfig() if config is None else config
        self.set_ring(group)
        self.layers = nn.ModuleList(self.layer(self.config, group=group) for _ in range(self.config.num_layers))
        self.norm = nn.LayerNorm(self.config.dim)

    def _run(self, x: Tensor, rotary: Rotary, options: Sequence[dict[str, Any]]) -> Tensor:
        """The layers' output; `options` are those of each layer's call."""
        again = self.config.checkpointing and self.training and torch.is_grad_enabled()
        how: dict[str, Any] = {"use_reentrant": False}
        if self.config.checkpointing == "attention":
            how["context_fn"] = partial(create_selective_checkpoint_contexts, attention_operators())
        for layer, given in zip(self.layers, options, strict=True):
            x = checkpoint(layer, x, rotary, **how, **given) if again else layer(x, rotary, **given)
        return self.norm(x)

    def _rotary(self, x: Tensor, first: int, positions: Tensor | None) -> Rotary:
        """Of tokens from position `first` on, or over a ring of the positions of this rank's tokens."""
        if positions is None:
            positions = torch.arange(first, first + x.shape[1], device=x.device)
        return Rotary.at(positions, self.config, compute_dtype(self.norm.weight.dtype))

    def extra_repr(self) -> str:
        return str(self.config)

    def save(self, path: str | Path) -> None:
        """Write configuration and parameters to one safetensors file; one with several names once."""
        tied = self._tied()
        tensors = {name: x for name, x in self.state_dict().items() if name not in tied}
        save_tensors(path, tensors, {"config": dataclasses.asdict(self.config), "tied": tied})

    @classmethod
    def load(cls, path: str | Path, *, device: torch.device | str | None = None, **changes: Any) -> Self:
        """The model of a file that `save` wrote, every parameter in the dtype that it had, tied as it was.

        Args:
            device: where to, the CPU by default.
            changes: fields of the configuration to replace.
        """
        tensors, about = load_tensors(path, device)
        if not isinstance(about, dict) or "config" not in about:
            raise ValueError(f"path must be a file that {cls.__name__}.save wrote, got {path}")
        tied = about.get("tied", {})
        with torch.device("meta"):
            model = cls(LongNetConfig(**{**about["config"], **changes}))
        # Assigned, not copied: a copy would be in the dtype that the model was made in.
        model.load_state_dict({**tensors, **{name: tensors[first] for name, first in tied.items()}}, assign=True)
        for name, first in tied.items():
            owner, _, own_name = name.rpartition(".")
            setattr(model.get_submodule(owner), own_name, model.get_parameter(first))
        return model

    def _tied(self) -> dict[str, str]:
        """The other names of parameters with several, and the first name of each."""
        first: dict[nn.Parameter, str] = {}
        names = {name: first.setdefault(x, name) for name, x in self.named_parameters(remove_duplicate=False)}
        return {name: known for name, known in names.items() if known != name}


class LongNet(_Stack):
    """The encoder: features (batch, seq, dim) in and out, every token with a view to both sides."""

    layer = LongNetEncoderLayer

    def forward(
        self, x: Tensor, *, key_padding_mask: Tensor | None = None, placement: Placement | None = None
    ) -> Tensor:
        """`key_padding_mask` is (batch, seq), True where a token is padding that no other may see."""
        _check_shape("x", x, 3, "(batch, seq, dim)")
        rotary = self._rotary(x, 0, self.positions(x, placement))
        return self._run(x, rotary, [{"key_padding_mask": key_padding_mask, "placement": placement}] * len(self.layers))


class LongNetLM(_Stack):
    """The language model: tokens (batch, seq) in, logits of each token's successor (batch, seq, vocab_size) out."""

    layer = LongNetDecoderLayer

    def __init__(self, config: LongNetConfig | None = None, *, group: Group | None = None) -> None:
        super().__init__(config, group=group)
        self.embedding = nn.Embedding(self.config.vocab_size, self.config.dim)
        self.head = nn.Linear(self.config.dim, self.config.vocab_size, bias=False)
        for weight in (self.embedding.weight, self.head.weight):
            nn.init.normal_(weight, std=self.config.dim**-0.5)

    def forward(self, tokens: Tensor, *, cache: KVCache | None = None, placement: Placement | None = None) -> Tensor:
        """With a cache, the tokens that follow those of the calls before, any number of them.

        Over a ring `tokens` are those that this rank has in `placement`; with a cache, they are a prompt, and tokens
        that follow it are given whole to every rank, without a placement.
        """
        return self.head(self._features(tokens, cache, placement))

    def loss(
        self, tokens: Tensor, targets: Tensor, *, placement: Placement | None = None, reduction: str = "mean"
    ) -> Tensor:
        """Cross entropy in nats: `cross_entropy` of the logits, which are never there for all tokens at once.

        Args:
            targets: int64 (batch, seq), the successor of each token; -100 is not counted.
            placement: see `forward`. Over a ring the loss is of this rank's tokens alone: `ring_mean` makes that of all
                tokens of a sum.
            reduction: "mean" over the targets that count, or "sum".
        """
        if reduction not in ("mean", "sum"):
            raise ValueError(f'reduction must be "mean" or "sum", got {reduction!r}')
        _check_shape("targets", targets, 2, "(batch, seq)")
        if targets.dtype != torch.int64 or targets.shape != tokens.shape:
            wanted = f"int64 {tuple(tokens.shape)}, as tokens are"
            raise ValueError(f"targets must be {wanted}, got {targets.dtype} {tuple(targets.shape)}")
        total = summed_cross_entropy(self._features(tokens, None, placement), self.head, targets)
        return total if reduction == "sum" else total / (targets != IGNORED).sum()

    def _features(self, tokens: Tensor, cache: KVCache | None, placement: Placement | None = None) -> Tensor:
        _check_shape("tokens", tokens, 2, "(batch, seq)")
        if tokens.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"tokens must be int32 or int64, got {tokens.dtype}")
        if cache is not None:
            cache.check(len(self.layers))
        own = cache is None or placement is not None  # else every rank has them all
        positions = self.positions(tokens, placement) if own else None
        rotary = self._rotary(tokens, 0 if cache is None else cache.length, positions)
        try:
            x = self.embedding(tokens) * math.sqrt(self.config.dim)
        except IndexError:  # of a CPU; a GPU stops its program
            least, most = int(tokens.min()), int(tokens.max())
            raise ValueError(f"tokens must be from 0 to {self.config.vocab_size - 1}, got {least} to {most}") from None
        options = [{"cache": cache, "layer": i, "placement": placement} for i in range(len(self.layers))]
        x = self._run(x, rotary, options)
        if cache is not None:
            cache.advance(tokens.shape[1] if placement is None else placement.seq)
        return x

    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """`tokens` (batch, seq) and `max_new_tokens` more, drawn one by one.

        Args:
            temperature: divides the logits; 0 takes the most likely token, without any of the following.
            top_k: draw from this many most likely tokens; from all by default.
            top_p: draw from the fewest most likely tokens, of those `top_k`, whose probabilities sum to at least this.
            generator: where the draws come from, PyTorch's own by default.

        Over a ring all ranks are given the whole prompt, and each reads its part of it; the tokens that follow are
        drawn by the first rank, and every rank attends for them by itself.
        """
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "generator": generator}
        return torch.cat([tokens, *self.stream(tokens, max_new_tokens, **options)], dim=1)

    def stream(self, tokens: Tensor, max_new_tokens: int, **options: Any) -> Iterator[Tensor]:
        """The tokens that `generate` adds, (batch, 1) each, as they are drawn; takes the options of `generate`."""
        check_int("max_new_tokens", max_new_tokens, least=1)
        sampling = Sampling(**options)
        if self.training:
            raise RuntimeError("generate needs model.eval(): dropout belongs to training")
        _check_shape("tokens", tokens, 2, "(batch, seq)")
        return self._drawn(tokens, max_new_tokens, sampling)

    @torch.no_grad()
    def _drawn(self, tokens: Tensor, count: int, sampling: Sampling) -> Iterator[Tensor]:
        cache = KVCache(self.config.branches, tokens.shape[1] + count)
        newest = self._features(tokens, cache)[:, -1] if self.ring_group is None else self._read_prompt(tokens, cache)
        for i in range(count):
            if i:
                newest = self._features(tokens, cache)[:, -1]
            tokens = self.of_first_rank(sampling.draw(self.head(newest).float()))
            yield tokens

    def _read_prompt(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """The features of a prompt's last token, on every rank; each reads its part, if there is one for each."""
        group, block = self.ring_group, BLOCK_SIZES[0]
        assert group is not None
        if tokens.shape[1] < block * group.size():
            return self._features(tokens, cache)[:, -1]
        placement = Placement.contiguous(tokens.shape[1], group.size(), block_size=block)
        x = self._features(shard_sequence(tokens, placement, group=group), cache, placement)
        newest = x[:, -1].contiguous()  # of the whole prompt on the last rank alone
        dist.broadcast(newest, group=group, group_src=group.size() - 1)
        return newest


def _check_shape(name: str, x: Tensor, ndim: int, shape: str) -> None:
    if not isinstance(x, Tensor) or x.ndim != ndim or 0 in x.shape:
        got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be {shape} and not empty, got {got}")
