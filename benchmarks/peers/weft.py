"""weft in each mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import weft
from benchmarks.peers import Contestant
from benchmarks.workloads import Workload, optimizer


class _Weft:
    def __init__(self, model: nn.Module, workload: Workload, mode: str) -> None:
        self.compiled = weft.compile(model, optimizer(model.parameters()), workload.loss, mode=mode)

    def step(self, batch: Any) -> torch.Tensor:
        return self.compiled(batch)

    def finish(self) -> None:
        self.compiled.drain()


def weft_step(model: nn.Module, workload: Workload, mode: str) -> Contestant:
    return _Weft(model, workload, mode)
