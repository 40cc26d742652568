"""Train an unmodified `transformers` model, built from a config, with weft.

    torchrun --nproc-per-node 2 examples/huggingface.py --mode zero3

The data is made up (sequences that count modulo a number), so that nothing has to be downloaded.
"""

from __future__ import annotations

import argparse
import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import weft


def batch(generator: torch.Generator, vocabulary: int, size: int = 4, length: int = 64) -> dict[str, torch.Tensor]:
    """Sequences that count up by a step of their own: learnable from a few tokens of context."""
    start = torch.randint(0, vocabulary, (size, 1), generator=generator)
    stride = torch.randint(1, 5, (size, 1), generator=generator)
    ids = (start + stride * torch.arange(length)) % vocabulary
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else "cpu"

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    step = weft.compile(model, optimizer, mode=args.mode, clip_norm=1.0)  # the loss is the model's own

    generator = torch.Generator().manual_seed(rank)
    for index in range(args.steps):
        data = {name: value.to(device) for name, value in batch(generator, config.vocab_size).items()}
        loss = step(data)
        if rank == 0 and (index % 10 == 0 or index == args.steps - 1):
            print(f"step {index:3d}  loss {loss.item():.3f}  gradient norm {step.grad_norm:.2f}", flush=True)

    # The whole model, on every rank, as transformers knows it.
    with step.gathered() as whole, torch.no_grad():
        prompt = torch.tensor([[3, 6, 9, 12, 15, 18]], device=device)
        counted = whole.eval().generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    if rank == 0:
        print(f"3, 6, 9, ... goes on as {counted[0, 6:].tolist()}")
    if world > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
