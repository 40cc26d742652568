"""Train a ResNet with batch norm with weft; every rank keeps its own running statistics, as with DDP.

    torchrun --nproc-per-node 2 examples/vision.py

The images are made up: noise with a bright square, to be classified by the quarter it lies in.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn

import weft


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x), inplace=True)


def resnet(classes: int, width: int = 16) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        Residual(width, width, 1),
        Residual(width, 2 * width, 2),
        Residual(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * width, classes),
    )


def batch(generator: torch.Generator, size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    images = 0.5 * torch.randn(size, 3, 32, 32, generator=generator)
    labels = torch.randint(0, 4, (size,), generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        top, left = torch.randint(0, 8, (2,), generator=generator).tolist()
        image[:, top + 16 * (label // 2) :, left + 16 * (label % 2) :][:, :6, :6] += 1.5
    return images, labels


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = batch
    logits = model(images)
    accuracy = (logits.argmax(1) == labels).float().mean()
    return F.cross_entropy(logits, labels), accuracy  # what comes beside the loss is returned beside it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else "cpu"

    torch.manual_seed(0)
    model = resnet(classes=4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    step = weft.compile(model, optimizer, loss, mode=args.mode)

    generator = torch.Generator().manual_seed(rank)
    for index in range(args.steps):
        value, accuracy = step(tuple(part.to(device) for part in batch(generator)))
        if rank == 0 and (index % 5 == 0 or index == args.steps - 1):
            print(f"step {index:3d}  loss {value.item():.3f}  accuracy {accuracy.item():.2f}", flush=True)
    held_out = tuple(part.to(device) for part in batch(torch.Generator().manual_seed(10**6 + rank), size=128))
    value, accuracy = step.evaluate(held_out)
    print(f"rank {rank}: evaluation loss {value.item():.3f}, accuracy {accuracy.item():.2f}", flush=True)
    if world > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
