"""LongNet: a transformer with dilated attention, whose cost grows with the length and not with its square.

    model = LongNetLM(LongNetConfig(num_layers=4, dim=256, num_heads=8))
    logits = model(tokens)                          # (batch, seq) → (batch, seq, vocab_size)
    longer = model.eval().generate(tokens, 100)
    model.save("model.safetensors")
    model = LongNetLM.load("model.safetensors")

Layers are MAGNETO's: a layer norm before each block and another inside it, before its last matrix. Positions are
rotary. Read from here down: configuration, positions, cache, layers, models.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from torch.utils.checkpoint import checkpoint

from ..backends.base import compute_dtype
from ..nn import BlockSparseAttention, DilatedAttention, Multihead, magneto_gammas
from ..ops.checks import check_dropout
from ..ops.choose import check_backend
from ..patterns import Branches, Full
from ..patterns.base import check_flag, check_int
from ..patterns.branches import check_heads
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
        checkpointing: in training keep only the layers' inputs and compute the rest again in the backward pass.
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
    checkpointing: bool = False
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
        check_flag("checkpointing", self.checkpointing)
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
        # In float64: at a million tokens a float32 angle is off by up to 0.03.
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device=device) / config.head_dim
        position = torch.arange(first, first + seq, dtype=torch.float64, device=device)
        angle = position[:, None, None] * config.rotary_base**-steps
        return cls(angle.cos(), angle.sin())

    def __call__(self, x: Tensor) -> Tensor:
        dtype = compute_dtype(x.dtype)
        cos, sin = self.cos.to(dtype), self.sin.to(dtype)
        left, right = x.to(dtype).chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)


class KVCache:
    """Keys and values of the tokens so far, for a model that goes on with any number of new ones.

    A single new token reads only the keys that some branch holds for it, each as often as branches do. Several are
    attended to as in the whole sequence, over the keys since the segments of all branches last began together. No
    branch looks back farther than the longest segment, so no more positions than that are stored, however long the
    sequence gets.
    """

    def __init__(self, branches: Branches, max_length: int) -> None:
        check_int("max_length", max_length, least=1)
        self.branches, self.max_length = branches, max_length
        self.slots = min(max_length, max(branches.segment_lengths))
        self.length = 0
        self._stored: dict[int, tuple[Tensor, Tensor]] = {}
        self._kept: dict[int, int] = {}  # tokens of each layer: more than `length` between its call and `advance`
        self._held: tuple[Tensor, Tensor] | None = None

    def check(self, num_layers: int) -> None:
        """Refuse a cache that another number of layers began."""
        if self.length > 0 and len(self._stored) != num_layers:
            raise ValueError(f"cache must be of a model with {num_layers} layers, got one of {len(self._stored)}")

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, attention: DilatedAttention) -> Tensor:
        """The attention of the next tokens of a layer, (batch, seq, heads, head_dim); keeps their keys and values."""
        self._check_next(layer, k, attention)
        if self.length > 0 and q.shape[1] == 1:
            self._keep(layer, k, v)
            return self._of_newest(layer, q)
        keys, values = self._with_those_before(layer, k, v)
        out = attention(q, keys, values, is_causal=True)
        self._keep(layer, k, v)
        assert isinstance(out, Tensor)
        return out

    def advance(self, tokens: int) -> None:
        """Every layer has attended for these tokens."""
        self.length += tokens
        self._held = None

    def _check_next(self, layer: int, k: Tensor, attention: DilatedAttention) -> None:
        if attention.branches != self.branches:
            raise ValueError(f"cache must be of a model with {attention.branches}, got one with {self.branches}")
        tokens = self.length + k.shape[1]
        if tokens > self.max_length:
            raise ValueError(f"max_length must be at least the {tokens} tokens so far, got {self.max_length}")
        if layer not in self._stored:
            if self.length > 0:
                raise ValueError(f"layer must be one that the cache has keys of, {list(self._stored)}, got {layer}")
            return
        stored = self._stored[layer][0]
        for name, of_cache, given in (
            ("samples", len(stored), len(k)),
            ("key heads", stored.shape[2], k.shape[2]),
            ("features of a head", stored.shape[3], k.shape[3]),
            ("dtype", stored.dtype, k.dtype),
            ("device", stored.device, k.device),
        ):
            if of_cache != given:
                raise ValueError(f"a cache goes on with the same {name}, {of_cache}, got {given}")
        if self._kept[layer] != self.length:
            raise RuntimeError(
                f"cache must have {self.length} tokens in every layer, but layer {layer} has {self._kept[layer]}: "
                "a call before failed on its way, or two layers have one number; begin a new cache"
            )

    def _with_those_before(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        if self.length == 0:
            return k, v
        # From here on segments and offsets are those of a sequence that begins here. Positions that are not stored
        # any more come back as others: no branch holds them for a new token.
        period = math.lcm(*self.branches.segment_lengths)
        slot = torch.arange(self.length // period * period, self.length, device=k.device) % self.slots
        return tuple(
            torch.cat([stored[:, slot], new], dim=1) for stored, new in zip(self._stored[layer], (k, v), strict=True)
        )

    def _keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        batch, seq, *rest = k.shape
        if layer not in self._stored:
            self._stored[layer] = k.new_zeros(batch, self.slots, *rest), v.new_zeros(batch, self.slots, *rest)
        self._kept[layer] = self.length + seq
        first = max(0, seq - self.slots)
        slot = torch.arange(self.length + first, self.length + seq, device=k.device) % self.slots
        for stored, new in zip(self._stored[layer], (k, v), strict=True):
            stored[:, slot] = new[:, first:]

    def _of_newest(self, layer: int, q: Tensor) -> Tensor:
        heads, head_dim = q.shape[2:]
        if self._held is None:
            self._held = self._find_held(heads, q.device)
        slot, counts = self._held
        stored = self._stored[layer]
        key_head = torch.arange(heads, device=q.device) // (heads // stored[0].shape[2])
        dtype = compute_dtype(q.dtype)
        k, v = (x[:, slot, key_head[:, None]].to(dtype) for x in stored)  # (batch, heads, keys, head_dim)
        scores = torch.einsum("bhd,bhkd->bhk", q[:, 0].to(dtype) * head_dim**-0.5, k)
        weights = scores.masked_fill(~counts, -torch.inf).softmax(dim=-1).masked_fill(~counts, 0.0)
        return torch.einsum("bhk,bhkd->bhd", weights, v)[:, None].to(q.dtype)

    def _find_held(self, heads: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Slots of the keys that the newest token counts, [heads, keys], and which of them are more than filling."""
        newest, found = self.length, []
        for head in range(heads):
            keys = [torch.zeros(0, dtype=torch.int64)]
            for segment, dilation, offset in self.branches.of_head(head, heads):
                if newest % segment % dilation == offset:
                    keys.append(torch.arange(newest // segment * segment + offset, newest + 1, dilation))
            found.append(torch.cat(keys))
        slot = torch.nn.utils.rnn.pad_sequence(found, batch_first=True, padding_value=-1).to(device)
        return slot % self.slots, slot >= 0


class FeedForward(nn.Module):
    """Two matrices with a GELU between them, and MAGNETO's layer norm before the second."""

    def __init__(self, config: LongNetConfig, gamma: float) -> None:
        super().__init__()
        assert config.hidden_dim is not None
        self.up = nn.Linear(config.dim, config.hidden_dim)
        self.norm = nn.LayerNorm(config.hidden_dim)
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
    """

    def __init__(self, config: LongNetConfig, gamma: float | None = None) -> None:
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
            ),
        )
        self.feed_forward_norm = nn.LayerNorm(config.dim)
        self.feed_forward = FeedForward(config, gamma)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotary: Rotary, key_padding_mask: Tensor | None = None) -> Tensor:
        q, k, v = self._heads(x, rotary)
        x = self._add_attention(x, self.attention.attention(q, k, v, key_padding_mask=key_padding_mask))
        return self._add_feed_forward(x)

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
        gamma: as in `LongNetEncoderLayer`.
        cross_attention: whether the layer takes an encoder's output, to all of which every token attends.
    """

    def __init__(self, config: LongNetConfig, gamma: float | None = None, *, cross_attention: bool = False) -> None:
        gamma = magneto_gammas(decoder_layers=config.num_layers)[1] if gamma is None else gamma
        super().__init__(config, gamma)
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
        out = attention(q, k, v, is_causal=True) if cache is None else cache.attend(layer, q, k, v, attention)
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


class _Stack(nn.Module):
    """Layers one after another and a layer norm; saving and loading."""

    layer: ClassVar[type[LongNetEncoderLayer]]

    def __init__(self, config: LongNetConfig | None = None) -> None:
        super().__init__()
        if config is not None and not isinstance(config, LongNetConfig):
            raise TypeError(f"config must be a LongNetConfig or None, got {type(config).__name__}")
        self.config = LongNetConfig() if config is None else config
        self.layers = nn.ModuleList(self.layer(self.config) for _ in range(self.config.num_layers))
        self.norm = nn.LayerNorm(self.config.dim)

    def _run(self, x: Tensor, first: int, options: Sequence[dict[str, Any]]) -> Tensor:
        """The layers' output for tokens from position `first` on; `options` are those of each layer's call."""
        rotary = Rotary.of(first, x.shape[1], self.config, x.device)
        again = self.config.checkpointing and self.training and torch.is_grad_enabled()
        for layer, given in zip(self.layers, options, strict=True):
            x = checkpoint(layer, x, rotary, use_reentrant=False, **given) if again else layer(x, rotary, **given)
        return self.norm(x)

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

    def forward(self, x: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """`key_padding_mask` is (batch, seq), True where a token is padding that no other may see."""
        return self._run(x, 0, [{"key_padding_mask": key_padding_mask}] * len(self.layers))


class LongNetLM(_Stack):
    """The language model: tokens (batch, seq) in, logits of each token's successor (batch, seq, vocab_size) out."""

    layer = LongNetDecoderLayer

    def __init__(self, config: LongNetConfig | None = None) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(self.config.vocab_size, self.config.dim)
        self.head = nn.Linear(self.config.dim, self.config.vocab_size, bias=False)
        for weight in (self.embedding.weight, self.head.weight):
            nn.init.normal_(weight, std=self.config.dim**-0.5)

    def forward(self, tokens: Tensor, *, cache: KVCache | None = None) -> Tensor:
        """With a cache, the tokens that follow those of the calls before, any number of them."""
        return self.head(self._features(tokens, cache))

    def _features(self, tokens: Tensor, cache: KVCache | None) -> Tensor:
        _check_shape("tokens", tokens, 2, "(batch, seq)")
        if tokens.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"tokens must be int32 or int64, got {tokens.dtype}")
        if cache is not None:
            cache.check(len(self.layers))
        first = 0 if cache is None else cache.length
        try:
            x = self.embedding(tokens) * math.sqrt(self.config.dim)
        except IndexError:  # of a CPU; a GPU stops its program
            least, most = int(tokens.min()), int(tokens.max())
            raise ValueError(f"tokens must be from 0 to {self.config.vocab_size - 1}, got {least} to {most}") from None
        x = self._run(x, first, [{"cache": cache, "layer": i} for i in range(len(self.layers))])
        if cache is not None:
            cache.advance(tokens.shape[1])
        return x

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """`tokens` (batch, seq) and `max_new_tokens` more, drawn one by one.

        Args:
            temperature: divides the logits; 0 takes the most likely token.
            top_k: draw from this many most likely tokens; from all by default. Not with temperature 0.
            generator: where the draws come from, PyTorch's own by default.
        """
        check_int("max_new_tokens", max_new_tokens, least=1)
        if not isinstance(temperature, int | float) or isinstance(temperature, bool):
            raise TypeError(f"temperature must be a number, got {temperature!r}")
        if not 0.0 <= temperature < math.inf:
            raise ValueError(f"temperature must be at least 0 and finite, got {temperature}")
        if top_k is not None:
            check_int("top_k", top_k, least=1)
        if top_k is not None and temperature == 0.0:
            raise ValueError(f"top_k has no meaning with temperature 0, which takes the most likely token, got {top_k}")
        if self.training:
            raise RuntimeError("generate needs model.eval(): dropout belongs to training")
        _check_shape("tokens", tokens, 2, "(batch, seq)")
        cache = KVCache(self.config.branches, tokens.shape[1] + max_new_tokens)
        new = tokens
        for _ in range(max_new_tokens):
            logits = self.head(self._features(new, cache)[:, -1])
            new = _draw(logits.float(), temperature, top_k, generator)
            tokens = torch.cat([tokens, new], dim=1)
        return tokens


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """One token a sample, (batch, 1)."""
    if temperature == 0.0:
        return logits.argmax(dim=-1, keepdim=True)
    likely, token = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]))
    pick = torch.multinomial((likely / temperature).softmax(dim=-1), 1, generator=generator)
    return token.gather(-1, pick)


def _check_shape(name: str, x: Tensor, ndim: int, shape: str) -> None:
    if not isinstance(x, Tensor) or x.ndim != ndim or 0 in x.shape:
        got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be {shape} and not empty, got {got}")
