"""One rank against plain eager, interleaved in one run, and what tracing and planning take.

    python -m benchmarks.one_rank

There is nothing to overlap on one rank: what is measured is whether the compiled program costs anything. The model is
the GPT of examples/gpt.py with a vocabulary of 2048 (12.3 M parameters), fp32, AdamW, batch 2 x 256, one thread.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import weft
from benchmarks.report import RESULTS, machine, versions
from weft.trace import functional

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from gpt import GPT

Batch = tuple[torch.Tensor, torch.Tensor]


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    ids, labels = batch
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


class Dropped(nn.Module):
    """Dropout after every block: in-place ops that a functional graph does without."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model
        model.blocks = nn.ModuleList(nn.Sequential(block, nn.Dropout(0.1)) for block in model.blocks)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids)


def batch(length: int = 256) -> Batch:
    return torch.randint(0, 2048, (2, length)), torch.randint(0, 2048, (2, length))


def varying(index: int) -> int:
    """Lengths from 16 to 256, in no order."""
    return 16 + 97 * index % 241


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Batch], None]:
    def step(batch: Batch) -> None:
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def compare(
    name: str, model: nn.Module, rounds: int, length: Callable[[int], int] = lambda _: 256
) -> tuple[float, float]:
    """Prints, and returns, the median ratio to eager and the seconds of tracing and planning."""
    other = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)  # constructing the first one imports half of PyTorch
    started = time.perf_counter()
    step = weft.compile(model, optimizer, loss)
    step.prepare(batch())
    planning = time.perf_counter() - started
    eager = eager_step(other, torch.optim.AdamW(other.parameters(), lr=1e-4))
    ratios = []
    for index in range(rounds + 3):
        data = batch(length(index))
        times = {}
        # Take turns in going first: the second finds warmer caches.
        for contestant in (step, eager) if index % 2 else (eager, step):
            begin = time.perf_counter()
            contestant(data)
            times[contestant] = time.perf_counter() - begin
        if index >= 3:
            ratios.append(times[step] / times[eager])
    quartiles, median = statistics.quantiles(ratios, n=4), statistics.median(ratios)
    print(
        f"{name}: tracing and planning {planning:.2f} s; step {median:.3f} x eager "
        f"(median of {rounds} rounds, quartiles {quartiles[0]:.3f} to {quartiles[2]:.3f})"
    )
    return median, planning


def functionalization(model: nn.Module) -> None:
    """How long it takes to make a trace functional, beside the whole of tracing and planning."""
    seconds: list[float] = []
    original = functional.functionalize

    def timed(*args: object) -> object:
        started = time.perf_counter()
        result = original(*args)  # type: ignore[arg-type]
        seconds.append(time.perf_counter() - started)
        return result

    functional.functionalize = timed  # type: ignore[assignment]
    try:
        started = time.perf_counter()
        step = weft.compile(model, torch.optim.AdamW(model.parameters()), loss)
        step.prepare(batch())
        total = time.perf_counter() - started
    finally:
        functional.functionalize = original
    print(f"making the trace functional: {sum(seconds):.2f} s of {total:.2f} s of tracing and planning")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--record", action="store_true", help="write to benchmarks/results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ratio, planning = compare("GPT", GPT(384, 6, 6, 256, vocabulary=2048), args.rounds)
    if args.record:
        result = {"ratio": ratio, "planning": planning, "machine": machine(), "versions": versions()}
        (RESULTS / "one_rank.json").write_text(json.dumps(result, indent=1) + "\n")
    # The first three rounds, which are not counted, hold the traces: of one length, and with the length left open.
    compare("GPT, lengths 16 to 256", GPT(384, 6, 6, 256, vocabulary=2048), 6 * args.rounds, varying)
    compare("GPT with dropout", Dropped(GPT(384, 6, 6, 256, vocabulary=2048)), args.rounds)
    functionalization(Dropped(GPT(384, 6, 6, 256, vocabulary=2048)))


if __name__ == "__main__":
    main()
