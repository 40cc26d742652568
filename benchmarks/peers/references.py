"""What nobody can beat: compute without communication, and communication without compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.peers import Contestant
from benchmarks.workloads import Work, Workload, optimizer

MESSAGE = 1 << 20  # elements: 4 MiB reach the wire's full rate


class _Compute:
    """Every rank trains by itself, all at the same time: as in one process, beside busy neighbours."""

    def __init__(self, model: nn.Module, workload: Workload, work: Work) -> None:
        self.model, self.loss, self.work = model, workload.loss, work
        self.optimizer = optimizer(model.parameters())

    def step(self, batches: Sequence[Any]) -> torch.Tensor:
        losses = []
        for batch in batches:
            loss = self.loss(self.model, batch)
            (loss / len(batches)).backward()
            losses.append(loss.detach())
        if self.work.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.work.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean()

    def finish(self) -> None:
        """Nothing is ever in flight."""


class _Wire:
    """A step sends every rank's share of all parameters to every other rank, once, as one all-gather does."""

    def __init__(self, model: nn.Module) -> None:
        world, self.rank = dist.get_world_size(), dist.get_rank()
        total = sum(parameter.numel() for parameter in model.parameters())
        share = -(-total // world)
        self.outgoing = list(torch.zeros(share).split(MESSAGE))
        self.peers = [(self.rank + distance) % world for distance in range(1, world)]
        self.incoming = {peer: list(torch.zeros(share).split(MESSAGE)) for peer in self.peers}

    def step(self, batches: Sequence[Any]) -> torch.Tensor:
        flying: list[Any] = []
        for index, message in enumerate(self.outgoing):
            for peer in self.peers:
                flying.append(dist.irecv(self.incoming[peer][index], peer, tag=index))
                flying.append(dist.isend(message, peer, tag=index))
        for work in flying:
            work.wait()
        return torch.zeros(())

    def finish(self) -> None:
        """A step waits for all its messages."""


def compute(model: nn.Module, workload: Workload, work: Work) -> Contestant:
    return _Compute(model, workload, work)


def wire(model: nn.Module, workload: Workload, work: Work) -> Contestant:
    return _Wire(model)
