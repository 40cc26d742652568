"""DeepSpeed ZeRO-1, 2 and 3 on CPUs with gloo, reductions overlapped with backward."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.peers import CannotRun, Contestant
from benchmarks.workloads import Work, Workload, optimizer


class _DeepSpeed:
    def __init__(self, model: nn.Module, workload: Workload, work: Work, stage: int, prefetch_elements: int) -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ.setdefault("LOCAL_RANK", "0")
        try:
            import deepspeed
        except ImportError as error:
            raise CannotRun(f"DeepSpeed is not installed ({error}): make bench installs it") from None
        zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
        if stage == 3:
            zero["stage3_prefetch_bucket_size"] = prefetch_elements
            zero["stage3_param_persistence_threshold"] = 10_000
        deepspeed.init_distributed(dist_backend="gloo")
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer(model.parameters()),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": zero,
                "zero_allow_untested_optimizer": True,
                "gradient_accumulation_steps": work.accumulate,
                "gradient_clipping": work.clip or 0.0,  # it clips to 1.0 unless told not to
            },
        )
        self.loss = workload.loss

    def step(self, batches: Sequence[Any]) -> torch.Tensor:
        """The engine divides losses itself, and updates with the last micro-batch's `step`."""
        losses = []
        for batch in batches:
            loss = self.loss(self.engine, batch)
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def finish(self) -> None:
        """A step leaves nothing in flight."""


def deepspeed(
    model: nn.Module, workload: Workload, work: Work, stage: int, prefetch_elements: int = 2_000_000
) -> Contestant:
    return _DeepSpeed(model, workload, work, stage, prefetch_elements)
