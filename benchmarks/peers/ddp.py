"""DistributedDataParallel, with gradients as views of its buckets and a static graph, as its documentation advises."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers import Contestant
from benchmarks.workloads import Work, Workload, optimizer


class _WithLoss(nn.Module):
    """DDP wraps a module's forward; the loss may be a function of model and batch."""

    def __init__(self, model: nn.Module, workload: Workload) -> None:
        super().__init__()
        self.model = model
        self.loss = workload.loss

    def forward(self, batch: Any) -> torch.Tensor:
        return self.loss(self.model, batch)


class _DDP:
    def __init__(self, model: nn.Module, workload: Workload, work: Work, compiled: bool, bucket_cap_mb: int) -> None:
        # torch.compile splits the graph at DDP's buckets, which it does without a static graph.
        self.wrapped = DistributedDataParallel(
            _WithLoss(model, workload),
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=True,
            static_graph=not compiled,
        )
        self.sync_all = not compiled  # DDP learns a static graph from its first backward, which must reduce
        self.model = torch.compile(self.wrapped) if compiled else self.wrapped
        self.work, self.parameters = work, list(model.parameters())
        self.optimizer = optimizer(self.parameters)

    def step(self, batches: Sequence[Any]) -> torch.Tensor:
        """Gradients are reduced with the last micro-batch."""
        losses = []
        for index, batch in enumerate(batches):
            reduces = self.sync_all or index == len(batches) - 1
            with nullcontext() if reduces else self.wrapped.no_sync():
                loss = self.model(batch)
                (loss / len(batches)).backward()
            losses.append(loss.detach())
        if self.work.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.work.clip)
        self.sync_all = False
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean()

    def finish(self) -> None:
        """A step leaves nothing in flight."""


def ddp(
    model: nn.Module, workload: Workload, work: Work, compiled: bool = False, bucket_cap_mb: int = 25
) -> Contestant:
    return _DDP(model, workload, work, compiled, bucket_cap_mb)
