"""Build model, optimizer, schedule, loss and step from a configuration, by dotted names, as Hydra users do.

    torchrun --nproc-per-node 2 examples/hydra_like.py optimizer.lr=0.05 model.num_layers=2 weft.mode=zero1

Nothing here knows what it trains until the command line has been read; weft does not mind.
"""

from __future__ import annotations

import ast
import copy
import importlib
import os
import sys
from typing import Any

import torch
from torch import nn

CONFIG: dict[str, Any] = {
    "seed": 0,
    "steps": 60,
    "model": {"_target_": "torch.nn.LSTM", "input_size": 4, "hidden_size": 32},
    "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.01},
    "schedule": {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 20, "gamma": 0.7},
    "criterion": {"_target_": "torch.nn.SmoothL1Loss", "beta": 0.5},
    "weft": {"_target_": "weft.compile", "mode": "auto", "clip_norm": 1.0},
}


def overridden(config: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """A copy with `a.b=value` applied; a value is Python where it can be, else text."""
    config = copy.deepcopy(config)
    for override in overrides:
        path, separator, text = override.partition("=")
        *parents, last = path.split(".")
        place = config
        for name in parents:
            place = place.get(name, {}) if isinstance(place, dict) else {}
        if not separator or not isinstance(place, dict) or (last not in place and "_target_" not in place):
            raise SystemExit(f"{override}: write name=value, with a name such as {', '.join(config)} or optimizer.lr")
        try:
            place[last] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            place[last] = text
    return config


def instantiate(config: dict[str, Any], *args: Any) -> Any:
    """Call what `_target_` names with the rest as keyword arguments."""
    module, _, name = config["_target_"].rpartition(".")
    options = {key: value for key, value in config.items() if key != "_target_"}
    return getattr(importlib.import_module(module), name)(*args, **options)


def waves(generator: torch.Generator, length: int = 24, size: int = 16) -> torch.Tensor:
    """Sines of several phases and speeds: the next value is to be foretold."""
    phase, speed = torch.rand(2, 1, size, 4, generator=generator)
    return torch.sin(6 * phase + (0.3 + 0.4 * speed) * torch.arange(length).view(-1, 1, 1))


def main() -> None:
    config = overridden(CONFIG, sys.argv[1:])
    rank = int(os.environ.get("RANK", 0))
    torch.manual_seed(config["seed"])
    model = instantiate(config["model"])
    criterion = instantiate(config["criterion"])
    optimizer = instantiate(config["optimizer"], model.parameters())
    schedule = instantiate(config["schedule"], optimizer)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        predicted, _ = model(batch[:-1])
        return criterion(predicted[..., : batch.shape[-1]], batch[1:])

    step = instantiate(config["weft"], model, optimizer, loss)
    generator = torch.Generator().manual_seed(config["seed"] + rank)
    for index in range(config["steps"]):
        value = step(waves(generator))
        schedule.step()
        if rank == 0 and (index % 20 == 0 or index == config["steps"] - 1):
            print(f"step {index:3d}  loss {value.item():.4f}  lr {schedule.get_last_lr()[0]:.4f}", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
