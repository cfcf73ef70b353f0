"""Batches, labels and the loss of training over a ring: from a whole sample to a rank's shard, and to one loss again.

    inputs, labels = shard_batch(batch, mesh["ring"], placement)    # a whole batch, the same on every rank of the ring
    inputs, labels = load_shard(tokens, mesh["ring"], placement)    # or: each rank reads its own tokens alone
    loss = ring_loss(model(**inputs).logits, labels, mesh)          # averages, over the mesh, to that of all tokens

Labels are shifted before they are cut: the label of a shard's last token is the first token of another rank's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import Dataset, DistributedSampler

from ..backends.base import compute_dtype
from ..patterns.base import check_int
from ..patterns.blocks import MASK32, mix32
from .agreement import agree, broadcast_refusal, fingerprint
from .carrier import Carrier
from .exchange import Group, check_group, or_broken
from .shard import Placement, check_placement, shard_sequence

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

IGNORED = -100  # a label that no loss counts, as in PyTorch and transformers

# What a batch may hold, (batch, seq, …), and what becomes of it.
TOKENS = ("input_ids", "inputs_embeds", "token_type_ids")
KNOWN = (*TOKENS, "attention_mask", "document_ids", "labels", "position_ids")


class Shard(NamedTuple):
    """A rank's part of a batch.

    Attributes:
        inputs: what a model takes: "input_ids", "position_ids" and "attention_mask", a `ShardMask`.
        labels: of each token its successor, -100 where there is none; None if the batch has no labels.
    """

    inputs: dict[str, Tensor]
    labels: Tensor | None


class ShardFacts(NamedTuple):
    """What a `ShardMask` holds beside tensors.

    Attributes:
        placement: who holds which tokens.
        padded: whether the whole batch has padding.
        begins_late: whether a row of it begins with padding.
    """

    placement: Placement
    padded: bool = False
    begins_late: bool = False


class ShardMask(Carrier):
    """In the place of a batch's `attention_mask`: tells a model that is registered with `group=` which tokens its
    inputs are. Any other that looks into it is refused.

    Attributes:
        tokens: bool [batch, tokens of the shard], False where there is padding.
        document_ids: int64 of the same shape, equal where tokens may see each other; None if all may.
    """

    TENSORS = ("tokens", "document_ids")
    facts: ShardFacts
    tokens: Tensor
    document_ids: Tensor | None

    def refusal(self, use: object) -> str:
        return (
            f"the model looks into the attention_mask of shard_batch ({use}), which is for attention over a ring "
            "alone: register(…, group=…)"
        )


def shard_batch(batch: Mapping[str, Tensor], group: Group, placement: Placement) -> Shard:
    """This rank's part of a batch that every rank of the ring holds whole.

    All ranks of the ring call it together; batches that differ, as those of a sampler that does not know of the ring
    do, are an error on every rank.

    Args:
        batch: as for one process, tensors (batch, seq): "input_ids" or "inputs_embeds"; "labels", not shifted, as
            transformers takes them; "attention_mask", 0 where a token is padding; "position_ids"; "document_ids",
            equal where tokens are of one document. Without an attention_mask, position_ids that begin again tell
            documents apart, as in transformers; without position_ids, those of each document begin at 0. The last
            token of a document has no label.
        group: the ring.
        placement: of sequences of this length.
    """
    group = check_group(group)
    with broadcast_refusal(group):
        check_placement(placement, group)
        _check_batch(batch, placement)
        agree(group, {"placement": fingerprint(placement), **{name: _contents(x) for name, x in batch.items()}})
    first = batch["input_ids"] if "input_ids" in batch else batch["inputs_embeds"][..., 0]
    real, labels, ids = (batch.get(name) for name in ("attention_mask", "labels", "document_ids"))
    positions = batch.get("position_ids")
    if ids is None and real is None and positions is not None:
        ids = _documents_of(positions)
    if positions is None:
        positions = _positions_of(first, ids)
    facts = ShardFacts(placement)
    if real is None:
        real = torch.ones_like(first, dtype=torch.bool)
    else:
        real = real.bool()
        facts = ShardFacts(placement, padded=not bool(real.all()), begins_late=not bool(real[:, 0].all()))
    if labels is not None:
        labels = pad(labels[:, 1:], (0, 1), value=IGNORED)
        if ids is not None:
            labels = labels.masked_fill(pad(ids[:, 1:] != ids[:, :-1], (0, 1)), IGNORED)
    whole = {name: batch[name] for name in TOKENS if name in batch} | {"position_ids": positions.expand(first.shape)}
    own = {name: shard_sequence(x, placement, group=group).contiguous() for name, x in whole.items()}
    masks = {"tokens": real, "document_ids": ids}
    masks = {name: None if x is None else shard_sequence(x, placement, group=group) for name, x in masks.items()}
    own["attention_mask"] = ShardMask(tuple(masks["tokens"].shape), first.device, facts, **masks)  # type: ignore[union-attr]
    return Shard(own, None if labels is None else shard_sequence(labels, placement, group=group).contiguous())


def load_shard(
    tokens: Any,
    group: Group,
    placement: Placement,
    *,
    first: int = 0,
    documents: Sequence[int] | Tensor | None = None,
    device: torch.device | str | None = None,
) -> Shard:
    """This rank's part of a sequence that no rank reads whole: one row, with labels.

    All ranks of the ring call it together, with the same arguments.

    Args:
        tokens: a long list of tokens of which slices can be read: a tensor, a `numpy.memmap`, a file of safetensors.
            A rank reads its own runs, and the token after each, which is a label.
        group, placement: as in `shard_batch`.
        first: where in `tokens` the sequence begins; it has as many as the placement.
        documents: where each document of the sequence begins, and where the last ends (the cumulative lengths that are
            called cu_seqlens elsewhere): 0, …, placement.seq.
        device: of the shard, the CPU by default.
    """
    group = check_group(group)
    with broadcast_refusal(group):
        check_placement(placement, group)
        check_int("first", first, least=0)
        have = len(tokens) if isinstance(tokens, Sized) else first + placement.seq
        if have < first + placement.seq:
            raise ValueError(f"tokens must hold {placement.seq} from the {first}th on, got {have} together")
        starts = None if documents is None else _check_documents(documents, placement)
        told = {"placement": fingerprint(placement), "first": str(first)}
        agree(group, told | {"documents": "none" if starts is None else _contents(starts)})
    place = placement.positions(dist.get_rank(group))
    read = [_read(tokens, first + run.start, first + run.stop) for run in placement.tokens(dist.get_rank(group))]
    ids, labels = (torch.cat(parts)[None].to(device) for parts in zip(*read, strict=True))
    document_ids = None
    positions = place[None].to(device)
    if starts is not None:
        number = torch.searchsorted(starts, place, right=True) - 1
        labels = labels.masked_fill((place + 1 == starts[number + 1])[None].to(device), IGNORED)
        document_ids, positions = number[None].to(device), (place - starts[number])[None].to(device)
    mask = ShardMask(
        tuple(ids.shape), ids.device, ShardFacts(placement),
        tokens=torch.ones_like(ids, dtype=torch.bool), document_ids=document_ids,
    )  # fmt: skip
    return Shard({"input_ids": ids, "position_ids": positions, "attention_mask": mask}, labels)


def ring_loss(
    logits: Tensor, labels: Tensor, group: Group | DeviceMesh, *, num_items: Tensor | int | None = None
) -> Tensor:
    """Cross entropy of a rank's shard, such that the mean over all ranks is that of all tokens with a label.

    `DistributedDataParallel`, FSDP2 and HSDP average gradients over their ranks: those are then the gradients of one
    process, however many labels a rank has. All ranks call it together.

    Args:
        logits: (batch, tokens of the shard, vocabulary).
        labels: (batch, tokens of the shard), already shifted, as `shard_batch` gives them; -100 is not counted.
        group: all ranks whose gradients are averaged: the whole mesh, data and ring.
        num_items: the number of labels of all ranks, where it is not that of this call: `count_labels` of the
            micro-batches of one step, when gradients are accumulated.
    """
    if not isinstance(logits, Tensor) or not isinstance(labels, Tensor) or logits.shape[:-1] != labels.shape:
        got = [list(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in (logits, labels)]
        raise ValueError(
            f"logits and labels must be (batch, tokens, vocabulary) and (batch, tokens), got {got[0]} and {got[1]}"
        )
    scores = logits.to(compute_dtype(logits.dtype)).flatten(0, -2)
    own = cross_entropy(scores, labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return ring_mean(own, labels, group, num_items=num_items)


def ring_mean(
    total: Tensor, labels: Tensor, group: Group | DeviceMesh, *, num_items: Tensor | int | None = None
) -> Tensor:
    """`ring_loss` of a sum over this rank's tokens, as `LongNetLM.loss(…, reduction="sum")` gives it."""
    count = count_labels(labels, group) if num_items is None else torch.as_tensor(num_items, device=labels.device)
    return total * group.size() / count.clamp(min=1)


