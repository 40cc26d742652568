"""Accelerate's data loaders feed a weft step: each rank gets its part of the data, metrics are gathered.

    torchrun --nproc-per-node 2 examples/accelerate_loader.py --mode zero3

Only the loader goes through `accelerator.prepare`; the model and the optimizer are weft's.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft


def spirals(count: int) -> TensorDataset:
    """Points on three spirals, to be told apart."""
    generator = torch.Generator().manual_seed(0)
    label = torch.randint(0, 3, (count,), generator=generator)
    radius = torch.rand(count, generator=generator)
    angle = 4 * radius + label * 2 * torch.pi / 3 + 0.1 * torch.randn(count, generator=generator)
    return TensorDataset(torch.stack([radius * angle.sin(), radius * angle.cos()], 1), label)


def loss(model: nn.Module, batch: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    points, labels = batch
    logits = model(points)
    return F.cross_entropy(logits, labels), logits.argmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--epochs", type=int, default=12)
    args = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    data = spirals(1200)
    train, held_out = torch.utils.data.random_split(data, [1000, 200], torch.Generator().manual_seed(1))
    # 1000 is no multiple of a batch: the last one is smaller, and weft leaves that size open.
    loader, evaluation = accelerator.prepare(DataLoader(train, 24, shuffle=True), DataLoader(held_out, 50))

    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    model.to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = weft.compile(model, optimizer, loss, mode=args.mode)
    for epoch in range(args.epochs):
        for batch in loader:
            value, _ = step(batch)
        if epoch % 4 == 3:
            accelerator.print(f"epoch {epoch:2d}  loss {value.item():.3f}")

    right = []
    for points, labels in evaluation:
        _, predicted = step.evaluate([points, labels])
        right.append(accelerator.gather_for_metrics(predicted == labels))
    accelerator.print(f"accuracy {torch.cat(right).float().mean().item():.2f} on {len(torch.cat(right))} points")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
