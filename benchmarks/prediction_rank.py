"""One rank of one plan that is predicted and then measured, on a host of the lab (see `benchmarks.prediction`).

    python -m benchmarks.prediction_rank WORKLOAD SIZE RANK WORLD ADDRESS

It answers requests as `benchmarks.worker` does.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import weft
from benchmarks.worker import join, serve, status
from benchmarks.workloads import optimizer, workload

WARM_UP = 3
LEARNING = 12  # steps: after nine of them weft has compared the ops with themselves alone


class Rank:
    """Builds the workload's step as asked for, and runs it."""

    def __init__(self, rank: int, name: str, size: str) -> None:
        self.rank, self.workload = rank, workload(name, size)
        self.data = torch.Generator().manual_seed(1000 + rank)

    def compiled(self, mode: str, passes: dict[str, Any], memory: str | None = None) -> weft.Step:
        torch.manual_seed(7)
        model = self.workload.build(self.workload.dropout)
        return weft.compile(
            model, optimizer(model.parameters()), self.workload.loss, mode=mode, memory=memory, passes=passes
        )

    def learn(self) -> dict[str, Any]:
        """Let weft see how long the step's ops take within a step; its store keeps that for the plans to come."""
        step = self.compiled("auto", {})
        for _ in range(LEARNING):
            step(self.workload.batch(self.data))
        step.drain()
        return {}

    def measure(self, mode: str, passes: dict[str, Any], memory: str | None, count: int) -> dict[str, Any]:
        """What a plan is said to take, and what it takes: `count` steps, begun and ended with nothing in flight."""
        warm_up()
        gc.collect()
        before = status("VmRSS")
        step = self.compiled(mode, {**passes, "replan": False}, memory)
        predicted = step.prepare(self.workload.batch(self.data)).predicted
        for _ in range(WARM_UP):
            step(self.workload.batch(self.data))
        step.drain()
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        batches = [self.workload.batch(self.data) for _ in range(count)]
        times = []
        dist.barrier()
        started = time.perf_counter()
        for batch in batches:
            begun = time.perf_counter()
            step(batch)
            times.append(time.perf_counter() - begun)
        step.drain()
        return {
            "seconds": (time.perf_counter() - started) / count,
            "median_call": statistics.median(times),
            "peak_bytes": status("VmHWM") - before,
            "predicted_seconds": predicted.seconds,
            "predicted_bytes": predicted.peak_bytes,
        }


def warm_up() -> None:
    """Everything that is loaded once, by a step of a small model."""
    model = nn.Linear(8, 8)
    step = weft.compile(model, optimizer(model.parameters()), lambda m, x: m(x).sum(), passes={"replan": False})
    step(torch.randn(2, 8))
    step.drain()


def main() -> None:
    name, size, rank, world, address = sys.argv[1:]
    join(int(rank), int(world), address)
    serve(Rank(int(rank), name, size))


if __name__ == "__main__":
    main()
