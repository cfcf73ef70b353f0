"""A model of transformers trained on a pattern with accelerate, and a text that it continues: seconds on a CPU.

    python examples/accelerate_train.py README.md --steps 60
    accelerate launch examples/accelerate_train.py README.md     # as many devices as there are

A small Llama reads bytes. Every layer but the first, which stays dense, sees a window and the first tokens; the loop is
accelerate's usual one. What it writes at the end comes from a cache that is read at the blocks of the pattern alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

from dilated_attention_pytorch import GlobalTokens, SlidingWindow
from dilated_attention_pytorch.integrations.huggingface import register


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    register("window", SlidingWindow(64, 0) | GlobalTokens(4), layers={0: None})
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=args.width,
            intermediate_size=2 * args.width,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2 * args.seq,
            attn_implementation="window",
        )
    )
    accelerator = Accelerator()
    rows = torch.tensor(list(args.text.read_bytes())).unfold(0, args.seq, args.seq // 2)
    loader = torch.utils.data.DataLoader(list(rows), batch_size=args.batch, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    losses: list[float] = []
    while len(losses) < args.steps:
        for ids in loader:
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
            if len(losses) % 20 == 0:
                accelerator.print(f"step {len(losses)}: loss {losses[-1]:.3f}", flush=True)
            if len(losses) == args.steps:
                break

    written = accelerator.unwrap_model(model).generate(ids[:1, :64], max_new_tokens=48, do_sample=False)
    accelerator.print(bytes(written[0].tolist()).decode(errors="replace"))
    return losses


if __name__ == "__main__":
    main()
