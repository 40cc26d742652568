"""DistributedDataParallel, with gradients as views of its buckets and a static graph, as its documentation advises."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers import Contestant
from benchmarks.workloads import Workload, optimizer


class _WithLoss(nn.Module):
    """DDP wraps a module's forward; the loss may be a function of model and batch."""

    def __init__(self, model: nn.Module, workload: Workload) -> None:
        super().__init__()
        self.model = model
        self.loss = workload.loss

    def forward(self, batch: Any) -> torch.Tensor:
        return self.loss(self.model, batch)


class _DDP:
    def __init__(self, model: nn.Module, workload: Workload, compiled: bool, bucket_cap_mb: int) -> None:
        wrapped = DistributedDataParallel(
            _WithLoss(model, workload),
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=True,
            static_graph=not compiled,  # torch.compile splits the graph at DDP's buckets, which it does without this
        )
        self.model = torch.compile(wrapped) if compiled else wrapped
        self.optimizer = optimizer(model.parameters())

    def step(self, batch: Any) -> torch.Tensor:
        loss = self.model(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def finish(self) -> None:
        """A step leaves nothing in flight."""


def ddp(model: nn.Module, workload: Workload, compiled: bool = False, bucket_cap_mb: int = 25) -> Contestant:
    return _DDP(model, workload, compiled, bucket_cap_mb)
