"""`KVCache`: keys and values of the tokens that a LongNet has read."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..backends.base import compute_dtype
from ..distributed import Placement, unshard_sequence
from ..nn import DilatedAttention
from ..patterns import Branches
from ..patterns.base import check_int


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

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention: DilatedAttention,
        placement: Placement | None = None,
    ) -> Tensor:
        """The attention of the next tokens of a layer, (batch, seq, heads, head_dim); keeps their keys and values.

        With a placement these are a rank's tokens of a whole prompt: the ring attends, and every rank keeps all that
        the tokens to come may see. Those every rank attends to by itself.
        """
        if placement is not None:
            return self._attend_over_ring(layer, q, k, v, attention, placement)
        self._check_next(layer, k, attention)
        if self.length > 0 and q.shape[1] == 1:
            self._keep(layer, k, v)
            return self._of_newest(layer, q)
        keys, values = self._with_those_before(layer, k, v)
        out = attention.alone()(q, keys, values, is_causal=True)
        self._keep(layer, k, v)
        assert isinstance(out, Tensor)
        return out

    def _attend_over_ring(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, attention: DilatedAttention, placement: Placement
    ) -> Tensor:
        if self.length > 0:
            raise ValueError(f"placement must be None for the tokens after a prompt, of which there are {self.length}")
        group = attention.ring_group
        assert group is not None
        out = attention(q, k, v, is_causal=True, placement=placement)
        whole_k, whole_v = (unshard_sequence(x, placement, group=group) for x in (k, v))
        self._check_next(layer, whole_k, attention)
        self._keep(layer, whole_k, whole_v)
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
