"""FSDP2: `fully_shard` on every block and on the model, as its tutorial does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from benchmarks.peers import Contestant
from benchmarks.workloads import Work, Workload, optimizer


class _FSDP2:
    def __init__(
        self, model: nn.Module, workload: Workload, work: Work, reshard: bool, compiled: bool, reduce_once: bool
    ) -> None:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for module in list(model.modules()):
            if type(module).__name__ in workload.blocks:
                if compiled:
                    module.compile()
                fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        self.model, self.loss, self.work, self.reduce_once = model, workload.loss, work, reduce_once
        self.optimizer = optimizer(model.parameters())

    def step(self, batches: Sequence[Any]) -> torch.Tensor:
        """Gradients are reduced in every micro-step, unless they are to be kept whole until the last."""
        assert isinstance(self.model, FSDPModule)
        losses = []
        for index, batch in enumerate(batches):
            if self.reduce_once:
                self.model.set_requires_gradient_sync(index == len(batches) - 1)
            loss = self.loss(self.model, batch)
            (loss / len(batches)).backward()
            losses.append(loss.detach())
        if self.work.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.work.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean()

    def finish(self) -> None:
        """A step leaves nothing in flight."""


def fsdp2(
    model: nn.Module,
    workload: Workload,
    work: Work,
    reshard: bool = True,
    compiled: bool = False,
    reduce_once: bool = False,
) -> Contestant:
    return _FSDP2(model, workload, work, reshard, compiled, reduce_once)