def count_labels(labels: Tensor, group: Group | DeviceMesh) -> Tensor:
    """How many labels, but for -100, all ranks have together: int64 [], without waiting for a GPU."""
    return sum_over((labels != IGNORED).sum(), group)


def sum_over(x: Tensor, group: Group | DeviceMesh) -> Tensor:
    """The sum over all ranks of a group, or of a mesh of any dimensions."""
    dimensions = range(group.ndim) if hasattr(group, "ndim") else ()
    total = x.clone()
    for each in [group.get_group(i) for i in dimensions] or [check_group(group)]:  # type: ignore[union-attr]
        with or_broken("a sum over ranks"):
            dist.all_reduce(total, group=each)
    return total


def ring_sampler(dataset: Dataset, mesh: DeviceMesh, *, ring: str = "ring", **options: Any) -> DistributedSampler:
    """A sampler that gives all ranks of one ring the same samples, and each ring its own.

    Args:
        dataset, options: as in PyTorch's `DistributedSampler` (shuffle, seed, drop_last); `set_epoch` is its, too.
        mesh: of data and ring: `init_device_mesh("cuda", (2, 4), mesh_dim_names=("data", "ring"))`.
        ring: the dimension of the ring; samples are dealt out over the others.
    """
    names = mesh.mesh_dim_names or ()
    if ring not in names:
        raise ValueError(f"ring must be a dimension of the mesh, {list(names)}, got {ring!r}")
    number, count = 0, 1
    for i, name in enumerate(names):
        if name != ring:
            number, count = number * mesh.size(i) + mesh.get_local_rank(i), count * mesh.size(i)
    return DistributedSampler(dataset, num_replicas=count, rank=number, **options)


