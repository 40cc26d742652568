"""FSDP2: `fully_shard` on every block and on the model, as its tutorial does."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.peers import Contestant
from benchmarks.workloads import Workload, optimizer


class _FSDP2:
    def __init__(self, model: nn.Module, workload: Workload, reshard: bool, compiled: bool) -> None:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for module in list(model.modules()):
            if type(module).__name__ in workload.blocks:
                if compiled:
                    module.compile()
                fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        self.model, self.loss = model, workload.loss
        self.optimizer = optimizer(model.parameters())

    def step(self, batch: Any) -> torch.Tensor:
        loss = self.loss(self.model, batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def finish(self) -> None:
        """A step leaves nothing in flight."""


def fsdp2(model: nn.Module, workload: Workload, reshard: bool = True, compiled: bool = False) -> Contestant:
    return _FSDP2(model, workload, reshard, compiled)
