"""An `nn.TransformerEncoder` on a pattern, trained with Lightning: seconds on a CPU.

    python examples/lightning_train.py README.md --steps 60

`replace_attention` puts the pattern into the encoder; the rest is a usual LightningModule. It learns to name the bytes
of a text that were blanked out.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning
import torch
from torch import Tensor, nn

from dilated_attention_pytorch import GlobalTokens, SlidingWindow
from dilated_attention_pytorch.integrations.pytorch import replace_attention

BLANK = 256


class Reader(lightning.LightningModule):
    """Bytes in, bytes out, positions learned."""

    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.embed, self.positions = nn.Embedding(BLANK + 1, width), nn.Embedding(seq, width)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, BLANK)
        replace_attention(self.encoder, SlidingWindow(32, 32) | GlobalTokens(2, queries=True))
        self.losses: list[float] = []

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(ids) + self.positions.weight[: ids.shape[1]]))

    def training_step(self, ids: Tensor, number: int) -> Tensor:
        blanked = torch.rand(ids.shape, device=ids.device) < 0.15
        logits = self(ids.masked_fill(blanked, BLANK))
        loss = nn.functional.cross_entropy(logits[blanked], ids[blanked])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args(arguments)

    lightning.seed_everything(0, verbose=False)
    rows = torch.tensor(list(args.text.read_bytes())).unfold(0, args.seq, args.seq // 2)
    loader = torch.utils.data.DataLoader(list(rows), batch_size=args.batch, shuffle=True, drop_last=True)
    model = Reader(args.width, args.seq)
    trainer = lightning.Trainer(
        max_steps=args.steps,
        accelerator="auto",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, loader)
    print(f"loss {model.losses[0]:.3f} → {model.losses[-1]:.3f} in {len(model.losses)} steps")
    return model.losses


if __name__ == "__main__":
    main()
