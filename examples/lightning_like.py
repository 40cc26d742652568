"""Train a LightningModule-like class with weft: it keeps its `training_step` and `configure_optimizers`.

    torchrun --nproc-per-node 2 examples/lightning_like.py --mode zero2

The `fit` below is all there is to it: the loss function given to weft calls `training_step`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import weft


class Regressor(nn.Module):
    """What a user of Lightning would have written, with nn.Module for LightningModule."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.GELU(), nn.Linear(width, 1))
        self.logged: dict[str, torch.Tensor] = {}

    def log(self, name: str, value: torch.Tensor) -> None:
        self.logged[name] = value

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_index: int) -> torch.Tensor:
        x, y = batch
        predicted = self.net(x).squeeze(-1)
        self.log("largest_error", (predicted - y).abs().max())
        return F.mse_loss(predicted, y)

    validation_step = training_step

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[Any]]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)]


def fit(module: Regressor, batches: Iterable[Any], validation: Any, **options: Any) -> None:
    """What a trainer does: every step by weft, schedulers after each, a validation at the end."""
    (optimizer,), schedulers = module.configure_optimizers()

    def loss(module: Regressor, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        module.logged.clear()
        run = module.training_step if module.training else module.validation_step
        return run(batch, 0), dict(module.logged)  # what is logged comes back beside the loss

    step = weft.compile(module, optimizer, loss, **options)
    for index, batch in enumerate(batches):
        value, logged = step(batch)
        for scheduler in schedulers:
            scheduler.step()
        if index % 20 == 0:
            show(f"step {index:3d}", value, logged)
    show("validation", *step.evaluate(validation))


def show(what: str, loss: torch.Tensor, logged: dict[str, torch.Tensor]) -> None:
    if int(os.environ.get("RANK", 0)) == 0:
        values = "  ".join(f"{name} {value.item():.3f}" for name, value in logged.items())
        print(f"{what}  loss {loss.item():.4f}  {values}", flush=True)


def data(generator: torch.Generator, size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(size, 8, generator=generator)
    return x, x[:, 0] * x[:, 1] + x[:, 2].sin()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", default="auto")
    args = parser.parse_args()
    torch.manual_seed(0)
    module = Regressor()
    mine = torch.Generator().manual_seed(int(os.environ.get("RANK", 0)))
    fit(module, (data(mine) for _ in range(60)), data(torch.Generator().manual_seed(10**6), 512), mode=args.mode)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
