"""The model of docs/how-a-step-is-compiled.md: prints its traced graph and its zero3 program for two ranks.

torchrun --nproc-per-node 2 examples/small.py
"""

from __future__ import annotations

import os

import torch
from torch import nn

import weft


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16, bias=False), nn.Linear(16, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))).sum()


def main() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # A bucket a parameter, to have something to see; and the plain schedule, which no measured time decides on.
    step = weft.compile(model, optimizer, mode="zero3", passes={"shard": {"bucket_bytes": 64}, "prefetch": False})
    plan = step.prepare(torch.randn(4, 8))
    if int(os.environ.get("RANK", 0)) == 0:
        print(plan.code())
        print(plan.explain())
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
