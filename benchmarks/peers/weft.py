"""weft in each mode, and with passes switched off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import weft
from benchmarks.peers import Planned
from benchmarks.workloads import Work, Workload, optimizer
from weft import graph
from weft.report.plan import Plan

PLAIN = {"prefetch": False, "unshard": False}  # every contestant gets the same budget, whatever its passes are


class _Weft:
    def __init__(
        self, model: nn.Module, workload: Workload, work: Work, mode: str, room: float | None, passes: Mapping[str, Any]
    ) -> None:
        self.model, self.workload, self.work, self.passes = model, workload, work, passes
        self.mode, self.room = mode, room
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.compiled: weft.Step | None = None

    def compile(self, mode: str, memory: int | None, passes: Mapping[str, Any]) -> weft.Step:
        return weft.compile(
            self.model,
            optimizer(self.model.parameters()),
            self.workload.loss,
            mode=mode,
            memory=memory,
            clip_norm=self.work.clip,
            accumulate=self.work.accumulate,
            passes=passes,
        )

    def budget(self, batch: Any) -> int | None:
        """So much of the way from what zero3 needs to what it takes to hold all parameters; it depends on the batch."""
        if self.room is None:
            return None
        plans = [self.compile(mode, None, PLAIN).prepare(batch) for mode in ("zero3", "zero2")]
        least, most = (plan.predicted.peak_bytes for plan in plans)
        return int(least + self.room * max(most - least, 0))  # a model of one bucket has nothing to keep whole

    def step(self, batches: Sequence[Any]) -> torch.Tensor:
        batch = list(batches) if self.work.accumulate > 1 else batches[0]
        if self.compiled is None:
            self.compiled = self.compile(self.mode, self.budget(batch), self.passes)
        loss: torch.Tensor = self.compiled(batch)
        return loss

    def finish(self) -> None:
        if self.compiled is not None:
            self.compiled.drain()

    @property
    def passes_a_step(self) -> float:
        assert self.compiled is not None
        return sent_elements(self.compiled.plan) / self.parameters


def sent_elements(plan: Plan) -> int:
    """Elements of the buckets that a step gathers and reduces; an all-reduce counts twice."""
    total = 0
    for variant, step in plan.programs.items():
        times = step.accumulate - 2 if variant == "middle" else 1
        for node in step.graph.nodes:
            if node.target not in (graph.gather, graph.reduce):
                continue
            bucket = step.layout.buckets[graph.bucket_of(node)]
            if not bucket.dormant:
                total += times * bucket.numel * (1 if node.target is graph.gather or bucket.scatter else 2)
    return total


def weft_step(
    model: nn.Module,
    workload: Workload,
    work: Work,
    mode: str,
    room: float | None = None,
    passes: Mapping[str, Any] | None = None,
) -> Planned:
    return _Weft(model, workload, work, mode, room, passes or {})