def _check_batch(batch: Mapping[str, Tensor], placement: Placement) -> None:
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch must be a mapping of names to tensors, got {type(batch).__name__}")
    unknown = [name for name in batch if name not in KNOWN]
    if unknown:
        raise ValueError(f"batch may hold {list(KNOWN)}, got {unknown[0]!r}, of which nobody knows how it is cut")
    if ("input_ids" in batch) == ("inputs_embeds" in batch):
        raise ValueError(f"batch must hold input_ids or inputs_embeds, and not both, got {list(batch)}")
    rows = len(batch["input_ids" if "input_ids" in batch else "inputs_embeds"])
    for name, x in batch.items():
        shape = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        broadcast = name == "position_ids" and isinstance(x, Tensor) and len(x) == 1
        fits = isinstance(x, Tensor) and x.ndim == (3 if name == "inputs_embeds" else 2)
        if not fits or x.shape[1] != placement.seq or (len(x) != rows and not broadcast):
            raise ValueError(f"{name} must be (batch, seq), [{rows}, {placement.seq}] here, got {shape}")


def _contents(x: Tensor) -> str:
    """What tells tensors apart, in few words."""
    if x.is_floating_point():
        return f"{list(x.shape)} {x.dtype} of sum {float(x.detach().double().sum())!r}"
    place = mix32(torch.arange(x.numel(), device=x.device) & MASK32)
    return f"{list(x.shape)} {x.dtype} of hash {int((mix32((x.flatten().long() ^ place) & MASK32)).sum())}"


def _documents_of(positions: Tensor) -> Tensor | None:
    """Numbers of documents, of positions that go on by 1 inside of one; None if there is one alone."""
    ids = pad(positions.diff(dim=1) != 1, (1, 0)).cumsum(1)
    return ids if bool((ids[:, -1] > 0).any()) else None


def _positions_of(tokens: Tensor, document_ids: Tensor | None) -> Tensor:
    """How far each token is from the beginning of its document."""
    place = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
    if document_ids is None:
        return place
    begins = pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0), value=True)
    return place - (place * begins).cummax(1).values


def _check_documents(documents: Sequence[int] | Tensor, placement: Placement) -> Tensor:
    starts = torch.as_tensor(documents, device="cpu")
    if starts.ndim != 1 or len(starts) < 2 or starts.is_floating_point() or starts.dtype == torch.bool:
        raise ValueError(f"documents must be cumulative lengths, 0, …, {placement.seq}, got {list(starts.shape)}")
    if starts[0] != 0 or starts[-1] != placement.seq or (starts.diff() < 0).any():
        raise ValueError(
            f"documents must ascend from 0 to the {placement.seq} tokens of the placement, got "
            f"{int(starts[0])} to {int(starts[-1])}"
        )
    return torch.unique(starts.long())


def _read(tokens: Any, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """A run of tokens and their successors; the last of all has none."""
    piece = tokens[start : stop + 1]
    piece = piece.long() if isinstance(piece, Tensor) else torch.tensor(piece).long()
    if len(piece) == stop - start:
        piece = pad(piece, (0, 1), value=IGNORED)
    if len(piece) != stop - start + 1:
        raise ValueError(f"tokens must hold those from {start} to {stop}, got {len(piece) - 1} of them")
    return piece[:-1], piece[1:]
