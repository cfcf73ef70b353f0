"""Train a Llama of transformers, or a LongNet, on packed documents over a mesh of data × ring.

    torchrun --nproc-per-node 4 examples/train_mesh.py --ring 2 --check
    torchrun --nproc-per-node 4 examples/train_mesh.py --ring 2 --model longnet --checkpoints mesh_checkpoints
    torchrun --nproc-per-node 8 examples/train_mesh.py --ring 8 --backend nccl --seq 1048576 --batch 1

The ranks of one ring share a sequence; rings have samples of their own. Parameters are sharded over the ring and
repeated over the data (FSDP2 on two dimensions, which is HSDP). Every step has other documents. `--check` trains the
same model in one process beside it, in float64, and prints the largest difference of losses and gradients over all
steps. A checkpoint is resumed by any mesh. The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from dilated_attention_pytorch import GlobalTokens, LongNetConfig, LongNetLM, Placement, SlidingWindow
from dilated_attention_pytorch.distributed import ring_loss, ring_sampler, shard_batch

VOCABULARY, WIDTH, HEADS, LAYERS = 64, 64, 4, 2
BLOCK = 16  # tokens that are never split


class Packed(Dataset):
    """Samples of several documents, cut anew in each; a document repeats a phrase of its own."""

    def __init__(self, samples: int, seq: int) -> None:
        self.samples, self.seq = samples, seq

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(number)
        cuts = torch.randint(1, self.seq, (3,), generator=draw).sort().values
        document_ids = (torch.arange(self.seq)[:, None] >= cuts).sum(1)
        phrases = torch.randint(VOCABULARY, (4, 16), generator=draw)
        ids = phrases[document_ids, torch.arange(self.seq) % 16]
        return {"input_ids": ids, "labels": ids, "document_ids": document_ids}


def make_model(kind: str, group: DeviceMesh | None) -> nn.Module:
    """Over a ring, or of one process: the same parameters."""
    torch.manual_seed(0)
    if kind == "longnet":
        config = LongNetConfig(
            vocab_size=VOCABULARY, dim=WIDTH, num_layers=LAYERS, num_heads=HEADS,
            segment_lengths=(64, 256), dilation_rates=(1, 4),
        )  # fmt: skip
        return LongNetLM(config, group=group)
    from transformers import LlamaConfig, LlamaForCausalLM

    from dilated_attention_pytorch.integrations.huggingface import register

    name = "window" if group is None else "window over the ring"
    register(name, SlidingWindow(96, 0) | GlobalTokens(4), layers={0: None}, group=group)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=2, max_position_embeddings=2**20, use_cache=False,
            attn_implementation=name,
        )
    )  # fmt: skip


class Run:
    """A model, its optimiser, its samples, and its place in the mesh; without a mesh, of one process."""

    def __init__(
        self, kind: str, mesh: DeviceMesh | None, *, steps: int, batch: int, seq: int, dtype: torch.dtype
    ) -> None:
        self.kind, self.mesh, self.step = kind, mesh, 0
        dataset = Packed(steps * batch, seq)
        self.model = make_model(kind, None if mesh is None else mesh["ring"]).to(dtype)
        sampler = None
        if mesh is not None:
            # Causal: the last tokens have the most to do, so a rank takes some from the front and some from the back.
            self.placement = Placement.zigzag(seq, mesh["ring"].size(), block_size=BLOCK)
            sampler = ring_sampler(dataset, mesh, ring="ring", shuffle=False)
            batch //= mesh["data"].size()
            self.model.to(mesh.device_type)
            fully_shard(self.model, mesh=mesh)
        self.loader = DataLoader(dataset, batch_size=batch, sampler=sampler)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def train(self) -> Iterator[float]:
        """The loss of each step that is left, of the whole batch; its gradients are there until the next."""
        for number, batch in enumerate(self.loader):
            if number < self.step:
                continue
            self.optimizer.zero_grad()
            loss = self.loss_alone(batch) if self.mesh is None else self.loss_over_ring(batch, self.mesh)
            loss.backward()
            total = loss.detach()
            if self.mesh is not None:
                dist.all_reduce(total, op=dist.ReduceOp.SUM)
                total /= self.mesh.size()
            yield float(total)
            self.optimizer.step()
            self.step += 1

    def loss_over_ring(self, batch: dict[str, Tensor], mesh: DeviceMesh) -> Tensor:
        inputs, labels = shard_batch(batch, mesh["ring"], self.placement)
        inputs = {name: x.to(mesh.device_type) for name, x in inputs.items()}
        if self.kind == "longnet":
            logits = self.model(inputs["input_ids"], placement=self.placement)
        else:
            logits = self.model(**inputs).logits
        assert labels is not None
        return ring_loss(logits, labels.to(mesh.device_type), mesh)

    def loss_alone(self, batch: dict[str, Tensor]) -> Tensor:
        """As one process has it, written out: every token but the last of a document tells the next."""
        ids, documents = batch["input_ids"], batch["document_ids"]
        if self.kind == "longnet":
            logits = self.model(ids)
        else:
            begins = torch.stack([torch.searchsorted(row, row) for row in documents])
            logits = self.model(ids, position_ids=torch.arange(ids.shape[1]) - begins).logits
        inside = documents[:, 1:] == documents[:, :-1]
        return cross_entropy(logits[:, :-1][inside], ids[:, 1:][inside])

    def save(self, folder: Path) -> None:
        """All ranks together."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save(
            {"model": model, "optimizer": optimizer, "step": self.step}, checkpoint_id=folder / f"step-{self.step:06d}"
        )

    def load(self, folder: Path) -> None:
        """The newest whole checkpoint, if there is one; whatever the mesh that wrote it."""
        whole = sorted(path.parent for path in folder.glob("step-*/.metadata"))  # written last
        if whole:
            model, optimizer = get_state_dict(self.model, self.optimizer)
            state = {"model": model, "optimizer": optimizer, "step": 0}
            dcp.load(state, checkpoint_id=whole[-1])
            set_state_dict(
                self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
            self.step = state["step"]


def check(kind: str, mesh: DeviceMesh, *, steps: int, batch: int, seq: int) -> dict[str, float]:
    """The largest difference from one process, over all steps, of losses and of gradients; the first rank's word."""
    ring = Run(kind, mesh, steps=steps, batch=batch, seq=seq, dtype=torch.float64)
    alone = Run(kind, None, steps=steps, batch=batch, seq=seq, dtype=torch.float64)
    want = alone.train()
    worst = {"loss": 0.0, "gradients": 0.0}
    for loss in ring.train():
        gradients = [parameter.grad.full_tensor() for parameter in ring.model.parameters()]
        if mesh.get_rank() == 0:
            worst["loss"] = max(worst["loss"], abs(loss - next(want)))
            pairs = zip(gradients, alone.model.parameters(), strict=True)
            worst["gradients"] = max(worst["gradients"], *(float((a - b.grad).abs().max()) for a, b in pairs))
    return worst


def train(
    kind: str,
    mesh: DeviceMesh,
    *,
    steps: int,
    batch: int,
    seq: int,
    dtype: torch.dtype,
    checkpoints: Path | None = None,
) -> list[float]:
    """Train up to step `steps`, from the newest checkpoint if there is one; the losses of the steps that were made."""
    run = Run(kind, mesh, steps=steps, batch=batch, seq=seq, dtype=dtype)
    if checkpoints is not None:
        run.load(checkpoints)
    losses = list(run.train())
    if checkpoints is not None:
        run.save(checkpoints)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("llama", "longnet"), default="llama")
    parser.add_argument("--ring", type=int, default=2, help="ranks that share a sequence; the others are for the data")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2, help="samples of a step, of all ranks together")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--checkpoints", type=Path, default=None, help="folder; without one nothing is saved")
    parser.add_argument("--check", action="store_true", help="compare every step with one process")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(args.backend)
    device = "cpu" if args.backend == "gloo" else "cuda"
    mesh = init_device_mesh(device, (dist.get_world_size() // args.ring, args.ring), mesh_dim_names=("data", "ring"))
    sizes = {"steps": args.steps, "batch": args.batch, "seq": args.seq}
    result: dict[str, object] = {"model": args.model, "mesh": list(mesh.shape)}
    if args.check:
        result |= check(args.model, mesh, **sizes)
    else:
        losses = train(args.model, mesh, **sizes, dtype=torch.float32, checkpoints=args.checkpoints)
        result |= {"steps": args.steps, "losses": [round(loss, 4) for loss in losses]}
    if dist.get_rank() == 0:
        print(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
